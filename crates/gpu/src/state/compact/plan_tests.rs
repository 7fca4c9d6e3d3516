//! Checks plans against a region of cells that is moved piece by piece.
//!
//! Invariant: a plan that violates a promise fails here.

use lowtide_cuda_sim::sample;

use super::plan::{CompactPlan, CompactTarget, Hold, LayoutPart, Move, PASSES_MAX, plan};
use crate::index::{ALIGN, End, Span};
use crate::tests::Chance;

const LOW: Hold = Hold::Moves { end: End::Low, align: ALIGN };
const HIGH: Hold = Hold::Moves { end: End::High, align: ALIGN };

/// A region of cells of 256 bytes. Each cell has its block and its index in that block.
#[derive(Clone, Debug)]
struct Cells {
    cells: Vec<Option<(usize, u64)>>,
    blocks: Vec<(u64, u64, Hold)>,
    granule: u64,
}

impl Cells {
    /// Creates parts of this many cells each.
    fn new(parts: &[(u64, Option<Hold>)], granule: u64) -> Self {
        let mut region = Self { cells: Vec::new(), blocks: Vec::new(), granule };
        for &(cells, hold) in parts {
            let at = region.cells.len() as u64;
            let name = region.blocks.len();
            region.cells.extend((0..cells).map(|nth| hold.map(|_| (name, nth))));
            region.blocks.extend(hold.map(|hold| (at, cells, hold)));
        }
        region
    }

    fn parts(&self) -> Vec<LayoutPart> {
        let mut parts: Vec<LayoutPart> = Vec::new();
        for (at, cell) in self.cells.iter().enumerate() {
            let span = Span { offset: at as u64 * ALIGN, size: ALIGN };
            let hold = cell.map(|(name, _)| self.blocks[name].2);
            let joins = cell.is_none_or(|(_, nth)| nth > 0);
            match parts.last_mut() {
                Some(part) if joins && part.hold == hold => part.span.size += ALIGN,
                _ => parts.push(LayoutPart { span, hold }),
            }
        }
        parts
    }

    fn plan(&self, target: CompactTarget<'_>, budget: u64) -> CompactPlan {
        plan(&self.parts(), self.granule * ALIGN, target, budget.saturating_mul(ALIGN), PASSES_MAX)
    }

    /// Copies the pieces of each move, and checks that no cell is lost.
    fn execute(&mut self, plan: &CompactPlan) {
        for &made in &plan.moves {
            let (from, to) = (made.from / ALIGN, made.to / ALIGN);
            let name = self.blocks.iter().position(|block| block.0 == from).expect("a block");
            let (_, cells, hold) = self.blocks[name];
            assert_eq!(cells * ALIGN, made.size, "a whole block moves");
            assert_ne!(hold, Hold::Stays, "a block that stays was moved");
            let Hold::Moves { align, .. } = hold else { unreachable!() };
            assert!(made.to.is_multiple_of(align) && made.distance() > 0);
            let room = made.room();
            let room = index(room.offset / ALIGN)..index(room.end() / ALIGN);
            assert!(self.cells[room].iter().all(Option::is_none), "the room is free");
            let mut copied = 0;
            for piece in made.pieces() {
                assert!(!piece.overlaps(), "a copy overlaps itself");
                self.copy(piece);
                copied += piece.size;
            }
            assert_eq!(copied, made.size);
            self.blocks[name].0 = to;
            for at in 0..self.cells.len() {
                let inside = (to..to + cells).contains(&(at as u64));
                if inside {
                    assert_eq!(self.cells[at], Some((name, at as u64 - to)), "contents moved");
                } else if self.cells[at].is_some_and(|(of, _)| of == name) {
                    self.cells[at] = None;
                }
            }
        }
    }

    fn copy(&mut self, piece: Move) {
        let cells = |span: Span| index(span.offset / ALIGN)..index(span.end() / ALIGN);
        let to = cells(piece.destination()).start;
        self.cells.copy_within(cells(piece.source()), to);
    }

    /// Returns the cells of active granules, and of the largest free span.
    fn figures(&self) -> [u64; 2] {
        let granules = self.cells.chunks(index(self.granule));
        let active = granules.filter(|cells| cells.iter().any(Option::is_some)).count() as u64;
        let (mut largest, mut run) = (0, 0);
        for cell in &self.cells {
            run = if cell.is_none() { run + 1 } else { 0 };
            largest = largest.max(run);
        }
        [active, largest]
    }

