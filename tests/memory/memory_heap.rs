//! The process heap under a running `Memory`, in a process of its own: decay without jemalloc's
//! threads, caches of a runtime's parked workers, growth of what C code's heap keeps.
#![expect(unsafe_code, reason = "C's malloc is called, as a library's code would")]

use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use lowtide::config::{DeviceChoice, Profile};
use lowtide::decay::DecayTime;
use lowtide::device::{DeviceArena, Region};
use lowtide::memory::{Builder, Diagnostic, MemorySnapshot};
use lowtide::{ByteSize, Memory};
use lowtide_admission::Signals;
use lowtide_heap::{self as heap, HeapProbe};
use test_fork::test;

use crate::support::until;

const SOON: Duration = Duration::from_secs(5);

/// By the machine's clock; nothing is purged but under pressure or when somebody asks.
fn builder() -> Builder {
    Memory::builder()
        .device(DeviceChoice::Host)
        .profile(Profile::Throughput)
        .memory_limit(ByteSize::gib(64))
        .metrics_interval(Duration::from_secs(3600))
}

fn heap(memory: &Memory) -> heap::HeapSnapshot {
    memory.snapshot().heap.expect("jemalloc tells")
}

/// Makes dirty pages on the calling thread.
fn dirty(mib: usize) {
    let blocks: Vec<_> = (0..mib).map(|_| vec![7_u8; 1 << 20]).collect();
    assert_eq!(std::hint::black_box(&blocks).len(), mib);
    drop(blocks);
}

#[test]
fn without_threads_of_jemallocs_its_dirty_pages_decay_all_the_same() {
    let never = builder().background_threads(0).heap_decay(DecayTime::Never);
    let memory = never.start().expect("starts");
    dirty(64);
    assert!(heap(&memory).dirty >= ByteSize::mib(48));
    assert!(memory.shutdown_blocking(SOON).is_clean());

    // They stayed. From here on nobody allocates enough to have jemalloc look by itself.
    let decays = builder().background_threads(0).heap_decay(DecayTime::from_millis(200));
    let memory = decays.start().expect("starts");
    assert_eq!(heap(&memory).background_threads, 0);
    dirty(64);
    assert!(heap(&memory).dirty >= ByteSize::mib(16), "{:?}", heap(&memory));
    let probe = HeapProbe::new().expect("jemalloc tells");
    until("dirty pages decay", || {
        probe.snapshot().expect("jemalloc tells").dirty < ByteSize::mib(4)
    });
    assert!(memory.shutdown_blocking(SOON).is_clean());
}

#[test]
fn workers_of_a_runtime_that_are_parked_give_up_their_caches_when_the_worker_purges() {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .on_thread_start(lowtide::memory::on_thread_start)
        .on_thread_park(heap::on_thread_park)
        .build()
        .expect("a runtime");
    let handle = runtime.handle().clone();
    let wake = move || {
        for _ in 0..handle.metrics().num_workers() {
            handle.spawn(async {});
        }
    };
    let memory = builder()
        .background_threads(0)
        .heap_decay(DecayTime::Never)
        .after_tcache_flush_request(wake);
    let memory = memory.start().expect("starts");
    memory.heap().purge().expect("not forked");
    let before = heap(&memory).thread_caches;
    for _ in 0..4 {
        let task = async {
            let sizes = [1_usize, 2, 4, 8, 16, 28].map(|kib| kib << 10);
            drop(std::hint::black_box(sizes.map(|size| vec![vec![7_u8; size]; 10])));
        };
        runtime.block_on(async { tokio::spawn(task).await }).expect("no panic");
    }
    let full = heap(&memory).thread_caches;
    assert!(full.saturating_sub(before) >= ByteSize::kib(200), "{before} {full}");
    until("the workers' caches are empty", || {
        memory.heap().request_purge();
        heap(&memory).thread_caches.saturating_sub(before) <= ByteSize::kib(100)
    });
    assert!(memory.shutdown_blocking(SOON).is_clean());
    drop(runtime);
}

/// Bytes that C code had and freed, with a block at the end that keeps glibc from giving them back.
fn fill_and_free_the_c_heap(mib: usize) -> *mut libc::c_void {
    const SIZE: usize = 64 << 10;
    let block = || {
        // SAFETY: any size may be asked for; what comes back is checked, and written within.
        let block = unsafe { libc::malloc(SIZE) };
        assert!(!block.is_null());
        // SAFETY: the block has that size.
        unsafe { libc::memset(block, 7, SIZE) };
        block
    };
    let blocks: Vec<_> = (0..mib * 16).map(|_| block()).collect();
    let last = block();
    for block in blocks {
        // SAFETY: from `malloc`, and freed once.
        unsafe { libc::free(block) };
    }
    last
}

