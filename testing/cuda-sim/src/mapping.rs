//! Address space and the memory behind it: reserve, commit, decommit, remap, copy.
//!
//! A commit is create, map and release for each handle, then one set-access; the release leaves the
//! mapping as the only owner of the handle, so that an unmap frees it. A decommit is one unmap for
//! each handle: the manual does not say that one unmap may take several. A call that fails half way
//! is rolled back by calls that are counted and do not fail. A remap maps the same handles at their
//! new place and enables access there before it unmaps the old place, so that a failure before the
//! last call loses nothing; it is assumed that the driver knows the handles, because it keeps them
//! or retrieves them (`cuMemRetainAllocationHandle`). An unmap does not wait: unfinished work on
//! the range is recorded as a fault at once, and becomes an illegal address later.
//!
//! Invariant: a failed call left the ranges unchanged; the contents that it would have released or
//! written are unspecified.

use super::call::Call;
use super::fault::{Fault, WorkKind};
use super::memory::{Obstacle, Range};
use super::model::{Answer, INVALID_VALUE, Model, NOT_SUPPORTED, OUT_OF_MEMORY};
use super::work::{Pattern, Work};
use lowtide_core::bytes::ByteSize;
use lowtide_gpu_driver::{DeviceAddress, DriverError};

/// The contents after a failed copy.
const SCRIBBLE: Pattern = Pattern::new(0xBAD);

impl Model {
    /// A range of whole granules.
    pub(super) fn whole(&self, at: DeviceAddress, size: ByteSize) -> Answer<Range> {
        let granularity = self.options.handle_min;
        let whole = at.is_multiple_of(granularity)
            && size.get().is_multiple_of(granularity.get())
            && !size.is_zero();
        if whole {
            return Ok(Range { at: at.get(), size: size.get() });
        }
        Err(DriverError::Misaligned { at, size, granularity })
    }

    /// Begins a call of virtual memory, which is not offered everywhere.
    pub(super) fn enter_virtual(&mut self, call: Call, requested: ByteSize) -> Answer {
        self.enter(call, requested)?;
        if self.options.virtual_memory {
            return Ok(());
        }
        Err(self.fail(NOT_SUPPORTED))
    }

    pub(super) fn reserve(&mut self, size: ByteSize) -> Answer<DeviceAddress> {
        self.whole(DeviceAddress::new(0), size)?;
        self.enter_virtual(Call::AddressReserve, size)?;
        let at = self.memory.reserve(size.get(), 1);
        at.map(DeviceAddress::new).ok_or_else(|| self.fail(OUT_OF_MEMORY))
    }

    pub(super) fn unreserve(&mut self, range: Range) -> Answer {
        self.enter_virtual(Call::AddressFree, ByteSize::ZERO)?;
        if !self.memory.is_whole_reservation(range) {
            return Err(self.not_reserved(range));
        }
        if self.memory.is_mapped_anywhere(range) {
            return Err(self.refuse(Fault::UnreserveMapped(range), INVALID_VALUE));
        }
        self.memory.unreserve(range);
        Ok(())
    }

    /// Checks a range of whole granules that is divided into handles of this size.
    pub(super) fn in_handles(
        &self,
        at: DeviceAddress,
        size: ByteSize,
        handle: ByteSize,
    ) -> Answer<(Range, u64)> {
        self.whole(at, handle)?;
        Ok((self.whole(at, size)?, handle.get()))
    }

    pub(super) fn commit(&mut self, (range, handle): (Range, u64)) -> Answer {
        let requested = ByteSize::new(range.size);
        let mut mapped = Range { at: range.at, size: 0 };
        let mut result = range.pieces(handle).try_for_each(|piece| {
            self.create_and_map(piece, range)?;
            mapped.size += piece.size;
            // The handle is the mapping's alone from here on.
            self.enter(Call::Release, requested)
        });
        if result.is_ok() {
            result = self.enter(Call::SetAccess, requested);
            self.charge(range.size.div_ceil(handle), requested);
        }
        match result {
            Ok(()) => self.memory.change_access(range, true),
            Err(_) => self.roll_back(mapped),
        }
        result
    }

