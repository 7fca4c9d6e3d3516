//! Tests that need a process of their own: a forked child, and an environment with our variables.
//!
//! The tests run this program again with other variables; the test that then runs says on its
//! standard output what `Memory` made of them.
#![cfg(target_os = "linux")]
#![expect(unsafe_code, reason = "fork and waitpid are C calls")]

use std::process::Command;
use std::sync::Arc;
#[cfg(feature = "tokio")]
use std::sync::mpsc::channel;
use std::time::Duration;

use lowtide::clock::{ManualClock, Moment};
use lowtide::config::arena::ArenaOptions;
use lowtide::config::{DeviceChoice, Profile, env};
use lowtide::device::{DeviceArena, DeviceError, Region};
use lowtide::memory::{
    AdminCommand, AdminTask, AdminTaskState, ArenaUse, Builder, MemoryError, Slot, StartError,
};
use lowtide::{ByteSize, Memory};
use lowtide_admission::{Cost, LimitSource, Managed, ResourceError};
use test_fork::test;
use tikv_jemalloc_ctl::{background_thread, max_background_threads, raw};

use crate::support::{PATIENCE, advance_until, run_again, until_no_threads};

const SOON: Duration = Duration::from_secs(5);

/// Runs `act` in a forked child and says with which code the child ended.
pub(crate) fn forked(act: impl FnOnce() -> i32) -> i32 {
    // SAFETY: the child runs `act` and ends with `_exit`. Other threads of this process wait on
    // locks that `act` does not touch, and jemalloc, whose locks it may need, holds them across a
    // fork.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // Seconds after which the kernel ends a child that hangs.
        // SAFETY: sets a timer of this process and touches no memory.
        unsafe { libc::alarm(20) };
        let code = act();
        // SAFETY: ends the child at once, without running the parent's exit handlers.
        unsafe { libc::_exit(code) };
    }
    assert!(child > 0, "fork failed");
    let mut status = 0;
    // SAFETY: `status` is a valid place for an int, and `child` is our own child.
    let waited = unsafe { libc::waitpid(child, &raw mut status, 0) };
    assert_eq!(waited, child);
    assert!(libc::WIFEXITED(status), "the child was killed: status {status:#x}");
    libc::WEXITSTATUS(status)
}

/// The bug: the child got the parent's for ever.
#[test]
fn a_forked_child_shares_a_memory_of_its_own() {
    let parents = Memory::shared().expect("starts");
    let code = forked(|| {
        let childs = Memory::shared().expect("starts in the child");
        first_broken(&[
            childs.heap().purge().is_ok(),
            Memory::shared().is_ok_and(|one| one.heap().purge().is_ok()),
        ])
    });
    assert_eq!(code, 0, "the first that does not hold");
    assert!(parents.shutdown_blocking(SOON).is_clean());
}

/// The number of the first that does not hold, counted from 1; 0 where all do.
fn first_broken(checks: &[bool]) -> i32 {
    let broken = checks.iter().position(|holds| !holds);
    broken.map_or(0, |at| i32::try_from(at).unwrap_or(99) + 1)
}

fn check_child(
    memory: &Memory,
    arena: &DeviceArena,
    model: &Managed<i32>,
    session: &ArenaUse,
) -> i32 {
    let (slot, none) = (session.slot().clone(), ArenaOptions::new());
    let forked = MemoryError::Forked;
    let unloaded = model.unload_now(Duration::ZERO);
    let later = memory.managed("later", || Ok(1)).register();
    memory.heap().request_purge();
    let snapshot = memory.snapshot();
    first_broken(&[
        matches!(memory.heap().purge(), Err(MemoryError::Forked)),
        matches!(memory.devices().open_arena("other"), Err(MemoryError::Forked)),
        matches!(later, Err(MemoryError::Forked)),
        matches!(arena.alloc::<u8>(1, Region::Dynamic), Err(DeviceError::Forked)),
        matches!(model.acquire_blocking(), Err(ResourceError::Forked { .. })),
        matches!(unloaded, Err(ResourceError::Forked { .. })),
        snapshot.heap.is_none()
            && snapshot.devices.arenas.is_empty()
            && snapshot.resources.is_empty(),
        memory.report().diagnostics().is_empty(),
        session.alloc::<u8>(1, Region::Dynamic).err() == Some(DeviceError::Forked),
        memory.devices().use_arena(&slot, &none).err() == Some(forked.clone()),
        memory.devices().replace_arena(&slot, &none).err() == Some(forked.clone()),
        memory.devices().unshare_arena(&slot) == Err(forked),
        memory.devices().arena_slots().is_empty() && memory.devices().arena_slots().is_empty(),
        memory.devices().shrink("gpu:0") == Err(MemoryError::Forked),
        memory.shutdown_blocking(SOON).forked,
    ])
}

