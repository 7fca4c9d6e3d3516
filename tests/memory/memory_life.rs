//! A `Memory` starts once, ends whole, and starts again: threads, claims, notes, reports.
#![cfg(target_os = "linux")]

use std::sync::{Arc, Mutex, OnceLock, mpsc};
use std::thread;
use std::time::Duration;

use lowtide::clock::{Clock, ManualClock, SystemClock};
use lowtide::config::{DeviceChoice, Source};
use lowtide::device::Region;
use lowtide::memory::{Builder, Diagnostic, Event, MemoryError, StartError};
use lowtide::{ByteSize, Memory};
use lowtide_admission::{
    AdmissionMode, Budget, Cost, RejectReason, Rejected, ResourceError, Signals,
};
use test_fork::test;
use tracing_subscriber::layer::SubscriberExt as _;

use crate::start::NONE;
use crate::support::{
    PATIENCE, Tree, advance_until, nothing_to_read, shutdown_apart, threads, until,
    until_both_threads, until_no_threads,
};

const SOON: Duration = Duration::from_secs(5);
const TICK: Duration = Duration::from_millis(250);

fn quiet() -> Builder {
    Memory::builder().device(DeviceChoice::Host)
}

fn about(memory: &Memory, about: &str) -> Vec<String> {
    let diagnostics = memory.report().diagnostics().into_iter().filter(|note| note.about == about);
    diagnostics.map(|note| note.text).collect()
}

#[test]
fn a_second_start_is_a_typed_error_until_the_first_has_ended() {
    let memory = quiet().start().expect("starts");
    let second = quiet().start();
    assert!(matches!(second, Err(StartError::AlreadyStarted)), "{second:?}");
    assert_eq!(memory.level(), lowtide_admission::Level::None, "the first is untouched");
    assert!(memory.shutdown_blocking(SOON).is_clean());
    // The handle of the first may outlive the second.
    let third = quiet().start().expect("starts again");
    drop(memory);
    let fourth = quiet().start();
    assert!(matches!(fourth, Err(StartError::AlreadyStarted)), "an old handle freed the claim");
    assert!(third.shutdown_blocking(SOON).is_clean());
    until_no_threads();
}

#[test]
fn two_threads_run_from_start_to_shutdown_and_none_after() {
    until_no_threads();
    let memory = quiet().start().expect("starts");
    until_both_threads();
    let report = memory.shutdown_blocking(SOON);
    assert!(report.is_clean(), "{report}");
    assert_eq!(report.to_string(), "nothing outstanding");
    until_no_threads();
}

#[test]
fn a_thread_that_cannot_be_started_is_a_typed_error_that_leaves_nothing() {
    until_no_threads();
    // More than the 128 TiB of addresses that a process has.
    let failed = quiet().stack(ByteSize::gib(1 << 20)).start();
    let Err(StartError::Thread { name, error }) = failed else { panic!("{failed:?}") };
    assert_eq!(name, "lowtide-worker");
    assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock);
    until_no_threads();
    let memory = quiet().start().expect("the claim was given back");
    assert!(memory.shutdown_blocking(SOON).is_clean());
}

#[test]
fn a_start_that_fails_for_its_settings_gives_the_claim_back() {
    let failed = quiet().ceiling(1.5).start();
    let Err(StartError::Config(error)) = &failed else { panic!("{failed:?}") };
    assert!(error.to_string().contains("ceiling=\"1.5\": expected a number in (0, 1]"), "{error}");
    let failed = quiet().device(DeviceChoice::Cuda).start();
    let Err(StartError::NoCuda { cause, .. }) = &failed else { panic!("{failed:?}") };
    assert!(!cause.is_empty());
    until_no_threads();
    assert!(quiet().start().expect("starts").shutdown_blocking(SOON).is_clean());
}

#[test]
fn dropping_every_handle_ends_the_threads_without_waiting_for_them() {
    let (entered, worker_is_in) = mpsc::channel();
    let (open, gate) = mpsc::channel::<()>();
    let memory = quiet()
        .after_publish(move || {
            let _ = entered.send(());
            let _ = gate.recv_timeout(PATIENCE);
        })
        .start()
        .expect("starts");
    worker_is_in.recv_timeout(PATIENCE).expect("metrics are published at once");
    let clone = memory.clone();
    drop(memory);
    until_both_threads(); // A clone is left.
    drop(clone);
    // The worker is held by the hook: had the drop waited for it, this line would not be reached.
    assert!(threads().contains(&"lowtide-worker".to_owned()));
    open.send(()).expect("the hook waits");
    until_no_threads();
    assert!(quiet().start().expect("the claim was given back").shutdown_blocking(SOON).is_clean());
}