    fn create_and_map(&mut self, piece: Range, all: Range) -> Answer {
        let requested = ByteSize::new(all.size);
        self.enter_virtual(Call::Create, requested)?;
        self.charge(1, ByteSize::new(piece.size));
        if self.headroom().get() < piece.size {
            return Err(self.fail(OUT_OF_MEMORY));
        }
        let mapped = self.enter(Call::Map, requested).and_then(|()| self.map(piece, all));
        if mapped.is_err() && self.lost.is_none() {
            self.count(Call::Release); // of the handle that found no place
        }
        mapped
    }

    fn map(&mut self, piece: Range, all: Range) -> Answer {
        self.bare_in_one_reservation(piece, all)?;
        self.memory.map(piece);
        self.charge(1, ByteSize::new(piece.size));
        Ok(())
    }

    /// Checks a range to map, which lies in another that is mapped by the same call.
    pub(super) fn bare_in_one_reservation(&mut self, range: Range, all: Range) -> Answer {
        self.in_one_reservation(all)?;
        if !self.memory.is_mapped_anywhere(range) {
            return Ok(());
        }
        Err(self.refuse(Fault::DoubleMap(range), INVALID_VALUE))
    }

    /// The range of one call lies in one reservation: the manual does not allow a range over
    /// adjacent reservations.
    pub(super) fn in_one_reservation(&mut self, range: Range) -> Answer {
        if self.memory.is_reserved(range) {
            return Ok(());
        }
        Err(self.not_reserved(range))
    }

    fn not_reserved(&mut self, range: Range) -> DriverError {
        self.refuse(Fault::NotReserved { call: self.call, range }, INVALID_VALUE)
    }

    /// Undoes the mapped part of a commit.
    fn roll_back(&mut self, mapped: Range) {
        if mapped.size == 0 {
            return;
        }
        if self.lost.is_none() {
            for _ in self.memory.handles_in(mapped) {
                self.count(Call::Unmap);
            }
        }
        self.memory.unmap(mapped);
    }

    pub(super) fn decommit(&mut self, (range, handle): (Range, u64)) -> Answer {
        self.check_whole(range)?;
        let mut gone = Range { at: range.at, size: 0 };
        for piece in range.pieces(handle) {
            if let Err(error) = self.unmap_one(piece) {
                self.commit_back(gone, handle);
                if self.memory.whole_mappings(range).is_ok() {
                    self.memory.wipe(range); // the range stays, its contents need not
                }
                return Err(error);
            }
            gone.size += piece.size;
        }
        Ok(())
    }

    /// Unmaps one handle.
    fn unmap_one(&mut self, handle: Range) -> Answer {
        if self.memory.whole_mappings(handle).is_ok_and(|handles| handles > 1) {
            return Err(self.refuse(Fault::UnmapSeveral(handle), INVALID_VALUE));
        }
        self.unmap(handle)
    }

    /// Unmaps whole handles by one call.
    pub(super) fn unmap(&mut self, range: Range) -> Answer {
        self.enter_virtual(Call::Unmap, ByteSize::ZERO)?;
        let handles = self.check_unmap(range)?;
        self.charge(handles, ByteSize::new(range.size));
        self.memory.unmap(range);
        Ok(())
    }

    /// Commits memory again for handles that were unmapped.
    fn commit_back(&mut self, gone: Range, handle: u64) {
        gone.pieces(handle).for_each(|piece| self.memory.map(piece));
        self.memory.change_access(gone, true);
        self.count_commit(gone.size.div_ceil(handle));
    }

    /// Counts the calls of a commit of this many handles that undoes something.
    fn count_commit(&mut self, handles: u64) {
        if handles == 0 || self.lost.is_some() {
            return;
        }
        for _ in 0..handles {
            self.count(Call::Create);
            self.count(Call::Map);
            self.count(Call::Release);
        }
        self.count(Call::SetAccess);
    }

