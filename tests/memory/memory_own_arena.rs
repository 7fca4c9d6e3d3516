//! Resources have heap arenas of their own: what was loaded goes back whole, whatever the
//! neighbours keep.

use std::collections::BTreeMap;
use std::panic;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use lowtide::ByteSize;
use lowtide::clock::{Clock as _, SystemClock};
use lowtide::decay::DecayTime;
use lowtide::device::{DeviceArena, Region};
use lowtide::memory::Memory;
use lowtide::metrics::MetricsTier;
use lowtide_admission::{Budget, Cost};
use lowtide_cuda_sim::{SimDriver, SimOptions};
use lowtide_heap::{HostArena, HostArenaStats};
use test_fork::test;

const MIB: u64 = 1 << 20;
const SOON: Duration = Duration::from_secs(10);

/// Some MiB in blocks of many sizes.
type Model = (Vec<Vec<u8>>, BTreeMap<u32, String>);

fn model() -> Model {
    let tensors = (0..8).map(|nth| vec![1_u8; 1 << (14 + nth)]).collect();
    let words = (0..20_000).map(|nth| (nth, format!("word {nth}"))).collect();
    (tensors, words)
}

fn arena(name: &str) -> Option<HostArenaStats> {
    let all = HostArena::all().expect("statistics");
    all.into_iter().find_map(|(of, stats)| (of == name).then_some(stats))
}

#[test]
fn what_a_loader_allocates_is_in_an_arena_of_the_resources_name_and_goes_with_it() {
    let memory = Memory::builder().start().expect("starts");
    let words = memory.managed("words", || Ok(model())).register().expect("registered");
    for _ in 0..3 {
        assert_eq!(arena("words"), None, "not loaded");
        let held = words.acquire_blocking().expect("loads");
        let (tensors, words_of) = &*held;
        let bytes: usize = tensors.iter().map(Vec::len).sum();
        assert_eq!(words_of.len(), 20_000);
        let beside = vec![1_u8; 3 << 20];
        let found = arena("words").expect("an arena");
        assert!(found.live.get() > bytes as u64, "{found:?}");
        assert!(
            found.live.get() < bytes as u64 + 3 * MIB,
            "what is beside is elsewhere: {found:?}"
        );
        drop((held, beside));
        assert!(words.unload_now(SOON).expect("free"));
    }
    let kept = HostArena::all().expect("statistics");
    assert_eq!(kept.len(), 1, "one, for the next: {kept:?}");
    let (name, stats) = &kept[0];
    assert_eq!((name.as_str(), stats.live, stats.active), ("", ByteSize::ZERO, ByteSize::ZERO));
    assert!(memory.shutdown_blocking(SOON).is_clean());
}

#[test]
fn a_resources_arena_is_in_the_metrics_and_reads_zero_once_it_is_unloaded() {
    let builder = crate::recorder::builder();
    let recorder = builder.install_recorder().expect("the only one");
    let memory = Memory::builder().metrics(MetricsTier::Detail).start().expect("starts");
    let seen = memory.managed("seen", || Ok(model())).register().expect("registered");
    let shows = |line: &str, what: &dyn Fn(f64) -> bool| {
        let clock = SystemClock::new();
        let end = clock.now() + SOON;
        let shown = || {
            let text = recorder.render();
            let value = text.lines().find_map(|found| found.strip_prefix(line)).map(str::parse);
            value.is_some_and(|value| what(value.expect("a number")))
        };
        // Published each second, by a thread of the memory's own.
        while !shown() {
            assert!(clock.now() < end, "{}", recorder.render());
            std::thread::yield_now();
        }
    };
    let held = seen.acquire_blocking().expect("loads");
    let named = memory.snapshot().heap_arenas;
    assert_eq!(named.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>(), ["seen"]);
    let live = "lowtide_heap_arena_live_bytes{heap_arena=\"seen\"} ";
    shows(live, &|bytes| bytes > 4e6);
    // Without the program's file pages.
    shows("lowtide_pressure_part_bytes{part=\"other\"} ", &|bytes| bytes >= 0.0);
    drop(held);
    assert!(seen.unload_now(SOON).expect("free"));
    assert_eq!(memory.snapshot().heap_arenas, []);
    shows(live, &|bytes| bytes.to_bits() == 0);
    assert!(memory.shutdown_blocking(SOON).is_clean());
}