#[test]
fn a_second_shutdown_finds_nothing_left_to_do() {
    let memory = quiet().start().expect("starts");
    assert!(memory.shutdown_blocking(SOON).is_clean());
    assert!(memory.shutdown_blocking(SOON).is_clean());
    assert!(memory.shutdown_blocking(Duration::ZERO).is_clean());
    // What is asked of it afterwards answers, and does nothing.
    memory.heap().request_purge();
    let refused = memory.admission().try_admit(Cost::ZERO);
    assert_eq!(refused.map(drop), Err(Rejected::ShuttingDown));
    assert_eq!(memory.admission().stats().rejected_total(RejectReason::ShuttingDown), 1);
    assert!(memory.heap().purge().is_ok());
    until_no_threads();
}

#[test]
fn the_report_names_what_is_outstanding() {
    let memory = quiet().start().expect("starts");
    let arena = memory.devices().open_arena("weights").expect("opens");
    let model = memory.managed("reranker", || Ok(7)).register().expect("registered");
    let guard = model.acquire_blocking().expect("loads");
    let permit = memory.admission().try_admit(Cost::host(ByteSize::kib(1))).expect("fits");
    let buffer = arena.alloc::<u8>(1 << 20, Region::Stable).expect("room");

    let report = memory.shutdown_blocking(Duration::from_millis(1));
    assert!(!report.is_clean());
    assert_eq!((report.requests, report.device_live), (1, ByteSize::mib(1)));
    let [resource] = &report.resources[..] else { panic!("{report}") };
    assert!(resource.contains("reranker") && resource.contains("1 guard, "), "{resource}");
    assert!(report.panicked.is_empty() && !report.forked);
    let text = report.to_string();
    for part in ["1 request,", "1.0 MiB of device memory live; reranker is still in use"] {
        assert!(text.contains(part), "{part:?} is missing in {text:?}");
    }
    until_no_threads(); // they ended all the same
    let closed = model.acquire_blocking();
    assert!(matches!(closed, Err(ResourceError::Closed { .. })), "{closed:?}");

    // What was outstanding goes, and the next report is clean.
    assert_eq!(*guard, 7);
    drop((guard, permit, buffer));
    assert!(memory.shutdown_blocking(SOON).is_clean());
    assert_eq!(arena.glance().live, ByteSize::ZERO);
}

#[test]
fn shutdown_waits_for_a_guard_until_its_deadline_and_no_longer() {
    let clock = Arc::new(ManualClock::new());
    let memory = quiet().clock(clock.clone()).start().expect("starts");
    let model = memory.managed("model", || Ok(())).register().expect("registered");
    let guard = model.acquire_blocking().expect("loads");
    let ending = shutdown_apart(&memory, Duration::from_secs(60));
    // Worker, control, and the one who shuts down.
    assert!(clock.wait_for_waiters(3, PATIENCE));
    clock.advance(Duration::from_secs(59));
    assert!(!ending.is_finished(), "a second is left");
    clock.advance(Duration::from_secs(1));
    let report = ending.join().expect("no panic");
    assert_eq!(report.resources.len(), 1, "{report}");
    drop(guard);
    assert!(memory.shutdown_blocking(Duration::ZERO).is_clean());

    let memory = quiet().clock(clock.clone()).start().expect("starts");
    let model = memory.managed("model", || Ok(())).register().expect("registered");
    let guard = model.acquire_blocking().expect("loads");
    let ending = shutdown_apart(&memory, Duration::from_secs(60));
    assert!(clock.wait_for_waiters(3, PATIENCE));
    drop(guard);
    let report = ending.join().expect("no panic");
    assert!(report.is_clean(), "released in time: {report}");
}

#[test]
fn two_shutdowns_at_once_one_of_them_on_the_worker_do_not_wait_for_each_other() {
    let handle: Arc<OnceLock<Memory>> = Arc::default();
    let (entered, worker_is_in) = mpsc::channel();
    let (open, gate) = mpsc::channel::<()>();
    let hook = {
        let handle = Arc::clone(&handle);
        move || {
            let _ = entered.send(());
            let _ = gate.recv_timeout(PATIENCE);
            if let Some(memory) = handle.get() {
                assert!(memory.shutdown_blocking(SOON).is_clean());
            }
        }
    };
    let memory = quiet().after_publish(hook).start().expect("starts");
    handle.set(memory.clone()).expect("set once");
    worker_is_in.recv_timeout(PATIENCE).expect("metrics are published at once");
    until_both_threads();
    let ending = shutdown_apart(&memory, SOON);
    // The control thread is gone, so the other one waits for the worker now.
    until("the control thread ends", || threads() == ["lowtide-worker"]);
    open.send(()).expect("the hook waits");
    until("both shutdowns end", || ending.is_finished());
    assert!(ending.join().expect("no panic").is_clean());
    until_no_threads();
}

