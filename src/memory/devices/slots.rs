//! Arenas shared by sessions, configured like ONNX Runtime's.
//!
//! A slot is a provider's name, a device and a kind of memory: device memory or pinned host memory,
//! each with its own options. `MemoryDevices::share_arena` opens a slot's arena for all sessions.
//! `MemoryDevices::use_arena` is a session's counted use of it, and opens the arena if there is
//! none. `MemoryDevices::replace_arena` changes its options at run time: it opens a new arena,
//! which serves all further allocations, and the old one drains. The worker drops the old arena
//! after its last block is freed; memory that its blocks do not use is released within a tick.
//!
//! Options that are not in force are reported to the caller, with the value in force and its
//! source. In ONNX Runtime an arena that is used by a session keeps its old options forever; here
//! it does not.
//!
//! While a thread opens an arena, others that use, share or replace the slot's wait for it, but no
//! allocation does. A use holds no arena, so it never keeps a replaced one alive. An allocation
//! takes the lock of the slot's state briefly, in addition to the arena's cost; the lock is not
//! held during the allocation.
//!
//! This module contains no policy; `config::arena` defines the meaning of options.
//!
//! Invariants: `users > 0 or shared <=> the slot has an arena`; a slot's `users` = the number of
//! its uses that exist; when a replacement has returned, no later allocation is in the old arena;
//! an old arena is in the snapshot while it has a live block or an allocation in progress; a
//! generation is cloned only out of `serving`, so a draining generation with a single handle has no
//! allocation in progress, and will have none.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::bytes::ByteSize;
use crate::config::arena::{
    ARENA_IS_OPEN, ArenaOptions, ArenaResolution, ArenaSource, Conflict, Layers, SHARED_ARENA,
};
use crate::decay::DecayTime;
use crate::device::driver::Driver as _;
use crate::device::{
    ArenaSnapshot, Buffer, DeviceArena, DeviceError, PinnedBuffer, PinnedPool, PinnedSnapshot,
    RawBlock, Region,
};
use crate::fork::Birth;
use crate::memory::error::MemoryError;
use crate::sync::{Mutex, MutexGuard, lock};
use bytemuck::Pod;

use super::arenas::{Arenas, ManagedArena};
use super::device::Device;
use super::values::Slot;

/// A counted use of a slot's arena, from
/// [`MemoryDevices::use_arena`](crate::memory::MemoryDevices::use_arena).
///
/// Buffers may outlive it. Use [`Buffer::enter`] to obtain a lease for one.
#[must_use = "the arena is left when this is dropped"]
pub struct ArenaUse {
    pub(super) place: Arc<ArenaSlot>,
    /// The options in force at the start of the use, and the session's that were not.
    pub report: ArenaReport,
}

impl ArenaUse {
    /// Allocates in the serving arena, like [`DeviceArena::alloc`].
    ///
    /// # Errors
    /// The same as for [`DeviceArena::alloc`]; [`DeviceError::Unsupported`] in a slot of pinned
    /// memory.
    pub fn alloc<T: Pod>(&self, len: usize, region: Region) -> Result<Buffer<T>, DeviceError> {
        self.with(|arena| arena.alloc(len, region))
    }

    /// Allocates in the serving arena, like [`DeviceArena::alloc_from`].
    ///
    /// # Errors
    /// The same as for [`DeviceArena::alloc_from`]; [`DeviceError::Unsupported`] in a slot of
    /// pinned memory.
    pub fn alloc_from<T: Pod>(&self, data: &[T], region: Region) -> Result<Buffer<T>, DeviceError> {
        self.with(|arena| arena.alloc_from(data, region))
    }

    /// Allocates in the serving pool, like [`PinnedPool::alloc`](crate::device::PinnedPool::alloc),
    /// for slots of pinned memory.
    ///
    /// # Errors
    /// The same as for [`PinnedPool::alloc`](crate::device::PinnedPool::alloc);
    /// [`DeviceError::Unsupported`] in a slot of device memory.
    pub fn alloc_pinned<T: Pod>(&self, len: usize) -> Result<PinnedBuffer<T>, DeviceError> {
        let serving = self.serving()?;
        let pool = serving.as_ref().and_then(|serving| serving.managed.pool.as_ref());
        let what = "pinned memory in a slot of device memory";
        pool.map_or_else(|| self.refused(what), |pool| pool.alloc(len))
    }

