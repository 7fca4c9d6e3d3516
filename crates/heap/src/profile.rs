//! The three named heap profiles, and the macro that puts one into a binary.
//!
//! jemalloc fixes its arena count, block layout and thread-cache size before `main`, from a string
//! under a symbol of the binary. The macro exports that symbol. A library must not: two of them do
//! not link. [`HeapSettings`] has the settings that can change later. The settings that may
//! override a profile, and their checks, are in `knobs`.
//!
//! Left out on purpose: a dirty decay of 0 (5 to 8 times the CPU), `hpa` (twice the memory at
//! rest), and block groups of one page (`slab_sizes`): jemalloc keeps 128 bytes of metadata for
//! each group at the peak, so a burst of small blocks leaves more behind than it saves.
//!
//! Invariant: the decay times in `conf` are those in `settings`.

use std::ffi::CStr;
use std::time::Duration;

use lowtide_core::decay::DecayTime;

/// Heap settings for a running process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeapSettings {
    /// Time that unused pages stay backed. jemalloc counts whole milliseconds: rounded up, never to
    /// 0. [`DecayTime::AtOnce`] costs 5 to 8 times the CPU.
    pub dirty_decay: DecayTime,
    /// Time that lazily released pages stay so. With [`DecayTime::AtOnce`], pages are never left
    /// for the kernel to reclaim later, while they would still count as resident.
    pub muzzy_decay: DecayTime,
    /// `true` if jemalloc's background threads decay the heap. Without them it decays only when the
    /// application allocates and frees, or by [`decay_tick`](super::decay_tick).
    pub background_threads: bool,
    /// The maximum number of those threads, from 1 to the number fixed at start; `None` keeps it.
    pub max_background_threads: Option<u32>,
}

lowtide_core::named_enum! {
    /// A named set of heap settings.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
    pub enum HeapProfile {
        /// The least memory at rest: 2 arenas, no huge pages.
        LowMemory = "low_memory",
        /// Memory is released one second after the traffic ends: 4 arenas. In the benchmark it
        /// costs 20 to 34 % more CPU than jemalloc's defaults over a burst of 5 s, and no
        /// measurable amount over 20 s of traffic.
        Balanced = "balanced",
        /// Memory is released ten seconds after the traffic ends; jemalloc's own arena count.
        Throughput = "throughput",
    }
}

impl HeapProfile {
    /// Returns the string for jemalloc's configuration symbol.
    ///
    /// 4 arenas and 2 background threads are guesses; the other values are measured.
    #[must_use]
    pub const fn conf(self) -> &'static CStr {
        match self {
            Self::LowMemory => {
                c"background_thread:true,max_background_threads:1,narenas:2,\
                  dirty_decay_ms:1000,muzzy_decay_ms:0,thp:never,metadata_thp:disabled,\
                  cache_oblivious:false"
            }
            Self::Balanced => {
                c"background_thread:true,max_background_threads:2,narenas:4,\
                  dirty_decay_ms:1000,muzzy_decay_ms:0,cache_oblivious:false"
            }
            Self::Throughput => c"background_thread:true,dirty_decay_ms:10000,muzzy_decay_ms:0",
        }
    }

    /// Returns the settings that can be applied while the process runs.
    #[must_use]
    pub const fn settings(self) -> HeapSettings {
        let (dirty_ms, threads) = match self {
            Self::LowMemory => (1_000, Some(1)),
            Self::Balanced => (1_000, Some(2)),
            Self::Throughput => (10_000, None),
        };
        HeapSettings {
            dirty_decay: DecayTime::Within(Duration::from_millis(dirty_ms)),
            muzzy_decay: DecayTime::AtOnce,
            background_threads: true,
            max_background_threads: threads,
        }
    }
}