#[test]
fn a_resource_that_holds_more_than_it_said_is_booked_by_what_it_holds() {
    let memory = Memory::builder().memory_limit(ByteSize::gib(4)).start().expect("starts");
    let said = Cost::host(ByteSize::mib(1));
    let heavy = memory.managed("heavy", || Ok(model())).cost(said).register();
    let heavy = heavy.expect("registered");
    let stood = || memory.admission().ledger(Budget::Host).resource_reservations();
    assert_eq!(heavy.stats().cost, said);
    let held = heavy.acquire_blocking().expect("loads");
    let measured = heavy.stats().measured.expect("it has an arena").host;
    assert!(measured > ByteSize::mib(4), "{measured}");
    assert_eq!(stood(), measured, "and so booked");
    drop(held);
    assert!(heavy.unload_now(SOON).expect("free"));
    assert_eq!(stood(), ByteSize::ZERO);
    let stats = heavy.stats();
    assert_eq!(stats.recovered_total.host, measured, "all of it went");
    assert_eq!(stats.cost, Cost::host(measured), "the next load books what this one held");
    assert!(memory.shutdown_blocking(SOON).is_clean());
}

/// If the arena lies in the host's memory, its bytes are the host's.
#[test]
fn what_a_resource_holds_in_its_device_arena_is_found_booked_and_given_back() {
    let sim = || Arc::new(SimDriver::new(SimOptions::default()));
    for (name, budget) in [("on the host", Budget::Host), ("apart", Budget::Device)] {
        let builder =
            Memory::builder().memory_limit(ByteSize::gib(4)).device_decay(DecayTime::Never);
        let builder = if budget == Budget::Host { builder } else { builder.driver(sim()) };
        let memory = builder.start().expect("starts");
        let arena = memory.devices().open_arena("weights").expect("opens");
        let load = |arena: &DeviceArena| Ok(arena.alloc::<u8>(9 << 20, Region::Stable)?);
        let said = Cost::device(ByteSize::mib(1));
        let weights = memory.managed_in(&arena, name, load).cost(said).register();
        let weights = weights.expect("registered");
        let part = |cost: Cost| if budget == Budget::Host { cost.host } else { cost.device };
        let stood = || memory.admission().ledger(budget).resource_reservations();
        drop(weights.acquire_blocking().expect("loads"));
        let measured = part(weights.stats().measured.expect("it has arenas"));
        assert!(measured >= ByteSize::mib(9) && measured < ByteSize::mib(14), "{measured}");
        assert_eq!(stood(), measured, "{name}");
        assert!(weights.unload_now(SOON).expect("free"));
        assert_eq!((stood(), arena.snapshot().committed), (ByteSize::ZERO, ByteSize::ZERO));
        let stats = weights.stats();
        assert!(part(stats.recovered_total) >= ByteSize::mib(9), "{stats:?}");
        assert_eq!(part(stats.cost), measured, "the next load books what this one held");
        assert!(memory.shutdown_blocking(SOON).is_clean());
    }
}

/// Memory of C code, which is in no arena of jemalloc.
struct Engine(usize);

#[expect(unsafe_code, reason = "C code allocates by `malloc`")]
impl Engine {
    const SIZE: usize = 64 << 20;

    fn load() -> Self {
        // SAFETY: has no preconditions.
        let at = unsafe { libc::malloc(Self::SIZE) };
        assert!(!at.is_null(), "no memory");
        // SAFETY: the block is that large, and nothing else refers to it.
        unsafe { libc::memset(at, 1, Self::SIZE) };
        Self(at.expose_provenance())
    }
}