#[test]
fn a_forked_child_gets_typed_errors_its_drops_do_nothing_and_it_ends() {
    let clock = Arc::new(ManualClock::new());
    let builder = Memory::builder().clock(clock.clone()).device(DeviceChoice::Host);
    let memory = builder.start().expect("starts");
    let arena = memory.devices().open_arena("weights").expect("opens");
    let buffer = arena.alloc_from(&[3_u8; 4096], Region::Stable).expect("room");
    let parent = std::process::id();
    let model = memory.managed("model", || Ok(7)).unload(move |_| {
        if std::process::id() != parent {
            // SAFETY: ends the child at once, without running the parent's exit handlers.
            unsafe { libc::_exit(77) };
        }
    });
    let model = model.register().expect("registered");
    let guard = model.acquire_blocking().expect("loads");
    let permit = memory.admission().try_admit(Cost::host(ByteSize::kib(1))).expect("fits");
    let slot = Slot::device("session", 0);
    let session = memory.devices().use_arena(&slot, &ArenaOptions::new()).expect("opened");
    let options = [("memory.enable_memory_arena_shrinkage", "gpu:0")];
    let run = memory.devices().run(options).expect("begins");
    assert!(clock.wait_for_waiters(2, PATIENCE), "both threads rest while the process forks");

    let code = forked(|| {
        let code = check_child(&memory, &arena, &model, &session);
        drop((guard, permit, buffer, model, arena, session, run, memory));
        code
    });
    assert_eq!(code, 0, "the check of this number failed in the child");
}

#[test]
fn a_fork_leaves_the_parent_as_it_was() {
    let memory = Memory::builder().device(DeviceChoice::Host).start().expect("starts");
    let arena = memory.devices().open_arena("weights").expect("opens");
    let buffer = arena.alloc_from(&[3_u8; 4096], Region::Stable).expect("room");
    let model = memory.managed("model", || Ok(7)).register().expect("registered");
    let guard = model.acquire_blocking().expect("loads");
    let child = (memory.clone(), arena.clone(), model.clone());
    assert_eq!(forked(move || i32::from(!child.0.shutdown_blocking(SOON).forked)), 0);

    let snapshot = memory.snapshot();
    assert_eq!((snapshot.resources[0].guards, snapshot.devices.arenas.len()), (1, 1));
    let lease = arena.enter().expect("awake");
    assert_eq!(buffer.slice(&lease), Ok(&[3_u8; 4096][..]));
    assert!(memory.heap().purge().is_ok());
    drop((lease, buffer, guard));
    assert!(memory.shutdown_blocking(SOON).is_clean());
    until_no_threads();
}

