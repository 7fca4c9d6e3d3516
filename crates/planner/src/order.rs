//! Rules that place items one after the other: in which order, and in which gap. Each is simple,
//! and good for some problems.
//!
//! The rules of GGML, ONNX Runtime, TFLite, TVM and XLA are among them, so a plan is no worse than
//! theirs if all of them ran. `solve` decides which rules run.
//!
//! Invariant: an order names each item of its part once.

use std::cmp::Reverse;

use super::part::{Item, Subproblem};
use super::shape::{ShapeNeed, Shapes};

/// The properties of an item that orders use.
#[derive(Clone, Copy, Debug)]
pub(super) struct Traits {
    /// Its first step, its duration in steps, and the number of its shape.
    birth: i64,
    pub(super) duration: u64,
    shape: u32,
    size: u64,
    area: u128,
}

impl Traits {
    /// Of all items of a part.
    pub(super) fn of(part: &Subproblem, shapes: &Shapes) -> Vec<Self> {
        let traits = |item: &Item| {
            let needs = shapes.needs(item.shape as usize);
            let birth = needs.first().map_or(0, |need: &ShapeNeed| need.first);
            let duration = needs.last().map_or(0, |need| need.end.abs_diff(birth));
            let area = u128::from(item.size) * u128::from(duration);
            Self { birth, duration, shape: item.shape, size: item.size, area }
        };
        part.items.iter().map(traits).collect()
    }
}

/// A rule that orders items.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum OrderRule {
    /// By first step, then by input order: the order in which an allocator sees them.
    Birth,
    /// By first step; ties by size, largest first.
    BirthLargest,
    /// By size, largest first; ties by duration, longest first.
    Size,
    /// By duration, longest first; ties by size, largest first.
    Duration,
    /// By the product of size and duration, largest first.
    Area,
    /// By size class, largest first, and by this rule within a class.
    Classes(ClassRatio, Within),
}

/// The size at which a class begins, by that of the one below it.
type ClassRatio = (u64, u64);

/// The rule within a class.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Within {
    Birth,
    Death,
    Duration,
    Area,
}

lowtide_core::named_enum! {
    /// Planners of other projects, each with one rule.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    #[non_exhaustive]
    pub enum Heuristic {
        /// GGML's graph allocator: input order, best fit; the highest of equal gaps.
        Ggml = "ggml",
        /// ONNX Runtime's memory pattern: input order, best fit, with the space below the peak so
        /// far as one more gap.
        OnnxRuntime = "onnx_runtime",
        /// TFLite's greedy by size, and XLA's best fit by space: largest first, best fit.
        TfLite = "tflite",
        /// XLA's best fit by time: longest first, best fit.
        XlaByTime = "xla_by_time",
        /// TFLite Micro's and TVM's greedy by size: largest first, first fit.
        LargestFirstFit = "largest_first_fit",
        /// Largest product of size and duration first, first fit.
        AreaFirstFit = "area_first_fit",
        /// Input order, first fit.
        FirstFit = "first_fit",
    }
}

impl Heuristic {
    pub(super) const fn rule(self) -> Ruled {
        match self {
            Self::Ggml => (OrderRule::Birth, FitRule::BestHighest),
            Self::OnnxRuntime => (OrderRule::Birth, FitRule::BestBelowPeak),
            Self::TfLite => (OrderRule::Size, FitRule::Best),
            Self::XlaByTime => (OrderRule::Duration, FitRule::Best),
            Self::LargestFirstFit => (OrderRule::Size, FitRule::First),
            Self::AreaFirstFit => (OrderRule::Area, FitRule::First),
            Self::FirstFit => (OrderRule::Birth, FitRule::First),
        }
    }
}

/// A rule, and the fit that goes with it.
pub(super) type Ruled = (OrderRule, FitRule);

/// The first rule to run, for any budget: GGML's graph allocator.
pub(super) const FIRST: [Ruled; 1] = [(OrderRule::Birth, FitRule::BestHighest)];

/// Rules of allocators, which see one buffer at a time.
pub(super) const ONLINE: [Ruled; 3] = [
    (OrderRule::Birth, FitRule::First),
    (OrderRule::Birth, FitRule::BestBelowPeak), // ONNX Runtime's memory pattern
    (OrderRule::BirthLargest, FitRule::BestBelowPeak), // the same, the largest first
];

/// Rules of planners, which see all buffers at once; the best ones for large parts come first
/// (measured by the bench `plan`).
pub(super) const OFFLINE: [Ruled; 9] = [
    (OrderRule::Classes((1, 1), Within::Birth), FitRule::First),
    (OrderRule::Size, FitRule::Best), // TFLite, XLA by space
    (OrderRule::Size, FitRule::First),
    (OrderRule::Classes((3, 2), Within::Birth), FitRule::Best),
    (OrderRule::Area, FitRule::First),
    (OrderRule::Duration, FitRule::Best), // XLA by time
    (OrderRule::Area, FitRule::Best),
    (OrderRule::Duration, FitRule::First),
    (OrderRule::BirthLargest, FitRule::First),
];

