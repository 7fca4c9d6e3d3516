//! The admin command `fit`: shrinks the process below a smaller limit before an operator lowers the
//! kernel's limit to it.
//!
//! `lowtide_admission::fit` decides, and its head says which figure must fall and what a fit does.
//! Here the command becomes a limit of the signals, which everything else follows, and an admin
//! task that runs until the process fits or cannot. The control loop posts a job for it at most ten
//! times a second, and at each tick of an idle service, so the worker never waits for it. Each job
//! updates the progress of the task: the largest holders of memory.
//!
//! Beyond what the smaller limit does by itself, a fit that has not succeeded after a second purges
//! the heap each second, whatever purges found before, asks reclaimers, and unloads resources that
//! are not in use, also within their minimum residency.
//!
//! One fit is in force at most; a new one replaces it. It applies to the host's memory. While it is
//! in force, memory is not declared exhausted, because a restart would undo it. A limit at or below
//! that of the command needs no fit: the task ends at once. If no limit is known, that of the
//! command is one.
//!
//! Invariant: the signals have a fit if and only if one is in force here; a task that was started
//! ends, also by a shutdown or a panic.

use crate::bytes::ByteSize;
use crate::clock::{Moment, short};
use crate::sync::{caught, lock};
use lowtide_admission::fit::{Fit, FitSample, FitStep, HOLD};
use lowtide_admission::{Budget, Job, Limit, ReclaimerStats, Signal, Signals, Trigger};
use lowtide_heap::HeapProbe;

use super::admin::{AdminCommand, AdminTaskState};
use super::breakdown::{MemoryPart, PartKind};
use super::error::MemoryError;
use super::shared::Shared;
use super::snapshot::MemorySnapshot;

/// The number of holders of memory that are named.
const HOLDERS_MAX: usize = 5;
/// Unused pages above the physical memory divided by this may be released.
const UNUSED_PART: u64 = 256;

#[derive(Clone, Debug)]
pub(super) struct FitTask {
    fit: Fit,
    /// The task and its command.
    id: u64,
    command: AdminCommand,
}

/// Describes a limit, such as `512.0 MiB, set by the cgroup's memory limit`.
fn describe_limit(limit: Limit) -> String {
    if !limit.is_known() {
        return "unknown".to_owned();
    }
    format!("{}, set by {}", limit.bytes, limit.source.phrase())
}

/// The minimum accepted limit: the two threads alone need half of it.
pub(super) const LIMIT_MIN: ByteSize = ByteSize::mib(1);

/// Returns the memory of this process without file pages, which no limit counts, and without that
/// of the cgroup's other processes.
pub(super) fn held_by_process(signal: &Signal) -> ByteSize {
    signal.rss.map_or(signal.physical, |rss| rss.min(signal.physical))
}

/// Returns the memory of this process now, without free pages of the heap.
pub(super) fn held_at_start(signals: &Signals, heap: Option<HeapProbe>) -> ByteSize {
    let heap = heap.and_then(|heap| heap.snapshot().ok()).unwrap_or_default();
    held_by_process(&signals.sample()).saturating_sub(heap.dirty.saturating_add(heap.muzzy))
}

/// Returns the smallest limit that admits anything next to these bytes, in whole MiB.
pub(super) fn least_limit(held: ByteSize, ceiling: f64) -> ByteSize {
    let least = held.scaled(1.0 / ceiling).saturating_add(ByteSize::new(1));
    least.next_multiple_of(LIMIT_MIN).unwrap_or(ByteSize::MAX)
}

impl Shared {
    /// Returns the smallest limit to fit in: of what the process held at its start, unless it holds
    /// less by now, or a reclaimer may release memory that is older.
    pub(super) fn fit_min(&self) -> ByteSize {
        let is_kept = !self.resources.reclaimer_stats().iter().any(|of| of.registered);
        let held = held_by_process(&self.signals.sample()).min(self.held_at_start);
        least_limit(if is_kept { held } else { ByteSize::ZERO }, self.config.ceiling.value)
    }

