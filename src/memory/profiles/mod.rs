//! Heap profiles while the service runs: files for after a kill, and suspects for a leak.
//!
//! If the heap profiler is active, a thread of its own, `lowtide-profiler`, takes profiles on
//! request. The sensor asks for a file when memory has settled, has grown, or nears the limit
//! (`CaptureTrigger`); the worker asks for a comparison at quiet times. Both only set a flag and
//! wake the thread, so that neither waits for a file. A profile takes some milliseconds.
//!
//! Without the feature `profiling` the same items in `no_profiles.rs` do nothing.
//!
//! Invariant: the control thread and the worker never write or read a profile.

mod folder;
mod names;
mod suspects;
mod trigger;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::time::Duration;

use crate::bytes::ByteSize;
use crate::clock::{Bell, Clock, Moment, short};
use crate::config::Config;
use crate::sync::{Mutex, lock};
use lowtide_heap::{self as heap, HostError, Profiler};

use self::folder::Folder;
use self::suspects::Suspects;
use self::trigger::{CaptureCause, CaptureTrigger};
use super::error::Diagnostic;
use super::leaks::LeakSuspects;

/// No capture is requested; a cause is requested as its index plus 1.
const NONE: u8 = 0;

/// The requests to the profiler's thread, and its last comparison.
#[derive(Debug, Default)]
pub(super) struct Profiles {
    bell: Arc<Bell>,
    capture: AtomicU8,
    /// The required bytes at the requested capture.
    required: AtomicU64,
    compare: AtomicBool,
    suspects: Mutex<Option<LeakSuspects>>,
}

/// The part of the sensor that asks for captures.
#[derive(Debug)]
pub(super) struct Captures {
    trigger: CaptureTrigger,
    profiles: Arc<Profiles>,
}

/// Returns the requests if the profiler is active. Adds a diagnostic if a folder is set and the
/// profiler is not active.
pub(super) fn prepare(config: &Config, diagnostics: &mut Vec<Diagnostic>) -> Option<Arc<Profiles>> {
    if let Profiler::Active { .. } = heap::profiler() {
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
        self.profiles.required.store(required.get(), Ordering::Relaxed);
        let nth = CaptureCause::ALL.iter().position(|other| *other == cause).unwrap_or(0);
        let nth = u8::try_from(nth).unwrap_or(0);
        self.profiles.capture.store(nth + 1, Ordering::Release);
        self.profiles.bell.ring();
    }
}

impl Profiles {
    /// Asks for a comparison with the profile of an earlier quiet time.
    pub(super) fn compare(&self) {
        self.compare.store(true, Ordering::Release);
        self.bell.ring();
    }

    /// Returns the bell that ends the thread's wait.
    pub(super) const fn bell(&self) -> &Arc<Bell> {
        &self.bell
    }

    pub(super) fn suspects(&self) -> Option<LeakSuspects> {
        lock(&self.suspects).clone()
    }

    fn requested(&self) -> Option<CaptureCause> {
        let nth = self.capture.swap(NONE, Ordering::Acquire).checked_sub(1)?;
        CaptureCause::ALL.get(usize::from(nth)).copied()
    }
}

/// Runs on the profiler's thread until `stop` is set and it is woken.
pub(super) fn run(
    profiles: &Profiles,
    folder: Option<&Path>,
    clock: &dyn Clock,
    stop: &AtomicBool,
) {
    let mut writer = folder.map(|path| Writer { path, folder: None, has_failed: false });
    let mut suspects = Suspects::default();
    // Ends with `stop`; each iteration waits for a request.
    while !stop.load(Ordering::Acquire) {
        if let (Some(cause), Some(writer)) = (profiles.requested(), &mut writer) {
            let required = ByteSize::new(profiles.required.load(Ordering::Relaxed));
            writer.write(cause, required, clock);
        } else if profiles.compare.swap(false, Ordering::AcqRel) {
            compare(profiles, &mut suspects, clock);
        } else {
            clock.wait_until(&profiles.bell, Moment::NEVER);
        }
    }
}

fn compare(profiles: &Profiles, suspects: &mut Suspects, clock: &dyn Clock) {
    let (taken, at) = (clock.now(), clock.since_epoch());
    match heap::take_profile() {
        Ok(profile) => {
            if let Some(found) = suspects.add(&profile, taken, at) {
                *lock(&profiles.suspects) = Some(found);
            }
        }
        Err(error) => log!(debug, target: "lowtide", %error, "heap profile not compared"),
    }
}

/// Writes profiles to the folder.
struct Writer<'a> {
    path: &'a Path,
    /// `None` until the first profile.
    folder: Option<Folder>,
    /// `true` if the last profile could not be written, which is logged once.
    has_failed: bool,
}

impl Writer<'_> {
    fn write(&mut self, cause: CaptureCause, required: ByteSize, clock: &dyn Clock) {
        let start = clock.now();
        let written = self.written(cause, required, clock.since_epoch());
        let (cause, took) = (cause.name(), clock.now() - start);
        match written {
            Ok((path, size)) => {
                self.has_failed = false;
                log!(
                    info,
                    target: "lowtide",
                    path = %path.display(),
                    cause,
                    %required,
                    %size,
                    took = %short(took),
                    "heap profile written"
                );
            }
            Err(error) if !std::mem::replace(&mut self.has_failed, true) => {
                let folder = self.path.display();
                log!(
                    warn,
                    target: "lowtide",
                    %folder,
                    cause,
                    %error,
                    "heap profile not written"
                );
            }
            Err(_) => {}
        }
    }

    fn written(
        &mut self,
        cause: CaptureCause,
        required: ByteSize,
        since_epoch: Duration,
    ) -> Result<(std::path::PathBuf, ByteSize), HostError> {
        let folder = match &mut self.folder {
            Some(folder) => folder,
            none => {
                let folder = Folder::open(self.path, since_epoch)?;
                none.insert(folder)
            }
        };
        folder.write(cause.name(), required)
    }
}
