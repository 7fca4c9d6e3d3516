//! Heap profiles while the service runs: files for after a kill, and suspects for a leak.
//!
//! If the heap profiler is active, a thread of its own, `lowtide-profiler`, takes profiles on
//! request. The sensor asks for a file when memory has settled, has grown, or nears the limit
//! (`CaptureTrigger`); the worker asks for a comparison at quiet times. Both only set a flag and
//! wake the thread, so that neither waits for a file. A profile takes some milliseconds.
//!
//! [`CaptureTrigger`] is pure, and takes each step once until memory has fallen again.
//!
//! Without the feature `profiling` the profiler is never active, so no profile is taken.
//!
//! Invariant: the control thread and the worker never write or read a profile.

mod folder;
#[cfg(feature = "profiling")]
mod suspects;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::bytes::ByteSize;
use crate::clock::{Bell, Clock, Moment, short};
use crate::config::Config;
use crate::sync::{Mutex, lock};
use lowtide_heap::{self as heap, HostError, Profiler};

use self::folder::Folder;
#[cfg(feature = "profiling")]
use self::suspects::Suspects;
use super::error::Diagnostic;
use super::trend::Grown;

/// The requests to the profiler's thread, and its last comparison.
#[derive(Debug, Default)]
pub(super) struct Profiles {
    /// Ends the thread's wait.
    pub(super) bell: Arc<Bell>,
    /// The cause of a requested capture, and the required bytes.
    capture: Mutex<Option<(CaptureCause, ByteSize)>>,
    compare: AtomicBool,
    suspects: Mutex<Option<Grown>>,
}

/// The part of the sensor that asks for captures.
#[derive(Debug)]
pub(super) struct Captures {
    trigger: CaptureTrigger,
    profiles: Arc<Profiles>,
}

/// Returns the requests if the profiler is active, unless the `Memory` is detached. Adds a
/// diagnostic if a folder is set and the profiler is not active.
pub(super) fn prepare(
    config: &Config,
    is_detached: bool,
    diagnostics: &mut Vec<Diagnostic>,
) -> Option<Arc<Profiles>> {
    if is_detached {
        return None;
    }
    if let Profiler::Active { .. } = heap::profiler() {
        #[cfg(feature = "profiling")]
        if let Err(error) = heap::cache_unwind_rules() {
            let text = format!("samples of the heap profiler stay expensive: {error}");
            diagnostics.push(Diagnostic::warning("profiler", text));
        }
        if let Some(folder) = &config.heap_profile_dir.value
            && let Err(error) = Folder::check(folder)
        {
            let text = format!(
                "no heap profile can be written to {folder:?}: {error}; expected a writable folder"
            );
            diagnostics.push(Diagnostic::warning("profiler", text));
        }
        return Some(Arc::default());
    }
    let folder = config.heap_profile_dir.value.as_ref()?;
    let state = heap::profiler().name();
    let text = format!(
        "no heap profile is written to {folder:?}: the profiler is {state}; expected a build with \
         the feature `profiling`, and prof:true in jemalloc's settings at start"
    );
    diagnostics.push(Diagnostic::warning("profiler", text));
    None
}

impl Captures {
    /// Returns the part of the sensor, if profiles go to a folder.
    pub(super) fn of(profiles: Option<&Arc<Profiles>>, config: &Config) -> Option<Self> {
        config.heap_profile_dir.value.as_ref()?;
        let profiles = Arc::clone(profiles?);
        Some(Self { trigger: CaptureTrigger::default(), profiles })
    }

    /// Asks for a capture if one is due at this sample. Does not allocate.
    pub(super) fn see(&mut self, now: Moment, required: ByteSize, limit: ByteSize) {
        let Some(cause) = self.trigger.see(now, required, limit) else { return };
        *lock(&self.profiles.capture) = Some((cause, required));
        self.profiles.bell.ring();
    }
}

impl Profiles {
    /// Asks for a comparison with the profile of an earlier quiet time.
    pub(super) fn compare(&self) {
        self.compare.store(true, Ordering::Release);
        self.bell.ring();
    }

