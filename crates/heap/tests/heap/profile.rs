//! A profile in the binary takes effect, also where unsafe code is forbidden.
#![cfg(target_os = "linux")]
#![forbid(unsafe_code)]

use lowtide_heap::HeapProfile;
use lowtide_heap::decay::DecayTime;

use crate::start::LOW_MEMORY;

#[test]
fn what_the_profile_asks_for_is_in_effect() {
    LOW_MEMORY.run(|| {
        let found = lowtide_heap::effective().unwrap();
        println!("{found}");
        assert_eq!(found.conf_of_binary, HeapProfile::LowMemory.conf().to_str().ok());
        assert_eq!(found.arenas_at_start, 2);
        assert!(!found.cache_oblivious);
        assert_eq!((found.thp, found.metadata_thp), ("never", "disabled"));
        assert_eq!(found.dirty_decay, DecayTime::from_millis(1_000));
        assert_eq!(found.muzzy_decay, DecayTime::AtOnce);
        assert_eq!(found.background_threads, found.background_threads_supported);
        assert_eq!(found.max_background_threads, 1);
        assert!(!found.hpa && found.is_global);
        assert_eq!(found.one_page_groups, Some(false));
        assert_eq!(
            found.requested_by_binary().and_then(|conf| conf.profile()),
            Some(HeapProfile::LowMemory)
        );
        assert_eq!(found.differences_from(HeapProfile::LowMemory), []);
        assert_eq!(found.not_in_effect(&found.requested()), []);
        let differences = found.differences_from(HeapProfile::Balanced);
        let settings: Vec<_> = differences.iter().map(|found| &*found.setting).collect();
        let all = ["max_background_threads", "narenas", "thp"];
        assert_eq!(settings, all, "{differences:?}");
    });
}
