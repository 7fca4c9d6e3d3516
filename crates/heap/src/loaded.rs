//! The executable files that this process has mapped, with the build ids of what is loaded.
//!
//! A file may be deleted or replaced while the program runs, as most deployments do. So the build
//! id is that of the notes in memory, which `pprof` compares with the binary that it is given. They
//! are read through `/proc/self/mem`, where a library that another thread unloads meanwhile is an
//! error, and for which a forked child needs no lock of the loader.

use std::fs::File;
use std::os::unix::fs::FileExt as _;

/// What the kernel adds to the path of a file that was deleted or replaced.
const DELETED: &str = " (deleted)";
/// The length of notes, and the number of program headers, that are read.
const NOTES_MAX: u64 = 4096;
const HEADERS_MAX: u64 = 64;

/// An executable mapping of a file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ProfileMapping {
    /// The first address.
    pub start: u64,
    /// The address after the last one.
    pub end: u64,
    /// The offset of the first address in the file.
    pub offset: u64,
    /// The path of the file, which may have been deleted or replaced.
    pub path: String,
    /// The build id of what is mapped, as hexadecimal digits; empty if it has none, or in a profile
    /// that was parsed.
    pub build_id: String,
    /// The address at which the file's first byte is mapped.
    header: u64,
}

/// Returns the executable mappings of files in lines of `/proc/self/maps`.
pub(super) fn executable(lines: impl Iterator<Item = impl AsRef<str>>) -> Vec<ProfileMapping> {
    let mut header = ProfileMapping::default();
    let mut found = Vec::new();
    for (mut mapping, is_executable) in lines.filter_map(|line| mapping(line.as_ref())) {
        if mapping.offset == 0 {
            header.clone_from(&mapping);
        }
        if is_executable {
            mapping.header = if header.path == mapping.path { header.start } else { 0 };
            found.push(mapping);
        }
    }
    found
}

/// Parses a line of `/proc/self/maps`; `None` if it is not a mapping of a file.
fn mapping(line: &str) -> Option<(ProfileMapping, bool)> {
    let mut words = line.split_whitespace();
    let (start, end) = words.next()?.split_once('-')?;
    let is_executable = words.next()?.contains('x');
    let offset = hexadecimal(words.next()?)?;
    let path = line.find('/').map(|at| &line[at..])?;
    let path = path.strip_suffix(DELETED).unwrap_or(path).to_owned();
    let (start, end) = (hexadecimal(start)?, hexadecimal(end)?);
    Some((ProfileMapping { start, end, offset, path, ..Default::default() }, is_executable))
}

pub(super) fn hexadecimal(text: &str) -> Option<u64> {
    u64::from_str_radix(text.strip_prefix("0x").unwrap_or(text), 16).ok()
}

/// Reads the build ids of these mappings of this process.
pub(super) fn read_build_ids(mappings: &mut [ProfileMapping]) {
    let Ok(memory) = File::open("/proc/self/mem") else { return };
    for mapping in mappings {
        mapping.build_id = build_id(&memory, mapping.header).unwrap_or_default();
    }
}

/// Reads the build id of the 64-bit ELF file whose first byte is at this address.
fn build_id(memory: &File, header: u64) -> Option<String> {
    let read = |address: u64, length: u64| {
        let mut bytes = vec![0; usize::try_from(length).ok()?];
        memory.read_exact_at(&mut bytes, address).ok().map(|()| bytes)
    };
    let elf = read(header, 64)?;
    let headers = number(&elf, 56, 2)?.min(HEADERS_MAX);
    elf.starts_with(b"\x7fELF\x02").then_some(())?;
    let table = read(header.checked_add(number(&elf, 32, 8)?)?, headers * 56)?;
    let of_kind = |kind| table.chunks(56).filter(move |one| number(one, 0, 4) == Some(kind));
    // Where the file's first byte was linked to be.
    let linked = of_kind(1).find(|one| number(one, 8, 8) == Some(0));
    let moved = header.wrapping_sub(linked.map_or(Some(0), |one| number(one, 16, 8))?);
    of_kind(4).find_map(|notes| {
        let notes =
            read(moved.wrapping_add(number(notes, 16, 8)?), number(notes, 40, 8)?.min(NOTES_MAX))?;
        build_id_in(&notes)
    })
}

