//! The three named heap profiles, and the macro that puts one into a binary.
//!
//! jemalloc fixes its arena count, block layout and thread-cache size before `main`, from a string
//! under a symbol of the binary. The macro exports that symbol. A library must not: two of them do
//! not link. [`HeapSettings`] has the settings that can change later. The settings that may
//! override a profile, and their checks, are in `KNOBS`.
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
                  dirty_decay_ms:1000,muzzy_decay_ms:0,thp:default,metadata_thp:disabled,\
                  cache_oblivious:false"
            }
            Self::Throughput => {
                c"background_thread:true,narenas:default,dirty_decay_ms:10000,muzzy_decay_ms:0,\
                  thp:default,metadata_thp:disabled,cache_oblivious:true"
            }
        }
    }

    /// The same as text; it is ASCII.
    pub(super) fn text(self) -> &'static str {
        self.conf().to_str().unwrap_or_default()
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
/// assert_eq!(lowtide_heap::effective().unwrap().get("narenas"), Some("3"));
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
/// | `tcache_nslots_small_min` | blocks, 1 to 200 |
/// | `tcache_nslots_large` | blocks, 1 to 2048 |
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
            const TEXT: &[u8; $crate::CONF_TEXT_MAX] = &$crate::conf_text(
                $crate::HeapProfile::$profile,
                &[$((::core::stringify!($name), ::core::stringify!($value))),*],
            );
            #[used]
            #[unsafe(export_name = "_rjem_malloc_conf")]
            static PREFIXED: &[u8; $crate::CONF_TEXT_MAX] = TEXT;
            #[used]
            #[unsafe(export_name = "malloc_conf")]
            static PLAIN: &[u8; $crate::CONF_TEXT_MAX] = TEXT;
        };
    };
    ($profile:ident $($other:tt)*) => {
        ::core::compile_error!(
            "expected settings after the name, each as `setting: value` with a literal value, \
             separated by commas, such as global_allocator!(balanced, narenas: 8)"
        );
    };
}

// jemalloc's settings that this crate supports: one table, which the macro
// [`jemalloc_conf!`](crate::jemalloc_conf) checks and writes a string by at compile time.
//
// Left out on purpose: `hpa` (twice the memory at rest), and a dirty decay of 0 (5 to 8 times the
// CPU).
//
// Invariant: jemalloc accepts every setting that the macro accepts.

/// One setting.
struct Knob {
    /// jemalloc's name for it.
    name: &'static str,
    takes: Takes,
    /// The message for other values.
    expected: &'static str,
}

enum Takes {
    /// A whole number, both ends included.
    Number(u64, u64),
    /// One of these words, separated by `|`.
    Word(&'static str),
}

macro_rules! knob {
    ($name:literal, $min:literal, $max:literal, $unit:literal) => {
        Knob {
            name: $name,
            takes: Takes::Number($min, $max),
            expected: concat!($name, " takes a whole number", $unit, " from ", $min, " to ", $max),
        }
    };
    ($name:literal, $words:literal) => {
        Knob {
            name: $name,
            takes: Takes::Word($words),
            expected: concat!($name, " takes ", $words),
        }
    };
}

/// The table. Bounds are jemalloc's own (5.3.1, `conf.c`; `tcache_nslots_small_max` of `tcache.c`) but
/// for those of the decay times: longer than an hour is most likely a wrong unit, which is a guess.
const KNOBS: &[Knob] = &[
    knob!("background_thread", "true|false"),
    knob!("max_background_threads", 1, 64, ""),
    knob!("narenas", 1, 4094, ""),
    knob!("tcache_max", 8, 32_768, " of bytes"),
    knob!("tcache_nslots_small_min", 1, 200, ""),
    knob!("tcache_nslots_large", 1, 2048, ""),
    knob!("dirty_decay_ms", 1, 3_600_000, " of ms (0 would cost 5 to 8 times the CPU)"),
    knob!("muzzy_decay_ms", 0, 3_600_000, " of ms"),
    knob!("thp", "default|always|never"),
    knob!("metadata_thp", "disabled|auto|always"),
    knob!("slab_sizes", "default|one_page"),
    knob!("cache_oblivious", "true|false"),
    knob!("prof", "true|false"),
    knob!("lg_prof_sample", 19, 30, " (2^19 bytes = 512 KiB, 2^23 = 8 MiB)"),
];

/// jemalloc's value for `slab_sizes: one_page`: the fewest pages for every small size.
const ONE_PAGE: &[u8] = b"1-16384:1";

const NO_PROFILER: &str = "prof and lg_prof_sample need the feature `profiling`";
const UNKNOWN: &str = "expected a setting of background_thread, \
                       max_background_threads, narenas, tcache_max, tcache_nslots_small_min, \
                       tcache_nslots_large, dirty_decay_ms, muzzy_decay_ms, thp, metadata_thp, \
                       slab_sizes, cache_oblivious, prof, lg_prof_sample";
const HPA: &str = "hpa is not offered: it keeps twice the memory at rest";
const TWICE: &str = "duplicate setting; expected each at most once";

/// Returns the setting of this name. Panics if the macro does not take it.
const fn knob(name: &[u8]) -> &'static Knob {
    let is_of_profiler = same(name, b"prof") || same(name, b"lg_prof_sample");
    if is_of_profiler && !cfg!(feature = "profiling") {
        panic!("{}", NO_PROFILER);
    }
    let mut at = 0;
    while at < KNOBS.len() {
        if same(KNOBS[at].name.as_bytes(), name) {
            return &KNOBS[at];
        }
        at += 1;
    }
    panic!("{}", if same(name, b"hpa") { HPA } else { UNKNOWN })
}

