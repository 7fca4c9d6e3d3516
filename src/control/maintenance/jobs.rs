//! What the control loop wants done, and the queue on which the worker waits for it.
//!
//! A set of jobs is 64 bits: each job has one place, so that the queue is bounded, a job that waits
//! already is not queued twice, and a push neither allocates nor locks more than the bell's flag.
//! The queue runs nothing.
//!
//! Invariant: `pop` gives the most urgent job that was pushed and not yet popped; a job pushed
//! before or while the worker waits is never lost.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::clock::{Bell, Clock, Moment};
use crate::control::reclaim::Ladder;

/// Why the heap is purged; the label of its metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Trigger {
    /// Memory is short.
    Pressure,
    /// Somebody asked for it.
    Manual,
    /// A resource has been unloaded.
    Unload,
    /// A resource has been loaded.
    Load,
    /// What the heaps keep has grown.
    Growth,
    /// Nothing is going on.
    Idle,
    /// It was time to.
    Periodic,
}

impl Trigger {
    /// All triggers, the most urgent first.
    pub const ALL: [Self; 7] = [
        Self::Pressure,
        Self::Manual,
        Self::Unload,
        Self::Load,
        Self::Growth,
        Self::Idle,
        Self::Periodic,
    ];

    /// Whether the control loop posts it, at its pace; the others run whenever they are asked for.
    pub(super) const fn is_paced(self) -> bool {
        !matches!(self, Self::Manual | Self::Unload)
    }

    /// Whether it leaves alone what leaves by itself in its time: there is no hurry.
    pub(crate) const fn leaves_decaying(self) -> bool {
        matches!(self, Self::Load | Self::Growth | Self::Idle | Self::Periodic)
    }

    /// Its label in metrics.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Pressure => "pressure",
            Self::Manual => "manual",
            Self::Unload => "unload",
            Self::Load => "load",
            Self::Growth => "growth",
            Self::Idle => "idle",
            Self::Periodic => "periodic",
        }
    }
}

/// Something for the worker to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Job {
    /// Purge the host's heap.
    Purge {
        /// Why.
        trigger: Trigger,
    },
    /// Ask a reclaimer.
    Reclaim {
        /// Its rung on the ladder.
        step: usize,
    },
    /// Do what an operator asked for, one errand.
    AdminTask,
    /// Report that memory that no request owns leaves no room, or does no longer.
    ReportExhaustion,
    /// Unload the resources that are due.
    UnloadIdle,
    /// Give back what the device arenas have let decay.
    DecayDevice,
    /// Have the heap give back what its decay times let go.
    DecayHeap,
    /// Look how much memory the device has left, and give idle memory back where that is little.
    SampleDevice,
    /// Publish metrics.
    Publish,
    /// Let the device arena fall asleep that has been idle for longest.
    SleepDevice,
}

/// Places: the lower, the more urgent. The rungs of the ladder come after the pressure purge.
const RUNG_FIRST: usize = 1;
const MANUAL: usize = RUNG_FIRST + Ladder::RUNGS_MAX;
const PLACES: usize = MANUAL + 14;
const _: () = assert!(PLACES <= 64, "each job has a bit of its own");

impl Job {
    /// Its place; `None` for a rung that no ladder has.
    const fn place(self) -> Option<usize> {
        Some(match self {
            Self::Purge { trigger: Trigger::Pressure } => 0,
            Self::Reclaim { step } if step < Ladder::RUNGS_MAX => RUNG_FIRST + step,
            Self::Reclaim { .. } => return None,
            Self::Purge { trigger: Trigger::Manual } => MANUAL,
            Self::UnloadIdle => MANUAL + 1,
            Self::Purge { trigger: Trigger::Unload } => MANUAL + 2,
            Self::AdminTask => MANUAL + 3,
            Self::DecayDevice => MANUAL + 4,
            Self::DecayHeap => MANUAL + 5,
            Self::SampleDevice => MANUAL + 6,
            Self::Purge { trigger: Trigger::Load } => MANUAL + 7,
            Self::Purge { trigger: Trigger::Growth } => MANUAL + 8,
            Self::Purge { trigger: Trigger::Idle } => MANUAL + 9,
            Self::Purge { trigger: Trigger::Periodic } => MANUAL + 10,
            Self::Publish => MANUAL + 11,
            Self::ReportExhaustion => MANUAL + 12,
            // It may copy for long, and nobody waits for it.
            Self::SleepDevice => MANUAL + 13,
        })
    }

    fn at(place: usize) -> Option<Self> {
        const REST: [Job; PLACES - MANUAL] = [
            Job::Purge { trigger: Trigger::Manual },
            Job::UnloadIdle,
            Job::Purge { trigger: Trigger::Unload },
            Job::AdminTask,
            Job::DecayDevice,
            Job::DecayHeap,
            Job::SampleDevice,
            Job::Purge { trigger: Trigger::Load },
            Job::Purge { trigger: Trigger::Growth },
            Job::Purge { trigger: Trigger::Idle },
            Job::Purge { trigger: Trigger::Periodic },
            Job::Publish,
            Job::ReportExhaustion,
            Job::SleepDevice,
        ];
        match place {
            0 => Some(Self::Purge { trigger: Trigger::Pressure }),
            RUNG_FIRST..MANUAL => Some(Self::Reclaim { step: place - RUNG_FIRST }),
            _ => REST.get(place - MANUAL).copied(),
        }
    }
}

