//! The state of the simulated device, and its transition rules.
//!
//! Every CUDA call passes [`Model::enter`]: it is counted, charged and logged, then other work may
//! proceed, then it fails if the context is lost or a failure is planned. Only a call that passes
//! has an effect. One lock guards everything; see [`super::SimDriver`].
//!
//! Invariant: the same options and the same sequence of calls produce the same log. Once `lost` is
//! set it stays, no work is queued, and no call has an effect.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::call::Call;
use super::fault::{Fault, HandleKind, Planned, SimError, WorkKind};
use super::graph::Capture;
use super::host::HostCopy;
use super::memory::{Memory, Range};
use super::options::{Order, SimOptions};
use super::pools::Pools;
use super::queue::{Chance, Queues};
use super::segments::Segments;
use super::slots::Slots;
use super::task::{HostRanges, Task};
use super::work::{Illegal, Outcome, Position, Ticket, Work};
use lowtide_core::bytes::ByteSize;
use lowtide_gpu_driver::{DeviceAddress, DriverError, HostMemory, StreamHandle};

/// The most pieces of queued work; a launch beyond the limit runs one first.
const QUEUED_MAX: usize = 1 << 20;

/// Most pieces of work that are done before one call in random order.
const TURNS_MAX: usize = 16;

/// The mark of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Marked {
    Nothing,
    Position(Position),
    /// A place in the capture of a stream, which is not a point in time.
    Captured(u64),
}

/// The answer of a call.
pub(super) type Answer<T = ()> = Result<T, DriverError>;

#[derive(Debug, Default)]
pub(super) struct Model {
    pub(super) options: SimOptions,
    /// The call that is being made, and the size that it requests: what errors and faults name.
    pub(super) call: Call,
    requested: ByteSize,
    pub(super) memory: Memory,
    pub(super) queues: Queues,
    pub(super) events: Slots<Marked>,
    /// The sizes and kinds of stores, by their addresses.
    pub(super) stores: BTreeMap<u64, (u64, HostMemory)>,
    pub(super) graphs: Slots<Vec<Work>>,
    pub(super) captures: BTreeMap<u64, Capture>,
    /// The breaches of the contract.
    pub(super) faults: Vec<Fault>,
    pub(super) planned: Planned<Call>,
    /// The result with which every call fails.
    pub(super) lost: Option<u32>,
    pub(super) calls: Vec<u64>,
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
    outcomes: Vec<Outcome>,
    chance: Chance,
    /// The tags of the host functions that ran, in order.
    pub(super) ran: Vec<u64>,
    pub(super) log_hash: u64,
}

impl Model {
    pub(super) fn new(options: SimOptions) -> Self {
        options.validate();
        let seed = if let Order::Random { seed } = options.order { seed } else { 0 };
        let space = Range { at: options.address_base, size: options.address_space.get() };
        Self {
            memory: Memory::new(space),
            calls: vec![0; Call::COUNT],
            host_limit: ByteSize::MAX,
            lock_limit: ByteSize::MAX,
            store_lock_limit: ByteSize::MAX,
            chance: Chance::new(seed),
            options,
            ..Self::default()
        }
    }

    /// Begins a call: counts, charges and logs it, lets other work proceed, and fails it if the
    /// context is lost, a failure is planned, or a capture forbids it. `requested` is the requested
    /// size, if any.
    pub(super) fn enter(&mut self, call: Call, requested: ByteSize) -> Answer {
        (self.call, self.requested) = (call, requested);
        self.count(call);
        if let Order::Random { .. } = self.options.order {
            self.take_turns();
        }
        if let Some(code) = self.lost {
            self.calls_after_loss += 1;
            return Err(self.error(code));
        }
        match self.planned.of(&call) {
            Some(error) => Err(self.fail(error.code())),
            None if call.is_unsafe_in_capture() => self.forbid_unsafe(UNSUPPORTED),
            None => Ok(()),
        }
    }

