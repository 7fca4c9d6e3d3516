//! A failure at each call that opening a device and a life of an arena make, and contexts lost.
//!
//! Invariant: nothing panics; what is left behind is what the failing call was to give back.

use std::ffi::CStr;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use lowtide::ByteSize;
use lowtide_fake_cuda::{Fake, Guard, Options};
use lowtide_gpu::clock::{Clock as _, ManualClock};
use lowtide_gpu::driver::cuda::{CudaDriver, CudaOptions};
use lowtide_gpu::driver::{Backend, DeviceAddress, Driver as _, DriverError, Guarded};
use lowtide_gpu::{ArenaConfig, DeviceArena, DeviceError, Region};

use super::open::{BASE, NEWER, PLAIN, POOLS, VIRTUAL, WAYS};
use super::support::{Bed, LAZY, UNIT, life, read, write};

/// Results of the driver: a bad value, no memory, no context, a bad handle, not offered, unknown.
const CODES: [u32; 6] = [1, 2, 201, 400, 801, 999];

/// Of all calls and codes each that is this many further on; in `.ci/run --soak` all. It has no
/// factor in common with the number of codes, so that each code is met.
const STEP: usize = if cfg!(lowtide_soak) { 1 } else { 7 };

/// One that is newer than all tables. cudarc makes an enum of what its own calls answer and knows
/// no other numbers, so it is for calls that only we make.
const NEW: u32 = 4242;

/// Returns `true` if cudarc makes calls of this name too.
fn is_cudarcs(name: &CStr) -> bool {
    let name = name.to_str().expect("plain");
    let [streams, copies] = ["cuStream", "cuMemcpyDtoH"].map(|it| name.starts_with(it));
    let others = ["cuEvent", "cuCtx", "cuMemcpyHtoD"].iter().any(|it| name.starts_with(it));
    streams || copies || others
}

/// Results after which every call fails.
const LOST: [u32; 2] = [700, 719];

fn names() -> impl Iterator<Item = &'static CStr> {
    BASE.iter().chain(VIRTUAL).chain(NEWER).chain(POOLS).chain(PLAIN).copied()
}

/// Returns the objects that a failure of this call may leave behind, by the names that the fake
/// gives them; everything else is released. A call that releases something and fails leaves it. The
/// calls that make a context current and relax the capture mode come before each of these, so that
/// one that fails is one of those that fails.
fn may_leave(name: &CStr) -> &'static [&'static str] {
    match name.to_str().expect("plain") {
        "cuCtxGetCurrent" | "cuCtxSetCurrent" | "cuThreadExchangeStreamCaptureMode" => {
            &["streams", "events", "reservations", "bytes locked", "context retains"]
        }
        "cuMemFreeAsync" => &["pool allocations"],
        "cuMemFree_v2" => &["plain allocations", "bytes managed"],
        "cuMemPoolDestroy" => &["pools"],
        "cuMemRelease" => &["handles"],
        "cuMemUnmap" => &["mappings", "handles", "reservations"],
        "cuMemAddressFree" => &["reservations"],
        "cuMemFreeHost" => &["bytes locked"],
        "cuStreamDestroy_v2" => &["streams"],
        "cuEventDestroy_v2" => &["events"],
        "cuDevicePrimaryCtxRelease_v2" => &["context retains"],
        _ => &[],
    }
}

/// Asserts that nothing is left but what this call may leave, and no fault is on record.
fn check_left(fake: &Guard, name: &CStr, told: &str) {
    let allowed = may_leave(name);
    for line in fake.leaks().lines() {
        let left = line.rsplit_once("with ").map_or(line, |(_, left)| left);
        let left = left.split_once(": ").map_or(left, |(_, left)| left);
        for part in left.split(", ") {
            let what = part.trim_start_matches(|it: char| it.is_ascii_digit()).trim_start();
            assert!(allowed.contains(&what), "{told}: {line}");
        }
    }
    assert_eq!(fake.faults(), "", "{told}");
}

