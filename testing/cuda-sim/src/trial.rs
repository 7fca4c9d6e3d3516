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

use std::collections::{BTreeMap, BTreeSet};
use std::ptr::NonNull;
use std::thread;
use std::time::Duration;

use crate::model::Answer;
use lowtide_core::bytes::ByteSize;
use lowtide_core::clock::{Clock as _, SystemClock};
use lowtide_core::sync::{Condvar, Mutex, lock, wait};
use lowtide_gpu_driver::host::HostDriver;
use lowtide_gpu_driver::{Backend, Capabilities, DeviceAddress, Driver, DriverError, HostMemory};

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
    reserved: BTreeMap<u64, u64>,
    committed: BTreeSet<u64>,
    /// The size of each handle, by its address.
    handles: BTreeMap<u64, u64>,
    committed_peak: usize,
    calls: u64,
    failure: Option<Failure>,
    /// Every call from this one on fails.
    fails_from: Option<u64>,
    /// The odds of a random failure, and the state of the generator.
    odds: Option<(u64, u64)>,
    device_granules: Option<usize>,
    remapped: usize,
    /// Allocated host memory: address, size and kind.
    host: BTreeMap<usize, (u64, HostMemory)>,
    lock_limit: Option<u64>,
    host_limit: Option<u64>,
    holding: bool,
    held: usize,
    faults: Vec<String>,
}

impl Seen {
    /// Records the handles of committed memory.
    fn join(&mut self, at: DeviceAddress, size: ByteSize, handle: ByteSize) {
        self.handles.extend(cut(at, size, handle));
    }

    /// Removes handles, and records a fault if they were committed with other sizes.
    fn part(&mut self, at: DeviceAddress, size: ByteSize, handle: ByteSize) {
        for (at, size) in cut(at, size, handle) {
            let was = self.handles.remove(&at);
            if was != Some(size) {
                self.faults.push(format!("{size} bytes left at {at:#x} of a handle of {was:?}"));
            }
        }
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
    pub fn remapped(&self) -> usize {
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
    /// If they are not within 20 s.
    pub fn wait_until_held(&self, count: usize) {
        let clock = SystemClock::new();
        let deadline = clock.now() + Duration::from_secs(20);
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
        let bytes = |granules| ByteSize::of(granules * (2 << 20));
        (bytes(seen.committed.len()), bytes(seen.committed_peak))
    }

    /// Returns the number of open reservations.
    pub fn reservations(&self) -> usize {
        lock(&self.seen).reserved.len()
    }

    /// # Panics
    /// If the contract was broken.
    pub fn assert_no_faults(&self) {
        let seen = lock(&self.seen);
        assert!(seen.faults.is_empty(), "{:?}", seen.faults);
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

/// Returns the address and the size of each handle of a range.
fn cut(at: DeviceAddress, size: ByteSize, handle: ByteSize) -> impl Iterator<Item = (u64, u64)> {
    let (at, size, handle) = (at.get(), size.get(), handle.get().max(1));
    let step = usize::try_from(handle).unwrap_or(usize::MAX);
    (0..size).step_by(step).map(move |from| (at + from, handle.min(size - from)))
}

fn granules(at: DeviceAddress, size: ByteSize) -> impl Iterator<Item = u64> + Clone {
    (at.get()..at.get() + size.get()).step_by(2 << 20)
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
        lock(&self.seen).reserved.insert(at.get(), size.get());
        Ok(at)
    }

    unsafe fn unreserve(&self, at: DeviceAddress, size: ByteSize) -> Answer {
        self.call("unreserve", size)?;
        let mut seen = lock(&self.seen);
        let whole = seen.reserved.remove(&at.get()) == Some(size.get());
        let end = at.get() + size.get();
        if !whole || seen.committed.range(at.get()..end).next().is_some() {
            seen.faults.push(format!("unreserve of {size} at {at}, whole {whole}"));
        }
        drop(seen);
        // SAFETY: the contract of this call, whose reservations are the host driver's.
        unsafe { self.host.unreserve(at, size) }
    }

    unsafe fn commit(&self, at: DeviceAddress, size: ByteSize, handle: ByteSize) -> Answer {
        self.wait_while_held();
        self.call("commit", size)?;
        let mut seen = lock(&self.seen);
        let wanted = granules(at, size);
        if seen
            .device_granules
            .is_some_and(|has| seen.committed.len() + wanted.clone().count() > has)
        {
            return Err(DriverError::OutOfMemory { call: "commit", requested: size });
        }
        for granule in wanted {
            if !seen.committed.insert(granule) {
                seen.faults.push(format!("{granule:#x} was committed twice"));
            }
        }
        seen.committed_peak = seen.committed_peak.max(seen.committed.len());
        if self.capabilities.handles {
            seen.join(at, size, handle);
        }
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
        let mut seen = lock(&self.seen);
        if self.capabilities.handles {
            seen.part(at, size, handle);
        }
        for granule in granules(at, size) {
            if !seen.committed.remove(&granule) {
                seen.faults.push(format!("{granule:#x} was decommitted bare"));
            }
        }
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
        for (old, new) in granules(from, size).zip(granules(to, size)) {
            if !seen.committed.remove(&old) {
                seen.faults.push(format!("{old:#x} was remapped bare"));
            }
            if !seen.committed.insert(new) {
                seen.faults.push(format!("{new:#x} was remapped over"));
            }
        }
        seen.remapped += granules(from, size).count();
        if self.capabilities.handles {
            seen.part(from, size, handle);
            seen.join(to, size, handle);
        }
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
            let first = part.get() & !((2 << 20) - 1);
            let bare = (first..part.get() + size.get())
                .step_by(2 << 20)
                .any(|granule| !seen.committed.contains(&granule));
            if bare {
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
