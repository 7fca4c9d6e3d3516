//! Arenas configured as ONNX Runtime's: shared, used by sessions, replaced at run time. Each of its
//! rules and faults that concerns configuration is a claim here.
#![cfg(target_os = "linux")]

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::Duration;

use lowtide::config::arena::{ArenaKey, ArenaOptions, ArenaResolution, ArenaSource};
use lowtide::config::{DeviceChoice, Fault};
use lowtide::decay::DecayTime;
use lowtide::device::driver::Backend;
use lowtide::device::{Buffer, DeviceError, PinnedConfig, PinnedKind, Region};
use lowtide::memory::{ArenaUse, MemoryError, Slot, SlotSnapshot};
use lowtide::{ByteSize, Memory};
use test_fork::test;

use crate::support::{PATIENCE, until};

const SOON: Duration = Duration::from_secs(5);
const NAME: &str = "CudaEp";

/// Idle memory stays unless somebody takes it.
fn start() -> Memory {
    let builder = Memory::builder().device(DeviceChoice::Host).device_decay(DecayTime::Never);
    builder.start().expect("starts")
}

fn slot() -> Slot {
    Slot::device(NAME, 0)
}

fn options(entries: &[(&str, &str)]) -> ArenaOptions {
    ArenaOptions::from_keys(entries.iter().copied()).expect("valid")
}

/// Grows by what is asked for, within so many MiB.
fn limit(mib: u64) -> ArenaOptions {
    let limit = ByteSize::mib(mib).get().to_string();
    options(&[("arena.max_mem", &limit), ("arena.extend_strategy", "1")])
}

fn options_of(memory: &Memory, slot: &Slot) -> Option<Arc<ArenaResolution>> {
    let slots = memory.devices().arena_slots();
    slots.into_iter().find(|of| of.slot == *slot)?.resolution
}

fn figures(memory: &Memory, slot: &Slot) -> SlotSnapshot {
    let slots = memory.devices().arena_slots();
    slots.into_iter().find(|found| found.slot == *slot).expect("the slot has an arena")
}

/// The limit in force and who gave it.
fn limit_of(memory: &Memory) -> (ByteSize, ArenaSource) {
    let resolution = options_of(memory, &slot()).expect("an arena");
    (resolution.limit(), resolution.get(ArenaKey::Limit).source)
}

fn mib(arena: &ArenaUse, count: usize) -> Result<Buffer<u8>, DeviceError> {
    arena.alloc(count << 20, Region::Dynamic)
}

#[test]
fn the_page_of_options_gives_each_keys_default() {
    let page = include_str!("../../docs/ARENA_OPTIONS.md");
    for key in ArenaKey::ALL {
        let default = match key.default_value() {
            u64::MAX => 0,
            default => default,
        };
        let row = format!("\n| `{key}` | {default} | ");
        assert!(page.contains(&row), "{row}");
    }
}

#[test]
fn without_options_a_shared_arena_has_onnx_runtimes_defaults() {
    let memory = start();
    assert!(options_of(&memory, &slot()).is_none() && memory.devices().arena_slots().is_empty());
    let report = memory.devices().share_arena(&slot(), &ArenaOptions::new()).expect("shared");
    assert!(report.opened && report.conflicts.is_empty());
    for effective in &report.resolution.values {
        assert_eq!(effective.value, effective.key.default_value());
        assert_eq!(effective.source, ArenaSource::Default);
    }
    assert_eq!(memory.snapshot().devices.arenas[0].name, NAME);
    assert!(memory.shutdown_blocking(SOON).is_clean());
}