#[expect(unsafe_code, reason = "C code frees by `free`")]
impl Drop for Engine {
    fn drop(&mut self) {
        // SAFETY: `load` has allocated the block, and it is freed once.
        unsafe { libc::free(std::ptr::with_exposed_provenance_mut(self.0)) };
    }
}

/// The bug: a second load, beside requests and so not measured, was taken to hold its heap arena
/// alone, and the next one reserved too little.
#[test]
fn what_was_measured_of_c_code_is_kept_for_a_load_that_cannot_be_measured() {
    let memory = Memory::builder().start().expect("starts");
    let engine = memory.managed("engine", || Ok(Engine::load())).register().expect("registered");
    let load = || {
        drop(engine.acquire_blocking().expect("loads"));
        engine.stats().measured.map_or(ByteSize::ZERO, |measured| measured.host)
    };
    let most = ByteSize::of(Engine::SIZE);
    let alone = load();
    if alone < most.scaled(0.9) {
        println!("skipped: this process does not run alone, or jemalloc serves C code");
        return;
    }
    assert!(engine.unload_now(SOON).expect("free"));
    let request = || memory.admission().try_admit(Cost::host(ByteSize::kib(16))).expect("fits");
    let requests = [request(), request()];
    assert_eq!(load(), alone);
    drop(requests);
    assert!(memory.shutdown_blocking(SOON).is_clean());
}

#[test]
fn a_load_that_fails_or_panics_leaves_the_arena_to_the_next() {
    let memory = Memory::builder().start().expect("starts");
    let turns = AtomicU32::new(0);
    let load = move || match turns.fetch_add(1, Ordering::Relaxed) {
        0 => Err(lowtide::BoxError::from("not yet")),
        1 => panic!("never"),
        _ => Ok(model()),
    };
    let resource = memory.managed("moody", load).backoff(Duration::ZERO, Duration::ZERO);
    let resource = resource.register().expect("registered");
    let before = panic::take_hook();
    panic::set_hook(Box::new(|_| {}));
    assert!(resource.acquire_blocking().is_err());
    assert!(resource.acquire_blocking().is_err());
    panic::set_hook(before);
    let held = resource.acquire_blocking().expect("loads");
    assert!(arena("moody").is_some());
    drop(held);
    assert!(resource.unload_now(SOON).expect("free"));
    assert_eq!(arena("moody"), None);
    assert!(memory.shutdown_blocking(SOON).is_clean());
}

#[test]
fn names_that_are_taken_or_long_and_a_wish_for_the_shared_heap_refuse_no_load() {
    let memory = Memory::builder().start().expect("starts");
    let long = "a name of more than thirty-one bytes, and \u{e4} at an odd place";
    let first = memory.managed(long, || Ok(model())).register().expect("registered");
    let held = first.acquire_blocking().expect("loads");
    assert!(arena("a name of more than thirty-one ").is_some(), "{:?}", HostArena::all());

    // The same 31 bytes: the shared heap, and a note that says so.
    let second = format!("{long}, another");
    let second = memory.managed(&second, || Ok(model())).register().expect("registered");
    let other = second.acquire_blocking().expect("loads");
    let diagnostics = memory.report().diagnostics();
    let said = diagnostics.iter().find(|note| note.text.contains("shared heap")).expect("a note");
    assert!(said.text.contains("already in use"), "{}", said.text);
    drop((held, other));
    assert!(first.unload_now(SOON).expect("free") && second.unload_now(SOON).expect("free"));

    let shared = memory.managed("shared", || Ok(model())).load_scope(None);
    let shared = shared.register().expect("registered");
    let held = shared.acquire_blocking().expect("loads");
    assert_eq!(arena("shared"), None);
    drop(held);
    assert!(memory.shutdown_blocking(SOON).is_clean());
}
