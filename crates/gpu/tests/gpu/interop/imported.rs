//! Memory of others: when it is released, how often, and what is no such memory.
#![expect(unsafe_code, reason = "memory is adopted, and arenas are told whose it is")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use lowtide_cuda_sim::{Pattern, SimDriver, SimOptions};
use lowtide_gpu::ByteSize;
use lowtide_gpu::clock::{Clock as _, ManualClock, Moment};
use lowtide_gpu::driver::{DeviceAddress, Driver as _};
use lowtide_gpu::{ArenaConfig, DeviceArena, DeviceError, HostDriver, Imported, Region};

use super::support::{Bed, MIB, Released};

/// Memory that is allocated beside the arena.
fn theirs(bed: &Bed, size: usize) -> DeviceAddress {
    DeviceAddress::new(bed.sim.raw().alloc(size as u64).expect("room"))
}

fn import(
    bed: &Bed,
    at: DeviceAddress,
    len: usize,
    release: impl FnOnce(DeviceAddress, ByteSize) + Send + 'static,
) -> Result<Imported<u8>, DeviceError> {
    // SAFETY: nobody reads or writes it from here, and the simulation looks at every address.
    unsafe { bed.arena.import(at, len, release) }
}

/// Frees it as others do, without a wait.
fn unmapping(sim: &Arc<SimDriver>) -> impl FnOnce(DeviceAddress, ByteSize) + Send + 'static {
    let sim = Arc::clone(sim);
    move |at, size| sim.raw().unmap(at.get(), size.get()).expect("mapped")
}

/// Memory that is mapped beside the arena: whoever unmaps it waits for nothing.
fn mapped(bed: &Bed) -> DeviceAddress {
    let (raw, size) = (bed.sim.raw(), 2 * MIB as u64);
    let at = raw.address_reserve(size, 0).expect("addresses");
    let handle = raw.create(size).expect("memory");
    raw.map(at, size, 0, handle).expect("bare");
    raw.release(handle).expect("mapped");
    raw.set_access(at, size, true).expect("mapped");
    DeviceAddress::new(at)
}

/// Breaches when adopted memory is dropped while a foreign stream works on it.
fn dropped_at_work() -> u64 {
    let bed = Bed::new();
    let at = mapped(&bed);
    let imported = import(&bed, at, 2 * MIB, unmapping(&bed.sim)).expect("theirs");
    bed.sim.fill(bed.foreign, at, imported.bytes(), Pattern::new(1)).expect("queued");
    drop(imported);
    assert_eq!(bed.sim.unsafe_unmaps(), 0, "a drop releases nothing");
    bed.arena.purge().expect("waited");
    assert_eq!(bed.arena.snapshot().imported_count, 0);
    bed.sim.unsafe_unmaps()
}

#[test]
fn adopted_memory_is_released_only_after_all_work_of_the_context() {
    assert_eq!(dropped_at_work(), 0);
}

#[test]
fn it_is_released_once_with_its_address_and_bytes_by_whoever_looks_next() {
    let looks: [fn(&Bed); 4] = [
        |bed| assert!(bed.arena.purge().is_ok()),
        |bed| assert!(bed.arena.trim(ByteSize::MAX).is_ok()),
        |bed| assert!(bed.arena.shrink().is_ok()),
        |bed| bed.arena.close().expect("looked"),
    ];
    for look in looks {
        let (bed, released) = (Bed::new(), Released::default());
        let at = theirs(&bed, 3 * MIB);
        let imported = import(&bed, at, 3 * MIB, released.note()).expect("theirs");
        let (calls, next) = (bed.sim.calls_total(), bed.arena.next_decay());
        assert_eq!(next, Moment::NEVER);
        drop(imported);
        assert_eq!(bed.sim.calls_total(), calls, "a drop makes no call");
        assert!(released.all().is_empty() && bed.arena.next_decay() < Moment::NEVER);
        bed.arena.decay(bed.clock.now()).expect("looked");
        assert!(released.all().is_empty(), "a decay waits for nothing");
        look(&bed);
        assert_eq!(released.all(), [(at, ByteSize::mib(3))]);
        bed.arena.validate();
        let _ = bed.arena.purge();
        assert_eq!(released.all().len(), 1);
        assert_eq!(bed.arena.next_decay(), Moment::NEVER);
    }
}

