//! A profile takes effect without `Heap`: the binary's symbol is what counts.

use lowtide_core::decay::DecayTime;
use lowtide_heap::{self as heap, HeapProfile};

use crate::start::NOT_GLOBAL;

#[test]
fn what_the_profile_asks_for_is_in_effect() {
    NOT_GLOBAL.run(|| {
        let found = heap::effective().unwrap();
        assert_eq!(found.conf_of_binary, HeapProfile::Throughput.conf().to_str().ok());
        assert_eq!(found.dirty_decay, DecayTime::from_millis(10_000));
        assert_eq!(found.muzzy_decay, DecayTime::AtOnce);
        assert_eq!(found.background_threads, found.background_threads_supported);
        assert_eq!(found.differences_from(HeapProfile::Throughput), []);
    });
}
