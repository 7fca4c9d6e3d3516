//! The reclaim steps: who releases memory under pressure, in which order, and how often.
//!
//! Deciding ([`Ladder::due`]) and doing ([`Ladder::run`]) are separate. The control loop decides
//! and never waits; the worker runs the steps. A reclaimer is known only by its trait: the budget
//! that it relieves, its cost, and the level from which it runs.
//!
//! Invariant: `start - end of the previous run >= pause`. The pause is [`PAUSE_MIN`] after a
//! successful run. After a run that recovered less than a twentieth of the requested bytes it
//! doubles, up to [`PAUSE_MAX`]. A step never runs twice at once.

use std::sync::Arc;
use std::time::Duration;
use std::{fmt, thread};

use lowtide_core::bytes::ByteSize;
use lowtide_core::clock::{Bell, Clock, Moment};
use lowtide_core::sync::{Mutex, caught, lock};
use thiserror::Error;

use super::cost::Budget;
use super::pressure::Level;

/// The shortest pause between two runs: 100 ms.
pub const PAUSE_MIN: Duration = Duration::from_millis(100);
/// The longest pause between two runs: 10 s.
pub const PAUSE_MAX: Duration = Duration::from_secs(10);
/// A run that recovers less than one part in this many of the requested bytes is ineffective.
const LITTLE: u64 = 20;

/// A request to a reclaimer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ask {
    /// The bytes that would relieve the budget.
    pub bytes: ByteSize,
    /// The current level.
    pub level: Level,
    /// The current time.
    pub now: Moment,
}

/// The result of a reclaimer's run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Recovered {
    /// Bytes released in the budget that the reclaimer relieves.
    pub bytes: ByteSize,
}

impl Recovered {
    /// No bytes.
    pub const NOTHING: Self = Self { bytes: ByteSize::ZERO };

    /// Creates a result of `bytes`.
    #[must_use]
    pub const fn of(bytes: ByteSize) -> Self {
        Self { bytes }
    }
}

/// Something that can release memory on request.
pub trait Reclaim: Send + Sync {
    /// Returns its name, for events and metrics.
    fn name(&self) -> &str;

    /// Returns the budget that it relieves.
    fn relieves(&self) -> Budget;

    /// Returns its rank: lower is cheaper and runs earlier.
    fn cost_rank(&self) -> u8;

    /// Returns the level from which it runs.
    fn starts_at(&self) -> Level {
        Level::Elevated
    }

    /// Releases what it can. Runs on the worker. It may take long, but must not wait for requests.
    fn reclaim(&self, ask: Ask) -> Recovered;
}

/// A rate limit that backs off after ineffective runs.
#[derive(Debug, Default)]
pub struct Pace {
    state: Mutex<PaceState>,
}

#[derive(Clone, Copy, Debug, Default)]
struct PaceState {
    /// The end of the last run; `None` before the first.
    ended: Option<Moment>,
    /// The pause after it.
    pause: Duration,
    running: bool,
}

impl PaceState {
    fn next(self) -> Moment {
        match self.ended {
            _ if self.running => Moment::NEVER,
            None => Moment::ORIGIN,
            Some(ended) => ended + self.pause,
        }
    }
}

impl Pace {
    /// Creates a pace that allows a start at once.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the time of the next allowed start; [`Moment::NEVER`] during a run.
    #[must_use]
    pub fn next(&self) -> Moment {
        lock(&self.state).next()
    }

    /// Begins a run if one is allowed now. Returns `true` if it began.
    #[must_use]
    pub fn start(&self, now: Moment) -> bool {
        let mut state = lock(&self.state);
        let may = state.next() <= now;
        state.running |= may;
        may
    }

    /// Begins a run unless one is in progress, without regard to the pause. Returns `true` if it
    /// began.
    #[must_use]
    pub(crate) fn start_without_pause(&self) -> bool {
        !std::mem::replace(&mut lock(&self.state).running, true)
    }

    /// Ends a run that did nothing: the pause is that of the run before.
    pub(crate) fn cancel(&self) {
        lock(&self.state).running = false;
    }

    /// Resets the pause to [`PAUSE_MIN`], because there is new work to do.
    pub fn forgive(&self) {
        lock(&self.state).pause = PAUSE_MIN;
    }

    /// Ends a run. The pause is reset to its minimum, or doubled if the run was ineffective.
    pub fn finish(&self, asked: ByteSize, recovered: Recovered, now: Moment) {
        let mut state = lock(&self.state);
        let little = recovered.bytes.is_zero() || recovered.bytes.get() < asked.get() / LITTLE;
        let doubled = state.pause.max(PAUSE_MIN).saturating_mul(2).min(PAUSE_MAX);
        state.pause = if little { doubled } else { PAUSE_MIN };
        state.ended = Some(now);
        state.running = false;
    }
}

struct ReclaimStep {
    reclaimer: Arc<dyn Reclaim>,
    pace: Pace,
}