#[test]
fn it_is_in_no_figure_of_the_arena_but_its_own() {
    let (bed, released) = (Bed::new(), Released::default());
    let before = bed.arena.snapshot();
    let imported = import(&bed, theirs(&bed, MIB), MIB, released.note()).expect("theirs");
    let snapshot = bed.arena.snapshot();
    assert_eq!((snapshot.imported, snapshot.imported_count), (ByteSize::mib(1), 1));
    assert_eq!((snapshot.committed, snapshot.live), (before.committed, before.live));
    assert_eq!(snapshot.allocs_total, 0);
    drop(imported);
    assert_eq!(bed.arena.snapshot().imported_count, 1, "it waits to be released");
    bed.arena.purge().expect("looked");
    let snapshot = bed.arena.snapshot();
    assert_eq!((snapshot.imported, snapshot.imported_count), (ByteSize::ZERO, 0));
    assert_eq!((snapshot.releases_total, snapshot.release_panics_total), (1, 0));
}

#[test]
fn it_can_be_released_now() {
    let bed = Bed::new();
    let at = mapped(&bed);
    let imported = import(&bed, at, 2 * MIB, unmapping(&bed.sim)).expect("theirs");
    bed.sim.fill(bed.foreign, at, imported.bytes(), Pattern::new(1)).expect("queued");
    imported.release().expect("done");
    assert_eq!((bed.sim.unsafe_unmaps(), bed.arena.snapshot().imported_count), (0, 0));
    assert_eq!(bed.faults(), 0);
}

#[test]
fn while_the_device_cannot_be_waited_for_it_is_not_released() {
    use lowtide_cuda_sim::{Call, SimError};
    let (bed, released) = (Bed::new(), Released::default());
    let imported = import(&bed, theirs(&bed, MIB), MIB, released.note()).expect("theirs");
    bed.sim.fail_always(Call::Synchronize, Some(SimError::Unknown));
    assert!(matches!(imported.release(), Err(DeviceError::Driver(_))));
    assert!(bed.arena.purge().is_err() && released.all().is_empty());
    bed.sim.forget_failures();
    bed.arena.purge().expect("waited");
    assert_eq!(released.all().len(), 1);
}

#[test]
fn a_release_that_panics_is_counted_and_the_next_is_called_all_the_same() {
    let (bed, released) = (Bed::new(), Released::default());
    let panics = |_, _| panic!("planted");
    let one = import(&bed, theirs(&bed, MIB), MIB, panics).expect("theirs");
    let two = import(&bed, theirs(&bed, MIB), MIB, released.note()).expect("theirs");
    drop((one, two));
    bed.arena.purge().expect("waited");
    let snapshot = bed.arena.snapshot();
    assert_eq!((snapshot.releases_total, snapshot.release_panics_total), (2, 1));
    assert_eq!((released.all().len(), snapshot.imported_count), (1, 0));
}

#[test]
fn a_release_may_use_the_arena_and_adopt_again() {
    let (bed, released) = (Bed::new(), Released::default());
    let at = theirs(&bed, MIB);
    let (arena, second) = (bed.arena.clone(), released.clone());
    let again = move |at: DeviceAddress, size: ByteSize| {
        drop(arena.alloc::<u8>(MIB, Region::Dynamic).expect("no lock is held"));
        // SAFETY: as above: the simulation looks.
        let imported = unsafe { arena.import::<u8>(at, MIB, second.note()) }.expect("released");
        assert_eq!(imported.bytes(), size);
    };
    drop(import(&bed, at, MIB, again).expect("theirs"));
    bed.arena.purge().expect("waited");
    assert!(released.all().is_empty(), "one for each look that found it");
    bed.arena.purge().expect("waited");
    assert_eq!(released.all(), [(at, ByteSize::mib(1))]);
}

#[test]
fn what_cannot_be_adopted_is_named_and_its_release_not_called() {
    let (bed, released) = (Bed::new(), Released::default());
    let at = theirs(&bed, MIB);
    let own = bed.arena.alloc_raw(ByteSize::mib(1), ByteSize::new(1), Region::Dynamic);
    let own = own.expect("room").at;
    let kept = import(&bed, at, MIB / 2, released.note()).expect("theirs");
    let past = |by: u64| DeviceAddress::new(at.get() + by);
    let cases = [
        (DeviceAddress::new(0), 8, "starts at address 0"),
        (at, 0, "no bytes"),
        (DeviceAddress::new(u64::MAX - 4095), 8192, "last address"),
        (at, usize::MAX, "last address"),
        (own, 4096, "arena's own"),
        (at, MIB, "is not released"),
        (past(MIB as u64 / 2 - 1), 8, "is not released"),
    ];
    for (at, len, text) in cases {
        let error = import(&bed, at, len, released.note()).expect_err(text);
        let DeviceError::Import { at: named, ref arena, ref reason, .. } = error else {
            panic!("{error}")
        };
        assert_eq!((named, arena.as_str()), (at, "border"));
        assert!(reason.contains(text), "{error}");
    }
    // SAFETY: it is refused.
    let odd = unsafe { bed.arena.import::<u32>(past(2), 1, released.note()) };
    let odd = odd.expect_err("misaligned").to_string();
    assert!(odd.contains("expected an address that is a multiple of 4 B"), "{odd}");
    for nowhere in [past(64 * MIB as u64), DeviceAddress::new(4096)] {
        let error = import(&bed, nowhere, 16, released.note()).expect_err("nothing is there");
        assert!(matches!(error, DeviceError::Import { .. }), "{error}");
    }
    let rest = import(&bed, past(MIB as u64 / 2), MIB / 2, released.note()).expect("beside it");
    assert!(released.all().is_empty() && bed.arena.snapshot().imported_count == 2);
    let error = bed.arena.close().expect_err("a block by address, and two that are held");
    assert!(matches!(error, DeviceError::LiveBlocks { .. }), "{error}");
    bed.arena.reset().expect("freed");
    let error = bed.arena.close().expect_err("two are held");
    assert!(matches!(error, DeviceError::ImportedHeld { count: 2, .. }), "{error}");
    drop((kept, rest));
    bed.arena.close().expect("they are released");
    assert_eq!(released.all().len(), 2);
    let error = import(&bed, at, 8, released.note()).expect_err("closed");
    assert!(matches!(error, DeviceError::Closed { .. }), "{error}");
}