#[test]
fn a_session_counts_where_no_arena_is_and_the_last_to_leave_makes_room_for_the_next() {
    let memory = start();
    let first = memory.devices().use_arena(&slot(), &limit(8)).expect("opened");
    assert!(first.report.opened && first.report.conflicts.is_empty());
    assert_eq!(limit_of(&memory), (ByteSize::mib(8), ArenaSource::Session));
    // The second finds the first's arena; what it wants otherwise is said.
    let second = memory.devices().use_arena(&slot(), &limit(16)).expect("joined");
    let [conflict] = &second.report.conflicts[..] else { panic!("{:?}", second.report.conflicts) };
    assert_eq!((conflict.key, conflict.reason), (ArenaKey::Limit, "the arena is already open"));
    assert_eq!(conflict.effective.source, ArenaSource::Session);
    assert!(!second.report.opened);
    assert_eq!(figures(&memory, &slot()).users, 2);
    drop(first);
    assert_eq!(limit_of(&memory).0, ByteSize::mib(8), "one still uses it");
    drop(second);
    assert!(options_of(&memory, &slot()).is_none(), "nobody does");
    let third = memory.devices().use_arena(&slot(), &limit(16)).expect("opened");
    assert!(third.report.opened && third.report.conflicts.is_empty());
    assert_eq!(limit_of(&memory), (ByteSize::mib(16), ArenaSource::Session));
    drop(third);
    assert!(memory.shutdown_blocking(SOON).is_clean());
}

#[test]
fn a_shared_arena_keeps_sessions_options_out_and_says_so() {
    let memory = start();
    memory.devices().share_arena(&slot(), &limit(8)).expect("shared");
    let session = memory.devices().use_arena(&slot(), &limit(4)).expect("joined");
    let [conflict] = &session.report.conflicts[..] else {
        panic!("{:?}", session.report.conflicts)
    };
    assert_eq!(
        (conflict.wanted_by, conflict.reason),
        (ArenaSource::Session, "there is a shared arena")
    );
    assert_eq!(conflict.effective.value, ByteSize::mib(8).get());
    assert_eq!(conflict.effective.source, ArenaSource::Shared);
    // Options that agree, and none at all, are no conflict.
    for agreeing in [limit(8), ArenaOptions::new()] {
        assert!(
            memory
                .devices()
                .use_arena(&slot(), &agreeing)
                .expect("joined")
                .report
                .conflicts
                .is_empty()
        );
    }
    // It outlives its users, and ends once.
    drop(session);
    assert_eq!(limit_of(&memory), (ByteSize::mib(8), ArenaSource::Shared));
    memory.devices().unshare_arena(&slot()).expect("was shared");
    assert!(options_of(&memory, &slot()).is_none());
    let again = memory.devices().unshare_arena(&slot());
    assert_eq!(again, Err(MemoryError::NotShared { slot: slot() }));
    assert!(memory.shutdown_blocking(SOON).is_clean());
}

#[test]
fn an_arena_that_a_session_opened_can_be_shared_and_outlives_the_session() {
    let memory = start();
    let session = memory.devices().use_arena(&slot(), &limit(8)).expect("opened");
    let report = memory.devices().share_arena(&slot(), &limit(16)).expect("shared");
    let [conflict] = &report.conflicts[..] else { panic!("{:?}", report.conflicts) };
    assert_eq!(
        (conflict.wanted_by, conflict.reason),
        (ArenaSource::Shared, "the arena is already open")
    );
    drop(session);
    assert_eq!(limit_of(&memory), (ByteSize::mib(8), ArenaSource::Session));
    // From the next arena on shared wins over session, as ever.
    let replaced = memory.devices().replace_arena(&slot(), &ArenaOptions::new()).expect("replaced");
    assert_eq!(limit_of(&memory), (ByteSize::mib(16), ArenaSource::Shared));
    assert_eq!(replaced.conflicts[0].reason, "there is a shared arena");
    memory.devices().unshare_arena(&slot()).expect("was shared");
    assert!(memory.shutdown_blocking(SOON).is_clean());
}