    fn free(&self) -> u64 {
        self.cells.iter().filter(|cell| cell.is_none()).count() as u64
    }

    fn has_stays(&self) -> bool {
        self.blocks.iter().any(|block| block.2 == Hold::Stays)
    }

    /// Makes a plan, checks every promise, and executes the plan. Returns the plan.
    fn check(&mut self, target: CompactTarget<'_>, budget: u64) -> CompactPlan {
        let before = self.figures();
        let plan = self.plan(target, budget);
        self.execute(&plan);
        let after = self.figures();
        let bytes = plan.moves.iter().map(|made| made.size).sum::<u64>();
        assert!(bytes <= budget.saturating_mul(ALIGN), "over budget: {plan:?}");
        assert_eq!(plan.active, [before[0], after[0]]);
        assert_eq!(plan.largest, [before[1] * ALIGN, after[1] * ALIGN]);
        let gained = match target {
            CompactTarget::Granules | CompactTarget::Segments(_) => {
                assert!(after[0] < before[0] || plan.moves.is_empty(), "moved for nothing");
                after[0] < before[0]
            }
            CompactTarget::Contiguous(size) => {
                assert!(after[1] >= before[1], "worse than before: {plan:?}");
                assert!(plan.moves.is_empty() || plan.largest[0] < size, "moved for nothing");
                after[1] > before[1]
            }
        };
        if budget == u64::MAX {
            assert!(gained || plan.moves.is_empty(), "moved for nothing: {plan:?}");
            assert_eq!(self.plan(target, budget).moves, [], "a second plan finds more");
            if let CompactTarget::Contiguous(size) = target {
                let wanted = size.min(self.free() * ALIGN);
                assert!(self.has_stays() || plan.largest[1] >= wanted, "short of {wanted}");
            }
        }
        plan
    }
}

fn index(at: u64) -> usize {
    usize::try_from(at).expect("small")
}

/// Creates a region of about this many parts, in which `stays` of 100 blocks stay.
fn random(chance: &mut Chance, parts: u64, cells_max: u64, stays: u64, granule: u64) -> Cells {
    let mut all: Vec<(u64, Option<Hold>)> = Vec::new();
    for _ in 0..parts {
        let most = 1 + chance.below(cells_max);
        let cells = 1 + chance.below(most);
        let free = chance.below(3) == 0;
        let hold = match chance.below(100) {
            at if at < stays => Hold::Stays,
            at if at % 2 == 0 => LOW,
            _ => HIGH,
        };
        all.push((cells, (!free).then_some(hold)));
    }
    Cells::new(&all, granule)
}

/// Calls a function with every region of this many cells.
fn every(
    cells: u64,
    parts: &mut Vec<(u64, Option<Hold>)>,
    act: &mut impl FnMut(&[(u64, Option<Hold>)]),
) {
    if cells == 0 {
        return act(parts);
    }
    for size in 1..=cells {
        for hold in [None, Some(LOW), Some(HIGH), Some(Hold::Stays)] {
            if hold.is_none() && parts.last().is_some_and(|part| part.1.is_none()) {
                continue;
            }
            parts.push((size, hold));
            every(cells - size, parts, act);
            parts.pop();
        }
    }
}

#[test]
fn every_small_region_is_planned_right_for_every_target_and_budget() {
    const CELLS: u64 = if cfg!(lowtide_soak) { 6 } else { 5 };
    let mut plans = 0_u64;
    every(CELLS, &mut Vec::new(), &mut |parts| {
        for budget in [0, 1, 2, 3, u64::MAX] {
            let sizes = [2, 3, 4, u64::MAX];
            let spans = sizes.map(|cells| CompactTarget::Contiguous(cells.saturating_mul(ALIGN)));
            for target in spans.into_iter().chain([CompactTarget::Granules]) {
                let mut region = Cells::new(parts, 2);
                region.check(target, budget);
                plans += 1;
            }
        }
    });
    assert!(plans > 20_000, "{plans}");
}

#[test]
fn random_regions_keep_their_contents_and_get_no_worse() {
    for seed in 1..=sample(1200) {
        println!("seed {seed}");
        let mut chance = Chance(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15));
        let parts = 1 + chance.below(60);
        let stays = [0, 0, 5, 30][index(chance.below(4))];
        let granule = 1 << chance.below(6);
        let cells = 1 + chance.below(40);
        let region = random(&mut chance, parts, cells, stays, granule);
        let size = 1 + chance.below(region.cells.len() as u64);
        let targets = [CompactTarget::Granules, CompactTarget::Contiguous(size * ALIGN)];
        for target in targets.into_iter().chain([CompactTarget::Contiguous(u64::MAX)]) {
            for budget in [u64::MAX, chance.below(80)] {
                region.clone().check(target, budget);
            }
        }
    }
}

