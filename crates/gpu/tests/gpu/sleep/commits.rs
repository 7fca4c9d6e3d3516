//! A fault at each driver call of a commit and of a compaction, with each kind of error, beside
//! streams: books right, contents whole, nothing left behind.

use lowtide_cuda_sim::{Order, SimError};
use lowtide_gpu::ByteSize;
use lowtide_gpu::{Buffer, CompactOptions, Region};

use super::faults::{LOST, PASSING};
use super::support::{Bed, MIB};

const DYNAMIC: Region = Region::Dynamic;

/// Runs `act` with a fault at its first call, its second, and so on, until it makes no more; after
/// each `check` looks at what is left.
fn at_each_call<T>(
    errors: &[SimError],
    prepare: impl Fn() -> T,
    bed: impl Fn(&T) -> &Bed,
    act: impl Fn(&T) -> bool,
    check: impl Fn(T, bool),
) {
    for &error in errors {
        let mut faults = 0;
        for nth in 0.. {
            let scene = prepare();
            let sim = &bed(&scene).sim;
            let calls = sim.calls_total();
            sim.fail_nth(None, nth, error);
            let done = act(&scene);
            let made = bed(&scene).sim.calls_total() - calls;
            bed(&scene).sim.forget_failures();
            bed(&scene).arena.validate();
            let is_past = made <= nth;
            assert!(done || !is_past, "{error:?} at {nth}: it failed without a fault");
            check(scene, done);
            faults += 1;
            if is_past {
                break;
            }
        }
        assert!(faults > 3, "{error:?}: no more than {faults} calls");
    }
}

/// An arena with one live block, in a limit that makes a commit give idle memory back first, and
/// take what another stream may still work on.
fn tight() -> (Bed, Buffer<u8>) {
    let bed = Bed::with(Order::Lazy, |config| config.limit = ByteSize::mib(4));
    let kept = bed.marked(MIB, DYNAMIC, 1);
    drop(bed.marked(MIB, Region::Stable, 2));
    let lane = bed.lane();
    let pending = lane.alloc::<u8>(MIB, DYNAMIC).expect("room");
    bed.mark(&pending, &lane.enter().expect("a lease"), 3);
    drop((pending, lane));
    (bed, kept)
}

#[test]
fn a_fault_at_any_call_of_a_commit_leaves_the_arena_as_it_was() {
    let allocates = |(bed, _): &(Bed, Buffer<u8>)| {
        let block = bed.arena.alloc::<u8>(3 * MIB, DYNAMIC);
        block.is_ok()
    };
    at_each_call(
        &PASSING,
        tight,
        |(bed, _)| bed,
        allocates,
        |(bed, kept), _| {
            let again = bed.arena.alloc::<u8>(3 * MIB, DYNAMIC).expect("it works on");
            bed.assert_marked(&kept, 1);
            drop((kept, again));
            bed.end();
        },
    );
}

/// Blocks of which every other one is gone: there is something to move.
fn scattered(count: u64, size: usize) -> (Bed, Vec<Buffer<u8>>) {
    let bed = Bed::new(Order::Lazy);
    let blocks = (0..count).map(|mark| (mark, bed.marked(size, DYNAMIC, mark)));
    let mut blocks: Vec<_> = blocks.collect();
    blocks.retain(|(mark, _)| mark % 2 == 1);
    let blocks = blocks.into_iter().map(|(_, block)| block).collect();
    (bed, blocks)
}

#[test]
fn a_fault_at_any_call_of_a_compaction_leaves_every_block_whole() {
    // For a free span that large blocks find, large blocks move.
    for (contiguous, count, size) in [(None, 12, 48 << 10), (Some(ByteSize::MAX), 4, MIB)] {
        let scattered = || scattered(count, size);
        let compacts = |(bed, _): &(Bed, Vec<Buffer<u8>>)| {
            // What was freed is worked on still: that is waited for as well.
            let purged = bed.arena.purge();
            let options = CompactOptions { contiguous, ..CompactOptions::new(DYNAMIC) };
            let compacted = bed.arena.compact(options, |_| {});
            purged.is_ok() && compacted.is_ok()
        };
        at_each_call(
            &PASSING,
            scattered,
            |(bed, _)| bed,
            compacts,
            |(bed, blocks), _| {
                for (nth, block) in (0..).zip(&blocks) {
                    bed.assert_marked(block, 2 * nth + 1);
                }
                drop(blocks);
                bed.end();
            },
        );
    }
}

#[test]
fn a_context_that_is_lost_in_a_commit_or_a_compaction_is_an_error_and_no_more() {
    let all = |(bed, _): &(Bed, Vec<Buffer<u8>>)| {
        let purged = bed.arena.purge();
        let compacted = bed.arena.compact(CompactOptions::new(DYNAMIC), |_| {});
        let block = bed.arena.alloc::<u8>(MIB, DYNAMIC);
        purged.is_ok() && compacted.is_ok() && block.is_ok()
    };
    at_each_call(
        &LOST,
        || scattered(12, 48 << 10),
        |(bed, _)| bed,
        all,
        |(bed, blocks), done| {
            if !done {
                assert!(bed.arena.alloc::<u8>(64 * MIB, DYNAMIC).is_err(), "the context is lost");
            }
            drop(blocks);
            let Bed { sim, arena, .. } = bed;
            drop(arena);
            assert_eq!(sim.unsafe_unmaps(), 0);
        },
    );
}
