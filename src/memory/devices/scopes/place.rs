//! One slot: the serving arena, the draining ones, their options, and the number of users.
//!
//! An arena is opened with no lock held, and then installed if nothing has changed in the meantime;
//! otherwise the attempt is repeated, a bounded number of times. Each failed attempt means that
//! another thread has succeeded.
//!
//! Invariant: a generation is cloned only out of `serving`, so a draining generation with a single
//! handle has no allocation in progress, and will have none.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::bytes::ByteSize;
use crate::config::arena::{ArenaOptions, ArenaResolution, ArenaSource, Layers, Reason};
use crate::decay::DecayTime;
use crate::device::driver::{Backend, Driver as _};
use crate::device::{DeviceArena, PinnedPool};
use crate::fork::Birth;
use crate::memory::devices::arenas::{ArenaId, Arenas};
use crate::memory::devices::device::Device;
use crate::memory::shared::Shared;
use crate::sync::{Mutex, lock};

use super::error::ScopeError;
use super::slot::{ArenaReport, Slot, SlotKind, SlotSnapshot};

/// The maximum number of attempts. An estimate: each time another thread has changed the same slot.
const ATTEMPTS_MAX: u32 = 8;

/// The operation on a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Act {
    Use,
    Share,
    Replace,
}

/// An arena that serves or has served a slot, with the options that it was opened with.
#[derive(Debug)]
pub(super) struct Generation {
    resolution: Arc<ArenaResolution>,
    /// Its number in the list of arenas.
    id: ArenaId,
    opened: Opened,
}

/// The source of a slot's memory.
#[derive(Clone, Debug)]
pub(super) struct Opened {
    /// The arena; that of the pool, if there is one, whose memory only the pool hands out.
    pub(super) arena: DeviceArena,
    pub(super) pool: Option<PinnedPool>,
}

impl Opened {
    /// Returns `true` if a block is held, or freed while the device may still use it. The last
    /// handle must not be dropped before: memory without a lane would be leaked, and a pool would
    /// wait for its copies.
    fn has_blocks(&self) -> bool {
        let snapshot = self.arena.snapshot();
        let held = snapshot.live.saturating_add(snapshot.pending).saturating_add(snapshot.imported);
        // Quarantined memory stays live for ever.
        let lost = self.pool.as_ref().map_or(ByteSize::ZERO, |pool| pool.snapshot().quarantined);
        held > lost
    }
}

impl Generation {
    /// Returns the arena of either kind of memory, for figures and the release of idle memory.
    pub(super) const fn any_arena(&self) -> &DeviceArena {
        &self.opened.arena
    }

    /// Returns the arena of a slot of device memory.
    pub(super) fn device_arena(&self) -> Option<&DeviceArena> {
        self.opened.pool.is_none().then_some(&self.opened.arena)
    }

    pub(super) const fn pool(&self) -> Option<&PinnedPool> {
        self.opened.pool.as_ref()
    }
}

#[derive(Debug)]
pub(super) struct Place {
    slot: Slot,
    birth: Birth,
    /// lowtide's own limit, if it bounds this kind of memory.
    device_limit: ByteSize,
    pub(super) device: Arc<Device>,
    arenas: Arenas,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// The number of changes of `serving`.
    changes: u64,
    serving: Option<Arc<Generation>>,
    /// The draining generations, oldest first; at most as many as there are arenas.
    draining: Vec<Arc<Generation>>,
    layers: Layers,
    shared: bool,
    users: u32,
}

/// The slots of a `Memory`.
#[derive(Debug, Default)]
pub(in crate::memory) struct Scopes(pub(super) Mutex<BTreeMap<Slot, Arc<Place>>>);

/// The result of an operation.
#[derive(Debug)]
pub(super) struct Done {
    pub(super) report: ArenaReport,
    /// The generation that drains since then; the caller calls [`begin_draining`] next.
    pub(super) old: Option<Arc<Generation>>,
}

