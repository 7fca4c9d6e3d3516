//! What configuration took effect when the process started, read back from jemalloc.
//!
//! jemalloc reports a bad or misnamed setting at most on standard error and runs on, so what was
//! asked for proves nothing. It reads and sets nothing; what can change while the process runs is
//! told by [`apply`](super::apply).
//!
//! Invariant: every field is jemalloc's own answer.

use std::fmt;

use crate::bytes::ByteSize;
use crate::decay::DecayTime;

use super::conf::{Difference, background_threads_supported, decay_from_ms};
use super::error::HostError;
use super::mallctl::{self as ctl, Key, Text};
use super::profile::HeapProfile;
use super::{allocator, conf};

/// jemalloc's configuration as it took effect at start. Displayed in one line.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(clippy::struct_excessive_bools, reason = "each is jemalloc's own switch")]
pub struct EffectiveConf {
    /// jemalloc's version.
    pub version: &'static str,
    /// Whether Rust's allocations reach it.
    pub is_global: bool,
    /// Whether C's do.
    pub serves_c: bool,
    /// The string that the binary carries for jemalloc (as `heap_profile!` does), where it found
    /// one. The environment may have overridden parts of it.
    pub conf_of_binary: Option<&'static str>,
    /// Automatic arenas (`opt.narenas`), among which threads are spread.
    pub arenas_at_start: u32,
    /// Arena indices that exist now, initialised or not.
    pub arenas: u32,
    /// Whether threads cache freed blocks.
    pub thread_caches: bool,
    /// The largest block that they cache.
    pub thread_cache_max: ByteSize,
    /// jemalloc's own page; not below the kernel's.
    pub page: ByteSize,
    /// What it does about huge pages: `default`, `always`, `never`.
    pub thp: &'static str,
    /// Huge pages for its own books: `disabled`, `auto`, `always`.
    pub metadata_thp: &'static str,
    /// Whether arenas go with CPUs: `disabled`, `percpu`, `phycpu`.
    pub percpu_arena: &'static str,
    /// Whether its huge-page allocator is on.
    pub hpa: bool,
    /// Whether it keeps address space that has nothing behind it.
    pub retain: bool,
    /// Dirty decay at start.
    pub dirty_decay: DecayTime,
    /// Muzzy decay at start.
    pub muzzy_decay: DecayTime,
    /// Whether background threads are possible in this build.
    pub background_threads_supported: bool,
    /// Whether they were on at start.
    pub background_threads: bool,
    /// The most of them, fixed at start.
    pub max_background_threads: u32,
    /// Whether the heap profiler was built in.
    pub profiler: bool,
}

/// Reads what took effect.
///
/// # Errors
/// [`HostError::Mallctl`] where jemalloc refuses a control.
pub fn effective() -> Result<EffectiveConf, HostError> {
    Ok(EffectiveConf {
        version: text(&ctl::VERSION)?,
        is_global: allocator::is_global(),
        serves_c: allocator::serves_c(),
        // Refused (ENOENT) where the binary carries none.
        conf_of_binary: ctl::OPT_CONF_FROM_BINARY.read().unwrap_or(None),
        arenas_at_start: ctl::OPT_ARENAS.read()?,
        arenas: ctl::ARENAS_COUNT.read()?,
        thread_caches: ctl::OPT_THREAD_CACHE.read()?,
        thread_cache_max: ByteSize::of(ctl::OPT_THREAD_CACHE_MAX.read()?),
        page: ByteSize::of(ctl::ARENAS_PAGE.read()?),
        thp: text(&ctl::OPT_THP)?,
        metadata_thp: text(&ctl::OPT_METADATA_THP)?,
        percpu_arena: text(&ctl::OPT_PERCPU_ARENA)?,
        hpa: ctl::OPT_HPA.read()?,
        retain: ctl::OPT_RETAIN.read()?,
        dirty_decay: decay_from_ms(ctl::OPT_DIRTY_DECAY.read()?),
        muzzy_decay: decay_from_ms(ctl::OPT_MUZZY_DECAY.read()?),
        background_threads_supported: background_threads_supported(),
        background_threads: ctl::OPT_BACKGROUND_THREAD.read()?,
        max_background_threads: u32::try_from(ctl::OPT_MAX_BACKGROUND_THREADS.read()?)
            .unwrap_or(u32::MAX),
        profiler: ctl::CONFIG_PROF.read()?,
    })
}