    /// Counts, charges and logs a call.
    pub(super) fn count(&mut self, call: Call) {
        self.calls[call as usize] += 1;
        self.note(call as u64);
        self.pass(self.options.costs.of(call).call_ns);
    }

    /// Charges for what the call reaches beyond the call itself.
    pub(super) fn charge(&self, handles: u64, bytes: ByteSize) {
        self.charge_for(self.call, handles, bytes);
    }

    fn charge_for(&self, call: Call, handles: u64, bytes: ByteSize) {
        let costs = &self.options.costs;
        let all = costs.nanoseconds(call, handles, bytes);
        self.pass(all - costs.of(call).call_ns.min(all));
    }

    fn pass(&self, nanoseconds: u64) {
        if nanoseconds > 0 {
            self.options.clock.advance(Duration::from_nanos(nanoseconds));
        }
    }

    /// The error of the call for a result of cuda.h.
    fn error(&self, code: u32) -> DriverError {
        DriverError::of_cuda(self.call.name(), code, self.requested)
    }

    /// Returns the error of the failed call; the context is lost if the error means so.
    pub(super) fn fail(&mut self, code: u32) -> DriverError {
        let error = self.error(code);
        if error.is_context_lost() {
            self.lose(code);
        }
        error
    }

    /// The error of a call that the caller may not make, on record.
    pub(super) fn refuse(&mut self, fault: Fault, code: u32) -> DriverError {
        self.faults.push(fault);
        self.fail(code)
    }

    /// Ends the context: queued work is never done.
    pub(super) fn lose(&mut self, code: u32) {
        self.lost.get_or_insert(code);
        self.queues.clear();
        self.tasks = Slots::default();
    }

    pub(super) fn stale(&mut self, kind: HandleKind, number: u64) -> DriverError {
        self.refuse(Fault::StaleHandle { call: self.call, kind, number }, INVALID_HANDLE)
    }

    pub(super) fn live_stream(&mut self, stream: u64) -> Answer {
        let live = self.queues.is_live(stream);
        if live { Ok(()) } else { Err(self.stale(HandleKind::Stream, stream)) }
    }

    pub(super) fn marked(&mut self, event: u64) -> Answer<Marked> {
        let marked = self.events.get(event).copied();
        marked.ok_or_else(|| self.stale(HandleKind::Event, event))
    }

    /// Queues work on a live stream, or captures it.
    pub(super) fn queue(&mut self, stream: u64, work: Work) -> Answer {
        if let Some(capture) = self.captures.get_mut(&stream) {
            if capture.spoiled {
                return Err(self.fail(INVALIDATED));
            }
            capture.work.push(work);
            return Ok(());
        }
        // A real launch blocks if the device's queue is full; which work then proceeds is open.
        while self.queues.unfinished() >= QUEUED_MAX {
            self.take_turn();
            self.lost_in()?;
        }
        if self.legacy != 0 {
            self.order_with_legacy(stream);
        }
        self.queues.push(stream, work);
        if self.options.order == Order::Synchronous {
            return self.wait_for(self.queues.end(stream));
        }
        Ok(())
    }