/// Classes of sizes, each in four orders with two fits.
pub(super) fn classes() -> impl Iterator<Item = Ruled> {
    let withins = [Within::Birth, Within::Duration, Within::Death, Within::Area];
    let ratios = [(1, 1), (2, 1), (3, 2), (5, 4), (11, 10)];
    let rules = ratios
        .into_iter()
        .flat_map(move |ratio| withins.map(|within| OrderRule::Classes(ratio, within)));
    rules.flat_map(|rule| [(rule, FitRule::First), (rule, FitRule::Best)])
}

impl OrderRule {
    /// Returns `true` if items come in the order of their first steps.
    pub(super) const fn is_online(self) -> bool {
        matches!(self, Self::Birth | Self::BirthLargest)
    }
}

/// The items in the order of a rule.
pub(super) fn order(traits: &[Traits], rule: OrderRule) -> Vec<u32> {
    let mut order: Vec<u32> = (0..).take(traits.len()).collect();
    let of = |item: u32| &traits[item as usize];
    match rule {
        OrderRule::Birth => order.sort_by_key(|item| (of(*item).birth, of(*item).shape)),
        OrderRule::BirthLargest => {
            order.sort_by_key(|item| (of(*item).birth, Reverse(of(*item).size), of(*item).shape));
        }
        OrderRule::Size => order
            .sort_by_key(|item| (Reverse((of(*item).size, of(*item).duration)), of(*item).shape)),
        OrderRule::Duration => order
            .sort_by_key(|item| (Reverse((of(*item).duration, of(*item).size)), of(*item).shape)),
        OrderRule::Area => order.sort_by_key(|item| (Reverse(of(*item).area), of(*item).shape)),
        OrderRule::Classes(ratio, within) => by_classes(traits, &mut order, ratio, within),
    }
    order
}

fn by_classes(traits: &[Traits], order: &mut [u32], ratio: ClassRatio, within: Within) {
    let classes = Classes::new(ratio, traits.iter().map(|own| own.size).max().unwrap_or(0));
    order.sort_by_cached_key(|item| {
        let own = &traits[*item as usize];
        let end = i128::from(own.birth) + i128::from(own.duration);
        let second = match within {
            Within::Birth => i128::from(own.birth),
            Within::Death => -end,
            Within::Duration => -i128::from(own.duration),
            Within::Area => -i128::try_from(own.area).unwrap_or(i128::MAX),
        };
        (Reverse(classes.of(own.size)), second, own.shape)
    });
}

/// Sizes at which classes begin; none where each size is one.
struct Classes(Vec<u64>);

impl Classes {
    fn new((up, down): ClassRatio, largest: u64) -> Self {
        let next = |at: &u64| (at + 1).max(at.saturating_mul(up) / down);
        let each = up == down;
        let starts =
            std::iter::successors(Some(1), |at| Some(next(at)).filter(|at| *at <= largest));
        Self(if each { Vec::new() } else { starts.collect() })
    }

    fn of(&self, size: u64) -> u64 {
        if self.0.is_empty() { size } else { self.0.partition_point(|start| *start <= size) as u64 }
    }
}

// Sequential placement: each item goes to a gap that is free for its whole lifetime.
//
// The quality of a plan depends on the order, which the caller chooses. There is no backtracking.
// First fit takes the lowest gap, best fit the smallest sufficient one; the last two are exactly
// the rules of GGML's allocator and of ONNX Runtime's memory pattern.
//
// Invariant: no two placed items overlap.

/// The number of items between two checks of `stop`: about a millisecond for large parts.
const ITEMS_PER_STOP: u32 = 128;

/// Which of the gaps that are large enough an item takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FitRule {
    /// The lowest gap.
    First,
    /// The smallest sufficient gap, of equal ones the lowest; above all items if there is none.
    Best,
    /// The smallest sufficient gap, of equal ones the highest; above all items if there is none.
    BestHighest,
    /// Like `Best`, with the space between the topmost item and the peak so far as one more gap.
    BestBelowPeak,
}

/// The positions of the items placed so far.
#[derive(Debug)]
pub(super) struct Placer<'a> {
    part: &'a Subproblem,
    /// Sorted by offset.
    placed: Vec<Placed>,
    /// Ranges in which an item cannot begin: for items with gaps or windows.
    closed: Vec<(i64, i64)>,
    /// The offset of each item, by number.
    pub(super) offsets: Vec<u64>,
    peak: u64,
    is_plain: bool,
}

/// One item that has its place.
#[derive(Clone, Copy, Debug)]
struct Placed {
    offset: u64,
    top: u64,
    from: u32,
    to: u32,
    item: u32,
}

impl<'a> Placer<'a> {
    pub(super) fn new(part: &'a Subproblem) -> Self {
        let count = part.items.len();
        let is_plain = !part.is_sliding && part.pieces.len() == count;
        let (placed, closed) = (Vec::with_capacity(count), Vec::new());
        Self { part, placed, closed, offsets: vec![0; count], peak: 0, is_plain }
    }