    pub(super) fn suspects(&self) -> Option<Grown> {
        lock(&self.suspects).clone()
    }
}

/// Runs on the profiler's thread until `stop` is set and it is woken.
pub(super) fn run(
    profiles: &Profiles,
    folder: Option<&Path>,
    clock: &dyn Clock,
    stop: &AtomicBool,
) {
    let mut writer = folder.map(|path| ProfileWriter { path, folder: None, has_failed: false });
    #[cfg(feature = "profiling")]
    let mut suspects = Suspects::default();
    // Ends with `stop`; each iteration waits for a request.
    while !stop.load(Ordering::Acquire) {
        let capture = lock(&profiles.capture).take();
        if let (Some((cause, required)), Some(writer)) = (capture, &mut writer) {
            writer.write(cause, required, clock);
        } else if profiles.compare.swap(false, Ordering::AcqRel) {
            #[cfg(feature = "profiling")]
            compare(profiles, &mut suspects, clock);
        } else {
            clock.wait_until(&profiles.bell, Moment::NEVER);
        }
    }
}

#[cfg(feature = "profiling")]
fn compare(profiles: &Profiles, suspects: &mut Suspects, clock: &dyn Clock) {
    let (taken, at) = (clock.now(), clock.since_epoch());
    match heap::take_profile() {
        Ok(profile) => {
            if let Some(found) = suspects.add(&profile, taken, at) {
                *lock(&profiles.suspects) = Some(found);
            }
        }
        Err(error) => log!(debug, %error, "heap profile not compared"),
    }
}

/// Writes profiles to the folder.
struct ProfileWriter<'a> {
    path: &'a Path,
    /// `None` until the first profile.
    folder: Option<Folder>,
    /// `true` if the last profile could not be written, which is logged once.
    has_failed: bool,
}

impl ProfileWriter<'_> {
    fn write(&mut self, cause: CaptureCause, required: ByteSize, clock: &dyn Clock) {
        let start = clock.now();
        let opened = match self.folder.take() {
            Some(folder) => Ok(folder),
            None => Folder::open(self.path, clock.since_epoch()).map_err(HostError::from),
        };
        let cause = cause.name();
        let written = opened.and_then(|folder| self.folder.insert(folder).write(cause, required));
        let took = short(clock.now() - start);
        match written {
            Ok((path, size)) => {
                self.has_failed = false;
                let path = path.display();
                log!(info, %path, cause, %required, %size, %took, "heap profile written");
            }
            Err(error) if !std::mem::replace(&mut self.has_failed, true) => {
                let folder = self.path.display();
                log!(warn, %folder, cause, %error, "heap profile not written");
            }
            Err(_) => {}
        }
    }
}

/// The time after the start at which the service counts as settled. An estimate.
const SETTLED: Duration = Duration::from_secs(10);
/// The minimum time between the last profile and one of the next growth, so that bursts write few.
const CAPTURED_AGAIN: Duration = Duration::from_secs(600);

/// The steps: shares of the way from the settled memory to the limit.
const STEPS: [(f64, CaptureCause); 6] = [
    (0.125, CaptureCause::Growth),
    (0.25, CaptureCause::Growth),
    (0.5, CaptureCause::Growth),
    (0.75, CaptureCause::Limit),
    (0.875, CaptureCause::Limit),
    (0.9375, CaptureCause::Limit),
];
/// The share below which memory counts as fallen.
const FALLEN: f64 = 0.0625;

lowtide_core::named_enum! {
    /// The reason for which a heap profile is written.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    enum CaptureCause {
        /// The service has settled after its start.
        Baseline = "baseline",
        /// Memory has grown by an eighth, a quarter or a half of the way to the limit.
        Growth = "growth",
        /// Memory is three quarters of the way to the limit, or nearer.
        Limit = "limit",
    }
}

