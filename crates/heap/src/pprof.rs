//! Converts a heap profile to the format of `pprof`: a gzipped message `Profile` of
//! `profile.proto` (github.com/google/pprof).
//!
//! Addresses and mappings only: `pprof` reads the names from the binary. The message has ten kinds
//! of fields, which are written here. The crate `pprof_util` has them too, but makes one location
//! of two addresses with the same offset in two libraries.
//!
//! Invariant: location and mapping numbers count from 1, and string 0 is empty.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::time::Duration;

use flate2::Compression;
use flate2::write::GzEncoder;

use super::allocations::AllocationProfile;

/// The functions of the allocator, which `pprof` leaves out of each stack.
const ALLOCATOR: &str = "(_rjem_|je_|prof_|imalloc|malloc_default).*";

impl AllocationProfile {
    /// Returns the profile for `pprof`, gzipped, with the values `inuse_objects` and `inuse_space`.
    /// `since_epoch` is the time at which it was taken.
    #[must_use]
    pub fn to_pprof(&self, since_epoch: Duration) -> Vec<u8> {
        let message = self.message(since_epoch);
        // Writing to memory does not fail.
        gzip(&message).unwrap_or(message)
    }

    fn message(&self, since_epoch: Duration) -> Vec<u8> {
        let mut strings = vec![""];
        let mut string = |text| {
            strings.push(text);
            strings.len() as u64 - 1
        };
        let (space, bytes) = (string("inuse_space"), string("bytes"));
        let value_types = [(string("inuse_objects"), string("count")), (space, bytes)];
        let allocator = string(ALLOCATOR);
        let mut profile = Message::default();
        for (kind, unit) in value_types {
            profile.message(1, &value_type(kind, unit));
        }
        let mut locations = BTreeMap::new();
        for stack in &self.stacks {
            let mut sample = Message::default();
            let ids = stack.addresses.iter().map(|&address| {
                let next = locations.len() as u64 + 1;
                *locations.entry(address).or_insert(next)
            });
            sample.packed(1, ids);
            sample.packed(2, [stack.blocks, stack.bytes.get()].into_iter());
            profile.message(2, &sample);
        }
        for (mapping, id) in self.mappings.iter().zip(1..) {
            let mut message = Message::default();
            let path = string(&mapping.path);
            let fields = [id, mapping.start, mapping.end, mapping.offset, path];
            fields.into_iter().zip(1..).for_each(|(value, field)| message.number(field, value));
            if !mapping.build_id.is_empty() {
                message.number(6, string(&mapping.build_id));
            }
            profile.message(3, &message);
        }
        let mut locations: Vec<_> = locations.into_iter().collect();
        locations.sort_unstable_by_key(|&(_, id)| id);
        for (address, id) in locations {
            // A return address is behind the call.
            let call = address.saturating_sub(1);
            let mut mappings = self.mappings.iter().zip(1..);
            let mapping = mappings.find(|(of, _)| (of.start..of.end).contains(&call));
            let mut message = Message::default();
            message.number(1, id);
            message.number(2, mapping.map_or(0, |(_, id)| id));
            message.number(3, call);
            profile.message(4, &message);
        }
        strings.iter().for_each(|text| profile.bytes(6, text.as_bytes()));
        profile.number(7, allocator);
        profile.number(9, u64::try_from(since_epoch.as_nanos()).unwrap_or(u64::MAX));
        profile.message(11, &value_type(space, bytes));
        profile.number(12, self.interval.get());
        profile.number(14, space);
        profile.0
    }
}

fn gzip(bytes: &[u8]) -> io::Result<Vec<u8>> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(bytes)?;
    encoder.finish()
}

fn value_type(kind: u64, unit: u64) -> Message {
    let mut message = Message::default();
    message.number(1, kind);
    message.number(2, unit);
    message
}

/// A message of protocol buffers.
#[derive(Default)]
struct Message(Vec<u8>);

/// Kinds of fields in a message.
const NUMBER: u64 = 0;
const BYTES: u64 = 2;

