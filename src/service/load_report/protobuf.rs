//! The few messages of Protocol Buffers that load reports need, written and read by hand: a
//! generator, its runtime and a compiler are more than they are.
//!
//! Pure. The layout is that of `xds/data/orca/v3/orca_load_report.proto`; fields that are zero are
//! left out, as proto3 does.

/// The numbers of the fields of `OrcaLoadReport`.
pub(super) const MEM_UTILIZATION: u8 = 2;
pub(super) const RPS_FRACTIONAL: u8 = 6;
pub(super) const EPS: u8 = 7;
pub(super) const NAMED_METRICS: u8 = 8;
pub(super) const APPLICATION_UTILIZATION: u8 = 9;

/// The wire types: 8 bytes, and bytes with their length in front.
const FIXED64: u8 = 1;
const LENGTH_DELIMITED: u8 = 2;

const fn tag(field: u8, wire_type: u8) -> u8 {
    // Fields up to 15 have a tag of one byte.
    field << 3 | wire_type
}

/// Appends a field of type `double`.
pub(super) fn put_double(field: u8, value: f64, into: &mut Vec<u8>) {
    if value != 0.0 {
        into.push(tag(field, FIXED64));
        into.extend_from_slice(&value.to_le_bytes());
    }
}

/// Appends an entry of a field of type `map<string, double>`. The name has at most 100 bytes, so
/// that each length is one byte.
pub(super) fn put_entry(field: u8, name: &str, value: f64, into: &mut Vec<u8>) {
    let name = name.as_bytes();
    let Some(length) = u8::try_from(name.len()).ok().filter(|length| *length <= 100) else {
        debug_assert!(false, "a name of {} bytes", name.len());
        return;
    };
    // The tags of both fields, the length of the name, and the value.
    into.extend_from_slice(&[tag(field, LENGTH_DELIMITED), length + 11]);
    into.extend_from_slice(&[tag(1, LENGTH_DELIMITED), length]);
    into.extend_from_slice(name);
    into.push(tag(2, FIXED64));
    into.extend_from_slice(&value.to_le_bytes());
}