#[test]
fn a_forked_child_may_start_a_memory_of_its_own_though_the_parents_runs() {
    let clock = Arc::new(ManualClock::new());
    let host = || Memory::builder().device(DeviceChoice::Host);
    let memory = host().clock(clock.clone()).start().expect("starts");
    assert!(clock.wait_for_waiters(2, PATIENCE), "both threads rest while the process forks");
    let code = forked(|| {
        // Its time stands still: a bell ends it.
        let own = host().clock(Arc::new(ManualClock::new())).start();
        let twice = matches!(host().start(), Err(StartError::AlreadyStarted));
        drop(memory.clone());
        let still = matches!(host().start(), Err(StartError::AlreadyStarted));
        let Ok(own) = own else { return 99 };
        let purged = own.heap().purge().is_ok();
        let clean = own.shutdown_blocking(SOON).is_clean();
        let again = host().start().is_ok_and(|memory| memory.shutdown_blocking(SOON).is_clean());
        until_no_threads();
        first_broken(&[twice, still, purged, clean, again])
    });
    assert_eq!(code, 0, "the check of this number failed in the child");
    assert!(matches!(host().start(), Err(StartError::AlreadyStarted)), "the parent's runs on");
    assert!(memory.shutdown_blocking(SOON).is_clean());
}

/// The test for which this program's other tests run it again: prints the effect of the
/// environment.
#[test]
fn memory_starts_as_the_environment_of_this_process_says() {
    println!("\n{}", outcome(Memory::builder()));
    // What code says, the environment wins over.
    let told = Memory::builder()
        .profile(Profile::Throughput)
        .ceiling(0.5)
        .idle_unload(Duration::from_secs(7))
        .device(DeviceChoice::Host);
    println!("with code: {}", outcome(told));
}

fn outcome(builder: Builder) -> String {
    let started = builder.start();
    match started {
        Ok(memory) => {
            let text = describe(&memory);
            assert!(memory.shutdown_blocking(SOON).is_clean());
            format!("started: {text}")
        }
        Err(error) => format!("refused: {error}"),
    }
}

/// Returns "in its time" if an arena falls asleep by itself, once it has memory, or "never".
fn sleeps(arena: &DeviceArena) -> String {
    let blocks = Region::ALL.map(|region| arena.alloc::<u8>(2 << 20, region).map(drop));
    assert!(blocks.iter().all(Result::is_ok), "{blocks:?}");
    let due = arena.next_sleep();
    if due == Moment::NEVER { "never".to_owned() } else { "in its time".to_owned() }
}

/// Each setting as `name=value (source)`, and what it did.
fn describe(memory: &Memory) -> String {
    let held = memory.snapshot().signal.limit;
    let arena = memory.devices().open_arena("one");
    let sleeps = arena.as_ref().map_or_else(|_| "nowhere".to_owned(), sleeps);
    let arena = arena.map_or_else(|error| error.to_string(), |arena| arena.limit().exact());
    // SAFETY: the decay time of arenas to come has type `ssize_t`.
    let decay: isize = unsafe { raw::read(b"arenas.dirty_decay_ms\0") }.expect("a control");
    let threads = max_background_threads::read().expect("a control");
    let runs = background_thread::read().expect("a control");
    let settings = memory.config().settings();
    let settings = settings.iter().map(|(name, it)| format!("{name}={} ({})", it.value, it.source));
    let effects = [
        format!("held={} ({})", held.bytes.exact(), held.source.name()),
        format!("K={}", memory.snapshot().host.correction_factor),
        format!("arena={arena}"),
        format!("sleeps={sleeps}"),
        format!("jemalloc={decay} ms, at most {threads} threads, on: {runs}"),
    ];
    settings.chain(effects).collect::<Vec<_>>().join("; ")
}

/// Runs this program again with these variables alone, and gives what it said: first without, then
/// with settings in code.
fn with_variables(variables: &[(&str, &str)]) -> (String, String) {
    let test = "memory_process::memory_starts_as_the_environment_of_this_process_says";
    let output = run_again(test, variables);
    let text = String::from_utf8_lossy(&output.stdout);
    let line = |start: &str| {
        let found = text.lines().find_map(|line| line.strip_prefix(start));
        found.unwrap_or_else(|| panic!("no {start:?} in {text}")).to_owned()
    };
    let bare =
        ["started: ", "refused: "].into_iter().find(|start| text.contains(&format!("\n{start}")));
    let bare = bare.expect("one of them");
    (format!("{bare}{}", line(bare)), line("with code: "))
}