impl Place {
    pub(super) fn new(
        slot: Slot,
        birth: Birth,
        device_limit: ByteSize,
        device: Arc<Device>,
        arenas: Arenas,
    ) -> Self {
        Self { slot, birth, device_limit, device, arenas, state: Mutex::default() }
    }

    pub(super) fn backend(&self) -> Backend {
        self.device.driver.backend()
    }

    pub(super) fn slot(&self) -> &Slot {
        &self.slot
    }

    /// Returns `true` in the process in which the lock can be taken.
    pub(super) fn is_here(&self) -> bool {
        self.birth.is_here()
    }

    /// Joins the existing arena, or opens one.
    pub(super) fn act(
        &self,
        memory: &Shared,
        act: Act,
        options: &ArenaOptions,
    ) -> Result<Done, ScopeError> {
        options.check_supported()?;
        for _ in 0..ATTEMPTS_MAX {
            let (changes, layers, replaced) = {
                let mut state = lock(&self.state);
                if act != Act::Replace
                    && let Some(report) = self.join(&mut state, act, options)?
                {
                    return Ok(Done { report, old: None });
                }
                let replaced = state.serving.as_ref().map(|serving| serving.id);
                (state.changes, self.layers(&state, act, options), replaced)
            };
            let resolution = Arc::new(layers.resolve()?);
            memory.sweep(); // so that what has drained takes no place
            let opened = match self.open(memory, &resolution, replaced) {
                // Another thread may have used the name or the place in the meantime.
                Err(_) if lock(&self.state).changes != changes => continue,
                opened => opened?,
            };
            let mut state = lock(&self.state);
            if state.changes != changes {
                drop(state); // before the arena, which calls the driver
                drop(opened);
                continue;
            }
            let id =
                self.arenas.add(&opened.arena, opened.pool.as_ref(), &self.device, replaced)?;
            let conflicts = resolution.conflicts().to_vec();
            let report = ArenaReport { resolution, conflicts, opened: true };
            let resolution = Arc::clone(&report.resolution);
            let old = state.serving.replace(Arc::new(Generation { resolution, id, opened }));
            state.changes += 1;
            state.layers = layers;
            state.draining.extend(old.clone());
            match act {
                Act::Use => state.users = 1, // there was no arena, and so no user
                Act::Share => state.shared = true,
                Act::Replace => state.shared |= old.is_none(),
            }
            return Ok(Done { report, old });
        }
        Err(ScopeError::Contended { slot: self.slot.clone(), attempts: ATTEMPTS_MAX })
    }

    /// Counts another user of the serving arena; `None` if there is none.
    fn join(
        &self,
        state: &mut State,
        act: Act,
        options: &ArenaOptions,
    ) -> Result<Option<ArenaReport>, ScopeError> {
        let Some(serving) = state.serving.clone() else { return Ok(None) };
        let (source, reason) = match act {
            Act::Use if state.shared => (ArenaSource::Session, Reason::SharedArena),
            Act::Use => (ArenaSource::Session, Reason::ArenaIsOpen),
            Act::Share | Act::Replace => (ArenaSource::Shared, Reason::ArenaIsOpen),
        };
        if act == Act::Use {
            let (users, max) = (state.users.checked_add(1), u32::MAX);
            let slot = || self.slot.clone();
            state.users = users.ok_or_else(|| ScopeError::TooManyUsers { slot: slot(), max })?;
        } else {
            state.shared = true;
            // In force when the arena is next replaced, with precedence over the first session's
            // options.
            state.layers.shared.get_or_insert_with(|| options.clone());
        }
        let resolution = Arc::clone(&serving.resolution);
        let conflicts = resolution.conflicts_with(options, source, reason);
        Ok(Some(ArenaReport { resolution, conflicts, opened: false }))
    }

    /// Combines the earlier options and these.
    fn layers(&self, state: &State, act: Act, options: &ArenaOptions) -> Layers {
        let mut layers = state.layers.clone();
        layers.device_limit = self.device_limit;
        layers.pinned = self.slot.kind == SlotKind::Pinned;
        match act {
            Act::Use => layers.session = Some(options.clone()),
            Act::Share => layers.shared = Some(options.clone()),
            Act::Replace => {
                let before = layers.replacement.unwrap_or_default();
                layers.replacement = Some(options.over(&before));
            }
        }
        layers
    }

