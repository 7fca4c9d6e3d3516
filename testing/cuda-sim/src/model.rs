//! The state of the simulated device, and its transition rules.
//!
//! Every CUDA call passes [`Model::enter`]: it is counted, charged and logged, then other work may
//! proceed, then it fails if the context is lost or a failure is planned. Only a call that passes
//! has an effect. One lock guards everything; see [`super::SimDriver`].
//!
//! Invariant: the same options and the same sequence of calls produce the same log. Once `lost` is
//! set it stays, no work is queued, and no call has an effect.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use super::call::Call;
use super::fault::{Fault, Faults, HandleKind, Planned, SimError, WorkKind};
use super::graph::Capture;
use super::host::HostCopy;
use super::memory::{Memory, Range};
use super::options::{Order, SimOptions};
use super::pools::Pools;
use super::queue::{Chance, Queues};
use super::segments::Segments;
use super::slots::Slots;
use super::sparse::Sparse;
use super::task::{HostRanges, Task};
use super::work::{Illegal, Outcome, Position, Ticket, Work};
use lowtide_core::bytes::ByteSize;
use lowtide_gpu_driver::{DeviceAddress, DriverError, HostMemory, HostStore, StreamHandle};

/// The number of outcomes kept; the oldest are dropped first.
const OUTCOMES_KEPT: usize = 1 << 20;

/// The most pieces of queued work; a launch beyond the limit runs one first.
const QUEUED_MAX: usize = 1 << 20;

/// Most pieces of work that are done before one call in random order.
const TURNS_MAX: usize = 16;

/// An entry of the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogEntry {
    /// A call was made.
    Called(Call),
    /// Work of a stream was done.
    Done(StreamHandle, WorkKind),
    /// A host function ran, with its tag.
    Ran(StreamHandle, u64),
}

/// The mark of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Marked {
    Nothing,
    Position(Position),
    /// A place in the capture of a stream, which is not a point in time.
    Captured(u64),
}

#[derive(Debug)]
pub(super) struct Model {
    pub(super) options: SimOptions,
    pub(super) memory: Memory,
    pub(super) queues: Queues,
    pub(super) events: Slots<Marked>,
    pub(super) stores: Slots<Sparse>,
    /// The stores that are not page-locked.
    pub(super) pageable_stores: BTreeSet<u64>,
    pub(super) graphs: Slots<Vec<Work>>,
    pub(super) captures: BTreeMap<u64, Capture>,
    pub(super) faults: Faults,
    pub(super) planned: Planned,
    /// The result with which every call fails.
    pub(super) lost: Option<u32>,
    pub(super) calls: [u64; Call::COUNT],
    pub(super) calls_after_loss: u64,
    pub(super) neighbours: ByteSize,
    pub(super) host_limit: ByteSize,
    pub(super) lock_limit: ByteSize,
    pub(super) store_lock_limit: ByteSize,
    /// Host memory given out by address.
    pub(super) host_blocks: BTreeMap<usize, (ByteSize, HostMemory)>,
    /// Copies with host memory at one end, of which some are not done.
    pub(super) host_copies: Vec<HostCopy>,
    pub(super) differences: u64,
    /// Work that is more than a value: kernels, copies with the host.
    pub(super) tasks: Slots<Task>,
    /// Real host memory that the device reaches.
    pub(super) host_ranges: HostRanges,
    /// Plain and stream-ordered memory.
    pub(super) pools: Pools,
    /// The part of it that the driver's segments use.
    pub(super) segments: Segments,
    /// The legacy default stream; 0 before its first use.
    pub(super) legacy: u64,
    /// Streams that are ordered with the legacy default stream.
    pub(super) blocking: BTreeSet<u64>,
    /// Streams that exist without being created.
    pub(super) implicit: BTreeSet<u64>,
    outcomes: VecDeque<Outcome>,
    /// The ticket of the first outcome kept.
    outcomes_from: u64,
    chance: Chance,
    log: VecDeque<LogEntry>,
    log_hash: u64,
}

