//! A token bucket, which limits a rate: a burst at once, then one at a fixed interval.
//!
//! Pure: the time is passed in. Invariant: within any time `t` at most `burst + t / every` are
//! accepted.

use std::time::Duration;

use crate::clock::Moment;

/// A token bucket.
#[derive(Debug)]
pub struct TokenBucket {
    burst: u32,
    every: Duration,
    left: u32,
    /// The time up to which refills are counted.
    counted: Moment,
}

impl TokenBucket {
    /// Creates a full bucket: `burst` at once, and one more after each `every`, which is above
    /// zero.
    #[must_use]
    pub const fn new(burst: u32, every: Duration, now: Moment) -> Self {
        Self { burst, every, left: burst, counted: now }
    }

    /// Takes one.
    ///
    /// # Errors
    /// The time until one is available.
    pub fn take(&mut self, now: Moment) -> Result<(), Duration> {
        let back = (now - self.counted).as_nanos() / self.every.as_nanos().max(1);
        let back = u32::try_from(back).unwrap_or(u32::MAX);
        if back >= self.burst - self.left {
            (self.left, self.counted) = (self.burst, now);
        } else {
            self.left += back;
            self.counted = self.counted + self.every * back;
        }
        if self.left == 0 {
            return Err(self.every - (now - self.counted));
        }
        self.left -= 1;
        Ok(())
    }
}

#[cfg(all(test, not(lowtide_loom)))]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn a_burst_passes_and_then_one_for_each_step_of_time() {
        let at = |ms| Moment::after_origin(Duration::from_millis(ms));
        let mut bucket = TokenBucket::new(3, SECOND, at(0));
        let passed = (0..10).filter(|_| bucket.take(at(0)).is_ok()).count();
        assert_eq!(passed, 3);
        assert_eq!(bucket.take(at(400)), Err(Duration::from_millis(600)));
        assert_eq!(bucket.take(at(1000)), Ok(()));
        assert_eq!(bucket.take(at(1999)), Err(Duration::from_millis(1)));
        // Unused tokens accumulate up to the burst.
        let passed = (0..10).filter(|_| bucket.take(at(60_000)).is_ok()).count();
        assert_eq!(passed, 3);
        // 10 s with a request every 10 ms: the burst is used up, so one a second.
        let passed = (0..1000).filter(|nth| bucket.take(at(60_000 + nth * 10)).is_ok()).count();
        assert_eq!(passed, 9);
    }
}
