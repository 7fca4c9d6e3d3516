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

use super::error::ArenaOptionsError;
use super::keys::{ArenaKey, ArenaValue, ExtendStrategy};
use super::options::{ArenaOptions, Written};
use crate::bytes::ByteSize;
use crate::device::{ArenaConfig, Growth};

/// The source of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum ArenaSource {
    /// ONNX Runtime's default.
    Default,
    /// The options of a session.
    Session,
    /// The options of the shared arena.
    Shared,
    /// A replacement at run time.
    Replacement,
    /// lowtide's own limit on device memory (`LOWTIDE_DEVICE_LIMIT`, `Builder::device_limit`).
    DeviceLimit,
}

impl fmt::Display for ArenaSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Default => "default",
            Self::Session => "session",
            Self::Shared => "shared",
            Self::Replacement => "replacement",
            Self::DeviceLimit => "device limit",
        })
    }
}

/// A value in force.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Effective {
    /// The option.
    pub key: ArenaKey,
    /// Its value.
    pub value: ArenaValue,
    /// The source of the value.
    pub source: ArenaSource,
    /// The key as spelled; `None` for a default.
    pub spelled: Option<String>,
    /// The reason that the value has no effect, if it was set and has none.
    pub without_effect: Option<&'static str>,
}

impl fmt::Display for Effective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={} ({}", self.key, self.value, self.source)?;
        if let Some(spelled) = self.spelled.as_ref().filter(|name| *name != self.key.name()) {
            write!(f, ", as {spelled}")?;
        }
        f.write_str(")")?;
        self.without_effect.map_or(Ok(()), |why| write!(f, ", without effect: {why}"))
    }
}

/// The reason that a value is not in force.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Reason {
    /// A session's options count only if there is no shared arena.
    SharedArena,
    /// The arena was already open. Only a replacement changes its options.
    ArenaIsOpen,
    /// A replacement at run time set the key.
    Replaced,
    /// lowtide's own limit on device memory is lower.
    DeviceLimit,
    /// The device has less free memory.
    DeviceFull,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::SharedArena => "there is a shared arena",
            Self::ArenaIsOpen => "the arena is already open",
            Self::Replaced => "a replacement sets the key",
            Self::DeviceLimit => "the device limit is lower",
            Self::DeviceFull => "the device has less free memory",
        })
    }
}

/// An option that was set and is not in force.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Conflict {
    /// The option.
    pub key: ArenaKey,
    /// The value that was set.
    pub wanted: ArenaValue,
    /// The source of that value.
    pub wanted_by: ArenaSource,
    /// The key as spelled.
    pub spelled: String,
    /// The value in force.
    pub effective: Effective,
    /// The reason that the option is not in force.
    pub reason: Reason,
}

impl fmt::Display for Conflict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { wanted, wanted_by, spelled, effective, reason, .. } = self;
        write!(f, "{spelled}={wanted} ({wanted_by}) is ignored because {reason}: ")?;
        write!(f, "{effective} is in force")
    }
}

/// The options of each place for one arena; `None` if the place does not exist.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layers {
    /// The session that opens the arena.
    pub session: Option<ArenaOptions>,
    /// The shared arena. Even without options it overrides the sessions' options.
    pub shared: Option<ArenaOptions>,
    /// The replacements so far, combined; later ones take precedence.
    pub replacement: Option<ArenaOptions>,
    /// lowtide's own limit of device memory; [`ByteSize::MAX`] for none.
    pub device_limit: ByteSize,
    /// `true` for a pool of pinned memory, which supports only the limit.
    pub pinned: bool,
}

impl Default for Layers {
    fn default() -> Self {
        let device_limit = ByteSize::MAX;
        Self { session: None, shared: None, replacement: None, device_limit, pinned: false }
    }
}

/// The options in force for one arena.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ArenaResolution {
    /// The value for each key, in the order of [`ArenaKey::ALL`].
    values: Vec<Effective>,
    /// Options of the layers that are not in force.
    conflicts: Vec<Conflict>,
}

