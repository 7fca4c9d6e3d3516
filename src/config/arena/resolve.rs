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

use super::keys::{ArenaKey, SAME_AS_REQUESTED};
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
    /// Its value, as in [`Written`].
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

lowtide_core::named_enum! {
    /// The reason that a value is not in force.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    #[non_exhaustive]
    pub enum Reason {
        /// A session's options count only if there is no shared arena.
        SharedArena = "there is a shared arena",
        /// The arena was already open. Only a replacement changes its options.
        ArenaIsOpen = "the arena is already open",
        /// A replacement at run time set the key.
        Replaced = "a replacement sets the key",
        /// lowtide's own limit on device memory is lower.
        DeviceLimit = "the device limit is lower",
        /// The device has less free memory.
        DeviceFull = "the device has less free memory",
    }
}

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
    /// The reason that the option is not in force.
    pub reason: Reason,
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
    /// # Ok::<(), lowtide::config::ConfigError>(())
    /// ```
    ///
    /// # Errors
    /// [`ConfigError`] if a layer sets an option that no arena here supports.
    pub fn resolve(&self) -> Result<ArenaResolution, ConfigError> {
        let layers = [
            (ArenaSource::Replacement, self.replacement.as_ref()),
            (ArenaSource::Shared, self.shared.as_ref()),
            (ArenaSource::Session, self.session.as_ref()),
        ];
        for options in layers.iter().filter_map(|(_, options)| *options) {
            options.check_supported()?;
        }
        let mut resolution = ArenaResolution { values: Vec::new(), conflicts: Vec::new() };
        for key in ArenaKey::ALL {
            let of = |(source, options): (ArenaSource, Option<&'_ ArenaOptions>)| {
                Some((source, options?.get(key)?.clone()))
            };
            let written: Vec<_> = layers.into_iter().filter_map(of).collect();
            self.resolve_key(key, &written, &mut resolution);
        }
        explain(&mut resolution.values, self.pinned);
        for conflict in &mut resolution.conflicts {
            conflict.effective = resolution.values[conflict.key as usize].clone();
        }
        Ok(resolution)
    }

    /// Resolves a key of what the layers say about it, the strongest first.
    fn resolve_key(
        &self,
        key: ArenaKey,
        written: &[(ArenaSource, Written)],
        resolution: &mut ArenaResolution,
    ) {
        let is_out = |source| source == ArenaSource::Session && self.shared.is_some();
        let winner = written.iter().find(|(source, _)| !is_out(*source));
        let (source, value) = match winner {
            Some((source, written)) => (*source, written.value),
            None => (ArenaSource::Default, key.default_value()),
        };
        let spelled = winner.map(|(_, written)| written.spelled.clone());
        let mut effective = Effective { key, value, source, spelled, without_effect: None };
        let is_lowered = key == ArenaKey::Limit && value > self.device_limit.get();
        if is_lowered {
            effective.value = self.device_limit.get();
            (effective.source, effective.spelled) = (ArenaSource::DeviceLimit, None);
        }
        for (wanted_by, written) in written {
            let is_winner = winner.is_some_and(|(source, _)| source == wanted_by);
            let (wanted, reason) = match written.capped_from {
                _ if is_winner && is_lowered => (written.value, Reason::DeviceLimit),
                Some(amount) if is_winner => (amount.get(), Reason::DeviceFull),
                _ if is_out(*wanted_by) => (written.value, Reason::SharedArena),
                _ => (written.value, Reason::Replaced),
            };
            if wanted != effective.value {
                let (wanted_by, spelled) = (*wanted_by, written.spelled.clone());
                let effective = effective.clone();
                let conflict = Conflict { key, wanted, wanted_by, spelled, effective, reason };
                resolution.conflicts.push(conflict);
            }
        }
        resolution.values.push(effective);
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
