//! A driver for this crate's tests: it checks the contract, fails on request, and can block calls.
//!
//! It passes every call on to the host driver, and records each breach of the contract of
//! [`Driver`] by its caller: committing a range that is not bare, decommitting one that is not
//! committed or not divided into handles in the same way, releasing one that is not entirely bare.
//! It does not model a device. It locks no page: memory that it calls page-locked counts against
//! its own limit.
//!
//! Invariant: `faults` is empty as long as the arena above keeps the contract.
#![expect(unsafe_code, reason = "the calls of the trait that take memory away are unsafe")]

use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::thread;
use std::time::Duration;

use crate::memory::{Memory, Range};
use crate::model::Answer;
use lowtide_core::bytes::ByteSize;
use lowtide_core::clock::{Clock as _, SystemClock};
use lowtide_core::sync::{Condvar, Mutex, lock, wait};
use lowtide_gpu_driver::host::HostDriver;
use lowtide_gpu_driver::{Backend, Capabilities, DeviceAddress, Driver, DriverError, HostMemory};

/// The unit in which the size of the device and remapped memory are counted.
const GRANULE: u64 = 2 << 20;

/// Which call fails, and how.
#[derive(Clone, Copy, Debug)]
pub struct Failure {
    /// The number of the call, from 0.
    pub nth: u64,
    /// As memory that has run out, or as a refusal.
    pub out_of_memory: bool,
}

#[derive(Debug, Default)]
struct Seen {
    memory: Memory,
    committed_peak: ByteSize,
    calls: u64,
    failure: Option<Failure>,
    /// Every call from this one on fails.
    fails_from: Option<u64>,
    /// The odds of a random failure, and the state of the generator.
    odds: Option<(u64, u64)>,
    device_granules: Option<usize>,
    remapped: u64,
    /// Allocated host memory: address, size and kind.
    host: BTreeMap<usize, (u64, HostMemory)>,
    lock_limit: Option<u64>,
    host_limit: Option<u64>,
    holding: bool,
    held: usize,
    faults: Vec<String>,
}

impl Seen {
    /// Checks that a range consists of handles of this size, as it was committed.
    fn check_handles(&mut self, range: Range, handle: u64) {
        for piece in range.pieces(handle) {
            let found = self.memory.whole_mappings(piece);
            if found != Ok(1) {
                self.faults.push(format!("{piece:?} is no handle: {found:?}"));
            }
        }
    }

    fn granules(&self) -> u64 {
        self.memory.committed().get() / GRANULE
    }

    /// Counts a call. `Some` if it is to fail: `true` as memory that has run out, else as a refusal.
    fn count(&mut self) -> Option<bool> {
        let nth = self.calls;
        self.calls += 1;
        if self.fails_from.is_some_and(|from| from <= nth) {
            return Some(false);
        }
        if let Some((odds, state)) = &mut self.odds {
            *state ^= *state << 13;
            *state ^= *state >> 7;
            *state ^= *state << 17;
            if state.is_multiple_of(*odds) {
                return Some((*state >> 40) % 2 == 0);
            }
        }
        self.failure.filter(|failure| failure.nth == nth).map(|failure| failure.out_of_memory)
    }

    /// Host memory of a kind, or of both.
    fn host_bytes(&self, memory: Option<HostMemory>) -> u64 {
        let counts = |of: HostMemory| memory.is_none_or(|memory| memory == of);
        self.host.values().filter(|(_, of)| counts(*of)).map(|(size, _)| size).sum()
    }
}

/// The watched driver.
#[derive(Debug)]
pub struct FaultInjectingDriver {
    host: HostDriver,
    seen: Mutex<Seen>,
    changed: Condvar,
    /// The capabilities that the driver reports.
    pub capabilities: Capabilities,
}

impl Default for FaultInjectingDriver {
    fn default() -> Self {
        Self::new()
    }
}

impl FaultInjectingDriver {
    /// Creates a driver whose calls all succeed.
    pub fn new() -> Self {
        let host = HostDriver::new();
        let capabilities = host.capabilities();
        Self { host, seen: Mutex::default(), changed: Condvar::new(), capabilities }
    }

    /// Lets one call fail.
    pub fn fail(&self, failure: Failure) {
        lock(&self.seen).failure = Some(failure);
    }

    /// Lets all calls from this one on fail, or none.
    pub fn fail_from(&self, nth: Option<u64>) {
        lock(&self.seen).fails_from = nth;
    }

    /// Lets one call in so many fail, at random.
    pub fn fail_one_in(&self, odds: Option<u64>, seed: u64) {
        lock(&self.seen).odds = odds.map(|odds| (odds, seed | 1));
    }

    /// Says how many granules the device has.
    pub fn set_device_granules(&self, granules: usize) {
        lock(&self.seen).device_granules = Some(granules);
    }

