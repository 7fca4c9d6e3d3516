//! Settings of one's own on top of a profile take effect, also where unsafe code is forbidden.
#![cfg(target_os = "linux")]
#![forbid(unsafe_code)]

use std::hint::black_box;

use lowtide_heap::{ByteSize, HeapProbe, HeapProfile};

use crate::start::OWN;

#[test]
fn what_is_asked_on_top_of_a_profile_is_in_effect_and_known() {
    OWN.run(|| {
        let found = lowtide_heap::effective().unwrap();
        println!("{found}");
        for (setting, value) in [
            ("narenas", "8"),
            ("tcache_max", "8192"),
            ("tcache_nslots_small_min", "128"),
            ("tcache_nslots_large", "64"),
            ("dirty_decay_ms", "2000"),
            ("thp", "never"),
            ("background_thread", "false"),
        ] {
            assert_eq!(found.get(setting), Some(value), "{setting}");
        }
        assert_eq!(found.differences(), []);
        assert!(found.to_string().ends_with("requested_outside=\"\""), "{found}");
    });
}

#[test]
fn a_thread_keeps_as_many_blocks_as_is_asked() {
    OWN.run(|| {
        drop(black_box([(); 100].map(|()| Vec::<u8>::with_capacity(4096))));
        let cached = HeapProbe::new().unwrap().snapshot().unwrap().thread_caches;
        assert!(cached >= ByteSize::kib(4 * 100), "{cached}");
    });
}

#[test]
fn the_same_settings_stay_on_top_of_another_profile() {
    OWN.run(|| {
        let found = lowtide_heap::effective().unwrap();
        let text = found.requested_by(HeapProfile::LowMemory);
        assert!(text.contains("narenas:8") && !text.contains("narenas:2"), "{text}");
        let differences = found.differences_from(HeapProfile::LowMemory);
        let settings: Vec<_> = differences.iter().map(|found| &*found.setting).collect();
        assert!(settings.contains(&"max_background_threads"), "{settings:?}");
        assert!(!settings.contains(&"narenas"), "{settings:?}");
    });
}