#[test]
fn each_variable_reaches_what_it_sets() {
    let (bare, _) = with_variables(&[
        ("LOWTIDE_PROFILE", "low-memory"),
        ("LOWTIDE_MEMORY_LIMIT", "96m"),
        ("LOWTIDE_CEILING", "0.25"),
        ("LOWTIDE_CORRECTION_FACTOR", "1.25"),
        ("LOWTIDE_DEVICE", "host"),
        ("LOWTIDE_DEVICE_BACKEND", "plain"),
        ("LOWTIDE_DEVICE_LIMIT", "6m"),
        ("LOWTIDE_DEVICE_WATERMARK", "20%"),
        ("LOWTIDE_DEVICE_DECAY", "1500ms"),
        ("LOWTIDE_DEVICE_SLEEP_AFTER", "10m"),
        ("LOWTIDE_DEVICE_MIN_AWAKE", "20s"),
        ("LOWTIDE_DEVICE_SLEEP_STABLE", "stay"),
        ("LOWTIDE_DEVICE_SLEEP_DYNAMIC", "discard"),
        ("LOWTIDE_HEAP_DECAY", "2s"),
        ("LOWTIDE_BACKGROUND_THREADS", "1"),
        ("LOWTIDE_PURGE_INTERVAL", "never"),
        ("LOWTIDE_IDLE_UNLOAD", "90s"),
        ("LOWTIDE_MAX_WAIT", "3s"),
        ("LOWTIDE_ADMISSION", "observe"),
        ("LOWTIDE_METRICS_INTERVAL", "250ms"),
        ("LOWTIDE_METRICS", "detail"),
        ("LOWTIDE_PROCESS_METRICS", "off"),
        ("LOWTIDE_SERVICE_VERSION", "2.4.1"),
        ("LOWTIDE_EXHAUSTION_POLICY", "exit:10m"),
        ("LOWTIDE_FLIGHT_RECORDER", "/nonexistent/recording"),
        ("LOWTIDE_HEAP_PROFILE_DIR", "/profiles"),
        ("LOWTIDE_SPILL_DIR", env!("CARGO_TARGET_TMPDIR")),
        ("LOWTIDE_SPILL_MAX", "200m"),
    ]);
    for part in [
        "started: LOWTIDE_PROFILE=low-memory (environment)",
        "MEMORY_LIMIT=96MiB (environment)",
        "held=96MiB (override)",
        "CEILING=0.25 (environment)",
        "CORRECTION_FACTOR=1.25 (environment)",
        "K=1.25;",
        "LOWTIDE_DEVICE=host (environment)",
        "DEVICE_BACKEND=plain (environment)",
        "DEVICE_LIMIT=6MiB (environment)",
        "arena=6MiB",
        "DEVICE_WATERMARK=0.2 (environment)",
        "DEVICE_DECAY=1s 500ms (environment)",
        "DEVICE_SLEEP_AFTER=10m (environment)",
        "DEVICE_MIN_AWAKE=20s (environment)",
        "SLEEP_STABLE=stay (environment)",
        "SLEEP_DYNAMIC=discard (environment)",
        "sleeps=in its time",
        "HEAP_DECAY=2s (environment)",
        "jemalloc=2000 ms, at most 1 threads, on: true",
        "BACKGROUND_THREADS=1 (environment)",
        "PURGE_INTERVAL=never (environment)",
        "IDLE_UNLOAD=1m 30s (environment)",
        "MAX_WAIT=3s (environment)",
        "ADMISSION=observe (environment)",
        "METRICS_INTERVAL=250ms (environment)",
        "METRICS=detail (environment)",
        "PROCESS_METRICS=off (environment)",
        "SERVICE_VERSION=2.4.1 (environment)",
        "EXHAUSTION_POLICY=exit:10m (environment)",
        "FLIGHT_RECORDER=/nonexistent/recording (environment)",
        "HEAP_PROFILE_DIR=/profiles (environment)",
        concat!("SPILL_DIR=", env!("CARGO_TARGET_TMPDIR"), " (environment)"),
        "SPILL_MAX=200MiB (environment)",
    ] {
        assert!(bare.contains(part), "{part:?} is missing in {bare}");
    }
    assert_eq!(env::VARIABLES.len(), 28, "a variable was added that this test does not name");
}