    /// Returns the number of remapped granules.
    pub fn remapped(&self) -> u64 {
        lock(&self.seen).remapped
    }

    /// Says how much may be page-locked.
    pub fn set_lock_limit(&self, limit: ByteSize) {
        lock(&self.seen).lock_limit = Some(limit.get());
    }

    /// Says how much memory the host has.
    pub fn set_host_limit(&self, limit: ByteSize) {
        lock(&self.seen).host_limit = Some(limit.get());
    }

    /// Bytes of host memory given out, and in how many pieces.
    pub fn host_memory(&self) -> (ByteSize, usize) {
        let seen = lock(&self.seen);
        (ByteSize::new(seen.host_bytes(None)), seen.host.len())
    }

    /// Holds every call that moves memory from now on until [`FaultInjectingDriver::let_go`].
    pub fn hold(&self) {
        lock(&self.seen).holding = true;
    }

    /// Waits until so many calls are held.
    ///
    /// # Panics
    /// If they are not within two minutes.
    pub fn wait_until_held(&self, count: usize) {
        let clock = SystemClock::new();
        let deadline = clock.now() + Duration::from_secs(120);
        while lock(&self.seen).held < count {
            assert!(clock.now() < deadline, "{count} calls were to be held, and were not made");
            thread::yield_now();
        }
    }

    /// Lets blocked calls continue.
    pub fn let_go(&self) {
        lock(&self.seen).holding = false;
        self.changed.notify_all();
    }

    /// Returns the number of calls so far.
    pub fn calls(&self) -> u64 {
        lock(&self.seen).calls
    }

    /// Bytes committed now, and the most that ever were.
    pub fn committed(&self) -> (ByteSize, ByteSize) {
        let seen = lock(&self.seen);
        (seen.memory.committed(), seen.committed_peak)
    }

    /// Returns the number of open reservations.
    pub fn reservations(&self) -> usize {
        lock(&self.seen).memory.reservations()
    }

    /// # Panics
    /// If the contract was broken.
    pub fn assert_no_faults(&self) {
        let seen = lock(&self.seen);
        assert!(seen.faults.is_empty(), "{:?}", seen.faults);
    }

    /// The size of the handles, if the driver has any: else ranges are divided as one likes.
    fn unit(&self, handle: ByteSize) -> u64 {
        if self.capabilities.handles { handle.get().max(1) } else { GRANULE }
    }

    fn wait_while_held(&self) {
        let mut seen = lock(&self.seen);
        seen.held += 1;
        self.changed.notify_all();
        while seen.holding {
            seen = wait(&self.changed, seen);
        }
        seen.held -= 1;
    }

    /// Counts a call, and fails it if a failure is due.
    fn call(&self, call: &'static str, requested: ByteSize) -> Answer {
        let message = "a trial".to_owned();
        match lock(&self.seen).count() {
            None => Ok(()),
            Some(true) => Err(DriverError::OutOfMemory { call, requested }),
            Some(false) => Err(DriverError::Refused { call, code: 1, message }),
        }
    }
}

const fn range(at: DeviceAddress, size: ByteSize) -> Range {
    Range { at: at.get(), size: size.get() }
}

// SAFETY: all memory is the host driver's, which keeps the promises; a call that fails here makes
// none there, except that a failed `remap` is not followed by another use of the range.
unsafe impl Driver for FaultInjectingDriver {
    fn backend(&self) -> Backend {
        Backend::Host
    }

    fn capabilities(&self) -> Capabilities {
        self.capabilities
    }

    fn reserve(&self, size: ByteSize) -> Answer<DeviceAddress> {
        self.call("reserve", size)?;
        let at = self.host.reserve(size)?;
        lock(&self.seen).memory.add_reservation(range(at, size));
        Ok(at)
    }

    unsafe fn unreserve(&self, at: DeviceAddress, size: ByteSize) -> Answer {
        self.call("unreserve", size)?;
        let (mut seen, range) = (lock(&self.seen), range(at, size));
        if seen.memory.is_whole_reservation(range) && !seen.memory.is_mapped_anywhere(range) {
            seen.memory.unreserve(range);
        } else {
            seen.faults.push(format!("unreserve of {range:?}"));
        }
        drop(seen);
        // SAFETY: the contract of this call, whose reservations are the host driver's.
        unsafe { self.host.unreserve(at, size) }
    }

