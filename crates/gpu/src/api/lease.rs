//! The permission to use an arena's memory.
//!
//! A slice of a buffer needs a lease, so that use without one does not compile. Leases nest and are
//! counted; while one is held the arena is awake, and no block moves. A lease names the streams
//! that use memory while it is held: before that memory sleeps, their work is waited for. A lease
//! without streams stands for all streams of the device.
//!
//! Invariant: `leases held = leases entered - leases dropped`, in the process of the arena.

use std::sync::Arc;

use crate::api::lane::Lane;
use crate::engine::enter::{enter, try_enter};
use crate::exec::inner::ArenaInner;
use crate::exec::lane::LaneInner;
use crate::state::streams::StreamKey;
use crate::types::error::DeviceError;
#[cfg(feature = "cuda")]
use lowtide_core::sync::atomic::{AtomicBool, Ordering};

/// A lease of an arena from [`DeviceArena::enter`](crate::DeviceArena::enter), which keeps it
/// awake.
///
/// One lease serves all buffers of its arena, and no other:
/// ```
/// use std::sync::Arc;
/// use lowtide_gpu::clock::SystemClock;
/// use lowtide_gpu::{ArenaConfig, DeviceArena, DeviceError, HostDriver, Region};
///
/// let driver = Arc::new(HostDriver::new());
/// let open = |name: &str| {
///     let clock = Arc::new(SystemClock::new());
///     DeviceArena::open(driver.clone(), clock, ArenaConfig::new(name))
/// };
/// let (arena, other) = (open("one")?, open("other")?);
/// let ones = arena.alloc_from(&[1_u8; 16], Region::Stable)?;
/// let twos = arena.alloc_from(&[2_u8; 16], Region::Stable)?;
/// let lease = arena.enter()?;
/// assert_eq!((ones.slice(&lease)?[0], twos.slice(&lease)?[0]), (1, 2));
/// let foreign = other.enter()?;
/// assert!(matches!(ones.slice(&foreign), Err(DeviceError::ForeignLease { .. })));
/// # Ok::<(), DeviceError>(())
/// ```
#[derive(Debug)]
#[must_use = "an arena is awake only while the lease is held"]
pub struct Lease {
    pub(crate) arena: Arc<ArenaInner>,
    /// The lanes whose streams use memory; empty for any stream.
    lanes: Vec<Arc<LaneInner>>,
    /// `true` if cudarc was given a view under this lease. Any stream may use the view.
    #[cfg(feature = "cuda")]
    viewed: AtomicBool,
}

impl Lease {
    /// Creates a lease of an arena, waking it if it sleeps. Waits for the end of a move in
    /// progress; no other starts while the lease is held.
    pub(crate) fn of(arena: &Arc<ArenaInner>) -> Result<Self, DeviceError> {
        arena.check_open()?;
        arena.run(enter)?;
        Ok(Self::new(arena))
    }

    /// Creates a lease for the streams of these lanes; for any stream if there are none.
    pub(crate) fn for_lanes(
        arena: &Arc<ArenaInner>,
        lanes: impl Iterator<Item = Arc<LaneInner>>,
    ) -> Result<Self, DeviceError> {
        let mut lease = Self::of(arena)?;
        lease.lanes.extend(lanes);
        Ok(lease)
    }

    /// Creates a lease of an arena that is awake; returns `None` if it sleeps. Also waits for a
    /// move in progress.
    pub(crate) fn try_of(arena: &Arc<ArenaInner>) -> Result<Option<Self>, DeviceError> {
        let is_entered = arena.run(try_enter)?;
        Ok(is_entered.then(|| Self::new(arena)))
    }

    /// Creates the value for a lease that is already counted.
    fn new(arena: &Arc<ArenaInner>) -> Self {
        Self {
            arena: Arc::clone(arena),
            lanes: Vec::new(),
            #[cfg(feature = "cuda")]
            viewed: AtomicBool::new(false),
        }
    }

    /// Records that cudarc was given a view under this lease.
    #[cfg(feature = "cuda")]
    pub(crate) fn note_view(&self) {
        self.viewed.store(true, Ordering::Relaxed);
    }

    /// Returns `true` if streams that the lease does not name may use memory under it.
    fn is_for_all(&self) -> bool {
        #[cfg(feature = "cuda")]
        if self.viewed.load(Ordering::Relaxed) {
            return true;
        }
        self.lanes.is_empty()
    }

    /// Adds a stream that uses memory while this lease is held.
    ///
    /// A lease from [`DeviceArena::enter`](crate::DeviceArena::enter) stands for all streams until
    /// the first call; from then on for the added streams only.
    ///
    /// # Errors
    /// [`DeviceError::ForeignLane`], [`DeviceError::Forked`].
    pub fn record_use(&mut self, lane: &Lane) -> Result<(), DeviceError> {
        lane.check_of(&self.arena)?;
        if self.lanes.iter().all(|known| known.key != lane.known().key) {
            self.lanes.push(Arc::clone(lane.known()));
        }
        Ok(())
    }
}

impl Drop for Lease {
    /// Ends the lease. Takes the arena's lock for a subtraction and to record the streams; makes no
    /// driver call. Does nothing in a forked child.
    fn drop(&mut self) {
        let _ = self.arena.run_here(|state| {
            if state.capabilities.asynchronous {
                if self.is_for_all() {
                    state.sleep.note_used(StreamKey::CONTEXT);
                }
                for stream in self.lanes.iter().filter_map(|lane| lane.key) {
                    state.sleep.note_used(stream);
                }
            }
            state.leave(&*self.arena.clock);
        });
    }
}