    /// Allocates in the serving arena, like [`DeviceArena::alloc_raw`]. Returns the arena as well:
    /// it frees the block ([`DeviceArena::free`]), even if it is replaced meanwhile. Do not
    /// allocate from it.
    ///
    /// # Errors
    /// The same as for [`DeviceArena::alloc_raw`]; [`DeviceError::Unsupported`] in a slot of pinned
    /// memory.
    pub fn alloc_raw(
        &self,
        size: ByteSize,
        align: ByteSize,
        region: Region,
    ) -> Result<(DeviceArena, RawBlock), DeviceError> {
        self.with(|arena| Ok((arena.clone(), arena.alloc_raw(size, align, region)?)))
    }

    /// Releases the idle memory of the serving arena now, like [`DeviceArena::purge`].
    ///
    /// # Errors
    /// The same as for [`DeviceArena::purge`]; [`DeviceError::Unsupported`] in a slot of pinned
    /// memory.
    pub fn purge(&self) -> Result<ByteSize, DeviceError> {
        self.with(DeviceArena::purge)
    }

    fn with<R>(
        &self,
        act: impl FnOnce(&DeviceArena) -> Result<R, DeviceError>,
    ) -> Result<R, DeviceError> {
        let serving = self.serving()?;
        let managed = serving.as_ref().map(|serving| &serving.managed);
        match managed.filter(|managed| managed.pool.is_none()) {
            Some(managed) => act(&managed.arena),
            None => self.refused("device memory in a slot of pinned memory"),
        }
    }

    fn serving(&self) -> Result<Option<Arc<ArenaGeneration>>, DeviceError> {
        match self.place.birth.is_here() {
            true => Ok(lock(&self.place.state).serving.clone()),
            false => Err(DeviceError::Forked),
        }
    }

    fn refused<R>(&self, what: &'static str) -> Result<R, DeviceError> {
        Err(DeviceError::Unsupported { what, backend: self.place.device.driver.backend() })
    }

    /// Returns the slot.
    #[must_use]
    pub fn slot(&self) -> &Slot {
        &self.place.slot
    }

    /// Returns the options in force, which a replacement may have changed. In a forked child, those
    /// in force at the start of the use.
    #[must_use]
    pub fn resolution(&self) -> Arc<ArenaResolution> {
        let now = if self.place.birth.is_here() { self.place.resolution() } else { None };
        now.unwrap_or_else(|| Arc::clone(&self.report.resolution))
    }
}

impl Drop for ArenaUse {
    /// Takes the slot's lock; no driver call. Does nothing in a forked child.
    fn drop(&mut self) {
        if self.place.birth.is_here() {
            self.place.leave();
        }
    }
}

lowtide_core::debug_as!(ArenaUse, |it| slot: it.slot(), conflicts: it.report.conflicts.len());

/// The operation on a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SlotAction {
    Use,
    Share,
    Replace,
}

/// An arena that serves or has served a slot, with the options that it was opened with.
#[derive(Debug)]
pub(super) struct ArenaGeneration {
    resolution: Arc<ArenaResolution>,
    pub(super) managed: Arc<ManagedArena>,
}

#[derive(Debug)]
pub(super) struct ArenaSlot {
    pub(super) slot: Slot,
    birth: Birth,
    pub(super) device: Arc<Device>,
    arenas: Arenas,
    /// Held while an arena is opened, so that one thread opens and the others join it.
    opening: Mutex<()>,
    state: Mutex<ArenaSlotState>,
}

#[derive(Debug, Default)]
struct ArenaSlotState {
    serving: Option<Arc<ArenaGeneration>>,
    /// The draining generations, oldest first; at most as many as there are arenas.
    draining: Vec<Arc<ArenaGeneration>>,
    layers: Layers,
    shared: bool,
    users: u64,
}

impl ArenaSlot {
    pub(super) fn new(slot: Slot, birth: Birth, device: Arc<Device>, arenas: Arenas) -> Self {
        let (opening, state) = (Mutex::default(), Mutex::default());
        Self { slot, birth, device, arenas, opening, state }
    }

