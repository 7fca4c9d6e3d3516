//! Small random problems, with as much or as little in them as asked for.
//!
//! Invariant: the same seed gives the same problem; every problem can be posed.

use lowtide_planner::ByteSize;
use lowtide_planner::{Demand, Gap, Problem, Role};

/// The features that a problem may have in addition to sizes and lifetimes.
#[expect(clippy::struct_excessive_bools, reason = "each may be there without the others")]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Kind {
    pub(crate) aligned: bool,
    pub(crate) gaps: Gaps,
    pub(crate) fixed: bool,
    pub(crate) roles: bool,
    /// Views and reuse in place.
    pub(crate) shared: bool,
}

/// A buffer that lies in another one's memory: which, in which, and from which byte on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Share {
    pub(crate) child: usize,
    pub(crate) over: usize,
    pub(crate) at: u64,
    /// `true` if it overwrites the bytes of the other buffer, `false` if it is a view.
    pub(crate) replaces: bool,
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

    pub(crate) fn index(&mut self, end: usize) -> usize {
        usize::try_from(self.below(end as u64)).expect("below a usize")
    }

    fn step(&mut self, from: i64, until: i64) -> i64 {
        from + i64::try_from(self.below(until.abs_diff(from) + 1)).expect("some steps")
    }
}

/// A problem of at most `most` buffers, none of which share memory.
pub(crate) fn problem(seed: u64, most: u64, kind: Kind) -> Problem {
    posed(seed, most, Kind { shared: false, ..kind }).0
}

/// A problem of at most `most` buffers, and which of them share memory.
pub(crate) fn posed(seed: u64, most: u64, kind: Kind) -> (Problem, Vec<Share>) {
    let mut random = Random::new(seed);
    let mut problem = Problem::new();
    for number in 0..=random.below(most) {
        let first = random.step(0, 7);
        let live = first..random.step(first, 9);
        let size = random.below(6);
        let mut demand = Demand::new(format!("b{number}"), ByteSize::new(size), live.clone());
        if kind.aligned {
            demand.align = [1, 1, 2, 4, 3][random.index(5)];
        }
        if kind.gaps != Gaps::None && random.below(2) == 0 {
            let start = random.step(live.start, live.end);
            let span = start..random.step(start, live.end);
            let low = random.below(size + 1);
            let low = if random.below(2) == 0 { 0 } else { low };
            let window = low..low + random.below(size - low + 1);
            let window = (kind.gaps == Gaps::Windows && random.below(2) == 0).then_some(window);
            demand.gaps.push(Gap { span, window });
        }
        if kind.fixed && number == 0 && random.below(2) == 0 {
            demand.offset = Some(random.below(4) * demand.align);
        }
        if kind.roles {
            use Role::{External, Inner, Input, Output, Through};
            let roles = [Inner, Inner, Inner, Input, Output, Through, External];
            demand.role = roles[random.index(7)];
        }
        problem.add(demand).expect("a buffer that can be posed");
    }
    let mut shares = Vec::new();
    for _ in 0..if kind.shared { 2 * problem.demands().len() } else { 0 } {
        share(&mut random, &mut problem, &mut shares);
    }
    (problem, shares)
}

/// Lets one buffer share another's memory, where that is legal.
fn share(random: &mut Random, problem: &mut Problem, shares: &mut Vec<Share>) {
    let count = problem.demands().len();
    let (child, over) = (random.index(count), random.index(count));
    let size = |at: usize| problem.demands()[at].size.get();
    let Some(room) = size(over).checked_sub(size(child)) else { return };
    let at = random.below(room + 1);
    let ids: Vec<_> = problem.ids().collect();
    // What is legal only when all is known is tried on a copy.
    let mut tried = problem.clone();
    let replaces = random.below(2) == 0;
    let at = if replaces { 0 } else { at };
    let shared = if replaces {
        tried.reuse(ids[child], ids[over])
    } else {
        tried.view(ids[child], ids[over], at)
    };
    if shared.is_ok() && tried.lower_bound().is_ok() {
        *problem = tried;
        shares.push(Share { child, over, at, replaces });
    }
}
