//! The ladder: who gives memory back under pressure, in what order, and how often.
//!
//! Deciding ([`Ladder::due`]) and doing ([`Ladder::run`]) are apart: the control loop decides and
//! never waits, the worker does. The ladder knows nobody by type; each reclaimer says which budget
//! it relieves, how dear it is and from which level on it may be asked.
//!
//! Invariant: `start - end of the run before >= pause`; the pause is [`PAUSE_MIN`] after a run of
//! use, and twice what it was, [`PAUSE_MAX`] at most, after one that recovered less than a
//! twentieth of what was asked; a rung never runs twice at once.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use thiserror::Error;

use crate::bytes::ByteSize;
use crate::clock::Moment;
use crate::sync::{Mutex, caught, lock};

use super::ledger::Budget;
use super::pressure::Level;

/// The shortest time between two starts.
pub const PAUSE_MIN: Duration = Duration::from_millis(100);
/// The longest.
pub const PAUSE_MAX: Duration = Duration::from_secs(10);
/// Less than one part in this many of what was asked is little.
const LITTLE: u64 = 20;

/// What is wanted of a reclaimer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ask {
    /// How many bytes would relieve the budget.
    pub bytes: ByteSize,
    /// The level.
    pub level: Level,
    /// The time.
    pub now: Moment,
}

/// What a reclaimer gave back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Recovered {
    /// Bytes of the budget that it relieves.
    pub bytes: ByteSize,
}

impl Recovered {
    /// Nothing.
    pub const NOTHING: Self = Self { bytes: ByteSize::ZERO };

    /// These bytes.
    #[must_use]
    pub const fn of(bytes: ByteSize) -> Self {
        Self { bytes }
    }
}

/// Something that can give memory back.
pub trait Reclaim: Send + Sync {
    /// Its name, for events and metrics.
    fn name(&self) -> &str;

    /// The budget that it relieves.
    fn relieves(&self) -> Budget;

    /// Its place on the ladder: the cheaper, the lower, the earlier.
    fn cost_rank(&self) -> u8;

    /// From which level on it is asked.
    fn starts_at(&self) -> Level {
        Level::Elevated
    }

    /// Gives back what it can. Runs on the worker; may take its time, must not wait for requests.
    fn reclaim(&self, ask: Ask) -> Recovered;
}

/// How often something may be started: a rate limit that backs off when it is of little use.
#[derive(Debug, Default)]
pub struct Pace {
    state: Mutex<PaceState>,
}

#[derive(Clone, Copy, Debug, Default)]
struct PaceState {
    /// When the last run ended; `None` before.
    ended: Option<Moment>,
    /// How long to wait after that.
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
    /// May start at once.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// When it may start next; [`Moment::NEVER`] while it runs.
    #[must_use]
    pub fn next(&self) -> Moment {
        lock(&self.state).next()
    }

    /// Books a start, if it may start now.
    #[must_use]
    pub fn start(&self, now: Moment) -> bool {
        let mut state = lock(&self.state);
        let may = state.next() <= now;
        state.running |= may;
        may
    }

    /// Forgets that it was of little use, because there is something new for it to do: it may
    /// start [`PAUSE_MIN`] after the last run.
    pub fn forgive(&self) {
        lock(&self.state).pause = PAUSE_MIN;
    }

    /// Books the end of a run: the pause is at its shortest again, or doubled where the run was of
    /// little use.
    pub fn finish(&self, asked: ByteSize, recovered: Recovered, now: Moment) {
        let mut state = lock(&self.state);
        let little = recovered.bytes.is_zero() || recovered.bytes.get() < asked.get() / LITTLE;
        let doubled = state.pause.max(PAUSE_MIN).saturating_mul(2).min(PAUSE_MAX);
        state.pause = if little { doubled } else { PAUSE_MIN };
        state.ended = Some(now);
        state.running = false;
    }
}

struct Step {
    reclaimer: Arc<dyn Reclaim>,
    pace: Pace,
}

impl fmt::Debug for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rung")
            .field("name", &self.reclaimer.name())
            .field("pace", &self.pace)
            .finish_non_exhaustive()
    }
}

/// A ladder that cannot be built.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum LadderError {
    /// More reclaimers than a ladder has rungs.
    #[error("{count} reclaimers were given: expected at most {}", Ladder::RUNGS_MAX)]
    TooManyRungs {
        /// How many were given.
        count: usize,
    },
}

/// Reclaimers in the order of their cost. Cheap to clone; all clones are one.
#[derive(Clone, Debug, Default)]
pub struct Ladder {
    steps: Arc<[Step]>,
}

impl Ladder {
    /// How many rungs a ladder has at most.
    pub const RUNGS_MAX: usize = 32;

    /// Orders reclaimers by cost, equal ones as they are given.
    ///
    /// # Errors
    /// Where there are more than [`Ladder::RUNGS_MAX`].
    pub fn new(mut reclaimers: Vec<Arc<dyn Reclaim>>) -> Result<Self, LadderError> {
        let count = reclaimers.len();
        if count > Self::RUNGS_MAX {
            return Err(LadderError::TooManyRungs { count });
        }
        reclaimers.sort_by_key(|reclaimer| reclaimer.cost_rank());
        let step = |reclaimer| Step { reclaimer, pace: Pace::new() };
        Ok(Self { steps: reclaimers.into_iter().map(step).collect() })
    }

    /// How many rungs it has.
    #[must_use]
    pub fn len(&self) -> usize {
        self.steps.len()
    }

    /// Whether it has none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.steps.is_empty()
    }

    /// The reclaimer on a rung.
    #[must_use]
    pub fn reclaimer(&self, step: usize) -> Option<&dyn Reclaim> {
        self.steps.get(step).map(|step| &*step.reclaimer)
    }

    /// The cheapest rung that relieves the budget at this level and is not pausing; while one that
    /// is cheaper still runs, none. Changes nothing, costs one look at each rung.
    #[must_use]
    pub fn due(&self, budget: Budget, level: Level, now: Moment) -> Option<usize> {
        let asked = |step: &Step| {
            step.reclaimer.relieves() == budget
                && level >= step.reclaimer.starts_at().max(Level::Elevated)
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

    /// Books the start of a rung that [`Ladder::due`] named; `false` where it may not start.
    #[must_use]
    pub fn start(&self, step: usize, now: Moment) -> bool {
        self.steps.get(step).is_some_and(|step| step.pace.start(now))
    }

    /// Runs a started rung, on the calling thread. A reclaimer that panics has recovered nothing.
    /// `finished` reads the time afterwards.
    pub fn run(&self, step: usize, ask: Ask, finished: impl FnOnce() -> Moment) -> Recovered {
        let Some(step) = self.steps.get(step) else { return Recovered::NOTHING };
        let ran = caught(|| step.reclaimer.reclaim(ask));
        let recovered = ran.unwrap_or(Recovered::NOTHING);
        step.pace.finish(ask.bytes, recovered, finished());
        recovered
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
        .expect("three rungs");
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
        assert_eq!(error.err(), Some(LadderError::TooManyRungs { count: 33 }));
        assert_eq!(Ladder::default().due(Budget::Host, Level::Critical, at(0)), None);
    }
}
