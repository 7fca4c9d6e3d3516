//! The three named sets of heap settings, and the macro that puts one into a binary.
//!
//! jemalloc fixes its arena count, block layout and thread-cache size before `main`, from a string
//! that it finds under a symbol of the binary. The macro exports that symbol; a library must not,
//! because two of them do not link. What can be changed later is in
//! [`HeapSettings`]. Which settings may stand on top of a profile, and their checks, are in
//! `knobs`.
//!
//! Left out on purpose: a dirty decay of 0 (5 to 8 times the CPU), `hpa` (twice the memory at
//! rest), and block groups of one page (`slab_sizes`): jemalloc keeps 128 bytes of metadata for
//! each group of the peak, so that a burst of small blocks leaves more behind than it saves.
//!
//! Invariant: the decay times in `conf` are those in `settings`.

use std::ffi::CStr;
use std::fmt;
use std::time::Duration;

use crate::decay::DecayTime;

use super::conf::HeapSettings;

/// A named set of heap settings.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum HeapProfile {
    /// The least memory at rest: 2 arenas, no huge pages.
    LowMemory,
    /// Memory goes a second after the traffic: 4 arenas. In the bench 20 to 34 % more CPU than
    /// jemalloc's defaults over a burst of 5 s, nothing that showed over 20 s of traffic.
    Balanced,
    /// Memory goes ten seconds after the traffic; jemalloc's own arena count.
    Throughput,
}

impl HeapProfile {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::LowMemory, Self::Balanced, Self::Throughput];

    /// The name, as in [`heap_profile!`](crate::heap_profile).
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::LowMemory => "low_memory",
            Self::Balanced => "balanced",
            Self::Throughput => "throughput",
        }
    }

    /// The string for jemalloc's configuration symbol.
    ///
    /// 4 arenas and 2 background threads are guesses; the rest is measured.
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

    /// The part of it that can be set while the process runs.
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

impl fmt::Display for HeapProfile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Fixes what jemalloc can be told only before `main`: `low_memory`, `balanced` or `throughput`,
/// and settings of one's own on top.
///
/// Once, in the binary (a second one does not link), beside the global allocator. It exports the
/// profile's string (see [`HeapProfile::conf`](crate::host::HeapProfile::conf)) as
/// `_rjem_malloc_conf` and as `malloc_conf`, because jemalloc looks for the second where it serves
/// C code as well (feature `interpose`, which any dependency may switch on). Whoever starts the
/// process can override it with the variable `_RJEM_MALLOC_CONF` or, in that case, `MALLOC_CONF`.
/// [`effective`](crate::host::effective) tells what came of it.
///
/// ```
/// #[global_allocator]
/// static HEAP: lowtide::host::Heap = lowtide::host::Heap;
/// lowtide::heap_profile!(low_memory, narenas: 3, dirty_decay_ms: 2_000);
///
/// assert_eq!(lowtide::host::effective().unwrap().arenas_at_start, 3);
/// ```
///
/// # Settings
///
/// Each by jemalloc's name, once, with a literal value; docs/TUNING.md says what each costs.
///
/// | setting | value |
/// |---|---|
/// | `background_thread` | `true`, `false` |
/// | `max_background_threads` | 1 to 64; what a later place says can only lower it |
/// | `narenas` | 1 to 4094 |
/// | `tcache_max` | bytes, 8 to 32768 |
/// | `dirty_decay_ms` | ms, 1 to 3600000 |
/// | `muzzy_decay_ms` | ms, 0 to 3600000 |
/// | `thp` | `default`, `always`, `never` |
/// | `metadata_thp` | `disabled`, `auto`, `always` |
/// | `slab_sizes` | `default`, `one_page` |
/// | `cache_oblivious` | `true`, `false` |
///
/// Anything else does not compile, and the message says what was expected:
/// ```compile_fail
/// lowtide::heap_profile!(lowmemory);
/// ```
/// ```compile_fail
/// lowtide::heap_profile!(balanced, dirty_decay_ms: 0); // 5 to 8 times the CPU
/// ```
/// ```compile_fail
/// lowtide::heap_profile!(balanced, hpa: true); // twice the memory at rest
/// ```
/// ```compile_fail
/// lowtide::heap_profile!(balanced, narenas: 5000); // 1 to 4094
/// ```
/// ```compile_fail
/// lowtide::heap_profile!(balanced, arenas: 8); // jemalloc calls it narenas
/// ```
///
/// # Where unsafe code is forbidden
///
/// It compiles under `#![forbid(unsafe_code)]` too: the compiler does not report that lint inside
/// macros of other crates, and the exported static is all that the expansion has of unsafe code.
/// Where a rule goes further, docs/TUNING.md has three other ways: allocator and macro in a crate
/// of their own, which the binary names (`use that_crate as _;`); the variable
/// `_RJEM_MALLOC_CONF`, set by whoever starts the process; and `JEMALLOC_SYS_WITH_MALLOC_CONF` in
/// the `[env]` of `.cargo/config.toml`, which is built into jemalloc.
#[macro_export]
macro_rules! heap_profile {
    (low_memory $($own:tt)*) => {
        $crate::__heap_profile_export!(LowMemory $($own)*);
    };
    (balanced $($own:tt)*) => {
        $crate::__heap_profile_export!(Balanced $($own)*);
    };
    (throughput $($own:tt)*) => {
        $crate::__heap_profile_export!(Throughput $($own)*);
    };
    ($($other:tt)*) => {
        ::core::compile_error!(
            "heap_profile! takes one of these names: low_memory, balanced, throughput"
        );
    };
}

/// What [`heap_profile!`](crate::heap_profile) expands to; not for use by hand.
#[doc(hidden)]
#[macro_export]
macro_rules! __heap_profile_export {
    ($profile:ident $(, $name:ident : $value:tt)* $(,)?) => {
        const _: () = {
            const TEXT: &$crate::host::ConfText = &$crate::host::ConfText::of(
                $crate::host::HeapProfile::$profile,
                &[$((::core::stringify!($name), ::core::stringify!($value))),*],
            );
            #[used]
            #[unsafe(export_name = "_rjem_malloc_conf")]
            static PREFIXED: $crate::host::ConfSymbol =
                $crate::host::ConfSymbol::new(TEXT.as_c_str());
            #[used]
            #[unsafe(export_name = "malloc_conf")]
            static PLAIN: $crate::host::ConfSymbol =
                $crate::host::ConfSymbol::new(TEXT.as_c_str());
        };
    };
    ($profile:ident $($other:tt)*) => {
        ::core::compile_error!(
            "heap_profile! takes settings after the name, each as `setting: value` with a literal \
             value, separated by commas, such as heap_profile!(balanced, narenas: 8)"
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
