//! A plan's memory in an arena: reserved once, looked up without a search.
//!
//! Each of the plan's segments is one block on its own granules. The arena treats these blocks like
//! any others: they count as live, sleep and wake with the arena and keep their addresses, and may
//! move in a compaction between two leases. Planning is elsewhere.
//!
//! Invariant: every segment of the plan has a block of at least its size, also after an error.

use std::ops::Range;

use crate::api::arena::DeviceArena;
use crate::api::buffer::Buffer;
use crate::api::lane::Lease;
use crate::driver::DeviceAddress;
use crate::plan::{BufferId, Plan, PlannedPlace};
use crate::types::{Contents, DeviceError, Region, Result};
use lowtide_core::bytes::ByteSize;

/// The memory of a [`Plan`] in an arena, freed on drop.
///
/// On the host its buffers are slices. On a device they are addresses for kernels: the work must
/// have ended before the memory is dropped or refitted, and the lease must be held until the work
/// is queued, with [`Lease::record_use`] for the lane of its stream.
///
/// ```
/// # use std::sync::Arc;
/// use lowtide_gpu::ByteSize;
/// use lowtide_gpu::clock::SystemClock;
/// use lowtide_gpu::plan::{Demand, Planner, Problem};
/// use lowtide_gpu::{ArenaConfig, DeviceArena, HostDriver, Region};
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
/// let address = memory.addresses(&lease)?; // on a device, for the whole run: lookups only
/// assert_ne!(address(hidden), address(output));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct PlannedMemory {
    arena: DeviceArena,
    region: Region,
    places: Vec<PlannedPlace>,
    /// The bytes of each segment that the plan needs. Further segments are kept for other plans.
    needed: Vec<ByteSize>,
    segments: Vec<Buffer<u8>>,
    contents: Option<Contents>,
    /// The segments' addresses at the last lookup.
    bases: Vec<u64>,
}

lowtide_core::debug_as!(PlannedMemory, |it| buffers: it.places.len(), bytes: it.bytes());

impl DeviceArena {
    /// Reserves the memory of a plan: one block on its own granules for each segment.
    ///
    /// # Errors
    /// The errors of [`DeviceArena::reserve`]; [`DeviceError::Unsupported`] if the plan has an
    /// alignment larger than a granule.
    pub fn reserve_plan(&self, plan: &Plan, region: Region) -> Result<PlannedMemory> {
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
    /// Switches to another plan. Segments that are large enough are kept with their contents;
    /// others are replaced, and both are live during that. Does not shrink: see
    /// [`PlannedMemory::shrink`]. O(n); allocates nothing if all segments are large enough and an
    /// earlier plan had as many buffers.
    ///
    /// # Errors
    /// The errors of [`DeviceArena::reserve_plan`]; the plan is then unchanged.
    pub fn refit(&mut self, plan: &Plan) -> Result<()> {
        let granule = self.arena.inner().granule;
        if !granule.get().is_multiple_of(plan.align()) {
            let (what, backend) = ("alignments larger than a granule", self.arena.backend());
            return Err(DeviceError::Unsupported { what, backend });
        }
        self.reserve(plan.segments())?;
        self.places.clear();
        self.places.extend_from_slice(plan.places());
        self.needed.clear();
        self.needed.extend_from_slice(plan.segments());
        Ok(())
    }

    /// Reserves memory for several plans, so that [`PlannedMemory::refit`] to each needs no
    /// allocation: `segments` has the largest size of each segment, as from
    /// [`PlanCache::segments`](crate::plan::PlanCache::segments). No segment becomes smaller.
    ///
    /// # Errors
    /// The errors of [`DeviceArena::reserve`]; nothing is changed then.
    pub fn reserve(&mut self, segments: &[ByteSize]) -> Result<()> {
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
        // At least one base, for lookups of buffers that need no memory.
        self.bases.resize(self.segments.len().max(1), 0);
        Ok(())
    }

    /// Frees memory that the plan does not need, and returns the bytes freed: first segments beyond
    /// its own, then, one by one, segments with more granules than it needs, whose contents are
    /// lost.
    ///
    /// # Errors
    /// The errors of [`DeviceArena::reserve`], if there is no room for a smaller segment in
    /// addition to the old one; the plan stays served, with some segments smaller.
    pub fn shrink(&mut self) -> Result<ByteSize> {
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

    /// Sets how the arena's sleep treats the contents of all segments, now and after any refit;
    /// `None` for the region's setting in the sleep options. Discard the activations of a completed
    /// run.
    ///
    /// # Errors
    /// The errors of [`Buffer::set_contents`].
    pub fn set_contents(&mut self, contents: Option<Contents>) -> Result<()> {
        for segment in &mut self.segments {
            segment.set_contents(contents)?;
        }
        self.contents = contents;
        Ok(())
    }

    /// Allocates a block on its own granules.
    fn segment(&self, size: ByteSize) -> Result<Buffer<u8>> {
        let length = size.as_usize().unwrap_or(usize::MAX);
        let mut segment = self.arena.reserve::<u8>(length, self.region)?;
        if self.contents.is_some() {
            segment.set_contents(self.contents)?;
        }
        Ok(segment)
    }

    /// Returns the bytes of all segments.
    #[must_use]
    pub fn bytes(&self) -> ByteSize {
        self.segments.iter().map(Buffer::bytes).sum()
    }

    /// Returns a function that returns the address of a buffer, or `None` for caller-provided
    /// memory, while the lease is held. Call this once per run: the function is O(1) and allocates
    /// nothing. It panics if the id is not of the plan's problem.
    ///
    /// # Errors
    /// The errors of [`Buffer::address`].
    pub fn addresses<'a>(
        &'a mut self,
        lease: &'a Lease,
    ) -> Result<impl Fn(BufferId) -> Option<DeviceAddress> + Copy + use<'a>> {
        for (base, segment) in self.bases.iter_mut().zip(&self.segments) {
            *base = segment.address(lease)?.map_or(0, DeviceAddress::get);
        }
        let (places, bases) = (&self.places, &self.bases);
        Ok(|id: BufferId| {
            let place = places[id.index()];
            let base = bases.get(place.segment as usize)?;
            Some(DeviceAddress::new(base + place.offset))
        })
    }

