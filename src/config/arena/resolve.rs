//! Options of several places put over each other: one value for each key, its source, what it does
//! here, and every conflict.
//!
//! Pure. A session counts only where there is no shared arena, and then wholly; a replacement
//! changes the keys that it names and leaves the others as they were (ONNX Runtime takes a whole
//! new set). lowtide's own limit on device memory bounds `arena.max_mem`.
//!
//! Invariant: each option of each layer is in force with that layer as its source, or agrees with
//! what is in force, or is in exactly one [`Conflict`].

use std::fmt;

use super::error::ArenaOptionsError;
use super::keys::{ArenaKey, ArenaValue, ExtendStrategy};
use super::options::{ArenaOptions, Written};
use crate::bytes::ByteSize;
use crate::device::{ArenaConfig, Growth};

/// Who gave a value that is in force, or wanted one that is not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ArenaSource {
    /// Nobody: ONNX Runtime's default.
    Default,
    /// A session.
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
pub struct Effective {
    /// The option.
    pub key: ArenaKey,
    /// Its value.
    pub value: ArenaValue,
    /// Who gave it.
    pub source: ArenaSource,
    /// How that was spelled; `None` for a default.
    pub spelled: Option<String>,
    /// Why the value does nothing here, where somebody wrote it and it does not.
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

/// Why a value is not in force.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Reason {
    /// A session's options count only where there is no shared arena.
    SharedArena,
    /// An arena was open already; only a replacement changes its options.
    ArenaIsOpen,
    /// A replacement at run time named the key.
    Replaced,
    /// lowtide's own limit on device memory is lower.
    DeviceLimit,
    /// The device has less left.
    DeviceFull,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::SharedArena => "there is a shared arena",
            Self::ArenaIsOpen => "the arena is open already",
            Self::Replaced => "a replacement names the key",
            Self::DeviceLimit => "the device limit is lower",
            Self::DeviceFull => "the device has less left",
        })
    }
}

/// An option that somebody wrote and that is not in force.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Conflict {
    /// The option.
    pub key: ArenaKey,
    /// The value that was wanted.
    pub wanted: ArenaValue,
    /// Who wanted it.
    pub wanted_by: ArenaSource,
    /// How that was spelled.
    pub spelled: String,
    /// What is in force instead.
    pub effective: Effective,
    /// Why.
    pub reason: Reason,
}

impl fmt::Display for Conflict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { wanted, wanted_by, spelled, effective, reason, .. } = self;
        write!(f, "{spelled}={wanted} ({wanted_by}) is ignored because {reason}: ")?;
        write!(f, "{effective} is in force")
    }
}

/// What each place said of one arena; `None` where it does not exist.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layers {
    /// The session that opens the arena.
    pub session: Option<ArenaOptions>,
    /// The shared arena; without options it still keeps sessions' options out.
    pub shared: Option<ArenaOptions>,
    /// The replacements so far, the last on top.
    pub replacement: Option<ArenaOptions>,
    /// lowtide's own limit; [`ByteSize::MAX`] for none.
    pub device_limit: ByteSize,
    /// Whether it is a pool of pinned memory, of which only the limit can be set.
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
    /// One for each key, in the order of [`ArenaKey::ALL`].
    values: Vec<Effective>,
    /// Options of the layers that are not in force.
    conflicts: Vec<Conflict>,
}

impl Layers {
    /// Puts the layers over each other.
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
    /// [`OptionFault::Unsupported`](super::OptionFault::Unsupported) for what no arena here can do,
    /// in whichever layer it stands.
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
            // What the device limit has lowered is in a conflict of its own already.
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

/// Says where the device had less left than was asked for.
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

/// Says of each value that somebody wrote and that does nothing why it does nothing.
fn explain(values: &mut [Effective], pinned: bool) {
    let same = ArenaValue::Strategy(ExtendStrategy::SameAsRequested);
    let as_requested = values.iter().any(|value| value.value == same);
    for value in values.iter_mut().filter(|value| value.source != ArenaSource::Default) {
        value.without_effect = match value.key {
            ArenaKey::DeadBytes => {
                Some("a block is always split, whatever remains, which keeps less memory")
            }
            ArenaKey::ExtendStrategy
            | ArenaKey::InitialBytes
            | ArenaKey::RegrowthBytes
            | ArenaKey::StepMaxBytes
                if pinned =>
            {
                Some("a pinned pool obtains segments of a size of its own")
            }
            ArenaKey::InitialBytes | ArenaKey::RegrowthBytes | ArenaKey::StepMaxBytes
                if as_requested =>
            {
                Some("the arena grows by what is requested, not in steps")
            }
            ArenaKey::PoolThreshold | ArenaKey::PoolKeep => Some("CUDA's pool is not asked for"),
            _ => None,
        };
    }
}

/// A value's bytes; none where it has no such value.
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
    /// The value in force for a key.
    #[must_use]
    pub fn get(&self, key: ArenaKey) -> &Effective {
        let at = ArenaKey::ALL.iter().position(|known| *known == key).unwrap_or_default();
        &self.values[at]
    }

    /// All values in force, in the order of [`ArenaKey::ALL`].
    #[must_use]
    pub fn values(&self) -> &[Effective] {
        &self.values
    }

    /// Options of the layers that are not in force, each with what is.
    #[must_use]
    pub fn conflicts(&self) -> &[Conflict] {
        &self.conflicts
    }

    /// What of these options is not in force here, for the reason given.
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

    /// The limit in force; [`ByteSize::MAX`] for none.
    #[must_use]
    pub fn limit(&self) -> ByteSize {
        bytes(self.get(ArenaKey::Limit))
    }

    /// How the arena grows.
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

    /// With these options, and the rest as in `base`.
    #[must_use]
    pub fn config(&self, base: ArenaConfig) -> ArenaConfig {
        ArenaConfig { limit: self.limit(), growth: self.growth(), ..base }
    }
}