#[test]
fn without_background_threads_jemalloc_runs_none() {
    let (bare, _) = with_variables(&[("LOWTIDE_BACKGROUND_THREADS", "0")]);
    assert!(bare.contains("BACKGROUND_THREADS=0 (environment)"), "{bare}");
    assert!(bare.ends_with(" threads, on: false"), "{bare}");
}

#[test]
fn the_environment_wins_over_code_and_code_over_the_profile() {
    let (bare, with_code) = with_variables(&[("LOWTIDE_CEILING", "0.25")]);
    for part in [
        "PROFILE=throughput (code)",
        "CEILING=0.25 (environment)",
        "IDLE_UNLOAD=7s (code)",
        "HEAP_DECAY=10s (profile)",
        "LOWTIDE_DEVICE=host (code)",
    ] {
        assert!(with_code.contains(part), "{part:?} is missing in {with_code}");
    }
    for part in ["SLEEP_AFTER=never (default)", "SLEEP_STABLE=keep (default)", "sleeps=never"] {
        assert!(bare.contains(part), "{part:?} is missing in {bare}");
    }
    for part in ["PROFILE=balanced (default)", "IDLE_UNLOAD=5m (profile)", "0.25 (environment)"] {
        assert!(bare.contains(part), "{part:?} is missing in {bare}");
    }
}

#[test]
fn an_unknown_variable_is_an_error_that_names_what_was_meant_or_lists_what_there_is() {
    let (bare, with_code) = with_variables(&[("LOWTIDE_MEMORYLIMIT", "1g")]);
    let expected = "refused: unknown variable LOWTIDE_MEMORYLIMIT: \
                    did you mean LOWTIDE_MEMORY_LIMIT?";
    assert_eq!((bare.as_str(), with_code.as_str()), (expected, expected));
    let (bare, with_code) = with_variables(&[("LOWTIDE_RAM", "1g")]);
    let expected = "refused: unknown variable LOWTIDE_RAM: expected one of ";
    assert!(bare.starts_with(expected), "{bare}");
    assert_eq!(bare, with_code);
    for variable in env::VARIABLES {
        assert!(bare.contains(variable), "{variable} is missing in {bare}");
    }
}

#[test]
fn a_bad_value_is_an_error_with_variable_value_and_what_was_expected() {
    let (bare, _) = with_variables(&[("LOWTIDE_CEILING", "180%"), ("LOWTIDE_DEVICE", "gpu")]);
    let expected = "refused: LOWTIDE_CEILING=\"180%\": expected a number in (0, 1], or a \
                    percentage up to 100%; \
                    LOWTIDE_DEVICE=\"gpu\": expected auto, cuda, cuda:1 (a number), cuda:GPU-... \
                    or cuda:MIG-... (a UUID), cuda:all, a list such as cuda:0,cuda:1, host or \
                    none";
    assert_eq!(bare, expected);
}

#[test]
fn what_kubernetes_injects_for_a_service_of_this_name_is_not_ours() {
    let (bare, _) = with_variables(&[
        ("LOWTIDE_SERVICE_HOST", "10.0.0.7"),
        ("LOWTIDE_SERVICE_PORT", "80"),
        ("LOWTIDE_SERVICE_PORT_HTTP", "80"),
        ("LOWTIDE_PORT", "tcp://10.0.0.7:80"),
        ("LOWTIDE_PORT_8080_TCP", "tcp://10.0.0.7:8080"),
        ("LOWTIDE_PORT_8080_TCP_PROTO", "tcp"),
        ("LOWTIDE_PORT_8080_TCP_PORT", "8080"),
        ("LOWTIDE_PORT_8080_TCP_ADDR", "10.0.0.7"),
        ("LOWTIDE_CEILING", "0.5"),
    ]);
    assert!(bare.starts_with("started: LOWTIDE_PROFILE=balanced (default)"), "{bare}");
    assert!(bare.contains("CEILING=0.5 (environment)"), "{bare}");
}

