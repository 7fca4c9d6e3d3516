//! Profiles: named sets of defaults, and of settings for ONNX Runtime in the same process.
//!
//! A profile is data. Its values that jemalloc reads at start-up (arena count, page classes) are
//! exported by `global_allocator!`; the values here can change at run time.
//!
//! ONNX Runtime caches memory in its own arenas, which neither jemalloc nor a
//! [`DeviceArena`](crate::device::DeviceArena) manages, and starts one thread per core of the
//! machine. Its settings limit both. The crate does not link ONNX Runtime: the program that
//! creates the session applies them, or the package `lowtide-ort`. ONNX Runtime's arena options are
//! in [`arena`](super::arena).
//!
//! Invariant: a profile differs from ONNX Runtime's defaults only in the listed settings.

use std::time::Duration;

use lowtide_heap as heap;

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
    /// The quiet time after which the heap is purged; `None` if quiet does not trigger a purge.
    pub(crate) const fn purge_when_idle_for(self) -> Option<Duration> {
        match self {
            Self::LowMemory => Some(Duration::from_secs(1)),
            Self::Balanced => Some(Duration::from_secs(2)),
            Self::Throughput => None,
        }
    }

    /// Returns the settings to apply to each ONNX Runtime session in this process, each with its
    /// value as text. All other settings keep ONNX Runtime's defaults. `cpus` is the CPU quota in
    /// whole CPUs ([`Cpus::whole`](crate::admission::Cpus::whole)); 0 counts as 1.
    ///
    /// A name that begins with `session.` is that of a configuration entry of a session
    /// (`AddSessionConfigEntry`, `add_session_config_entry`). The others are attributes of
    /// `SessionOptions`, under their names in the Python interface and in the `session_options` of
    /// a `genai_config.json`. In C those are functions: `DisableCpuMemArena`, `DisableMemPattern`,
    /// `SetIntraOpNumThreads`, `SetInterOpNumThreads`.
    ///
    /// | key | where | low-memory | balanced | throughput |
    /// |---|---|---|---|---|
    /// | `enable_cpu_mem_arena` | session option | false | false with `interpose` | as it is |
    /// | `enable_mem_pattern` | session option | false | false with `interpose` | as it is |
    /// | `session.use_device_allocator_for_initializers` | session entry | 1 | 1 | 1 |
    /// | `intra_op_num_threads` | session option | 1 | the CPUs | the CPUs |
    /// | `inter_op_num_threads` | session option | 1 | 1 | 1 |
    /// | `session.intra_op.allow_spinning` | session entry | 0 | 0 | as it is |
    ///
    /// Without its CPU arena, ONNX Runtime frees to the heap that serves C++ code; without the
    /// memory pattern, it plans no block for a whole run. The effect depends on the heap, so
    /// `balanced` decides by [`heap::serves_c`]. jemalloc, with feature `interpose`, keeps such
    /// blocks for a second and returns them to the system when idle. glibc maps and unmaps each
    /// large block, which costs many page faults and a larger peak than with the arena. Under glibc
    /// `balanced` therefore leaves the arena on, and it keeps its memory between bursts;
    /// `low-memory` turns the arena off. `docs/BENCHMARKING.md` has the figures.
    ///
    /// Initializers (the weights) are to be allocated outside the arena, which would keep its
    /// largest step for them. ONNX Runtime counts the cores of the machine instead of the quota,
    /// and each thread costs a stack and a share of the heap, so the number of threads is set to
    /// the quota. Spinning threads use up the CPU quota of the working threads.
    ///
    /// With ONNX Runtime 1.32 the first two rows were measured, and the effect of threads and of
    /// spinning was observed, as `lowtide-ort` does at each start. The third row has no effect on
    /// the CPU there. Sources:
    /// `onnxruntime_session_options_config_keys.h` and `onnxruntime_c_api.h` of ONNX Runtime 1.2x.
    /// A run's `memory.enable_memory_arena_shrinkage` is for sessions with an arena: with `cpu:0`
    /// in it "`DisableCpuMemArena()` API must not be called", so no profile sets it.
    ///
    /// ```
    /// use lowtide::config::Profile;
    ///
    /// let settings = Profile::LowMemory.onnxruntime(4);
    /// assert!(settings.contains(&("enable_cpu_mem_arena", "false".to_owned())));
    /// for (name, value) in &settings {
    ///     let kind = if name.starts_with("session.") { "entry" } else { "option" };
    ///     println!("{kind} {name} = {value}");
    /// }
    /// ```
    #[must_use]
    pub fn onnxruntime(self, cpus: u32) -> Vec<(&'static str, String)> {
        self.settings(cpus, heap::serves_c())
    }

    /// The same, if jemalloc serves C++ code or if it does not.
    fn settings(self, cpus: u32, serves_cpp: bool) -> Vec<(&'static str, String)> {
        let frees_at_once = match self {
            Self::LowMemory => true,
            Self::Balanced => serves_cpp,
            Self::Throughput => false,
        };
        let gives_back = matches!(self, Self::LowMemory | Self::Balanced);
        let threads = if self == Self::LowMemory { 1 } else { cpus.max(1) }.to_string();
        let rows = [
            (frees_at_once, "enable_cpu_mem_arena", "false"),
            (frees_at_once, "enable_mem_pattern", "false"),
            (true, "session.use_device_allocator_for_initializers", "1"),
            (true, "intra_op_num_threads", &*threads),
            (true, "inter_op_num_threads", "1"),
            (gives_back, "session.intra_op.allow_spinning", "0"),
        ];
        let chosen = rows.into_iter().filter(|(holds, ..)| *holds);
        chosen.map(|(_, name, value)| (name, value.to_owned())).collect()
    }
}