    /// Returns the number of handles that an unmap removes, if it is valid; unfinished work there
    /// is recorded.
    fn check_unmap(&mut self, range: Range) -> Answer<u64> {
        let handles = self.check_whole(range)?;
        if let Some((stream, work)) = self.unfinished_in(range) {
            self.faults.push(Fault::UnmapBeforeDone { range, stream, work });
        }
        Ok(handles)
    }

    /// Returns the number of handles in a range of whole handles.
    fn check_whole(&mut self, range: Range) -> Answer<u64> {
        self.call = Call::Unmap;
        self.in_one_reservation(range)?;
        self.memory.whole_mappings(range).map_err(|obstacle| {
            let fault = match obstacle {
                Obstacle::Bare(bare) => Fault::UnmapBare { range, bare: DeviceAddress::new(bare) },
                Obstacle::Part(handle) => Fault::UnmapPart { range, handle },
            };
            self.refuse(fault, INVALID_VALUE)
        })
    }

    /// The handles behind one range, behind another.
    pub(super) fn remap(&mut self, (from, handle): (Range, u64), to: Range) -> Answer {
        if !(self.options.virtual_memory && self.options.remap) {
            return Err(DriverError::Unsupported { what: "remap" });
        }
        let (mut mapped, mut unmapped) = (0, Range { at: from.at, size: 0 });
        let outcome = self.try_remap((from, handle), to, &mut mapped, &mut unmapped);
        match outcome {
            Ok(()) => self.memory.remap(from, to),
            Err(_) => {
                if self.lost.is_none() {
                    // Of the handles that were mapped at the new place.
                    (0..mapped).for_each(|_| self.count(Call::Unmap));
                }
                self.count_commit(unmapped.size.div_ceil(handle));
                if self.memory.whole_mappings(from).is_ok() {
                    self.memory.wipe(from);
                }
            }
        }
        outcome
    }

    /// The calls of a remap. Counts the handles mapped at the new place, and notes what was
    /// unmapped at the old one.
    fn try_remap(
        &mut self,
        (from, handle): (Range, u64),
        to: Range,
        mapped: &mut u64,
        unmapped: &mut Range,
    ) -> Answer {
        if self.memory.whole_mappings(from).is_err() {
            return self.check_unmap(from).map(drop); // no handles to make a call with
        }
        let requested = ByteSize::new(from.size);
        let handles = self.memory.handles_in(from);
        if !from.pieces(handle).map(|piece| piece.size).eq(handles.iter().copied()) {
            self.call = Call::Map;
            return Err(self.refuse(Fault::UnmapSeveral(from), INVALID_VALUE));
        }
        for &size in &handles {
            self.enter_virtual(Call::Map, requested)?;
            self.bare_in_one_reservation(to, to)?;
            self.charge(1, ByteSize::new(size));
            *mapped += 1;
        }
        self.enter(Call::SetAccess, requested)?;
        self.charge(handles.len() as u64, requested);
        for &size in &handles {
            self.enter(Call::Unmap, ByteSize::ZERO)?;
            self.check_unmap(Range { at: unmapped.end(), size })?;
            self.charge(1, ByteSize::new(size));
            unmapped.size += size;
        }
        Ok(())
    }

    /// Copies and waits for that alone: other streams are not waited for.
    pub(super) fn copy(&mut self, from: Range, to: DeviceAddress) -> Answer {
        let size = ByteSize::new(from.size);
        let entered = self.enter(Call::Copy, size);
        let work = match entered {
            Ok(()) => Work::Copy(from, to.get(), WorkKind::Copy),
            Err(_) => Work::Fill(Range { at: to.get(), size: from.size }, SCRIBBLE),
        };
        if self.lost.is_none() {
            self.charge(0, size);
            let done = work.run(&mut self.memory);
            if let Err(illegal) = done
                && entered.is_ok()
            {
                self.illegal(None, &work, illegal);
            }
        }
        entered.and_then(|()| self.lost_in())
    }
}