#[test]
fn a_device_that_cannot_be_had_is_an_error_and_none_refuses_arenas() {
    let (bare, with_code) = with_variables(&[("LOWTIDE_DEVICE", "cuda")]);
    assert!(bare.starts_with("refused: cannot open the device cuda: "), "{bare}");
    assert!(with_code.starts_with("refused: "), "it wins over the host in code: {with_code}");
    let (bare, _) = with_variables(&[("LOWTIDE_DEVICE", "cuda:7")]);
    assert!(bare.starts_with("refused: cannot open the device cuda:7: "), "{bare}");
    let (bare, _) = with_variables(&[("LOWTIDE_DEVICE", "none")]);
    assert!(bare.contains("cannot open arena \"one\": the configured device is none"), "{bare}");
}

/// A subscriber that fails as one does whose output is a full disk.
struct Panics;

impl tracing::Subscriber for Panics {
    fn enabled(&self, _: &tracing::Metadata<'_>) -> bool {
        true
    }

    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }

    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}

    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}

    fn event(&self, _: &tracing::Event<'_>) {
        panic!("the disk is full");
    }

    fn enter(&self, _: &tracing::span::Id) {}

    fn exit(&self, _: &tracing::span::Id) {}
}

/// The bug: a subscriber that panicked left admin tasks `running` for ever, failed the start and
/// closed arenas halfway. In a process of its own, since the worker's subscriber is the process's.
#[test]
fn a_subscriber_that_panicked_left_admin_tasks_running() {
    tracing::subscriber::set_global_default(Panics).expect("the first of this process");
    std::panic::set_hook(Box::new(|_| {}));
    let memory = Memory::builder().device(DeviceChoice::Host).start().expect("starts");
    let arena = memory.devices().open_arena("weights").expect("opens");
    drop(arena.alloc::<u8>(9 << 20, Region::Stable).expect("room"));
    let commands = [
        AdminCommand::Purge,
        AdminCommand::Trim { arena: "weights".to_owned(), keep: ByteSize::ZERO },
    ];
    for command in commands {
        memory.admin().run(command).expect("taken");
    }
    let is_done = |admin_task: &AdminTask| matches!(admin_task.state, AdminTaskState::Done(_));
    crate::support::until("all admin tasks are done", || {
        memory.admin().tasks().iter().all(is_done)
    });
    arena.close().expect("nothing is live");
    assert!(arena.snapshot().committed.is_zero(), "it was closed to the end");
    assert!(memory.shutdown_blocking(SOON).is_clean());
}

