//! The bugs that others had with sleep and wake, one by one: here each is a claim.

use std::sync::Arc;
use std::time::Duration;

use lowtide_cuda_sim::{
    Call, DriverCosts, Order, Outcome, Pattern, SimDriver, SimError, SimOptions,
};
use lowtide_gpu::ByteSize;
use lowtide_gpu::clock::Clock as _;
use lowtide_gpu::driver::Driver as _;
use lowtide_gpu::{Buffer, Contents, DeviceError, Region, SleepOptions, SleepState};

use super::support::{Bed, MIB, at};

const NOW: SleepOptions =
    SleepOptions { drain: Duration::ZERO, stable: Contents::Keep, dynamic: Contents::Keep };

/// A bed whose driver allocates each granule by itself.
fn small_handles() -> Bed {
    Bed::with(Order::Lazy, |config| config.handle_max = ByteSize::ZERO)
}

/// vLLM #43020 and #45615 (Xid 31), TensorRT-LLM #11641, cuda-python #2886: memory was unmapped
/// while kernels ran on it.
#[test]
fn vllm_43020_no_memory_leaves_under_a_kernel_that_runs() {
    let bed = Bed::new(Order::Lazy);
    let (kept, lane) = (bed.marked(MIB, Region::Stable, 1), bed.lane());
    let lease = lane.enter().expect("a lease");
    bed.mark(&kept, &lease, 2);
    let late = bed.sim.unfinished();
    assert!(late > 0, "the kernel has not run");
    drop(lease);
    bed.arena.sleep(NOW).expect("asleep");
    assert_eq!(bed.sim.unsafe_unmaps(), 0);
    bed.assert_marked(&kept, 2);
    drop((kept, lane));
    bed.end();
}

/// vLLM #28714: a sleep that came in the middle of a request took its memory away.
#[test]
fn vllm_28714_a_sleep_in_the_middle_of_a_request_is_refused() {
    let bed = Bed::new(Order::Lazy);
    let kept = bed.marked(MIB / 16, Region::Stable, 1);
    let request = bed.arena.enter().expect("a lease");
    let place = at(&kept, &request);
    assert!(matches!(bed.arena.sleep(NOW), Err(DeviceError::Leased { .. })));
    let check = bed.sim.check(bed.stream, place, kept.bytes(), Pattern::new(1)).expect("queued");
    drop(request);
    bed.arena.sleep(NOW).expect("asleep");
    assert_eq!(bed.sim.outcome(check), Outcome::Held);
    drop(kept);
    bed.end();
}

/// vLLM #13941 and #34600: a wake without enough memory failed half way, and what it had got was
/// lost.
#[test]
fn vllm_34600_a_wake_that_fails_half_way_gives_back_what_it_has_got() {
    let bed = small_handles();
    let kept = [1, 2].map(|mark| bed.marked(MIB, Region::ALL[mark - 1], mark as u64));
    bed.arena.sleep(NOW).expect("asleep");
    let free = bed.sim.headroom().expect("known");
    bed.sim.fail_nth(Some(Call::Create), 20, SimError::OutOfMemory);
    assert!(bed.arena.wake().expect_err("half way").is_out_of_memory());
    assert_eq!(bed.sim.headroom(), Ok(free));
    assert_eq!(bed.arena.state(), SleepState::Asleep);
    bed.assert_all_marked(1, &kept);
    drop(kept);
    bed.end();
}

/// Ours: what had not come back was told as committed.
#[test]
fn a_wake_that_finds_no_room_says_what_the_arena_holds() {
    let bed = small_handles();
    let kept = [1, 2].map(|mark| bed.marked(MIB, Region::ALL[mark - 1], mark as u64));
    bed.arena.sleep(NOW).expect("asleep");
    for (nth, held) in [(0, ByteSize::ZERO), (16, ByteSize::mib(1))] {
        bed.sim.fail_nth(Some(Call::Create), nth, SimError::OutOfMemory);
        let refused = bed.arena.alloc::<u8>(1, Region::Stable).expect_err("no room to wake");
        let DeviceError::OutOfMemory { requested, live, committed, .. } = refused else {
            panic!("{refused}");
        };
        assert_eq!((requested, live), (ByteSize::mib(1), ByteSize::mib(2)), "of the wake");
        assert_eq!(committed, held);
    }
    bed.arena.wake().expect("awake");
    bed.assert_all_marked(1, &kept);
    drop(kept);
    bed.end();
}

/// Ours: a wake that failed left memory committed whose contents the driver had lost, and the next
/// wake did not fill it again.
#[test]
fn memory_that_a_failed_wake_could_not_release_is_filled_by_the_next() {
    let bed = small_handles();
    let kept = [1, 2].map(|mark| bed.marked(MIB, Region::ALL[mark - 1], mark as u64));
    bed.arena.sleep(NOW).expect("asleep");
    bed.sim.fail_nth(Some(Call::Create), 16, SimError::OutOfMemory);
    bed.sim.fail_nth(Some(Call::Unmap), 3, SimError::InvalidValue);
    bed.arena.wake().expect_err("the second region finds no memory");
    bed.arena.wake().expect("awake");
    bed.assert_all_marked(1, &kept);
    drop(kept);
    bed.end();
}

/// vLLM #36651: without a state for each piece a second sleep released twice, and an old error was
/// told for a new call.
#[test]
fn vllm_36651_a_second_sleep_releases_nothing_and_an_old_error_is_not_told_again() {
    let bed = small_handles();
    let kept = bed.marked(MIB, Region::Stable, 1);
    bed.arena.sleep(NOW).expect("asleep");
    let released = bed.sim.calls(Call::Unmap);
    assert!(matches!(bed.arena.sleep(NOW), Err(DeviceError::State { .. })));
    assert_eq!(bed.sim.calls(Call::Unmap), released);
    bed.sim.fail_nth(Some(Call::Create), 0, SimError::OutOfMemory);
    assert!(bed.arena.wake().is_err());
    drop(bed.arena.enter().expect("the error was of another wake"));
    bed.assert_marked(&kept, 1);
    drop(kept);
    bed.end();
}

