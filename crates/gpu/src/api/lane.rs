//! A lane: one stream of the device on one arena.
//!
//! A lane can reuse memory that it freed immediately, because its work runs in order. Another lane
//! gets the memory after an event that its stream waits for, or when the work is complete. A lane
//! uses the stream's handle, but neither creates nor destroys the stream.
//!
//! Invariant: the arena knows the stream while its lane, or a buffer or a lease of it, exists.
#![expect(unsafe_code, reason = "only the caller knows that a stream is there")]

use std::sync::Arc;

use crate::api::arena::DeviceArena;
use crate::api::buffer::Buffer;
use crate::driver::StreamHandle;
use crate::engine::completion::mark_end;
use crate::engine::resume::enter;
use crate::exec::{ArenaInner, Keeps, LaneInner};
use crate::state::StreamKey;
use crate::types::{DeviceError, Region, Result};
use bytemuck::Pod;
#[cfg(feature = "cuda")]
use lowtide_core::sync::atomic::{AtomicBool, Ordering};

/// One stream on one arena. A cheap handle: clones refer to the same lane.
///
/// A lane can reuse memory that it freed immediately. If another lane takes the memory, its stream
/// waits on the device for the earlier work, and no thread waits; the wait is skipped if the arena
/// has seen that the work is complete ([`DeviceArena::decay`], or a `Memory`). Memory is released
/// only after that. End a stream in this order: drop its buffers, leases and lanes, which does not
/// wait, then destroy the stream. A stream and a lane per request are fine: the next request reuses
/// their memory.
///
/// Blocks of frequent sizes are cached in the lane, within
/// [`ArenaConfig::thread_cache`](crate::ArenaConfig::thread_cache): such an alloc/free pair does
/// not take the arena's lock. Other lanes get them when this lane ends a run, when the lane is
/// dropped with its last buffer and lease, when they age, and when memory is short.
///
/// [`Lane::copy_to_device`] and [`Lane::copy_to_host`] copy page-locked memory asynchronously.
///
/// On a driver with synchronous calls a lane is equivalent to the arena.
///
/// ```
/// use std::sync::Arc;
///
/// use lowtide_gpu::ByteSize;
/// use lowtide_gpu::driver::Driver as _;
/// use lowtide_cuda_sim::{Pattern, SimDriver, SimOptions};
/// use lowtide_gpu::{ArenaConfig, DeviceArena, Region};
///
/// let sim = Arc::new(SimDriver::new(SimOptions::default())); // stands for a device
/// let config = ArenaConfig { limit: ByteSize::mib(4), ..ArenaConfig::new("embedder") };
/// let arena = DeviceArena::open(sim.clone(), Arc::new(sim.clock()), config)?;
/// let (copies, computes) = (sim.stream_create()?, sim.stream_create()?);
/// // SAFETY: the streams are the driver's, and destroyed after their lanes.
/// let (one, two) = unsafe { (arena.lane(copies)?, arena.lane(computes)?) };
///
/// let mut input = one.alloc::<u8>(4 << 20, Region::Dynamic)?;
/// let mut lease = one.enter()?;
/// let at = input.address(&lease)?.expect("not empty");
/// sim.fill(copies, at, input.bytes(), Pattern::new(1))?;
/// // The other stream uses it too: record that for the buffer and the lease. The program
/// // itself orders that work after the copy, as without lanes.
/// input.record_use(&two)?;
/// lease.record_use(&two)?;
/// let copied = sim.event_create()?;
/// sim.event_record(copied, copies)?;
/// sim.stream_wait_event(computes, copied)?;
/// sim.check(computes, at, input.bytes(), Pattern::new(1))?;
/// drop((input, lease)); // does not wait
///
/// let output = two.alloc::<u8>(4 << 20, Region::Dynamic)?; // the same memory, after that work
/// drop(output);
/// two.end_run()?;
/// drop((one, two));
/// for stream in [copies, computes] {
///     sim.stream_destroy(stream)?;
/// }
/// # sim.run_all();
/// # sim.assert_no_faults();
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct Lane {
    arena: DeviceArena,
    known: Arc<LaneInner>,
}

impl DeviceArena {
    /// Returns the lane of a stream.
    ///
    /// # Safety
    /// The stream belongs to the arena's driver, and exists until the lane, its clones, its buffers
    /// and its leases are dropped: a CUDA driver does not check stream handles. The host driver has
    /// no streams and the simulation checks handles, so any number is safe with them.
    ///
    /// # Errors
    /// [`DeviceError::Closed`], [`DeviceError::Forked`].
    pub unsafe fn lane(&self, stream: StreamHandle) -> Result<Lane> {
        // SAFETY: the contract of this function.
        unsafe { self.lane_with(stream, Keeps::Others) }
    }

    /// Returns the lane of a stream that the given value keeps alive.
    ///
    /// # Safety
    /// As for [`DeviceArena::lane`]; the given value may be what keeps the stream until then.
    ///
    /// # Errors
    /// The errors of [`DeviceArena::lane`].
    pub(crate) unsafe fn lane_with(&self, stream: StreamHandle, keeps: Keeps) -> Result<Lane> {
        let inner = self.inner();
        inner.check_open()?;
        // SAFETY: the contract of this function.
        let known = unsafe { LaneInner::new(inner, stream, keeps) };
        Ok(Lane { arena: self.clone(), known: Arc::new(known) })
    }
}

