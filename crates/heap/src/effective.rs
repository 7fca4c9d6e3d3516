//! The configuration that took effect when the process started, read back from jemalloc.
//!
//! jemalloc reports a bad or misnamed setting at most on standard error and continues, so the
//! requested text proves nothing. This module only reads: comparing is
//! [`EffectiveConf::differences_from`], and changing settings at run time is
//! [`apply`](super::apply). It reads one file of the kernel, never the environment: jemalloc
//! reports what it read there.
//!
//! Invariant: every field is an answer of jemalloc or the kernel.

use std::borrow::Cow;
use std::fmt;

use lowtide_core::bytes::ByteSize;
use lowtide_core::decay::DecayTime;
use lowtide_core::kernel::page_size;

use super::conf::{background_threads_supported, decay_from_ms, decay_to_ms};
use super::error::HostError;
use super::mallctl::{Key, Text};
use super::profile::{Difference, HeapProfile, KNOBS, Knob, ONE_PAGE, knob};
use super::{allocator, conf, mallctl, mallctl as ctl};

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

// The configuration that jemalloc receives at start: a profile, with custom settings on top, as a
// string. Which of it took effect is in [`EffectiveConf`](super::EffectiveConf).
//
// Invariant: a string made from a profile lists the profile's settings first, in their order.

/// A configuration string for jemalloc.
///
/// ```
/// use lowtide_heap::{HeapConf, HeapProfile};
///
/// let own = HeapConf::from(HeapProfile::Balanced).with("narenas", "8");
/// assert_eq!(own.profile(), Some(HeapProfile::Balanced));
/// assert_eq!(own.own(), [("narenas", "8")]);
/// // The same settings on top of another profile.
/// assert!(own.on(HeapProfile::LowMemory).text().contains("narenas:8,dirty_decay_ms"));
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeapConf {
    text: Cow<'static, str>,
}

impl HeapConf {
    /// Creates a configuration from any string: settings as `name:value`, separated by commas.
    #[must_use]
    pub fn new(text: impl Into<Cow<'static, str>>) -> Self {
        Self { text: text.into() }
    }

    /// Returns the string.
    #[must_use]
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Returns the profile that it was made from, recognised by the order of its settings; `None`
    /// for other strings.
    #[must_use]
    pub fn profile(&self) -> Option<HeapProfile> {
        HeapProfile::ALL.into_iter().find(|profile| {
            let mut own = settings(&self.text).map(|(name, _)| name);
            settings(text_of(*profile)).all(|(name, _)| own.next() == Some(name))
        })
    }

    /// Returns the settings that differ from its profile, as name and value; all of them if it has
    /// no profile.
    #[must_use]
    pub fn own(&self) -> Vec<(&str, &str)> {
        let profile = self.profile().map_or("", text_of);
        settings(&self.text)
            .filter(|(name, value)| last(profile, name).is_none_or(|found| found != *value))
            .collect()
    }

    /// Returns its custom settings on top of another profile.
    #[must_use]
    pub fn on(&self, profile: HeapProfile) -> Self {
        let own = self.own();
        own.iter().fold(profile.into(), |conf: Self, (name, value)| conf.with(name, value))
    }

    /// Returns the configuration with one more setting, replacing one of the same name.
    #[must_use]
    pub fn with(&self, name: &str, value: &str) -> Self {
        let mut settings: Vec<_> = settings(&self.text).collect();
        match settings.iter_mut().find(|(found, _)| *found == name) {
            Some(setting) => setting.1 = value,
            None => settings.push((name, value)),
        }
        let text: Vec<_> = settings.iter().map(|(name, value)| format!("{name}:{value}")).collect();
        Self { text: text.join(",").into() }
    }

    /// Returns its value of a setting; the last one counts.
    pub(super) fn value(&self, name: &str) -> Option<&str> {
        last(&self.text, name)
    }
}

/// The settings of a string, as name and value; the value of a piece without one is empty.
pub(super) fn settings(text: &str) -> impl Iterator<Item = (&str, &str)> {
    let pieces = text.split(',').filter(|piece| !piece.is_empty());
    pieces.map(|piece| piece.split_once(':').unwrap_or((piece, "")))
}

/// The last value that a string gives a setting.
pub(super) fn last<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    settings(text).filter(|(found, _)| *found == name).last().map(|(_, value)| value)
}