#[test]
fn shutdown_does_not_wait_past_its_deadline_for_a_job_that_does_not_end() {
    let clock = Arc::new(ManualClock::new());
    let (entered, worker_is_in) = mpsc::channel();
    let (open, gate) = mpsc::channel::<()>();
    let hook = move || {
        let _ = entered.send(());
        let _ = gate.recv_timeout(PATIENCE);
    };
    let memory = quiet().clock(clock.clone()).after_publish(hook).start().expect("starts");
    worker_is_in.recv_timeout(PATIENCE).expect("metrics are published at once");
    until_both_threads();
    let ending = shutdown_apart(&memory, SOON);
    until("the control thread ends", || threads() == ["lowtide-worker"]);
    assert!(clock.wait_for_waiters(1, PATIENCE));
    clock.advance(SOON - Duration::from_millis(1));
    assert!(!ending.is_finished(), "a millisecond is left");
    clock.advance(Duration::from_millis(1));
    until("the shutdown ends", || ending.is_finished());
    let report = ending.join().expect("no panic");
    assert_eq!(report.busy, ["lowtide-worker"]);
    assert!(!report.is_clean() && report.to_string().ends_with("lowtide-worker still running"));
    let second = quiet().start();
    assert!(matches!(second, Err(StartError::AlreadyStarted)), "its worker still runs");

    open.send(()).expect("the hook waits");
    assert!(memory.shutdown_blocking(SOON).is_clean(), "joined by the second call");
    assert!(quiet().start().expect("starts").shutdown_blocking(SOON).is_clean());
}

#[test]
fn a_hook_that_panics_costs_its_run_and_nothing_else() {
    let clock = Arc::new(ManualClock::new());
    let runs = Arc::new(Mutex::new(0));
    let hook = {
        let runs = Arc::clone(&runs);
        move || {
            *lowtide_core::sync::lock(&runs) += 1;
            panic!("planted");
        }
    };
    let memory = quiet().clock(clock.clone()).after_publish(hook).start().expect("starts");
    advance_until(&clock, Duration::from_secs(1), "it runs again", || {
        *lowtide_core::sync::lock(&runs) >= 2
    });
    let report = memory.shutdown_blocking(SOON);
    assert!(report.is_clean(), "the thread lives on: {report}");
}

#[test]
fn without_readable_proc_it_starts_says_so_once_and_admits_by_its_books() {
    let memory = quiet().signals(nothing_to_read()).start().expect("starts");
    let diagnostics = about(&memory, "signals");
    assert!(diagnostics.iter().any(|note| note.contains("statm")), "{diagnostics:?}");
    assert!(diagnostics.iter().any(|note| note.contains("meminfo")), "{diagnostics:?}");
    let mut once = memory.report().diagnostics();
    once.dedup();
    assert_eq!(once, memory.report().diagnostics());
    let snapshot = memory.snapshot();
    assert_eq!((snapshot.signal.rss, snapshot.physical), (None, ByteSize::ZERO));
    assert!(!snapshot.signal.limit.is_known());
    // No limit is known: everything is admitted, and booked all the same.
    let permit =
        memory.admission().try_admit(Cost::host(ByteSize::gib(1 << 20))).expect("admitted");
    assert_eq!(memory.snapshot().host.reserved, ByteSize::gib(1 << 20));
    drop(permit);
    assert!(memory.shutdown_blocking(SOON).is_clean());

    // A limit that was given holds all the same: nothing is measured, so the books alone count.
    let limited = quiet().memory_limit(ByteSize::mib(100)).signals(nothing_to_read());
    let memory = limited.start().expect("starts");
    assert_eq!(memory.snapshot().host.ceiling, ByteSize::mib(80));
    let permit = memory.admission().try_admit(Cost::host(ByteSize::mib(39))).expect("fits");
    let refused = memory.admission().try_admit(Cost::host(ByteSize::mib(39))).map(drop);
    assert!(matches!(refused, Err(Rejected::Full { .. })), "{refused:?}");
    drop(permit);
    assert!(memory.shutdown_blocking(SOON).is_clean());
}

#[test]
fn a_plain_program_without_a_runtime_admits_loads_and_ends() {
    let tree = Tree::new(ByteSize::mib(100));
    let memory = quiet().signals(tree.open()).start().expect("starts");
    let model =
        memory.managed("table", || Ok(vec![1_u8; 1 << 10])).cost(Cost::host(ByteSize::kib(1)));
    let model = model.register().expect("registered");
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..50 {
                    let cost = Cost::host(ByteSize::kib(64));
                    let permit = memory.admission().try_admit(cost).expect("fits");
                    assert_eq!(model.acquire_blocking().expect("loads").len(), 1 << 10);
                    drop(permit);
                }
            });
        }
    });
    let snapshot = memory.snapshot();
    assert_eq!(snapshot.admission.admitted_total, 200);
    assert_eq!(snapshot.resources[0].loads_ok_total, 1, "one load for all threads");
    let report = memory.shutdown_blocking(SOON);
    assert!(report.is_clean(), "{report}");
    assert!(model.try_acquire().is_none(), "unloaded at the end");
    assert_eq!(memory.snapshot().host.reserved, ByteSize::ZERO);
}

