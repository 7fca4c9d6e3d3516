//! A binary that exports jemalloc's configuration under the name that this build does not read:
//! nothing of it took effect, and that is said.
#![cfg(target_os = "linux")]

use lowtide_heap::{Cause, HeapProfile};

use crate::start::WRONG_NAME;

#[test]
fn a_symbol_of_the_wrong_name_is_none_and_the_right_one_is_named() {
    WRONG_NAME.run(|| {
        let found = lowtide_heap::effective().unwrap();
        assert_eq!(found.conf_of_binary, None);
        let differences = found.differences_from(HeapProfile::Balanced);
        let settings: Vec<_> = differences.iter().map(|found| found.setting).collect();
        assert!(settings.contains(&"background_thread"), "{settings:?}");
        let symbol = if cfg!(feature = "interpose") { "malloc_conf" } else { "_rjem_malloc_conf" };
        let none = differences.iter().find(|found| found.setting == "dirty_decay_ms");
        assert_eq!(none.map(|found| &found.cause), Some(&Cause::NoSymbol(symbol)));
    });
}
