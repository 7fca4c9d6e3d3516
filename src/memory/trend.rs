//! Figures over time: the trend of live memory at quiet times, which tells a leak from traffic, the
//! last five minutes for a viewer, and the largest value of about the last minute.
//!
//! A quiet time is the moment of a window with the least live memory: between requests only what
//! the service retains is live. Windows are 10 s long at first. When 32 are kept, each two become
//! one, and windows are twice as long from then on, up to 85 minutes; after that the oldest is
//! dropped. The worker adds a figure at each publication.
//!
//! Invariant: `points <= POINTS_MAX`, oldest first.

use std::collections::VecDeque;
use std::ops::Range;
use std::time::Duration;

use crate::bytes::ByteSize;
use crate::clock::Moment;
use crate::sync::{Mutex, lock};
use lowtide_heap::{Profiler, profiler};

/// The maximum number of quiet times kept.
const POINTS_MAX: usize = 32;
/// The first length of a window.
const WINDOW_MIN: Duration = Duration::from_secs(10);
/// The maximum length of a window, 85 minutes: 31 of them are 44 hours.
const WINDOW_MAX: Duration = Duration::from_secs(10 << 9);
/// The number of quiet times from which there is a trend.
const TREND_MIN: usize = 6;
const HOUR: f64 = 3600.0;

/// The quiet times kept.
#[derive(Debug)]
pub(super) struct QuietTimes {
    /// The length of the current window.
    length: Duration,
    /// The start of the current window; `None` before the first figure.
    start: Option<Moment>,
    /// The least figure of the current window so far.
    lowest: Option<QuietPoint>,
    /// `true` once a quiet time of the current window was reported.
    is_reported: bool,
    points: VecDeque<QuietPoint>,
}

/// The live bytes of the heap at a quiet time: the least of a window.
#[derive(Clone, Copy, Debug)]
struct QuietPoint {
    now: Moment,
    /// The time since the Unix epoch.
    at: Duration,
    live: ByteSize,
}

impl Default for QuietTimes {
    fn default() -> Self {
        let (start, lowest, points) = (None, None, VecDeque::with_capacity(POINTS_MAX));
        Self { length: WINDOW_MIN, start, lowest, is_reported: false, points }
    }
}

impl QuietTimes {
    /// Adds a figure. Returns `true` once in each window, at a time that is likely its quietest:
    /// the first figure of the second half that is no larger than those of the first half, or else
    /// the last figure.
    pub(super) fn add(&mut self, now: Moment, at: Duration, live: ByteSize) -> bool {
        let elapsed = now - *self.start.get_or_insert(now);
        let is_lowest = self.lowest.is_none_or(|lowest| live <= lowest.live);
        if is_lowest {
            self.lowest = Some(QuietPoint { now, at, live });
        }
        let is_over = elapsed >= self.length;
        let reports = !self.is_reported && (is_over || is_lowest && elapsed * 2 >= self.length);
        self.is_reported |= reports;
        if is_over {
            self.close(now);
        }
        reports
    }

    /// Returns the trend, with these call sites that grew.
    pub(super) fn report(&self, suspects: Option<Grown>) -> LeakReport {
        let points: Vec<_> = self.points.iter().copied().collect();
        let growth_per_hour = growth_per_hour(&points);
        let points = points.into_iter().map(|seen| (seen.at, seen.live)).collect();
        LeakReport { points, window: self.length, growth_per_hour, profiler: profiler(), suspects }
    }

    /// Keeps the quiet time of the window, and begins the next window.
    fn close(&mut self, now: Moment) {
        self.points.extend(self.lowest.take());
        (self.start, self.is_reported) = (Some(now), false);
        if self.points.len() < POINTS_MAX {
            return;
        }
        if self.length >= WINDOW_MAX {
            self.points.pop_front();
            return;
        }
        self.length *= 2;
        let all = self.points.make_contiguous();
        let lower = |pair: &[QuietPoint]| pair.iter().min_by_key(|seen| seen.live).copied();
        self.points = all.chunks(2).filter_map(lower).collect();
    }
}

/// The median of the slopes between each two points (Theil 1950, Sen 1968): at most 496.
fn growth_per_hour(points: &[QuietPoint]) -> Option<f64> {
    if points.len() < TREND_MIN {
        return None;
    }
    let slope = |one: &QuietPoint, other: &QuietPoint| {
        let seconds = (other.now - one.now).as_secs_f64();
        let growth = other.live.as_f64() - one.live.as_f64();
        (seconds > 0.0).then_some(growth / seconds * HOUR)
    };
    let later = |(at, one)| points[at + 1..].iter().filter_map(move |other| slope(one, other));
    let mut slopes: Vec<_> = points.iter().enumerate().flat_map(later).collect();
    slopes.sort_unstable_by(f64::total_cmp);
    slopes.get(slopes.len() / 2).copied()
}