#[test]
fn many_small_calls_reach_what_one_large_call_does() {
    for seed in 1..=sample(600) {
        println!("seed {seed}");
        let mut chance = Chance(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15));
        let region = random(&mut chance, 40, 12, 0, 16);
        for target in [CompactTarget::Contiguous(u64::MAX), CompactTarget::Contiguous(64 * ALIGN)] {
            let mut whole = region.clone();
            let whole_plan = whole.check(target, u64::MAX);
            let mut parts = region.clone();
            let mut calls = 0;
            // The least budget with which all blocks can move is the largest block.
            while !parts.check(target, 12 + chance.below(12)).moves.is_empty() {
                calls += 1;
                assert!(calls < 400, "it goes on for ever");
            }
            let CompactTarget::Contiguous(size) = target else { unreachable!() };
            let wanted = size.min(region.free() * ALIGN);
            assert!(parts.figures()[1] * ALIGN >= wanted, "{calls} calls");
            assert!(whole_plan.largest[1] >= wanted);
        }
    }
}

#[test]
fn many_small_calls_free_as_many_granules_as_one_large_call() {
    let (mut whole_active, mut parts_active, mut before) = (0, 0, 0);
    for seed in 1..=sample(400) {
        println!("seed {seed}");
        let mut chance = Chance(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15));
        let region = random(&mut chance, 120, 10, 5, 16);
        let mut whole = region.clone();
        whole.check(CompactTarget::Granules, u64::MAX);
        let mut parts = region.clone();
        let mut calls = 0;
        // Enough for any granule: 16 cells, and a block over each of its ends.
        while !parts.check(CompactTarget::Granules, 40).moves.is_empty() {
            calls += 1;
            assert!(calls < 400, "it goes on for ever");
        }
        before += region.figures()[0];
        whole_active += whole.figures()[0];
        parts_active += parts.figures()[0];
    }
    println!("active before {before}, one call {whole_active}, many calls {parts_active}");
    assert!(whole_active < before);
    assert!(parts_active.abs_diff(whole_active) * 50 <= before - whole_active, "{parts_active}");
}

/// Creates eight blocks, every other one free.
fn alternating(stays: Option<usize>) -> Cells {
    let hold = |nth| if Some(nth) == stays { Hold::Stays } else { LOW };
    let parts: Vec<_> = (0..8).map(|nth| (32, (nth % 2 == 1).then(|| hold(nth)))).collect();
    Cells::new(&parts, 8)
}

#[test]
fn all_free_space_is_joined_with_as_few_moves_as_it_takes() {
    let mut region = alternating(None);
    let plan = region.check(CompactTarget::Contiguous(u64::MAX), u64::MAX);
    assert_eq!(plan.largest[1], 4 * 32 * ALIGN);
    assert!(plan.moves.len() <= 2, "{plan:?}");
    assert!(plan.moves.iter().all(|made| !made.overlaps()));
}

#[test]
fn what_is_wanted_is_joined_and_no_more() {
    let plan = alternating(None).check(CompactTarget::Contiguous(64 * ALIGN), u64::MAX);
    assert_eq!((plan.moves.len(), plan.largest[1]), (1, 64 * ALIGN));
    let plan = alternating(None).check(CompactTarget::Contiguous(32 * ALIGN), u64::MAX);
    assert_eq!(plan.moves, []);
}

#[test]
fn blocks_that_stay_are_planned_around() {
    let mut region = alternating(Some(3));
    let plan = region.check(CompactTarget::Contiguous(u64::MAX), u64::MAX);
    assert_eq!(plan.largest[1], 4 * 32 * ALIGN, "{plan:?}"); // all of it, on one side
    let mut region = Cells::new(&[(4, None), (4, Some(Hold::Stays)), (4, None)], 8);
    for target in [CompactTarget::Granules, CompactTarget::Contiguous(u64::MAX)] {
        assert_eq!(region.check(target, u64::MAX).moves, []);
    }
}

