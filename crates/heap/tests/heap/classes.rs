//! Statistics by size class and by thread, in a process where nobody else allocates meanwhile.
#![cfg(target_os = "linux")]

use std::hint::black_box;

use lowtide_heap::ByteSize;
use lowtide_heap::{HeapProbe, HeapSizeClass, thread_totals};
use test_fork::test;

fn classes(probe: &HeapProbe) -> Vec<HeapSizeClass> {
    let mut all = Vec::with_capacity(64);
    probe.each_class(|class| all.push(class)).expect("statistics");
    all
}

/// One test, since the process's blocks are counted.
#[test]
fn slack_sits_in_the_class_whose_blocks_were_freed_and_a_threads_totals_are_its_own() {
    let probe = HeapProbe::new().expect("a probe");
    let of = |size: u64| {
        let all = classes(&probe);
        all.into_iter().find(|class| class.size == ByteSize::new(size)).expect("such a class")
    };
    let before = classes(&probe);
    assert!(before.is_sorted_by_key(|class| class.size) && before.len() > 30, "{before:?}");
    assert!(before.iter().all(|class| (0.0..=1.0).contains(&class.utilisation())), "{before:?}");

    // Every tenth stays: nearly all of their groups do.
    let blocks: Vec<Box<[u8; 320]>> = (0..10_000).map(|_| black_box(Box::new([1; 320]))).collect();
    let full = of(320);
    assert!(full.blocks >= 10_000 && full.utilisation() > 0.9, "{full:?}");
    let kept: Vec<_> = blocks.into_iter().step_by(10).collect();
    lowtide_heap::flush_thread_cache().expect("flushed");
    let sparse = of(320);
    assert!((1000..1300).contains(&sparse.blocks), "{sparse:?}");
    assert!(sparse.groups * 10 > full.groups * 9 && sparse.utilisation() < 0.15, "{sparse:?}");
    let freed = ByteSize::new(9000 * 320);
    assert!(sparse.slack() > freed.saturating_sub(ByteSize::kib(128)), "{sparse:?}");
    drop(kept);
    lowtide_heap::flush_thread_cache().expect("flushed");
    let gone = of(320);
    assert!(gone.groups * 10 < full.groups, "{gone:?}");

    // The whole of it explains what is active and neither live nor cached.
    let heap = probe.snapshot().expect("statistics");
    let slack: ByteSize = classes(&probe).iter().map(HeapSizeClass::slack).sum();
    let unexplained = heap.active.saturating_sub(heap.live).saturating_sub(heap.thread_caches);
    let (most, least) = (slack.max(unexplained), slack.min(unexplained));
    assert!(most.saturating_sub(least) < ByteSize::mib(1), "{slack} of {unexplained}");

    let start = thread_totals().expect("totals");
    let (there, back) = std::thread::spawn(|| {
        let start = thread_totals().expect("totals");
        drop(black_box(vec![1_u8; 1 << 20]));
        let end = thread_totals().expect("totals");
        (end.0 - start.0, end.1 - start.1)
    })
    .join()
    .expect("no panic");
    assert!(there >= 1 << 20 && back >= 1 << 20, "{there} and {back}");
    let end = thread_totals().expect("totals");
    assert!(end.0 - start.0 < 1 << 19, "another thread's are not counted here");
}