impl fmt::Debug for ReclaimStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Step")
            .field("name", &self.reclaimer.name())
            .field("pace", &self.pace)
            .finish_non_exhaustive()
    }
}

/// An error in the list of reclaimers.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum LadderError {
    /// More reclaimers than [`Ladder::RUNGS_MAX`].
    #[error("too many reclaimers: {count}, expected at most {}", Ladder::RUNGS_MAX)]
    TooManySteps {
        /// The number of reclaimers given.
        count: usize,
    },
}

/// Reclaimers in the order of their cost. Cheap to clone; all clones share one state.
#[derive(Clone, Debug, Default)]
pub struct Ladder {
    steps: Arc<[ReclaimStep]>,
}

impl Ladder {
    /// The largest number of steps.
    pub const RUNGS_MAX: usize = 32;

    /// Orders reclaimers by cost; equal ones keep their order.
    ///
    /// # Errors
    /// [`LadderError::TooManySteps`] if there are more than [`Ladder::RUNGS_MAX`].
    pub fn new(mut reclaimers: Vec<Arc<dyn Reclaim>>) -> Result<Self, LadderError> {
        let count = reclaimers.len();
        if count > Self::RUNGS_MAX {
            return Err(LadderError::TooManySteps { count });
        }
        reclaimers.sort_by_key(|reclaimer| reclaimer.cost_rank());
        let step = |reclaimer| ReclaimStep { reclaimer, pace: Pace::new() };
        Ok(Self { steps: reclaimers.into_iter().map(step).collect() })
    }

    /// Returns the number of steps.
    #[must_use]
    pub fn len(&self) -> usize {
        self.steps.len()
    }

    /// Returns `true` if there are no steps.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.steps.is_empty()
    }

    /// Returns the reclaimer of a step.
    #[must_use]
    pub fn reclaimer(&self, step: usize) -> Option<&dyn Reclaim> {
        self.steps.get(step).map(|step| &*step.reclaimer)
    }

    /// Returns the cheapest step that relieves the budget at this level and is not pausing, or
    /// `None` while a cheaper one runs. Changes nothing; costs one check of each step.
    #[must_use]
    pub fn due(&self, budget: Budget, level: Level, now: Moment) -> Option<usize> {
        if level < Level::Elevated {
            return None;
        }
        let asked = |step: &ReclaimStep| {
            step.reclaimer.relieves() == budget && level >= step.reclaimer.starts_at()
        };
        for (at, step) in self.steps.iter().enumerate().filter(|(_, step)| asked(step)) {
            match step.pace.next() {
                Moment::NEVER => return None,
                next if next <= now => return Some(at),
                _ => {}
            }
        }
        None
    }

    /// Begins a step that [`Ladder::due`] returned. Returns `false` if it may not start.
    #[must_use]
    pub fn start(&self, step: usize, now: Moment) -> bool {
        self.steps.get(step).is_some_and(|step| step.pace.start(now))
    }

    /// Ends a started step that has nothing to do. Its pause stays as it was.
    pub(crate) fn cancel(&self, step: usize) {
        if let Some(step) = self.steps.get(step) {
            step.pace.cancel();
        }
    }

    /// Runs a started step on the calling thread. A reclaimer that panics counts as having
    /// recovered nothing. `finished` reads the time afterwards.
    pub fn run(&self, step: usize, ask: Ask, finished: impl FnOnce() -> Moment) -> Recovered {
        let Some(step) = self.steps.get(step) else { return Recovered::NOTHING };
        let ran = caught(|| step.reclaimer.reclaim(ask));
        let recovered = ran.unwrap_or(Recovered::NOTHING);
        step.pace.finish(ask.bytes, recovered, finished());
        recovered
    }
}

/// Runs functions of the application on a new thread, and waits for the answer, at most for this
/// time. Returns `None` without one; the thread continues.
pub(super) fn elsewhere<T: Send + 'static>(
    clock: &dyn Clock,
    most: Duration,
    run: impl FnOnce() -> T + Send + 'static,
) -> Option<T> {
    let (answer, bell) = (Arc::new(Mutex::new(None)), Bell::new());
    let (answers, rings) = (Arc::clone(&answer), Arc::clone(&bell));
    let thread = thread::Builder::new().name("lowtide-reclaim".to_owned());
    let started = thread.spawn(move || {
        let ran = run();
        *lock(&answers) = Some(ran);
        rings.ring();
    });
    started.ok()?;
    let deadline = clock.now() + most;
    // Ends at the deadline at the latest: each iteration waits until then, or for the answer.
    loop {
        let answered = lock(&answer).take();
        if answered.is_some() || clock.now() >= deadline {
            return answered;
        }
        clock.wait_until(&bell, deadline);
    }
}

