//! The configuration that jemalloc receives at start: a profile, with custom settings on top, as a
//! string. Which of it took effect is in [`EffectiveConf`](super::EffectiveConf).
//!
//! Invariant: a string made from a profile lists the profile's settings first, in their order.

use std::borrow::Cow;
use std::fmt;

use super::profile::HeapProfile;

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

#[cfg(test)]
mod tests {
    use super::super::knobs::KNOBS;
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
