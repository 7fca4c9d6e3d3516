//! The block index against a naive model: every short history of a small range, and long random
//! ones of a large range. The model is a map of live spans; what is free is what they leave.

use std::collections::BTreeMap;

use super::*;

const PLAIN: fn(Span) -> u64 = |_| 0;

fn units(count: u64) -> Request {
    Request { size: count * ALIGN, align: ALIGN, end: End::Low }
}

/// Live spans by offset: end and name.
type Model = BTreeMap<u64, (u64, BlockId)>;

/// What is free according to the model, in address order.
fn free_spans(model: &Model, span: u64) -> Vec<Span> {
    let mut free = Vec::new();
    let mut end = 0;
    for (&offset, &(next, _)) in model.iter().chain([(&span, &(span, BlockId::NOBODY))]) {
        if offset > end {
            free.push(Span { offset: end, size: offset - end });
        }
        end = next;
    }
    free
}

impl BlockId {
    const NOBODY: Self = Self { slot: NONE, generation: 0 };
}

fn compare(index: &BlockIndex, model: &Model) {
    index.validate();
    let of = |wanted: bool| {
        index.blocks().filter(move |&(_, name)| name.is_some() == wanted).map(|(span, _)| span)
    };
    assert!(of(false).eq(free_spans(model, index.span)));
    let live = model.iter().map(|(&offset, &(end, _))| Span { offset, size: end - offset });
    assert!(of(true).eq(live));
    let largest = free_spans(model, index.span).iter().map(|span| span.size).max();
    assert_eq!(index.largest(|span| span.size), largest.unwrap_or(0));
}

fn take(index: &mut BlockIndex, model: &mut Model, request: Request) -> bool {
    let free = free_spans(model, index.span);
    let Some((id, span)) = index.take(request, PLAIN) else { return false };
    assert!(span.size >= request.size && span.offset.is_multiple_of(request.align));
    assert!(free.iter().any(|hole| hole.offset <= span.offset && span.end() <= hole.end()));
    model.insert(span.offset, (span.end(), id));
    true
}

fn release(index: &mut BlockIndex, model: &mut Model, nth: usize) {
    let (&offset, &(end, id)) = model.iter().nth(nth).expect("live");
    model.remove(&offset);
    assert_eq!(index.release(id), Ok(Span { offset, size: end - offset }));
    assert_eq!(index.release(id), Err(StaleBlock), "a second release");
    assert_eq!(index.span_of(id), Err(StaleBlock));
}

/// Every history of this many acts in a range of this many units.
fn explore(mut acts: Vec<usize>, span: u64, depth: usize, seen: &mut usize) {
    // Histories are played again from the start, so that the index needs no copy.
    let mut index = BlockIndex::new(span * ALIGN);
    let mut model = Model::new();
    let sizes = usize::try_from(span).expect("small");
    for &act in &acts {
        if act < sizes {
            let size = act as u64 + 1;
            let fits = free_spans(&model, index.span).iter().any(|free| free.size >= size * ALIGN);
            assert_eq!(take(&mut index, &mut model, units(size)), fits, "{acts:?}");
        } else if act - sizes < model.len() {
            release(&mut index, &mut model, act - sizes);
        } else {
            return; // no such block: the history is another one's
        }
    }
    compare(&index, &model);
    *seen += 1;
    if acts.len() < depth {
        for act in 0..sizes + model.len() {
            acts.push(act);
            explore(acts.clone(), span, depth, seen);
            acts.pop();
        }
    }
}

#[test]
fn every_short_history_of_a_small_range_agrees_with_the_model() {
    let mut seen = 0;
    explore(Vec::new(), 4, 6, &mut seen);
    assert!(seen > 5_000, "only {seen} histories");
}

struct Chance(u64);

impl Chance {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % bound
    }
}

