//! A lane: one stream of the device on one arena.
//!
//! What a lane frees it may take again at once, because its work is done in order. Another lane
//! gets it after an event that its stream waits for, or when the work is complete. A lane knows the
//! stream by its handle, and neither makes nor destroys it.
//!
//! Invariant: while a lane, or a buffer or a lease of it, is there, the arena knows its stream.
#![expect(unsafe_code, reason = "only the caller knows that a stream is there")]

use std::fmt;
use std::sync::Arc;

use bytemuck::Pod;

use super::arena::DeviceArena;
use super::buffer::Buffer;
use super::driver::StreamHandle;
use super::driver::sealed::Key;
use super::error::DeviceError;
use super::front::Home;
use super::lease::Lease;
use super::record::Operation;
use super::region::Region;
use super::shared::Shared;
use super::streams::StreamKey;

/// One stream on one arena: a cheap handle, the same lane for every clone.
///
/// What a lane frees it may take again at once. Another lane's stream is made to wait for the work
/// on it, by the device and without a thread that waits, or has it without a wait once an arena
/// that is looked at ([`DeviceArena::decay`], or a `Memory`) has seen that the work is done. Memory
/// leaves only after that. A stream ends in this order: its buffers, leases and lanes are dropped,
/// which waits for no work, then the stream is destroyed. A stream and a lane for each request are
/// fine: what they freed is the next one's.
///
/// Blocks of sizes that it asks for often wait in a front of the lane's own, within
/// [`ArenaConfig::front`](super::ArenaConfig::front): such a pair of calls takes no lock of the
/// arena. Others have them when the lane ends a run, when it is gone with the last of its buffers
/// and leases, when they cool, and when memory is short.
///
/// [`Lane::copy_to_device`] and [`Lane::copy_to_host`] copy page-locked memory asynchronously.
///
/// On a driver whose work is complete when its call returns there is nothing to order, and a lane
/// is the arena by another name.
///
/// ```
/// # #[cfg(feature = "simulation")] {
/// use std::sync::Arc;
///
/// use lowtide::ByteSize;
/// use lowtide::device::driver::Driver as _;
/// use lowtide::device::driver::sim::{Pattern, SimDriver, SimOptions};
/// use lowtide::device::{ArenaConfig, DeviceArena, Region};
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
/// // The other stream works on it too: both the buffer and the lease are told. That its work
/// // comes after the copy is the program's part, as without lanes.
/// input.record_use(&two)?;
/// lease.record_use(&two)?;
/// let copied = sim.event_create()?;
/// sim.event_record(copied, copies)?;
/// sim.stream_wait_event(computes, copied)?;
/// sim.check(computes, at, input.bytes(), Pattern::new(1))?;
/// drop((input, lease)); // nobody waits
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
/// # }
/// # Ok::<(), lowtide::BoxError>(())
/// ```
#[derive(Clone)]
pub struct Lane {
    arena: DeviceArena,
    known: Arc<Known>,
}

/// The arena's knowledge of a stream, for as long as somebody may use it.
pub(super) struct Known {
    shared: Arc<Shared>,
    stream: StreamHandle,
    /// None where nothing is to be ordered.
    key: Option<StreamKey>,
    /// Where the blocks wait that it alone used; none where nothing is to be ordered.
    home: Option<Arc<Home>>,
    /// Its number in the arena's recording; 0 where there is none.
    number: u64,
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "it is there to be dropped"))]
    keeps: Keeps,
}

/// What keeps a lane's stream there.
#[derive(Debug)]
pub(super) enum Keeps {
    /// Whoever vouched for it.
    Others,
    /// The arena.
    Own { _stream: Arc<OwnStream> },
    /// The lane has a part in it.
    #[cfg(feature = "cuda")]
    Cuda(Arc<cudarc::driver::CudaStream>),
}

/// A stream of an arena's driver that exists for as long as this.
#[derive(Debug)]
pub(super) struct OwnStream {
    shared: Arc<Shared>,
    handle: StreamHandle,
}