impl Lane {
    /// Returns the lane's arena.
    #[must_use]
    pub const fn arena(&self) -> &DeviceArena {
        &self.arena
    }

    /// Returns the stream.
    #[must_use]
    pub fn stream(&self) -> StreamHandle {
        self.known.stream
    }

    /// Allocates `len` elements with unspecified contents for this lane's next work. Dropping the
    /// buffer after its last use was queued on the stream frees it.
    ///
    /// If only memory is left that other streams may still use, the stream waits for them on the
    /// device; no thread waits. Committing new memory comes last.
    ///
    /// While a stream captures a graph, memory that would need a wait harmful to the capture is
    /// skipped, and memory is committed instead, within the limit.
    ///
    /// A graph keeps the addresses that it captured. A buffer with a view (`Buffer::cuda`) that is
    /// dropped while its stream captures, or after it was viewed in a capture, is held: its memory
    /// is not reused before the unsafe [`DeviceArena::release_captured`], so that launches of the
    /// graph use no memory of others. Not seen are buffers of which a view was taken before the
    /// capture and that are dropped after it without cudarc's event tracking, captures on streams
    /// that neither the lane nor [`Buffer::record_use`] names, and work that was given an address
    /// ([`Buffer::address`]): keep these buffers until the graph is destroyed. Launch a graph under
    /// a lease.
    ///
    /// # Errors
    /// The errors of [`DeviceArena::alloc`].
    pub fn alloc<T: Pod>(&self, len: usize, region: Region) -> Result<Buffer<T>> {
        match (self.known.key, self.known.number) {
            (None, None) => self.arena.alloc(len, region),
            _ => self.arena.alloc_for(Some(&self.known), len, region),
        }
    }

    /// Returns a lease for this lane's stream. Like [`DeviceArena::enter`], but a sleep waits for
    /// the work of this stream and not of the whole device. [`Lease::record_use`] adds further
    /// streams.
    ///
    /// # Errors
    /// The errors of [`DeviceArena::enter`].
    pub fn enter(&self) -> Result<Lease> {
        Lease::of(self.arena.inner(), vec![Arc::clone(&self.known)])
    }

    /// Marks the end of a run: lanes that take memory freed until now wait for the work up to here,
    /// not for later work of the stream. Without this call they wait for all work queued until they
    /// allocate. Records at most one event, and does not wait.
    ///
    /// # Errors
    /// [`DeviceError::Driver`], with code 900 while the stream captures a graph;
    /// [`DeviceError::Forked`].
    pub fn end_run(&self) -> Result<()> {
        let inner = self.arena.inner();
        inner.check_here()?;
        // Cached blocks were freed before the mark.
        if let Some(shard) = &self.known.shard {
            shard.give_up();
        }
        let ended =
            self.known.key.map_or(Ok(()), |key| inner.run(async |cx| mark_end(cx, key).await));
        if let Some(lane) = self.known.number {
            inner.push_event("run_end", |line| {
                line.number("lane", lane.get()).flag("ok", ended.is_ok())
            });
        }
        Ok(ended?)
    }

    /// Checks that this lane belongs to an arena, in this process.
    ///
    /// # Errors
    /// `ForeignLane`, `Forked`.
    pub(crate) fn check_of(&self, inner: &Arc<ArenaInner>) -> Result<()> {
        inner.check_here()?;
        if Arc::ptr_eq(inner, self.arena.inner()) {
            return Ok(());
        }
        let (buffer_of, lane_of) = (inner.name.clone(), self.arena.name().to_owned());
        Err(DeviceError::ForeignLane { buffer_of, lane_of })
    }

    pub(crate) const fn known(&self) -> &Arc<LaneInner> {
        &self.known
    }
}

// The permission to use an arena's memory.
//
// A slice of a buffer needs a lease, so that use without one does not compile. Leases nest and are
// counted; while one is held the arena is awake, and no block moves. A lease names the streams
// that use memory while it is held: before that memory sleeps, their work is waited for. A lease
// without streams stands for all streams of the device.
//
// Invariant: `leases held = leases entered - leases dropped`, in the process of the arena.

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
    /// Creates a lease for the streams of these lanes, or for any if there are none. Wakes the arena
    /// if it sleeps. Waits for the end of a move in progress; no other starts while the lease is
    /// held.
    pub(crate) fn of(arena: &Arc<ArenaInner>, lanes: Vec<Arc<LaneInner>>) -> Result<Self> {
        arena.check_open()?;
        arena.run(enter)?;
        Ok(Self::new(arena, lanes))
    }

    /// Creates the value for a lease that is already counted.
    pub(crate) fn new(arena: &Arc<ArenaInner>, lanes: Vec<Arc<LaneInner>>) -> Self {
        Self {
            arena: Arc::clone(arena),
            lanes,
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
    pub fn record_use(&mut self, lane: &Lane) -> Result<()> {
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
                    state.sleep.used.insert(StreamKey::CONTEXT);
                }
                for stream in self.lanes.iter().filter_map(|lane| lane.key) {
                    state.sleep.used.insert(stream);
                }
            }
            state.leave();
        });
    }
}
