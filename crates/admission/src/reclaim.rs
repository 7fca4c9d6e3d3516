//! The reclaim steps: who releases memory under pressure, in which order, and how often.
//!
//! Deciding ([`due`]) and doing ([`ReclaimStep::run`]) are separate. The control loop decides and
//! never waits; the worker runs the steps. Of a step only its place in the order, the budget that it
//! relieves, and the level from which it runs are known.
//!
//! Invariant: `start - end of the previous run >= pause`. The pause is [`PAUSE_MIN`] after a
//! successful run. After a run that recovered less than a twentieth of the requested bytes it
//! doubles, up to [`PAUSE_MAX`]. A step never runs twice at once.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use super::cost::Budget;
use super::pressure::Level;
use lowtide_core::bytes::ByteSize;
use lowtide_core::clock::{Bell, Clock, Moment};
use lowtide_core::sync::{Mutex, caught, lock};

/// The shortest pause between two runs: 100 ms.
pub(crate) const PAUSE_MIN: Duration = Duration::from_millis(100);
/// The longest pause between two runs: 10 s.
pub(crate) const PAUSE_MAX: Duration = Duration::from_secs(10);
/// A run that recovers less than one part in this many of the requested bytes is ineffective.
const LITTLE: u64 = 20;

/// A rate limit that backs off after ineffective runs.
#[derive(Debug, Default)]
pub(crate) struct ReclaimBackoff {
    state: Mutex<BackoffState>,
}

#[derive(Clone, Copy, Debug, Default)]
struct BackoffState {
    /// The end of the last run; `None` before the first.
    ended: Option<Moment>,
    /// The pause after it.
    pause: Duration,
    running: bool,
}

impl BackoffState {
    fn next(self) -> Moment {
        match self.ended {
            _ if self.running => Moment::NEVER,
            None => Moment::ORIGIN,
            Some(ended) => ended + self.pause,
        }
    }
}

impl ReclaimBackoff {
    /// Returns the time of the next allowed start; [`Moment::NEVER`] during a run.
    pub(crate) fn next(&self) -> Moment {
        lock(&self.state).next()
    }

    /// Begins a run if one is allowed now. Returns `true` if it began.
    pub(crate) fn start(&self, now: Moment) -> bool {
        let mut state = lock(&self.state);
        let may = state.next() <= now;
        state.running |= may;
        may
    }

    /// Begins a run unless one is in progress, without regard to the pause. Returns `true` if it
    /// began.
    pub(crate) fn start_without_pause(&self) -> bool {
        !std::mem::replace(&mut lock(&self.state).running, true)
    }

    /// Ends a run that did nothing: the pause is that of the run before.
    pub(crate) fn cancel(&self) {
        lock(&self.state).running = false;
    }

    /// Resets the pause to [`PAUSE_MIN`], because there is new work to do.
    pub(crate) fn forgive(&self) {
        lock(&self.state).pause = PAUSE_MIN;
    }

    /// Ends a run. The pause is reset to its minimum, or doubled if the run was ineffective.
    pub(crate) fn finish(&self, asked: ByteSize, recovered: ByteSize, now: Moment) {
        let mut state = lock(&self.state);
        let little = recovered.is_zero() || recovered.get() < asked.get() / LITTLE;
        let doubled = state.pause.max(PAUSE_MIN).saturating_mul(2).min(PAUSE_MAX);
        state.pause = if little { doubled } else { PAUSE_MIN };
        state.ended = Some(now);
        state.running = false;
    }
}

/// A function that releases memory under pressure, and its rate limit.
pub struct ReclaimStep {
    /// The budget that it relieves.
    pub(crate) relieves: Budget,
    /// The level from which it runs.
    pub(crate) starts_at: Level,
    release: Box<dyn Fn(ByteSize) -> ByteSize + Send + Sync>,
    pub(crate) pace: ReclaimBackoff,
}

debug_as!(ReclaimStep, |step| relieves: step.relieves, starts_at: step.starts_at);

impl ReclaimStep {
    /// Creates the step of a function that releases memory, up to these bytes, and returns the
    /// bytes that it released of this budget. It runs on the worker. It may take long, but must not
    /// wait for requests.
    #[must_use]
    pub fn new(
        relieves: Budget,
        starts_at: Level,
        release: impl Fn(ByteSize) -> ByteSize + Send + Sync + 'static,
    ) -> Self {
        Self { relieves, starts_at, release: Box::new(release), pace: ReclaimBackoff::default() }
    }

    /// Calls the function, on this thread and without a pause.
    pub fn reclaim(&self, bytes: ByteSize) -> ByteSize {
        (self.release)(bytes)
    }