/// Each call that was counted and may fail: its name, and which one of that name.
fn each(counts: &[(&'static CStr, u64)]) -> impl Iterator<Item = (&'static CStr, u64)> {
    counts.iter().flat_map(|&(name, count)| (1..=count.min(4)).map(move |nth| (name, nth)))
}

/// Returns the number of calls of each function that `act` calls.
fn counted(fake: &Guard, act: impl FnOnce()) -> Vec<(&'static CStr, u64)> {
    let before: Vec<_> = names().map(|name| fake.calls(name)).collect();
    act();
    let counts = names().zip(before).map(|(name, before)| (name, fake.calls(name) - before));
    counts.filter(|(_, count)| *count > 0).collect()
}

#[track_caller]
fn without_panic<T>(told: &str, act: impl FnOnce() -> T) -> T {
    catch_unwind(AssertUnwindSafe(act)).unwrap_or_else(|_| panic!("{told}: it panicked"))
}

#[test]
fn any_call_of_an_open_may_fail() {
    let fake = Fake::start(LAZY);
    let ladder = [(CudaOptions::default(), 0)].into_iter();
    let ways = WAYS.iter().map(|(options, _)| (*options, 0));
    // Where the first rung is not offered, and where ours is refused as well.
    let lower = [Options::NO_VIRTUAL_MEMORY, Options::NO_VIRTUAL_MEMORY | Options::NO_POOL_CREATE];
    let lower = lower.into_iter().map(|flags| (CudaOptions::default(), flags));
    for (options, flags) in ladder.chain(ways).chain(lower) {
        let reset = || fake.reset(Options { flags, ..LAZY });
        let open = || CudaDriver::open(options);
        reset();
        let counts = counted(&fake, || drop(open().expect("a device")));
        assert!(counts.len() > 15, "{counts:?}");
        let codes = || CODES.into_iter().chain(LOST).chain([NEW]);
        let all = each(&counts).flat_map(|(name, nth)| codes().map(move |code| (name, nth, code)));
        for (name, nth, code) in all.step_by(STEP) {
            let told = format!("{options:?}, {flags}: {name:?}, call {nth}, code {code}");
            reset();
            fake.fail(name, nth, code);
            let opened = without_panic(&told, open);
            fake.forget_failures();
            without_panic(&told, || drop(opened));
            check_left(&fake, name, &told);
            drop(open().unwrap_or_else(|error| panic!("{told}: then {error}")));
        }
    }
}

#[test]
fn any_call_in_the_life_of_an_arena_may_fail() {
    let fake = Fake::start(LAZY);
    for (options, names) in WAYS {
        fake.reset(LAZY);
        let bed = on(options);
        let counts = counted(&fake, || assert_eq!(life(&bed, &mut || {}).0, Vec::<String>::new()));
        drop(bed);
        fake.assert_clean();
        let called = |wanted: &CStr| counts.iter().any(|(name, _)| *name == wanted);
        let needed = match options.backend {
            Some(Backend::CudaVirtualMemory) => [&names[1..], &NEWER[..1]].concat(),
            Some(Backend::CudaPool) => vec![POOLS[2], POOLS[6], POOLS[7]],
            Some(_) => names.to_vec(),
            None => PLAIN[1..].to_vec(),
        };
        for name in needed {
            assert!(called(name), "{name:?} is not called: {counts:?}");
        }
        let all = counts.iter().flat_map(|&(name, count)| (1..=count).map(move |nth| (name, nth)));
        let all = all.flat_map(|(name, nth)| {
            let codes: Vec<_> = match nth {
                1..=4 if is_cudarcs(name) => CODES.into_iter().chain(LOST).collect(),
                1..=4 => CODES.into_iter().chain(LOST).chain([NEW]).collect(),
                _ => vec![999],
            };
            codes.into_iter().map(move |code| (name, nth, code))
        });
        let failed = all.step_by(STEP).filter(|call| fails(&fake, options, *call)).count();
        assert!(failed > 100 / STEP, "{options:?}: {failed} of the failures were noticed");
    }
}

/// A device whose memory is had in one way.
fn on(options: CudaOptions) -> Bed {
    Bed::over(CudaDriver::open(options).expect("a device"))
}

/// A life in which one call fails; whether anybody was told.
fn fails(fake: &Guard, options: CudaOptions, (name, nth, code): (&CStr, u64, u32)) -> bool {
    let told = format!("{options:?}: {name:?}, call {nth}, code {code}");
    fake.reset(LAZY);
    let bed = on(options);
    fake.fail(name, nth, code);
    let errors = without_panic(&told, || life(&bed, &mut || {}));
    fake.forget_failures();
    let stuck = bed.driver.rollback_failures_total();
    without_panic(&told, || drop(bed));
    if !LOST.contains(&code) {
        check_left(fake, name, &format!("{told}, {stuck} stuck, {:?}", errors.0));
    }
    !errors.0.is_empty()
}

#[test]
fn a_context_that_is_lost_at_any_time_makes_errors_and_silent_drops() {
    let fake = Fake::start(LAZY);
    let ways = WAYS.iter().flat_map(|(options, _)| LOST.map(|code| (*options, code)));
    for (options, code) in ways {
        let mut moments = 0;
        for moment in 0.. {
            let told = format!("{options:?}: lost at {moment} with {code}");
            fake.reset(LAZY);
            let bed = on(options);
            let mut now = 0;
            let errors = without_panic(&told, || {
                life(&bed, &mut || {
                    if now == moment {
                        fake.poison(0, code);
                    }
                    now += 1;
                })
            });
            if moment >= now {
                break;
            }
            moments += 1;
            assert!(!errors.0.is_empty(), "{told}: nobody noticed");
            let (codes, lost) = (format!("code {code}"), "lost");
            let typed = errors.0.iter().any(|it| it.contains(&codes) || it.contains(lost));
            assert!(typed, "{told}: {:?}", errors.0);
            for again in [bed.driver.synchronize(), bed.driver.headroom().map(drop)] {
                let error = again.expect_err("every later call fails");
                assert!(error.is_context_lost(), "{told}: {error}");
            }
            without_panic(&told, || drop(bed));
            assert_eq!(fake.retains(0), 0, "{told}");
        }
        assert!(moments > 5, "{moments}");
    }
}

#[test]
fn what_is_live_when_the_context_is_lost_is_dropped_in_silence() {
    for code in LOST {
        let fake = Fake::start(LAZY);
        let bed = Bed::new();
        let arena = bed.arena();
        let lane = arena.cuda_lane(&bed.one).expect("a lane");
        let mut blocks: Vec<_> =
            (0..4).map(|_| lane.alloc::<u8>(UNIT, Region::Dynamic).expect("room")).collect();
        write(&bed.two, &mut blocks[0], 1).expect("queued");
        fake.poison(0, code);
        assert!(read(&bed.one, &blocks[0]).is_err());
        let error = lane.alloc::<u8>(8 * UNIT, Region::Dynamic).expect_err("no calls succeed");
        let DeviceError::Driver(cause) = &error else { panic!("{error}") };
        assert!(cause.is_context_lost(), "{error}");
        drop(blocks);
        assert!(arena.snapshot().parked_errors_total > 0, "the view's waits failed");
        drop((lane, arena, bed));
        assert_eq!(fake.retains(0), 0);
    }
}

/// Results by which a device that fell off the bus, or whose MPS server died, answers every call.
const DEAD: [u32; 4] = [999, 806, 46, 100];

/// Reported in timemachine #1203 and ollama #1895: 28 calls a second, for ever.
#[test]
fn a_device_that_answers_no_call_is_lost_whatever_it_answers() {
    let mut most = 0;
    for code in DEAD {
        let fake = Fake::start(LAZY);
        let driver = CudaDriver::open(CudaOptions::default()).expect("a device");
        let driver = Arc::new(Guarded::new(Arc::new(driver)));
        let clock = Arc::new(ManualClock::new());
        let config = ArenaConfig::new("dead");
        let arena = DeviceArena::open(driver.clone(), clock.clone(), config).expect("an arena");
        drop(arena.alloc::<u8>(UNIT, Region::Dynamic).expect("room"));
        fake.poison(0, code);
        let calls = fake.calls_total();
        for _ in 0..240 {
            clock.advance(Duration::from_millis(250));
            let _ = arena.alloc::<u8>(8 * UNIT, Region::Dynamic);
            let _ = arena.decay(clock.now());
        }
        most = most.max(fake.calls_total() - calls);
        let lost = driver.lost().unwrap_or_else(|| panic!("{code}: not lost"));
        assert!(lost.is_context_lost() && lost.code() == Some(i64::from(code)), "{lost}");
        drop(arena);
    }
    println!("figure field.lost.calls_per_minute {most} calls");
    assert!(most <= 10, "{most}");
}

#[test]
fn a_refusal_of_a_device_that_answers_other_calls_is_no_loss() {
    let fake = Fake::start(LAZY);
    let driver = CudaDriver::open(CudaOptions::default()).expect("a device");
    let driver = Guarded::new(Arc::new(driver));
    for code in DEAD {
        fake.fail(c"cuCtxSynchronize", 1, code);
        let error = driver.synchronize().expect_err("refused");
        assert_eq!((error.code(), error.is_context_lost()), (Some(i64::from(code)), false));
        assert_eq!((driver.lost(), driver.synchronize()), (None, Ok(())));
    }
}

#[test]
#[expect(unsafe_code, reason = "a copy that fails before it copies")]
fn a_copy_that_finds_no_memory_names_its_size() {
    let fake = Fake::start(LAZY);
    let driver = CudaDriver::open(CudaOptions::default()).expect("a device");
    let size = ByteSize::kib(64);
    let at = DeviceAddress::new;
    fake.fail(c"cuMemcpyDtoDAsync_v2", 1, 2);
    // SAFETY: the call fails before it copies.
    let error = unsafe { driver.copy(at(1 << 20), at(1 << 21), size) }.expect_err("refused");
    let call = "cuMemcpyDtoDAsync";
    assert_eq!(error, DriverError::OutOfMemory { call, requested: size });
}
