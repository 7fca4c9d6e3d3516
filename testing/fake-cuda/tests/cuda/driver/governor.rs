//! The pool governor, over unmodified cudarc: `stream.alloc` and a drop, and no call of ours.
//!
//! Invariant: after a governor's end the device's pool is the one from before.

#![expect(unsafe_code, reason = "cudarc's own allocation, whose contents nobody reads")]

use std::ffi::CStr;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::result::{device, mem_pool};
use cudarc::driver::{CudaContext, CudaSlice, CudaStream, DriverError as CudarcError, sys};
use lowtide::ByteSize;
use lowtide::clock::Moment;
use lowtide::decay::DecayTime;
use lowtide_fake_cuda::{Fake, Guard, Options};
use lowtide_gpu::driver::cuda::{CudaDriver, CudaOptions, DeviceChoice, PoolGovernor};
use lowtide_gpu::driver::{Backend, Driver as _, DriverError};
use lowtide_gpu::{ArenaConfig, DeviceArena, Region};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::{Context, SubscriberExt as _};

use super::support::{LAZY, UNIT};

const CODES: [u32; 8] = [1, 2, 201, 400, 700, 719, 801, 999];

fn units(count: u64) -> ByteSize {
    ByteSize::new(UNIT as u64 * count)
}

fn seconds(count: u64) -> Moment {
    Moment::ORIGIN + Duration::from_secs(count)
}

const FIRST: DeviceChoice = DeviceChoice::Ordinal(0);
const DECAY: DecayTime = DecayTime::from_millis(5_000);

fn try_open() -> Result<PoolGovernor, DriverError> {
    PoolGovernor::open(FIRST, None, DECAY)
}

fn open() -> PoolGovernor {
    try_open().expect("a governor")
}

fn stream() -> (Arc<CudaContext>, Arc<CudaStream>) {
    let context = CudaContext::new(0).expect("a context");
    let stream = context.new_stream().expect("a stream");
    (context, stream)
}

fn alloc(stream: &Arc<CudaStream>, bytes: usize) -> Result<CudaSlice<u8>, CudarcError> {
    // SAFETY: nobody reads what is in it.
    unsafe { stream.alloc(bytes) }
}

/// The device's current pool, as a number.
fn current() -> usize {
    let device = device::get(0).expect("a device");
    // SAFETY: a device that lives.
    unsafe { device::get_mem_pool(device) }.expect("a pool") as usize
}

fn held(governor: &PoolGovernor) -> ByteSize {
    governor.report(ByteSize::ZERO).expect("answered").held()
}

#[test]
fn a_limit_makes_cudarcs_allocations_fail_and_a_free_makes_room() {
    let fake = Fake::start(LAZY);
    let limit = Some(units(8));
    let governor = PoolGovernor::open(FIRST, limit, DECAY).expect("a governor");
    let (context, stream) = stream();
    let mut slices: Vec<_> =
        (0..8).map(|_| alloc(&stream, UNIT).expect("within the limit")).collect();
    let refused = alloc(&stream, 1).expect_err("beyond the limit");
    assert_eq!(refused.0, sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY);
    let report = governor.report(ByteSize::ZERO).expect("answered");
    assert_eq!((report.limit, report.used, report.reserved), (limit, units(8), units(8)));
    assert_eq!(report.held(), ByteSize::ZERO);
    slices.pop();
    drop(alloc(&stream, UNIT).expect("room again"));
    drop((slices, stream, context, governor));
    assert_eq!(fake.numbers(0).pools, 0);
    fake.assert_clean();
}