#[test]
fn a_lease_of_another_arena_opens_nothing() {
    let (bed, other) = (Bed::new(), Bed::new());
    let imported = import(&bed, theirs(&bed, MIB), MIB, |_, _| {}).expect("theirs");
    let lease = other.arena.enter().expect("awake");
    assert!(matches!(imported.address(&lease), Err(DeviceError::ForeignLease { .. })));
    let lease = bed.arena.enter().expect("awake");
    assert!(imported.address(&lease).is_ok());
    assert!(matches!(imported.slice(&lease), Err(DeviceError::Unsupported { .. })));
}

/// The last holder of an arena releases what the device is done with, and leaves the rest.
#[test]
fn the_end_of_an_arena_calls_no_release_that_work_may_be_before() {
    let released = Released::default();
    let bed = Bed::new();
    let (done, at_work) = (theirs(&bed, MIB), theirs(&bed, MIB));
    let dropped = Arc::new(AtomicU64::new(0));
    struct Says(Arc<AtomicU64>);
    impl Drop for Says {
        fn drop(&mut self) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }
    drop(import(&bed, done, MIB, released.note()).expect("theirs"));
    bed.arena.purge().expect("looked");
    assert_eq!(released.all(), [(done, ByteSize::mib(1))]);
    let (says, second) = (Says(Arc::clone(&dropped)), released.clone());
    let late = import(&bed, at_work, MIB, move |at, size| {
        let _says = &says;
        second.note()(at, size);
    });
    let Bed { arena, sim, .. } = bed;
    drop(arena);
    drop(late.expect("theirs"));
    assert_eq!((released.all().len(), dropped.load(Ordering::Relaxed)), (1, 1));
    assert!(sim.leaks().is_empty() || sim.leaks().streams == 1, "{:?}", sim.leaks());
}

#[test]
fn on_the_host_it_is_a_slice_and_released_by_the_last_holder_too() {
    let arena = || {
        let (driver, clock) = (Arc::new(HostDriver::new()), Arc::new(ManualClock::new()));
        DeviceArena::open(driver, clock, ArenaConfig::new("host")).expect("opens")
    };
    for decays in [true, false] {
        let (arena, released) = (arena(), Released::default());
        let mut theirs = vec![1_u32, 2, 3];
        let at = DeviceAddress::new(theirs.as_mut_ptr().expose_provenance() as u64);
        // SAFETY: three numbers, initialised, which stay where they are until after the release,
        // and which nobody else uses.
        let mut numbers = unsafe { arena.import::<u32>(at, 3, released.note()) }.expect("theirs");
        let lease = arena.enter().expect("awake");
        numbers.slice_mut(&lease).expect("host memory")[1] = 20;
        assert_eq!(numbers.slice(&lease).expect("host memory"), [1, 20, 3]);
        drop((lease, numbers));
        if decays {
            arena.decay(ManualClock::new().now()).expect("looked");
        }
        drop(arena);
        assert_eq!(released.all(), [(at, ByteSize::new(12))]);
        assert_eq!(theirs, [1, 20, 3]);
    }
}

#[test]
fn the_simulation_knows_its_own_memory() {
    let sim = SimDriver::new(SimOptions::default());
    let size = ByteSize::mib(1);
    let at = DeviceAddress::new(sim.raw().alloc(size.get()).expect("room"));
    assert_eq!(sim.foreign_memory(at, size), Ok(None));
    assert!(matches!(sim.foreign_memory(at, ByteSize::gib(1)), Ok(Some(_))));
    sim.raw().free(at.get()).expect("freed");
    assert!(matches!(sim.foreign_memory(at, size), Ok(Some(_))));
}