    /// Places all items in this order, those with fixed offsets first; stops if the peak reaches
    /// `enough` or `stop` is set. Returns the peak if it is below `enough`.
    ///
    /// O(items x items); if the order is that of first sections (`is_online`), ended items are
    /// dropped: O(items x live).
    pub(super) fn run(
        &mut self,
        order: &[u32],
        fit: FitRule,
        is_online: bool,
        enough: u64,
        stop: &mut dyn FnMut() -> bool,
    ) -> Option<u64> {
        self.placed.clear();
        self.peak = 0;
        let is_fixed = |item: &&u32| self.part.items[**item as usize].fixed.is_some();
        let fixed: Vec<u32> = order.iter().filter(is_fixed).copied().collect();
        for item in fixed {
            let offset = self.part.items[item as usize].fixed.unwrap_or(0);
            self.put(item, offset);
        }
        let mut now = 0;
        for (&item, done) in order.iter().zip(1_u32..) {
            if done % ITEMS_PER_STOP == 0 && stop() {
                return None;
            }
            let own = &self.part.items[item as usize];
            if is_online && own.from > now {
                now = own.from;
                self.placed.retain(|other| other.to > now);
            }
            if own.fixed.is_none() {
                let offset = self.find(item, fit);
                self.put(item, offset);
            }
            if self.peak >= enough {
                return None;
            }
        }
        Some(self.peak)
    }

    fn put(&mut self, item: u32, offset: u64) {
        let own = &self.part.items[item as usize];
        let top = offset + own.height;
        let placed = Placed { offset, top, from: own.from, to: own.to, item };
        let at = self.placed.partition_point(|other| other.offset <= offset);
        self.placed.insert(at, placed);
        self.offsets[item as usize] = offset;
        self.peak = self.peak.max(offset + own.size);
    }

    fn find(&mut self, item: u32, fit: FitRule) -> u64 {
        let own = &self.part.items[item as usize];
        let mut gaps = Gaps { part: self.part, own, at: 0, size: own.height, fit, best: None };
        gaps.at = self.part.fit(0, 1, own.size);
        if self.is_plain {
            for other in &self.placed {
                let apart = other.to <= own.from || own.to <= other.from;
                if !apart && gaps.pass(other.offset, other.top) {
                    break;
                }
            }
        } else {
            self.close(item as usize);
            gaps.size = 0;
            for (first, end) in &self.closed {
                if gaps.pass(first.cast_unsigned(), end.cast_unsigned()) {
                    break;
                }
            }
        }
        gaps.take(self.peak, own.size)
    }

    /// Lists the offsets, in their order, at which an item would overlap others.
    fn close(&mut self, item: usize) {
        self.closed.clear();
        for other in &self.placed {
            let (below, above) = (other.item as usize, item);
            let (Some(up), Some(down)) =
                (self.part.lift(below, above), self.part.lift(above, below))
            else {
                continue;
            };
            let offset = other.offset.cast_signed();
            let (first, end) = ((offset - down + 1).max(0), offset + up);
            if first < end {
                self.closed.push((first, end));
            }
        }
        self.closed.sort_unstable();
    }
}

/// The search for a gap, from below.
struct Gaps<'a> {
    part: &'a Subproblem,
    own: &'a Item,
    /// No offset below it is free.
    at: u64,
    size: u64,
    fit: FitRule,
    /// The remaining space of the best gap, and its offset.
    best: Option<(u64, u64)>,
}

impl Gaps<'_> {
    /// Skips an occupied range; returns `true` if the gap is found.
    #[inline]
    fn pass(&mut self, first: u64, end: u64) -> bool {
        // If items are represented by the offsets that they exclude, `size` is 0 and a gap ends at
        // the first such offset.
        let end_of_gap = first;
        if self.at + self.size <= end_of_gap && self.offer(end_of_gap - self.at - self.size) {
            return true;
        }
        if end > self.at {
            self.at = self.part.fit(end, self.own.align, self.own.size);
        }
        false
    }

    /// Offers the gap at `at`, of which so much is left; says whether it is taken at once.
    #[inline]
    fn offer(&mut self, left: u64) -> bool {
        let better = match self.best {
            None => true,
            Some((least, _)) => left < least || left == least && self.fit == FitRule::BestHighest,
        };
        // A gap of no length is between two that adjoin, unless nothing is to be placed there.
        if better && (self.size > 0 || left > 0) {
            self.best = Some((left, self.at));
        }
        self.fit == FitRule::First && self.best.is_some()
    }

    fn take(mut self, peak: u64, size: u64) -> u64 {
        if self.fit == FitRule::BestBelowPeak && self.at + size <= peak {
            self.offer(peak - self.at - size);
        }
        self.best.map_or(self.at, |(_, at)| at)
    }
}