/// Makes jemalloc the global allocator, with settings that are fixed before `main`: `low_memory`,
/// `balanced` or `throughput`, and custom settings on top.
///
/// Use it once, in the binary (a second one does not compile or link). For an allocator of your own
/// that wraps [`Heap`](crate::Heap), use [`jemalloc_conf!`](crate::jemalloc_conf).
///
/// The macro exports the profile's string (see [`HeapProfile::conf`](crate::HeapProfile::conf)) as
/// `_rjem_malloc_conf` and as `malloc_conf`, because jemalloc reads the second if it serves C code
/// as well (feature `interpose`, which any dependency may enable). The environment variable
/// `_RJEM_MALLOC_CONF`, or `MALLOC_CONF` in that case, overrides it.
/// [`effective`](crate::effective) returns the settings in effect.
///
/// ```
/// lowtide_heap::global_allocator!(low_memory, narenas: 3, dirty_decay_ms: 2_000);
///
/// assert_eq!(lowtide_heap::effective().unwrap().arenas_at_start, 3);
/// ```
///
/// # Settings
///
/// Each by jemalloc's name, at most once, with a literal value; docs/TUNING.md lists their costs.
///
/// | setting | value |
/// |---|---|
/// | `background_thread` | `true`, `false` |
/// | `max_background_threads` | 1 to 64; later sources can only lower it |
/// | `narenas` | 1 to 4094 |
/// | `tcache_max` | bytes, 8 to 32768 |
/// | `dirty_decay_ms` | ms, 1 to 3600000 |
/// | `muzzy_decay_ms` | ms, 0 to 3600000 |
/// | `thp` | `default`, `always`, `never` |
/// | `metadata_thp` | `disabled`, `auto`, `always` |
/// | `slab_sizes` | `default`, `one_page` |
/// | `cache_oblivious` | `true`, `false` |
/// | `prof` | `true`, `false`; with the feature `profiling` |
/// | `lg_prof_sample` | 19 to 30; with the feature `profiling` |
///
/// `prof: true` starts jemalloc's heap profiler with the process. It records the stack of one
/// allocation in each 2^`lg_prof_sample` bytes allocated, on average: 23, which is 8 MiB, is cheap
/// enough to leave on (docs/OPERATING.md, "Taking a heap profile").
///
/// Other settings and values do not compile, and the message names the expected ones:
/// ```compile_fail
/// lowtide_heap::global_allocator!(lowmemory);
/// ```
/// ```compile_fail
/// lowtide_heap::global_allocator!(balanced, dirty_decay_ms: 0); // 5 to 8 times the CPU
/// ```
/// ```compile_fail
/// lowtide_heap::global_allocator!(balanced, hpa: true); // twice the memory at rest
/// ```
/// ```compile_fail
/// lowtide_heap::global_allocator!(balanced, narenas: 5000); // 1 to 4094
/// ```
/// ```compile_fail
/// lowtide_heap::global_allocator!(balanced, arenas: 8); // jemalloc calls it narenas
/// ```
///
/// # In a library that is loaded at run time
///
/// A shared library for `dlopen`, such as a Python extension, needs the feature
/// `disable_initial_exec_tls`; without it, loading fails with "cannot allocate memory in static TLS
/// block". jemalloc's threads run on after `dlclose`, so on Linux with glibc the library marks
/// itself as not to be unloaded, like one that was linked with `-z nodelete`.
///
/// # If unsafe code is forbidden
///
/// It compiles under `#![forbid(unsafe_code)]` too: the compiler does not report that lint inside
/// macros of other crates, and the exported static is the only unsafe code of the expansion. For
/// stricter rules, docs/TUNING.md has three other ways: allocator and macro in a separate crate,
/// which the binary names (`use that_crate as _;`); the environment variable `_RJEM_MALLOC_CONF`;
/// and `JEMALLOC_SYS_WITH_MALLOC_CONF` in the `[env]` of `.cargo/config.toml`, which is built into
/// jemalloc.
#[macro_export]
macro_rules! global_allocator {
    ($($profile:tt)*) => {
        #[global_allocator]
        static LOWTIDE_HEAP: $crate::Heap = $crate::Heap;
        $crate::jemalloc_conf!($($profile)*);
    };
}