#[test]
fn random_histories_agree_with_the_model_and_fail_only_when_nothing_much_larger_is_free() {
    const SPAN: u64 = 1 << 26;
    for seed in [0x9E37_79B9_7F4A_7C15, 0xD1B5_4A32_D192_ED03] {
        println!("seed {seed:#x}");
        let mut chance = Chance(seed);
        let mut index = BlockIndex::new(SPAN);
        let mut model = Model::new();
        let mut failures = 0;
        for step in 0..6_000 {
            if chance.below(100) < 55 {
                let size = (256 << chance.below(17)) + chance.below(4096);
                let align = 1 << chance.below(18);
                let end = if chance.below(2) == 0 { End::Low } else { End::High };
                let request = Request { size, align, end };
                if !take(&mut index, &mut model, request) {
                    failures += 1;
                    let sure = (size + ALIGN + align).div_ceil(32) * 33;
                    let largest = index.largest(|span| span.size);
                    assert!(largest < sure, "{request:?} failed beside {largest}");
                }
            } else if !model.is_empty() {
                let count = model.len() as u64;
                let nth = usize::try_from(chance.below(count)).expect("small");
                release(&mut index, &mut model, nth);
            }
            if step % 50 == 0 {
                compare(&index, &model);
            }
        }
        assert!(failures > 0, "the range was never full: the test is too tame");
        while !model.is_empty() {
            release(&mut index, &mut model, 0);
        }
        compare(&index, &model);
        assert_eq!(index.take(units(SPAN / ALIGN), PLAIN).expect("all of it").1.offset, 0);
    }
}

#[test]
fn a_stale_name_is_refused_after_its_record_is_another_blocks() {
    let mut index = BlockIndex::new(16 * ALIGN);
    let (old, span) = index.take(units(4), PLAIN).expect("room");
    assert_eq!(index.release(old), Ok(span));
    let (new, again) = index.take(units(4), PLAIN).expect("room");
    assert_eq!((again, new.slot), (span, old.slot), "the test needs the record to be used again");
    assert_eq!(index.release(old), Err(StaleBlock));
    assert_eq!(index.release(new), Ok(again));
}

#[test]
fn an_aligned_block_in_its_own_bin_is_found_without_rounding_up() {
    let mut index = BlockIndex::new(64 * ALIGN);
    let (_, head) = index.take(units(1), PLAIN).expect("room");
    assert_eq!(head.offset, 0);
    let request = Request { align: 32 * ALIGN, ..units(32) };
    let (_, span) = index.take(request, PLAIN).expect("room");
    assert_eq!(span.offset, 32 * ALIGN);
    index.validate();
}

#[test]
fn a_place_that_costs_nothing_is_preferred_to_a_lower_and_a_better_fitting_one() {
    let mut index = BlockIndex::new(1 << 20);
    let (low, low_span) = index.take(units(10), PLAIN).expect("room");
    let _ = index.take(units(1), PLAIN).expect("room");
    let (high, high_span) = index.take(units(20), PLAIN).expect("room");
    let _ = index.take(units(1), PLAIN).expect("room");
    index.release(low).expect("live");
    index.release(high).expect("live");
    let cheap = |place: Span| u64::from(place.offset != high_span.offset);
    assert_eq!(index.take(units(10), cheap).expect("room").1.offset, high_span.offset);
    assert_eq!(index.take(units(10), PLAIN).expect("room").1.offset, low_span.offset);
}

#[test]
fn sizes_at_the_end_of_the_number_range_are_refused() {
    let mut index = BlockIndex::new(1 << 20);
    for size in [u64::MAX, u64::MAX - ALIGN, 1 << 63, (1 << 20) + 1] {
        for align in [1, ALIGN, 1 << 63] {
            assert!(index.take(Request { size, align, end: End::Low }, PLAIN).is_none());
        }
    }
    assert!(BlockIndex::new(0).take(units(1), PLAIN).is_none());
    assert_eq!(index.live(), 0);
    index.validate();
}