/// The bug: a process whose addresses were limited below its memory limit (`ulimit -v`) admitted
/// what it could not map, and was aborted. In processes of their own, which have such a limit.
#[test]
#[expect(clippy::disallowed_methods, reason = "how this process is told which half it is")]
fn a_limit_on_addresses_below_the_memory_limit_aborted_the_process() {
    const INNER: &str = "ADDRESSES_ARE_LIMITED";
    let test = "memory_process::a_limit_on_addresses_below_the_memory_limit_aborted_the_process";
    let Some(retain) = std::env::var_os(INNER) else {
        for (limit, retain) in
            [("-v 800000", "true"), ("-v 800000", "false"), ("-d 400000", "false")]
        {
            let own = std::env::current_exe().expect("this program");
            let script = format!("ulimit {limit} && exec \"$0\" --exact {test} --nocapture");
            let output = Command::new("sh")
                .args(["-c", &script])
                .arg(own)
                .env(INNER, retain)
                .env("_RJEM_MALLOC_CONF", format!("retain:{retain}"))
                .output()
                .expect("a shell");
            let [text, errors] =
                [&output.stdout, &output.stderr].map(|of| String::from_utf8_lossy(of));
            let ran = output.status.success() && text.contains("running 1 test");
            assert!(ran, "{limit} {retain}: {}\n{text}{errors}", output.status);
        }
        return;
    };
    const PIECE: usize = 16 << 20;
    let builder = Memory::builder().memory_limit(ByteSize::gib(1 << 20));
    let memory = builder.device(DeviceChoice::Host).start().expect("starts");
    let signal = memory.snapshot().signal;
    assert_eq!(signal.limit.source, LimitSource::AddressSpace, "{signal:?}");
    assert!(signal.limit.bytes < ByteSize::kib(800_000), "{signal:?}");
    let is_told =
        memory.report().diagnostics().iter().any(|note| note.text.contains("retain:false"));
    assert_eq!(is_told, retain == "true", "{:?}", memory.report().diagnostics());
    for round in 0..20 {
        let mut held = Vec::new();
        // What is admitted is there.
        while let Ok(permit) = memory.admission().try_admit(Cost::host(ByteSize::of(PIECE))) {
            held.push((permit, vec![1_u8; PIECE]));
        }
        assert!(round > 0 || held.len() > 2, "{} pieces fit", held.len());
    }
    assert!(memory.shutdown_blocking(SOON).is_clean());
}

/// The bug: a builder ignored a limit in the environment without a word.
#[test]
#[expect(clippy::disallowed_methods, reason = "how this process is told which half it is")]
fn a_builder_ignored_variables_silently() {
    const LIMIT: &str = "LOWTIDE_MEMORY_LIMIT";
    if std::env::var_os(LIMIT).is_none() {
        let test = "memory_process::a_builder_ignored_variables_silently";
        run_again(test, &[(LIMIT, "1g"), ("LOWTIDE_DEVICE", "")]);
        return;
    }
    let limit = |builder: Builder| {
        let memory = builder.device(DeviceChoice::Host).start().expect("starts");
        let limit = memory.config().memory_limit.value;
        assert!(memory.shutdown_blocking(SOON).is_clean());
        limit
    };
    assert_eq!(limit(Memory::builder()), Some(ByteSize::gib(1)));
    assert_eq!(limit(Memory::builder().without_environment()), None);
}

/// The bug: the child's control loop woke a worker of the parent's runtime, behind locks that a
/// thread of the parent may have held.
#[cfg(feature = "tokio")]
#[test]
fn a_forked_child_wakes_no_worker_of_its_parents_runtime() {
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    let runtime = runtime.worker_threads(2).build().expect("a runtime");
    let clock = Arc::new(ManualClock::new());
    let memory = Memory::builder().clock(clock).device(DeviceChoice::Host).start().expect("starts");
    let (served, (ends, end), (begun, has_begun)) = (memory.clone(), channel(), channel());
    runtime.spawn(async move {
        let _layer = served.layer();
        begun.send(()).expect("awaited");
        let _: Result<(), _> = end.recv();
    });
    has_begun.recv_timeout(PATIENCE).expect("it runs");
    let code = forked(|| {
        let clock = Arc::new(ManualClock::new());
        let childs = Memory::builder().clock(clock.clone()).device(DeviceChoice::Host).start();
        let childs = childs.expect("starts in the child");
        let value = Arc::new(());
        let loaded = Arc::clone(&value);
        let load = move || Ok(Arc::clone(&loaded));
        let model = childs.managed("model", load).idle(SOON).register().expect("new");
        // Each unload is at least one tick.
        for _ in 0..3 {
            drop(model.acquire_blocking().expect("loads"));
            advance_until(&clock, SOON, "it unloads", || Arc::strong_count(&value) == 2);
        }
        first_broken(&[runtime.metrics().global_queue_depth() == 0])
    });
    drop(ends);
    assert_eq!(code, 0, "the first that does not hold");
    assert!(memory.shutdown_blocking(SOON).is_clean());
}