#[test]
fn a_slide_by_less_than_its_size_is_cut_into_pieces_of_the_distance() {
    let mut region = Cells::new(&[(1, None), (8, Some(LOW)), (3, None)], 4);
    let plan = region.check(CompactTarget::Contiguous(u64::MAX), u64::MAX);
    assert_eq!(plan.moves, [Move { from: ALIGN, to: 0, size: 8 * ALIGN }]);
    assert_eq!(plan.moves[0].pieces().count(), 8);
    let up = Move { from: 0, to: 3 * ALIGN, size: 8 * ALIGN };
    let pieces: Vec<_> =
        up.pieces().map(|piece| (piece.from / ALIGN, piece.size / ALIGN)).collect();
    assert_eq!(pieces, [(5, 3), (2, 3), (0, 2)]);
}

#[test]
fn low_blocks_slide_down_and_high_blocks_slide_up() {
    let parts = [(2, None), (9, Some(LOW)), (2, None), (9, Some(HIGH)), (2, None)];
    let mut region = Cells::new(&parts, 8);
    let plan = region.check(CompactTarget::Contiguous(u64::MAX), u64::MAX);
    let places: Vec<_> = plan.moves.iter().map(|made| made.to / ALIGN).collect();
    assert_eq!(places, [0, 15]);
}

#[test]
fn a_granule_that_little_pins_is_cleared_into_the_holes_of_full_ones() {
    // Granules of 8 cells: full but for two, one cell in an else empty one, full but for one.
    let parts = [(6, Some(LOW)), (5, None), (1, Some(LOW)), (4, None), (7, Some(LOW)), (1, None)];
    let mut region = Cells::new(&parts, 8);
    let plan = region.check(CompactTarget::Granules, u64::MAX);
    assert_eq!(plan.moves, [Move { from: 11 * ALIGN, to: 23 * ALIGN, size: ALIGN }]);
    assert_eq!(plan.active, [3, 2]);
}

#[test]
fn large_blocks_are_moved_where_that_frees_granules() {
    let parts = [(3, Some(LOW)), (3, None), (3, Some(LOW)), (3, None), (6, Some(LOW)), (6, None)];
    let mut region = Cells::new(&parts, 2);
    let plan = region.check(CompactTarget::Granules, u64::MAX);
    assert_eq!(plan.active[1], 6, "{plan:?}");
}

#[test]
fn small_blocks_and_large_ones_are_not_mixed() {
    let parts = [(4, Some(LOW)), (12, None), (3, Some(HIGH)), (5, None), (8, Some(HIGH))];
    let mut region = Cells::new(&parts, 8);
    // The only hole in another active granule is among the large blocks.
    assert_eq!(region.check(CompactTarget::Granules, u64::MAX).moves, []);
}

#[test]
fn a_block_goes_only_to_multiples_of_its_alignment() {
    let aligned = Hold::Moves { end: End::Low, align: 4 * ALIGN };
    let parts = [
        (5, Some(Hold::Stays)),
        (1, None),
        (1, Some(Hold::Stays)),
        (1, None),
        (1, Some(aligned)),
        (7, None),
    ];
    let mut region = Cells::new(&parts, 8);
    assert_eq!(region.check(CompactTarget::Granules, u64::MAX).moves, []);
    let parts = [(4, Some(LOW)), (2, None), (2, Some(LOW)), (1, Some(aligned)), (7, None)];
    let plan = Cells::new(&parts, 8).check(CompactTarget::Granules, u64::MAX);
    assert_eq!(plan.moves, [Move { from: 8 * ALIGN, to: 4 * ALIGN, size: ALIGN }]);
}

#[test]
fn an_empty_region_and_a_full_one_need_no_moves() {
    for parts in [&[(64, None)][..], &[(64, Some(LOW))], &[]] {
        for target in [CompactTarget::Granules, CompactTarget::Contiguous(u64::MAX)] {
            assert_eq!(Cells::new(parts, 8).check(target, u64::MAX).moves, []);
        }
    }
}

#[test]
fn a_slide_that_would_take_thousands_of_copies_is_not_planned() {
    let region = |gap| Cells::new(&[(gap, None), (4096, Some(LOW)), (gap, None)], 8);
    for target in [CompactTarget::Granules, CompactTarget::Contiguous(u64::MAX)] {
        assert_eq!(region(3).plan(target, u64::MAX).moves, []);
    }
    let plan = region(4).plan(CompactTarget::Contiguous(u64::MAX), u64::MAX);
    assert_eq!((plan.moves.len(), plan.largest[1]), (1, 8 * ALIGN));
    assert_eq!(plan.moves[0].pieces().count(), 1024);
}