/// Exports the settings of [`global_allocator!`](crate::global_allocator) without the allocator:
/// for a global allocator of your own that wraps [`Heap`](crate::Heap).
///
/// ```
/// use lowtide_heap::Heap;
///
/// #[global_allocator]
/// static ALLOCATOR: Heap = Heap; // or one that counts, and calls it
/// lowtide_heap::jemalloc_conf!(balanced, narenas: 2);
/// ```
#[macro_export]
macro_rules! jemalloc_conf {
    (low_memory $($own:tt)*) => {
        $crate::__export_conf!(LowMemory $($own)*);
    };
    (balanced $($own:tt)*) => {
        $crate::__export_conf!(Balanced $($own)*);
    };
    (throughput $($own:tt)*) => {
        $crate::__export_conf!(Throughput $($own)*);
    };
    ($($other:tt)*) => {
        ::core::compile_error!("expected one of the names low_memory, balanced, throughput");
    };
}

/// The expansion of [`jemalloc_conf!`](crate::jemalloc_conf); don't use it directly.
#[doc(hidden)]
#[macro_export]
macro_rules! __export_conf {
    ($profile:ident $(, $name:ident : $value:tt)* $(,)?) => {
        const _: () = {
            const TEXT: &$crate::ConfText = &$crate::ConfText::of(
                $crate::HeapProfile::$profile,
                &[$((::core::stringify!($name), ::core::stringify!($value))),*],
            );
            #[used]
            #[unsafe(export_name = "_rjem_malloc_conf")]
            static PREFIXED: $crate::ConfSymbol =
                $crate::ConfSymbol::new(TEXT.as_c_str());
            #[used]
            #[unsafe(export_name = "malloc_conf")]
            static PLAIN: $crate::ConfSymbol =
                $crate::ConfSymbol::new(TEXT.as_c_str());
        };
    };
    ($profile:ident $($other:tt)*) => {
        ::core::compile_error!(
            "expected settings after the name, each as `setting: value` with a literal value, \
             separated by commas, such as global_allocator!(balanced, narenas: 8)"
        );
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The last one is a bug: after a burst of which nothing survived, low-memory kept half as much
    /// again as balanced.
    #[test]
    fn no_profile_asks_for_what_costs_more_than_it_gives() {
        for profile in HeapProfile::ALL {
            let conf = profile.conf().to_str().unwrap();
            let settings: Vec<_> = conf.split(',').map(|s| s.split_once(':').unwrap()).collect();
            assert!(!settings.iter().any(|(key, _)| *key == "hpa"), "{conf}");
            assert!(!settings.contains(&("dirty_decay_ms", "0")), "{conf}");
            assert!(!settings.iter().any(|(key, _)| *key == "slab_sizes"), "{conf}");
            assert!(settings.contains(&("background_thread", "true")), "{conf}");
            assert!(!conf.contains(char::is_whitespace), "{conf}");
        }
    }

    #[test]
    fn conf_and_settings_say_the_same() {
        for profile in HeapProfile::ALL {
            let conf = profile.conf().to_str().unwrap();
            let settings = profile.settings();
            let DecayTime::Within(dirty) = settings.dirty_decay else { panic!("{profile}") };
            assert!(conf.contains(&format!("dirty_decay_ms:{}", dirty.as_millis())), "{conf}");
            assert_eq!(settings.muzzy_decay, DecayTime::AtOnce);
            assert!(conf.contains("muzzy_decay_ms:0"), "{conf}");
            let threads = settings.max_background_threads;
            let threads = threads.map(|count| format!("max_background_threads:{count}"));
            assert!(threads.is_none_or(|text| conf.contains(&text)), "{conf}");
        }
    }
}