/// Finds the note of kind 3 of `GNU`. A note is the lengths of its name and contents, its kind, and
/// both, each filled up to four bytes.
fn build_id_in(mut notes: &[u8]) -> Option<String> {
    // Ends: each iteration takes twelve bytes at least.
    loop {
        let length = |at| usize::try_from(number(notes, at, 4)?).ok();
        let (named, contents) = (12 + length(0)?.next_multiple_of(4), length(4)?);
        let id = notes.get(named..named + contents)?;
        if number(notes, 8, 4)? == 3 && notes.get(12..16)? == b"GNU\0" {
            return Some(id.iter().map(|byte| format!("{byte:02x}")).collect());
        }
        notes = notes.get(named + contents.next_multiple_of(4)..)?;
    }
}

/// Returns the number of this many bytes.
fn number(bytes: &[u8], at: usize, length: usize) -> Option<u64> {
    let mut number = [0; 8];
    let bytes = bytes.get(at..at + length)?;
    let low = if cfg!(target_endian = "little") { 0 } else { 8 - length };
    number[low..low + length].copy_from_slice(bytes);
    Some(u64::from_ne_bytes(number))
}

#[cfg(all(test, target_os = "linux", target_pointer_width = "64"))]
mod tests {
    use std::process::Command;

    use super::*;

    const SELF: &str = "loaded::tests::a_program_that_was_deleted_has_its_path_and_its_build_id";

    fn own() -> Vec<ProfileMapping> {
        let maps = std::fs::read_to_string("/proc/self/maps").expect("readable");
        let mut found = executable(maps.lines());
        read_build_ids(&mut found);
        found
    }

    /// Case M: google/pprof#386, rust-jemalloc-pprof#18.
    #[test]
    fn a_program_that_was_deleted_has_its_path_and_its_build_id() {
        let program = std::fs::read_link("/proc/self/exe").expect("this program");
        // This test's own child, which deletes its program.
        let is_copy = program.ends_with("service");
        if is_copy {
            std::fs::remove_file(&program).expect("removed");
            std::fs::copy("/proc/self/maps", &program).expect("replaced");
        }
        let found = own();
        let program = program.to_str().expect("UTF-8");
        let ours = found.iter().find(|one| one.path == program);
        let ours = ours.unwrap_or_else(|| panic!("{program} in {found:?}"));
        println!("build id {}", ours.build_id);
        if is_copy {
            return;
        }
        let libraries = found.iter().filter(|one| one.path.contains("libc.so"));
        assert!(libraries.map(|one| one.build_id.len()).all(|length| length >= 16), "{found:?}");
        let folder = tempfile::tempdir().expect("a folder");
        let copy = folder.path().join("service");
        std::fs::copy(program, &copy).expect("copied");
        let mut command = Command::new(&copy);
        let output = command.args(["--exact", SELF, "--nocapture"]).output();
        let output = output.expect("runs");
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{text}");
        assert!(text.contains(&format!("build id {}\n", ours.build_id)), "{text}");
    }

    #[test]
    fn notes_that_are_cut_or_of_others_have_no_build_id() {
        let note = |kind: u32, name: &[u8; 4], id: &[u8]| {
            let mut note = Vec::new();
            for number in [4, u32::try_from(id.len()).expect("short"), kind] {
                note.extend(number.to_ne_bytes());
            }
            note.extend(name);
            note.extend(id);
            note.resize(note.len().next_multiple_of(4), 0);
            note
        };
        let notes = [note(3, b"Xen\0", &[1; 6]), note(3, b"GNU\0", &[0xab, 0, 7])].concat();
        assert_eq!(build_id_in(&notes).as_deref(), Some("ab0007"));
        for length in 0..notes.len() - 1 {
            assert_eq!(build_id_in(&notes[..length]), None, "{length}");
        }
        assert_eq!(build_id_in(&[0xff; 64]), None);
    }

    #[test]
    fn the_address_of_a_header_is_that_of_its_own_file() {
        let lines = "1000-2000 r--p 00000000 fe:00 1  /a (deleted)\n\
                     2000-3000 r-xp 00001000 fe:00 1  /a (deleted)\n\
                     5000-6000 r-xp 00001000 fe:00 2  /b\n7000-8000 rw-p 00000000 00:00 0 [heap]\n";
        let found = executable(lines.lines());
        let found: Vec<_> = found.iter().map(|one| (&*one.path, one.start, one.header)).collect();
        assert_eq!(found, [("/a", 0x2000, 0x1000), ("/b", 0x5000, 0)]);
    }
}