    /// Joins the existing arena, or opens one in the place of another, which is returned: the
    /// caller calls [`begin_draining`] next.
    pub(super) fn act(
        &self,
        act: SlotAction,
        options: &ArenaOptions,
        device_limit: ByteSize,
        open: impl Fn(
            &ArenaResolution,
            Option<&Arc<ManagedArena>>,
        ) -> Result<Arc<ManagedArena>, MemoryError>,
    ) -> Result<(ArenaReport, Option<Arc<ArenaGeneration>>), MemoryError> {
        options.check_supported()?;
        let _opening = lock(&self.opening);
        // At most twice: while this thread opens, no other thread gives the slot an arena.
        loop {
            let (layers, replaced) = {
                let mut state = lock(&self.state);
                if act != SlotAction::Replace
                    && let Some(report) = self.join(&mut state, act, options)
                {
                    return Ok((report, None));
                }
                let replaced = state.serving.as_ref().map(|serving| Arc::clone(&serving.managed));
                (self.layers(&state, act, options, device_limit), replaced)
            };
            let resolution = Arc::new(layers.resolve()?);
            let opened = open(&resolution, replaced.as_ref());
            let mut state = lock(&self.state);
            if replaced.is_some() && state.serving.is_none() {
                // The last user has left meanwhile, and the options of its arena do not apply.
                drop(state); // before the arena, which calls the driver
                continue;
            }
            let opened = opened?;
            self.arenas.add(&opened, replaced.as_ref())?;
            let report = ArenaReport::new(&resolution, resolution.conflicts.clone(), true);
            let serving = Arc::new(ArenaGeneration { resolution, managed: opened });
            let old = state.serving.replace(serving);
            state.layers = layers;
            state.draining.extend(old.clone());
            match act {
                SlotAction::Use => state.users = 1, // there was no arena, and so no user
                SlotAction::Share => state.shared = true,
                SlotAction::Replace => state.shared |= old.is_none(),
            }
            return Ok((report, old));
        }
    }

    /// Counts another user of the serving arena; `None` if there is none.
    fn join(
        &self,
        state: &mut ArenaSlotState,
        act: SlotAction,
        options: &ArenaOptions,
    ) -> Option<ArenaReport> {
        let serving = state.serving.clone()?;
        let (source, reason) = match act {
            SlotAction::Use if state.shared => (ArenaSource::Session, SHARED_ARENA),
            SlotAction::Use => (ArenaSource::Session, ARENA_IS_OPEN),
            SlotAction::Share | SlotAction::Replace => (ArenaSource::Shared, ARENA_IS_OPEN),
        };
        if act == SlotAction::Use {
            state.users += 1;
        } else {
            state.shared = true;
            // In force when the arena is next replaced, with precedence over the first session's
            // options.
            state.layers.shared.get_or_insert_with(|| options.clone());
        }
        let conflicts =
            serving.resolution.conflicts_with(options, source, |_, of| (of.value, reason));
        Some(ArenaReport::new(&serving.resolution, conflicts, false))
    }

    /// Combines the earlier options and these.
    fn layers(
        &self,
        state: &ArenaSlotState,
        act: SlotAction,
        options: &ArenaOptions,
        device_limit: ByteSize,
    ) -> Layers {
        let mut layers = state.layers.clone();
        layers.pinned = self.slot.pinned;
        layers.device_limit = (!self.slot.pinned).then_some(device_limit);
        match act {
            SlotAction::Use => layers.session = Some(options.clone()),
            SlotAction::Share => layers.shared = Some(options.clone()),
            SlotAction::Replace => {
                let before = layers.replacement.unwrap_or_default();
                layers.replacement = Some(options.over(&before));
            }
        }
        layers
    }

    pub(super) fn resolution(&self) -> Option<Arc<ArenaResolution>> {
        let state = lock(&self.state);
        state.serving.as_ref().map(|serving| Arc::clone(&serving.resolution))
    }

    /// Ends the sharing. Returns `true` if the arena was shared.
    pub(super) fn unshare(&self) -> bool {
        let mut state = lock(&self.state);
        let shared = std::mem::take(&mut state.shared);
        self.retire(state);
        shared
    }

    /// Counts one user less.
    fn leave(&self) {
        let mut state = lock(&self.state);
        state.users -= 1;
        self.retire(state);
    }

    /// Starts to drain the arena if it has no users and is not shared. Its options are discarded.
    fn retire(&self, mut state: MutexGuard<'_, ArenaSlotState>) {
        if state.shared || state.users > 0 {
            return;
        }
        let Some(old) = state.serving.take() else { return };
        state.layers = Layers::default();
        old.managed.drains.store(true, Ordering::Relaxed);
        state.draining.push(Arc::clone(&old));
        drop(state);
        begin_draining(&old);
    }

