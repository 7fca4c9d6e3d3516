//! The time that idle memory may stay before it is released, for heap and device.
//!
//! Plain values. Nothing here reads a clock or releases memory. The two parts apply a time
//! differently. jemalloc releases the heap's idle pages along a smooth curve: half of them by half
//! of the time, the last at its end. A device arena releases nothing before the whole time has
//! passed and then everything that was idle for so long, because memory released too early costs
//! driver calls to allocate again.
//!
//! Invariant: a constructor never returns [`DecayTime::Within`] with a zero duration.

use std::fmt;
use std::time::Duration;

use crate::clock::short;

/// The time that idle memory may stay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DecayTime {
    /// Idle memory is released at once (jemalloc's 0).
    AtOnce,
    /// Idle memory is released within this time: on the heap along jemalloc's curve, in an arena
    /// after the whole time without use.
    Within(Duration),
    /// Idle memory is kept until a purge or trim (jemalloc's -1).
    Never,
}

impl DecayTime {
    /// Creates a decay time in milliseconds. 0 is [`DecayTime::AtOnce`].
    #[must_use]
    pub const fn from_millis(millis: u64) -> Self {
        Self::from_duration(Duration::from_millis(millis))
    }

    /// Creates a decay time from a duration. Zero is [`DecayTime::AtOnce`].
    #[must_use]
    pub const fn from_duration(time: Duration) -> Self {
        if time.is_zero() { Self::AtOnce } else { Self::Within(time) }
    }
}

impl fmt::Display for DecayTime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AtOnce => f.write_str("at once"),
            Self::Within(time) => write!(f, "{}", short(*time)),
            Self::Never => f.write_str("never"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_time_is_at_once() {
        assert_eq!(DecayTime::from_millis(0), DecayTime::AtOnce);
        let shown = [0, 5_000].map(|ms| DecayTime::from_millis(ms).to_string());
        assert_eq!(shown, ["at once", "5.0 s"]);
        assert_eq!(DecayTime::from_millis(1), DecayTime::Within(Duration::from_millis(1)));
    }
}
