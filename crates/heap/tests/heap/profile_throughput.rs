//! A profile takes effect without `Heap`: the binary's symbol is what counts.

use lowtide_heap::{self as heap, HeapProfile};

use crate::start::NOT_GLOBAL;

#[test]
fn what_the_profile_asks_for_is_in_effect() {
    NOT_GLOBAL.run(|| {
        let found = heap::effective().unwrap();
        assert_eq!(found.get("dirty_decay_ms"), Some("10000"));
        assert_eq!(found.get("muzzy_decay_ms"), Some("0"));
        let supported = heap::background_threads_supported().to_string();
        assert_eq!(found.get("background_thread"), Some(&*supported));
        assert_eq!(found.differences_from(HeapProfile::Throughput), []);
    });
}
