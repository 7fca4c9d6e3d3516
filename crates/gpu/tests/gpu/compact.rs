//! Compaction over the host driver, as a user sees it: buffers follow their blocks.
//!
//! Invariant: what a slice shows does not depend on where its block is.

#![expect(unsafe_code, reason = "an element type with an alignment of its own is plain bytes")]

use std::sync::Arc;

use lowtide_gpu::ByteSize;
use lowtide_gpu::clock::ManualClock;
use lowtide_gpu::{ArenaConfig, CompactOptions, DeviceArena, HostDriver, Region};

const ALL: CompactOptions =
    CompactOptions { contiguous: Some(ByteSize::MAX), ..CompactOptions::new(Region::Dynamic) };

fn fixed(size: ByteSize) -> DeviceArena {
    let config = ArenaConfig { limit: size, reserve: size, ..ArenaConfig::new("fixed") };
    let (driver, clock) = (Arc::new(HostDriver::new()), Arc::new(ManualClock::new()));
    DeviceArena::open(driver, clock, config).expect("the host driver works everywhere")
}

/// A page with an alignment of its own.
#[derive(Clone, Copy)]
#[repr(C, align(4096))]
struct Page([u8; 4096]);

// SAFETY: all zeros are a valid array of bytes.
unsafe impl bytemuck::Zeroable for Page {}
// SAFETY: an array of bytes, as large as its alignment: no padding, and any bytes are valid.
unsafe impl bytemuck::Pod for Page {}

#[test]
fn elements_stay_aligned_though_their_block_was_another_ones_before() {
    let arena = fixed(ByteSize::mib(8));
    let bytes = |count| arena.alloc::<u8>(count, Region::Dynamic).expect("room");
    let at_the_end = bytes(4096);
    // Makes the size hot, and leaves an aligned block in the front.
    for _ in 0..8 {
        drop(bytes(4096));
    }
    let page = arena.alloc_from(&[Page([7; 4096])], Region::Dynamic).expect("room");
    drop(at_the_end);
    let small = bytes(256);
    assert!(arena.compact(ALL, |_| {}).is_ok());
    let lease = arena.enter().expect("awake");
    assert!(page.slice(&lease).expect("own lease")[0].0.iter().all(|&byte| byte == 7));
    drop(small);
}

#[test]
fn a_cache_that_fragmented_its_pool_takes_a_large_entry_after_a_compaction() {
    let arena = fixed(ByteSize::mib(16));
    let entry = |nth: u8| (nth, arena.alloc_from(&[nth; 1 << 20], Region::Dynamic).expect("room"));
    let mut entries: Vec<_> = (0..16).map(entry).collect();
    entries.retain(|(nth, _)| nth % 2 == 0);
    let large = || arena.alloc::<u8>(8 << 20, Region::Dynamic);
    assert!(large().is_err());
    let mut moved = ByteSize::ZERO;
    let done = arena.compact(ALL, |block| moved = moved.saturating_add(block.size));
    assert_eq!(done.expect("no error").moved, moved);
    let large = large().expect("room now");
    let lease = arena.enter().expect("awake");
    for (nth, entry) in &entries {
        assert!(entry.slice(&lease).expect("own lease").iter().all(|byte| byte == nth));
    }
    drop(large);
    arena.validate();
}

/// Users of kvcached report that instances share pages, and that an idle one keeps nearly every
/// page with the few blocks that it has: 8.9 GiB for a nominal 2.2 GiB.
#[test]
fn an_idle_owners_scattered_blocks_keep_their_granules_until_they_are_moved_together() {
    let config = ArenaConfig::new("shared");
    let (driver, clock) = (Arc::new(HostDriver::new()), Arc::new(ManualClock::new()));
    let arena = DeviceArena::open(driver, clock, config).expect("the host driver works everywhere");
    let (mut idle, mut others) = (Vec::new(), Vec::new());
    let seed = 0x9E37_79B9_7F4A_7C15_u64;
    println!("seed {seed:#x}");
    let mut chance = seed;
    while idle.len() < 400 {
        chance = chance.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let mark = u8::try_from(idle.len() % 251).expect("small");
        let block = arena.alloc_from(&[mark; 64 << 10], Region::Dynamic).expect("room");
        if chance >> 62 == 0 { idle.push((mark, block)) } else { others.push(block) }
    }
    drop(others);
    arena.purge().expect("the driver takes it");
    let pinned = arena.glance();
    assert!(pinned.committed.get() >= 3 * pinned.live.get(), "{pinned:?}");
    let options =
        CompactOptions { budget: ByteSize::mib(4), ..CompactOptions::new(Region::Dynamic) };
    let mut moved = ByteSize::ZERO;
    loop {
        let done = arena.compact(options, |_| {}).expect("copies");
        assert!(done.moved <= options.budget, "{done:?}");
        moved = moved.saturating_add(done.moved);
        if done.moves == 0 {
            break;
        }
    }
    assert!(moved <= pinned.live.saturating_add(pinned.live), "each block about once: {moved}");
    arena.purge().expect("the driver takes it");
    let after = arena.glance();
    assert_eq!(after.live, pinned.live);
    assert!(after.committed.get() * 10 <= after.live.get() * 13, "{after:?}");
    let lease = arena.enter().expect("awake");
    for (mark, block) in &idle {
        assert!(block.slice(&lease).expect("own lease").iter().all(|byte| byte == mark));
    }
    drop(lease);
    arena.validate();
}