#[test]
fn arenas_are_named_once_and_none_is_opened_where_there_is_no_device() {
    let memory = quiet().device_limit(ByteSize::mib(3)).start().expect("starts");
    let arena = memory.devices().open_arena("one").expect("opens");
    assert_eq!(arena.limit(), ByteSize::mib(3));
    let twice = memory.devices().open_arena("one").map(drop);
    assert_eq!(twice, Err(MemoryError::DuplicateArena { arena: "one".to_owned() }));
    assert!(memory.shutdown_blocking(SOON).is_clean());

    let memory = Memory::builder().device(DeviceChoice::None).start().expect("starts");
    let refused = memory.devices().open_arena("one").map(drop);
    let cause = Box::new(MemoryError::NoDevice);
    assert_eq!(refused, Err(MemoryError::OpenArena { arena: "one".to_owned(), cause }));
    assert!(memory.shutdown_blocking(SOON).is_clean());
}

/// The bug: a closed arena kept its name, and one of 64 places, until the service ended.
#[test]
fn a_closed_arena_gives_up_its_name_and_its_place() {
    let memory = quiet().start().expect("starts");
    for _ in 0..70 {
        let arena = memory.devices().open_arena("one").expect("the name is free");
        let block = arena.alloc::<u8>(1 << 10, Region::Dynamic).expect("room");
        arena.close().expect_err("a block is live");
        assert!(!arena.is_closed());
        let twice = memory.devices().open_arena("one").map(drop);
        assert_eq!(twice, Err(MemoryError::DuplicateArena { arena: "one".to_owned() }));
        drop(block);
        arena.close().expect("nothing is live");
        assert!(arena.is_closed());
    }
    let last = memory.devices().open_arena("one").expect("opens");
    assert_eq!(memory.snapshot().devices.arenas.len(), 1);
    drop(last); // its last handle, and no end: buffers may be there
    let twice = memory.devices().open_arena("one").map(drop);
    assert_eq!(twice, Err(MemoryError::DuplicateArena { arena: "one".to_owned() }));
    assert!(memory.shutdown_blocking(SOON).is_clean());
}

/// The bug: a limit that raises nothing, and one that is passed at start, went by in silence.
#[test]
fn a_limit_that_can_never_work_is_said_once_with_both_numbers() {
    let tree = Tree::new(ByteSize::mib(100));
    tree.hold(20);
    for (given, parts) in [
        (ByteSize::mib(300), ["300.0 MiB (code)", "100.0 MiB, the limit of the cgroup"]),
        // Other processes of the cgroup hold half of it and may end: no reason to refuse the start.
        (ByteSize::mib(15), ["20.0 MiB in use", "the limit is 15.0 MiB, set by the configuration"]),
    ] {
        let memory = quiet().signals(tree.open()).memory_limit(given).start().expect("starts");
        let diagnostics = about(&memory, "limit");
        let [note] = &diagnostics[..] else { panic!("one note: {diagnostics:?}") };
        assert!(parts.iter().all(|part| note.contains(part)), "{note}");
        assert!(memory.shutdown_blocking(SOON).is_clean());
    }
    let memory = quiet().signals(tree.open()).memory_limit(ByteSize::mib(50)).start();
    let memory = memory.expect("starts");
    assert_eq!(about(&memory, "limit"), Vec::<String>::new(), "it lowers the limit, and fits");
    assert!(memory.shutdown_blocking(SOON).is_clean());
}

