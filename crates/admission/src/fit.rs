//! Decides if the process fits in a smaller limit, before the kernel's limit is lowered to it.
//!
//! Kubernetes refuses to lower the memory limit of a running container unless its usage is below.
//! The kernel refuses nothing on version 2: it drops page cache, and then kills. So an operator
//! first makes the process fit.
//!
//! While a fit is in force, the limit is `min(limit of the kernel, fit - page cache)`
//! ([`Signals::set_fit`](super::signal::Signals::set_fit)). Ceiling, levels, purges, evictions, and
//! the bound of the queue follow from the limit, as they do when the kernel's limit changes. What
//! they do not do is decided here: whether the process fits, whether it still can, what is released
//! beyond that, and when the fit has ended. The caller passes a sample several times a second, and
//! acts on the answer.
//!
//! The figure that must fall below the fit is the usage of the cgroup (`memory.current`,
//! `memory.usage_in_bytes`), with page cache: the kubelet compares that one (`usageBytes` of its
//! container statistics) with the new limit, not the working set. Page cache belongs to the kernel,
//! which drops it when the limit falls; this crate writes to no cgroup and cannot. Until then the
//! limit of all other memory is reduced by the page cache, but not below an eighth of the fit. If
//! page cache is all that does not fit, a caller whose limit is lowered without a check may leave
//! it out ([`Fit::counts_page_cache`]). Without a cgroup that limits the process, its resident
//! set counts.
//!
//! What requests have reserved and do not hold yet, and resources that are being loaded, may be
//! allocated after the limit was lowered, so they must fit too.
//!
//! States: `Shrinking -> Holding -> ended`, or `Shrinking -> failed`. A fit that holds ends when
//! the limit has been lowered, or after [`HOLD`], so that a forgotten fit does not limit the
//! service permanently.
//!
//! Pure: no clock, no signal, no allocation.
//!
//! Invariants: a fit is reached only if `counted <= target` and `required + promised <= target` at
//! each sample of [`STAYS`], with `target = fit - fit / 32`; it fails only after its time, or if
//! nothing that could be released has been left for 2 s and the memory has not fallen.

use std::time::Duration;

use lowtide_core::bytes::ByteSize;
use lowtide_core::clock::Moment;

/// The time for which the process must fit: one to four ticks of an idle service, and a hundred of a
/// busy one. A guess: most requests that arrived before the fit have ended.
pub const STAYS: Duration = Duration::from_secs(1);
/// The time for which a fit that was reached stays in force. A guess: a kubelet tries again each
/// minute or two, by statistics that are some ten seconds old.
pub const HOLD: Duration = Duration::from_secs(600);
/// The time without a change after which a process that has nothing to release does not fit.
const STILL: Duration = Duration::from_secs(2);
/// The margin is the fit divided by this: what one tick of a busy service may add.
const MARGIN_PART: u64 = 32;
/// The largest page cache for which room is made, in steps of the margin: seven eighths.
const CACHE_STEPS_MAX: u64 = MARGIN_PART / 8 * 7;
/// Memory that falls by less than the fit divided by this does not change.
const CHANGE_PART: u64 = 256;
/// The time between two requests to release memory, and to the first: by then pressure has released
/// what it can. A guess.
const RELEASE_EVERY: Duration = Duration::from_secs(1);

/// A sample of the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FitSample {
    /// The limit without the fit; [`ByteSize::MAX`] if none is known.
    pub limit: ByteSize,
    /// The usage of the cgroup with page cache; `None` if no cgroup limits the process.
    pub usage: Option<ByteSize>,
    /// The bytes that count against the limit, without page cache.
    pub physical: ByteSize,
    /// The part of `physical` that a purge releases.
    pub purgeable: ByteSize,
    /// The bytes that requests have reserved and do not hold, and those of resources that are being
    /// loaded.
    pub promised: ByteSize,
    /// `true` if something has reserved or holds memory that it may release: a request, a resource,
    /// unused pages, a reclaimer.
    pub may_release: bool,
}

/// The answer to a sample.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FitStep {
    /// The process does not fit yet.
    Shrinking,
    /// The process fits, from this sample on.
    Reached,
    /// The process has been made to fit, and the limit has not been lowered yet.
    Holding,
    /// The process does not fit, although its time is over or nothing is left to release.
    Failed,
    /// The limit has been lowered.
    Lowered,
    /// The limit was not lowered in time.
    Expired,
}

