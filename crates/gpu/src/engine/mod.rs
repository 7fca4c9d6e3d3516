//! The steps of every operation on the state of an arena.

pub(crate) mod call;
pub(crate) mod commit;
pub(crate) mod compact;
pub(crate) mod completion;
pub(crate) mod enter;
pub(crate) mod import;
pub(crate) mod move_block;
pub(crate) mod obtain;
pub(crate) mod place;
pub(crate) mod port;
pub(crate) mod raw_block;
pub(crate) mod reclaim;
pub(crate) mod refusal;
pub(crate) mod remap;
pub(crate) mod resume;
pub(crate) mod shortage;
pub(crate) mod sleep;
