//! The test interface of the simulation: counts, faults, limits, failures, time.
//!
//! Nothing here is a driver call: nothing is counted, charged or logged, and everything works after
//! the context is lost.
//!
//! Invariant: only `advance`, `run_all`, `poison` and `lose_context` change the queued work.

use super::SimDriver;
use super::call::Call;
use super::fault::{Fault, Planned, SimError};
use super::model::DESTROYED;
use lowtide_core::bytes::ByteSize;
use lowtide_core::clock::ManualClock;

/// Objects that have not been released.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Leaks {
    /// Reservations of address space.
    pub reservations: usize,
    /// Bytes of these reservations.
    pub reserved: ByteSize,
    /// Physical handles.
    pub handles: usize,
    /// Bytes of these handles.
    pub committed: ByteSize,
    /// Segments of a device without virtual memory. Memory cached by its pool does not count.
    pub segments: usize,
    /// Streams.
    pub streams: usize,
    /// Events.
    pub events: usize,
    /// Stores of host memory.
    pub host_stores: usize,
    /// Blocks of host memory.
    pub host_blocks: usize,
    /// Captured graphs.
    pub graphs: usize,
}

impl Leaks {
    /// Returns `true` if everything was released.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

impl SimDriver {
    /// Returns the clock that the calls advance.
    #[must_use]
    pub fn clock(&self) -> ManualClock {
        self.model().options.clock.clone()
    }

    /// Returns the number of calls of a kind, including failed ones.
    #[must_use]
    pub fn calls(&self, call: Call) -> u64 {
        self.model().calls[call as usize]
    }

    /// Returns the total number of calls.
    #[must_use]
    pub fn calls_total(&self) -> u64 {
        self.model().calls.iter().sum()
    }

    /// Returns the number of calls that failed because the context is lost. The first is how a
    /// caller learns of the loss; the rest were made despite it.
    #[must_use]
    pub fn calls_after_loss(&self) -> u64 {
        self.model().calls_after_loss
    }

    /// Makes one call fail: of this kind, or of any kind with `None`; the next one with `nth` 0.
    ///
    /// The call has no effect, and loses the context if the error means so. Rollback calls of a
    /// failed commit are counted and do not fail.
    ///
    /// # Panics
    /// If more than a thousand failures are planned.
    pub fn fail_nth(&self, call: Option<Call>, nth: u64, error: SimError) {
        self.model().planned.once(call, nth, error);
    }

    /// Makes every call of this kind fail from now on, or none with `None`.
    pub fn fail_always(&self, call: Call, error: Option<SimError>) {
        self.model().planned.always(call, error);
    }

    /// Clears all planned failures.
    pub fn forget_failures(&self) {
        self.model().planned = Planned::default();
    }

    /// Sets the memory of the device. It may be less than is committed.
    pub fn set_capacity(&self, capacity: ByteSize) {
        self.model().options.capacity = capacity;
    }

    /// Sets the device memory that other processes hold.
    pub fn set_neighbours(&self, held: ByteSize) {
        self.model().neighbours = held;
    }

    /// Sets the limit of host memory, of all kinds. Initially unlimited.
    pub fn set_host_limit(&self, limit: ByteSize) {
        self.model().host_limit = limit;
    }

    /// Sets the limit of page-locked host memory. Initially unlimited.
    pub fn set_lock_limit(&self, limit: ByteSize) {
        self.model().lock_limit = limit;
    }

    /// Sets the limit of page-locked stores, within the limit of page-locked memory. Initially
    /// unlimited. Zero is a driver that page-locks only what it allocates itself.
    pub fn set_store_lock_limit(&self, limit: ByteSize) {
        self.model().store_lock_limit = limit;
    }

    /// Loses the context as after a device fault: every later call returns this error, and queued
    /// work is never done.
    pub fn poison(&self, error: SimError) {
        self.model().lose(error.code());
    }

    /// Destroys the context, as other code in the process may: every later call returns 709.
    pub fn lose_context(&self) {
        self.model().lose(DESTROYED);
    }

    /// Returns the result of every call after the context is lost; `None` before.
    #[must_use]
    pub fn lost(&self) -> Option<u32> {
        self.model().lost
    }

    /// Runs up to `count` pieces of queued work, of randomly chosen streams; returns the number
    /// run.
    pub fn advance(&self, count: usize) -> usize {
        let mut model = self.model();
        let mut done = 0;
        while done < count && model.queues.busy() > 0 {
            model.take_turn();
            done += 1;
        }
        done
    }

    /// Runs all queued work.
    pub fn run_all(&self) {
        self.model().run_all();
    }

    /// Returns the number of queued pieces of work.
    #[must_use]
    pub fn unfinished(&self) -> usize {
        self.model().queues.unfinished()
    }

    /// Returns the breaches of the contract so far.
    #[must_use]
    pub fn faults(&self) -> Vec<Fault> {
        self.model().faults.clone()
    }

    /// Returns the total number of breaches.
    #[must_use]
    pub fn faults_total(&self) -> u64 {
        self.model().faults.len() as u64
    }

    /// Returns how often memory was unmapped while unfinished work referred to it.
    #[must_use]
    pub fn unsafe_unmaps(&self) -> u64 {
        let is_meant = |fault: &&Fault| matches!(fault, Fault::UnmapBeforeDone { .. });
        self.model().faults.iter().filter(is_meant).count() as u64
    }

    /// Asserts that the contract was kept, and that every check found its pattern.
    ///
    /// # Panics
    /// If the contract was broken or a check found different bytes.
    pub fn assert_no_faults(&self) {
        let model = self.model();
        let faults = &model.faults;
        assert!(faults.is_empty(), "{} breaches of the contract: {faults:?}", faults.len());
        assert_eq!(model.differences, 0, "checks found bytes other than their pattern");
    }

    /// Returns the objects that have not been released.
    #[must_use]
    pub fn leaks(&self) -> Leaks {
        let model = self.model();
        Leaks {
            reservations: model.memory.reservations(),
            reserved: model.memory.reserved(),
            handles: model.memory.handles(),
            committed: model.memory.committed(),
            segments: model.segments.table.len(),
            streams: model.queues.live() - model.implicit.len(),
            events: model.events.len(),
            host_stores: model.stores.len(),
            host_blocks: model.host_blocks.len(),
            graphs: model.graphs.len(),
        }
    }

    /// Returns the bytes of live segments, and the bytes that the device has allocated for them and
    /// for cached memory of released segments.
    #[must_use]
    pub fn segment_bytes(&self) -> [ByteSize; 2] {
        let model = self.model();
        [ByteSize::new(model.segments.table.values().sum()), model.memory.taken()]
    }

    /// Returns the tags of the host functions that ran, in order.
    #[must_use]
    pub fn ran(&self) -> Vec<u64> {
        self.model().ran.clone()
    }

    /// Returns a hash of all calls and all work done so far, in their order.
    #[must_use]
    pub fn log_hash(&self) -> u64 {
        self.model().log_hash
    }

    /// Checks the model's internal consistency. Cost: O(all objects).
    ///
    /// # Panics
    /// If the model is inconsistent.
    pub fn validate(&self) {
        self.model().validate();
    }
}