/// The profile's string; it is ASCII.
const fn text_of(profile: HeapProfile) -> &'static str {
    match profile.conf().to_str() {
        Ok(text) => text,
        Err(_) => "",
    }
}

impl From<HeapProfile> for HeapConf {
    fn from(profile: HeapProfile) -> Self {
        Self { text: text_of(profile).into() }
    }
}

impl From<&Self> for HeapConf {
    fn from(conf: &Self) -> Self {
        conf.clone()
    }
}

impl fmt::Display for HeapConf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.text)
    }
}

// Compares the requested jemalloc settings with those in effect.
//
// Works on the result of [`effective`](super::effective); it calls jemalloc only to check if a
// name exists. It changes nothing, and does not say why a setting differs.
//
// Invariant: a setting that is as requested is in no difference.

impl EffectiveConf {
    /// Returns the name of the environment variable that this jemalloc reads at start.
    #[must_use]
    pub const fn variable(&self) -> &'static str {
        if self.serves_c { "MALLOC_CONF" } else { "_RJEM_MALLOC_CONF" }
    }

    /// Returns the name of the variable that other builds of jemalloc read and this one does not.
    #[must_use]
    pub const fn unread_variable(&self) -> &'static str {
        if self.serves_c { "_RJEM_MALLOC_CONF" } else { "MALLOC_CONF" }
    }

    /// Returns the configuration of [`global_allocator!`](crate::global_allocator) in the binary,
    /// if it has one.
    #[must_use]
    pub fn requested_by_binary(&self) -> Option<HeapConf> {
        self.conf_of_binary.map(HeapConf::new)
    }

    /// Returns this profile's configuration with the binary's custom settings on top.
    #[must_use]
    pub fn requested_by(&self, profile: HeapProfile) -> HeapConf {
        let asked = self.requested_by_binary().filter(|conf| conf.profile().is_some());
        asked.map_or_else(|| profile.into(), |conf| conf.on(profile))
    }

    /// Returns the configuration that jemalloc read at start: the texts of the build, the binary,
    /// the symbolic link, the variable and the binary's second symbol. A later one overrides an
    /// earlier one, setting by setting. Empty if there was none.
    #[must_use]
    pub fn requested(&self) -> HeapConf {
        let texts = [
            self.conf_of_build,
            self.conf_of_binary,
            self.conf_of_symlink.as_deref(),
            self.conf_of_variable.as_deref(),
            self.conf_of_harder,
        ];
        HeapConf::new(texts.into_iter().flatten().collect::<Vec<_>>().join(","))
    }

    /// Returns the value of [`variable`](Self::variable) that makes this configuration effective.
    /// It resets the settings that jemalloc read at this start and that `asked` does not have.
    #[must_use]
    pub fn variable_for(&self, asked: &HeapConf) -> String {
        let read = self.requested();
        KNOBS
            .iter()
            .filter(|knob| asked.value(knob.name).is_none() && read.value(knob.name).is_some())
            .filter_map(|knob| knob.default.map(|default| (knob.name, default)))
            .fold(asked.clone(), |conf, (name, default)| conf.with(name, default))
            .text()
            .to_owned()
    }

    /// Returns the settings in effect that differ from a profile or a custom configuration;
    /// settings that it does not name are expected to have jemalloc's default. Empty if the process
    /// was started with it: by [`global_allocator!`](crate::global_allocator) in the binary, or by
    /// [`variable`](Self::variable) with the string of [`variable_for`](Self::variable_for).
    ///
    /// Allocates; takes about 10 us in an optimised build.
    #[must_use]
    pub fn differences_from(&self, asked: impl Into<HeapConf>) -> Vec<Difference> {
        let asked = asked.into();
        KNOBS.iter().filter_map(|knob| self.difference(knob, asked.value(knob.name))).collect()
    }

    /// Returns the settings of a text that are not in effect, with those that jemalloc does not
    /// know. Nothing is expected of settings that the text does not name.
    #[must_use]
    pub fn not_in_effect(&self, asked: &HeapConf) -> Vec<Difference> {
        let named = settings(asked.text());
        let last = named.filter(|(name, value)| last(asked.text(), name) == Some(*value));
        let mut differences: Vec<Difference> = Vec::new();
        for (name, value) in last {
            let found = match knob(name) {
                Some(knob) => self.difference(knob, Some(value)),
                None if self.knows(name) => None,
                None => Some(Difference::new(name.to_owned(), value, "none")),
            };
            differences.extend(found.filter(|found| !differences.contains(found)));
        }
        differences
    }

    /// Returns what the kernel and the build decide and costs memory: huge pages that were not
    /// requested, and pages larger than the kernel's.
    pub fn of_platform(&self) -> impl Iterator<Item = Difference> + use<> {
        let huge = self.thp == "default" && self.kernel_thp == Some("always");
        let huge = huge.then(|| Difference::new("transparent_hugepage", "madvise", "always"));
        let large = self.page > self.kernel_page && !self.kernel_page.is_zero();
        let page =
            large.then(|| Difference::new("page", self.kernel_page.exact(), self.page.exact()));
        huge.into_iter().chain(page)
    }

    /// Compares a setting with its requested value; `None` requests the default.
    fn difference(&self, knob: &'static Knob, asked: Option<&str>) -> Option<Difference> {
        let found = self.found(knob.name)?;
        let asked = asked.or(knob.default).unwrap_or("default");
        let same = match asked {
            // The default follows from the CPUs or from an earlier text.
            "default" if matches!(knob.name, "narenas" | "max_background_threads") => {
                self.requested().value(knob.name).is_none_or(|text| text == "default")
            }
            // What is in effect is known of these two values only.
            _ if knob.name == "slab_sizes" && asked != "default" && asked != ONE_PAGE => true,
            // jemalloc takes the first word that begins with the text.
            _ if matches!(knob.name, "thp" | "metadata_thp") && !asked.is_empty() => {
                found.starts_with(asked)
            }
            _ if asked == found => true,
            _ => c_number(asked).is_some_and(|asked| found.parse() == Ok(asked)),
        };
        (!same).then(|| Difference::new(knob.name, asked, found))
    }

    /// Returns the value in effect, as jemalloc would write it; `None` if unknown.
    fn found(&self, name: &str) -> Option<String> {
        let on = self.background_threads && self.background_threads_supported;
        Some(match name {
            "background_thread" => on.to_string(),
            "max_background_threads" => self.max_background_threads.to_string(),
            "narenas" => self.arenas_at_start.to_string(),
            "tcache_max" => self.thread_cache_max.get().to_string(),
            "dirty_decay_ms" => decay_to_ms(self.dirty_decay).to_string(),
            "muzzy_decay_ms" => decay_to_ms(self.muzzy_decay).to_string(),
            "thp" => self.thp.to_owned(),
            "metadata_thp" => self.metadata_thp.to_owned(),
            "cache_oblivious" => self.cache_oblivious.to_string(),
            "slab_sizes" => {
                let one_page = self.one_page_groups?;
                (if one_page { ONE_PAGE } else { "default" }).to_owned()
            }
            _ => return None,
        })
    }

    /// Returns `true` if this build of jemalloc has a setting of this name.
    fn knows(&self, name: &str) -> bool {
        let is_of_profiler = name.starts_with("prof") || name.starts_with("lg_prof");
        mallctl::knows_option(name) && (self.profiler || !is_of_profiler)
    }
}