impl Model {
    pub(super) fn new(options: SimOptions) -> Self {
        options.validate();
        let seed = if let Order::Random { seed } = options.order { seed } else { 0 };
        let space = Range { at: options.address_base, size: options.address_space.get() };
        Self {
            memory: Memory::new(space),
            queues: Queues::default(),
            events: Slots::default(),
            stores: Slots::default(),
            pageable_stores: BTreeSet::new(),
            graphs: Slots::default(),
            captures: BTreeMap::new(),
            faults: Faults::default(),
            planned: Planned::default(),
            lost: None,
            calls: [0; Call::COUNT],
            calls_after_loss: 0,
            neighbours: ByteSize::ZERO,
            host_limit: ByteSize::MAX,
            lock_limit: ByteSize::MAX,
            store_lock_limit: ByteSize::MAX,
            host_blocks: BTreeMap::new(),
            host_copies: Vec::new(),
            differences: 0,
            tasks: Slots::default(),
            host_ranges: HostRanges::default(),
            pools: Pools::default(),
            segments: Segments::default(),
            legacy: 0,
            blocking: BTreeSet::new(),
            implicit: BTreeSet::new(),
            outcomes: VecDeque::new(),
            outcomes_from: 0,
            chance: Chance::new(seed),
            log: VecDeque::new(),
            log_hash: 0,
            options,
        }
    }

    /// Begins a call: counts, charges and logs it, lets other work proceed, and fails it if the
    /// context is lost, a failure is planned, or a capture forbids it. `requested` is the requested
    /// size, if any.
    pub(super) fn enter(&mut self, call: Call, requested: ByteSize) -> Result<(), DriverError> {
        self.count(call);
        if let Order::Random { .. } = self.options.order {
            self.take_turns();
        }
        if let Some(code) = self.lost {
            self.calls_after_loss += 1;
            return Err(DriverError::of_cuda(call.name(), code, requested));
        }
        match self.planned.of(call) {
            Some(error) => Err(self.fail(call, error, requested)),
            None if call.is_unsafe_in_capture() => self.forbid_unsafe(call, UNSUPPORTED),
            None => Ok(()),
        }
    }

    /// Counts, charges and logs a call.
    pub(super) fn count(&mut self, call: Call) {
        self.calls[call as usize] += 1;
        self.note(LogEntry::Called(call), call as u64);
        self.pass(self.options.costs.of(call).call_ns);
    }

    /// Charges for what a call reaches beyond the call itself.
    pub(super) fn charge(&self, call: Call, handles: u64, bytes: ByteSize) {
        let costs = &self.options.costs;
        let all = costs.nanoseconds(call, handles, bytes);
        self.pass(all - costs.of(call).call_ns.min(all));
    }

    fn pass(&self, nanoseconds: u64) {
        if nanoseconds > 0 {
            self.options.clock.advance(Duration::from_nanos(nanoseconds));
        }
    }

    /// Returns the error of a failed call; the context is lost if the error means so.
    pub(super) fn fail(&mut self, call: Call, error: SimError, requested: ByteSize) -> DriverError {
        let error_is = DriverError::of_cuda(call.name(), error.code(), requested);
        if error_is.is_context_lost() {
            self.lose(error.code());
        }
        error_is
    }

    /// The error of a call that the caller may not make, on record.
    pub(super) fn refuse(&mut self, call: Call, fault: Fault, code: u32) -> DriverError {
        self.faults.add(fault);
        self.fail(call, SimError::Code(code), ByteSize::ZERO)
    }

    /// Ends the context: queued work is never done.
    pub(super) fn lose(&mut self, code: u32) {
        self.lost.get_or_insert(code);
        self.queues.clear();
        self.tasks = Slots::default();
    }

    pub(super) fn stale(&mut self, call: Call, kind: HandleKind, number: u64) -> DriverError {
        self.refuse(call, Fault::StaleHandle { call, kind, number }, INVALID_HANDLE)
    }

    pub(super) fn live_stream(&mut self, call: Call, stream: u64) -> Result<(), DriverError> {
        let live = self.queues.is_live(stream);
        if live { Ok(()) } else { Err(self.stale(call, HandleKind::Stream, stream)) }
    }

    pub(super) fn marked(&mut self, call: Call, event: u64) -> Result<Marked, DriverError> {
        let marked = self.events.get(event).copied();
        marked.ok_or_else(|| self.stale(call, HandleKind::Event, event))
    }

    /// Queues work on a live stream, or captures it.
    pub(super) fn queue(&mut self, call: Call, stream: u64, work: Work) -> Result<(), DriverError> {
        if let Some(capture) = self.captures.get_mut(&stream) {
            if capture.spoiled {
                return Err(self.fail(call, SimError::Code(INVALIDATED), ByteSize::ZERO));
            }
            capture.work.push(work);
            return Ok(());
        }
        // A real launch blocks if the device's queue is full; which work then proceeds is open.
        while self.queues.unfinished() >= QUEUED_MAX {
            self.take_turn();
            self.lost_in(call)?;
        }
        if self.legacy != 0 {
            self.order_with_legacy(stream);
        }
        self.queues.push(stream, work);
        if self.options.order == Order::Synchronous {
            return self.wait_for(call, self.queues.end(stream));
        }
        Ok(())
    }

