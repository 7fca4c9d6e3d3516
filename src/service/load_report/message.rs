//! The messages of ORCA load reports: the report as text for a header and as the message
//! `OrcaLoadReport`, and the request of a stream, `xds.service.orca.v3.OrcaLoadReportRequest`. The
//! Protocol Buffers are written and read by hand, since a generator and its runtime are more than
//! they are.
//!
//! Pure; an error is a sentence. Envoy's parser wants `TEXT ` in front, names as in the message,
//! and numbers that are finite. Fields that are zero are left out of the message, as proto3 does.
//! Of a request only `report_interval` counts; names of request costs are accepted, and no costs
//! are reported.

use std::time::Duration;

use bytes::{Buf, BufMut as _};

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
        let devices = (0..).map(|device| format!("device{device}_utilization"));
        let names = std::iter::once("host_utilization".to_owned()).chain(devices);
        names.zip(&self.ledgers).filter_map(|(name, value)| Some((name, (*value)?)))
    }

    /// Returns the value of the header `endpoint-load-metrics`.
    pub(super) fn header(&self) -> String {
        let fields = self.fields().map(|(name, value)| format!("{name}:{}", rounded(value)));
        let named = self.named_metrics();
        let named = named.map(|(name, value)| format!("named_metrics.{name}:{}", rounded(value)));
        format!("TEXT {}", fields.chain(named).collect::<Vec<_>>().join(", "))
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
const MEM_UTILIZATION: u8 = 2;
const RPS_FRACTIONAL: u8 = 6;
const EPS: u8 = 7;
const NAMED_METRICS: u8 = 8;
const APPLICATION_UTILIZATION: u8 = 9;

/// The wire types: 8 bytes, and bytes with their length in front.
const FIXED64: u8 = 1;
const LENGTH_DELIMITED: u8 = 2;

const fn tag(field: u8, wire_type: u8) -> u8 {
    // Fields up to 15 have a tag of one byte.
    field << 3 | wire_type
}

/// Appends a field of type `double`.
fn put_double(field: u8, value: f64, into: &mut Vec<u8>) {
    if value != 0.0 {
        into.push(tag(field, FIXED64));
        into.extend_from_slice(&value.to_le_bytes());
    }
}

/// Appends an entry of a field of type `map<string, double>`. The name is that of a ledger, of less
/// than 100 bytes, so that each length is one byte.
fn put_entry(field: u8, name: &str, value: f64, into: &mut Vec<u8>) {
    let name = name.as_bytes();
    let length = u8::try_from(name.len()).unwrap_or_default();
    // The tags of both fields, the length of the name, and the value.
    into.extend_from_slice(&[tag(field, LENGTH_DELIMITED), length + 11]);
    into.extend_from_slice(&[tag(1, LENGTH_DELIMITED), length]);
    into.extend_from_slice(name);
    into.push(tag(2, FIXED64));
    into.extend_from_slice(&value.to_le_bytes());
}

/// The time between two reports if the client names none, or zero: that of gRPC's clients.
const INTERVAL_DEFAULT: Duration = Duration::from_secs(10);
/// A shorter or longer interval counts as one of these. The control loop looks at streams every
/// 100 ms.
const INTERVAL_MIN: Duration = Duration::from_millis(100);
const INTERVAL_MAX: Duration = Duration::from_secs(3600);

/// The longest request. The names of costs may need some place.
pub(super) const REQUEST_MAX: usize = 4096;
/// The prefix of a message: a flag for compression and the length.
const PREFIX: usize = 5;

const NANOS_MAX: u32 = 999_999_999;

/// A request that has not arrived as a whole.
#[derive(Debug, Default)]
pub(super) struct PartialRequest(Vec<u8>);

impl PartialRequest {
    /// Adds what arrived. Returns the interval when the message is complete; what follows it is
    /// ignored.
    pub(super) fn add(&mut self, mut data: impl Buf) -> Result<Option<Duration>, String> {
        while data.has_remaining() {
            let missing = self.length()?.saturating_sub(self.0.len());
            if missing == 0 {
                break;
            }
            self.0.put((&mut data).take(missing));
        }
        if self.0.len() < PREFIX || self.0.len() < self.length()? {
            return Ok(None);
        }
        interval(self.0.get(PREFIX..).unwrap_or_default()).map(Some)
    }

    /// Returns the error of a request that ends here.
    pub(super) fn ended(&self) -> String {
        format!("request ended after {} bytes: expected one message", self.0.len())
    }

    /// Returns the length of the whole, as far as it is known.
    fn length(&self) -> Result<usize, String> {
        let Some((&[flag, length @ ..], _)) = self.0.split_first_chunk::<PREFIX>() else {
            return Ok(PREFIX);
        };
        let length = usize::try_from(u32::from_be_bytes(length)).unwrap_or(usize::MAX);
        match flag {
            0 if length <= REQUEST_MAX => Ok(PREFIX + length),
            0 => Err(format!("message of {length} bytes: expected at most {REQUEST_MAX}")),
            flag => {
                Err(format!("compression flag {flag}: expected 0, messages are not compressed"))
            }
        }
    }
}

/// Returns the interval that a message asks for, within the bounds.
fn interval(message: &[u8]) -> Result<Duration, String> {
    let malformed =
        || format!("invalid message of {} bytes: expected OrcaLoadReportRequest", message.len());
    let (seconds, nanos) = duration(message).ok_or_else(malformed)?;
    let parts = (u64::try_from(seconds), u32::try_from(nanos));
    let (Ok(whole), Ok(part @ 0..=NANOS_MAX)) = parts else {
        return Err(format!(
            "report_interval of {seconds} s and {nanos} ns: expected 0 s or more, and 0 to \
             {NANOS_MAX} ns"
        ));
    };
    let interval = Duration::new(whole, part);
    Ok(if interval.is_zero() {
        INTERVAL_DEFAULT
    } else {
        interval.clamp(INTERVAL_MIN, INTERVAL_MAX)
    })
}

/// Returns the seconds and nanoseconds of `report_interval`; `None` if the message is malformed.
fn duration(mut message: &[u8]) -> Option<(i64, i64)> {
    let (mut seconds, mut nanos) = (0, 0);
    while !message.is_empty() {
        let (1, FieldValue::Bytes(mut parts)) = next_field(&mut message)? else { continue };
        // Given more than once, the messages are merged.
        while !parts.is_empty() {
            match next_field(&mut parts)? {
                (1, FieldValue::Varint(value)) => seconds = value.cast_signed(),
                (2, FieldValue::Varint(value)) => nanos = value.cast_signed(),
                _ => {}
            }
        }
    }
    Some((seconds, nanos))
}

/// A value of a field.
enum FieldValue<'a> {
    Varint(u64),
    Bytes(&'a [u8]),
    /// Of a type that no known field has.
    Other,
}

/// Takes the next field off a message, and returns its number and its value.
fn next_field<'a>(message: &mut &'a [u8]) -> Option<(u64, FieldValue<'a>)> {
    let tag = varint(message)?;
    let value = match tag & 7 {
        0 => FieldValue::Varint(varint(message)?),
        1 => message.split_off(..8).map(|_| FieldValue::Other)?,
        2 => {
            let length = usize::try_from(varint(message)?).ok()?;
            FieldValue::Bytes(message.split_off(..length)?)
        }
        5 => message.split_off(..4).map(|_| FieldValue::Other)?,
        // Groups are no part of proto3.
        _ => return None,
    };
    Some((tag >> 3, value)).filter(|(number, _)| *number != 0)
}

