//! Errors of sharing, using and replacing the arena of a slot. Nothing is changed if one occurs.

use thiserror::Error;

use crate::config::ConfigError;
use crate::memory::devices::selector::ArenaError;
use crate::memory::error::MemoryError;

use super::slot::Slot;

/// Returns the names of this many devices.
fn gpus(devices: usize) -> String {
    match devices.saturating_sub(1) {
        0 => "gpu:0".to_owned(),
        last => format!("gpu:0 to gpu:{last}"),
    }
}

/// An error of sharing, using or replacing the arena of a slot.
#[derive(Clone, Debug, Error, PartialEq)]
#[non_exhaustive]
pub enum ScopeError {
    /// Invalid options.
    #[error(transparent)]
    Options(#[from] ConfigError),
    /// The arena could not be opened.
    #[error(transparent)]
    Arena(#[from] ArenaError),
    /// This `Memory` cannot do it now, for example in a forked child.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// A slot without a name.
    #[error("the slot's name is empty: expected the name of a provider")]
    NoName,
    /// There is no such device.
    #[error("{slot}: unknown device; expected {}", gpus(*devices))]
    UnknownDevice {
        /// The slot.
        slot: Slot,
        /// The number of devices, at least 1.
        devices: usize,
    },
    /// The slot has no shared arena.
    #[error("{slot} has no shared arena (never shared, or sharing has ended)")]
    NotShared {
        /// The slot.
        slot: Slot,
    },
    /// The maximum number of slots has an arena.
    #[error("too many slots: at most {max} can have an arena")]
    TooManySlots {
        /// The maximum.
        max: usize,
    },
    /// More concurrent users than can be counted.
    #[error("{slot} has more than {max} concurrent users: some may be leaked")]
    TooManyUsers {
        /// The slot.
        slot: Slot,
        /// The maximum.
        max: u32,
    },
    /// Other threads changed the slot's arena at every attempt.
    #[error("{slot} was changed by other threads during {attempts} attempts: try again")]
    Contended {
        /// The slot.
        slot: Slot,
        /// The number of attempts.
        attempts: u32,
    },
}