/// The bytes of a configuration string, NULs at its end included; all settings together take some
/// 250.
#[doc(hidden)]
pub const CONF_TEXT_MAX: usize = 512;

/// Returns the string of a profile with custom settings, which replace the profile's or follow
/// them. It ends in a NUL.
///
/// # Panics
/// At compile time, if a setting is invalid; the message names the setting and the expected value.
#[doc(hidden)]
#[must_use]
pub const fn conf_text(profile: HeapProfile, own: &[(&str, &str)]) -> [u8; CONF_TEXT_MAX] {
    let mut text = ConfText { bytes: [0; CONF_TEXT_MAX], len: 0 };
    let (mut rest, mut written) = (profile.conf().to_bytes(), 0_u64);
    while !rest.is_empty() {
        let (setting, after) = cut(rest, b',');
        match position(own, cut(setting, b':').0) {
            Some(at) => {
                text.push_setting(own[at].0, own[at].1);
                written |= 1 << at;
            }
            None => text.push(setting),
        }
        rest = after;
    }
    let mut at = 0;
    while at < own.len() {
        match position(own, own[at].0.as_bytes()) {
            Some(first) if first != at => panic!("{}", TWICE),
            _ if written >> at & 1 == 1 => {}
            _ => text.push_setting(own[at].0, own[at].1),
        }
        at += 1;
    }
    text.bytes
}

/// A configuration string, built at compile time. Its functions panic with the expected value.
struct ConfText {
    bytes: [u8; CONF_TEXT_MAX],
    len: usize,
}

impl ConfText {
    /// Appends one setting as it stands in the source, checked.
    const fn push_setting(&mut self, name: &str, value: &str) {
        let knob = knob(name.as_bytes());
        self.push(name.as_bytes());
        self.push_bytes(b":");
        let value = value.as_bytes();
        match knob.takes {
            Takes::Number(least, most) => match digits(value) {
                Some(number) if least <= number && number <= most => self.push_number(number),
                _ => panic!("{}", knob.expected),
            },
            Takes::Word(words) => {
                let mut rest = words.as_bytes();
                while !rest.is_empty() {
                    let (word, after) = cut(rest, b'|');
                    if same(word, value) {
                        self.push_bytes(if same(word, b"one_page") { ONE_PAGE } else { word });
                        return;
                    }
                    rest = after;
                }
                panic!("{}", knob.expected)
            }
        }
    }

    /// Appends after a comma, if the text is not empty.
    const fn push(&mut self, setting: &[u8]) {
        // Room for a value of any length that passes its check.
        assert!(self.len + setting.len() + 32 <= CONF_TEXT_MAX, "the settings are too long");
        if self.len > 0 {
            self.push_bytes(b",");
        }
        self.push_bytes(setting);
    }

    const fn push_bytes(&mut self, bytes: &[u8]) {
        let mut at = 0;
        while at < bytes.len() {
            self.bytes[self.len] = bytes[at];
            self.len += 1;
            at += 1;
        }
    }

    /// Appends a number in decimal digits, as jemalloc reads it.
    const fn push_number(&mut self, number: u64) {
        if number >= 10 {
            self.push_number(number / 10);
        }
        self.push_bytes(&[b'0' + (number % 10).to_le_bytes()[0]]);
    }
}

/// A number of Rust's, in decimal digits and underscores.
const fn digits(text: &[u8]) -> Option<u64> {
    let (mut number, mut at) = (0_u64, 0);
    while at < text.len() {
        let digit = text[at];
        if digit.is_ascii_digit() {
            number = number.saturating_mul(10).saturating_add((digit - b'0') as u64);
        } else if digit != b'_' || at == 0 {
            return None;
        }
        at += 1;
    }
    if text.is_empty() { None } else { Some(number) }
}

/// Returns the text before and after the first such byte.
const fn cut(text: &[u8], by: u8) -> (&[u8], &[u8]) {
    let mut at = 0;
    while at < text.len() {
        if text[at] == by {
            let (before, after) = text.split_at(at);
            let (_, after) = after.split_at(1);
            return (before, after);
        }
        at += 1;
    }
    (text, &[])
}

