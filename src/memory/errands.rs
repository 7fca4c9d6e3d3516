//! Errands: what an operator asks for by name, and the worker does.
//!
//! Six verbs: purge, trim, sleep, wake, unload, snapshot. Whoever asks is not kept waiting; what
//! came of an errand stands in a short list. Who may ask is not decided here.
//!
//! Invariants: at most [`WAITING_MAX`] errands wait, and `KEPT_MAX` of all are kept; an errand
//! that was begun has an end, be it a panic; of pictures the last one is kept.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use thiserror::Error;

use crate::bytes::ByteSize;
use crate::control::{Job, Resource, ResourceStats, Trigger, UnloadReason};
use crate::device::{DeviceArena, SleepOptions};
use crate::sync::{Mutex, caught, lock};

use super::shared::Shared;
use super::{Memory, MemoryError};

/// Errands that wait at most: the worker does one after the other.
const WAITING_MAX: usize = 8;
/// Errands that are kept, those that have ended included.
const KEPT_MAX: usize = 16;

/// What can be asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Verb {
    /// Give back all idle memory of the heap and of every arena.
    Purge,
    /// Give back idle memory of an arena until at most so much is committed.
    Trim {
        /// The arena.
        arena: String,
        /// What may stay committed.
        keep: ByteSize,
    },
    /// Have an arena fall asleep, if nobody holds a lease; contents as it is configured.
    Sleep {
        /// The arena.
        arena: String,
    },
    /// Wake an arena.
    Wake {
        /// The arena.
        arena: String,
    },
    /// Unload a resource, if nobody holds it.
    Unload {
        /// The resource.
        resource: String,
    },
    /// Take a picture of an arena ([`ArenaMap::to_svg`](crate::device::ArenaMap::to_svg)).
    Snapshot {
        /// The arena.
        arena: String,
    },
}

impl Verb {
    /// The names of all verbs.
    pub const NAMES: [&str; 6] = ["purge", "trim", "sleep", "wake", "unload", "snapshot"];

    /// Its name.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Purge => "purge",
            Self::Trim { .. } => "trim",
            Self::Sleep { .. } => "sleep",
            Self::Wake { .. } => "wake",
            Self::Unload { .. } => "unload",
            Self::Snapshot { .. } => "snapshot",
        }
    }

    /// What it is about; nothing for a purge, which is about everything.
    #[must_use]
    pub fn about(&self) -> &str {
        match self {
            Self::Purge => "",
            Self::Trim { arena, .. }
            | Self::Sleep { arena }
            | Self::Wake { arena }
            | Self::Snapshot { arena } => arena,
            Self::Unload { resource } => resource,
        }
    }
}

/// Why an errand was not taken on.
#[derive(Clone, Debug, Error, PartialEq)]
#[non_exhaustive]
pub enum AskError {
    /// No arena has this name.
    #[error("no arena is called {name:?}: expected {}", listed(known))]
    UnknownArena {
        /// What was asked for.
        name: String,
        /// The names that there are.
        known: Vec<String>,
    },
    /// No resource has this name.
    #[error("no resource is called {name:?}: expected {}", listed(known))]
    UnknownResource {
        /// What was asked for.
        name: String,
        /// The names that there are.
        known: Vec<String>,
    },
    /// Too many wait.
    #[error("{waiting} errands wait already: at most {max} do")]
    Full {
        /// How many.
        waiting: usize,
        /// At most.
        max: usize,
    },
    /// This `Memory` ends, or has ended.
    #[error("the service ends")]
    Ended,
    /// This is a forked child.
    #[error(transparent)]
    Memory(#[from] MemoryError),
}

/// Some names, of which there may be a thousand.
fn listed(names: &[String]) -> String {
    const SHOWN: usize = 8;
    let shown: Vec<_> = names.iter().take(SHOWN).map(|name| format!("{name:?}")).collect();
    match names.len() {
        0 => "none, there are none".to_owned(),
        1..=SHOWN => shown.join(", "),
        all => format!("{} or one of {} others", shown.join(", "), all - SHOWN),
    }
}

/// One errand.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Errand {
    /// Its number: from 1, in the order of asking.
    pub id: u64,
    /// What was asked for.
    pub verb: Verb,
    /// When, since the Unix epoch.
    pub asked_at: Duration,
    /// What has become of it.
    pub state: ErrandState,
}