#[test]
fn what_nobody_uses_goes_after_the_decay_time_and_what_is_used_stays() {
    let fake = Fake::start(LAZY);
    let governor = open(); // 5 s
    let (context, stream) = stream();
    let kept = alloc(&stream, 2 * UNIT).expect("memory");
    assert_eq!(governor.decay(seconds(0)), Ok(ByteSize::ZERO));
    for second in 1..20 {
        drop(alloc(&stream, 8 * UNIT).expect("memory"));
        stream.synchronize().expect("done");
        assert_eq!(governor.decay(seconds(second)), Ok(ByteSize::ZERO), "in use each second");
    }
    assert_eq!(held(&governor), units(8), "the threshold keeps what is freed");
    for second in 20..24 {
        assert_eq!(governor.decay(seconds(second)), Ok(ByteSize::ZERO), "{second}");
    }
    assert_eq!(governor.decay(seconds(24)), Ok(units(8)));
    assert_eq!(held(&governor), ByteSize::ZERO);
    let report = governor.report(ByteSize::ZERO).expect("answered");
    assert_eq!((report.used, report.reserved), (units(2), units(2)));
    assert_eq!((report.used_high, report.reserved_high), (units(10), units(10)));
    // A burst between two looks is a need as well.
    drop(alloc(&stream, 4 * UNIT).expect("memory"));
    assert_eq!(governor.decay(seconds(25)), Ok(ByteSize::ZERO));
    assert_eq!(governor.decay(seconds(31)), Ok(units(4)));
    drop((kept, stream, context, governor));
    fake.assert_clean();
}

/// Frees that no host call has waited for cannot be trimmed: the governor waits first.
#[test]
fn a_trim_gives_back_what_was_freed_and_never_waited_for() {
    let fake = Fake::start(LAZY);
    for decay in [DecayTime::Never, DecayTime::AtOnce] {
        let governor = PoolGovernor::open(FIRST, None, decay).expect("a governor");
        let (context, stream) = stream();
        drop(alloc(&stream, 3 * UNIT).expect("memory"));
        assert_eq!(held(&governor), units(3));
        let decayed = governor.decay(seconds(1)).expect("decayed");
        let trimmed = governor.trim().expect("trimmed");
        let all = [ByteSize::ZERO, units(3)];
        assert_eq!(
            [decayed, trimmed],
            if decay == DecayTime::Never { all } else { [all[1], all[0]] }
        );
        assert_eq!(held(&governor), ByteSize::ZERO);
        let waits = fake.calls(c"cuCtxSynchronize");
        assert_eq!((governor.trim(), governor.decay(seconds(2))), (Ok(all[0]), Ok(all[0])));
        assert_eq!(fake.calls(c"cuCtxSynchronize"), waits, "nothing to give back, no wait");
        drop((stream, context, governor));
    }
    fake.assert_clean();
}

#[test]
fn the_pool_from_before_is_current_again_unless_somebody_set_another() {
    let fake = Fake::start(LAZY);
    let (context, stream) = stream();
    let before = current();
    let governor = open();
    assert_ne!(current(), before);
    drop(governor);
    assert_eq!((current(), fake.numbers(0).pools), (before, 0));
    // Somebody sets one of theirs meanwhile.
    let governor = open();
    let theirs = raw_pool();
    let number = device::get(0).expect("a device");
    // SAFETY: a pool and a device that live.
    unsafe { device::set_mem_pool(number, theirs) }.expect("set");
    drop(governor);
    assert_eq!(current(), theirs as usize);
    // And gives it up while a governor would put it back.
    let governor = open();
    // SAFETY: nothing was allocated from it.
    unsafe { mem_pool::destroy(theirs) }.expect("destroyed");
    drop(governor);
    assert_eq!(current(), before);
    drop((stream, context));
    assert!(fake.faults().contains("StaleHandle"), "the pool that is gone: {}", fake.faults());
    assert_eq!(fake.leaks(), "");
}