/// The bug: `LOWTIDE_MEMORY_LIMIT=512`, meant as MiB, started and shed every request.
#[test]
fn a_limit_below_what_the_process_holds_already_is_refused_at_start() {
    let tree = Tree::new(ByteSize::mib(100));
    let signals = [tree.open(), nothing_to_read(), Signals::open()];
    for (at, signals) in signals.into_iter().enumerate() {
        let refused = quiet().signals(signals).memory_limit(ByteSize::new(512)).start();
        let Err(StartError::LimitTooSmall { limit, from, held, least }) = &refused else {
            panic!("{at}: {refused:?}")
        };
        assert_eq!((*limit, *from), (ByteSize::new(512), Source::Code));
        assert_eq!(held.is_zero(), at == 1, "{at}: {held}");
        assert!(*least > *held && *least < ByteSize::mib(512), "{at}: {least}");
        let error = refused.expect_err("as above").to_string();
        assert!(error.ends_with("did you mean 512m?"), "{error}");
    }
    // 10 MiB are in use: up to 12.5 MiB nothing fits under the ceiling.
    let start = |limit| quiet().signals(tree.open()).memory_limit(limit).start();
    let Err(StartError::LimitTooSmall { least, .. }) = start(ByteSize::mib(12)) else {
        panic!("12 MiB start")
    };
    assert_eq!(least, ByteSize::mib(13));
    let memory = start(ByteSize::mib(13)).expect("the claim of the refused start is free");
    assert_eq!(about(&memory, "limit"), Vec::<String>::new());
    assert!(memory.admission().try_admit(Cost::host(ByteSize::kib(50))).is_ok());
    assert!(memory.shutdown_blocking(SOON).is_clean());

    // A cgroup's limit is not ours, and it may be raised: said, not refused.
    tree.limit(ByteSize::mib(8));
    let memory = quiet().signals(tree.open()).start().expect("starts");
    let [note] = &about(&memory, "limit")[..] else {
        panic!("{:?}", memory.report().diagnostics())
    };
    assert!(
        note.contains("10.0 MiB in use") && note.contains("8.0 MiB, set by the cgroup"),
        "{note}"
    );
    assert!(memory.shutdown_blocking(SOON).is_clean());
}

#[test]
fn a_start_in_observe_mode_says_that_nothing_keeps_the_limit() {
    for (mode, count) in [(AdmissionMode::Observe, 1), (AdmissionMode::Enforce, 0)] {
        let memory = quiet().admission_mode(mode).start().expect("starts");
        let told = about(&memory, "admission");
        assert_eq!(told.len(), count, "{told:?}");
        assert!(told.iter().all(|text| text.starts_with("observe mode")), "{told:?}");
        assert!(memory.shutdown_blocking(SOON).is_clean());
    }
}

/// The bug: five warnings named files, and none said that no request would ever be shed.
#[test]
fn without_proc_one_warning_says_that_no_request_is_rejected_for_memory() {
    let warnings = |memory: &Memory| -> Vec<String> {
        let of = |note: &Diagnostic| note.about == "signals" && note.is_problem;
        memory.report().diagnostics().into_iter().filter(of).map(|note| note.text).collect()
    };
    let memory = quiet().signals(nothing_to_read()).start().expect("starts");
    let [warning] = &warnings(&memory)[..] else { panic!("{:?}", memory.report().diagnostics()) };
    assert!(warning.starts_with("no memory limit found, so no request is rejected"), "{warning}");
    assert!(warning.contains("LOWTIDE_MEMORY_LIMIT") && warning.contains("statm"), "{warning}");
    assert!(memory.shutdown_blocking(SOON).is_clean());
    let limited = quiet().memory_limit(ByteSize::mib(100)).signals(nothing_to_read());
    let memory = limited.start().expect("starts");
    let [warning] = &warnings(&memory)[..] else { panic!("{:?}", memory.report().diagnostics()) };
    assert!(warning.contains("by their estimates alone"), "{warning}");
    assert!(memory.shutdown_blocking(SOON).is_clean());
}

/// The bug: a program without the macro ran with jemalloc's defaults, and nothing told.
#[test]
fn forgotten_settings_of_jemalloc_are_noted_with_the_line_to_add() {
    NONE.run(|| {
        let memory = quiet().start().expect("starts");
        let diagnostics = about(&memory, "heap");
        let said = diagnostics.iter().filter(|note| {
            note.contains("make `lowtide::global_allocator!(balanced);` its allocator")
        });
        assert_eq!(said.count(), 1, "{diagnostics:?}");
        assert!(memory.shutdown_blocking(SOON).is_clean());
    });
}

/// The bug: a machine without a GPU and without PSI logged two warnings at each start.
#[test]
fn a_start_without_a_gpu_and_without_psi_warns_of_neither() {
    // No PSI file in this tree, and no CUDA library in a process of this test.
    let tree = Tree::new(ByteSize::gib(1));
    tree.without_psi();
    let memory = Memory::builder().signals(tree.open()).start().expect("starts");
    let diagnostics = memory.report().diagnostics();
    for (about, text) in [("device", "device arenas use host memory"), ("signals", "PSI")] {
        let of = |note: &&Diagnostic| note.about == about && note.text.contains(text);
        let is_problem = diagnostics.iter().find(of).map(|note| note.is_problem);
        assert_eq!(is_problem, Some(false), "{diagnostics:?}");
    }
    let warnings = diagnostics.iter().filter(|note| note.is_problem);
    assert!(warnings.clone().all(|note| note.about == "heap"), "{diagnostics:?}");
    assert!(memory.shutdown_blocking(SOON).is_clean());
}