#[test]
fn cudas_pool_is_an_error_and_opens_no_second_pool_beside_a_shared_arena() {
    let memory = start();
    let pool = options(&[("arena.use_cuda_mempool", "1")]);
    let unsupported = |error: MemoryError| match error {
        MemoryError::Options(error) => {
            assert!(matches!(&error.faults[..], [Fault { value: Some(_), .. }]), "{error}");
        }
        error => panic!("{error}"),
    };
    unsupported(memory.devices().share_arena(&slot(), &pool).expect_err("no such pool"));
    unsupported(memory.devices().use_arena(&slot(), &pool).map(drop).expect_err("no such pool"));
    assert!(memory.devices().arena_slots().is_empty(), "nothing was opened");
    memory.devices().share_arena(&slot(), &limit(8)).expect("shared");
    unsupported(memory.devices().use_arena(&slot(), &pool).map(drop).expect_err("no such pool"));
    unsupported(
        memory.devices().replace_arena(&slot(), &pool).map(drop).expect_err("no such pool"),
    );
    assert_eq!(figures(&memory, &slot()).users, 0, "nobody was counted");
    assert_eq!(limit_of(&memory), (ByteSize::mib(8), ArenaSource::Shared));
    assert!(memory.shutdown_blocking(SOON).is_clean());
}

#[test]
fn device_and_pinned_arenas_are_configured_apart() {
    let memory = start();
    let pinned = Slot::pinned(NAME, 0);
    memory.devices().share_arena(&slot(), &limit(8)).expect("shared");
    memory.devices().share_arena(&pinned, &limit(4)).expect("shared");
    let resolution = options_of(&memory, &pinned).expect("resolved");
    assert_eq!(resolution.limit(), ByteSize::mib(4));
    let session = memory.devices().use_arena(&pinned, &limit(8)).expect("joined");
    assert_eq!(session.report.conflicts.len(), 1, "the pinned arena's options differ from these");
    assert!(
        memory.devices().use_arena(&slot(), &limit(8)).expect("joined").report.conflicts.is_empty()
    );
    memory.devices().replace_arena(&pinned, &limit(2)).expect("replaced");
    assert_eq!(session.resolution().limit(), ByteSize::mib(2));
    assert_eq!(limit_of(&memory), (ByteSize::mib(8), ArenaSource::Shared), "untouched");
    // A pool of its own serves it, and drains when it is replaced.
    let strategy = session.resolution().get(ArenaKey::ExtendStrategy).clone();
    assert!(strategy.without_effect.is_some(), "{strategy}");
    assert!(session.alloc_pinned::<u8>(3 << 20).expect_err("the limit").is_out_of_memory());
    let mut buffer = session.alloc_pinned::<u8>(1 << 20).expect("room");
    buffer.fill(7).expect("no copy");
    let replaced = memory.devices().replace_arena(&pinned, &limit(4)).expect("replaced");
    assert_eq!(replaced.draining, Some(ByteSize::mib(1)));
    let found = figures(&memory, &pinned);
    assert_eq!(found.pool.expect("serves").live(), ByteSize::ZERO);
    assert_eq!(found.draining[0].live, ByteSize::mib(1));
    assert_eq!(buffer.to_vec(), Ok(vec![7; 1 << 20]));
    drop(buffer);
    until("the old pool goes", || figures(&memory, &pinned).draining.is_empty());
    assert_eq!(limit_of(&memory), (ByteSize::mib(8), ArenaSource::Shared), "untouched");
    let refused = mib(&session, 1).expect_err("another kind of memory");
    assert!(matches!(refused, DeviceError::Unsupported { .. }), "{refused}");
    drop(session);
    assert!(memory.shutdown_blocking(SOON).is_clean());
}

