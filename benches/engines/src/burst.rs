//! The requests of a burst: many short ones, some long, of 1 to 8 rows.

#[path = "../../index/chance.rs"]
#[allow(dead_code, reason = "another bench draws sizes too")]
mod chance;

use self::chance::Chance;

/// Rows of one length.
#[derive(Debug)]
pub(crate) struct Batch {
    pub(crate) rows: usize,
    pub(crate) length: usize,
    pub(crate) ids: Vec<i64>,
    pub(crate) mask: Vec<i64>,
    pub(crate) types: Vec<i64>,
}

/// Rows and tokens of each request, before the shuffle.
const SHAPES: [(usize, usize); 16] = [
    (1, 10),
    (1, 16),
    (1, 24),
    (1, 48),
    (1, 80),
    (1, 120),
    (1, 240),
    (2, 24),
    (2, 80),
    (2, 240),
    (4, 40),
    (4, 80),
    (4, 160),
    (8, 24),
    (8, 80),
    (8, 240),
];
const REQUESTS: usize = 32;
/// Tokens of words in the vocabulary of BERT.
const WORDS: std::ops::Range<i64> = 1_996..30_522;

/// The requests of one burst.
pub(crate) fn of(seed: u64) -> impl Iterator<Item = Batch> {
    let mut random = Chance::new(seed);
    let mut shapes: Vec<_> = SHAPES.iter().cycle().take(REQUESTS).copied().collect();
    for last in (1..shapes.len()).rev() {
        shapes.swap(last, random.below(last + 1));
    }
    shapes.into_iter().map(move |(rows, length)| {
        let length = length + random.below(1 + length / 4);
        let ids = words(&mut random, rows * length);
        Batch { rows, length, ids, mask: vec![1; rows * length], types: vec![0; rows * length] }
    })
}

/// A request of one short row.
pub(crate) fn one(seed: u64) -> Batch {
    const LENGTH: usize = 16;
    let mut random = Chance::new(seed);
    let ids = words(&mut random, LENGTH);
    Batch { rows: 1, length: LENGTH, ids, mask: vec![1; LENGTH], types: vec![0; LENGTH] }
}

fn words(random: &mut Chance, count: usize) -> Vec<i64> {
    let range = WORDS.end.abs_diff(WORDS.start);
    (0..count).map(|_| WORDS.start.saturating_add_unsigned((random.next() >> 1) % range)).collect()
}
