//! A plan's memory in an arena: reserved once, looked up without a search.
//!
//! One block on granules of its own for each of the plan's segments. The arena treats these as any
//! others: they count as live, sleep and wake with it and keep their addresses meanwhile, and may
//! move in a compaction between two leases. It plans nothing.
//!
//! Invariant: for every segment of the plan there is a block of at least its size, also after an
//! error.

use std::fmt;
use std::ops::Range;

use super::arena::DeviceArena;
use super::buffer::Buffer;
use super::driver::DeviceAddress;
use super::error::DeviceError;
use super::lease::Lease;
use super::plan::{BufferId, Place, Plan};
use super::region::Region;
use super::sleep::Contents;
use crate::bytes::ByteSize;

/// The memory of a [`Plan`], held in an arena until this is dropped.
///
/// On the host its buffers are slices. On a device they are addresses for kernels: the work has to
/// have ended before the memory is dropped or refitted, and the lease is to be held until it was
/// queued, with [`Lease::record_use`] for the lane of its stream.
///
/// ```
/// # use std::sync::Arc;
/// use lowtide::ByteSize;
/// use lowtide::clock::SystemClock;
/// use lowtide::device::plan::{Demand, Planner, Problem};
/// use lowtide::device::{ArenaConfig, DeviceArena, HostDriver, Region};
///
/// let clock = Arc::new(SystemClock::new());
/// let mut problem = Problem::new();
/// let hidden = problem.add(Demand::new("hidden", ByteSize::kib(64), 0..2))?;
/// let output = problem.add(Demand::new("output", ByteSize::kib(16), 1..3))?;
/// let plan = Planner::new(&*clock).plan(&problem)?;
///
/// let arena = DeviceArena::open(Arc::new(HostDriver::new()), clock, ArenaConfig::new("model"))?;
/// let mut memory = arena.reserve_plan(&plan, Region::Dynamic)?;
/// let lease = arena.enter()?;
/// let sizes = [(hidden, ByteSize::kib(64)), (output, ByteSize::kib(16))];
/// let [hidden_bytes, output_bytes] = memory.slices_mut(&lease, sizes)?;
/// output_bytes.copy_from_slice(&hidden_bytes[..16 << 10]); // both are live at step 1
/// let planned = memory.enter(&lease)?; // on a device, for the whole run: lookups only
/// assert_ne!(planned.address(hidden), planned.address(output));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct PlannedMemory {
    arena: DeviceArena,
    region: Region,
    places: Vec<Place>,
    /// How much of each segment the plan needs; those beyond are kept for other plans.
    needed: Vec<ByteSize>,
    segments: Vec<Buffer<u8>>,
    contents: Option<Contents>,
    /// Where the segments were when they were last looked for.
    bases: Vec<u64>,
}

impl fmt::Debug for PlannedMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (buffers, bytes) = (self.places.len(), self.bytes());
        write!(f, "PlanMemory {{ buffers: {buffers}, bytes: {bytes:?} }}")
    }
}

impl DeviceArena {
    /// Holds the memory of a plan: a block on granules of its own for each of its segments.
    ///
    /// # Errors
    /// As [`DeviceArena::reserve`]; [`DeviceError::Unsupported`] where an alignment of the plan is
    /// larger than a granule.
    pub fn reserve_plan(&self, plan: &Plan, region: Region) -> Result<PlannedMemory, DeviceError> {
        let mut memory = PlannedMemory {
            arena: self.clone(),
            region,
            places: Vec::new(),
            needed: Vec::new(),
            segments: Vec::new(),
            contents: None,
            bases: Vec::new(),
        };
        memory.refit(plan)?;
        Ok(memory)
    }
}