/// vLLM #48680: each small piece took a mapping of 2 MiB of its own, and small cards ran out.
#[test]
fn vllm_48680_small_buffers_share_granules_asleep_as_well() {
    let options = SimOptions { costs: DriverCosts::zero(), ..SimOptions::default() };
    let bed = Bed::over(Arc::new(SimDriver::new(options)), |_| {});
    let small: Vec<_> = (0..1_000).map(|nth| bed.marked(4096, Region::Stable, nth)).collect();
    let slept = bed.arena.sleep(NOW).expect("asleep");
    assert!(slept.copied <= ByteSize::mib(6), "{slept:?}");
    assert!(bed.arena.wake().expect("awake").memory <= ByteSize::mib(6));
    bed.assert_all_marked(0, &small);
    drop(small);
    bed.end();
}

/// `NeMo-RL` #2619: what was left after a sleep grew from step to step, 4 to 25 GiB.
#[test]
fn nemo_rl_2619_nothing_grows_over_a_hundred_cycles() {
    let bed = Bed::new(Order::Random { seed: 5 });
    let kept = bed.marked(MIB, Region::Stable, 1);
    let mut first = None;
    for step in 0..100_usize {
        let activations: Vec<Buffer<u8>> = (0..8)
            .map(|nth| bed.arena.alloc(1 + step * 1000 + nth * 20_000, Region::Dynamic))
            .collect::<Result<_, _>>()
            .expect("room");
        bed.assert_marked(&kept, 1);
        drop(activations);
        bed.arena.sleep(NOW).expect("asleep");
        let snapshot = bed.arena.snapshot();
        assert_eq!(snapshot.committed, ByteSize::ZERO);
        let (leaks, metadata) = (bed.sim.leaks(), snapshot.metadata);
        let (before, books) = *first.get_or_insert((leaks, metadata));
        assert_eq!(leaks, before, "step {step}");
        assert!(metadata.get() <= books.get() + (16 << 10), "step {step}: {books} to {metadata}");
        bed.arena.wake().expect("awake");
    }
    drop(kept);
    bed.end();
}

/// `torch_memory_saver` #71: weights were not what they had been.
#[test]
fn torch_memory_saver_71_weights_are_what_they_were_after_many_cycles() {
    let bed = Bed::new(Order::Random { seed: 9 });
    let weights: Vec<_> = (0..30_u64)
        .map(|mark| {
            let size = 1 + usize::try_from(mark * mark * 977).expect("small");
            bed.marked(size, Region::Stable, mark)
        })
        .collect();
    for _ in 0..20 {
        bed.arena.sleep(NOW).expect("asleep");
        bed.arena.wake().expect("awake");
    }
    bed.assert_all_marked(0, &weights);
    drop(weights);
    bed.end();
}

/// `torch_memory_saver` #88: buffers that NCCL knows by address must not lose their memory.
#[test]
fn torch_memory_saver_88_registered_buffers_stay() {
    let bed = Bed::new(Order::Lazy);
    let mut registered = bed.marked(MIB / 16, Region::Stable, 3);
    registered.set_contents(Some(Contents::Stay)).expect("here");
    let place = at(&registered, &bed.arena.enter().expect("a lease"));
    bed.arena.sleep(NOW).expect("asleep");
    // NCCL may come to it at any time, and holds no lease.
    let size = registered.bytes();
    let check = bed.sim.check(bed.stream, place, size, Pattern::new(3)).expect("queued");
    bed.sim.stream_synchronize(bed.stream).expect("done");
    assert_eq!(bed.sim.outcome(check), Outcome::Held);
    drop(registered);
    bed.end();
}

/// `torch_memory_saver` #90: the host kept the copies after the memory was back on the device.
#[test]
fn torch_memory_saver_90_the_host_has_its_memory_back_after_the_wake() {
    let bed = Bed::new(Order::Lazy);
    let kept = bed.marked(8 * MIB, Region::Stable, 1);
    for _ in 0..3 {
        bed.arena.sleep(NOW).expect("asleep");
        assert_eq!(bed.arena.snapshot().offloaded, ByteSize::mib(8));
        assert_eq!(bed.sim.leaks().host_stores, 1);
        bed.arena.wake().expect("awake");
        let soon = bed.sim.clock().now() + Duration::from_millis(100);
        assert_eq!(bed.arena.next_decay(), soon, "what stays is limited to nothing");
        bed.sim.clock().advance(Duration::from_millis(100));
        bed.arena.decay(soon).expect("no error");
        assert_eq!(bed.arena.snapshot().offloaded, ByteSize::ZERO);
        assert_eq!(bed.sim.leaks().host_stores, 0);
    }
    drop(kept);
    bed.end();
}

/// mistral.rs #2113: after an unload most of the device's memory was still held.
#[test]
fn mistral_rs_2113_nothing_is_held_after_an_unload() {
    let bed = Bed::new(Order::Lazy);
    let free = bed.sim.headroom().expect("known");
    let weights = bed.marked(64 * MIB, Region::Stable, 1);
    drop((bed.marked(16 * MIB, Region::Dynamic, 2), weights));
    bed.arena.sleep(NOW).expect("asleep");
    assert_eq!(bed.sim.headroom(), Ok(free));
    bed.end();
}
