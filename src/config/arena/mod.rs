//! ONNX Runtime's arena options, and their meaning for a lowtide arena.
//!
//! [`ArenaOptions`] holds the options of one place, each validated and with its spelling.
//! `Layers` combines the places into an [`ArenaResolution`]: a value for each of the nine keys,
//! with its source, its effect and every conflict. The module is part of `config` because it maps options to an
//! [`ArenaConfig`](crate::device::ArenaConfig). It opens nothing; `Memory` does.
//!
//! Precedence, for each key: a replacement at run time, the shared arena's options, the session's
//! options (only if there is no shared arena), ONNX Runtime's default. Options that ONNX Runtime
//! ignores, with or without a warning, are reported to the caller.
//!
//! Invariant: an option that was set and is not in force is an error or a [`Conflict`]; one that is
//! in force but has no effect has its reason in [`Effective::without_effect`].

mod keys;
mod options;
mod resolve;

pub use keys::ArenaKey;
pub use options::{ArenaOptions, CUARENA_MARGIN, SHRINK_OPTION};
pub(crate) use options::{ShrinkTarget, targets};
pub(crate) use resolve::{ARENA_IS_OPEN, Layers, SHARED_ARENA};
pub use resolve::{ArenaResolution, ArenaSource, Conflict, Effective};

#[cfg(test)]
mod tests;