    /// Does what a position depends on; in random order other work as well.
    pub(super) fn wait_for(&mut self, call: Call, position: Position) -> Result<(), DriverError> {
        let is_random = matches!(self.options.order, Order::Random { .. });
        while let Some(stream) = self.queues.next_towards(position) {
            if is_random && self.chance.below(2) == 0 {
                self.take_turn();
            } else {
                self.run(stream);
            }
        }
        self.lost_in(call)?;
        self.observe(position);
        Ok(())
    }

    /// Does all that is queued.
    pub(super) fn run_all(&mut self) {
        while self.queues.busy() > 0 {
            self.take_turn();
        }
        self.observe_all();
    }

    /// The error of a call in which the context was lost.
    pub(super) fn lost_in(&self, call: Call) -> Result<(), DriverError> {
        let error = |code| DriverError::of_cuda(call.name(), code, ByteSize::ZERO);
        self.lost.map_or(Ok(()), |code| Err(error(code)))
    }

    fn take_turns(&mut self) {
        // Half of the calls let nothing on, the others mostly a little: queues grow and drain.
        let turns = match self.chance.below(8) {
            0..=3 => 0,
            few @ 4..=6 => few - 3,
            _ => self.chance.below(TURNS_MAX + 1),
        };
        for _ in 0..turns {
            if self.queues.busy() == 0 {
                break;
            }
            self.take_turn();
        }
    }

    /// Does one piece of work of a stream drawn by chance, or of one on which that depends.
    pub(super) fn take_turn(&mut self) {
        let busy = self.queues.busy();
        if busy > 0 {
            let drawn = if busy == 1 { 0 } else { self.chance.below(busy) };
            if let Some(stream) = self.queues.next_of_busy(drawn) {
                self.run(stream);
            }
        }
    }

    fn run(&mut self, number: u64) {
        if self.is_delayed(number) {
            return;
        }
        let Some(work) = self.queues.take(number) else { return };
        let stream = StreamHandle::new(number);
        let entry = match work {
            Work::HostFunction(tag) => LogEntry::Ran(stream, tag),
            _ => LogEntry::Done(stream, work.kind()),
        };
        self.note(entry, number << 8 | work.kind() as u64 | 0x80);
        self.charge_copy(&work);
        match work {
            Work::Task(task, _) => return self.run_task(stream, &work, task),
            Work::Open(at, size) => return self.open_block(at, size),
            Work::Close(at, free) => {
                return self.close_block(at, free, self.queues.done(number));
            }
            _ => {}
        }
        match work.run(&mut self.memory, &mut self.stores) {
            Ok(None) => {}
            Ok(Some((ticket, outcome))) => self.keep(ticket, outcome),
            Err(illegal) => self.illegal(Some(stream), &work, illegal),
        }
    }

    /// A copy costs its bytes when it is done.
    fn charge_copy(&self, work: &Work) {
        let call = match work {
            Work::Copy(..) => Call::CopyAsync,
            Work::Offload(..) => Call::Offload,
            Work::Restore(..) => Call::Restore,
            _ => return,
        };
        let bytes = work.ranges().next().map_or(0, |range| range.size);
        self.charge(call, 0, ByteSize::new(bytes));
    }

    /// Records work that accessed a bare address, and loses the context.
    pub(super) fn illegal(&mut self, stream: Option<StreamHandle>, work: &Work, what: Illegal) {
        let work = work.kind();
        self.faults.add(match what {
            Illegal::Store(store) => {
                Fault::IllegalStore { stream, work, store: HostStore::new(store) }
            }
            Illegal::Bare(range, bare) => {
                let (at, size) = named(range);
                Fault::IllegalAddress { stream, work, at, size, bare: DeviceAddress::new(bare) }
            }
        });
        self.lose(SimError::IllegalAddress.code());
    }

    /// A place for the outcome of a check or a sum.
    pub(super) fn ticket(&mut self) -> Ticket {
        if self.outcomes.len() == OUTCOMES_KEPT {
            self.outcomes.pop_front();
            self.outcomes_from += 1;
        }
        self.outcomes.push_back(Outcome::Pending);
        Ticket(self.outcomes_from + self.outcomes.len() as u64 - 1)
    }

