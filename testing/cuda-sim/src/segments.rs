//! Memory in segments, for devices without virtual memory.
//!
//! Segments come from plain memory, or from a private pool with one stream, which caches released
//! memory until it is trimmed. A segment is returned only after its allocation completed, and has
//! scrambled contents. Releasing one while unfinished work refers to it is recorded as a fault,
//! even though the call for plain memory waits for all work: that wait does not prove that the
//! arena waited.
//!
//! Invariant: every segment in the table is a block in use of that source, and of no other caller.

use std::collections::BTreeMap;

use super::call::Call;
use super::fault::Fault;
use super::memory::Range;
use super::model::{Answer, INVALID_VALUE, Model, NOT_SUPPORTED};
use lowtide_core::bytes::ByteSize;
use lowtide_gpu_driver::DeviceAddress;

/// The segments that are there, and the pool that they are of.
#[derive(Debug, Default)]
pub(super) struct Segments {
    /// Sizes by address.
    pub(super) table: BTreeMap<u64, u64>,
    /// The pool and its stream, once the first segment was created.
    source: Option<(u64, u64)>,
}

impl Model {
    pub(super) fn segment_create(&mut self, size: ByteSize) -> Answer<DeviceAddress> {
        let range = self.whole(DeviceAddress::new(0), size)?;
        let call = self.call_of_segments([Call::Alloc, Call::AllocAsync])?;
        self.enter(call, size)?;
        let at = if self.options.pool {
            let (pool, stream) = self.segment_pool();
            let at = self.alloc_ordered(pool, range.size, stream)?;
            self.wait_for(self.queues.end(stream))?;
            at
        } else {
            let at = self.alloc_plain(range.size)?;
            self.memory.wipe(Range { at, ..range });
            at
        };
        self.segments.table.insert(at, range.size);
        Ok(DeviceAddress::new(at))
    }

    pub(super) fn segment_destroy(&mut self, range: Range) -> Answer {
        let call = self.call_of_segments([Call::Free, Call::FreeAsync])?;
        let is_there = self.segments.table.get(&range.at) == Some(&range.size);
        if let Err(error) = self.enter(call, ByteSize::ZERO) {
            if is_there {
                self.memory.wipe(range); // the segment stays, its contents need not
            }
            return Err(error);
        }
        if !is_there {
            return Err(self.refuse(
                Fault::NotAllocated { call, at: DeviceAddress::new(range.at) },
                INVALID_VALUE,
            ));
        }
        if let Some((stream, work)) = self.unfinished_in(range) {
            self.faults.push(Fault::UnmapBeforeDone { range, stream, work });
        }
        self.charge(1, ByteSize::new(range.size));
        if self.options.pool {
            let (_, stream) = self.segment_pool();
            self.free_ordered(range.at, stream)?;
        } else {
            self.free_plain(range.at)?;
        }
        self.segments.table.remove(&range.at);
        Ok(())
    }

    /// Releases the memory that the pool caches to the device.
    pub(super) fn trim_segments(&mut self) -> Answer {
        let Some((pool, stream)) = self.segments.source else { return Ok(()) };
        self.enter(Call::PoolTrim, ByteSize::ZERO)?;
        self.wait_for(self.queues.end(stream))?;
        self.trim(pool, 0);
        Ok(())
    }

    /// The call that serves segments, of plain memory and of a pool.
    fn call_of_segments(&mut self, calls: [Call; 2]) -> Answer<Call> {
        self.call = calls[usize::from(self.options.pool)];
        if self.options.virtual_memory {
            return Err(self.fail(NOT_SUPPORTED));
        }
        Ok(self.call)
    }

    /// The pool of the segments and its stream, which release nothing by themselves.
    fn segment_pool(&mut self) -> (u64, u64) {
        if let Some(source) = self.segments.source {
            return source;
        }
        let pool = self.pool_create(0);
        if let Some(pool) = self.pools.get_mut(pool) {
            pool.threshold = u64::MAX;
        }
        let source = (pool, self.implicit_stream());
        self.segments.source = Some(source);
        source
    }
}
