//! Combines the options of several places: one value for each key, with its source, its effect, and
//! every conflict.
//!
//! Pure. A session's options count only if there is no shared arena. A replacement changes the keys
//! that it sets and leaves the others unchanged (in ONNX Runtime it replaces all of them).
//! lowtide's own limit on device memory bounds `arena.max_mem`.
//!
//! Invariant: each option of each layer is in force with that layer as its source, or agrees with
//! the value in force, or is in exactly one [`Conflict`].

use std::fmt;

use super::keys::{ArenaKey, NO_LIMIT, SAME_AS_REQUESTED};
use super::options::{ArenaOptions, Written};
use crate::bytes::ByteSize;
use crate::config::error::ConfigError;
use crate::device::{ArenaConfig, Growth};

lowtide_core::named_enum! {
    /// The source of a value.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
    #[non_exhaustive]
    pub enum ArenaSource {
        /// ONNX Runtime's default.
        Default = "default",
        /// The options of a session.
        Session = "session",
        /// The options of the shared arena.
        Shared = "shared",
        /// A replacement at run time.
        Replacement = "replacement",
        /// lowtide's own limit on device memory (`LOWTIDE_DEVICE_LIMIT`, `Builder::device_limit`).
        DeviceLimit = "device limit",
    }
}

/// A value in force.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Effective {
    /// The option.
    pub key: ArenaKey,
    /// Its value: bytes, [`u64::MAX`] for no limit, or the number of a strategy or a switch.
    pub value: u64,
    /// The source of the value.
    pub source: ArenaSource,
    /// The key as spelled; `None` for a default.
    pub spelled: Option<String>,
    /// The reason that the value has no effect, if it was set and has none.
    pub without_effect: Option<&'static str>,
}

impl fmt::Display for Effective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={} ({}", self.key, self.key.show(self.value), self.source)?;
        if let Some(spelled) = self.spelled.as_ref().filter(|name| *name != self.key.name()) {
            write!(f, ", as {spelled}")?;
        }
        f.write_str(")")?;
        self.without_effect.map_or(Ok(()), |why| write!(f, ", without effect: {why}"))
    }
}

/// The reasons of conflicts.
pub(crate) const SHARED_ARENA: &str = "there is a shared arena";
pub(crate) const ARENA_IS_OPEN: &str = "the arena is already open";
pub(super) const REPLACED: &str = "a replacement sets the key";
pub(super) const DEVICE_LIMIT: &str = "the device limit is lower";
pub(super) const DEVICE_FULL: &str = "the device has less free memory";

/// An option that was set and is not in force.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Conflict {
    /// The option.
    pub key: ArenaKey,
    /// The value that was set.
    pub wanted: u64,
    /// The source of that value.
    pub wanted_by: ArenaSource,
    /// The key as spelled.
    pub spelled: String,
    /// The value in force.
    pub effective: Effective,
    /// The reason that the option is not in force, such as "there is a shared arena".
    pub reason: &'static str,
}

impl fmt::Display for Conflict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { key, wanted, wanted_by, spelled, effective, reason } = self;
        let wanted = key.show(*wanted);
        write!(f, "{spelled}={wanted} ({wanted_by}) is ignored because {reason}: ")?;
        write!(f, "{effective} is in force")
    }
}

/// The options of each place for one arena; `None` if the place does not exist.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Layers {
    /// The session that opens the arena.
    pub(crate) session: Option<ArenaOptions>,
    /// The shared arena. Even without options it overrides the sessions' options.
    pub(crate) shared: Option<ArenaOptions>,
    /// The replacements so far, combined; later ones take precedence.
    pub(crate) replacement: Option<ArenaOptions>,
    /// lowtide's own limit of device memory, if there is one.
    pub(crate) device_limit: Option<ByteSize>,
    /// `true` for a pool of pinned memory, which supports only the limit.
    pub(crate) pinned: bool,
}

/// The options in force for one arena.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ArenaResolution {
    /// The value in force for each key, in the order of [`ArenaKey::ALL`].
    pub values: Vec<Effective>,
    /// The options that are not in force, each with the value in force.
    pub conflicts: Vec<Conflict>,
}

