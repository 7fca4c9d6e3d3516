//! ONNX Runtime's arena options: what was written where, and what it means for an arena of ours.
//!
//! The two steps of [`config`](super) again. [`ArenaOptions`] is what somebody wrote in one place,
//! each value valid and with its spelling. [`Layers`] puts the places over each other and gives an
//! [`ArenaResolution`]: a value for each of the nine keys with its source, what it does here, and
//! every conflict. [`Targets`] and [`RunOptions`] are the shrink at the end of a run. It stands on
//! this floor because it maps options to the [`ArenaConfig`](crate::device::ArenaConfig) of the
//! floor below. It opens nothing; `Memory` does.
//!
//! Precedence, for each key: a replacement at run time, then the shared arena's options, then the
//! session's, which count only where there is no shared arena, then ONNX Runtime's default. Where
//! ONNX Runtime ignores an option with a warning, or without one, this says so to the caller.
//!
//! Invariant: an option that somebody wrote and that is not in force is an error or a [`Conflict`];
//! one that is in force and does nothing has its reason in [`Effective::without_effect`].

mod error;
mod keys;
mod options;
mod resolve;
mod scopes;
mod selector;

pub use error::{ArenaOptionsError, OptionFault};
pub use keys::{ArenaKey, ArenaValue, ExtendStrategy};
pub use options::{ArenaOptions, CUARENA_MARGIN, CuArenaLimitError, Written};
pub use resolve::{ArenaResolution, ArenaSource, Conflict, Effective, Layers, Reason};
pub use selector::{RunOptions, SHRINK_OPTION, SelectorError, Target, TargetKind, Targets};

#[cfg(test)]
mod tests;
