//! How long idle memory may stay: plain values, of one meaning for host and device.
//!
//! They read no clock and give nothing back. What becomes of memory meanwhile differs: jemalloc
//! lets the heap's idle pages go along a smooth curve, half of them by half of the time and the
//! last at its end; a device arena lets nothing go before the whole time, and then all that was
//! idle for so long, because what it gives back too early costs driver calls to get again.
//!
//! Invariant: [`DecayTime::Within`] is never zero by way of a constructor.

use std::time::Duration;

/// How long idle memory may stay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DecayTime {
    /// Given back as soon as it is idle (jemalloc's 0).
    AtOnce,
    /// Given back within this long: the heap's along jemalloc's curve, the last of it after this
    /// long; an arena's when it was not used for this long, and nothing of it before.
    Within(Duration),
    /// Kept until it is asked for (jemalloc's -1).
    Never,
}

impl DecayTime {
    /// A time in milliseconds: 0 is [`DecayTime::AtOnce`].
    #[must_use]
    pub const fn from_millis(millis: u64) -> Self {
        Self::from_duration(Duration::from_millis(millis))
    }

    /// A duration: zero is [`DecayTime::AtOnce`].
    #[must_use]
    pub const fn from_duration(time: Duration) -> Self {
        if time.is_zero() { Self::AtOnce } else { Self::Within(time) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_time_is_at_once() {
        assert_eq!(DecayTime::from_millis(0), DecayTime::AtOnce);
        assert_eq!(DecayTime::from_millis(1), DecayTime::Within(Duration::from_millis(1)));
    }
}