/// The bug: a model above the limit was registered, and acquiring it said to try again later.
#[test]
fn a_resource_above_the_ceiling_of_a_limit_that_cannot_grow_is_not_registered() {
    let tree = Tree::new(ByteSize::gib(1));
    let builder = quiet().signals(tree.open()).memory_limit(ByteSize::mib(100));
    let memory = builder.start().expect("starts");
    let of = |cost| memory.managed("model", || Ok(())).cost(cost);
    let both = Cost::host(ByteSize::mib(40)).and_device(ByteSize::mib(41));
    for cost in [Cost::host(ByteSize::mib(81)), both] {
        let refused = of(cost).register().map(drop);
        let (name, budget) = ("model".to_owned(), Budget::Host);
        let (cost, ceiling) = (ByteSize::mib(81), ByteSize::mib(80));
        let expected = MemoryError::ResourceTooLarge { name, budget, cost, ceiling };
        assert_eq!(refused, Err(expected));
    }
    of(Cost::host(ByteSize::mib(80))).register().expect("its name is free, and it may fit");
    assert!(memory.shutdown_blocking(SOON).is_clean());
    // Beyond the machine's 32 GiB as well, without a configured limit.
    let memory = quiet().signals(tree.open()).start().expect("starts");
    let above = memory.managed("model", || Ok(())).cost(Cost::host(ByteSize::gib(26)));
    let refused = above.register().map(drop);
    assert!(matches!(refused, Err(MemoryError::ResourceTooLarge { .. })), "{refused:?}");
    // Above the ceiling of the cgroup, whose limit may be raised.
    let above = memory.managed("model", || Ok(())).cost(Cost::host(ByteSize::gib(2)));
    let model = above.register().expect("registered");
    let error = model.acquire_blocking().map(drop).expect_err("2 GiB in 1 GiB");
    assert_eq!((error.reason(), error.retry_after()), ("does_not_fit", None));
    assert_eq!(about(&memory, "resources").len(), 1, "and noted");
    assert!(memory.shutdown_blocking(SOON).is_clean());
}

/// The load waited for 2 s, was rejected as one that may fit later, and the verdict was in order.
#[test]
fn a_resource_that_never_fits_beside_the_process_is_rejected_at_once_and_named() {
    let (clock, tree) = (Arc::new(ManualClock::new()), Tree::new(ByteSize::mib(250)));
    tree.hold(40);
    let builder = quiet().clock(Arc::clone(&clock) as Arc<dyn Clock>).signals(tree.open());
    let memory = builder.start().expect("starts");
    let ledger = memory.admission().ledger(Budget::Host);
    let tick = Duration::from_millis(250);
    advance_until(&clock, tick, "the process is measured", || {
        ledger.ceiling() == ByteSize::mib(200) && ledger.allowance() < ByteSize::mib(160)
    });
    let of = |name: &str, mib| {
        let cost = Cost::host(ByteSize::mib(mib));
        memory.managed(name, || Ok(())).cost(cost).register().expect("below the ceiling")
    };
    let model = of("embedder", 190);
    assert!(about(&memory, "resources").iter().any(|note| note.contains("\"embedder\"")));
    let error = crate::polled::now(model.acquire()).map(drop).expect_err("150 MiB are left");
    let ResourceError::Rejected { rejected, .. } = &error else { panic!("{error:?}") };
    let Rejected::TooLarge { budget: Budget::Host, asked, ceiling } = *rejected else {
        panic!("{rejected:?}")
    };
    assert_eq!(asked, ByteSize::mib(190));
    // Less what a purge would release.
    assert!(ceiling >= ByteSize::mib(160) && ceiling < ByteSize::mib(161), "{ceiling}");
    assert_eq!((error.reason(), error.retry_after()), ("does_not_fit", None));
    let answer = lowtide::service::unavailable(&error);
    assert!(answer.body().contains("than can ever be free"), "{}", answer.body());
    let verdict = memory.report().verdict();
    let expected = "The resource \"embedder\" cannot be loaded: it needs 190.0 MiB";
    assert!(verdict.summary.starts_with(expected), "{verdict:?}");
    // One that fits beside the process may wait for room.
    let fits = of("reranker", 150);
    drop(fits.acquire_blocking().expect("loads"));
    assert!(memory.shutdown_blocking(SOON).is_clean());
}

/// Asks for the notes at each event.
struct Curious {
    memory: Memory,
    seen: mpsc::Sender<usize>,
}