#[test]
fn a_pinned_pool_is_an_arena_of_the_host_with_figures_decay_and_a_name() {
    let builder = Memory::builder().device(DeviceChoice::Host).device_decay(DecayTime::AtOnce);
    let memory = builder.start().expect("starts");
    let kind = PinnedKind::PageLockedOrPageable;
    let config = || PinnedConfig { kind, ..PinnedConfig::new("staging") };
    let pool = memory.devices().open_pinned_pool(config()).expect("opened");
    let arena =
        || memory.snapshot().devices.arenas.into_iter().find(|arena| arena.name == "staging");
    let buffer = pool.alloc::<u8>(1 << 20).expect("room");
    let found = arena().expect("listed");
    assert_eq!((found.backend, found.live), (Backend::PinnedHost, ByteSize::mib(1)));
    assert_eq!(memory.devices().occupancy(64)[0].0, "staging");
    let taken =
        memory.devices().open_pinned_pool(config()).map(drop).expect_err("the name is in use");
    assert!(matches!(taken, MemoryError::DuplicateArena { .. }), "{taken}");
    drop(buffer);
    until("idle memory decays", || arena().is_some_and(|arena| arena.committed.is_zero()));
    pool.close().expect("nothing is live");
    drop(memory.devices().open_pinned_pool(config()).expect("the name is free again"));
    assert!(memory.shutdown_blocking(SOON).is_clean());
}

#[test]
fn a_replacement_is_in_force_although_sessions_hold_the_arena() {
    let memory = start();
    memory.devices().share_arena(&slot(), &limit(4)).expect("shared");
    let session = memory.devices().use_arena(&slot(), &ArenaOptions::new()).expect("joined");
    assert!(mib(&session, 6).expect_err("above the limit").is_out_of_memory());
    let replaced =
        memory.devices().replace_arena(&slot(), &options(&[("arena.max_mem", "8388608")]));
    let replaced = replaced.expect("replaced");
    assert_eq!((replaced.draining, replaced.released), (Some(ByteSize::ZERO), ByteSize::ZERO));
    let [conflict] = &replaced.conflicts[..] else { panic!("{replaced:?}") };
    assert_eq!(
        (conflict.wanted_by, conflict.reason),
        (ArenaSource::Shared, "a replacement sets the key")
    );
    // The key that it does not name is as it was; the session sees all of it.
    let resolution = session.resolution();
    let strategy = resolution.get(ArenaKey::ExtendStrategy);
    assert_eq!(strategy.source, ArenaSource::Shared);
    assert_eq!(limit_of(&memory), (ByteSize::mib(8), ArenaSource::Replacement));
    drop(mib(&session, 6).expect("within the new limit"));
    // A second replacement stands on the first.
    memory
        .devices()
        .replace_arena(&slot(), &options(&[("arena.extend_strategy", "0")]))
        .expect("replaced");
    assert_eq!(limit_of(&memory), (ByteSize::mib(8), ArenaSource::Replacement));
    drop(session);
    assert!(memory.shutdown_blocking(SOON).is_clean());
}

#[test]
fn a_replacement_where_no_arena_is_shares_one() {
    let memory = start();
    let replaced = memory.devices().replace_arena(&slot(), &limit(8)).expect("opened");
    assert_eq!((replaced.draining, replaced.opened), (None, true));
    let found = figures(&memory, &slot());
    assert!(found.shared && found.users == 0 && found.draining.is_empty());
    memory.devices().unshare_arena(&slot()).expect("was shared");
    assert!(memory.shutdown_blocking(SOON).is_clean());
}

