//! A fault at each driver call of a mix of operations: nothing is lost, counted twice or left.
#![expect(unsafe_code, reason = "raw blocks are of streams that the caller vouches for")]

use std::time::Duration;

use lowtide_cuda_sim::Order;
use lowtide_gpu::ByteSize;
use lowtide_gpu::driver::{Driver as _, StreamHandle};
use lowtide_gpu::plan::{Demand, Plan, Planner, Problem};
use lowtide_gpu::{Buffer, CompactOptions, Contents, DeviceError, Region, SleepOptions};

use super::faults::{LOST, PASSING};
use super::support::{Bed, MIB};

/// The buffers that stay, with their marks.
struct Kept([Buffer<u8>; 3]);

fn plan(bed: &Bed, sizes: &[usize]) -> Plan {
    let mut problem = Problem::new();
    for (nth, &size) in (0..).zip(sizes) {
        problem.add(Demand::new("demand", ByteSize::of(size), nth..nth + 2)).expect("valid");
    }
    Planner::new(&bed.sim.clock()).plan(&problem).expect("a plan")
}

fn prepare() -> (Bed, Kept, [StreamHandle; 2]) {
    let bed = Bed::with(Order::Lazy, |config| config.limit = ByteSize::mib(6));
    let gap = bed.marked(MIB / 4, Region::Dynamic, 9);
    let kept = [1, 2, 3].map(|mark| bed.marked(MIB / 4, Region::Dynamic, mark));
    let streams = [(); 2].map(|()| bed.sim.stream_create().expect("a stream"));
    drop(gap);
    (bed, Kept(kept), streams)
}

/// Does what an engine does; whatever fails, the identities hold between any two operations.
fn mix(bed: &Bed, Kept(kept): &mut Kept, streams: [StreamHandle; 2]) -> Vec<DeviceError> {
    let arena = &bed.arena;
    let mut errors = Vec::new();
    macro_rules! act {
        ($outcome:expr) => {{
            let outcome: Result<_, DeviceError> = $outcome;
            arena.validate();
            outcome.map_err(|error| errors.push(error)).ok()
        }};
    }
    let [one, other] = streams;
    // SAFETY: the simulation looks whether a stream is there.
    let lanes = streams.map(|stream| unsafe { arena.lane(stream) });
    let lanes = lanes.map(|lane| act!(lane));
    let size = ByteSize::kib(300);
    // SAFETY: as above.
    let raw = unsafe { arena.alloc_raw_on(one, size, ByteSize::new(256), Region::Dynamic) };
    let raw = act!(raw);
    if let [Some(first), Some(second)] = &lanes {
        let used = act!(first.alloc::<u8>(MIB, Region::Dynamic));
        if let Some(mut used) = used {
            act!(used.record_use(second));
        }
        let reused = act!(second.alloc::<u8>(MIB, Region::Dynamic));
        act!(first.end_run());
        drop(reused);
    }
    arena.validate();
    if let Some(block) = raw {
        // SAFETY: as above.
        let used = unsafe { arena.record_use_on(block.at, other) };
        act!(used);
        // SAFETY: as above.
        let freed = unsafe { arena.free_on(block.at, one) };
        if act!(freed).is_none() {
            act!(arena.free(block.at));
        }
    }
    act!(kept[0].resize(MIB));
    let large = act!(arena.alloc::<u8>(4 * MIB, Region::Stable));
    drop(large);
    let compacted = arena.compact(CompactOptions::new(Region::Dynamic), |_| {});
    act!(compacted.map_err(|failed| failed.error));
    let options =
        SleepOptions { drain: Duration::ZERO, stable: Contents::Keep, dynamic: Contents::Keep };
    act!(arena.sleep(options));
    if let Some(mut memory) = act!(arena.reserve_plan(&plan(bed, &[MIB, MIB]), Region::Stable)) {
        act!(memory.refit(&plan(bed, &[2 * MIB])));
        act!(memory.shrink());
    }
    act!(kept[0].resize(MIB / 4));
    act!(arena.trim(ByteSize::mib(1)));
    // SAFETY: as above.
    let ended = unsafe { arena.end_stream(other) };
    act!(ended);
    drop(lanes);
    act!(arena.wait_for_pending());
    act!(arena.purge());
    errors
}

#[test]
fn a_fault_at_any_call_of_a_mix_of_operations_loses_nothing() {
    let mut failures = 0;
    for nth in 0.. {
        let error = PASSING[nth % PASSING.len()];
        let nth = nth as u64;
        let (bed, mut kept, streams) = prepare();
        let calls = bed.sim.calls_total();
        bed.sim.fail_nth(None, nth, error);
        let errors = mix(&bed, &mut kept, streams);
        failures += errors.len();
        let is_past = bed.sim.calls_total() - calls <= nth;
        bed.sim.forget_failures();
        assert!(!is_past || errors.is_empty(), "without a fault: {errors:?}");
        bed.assert_all_marked(1, &kept.0);
        drop(kept);
        bed.arena.wait_for_pending().expect("no fault");
        bed.arena.purge().expect("no fault");
        let snapshot = bed.arena.snapshot();
        let left = (snapshot.live, snapshot.committed, snapshot.offloaded);
        assert_eq!(left, Default::default(), "{error:?} at {nth}: {errors:?}");
        for stream in streams {
            bed.sim.stream_destroy(stream).expect("a stream");
        }
        bed.end();
        if is_past {
            println!("{nth} calls");
            break;
        }
    }
    assert!(failures > 100, "{failures} failures");
}

#[test]
fn a_context_that_is_lost_at_any_call_of_a_mix_ends_in_errors() {
    for nth in 0.. {
        let error = LOST[nth % LOST.len()];
        let nth = nth as u64;
        let (bed, mut kept, streams) = prepare();
        let calls = bed.sim.calls_total();
        bed.sim.fail_nth(None, nth, error);
        let errors = mix(&bed, &mut kept, streams);
        let is_past = bed.sim.calls_total() - calls <= nth;
        assert_eq!(errors.is_empty(), is_past, "{error:?} at {nth}: {errors:?}");
        drop(kept);
        bed.arena.validate();
        let Bed { sim, arena, .. } = bed;
        drop(arena);
        sim.validate();
        assert_eq!(sim.unsafe_unmaps(), 0);
        assert!(sim.faults().is_empty(), "{:?}", sim.faults());
        if is_past {
            break;
        }
    }
}
