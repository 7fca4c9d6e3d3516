//! A binary that exports jemalloc's configuration under the name that this build does not read:
//! nothing of it took effect, and that is said.
#![cfg(target_os = "linux")]

use lowtide_heap::HeapProfile;

use crate::start::WRONG_NAME;

#[test]
fn a_symbol_of_the_wrong_name_is_none() {
    WRONG_NAME.run(|| {
        let found = lowtide_heap::effective().unwrap();
        assert!(found.is_default());
        let differences = found.differences_from(HeapProfile::Balanced);
        let settings: Vec<_> = differences.iter().map(|found| &*found.setting).collect();
        assert!(settings.contains(&"background_thread"), "{settings:?}");
        assert!(settings.contains(&"dirty_decay_ms"), "{settings:?}");
    });
}