/// Bug: idle purges looked at the pages of jemalloc alone, so that an idle service kept what its C
/// libraries had freed. 48 MiB are less than what counts as growth.
#[test]
fn an_idle_service_gives_back_what_the_heap_of_c_code_keeps() {
    if cfg!(feature = "interpose") || heap::libc_heap().is_err() {
        println!("skipped: C code has no heap of its own here, or none that can be trimmed");
        return;
    }
    let memory = builder().profile(Profile::Balanced).purge_interval(Some(Duration::MAX));
    let memory = memory.start().expect("starts");
    let signals = Signals::open();
    let anonymous = || signals.sample().anonymous.expect("the kernel tells");
    let request = memory.admission().try_admit(lowtide_admission::Cost::ZERO).expect("admitted");
    memory.heap().purge().expect("not forked");
    let before = anonymous();
    let last = fill_and_free_the_c_heap(48);
    let grown = anonymous().saturating_sub(before);
    assert!(grown >= ByteSize::mib(40), "{grown}");
    drop(request);
    until("what is idle there goes back", || {
        anonymous().saturating_sub(before) <= ByteSize::mib(8)
    });
    // SAFETY: from `malloc`, and freed once.
    unsafe { libc::free(last) };
    assert!(memory.shutdown_blocking(SOON).is_clean());
}

/// A block of C code.
struct OfC(*mut libc::c_void);

// SAFETY: the block is nobody else's, and may be freed on any thread.
unsafe impl Send for OfC {}
// SAFETY: nothing reads or writes it.
unsafe impl Sync for OfC {}

impl OfC {
    fn new(bytes: usize) -> Self {
        // SAFETY: any size may be asked for; what comes back is checked, and written within.
        let block = unsafe { libc::malloc(bytes) };
        assert!(!block.is_null());
        // SAFETY: the block has that size.
        unsafe { libc::memset(block, 7, bytes) };
        Self(block)
    }
}

impl Drop for OfC {
    fn drop(&mut self) {
        // SAFETY: from `malloc`, and freed once.
        unsafe { libc::free(self.0) };
    }
}

/// Bug: a session of an engine written in C++ was measured as 0 bytes, and nothing said so.
#[test]
fn a_resource_of_c_code_is_measured_by_the_growth_around_its_load() {
    if cfg!(feature = "interpose") {
        println!("skipped: jemalloc serves C code");
        return;
    }
    let memory = builder().start().expect("starts");
    let load = || {
        drop(OfC::new(20 << 20)); // as a file that is read and parsed
        Ok(OfC::new(40 << 20))
    };
    let model = memory.managed("of C", load).register().expect("registered");
    let request = memory.admission().try_admit(lowtide_admission::Cost::ZERO).expect("admitted");
    drop(model.acquire_blocking().expect("loads"));
    drop(request);
    let found = model.stats().measured.expect("measured").host;
    assert!(found >= ByteSize::mib(38) && found <= ByteSize::mib(46), "{found}");
    let said = |part: &str| {
        memory.report().diagnostics().iter().any(|note| note.to_string().contains(part))
    };
    assert!(
        said("of C") && said("interpose") && said("growth"),
        "{:?}",
        memory.report().diagnostics()
    );
    assert!(model.unload_now(SOON).expect("nobody holds it"));
    assert!(model.stats().recovered_total.host >= ByteSize::mib(38));

    // Beside another request nobody can tell whose memory it is.
    let other = memory.admission().try_admit(lowtide_admission::Cost::ZERO).expect("admitted");
    let request = memory.admission().try_admit(lowtide_admission::Cost::ZERO).expect("admitted");
    let model = memory.managed("beside", load).register().expect("registered");
    drop(model.acquire_blocking().expect("loads"));
    drop((request, other));
    let found = model.stats().measured.unwrap_or_default().host;
    assert!(found <= ByteSize::mib(4), "{found}");
    assert!(said("\"beside\"") && said("not measured"), "{:?}", memory.report().diagnostics());
    assert!(memory.shutdown_blocking(SOON).is_clean());
}