/// A set of jobs; iterates from the most urgent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Jobs(u64);

impl Jobs {
    /// Puts one in; a rung that no ladder has is left out.
    pub fn insert(&mut self, job: Job) {
        self.0 |= job.place().map_or(0, |place| 1 << place);
    }

    /// Whether one is in it.
    #[must_use]
    pub const fn contains(self, job: Job) -> bool {
        match job.place() {
            Some(place) => self.0 & (1 << place) != 0,
            None => false,
        }
    }

    /// Whether there are none.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }
}

impl Iterator for Jobs {
    type Item = Job;

    fn next(&mut self) -> Option<Job> {
        let lowest = self.0 & self.0.wrapping_neg();
        self.0 ^= lowest;
        Job::at(usize::try_from(lowest.checked_ilog2()?).ok()?)
    }
}

/// Jobs that wait for the worker. One worker waits on it; anybody pushes.
#[derive(Debug)]
pub struct JobQueue {
    pending: AtomicU64,
    closed: AtomicBool,
    bell: Arc<Bell>,
}

impl JobQueue {
    /// An open queue without jobs.
    #[must_use]
    pub fn new() -> Self {
        Self { pending: AtomicU64::new(0), closed: AtomicBool::new(false), bell: Bell::new() }
    }

    /// Adds jobs and wakes the worker; what waits already waits once. Nothing after the close.
    pub fn push(&self, jobs: Jobs) {
        if !jobs.is_empty() && !self.is_closed() {
            self.pending.fetch_or(jobs.0, Ordering::Release);
            self.bell.ring();
        }
    }

    /// Adds one job.
    pub fn push_one(&self, job: Job) {
        let mut jobs = Jobs::default();
        jobs.insert(job);
        self.push(jobs);
    }

    /// Takes the most urgent job.
    pub fn pop(&self) -> Option<Job> {
        let mut pending = Jobs(self.pending.load(Ordering::Acquire));
        // Ends: a bit that somebody else took is looked for no more.
        loop {
            let job = pending.next()?;
            let bit = 1 << job.place()?;
            if self.pending.fetch_and(!bit, Ordering::AcqRel) & bit != 0 {
                return Some(job);
            }
        }
    }

    /// The jobs that wait.
    #[must_use]
    pub fn pending(&self) -> Jobs {
        Jobs(self.pending.load(Ordering::Acquire))
    }

    /// Takes the most urgent job, waiting for one; `None` once the queue is closed and empty.
    pub fn wait(&self, clock: &dyn Clock) -> Option<Job> {
        // Ends: each turn waits for a push or the close.
        loop {
            if let Some(job) = self.pop() {
                return Some(job);
            }
            if self.is_closed() {
                return None;
            }
            clock.wait_until(&self.bell, Moment::NEVER);
        }
    }

    /// Takes no more jobs; the worker ends after those that wait.
    pub fn close(&self) {
        self.closed.store(true, Ordering::Release);
        self.bell.ring();
    }

    /// Whether it takes no more jobs.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }
}

impl Default for JobQueue {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(all(test, not(lowtide_loom)))]
mod tests {
    use super::*;
    use crate::clock::ManualClock;

    #[test]
    fn each_job_has_a_place_of_its_own() {
        let places: Vec<_> = (0..PLACES).map(|place| Job::at(place).expect("a job")).collect();
        for (place, job) in places.iter().enumerate() {
            assert_eq!(job.place(), Some(place), "{job:?}");
        }
        assert_eq!(Job::at(PLACES), None);
        assert_eq!(Job::Reclaim { step: Ladder::RUNGS_MAX }.place(), None);
    }

    #[test]
    fn the_most_urgent_comes_first_and_doubles_are_one() {
        let queue = JobQueue::new();
        let purge = |trigger| Job::Purge { trigger };
        for job in [
            Job::Publish,
            purge(Trigger::Idle),
            Job::UnloadIdle,
            Job::Reclaim { step: 3 },
            purge(Trigger::Pressure),
            Job::Publish,
            Job::Reclaim { step: 0 },
            Job::Reclaim { step: 99 },
        ] {
            queue.push_one(job);
        }
        let order: Vec<_> = std::iter::from_fn(|| queue.pop()).collect();
        let expected = [
            purge(Trigger::Pressure),
            Job::Reclaim { step: 0 },
            Job::Reclaim { step: 3 },
            Job::UnloadIdle,
            purge(Trigger::Idle),
            Job::Publish,
        ];
        assert_eq!(order, expected);
    }

    #[test]
    fn a_closed_queue_ends_the_worker_after_what_waits() {
        let queue = JobQueue::new();
        queue.push_one(Job::Publish);
        queue.close();
        queue.push_one(Job::UnloadIdle);
        let clock = ManualClock::new();
        assert_eq!(queue.wait(&clock), Some(Job::Publish));
        assert_eq!(queue.wait(&clock), None);
    }

    #[test]
    fn a_push_wakes_the_worker() {
        let queue = JobQueue::new();
        let clock = ManualClock::new();
        std::thread::scope(|scope| {
            let worker = scope.spawn(|| queue.wait(&clock));
            assert!(clock.wait_for_waiters(1, std::time::Duration::from_secs(20)));
            queue.push_one(Job::DecayDevice);
            assert_eq!(worker.join().expect("no panic"), Some(Job::DecayDevice));
        });
    }
}
