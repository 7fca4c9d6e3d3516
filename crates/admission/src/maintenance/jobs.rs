//! Jobs of the control loop, and the queue of them on which the worker waits.
//!
//! A set of jobs is 64 bits, with one bit per job. So the queue is bounded, a pending job is not
//! queued twice, and a push neither allocates nor locks more than the bell's flag. The queue runs
//! nothing.
//!
//! Invariant: `pop_job` returns the most urgent job that was pushed and not yet popped. A job pushed
//! before or while the worker waits is never lost.

use std::sync::atomic::Ordering;

use crate::reclaim::STEPS_MAX;
use lowtide_core::clock::{Clock, Moment};

use super::state::PressureState;

lowtide_core::named_enum! {
    /// The reason for a purge of the heap, used as a label in metrics.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
    pub enum Trigger {
        /// Memory is short, or a load does not fit together with memory that a purge releases.
        Pressure = "pressure",
        /// A caller or an operator requested it.
        Manual = "manual",
        /// A resource has been unloaded.
        Unload = "unload",
        /// A resource has been loaded.
        Load = "load",
        /// Retained memory has grown.
        Growth = "growth",
        /// The service is idle.
        Idle = "idle",
        /// The purge interval has passed.
        Periodic = "periodic",
    }
}

impl Trigger {
    /// Returns `true` if the control loop posts it, at its own rate. The others run on every
    /// request.
    pub(super) const fn is_paced(self) -> bool {
        !matches!(self, Self::Manual | Self::Unload)
    }

    /// Returns `true` if the purge leaves memory alone that decays by itself: there is no hurry.
    pub const fn leaves_decaying(self) -> bool {
        matches!(self, Self::Load | Self::Growth | Self::Idle | Self::Periodic)
    }
}

/// A task for the worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Job {
    /// Purge the host's heap.
    Purge {
        /// The reason.
        trigger: Trigger,
    },
    /// Run a reclaim step.
    Reclaim {
        /// The index of the step.
        step: usize,
    },
    /// Run one admin task.
    AdminTask,
    /// Report that memory that no request owns leaves no room, or no longer does.
    ReportExhaustion,
    /// Tend the fit in force.
    TendFit,
    /// Unload the resources that are due.
    UnloadIdle,
    /// Release device memory whose decay time has passed.
    DecayDevice,
    /// Release heap memory whose decay time has passed.
    DecayHeap,
    /// Sample the free memory of the device, and release idle memory if it is low.
    SampleDevice,
    /// Publish metrics.
    Publish,
    /// Put the device arena to sleep that has been idle for longest.
    SleepDevice,
}

/// Bit numbers: the lower, the more urgent. The reclaim steps follow the pressure purge.
const STEP_FIRST: usize = 1;
const REST_FIRST: usize = STEP_FIRST + STEPS_MAX;

/// The other jobs, from the most urgent.
const REST: [Job; 15] = [
    Job::Purge { trigger: Trigger::Manual },
    Job::UnloadIdle,
    Job::Purge { trigger: Trigger::Unload },
    Job::AdminTask,
    Job::TendFit,
    Job::DecayDevice,
    Job::DecayHeap,
    Job::SampleDevice,
    Job::Purge { trigger: Trigger::Load },
    Job::Purge { trigger: Trigger::Growth },
    Job::Purge { trigger: Trigger::Idle },
    Job::Purge { trigger: Trigger::Periodic },
    Job::Publish,
    Job::ReportExhaustion,
    // It may copy for long, and no caller waits for it.
    Job::SleepDevice,
];
const _: () = assert!(REST_FIRST + REST.len() <= 64, "each job has a bit of its own");

impl Job {
    /// Returns the bit number; `None` for a step beyond the largest policy.
    fn place(self) -> Option<usize> {
        match self {
            Self::Purge { trigger: Trigger::Pressure } => Some(0),
            Self::Reclaim { step: STEPS_MAX.. } => None,
            Self::Reclaim { step } => Some(STEP_FIRST + step),
            _ => REST.iter().position(|job| *job == self).map(|at| REST_FIRST + at),
        }
    }