/// What has become of an errand.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ErrandState {
    /// Not begun.
    Waiting,
    /// Begun.
    Running,
    /// Done: what came of it.
    Done(String),
    /// Not done: why.
    Failed(String),
}

impl ErrandState {
    /// Its name.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Waiting => "waiting",
            Self::Running => "running",
            Self::Done(_) => "done",
            Self::Failed(_) => "failed",
        }
    }

    /// What came of it; nothing before its end.
    #[must_use]
    pub fn outcome(&self) -> &str {
        match self {
            Self::Waiting | Self::Running => "",
            Self::Done(text) | Self::Failed(text) => text,
        }
    }
}

/// The list.
#[derive(Debug, Default)]
pub(super) struct Errands(Mutex<List>);

#[derive(Debug, Default)]
struct List {
    given: u64,
    kept: VecDeque<Errand>,
    /// The last picture, and the errand that it is of.
    picture: Option<(u64, Arc<str>)>,
}

impl Errands {
    fn add(&self, verb: Verb, asked_at: Duration) -> Result<u64, AskError> {
        let mut list = lock(&self.0);
        let is_open = |errand: &&Errand| errand.state == ErrandState::Waiting;
        let waiting = list.kept.iter().filter(is_open).count();
        if waiting >= WAITING_MAX {
            return Err(AskError::Full { waiting, max: WAITING_MAX });
        }
        if list.kept.len() == KEPT_MAX {
            // The oldest has ended: fewer than half of those that are kept wait, in order.
            list.kept.pop_front();
        }
        list.given += 1;
        let id = list.given;
        list.kept.push_back(Errand { id, verb, asked_at, state: ErrandState::Waiting });
        Ok(id)
    }

    /// Begins the oldest that waits.
    fn begin(&self) -> Option<(u64, Verb)> {
        let mut list = lock(&self.0);
        let mut open = list.kept.iter_mut();
        let errand = open.find(|errand| errand.state == ErrandState::Waiting)?;
        errand.state = ErrandState::Running;
        Some((errand.id, errand.verb.clone()))
    }

    /// For one that nobody may come for any more: where it was begun it stays, else it has failed.
    fn keep_if_begun(&self, id: u64) -> Result<u64, AskError> {
        let mut list = lock(&self.0);
        let waits = |errand: &&mut Errand| errand.id == id && errand.state == ErrandState::Waiting;
        let Some(errand) = list.kept.iter_mut().find(waits) else { return Ok(id) };
        errand.state = ErrandState::Failed(AskError::Ended.to_string());
        Err(AskError::Ended)
    }

    /// Ends one; says whether others wait.
    fn end(&self, id: u64, state: ErrandState, picture: Option<Arc<str>>) -> bool {
        let mut list = lock(&self.0);
        if let Some(errand) = list.kept.iter_mut().find(|errand| errand.id == id) {
            errand.state = state;
        }
        if let Some(picture) = picture {
            list.picture = Some((id, picture));
        }
        list.kept.iter().any(|errand| errand.state == ErrandState::Waiting)
    }
}