/// Returns the first position of a setting of this name.
const fn position(own: &[(&str, &str)], name: &[u8]) -> Option<usize> {
    let mut at = 0;
    while at < own.len() {
        if same(own[at].0.as_bytes(), name) {
            return Some(at);
        }
        at += 1;
    }
    None
}

const fn same(one: &[u8], other: &[u8]) -> bool {
    let mut at = 0;
    while at < one.len() && at < other.len() {
        if one[at] != other[at] {
            return false;
        }
        at += 1;
    }
    one.len() == other.len()
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

#[cfg(test)]
mod knobs_tests {
    use super::*;

    fn composed(profile: HeapProfile, own: &[(&str, &str)]) -> Result<String, String> {
        let text = lowtide_core::sync::caught(|| conf_text(profile, own))?;
        Ok(CStr::from_bytes_until_nul(&text).unwrap().to_str().unwrap().to_owned())
    }

    #[test]
    fn a_profile_alone_is_its_own_string() {
        for profile in HeapProfile::ALL {
            assert_eq!(composed(profile, &[]).as_deref(), Ok(profile.conf().to_str().unwrap()));
        }
    }

    #[test]
    fn own_settings_stand_in_place_of_the_profiles_or_after_them() {
        let own = [("tcache_max", "8_192"), ("narenas", "8"), ("slab_sizes", "one_page")];
        assert_eq!(
            composed(HeapProfile::Balanced, &own).as_deref(),
            Ok("background_thread:true,max_background_threads:2,narenas:8,dirty_decay_ms:1000,\
                muzzy_decay_ms:0,thp:default,metadata_thp:disabled,cache_oblivious:false,\
                tcache_max:8192,slab_sizes:1-16384:1")
        );
        let all: Vec<_> = KNOBS.iter().map(|knob| (knob.name, widest(knob))).collect();
        let all = if cfg!(feature = "profiling") { &*all } else { &all[..KNOBS.len() - 2] };
        for profile in HeapProfile::ALL {
            let text = composed(profile, all).unwrap();
            assert_eq!(text.split(',').count(), all.len(), "{text}");
        }
    }

    /// The longest value that passes.
    fn widest(knob: &Knob) -> &'static str {
        match knob.takes {
            Takes::Number(_, most) => match most {
                30 => "30",
                64 => "64",
                200 => "200",
                2048 => "2_048",
                4094 => "4_094",
                32_768 => "0000000032768",
                _ => "3_600_000",
            },
            Takes::Word(words) => words.rsplit('|').next().unwrap(),
        }
    }

    #[test]
    fn a_bad_setting_is_refused_with_what_was_expected() {
        for (own, part) in [
            (("narenas", "0"), "narenas takes a whole number from 1 to 4094"),
            (("narenas", "4095"), "from 1 to 4094"),
            (("narenas", "eight"), "from 1 to 4094"),
            (("narenas", "8usize"), "from 1 to 4094"),
            (("narenas", "0x8"), "from 1 to 4094"),
            (("narenas", "99999999999999999999999"), "from 1 to 4094"),
            (("dirty_decay_ms", "0"), "5 to 8 times the CPU"),
            (("dirty_decay_ms", "1000.5"), "whole number of ms"),
            (("tcache_max", "7"), "of bytes from 8 to 32768"),
            (("tcache_nslots_small_min", "201"), "from 1 to 200"),
            (("thp", "sometimes"), "default|always|never"),
            (("background_thread", "yes"), "true|false"),
            (("slab_sizes", "two_pages"), "default|one_page"),
            (("hpa", "true"), "twice the memory"),
            (("arenas", "8"), "expected a setting of background_thread"),
            (("", ""), "expected a setting of"),
        ] {
            let error = composed(HeapProfile::Balanced, &[own]).expect_err("refused");
            assert!(error.contains(part), "{own:?}: {error}");
        }
        let twice = [("narenas", "2"), ("narenas", "4")];
        assert_eq!(composed(HeapProfile::Balanced, &twice), Err(TWICE.to_owned()));
        let twice = [("tcache_max", "64"), ("tcache_max", "64")];
        assert_eq!(composed(HeapProfile::Balanced, &twice), Err(TWICE.to_owned()));
    }

    #[test]
    fn the_profiler_is_set_only_in_a_build_that_has_it() {
        let own = [("prof", "true"), ("lg_prof_sample", "23")];
        let composed = composed(HeapProfile::Throughput, &own);
        if cfg!(feature = "profiling") {
            let text = composed.unwrap();
            assert!(text.ends_with(",prof:true,lg_prof_sample:23"), "{text}");
        } else {
            assert_eq!(composed, Err(NO_PROFILER.to_owned()));
        }
    }

    #[test]
    fn what_the_macro_says_is_what_the_table_checks() {
        assert!(KNOBS.iter().all(|knob| UNKNOWN.contains(knob.name)));
    }
}