impl Message {
    /// A number in groups of seven bits, the lowest first.
    fn varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push(value.to_le_bytes()[0] | 0x80);
            value >>= 7;
        }
        self.0.push(value.to_le_bytes()[0]);
    }

    /// A number field; 0 is the default, and is left out.
    fn number(&mut self, field: u64, value: u64) {
        if value != 0 {
            self.varint(field << 3 | NUMBER);
            self.varint(value);
        }
    }

    fn bytes(&mut self, field: u64, bytes: &[u8]) {
        self.varint(field << 3 | BYTES);
        self.varint(bytes.len() as u64);
        self.0.extend_from_slice(bytes);
    }

    fn message(&mut self, field: u64, message: &Self) {
        self.bytes(field, &message.0);
    }

    fn packed(&mut self, field: u64, values: impl Iterator<Item = u64>) {
        let mut packed = Self::default();
        values.for_each(|value| packed.varint(value));
        self.message(field, &packed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A field of a message: its number, and a number or bytes.
    type Field = (u64, Result<u64, Vec<u8>>);

    fn varint(bytes: &mut &[u8]) -> u64 {
        let (mut value, mut shift) = (0, 0);
        loop {
            let (byte, rest) = bytes.split_first().expect("a whole number");
            *bytes = rest;
            value |= u64::from(byte & 0x7f) << shift;
            shift += 7;
            if byte & 0x80 == 0 {
                return value;
            }
        }
    }

    fn fields(mut bytes: &[u8]) -> Vec<Field> {
        let mut found = Vec::new();
        while !bytes.is_empty() {
            let key = varint(&mut bytes);
            let value = varint(&mut bytes);
            if key & 7 == NUMBER {
                found.push((key >> 3, Ok(value)));
            } else {
                let (text, rest) = bytes.split_at(usize::try_from(value).expect("short"));
                bytes = rest;
                found.push((key >> 3, Err(text.to_vec())));
            }
        }
        found
    }

    fn messages(found: &[Field], field: u64) -> Vec<Vec<u8>> {
        let of_field = found.iter().filter(|(number, _)| *number == field);
        of_field.map(|(_, value)| value.clone().expect_err("bytes")).collect()
    }

    const TEXT: &str = "heap_v2/1024\n@ 0x5011 0x8011\n t*: 1: 1048576 [0: 0]\n\
        @ 0x5021 0x8011\n t*: 2: 4194304 [0: 0]\nMAPPED_LIBRARIES:\n\
        5000-6000 r-xp 00001000 fe:00 12 /service\n8000-9000 r-xp 00001000 fe:00 13 /lib.so\n";

    /// Bug of `pprof_util` 0.8: 0x5011 and 0x8011 have the same offset in two files, and were one
    /// location.
    #[test]
    fn each_address_is_one_location_of_its_own_mapping() {
        let mut profile = AllocationProfile::parse(TEXT).expect("a profile");
        "00ab".clone_into(&mut profile.mappings[1].build_id);
        let found = fields(&profile.message(Duration::from_nanos(7)));
        let locations = messages(&found, 4);
        let read = |bytes: &Vec<u8>| {
            fields(bytes).into_iter().map(|(_, value)| value.expect("numbers")).collect::<Vec<_>>()
        };
        let locations: Vec<_> = locations.iter().map(read).collect();
        assert_eq!(locations, [[1, 1, 0x5010], [2, 2, 0x8010], [3, 1, 0x5020]]);
        let samples: Vec<_> = messages(&found, 2).iter().map(|sample| fields(sample)).collect();
        assert_eq!(samples[0][0], (1, Err(vec![1, 2])));
        assert_eq!(samples[1][0], (1, Err(vec![3, 2])));
        let (_, Err(values)) = &samples[1][1] else { panic!("packed values") };
        let mut values = &**values;
        assert_eq!((varint(&mut values), varint(&mut values)), (2, 4 << 20));
        let strings = messages(&found, 6);
        let strings: Vec<_> = strings.iter().map(|text| String::from_utf8_lossy(text)).collect();
        let expected = ["", "inuse_space", "bytes", "inuse_objects", "count", ALLOCATOR];
        assert_eq!(strings[..6], expected);
        assert_eq!(strings[6..], ["/service", "/lib.so", "00ab"]);
        let [service, library] = &*messages(&found, 3) else { panic!("two mappings") };
        assert!(!fields(service).iter().any(|(field, _)| *field == 6));
        assert_eq!(fields(library).last(), Some(&(6, Ok(8))));
        for numbers in [(9, Ok(7)), (12, Ok(1024)), (14, Ok(1))] {
            assert!(found.contains(&numbers), "{numbers:?}");
        }
    }

    #[test]
    fn the_message_is_gzipped() {
        let profile = AllocationProfile::parse(TEXT).expect("a profile");
        assert_eq!(profile.to_pprof(Duration::ZERO)[..3], [0x1f, 0x8b, 8]);
    }
}