impl Memory {
    /// Has the worker do something; returns at once with the number of the errand, under which
    /// [`Memory::errands`] says what came of it. For endpoints: code calls the arena itself.
    ///
    /// ```
    /// use lowtide::Memory;
    /// use lowtide::memory::{AskError, Verb};
    ///
    /// let memory = Memory::builder().start()?;
    /// let id = memory.ask(Verb::Purge)?;
    /// assert_eq!(memory.errands()[0].id, id);
    /// let sleep = Verb::Sleep { arena: "embedder".to_owned() };
    /// assert!(matches!(memory.ask(sleep), Err(AskError::UnknownArena { .. })));
    /// # Ok::<(), lowtide::BoxError>(())
    /// ```
    ///
    /// # Errors
    /// [`AskError`]; then nothing is done.
    pub fn ask(&self, verb: Verb) -> Result<u64, AskError> {
        let shared = &self.0.shared;
        shared.check_here()?;
        if shared.admission.is_closed() || shared.queue.is_closed() {
            return Err(AskError::Ended);
        }
        match &verb {
            Verb::Purge => {}
            Verb::Unload { resource } => drop(shared.resource_named(resource)?),
            on_arena => drop(shared.arena_named(on_arena.about())?),
        }
        let id = shared.errands.add(verb, shared.clock.since_epoch())?;
        shared.queue.push_one(Job::Errand);
        if shared.queue.is_closed() {
            // It closed meanwhile, and may have dropped the job.
            return shared.errands.keep_if_begun(id);
        }
        Ok(id)
    }

    /// The last errands, oldest first: at most 16. None in a forked child.
    #[must_use]
    pub fn errands(&self) -> Vec<Errand> {
        let shared = &self.0.shared;
        if shared.check_here().is_err() {
            return Vec::new();
        }
        lock(&shared.errands.0).kept.iter().cloned().collect()
    }

    /// The picture that an errand took; `None` where it took none, or another was taken since.
    #[must_use]
    pub fn errand_picture(&self, id: u64) -> Option<Arc<str>> {
        let shared = &self.0.shared;
        shared.check_here().ok()?;
        let list = lock(&shared.errands.0);
        list.picture.as_ref().filter(|(of, _)| *of == id).map(|(_, picture)| Arc::clone(picture))
    }
}

impl Shared {
    fn arena_named(&self, name: &str) -> Result<DeviceArena, AskError> {
        let (serving, _) = self.arenas.parted();
        serving.iter().find(|arena| arena.name() == name).cloned().ok_or_else(|| {
            let known = serving.iter().map(|arena| arena.name().to_owned()).collect();
            AskError::UnknownArena { name: name.to_owned(), known }
        })
    }

    fn resource_named(&self, name: &str) -> Result<Arc<dyn Resource>, AskError> {
        let all = self.resources.all();
        all.iter().find(|resource| resource.name() == name).cloned().ok_or_else(|| {
            let known = all.iter().map(|resource| resource.name().to_owned()).collect();
            AskError::UnknownResource { name: name.to_owned(), known }
        })
    }

    /// Does the oldest errand that waits, on this thread; `purge` is how the worker purges. Says
    /// whether others wait.
    pub(super) fn errand(&self, purge: impl FnOnce() -> ByteSize) -> bool {
        let Some((id, verb)) = self.errands.begin() else { return false };
        let mut picture = None;
        let done = caught(|| self.carry_out(&verb, purge, &mut picture));
        let state = match done {
            Ok(Ok(text)) => ErrandState::Done(text),
            Ok(Err(text)) => ErrandState::Failed(text),
            Err(said) => ErrandState::Failed(format!("it panicked: {said}")),
        };
        let about = verb.about();
        let text = format!("{} {}: {}", verb.name(), state.name(), state.outcome());
        self.events.add(self.clock.since_epoch(), "errand", about, text);
        let others_wait = self.errands.end(id, state.clone(), picture);
        log!(
            info,
            target: "lowtide",
            errand = id,
            verb = verb.name(),
            about,
            state = state.name(),
            outcome = state.outcome(),
            "an errand ended"
        );
        others_wait
    }