/// Takes a number of at most ten bytes off a message.
fn varint(message: &mut &[u8]) -> Option<u64> {
    let mut value = 0;
    for shift in (0..70).step_by(7) {
        let byte = *message.split_off_first()?;
        // The last byte has one bit.
        if shift == 63 && byte > 1 {
            return None;
        }
        value |= u64::from(byte & 0x7f) << shift;
        if byte < 0x80 {
            return Some(value);
        }
    }
    None
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

    fn read(message: &[u8]) -> Result<Duration, String> {
        PartialRequest::default().add(&*framed(message)).map(|read| read.expect("it is whole"))
    }

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn an_interval_is_read_within_its_bounds() {
        // What `xds-protos` of Python has written.
        for (message, expected) in [
            ("", INTERVAL_DEFAULT),
            ("0a00", INTERVAL_DEFAULT),
            ("0a020805", 5 * SECOND),
            ("0a0808011080cab5ee01", SECOND + SECOND / 2),
            ("0a061080cab5ee01", SECOND / 2),
            ("0a021001", INTERVAL_MIN),
            ("0a04080a1001", 10 * SECOND + Duration::from_nanos(1)),
            ("0a0608ff97d9b701", INTERVAL_MAX),
            ("0a03089c1c1204636f7374120178", INTERVAL_MAX),
            // Unknown fields of every type, and a second interval, which is merged.
            (
                "1801 2100000000 00000000 2d00000000 0a020803 0a03108001",
                3 * SECOND + Duration::from_nanos(128),
            ),
        ] {
            let message = bytes(message);
            assert_eq!(read(&message), Ok(expected), "{message:x?}");
        }
    }

    fn bytes(hex: &str) -> Vec<u8> {
        let digits: Vec<u8> = hex
            .chars()
            .filter_map(|c| c.to_digit(16))
            .map(|digit| u8::try_from(digit).expect("4 bits"))
            .collect();
        digits.chunks(2).map(|pair| pair[0] << 4 | pair[1]).collect()
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (message, error) in [
            // -5 s.
            (
                "0a0b08fbffffffffffffffff01",
                "report_interval of -5 s and 0 ns: expected 0 s or more, and 0 to 999999999 ns",
            ),
            (
                "0a06108094ebdc03",
                "report_interval of 0 s and 1000000000 ns: expected 0 s or more, and 0 to \
                 999999999 ns",
            ),
            ("0a05", "invalid message of 2 bytes: expected OrcaLoadReportRequest"),
            ("0a", "invalid message of 1 bytes: expected OrcaLoadReportRequest"),
            (
                "ffffffffffffffffffffff",
                "invalid message of 11 bytes: expected OrcaLoadReportRequest",
            ),
            ("0a0208", "invalid message of 3 bytes: expected OrcaLoadReportRequest"),
            ("0a020880", "invalid message of 4 bytes: expected OrcaLoadReportRequest"),
            ("0b", "invalid message of 1 bytes: expected OrcaLoadReportRequest"),
            ("0001", "invalid message of 2 bytes: expected OrcaLoadReportRequest"),
        ] {
            assert_eq!(read(&bytes(message)).expect_err(message), error, "{message}");
        }
        let add = |bytes: &[u8]| PartialRequest::default().add(bytes).expect_err("invalid");
        assert_eq!(
            add(&[1, 0, 0, 0, 0]),
            "compression flag 1: expected 0, messages are not compressed"
        );
        assert_eq!(add(&[0, 0, 0, 16, 1]), "message of 4097 bytes: expected at most 4096");
    }

    #[test]
    fn a_request_arrives_in_any_pieces() {
        let whole = framed(&bytes("0a020805"));
        for size in 1..=whole.len() {
            let mut request = PartialRequest::default();
            let mut pieces = whole.chunks(size).peekable();
            while let Some(piece) = pieces.next() {
                let expected = pieces.peek().is_none().then_some(5 * SECOND);
                assert_eq!(request.add(piece), Ok(expected), "{size}");
            }
        }
        let mut request = PartialRequest::default();
        assert_eq!(request.add(&whole[..4]), Ok(None));
        assert_eq!(request.ended(), "request ended after 4 bytes: expected one message");
        let more = [&whole[4..], &[0xff; 100_000]].concat();
        assert_eq!(request.add(&*more), Ok(Some(5 * SECOND)), "no more than the message is kept");
        assert!(request.0.capacity() < 2 * REQUEST_MAX);
    }

    #[test]
    fn no_bytes_make_it_panic() {
        // Every message of two bytes, and longer ones of a generator.
        for bits in 0..=u16::MAX {
            let _ = read(&bits.to_be_bytes());
        }
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        for _ in 0..100_000 {
            let mut message = Vec::new();
            for _ in 0..state % 24 {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                message.push((state >> 56) as u8);
            }
            state = state.wrapping_add(1);
            let _ = read(&message);
        }
    }
}