#[test]
fn a_replaced_arena_keeps_its_blocks_and_goes_with_the_last() {
    let memory = start();
    memory.devices().share_arena(&slot(), &limit(64)).expect("shared");
    let session = memory.devices().use_arena(&slot(), &ArenaOptions::new()).expect("joined");
    let mut old = [mib(&session, 8).expect("room"), mib(&session, 8).expect("room")];
    drop(mib(&session, 8).expect("room")); // idle from now on
    old[0].slice_mut(&old[0].enter().expect("awake")).expect("host").fill(7);
    let idle = memory.snapshot().devices.arenas[0].idle;
    let replaced = memory.devices().replace_arena(&slot(), &limit(32)).expect("replaced");
    assert_eq!(replaced.draining, Some(ByteSize::mib(16)));
    assert!(!idle.is_zero());
    assert_eq!(replaced.released, idle, "what was idle went at once");
    let new = mib(&session, 1).expect("room");
    let found = figures(&memory, &slot());
    assert_eq!(found.arena.expect("serves").live, ByteSize::mib(1));
    let [draining] = &found.draining[..] else { panic!("{:?}", found.draining) };
    assert_eq!((draining.live, draining.idle), (ByteSize::mib(16), ByteSize::ZERO));
    let snapshot = memory.snapshot();
    assert_eq!((snapshot.devices.arenas.len(), snapshot.devices.draining.len()), (1, 1));
    // Still readable and writable, through leases of its own.
    let lease = old[0].enter().expect("awake");
    assert!(old[0].slice(&lease).expect("host").iter().all(|byte| *byte == 7));
    let foreign = new.enter().expect("awake");
    assert!(matches!(old[0].slice(&foreign), Err(DeviceError::ForeignLease { .. })));
    drop((lease, foreign));
    let [first, second] = old;
    drop(first);
    until("a freed part goes back", || {
        memory.snapshot().devices.draining.iter().all(|arena| arena.committed < ByteSize::mib(16))
    });
    assert_eq!(memory.snapshot().devices.draining.len(), 1, "one block is left");
    drop(second);
    until("the old arena goes", || memory.snapshot().devices.draining.is_empty());
    assert!(figures(&memory, &slot()).draining.is_empty());
    drop((new, session));
    assert!(memory.shutdown_blocking(SOON).is_clean());
}

#[test]
fn buffers_outlive_the_use_and_the_memory_counts_them_when_it_ends() {
    let memory = start();
    let session = memory.devices().use_arena(&slot(), &limit(8)).expect("opened");
    let buffer = session.alloc_from(&[3_u32; 1024], Region::Stable).expect("room");
    drop(session);
    let found = figures(&memory, &slot());
    assert!(found.arena.is_none() && found.resolution.is_none());
    assert_eq!((found.users, found.draining.len()), (0, 1));
    let report = memory.shutdown_blocking(SOON);
    assert_eq!(report.device_live, ByteSize::kib(4), "a draining block is outstanding");
    drop(memory);
    let lease = buffer.enter().expect("awake");
    assert_eq!(buffer.slice(&lease).expect("host")[1023], 3);
}

#[test]
fn a_replacement_that_fails_changes_nothing() {
    let memory = start();
    memory.devices().share_arena(&slot(), &limit(8)).expect("shared");
    let session = memory.devices().use_arena(&slot(), &ArenaOptions::new()).expect("joined");
    let kept = mib(&session, 1).expect("room");
    let others: Vec<_> =
        (0..63).map(|nth| memory.devices().open_arena(&format!("other {nth}"))).collect();
    assert!(others.iter().all(Result::is_ok));
    let full =
        memory.devices().replace_arena(&slot(), &limit(4)).expect_err("every place is taken");
    assert_eq!(full, MemoryError::TooMany { what: "arenas", max: 64 });
    assert_eq!(limit_of(&memory), (ByteSize::mib(8), ArenaSource::Shared));
    let found = figures(&memory, &slot());
    assert_eq!((found.users, found.draining.len()), (1, 0));
    drop(mib(&session, 4).expect("the old one serves"));
    drop((kept, session));
    assert!(memory.shutdown_blocking(SOON).is_clean());
}