impl Layers {
    /// Combines the layers.
    ///
    /// # Errors
    /// [`ConfigError`] if a layer sets an option that no arena here supports.
    pub(crate) fn resolve(&self) -> Result<ArenaResolution, ConfigError> {
        let layers = [
            (ArenaSource::Replacement, &self.replacement),
            (ArenaSource::Shared, &self.shared),
            (ArenaSource::Session, &self.session),
        ];
        let layers = layers.into_iter().filter_map(|(by, options)| Some((by, options.as_ref()?)));
        layers.clone().try_for_each(|(_, options)| options.check_supported())?;
        let is_out = |source| source == ArenaSource::Session && self.shared.is_some();
        let in_force = |key: ArenaKey| {
            let mut written = layers.clone().filter(|(source, _)| !is_out(*source));
            let winner =
                written.find_map(|(source, options)| Some((source, options.written(key)?)));
            let (source, value, spelled) = match winner {
                Some((source, of)) => (source, of.value, Some(of.spelled.clone())),
                None => (ArenaSource::Default, key.default_value(), None),
            };
            let limit = self.device_limit.map_or(NO_LIMIT, ByteSize::get);
            let (source, value, spelled) = match key {
                ArenaKey::Limit if value > limit => (ArenaSource::DeviceLimit, limit, None),
                _ => (source, value, spelled),
            };
            Effective { key, value, source, spelled, without_effect: None }
        };
        let mut values = ArenaKey::ALL.map(in_force).to_vec();
        explain(&mut values, self.pinned);
        let mut resolution = ArenaResolution { values, conflicts: Vec::new() };
        for (by, options) in layers {
            let wanted = |of: &Effective, written: &Written| match written.capped_from {
                _ if is_out(by) => (written.value, SHARED_ARENA),
                Some(amount) if of.source == by => (amount.get(), DEVICE_FULL),
                _ if of.source == ArenaSource::DeviceLimit && written.value > of.value => {
                    (written.value, DEVICE_LIMIT)
                }
                _ => (written.value, REPLACED),
            };
            let conflicts = resolution.conflicts_with(options, by, wanted);
            resolution.conflicts.extend(conflicts);
        }
        resolution.conflicts.sort_by_key(|conflict| conflict.key);
        Ok(resolution)
    }
}

/// Sets the reason for each value that was set and has no effect.
fn explain(values: &mut [Effective], pinned: bool) {
    let as_requested =
        values.iter().any(|of| of.key == ArenaKey::ExtendStrategy && of.value == SAME_AS_REQUESTED);
    for value in values.iter_mut().filter(|value| value.source != ArenaSource::Default) {
        let is_step = matches!(
            value.key,
            ArenaKey::InitialBytes | ArenaKey::RegrowthBytes | ArenaKey::StepMaxBytes
        );
        value.without_effect = match value.key {
            ArenaKey::DeadBytes => Some("blocks are always split, which retains less memory"),
            key if pinned && (is_step || key == ArenaKey::ExtendStrategy) => {
                Some("a pinned pool chooses the size of its segments")
            }
            _ if is_step && as_requested => {
                Some("the arena grows by the size of the request, not in steps")
            }
            ArenaKey::PoolThreshold | ArenaKey::PoolKeep => Some("CUDA's memory pool is not used"),
            _ => None,
        };
    }
}

impl ArenaResolution {
    /// Returns the value in force for a key.
    #[must_use]
    pub fn get(&self, key: ArenaKey) -> &Effective {
        &self.values[key as usize]
    }

    /// Returns a conflict for each of these options that is not in force. `wanted` returns what the
    /// place asked for, and the reason.
    pub(crate) fn conflicts_with(
        &self,
        options: &ArenaOptions,
        wanted_by: ArenaSource,
        wanted: impl Fn(&Effective, &Written) -> (u64, &'static str),
    ) -> Vec<Conflict> {
        let conflict = |(key, written): (ArenaKey, &Written)| {
            let effective = self.get(key).clone();
            let (wanted, reason) = wanted(&effective, written);
            let spelled = written.spelled.clone();
            let is_in_force = wanted == effective.value;
            let conflict = Conflict { key, wanted, wanted_by, spelled, effective, reason };
            (!is_in_force).then_some(conflict)
        };
        options.iter().filter_map(conflict).collect()
    }

    /// Returns the limit in force; [`ByteSize::MAX`] for none.
    #[must_use]
    pub fn limit(&self) -> ByteSize {
        ByteSize::new(self.get(ArenaKey::Limit).value)
    }

    /// Returns the arena's growth.
    #[must_use]
    pub fn growth(&self) -> Growth {
        let step = |key| ByteSize::new(self.get(key).value);
        if self.get(ArenaKey::ExtendStrategy).value == SAME_AS_REQUESTED {
            return Growth::SameAsRequested;
        }
        Growth::NextPowerOfTwo {
            initial: step(ArenaKey::InitialBytes),
            after_shrink: step(ArenaKey::RegrowthBytes),
            cap: step(ArenaKey::StepMaxBytes),
        }
    }

    /// Returns `base` with the limit and growth of these options.
    #[must_use]
    pub fn config(&self, base: ArenaConfig) -> ArenaConfig {
        ArenaConfig { limit: self.limit(), growth: self.growth(), ..base }
    }
}