impl<S: tracing::Subscriber> tracing_subscriber::Layer<S> for Curious {
    fn on_event(
        &self,
        _event: &tracing::Event<'_>,
        _context: tracing_subscriber::layer::Context<'_, S>,
    ) {
        let _ = self.seen.send(self.memory.report().diagnostics().len());
    }
}

/// The bug: a note was logged with the lock of the notes held.
#[test]
fn a_subscriber_may_ask_for_the_notes_when_one_is_logged() {
    let tree = Tree::new(ByteSize::gib(1));
    let memory = quiet().signals(tree.open()).start().expect("starts");
    let before = memory.report().diagnostics().len();
    let (seen, sees) = mpsc::channel();
    let curious = Curious { memory: memory.clone(), seen };
    let registering = memory.clone();
    let apart = thread::spawn(move || {
        let subscriber = tracing_subscriber::registry().with(curious);
        tracing::subscriber::with_default(subscriber, || {
            let large = registering.managed("large", || Ok(()));
            drop(large.cost(Cost::host(ByteSize::gib(2))).register());
        });
    });
    assert_eq!(sees.recv_timeout(PATIENCE), Ok(before + 1), "it is there when it is logged");
    apart.join().expect("registered");
    assert!(memory.shutdown_blocking(SOON).is_clean());
}

#[test]
fn resources_whose_idle_time_is_never_stay() {
    let clock = Arc::new(ManualClock::new());
    let builder = quiet().clock(Arc::clone(&clock) as Arc<dyn Clock>).idle_unload(Duration::MAX);
    let memory = builder.start().expect("starts");
    let model = memory.managed("model", || Ok(())).register().expect("registered");
    drop(model.acquire_blocking().expect("loads"));
    clock.advance(Duration::from_secs(365 * 24 * 3600));
    assert_eq!(model.next_due(), lowtide::clock::Moment::NEVER);
    assert!(!model.unload_if_due(clock.now()) && model.stats().loaded);
    assert!(memory.shutdown_blocking(SOON).is_clean());
}

/// The bug: two resources of one name were one in metrics and in `/memory`.
#[test]
fn two_resources_of_one_name_were_registered() {
    let memory = quiet().start().expect("starts");
    let register = |name| memory.managed(name, || Ok(())).register().map(drop);
    assert_eq!(register("model"), Ok(()));
    assert_eq!(
        register("model"),
        Err(MemoryError::Resource(ResourceError::Duplicate { name: "model".into() }))
    );
    assert_eq!(register("other"), Ok(()));
    assert_eq!(memory.snapshot().resources.len(), 2);
    assert!(memory.shutdown_blocking(SOON).is_clean());
}

#[test]
fn automatic_device_memory_in_host_memory_is_said() {
    NONE.run(|| {
        let memory = Memory::builder().start().expect("starts");
        assert_eq!(memory.config().devices.source, Source::Default);
        let arena = memory.devices().open_arena("one").expect("opens");
        assert_eq!(arena.backend().name(), "host");
        let diagnostics = about(&memory, "device");
        assert!(diagnostics.iter().any(|note| note.contains("host memory")), "{diagnostics:?}");
        let [heap] = &about(&memory, "heap")[..] else {
            panic!("{:?}", memory.report().diagnostics())
        };
        assert!(heap.contains("global_allocator!"), "else the heap is as it was asked for: {heap}");
        let cost = Cost::host(ByteSize::mib(1)).and_device(ByteSize::mib(2));
        let permit = memory.admission().try_admit(cost).expect("fits");
        let booked = permit.cost();
        assert_eq!(booked, Cost::host(ByteSize::mib(3)), "device memory is host memory here");
        drop(permit);
        assert!(memory.shutdown_blocking(SOON).is_clean());
    });
}

#[test]
fn a_start_takes_its_first_sample_before_it_returns() {
    let tree = Tree::new(ByteSize::mib(100));
    tree.hold(95);
    let clock: Arc<dyn Clock> = Arc::new(SystemClock::new());
    let memory = quiet().clock(clock).signals(tree.open()).start().expect("starts");
    assert_eq!(memory.level(), lowtide_admission::Level::Critical);
    let first = memory.admission().try_admit(Cost::host(ByteSize::kib(1))).map(drop);
    assert!(matches!(first, Err(Rejected::Pressure { .. })), "{first:?}");
    assert!(memory.shutdown_blocking(SOON).is_clean());
}

/// Keeps the messages and levels of events.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<(tracing::Level, String)>>>);

impl Log {
    /// Returns the lines that `work` logs on this thread.
    fn of(work: impl FnOnce()) -> Vec<(tracing::Level, String)> {
        let log = Self::default();
        let subscriber = tracing_subscriber::registry().with(log.clone());
        tracing::subscriber::with_default(subscriber, work);
        let mut kept = log.0.lock().expect("no panic");
        std::mem::take(&mut *kept)
    }
}

