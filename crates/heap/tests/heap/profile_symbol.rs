//! A binary that exports jemalloc's configuration itself: its string is what took effect.
#![cfg(target_os = "linux")]

use lowtide_heap::HeapProfile;

use crate::start::{BY_HAND, TEXT_BY_HAND};

#[test]
fn a_symbol_of_the_binarys_own_differs_from_a_profile() {
    BY_HAND.run(|| {
        let found = lowtide_heap::effective().unwrap();
        assert_eq!(found.conf_of_binary, TEXT_BY_HAND.to_str().ok());
        assert_eq!((found.arenas_at_start, found.cache_oblivious), (3, false));
        assert_eq!(found.requested_by_binary().and_then(|conf| conf.profile()), None);
        let differences = found.differences_from(HeapProfile::LowMemory);
        let of = |setting: &str| differences.iter().find(|found| found.setting == setting);
        let narenas = of("narenas").expect("3 are not 2");
        assert_eq!(narenas.to_string(), "narenas: requested 2, effective 3");
        assert_eq!(of("cache_oblivious"), None, "they agree on that");
        assert!(of("thp").is_some());
    });
}