impl OwnStream {
    /// A new stream; a number and no more, on a driver that has none.
    ///
    /// # Errors
    /// As the driver.
    pub(super) fn new(arena: &DeviceArena, number: u64) -> Result<Arc<Self>, DeviceError> {
        let shared = Arc::clone(arena.shared());
        let handle = if shared.capabilities.asynchronous {
            shared.driver.stream_create()?
        } else {
            StreamHandle::new(number)
        };
        Ok(Arc::new(Self { shared, handle }))
    }
}

impl Drop for OwnStream {
    /// In a forked child does nothing.
    fn drop(&mut self) {
        if self.shared.capabilities.asynchronous && self.shared.check_here().is_ok() {
            let _ = self.shared.driver.stream_destroy(self.handle, Key::new());
        }
    }
}

impl Known {
    pub(super) const fn key(&self) -> Option<StreamKey> {
        self.key
    }

    pub(super) const fn home(&self) -> Option<&Arc<Home>> {
        self.home.as_ref()
    }

    pub(super) const fn number(&self) -> u64 {
        self.number
    }

    /// The stream, where it is one of cudarc's.
    #[cfg(feature = "cuda")]
    pub(super) const fn cuda(&self) -> Option<&Arc<cudarc::driver::CudaStream>> {
        if let Keeps::Cuda(stream) = &self.keeps { Some(stream) } else { None }
    }

    /// Whether both are of one stream.
    pub(super) fn is_beside(&self, other: &Self) -> bool {
        self.stream == other.stream
    }
}

impl DeviceArena {
    /// The lane of a stream.
    ///
    /// # Safety
    /// The stream is one of the arena's driver, and goes on existing until the lane, its clones,
    /// its buffers and its leases are dropped: a CUDA driver does not look whether a stream that it
    /// is given is there. The host driver has no streams and the simulation looks, so that there
    /// any number will do.
    ///
    /// # Errors
    /// [`DeviceError::Closed`], [`DeviceError::Forked`].
    pub unsafe fn lane(&self, stream: StreamHandle) -> Result<Lane, DeviceError> {
        self.lane_of(stream)
    }

    /// The same, where somebody else vouches for the stream.
    pub(super) fn lane_of(&self, stream: StreamHandle) -> Result<Lane, DeviceError> {
        self.lane_with(stream, Keeps::Others)
    }

    /// The lane of a stream that it keeps.
    ///
    /// # Errors
    /// As [`DeviceArena::lane`].
    pub(super) fn lane_on(&self, own: &Arc<OwnStream>) -> Result<Lane, DeviceError> {
        debug_assert!(Arc::ptr_eq(self.shared(), &own.shared), "a stream of another arena");
        self.lane_with(own.handle, Keeps::Own { _stream: Arc::clone(own) })
    }

    /// The lane of a stream that what it keeps keeps there.
    ///
    /// # Errors
    /// As [`DeviceArena::lane`].
    pub(super) fn lane_with(
        &self,
        stream: StreamHandle,
        keeps: Keeps,
    ) -> Result<Lane, DeviceError> {
        let shared = self.shared();
        shared.check_open()?;
        let (mut key, mut number) = (None, 0);
        if shared.capabilities.asynchronous || shared.recorder.is_some() {
            let mut books = shared.books();
            key = shared.capabilities.asynchronous.then(|| books.streams.enter(stream));
            books.tell(&*shared.clock, |numbers| {
                let (lane, stream) = numbers.lane(stream);
                number = lane;
                Some(Operation::Lane { lane, stream })
            });
        }
        shared.pass_on();
        let home = key.map(|key| Home::of_lane(shared, key));
        let known = Known { shared: Arc::clone(shared), stream, key, home, number, keeps };
        Ok(Lane { arena: self.clone(), known: Arc::new(known) })
    }
}

impl Lane {
    /// The arena that it is of.
    #[must_use]
    pub const fn arena(&self) -> &DeviceArena {
        &self.arena
    }