/// A fit in force.
#[derive(Clone, Copy, Debug)]
pub struct Fit {
    /// The limit to fit in.
    pub limit: ByteSize,
    /// The longest time until the process fits.
    pub within: Duration,
    /// `true` if page cache must fit too.
    pub counts_page_cache: bool,
    started: Moment,
    /// The first of the samples that fit.
    fits_since: Option<Moment>,
    /// The smallest memory so far, and when it last fell.
    least: ByteSize,
    fell_at: Moment,
    reached: Option<Moment>,
    /// The time of the last request to release memory.
    released_at: Moment,
    /// The largest page cache so far, rounded.
    cache: ByteSize,
}

impl Fit {
    /// Begins a fit on these terms, which are those of its public fields.
    #[must_use]
    pub const fn new(
        limit: ByteSize,
        within: Duration,
        counts_page_cache: bool,
        now: Moment,
    ) -> Self {
        Self {
            limit,
            within,
            counts_page_cache,
            started: now,
            fits_since: None,
            least: ByteSize::MAX,
            fell_at: now,
            reached: None,
            released_at: now,
            cache: ByteSize::ZERO,
        }
    }

    /// Returns the bytes that the process may hold.
    #[must_use]
    pub const fn target(&self) -> ByteSize {
        self.limit.saturating_sub(ByteSize::new(self.limit.get() / MARGIN_PART))
    }

    /// Returns what counts of this usage.
    #[must_use]
    pub fn counted(&self, sample: &FitSample) -> ByteSize {
        let usage = sample.usage.filter(|_| self.counts_page_cache);
        usage.map_or(sample.physical, |usage| usage.max(sample.physical))
    }

    /// Returns the page cache that counts.
    #[must_use]
    pub fn page_cache(&self, sample: &FitSample) -> ByteSize {
        self.counted(sample).saturating_sub(sample.physical)
    }

    /// Returns the time since the beginning.
    #[must_use]
    pub fn age(&self, now: Moment) -> Duration {
        now - self.started
    }

    /// Returns the limit of memory other than page cache. It falls when page cache grows, in steps
    /// of a thirty-second of the fit, and does not rise.
    #[must_use]
    pub const fn limit_now(&self) -> ByteSize {
        self.limit.saturating_sub(self.cache)
    }

    /// Returns `true` once the process has been made to fit.
    #[must_use]
    pub const fn is_reached(&self) -> bool {
        self.reached.is_some()
    }

    /// Returns the bytes by which the process exceeds the target.
    #[must_use]
    pub fn excess(&self, sample: &FitSample) -> ByteSize {
        let required = sample.physical.saturating_sub(sample.purgeable);
        let most = self.counted(sample).max(required.saturating_add(sample.promised));
        most.saturating_sub(self.target())
    }

    /// Returns the bytes that reclaimers and resources that are not in use are to release now,
    /// besides a purge, whatever the pressure level: it pauses after purges that found little, and
    /// leaves resources for their minimum residency. At most once a second.
    pub fn release(&mut self, now: Moment, sample: &FitSample) -> Option<ByteSize> {
        let excess = self.excess(sample);
        if excess.is_zero() || now - self.released_at < RELEASE_EVERY {
            return None;
        }
        self.released_at = now;
        Some(excess.saturating_sub(sample.purgeable))
    }

    /// Decides on a sample. After [`FitStep::Failed`], [`FitStep::Lowered`] and
    /// [`FitStep::Expired`] the fit is over.
    pub fn step(&mut self, now: Moment, sample: &FitSample) -> FitStep {
        if sample.limit <= self.limit {
            return FitStep::Lowered;
        }
        // Room for page cache, of which half a step fits in the margin. No request is rejected for so
        // much of it that the process cannot fit.
        let margin = (self.limit.get() / MARGIN_PART).max(1);
        let cache = self.page_cache(sample).get();
        let steps = if cache < margin / 2 { 0 } else { cache.div_ceil(margin) };
        if steps <= CACHE_STEPS_MAX {
            self.cache = self.cache.max(ByteSize::new(steps * margin));
        }
        if let Some(reached) = self.reached {
            return if now - reached >= HOLD { FitStep::Expired } else { FitStep::Holding };
        }
        if self.excess(sample).is_zero() {
            if now - *self.fits_since.get_or_insert(now) < STAYS {
                return FitStep::Shrinking;
            }
            self.reached = Some(now);
            return FitStep::Reached;
        }
        self.fits_since = None;
        let counted = self.counted(sample);
        let change = ByteSize::new(self.limit.get() / CHANGE_PART);
        if sample.may_release || counted.saturating_add(change) <= self.least {
            (self.least, self.fell_at) = (counted, now);
        }
        let is_still = now - self.fell_at >= STILL;
        if is_still || self.age(now) >= self.within { FitStep::Failed } else { FitStep::Shrinking }
    }
}

