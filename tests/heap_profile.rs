//! A profile in the binary takes effect, also where unsafe code is forbidden.
#![cfg(feature = "heap")]
#![forbid(unsafe_code)]

use lowtide::ByteSize;
use lowtide::decay::DecayTime;
use lowtide::host::{self, HeapProfile};

#[global_allocator]
static HEAP: host::Heap = host::Heap;

lowtide::heap_profile!(low_memory);

#[test]
fn what_the_profile_asks_for_is_in_effect() {
    let found = host::effective().unwrap();
    println!("{found}");
    assert_eq!(found.conf_of_binary, HeapProfile::LowMemory.conf().to_str().ok());
    assert_eq!(found.arenas_at_start, 2);
    assert_eq!(found.thread_cache_max, ByteSize::kib(4));
    assert_eq!((found.thp, found.metadata_thp), ("never", "disabled"));
    assert_eq!(found.dirty_decay, DecayTime::from_millis(1_000));
    assert_eq!(found.muzzy_decay, DecayTime::AtOnce);
    assert_eq!(found.background_threads, found.background_threads_supported);
    assert_eq!(found.max_background_threads, 1);
    assert!(!found.hpa && found.is_global);
    assert_eq!(found.differences_from(HeapProfile::LowMemory), []);
    let settings = found.differences_from(HeapProfile::Balanced);
    assert_eq!(settings.len(), 1, "{settings:?}");
    assert!(settings[0].cause.contains(found.variable()), "{}", settings[0]);
}
