//! jemalloc's settings in effect, read back, and those that differ from the request.
//!
//! jemalloc reports a bad or misnamed setting at most on standard error and continues, so the
//! requested text proves nothing. This module only reads: changing settings at run time is
//! [`apply`](super::apply). It reads one file of the kernel, never the environment: jemalloc
//! reports what it read there.
//!
//! Invariant: every value is an answer of jemalloc or the kernel; a setting that is as requested is
//! in no difference.

use std::borrow::Cow;
use std::fmt;

use lowtide_core::kernel::page_size;

use super::allocator::serves_c;
use super::conf::background_threads_supported;
use super::error::HostError;
use super::mallctl::{self as ctl, Key, Text};
use super::profile::HeapProfile;

/// jemalloc's settings in effect. Displayed in one line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EffectiveConf {
    version: &'static str,
    values: Vec<(&'static str, String)>,
    /// The string in the binary.
    binary: &'static str,
    /// The strings outside the binary that override it: of the symbolic link, then of the variable.
    outside: String,
    /// All strings in the order in which jemalloc read them.
    requested: String,
}

/// Reads the settings in effect. Takes some 10 us: one file of the kernel and about 20 controls.
///
/// # Errors
/// [`HostError::Mallctl`] if jemalloc refuses a control.
pub fn effective() -> Result<EffectiveConf, HostError> {
    // Each is refused (ENOENT) if there is none.
    let binary = ctl::OPT_CONF_FROM_BINARY.read().unwrap_or(None).unwrap_or_default();
    let build = ctl::CONFIG_CONF.read().unwrap_or(None).unwrap_or_default();
    let harder = ctl::OPT_CONF_FROM_HARDER.read().unwrap_or(None).unwrap_or_default();
    let outside = [&ctl::OPT_CONF_FROM_SYMLINK, &ctl::OPT_CONF_FROM_VARIABLE];
    let outside = outside.map(|key| key.copy().unwrap_or(None).unwrap_or_default()).join(",");
    let outside = outside.trim_matches(',').to_owned();
    let threads = background_threads_supported() && ctl::BACKGROUND_THREAD.read()?;
    let mut values = vec![
        ("background_thread", threads.to_string()),
        ("max_background_threads", ctl::MAX_BACKGROUND_THREADS.read().unwrap_or(0).to_string()),
        ("narenas", ctl::OPT_ARENAS.read()?.to_string()),
        ("percpu_arena", text(&ctl::OPT_PERCPU_ARENA)?.to_owned()),
        ("tcache", ctl::OPT_THREAD_CACHE.read()?.to_string()),
        ("tcache_max", ctl::OPT_THREAD_CACHE_MAX.read()?.to_string()),
        ("tcache_nslots_small_min", ctl::OPT_THREAD_CACHE_SMALL_MIN.read()?.to_string()),
        ("tcache_nslots_large", ctl::OPT_THREAD_CACHE_LARGE.read()?.to_string()),
        ("dirty_decay_ms", ctl::ARENAS_DIRTY_DECAY.read()?.to_string()),
        ("muzzy_decay_ms", ctl::ARENAS_MUZZY_DECAY.read()?.to_string()),
        ("thp", text(&ctl::OPT_THP)?.to_owned()),
        ("metadata_thp", text(&ctl::OPT_METADATA_THP)?.to_owned()),
        ("cache_oblivious", ctl::OPT_CACHE_OBLIVIOUS.read()?.to_string()),
        ("hpa", ctl::OPT_HPA.read()?.to_string()),
        ("retain", ctl::OPT_RETAIN.read()?.to_string()),
        ("page", ctl::ARENAS_PAGE.read()?.to_string()),
    ];
    values.extend(ctl::OPT_PROF.read().ok().map(|is_on| ("prof", is_on.to_string())));
    let requested = [build, binary, &outside, harder].join(",");
    Ok(EffectiveConf { version: text(&ctl::VERSION)?, values, binary, outside, requested })
}

fn text<const N: usize>(key: &Key<Text, N>) -> Result<&'static str, HostError> {
    Ok(key.read()?.unwrap_or("unknown"))
}

impl EffectiveConf {
    /// Returns the value of a setting by jemalloc's name, as jemalloc writes it: `4` for `narenas`,
    /// `1000` for `dirty_decay_ms`, and the page size in bytes for `page`. Those that
    /// [`apply`](super::apply) changes have their current value. `None` for a setting that cannot
    /// be read back.
    #[must_use]
    pub fn get(&self, setting: &str) -> Option<&str> {
        let mut values = self.values.iter();
        values.find(|(name, _)| *name == setting).map(|(_, value)| &**value)
    }

    /// Returns the name of the environment variable that this jemalloc reads at start, and that of
    /// the one that only other builds read.
    #[must_use]
    pub fn variables() -> [&'static str; 2] {
        if serves_c() {
            ["MALLOC_CONF", "_RJEM_MALLOC_CONF"]
        } else {
            ["_RJEM_MALLOC_CONF", "MALLOC_CONF"]
        }
    }