#[cfg(all(test, not(lowtide_loom)))]
mod tests {
    use super::*;

    const SECOND: u64 = 1000;
    const LIMIT: ByteSize = ByteSize::mib(512);

    fn at(millis: u64) -> Moment {
        Moment::after_origin(Duration::from_millis(millis))
    }

    /// A busy process in a cgroup of 1 GiB, with this usage in MiB.
    fn sample(usage: u64) -> FitSample {
        let bytes = ByteSize::mib(usage);
        FitSample {
            limit: ByteSize::gib(1),
            usage: Some(bytes),
            physical: bytes,
            purgeable: ByteSize::ZERO,
            promised: ByteSize::ZERO,
            may_release: true,
        }
    }

    fn fit() -> Fit {
        Fit::new(LIMIT, Duration::from_secs(30), true, at(0))
    }

    #[test]
    fn a_process_fits_once_it_has_stayed_below_the_margin_for_a_second() {
        let mut fit = fit();
        assert_eq!(fit.step(at(0), &sample(900)), FitStep::Shrinking);
        assert_eq!(fit.excess(&sample(900)), ByteSize::mib(900 - 496));
        // 512 MiB less a thirty-second.
        assert_eq!(fit.step(at(100), &sample(496)), FitStep::Shrinking);
        assert_eq!(fit.step(at(900), &sample(497)), FitStep::Shrinking, "it begins again");
        assert_eq!(fit.step(at(1000), &sample(496)), FitStep::Shrinking);
        assert_eq!(fit.step(at(1999), &sample(400)), FitStep::Shrinking);
        assert!(!fit.is_reached());
        assert_eq!(fit.step(at(2000), &sample(496)), FitStep::Reached);
        assert!(fit.is_reached());
        assert_eq!(fit.step(at(2100), &sample(511)), FitStep::Holding, "the limit holds it now");
    }

    #[test]
    fn what_is_promised_must_fit_as_well_and_unused_pages_do_not_count_for_it() {
        let mut fit = fit();
        let promised = |mib| FitSample { promised: ByteSize::mib(mib), ..sample(400) };
        assert_eq!(fit.excess(&promised(96)), ByteSize::ZERO);
        assert_eq!(fit.excess(&promised(97)), ByteSize::mib(1));
        let purgeable = FitSample { purgeable: ByteSize::mib(50), ..promised(146) };
        assert_eq!(fit.excess(&purgeable), ByteSize::ZERO, "they take the place of unused pages");
        for second in 0..29 {
            assert_eq!(fit.step(at(second * SECOND), &promised(97)), FitStep::Shrinking);
        }
        assert_eq!(fit.step(at(30 * SECOND), &promised(97)), FitStep::Failed);
    }

    #[test]
    fn page_cache_counts_unless_the_terms_leave_it_out() {
        let cached = FitSample { physical: ByteSize::mib(300), ..sample(600) };
        assert_eq!(fit().excess(&cached), ByteSize::mib(104));
        let without = Fit { counts_page_cache: false, ..fit() };
        assert_eq!(without.excess(&cached), ByteSize::ZERO);
        let unlimited = FitSample { usage: None, ..cached };
        assert_eq!(fit().excess(&unlimited), ByteSize::ZERO, "no cgroup limits the process");
    }