/// What the process allocates from jemalloc during a load, such as requests that run at the same
/// time, was taken for memory of C code.
#[test]
fn a_load_during_traffic_is_not_taken_for_memory_of_c_code() {
    let memory = builder().start().expect("starts");
    for requests in [1, 3] {
        let traffic = Arc::new(Mutex::new(Vec::new()));
        let held = Arc::clone(&traffic);
        let load = move || {
            let allocate = || vec![7_u8; 40 << 20];
            held.lock().expect("no panic").push(thread::spawn(allocate).join().expect("no panic"));
            Ok(vec![7_u8; 8 << 20])
        };
        let name = format!("beside {requests}");
        let model = memory.managed(&name, load).register().expect("registered");
        let admit = || memory.admission().try_admit(lowtide_admission::Cost::ZERO);
        let permits: Vec<_> = (0..requests).map(|_| admit().expect("admitted")).collect();
        drop(model.acquire_blocking().expect("loads"));
        drop((permits, traffic));
        let found = model.stats().measured.expect("measured").host;
        assert!(found >= ByteSize::mib(8) && found <= ByteSize::mib(12), "{found}");
        let is_said = |note: &Diagnostic| note.text.contains("of C or C++ code");
        assert!(
            !memory.report().diagnostics().iter().any(is_said),
            "{:?}",
            memory.report().diagnostics()
        );
    }
    assert!(memory.shutdown_blocking(SOON).is_clean());
}

/// Bug: a maximum without a folder was set, and nothing was ever spilled.
#[test]
fn a_maximum_of_spilled_bytes_without_a_folder_is_said_to_have_no_effect() {
    for set in [false, true] {
        let builder = if set { builder().spill_max(ByteSize::gib(2)) } else { builder() };
        let memory = builder.start().expect("starts");
        let is_said =
            |note: &Diagnostic| note.is_problem && note.text.contains("LOWTIDE_SPILL_DIR");
        assert_eq!(memory.report().diagnostics().iter().any(is_said), set);
        assert!(memory.shutdown_blocking(SOON).is_clean());
    }
}

/// Bug: a maximum far above the free disk was set without a word.
#[test]
fn a_maximum_of_spilled_bytes_above_the_free_disk_is_a_diagnostic_with_both() {
    let builder =
        builder().spill_dir(env!("CARGO_TARGET_TMPDIR")).spill_max(ByteSize::gib(8 << 10));
    let memory = builder.start().expect("starts");
    let notes = memory.report().diagnostics();
    let note = notes.iter().find(|note| note.about == "spill_max").expect("a diagnostic");
    assert!(note.is_problem && note.text.contains("8.0 TiB"), "{note}");
    assert!(note.text.contains("room for"), "{note}");
    assert!(memory.shutdown_blocking(SOON).is_clean());
}

/// Bug: a model in an arena of host memory was measured a second time as memory of C code, and did
/// not fit any more when it was loaded again.
#[test]
fn memory_in_a_device_arena_is_not_measured_again_as_growth() {
    let memory = builder().start().expect("starts");
    let arena = memory.devices().open_arena("weights").expect("opened");
    let load = |arena: &DeviceArena| {
        let mut weights = arena.alloc::<u8>(32 << 20, Region::Stable)?;
        let lease = arena.enter()?;
        weights.slice_mut(&lease)?.fill(1);
        drop(lease);
        Ok(weights)
    };
    let model = memory.managed_in(&arena, "weights", load).register().expect("registered");
    drop(model.acquire_blocking().expect("loads"));
    let found = model.stats().measured.expect("measured").host;
    assert!(found >= ByteSize::mib(32) && found <= ByteSize::mib(38), "{found}");
    let is_said = memory
        .report()
        .diagnostics()
        .iter()
        .any(|note| note.to_string().contains("of C or C++ code"));
    assert!(!is_said, "{:?}", memory.report().diagnostics());
    assert!(memory.shutdown_blocking(SOON).is_clean());
}

/// Services whose load never pauses, and whose C libraries free and keep, grew until they were
/// killed: a trim when the service is idle never came.
#[test]
fn a_busy_service_gives_back_what_the_heap_of_c_code_keeps() {
    if cfg!(feature = "interpose") || heap::libc_heap().is_err() {
        println!("skipped: C code has no heap of its own here, or none that can be trimmed");
        return;
    }
    let memory = builder().profile(Profile::Balanced).purge_interval(Some(Duration::MAX));
    let memory = memory.start().expect("starts");
    let busy = memory.admission().try_admit(lowtide_admission::Cost::ZERO).expect("admitted");
    let signals = Signals::open();
    let anonymous = || signals.sample().anonymous.expect("the kernel tells");
    let before = anonymous();
    let last = fill_and_free_the_c_heap(160);
    let grown = anonymous().saturating_sub(before);
    assert!(grown >= ByteSize::mib(128), "{grown}");
    until("what is idle there goes back", || {
        anonymous().saturating_sub(before) <= ByteSize::mib(64)
    });
    // SAFETY: from `malloc`, and freed once.
    unsafe { libc::free(last) };
    drop(busy);
    let snapshot: MemorySnapshot = memory.snapshot();
    assert_eq!(snapshot.cpus, signals.cpus());
    assert!(memory.shutdown_blocking(SOON).is_clean());
}
