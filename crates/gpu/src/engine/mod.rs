//! The operations of an arena, as sequences of steps on its state.

pub(crate) mod alloc;
pub(crate) mod callbacks;
pub(crate) mod commit;
pub(crate) mod completion;
pub(crate) mod context;
pub(crate) mod import;
pub(crate) mod move_block;
pub(crate) mod raw_block;
pub(crate) mod resume;
pub(crate) mod shortage;
pub(crate) mod split;
pub(crate) mod stores;
pub(crate) mod suspend;