#[test]
fn a_slot_that_cannot_be_is_a_typed_error() {
    let memory = start();
    let none = ArenaOptions::new();
    let elsewhere = Slot::device(NAME, 1);
    let refused = |slot: &Slot| memory.devices().share_arena(slot, &none).expect_err("refused");
    assert_eq!(refused(&Slot::device("", 0)), MemoryError::NoSlotName);
    let (name, known) = (elsewhere.to_string(), vec!["gpu:0".to_owned()]);
    assert_eq!(refused(&elsewhere), MemoryError::UnknownDevice { name, known });
    // A slot's arena and one that was opened by name would be one in metrics.
    let opened = memory.devices().open_arena(NAME).expect("free");
    let duplicate = MemoryError::DuplicateArena { arena: NAME.to_owned() };
    assert_eq!(refused(&slot()), duplicate);
    drop(opened);
    memory.devices().share_arena(&Slot::device("other", 0), &none).expect("shared");
    assert!(matches!(
        memory.devices().open_arena("other"),
        Err(MemoryError::DuplicateArena { .. })
    ));
    assert!(memory.shutdown_blocking(SOON).is_clean());
    drop(memory);
    let memory = Memory::builder().device(DeviceChoice::None).start().expect("starts");
    let refused = memory.devices().share_arena(&slot(), &none).expect_err("no device");
    let cause = Box::new(MemoryError::NoDevice);
    assert_eq!(refused, MemoryError::OpenArena { arena: NAME.to_owned(), cause });
    assert!(memory.shutdown_blocking(SOON).is_clean());
}

#[test]
fn the_device_limit_of_the_service_bounds_what_options_ask_for() {
    let builder = Memory::builder().device(DeviceChoice::Host).device_limit(ByteSize::mib(4));
    let memory = builder.start().expect("starts");
    let report = memory.devices().share_arena(&slot(), &limit(8)).expect("shared");
    assert_eq!(report.conflicts[0].reason, "the device limit is lower");
    assert_eq!(limit_of(&memory), (ByteSize::mib(4), ArenaSource::DeviceLimit));
    let session = memory.devices().use_arena(&slot(), &ArenaOptions::new()).expect("joined");
    assert!(mib(&session, 6).expect_err("above the limit").is_out_of_memory());
    drop(session);
    assert!(memory.shutdown_blocking(SOON).is_clean());
}

#[test]
fn the_steps_of_the_options_are_those_of_the_arena_and_the_cap_bounds_requests_too() {
    let memory = start();
    let steps = options(&[
        ("arena.initial_chunk_size_bytes", "4194304"),
        ("arena.max_power_of_two_extend_bytes", "8388608"),
        ("arena.max_mem", "33554432"),
    ]);
    let session = memory.devices().use_arena(&slot(), &steps).expect("opened");
    let committed = || memory.snapshot().devices.arenas[0].committed;
    let first = mib(&session, 1).expect("room");
    assert_eq!(committed(), ByteSize::mib(4), "the first step");
    // ONNX Runtime would take 16 MiB for it, and drops the cap in its stream-aware arena.
    let large = mib(&session, 10).expect("room");
    let most = ByteSize::mib(4 + 10);
    assert!(committed() <= most, "{}", committed());
    assert!(mib(&session, 30).expect_err("above the limit").is_out_of_memory());
    drop((first, large, session));
    assert!(memory.shutdown_blocking(SOON).is_clean());
}

/// Runs four threads at once.
fn at_once<T: Send>(act: impl Fn(u64) -> T + Sync) -> Vec<T> {
    let (together, act) = (Barrier::new(4), &act);
    thread::scope(|scope| {
        let together = &together;
        let run = |nth| {
            scope.spawn(move || {
                together.wait();
                act(nth)
            })
        };
        let threads: Vec<_> = (1..=4).map(run).collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    })
}

#[test]
fn first_sessions_at_the_same_time_get_one_arena() {
    let memory = start();
    for _ in 0..100 {
        let opened =
            |nth| memory.devices().use_arena(&slot(), &limit(2 * nth)).expect("opened or joined");
        let uses = at_once(opened);
        assert_eq!(uses.iter().filter(|one| one.report.opened).count(), 1);
        assert_eq!(uses.iter().filter(|one| one.report.conflicts.len() == 1).count(), 3);
        assert_eq!(figures(&memory, &slot()).users, 4);
        assert_eq!(memory.snapshot().devices.arenas.len(), 1);
        drop(uses);
        assert!(memory.snapshot().devices.arenas.is_empty());
    }
    assert!(memory.shutdown_blocking(SOON).is_clean());
}