    /// Bug: requests took the room of page cache, which is no pressure, so that the usage never
    /// fell below the fit.
    #[test]
    fn page_cache_takes_room_from_everything_else_and_gives_none_back() {
        let mut fit = fit();
        let cached = |mib: u64| FitSample { physical: ByteSize::mib(300), ..sample(300 + mib) };
        for (cache, limit) in
            [(7, 512), (8, 496), (16, 496), (17, 480), (0, 480), (449, 480), (448, 64), (9, 64)]
        {
            assert_eq!(fit.step(at(0), &cached(cache)), FitStep::Shrinking);
            assert_eq!(fit.limit_now(), ByteSize::mib(limit), "{cache} MiB of page cache");
        }
        let mut fit = Fit { counts_page_cache: false, ..self::fit() };
        let _ = fit.step(at(0), &cached(300));
        assert_eq!(fit.limit_now(), LIMIT);
    }

    #[test]
    fn a_process_that_is_about_to_fit_at_the_end_of_its_time_is_not_refused() {
        let mut fit = fit();
        assert_eq!(fit.step(at(29_500), &sample(496)), FitStep::Shrinking);
        assert_eq!(fit.step(at(30_400), &sample(496)), FitStep::Shrinking);
        assert_eq!(fit.step(at(30_500), &sample(496)), FitStep::Reached);
        let mut fit = self::fit();
        assert_eq!(fit.step(at(29_500), &sample(496)), FitStep::Shrinking);
        assert_eq!(fit.step(at(30_400), &sample(497)), FitStep::Failed);
    }

    #[test]
    fn a_process_with_nothing_to_release_is_refused_after_two_seconds_without_a_change() {
        let base = |mib| FitSample { may_release: false, ..sample(mib) };
        let mut fit = fit();
        assert_eq!(fit.step(at(0), &base(700)), FitStep::Shrinking);
        // It falls by itself: a task of the application ends.
        assert_eq!(fit.step(at(1900), &base(697)), FitStep::Shrinking);
        assert_eq!(fit.step(at(3800), &base(695)), FitStep::Shrinking);
        assert_eq!(fit.step(at(5800), &base(694)), FitStep::Failed, "1 MiB is no change");
        let mut fit = self::fit();
        for second in 0..10 {
            let sample = if second % 2 == 0 { sample(700) } else { base(700) };
            assert_eq!(fit.step(at(second * SECOND), &sample), FitStep::Shrinking, "it may fall");
        }
    }

    #[test]
    fn what_is_too_much_is_ordered_back_each_second_unused_pages_first() {
        let mut fit = fit();
        let unused = |mib| FitSample { purgeable: ByteSize::mib(mib), ..sample(600) };
        assert_eq!(fit.release(at(999), &unused(50)), None);
        let order = |mib| Some(ByteSize::mib(mib));
        assert_eq!(fit.release(at(1000), &unused(50)), order(54), "and a purge");
        assert_eq!(fit.release(at(1999), &unused(50)), None);
        assert_eq!(fit.release(at(2000), &unused(200)), order(0));
        assert_eq!(fit.release(at(3000), &sample(600)), order(104));
        assert_eq!(fit.release(at(4000), &sample(496)), None, "nothing is too much");
    }

    #[test]
    fn a_fit_ends_when_the_limit_was_lowered_or_after_ten_minutes() {
        let lowered = FitSample { limit: ByteSize::mib(512), ..sample(600) };
        assert_eq!(fit().step(at(1), &lowered), FitStep::Lowered, "also before it was reached");
        let mut fit = fit();
        let _ = fit.step(at(0), &sample(100));
        assert_eq!(fit.step(at(SECOND), &sample(100)), FitStep::Reached);
        let mut other = fit;
        assert_eq!(fit.step(at(600 * SECOND), &sample(100)), FitStep::Holding);
        assert_eq!(fit.step(at(601 * SECOND), &sample(100)), FitStep::Expired);
        let above = FitSample { limit: ByteSize::mib(513), ..sample(600) };
        assert_eq!(other.step(at(2 * SECOND), &above), FitStep::Holding);
        assert_eq!(other.step(at(2 * SECOND), &lowered), FitStep::Lowered);
    }

    #[test]
    fn an_unknown_limit_is_above_every_fit() {
        let unknown = FitSample { limit: ByteSize::MAX, usage: None, ..sample(100) };
        let mut fit = fit();
        assert_eq!(fit.step(at(0), &unknown), FitStep::Shrinking);
        assert_eq!(fit.step(at(SECOND), &unknown), FitStep::Reached);
    }
}
