//! Address space and the memory behind it: reserve, commit, decommit, remap, copy.
//!
//! A commit is create, map and release for each handle, then one set-access; the release leaves the
//! mapping as the only owner of the handle, so that an unmap frees it. A commit that fails half way
//! is rolled back by calls that are counted and do not fail. A remap maps the same handles at their
//! new place and enables access there before it unmaps the old place, so that a failure before the
//! last call loses nothing; it is assumed that the driver knows the handles, because it keeps them
//! or retrieves them (`cuMemRetainAllocationHandle`). An unmap does not wait: unfinished work on
//! the range is recorded as a fault at once, and becomes an illegal address later.
//!
//! Invariant: a failed call left the ranges unchanged; the contents that it would have released or
//! written are unspecified.

use super::call::Call;
use super::fault::{Fault, SimError};
use super::memory::{Obstacle, Range};
use super::model::{INVALID_VALUE, Model, named};
use super::options::Handles;
use super::work::{Pattern, Work};
use lowtide_core::bytes::ByteSize;
use lowtide_gpu_driver::{DeviceAddress, DriverError};

/// The contents after a failed copy.
const SCRIBBLE: Pattern = Pattern::new(0xBAD);

impl Model {
    /// A range of whole granules.
    pub(super) fn whole(&self, at: DeviceAddress, size: ByteSize) -> Result<Range, DriverError> {
        let granularity = self.options.unit();
        let whole = at.is_multiple_of(granularity)
            && size.get().is_multiple_of(granularity.get())
            && !size.is_zero();
        if whole {
            return Ok(Range { at: at.get(), size: size.get() });
        }
        Err(DriverError::Misaligned { at, size, granularity })
    }

    /// Begins a call of virtual memory, which is not offered everywhere.
    pub(super) fn enter_virtual(
        &mut self,
        call: Call,
        requested: ByteSize,
    ) -> Result<(), DriverError> {
        self.enter(call, requested)?;
        if self.options.virtual_memory {
            return Ok(());
        }
        Err(self.fail(call, SimError::NotSupported, requested))
    }

    pub(super) fn reserve(&mut self, size: ByteSize) -> Result<DeviceAddress, DriverError> {
        self.whole(DeviceAddress::new(0), size)?;
        self.enter_virtual(Call::AddressReserve, size)?;
        let at = self.memory.reserve(size.get());
        let refused = || DriverError::of_cuda(Call::AddressReserve.name(), 2, size);
        at.map(DeviceAddress::new).ok_or_else(refused)
    }

    pub(super) fn unreserve(&mut self, range: Range) -> Result<(), DriverError> {
        let call = Call::AddressFree;
        self.enter_virtual(call, ByteSize::ZERO)?;
        let (at, size) = named(range);
        if !self.memory.is_whole_reservation(range) {
            return Err(self.refuse(call, Fault::NotReserved { call, at, size }, INVALID_VALUE));
        }
        if self.memory.is_mapped_anywhere(range) {
            return Err(self.refuse(call, Fault::UnreserveMapped { at, size }, INVALID_VALUE));
        }
        self.memory.unreserve(range);
        Ok(())
    }

    pub(super) fn commit(&mut self, range: Range) -> Result<(), DriverError> {
        let step = match self.options.handles {
            Handles::Fixed(size) => size.get(),
            Handles::PerCommit => range.size,
        };
        let requested = ByteSize::new(range.size);
        let mut mapped = Range { at: range.at, size: 0 };
        let mut result = Ok(());
        while mapped.size < range.size && result.is_ok() {
            let piece = Range { at: mapped.end(), size: step };
            result = self.create_and_map(piece, range);
            if result.is_ok() {
                mapped.size += step;
                // The handle is the mapping's alone from here on.
                result = self.enter(Call::Release, requested);
            }
        }
        if result.is_ok() {
            result = self.enter(Call::SetAccess, requested);
            self.charge(Call::SetAccess, range.size / step, requested);
        }
        match result {
            Ok(()) => self.memory.set_access(range),
            Err(_) => self.roll_back(mapped),
        }
        result
    }

    fn create_and_map(&mut self, piece: Range, all: Range) -> Result<(), DriverError> {
        let requested = ByteSize::new(all.size);
        self.enter_virtual(Call::Create, requested)?;
        self.charge(Call::Create, 1, ByteSize::new(piece.size));
        if self.headroom().get() < piece.size {
            return Err(self.fail(Call::Create, SimError::OutOfMemory, requested));
        }
        let mapped = self.enter(Call::Map, requested).and_then(|()| self.map(piece, all));
        if mapped.is_err() && self.lost.is_none() {
            self.count(Call::Release); // of the handle that found no place
        }
        mapped
    }

    fn map(&mut self, piece: Range, all: Range) -> Result<(), DriverError> {
        self.in_one_reservation(Call::Map, all)?;
        let (at, size) = named(piece);
        if self.memory.is_mapped_anywhere(piece) {
            return Err(self.refuse(Call::Map, Fault::DoubleMap { at, size }, INVALID_VALUE));
        }
        self.memory.map(piece);
        self.charge(Call::Map, 1, size);
        Ok(())
    }