impl PlannedMemory {
    /// Serves another plan from now on. Segments that are large enough stay, and so does what is in
    /// them; others are replaced, and both are held meanwhile. It does not shrink: see
    /// [`PlannedMemory::shrink`]. O(n); allocates nothing where all segments are large enough and
    /// no plan before had fewer buffers.
    ///
    /// # Errors
    /// As [`DeviceArena::reserve_plan`]; then the plan is as it was.
    pub fn refit(&mut self, plan: &Plan) -> Result<(), DeviceError> {
        let granule = self.arena.shared().granule;
        if !granule.get().is_multiple_of(plan.align()) {
            let (what, backend) = ("alignments beyond a granule", self.arena.backend());
            return Err(DeviceError::Unsupported { what, backend });
        }
        self.reserve(plan.segments())?;
        self.places.clear();
        self.places.extend_from_slice(plan.places());
        self.needed.clear();
        self.needed.extend_from_slice(plan.segments());
        Ok(())
    }

    /// Makes room for several plans, each of which is then served by [`PlannedMemory::refit`]
    /// without an allocation: `segments` is the largest of each segment, such as
    /// [`PlanCache::segments`](super::plan::PlanCache::segments) has it. Nothing becomes smaller.
    ///
    /// # Errors
    /// As [`DeviceArena::reserve`]; then everything is as it was.
    pub fn reserve(&mut self, segments: &[ByteSize]) -> Result<(), DeviceError> {
        let mut larger = Vec::new();
        for (at, size) in segments.iter().enumerate() {
            if self.segments.get(at).is_none_or(|segment| segment.bytes() < *size) {
                larger.push((at, self.segment(*size)?));
            }
        }
        for (at, segment) in larger {
            match self.segments.get_mut(at) {
                Some(old) => *old = segment,
                None => self.segments.push(segment),
            }
        }
        // One at least, where what needs no memory is looked up.
        self.bases.resize(self.segments.len().max(1), 0);
        Ok(())
    }

    /// Gives back what the plan does not need: segments beyond its own, then those which take more
    /// granules than it needs, one after the other. What was in the latter is lost. Says how many
    /// bytes became free.
    ///
    /// # Errors
    /// As [`DeviceArena::reserve`], where there is no room for a smaller one beside the old one;
    /// then the plan is served as before, by segments of which some are smaller now.
    pub fn shrink(&mut self) -> Result<ByteSize, DeviceError> {
        let before = self.bytes();
        self.segments.truncate(self.needed.len());
        self.bases.truncate(self.needed.len().max(1));
        for at in 0..self.segments.len() {
            if self.segments[at].bytes() > self.needed[at] {
                self.segments[at] = self.segment(self.needed[at])?;
            }
        }
        Ok(before.saturating_sub(self.bytes()))
    }

    /// Says what becomes of the contents of all segments when the arena falls asleep, now and after
    /// any refit; `None` for what its options say of the region. Activations of a run that ended
    /// are best discarded.
    ///
    /// # Errors
    /// As [`Buffer::set_contents`].
    pub fn set_contents(&mut self, contents: Option<Contents>) -> Result<(), DeviceError> {
        for segment in &mut self.segments {
            segment.set_contents(contents)?;
        }
        self.contents = contents;
        Ok(())
    }

    /// A block of granules of its own.
    fn segment(&self, size: ByteSize) -> Result<Buffer<u8>, DeviceError> {
        let length = size.as_usize().unwrap_or(usize::MAX);
        let mut segment = self.arena.reserve::<u8>(length, self.region)?;
        if self.contents.is_some() {
            segment.set_contents(self.contents)?;
        }
        Ok(segment)
    }

    /// The bytes of all segments.
    #[must_use]
    pub fn bytes(&self) -> ByteSize {
        self.segments.iter().map(Buffer::bytes).sum()
    }

    /// Where everything is while the lease is held: asked once for a run, then looked up.
    ///
    /// # Errors
    /// As [`Buffer::address`].
    pub fn enter<'a>(&'a mut self, lease: &'a Lease) -> Result<Planned<'a>, DeviceError> {
        for (base, segment) in self.bases.iter_mut().zip(&self.segments) {
            *base = segment.address(lease)?.map_or(0, DeviceAddress::get);
        }
        Ok(Planned { places: &self.places, bases: &self.bases, lease })
    }

