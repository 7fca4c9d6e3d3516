//! The figures of a load report, and their forms: text for a header, and the message
//! `OrcaLoadReport` in Protocol Buffers, written by hand since a generator and its runtime are more
//! than it is.
//!
//! Pure. Envoy's parser wants `TEXT ` in front, names as in the message, and numbers that are
//! finite. Fields that are zero are left out of the message, as proto3 does.

use std::fmt::Write as _;

/// One report. `None` for what is unknown, because no limit is.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct LoadReport {
    /// Physical memory by the limit, from 0 to 1.
    pub(super) mem_utilization: Option<f64>,
    /// How full the fullest ledger is, and 1 or more while the service sheds.
    pub(super) application_utilization: Option<f64>,
    /// The responses of each second.
    pub(super) rps: f64,
    /// The part of `rps` for which the service is to blame.
    pub(super) eps: f64,
    /// How full each ledger is: the host's, then the devices' in their order.
    pub(super) ledgers: Vec<Option<f64>>,
}

/// Returns the name of the metric of a ledger.
fn ledger_name(nth: usize) -> String {
    match nth.checked_sub(1) {
        None => "host_utilization".to_owned(),
        Some(device) => format!("device{device}_utilization"),
    }
}

/// Rounds to millionths, so that no number is longer than it says.
fn rounded(value: f64) -> f64 {
    (value * 1e6).round() / 1e6
}

impl LoadReport {
    /// Returns the known figures, with the names of their fields.
    fn fields(&self) -> impl Iterator<Item = (&'static str, f64)> {
        [
            ("mem_utilization", self.mem_utilization),
            ("application_utilization", self.application_utilization),
            ("rps_fractional", Some(self.rps)),
            ("eps", Some(self.eps)),
        ]
        .into_iter()
        .filter_map(|(name, value)| Some((name, value?)))
    }

    fn named_metrics(&self) -> impl Iterator<Item = (String, f64)> {
        self.ledgers
            .iter()
            .enumerate()
            .filter_map(|(nth, value)| Some((ledger_name(nth), (*value)?)))
    }

    /// Returns the value of the header `endpoint-load-metrics`.
    pub(super) fn header(&self) -> String {
        let mut text = String::from("TEXT ");
        for (nth, (name, value)) in self.fields().enumerate() {
            let comma = if nth == 0 { "" } else { ", " };
            // Writing to a string does not fail.
            let _ = write!(text, "{comma}{name}:{}", rounded(value));
        }
        for (name, value) in self.named_metrics() {
            let _ = write!(text, ", named_metrics.{name}:{}", rounded(value));
        }
        text
    }

    /// Returns the message `xds.data.orca.v3.OrcaLoadReport`.
    pub(super) fn message(&self) -> Vec<u8> {
        let mut message = Vec::with_capacity(128);
        // In the order of their numbers.
        let mut put = |number, value| put_double(number, value, &mut message);
        put(MEM_UTILIZATION, self.mem_utilization.unwrap_or(0.0));
        put(RPS_FRACTIONAL, self.rps);
        put(EPS, self.eps);
        for (name, value) in self.named_metrics() {
            put_entry(NAMED_METRICS, &name, value, &mut message);
        }
        let utilization = self.application_utilization.unwrap_or(0.0);
        put_double(APPLICATION_UTILIZATION, utilization, &mut message);
        message
    }
}

/// Returns a message of gRPC: uncompressed, with its length in front.
pub(super) fn framed(message: &[u8]) -> Vec<u8> {
    let length = u32::try_from(message.len()).unwrap_or(u32::MAX);
    [&[0], length.to_be_bytes().as_slice(), message].concat()
}

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

/// Encodes bytes.
pub(super) fn base64(bytes: &[u8]) -> String {
    const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for three in bytes.chunks(3) {
        let bits =
            (0..3).fold(0, |bits: u32, at| bits << 8 | three.get(at).map_or(0, |b| (*b).into()));
        for at in 0..4 {
            let six = (bits >> (18 - 6 * at)) as usize & 63;
            text.push(if at <= three.len() { char::from(LETTERS[six]) } else { '=' });
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report() -> LoadReport {
        LoadReport {
            mem_utilization: Some(0.5),
            application_utilization: Some(1.25),
            rps: 100.123_456_789,
            eps: 2.0,
            ledgers: vec![Some(0.75), None, Some(1.25)],
        }
    }

    #[test]
    fn the_header_has_the_names_of_the_message() {
        assert_eq!(
            report().header(),
            "TEXT mem_utilization:0.5, application_utilization:1.25, rps_fractional:100.123457, \
             eps:2, named_metrics.host_utilization:0.75, named_metrics.device1_utilization:1.25"
        );
    }

    #[test]
    fn what_is_unknown_is_left_out() {
        let nothing = LoadReport::default();
        assert_eq!(nothing.header(), "TEXT rps_fractional:0, eps:0");
        assert_eq!(nothing.message(), b"", "as proto3 leaves out zeros");
    }

    /// The bytes that `protobuf` 7 of Python has written for the same figures.
    #[test]
    fn the_message_is_that_of_another_encoder() {
        let message = report().message();
        let hex: String = message.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(hex, EXPECTED);
    }

    const EXPECTED: &str = "11000000000000e03f3159ce4db7e6075940390000000000000040\
        421b0a10686f73745f7574696c697a6174696f6e11000000000000e83f\
        421e0a13646576696365315f7574696c697a6174696f6e11000000000000f43f\
        49000000000000f43f";

    #[test]
    fn base64_is_that_of_the_standards_examples() {
        let examples = ["", "Zg==", "Zm8=", "Zm9v", "Zm9vYg==", "Zm9vYmE=", "Zm9vYmFy"];
        for (length, text) in examples.into_iter().enumerate() {
            assert_eq!(base64(&b"foobar"[..length]), text);
        }
    }
}