/// mistral.rs and iris-mpc#2120 set the threshold of the current pool, cuda-core sets a pool of its
/// own: the pool kept nothing any more, or all went past the governor.
#[test]
fn a_governor_sets_back_what_other_owners_change() {
    let fake = Fake::start(LAZY);
    let (context, stream) = stream();
    let governor = open();
    let ours = current();
    let set = |pool: usize, threshold: u64| {
        let mut value = threshold;
        let which = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
        let pool = std::ptr::with_exposed_provenance_mut(pool);
        // SAFETY: a pool that lives, and a number of 64 bits.
        let code = unsafe { sys::cuMemPoolSetAttribute(pool, which, (&raw mut value).cast()) };
        assert_eq!(code, sys::CUresult::CUDA_SUCCESS);
    };
    set(ours, 0);
    governor.decay(seconds(0)).expect("looked");
    drop(alloc(&stream, 4 * UNIT).expect("memory"));
    stream.synchronize().expect("done");
    assert_eq!(held(&governor), units(4), "kept for its decay time");
    let theirs = raw_pool();
    let device = device::get(0).expect("a device");
    // SAFETY: a pool and a device that live.
    unsafe { device::set_mem_pool(device, theirs) }.expect("set");
    assert_eq!(current(), theirs.expose_provenance());
    governor.decay(seconds(1)).expect("looked");
    assert_eq!(current(), ours);
    drop(governor);
    assert_eq!(current(), theirs.expose_provenance(), "what other code has set last");
    // SAFETY: nothing was allocated from it.
    unsafe { mem_pool::destroy(theirs) }.expect("destroyed");
    drop((stream, context));
    assert_eq!(fake.leaks(), "");
}

/// rmm#2512, luminal#467: the default pool with a threshold of all, and the memory of graphs, were
/// never released.
#[test]
fn what_the_default_pool_and_graphs_cache_is_released_when_idle() {
    let fake = Fake::start(LAZY);
    let (context, stream) = stream();
    let (default, mut all) = (std::ptr::with_exposed_provenance_mut(current()), u64::MAX);
    let which = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
    // SAFETY: a pool that lives, and a number of 64 bits.
    let code = unsafe { sys::cuMemPoolSetAttribute(default, which, (&raw mut all).cast()) };
    assert_eq!(code, sys::CUresult::CUDA_SUCCESS);
    let kept = alloc(&stream, 2 * UNIT).expect("memory of the default pool");
    drop(alloc(&stream, 6 * UNIT).expect("memory of the default pool"));
    stream.synchronize().expect("done");
    let governor = open(); // 5 s
    for second in 0..10 {
        fake.graph_memory(0, UNIT as u64);
        let released = governor.decay(seconds(second)).expect("looked");
        let idle = if second == 0 { units(6) } else { ByteSize::ZERO };
        assert_eq!(released, idle, "graphs run each second: {second}");
    }
    assert_eq!(governor.decay(seconds(13)), Ok(ByteSize::ZERO));
    assert_eq!(governor.decay(seconds(15)), Ok(units(1)), "no graph ran for the decay time");
    fake.graph_memory(0, 3 * UNIT as u64);
    assert_eq!(governor.trim(), Ok(units(3)));
    drop((kept, governor, stream, context));
    fake.assert_clean();
}

