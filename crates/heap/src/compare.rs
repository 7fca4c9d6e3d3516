//! Compares the requested jemalloc settings with those in effect, and finds the cause of each
//! difference.
//!
//! Works on the result of [`effective`](super::effective); it calls jemalloc only to check if a
//! name exists. It changes nothing.
//!
//! Invariant: a setting that is as requested is in no difference.

use super::asked::{HeapConf, last};
use super::cause::{Cause, ConfSource, Difference};
use super::effective::EffectiveConf;
use super::knobs::{KNOBS, Knob, Meaning, Piece, knob, pieces};
use super::mallctl;
use super::profile::HeapProfile;

/// The maximum length of a quoted text.
const QUOTED: usize = 80;

impl EffectiveConf {
    /// Returns the name of the environment variable that this jemalloc reads at start.
    #[must_use]
    pub const fn variable(&self) -> &'static str {
        if self.serves_c { PLAIN.variable } else { PREFIXED.variable }
    }

    /// Returns the name of the variable that other builds of jemalloc read and this one does not.
    /// Pass its value to [`with_unread`](Self::with_unread).
    #[must_use]
    pub const fn unread_variable(&self) -> &'static str {
        if self.serves_c { PREFIXED.variable } else { PLAIN.variable }
    }

    /// Sets the value of [`unread_variable`](Self::unread_variable), to report it as ignored.
    #[must_use]
    pub fn with_unread(mut self, text: Option<String>) -> Self {
        let name = self.unread_variable();
        self.unread.extend(text.map(|text| (name, text)));
        self
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

    /// Returns the value of [`variable`](Self::variable) that makes this configuration effective.
    /// It resets settings of other sources that `asked` does not have.
    #[must_use]
    pub fn variable_for(&self, asked: &HeapConf) -> String {
        let said = self.sources();
        let earlier = |name| {
            said.iter()
                .filter(|(source, _)| *source < ConfSource::Variable(""))
                .any(|(_, text)| last(text, name).is_some())
        };
        KNOBS
            .iter()
            .filter(|knob| asked.value(knob.name).is_none() && earlier(knob.name))
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
    /// It also expects pages no larger than the kernel's, and every arena at the decay times of the
    /// start. Allocates; takes about 10 us in an optimised build.
    #[must_use]
    pub fn differences_from(&self, asked: impl Into<HeapConf>) -> Vec<Difference> {
        let asked = asked.into();
        let mut differences: Vec<_> =
            KNOBS.iter().filter_map(|knob| self.difference(knob, &asked)).collect();
        if self.thp_unasked() && !differences.iter().any(|found| found.setting == "thp") {
            differences.push(Difference {
                setting: "thp",
                asked: "default".to_owned(),
                found: "always".to_owned(),
                cause: Cause::KernelHugePages,
            });
        }
        if self.page > self.kernel_page && !self.kernel_page.is_zero() {
            differences.push(Difference {
                setting: "page",
                asked: self.kernel_page.exact(),
                found: self.page.exact(),
                cause: Cause::PageOfBuild,
            });
        }
        differences.extend(self.arenas_otherwise());
        differences
    }

    /// Returns configuration that was ignored: a value or name that jemalloc refused, text that it
    /// did not read, a variable that this build does not read. Empty if the configuration is
    /// correct.
    #[must_use]
    pub fn ignored(&self) -> Vec<Difference> {
        let mut ignored = Vec::new();
        for (source, text) in self.sources() {
            let faults = pieces(text).filter_map(|piece| self.fault(source, piece));
            ignored.extend(faults);
        }
        ignored.extend(["max_background_threads", "tcache_max"].iter().filter_map(|n| self.cap(n)));
        let read = self.read_places();
        for (written, text) in self.unread.iter().filter(|(_, text)| !text.is_empty()) {
            let read = if written.starts_with('/') { read.symlink } else { read.variable };
            ignored.push(nothing_came_of(text, Cause::NotRead { written, read }));
        }
        ignored
    }

    /// The places that jemalloc read, the one that wins last.
    pub(super) fn sources(&self) -> Vec<(ConfSource, &str)> {
        let names = self.read_places();
        [
            (ConfSource::Build, self.conf_of_build),
            (ConfSource::Binary(names.symbol), self.conf_of_binary),
            (ConfSource::Symlink(names.symlink), self.conf_of_symlink.as_deref()),
            (ConfSource::Variable(names.variable), self.conf_of_variable.as_deref()),
            (ConfSource::HarderSymbol(names.harder), self.conf_of_harder),
        ]
        .into_iter()
        .filter_map(|(source, text)| text.map(|text| (source, text)))
        .collect()
    }

    const fn read_places(&self) -> &'static Places {
        if self.serves_c { &PLAIN } else { &PREFIXED }
    }

    /// Returns `true` if the heap gets huge pages that were not requested.
    fn thp_unasked(&self) -> bool {
        self.thp == "default" && self.kernel_thp == Some("always")
    }

    fn difference(&self, knob: &'static Knob, asked: &HeapConf) -> Option<Difference> {
        let found = self.found(knob.name)?;
        let text = asked.value(knob.name);
        let meaning = text.map_or(Meaning::Default, |text| knob.meaning(text));
        let same = match &meaning {
            Meaning::Value(value) => *value == found,
            // The default of `narenas` follows from the CPUs, that of the others is known.
            Meaning::Default => match knob.default {
                Some("default") if knob.name == "narenas" => !self.is_set(knob),
                Some(default) => default == found,
                None => !self.is_set(knob),
            },
            Meaning::Refused => false,
        };
        if same {
            return None;
        }
        let asked = text.or(knob.default).unwrap_or("default").to_owned();
        let cause = self.cause(knob, &asked, &found);
        Some(Difference { setting: knob.name, asked, found, cause })
    }

    /// Returns the value in effect, as jemalloc would write it; `None` if unknown.
    fn found(&self, name: &str) -> Option<String> {
        let on = self.background_threads && self.background_threads_supported;
        Some(match name {
            "background_thread" => on.to_string(),
            "max_background_threads" => self.max_background_threads.to_string(),
            "narenas" => self.arenas_at_start.to_string(),
            "tcache_max" => self.thread_cache_max.get().to_string(),
            "dirty_decay_ms" => super::conf::decay_to_ms(self.dirty_decay).to_string(),
            "muzzy_decay_ms" => super::conf::decay_to_ms(self.muzzy_decay).to_string(),
            "thp" => self.thp.to_owned(),
            "metadata_thp" => self.metadata_thp.to_owned(),
            "cache_oblivious" => self.cache_oblivious.to_string(),
            "slab_sizes" => {
                let one_page = self.one_page_groups?;
                (if one_page { super::knobs::ONE_PAGE } else { "default" }).to_owned()
            }
            _ => return None,
        })
    }

    /// Returns `true` if a source that jemalloc reads sets it.
    fn is_set(&self, knob: &Knob) -> bool {
        let said = self.sources();
        let last = said.iter().rev().find_map(|(_, text)| last(text, knob.name));
        last.is_some_and(|text| matches!(knob.meaning(text), Meaning::Value(_)))
    }

    /// Returns the cause of a difference.
    fn cause(&self, knob: &Knob, asked: &str, found: &str) -> Cause {
        if !self.background_threads_supported && knob.name == "background_thread" {
            return Cause::NoBackgroundThreads;
        }
        if knob.name.ends_with("thp") && self.thp == "not supported" {
            return Cause::KernelHugePages;
        }
        let wish = knob.meaning(asked);
        let read = self.read_places();
        let unread = self.unread.iter().find(|(_, text)| {
            last(text, knob.name).is_some_and(|value| knob.meaning(value) == wish)
        });
        if let Some((written, _)) = unread {
            let read = if written.starts_with('/') { read.symlink } else { read.variable };
            return Cause::NotRead { written, read };
        }
        for (source, text) in self.sources().into_iter().rev() {
            if broken_before(text, knob.name) {
                return Cause::Broken(source);
            }
            let Some(text) = last(text, knob.name) else { continue };
            return match knob.meaning(text) {
                Meaning::Refused => Cause::Refused { by: source, expected: knob.expects() },
                meaning if meaning == wish => match found.parse() {
                    Ok(most) if knob.default.is_none() || knob.name == "tcache_max" => {
                        Cause::Capped { most }
                    }
                    _ => Cause::NotKnown,
                },
                _ => Cause::SetBy(source),
            };
        }
        match self.conf_of_binary {
            None => Cause::NoSymbol(read.symbol),
            Some(_) => Cause::NotAsked,
        }
    }

    /// Returns the fault of a piece of a text.
    fn fault(&self, source: ConfSource, piece: Piece<'_>) -> Option<Difference> {
        let (name, value) = match piece {
            Piece::Broken(text) => return Some(nothing_came_of(text, Cause::Broken(source))),
            Piece::Setting(name, value) => (name, value),
        };
        let Some(knob) = knob(name) else {
            let known = mallctl::knows_option(name) && (self.profiler || !is_of_profiler(name));
            let text = format!("{name}:{value}");
            return (!known).then(|| nothing_came_of(&text, Cause::Unknown(source)));
        };
        let refused = knob.meaning(value) == Meaning::Refused;
        let cause = Cause::Refused { by: source, expected: knob.expects() };
        let found = self.found(name).unwrap_or_else(|| "default".to_owned());
        let asked = quoted(value);
        refused.then_some(Difference { setting: knob.name, asked, found, cause })
    }

    /// Returns the difference if the last source that sets it requests more than jemalloc accepted.
    fn cap(&self, name: &str) -> Option<Difference> {
        let said = self.sources();
        let (asked, found) =
            (said.iter().rev().find_map(|(_, text)| last(text, name))?, self.found(name)?);
        let Meaning::Value(wish) = knob(name)?.meaning(asked) else { return None };
        let (wish, most): (u64, u64) = (wish.parse().ok()?, found.parse().ok()?);
        let (setting, cause) = (knob(name)?.name, Cause::Capped { most });
        (wish > most).then(|| Difference { setting, asked: asked.to_owned(), found, cause })
    }

    /// Arenas whose decay times are not those of the start.
    fn arenas_otherwise(&self) -> impl Iterator<Item = Difference> {
        let first = |muzzy: bool| {
            let start = if muzzy { self.muzzy_decay } else { self.dirty_decay };
            let setting = if muzzy { "muzzy_decay_ms" } else { "dirty_decay_ms" };
            let of = |found: &super::effective::ArenaDecay| {
                if muzzy { found.muzzy } else { found.dirty }
            };
            let found = self.arenas_apart.iter().find(|found| of(found) != start)?;
            let ms = |time| super::conf::decay_to_ms(time).to_string();
            let large = found.arena == self.arenas_at_start && !self.background_threads;
            let arena = found.arena;
            let cause = if large && ms(of(found)) == "0" {
                Cause::LargeBlocks { arena }
            } else {
                Cause::SetElsewhere { arena: Some(arena) }
            };
            Some(Difference { setting, asked: ms(start), found: ms(of(found)), cause })
        };
        [false, true].map(first).into_iter().flatten()
    }
}

