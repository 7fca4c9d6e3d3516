//! The resident memory of the process by mapping, from `/proc/self/smaps`.
//!
//! Read on demand only: the kernel walks all page tables of the process, which takes milliseconds
//! in a large one. The text is read line by line.
//!
//! Invariant: at most [`BYTES_MAX`] bytes are read and [`FILES_MAX`] files are kept.

use std::collections::BTreeMap;
use std::io::{self, BufRead, BufReader, Read as _};

use lowtide_core::bytes::ByteSize;
use lowtide_core::kernel::kib_of;

/// The maximum length of the text that is read: some ten thousand mappings.
const BYTES_MAX: u64 = 16 << 20;
/// The maximum number of files.
const FILES_MAX: usize = 1024;

/// The resident memory of this process by mapping.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Mappings {
    /// Mapped files and shared memory, the largest first.
    pub files: Vec<(String, ByteSize)>,
    /// Anonymous memory: heaps, arenas in host memory, stacks of threads.
    pub anonymous: ByteSize,
    /// The area that grows with `brk`, which the C library uses for its heap.
    pub program_break: ByteSize,
    /// The stack of the main thread.
    pub main_stack: ByteSize,
    /// `true` if there are more mappings than were read.
    pub is_truncated: bool,
}

impl Mappings {
    /// Reads the mappings of this process.
    ///
    /// # Errors
    /// The operating system's error if `/proc/self/smaps` cannot be read.
    pub fn read() -> io::Result<Self> {
        let file = std::fs::File::open("/proc/self/smaps")?;
        Self::parse(BufReader::new(file.take(BYTES_MAX)))
    }

    fn parse(mut text: impl BufRead) -> io::Result<Self> {
        let mut found = Self::default();
        let mut files = BTreeMap::<String, u64>::new();
        let mut name = String::new();
        let (mut raw, mut read) = (Vec::new(), 0);
        // Ends: the text is bounded, and each iteration reads a line of it.
        loop {
            raw.clear();
            let length = text.read_until(b'\n', &mut raw)?;
            if length == 0 {
                break;
            }
            read += length as u64;
            // A path may be any bytes.
            let line = String::from_utf8_lossy(&raw);
            if let Some(bytes) = kib_of(&raw, b"Rss:") {
                found.add(&name, bytes.get(), &mut files);
            } else if let Some(of) = name_of(&line) {
                name.clear();
                name.push_str(of);
            }
        }
        found.is_truncated |= read >= BYTES_MAX;
        found.files = files.into_iter().map(|(name, bytes)| (name, ByteSize::new(bytes))).collect();
        found.files.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
        Ok(found)
    }

    fn add(&mut self, name: &str, bytes: u64, files: &mut BTreeMap<String, u64>) {
        if bytes == 0 {
            return;
        }
        let sum = match name {
            "[heap]" => &mut self.program_break,
            "[stack]" => &mut self.main_stack,
            _ if name.starts_with('/') => {
                if let Some(sum) = files.get_mut(name) {
                    *sum = sum.saturating_add(bytes);
                } else if files.len() < FILES_MAX {
                    files.insert(name.to_owned(), bytes);
                } else {
                    self.is_truncated = true;
                }
                return;
            }
            _ => &mut self.anonymous,
        };
        *sum = sum.saturating_add(ByteSize::new(bytes));
    }
}

/// Returns the name of a mapping, empty if it has none, if this is the first line of one, such as
/// `7f00-7f01 r--p 00000000 fd:00 12 /usr/lib/libc.so.6`.
fn name_of(line: &str) -> Option<&str> {
    let (range, rest) = line.split_once(' ')?;
    let (first, last) = range.split_once('-')?;
    let is_hex = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    if !is_hex(first) || !is_hex(last) {
        return None;
    }
    // Permissions, offset, device and inode.
    let mut rest = rest.trim_end();
    for _ in 0..4 {
        rest = rest.trim_start().split_once(' ').map_or("", |(_, rest)| rest);
    }
    Some(rest.trim_start())
}

#[cfg(all(test, not(lowtide_loom)))]
mod tests {
    use super::*;

    #[test]
    fn mappings_are_summed_by_file_and_the_rest_by_kind() {
        let text = "\
55d0-55d1 r--p 00000000 fd:00 100                        /usr/bin/a service
Rss:                  40 kB
55d1-55d2 r-xp 00001000 fd:00 100                        /usr/bin/a service
Size:                 99 kB
Rss:                   2 kB
55e0-55f0 rw-p 00000000 00:00 0                          [heap]
Rss:                   8 kB
7f00-7f10 rw-p 00000000 00:00 0
Rss:                 100 kB
7f10-7f11 rw-p 00000000 00:00 0                          [anon:jemalloc]
Rss:                   1 kB
7f20-7f21 r--s 00000000 fd:00 7                          /models/weights.bin
Rss:                4096 kB
7ffd-7ffe rw-p 00000000 00:00 0                          [stack]
Rss:                  12 kB
VmFlags: rd wr
";
        let found = Mappings::parse(text.as_bytes()).expect("text");
        let kib = ByteSize::kib;
        let files = [("/models/weights.bin", 4096), ("/usr/bin/a service", 42)];
        let files = files.map(|(name, size)| (name.to_owned(), kib(size)));
        assert_eq!(found.files, files);
        let others = (found.anonymous, found.program_break, found.main_stack, found.is_truncated);
        assert_eq!(others, (kib(101), kib(8), kib(12), false));
    }

    #[test]
    fn more_files_than_are_kept_are_reported() {
        let text: String = (0..=FILES_MAX)
            .map(|nth| format!("1-2 r--p 0 0:0 1 /file{nth}\nRss: 4 kB\n"))
            .collect();
        let found = Mappings::parse(text.as_bytes()).expect("text");
        assert_eq!((found.files.len(), found.is_truncated), (FILES_MAX, true));
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn the_mappings_of_this_process_contain_its_program() {
        let found = Mappings::read().expect("readable");
        assert!(!found.files.is_empty() && !found.anonymous.is_zero() && !found.is_truncated);
    }
}