/// Allocates, writes, reads back and frees until told to stop; counts what it could allocate.
fn load(arena: &ArenaUse, seed: u8, stop: &AtomicBool, served: &AtomicU64) {
    let mut held: Vec<(Buffer<u8>, u8)> = Vec::new();
    let mut mark = seed;
    while !stop.load(Ordering::Relaxed) {
        mark = mark.wrapping_mul(31).wrapping_add(7);
        let len = 1 + usize::from(mark) * 64;
        if let Ok(mut buffer) = arena.alloc::<u8>(len, Region::Dynamic) {
            let lease = buffer.enter().expect("awake");
            buffer.slice_mut(&lease).expect("host").fill(mark);
            drop(lease);
            held.push((buffer, mark));
            served.fetch_add(1, Ordering::Relaxed);
        }
        if held.len() > usize::from(mark % 8) {
            let (buffer, mark) = held.swap_remove(usize::from(mark) % held.len());
            let lease = buffer.enter().expect("awake");
            let bytes = buffer.slice(&lease).expect("host");
            assert!(bytes.iter().all(|byte| *byte == mark), "another block wrote here");
        }
    }
}

#[test]
fn replacements_under_load_lose_nothing_and_later_allocations_are_in_the_new_arena() {
    const ROUNDS: u64 = 12;
    let memory = start();
    memory.devices().share_arena(&slot(), &limit(64)).expect("shared");
    let (stop, served) = (AtomicBool::new(false), AtomicU64::new(0));
    thread::scope(|scope| {
        for seed in 1..=3 {
            let arena = memory.devices().use_arena(&slot(), &ArenaOptions::new()).expect("joined");
            let (stop, served) = (&stop, &served);
            scope.spawn(move || load(&arena, seed, stop, served));
        }
        let arena = memory.devices().use_arena(&slot(), &ArenaOptions::new()).expect("joined");
        for round in 0..ROUNDS {
            let before = served.load(Ordering::Relaxed);
            // A block of 128 MiB fits every second arena, and no other.
            let wide = round % 2 == 1;
            let size = if wide { 256 } else { 64 };
            let replaced = memory.devices().replace_arena(&slot(), &limit(size)).expect("replaced");
            assert_eq!(arena.alloc::<u8>(128 << 20, Region::Stable).is_ok(), wide, "{replaced:?}");
            until("the threads go on", || served.load(Ordering::Relaxed) > before + 20);
        }
        stop.store(true, Ordering::Relaxed);
    });
    until("every old arena goes", || memory.snapshot().devices.draining.is_empty());
    let found = figures(&memory, &slot());
    assert_eq!((found.users, found.draining.len()), (0, 0));
    assert_eq!(found.arena.expect("shared").live, ByteSize::ZERO);
    assert_eq!(memory.snapshot().devices.arenas.len(), 1);
    assert!(memory.shutdown_blocking(PATIENCE).is_clean());
}

#[test]
fn replacements_at_the_same_time_each_take_effect() {
    let memory = start();
    for _ in 0..50 {
        let done = at_once(|nth| memory.devices().replace_arena(&slot(), &limit(2 * nth)));
        assert!(done.iter().all(Result::is_ok), "{done:?}");
        let firsts = done.iter().flatten().filter(|replaced| replaced.draining.is_none());
        assert_eq!(firsts.count(), 1, "one of them found no arena");
        assert_eq!(memory.snapshot().devices.arenas.len(), 1);
        memory.devices().unshare_arena(&slot()).expect("was shared");
    }
    until("the old arenas go", || memory.snapshot().devices.draining.is_empty());
    assert!(memory.shutdown_blocking(SOON).is_clean());
}
