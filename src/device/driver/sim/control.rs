//! What a test asks the simulation, and tells it: counts, faults, limits, failures, time.
//!
//! Nothing here is a call of the driver: nothing is counted, charged or logged, and it all works
//! after the context is lost.
//!
//! Invariant: only `advance`, `run_all`, `poison` and `lose_context` change what is queued.

use super::SimDriver;
use super::call::Call;
use super::fault::{Fault, SimError};
use super::model::{DESTROYED, LogEntry};
use crate::bytes::ByteSize;
use crate::clock::ManualClock;

/// What has not been given back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Leaks {
    /// Reservations of address space.
    pub reservations: usize,
    /// Their bytes.
    pub reserved: ByteSize,
    /// Physical handles.
    pub handles: usize,
    /// Their bytes.
    pub committed: ByteSize,
    /// Segments of a device without virtual memory. What its pool keeps is none.
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
    /// Whether all was given back.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

impl SimDriver {
    /// The clock that the calls advance.
    #[must_use]
    pub fn clock(&self) -> ManualClock {
        self.clock.clone()
    }

    /// How many calls of a kind were made, failed ones included.
    #[must_use]
    pub fn calls(&self, call: Call) -> u64 {
        self.model().calls[call as usize]
    }

    /// How many calls were made in all.
    #[must_use]
    pub fn calls_total(&self) -> u64 {
        self.model().calls.iter().sum()
    }

    /// How many calls were answered with the error of a lost context: the first is how a caller
    /// learns of it, the others it made although it knew.
    #[must_use]
    pub fn calls_after_loss(&self) -> u64 {
        self.model().calls_after_loss
    }

    /// Lets one call fail: of this kind, or of any with `None`; the next one with `nth` 0. The
    /// call has no effect, and loses the context where the error says so. Rolling back a failed
    /// commit counts, and does not fail.
    ///
    /// # Panics
    /// If a thousand failures are planned.
    pub fn fail_nth(&self, call: Option<Call>, nth: u64, error: SimError) {
        self.model().planned.once(call, nth, error);
    }

    /// Lets every call of this kind fail from now on, or none with `None`.
    pub fn fail_always(&self, call: Call, error: Option<SimError>) {
        self.model().planned.always(call, error);
    }

    /// Forgets all planned failures.
    pub fn forget_failures(&self) {
        self.model().planned.forget();
    }

    /// Sets the memory of the device. It may be less than is committed.
    pub fn set_capacity(&self, capacity: ByteSize) {
        self.model().options.capacity = capacity;
    }

    /// Sets what others on the device hold of its memory.
    pub fn set_neighbours(&self, held: ByteSize) {
        self.model().neighbours = held;
    }

    /// Sets how much host memory there is, of all kinds; without limit at first.
    pub fn set_host_limit(&self, limit: ByteSize) {
        self.model().host_limit = limit;
    }

    /// Sets how much host memory may be page-locked; without limit at first.
    pub fn set_lock_limit(&self, limit: ByteSize) {
        self.model().lock_limit = limit;
    }

    /// Loses the context as by a fault of the device: every later call answers with this error, and
    /// nothing that is queued is done.
    pub fn poison(&self, error: SimError) {
        self.model().lose(error.code());
    }

    /// Destroys the context, as another part of the process may: every later call answers 709.
    pub fn lose_context(&self) {
        self.model().lose(DESTROYED);
    }

    /// The result with which every call fails, once the context is lost.
    #[must_use]
    pub fn lost(&self) -> Option<u32> {
        self.model().lost
    }

    /// Does so many pieces of queued work, of streams drawn by chance; how many were there to do.
    pub fn advance(&self, count: usize) -> usize {
        let mut model = self.model();
        let mut done = 0;
        while done < count && model.queues.busy() > 0 {
            model.take_turn();
            done += 1;
        }
        done
    }

    /// Does all queued work.
    pub fn run_all(&self) {
        self.model().run_all();
    }

    /// How many pieces of work are queued.
    #[must_use]
    pub fn unfinished(&self) -> usize {
        self.model().queues.unfinished()
    }

    /// The breaches of the contract so far, the first thousand of them.
    #[must_use]
    pub fn faults(&self) -> Vec<Fault> {
        self.model().faults.kept().to_vec()
    }

    /// How many breaches there were in all.
    #[must_use]
    pub fn faults_total(&self) -> u64 {
        self.model().faults.total
    }

    /// How often memory was unmapped while unfinished work referred to it.
    #[must_use]
    pub fn unsafe_unmaps(&self) -> u64 {
        self.model().faults.unsafe_unmaps
    }

    /// Asserts that the contract was kept, and no check found anything but its pattern.
    ///
    /// # Panics
    /// If not.
    pub fn assert_no_faults(&self) {
        let model = self.model();
        let faults = model.faults.kept();
        assert!(faults.is_empty(), "{} breaches of the contract: {faults:?}", model.faults.total);
        assert_eq!(model.differences, 0, "checks found something other than their pattern");
    }

    /// What has not been given back.
    #[must_use]
    pub fn leaks(&self) -> Leaks {
        let model = self.model();
        Leaks {
            reservations: model.memory.reservations(),
            reserved: model.memory.reserved(),
            handles: model.memory.handles(),
            committed: model.memory.committed(),
            segments: model.segments.len(),
            streams: model.queues.live() - model.implicit.len(),
            events: model.events.len(),
            host_stores: model.stores.len(),
            host_blocks: model.host_blocks.len(),
            graphs: model.graphs.len(),
        }
    }

    /// Bytes of segments that are there, and what the device has given for them and for what is
    /// kept of those that were given back.
    #[must_use]
    pub fn segment_bytes(&self) -> [ByteSize; 2] {
        let model = self.model();
        [ByteSize::new(model.segments.bytes()), model.memory.taken()]
    }

    /// The last entries of the log, as many as the options keep.
    #[must_use]
    pub fn log(&self) -> Vec<LogEntry> {
        self.model().log()
    }

    /// A number that follows from all calls and all work done so far, and their order.
    #[must_use]
    pub fn log_hash(&self) -> u64 {
        self.model().log_hash()
    }

    /// Checks the model's own books. Cost: O(all that there is).
    ///
    /// # Panics
    /// If the model is wrong.
    pub fn validate(&self) {
        self.model().validate();
    }
}