    /// The first bytes of a planned buffer, on drivers with host access.
    ///
    /// # Errors
    /// As [`Buffer::slice`].
    ///
    /// # Panics
    /// If the number is not of the plan's problem, is that of memory of the caller's own, or so
    /// many bytes reach beyond the segment.
    pub fn slice<'a>(
        &'a self,
        lease: &'a Lease,
        id: BufferId,
        size: ByteSize,
    ) -> Result<&'a [u8], DeviceError> {
        let range = self.range(id, size);
        match self.segments.get(self.places[id.index()].segment as usize) {
            Some(segment) => Ok(&segment.slice(lease)?[range]),
            None => Ok(&[][..range.len()]), // a plan of no bytes
        }
    }

    /// The same, to write. Whoever writes a buffer that is not live writes into others.
    ///
    /// # Errors
    /// As [`Buffer::slice`].
    ///
    /// # Panics
    /// As [`PlannedMemory::slice`].
    pub fn slice_mut<'a>(
        &'a mut self,
        lease: &'a Lease,
        id: BufferId,
        size: ByteSize,
    ) -> Result<&'a mut [u8], DeviceError> {
        let range = self.range(id, size);
        match self.segments.get_mut(self.places[id.index()].segment as usize) {
            Some(segment) => Ok(&mut segment.slice_mut(lease)?[range]),
            None => Ok(&mut [][..range.len()]),
        }
    }

    /// Several buffers at once, to compute from some of them into others: what is live at one step
    /// does not overlap. Allocates nothing.
    ///
    /// # Errors
    /// As [`Buffer::slice`].
    ///
    /// # Panics
    /// As [`PlannedMemory::slice`], and where two of them overlap.
    pub fn slices_mut<'a, const N: usize>(
        &'a mut self,
        lease: &'a Lease,
        buffers: [(BufferId, ByteSize); N],
    ) -> Result<[&'a mut [u8]; N], DeviceError> {
        let ranges = buffers.map(|(id, size)| self.range(id, size));
        let segment_of = |nth: usize| self.places[buffers[nth].0.index()].segment as usize;
        let segments: [usize; N] = std::array::from_fn(segment_of);
        let mut order: [usize; N] = std::array::from_fn(|nth| nth);
        order.sort_unstable_by_key(|nth| (segments[*nth], ranges[*nth].start, ranges[*nth].end));
        let mut slices: [&'a mut [u8]; N] = std::array::from_fn(|_| <&mut [u8]>::default());
        let mut next = order.into_iter().peekable();
        for (at, segment) in self.segments.iter_mut().enumerate() {
            let (mut rest, mut passed) = (segment.slice_mut(lease)?, 0);
            while let Some(nth) = next.next_if(|nth| segments[*nth] == at) {
                let Range { start, end } = ranges[nth].clone();
                let (own, above) = rest[left_out(passed, start)..].split_at_mut(end - start);
                (slices[nth], rest, passed) = (own, above, end);
            }
        }
        for nth in next {
            slices[nth] = &mut [][..ranges[nth].len()]; // of no bytes, or not in the plan's memory
        }
        Ok(slices)
    }

    fn range(&self, id: BufferId, size: ByteSize) -> Range<usize> {
        let length = |bytes: u64| ByteSize::new(bytes).as_usize().unwrap_or(usize::MAX);
        let start = length(self.places[id.index()].offset);
        start..start.saturating_add(length(size.get()))
    }
}

/// Bytes between one buffer and the next.
fn left_out(end: usize, start: usize) -> usize {
    assert!(end <= start, "two of the buffers overlap at {start}");
    start - end
}

/// Where the buffers of a plan are while a lease is held.
#[derive(Clone, Copy, Debug)]
pub struct Planned<'a> {
    places: &'a [Place],
    bases: &'a [u64],
    lease: &'a Lease,
}

impl Planned<'_> {
    /// The address of a buffer; `None` for what lies in memory of the caller's own. O(1), allocates
    /// nothing.
    ///
    /// # Panics
    /// If the number is not of the plan's problem.
    #[must_use]
    #[inline]
    pub fn address(&self, id: BufferId) -> Option<DeviceAddress> {
        let place = self.places[id.index()];
        let base = self.bases.get(place.segment as usize)?;
        Some(DeviceAddress::new(base + place.offset))
    }

    /// The lease that keeps the addresses true.
    pub const fn lease(&self) -> &Lease {
        self.lease
    }
}
