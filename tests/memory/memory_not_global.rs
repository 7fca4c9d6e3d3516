//! Parts that work without a started `Memory`, and without jemalloc as the global allocator.

use std::sync::Arc;
use std::time::Duration;

use lowtide::clock::{Clock, ManualClock};
use lowtide::config::DeviceChoice;
use lowtide::decay::DecayTime;
use lowtide::device::driver::host::HostDriver;
use lowtide::device::{ArenaConfig, DeviceArena, Region};
use lowtide::service::Endpoints;
use lowtide::{ByteSize, Memory};
use lowtide_admission::{Admission, Cost, Managed};
use lowtide_heap::{self as heap, HeapProbe, Unsupported};
use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle};

use crate::start::NOT_GLOBAL;
use crate::support::{threads, until, until_no_threads};

const SOON: Duration = Duration::from_secs(5);
/// With C's `malloc` served by jemalloc, Rust's default allocator is jemalloc as well.
const INTERPOSED: bool = cfg!(feature = "interpose");

/// The recorder of this process.
fn recorder() -> &'static PrometheusHandle {
    static RECORDER: std::sync::OnceLock<PrometheusHandle> = std::sync::OnceLock::new();
    RECORDER.get_or_init(|| PrometheusBuilder::new().install_recorder().expect("the first"))
}

#[test]
fn never_started_heap_arenas_and_resources_work_and_nothing_is_timed_or_published() {
    NOT_GLOBAL.run(|| {
        until_no_threads();
        let published = recorder().render();
        let clock = Arc::new(ManualClock::new());
        let shared: Arc<dyn Clock> = clock.clone();
        let decay = DecayTime::from_millis(1_000);
        let config = ArenaConfig { decay, ..ArenaConfig::new("alone") };
        let arena = DeviceArena::open(Arc::new(HostDriver::new()), Arc::clone(&shared), config);
        let arena = arena.expect("opens");
        let buffer = arena.alloc_from(&[5_u8; 4096], Region::Dynamic).expect("room");
        let lease = arena.enter().expect("awake");
        assert_eq!(buffer.slice(&lease), Ok(&[5_u8; 4096][..]));
        drop((buffer, lease));

        let model = Managed::builder("model", || Ok(7)).idle(Duration::from_secs(1));
        let model = model.build(shared, Some(Admission::new()));
        assert_eq!(model.acquire_blocking().map(|value| *value).ok(), Some(7));

        clock.advance(Duration::from_secs(3600));
        assert!(model.try_acquire().is_some(), "nobody unloads it");
        let idle = arena.glance().idle;
        assert!(!idle.is_zero(), "nobody lets it decay");
        let decayed = arena.decay(clock.now()).expect("not forked");
        assert_eq!(decayed, idle, "but who asks gets it");

        assert!(HeapProbe::new().expect("jemalloc is linked").snapshot().is_ok());
        assert!(heap::purge(&*clock).is_ok());
        assert_eq!(threads(), Vec::<String>::new());
        assert_eq!(recorder().render(), published, "nothing is published");
        let answer = Endpoints::new(None).answer("/memory").expect("answers");
        assert!(answer.body().contains("\"managed\": false"), "{}", answer.body());
    });
}

#[test]
fn with_a_heap_that_nobody_uses_it_starts_says_so_and_goes_on() {
    NOT_GLOBAL.run(|| {
        let memory = Memory::builder().device(DeviceChoice::Host).start().expect("starts");
        let diagnostics = memory.report().diagnostics();
        let said = diagnostics.iter().filter(|note| {
            note.about == "heap" && note.text.contains("jemalloc is not the global allocator")
        });
        assert_eq!(said.count(), usize::from(!INTERPOSED), "{diagnostics:?}");
        // What jemalloc took for itself when it started may go first.
        let expected = if INTERPOSED { Ok(ByteSize::ZERO) } else { Err(Unsupported::NoJemalloc) };
        until("a purge says that there is no heap to purge", || {
            let purged = memory.heap().purge().expect("not forked");
            purged.heap.expect("no refusal").jemalloc == expected
        });
        let arena = memory.devices().open_arena("weights").expect("opens");
        let buffer = arena.alloc::<u8>(1 << 20, Region::Stable).expect("room");
        let permit = memory.admission().try_admit(Cost::host(ByteSize::kib(1))).expect("fits");
        let snapshot = memory.snapshot();
        assert_eq!(snapshot.admission.held(), 1);
        assert!(snapshot.heap.is_some() && !snapshot.physical.is_zero());
        assert_eq!(memory.report().diagnostics(), diagnostics, "said once");
        drop((buffer, permit));
        assert!(memory.shutdown_blocking(SOON).is_clean());
    });
}
