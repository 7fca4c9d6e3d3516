//! The requests of a burst: many short ones, some long, of 1 to 8 rows.

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
    let mut random = Random(seed);
    let mut shapes: Vec<_> = SHAPES.iter().cycle().take(REQUESTS).copied().collect();
    for last in (1..shapes.len()).rev() {
        shapes.swap(last, random.below(last + 1));
    }
    shapes.into_iter().map(move |(rows, length)| {
        let length = length + random.below(1 + length / 4);
        let mut id = || WORDS.start + random.next() % (WORDS.end - WORDS.start);
        let ids = std::iter::repeat_with(&mut id).take(rows * length).collect();
        Batch { rows, length, ids, mask: vec![1; rows * length], types: vec![0; rows * length] }
    })
}

/// A request of one short row.
pub(crate) fn one(seed: u64) -> Batch {
    const LENGTH: usize = 16;
    let mut random = Random(seed);
    let ids =
        (0..LENGTH).map(|_| WORDS.start + random.next() % (WORDS.end - WORDS.start)).collect();
    Batch { rows: 1, length: LENGTH, ids, mask: vec![1; LENGTH], types: vec![0; LENGTH] }
}

/// `SplitMix64`.
struct Random(u64);

impl Random {
    /// A number that is not negative.
    fn next(&mut self) -> i64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        i64::try_from((z ^ (z >> 31)) >> 1).unwrap_or(0)
    }

    fn below(&mut self, end: usize) -> usize {
        usize::try_from(self.next()).unwrap_or(0) % end
    }
}