/// The figures that show if live memory leaks, and where.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct LeakReport {
    /// The quiet times of this process, since the Unix epoch, with the live bytes of the heap,
    /// oldest first: at most 32.
    pub points: Vec<(Duration, ByteSize)>,
    /// The length of a window, of which each quiet time is the minimum.
    pub window: Duration,
    /// The growth of live memory in bytes per hour: the median of the slopes between any two quiet
    /// times, so that a few outliers or one step do not change it. `None` with fewer than 6 quiet
    /// times, about a minute after the start.
    pub growth_per_hour: Option<f64>,
    /// The state of the heap profiler.
    pub profiler: Profiler,
    /// The call sites whose live memory grew between two quiet times, and these times, since the
    /// Unix epoch: those that grew by a sampling interval or more, the largest growth first, at
    /// most 16. The first time is from the second quarter of the time since the start, or later.
    /// `None` if the profiler is not active, or has seen only one quiet time.
    pub suspects: Option<(Range<Duration>, Vec<LeakSuspect>)>,
}

/// The call sites that grew between two times.
pub(super) type Grown = (Range<Duration>, Vec<LeakSuspect>);

/// A call site whose live memory grew. Its figures are estimates from samples: a growth of `n`
/// sampling intervals has a standard error of some `sqrt(n)` of them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct LeakSuspect {
    /// The live bytes at the earlier time.
    pub then: ByteSize,
    /// The live bytes at the later time.
    pub now: ByteSize,
    /// The functions that led to the allocation, the innermost first, without those of the
    /// allocator and the standard library before the first other one: at most 8, each of at most
    /// 160 bytes. A function without a name is its file and the offset in it, as in
    /// `proxy+0x1f3a0`.
    pub frames: Vec<String>,
}

impl LeakSuspect {
    /// Returns the growth between the two times.
    #[must_use]
    pub const fn growth(&self) -> ByteSize {
        self.now.saturating_sub(self.then)
    }
}

/// The samples kept: five minutes if metrics are published each second; 17 KiB.
const SAMPLES_MAX: usize = 300;

/// A few figures at one instant.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct HistorySample {
    /// The time, since the Unix epoch.
    pub at: Duration,
    /// The memory that counts against the host's limit.
    pub physical: ByteSize,
    /// The live bytes of the heap; zero if they cannot be read.
    pub heap_live: ByteSize,
    /// The bytes that the heap retains.
    pub heap_retained: ByteSize,
    /// The live bytes of all device arenas that have memory, without sleeping ones; zero without the
    /// feature `device`.
    pub device_live: ByteSize,
    /// The bytes that these arenas retain; zero without the feature `device`.
    pub device_retained: ByteSize,
}

/// The ring of samples.
#[derive(Debug)]
pub(super) struct MetricsHistory(Mutex<VecDeque<HistorySample>>);

impl Default for MetricsHistory {
    fn default() -> Self {
        Self(Mutex::new(VecDeque::with_capacity(SAMPLES_MAX)))
    }
}

impl MetricsHistory {
    pub(super) fn add(&self, point: HistorySample) {
        let mut points = lock(&self.0);
        if points.len() == SAMPLES_MAX {
            points.pop_front();
        }
        points.push_back(point);
    }

    /// Returns the samples, oldest first.
    pub(super) fn all(&self) -> Vec<HistorySample> {
        lock(&self.0).iter().copied().collect()
    }
}

/// Half of the time that a peak stays. A scrape sees every peak if scrapes are at most this far
/// apart.
const HALF: Duration = Duration::from_secs(30);

/// The largest value of the last 30 s to 60 s.
#[derive(Debug, Default)]
pub(super) struct RecentPeak {
    /// The largest values of the half that has ended, and of the current one.
    halves: [ByteSize; 2],
    began: Option<Moment>,
}

impl RecentPeak {
    /// Adds the largest value since the last call, and returns the peak.
    pub(super) fn add(&mut self, now: Moment, value: ByteSize) -> ByteSize {
        let [before, current] = self.halves;
        let began = *self.began.get_or_insert(now);
        self.halves = if now - began < HALF {
            [before, current.max(value)]
        } else {
            self.began = Some(now);
            [current, value]
        };
        let [before, current] = self.halves;
        before.max(current)
    }
}