#[cfg(all(test, not(lowtide_loom)))]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;

    struct Fake {
        name: &'static str,
        rank: u8,
        budget: Budget,
        from: Level,
        gives: AtomicU64,
    }

    impl Fake {
        fn new(name: &'static str, rank: u8, budget: Budget, from: Level) -> Arc<Self> {
            Arc::new(Self { name, rank, budget, from, gives: AtomicU64::new(100) })
        }
    }

    impl Reclaim for Fake {
        fn name(&self) -> &str {
            self.name
        }
        fn relieves(&self) -> Budget {
            self.budget
        }
        fn cost_rank(&self) -> u8 {
            self.rank
        }
        fn starts_at(&self) -> Level {
            self.from
        }
        fn reclaim(&self, _: Ask) -> Recovered {
            match self.gives.load(Ordering::Relaxed) {
                u64::MAX => panic!("a reclaimer panics"),
                bytes => Recovered::of(ByteSize::new(bytes)),
            }
        }
    }

    fn at(millis: u64) -> Moment {
        Moment::after_origin(Duration::from_millis(millis))
    }

    fn ask(now: Moment) -> Ask {
        Ask { bytes: ByteSize::new(100), level: Level::High, now }
    }

    #[test]
    fn the_cheapest_rung_of_the_budget_and_level_is_due_first() {
        let ladder = Ladder::new(vec![
            Fake::new("sleep", 20, Budget::Device, Level::High),
            Fake::new("unload", 10, Budget::Host, Level::High),
            Fake::new("purge", 0, Budget::Host, Level::Elevated),
        ])
        .expect("three steps");
        let name = |budget, level| {
            let step = ladder.due(budget, level, at(0))?;
            ladder.reclaimer(step).map(|reclaimer| reclaimer.name().to_owned())
        };
        assert_eq!(name(Budget::Host, Level::None), None);
        assert_eq!(name(Budget::Host, Level::Critical).as_deref(), Some("purge"));
        assert_eq!(name(Budget::Device, Level::Elevated), None);
        assert_eq!(name(Budget::Device, Level::High).as_deref(), Some("sleep"));
        // While the cheap one runs none is due; while it pauses the next one is.
        assert!(ladder.start(0, at(0)));
        assert_eq!(name(Budget::Host, Level::High), None);
        let _ = ladder.run(0, ask(at(0)), || at(0));
        assert_eq!(name(Budget::Host, Level::High).as_deref(), Some("unload"));
        assert_eq!(name(Budget::Host, Level::Elevated), None);
    }

    #[test]
    fn a_rung_backs_off_while_it_recovers_little_and_comes_back_when_it_does() {
        let fake = Fake::new("purge", 0, Budget::Host, Level::Elevated);
        let ladder = Ladder::new(vec![Arc::clone(&fake) as Arc<dyn Reclaim>]).expect("one");
        let mut starts = Vec::new();
        fake.gives.store(4, Ordering::Relaxed);
        for tick in 0..6000 {
            let now = at(tick * 10);
            if ladder.due(Budget::Host, Level::Elevated, now) == Some(0) {
                assert!(ladder.start(0, now));
                assert!(!ladder.start(0, now), "started twice");
                let _ = ladder.run(0, ask(now), || now);
                starts.push(tick * 10);
            }
        }
        let pauses: Vec<_> = starts.windows(2).map(|pair| pair[1] - pair[0]).collect();
        assert_eq!(pauses[..7], [200, 400, 800, 1600, 3200, 6400, 10_000]);
        assert!(pauses.iter().skip(6).all(|&pause| pause == 10_000));
        fake.gives.store(5, Ordering::Relaxed);
        let now = at(100_000);
        assert!(ladder.start(0, now));
        let _ = ladder.run(0, ask(now), || now);
        assert_eq!(ladder.due(Budget::Host, Level::Elevated, now + PAUSE_MIN), Some(0));
    }

    #[test]
    fn a_reclaimer_that_panics_recovers_nothing_and_stays_on_the_ladder() {
        let fake = Fake::new("bad", 0, Budget::Host, Level::Elevated);
        fake.gives.store(u64::MAX, Ordering::Relaxed);
        let ladder = Ladder::new(vec![fake as Arc<dyn Reclaim>]).expect("one");
        assert!(ladder.start(0, at(0)));
        assert_eq!(ladder.run(0, ask(at(0)), || at(5)), Recovered::NOTHING);
        assert_eq!(ladder.due(Budget::Host, Level::Elevated, at(204)), None);
        assert_eq!(ladder.due(Budget::Host, Level::Elevated, at(205)), Some(0));
    }

    #[test]
    fn a_ladder_has_a_bounded_number_of_rungs() {
        let step = || Fake::new("x", 0, Budget::Host, Level::High) as Arc<dyn Reclaim>;
        assert!(Ladder::new((0..Ladder::RUNGS_MAX).map(|_| step()).collect()).is_ok());
        let error = Ladder::new((0..=Ladder::RUNGS_MAX).map(|_| step()).collect());
        assert_eq!(error.err(), Some(LadderError::TooManySteps { count: 33 }));
        assert_eq!(Ladder::default().due(Budget::Host, Level::Critical, at(0)), None);
    }
}
