//! Orders in which items are placed: simple rules, each good for some problems.
//!
//! The rules of GGML, ONNX Runtime, TFLite, TVM and XLA are among them, so a plan is no worse than
//! theirs if all of them ran. This module places nothing.
//!
//! Invariant: an order names each item of its part once.

use std::cmp::Reverse;

use super::part::Subproblem;
use super::place::FitRule;
use super::shape::{ShapeNeed, Shapes};

/// The properties of an item that orders use.
#[derive(Clone, Copy, Debug)]
pub(super) struct Traits {
    /// Its first step, its duration in steps, and the number of its shape.
    birth: i64,
    duration: u64,
    shape: u32,
    size: u64,
    area: u128,
}

impl Traits {
    /// Of all items of a part.
    pub(super) fn of(part: &Subproblem, shapes: &Shapes) -> Vec<Self> {
        let traits = |item: &super::part::Item| {
            let needs = shapes.needs(item.shape as usize);
            let birth = needs.first().map_or(0, |need: &ShapeNeed| need.first);
            let duration = needs.last().map_or(0, |need| need.end.abs_diff(birth));
            let area = u128::from(item.size) * u128::from(duration);
            Self { birth, duration, shape: item.shape, size: item.size, area }
        };
        part.items.iter().map(traits).collect()
    }
}

impl Traits {
    pub(super) const fn duration(&self) -> u64 {
        self.duration
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
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ClassRatio(u64, u64);

/// The rule within a class.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Within {
    Birth,
    Death,
    Duration,
    Area,
}

/// Planners of other projects, each with one rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Heuristic {
    /// GGML's graph allocator: input order, best fit; the highest of equal gaps.
    Ggml,
    /// ONNX Runtime's memory pattern: input order, best fit, with the space below the peak so far
    /// as one more gap.
    OnnxRuntime,
    /// TFLite's greedy by size, and XLA's best fit by space: largest first, best fit.
    TfLite,
    /// XLA's best fit by time: longest first, best fit.
    XlaByTime,
    /// TFLite Micro's and TVM's greedy by size: largest first, first fit.
    LargestFirstFit,
    /// Largest product of size and duration first, first fit.
    AreaFirstFit,
    /// Input order, first fit.
    FirstFit,
}

impl Heuristic {
    /// All heuristics.
    pub const ALL: [Self; 7] = [
        Self::Ggml,
        Self::OnnxRuntime,
        Self::TfLite,
        Self::XlaByTime,
        Self::LargestFirstFit,
        Self::AreaFirstFit,
        Self::FirstFit,
    ];

    /// Returns the name used in figures: lower case, words joined by `_`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ggml => "ggml",
            Self::OnnxRuntime => "onnx_runtime",
            Self::TfLite => "tflite",
            Self::XlaByTime => "xla_by_time",
            Self::LargestFirstFit => "largest_first_fit",
            Self::AreaFirstFit => "area_first_fit",
            Self::FirstFit => "first_fit",
        }
    }

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
    (OrderRule::Classes(ClassRatio(1, 1), Within::Birth), FitRule::First),
    (OrderRule::Size, FitRule::Best), // TFLite, XLA by space
    (OrderRule::Size, FitRule::First),
    (OrderRule::Classes(ClassRatio(3, 2), Within::Birth), FitRule::Best),
    (OrderRule::Area, FitRule::First),
    (OrderRule::Duration, FitRule::Best), // XLA by time
    (OrderRule::Area, FitRule::Best),
    (OrderRule::Duration, FitRule::First),
    (OrderRule::BirthLargest, FitRule::First),
];

/// Classes of sizes, each in four orders with two fits.
pub(super) fn classes() -> impl Iterator<Item = Ruled> {
    let withins = [Within::Birth, Within::Duration, Within::Death, Within::Area];
    let ratios = [
        ClassRatio(1, 1),
        ClassRatio(2, 1),
        ClassRatio(3, 2),
        ClassRatio(5, 4),
        ClassRatio(11, 10),
    ];
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
    fn new(ClassRatio(up, down): ClassRatio, largest: u64) -> Self {
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