/// A pool of device 0 that another made.
fn raw_pool() -> sys::CUmemoryPool {
    // `CUmemPoolProps`: pinned, of device 0; all else zero, whatever the bindings call it.
    let properties: [u64; 11] = [1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    let mut pool = std::ptr::null_mut();
    // SAFETY: properties of that size and shape; it writes one pointer.
    let code = unsafe { sys::cuMemPoolCreate(&raw mut pool, (&raw const properties).cast()) };
    assert_eq!(code, sys::CUresult::CUDA_SUCCESS);
    pool
}

#[test]
fn a_pool_with_live_memory_is_left_and_counted_and_its_contents_hold() {
    let fake = Fake::start(LAZY);
    let (context, stream) = stream();
    let before = PoolGovernor::left_total();
    let governor = open();
    let slice = stream.clone_htod(&[7_u8; UNIT]).expect("memory");
    drop(governor);
    assert_eq!(PoolGovernor::left_total(), before + 1);
    assert_eq!(fake.numbers(0).pools, 1);
    assert_eq!(stream.clone_dtoh(&slice).expect("there"), [7; UNIT]);
    drop(slice);
    stream.synchronize().expect("done");
    assert_eq!(fake.numbers(0).taken_bytes, 0, "its threshold is 0 now");
    drop(open()); // the device may be governed again
    drop((stream, context));
    assert_eq!(fake.faults(), "");
}

#[test]
fn a_device_has_one_governor() {
    let fake = Fake::start(LAZY);
    let governor = open();
    let error = try_open().expect_err("one is enough");
    assert_eq!(error, DriverError::Governed { device: 0 });
    let device = DeviceChoice::Ordinal(1);
    let other = PoolGovernor::open(device, None, DECAY);
    drop(other.expect("another device"));
    drop(governor);
    drop(open());
    fake.assert_clean();
}

/// The bug: where the end of a governor was refused an answer, the pool that it left kept all that
/// was freed into it, for ever.
#[test]
fn a_pool_that_is_left_for_want_of_an_answer_keeps_nothing() {
    let fake = Fake::start(LAZY);
    for name in [c"cuDeviceGetMemPool", c"cuDeviceSetMemPool", c"cuMemPoolGetAttribute"] {
        fake.reset(LAZY);
        let (context, stream) = stream();
        let (governor, left) = (open(), PoolGovernor::left_total());
        let slice = alloc(&stream, UNIT).expect("memory");
        (1..=2).for_each(|nth| fake.fail(name, nth, 999));
        drop(governor);
        fake.forget_failures();
        assert_eq!(PoolGovernor::left_total(), left + 1, "{name:?}");
        drop(slice);
        stream.synchronize().expect("done");
        assert_eq!(fake.numbers(0).taken_bytes, 0, "{name:?}");
        drop((stream, context));
    }
}

/// Listens to the log, and cannot bear it.
struct Panics;

impl<S: tracing::Subscriber> Layer<S> for Panics {
    fn on_event(&self, event: &tracing::Event<'_>, _: Context<'_, S>) {
        panic!("a trial: {:?}", event.metadata().name());
    }
}

fn listened<T>(act: impl FnOnce() -> T) -> T {
    tracing::subscriber::with_default(tracing_subscriber::registry().with(Panics), act)
}

/// The bug: the end of a governor unwound where a listener of the log panicked, and its beginning
/// left a pool that nobody governed.
#[test]
fn a_listener_that_panics_fails_neither_the_start_nor_the_end_of_a_governor() {
    let fake = Fake::start(LAZY);
    let (context, stream) = stream();
    let before = current();
    let opened = listened(try_open);
    drop(opened.expect("the listener's panic is not the governor's"));
    assert_eq!((current(), fake.numbers(0).pools), (before, 0));
    let governor = open();
    let kept = alloc(&stream, UNIT).expect("memory");
    let dropped = catch_unwind(AssertUnwindSafe(|| listened(|| drop(governor))));
    assert!(dropped.is_ok(), "out of a drop");
    assert_eq!(current(), before);
    drop((kept, stream, context)); // what is in the pool that was left
}

/// The bug: a panic of a listener came out of the driver, and what the arena had marked as on its
/// way was so for ever: whoever waited for it hung.
#[test]
fn a_listener_that_panics_loses_no_segment() {
    let fake = Fake::start(LAZY);
    let options = CudaOptions { backend: Some(Backend::CudaPool), ..CudaOptions::default() };
    let driver = Arc::new(CudaDriver::open(options).expect("a pool"));
    let clock = Arc::new(lowtide::clock::SystemClock::new());
    let config = ArenaConfig { reserve: ByteSize::gib(1), ..ArenaConfig::new("listened to") };
    let arena = DeviceArena::open(driver, clock, config).expect("an arena");
    fake.fail(c"cuEventSynchronize", 1, 999);
    fake.fail(c"cuMemFreeAsync", 1, 999);
    let alloc = || listened(|| arena.alloc::<u8>(UNIT, Region::Dynamic).map(drop));
    let _either_way = catch_unwind(AssertUnwindSafe(alloc));
    fake.forget_failures();
    assert!(!arena.is_busy());
    assert_eq!(arena.snapshot().committed, ByteSize::ZERO);
    drop(arena.alloc::<u8>(UNIT, Region::Dynamic).expect("memory"));
    arena.close().expect("nothing is live");
}

#[test]
fn what_bypasses_the_pool_is_seen() {
    let fake = Fake::start(Options { context_overhead: 3 << 20, ..LAZY });
    let governor = open();
    let unmanaged = |arenas| governor.report(arenas).expect("answered").unmanaged;
    let floor = unmanaged(ByteSize::ZERO);
    assert_eq!(floor, ByteSize::mib(3), "what the context itself takes");
    let (context, stream) = stream();
    let slice = alloc(&stream, 4 * UNIT).expect("memory of the pool");
    assert_eq!(unmanaged(ByteSize::ZERO), floor);
    // SAFETY: a context is current; nobody reads what is there.
    let plain = unsafe { cudarc::driver::result::malloc_sync(5 * UNIT) }.expect("past the pool");
    assert_eq!(unmanaged(ByteSize::ZERO), floor.saturating_add(units(5)));
    fake.neighbours(0, UNIT as u64);
    assert_eq!(unmanaged(ByteSize::ZERO), floor.saturating_add(units(6)));
    assert_eq!(unmanaged(units(6)), floor);
    assert_eq!(unmanaged(ByteSize::MAX), ByteSize::ZERO);
    fake.neighbours(0, 0);
    // SAFETY: from above, freed once.
    unsafe { cudarc::driver::result::free_sync(plain) }.expect("freed");
    drop((slice, stream, context, governor));
    fake.assert_clean();
}

#[test]
fn a_device_without_pools_and_a_driver_without_limits_say_so() {
    let fake = Fake::start(Options { driver_version: 12_010, ..LAZY });
    let limit = Some(units(8));
    let error = PoolGovernor::open(FIRST, limit, DECAY).expect_err("no limits");
    assert_eq!(error, DriverError::NoPoolLimit { limit: units(8), driver_version: 12_010 });
    for text in ["12.1", "12.2", "512"] {
        assert!(error.to_string().contains(text), "{error}");
    }
    drop(open());
    for (flags, what) in [
        (Options::NO_POOLS, DriverError::Unsupported { what: "memory pools" }.to_string()),
        (Options::NO_POOL_CREATE, "the driver does not support cuMemPoolCreate".to_owned()),
    ] {
        fake.reset(Options { flags, ..LAZY });
        let error = try_open().expect_err("no pool of ours");
        let DriverError::CurrentPool { device: 0, cause } = &error else { panic!("{error}") };
        assert_eq!(cause.to_string(), what);
        assert_eq!(fake.retains(0), 0);
        fake.assert_clean();
    }
    fake.reset(LAZY);
    let device = DeviceChoice::Ordinal(9);
    let error = PoolGovernor::open(device, None, DECAY).expect_err("no such device");
    let absent = DriverError::NoSuchDevice { ordinal: 9, count: 2 };
    assert_eq!(error, absent);
    fake.assert_clean();
}

/// To CUDA a limit of 0 is none: it was taken, and nothing was limited.
#[test]
fn a_limit_that_leaves_no_room_is_refused_by_name() {
    let fake = Fake::start(LAZY);
    let unit = ByteSize::kib(64);
    for requested in [ByteSize::ZERO, ByteSize::new(1), ByteSize::new(unit.get() - 1)] {
        let error = PoolGovernor::open(FIRST, Some(requested), DECAY).expect_err("too little");
        assert_eq!(error, DriverError::PoolLimit { requested, unit });
        assert!(error.to_string().contains(&requested.to_string()), "{error}");
        assert_eq!(fake.retains(0), 0);
    }
    let least = PoolGovernor::open(FIRST, Some(unit), DECAY);
    drop(least.expect("the least that there may be"));
    fake.assert_clean();
}

/// The calls of a governor, from its open to its end.
const CALLS: [&CStr; 17] = [
    c"cuCtxGetCurrent",
    c"cuCtxSetCurrent",
    c"cuCtxSynchronize",
    c"cuDeviceGetAttribute",
    c"cuDevicePrimaryCtxRetain",
    c"cuDevicePrimaryCtxRelease_v2",
    c"cuDeviceGetMemPool",
    c"cuDeviceSetMemPool",
    c"cuMemAllocFromPoolAsync",
    c"cuMemFreeAsync",
    c"cuMemGetInfo_v2",
    c"cuMemPoolCreate",
    c"cuMemPoolDestroy",
    c"cuMemPoolGetAttribute",
    c"cuMemPoolSetAttribute",
    c"cuMemPoolTrimTo",
    c"cuEventSynchronize",
];

/// As a thread without a context, but for what cudarc does.
fn life(stream: &Arc<CudaStream>) -> Result<(), DriverError> {
    let governor = try_open()?;
    drop(alloc(stream, UNIT));
    let outcomes = [
        governor.report(ByteSize::ZERO).map(drop),
        governor.decay(seconds(1)).map(drop),
        governor.decay(seconds(9)).map(drop),
        governor.trim().map(drop),
    ];
    drop(governor);
    let outcomes: Result<(), DriverError> = outcomes.into_iter().collect();
    outcomes
}

#[test]
fn any_call_of_a_governor_may_fail() {
    let fake = Fake::start(LAZY);
    let counts = {
        let (context, stream) = stream();
        none_current();
        let before = CALLS.map(|name| fake.calls(name));
        life(&stream).expect("a life");
        drop((stream, context));
        CALLS.iter().zip(before).map(|(name, before)| fake.calls(name) - before).collect::<Vec<_>>()
    };
    for (name, count) in CALLS.iter().zip(counts) {
        assert!(count > 0, "{name:?} is not called");
        for nth in 1..=count.min(8) {
            for code in CODES {
                fails(&fake, name, (nth, code));
            }
        }
    }
}

fn none_current() {
    // SAFETY: no context is one that may be current.
    unsafe { cudarc::driver::result::ctx::set_current(std::ptr::null_mut()) }.expect("set");
}

fn fails(fake: &Guard, name: &CStr, (nth, code): (u64, u32)) {
    let told = format!("{name:?}, call {nth}, code {code}");
    fake.reset(LAZY);
    let (context, stream) = stream();
    let before = current();
    none_current();
    let left = PoolGovernor::left_total();
    fake.fail(name, nth, code);
    let lived = catch_unwind(AssertUnwindSafe(|| life(&stream)));
    fake.forget_failures();
    assert!(lived.is_ok(), "{told}: it panicked");
    let left = PoolGovernor::left_total() - left;
    let pools = fake.numbers(0).pools;
    let is_end = [c"cuMemPoolDestroy", c"cuCtxGetCurrent", c"cuCtxSetCurrent"].contains(&name);
    assert!(pools <= left || is_end, "{told}: {pools} pools, {left} counted");
    if left == 0 {
        assert_eq!(current(), before, "{told}");
    }
    assert_eq!(fake.faults(), "", "{told}");
    drop((stream, context));
    drop(try_open().expect("the next one"));
}

#[test]
fn a_context_that_is_lost_makes_errors_and_a_silent_drop() {
    for code in [700, 719] {
        let fake = Fake::start(LAZY);
        let governor = open();
        fake.poison(0, code);
        let lost = |error: DriverError| error.is_context_lost();
        assert!(governor.report(ByteSize::ZERO).map(drop).is_err_and(lost));
        assert!(governor.decay(seconds(1)).map(drop).is_err_and(lost));
        assert!(governor.trim().map(drop).is_err_and(lost));
        drop(governor);
        assert_eq!(fake.retains(0), 0);
    }
}

/// Arenas on the pool rung have a pool of their own, which no governor governs.
#[test]
fn an_arenas_pool_and_a_governors_are_two() {
    let fake = Fake::start(LAZY);
    let governor = open();
    let backend = Some(Backend::CudaPool);
    let driver =
        CudaDriver::open(CudaOptions { backend, ..CudaOptions::default() }).expect("a pool");
    assert_eq!((driver.shares_pool(), fake.numbers(0).pools), (false, 2));
    driver.trim().expect("trimmed");
    drop((driver, governor));
    fake.assert_clean();
}