impl Layers {
    /// Combines the layers.
    ///
    /// ```
    /// use lowtide::config::arena::{ArenaKey, ArenaOptions, ArenaSource, Layers};
    ///
    /// let session = [("ep.cudaep.arena.max_mem", "1073741824")];
    /// let shared = [("ep_factory.CudaEp.arena.extend_strategy", "1")];
    /// let resolution = Layers {
    ///     session: Some(ArenaOptions::of_session("CudaEp", session)?),
    ///     shared: Some(ArenaOptions::of_process("CudaEp", shared)?),
    ///     ..Layers::default()
    /// }
    /// .resolve()?;
    /// assert_eq!(resolution.get(ArenaKey::ExtendStrategy).source, ArenaSource::Shared);
    /// assert_eq!(
    ///     resolution.conflicts()[0].to_string(),
    ///     "ep.cudaep.arena.max_mem=1GiB (session) is ignored because there is a shared arena: \
    ///      arena.max_mem=no limit (default) is in force"
    /// );
    /// # Ok::<(), lowtide::config::arena::ArenaOptionsError>(())
    /// ```
    ///
    /// # Errors
    /// [`OptionFault::Unsupported`](super::OptionFault::Unsupported) if a layer sets an option that
    /// no arena here supports.
    pub fn resolve(&self) -> Result<ArenaResolution, ArenaOptionsError> {
        let session = self.session.as_ref();
        let layers = [
            (self.replacement.as_ref(), ArenaSource::Replacement),
            (self.shared.as_ref(), ArenaSource::Shared),
            (session.filter(|_| self.shared.is_none()), ArenaSource::Session),
        ];
        for options in [session, self.shared.as_ref(), self.replacement.as_ref()] {
            options.map_or(Ok(()), ArenaOptions::check_supported)?;
        }
        let mut conflicts = Vec::new();
        let mut values: Vec<_> = ArenaKey::ALL
            .into_iter()
            .map(|key| {
                let found = layers.iter().find_map(|(options, source)| {
                    let written = options.and_then(|options| options.get(key))?;
                    Some((written, *source))
                });
                found.map_or_else(|| Effective::default_of(key), |(w, s)| Effective::of(key, w, s))
            })
            .collect();
        bound_limit(&mut values, self.device_limit, &mut conflicts);
        for (options, source) in layers {
            report_capped(options, source, &values, &mut conflicts);
        }
        explain(&mut values, self.pinned);
        let mut resolution = ArenaResolution { values, conflicts: Vec::new() };
        for (options, source, reason) in [
            (session.filter(|_| self.shared.is_some()), ArenaSource::Session, Reason::SharedArena),
            (session.filter(|_| self.shared.is_none()), ArenaSource::Session, Reason::Replaced),
            (self.shared.as_ref(), ArenaSource::Shared, Reason::Replaced),
        ] {
            let Some(options) = options else { continue };
            let against = resolution.conflicts_with(options, source, reason);
            // A value lowered by the device limit already has its conflict.
            let known = |new: &Conflict, old: &Conflict| {
                new.key == old.key && new.wanted_by == old.wanted_by && new.wanted == old.wanted
            };
            let new = |one: &Conflict| !conflicts.iter().any(|old| known(one, old));
            let new: Vec<_> = against.into_iter().filter(new).collect();
            conflicts.extend(new);
        }
        resolution.conflicts = conflicts;
        Ok(resolution)
    }
}

/// Lowers the limit to lowtide's own.
fn bound_limit(values: &mut [Effective], device_limit: ByteSize, conflicts: &mut Vec<Conflict>) {
    for effective in values.iter_mut().filter(|value| value.key == ArenaKey::Limit) {
        if effective.value == ArenaValue::Bytes(device_limit) || bytes(effective) < device_limit {
            continue;
        }
        let before = effective.clone();
        effective.value = ArenaValue::Bytes(device_limit);
        effective.source = ArenaSource::DeviceLimit;
        effective.spelled = None;
        if let Some(spelled) = before.spelled {
            conflicts.push(Conflict {
                key: before.key,
                wanted: before.value,
                wanted_by: before.source,
                spelled,
                effective: effective.clone(),
                reason: Reason::DeviceLimit,
            });
        }
    }
}

/// Reports the options that exceed the device's free memory.
fn report_capped(
    options: Option<&ArenaOptions>,
    source: ArenaSource,
    values: &[Effective],
    conflicts: &mut Vec<Conflict>,
) {
    for (key, written) in options.iter().flat_map(|options| options.iter()) {
        let effective = values.iter().find(|value| value.key == key && value.source == source);
        if let (Some(amount), Some(effective)) = (written.capped_from, effective) {
            conflicts.push(Conflict {
                key,
                wanted: ArenaValue::Bytes(amount),
                wanted_by: source,
                spelled: written.spelled.clone(),
                effective: effective.clone(),
                reason: Reason::DeviceFull,
            });
        }
    }
}