/// Reads a number as C does: in hexadecimal behind `0x`, in octal behind `0`.
fn c_number(text: &str) -> Option<i64> {
    let text = text.trim_start();
    let (sign, digits) = text.strip_prefix('-').map_or((1, text), |digits| (-1, digits));
    let hexadecimal = digits.strip_prefix("0x").or_else(|| digits.strip_prefix("0X"));
    let octal = digits.strip_prefix('0').filter(|digits| !digits.is_empty());
    let number = match (hexadecimal, octal) {
        (Some(digits), _) => i64::from_str_radix(digits, 16),
        (None, Some(digits)) => i64::from_str_radix(digits, 8),
        (None, None) => digits.parse(),
    };
    Some(sign * number.ok()?)
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

#[cfg(test)]
mod asked_tests {
    use super::super::profile::KNOBS;
    use super::*;

    #[test]
    fn a_profile_is_known_again_under_any_settings_of_ones_own() {
        for profile in HeapProfile::ALL {
            let mut conf = HeapConf::from(profile);
            assert_eq!((conf.profile(), conf.own()), (Some(profile), vec![]));
            for knob in KNOBS.iter().rev() {
                conf = conf.with(knob.name, "7");
                assert_eq!(conf.profile(), Some(profile), "{conf}");
            }
            assert_eq!(conf.own().len(), KNOBS.len(), "{conf}");
        }
        for other in ["", "narenas:2", "dirty_decay_ms:1000,background_thread:true"] {
            assert_eq!(HeapConf::new(other).profile(), None, "{other}");
        }
    }

    #[test]
    fn own_settings_move_to_another_profile_and_nothing_else_does() {
        let own = HeapConf::from(HeapProfile::LowMemory).with("tcache_max", "64");
        assert_eq!(own.own(), [("tcache_max", "64")]);
        let moved = own.on(HeapProfile::Throughput);
        assert_eq!(moved.text(), format!("{},tcache_max:64", text_of(HeapProfile::Throughput)));
        assert_eq!(moved.on(HeapProfile::LowMemory), own);
    }

    #[test]
    fn the_last_word_counts() {
        let conf = HeapConf::new("narenas:2,thp:never,narenas:3");
        assert_eq!((conf.value("narenas"), conf.value("tcache_max")), (Some("3"), None));
    }
}

#[cfg(test)]
mod compare_tests {
    use super::effective;
    use super::*;
    use lowtide_core::ByteSize;
    use lowtide_core::decay::DecayTime;

    /// A process that was started with this string in the binary, on a kernel without surprises.
    fn started_with(profile: Option<HeapProfile>) -> EffectiveConf {
        let second = DecayTime::from_millis(1_000);
        let binary = profile.map(|profile| profile.conf().to_str().unwrap());
        let value = |name| binary.and_then(|text| last(text, name));
        let number = |name, other| value(name).map_or(other, |text| text.parse().unwrap());
        EffectiveConf {
            serves_c: false,
            conf_of_build: None,
            conf_of_binary: binary,
            conf_of_symlink: None,
            conf_of_variable: None,
            conf_of_harder: None,
            arenas_at_start: u32::try_from(number("narenas", 8)).unwrap(),
            thread_cache_max: ByteSize::new(number("tcache_max", 32_768)),
            page: ByteSize::kib(4),
            kernel_page: ByteSize::kib(4),
            kernel_thp: Some("madvise"),
            thp: value("thp").map_or("default", |_| "never"),
            metadata_thp: "disabled",
            one_page_groups: Some(value("slab_sizes").is_some()),
            cache_oblivious: value("cache_oblivious").is_none(),
            dirty_decay: if binary.is_some() { second } else { DecayTime::from_millis(10_000) },
            muzzy_decay: DecayTime::AtOnce,
            background_threads_supported: true,
            background_threads: binary.is_some(),
            max_background_threads: u32::try_from(number("max_background_threads", 4)).unwrap(),
            profiler: false,
            ..effective().unwrap()
        }
    }

    fn told(found: &[Difference]) -> Vec<String> {
        found.iter().map(Difference::to_string).collect()
    }

    #[test]
    fn a_process_started_with_a_profile_differs_from_the_others_by_its_symbol() {
        for profile in [HeapProfile::LowMemory, HeapProfile::Balanced] {
            let found = started_with(Some(profile));
            assert_eq!(found.differences_from(profile), [], "{profile}");
            assert_eq!(found.not_in_effect(&found.requested()), []);
        }
        let found = started_with(Some(HeapProfile::Balanced));
        assert_eq!(
            told(&found.differences_from(HeapProfile::LowMemory)),
            [
                "max_background_threads: requested 1, effective 2",
                "narenas: requested 2, effective 4",
                "thp: requested never, effective default"
            ]
        );
        // Bug: throughput names no arena count, so four arenas in place of four a CPU were none.
        let differences = found.differences_from(HeapProfile::Throughput);
        let settings: Vec<_> = differences.iter().map(|found| &*found.setting).collect();
        assert_eq!(
            settings,
            ["max_background_threads", "narenas", "dirty_decay_ms", "cache_oblivious"]
        );
        let fixed = differences.iter().map(Difference::is_fixed_at_start);
        assert!(fixed.eq([false, true, false, true]));
    }

    /// Bug: the string of another profile left settings of the binary in force, which it does not
    /// name.
    #[test]
    fn the_string_to_set_takes_back_what_the_binary_asks_for() {
        let found = started_with(Some(HeapProfile::LowMemory));
        let text = found.variable_for(&HeapProfile::Throughput.into());
        assert_eq!(
            text,
            "background_thread:true,dirty_decay_ms:10000,muzzy_decay_ms:0,narenas:default,\
             thp:default,metadata_thp:disabled,cache_oblivious:true"
        );
        let low = HeapProfile::LowMemory.conf().to_str().unwrap();
        assert_eq!(found.variable_for(&HeapProfile::LowMemory.into()), low);
    }

    #[test]
    fn a_setting_of_ones_own_stays_on_top_of_every_profile() {
        let mut found = started_with(Some(HeapProfile::Balanced));
        found.conf_of_binary = Some(
            "background_thread:true,max_background_threads:2,narenas:9,dirty_decay_ms:1000,\
             muzzy_decay_ms:0,cache_oblivious:false",
        );
        found.arenas_at_start = 9;
        assert_eq!(found.differences_from(found.requested_by(HeapProfile::Balanced)), []);
        let low = found.requested_by(HeapProfile::LowMemory);
        assert_eq!((low.value("narenas"), low.value("thp")), (Some("9"), Some("never")));
        // A custom string does not apply to another profile.
        found.conf_of_binary = Some("narenas:9");
        assert_eq!(found.requested_by(HeapProfile::Balanced), HeapProfile::Balanced.into());
    }

    #[test]
    fn the_last_text_that_names_a_setting_is_the_request() {
        let mut found = started_with(Some(HeapProfile::Balanced));
        found.conf_of_symlink = Some("narenas:5".to_owned());
        found.conf_of_variable = Some("narenas:6,dirty_decay_ms:0".to_owned());
        let requested = found.requested();
        assert_eq!((requested.value("narenas"), requested.value("thp")), (Some("6"), None));
        found.conf_of_harder = Some("narenas:7");
        let not_in_effect = told(&found.not_in_effect(&found.requested()));
        assert_eq!(
            not_in_effect,
            ["dirty_decay_ms: requested 0, effective 1000", "narenas: requested 7, effective 4"]
        );
        (found.arenas_at_start, found.dirty_decay) = (7, DecayTime::AtOnce);
        assert_eq!(found.not_in_effect(&found.requested()), []);
    }

    #[test]
    fn what_jemalloc_refused_or_does_not_know_is_a_difference() {
        let mut found = started_with(Some(HeapProfile::Balanced));
        found.conf_of_variable = Some(
            "narenas:two,arenas:3,prof:true,tcache:true,max_background_threads:4, thp:never"
                .to_owned(),
        );
        assert_eq!(
            told(&found.not_in_effect(&found.requested())),
            [
                "narenas: requested two, effective 4",
                "arenas: requested 3, effective none",
                "prof: requested true, effective none",
                "max_background_threads: requested 4, effective 2",
                " thp: requested never, effective none",
            ]
        );
    }

    #[test]
    fn a_setting_that_is_written_in_another_way_is_in_effect() {
        let mut found = started_with(Some(HeapProfile::LowMemory));
        let arenas = found.arenas_at_start;
        for text in [
            format!("narenas:{arenas:#x}"),
            format!("narenas: 0{arenas:o}"),
            "thp:n".to_owned(),
            "slab_sizes:1-4096:2".to_owned(),
        ] {
            found.conf_of_variable = Some(text);
            assert_eq!(told(&found.not_in_effect(&found.requested())), [""; 0]);
        }
    }

    #[test]
    fn what_the_kernel_and_the_build_give_is_a_difference() {
        let mut found = started_with(Some(HeapProfile::Balanced));
        found.kernel_thp = Some("always");
        found.page = ByteSize::kib(64);
        found.background_threads_supported = false;
        assert_eq!(
            told(&found.differences_from(HeapProfile::Balanced)),
            ["background_thread: requested true, effective false"]
        );
        assert_eq!(
            told(&found.of_platform().collect::<Vec<_>>()),
            [
                "transparent_hugepage: requested madvise, effective always",
                "page: requested 4KiB, effective 64KiB",
            ]
        );
        // With `thp:never` the kernel's choice is none of the heap's.
        let mut found = started_with(Some(HeapProfile::LowMemory));
        found.kernel_thp = Some("always");
        assert_eq!(found.of_platform().count(), 0);
    }
}