fn text<const N: usize>(key: &Key<Text, N>) -> Result<&'static str, HostError> {
    Ok(key.read()?.unwrap_or("unknown"))
}

impl EffectiveConf {
    /// The environment variable from which this jemalloc reads its configuration at start.
    #[must_use]
    pub const fn variable(&self) -> &'static str {
        if self.serves_c { "MALLOC_CONF" } else { "_RJEM_MALLOC_CONF" }
    }

    /// What a profile fixes at start and is otherwise in this process: empty when the process was
    /// started with it. Set by the macro [`heap_profile!`](crate::heap_profile), or by
    /// [`variable`](Self::variable) with the profile's string.
    ///
    /// Block layout (`slab_sizes`) cannot be read back, and what can be set later is not compared.
    #[must_use]
    pub fn differences_from(&self, profile: HeapProfile) -> Vec<Difference> {
        let conf = profile.conf().to_str().unwrap_or("");
        let asked = conf.split(',').filter_map(|setting| setting.split_once(':'));
        let found = |name: &str| match name {
            "narenas" => Some(("narenas", self.arenas_at_start.to_string())),
            "tcache_max" => Some(("tcache_max", self.thread_cache_max.get().to_string())),
            "thp" => Some(("thp", self.thp.to_owned())),
            "metadata_thp" => Some(("metadata_thp", self.metadata_thp.to_owned())),
            _ => None,
        };
        asked
            .filter_map(|(name, value)| found(name).map(|(name, found)| (name, value, found)))
            .filter(|(_, asked, found)| asked != found)
            .map(|(setting, asked, found)| Difference {
                setting,
                asked: asked.to_owned(),
                found,
                cause: format!("fixed at start: start the process with {}={conf}", self.variable()),
            })
            .collect()
    }
}

impl fmt::Display for EffectiveConf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let yes = |value| if value { "yes" } else { "no" };
        let threads = match (self.background_threads_supported, self.background_threads) {
            (false, _) => "unsupported".to_owned(),
            (true, true) => format!("on, at most {}", self.max_background_threads),
            (true, false) => "off".to_owned(),
        };
        let cache = if self.thread_caches { self.thread_cache_max.exact() } else { "off".into() };
        write!(
            f,
            "jemalloc {} global={} serves_c={} arenas={} tcache_max={cache} page={} thp={} \
             metadata_thp={} percpu_arena={} hpa={} retain={} dirty_decay={} muzzy_decay={} \
             background_threads=({threads}) profiler={} conf_of_binary={:?} variable={}",
            self.version,
            yes(self.is_global),
            yes(self.serves_c),
            self.arenas_at_start,
            self.page.exact(),
            self.thp,
            self.metadata_thp,
            self.percpu_arena,
            yes(self.hpa),
            yes(self.retain),
            conf::decay_text(self.dirty_decay),
            conf::decay_text(self.muzzy_decay),
            yes(self.profiler),
            self.conf_of_binary.unwrap_or(""),
            self.variable(),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_took_effect_is_one_line() {
        let line = effective().unwrap().to_string();
        assert!(line.starts_with("jemalloc 5."), "{line}");
        assert_eq!(line.lines().count(), 1);
    }

    #[test]
    fn a_difference_names_the_variable_and_the_string_to_set() {
        let found = EffectiveConf {
            arenas_at_start: 4,
            thread_cache_max: ByteSize::kib(32),
            thp: "default",
            metadata_thp: "disabled",
            serves_c: false,
            ..effective().unwrap()
        };
        let settings: Vec<_> =
            found.differences_from(HeapProfile::LowMemory).iter().map(|d| d.setting).collect();
        assert_eq!(settings, ["narenas", "tcache_max", "thp"]);
        let differences = found.differences_from(HeapProfile::LowMemory);
        assert_eq!((&*differences[0].asked, &*differences[0].found), ("2", "4"));
        assert!(differences[0].cause.contains("_RJEM_MALLOC_CONF=background_thread:true"));
        assert!(found.differences_from(HeapProfile::Balanced).is_empty());
        assert!(found.differences_from(HeapProfile::Throughput).is_empty());
        let interposed = EffectiveConf { serves_c: true, ..found };
        assert_eq!(interposed.variable(), "MALLOC_CONF");
    }
}