    unsafe fn commit(&self, at: DeviceAddress, size: ByteSize, handle: ByteSize) -> Answer {
        self.wait_while_held();
        self.call("commit", size)?;
        let (mut seen, range) = (lock(&self.seen), range(at, size));
        let wanted = seen.granules() + range.size.div_ceil(GRANULE);
        if seen.device_granules.is_some_and(|has| wanted > has as u64) {
            return Err(DriverError::OutOfMemory { call: "commit", requested: size });
        }
        if seen.memory.is_mapped_anywhere(range) {
            seen.faults.push(format!("{range:?} was committed twice"));
        } else {
            range.pieces(self.unit(handle)).for_each(|piece| seen.memory.map(piece));
            seen.memory.change_access(range, true);
        }
        seen.committed_peak = seen.committed_peak.max(seen.memory.committed());
        drop(seen);
        // SAFETY: the contract of this call, whose reservations are the host driver's.
        unsafe { self.host.commit(at, size, handle) }
    }

    unsafe fn decommit(&self, at: DeviceAddress, size: ByteSize, handle: ByteSize) -> Answer {
        self.wait_while_held();
        self.call("decommit", size)?;
        // The memory is released before the metadata changes, so that a premature commit is seen.
        // SAFETY: the contract of this call, whose reservations are the host driver's.
        unsafe { self.host.decommit(at, size, handle) }?;
        let (mut seen, range) = (lock(&self.seen), range(at, size));
        seen.check_handles(range, self.unit(handle));
        seen.memory.unmap(range);
        Ok(())
    }

    /// Supported if the capability is set: a commit, a copy and a decommit, with no other call in
    /// between.
    unsafe fn remap(
        &self,
        from: DeviceAddress,
        to: DeviceAddress,
        size: ByteSize,
        handle: ByteSize,
    ) -> Answer {
        self.wait_while_held();
        self.call("remap", size)?;
        let mut seen = lock(&self.seen);
        if !self.capabilities.remap {
            seen.faults.push("a remap that is not offered".to_owned());
        }
        let (old, new) = (range(from, size), range(to, size));
        seen.check_handles(old, self.unit(handle));
        if seen.memory.is_mapped_anywhere(new) {
            seen.faults.push(format!("{new:?} was remapped over"));
        } else {
            seen.memory.remap(old, new);
        }
        seen.remapped += size.get().div_ceil(GRANULE);
        drop(seen);
        // SAFETY: `to` is bare and in a reservation of the host driver's (contract of this call).
        unsafe { self.host.commit(to, size, handle) }?;
        // SAFETY: both are committed, and nothing else uses them (contract of this call).
        unsafe { self.host.copy(from, to, size) }?;
        // SAFETY: `from` is committed, and every use of it complete (contract of this call).
        unsafe { self.host.decommit(from, size, handle) }
    }

    unsafe fn copy(&self, from: DeviceAddress, to: DeviceAddress, size: ByteSize) -> Answer {
        self.wait_while_held();
        self.call("copy", size)?;
        let mut seen = lock(&self.seen);
        for part in [from, to] {
            if seen.memory.first_bare(range(part, size)).is_some() {
                seen.faults.push(format!("a copy touched bare memory: {size} at {part}"));
                return Ok(());
            }
        }
        drop(seen);
        // SAFETY: the contract of this call, whose memory is the host driver's.
        unsafe { self.host.copy(from, to, size) }
    }

    fn host_alloc(&self, size: ByteSize, memory: HostMemory) -> Answer<NonNull<u8>> {
        self.wait_while_held();
        self.call("host_alloc", size)?;
        let mut seen = lock(&self.seen);
        let locked = seen.host_bytes(Some(HostMemory::PageLocked));
        if memory == HostMemory::PageLocked {
            if !self.capabilities.page_locked {
                return Err(DriverError::Unsupported { what: "page-locked memory" });
            }
            if let Some(limit) = seen.lock_limit.filter(|limit| locked + size.get() > *limit) {
                let limit = ByteSize::new(limit);
                return Err(DriverError::LockLimit { requested: size, limit });
            }
        }
        if seen.host_limit.is_some_and(|limit| seen.host_bytes(None) + size.get() > limit) {
            return Err(DriverError::OutOfMemory { call: "host_alloc", requested: size });
        }
        let at = self.host.host_alloc(size, HostMemory::Pageable)?;
        seen.host.insert(at.addr().get(), (size.get(), memory));
        Ok(at)
    }

    unsafe fn host_free(&self, at: NonNull<u8>, size: ByteSize, memory: HostMemory) -> Answer {
        self.wait_while_held();
        self.call("host_free", size)?;
        let mut seen = lock(&self.seen);
        if seen.host.remove(&at.addr().get()) != Some((size.get(), memory)) {
            seen.faults.push(format!("host_free of {size} at {at:?}, {memory}"));
            return Ok(());
        }
        drop(seen);
        // SAFETY: the contract of this call; every allocation is a pageable one of the host driver.
        unsafe { self.host.host_free(at, size, HostMemory::Pageable) }
    }

    fn host_pointer(&self, at: DeviceAddress) -> Option<NonNull<u8>> {
        self.capabilities.host_access.then(|| self.host.host_pointer(at)).flatten()
    }
}