    /// Begins a fit, or ends the one in force. Returns the outcome of the task, or `None` if the
    /// task goes on.
    pub(super) fn begin_fit(
        &self,
        id: u64,
        command: &AdminCommand,
        fit: Option<Fit>,
    ) -> Result<Option<String>, String> {
        let ended = match &fit {
            Some(_) => self.fail_fit("replaced", format!("replaced by admin task {id}")),
            None => self.fail_fit("lifted", "lifted".to_owned()),
        };
        let limit = self.signals.sample().limit_without_fit;
        let Some(fit) = fit else {
            let none = || "no fit is in force".to_owned();
            let before = ended.map_or_else(none, |limit| format!("the fit in {limit} is lifted"));
            return Ok(Some(format!("{before}: the limit is {}", describe_limit(limit))));
        };
        if fit.limit >= limit.bytes {
            return Ok(Some(format!("the limit is already {}", describe_limit(limit))));
        }
        {
            let mut in_force = lock(&self.fit);
            // With the lock held: a shutdown that comes later ends it.
            if self.admission.is_closed() {
                return Err(MemoryError::Ended.to_string());
            }
            *in_force = Some(FitTask { fit, id, command: command.clone() });
            self.signals.set_fit(Some(fit.limit));
        }
        self.state.post(Job::Purge { trigger: Trigger::Manual });
        log!(info, admin_task = id, limit = %fit.limit, was = describe_limit(limit),
            within = %short(fit.within), "fit started");
        Ok(None)
    }

    /// Looks at the fit in force, on the worker.
    pub(super) fn tend_fit(&self, now: Moment) {
        if let Err(said) = caught(|| self.decide_on_fit(now)) {
            self.fail_fit("failed", format!("panicked: {said}"));
        }
    }

    fn decide_on_fit(&self, now: Moment) {
        if lock(&self.fit).is_none() {
            return;
        }
        let sample = self.fit_sample();
        let (step, release, running) = {
            let mut in_force = lock(&self.fit);
            let Some(running) = in_force.as_mut() else { return };
            let step = running.fit.step(now, &sample);
            self.signals.set_fit(Some(running.fit.limit_now()));
            let shrinks = step == FitStep::Shrinking;
            let release = shrinks.then(|| running.fit.release(now, &sample)).flatten();
            (step, release, running.clone())
        };
        let (id, fit) = (running.id, running.fit);
        match step {
            FitStep::Holding => {}
            FitStep::Shrinking => {
                let (_, holders) = self.holders(&sample, &fit);
                self.admin_tasks.edit(id, |task| task.progress = holders);
                if release.is_some() && !sample.purgeable.is_zero() {
                    self.state.post(Job::Purge { trigger: Trigger::Manual });
                }
                // The worker purges if something was released.
                if let Some(beyond) = release.filter(|beyond| !beyond.is_zero()) {
                    self.resources.release(beyond);
                }
            }
            FitStep::Reached => {
                let (counted, age) = (fit.counted(&sample), fit.age(now));
                let text = format!(
                    "fits in {} after {}: {counted} in use{}; the limit can be lowered within {}",
                    fit.limit,
                    short(age),
                    cached(fit.page_cache(&sample)),
                    short(HOLD)
                );
                self.finish_task(id, &running.command, AdminTaskState::Done(text));
            }
            FitStep::Failed => {
                let text = self.failure_text(&fit, &sample, now);
                self.fail_fit("failed", text);
            }
            FitStep::Lowered => {
                let limit = |now: &str| AdminTaskState::Done(format!("the limit is now {now}"));
                self.end_fit("lowered", limit);
            }
            FitStep::Expired => drop(self.fail_fit("expired", "lifted".to_owned())),
        }
    }

    fn fit_sample(&self) -> FitSample {
        let signal = self.signals.sample();
        let ledger = self.admission.ledger(Budget::Host);
        let purgeable = self.state.sample().purgeable;
        let uses = self.resources.stats().iter().any(|stats| stats.loaded || stats.loading);
        // What it may release is known once it has been asked.
        let has_releasable = |of: &ReclaimerStats| {
            of.registered && (of.calls_total == 0 || !of.releasable.is_zero())
        };
        let promised = ledger.unheld().saturating_add(ledger.loading());
        let may_release = uses
            || !promised.is_zero()
            || self.admission.stats().held() > 0
            || purgeable.get() > signal.physical.get() / UNUSED_PART
            || self.resources.reclaimer_stats().iter().any(has_releasable);
        FitSample {
            limit: signal.limit_without_fit.bytes,
            usage: signal.usage,
            physical: signal.physical,
            purgeable,
            promised,
            may_release,
        }
    }

