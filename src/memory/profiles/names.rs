//! Names of functions for the addresses of a few call stacks.
//!
//! Runs only on the profiler's thread: the symbols of the binary are read from its file, which
//! takes up to some 100 ms and some MiB. They are dropped afterwards.
//!
//! Invariant: every frame has a text of at most [`NAME_MAX`] bytes.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::path::Path;

use crate::bytes::prefix;
use lowtide_heap::ProfileMapping;

/// The maximum number of frames of a stack.
const FRAMES_MAX: usize = 8;
/// The maximum length of a frame, in bytes.
const NAME_MAX: usize = 160;

/// The beginnings of functions that allocate for others.
const ALLOCATORS: &[&str] = &[
    "_rjem",
    "__rg_",
    "__rdl_",
    "__rust_",
    "__rustc::",
    "_RNv",
    "je_",
    "prof_",
    "imalloc",
    "malloc",
    "calloc",
    "realloc",
    "aligned_alloc",
    "posix_memalign",
    "operator new",
    "alloc::",
    "core::",
    "std::",
    "hashbrown::",
    "bytes::",
    "lowtide_heap::",
    "tikv_jemallocator::",
];

/// Returns the frames of each stack, the innermost first, from the first function that is not part
/// of the allocator or the standard library.
pub(super) fn frames(stacks: &[&[u64]], mappings: &[ProfileMapping]) -> Vec<Vec<String>> {
    let mut known: BTreeMap<u64, Vec<String>> = BTreeMap::new();
    let frames = stacks.iter().map(|addresses| {
        let all = addresses.iter().flat_map(|&address| {
            known.entry(address).or_insert_with(|| names(address, mappings)).clone()
        });
        trimmed(all)
    });
    let frames = frames.collect();
    if !known.is_empty() {
        backtrace::clear_symbol_cache();
    }
    frames
}

fn trimmed(all: impl Iterator<Item = String>) -> Vec<String> {
    let all: Vec<_> = all.collect();
    let first = all.iter().position(|name| !is_allocator(name)).unwrap_or(0);
    all.into_iter().skip(first).take(FRAMES_MAX).collect()
}

fn is_allocator(name: &str) -> bool {
    // Of `<T as alloc::slice::hack::ConvertVec>::to_vec` the trait.
    let inner = name.trim_start_matches('<');
    let of_trait = inner.split_once(" as ").filter(|_| name.starts_with('<')).map(|it| it.1);
    let is_one = |name: &str| ALLOCATORS.iter().any(|start| name.starts_with(start));
    is_one(inner) || of_trait.is_some_and(is_one)
}

/// Returns the names of the function that returns to this address, the innermost inlined function
/// first.
fn names(address: u64, mappings: &[ProfileMapping]) -> Vec<String> {
    // A return address is behind the call.
    let call = address.saturating_sub(1);
    let mut names = Vec::new();
    let place = usize::try_from(call).unwrap_or(0);
    backtrace::resolve(std::ptr::without_provenance_mut::<c_void>(place), |symbol| {
        let Some(name) = symbol.name() else { return };
        let file = symbol.filename().and_then(Path::file_name).map(|file| file.to_string_lossy());
        let mut text = format!("{name:#}");
        if let (Some(file), Some(line)) = (file, symbol.lineno()) {
            text = format!("{text} ({file}:{line})");
        }
        names.push(cut(text));
    });
    if names.is_empty() {
        let mapping = mappings.iter().find(|of| (of.start..of.end).contains(&call));
        names.push(cut(mapping.map_or_else(
            || format!("{call:#x}"),
            |of| {
                let file = Path::new(&of.path).file_name().unwrap_or_default().to_string_lossy();
                format!("{file}+{:#x}", call - of.start + of.offset)
            },
        )));
    }
    names
}

fn cut(mut text: String) -> String {
    text.truncate(prefix(&text, NAME_MAX).len());
    text
}

#[cfg(all(test, not(lowtide_loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_stack_begins_at_the_first_function_that_is_no_allocator() {
        let all = [
            "_rjem_je_prof_tctx_create",
            "__rust_alloc",
            "__rustc::__rust_alloc (profile.rs:161)",
            "<T as alloc::slice::hack::ConvertVec>::to_vec",
            "<alloc::vec::Vec<T> as core::clone::Clone>::clone",
            "service::cache::insert",
            "std::thread::spawn",
        ];
        let trimmed = trimmed(all.into_iter().map(str::to_owned));
        assert_eq!(trimmed, ["service::cache::insert", "std::thread::spawn"]);
    }

    #[test]
    fn a_function_without_a_name_is_its_file_and_offset() {
        let mut mapping = ProfileMapping::default();
        (mapping.start, mapping.end, mapping.offset) = (0x10, 0x20, 0x1000);
        mapping.path = "/opt/proxy".to_owned();
        assert_eq!(names(0x18, &[mapping]), ["proxy+0x1007"]);
        assert_eq!(names(0x18, &[]), ["0x17"]);
        assert_eq!(cut("ä".repeat(200)).len(), NAME_MAX);
    }

    #[test]
    fn a_function_of_this_binary_has_its_name() {
        let address = a_function_of_this_binary_has_its_name as fn() as usize as u64;
        let found = frames(&[&[address + 2]], &[]);
        let name = "a_function_of_this_binary_has_its_name";
        assert!(found[0].iter().any(|frame| frame.contains(name)), "{found:?}");
    }
}