    /// The stream.
    #[must_use]
    pub fn stream(&self) -> StreamHandle {
        self.known.stream
    }

    /// Room for `len` elements that this lane's stream may use from its next work on, with
    /// unspecified contents. Freed by the drop of the buffer, when its last use is in the stream.
    ///
    /// Where only memory is left that other streams may still work on, the stream is made to wait
    /// for them: no thread waits. Memory that nobody gave up is committed last.
    ///
    /// While a stream captures a graph, nothing is waited for that could spoil it: memory for which
    /// that would be needed is passed over for memory that is committed, within the limit.
    ///
    /// # Errors
    /// As [`DeviceArena::alloc`].
    pub fn alloc<T: Pod>(&self, len: usize, region: Region) -> Result<Buffer<T>, DeviceError> {
        match (self.known.key, self.known.number) {
            (None, 0) => self.arena.alloc(len, region),
            _ => self.arena.alloc_on(&self.known, len, region),
        }
    }

    /// The right to use the arena's memory on this lane's stream: as [`DeviceArena::enter`], but
    /// that before the memory sleeps the work of this stream is waited for, and not that of the
    /// whole device. [`Lease::record_use`] names further streams.
    ///
    /// # Errors
    /// As [`DeviceArena::enter`].
    pub fn enter(&self) -> Result<Lease, DeviceError> {
        Lease::on(&self.known, self.arena.shared())
    }

    /// Marks the end of a run: other lanes that want what this one has freed until now come after
    /// the work up to here, and not after what the stream is given later. Without it they have that
    /// memory as well, and come after all that the stream was given until they ask. Records one
    /// event, where any is wanted, and waits for nothing.
    ///
    /// # Errors
    /// [`DeviceError::Driver`], with code 900 while the stream captures a graph;
    /// [`DeviceError::Forked`].
    pub fn end_run(&self) -> Result<(), DeviceError> {
        self.known.shared.check_here()?;
        let (shared, lane) = (&self.known.shared, self.known.number);
        // What waits in the front was freed before the mark.
        if let Some(home) = &self.known.home {
            home.give_up();
        }
        let ended = self.known.key.map_or(Ok(()), |key| shared.mark_end(key));
        if lane > 0 {
            shared.tell(|_| Some(Operation::EndRun { lane, done: ended.is_ok() }));
        }
        Ok(ended?)
    }

    pub(super) const fn known(&self) -> &Arc<Known> {
        &self.known
    }
}

impl Known {
    /// Books that the lane is gone, and with the last of its stream that stream.
    fn leave(&self, key: StreamKey) {
        let mut books = self.shared.books();
        if !books.streams.leave(key) {
            return;
        }
        if books.sleep.forget_used(key) {
            // Its work under leases is waited for by an event, or with all other work.
            books.streams.use_now(key);
        }
        drop(books);
        let _ = self.shared.mark_end(key);
        self.shared.end_stream(key);
    }
}

impl Drop for Known {
    /// The arena forgets the stream, after an event for what it still has to do: one call of the
    /// driver that waits for nothing. Where that fails, all work of the device is waited for by who
    /// needs that memory. A call that another thread makes with the handle ends first, which waits
    /// for nothing either: whoever dropped this may destroy the stream. In a forked child does
    /// nothing.
    fn drop(&mut self) {
        if self.shared.check_here().is_err() {
            return;
        }
        if let Some(home) = &self.home {
            home.retire();
        }
        if let Some(key) = self.key {
            self.leave(key);
        }
        if self.number > 0 {
            self.shared.tell(|numbers| {
                numbers.lane_end(self.stream);
                Some(Operation::LaneEnd { lane: self.number })
            });
        }
    }
}

impl fmt::Debug for Lane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lane")
            .field("arena", &self.arena.name())
            .field("stream", &self.known.stream)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for Known {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Known").field("stream", &self.stream).finish_non_exhaustive()
    }
}