    /// Returns `true` if jemalloc found no settings at start: none in its build, in the binary, by
    /// the symbolic link `/etc/_rjem_malloc.conf`, or in its variable.
    #[must_use]
    pub fn is_default(&self) -> bool {
        settings(&self.requested).next().is_none()
    }

    /// Returns the string that requests this profile, with the settings of the binary on top that
    /// are of no profile.
    #[must_use]
    pub fn requested_by(&self, profile: HeapProfile) -> String {
        let own = settings(self.binary).filter(|own| {
            !HeapProfile::ALL.iter().any(|one| settings(one.text()).any(|setting| setting == *own))
        });
        own.fold(profile.text().to_owned(), |text, (name, value)| {
            let mut settings: Vec<_> = settings(&text).filter(|found| found.0 != name).collect();
            settings.push((name, value));
            let settings = settings.iter().map(|(name, value)| format!("{name}:{value}"));
            settings.collect::<Vec<_>>().join(",")
        })
    }

    /// Returns the settings in effect that differ from a profile with the binary's own settings on
    /// top. Empty if the process was started with it, by
    /// [`global_allocator!`](crate::global_allocator) or by its variable.
    #[must_use]
    pub fn differences_from(&self, profile: HeapProfile) -> Vec<Difference> {
        self.compare(&self.requested_by(profile))
    }

    /// Returns the settings in effect that differ from those that jemalloc read at start, including
    /// those that it does not know, and what the kernel and the build decide and costs memory: huge
    /// pages that were not requested, and pages larger than the kernel's. Of several values for a
    /// setting the last one counts. A value in the binary may be changed at run time.
    #[must_use]
    pub fn differences(&self) -> Vec<Difference> {
        let mut differences = self.compare(&self.requested);
        differences.retain(|found| {
            found.is_fixed_at_start() || last(&self.outside, &found.setting).is_some()
        });
        if self.get("thp") == Some("default") && kernel_uses_huge_pages() {
            differences.push(Difference::new("transparent_hugepage", "madvise", "always"));
        }
        let (page, kernel) =
            (self.get("page").unwrap_or_default(), page_size().unwrap_or_default());
        if !kernel.is_zero() && page.parse().is_ok_and(|page: u64| page > kernel.get()) {
            differences.push(Difference::new("page", kernel.get().to_string(), page));
        }
        differences
    }

    fn compare(&self, requested: &str) -> Vec<Difference> {
        let mut differences = Vec::new();
        let counts = settings(requested).filter(|it| last(requested, it.0) == Some(it.1));
        for (name, value) in counts {
            let found = match self.get(name) {
                Some(found) if found == value => continue,
                // The default of a number follows from the CPUs.
                Some(_) if value == "default" && last(&self.requested, name) == Some(value) => {
                    continue;
                }
                Some(found) => found,
                None if self.knows(name) => continue,
                None => "none",
            };
            let difference = Difference::new(name.to_owned(), value, found);
            if !differences.contains(&difference) {
                differences.push(difference);
            }
        }
        differences
    }

    /// Returns `true` if this build of jemalloc has a setting of this name.
    fn knows(&self, name: &str) -> bool {
        let is_of_profiler = name.starts_with("prof") || name.starts_with("lg_prof");
        ctl::knows_option(name) && (self.get("prof").is_some() || !is_of_profiler)
    }
}

impl fmt::Display for EffectiveConf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "jemalloc {} serves_c={}", self.version, serves_c())?;
        for (name, value) in &self.values {
            write!(f, " {name}={value}")?;
        }
        write!(f, " conf_of_binary={:?} requested_outside={:?}", self.binary, self.outside)
    }
}

/// The settings of a string, as name and value; the value of a piece without one is empty.
fn settings(text: &str) -> impl Iterator<Item = (&str, &str)> {
    let pieces = text.split(',').filter(|piece| !piece.is_empty());
    pieces.map(|piece| piece.split_once(':').unwrap_or((piece, "")))
}

/// The last value that a string gives a setting.
fn last<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    settings(text).filter(|(found, _)| *found == name).last().map(|(_, value)| value)
}

/// Returns `true` if the kernel's mode for huge pages, the word in brackets, is `always`.
fn kernel_uses_huge_pages() -> bool {
    let modes = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled");
    modes.is_ok_and(|modes| modes.contains("[always]"))
}

/// A setting that differs from the requested value.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Difference {
    /// jemalloc's name of the setting; `page` for the page size in bytes, `transparent_hugepage`
    /// for the kernel's mode.
    pub setting: Cow<'static, str>,
    /// The requested value.
    pub requested: String,
    /// The value in effect; `none` if jemalloc has no such setting.
    pub effective: String,
}

impl Difference {
    pub(super) fn new(
        setting: impl Into<Cow<'static, str>>,
        requested: impl Into<String>,
        effective: impl Into<String>,
    ) -> Self {
        let (requested, effective) = (requested.into(), effective.into());
        Self { setting: setting.into(), requested, effective }
    }

