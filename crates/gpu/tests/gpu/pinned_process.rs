//! The kernel's figures for a pinned pool's memory: locked, limited, returned, forked.
//!
//! It reads figures of the whole process, so it runs in a child process of its own.
//! Where this process may lock nothing at all, it says so and goes on with pageable memory.
#![expect(unsafe_code, reason = "fork, setrlimit and capset are C calls")]
#![cfg(target_os = "linux")]

use std::sync::Arc;

use lowtide_gpu::ByteSize;
use lowtide_gpu::clock::SystemClock;
use lowtide_gpu::driver::{DriverError, HostMemory};
use lowtide_gpu::{DeviceError, HostDriver, PinnedBuffer, PinnedConfig, PinnedKind, PinnedPool};

/// One segment of 64 KiB, which most systems let a process lock.
const SIZE: ByteSize = ByteSize::kib(64);
/// The amount of memory that the child may lock.
const LIMIT: ByteSize = ByteSize::kib(128);

fn open(kind: PinnedKind) -> PinnedPool {
    let config = PinnedConfig { kind, segment: SIZE, ..PinnedConfig::new("process") };
    let clock = Arc::new(SystemClock::new());
    PinnedPool::open(Arc::new(HostDriver::new()), clock, config).expect("open")
}

fn bytes(pool: &PinnedPool, size: ByteSize) -> Result<PinnedBuffer<u8>, DeviceError> {
    pool.alloc(size.as_usize().expect("fits"))
}

/// A figure of `/proc/self/status`.
fn status(name: &str) -> ByteSize {
    let status = std::fs::read_to_string("/proc/self/status").expect("proc");
    let line = status.lines().find_map(|line| line.strip_prefix(name)).expect("the figure");
    let kib = line.trim_start_matches(':').trim().trim_end_matches(" kB");
    ByteSize::kib(kib.parse().expect("a number"))
}

/// Runs `act` in a forked child and says with which code the child ended.
fn forked(act: impl FnOnce() -> i32) -> i32 {
    // SAFETY: the child runs `act` and ends with `_exit`. Other threads of this process hold no
    // lock that `act` needs but those of malloc, which the C library holds across a fork.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // Seconds after which the kernel ends a child that hangs.
        // SAFETY: sets a timer of this process and touches no memory.
        unsafe { libc::alarm(20) };
        let code = act();
        // SAFETY: ends the child at once, without running the parent's exit handlers.
        unsafe { libc::_exit(code) };
    }
    assert!(child > 0, "fork failed");
    let mut status = 0;
    // SAFETY: `status` is a valid place for an int, and `child` is our own child.
    let waited = unsafe { libc::waitpid(child, &raw mut status, 0) };
    assert_eq!(waited, child);
    assert!(libc::WIFEXITED(status), "the child was killed: status {status:#x}");
    libc::WEXITSTATUS(status)
}

/// The number of the first that does not hold, counted from 1; 0 where all do.
fn first_broken(checks: &[bool]) -> i32 {
    let broken = checks.iter().position(|holds| !holds);
    broken.map_or(0, |at| i32::try_from(at).unwrap_or(99) + 1)
}

/// Lets this process lock so much and no more, whoever runs it.
fn limit_locking() -> bool {
    let limit = libc::rlimit { rlim_cur: LIMIT.get(), rlim_max: LIMIT.get() };
    // SAFETY: `limit` is a valid value to read.
    let limited = unsafe { libc::setrlimit(libc::RLIMIT_MEMLOCK, &raw const limit) };
    // CAP_IPC_LOCK lifts the limit: no capability is kept. Version 3, this thread, all bits clear.
    let header = [0x2008_0522_u32, 0];
    let none = [0_u32; 6];
    // SAFETY: capset(2) reads a header of two words and, in version 3, two times three words.
    let dropped = unsafe { libc::syscall(libc::SYS_capset, header.as_ptr(), none.as_ptr()) };
    limited == 0 && dropped == 0
}