    /// Ends the fit in force; its task has failed if it still runs. Returns its limit.
    pub(super) fn fail_fit(&self, reason: &'static str, text: String) -> Option<ByteSize> {
        self.end_fit(reason, |_| AdminTaskState::Failed(text))
    }

    /// Ends the fit in force: the limit without it applies from the next sample on. `state` is the
    /// end of its task, if that still runs, from the limit now. Returns the limit of the fit.
    fn end_fit(
        &self,
        reason: &'static str,
        state: impl FnOnce(&str) -> AdminTaskState,
    ) -> Option<ByteSize> {
        let running = {
            let mut in_force = lock(&self.fit);
            let running = in_force.take()?;
            self.signals.set_fit(None);
            running
        };
        let limit = running.fit.limit;
        let now = describe_limit(self.signals.sample().limit_without_fit);
        if running.fit.is_reached() {
            // What the task did has ended.
            self.admin_tasks.edit(running.id, |task| {
                if let AdminTaskState::Done(text) = &mut task.state {
                    *text = format!("{text}; {reason}: the limit is {now}");
                }
            });
        } else {
            let _ = self.finish_task(running.id, &running.command, state(&now));
        }
        let text = format!("fit ended ({reason}): the limit is {now}");
        self.events.add(self.clock.since_epoch(), "admin", &limit.to_string(), text);
        log!(info, admin_task = running.id, %limit, now, reason, "fit ended");
        Some(limit)
    }

    /// Says why the process does not fit.
    fn failure_text(&self, fit: &Fit, sample: &FitSample, now: Moment) -> String {
        let (cache, holders) = self.holders(sample, fit);
        let when = if fit.age(now) < fit.within {
            ": nothing is left to release".to_owned()
        } else {
            format!(" within {}", short(fit.within))
        };
        let counts = fit.counted(sample).saturating_sub(fit.target());
        let hint = if !counts.is_zero() && cache >= counts {
            "; page cache is the kernel's, which drops it when the limit falls, but Kubernetes \
             refuses to lower the limit: expected less page cache, or page_cache=ignore"
        } else {
            ""
        };
        format!("cannot fit in {}{when}: {holders}{hint}", fit.limit)
    }

    /// Returns the page cache that counts, and a text about all holders of memory.
    fn holders(&self, sample: &FitSample, fit: &Fit) -> (ByteSize, String) {
        let snapshot = self.snapshot();
        let breakdown = self.breakdown(&snapshot);
        let counted = fit.counted(sample);
        let cache = fit.page_cache(sample);
        let named = breakdown.largest(HOLDERS_MAX);
        let others = breakdown.parts.iter().map(|part| part.bytes).sum::<ByteSize>();
        let others = others.saturating_sub(named.iter().map(|part| part.bytes).sum());
        let mut parts: Vec<_> = named.into_iter().map(|part| described(part, &snapshot)).collect();
        let more = [
            (others, "other memory"),
            (cache, "page cache"),
            (sample.promised, "reserved and not in use yet"),
        ];
        let more = more.into_iter().filter(|(bytes, _)| !bytes.is_zero());
        parts.extend(more.map(|(bytes, what)| format!("{what} {bytes}")));
        let text = format!("{counted} in use, target {}: {}", fit.target(), parts.join(", "));
        (cache, text)
    }
}

/// Describes a holder of memory, and if a resource is in use.
fn described(part: &MemoryPart, snapshot: &MemorySnapshot) -> String {
    let is_it = |name: &str| part.name.as_deref() == Some(name);
    let of = snapshot.resources.iter().find(|resource| is_it(&resource.name));
    match of.filter(|_| part.kind == PartKind::Resource) {
        Some(resource) if resource.guards > 0 => format!("{part} (guards: {})", resource.guards),
        Some(_) => format!("{part} (not in use)"),
        None => part.to_string(),
    }
}

/// Describes the page cache in a usage.
fn cached(cache: ByteSize) -> String {
    match cache {
        ByteSize::ZERO => String::new(),
        cache => format!(", with {cache} of page cache"),
    }
}
