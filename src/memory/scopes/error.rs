//! Why an arena of a slot could not be shared, used or replaced. Nothing is changed then.

use thiserror::Error;

use crate::config::arena::ArenaOptionsError;
use crate::memory::MemoryError;

use super::Slot;

/// Why not.
#[derive(Clone, Debug, Error, PartialEq)]
#[non_exhaustive]
pub enum ScopeError {
    /// Options that cannot be used.
    #[error(transparent)]
    Options(#[from] ArenaOptionsError),
    /// The arena could not be opened.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// A slot without a name.
    #[error("a slot has no name: expected the provider's")]
    NoName,
    /// There is no such device.
    #[error("{slot}: there is no such device; expected gpu:0")]
    UnknownDevice {
        /// The slot.
        slot: Slot,
    },
    /// Nothing is shared there, so that nothing can end.
    #[error("{slot} has no shared arena: it was never shared, or ended before")]
    NotShared {
        /// The slot.
        slot: Slot,
    },
    /// Every place is taken.
    #[error("{max} slots have an arena: expected fewer")]
    TooManySlots {
        /// How many there may be.
        max: usize,
    },
    /// More users at once than are counted.
    #[error("{slot} has more than {max} users at once: some are leaked")]
    TooManyUsers {
        /// The slot.
        slot: Slot,
        /// The most that are counted.
        max: u32,
    },
    /// Other threads changed the slot's arena each time before this one could.
    #[error("{slot} was changed by other threads {attempts} times meanwhile: try again")]
    Contended {
        /// The slot.
        slot: Slot,
        /// How often it was tried.
        attempts: u32,
    },
}