    /// Removes the arenas that have no block and will have none. The caller drops them.
    pub(super) fn take_drained(&self) -> Vec<Arc<ManagedArena>> {
        // This is the last handle: see the invariant above. The check also orders this after the
        // blocks of other threads.
        let is_over = |generation: &mut Arc<ArenaGeneration>| {
            Arc::get_mut(generation).is_some() && !generation.managed.has_blocks()
        };
        let drained: Vec<_> = lock(&self.state).draining.extract_if(.., is_over).collect();
        let removed = drained.into_iter().map(|generation| {
            self.arenas.remove(&generation.managed);
            Arc::clone(&generation.managed)
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
        let figures = |of: &Arc<ArenaGeneration>| of.managed.arena.snapshot();
        let pool = |of: &Arc<ArenaGeneration>| of.managed.pool.as_ref().map(PinnedPool::snapshot);
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
pub(super) fn begin_draining(old: &ArenaGeneration) {
    old.managed.arena.set_decay(DecayTime::AtOnce);
}

/// The options in force after an arena was shared, used or replaced, and the options of the caller,
/// or older ones, that are not in force.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct ArenaReport {
    /// Every value in force, with its source.
    pub resolution: Arc<ArenaResolution>,
    /// Every option that is not in force, with the value in force.
    pub conflicts: Vec<Conflict>,
    /// `true` if this call opened the arena.
    pub opened: bool,
    /// The live bytes that drain with the arena that this call replaced; `None` if there was none.
    pub draining: Option<ByteSize>,
    /// The idle bytes of that arena that were released immediately.
    pub released: ByteSize,
}

impl ArenaReport {
    fn new(resolution: &Arc<ArenaResolution>, conflicts: Vec<Conflict>, opened: bool) -> Self {
        let (resolution, released) = (Arc::clone(resolution), ByteSize::ZERO);
        Self { resolution, conflicts, opened, draining: None, released }
    }
}

/// The figures of a slot.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct SlotSnapshot {
    /// The slot.
    pub slot: Slot,
    /// `true` if its arena is shared.
    pub shared: bool,
    /// The number of uses.
    pub users: u64,
    /// The options in force; `None` without an arena.
    pub resolution: Option<Arc<ArenaResolution>>,
    /// The serving arena; `None` without one. Blocks of dropped pinned buffers whose copies are not
    /// complete count as live.
    pub arena: Option<ArenaSnapshot>,
    /// The arenas that were replaced, or left by their last user, oldest first.
    pub draining: Vec<ArenaSnapshot>,
    /// The serving pool, for pinned memory.
    pub pool: Option<PinnedSnapshot>,
}

#[cfg(all(test, not(lowtide_loom)))]
mod tests {
    use std::cell::Cell;

    use super::*;
    use crate::config::DeviceChoice;
    use crate::config::arena::ArenaKey;

    fn options(key: &str, value: &str) -> ArenaOptions {
        ArenaOptions::from_keys([(key, value)]).expect("valid")
    }

    #[test]
    fn an_arena_that_is_left_while_its_replacement_opens_leaves_no_options() {
        let builder = crate::Memory::builder().detached().device(DeviceChoice::Host);
        let memory = builder.start().expect("starts");
        let devices = memory.devices();
        let slot = Slot::device("ep", 0);
        let (session, wanted) =
            (options("arena.max_mem", "8388608"), options("arena.extend_strategy", "1"));
        let used = devices.use_arena(&slot, &session).expect("opened");
        let (place, user, shared) =
            (Arc::clone(&used.place), Cell::new(Some(used)), devices.shared());
        let replaced = place.act(SlotAction::Replace, &wanted, ByteSize::MAX, |resolution, _| {
            drop(user.take());
            shared.open_apart(&place.device, resolution.config(shared.arena_config("new")))
        });
        let (report, old) = replaced.expect("opened");
        assert!(old.is_none(), "it drains because its last user left");
        let limit = report.resolution.get(ArenaKey::Limit);
        assert_eq!(limit.source, ArenaSource::Default, "{limit:?}");
        let strategy = report.resolution.get(ArenaKey::ExtendStrategy);
        assert_eq!(strategy.source, ArenaSource::Replacement, "{strategy:?}");
        let found = place.snapshot();
        assert_eq!((found.shared, found.users), (true, 0));
        assert_eq!(found.resolution, Some(report.resolution));
    }
}