/// A child that may lock 128 KiB: the third segment is refused, or pageable where that was asked.
fn under_a_limit() -> i32 {
    let limited = limit_locking();
    let strict = open(PinnedKind::PageLocked);
    let two = [bytes(&strict, SIZE), bytes(&strict, SIZE)];
    let third = bytes(&strict, SIZE);
    let refused = DriverError::LockLimit { requested: SIZE, limit: LIMIT };
    let refused = matches!(third, Err(DeviceError::Driver(error)) if error == refused);
    let works_on = strict.glance().committed == LIMIT && two.iter().all(Result::is_ok);
    let lax = open(PinnedKind::PageLockedOrPageable);
    let fallen = bytes(&lax, SIZE);
    drop(two);
    let recovers = strict.purge() == Ok(LIMIT) && status("VmLck").is_zero();
    let locked_again = bytes(&lax, SIZE).map(|buffer| buffer.memory());
    first_broken(&[
        limited,
        works_on,
        refused,
        fallen.is_ok_and(|buffer| buffer.memory() == Some(HostMemory::Pageable)),
        lax.snapshot().fallbacks_total == 1,
        recovers,
        locked_again == Ok(Some(HostMemory::PageLocked)),
    ])
}

/// A child of a process with a pool: its memory is not locked, and every act is refused.
fn with_an_inherited_pool(pool: &PinnedPool, mut buffer: PinnedBuffer<u8>) -> i32 {
    let unlocked = status("VmLck").is_zero();
    let glance = pool.glance();
    first_broken(&[
        unlocked,
        matches!(buffer.to_vec(), Err(DeviceError::Forked)),
        matches!(buffer.fill(4), Err(DeviceError::Forked)),
        matches!(pool.alloc::<u8>(1), Err(DeviceError::Forked)),
        matches!(pool.alloc::<u8>(0), Err(DeviceError::Forked)),
        matches!(buffer.resize(1), Err(DeviceError::Forked)),
        matches!(pool.purge(), Err(DeviceError::Forked)),
        matches!(pool.maintain(), Err(DeviceError::Forked)),
        matches!(pool.close(), Err(DeviceError::Forked)),
        pool.limit().is_zero() && glance.committed.is_zero() && pool.snapshot().live().is_zero(),
        matches!(buffer.free(), Err(DeviceError::Forked)),
    ])
}

#[test_fork::test]
fn locked_memory_is_locked_within_the_limit_given_back_and_not_a_childs() {
    let before = status("VmLck");
    let kind = PinnedKind::PageLocked;
    let (pool, locked) = match bytes(&open(kind), SIZE) {
        Ok(_) => (open(kind), SIZE),
        Err(error @ DeviceError::Driver(DriverError::LockLimit { .. })) => {
            println!("skipped for page-locked memory: {error}");
            (open(PinnedKind::Pageable), ByteSize::ZERO)
        }
        Err(error) => panic!("{error}"),
    };
    assert_eq!(status("VmLck"), before, "the pool that was tried is gone, and its memory");
    let mut buffer = bytes(&pool, SIZE).expect("room");
    buffer.fill(3).expect("no copy");
    assert_eq!(status("VmLck"), before.saturating_add(locked));

    let child = forked(|| with_an_inherited_pool(&pool, buffer));
    assert_eq!(child, 0, "the act with this number was not refused");
    // The closure, and the buffer in it, ended here as well: the child's was a copy.
    assert_eq!(pool.snapshot().live(), ByteSize::ZERO);
    let mut buffer = bytes(&pool, SIZE).expect("room");
    let contents = vec![3; buffer.len()];
    assert_eq!(buffer.to_vec(), Ok(contents), "the child wrote to it");
    buffer.fill(5).expect("no copy");
    drop(buffer);
    assert_eq!(pool.purge(), Ok(SIZE));
    assert_eq!(status("VmLck"), before);
    pool.validate();

    if locked.is_zero() {
        return;
    }
    let child = forked(under_a_limit);
    assert_eq!(child, 0, "the check with this number does not hold under the limit");
}
