//! A binary that exports jemalloc's configuration under the name that this build does not read:
//! nothing of it took effect, and that is said.
#![cfg(feature = "heap")]
#![expect(unsafe_code, reason = "a symbol by hand")]

use std::ffi::{CStr, c_char};

use lowtide::host::{self, Cause, HeapProfile};

#[global_allocator]
static HEAP: host::Heap = host::Heap;

const CONF: &CStr = c"narenas:3";

/// As C has it: a pointer to the string.
#[repr(transparent)]
struct Conf(*const c_char);

// SAFETY: the pointer is to a literal, which is never written.
unsafe impl Sync for Conf {}

#[used]
#[cfg_attr(not(feature = "interpose"), unsafe(export_name = "malloc_conf"))]
#[cfg_attr(feature = "interpose", unsafe(export_name = "_rjem_malloc_conf"))]
static UNREAD: Conf = Conf(CONF.as_ptr());

#[test]
fn a_symbol_of_the_wrong_name_is_none_and_the_right_one_is_named() {
    let found = host::effective().unwrap();
    assert_eq!(found.conf_of_binary, None);
    let differences = found.differences_from(HeapProfile::Balanced);
    let settings: Vec<_> = differences.iter().map(|found| found.setting).collect();
    assert!(settings.contains(&"background_thread"), "{settings:?}");
    let symbol = if cfg!(feature = "interpose") { "malloc_conf" } else { "_rjem_malloc_conf" };
    let none = differences.iter().find(|found| found.setting == "dirty_decay_ms");
    assert_eq!(none.map(|found| &found.cause), Some(&Cause::NoSymbol(symbol)));
}