/// The sources of a build of jemalloc.
struct Places {
    symbol: &'static str,
    harder: &'static str,
    symlink: &'static str,
    variable: &'static str,
}

/// With names of its own, so that C's `malloc` is another.
const PREFIXED: Places = Places {
    symbol: "_rjem_malloc_conf",
    harder: "_rjem_malloc_conf_2_conf_harder",
    symlink: "/etc/_rjem_malloc.conf",
    variable: "_RJEM_MALLOC_CONF",
};

/// For a build that also serves C's `malloc`.
const PLAIN: Places = Places {
    symbol: "malloc_conf",
    harder: "malloc_conf_2_conf_harder",
    symlink: "/etc/malloc.conf",
    variable: "MALLOC_CONF",
};

/// The link that other builds of jemalloc follow.
pub(super) const fn unread_symlink(serves_c: bool) -> &'static str {
    if serves_c { PREFIXED.symlink } else { PLAIN.symlink }
}

/// Settings that only a build with the profiler knows.
fn is_of_profiler(name: &str) -> bool {
    name.starts_with("prof") || name.starts_with("lg_prof")
}

/// Returns `true` if reading a text stops before this name.
fn broken_before(text: &str, name: &str) -> bool {
    pieces(text).any(|piece| match piece {
        Piece::Broken(rest) => {
            rest.split([',', ' ', ';']).any(|part| part.trim_start().starts_with(name))
        }
        Piece::Setting(..) => false,
    })
}