    fn at(place: usize) -> Option<Self> {
        match place {
            0 => Some(Self::Purge { trigger: Trigger::Pressure }),
            STEP_FIRST..REST_FIRST => Some(Self::Reclaim { step: place - STEP_FIRST }),
            _ => REST.get(place - REST_FIRST).copied(),
        }
    }
}

/// A set of jobs. Iterates from the most urgent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Jobs(u64);

impl Jobs {
    /// Adds a job. Ignores a step beyond the largest ladder.
    pub(super) fn insert(&mut self, job: Job) {
        self.0 |= job.place().map_or(0, |place| 1 << place);
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

/// The pending jobs. One worker waits for them; any thread may post.
impl PressureState {
    /// Adds jobs and wakes the worker.
    pub(super) fn post_all(&self, jobs: Jobs) {
        if jobs.0 != 0 && !self.is_closed() {
            self.pending.fetch_or(jobs.0, Ordering::Release);
            self.bell.ring();
        }
    }

    /// Adds a job and wakes the worker. A job that is already pending stays single. Does nothing
    /// after [`PressureState::close`].
    pub fn post(&self, job: Job) {
        let mut jobs = Jobs::default();
        jobs.insert(job);
        self.post_all(jobs);
    }

    /// Takes the most urgent job.
    pub fn pop_job(&self) -> Option<Job> {
        // One that another thread took is not tried again.
        Jobs(self.pending.load(Ordering::Acquire)).find(|job| {
            let bit = job.place().map_or(0, |place| 1 << place);
            self.pending.fetch_and(!bit, Ordering::AcqRel) & bit != 0
        })
    }

    /// Returns `true` if a job is pending.
    #[must_use]
    pub fn has_jobs(&self) -> bool {
        self.pending.load(Ordering::Acquire) != 0
    }

    /// Waits for a job and takes the most urgent one. Returns `None` once no more are accepted and
    /// none is pending.
    pub(super) fn wait_for_job(&self, clock: &dyn Clock) -> Option<Job> {
        // Ends: each iteration waits for a push or the close.
        loop {
            if let Some(job) = self.pop_job() {
                return Some(job);
            }
            if self.is_closed() {
                return None;
            }
            clock.wait_until(&self.bell, Moment::NEVER);
        }
    }

    /// Stops accepting jobs. The worker ends after the pending ones.
    pub fn close(&self) {
        self.closed.store(true, Ordering::Release);
        self.bell.ring();
    }

    /// Returns `true` if no more jobs are accepted.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }
}

#[cfg(all(test, not(lowtide_loom)))]
mod tests {
    use super::*;
    use lowtide_core::clock::ManualClock;

    #[test]
    fn each_job_has_a_place_of_its_own() {
        let places: Vec<_> =
            (0..REST_FIRST + REST.len()).map(|place| Job::at(place).expect("a job")).collect();
        for (place, job) in places.iter().enumerate() {
            assert_eq!(job.place(), Some(place), "{job:?}");
        }
        assert_eq!(Job::at(REST_FIRST + REST.len()), None);
        assert_eq!(Job::Reclaim { step: STEPS_MAX }.place(), None);
    }

    #[test]
    fn the_most_urgent_comes_first_and_doubles_are_one() {
        let queue = PressureState::default();
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
            queue.post(job);
        }
        let order: Vec<_> = std::iter::from_fn(|| queue.pop_job()).collect();
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
        let queue = PressureState::default();
        queue.post(Job::Publish);
        queue.close();
        queue.post(Job::UnloadIdle);
        let clock = ManualClock::new();
        assert_eq!(queue.wait_for_job(&clock), Some(Job::Publish));
        assert_eq!(queue.wait_for_job(&clock), None);
    }

    #[test]
    fn a_push_wakes_the_worker() {
        let queue = PressureState::default();
        let clock = ManualClock::new();
        std::thread::scope(|scope| {
            let worker = scope.spawn(|| queue.wait_for_job(&clock));
            assert!(clock.wait_for_waiters(1, std::time::Duration::from_secs(20)));
            queue.post(Job::DecayDevice);
            assert_eq!(worker.join().expect("no panic"), Some(Job::DecayDevice));
        });
    }
}