    fn carry_out(
        &self,
        verb: &Verb,
        purge: impl FnOnce() -> ByteSize,
        picture: &mut Option<Arc<str>>,
    ) -> Result<String, String> {
        let arena = || self.arena_named(verb.about()).map_err(|error| error.to_string());
        let said = |error: crate::device::DeviceError| error.to_string();
        match verb {
            Verb::Purge => Ok(format!("{} given back", purge())),
            Verb::Trim { keep, .. } => {
                let released = arena()?.trim(*keep).map_err(said)?;
                Ok(format!("{released} given back"))
            }
            Verb::Sleep { .. } => {
                // Nobody is waited for: the worker has other things to do.
                let drain = Duration::ZERO;
                let options = SleepOptions { drain, ..self.config.device_sleep().options };
                let slept = arena()?.sleep(options).map_err(said)?;
                Ok(format!("{} given back, {} offloaded", slept.released, slept.offloaded))
            }
            Verb::Wake { .. } => {
                // Nor here: what is short would be given back by this very worker.
                let woken = arena()?.wake_at_once().map_err(said)?;
                Ok(format!("{} committed, {} restored", woken.committed, woken.restored))
            }
            Verb::Unload { resource } => self.unload_named(resource),
            Verb::Snapshot { .. } => {
                let svg = arena()?.map().to_svg();
                let size = ByteSize::of(svg.len());
                *picture = Some(svg.into());
                Ok(format!("a picture of {size}"))
            }
        }
    }

    fn unload_named(&self, name: &str) -> Result<String, String> {
        let resource = self.resource_named(name).map_err(|error| error.to_string())?;
        if resource.unload(UnloadReason::Asked) {
            self.queue.push_one(Job::Purge { trigger: Trigger::Unload });
            return Ok("unloaded".to_owned());
        }
        Err(match resource.stats() {
            ResourceStats { loaded: false, .. } => "it is not loaded".to_owned(),
            ResourceStats { guards, .. } => format!("{guards} guards hold it"),
        })
    }
}

#[cfg(all(test, not(lowtide_loom)))]
mod tests {
    use super::*;

    /// The bug: one that was begun, or done, was told to have failed because the memory ended.
    #[test]
    fn only_an_errand_that_was_not_begun_fails_for_the_end() {
        let errands = Errands::default();
        for id in 1..=3 {
            assert_eq!(errands.add(Verb::Purge, Duration::ZERO), Ok(id));
        }
        let (done, _) = errands.begin().expect("one waits");
        errands.end(done, ErrandState::Done("1 KiB given back".to_owned()), None);
        let (running, _) = errands.begin().expect("another one waits");
        assert_eq!(errands.keep_if_begun(done), Ok(done));
        assert_eq!(errands.keep_if_begun(running), Ok(running));
        assert_eq!(errands.keep_if_begun(3), Err(AskError::Ended));
        let states: Vec<_> =
            lock(&errands.0).kept.iter().map(|errand| errand.state.name()).collect();
        assert_eq!(states, ["done", "running", "failed"]);
        assert!(errands.begin().is_none(), "nobody does what its asker was told is not done");
    }

    #[test]
    fn errands_are_bounded_and_done_in_the_order_of_asking() {
        let errands = Errands::default();
        for id in 1..=8 {
            assert_eq!(errands.add(Verb::Purge, Duration::ZERO), Ok(id));
        }
        let full = errands.add(Verb::Purge, Duration::ZERO);
        assert_eq!(full, Err(AskError::Full { waiting: 8, max: 8 }));
        for nth in 1..=100 {
            let (id, _) = errands.begin().expect("one waits");
            assert_eq!(id, nth);
            assert!(errands.end(id, ErrandState::Done(String::new()), None), "seven wait");
            errands.add(Verb::Purge, Duration::ZERO).expect("room for one more");
            assert!(lock(&errands.0).kept.len() <= KEPT_MAX);
        }
    }

    #[test]
    fn of_many_names_some_are_listed() {
        let names = |count: usize| (0..count).map(|nth| nth.to_string()).collect::<Vec<_>>();
        assert_eq!(listed(&names(0)), "none, there are none");
        assert_eq!(listed(&names(2)), r#""0", "1""#);
        assert!(listed(&names(1024)).ends_with(r#""7" or one of 1016 others"#));
    }
}