fn nothing_came_of(text: &str, cause: Cause) -> Difference {
    let setting = "malloc_conf";
    Difference { setting, asked: quoted(text), found: "nothing".to_owned(), cause }
}

/// A text in quotes, or its beginning.
fn quoted(text: &str) -> String {
    let end = text.char_indices().nth(QUOTED).map_or(text.len(), |(end, _)| end);
    let more = if end < text.len() { "..." } else { "" };
    format!("{:?}{more}", &text[..end])
}

#[cfg(test)]
mod tests {
    use super::super::effective::{ArenaDecay, effective};
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
            unread: Vec::new(),
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
            arenas_apart: Vec::new(),
            ..effective().unwrap()
        }
    }

    fn causes(found: &[Difference]) -> Vec<(&'static str, Cause)> {
        found.iter().map(|found| (found.setting, found.cause.clone())).collect()
    }

    const BINARY: Cause = Cause::SetBy(ConfSource::Binary("_rjem_malloc_conf"));
    const VARIABLE: ConfSource = ConfSource::Variable("_RJEM_MALLOC_CONF");

    #[test]
    fn a_process_started_with_a_profile_differs_from_the_others_by_its_symbol() {
        for profile in [HeapProfile::LowMemory, HeapProfile::Balanced] {
            let found = started_with(Some(profile));
            assert_eq!(found.differences_from(profile), [], "{profile}");
            assert_eq!(found.ignored(), []);
        }
        let found = started_with(Some(HeapProfile::Balanced));
        let differences = found.differences_from(HeapProfile::LowMemory);
        assert_eq!((&*differences[0].asked, &*differences[0].found), ("1", "2"));
        assert_eq!(
            causes(&differences),
            [("max_background_threads", BINARY), ("narenas", BINARY), ("thp", Cause::NotAsked)]
        );
        // Bug: throughput names no arena count, so four arenas in place of four a CPU were none.
        let differences = found.differences_from(HeapProfile::Throughput);
        let settings: Vec<_> = differences.iter().map(|found| found.setting).collect();
        assert_eq!(
            settings,
            ["max_background_threads", "narenas", "dirty_decay_ms", "cache_oblivious"]
        );
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
    fn without_a_symbol_the_cause_is_that_there_is_none() {
        let found = started_with(None);
        let differences = found.differences_from(HeapProfile::Balanced);
        let all = differences.iter().all(|it| it.cause == Cause::NoSymbol("_rjem_malloc_conf"));
        assert!(all && differences.len() == 5, "{differences:?}");
    }

    #[test]
    fn the_last_place_that_names_a_setting_is_its_cause() {
        let mut found = started_with(Some(HeapProfile::Balanced));
        found.conf_of_symlink = Some("narenas:5".to_owned());
        found.arenas_at_start = 5;
        let cause = |found: &EffectiveConf| causes(&found.differences_from(HeapProfile::Balanced));
        let symlink = ConfSource::Symlink("/etc/_rjem_malloc.conf");
        assert_eq!(cause(&found), [("narenas", Cause::SetBy(symlink))]);
        found.conf_of_variable = Some("narenas:6,dirty_decay_ms:0".to_owned());
        (found.arenas_at_start, found.dirty_decay) = (6, DecayTime::AtOnce);
        let set = Cause::SetBy(VARIABLE);
        assert_eq!(cause(&found), [("narenas", set.clone()), ("dirty_decay_ms", set.clone())]);
        found.conf_of_harder = Some("narenas:7");
        found.arenas_at_start = 7;
        let harder = ConfSource::HarderSymbol("_rjem_malloc_conf_2_conf_harder");
        assert_eq!(cause(&found), [("narenas", Cause::SetBy(harder)), ("dirty_decay_ms", set)]);
    }

    #[test]
    fn what_jemalloc_refused_is_a_difference_although_the_value_is_as_before() {
        let mut found = started_with(Some(HeapProfile::Balanced));
        found.conf_of_variable =
            Some("narenas:two,arenas:3,prof:true,tcache:true, thp:never".to_owned());
        let ignored = found.ignored();
        let expected = "default, or a whole number from 1 to 4094";
        assert_eq!(
            causes(&ignored),
            [
                ("narenas", Cause::Refused { by: VARIABLE, expected }),
                ("malloc_conf", Cause::Unknown(VARIABLE)),
                ("malloc_conf", Cause::Unknown(VARIABLE)),
                ("malloc_conf", Cause::Broken(VARIABLE)),
            ]
        );
        assert_eq!((&*ignored[0].asked, &*ignored[0].found), ("\"two\"", "4"));
        assert_eq!(ignored[3].asked, "\" thp:never\"");
        // Settings that were requested and would be effective otherwise.
        let conf = HeapConf::from(HeapProfile::Balanced).with("narenas", "2").with("thp", "never");
        assert_eq!(
            causes(&found.differences_from(conf)),
            [
                ("narenas", Cause::Refused { by: VARIABLE, expected }),
                ("thp", Cause::Broken(VARIABLE))
            ]
        );
    }

    #[test]
    fn the_variable_that_this_build_does_not_read_is_named() {
        let low = HeapProfile::LowMemory.conf().to_str().unwrap();
        let found = started_with(None).with_unread(Some(low.to_owned()));
        let cause = Cause::NotRead { written: "MALLOC_CONF", read: "_RJEM_MALLOC_CONF" };
        let ignored = found.ignored();
        assert_eq!(causes(&ignored), [("malloc_conf", cause.clone())]);
        let differences = found.differences_from(HeapProfile::LowMemory);
        assert!(differences.iter().all(|found| found.cause == cause), "{differences:?}");
        let plain = EffectiveConf { serves_c: true, unread: Vec::new(), ..found };
        assert_eq!((plain.variable(), plain.unread_variable()), ("MALLOC_CONF", VARIABLE_NAME));
        assert_eq!(started_with(None).with_unread(Some(String::new())).ignored(), []);
    }

    const VARIABLE_NAME: &str = "_RJEM_MALLOC_CONF";

    #[test]
    fn a_later_place_cannot_raise_the_number_of_background_threads() {
        let mut found = started_with(Some(HeapProfile::Balanced));
        found.conf_of_variable = Some("max_background_threads:4".to_owned());
        let asked = HeapConf::from(HeapProfile::Balanced).with("max_background_threads", "4");
        let capped = [("max_background_threads", Cause::Capped { most: 2 })];
        assert_eq!(causes(&found.differences_from(asked)), capped);
        assert_eq!(causes(&found.ignored()), capped);
    }

    #[test]
    fn the_kernel_and_the_build_are_causes() {
        let mut found = started_with(Some(HeapProfile::Balanced));
        found.kernel_thp = Some("always");
        found.page = ByteSize::kib(64);
        found.background_threads_supported = false;
        let of_balanced = found.differences_from(HeapProfile::Balanced);
        assert_eq!(
            causes(&of_balanced),
            [
                ("background_thread", Cause::NoBackgroundThreads),
                ("thp", Cause::KernelHugePages),
                ("page", Cause::PageOfBuild)
            ]
        );
        assert_eq!((&*of_balanced[2].asked, &*of_balanced[2].found), ("4KiB", "64KiB"));
        found.thp = "not supported";
        let asked = HeapConf::from(HeapProfile::Balanced).with("thp", "never");
        let differences = found.differences_from(asked);
        assert!(causes(&differences).contains(&("thp", Cause::KernelHugePages)));
        // With `thp:never` the kernel's choice is none of the heap's.
        let mut found = started_with(Some(HeapProfile::LowMemory));
        found.kernel_thp = Some("always");
        assert_eq!(found.differences_from(HeapProfile::LowMemory), []);
    }

    #[test]
    fn an_arena_with_decay_times_of_its_own_is_named() {
        let mut found = started_with(Some(HeapProfile::Balanced));
        let at_once = DecayTime::AtOnce;
        let apart = |arena| ArenaDecay { arena, dirty: at_once, muzzy: at_once };
        found.arenas_apart = vec![apart(4)];
        let cause = Cause::SetElsewhere { arena: Some(4) };
        let of_balanced = found.differences_from(HeapProfile::Balanced);
        assert_eq!(causes(&of_balanced), [("dirty_decay_ms", cause)]);
        found.background_threads = false;
        let of_balanced = causes(&found.differences_from(HeapProfile::Balanced));
        assert!(of_balanced.contains(&("dirty_decay_ms", Cause::LargeBlocks { arena: 4 })));
    }

    #[test]
    fn a_long_text_is_quoted_in_part() {
        let text = quoted(&"x".repeat(200));
        assert_eq!((text.len(), text.ends_with("...")), (QUOTED + 5, true));
    }
}
