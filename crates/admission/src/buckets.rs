//! Buckets of histograms: sixteen for each power of two.
//!
//! Plain functions; the counts belong to the callers.
//!
//! Invariants: every amount lies in one bucket; amounts up to 15 have a bucket each, and the
//! largest amount of another bucket is at most a sixteenth more than its smallest.

/// The number of buckets for each power of two.
const PARTS: usize = 16;
const PARTS_POWER: usize = PARTS.ilog2() as usize;

/// Returns the bucket of an amount.
pub(super) const fn bucket_of(amount: u64) -> usize {
    #[expect(clippy::cast_possible_truncation, reason = "both are small")]
    const fn small(amount: u64) -> usize {
        amount as usize
    }
    let power = match amount.checked_ilog2() {
        Some(power) => power as usize,
        None => 0,
    };
    if power < PARTS_POWER {
        return small(amount);
    }
    let part = small((amount >> (power - PARTS_POWER)) % PARTS as u64);
    (power - PARTS_POWER + 1) * PARTS + part
}

/// Returns the largest amount of a bucket.
pub(super) const fn largest_of(bucket: usize) -> u64 {
    if bucket < PARTS {
        return bucket as u64;
    }
    let (shift, part) = (bucket / PARTS - 1, (bucket % PARTS) as u64);
    // The bucket after the last one would begin at 2^64, whose bits are shifted out.
    ((PARTS as u64 + part + 1) << shift).wrapping_sub(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_amount_lies_in_one_bucket_that_is_a_sixteenth_wide() {
        let mut above = None;
        // The smallest amounts have one each, followed by sixteen for each power of two.
        for at in 0..(64 - PARTS_POWER + 1) * PARTS {
            let most = largest_of(at);
            assert_eq!(bucket_of(most), at, "{most}");
            if let Some(first) = above {
                assert_eq!(bucket_of(first), at, "{first}");
                assert!(most - first <= first / 16, "{first} to {most}");
            }
            above = most.checked_add(1);
        }
        assert_eq!(above, None, "the last one ends where 64 bits do");
    }
}
