//! Memory that scattered live blocks keep committed: an idle instance of a cache server pinned 8.9
//! GiB for 2.2 GiB of live blocks, because one block in four was left of each 2 MiB page (kvcached
//! issue 359).
//!
//! The same pattern here, a sixteenth of the size: several owners fill the cache by turns, then all
//! but one go. The ratio is a count of bytes and does not depend on the machine.

use lowtide_gpu::ByteSize;
use lowtide_gpu::{Buffer, CompactOptions, DeviceArena, Region};

use super::{Chance, on_host};

const BLOCK: usize = 64 << 10;
/// One owner's blocks: 141 MiB, a sixteenth of 2.2 GiB.
const OWNED: usize = 2_250;
const OWNERS: usize = 4;
/// The bytes that one call to compact may move.
const BUDGET: ByteSize = ByteSize::mib(16);

fn committed_per_live(arena: &DeviceArena) -> f64 {
    arena.purge().expect("no error");
    let glance = arena.glance();
    glance.committed.as_f64() / glance.live.as_f64()
}

/// Owners allocate by turns of chance; what the first has is left.
fn left(arena: &DeviceArena, seed: u64, stays_in: Region) -> Vec<Buffer<u8>> {
    let mut chance = Chance(seed);
    let (mut stays, mut goes) = (Vec::new(), Vec::new());
    while stays.len() < OWNED {
        let owner = chance.index(OWNERS);
        let region = if owner == 0 { stays_in } else { Region::Dynamic };
        let block = arena.alloc::<u8>(BLOCK, region).expect("room");
        if owner == 0 { &mut stays } else { &mut goes }.push(block);
    }
    let full = arena.glance();
    println!("seed {seed}: {} live, {} committed", full.live, full.committed);
    stays
}

#[test]
fn blocks_that_stay_in_a_region_of_their_own_keep_what_they_need() {
    for seed in [1, 42, 1234] {
        let arena = on_host(ByteSize::MAX);
        let stays = left(&arena, seed, Region::Stable);
        let ratio = committed_per_live(&arena);
        println!("seed {seed}: committed / live {ratio:.3} after a purge");
        assert!(ratio <= 1.25, "{ratio}");
        drop(stays);
    }
}

#[test]
fn blocks_that_stay_among_those_that_go_keep_what_they_need_after_a_budgeted_compaction() {
    for seed in [1, 42, 1234] {
        let arena = on_host(ByteSize::MAX);
        let stays = left(&arena, seed, Region::Dynamic);
        let scattered = committed_per_live(&arena);
        let options = CompactOptions { budget: BUDGET, ..CompactOptions::new(Region::Dynamic) };
        let (mut moved, mut calls) = (ByteSize::ZERO, 0);
        loop {
            let done = arena.compact(options, |_| {}).expect("no error");
            if done.moves == 0 {
                break;
            }
            assert!(done.moved <= BUDGET, "{done:?}");
            moved = moved.saturating_add(done.moved);
            calls += 1;
        }
        let ratio = committed_per_live(&arena);
        println!(
            "seed {seed}: committed / live {scattered:.3} after a purge, {ratio:.3} after {calls} \
             compactions that moved {moved}"
        );
        assert!(scattered > 3.0, "too tame: {scattered}");
        assert!(ratio <= 1.3, "{ratio}");
        arena.validate();
        drop(stays);
    }
}