    /// Does what a position depends on; in random order other work as well.
    pub(super) fn wait_for(&mut self, position: Position) -> Answer {
        let is_random = matches!(self.options.order, Order::Random { .. });
        while let Some(stream) = self.queues.next_towards(position) {
            if is_random && self.chance.below(2) == 0 {
                self.take_turn();
            } else {
                self.run(stream);
            }
        }
        self.lost_in()?;
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

    /// Fails a call in which the context was lost.
    pub(super) fn lost_in(&self) -> Answer {
        self.lost.map_or(Ok(()), |code| Err(self.error(code)))
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
        self.note(number << 8 | work.kind() as u64 | 0x80);
        self.charge_copy(&work);
        match work {
            Work::HostFunction(tag) => self.ran.push(tag),
            Work::Task(task, _) => return self.run_task(stream, &work, task),
            Work::Open(at, size) => return self.open_block(at, size),
            Work::Close(at, free) => {
                return self.close_block(at, free, self.queues.done(number));
            }
            _ => {}
        }
        match work.run(&mut self.memory) {
            Ok(None) => {}
            Ok(Some((ticket, outcome))) => self.keep(ticket, outcome),
            Err(illegal) => self.illegal(Some(stream), &work, illegal),
        }
    }

    /// A copy costs its bytes when it is done.
    fn charge_copy(&self, work: &Work) {
        let Work::Copy(range, _, kind) = work else { return };
        let call = match kind {
            WorkKind::Offload => Call::Offload,
            WorkKind::Restore => Call::Restore,
            _ => Call::CopyAsync,
        };
        self.charge_for(call, 0, ByteSize::new(range.size));
    }

    /// Records work that accessed a bare address, and loses the context.
    pub(super) fn illegal(
        &mut self,
        stream: Option<StreamHandle>,
        work: &Work,
        (range, bare): Illegal,
    ) {
        let (work, bare) = (work.kind(), DeviceAddress::new(bare));
        self.faults.push(Fault::IllegalAddress { stream, work, range, bare });
        self.lose(SimError::IllegalAddress.code());
    }

    /// A place for the outcome of a check or a sum.
    pub(super) fn ticket(&mut self) -> Ticket {
        self.outcomes.push(Outcome::Pending);
        Ticket(self.outcomes.len() - 1)
    }

    fn keep(&mut self, Ticket(at): Ticket, outcome: Outcome) {
        self.differences += u64::from(matches!(outcome, Outcome::Differs { .. }));
        self.outcomes[at] = outcome;
    }

    pub(super) fn outcome(&self, Ticket(at): Ticket) -> Outcome {
        match self.outcomes[at] {
            Outcome::Pending if self.lost.is_some() => Outcome::Lost,
            outcome => outcome,
        }
    }

    /// Adds a call or a piece of work to the log, of which only a hash is kept.
    fn note(&mut self, number: u64) {
        // The multiplier of Knuth's MMIX generator; enough to distinguish sequences.
        let mixed = (self.log_hash ^ number).wrapping_mul(6_364_136_223_846_793_005);
        self.log_hash = mixed.rotate_left(29);
    }

    /// Returns the free memory of the device.
    pub(super) const fn headroom(&self) -> ByteSize {
        let taken = self.options.context_overhead.saturating_add(self.neighbours);
        let taken = taken.saturating_add(self.memory.taken());
        self.options.capacity.saturating_sub(taken.saturating_add(self.memory.committed()))
    }

    /// Host memory given out, of a kind or of all kinds: blocks, stores, and what the device reaches.
    pub(super) fn host_bytes(&self, of: Option<HostMemory>) -> ByteSize {
        let blocks = self.host_blocks.values().copied();
        let stores = self.stores.values().map(|(size, kind)| (ByteSize::new(*size), *kind));
        let ranges = (ByteSize::new(self.host_ranges.bytes(false)), HostMemory::PageLocked);
        let all = blocks.chain(stores).chain([ranges]);
        all.filter(|(_, kind)| of.is_none_or(|of| of == *kind))
            .fold(ByteSize::ZERO, |sum, (size, _)| sum.saturating_add(size))
    }

    /// Checks the whole state. Cost: O(all objects).
    pub(super) fn validate(&self) {
        self.memory.validate();
        self.queues.validate();
        self.pools.validate(&self.memory);
        assert!(self.lost.is_none() || self.queues.unfinished() == 0);
    }
}

/// `CUDA_ERROR_INVALID_VALUE`
pub(super) const INVALID_VALUE: u32 = 1;
/// `CUDA_ERROR_OUT_OF_MEMORY`
pub(super) const OUT_OF_MEMORY: u32 = 2;
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
/// `CUDA_ERROR_NOT_SUPPORTED`
pub(super) const NOT_SUPPORTED: u32 = 801;