lowtide_core::by_name!(Profile, "low-memory, balanced or throughput");

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bytes::ByteSize;
    use crate::config::{Config, Settings};
    use crate::decay::DecayTime;

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
        let growth = |growth: Option<(ByteSize, f64)>| {
            growth.map_or_else(
                || "never".to_owned(),
                |(floor, part)| format!("{} MiB, {:.0} %", floor.get() >> 20, part * 100.0),
            )
        };
        let of = |value: &dyn Fn(&Config) -> String| {
            let of_profile = |profile| {
                let code = Settings { profile: Some(profile), ..Settings::default() };
                value(&Config::resolve(&code, &Settings::default()).expect("valid"))
            };
            Profile::ALL.map(of_profile).join(" | ")
        };
        for (name, values) in [
            ("heap decay", of(&|config| decay(config.heap_decay.value))),
            ("device decay", of(&|config| decay(config.device_decay.value))),
            ("background threads", of(&|config| config.background_threads.value.to_string())),
            (
                "heap purge after a quiet time of",
                of(&|config| time(config.profile.value.purge_when_idle_for())),
            ),
            (
                "heap purge interval of a busy service",
                of(&|config| time(config.purge_interval.value)),
            ),
            ("heap purge after sustained growth of", of(&|config| growth(config.purge_growth()))),
            ("resources unloaded after", of(&|config| time(Some(config.idle_unload.value)))),
        ] {
            let row = format!("{name} | {values} |\n");
            assert!(include_str!("profile.rs").contains(&row), "the table has no {row}");
        }
        let nothing = Settings::default();
        let config = Config::resolve(&nothing, &nothing).expect("valid");
        assert!((config.ceiling.value - 0.80).abs() < f64::EPSILON);
        assert_eq!(config.metrics_interval.value, Duration::from_secs(1));
    }

    #[test]
    fn the_documented_settings_of_onnx_runtime_are_those_of_the_code() {
        let text = include_str!("profile.rs");
        let rows: Vec<_> = text.lines().filter(|line| line.starts_with("    /// | `")).collect();
        for row in &rows {
            let cells: Vec<_> =
                row.trim_start_matches([' ', '/']).trim_matches('|').split('|').collect();
            let cells: Vec<_> = cells.iter().map(|cell| cell.trim().trim_matches('`')).collect();
            for (profile, said) in Profile::ALL.into_iter().zip(&cells[2..]) {
                let of = |serves_cpp| {
                    let settings = profile.settings(7, serves_cpp);
                    settings.into_iter().find(|(name, _)| *name == cells[0])
                };
                let (found, without) = (of(true), of(false));
                let place = match found.as_ref().map(|(name, _)| name.starts_with("session.")) {
                    Some(true) => "session entry",
                    Some(false) => "session option",
                    None => cells[1],
                };
                let value = match found.as_ref().map(|(_, value)| &**value) {
                    Some("7") => "the CPUs".to_owned(),
                    Some(value) if without.is_none() => format!("{value} with `interpose"),
                    Some(value) => value.to_owned(),
                    None => "as it is".to_owned(),
                };
                assert_eq!((cells[1], *said), (place, &*value), "{profile}: {row}");
            }
        }
        let of_code = Profile::LowMemory.settings(7, true).len();
        assert_eq!(rows.len(), of_code, "each key has a row");
    }

    /// Bug: `balanced` switched the arena off under glibc too, which then maps and unmaps each
    /// large block of each run.
    #[test]
    fn balanced_keeps_the_arena_of_onnx_runtime_unless_jemalloc_serves_cpp() {
        let keys = |profile: Profile, serves_cpp| {
            let settings = profile.settings(2, serves_cpp);
            settings.iter().filter(|(name, _)| name.contains("_mem_")).count()
        };
        assert_eq!([keys(Profile::Balanced, false), keys(Profile::Balanced, true)], [0, 2]);
        for serves_cpp in [false, true] {
            let of = |profile| keys(profile, serves_cpp);
            assert_eq!([of(Profile::LowMemory), of(Profile::Throughput)], [2, 0]);
        }
    }

    #[test]
    fn there_is_a_thread_even_where_no_cpu_was_counted() {
        for setting in Profile::ALL.into_iter().flat_map(|profile| profile.onnxruntime(0)) {
            assert_ne!(setting, ("intra_op_num_threads", "0".to_owned()));
        }
    }
}
