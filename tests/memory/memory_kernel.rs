//! The reactions of a `Memory` to the kernel's figures, and to a limit that is changed under it.
//! In processes of their own, since one installs the process's subscriber.
#![cfg(target_os = "linux")]

use std::sync::{Arc, Mutex};
use std::time::Duration;

use lowtide::clock::{Clock, ManualClock};
use lowtide::config::{DeviceChoice, Profile};
use lowtide::decay::DecayTime;
use lowtide::{ByteSize, Memory};
use lowtide_admission::{Cost, Level};
use test_fork::test;
use tracing::field::{Field, Visit};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt as _};

use crate::start::THROUGHPUT;
use crate::support::{Tree, advance_until};

const TICK: Duration = Duration::from_millis(250);
const SECOND: Duration = Duration::from_secs(1);

/// Keeps what is said of kills.
#[derive(Clone, Default)]
struct Kills(Arc<Mutex<Vec<u64>>>);

impl<S: tracing::Subscriber> Layer<S> for Kills {
    fn on_event(&self, event: &tracing::Event<'_>, _: Context<'_, S>) {
        event.record(&mut self.clone());
    }
}

impl Visit for Kills {
    fn record_u64(&mut self, field: &Field, value: u64) {
        if field.name() == "killed" {
            self.0.lock().expect("no panic").push(value);
        }
    }

    fn record_debug(&mut self, _: &Field, _: &dyn std::fmt::Debug) {}
}

#[test]
fn kills_are_logged_once_and_the_level_follows_a_limit_that_is_changed() {
    THROUGHPUT.run(|| {
        let said = Kills::default();
        let subscriber = tracing_subscriber::registry().with(said.clone());
        tracing::subscriber::set_global_default(subscriber).expect("the first of this process");
        let kills = || said.0.lock().expect("no panic").clone();

        let (clock, tree) = (Arc::new(ManualClock::new()), Tree::new(ByteSize::mib(512)));
        tree.killed(3); // before the start: not ours to report
        let memory = Memory::builder()
            .clock(Arc::clone(&clock) as Arc<dyn Clock>)
            .signals(tree.open())
            .device(DeviceChoice::Host)
            .profile(Profile::Throughput)
            .heap_decay(DecayTime::Never)
            .background_threads(0)
            .metrics_interval(TICK)
            .start()
            .expect("starts");
        assert_eq!(memory.report().diagnostics(), []);
        tree.stall(9_000_000, 1_000_000);
        tree.hold(100);
        advance_until(&clock, TICK, "it is sampled", || {
            memory.snapshot().physical == ByteSize::mib(100) && memory.level() == Level::None
        });
        let snapshot = memory.snapshot();
        let psi = snapshot.psi.expect("it has one");
        assert_eq!(psi.some_total, Duration::from_secs(9), "shown, and nothing is shed for it");
        assert!(memory.admission().try_admit(Cost::host(ByteSize::mib(1))).is_ok());

        // Lowered below what is held, raised, lowered a little, and without one that can be read.
        for (mib, level) in
            [(90, Level::Critical), (512, Level::None), (128, Level::Elevated), (512, Level::None)]
        {
            tree.limit(ByteSize::mib(mib));
            advance_until(&clock, TICK, "the level follows", || memory.level() == level);
            assert_eq!(memory.snapshot().signal.limit.bytes, ByteSize::mib(mib));
        }
        tree.limit_text("garbage");
        advance_until(&clock, TICK, "it is said", || {
            memory
                .report()
                .diagnostics()
                .iter()
                .any(|note| note.text.contains("512.0 MiB (cgroup), stays"))
        });
        assert!(memory.snapshot().signal.limit_is_stale);
        assert_eq!(memory.level(), Level::None);
        advance_until(&clock, TICK, "time passes", || clock.now().since_origin() > 20 * SECOND);
        assert_eq!(
            memory.report().diagnostics().len(),
            1,
            "once: {:?}",
            memory.report().diagnostics()
        );

        assert_eq!(kills(), [0_u64; 0]);
        tree.killed(4);
        advance_until(&clock, TICK, "the kill is logged", || !kills().is_empty());
        tree.killed(6);
        advance_until(&clock, TICK, "the two others are", || kills().len() > 1);
        let then = clock.now();
        advance_until(&clock, TICK, "time passes", || clock.now() - then > 4 * SECOND);
        assert_eq!(kills(), [1, 2], "each once");
        let snapshot = memory.snapshot();
        assert_eq!(snapshot.oom_kills, Some(6));
        assert_eq!(snapshot.events.expect("a cgroup").own.oom_kill, Some(3));
        assert!(memory.shutdown_blocking(Duration::from_secs(5)).is_clean());
    });
}

/// Report: garden-runc#406, podman#14677 (H), snapd#14275 (E): the limit of the cgroup that the
/// process had left stayed, and a limit that cannot be read was none.
#[test]
fn a_process_that_is_moved_has_the_limit_of_its_new_cgroup_and_says_if_it_cannot_be_read() {
    THROUGHPUT.run(|| {
        let (clock, tree) = (Arc::new(ManualClock::new()), Tree::new(ByteSize::mib(512)));
        let memory = Memory::builder()
            .clock(Arc::clone(&clock) as Arc<dyn Clock>)
            .signals(tree.open())
            .device(DeviceChoice::Host)
            .profile(Profile::Throughput)
            .background_threads(0)
            .metrics_interval(TICK)
            .start()
            .expect("starts");
        tree.move_to("to", Some(ByteSize::mib(200)));
        advance_until(&clock, TICK, "it is seen", || {
            memory.snapshot().signal.limit.bytes == ByteSize::mib(200)
        });
        let snapshot = memory.snapshot();
        assert!(snapshot.cgroup.is_some_and(|folder| folder.ends_with("to")));
        let [first, ..] = &*snapshot.bounds else { panic!("no bounds") };
        assert!(first.name.ends_with("to/memory.max"), "{first}");
        let warned = || {
            let notes = memory.report().diagnostics();
            notes.iter().filter(|note| note.text.contains("unread/memory.max: ")).count()
        };
        assert_eq!(warned(), 0);
        tree.move_to("unread", None);
        advance_until(&clock, TICK, "it is said", || warned() == 1);
        let then = clock.now();
        advance_until(&clock, TICK, "time passes", || clock.now() - then > 4 * SECOND);
        assert_eq!(warned(), 1, "once");
        assert!(memory.shutdown_blocking(5 * SECOND).is_clean());
    });
}
