//! Settings of one's own on top of a profile take effect, also where unsafe code is forbidden.
#![cfg(target_os = "linux")]
#![forbid(unsafe_code)]

use lowtide_heap::HeapProfile;

use crate::start::OWN;

#[test]
fn what_is_asked_on_top_of_a_profile_is_in_effect_and_known() {
    OWN.run(|| {
        let found = lowtide_heap::effective().unwrap();
        println!("{found}");
        for (setting, value) in [
            ("narenas", "8"),
            ("tcache_max", "8192"),
            ("dirty_decay_ms", "2000"),
            ("thp", "never"),
            ("background_thread", "false"),
        ] {
            assert_eq!(found.get(setting), Some(value), "{setting}");
        }
        assert_eq!(found.differences(), []);
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