#[cfg(all(test, not(lowtide_loom)))]
mod tests {
    use super::*;

    const MIB: f64 = 1024.0 * 1024.0;

    /// Adds a figure for each second, and returns the seconds that were reported.
    fn run(seconds: u64, live: impl Fn(u64) -> u64) -> (LeakReport, Vec<u64>) {
        let mut quiet = QuietTimes::default();
        let add = |second: &u64| {
            let at = Duration::from_secs(*second);
            let live = ByteSize::new(live(*second));
            quiet.add(Moment::after_origin(at), at, live)
        };
        let reported = (0..seconds).filter(add).collect();
        (quiet.report(None), reported)
    }

    #[test]
    fn a_leak_below_bursts_is_a_slope_of_the_minima() {
        // 50 MiB/h below bursts of 200 MiB, which last 7 of each 10 s.
        let leak = |second: u64| ((second * 50) << 20) / 3600;
        let live = |second: u64| leak(second) + if second % 10 < 7 { 200 << 20 } else { 0 };
        for hours in [1, 8, 100] {
            let (trend, _) = run(hours * 3600, live);
            assert!((16..=32).contains(&trend.points.len()), "{trend:?}");
            let growth = trend.growth_per_hour.expect("many windows") / MIB;
            assert!((49.0..51.0).contains(&growth), "{growth} MiB/h after {hours} h");
        }
    }

    #[test]
    fn a_step_is_no_trend() {
        let (trend, _) = run(3 * 3600, |second| if second > 600 { 100 << 20 } else { 20 << 20 });
        assert_eq!(trend.growth_per_hour, Some(0.0));
        assert_eq!(run(59, |_| 1).0.growth_per_hour, None, "too early");
    }

    #[test]
    fn windows_grow_to_an_hour_and_a_half_at_most_and_the_oldest_makes_way() {
        let (trend, _) = run(400 * 3600, |second| second);
        assert_eq!(trend.window, WINDOW_MAX);
        assert!(trend.points.len() < POINTS_MAX);
        let (oldest, _) = trend.points[0];
        assert!(oldest > Duration::from_secs(300 * 3600), "{oldest:?}");
    }

    /// The bug: the verdict of a forked child, and so its `/memory`, waited for ever.
    #[cfg(target_os = "linux")]
    #[test]
    fn a_forked_child_gets_a_verdict_whoever_held_the_quiet_times_at_the_fork() {
        let memory = crate::Memory::builder().detached().start().expect("it needs nothing");
        let held = lock(&memory.0.shared.quiet_times);
        let says = || !memory.report().verdict().summary.is_empty();
        assert!(crate::memory::holds_in_child(says));
        drop(held);
    }

    #[test]
    fn each_window_reports_one_quiet_time() {
        let (_, reported) = run(32, |second| match second {
            6 | 16 => 1,
            20.. => second, // no figure of the second half is low
            _ if second % 10 < 5 => 2,
            _ => 3,
        });
        assert_eq!(reported, [6, 16, 30]);
    }

    #[test]
    fn the_last_points_are_kept_oldest_first_without_growing() {
        let history = MetricsHistory::default();
        let room = lock(&history.0).capacity();
        for nth in 0..1000 {
            history.add(HistorySample { at: Duration::from_secs(nth), ..HistorySample::default() });
        }
        let seconds: Vec<_> = history.all().iter().map(|point| point.at.as_secs()).collect();
        assert!(seconds.into_iter().eq(700..1000));
        assert_eq!(lock(&history.0).capacity(), room, "allocated once");
    }

    #[test]
    fn a_peak_stays_for_at_least_30_s_and_at_most_60_s() {
        let at = |seconds| Moment::after_origin(Duration::from_secs(seconds));
        let (low, high) = (ByteSize::mib(10), ByteSize::mib(90));
        for peak_at in 0..40 {
            let mut peak = RecentPeak::default();
            for second in 0..120 {
                let value = if second == peak_at { high } else { low };
                let found = peak.add(at(second), value);
                let since = second.checked_sub(peak_at);
                let expected = match since {
                    Some(0..30) => Some(high),
                    Some(30..60) => None,
                    _ => Some(low),
                };
                assert!(
                    expected.is_none_or(|value| value == found),
                    "{peak_at}, {second}: {found}"
                );
            }
        }
    }
}