impl<S: tracing::Subscriber> tracing_subscriber::Layer<S> for Log {
    fn on_event(
        &self,
        event: &tracing::Event<'_>,
        _context: tracing_subscriber::layer::Context<'_, S>,
    ) {
        struct Message(String);
        impl tracing::field::Visit for Message {
            fn record_debug(&mut self, field: &tracing::field::Field, value: &dyn std::fmt::Debug) {
                if field.name() == "message" {
                    self.0 = format!("{value:?}");
                }
            }
        }
        let mut message = Message(String::new());
        event.record(&mut message);
        self.0.lock().expect("no panic").push((*event.metadata().level(), message.0));
    }
}

/// The bug: nothing said why a service that SIGTERM had reached was not ready.
#[test]
fn a_service_that_is_to_end_says_so_once() {
    let memory = quiet().start().expect("starts");
    let line = (tracing::Level::INFO, "not ready any more: the service is to end".to_owned());
    let lines = Log::of(|| (0..2).for_each(|_| memory.set_ending()));
    assert_eq!(lines, [line]);
    assert!(memory.shutdown_blocking(SOON).is_clean());
}

/// The bug: a load that found no room left no line and no event. Only its callers heard of it.
#[test]
fn a_load_that_finds_no_room_is_logged_once_and_an_event_with_its_need() {
    let (clock, tree) = (Arc::new(ManualClock::new()), Tree::new(ByteSize::mib(100)));
    let own = Arc::clone(&clock) as Arc<dyn Clock>;
    let memory = quiet().clock(own).signals(tree.open()).start().expect("starts");
    let model = memory.managed("model", || Ok(())).cost(Cost::host(ByteSize::mib(40)));
    let model = model.register().expect("registered");
    let held = memory.admission().try_admit(Cost::host(ByteSize::mib(50))).expect("fits");
    let refused = || Log::of(|| (0..3).for_each(|_| assert!(model.warm().is_err())));
    assert_eq!(refused(), [(tracing::Level::WARN, "load refused".to_owned())]);
    assert!(refused().is_empty(), "once while it goes on");
    let told = || {
        let is_it = |event: &Event| event.kind == "load" && event.about == "model";
        memory.report().events().into_iter().find(is_it).map(|event| event.text)
    };
    advance_until(&clock, TICK, "it is an event", || told().is_some());
    let (text, start) = (told().expect("told"), "load refused: cannot reserve 40.0 MiB of host");
    assert!(text.starts_with(start) && text.contains(": 50.0 MiB reserved, allowance"), "{text}");
    (0..60).for_each(|_| clock.advance(TICK));
    assert_eq!(refused().len(), 1, "and again after a pause");
    drop(held);
    advance_until(&clock, TICK, "it loads", || model.warm().is_ok());
    assert!(memory.shutdown_blocking(SOON).is_clean());
}

/// The bug: a resource without a name was registered, and its line in metrics had an empty label.
#[test]
fn a_resource_without_a_name_is_refused() {
    let memory = quiet().start().expect("starts");
    let error = memory.managed("", || Ok(())).register().map(drop).expect_err("no name");
    assert!(matches!(error, MemoryError::Options(_)), "{error}");
    assert_eq!(error.to_string(), "name=\"\": expected the name of a resource");
    assert!(memory.snapshot().resources.is_empty());
    assert!(memory.shutdown_blocking(SOON).is_clean());
}

/// The bugs: protection ended without a word when the last handle was dropped; and a `main` that
/// ended by an error warned of it before the error, although nothing ran.
#[test]
fn dropping_the_last_handle_without_a_shutdown_logs_a_warning_if_requests_run() {
    let warning = (tracing::Level::WARN, "memory manager dropped without shutdown".to_owned());
    let memory = quiet().start().expect("starts");
    let admission = memory.admission().clone();
    let permit = admission.try_admit(Cost::host(ByteSize::mib(1))).expect("fits");
    assert!(!Log::of(|| drop(memory)).contains(&warning), "a handle is left");
    assert_eq!(Log::of(|| drop(admission)), std::slice::from_ref(&warning));
    drop(permit);
    until_no_threads();

    let memory = quiet().start().expect("starts");
    let idle = Log::of(|| drop(memory));
    assert_eq!(idle, [(tracing::Level::DEBUG, warning.1.clone())], "nothing runs");
    until_no_threads();

    let memory = quiet().start().expect("starts");
    assert!(memory.shutdown_blocking(SOON).is_clean());
    assert!(!Log::of(|| drop(memory)).contains(&warning), "it was shut down");
    let failed = Log::of(|| drop(quiet().stack(ByteSize::gib(1 << 20)).start()));
    assert!(!failed.contains(&warning), "it did not start");
    until_no_threads();
}