    /// Runs a started step on the calling thread, to release these bytes. A function that panics
    /// counts as having released nothing. `finished` reads the time afterwards.
    pub(crate) fn run(&self, bytes: ByteSize, finished: impl FnOnce() -> Moment) {
        let released = caught(|| self.reclaim(bytes)).unwrap_or_default();
        self.pace.finish(bytes, released, finished());
    }
}

/// The largest number of steps.
pub(crate) const STEPS_MAX: usize = 32;

/// Returns the cheapest step that relieves the budget at this level and is not pausing, or `None`
/// while a cheaper one runs. The cheapest come first. Changes nothing; costs one check of each step.
pub(crate) fn due(steps: &[ReclaimStep], of: Budget, level: Level, now: Moment) -> Option<usize> {
    if level < Level::Elevated {
        return None;
    }
    let asked = |step: &ReclaimStep| step.relieves == of && level >= step.starts_at;
    for (at, step) in steps.iter().enumerate().filter(|(_, step)| asked(step)) {
        match step.pace.next() {
            Moment::NEVER => return None,
            next if next <= now => return Some(at),
            _ => {}
        }
    }
    None
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

    /// A step that releases so many bytes, and panics if they are `u64::MAX`.
    fn step(budget: Budget, from: Level, gives: &Arc<AtomicU64>) -> ReclaimStep {
        let gives = Arc::clone(gives);
        ReclaimStep::new(budget, from, move |_| match gives.load(Ordering::Relaxed) {
            u64::MAX => panic!("a reclaimer panics"),
            bytes => ByteSize::new(bytes),
        })
    }

    fn at(millis: u64) -> Moment {
        Moment::after_origin(Duration::from_millis(millis))
    }

    const ASKED: ByteSize = ByteSize::new(100);

    #[test]
    fn the_cheapest_step_of_the_budget_and_level_is_due_first() {
        let gives = Arc::new(AtomicU64::new(100));
        let steps = [
            step(Budget::Host, Level::Elevated, &gives),
            step(Budget::Host, Level::High, &gives),
            step(Budget::Device, Level::High, &gives),
        ];
        let due = |budget, level| due(&steps, budget, level, at(0));
        assert_eq!(due(Budget::Host, Level::None), None);
        assert_eq!(due(Budget::Host, Level::Critical), Some(0));
        assert_eq!(due(Budget::Device, Level::Elevated), None);
        assert_eq!(due(Budget::Device, Level::High), Some(2));
        // While the cheap one runs none is due; while it pauses the next one is.
        assert!(steps[0].pace.start(at(0)));
        assert_eq!(due(Budget::Host, Level::High), None);
        steps[0].run(ASKED, || at(0));
        assert_eq!(due(Budget::Host, Level::High), Some(1));
        assert_eq!(due(Budget::Host, Level::Elevated), None);
    }

    #[test]
    fn a_step_backs_off_while_it_recovers_little_and_comes_back_when_it_does() {
        let gives = Arc::new(AtomicU64::new(4));
        let steps = [step(Budget::Host, Level::Elevated, &gives)];
        let mut starts = Vec::new();
        for tick in 0..6000 {
            let now = at(tick * 10);
            if due(&steps, Budget::Host, Level::Elevated, now) == Some(0) {
                assert!(steps[0].pace.start(now));
                assert!(!steps[0].pace.start(now), "started twice");
                steps[0].run(ASKED, || now);
                starts.push(tick * 10);
            }
        }
        let pauses: Vec<_> = starts.windows(2).map(|pair| pair[1] - pair[0]).collect();
        assert_eq!(pauses[..7], [200, 400, 800, 1600, 3200, 6400, 10_000]);
        assert!(pauses.iter().skip(6).all(|&pause| pause == 10_000));
        gives.store(5, Ordering::Relaxed);
        let now = at(100_000);
        assert!(steps[0].pace.start(now));
        steps[0].run(ASKED, || now);
        assert_eq!(due(&steps, Budget::Host, Level::Elevated, now + PAUSE_MIN), Some(0));
    }

    #[test]
    fn a_reclaimer_that_panics_recovers_nothing_and_stays_among_the_steps() {
        let gives = Arc::new(AtomicU64::new(u64::MAX));
        let steps = [step(Budget::Host, Level::Elevated, &gives)];
        assert!(steps[0].pace.start(at(0)));
        steps[0].run(ASKED, || at(5));
        assert_eq!(due(&steps, Budget::Host, Level::Elevated, at(204)), None);
        assert_eq!(due(&steps, Budget::Host, Level::Elevated, at(205)), Some(0));
    }
}
