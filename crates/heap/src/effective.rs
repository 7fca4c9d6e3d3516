//! The configuration that took effect when the process started, read back from jemalloc.
//!
//! jemalloc reports a bad or misnamed setting at most on standard error and continues, so the
//! requested text proves nothing. This module only reads: comparing is
//! [`EffectiveConf::differences_from`], and changing settings at run time is
//! [`apply`](super::apply). It reads one file of the kernel, never the environment: jemalloc
//! reports what it read there.
//!
//! Invariant: every field is an answer of jemalloc or the kernel.

use std::fmt;

use lowtide_core::bytes::ByteSize;
use lowtide_core::decay::DecayTime;
use lowtide_core::kernel::page_size;

use super::conf::{background_threads_supported, decay_from_ms};
use super::error::HostError;
use super::mallctl::{self as ctl, Key, Text};
use super::{allocator, conf};

/// jemalloc's configuration as it took effect at start. Displayed in one line.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(clippy::struct_excessive_bools, reason = "each is jemalloc's own switch")]
#[non_exhaustive]
pub struct EffectiveConf {
    /// jemalloc's version.
    pub version: &'static str,
    /// `true` if Rust's allocations reach it.
    pub is_global: bool,
    /// `true` if C's allocations reach it.
    pub serves_c: bool,
    /// The configuration string in the binary (as of `global_allocator!`), if jemalloc found one.
    /// Later sources may have overridden parts of it: `conf_of_symlink`, `conf_of_variable` and
    /// `conf_of_harder`.
    pub conf_of_binary: Option<&'static str>,
    /// The string set when jemalloc was built; read before the binary's.
    pub conf_of_build: Option<&'static str>,
    /// The name that the symbolic link `/etc/_rjem_malloc.conf` refers to (`/etc/malloc.conf` if
    /// jemalloc serves C).
    pub conf_of_symlink: Option<String>,
    /// The value of the environment variable at start.
    pub conf_of_variable: Option<String>,
    /// The string under the binary's second symbol, which overrides all others.
    pub conf_of_harder: Option<&'static str>,
    /// The number of automatic arenas (`opt.narenas`), over which threads are spread.
    pub arenas_at_start: u32,
    /// The number of arena indices that exist now, initialised or not.
    pub arenas: u32,
    /// `true` if threads cache freed blocks.
    pub thread_caches: bool,
    /// The size of the largest block that they cache.
    pub thread_cache_max: ByteSize,
    /// jemalloc's page size; at least the kernel's.
    pub page: ByteSize,
    /// The kernel's page size; zero if unknown.
    pub kernel_page: ByteSize,
    /// The kernel's mode for huge pages: `always`, `madvise`, `never`.
    pub kernel_thp: Option<&'static str>,
    /// `true` if blocks of every small size use the fewest pages that fit (`slab_sizes:1-16384:1`);
    /// `false` for any other layout.
    pub one_page_groups: Option<bool>,
    /// jemalloc's mode for huge pages: `default`, `always`, `never`.
    pub thp: &'static str,
    /// Huge pages for its metadata: `disabled`, `auto`, `always`.
    pub metadata_thp: &'static str,
    /// `true` if it adds a page to blocks of 16 KiB and more, so that they start at varying
    /// offsets.
    pub cache_oblivious: bool,
    /// One arena per CPU: `disabled`, `percpu`, `phycpu`.
    pub percpu_arena: &'static str,
    /// `true` if its huge-page allocator is on.
    pub hpa: bool,
    /// `true` if it keeps address space without memory behind it.
    pub retain: bool,
    /// Dirty decay at start.
    pub dirty_decay: DecayTime,
    /// Muzzy decay at start.
    pub muzzy_decay: DecayTime,
    /// `true` if this build supports background threads.
    pub background_threads_supported: bool,
    /// `true` if they were on at start.
    pub background_threads: bool,
    /// The maximum number of background threads, fixed at start.
    pub max_background_threads: u32,
    /// `true` if the heap profiler was built in.
    pub profiler: bool,
}

/// Reads the configuration in effect. Takes 10 to 50 us: one file of the kernel and
/// about 100 controls.
///
/// # Errors
/// [`HostError::Mallctl`] if jemalloc refuses a control.
pub fn effective() -> Result<EffectiveConf, HostError> {
    let serves_c = allocator::serves_c();
    Ok(EffectiveConf {
        version: text(&ctl::VERSION)?,
        is_global: allocator::is_global(),
        serves_c,
        // Each is refused (ENOENT) if there is none.
        conf_of_binary: ctl::OPT_CONF_FROM_BINARY.read().unwrap_or(None),
        conf_of_build: ctl::CONFIG_CONF.read().unwrap_or(None).filter(|text| !text.is_empty()),
        conf_of_symlink: ctl::OPT_CONF_FROM_SYMLINK.copy().unwrap_or(None),
        conf_of_variable: ctl::OPT_CONF_FROM_VARIABLE.copy().unwrap_or(None),
        conf_of_harder: ctl::OPT_CONF_FROM_HARDER.read().unwrap_or(None),
        arenas_at_start: ctl::OPT_ARENAS.read()?,
        arenas: ctl::ARENAS_COUNT.read()?,
        thread_caches: ctl::OPT_THREAD_CACHE.read()?,
        thread_cache_max: ByteSize::of(ctl::OPT_THREAD_CACHE_MAX.read()?),
        page: ByteSize::of(ctl::ARENAS_PAGE.read()?),
        kernel_page: page_size().unwrap_or_default(),
        kernel_thp: kernel_thp(),
        one_page_groups: one_page_groups().ok(),
        thp: text(&ctl::OPT_THP)?,
        metadata_thp: text(&ctl::OPT_METADATA_THP)?,
        cache_oblivious: ctl::OPT_CACHE_OBLIVIOUS.read()?,
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

/// Returns `true` if every small size has the fewest pages that one block of it needs.
fn one_page_groups() -> Result<bool, HostError> {
    let page = ctl::ARENAS_PAGE.read()?;
    for class in 0..ctl::ARENAS_CLASSES.read()? {
        let size = ctl::CLASS_SIZE.read_class(class)?;
        let group = ctl::CLASS_GROUP_BYTES.read_class(class)?;
        if group > size.next_multiple_of(page.max(1)) {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Returns the kernel's mode for huge pages: the word in brackets.
fn kernel_thp() -> Option<&'static str> {
    let text = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled").ok()?;
    let modes = ["always", "madvise", "never"];
    modes.into_iter().find(|mode| text.contains(&format!("[{mode}]")))
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
        let variable = &self.conf_of_variable;
        let variable =
            variable.as_ref().map_or_else(|| "unset".to_owned(), |conf| format!("{conf:?}"));
        write!(
            f,
            "jemalloc {} global={} serves_c={} arenas={} tcache_max={cache} page={} thp={} \
             metadata_thp={} cache_oblivious={} percpu_arena={} hpa={} retain={} dirty_decay={} \
             muzzy_decay={} background_threads=({threads}) profiler={} conf_of_binary={:?} \
             {}={variable}",
            self.version,
            yes(self.is_global),
            yes(self.serves_c),
            self.arenas_at_start,
            self.page.exact(),
            self.thp,
            self.metadata_thp,
            yes(self.cache_oblivious),
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
}
