//! A binary that exports jemalloc's configuration itself: its string is what took effect.
#![cfg(target_os = "linux")]

use lowtide_heap::HeapProfile;

use crate::start::BY_HAND;

#[test]
fn a_symbol_of_the_binarys_own_differs_from_a_profile() {
    BY_HAND.run(|| {
        let found = lowtide_heap::effective().unwrap();
        assert_eq!(found.get("narenas"), Some("3"));
        let low = found.requested_by(HeapProfile::LowMemory);
        assert!(low.ends_with("cache_oblivious:false,narenas:3"), "{low}");
        let differences = found.differences_from(HeapProfile::LowMemory);
        let of = |setting: &str| differences.iter().find(|found| found.setting == setting);
        let thp = of("thp").expect("it names none");
        assert_eq!(thp.to_string(), "thp: requested never, effective default");
        assert_eq!(of("cache_oblivious"), None, "they agree on that");
        assert_eq!(of("narenas"), None, "a setting of the binary's own");
    });
}
