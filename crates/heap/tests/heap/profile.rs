//! A profile in the binary takes effect, also where unsafe code is forbidden.
#![cfg(target_os = "linux")]
#![forbid(unsafe_code)]

use lowtide_heap::{Difference, HeapProfile};

use crate::start::LOW_MEMORY;

#[test]
fn what_the_profile_asks_for_is_in_effect() {
    LOW_MEMORY.run(|| {
        let found = lowtide_heap::effective().unwrap();
        println!("{found}");
        assert!(!found.is_default() && lowtide_heap::is_global());
        let supported = lowtide_heap::background_threads_supported().to_string();
        for (setting, value) in [
            ("narenas", "2"),
            ("cache_oblivious", "false"),
            ("thp", "never"),
            ("metadata_thp", "disabled"),
            ("dirty_decay_ms", "1000"),
            ("muzzy_decay_ms", "0"),
            ("background_thread", &*supported),
            ("max_background_threads", "1"),
            ("hpa", "false"),
        ] {
            assert_eq!(found.get(setting), Some(value), "{setting}");
        }
        assert_eq!(found.differences_from(HeapProfile::LowMemory), []);
        let of_kernel =
            |found: &Difference| matches!(&*found.setting, "page" | "transparent_hugepage");
        assert!(found.differences().iter().all(of_kernel), "{:?}", found.differences());
        let differences = found.differences_from(HeapProfile::Balanced);
        let settings: Vec<_> = differences.iter().map(|found| &*found.setting).collect();
        let all = ["max_background_threads", "narenas", "thp"];
        assert_eq!(settings, all, "{differences:?}");
    });
}