    fn keep(&mut self, ticket: Ticket, outcome: Outcome) {
        self.differences += u64::from(matches!(outcome, Outcome::Differs { .. }));
        let at = ticket.0.checked_sub(self.outcomes_from);
        let kept = at.and_then(|at| self.outcomes.get_mut(usize::try_from(at).ok()?));
        if let Some(kept) = kept {
            *kept = outcome;
        }
    }

    pub(super) fn outcome(&self, ticket: Ticket) -> Outcome {
        let at = ticket.0.checked_sub(self.outcomes_from);
        let kept = at.and_then(|at| self.outcomes.get(usize::try_from(at).ok()?));
        match kept {
            Some(Outcome::Pending) if self.lost.is_some() => Outcome::Lost,
            Some(outcome) => *outcome,
            None => Outcome::Forgotten,
        }
    }

    fn note(&mut self, entry: LogEntry, number: u64) {
        // The multiplier of Knuth's MMIX generator; enough to distinguish sequences.
        let mixed = (self.log_hash ^ number).wrapping_mul(6_364_136_223_846_793_005);
        self.log_hash = mixed.rotate_left(29);
        if self.options.log_entries > 0 {
            if self.log.len() == self.options.log_entries {
                self.log.pop_front();
            }
            self.log.push_back(entry);
        }
    }

    pub(super) fn log(&self) -> Vec<LogEntry> {
        self.log.iter().copied().collect()
    }

    pub(super) const fn log_hash(&self) -> u64 {
        self.log_hash
    }

    /// Returns the free memory of the device.
    pub(super) const fn headroom(&self) -> ByteSize {
        let taken = self.options.context_overhead.saturating_add(self.neighbours);
        let taken = taken.saturating_add(self.memory.taken());
        self.options.capacity.saturating_sub(taken.saturating_add(self.memory.committed()))
    }

    /// Host memory given out: of a kind, or all of it with the stores.
    pub(super) fn host_bytes(&self, of: Option<HostMemory>) -> ByteSize {
        let blocks = self.host_blocks.values().filter(|(_, kind)| of.is_none_or(|of| of == *kind));
        let sum = |stores: &mut dyn Iterator<Item = &Sparse>| -> ByteSize {
            stores.map(|store| ByteSize::of(store.size())).sum()
        };
        let all = sum(&mut self.stores.values());
        let pageable = self.pageable_stores.iter().filter_map(|store| self.stores.get(*store));
        let pageable = sum(&mut { pageable });
        let stores = match of {
            None => all,
            Some(HostMemory::PageLocked) => all.saturating_sub(pageable),
            Some(HostMemory::Pageable) => pageable,
        };
        let ranges = if of == Some(HostMemory::Pageable) {
            ByteSize::ZERO
        } else {
            ByteSize::new(self.host_ranges.locked())
        };
        blocks
            .map(|(size, _)| *size)
            .chain([stores, ranges])
            .fold(ByteSize::ZERO, ByteSize::saturating_add)
    }

    /// Checks the whole state. Cost: O(all objects).
    pub(super) fn validate(&self) {
        self.memory.validate();
        self.queues.validate();
        self.pools.validate(&self.memory);
        assert!(self.lost.is_none() || self.queues.unfinished() == 0);
    }
}

/// A range as the public types name it.
pub(super) const fn named(range: Range) -> (DeviceAddress, ByteSize) {
    (DeviceAddress::new(range.at), ByteSize::new(range.size))
}

/// `CUDA_ERROR_INVALID_VALUE`
pub(super) const INVALID_VALUE: u32 = 1;
/// `CUDA_ERROR_INVALID_HANDLE`
pub(super) const INVALID_HANDLE: u32 = 400;
/// `CUDA_ERROR_ILLEGAL_STATE`
pub(super) const ILLEGAL_STATE: u32 = 401;
/// `CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED`
pub(super) const UNSUPPORTED: u32 = 900;
/// `CUDA_ERROR_STREAM_CAPTURE_INVALIDATED`
pub(super) const INVALIDATED: u32 = 901;
/// `CUDA_ERROR_STREAM_CAPTURE_ISOLATION`
pub(super) const ISOLATION: u32 = 905;
/// `CUDA_ERROR_STREAM_CAPTURE_IMPLICIT`
pub(super) const IMPLICIT: u32 = 906;
/// `CUDA_ERROR_CAPTURED_EVENT`
pub(super) const CAPTURED_EVENT: u32 = 907;
/// `CUDA_ERROR_CONTEXT_IS_DESTROYED`
pub(super) const DESTROYED: u32 = 709;
