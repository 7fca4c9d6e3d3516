//! Settings of one's own on top of a profile take effect, also where unsafe code is forbidden.
#![cfg(target_os = "linux")]
#![forbid(unsafe_code)]

use lowtide_heap::ByteSize;
use lowtide_heap::decay::DecayTime;
use lowtide_heap::{HeapConf, HeapProfile};

use crate::start::OWN;

#[test]
fn what_is_asked_on_top_of_a_profile_is_in_effect_and_known() {
    OWN.run(|| {
        let found = lowtide_heap::effective().unwrap();
        println!("{found}");
        let text = "background_thread:false,max_background_threads:2,narenas:8,\
                    dirty_decay_ms:2000,muzzy_decay_ms:0,cache_oblivious:false,tcache_max:8192,\
                    thp:never";
        assert_eq!(found.conf_of_binary, Some(text));
        assert_eq!(found.arenas_at_start, 8);
        assert_eq!(found.thread_cache_max, ByteSize::kib(8));
        assert_eq!(found.dirty_decay, DecayTime::from_millis(2_000));
        assert_eq!(found.thp, "never");
        assert!(!found.background_threads);

        let asked = found.requested_by_binary().unwrap();
        assert_eq!(asked.profile(), Some(HeapProfile::Balanced));
        let own = asked.own();
        assert_eq!(own.len(), 5, "{own:?}");
        assert!(own.contains(&("narenas", "8")), "{own:?}");
        assert_eq!(found.differences_from(&asked), []);
        assert_eq!(found.variable_for(&asked), text);
    });
}

#[test]
fn the_same_settings_stay_on_top_of_another_profile() {
    OWN.run(|| {
        let found = lowtide_heap::effective().unwrap();
        let low = found.requested_by(HeapProfile::LowMemory);
        assert_eq!(low.profile(), Some(HeapProfile::LowMemory));
        let differences = found.differences_from(&low);
        let settings: Vec<_> = differences.iter().map(|found| &*found.setting).collect();
        assert!(
            !settings.contains(&"narenas") && settings.contains(&"max_background_threads"),
            "{settings:?}"
        );
        assert_ne!(low, HeapConf::from(HeapProfile::LowMemory));
    });
}