    /// Returns `true` if only a restart of the process can change it.
    #[must_use]
    pub fn is_fixed_at_start(&self) -> bool {
        !["background_thread", "max_background_threads", "dirty_decay_ms", "muzzy_decay_ms"]
            .contains(&&*self.setting)
    }
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { setting, requested, effective } = self;
        write!(f, "{setting}: requested {requested}, effective {effective}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A process that was started with this string in the binary, and has what it requests.
    fn started_with(binary: &'static str) -> EffectiveConf {
        let mut conf = effective().expect("readable");
        for (name, value) in &mut conf.values {
            let default = match *name {
                "narenas" => "8",
                "max_background_threads" => "4",
                _ => continue,
            };
            default.clone_into(value);
        }
        for (name, value) in settings(binary).filter(|(_, value)| *value != "default") {
            set(&mut conf, name, value);
        }
        set(&mut conf, "page", "1");
        EffectiveConf { binary, outside: String::new(), requested: binary.to_owned(), ..conf }
    }

    fn set(conf: &mut EffectiveConf, setting: &str, to: &str) {
        for (_, value) in conf.values.iter_mut().filter(|(name, _)| *name == setting) {
            to.clone_into(value);
        }
    }

    /// Adds the value of jemalloc's variable.
    fn with_variable(mut conf: EffectiveConf, variable: &str) -> EffectiveConf {
        conf.requested = format!("{},{variable}", conf.requested);
        variable.clone_into(&mut conf.outside);
        conf
    }

    fn told(found: &[Difference]) -> Vec<String> {
        let of_kernel = |found: &&Difference| found.setting != "transparent_hugepage";
        found.iter().filter(of_kernel).map(Difference::to_string).collect()
    }

    #[test]
    fn what_took_effect_is_one_line() {
        let line = effective().unwrap().to_string();
        assert!(line.starts_with("jemalloc 5."), "{line}");
        assert_eq!(line.lines().count(), 1);
    }

    #[test]
    fn a_process_started_with_a_profile_differs_from_the_others_by_its_symbol() {
        for profile in HeapProfile::ALL {
            let found = started_with(profile.text());
            assert_eq!(found.differences_from(profile), [], "{profile}");
            assert_eq!(told(&found.differences()), [""; 0]);
        }
        let found = started_with(HeapProfile::Balanced.text());
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
        assert_eq!(settings, ["narenas", "dirty_decay_ms", "cache_oblivious"]);
        let fixed = differences.iter().map(Difference::is_fixed_at_start);
        assert!(fixed.eq([true, false, true]));
    }

    /// Bug: the string of another profile left settings of the binary in force, which it does not
    /// name.
    #[test]
    fn the_string_of_each_profile_sets_what_another_one_does() {
        let names = |profile: HeapProfile| settings(profile.text()).map(|(name, _)| name);
        for (profile, other) in HeapProfile::ALL.iter().zip(HeapProfile::ALL.iter().rev()) {
            let missing: Vec<_> =
                names(*other).filter(|name| !names(*profile).any(|own| own == *name)).collect();
            // A later string can lower it and never raise it.
            assert!(missing.iter().all(|name| *name == "max_background_threads"), "{missing:?}");
        }
    }

    #[test]
    fn a_setting_of_ones_own_stays_on_top_of_every_profile() {
        let found = started_with(
            "background_thread:true,max_background_threads:2,narenas:9,dirty_decay_ms:1000,\
             muzzy_decay_ms:0,thp:default,metadata_thp:disabled,cache_oblivious:false",
        );
        assert_eq!(found.differences_from(HeapProfile::Balanced), []);
        let low = found.requested_by(HeapProfile::LowMemory);
        assert_eq!((last(&low, "narenas"), last(&low, "thp")), (Some("9"), Some("never")));
        assert_eq!(settings(&low).filter(|(name, _)| *name == "narenas").count(), 1, "{low}");
    }

    #[test]
    fn the_last_text_that_names_a_setting_is_the_request() {
        let found = started_with(HeapProfile::Balanced.text());
        let mut found = with_variable(found, "narenas:5,narenas:6,dirty_decay_ms:0");
        assert_eq!(
            told(&found.differences()),
            ["narenas: requested 6, effective 4", "dirty_decay_ms: requested 0, effective 1000"]
        );
        set(&mut found, "narenas", "6");
        set(&mut found, "dirty_decay_ms", "0");
        assert_eq!(told(&found.differences()), [""; 0]);
    }

    #[test]
    fn what_jemalloc_refused_or_does_not_know_is_a_difference() {
        let mut found = started_with(HeapProfile::Balanced.text());
        found.values.retain(|(name, _)| *name != "prof");
        let found = with_variable(
            found,
            "narenas:two,arenas:3,prof:true,tcache:true,max_background_threads:4, thp:never",
        );
        assert_eq!(
            told(&found.differences()),
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
    fn pages_that_are_larger_than_the_kernels_are_a_difference() {
        let mut found = started_with(HeapProfile::LowMemory.text());
        set(&mut found, "page", "1048576");
        let differences = found.differences();
        assert_eq!(differences.len(), 1, "the kernel's huge pages are none of the heap's");
        let page = differences[0].to_string();
        assert!(page.starts_with("page: requested ") && page.ends_with("1048576"), "{page}");
    }
}