    /// The range of one call lies in one reservation: the manual does not allow a range over
    /// adjacent reservations.
    pub(super) fn in_one_reservation(
        &mut self,
        call: Call,
        range: Range,
    ) -> Result<(), DriverError> {
        if self.memory.is_reserved(range) {
            return Ok(());
        }
        let (at, size) = named(range);
        Err(self.refuse(call, Fault::NotReserved { call, at, size }, INVALID_VALUE))
    }

    /// Undoes the mapped part of a commit.
    fn roll_back(&mut self, mapped: Range) {
        if mapped.size > 0 {
            if self.lost.is_none() {
                self.count(Call::Unmap);
            }
            self.memory.unmap(mapped);
        }
    }

    pub(super) fn decommit(&mut self, range: Range) -> Result<(), DriverError> {
        let call = Call::Unmap;
        let entered = self.enter_virtual(call, ByteSize::ZERO);
        let handles = self.memory.whole_mappings(range);
        if let Err(error) = entered {
            if handles.is_ok() {
                self.memory.wipe(range); // the range stays, its contents need not
            }
            return Err(error);
        }
        let handles = self.check_unmap(range)?;
        self.charge(call, handles, ByteSize::new(range.size));
        self.memory.unmap(range);
        Ok(())
    }

    /// Returns the number of handles that an unmap removes, if it is valid; unfinished work there
    /// is recorded.
    fn check_unmap(&mut self, range: Range) -> Result<u64, DriverError> {
        let call = Call::Unmap;
        self.in_one_reservation(call, range)?;
        let (at, size) = named(range);
        let handles = match self.memory.whole_mappings(range) {
            Ok(handles) => handles,
            Err(obstacle) => {
                let fault = match obstacle {
                    Obstacle::Bare(bare) => {
                        Fault::UnmapBare { at, size, bare: DeviceAddress::new(bare) }
                    }
                    Obstacle::Part(handle) => {
                        let (handle_at, handle_size) = named(handle);
                        Fault::UnmapPart { at, size, handle_at, handle_size }
                    }
                };
                return Err(self.refuse(call, fault, INVALID_VALUE));
            }
        };
        if let Some((stream, work)) = self.unfinished_in(range) {
            self.faults.add(Fault::UnmapBeforeDone { at, size, stream, work });
        }
        Ok(handles)
    }

    /// The handles behind one range, behind another.
    pub(super) fn remap(&mut self, from: Range, to: Range) -> Result<(), DriverError> {
        if !(self.options.virtual_memory && self.options.remap) {
            return Err(DriverError::Unsupported { what: "remap" });
        }
        let mut mapped = false;
        let outcome = self.try_remap(from, to, &mut mapped);
        match outcome {
            Ok(()) => self.memory.remap(from, to),
            Err(_) => {
                if mapped && self.lost.is_none() {
                    self.count(Call::Unmap); // of what was mapped at the new place
                }
                if self.memory.whole_mappings(from).is_ok() {
                    self.memory.wipe(from);
                }
            }
        }
        outcome
    }

    /// The calls of a remap; notes whether any of its new place is mapped.
    fn try_remap(&mut self, from: Range, to: Range, mapped: &mut bool) -> Result<(), DriverError> {
        if self.memory.whole_mappings(from).is_err() {
            return self.check_unmap(from).map(drop); // no handles to make a call with
        }
        let requested = ByteSize::new(from.size);
        let handles = self.memory.handles_in(from);
        for &size in &handles {
            self.enter_virtual(Call::Map, requested)?;
            self.in_one_reservation(Call::Map, to)?;
            if self.memory.is_mapped_anywhere(to) {
                let (at, size) = named(to);
                return Err(self.refuse(Call::Map, Fault::DoubleMap { at, size }, INVALID_VALUE));
            }
            self.charge(Call::Map, 1, ByteSize::new(size));
            *mapped = true;
        }
        self.enter(Call::SetAccess, requested)?;
        self.charge(Call::SetAccess, handles.len() as u64, requested);
        self.enter(Call::Unmap, ByteSize::ZERO)?;
        let count = self.check_unmap(from)?;
        self.charge(Call::Unmap, count, requested);
        Ok(())
    }

    /// Copies and waits for that alone: other streams are not waited for.
    pub(super) fn copy(&mut self, from: Range, to: DeviceAddress) -> Result<(), DriverError> {
        let size = ByteSize::new(from.size);
        let entered = self.enter(Call::Copy, size);
        let work = match entered {
            Ok(()) => Work::Copy(from, to.get()),
            Err(_) => Work::Fill(Range { at: to.get(), size: from.size }, SCRIBBLE),
        };
        if self.lost.is_none() {
            self.charge(Call::Copy, 0, size);
            let done = work.run(&mut self.memory, &mut self.stores);
            if let Err(illegal) = done
                && entered.is_ok()
            {
                self.illegal(None, &work, illegal);
            }
        }
        entered.and_then(|()| self.lost_in(Call::Copy))
    }
}
