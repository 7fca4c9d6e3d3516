//! Profiles: named sets of defaults.
//!
//! A profile is data. Its values that jemalloc reads at start-up (arena count, page classes) are
//! exported by `global_allocator!`; the values here can change at run time.

use std::str::FromStr;
use std::time::Duration;

use crate::bytes::ByteSize;
use crate::decay::DecayTime;
use lowtide_admission::PurgeGrowth;

lowtide_core::named_enum! {
    /// A named set of defaults.
    ///
    /// | setting | low-memory | balanced | throughput |
    /// |---|---|---|---|
    /// | heap decay | 1s | 1s | 10s |
    /// | device decay | 1s | 5s | 30s |
    /// | jemalloc background threads | 1 | 2 | 4 |
    /// | heap purge after a quiet time of | 1s | 2s | never |
    /// | heap purge interval of a busy service | 10s | 30s | never |
    /// | heap purge after sustained growth of | 16 MiB, 5 % | 64 MiB, 10 % | never |
    /// | idle resources unloaded after | 60s | 300s | 900s |
    ///
    /// The ceiling (0.80 of the limit) and the metrics interval (1 s) are the same under every
    /// profile ([`Config`](super::Config)).
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    #[non_exhaustive]
    pub enum Profile {
        /// The smallest idle footprint: short decay, early unload. Costs some CPU after each burst.
        LowMemory = "low-memory",
        /// Returns unused memory within seconds. In the benchmark that cost 20 to 34 % more CPU
        /// than jemalloc's defaults over a burst of 5 s, and nothing measurable over 20 s of
        /// traffic.
        #[default]
        Balanced = "balanced",
        /// Keeps memory for the next burst. Releases it late, or immediately under pressure.
        Throughput = "throughput",
    }
}

impl Profile {
    /// The time for which a device arena keeps unused granules: a shorter pause costs no driver
    /// call. An estimate, not measured on a GPU.
    #[cfg(feature = "device")]
    pub(super) const fn device_decay(self) -> DecayTime {
        match self {
            Self::LowMemory => DecayTime::from_millis(1_000),
            Self::Balanced => DecayTime::from_millis(5_000),
            Self::Throughput => DecayTime::from_millis(30_000),
        }
    }

    /// The time for which jemalloc keeps dirty pages. One second costs nothing measurable against
    /// ten and returns memory ten times as fast; zero would cost 5 to 8 times the CPU and is never
    /// used.
    pub(super) const fn heap_decay(self) -> DecayTime {
        match self {
            Self::LowMemory | Self::Balanced => DecayTime::from_millis(1_000),
            Self::Throughput => DecayTime::from_millis(10_000),
        }
    }

    /// The maximum number of jemalloc's background threads. An estimate: two suffice for the
    /// default arenas.
    pub(super) const fn background_threads(self) -> u32 {
        match self {
            Self::LowMemory => 1,
            Self::Balanced => 2,
            Self::Throughput => 4,
        }
    }

    /// The quiet time after which the heap is purged; `None` if quiet does not trigger a purge.
    pub(crate) const fn purge_when_idle_for(self) -> Option<Duration> {
        match self {
            Self::LowMemory => Some(Duration::from_secs(1)),
            Self::Balanced => Some(Duration::from_secs(2)),
            Self::Throughput => None,
        }
    }

    /// The time between purges of a busy service; `None` purges only under pressure.
    pub(super) const fn purge_interval(self) -> Option<Duration> {
        match self {
            Self::LowMemory => Some(Duration::from_secs(10)),
            Self::Balanced => Some(Duration::from_secs(30)),
            Self::Throughput => None,
        }
    }

    /// The growth of retained heap memory that triggers a purge. The amounts are estimates. The
    /// growth must last for twice the decay time, in which dirty pages are purged without it.
    pub(super) const fn purge_growth(self) -> Option<PurgeGrowth> {
        let hold = Duration::from_secs(2);
        match self {
            Self::LowMemory => Some(PurgeGrowth { floor: ByteSize::mib(16), part: 0.05, hold }),
            Self::Balanced => Some(PurgeGrowth { floor: ByteSize::mib(64), part: 0.10, hold }),
            Self::Throughput => None,
        }
    }

    /// The idle time of resources without their own setting.
    pub(super) const fn idle_unload(self) -> Duration {
        match self {
            Self::LowMemory => Duration::from_secs(60),
            Self::Balanced => Duration::from_secs(300),
            Self::Throughput => Duration::from_secs(900),
        }
    }
}

impl FromStr for Profile {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::ALL
            .into_iter()
            .find(|profile| profile.name() == text)
            .ok_or("low-memory, balanced or throughput")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Config, Settings};

    #[test]
    fn the_documented_table_is_what_the_code_says() {
        let time = |time: Option<Duration>| match time {
            Some(time) => format!("{time:?}"),
            None => "never".to_owned(),
        };
        let decay = |decay| match decay {
            DecayTime::Within(within) => time(Some(within)),
            other => format!("{other:?}"),
        };
        let growth = |growth: Option<PurgeGrowth>| {
            growth.map_or_else(
                || "never".to_owned(),
                |PurgeGrowth { floor, part, .. }| {
                    format!("{} MiB, {:.0} %", floor.get() >> 20, part * 100.0)
                },
            )
        };
        let of = |value: &dyn Fn(Profile) -> String| Profile::ALL.map(value).join(" | ");
        for (name, values) in [
            ("heap decay", of(&|profile| decay(profile.heap_decay()))),
            ("device decay", of(&|profile| decay(profile.device_decay()))),
            ("background threads", of(&|profile| profile.background_threads().to_string())),
            (
                "heap purge after a quiet time of",
                of(&|profile| time(profile.purge_when_idle_for())),
            ),
            (
                "heap purge interval of a busy service",
                of(&|profile| time(profile.purge_interval())),
            ),
            ("heap purge after sustained growth of", of(&|profile| growth(profile.purge_growth()))),
            ("resources unloaded after", of(&|profile| time(Some(profile.idle_unload())))),
        ] {
            let row = format!("{name} | {values} |\n");
            assert!(include_str!("profile.rs").contains(&row), "the table has no {row}");
        }
        let nothing = Settings::default();
        let config = Config::resolve(&nothing, &nothing).expect("valid");
        assert!((config.ceiling.value - 0.80).abs() < f64::EPSILON);
        assert_eq!(config.metrics_interval.value, Duration::from_secs(1));
    }
}