    /// Returns the first `size` bytes of a planned buffer, on drivers with host access.
    ///
    /// # Errors
    /// The errors of [`Buffer::slice`].
    ///
    /// # Panics
    /// If the id is not of the plan's problem or belongs to caller-provided memory, or if `size`
    /// exceeds the segment.
    pub fn slice<'a>(&'a self, lease: &'a Lease, id: BufferId, size: ByteSize) -> Result<&'a [u8]> {
        let range = self.range(id, size);
        match self.segments.get(self.places[id.index()].segment as usize) {
            Some(segment) => Ok(&segment.slice(lease)?[range]),
            None => Ok(&[][..range.len()]), // a plan of no bytes
        }
    }

    /// Returns the first `size` bytes of a planned buffer for writing. Writing a buffer that is not
    /// live at the current step overwrites others.
    ///
    /// # Errors
    /// The errors of [`Buffer::slice`].
    ///
    /// # Panics
    /// See [`PlannedMemory::slice`].
    pub fn slice_mut<'a>(
        &'a mut self,
        lease: &'a Lease,
        id: BufferId,
        size: ByteSize,
    ) -> Result<&'a mut [u8]> {
        let [slice] = self.slices_mut(lease, [(id, size)])?;
        Ok(slice)
    }

    /// Returns several buffers at once, to compute from some of them into others; buffers that are
    /// live at the same step do not overlap. Allocates nothing.
    ///
    /// # Errors
    /// The errors of [`Buffer::slice`].
    ///
    /// # Panics
    /// See [`PlannedMemory::slice`]; also if two of the buffers overlap.
    #[expect(clippy::panic_in_result_fn, reason = "an error of the caller")]
    pub fn slices_mut<'a, const N: usize>(
        &'a mut self,
        lease: &'a Lease,
        buffers: [(BufferId, ByteSize); N],
    ) -> Result<[&'a mut [u8]; N]> {
        let ranges = buffers.map(|(id, size)| self.range(id, size));
        let segment_of = |nth: usize| self.places[buffers[nth].0.index()].segment as usize;
        let segments: [usize; N] = std::array::from_fn(segment_of);
        let mut order: [usize; N] = std::array::from_fn(|nth| nth);
        order.sort_unstable_by_key(|nth| (segments[*nth], ranges[*nth].start, ranges[*nth].end));
        let mut slices: [&'a mut [u8]; N] = std::array::from_fn(|_| <&mut [u8]>::default());
        let mut next = order.into_iter().peekable();
        for (at, segment) in self.segments.iter_mut().enumerate() {
            if next.peek().is_none_or(|nth| segments[*nth] != at) {
                continue; // the contents of a segment that is not asked for may be lost
            }
            let (mut rest, mut passed) = (segment.slice_mut(lease)?, 0);
            while let Some(nth) = next.next_if(|nth| segments[*nth] == at) {
                let Range { start, end } = ranges[nth].clone();
                assert!(passed <= start, "planned buffers overlap at offset {start}");
                let (own, above) = rest[start - passed..].split_at_mut(end - start);
                (slices[nth], rest, passed) = (own, above, end);
            }
        }
        for nth in next {
            slices[nth] = &mut [][..ranges[nth].len()]; // no bytes, or not in the plan's memory
        }
        Ok(slices)
    }

    fn range(&self, id: BufferId, size: ByteSize) -> Range<usize> {
        let length = |bytes: u64| ByteSize::new(bytes).as_usize().unwrap_or(usize::MAX);
        let start = length(self.places[id.index()].offset);
        start..start.saturating_add(length(size.get()))
    }
}
