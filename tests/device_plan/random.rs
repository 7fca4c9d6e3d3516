//! Small random problems, with as much or as little in them as asked for.
//!
//! Invariant: the same seed gives the same problem; every problem can be posed.

use lowtide::ByteSize;
use lowtide::device::plan::{Demand, Gap, Problem, Window};

/// What may be in a problem beside sizes and lifetimes.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Kind {
    pub(crate) aligned: bool,
    pub(crate) gaps: Gaps,
    pub(crate) fixed: bool,
}

/// Which gaps lifetimes may have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Gaps {
    #[default]
    None,
    Empty,
    /// Of which some leave a window.
    Windows,
}

/// A generator: xorshift64*.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 33) % end
    }

    fn step(&mut self, from: i64, until: i64) -> i64 {
        from + i64::try_from(self.below(until.abs_diff(from) + 1)).expect("some steps")
    }
}

/// A problem of at most `most` buffers.
pub(crate) fn problem(seed: u64, most: u64, kind: Kind) -> Problem {
    let mut random = Random::new(seed);
    let mut problem = Problem::new();
    for number in 0..=random.below(most) {
        let first = random.step(0, 7);
        let live = first..random.step(first, 9);
        let size = random.below(6);
        let mut demand = Demand::new(format!("b{number}"), ByteSize::new(size), live.clone());
        if kind.aligned {
            demand.align = [1, 1, 2, 4, 3][usize::try_from(random.below(5)).expect("small")];
        }
        if kind.gaps != Gaps::None && random.below(2) == 0 {
            let start = random.step(live.start, live.end);
            let span = start..random.step(start, live.end);
            let low = random.below(size + 1);
            let low = if random.below(2) == 0 { 0 } else { low };
            let window = Window { low, high: low + random.below(size - low + 1) };
            let window = (kind.gaps == Gaps::Windows && random.below(2) == 0).then_some(window);
            demand.gaps.push(Gap { span, window });
        }
        if kind.fixed && number == 0 && random.below(2) == 0 {
            demand.offset = Some(random.below(4) * demand.align);
        }
        problem.add(demand).expect("a buffer that can be posed");
    }
    problem
}