/// The memory at the start, and the steps already taken.
#[derive(Debug, Default)]
struct CaptureTrigger {
    start: Option<Moment>,
    is_settled: bool,
    /// The least required memory: at first that of the first sample.
    baseline: ByteSize,
    /// The index of the next step.
    next: usize,
    /// The time of the last capture.
    last: Moment,
}

impl CaptureTrigger {
    /// Returns the cause for a profile at this sample, if there is one. `required` is the memory
    /// that counts against the limit and could not be released.
    fn see(&mut self, now: Moment, required: ByteSize, limit: ByteSize) -> Option<CaptureCause> {
        let start = *self.start.get_or_insert_with(|| {
            self.baseline = required;
            now
        });
        self.baseline = self.baseline.min(required);
        let cause = self.step(now, required, limit).or_else(|| {
            let settles = !self.is_settled && now - start >= SETTLED;
            settles.then(|| {
                self.is_settled = true;
                self.baseline = required;
                CaptureCause::Baseline
            })
        });
        if cause.is_some() {
            self.last = now;
        }
        cause
    }

    fn step(&mut self, now: Moment, required: ByteSize, limit: ByteSize) -> Option<CaptureCause> {
        if limit == ByteSize::MAX {
            return None;
        }
        let way = limit.saturating_sub(self.baseline);
        let at = |share| self.baseline.saturating_add(way.scaled(share));
        if self.next > 0 && required < at(FALLEN) && now - self.last >= CAPTURED_AGAIN {
            self.next = 0;
        }
        let passed = STEPS.iter().filter(|(share, _)| required >= at(*share)).count();
        if passed <= self.next {
            return None;
        }
        self.next = passed;
        STEPS.get(passed - 1).map(|(_, cause)| *cause)
    }
}

#[cfg(all(test, not(lowtide_loom)))]
mod tests {
    use super::*;

    const LIMIT: ByteSize = ByteSize::mib(180);

    fn at(millis: u64) -> Moment {
        Moment::after_origin(Duration::from_millis(millis))
    }

    #[test]
    fn a_slow_growth_is_captured_at_each_step_once() {
        let mut trigger = CaptureTrigger::default();
        let mut seen = Vec::new();
        // 20 MiB for a minute, then one more each second, with noise of a MiB.
        for second in 0..220 {
            let required = ByteSize::mib(20 + u64::saturating_sub(second, 60) + second % 2);
            if let Some(cause) = trigger.see(at(second * 1000), required, LIMIT) {
                seen.push((required.get() >> 20, cause.name()));
            }
        }
        let expected = [
            (20, "baseline"),
            (40, "growth"),
            (60, "growth"),
            (100, "growth"),
            (140, "limit"),
            (160, "limit"),
            (170, "limit"),
        ];
        assert_eq!(seen, expected);
    }

    #[test]
    fn a_fast_growth_at_the_start_is_captured_before_the_service_has_settled() {
        let mut trigger = CaptureTrigger::default();
        let causes = [20, 21, 65, 150, 178].map(|mib| {
            let cause = trigger.see(at(mib), ByteSize::mib(mib), LIMIT);
            cause.map(CaptureCause::name)
        });
        assert_eq!(causes, [None, None, Some("growth"), Some("limit"), Some("limit")]);
    }

    #[test]
    fn bursts_are_captured_again_only_after_ten_minutes() {
        let mut trigger = CaptureTrigger::default();
        let burst = |second: u64| if second % 60 == 59 { 120 } else { 20 };
        let seen = (0..3600).filter(|&second| {
            trigger.see(at(second * 1000), ByteSize::mib(burst(second)), LIMIT).is_some()
        });
        assert_eq!(seen.count(), 1 + 6, "the baseline, and six of sixty bursts");
    }

    #[test]
    fn without_a_limit_only_the_baseline_is_captured() {
        let mut trigger = CaptureTrigger::default();
        let see = |second: &u64| {
            trigger.see(at(second * 1000), ByteSize::gib(*second), ByteSize::MAX).is_some()
        };
        assert_eq!((0..100).filter(see).collect::<Vec<_>>(), [10]);
    }
}