    /// Opens an arena that is not installed yet.
    fn open(
        &self,
        memory: &Shared,
        resolution: &ArenaResolution,
        replaced: Option<ArenaId>,
    ) -> Result<Opened, ScopeError> {
        let name = self.slot.to_string();
        self.arenas.admit(&name, replaced)?;
        if self.slot.kind == SlotKind::Pinned {
            let (pool, arena) = memory.open_slot_pool(&self.device, name, resolution.limit())?;
            return Ok(Opened { arena, pool: Some(pool) });
        }
        Ok(Opened { arena: memory.open_slot_arena(&self.device, name, resolution)?, pool: None })
    }

    /// Returns the serving arena.
    pub(super) fn serving(&self) -> Option<Arc<Generation>> {
        lock(&self.state).serving.clone()
    }

    pub(super) fn resolution(&self) -> Option<Arc<ArenaResolution>> {
        let state = lock(&self.state);
        state.serving.as_ref().map(|serving| Arc::clone(&serving.resolution))
    }

    /// Ends the sharing. Returns `true` if the arena was shared.
    pub(super) fn unshare(&self) -> bool {
        let mut state = lock(&self.state);
        let shared = std::mem::take(&mut state.shared);
        let old = self.retire(&mut state);
        drop(state);
        begin_draining(old.as_deref());
        shared
    }

    /// Counts one user less.
    pub(super) fn leave(&self) {
        let mut state = lock(&self.state);
        state.users -= 1;
        let old = self.retire(&mut state);
        drop(state);
        begin_draining(old.as_deref());
    }

    /// Starts to drain the arena if it has no users and is not shared. Its options are discarded.
    fn retire(&self, state: &mut State) -> Option<Arc<Generation>> {
        if state.shared || state.users > 0 {
            return None;
        }
        let old = state.serving.take()?;
        state.changes += 1;
        state.layers = Layers::default();
        self.arenas.drain(old.id);
        state.draining.push(Arc::clone(&old));
        Some(old)
    }

    /// Removes the arenas that have no block and will have none. The caller drops them.
    pub(super) fn take_drained(&self) -> Vec<Opened> {
        let mut state = lock(&self.state);
        let mut drained = Vec::new();
        state.draining.retain_mut(|generation| {
            // This is the last handle: see the invariant above. The check also orders this after
            // the blocks of other threads.
            if Arc::get_mut(generation).is_none() || generation.opened.has_blocks() {
                return true;
            }
            drained.push((generation.id, generation.opened.clone()));
            false
        });
        drop(state);
        let removed = drained.into_iter().map(|(id, opened)| {
            self.arenas.remove(id);
            opened
        });
        removed.collect()
    }

    /// Returns `true` if there is nothing to show.
    pub(super) fn is_empty(&self) -> bool {
        let state = lock(&self.state);
        state.serving.is_none() && state.draining.is_empty()
    }

    pub(super) fn snapshot(&self) -> SlotSnapshot {
        let state = lock(&self.state);
        let figures = |generation: &Arc<Generation>| generation.any_arena().snapshot();
        let pool = |generation: &Arc<Generation>| generation.pool().map(PinnedPool::snapshot);
        SlotSnapshot {
            slot: self.slot.clone(),
            shared: state.shared,
            users: state.users,
            resolution: state.serving.as_ref().map(|serving| Arc::clone(&serving.resolution)),
            arena: state.serving.as_ref().map(figures),
            draining: state.draining.iter().map(figures).collect(),
            pool: state.serving.as_ref().and_then(pool),
        }
    }
}

/// Schedules the release of a draining arena's idle memory at the worker's next turn. No driver
/// call.
pub(super) fn begin_draining(old: Option<&Generation>) {
    if let Some(old) = old {
        old.any_arena().set_decay(DecayTime::AtOnce);
    }
}
