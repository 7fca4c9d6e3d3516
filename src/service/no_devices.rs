//! The stand-in for `devices` in a build without device arenas: it adds nothing.

use serde_json::Value;

use crate::memory::{HistorySample, Memory, MemorySnapshot};

/// The paths of the admin commands.
pub(super) const ADMIN_PATHS: &[&str] =
    &["/memory/purge", "/memory/unload", "/memory/fit", "/memory/profile"];

pub(super) const fn add_states(_: &MemorySnapshot, _: &mut Value) {}

pub(super) const fn add_figures(_: &MemorySnapshot, _: &mut Value) {}

pub(super) const fn add_history(_: &[HistorySample], _: &mut Value) {}

pub(super) const fn processes(_: &Memory) -> Option<Value> {
    None
}

/// The maps of arenas, of which there are none.
#[derive(Debug, Default)]
pub(super) struct Maps {}

impl Maps {
    #[expect(clippy::unused_self, reason = "as in a build with device arenas")]
    pub(super) const fn of(&self, _: &Memory) -> Option<Value> {
        None
    }
}