/// Sets the reason for each value that was set and has no effect.
fn explain(values: &mut [Effective], pinned: bool) {
    let same = ArenaValue::Strategy(ExtendStrategy::SameAsRequested);
    let as_requested = values.iter().any(|value| value.value == same);
    for value in values.iter_mut().filter(|value| value.source != ArenaSource::Default) {
        value.without_effect = match value.key {
            ArenaKey::DeadBytes => Some("blocks are always split, which retains less memory"),
            ArenaKey::ExtendStrategy
            | ArenaKey::InitialBytes
            | ArenaKey::RegrowthBytes
            | ArenaKey::StepMaxBytes
                if pinned =>
            {
                Some("a pinned pool chooses the size of its segments")
            }
            ArenaKey::InitialBytes | ArenaKey::RegrowthBytes | ArenaKey::StepMaxBytes
                if as_requested =>
            {
                Some("the arena grows by the size of the request, not in steps")
            }
            ArenaKey::PoolThreshold | ArenaKey::PoolKeep => Some("CUDA's memory pool is not used"),
            _ => None,
        };
    }
}

/// Returns the value in bytes, or zero for values that are no amount.
const fn bytes(effective: &Effective) -> ByteSize {
    match effective.value {
        ArenaValue::Bytes(bytes) => bytes,
        ArenaValue::Strategy(_) | ArenaValue::Flag(_) => ByteSize::ZERO,
    }
}

impl Effective {
    fn default_of(key: ArenaKey) -> Self {
        let (value, source) = (key.default_value(), ArenaSource::Default);
        Self { key, value, source, spelled: None, without_effect: None }
    }

    fn of(key: ArenaKey, written: &Written, source: ArenaSource) -> Self {
        let spelled = Some(written.spelled.clone());
        Self { key, value: written.value, source, spelled, without_effect: None }
    }
}

impl ArenaResolution {
    /// Returns the value in force for a key.
    #[must_use]
    pub fn get(&self, key: ArenaKey) -> &Effective {
        let at = ArenaKey::ALL.iter().position(|known| *known == key).unwrap_or_default();
        &self.values[at]
    }

    /// Returns all values in force, in the order of [`ArenaKey::ALL`].
    #[must_use]
    pub fn values(&self) -> &[Effective] {
        &self.values
    }

    /// Returns the options that are not in force, each with the value in force.
    #[must_use]
    pub fn conflicts(&self) -> &[Conflict] {
        &self.conflicts
    }

    /// Returns a conflict, with the given reason, for each of these options that is not in force.
    #[must_use]
    pub fn conflicts_with(
        &self,
        options: &ArenaOptions,
        wanted_by: ArenaSource,
        reason: Reason,
    ) -> Vec<Conflict> {
        let wanted = options.iter().filter(|(key, written)| self.get(*key).value != written.value);
        wanted
            .map(|(key, written)| Conflict {
                key,
                wanted: written.value,
                wanted_by,
                spelled: written.spelled.clone(),
                effective: self.get(key).clone(),
                reason,
            })
            .collect()
    }

    /// Returns the limit in force; [`ByteSize::MAX`] for none.
    #[must_use]
    pub fn limit(&self) -> ByteSize {
        bytes(self.get(ArenaKey::Limit))
    }

    /// Returns the arena's growth.
    #[must_use]
    pub fn growth(&self) -> Growth {
        let step = |key| bytes(self.get(key));
        match self.get(ArenaKey::ExtendStrategy).value {
            ArenaValue::Strategy(ExtendStrategy::NextPowerOfTwo) => Growth::NextPowerOfTwo {
                initial: step(ArenaKey::InitialBytes),
                after_shrink: step(ArenaKey::RegrowthBytes),
                cap: step(ArenaKey::StepMaxBytes),
            },
            _ => Growth::SameAsRequested,
        }
    }

    /// Returns `base` with the limit and growth of these options.
    #[must_use]
    pub fn config(&self, base: ArenaConfig) -> ArenaConfig {
        ArenaConfig { limit: self.limit(), growth: self.growth(), ..base }
    }
}
