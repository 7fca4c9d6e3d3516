//! Memory that the kernel does not take back: a `Memory` reports it, and serves requests in it.
//!
//! Reported as gperftools#735, llvm-project#167788 and hermit#43.
#![cfg(target_os = "linux")]
#![expect(unsafe_code, reason = "mlockall and seccomp are C calls")]
#![expect(clippy::print_stdout, reason = "figures, and why a test is skipped")]

use std::io;

use lowtide::heap::ReleaseFailure;
use lowtide::{ByteSize, Memory};
use lowtide_admission::{Cost, Level};
use test_fork::test;

use crate::start::BALANCED;
use crate::support::until;

/// Memory that a burst leaves unused, and a limit that it nearly fills.
const BURST: ByteSize = ByteSize::mib(512);
const LIMIT: ByteSize = ByteSize::mib(600);
const REQUESTS: u32 = 40;

/// Locks the memory of this process; `false` if it may not.
fn lock_all(flags: i32) -> bool {
    // SAFETY: changes no memory.
    let locked = unsafe { libc::mlockall(flags) } == 0;
    if !locked {
        println!("skipped: mlockall: {}", io::Error::last_os_error());
    }
    locked
}

/// Makes `madvise` fail with EPERM on all threads of this process.
fn refuse_madvise() -> bool {
    let small = |code| u16::try_from(code).expect("16 bits");
    let statement = |code: u32, jf, k| libc::sock_filter { code: small(code), jt: 0, jf, k };
    let number = u32::try_from(libc::SYS_madvise).expect("small");
    let mut filter = [
        statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0),
        statement(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 1, number),
        statement(
            libc::BPF_RET | libc::BPF_K,
            0,
            libc::SECCOMP_RET_ERRNO | libc::EPERM.unsigned_abs(),
        ),
        statement(libc::BPF_RET | libc::BPF_K, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog { len: 4, filter: filter.as_mut_ptr() };
    // SAFETY: takes plain numbers.
    let _ = unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) };
    // SAFETY: the program has as many statements as it says, and the kernel copies it.
    let set = unsafe {
        let (mode, flags) = (libc::SECCOMP_SET_MODE_FILTER, libc::SECCOMP_FILTER_FLAG_TSYNC);
        libc::syscall(libc::SYS_seccomp, mode, flags, &raw const program)
    };
    if set != 0 {
        println!("skipped: seccomp: {}", io::Error::last_os_error());
    }
    set == 0
}

fn tick(memory: &Memory) {
    let seen = memory.admission().state().last_tick();
    until("a tick", || memory.admission().state().last_tick() != seen);
}

/// Takes a burst, and counts the requests that are served after it.
fn serves_after_a_burst(
    before: impl FnOnce() -> bool,
    after: impl FnOnce() -> bool,
) -> Option<ReleaseFailure> {
    if !before() {
        return None;
    }
    let memory = Memory::builder().memory_limit(LIMIT).start().expect("starts");
    let burst: Vec<_> = (0..BURST.get() >> 16).map(|_| vec![1_u8; 64 << 10]).collect();
    if !after() {
        return None;
    }
    drop(burst);
    let report = memory.heap().purge().expect("not forked").heap.expect("jemalloc purges");
    let tick = || tick(&memory);
    // The level falls step by step.
    (0..600).take_while(|_| memory.level() > Level::None).for_each(|_| tick());
    let serve = |nth| {
        if nth % 8 == 0 {
            tick();
        }
        memory.admission().try_admit(Cost::host(ByteSize::kib(64))).is_ok()
    };
    let served = (0..REQUESTS).filter(|&nth| serve(nth)).count();
    println!("figure field.unreleasable.served {served} requests");
    let snapshot = memory.snapshot();
    assert_eq!(served, REQUESTS as usize, "{report:?} {snapshot:?}");
    let most = BURST.scaled(0.1);
    assert!(report.released() < most, "the resident set did not fall: {report:?}");
    let cause = report.failure.unwrap_or_else(|| panic!("{report:?}"));
    let bytes = report.unreleased;
    assert!(bytes >= BURST.scaled(0.9) && snapshot.unreleased >= BURST.scaled(0.9), "{bytes}");
    let notes = memory.report().diagnostics();
    assert!(notes.iter().any(|note| note.text.contains(&cause.to_string())), "{notes:?}");
    Some(cause)
}

#[test]
fn requests_are_served_in_memory_that_was_locked_before_the_start() {
    BALANCED.run(|| {
        let lock = || lock_all(libc::MCL_CURRENT | libc::MCL_FUTURE);
        let cause = serves_after_a_burst(lock, || true);
        assert!(matches!(cause, None | Some(ReleaseFailure::Locked)), "{cause:?}");
    });
}

#[test]
fn requests_are_served_in_memory_that_is_locked_after_a_burst() {
    BALANCED.run(|| {
        let cause = serves_after_a_burst(|| true, || lock_all(libc::MCL_CURRENT));
        assert!(matches!(cause, None | Some(ReleaseFailure::Locked)), "{cause:?}");
    });
}

#[test]
fn requests_are_served_in_memory_that_is_locked_on_fault() {
    BALANCED.run(|| {
        let lock = || lock_all(libc::MCL_CURRENT | libc::MCL_FUTURE | libc::MCL_ONFAULT);
        let cause = serves_after_a_burst(lock, || true);
        assert!(matches!(cause, None | Some(ReleaseFailure::Locked)), "{cause:?}");
    });
}

#[test]
fn requests_are_served_where_a_filter_refuses_to_release_memory() {
    BALANCED.run(|| {
        let cause = serves_after_a_burst(|| true, refuse_madvise);
        let refused = ReleaseFailure::Refused(libc::EPERM);
        assert!(cause.is_none_or(|cause| cause == refused), "{cause:?}");
    });
}

/// All unbacked addresses counted as unused memory once some memory was locked, and memory of
/// others was left out of what counts against the limit.
#[test]
fn no_more_than_what_is_locked_is_left_out() {
    const LOCKED: ByteSize = ByteSize::mib(32);
    const UNUSED: ByteSize = ByteSize::mib(256);
    const OTHERS: ByteSize = ByteSize::mib(256);
    BALANCED.run(|| {
        let memory = Memory::builder().memory_limit(LIMIT).start().expect("starts");
        let bytes = |size: ByteSize| vec![1_u8; usize::try_from(size.get()).expect("64 bits")];
        let unused = bytes(UNUSED);
        // Below 8 MiB: larger ones are released when they are freed.
        let locked: Vec<_> = (0..8).map(|_| bytes(LOCKED.scaled(0.125))).collect();
        for block in &locked {
            // SAFETY: changes no memory.
            if unsafe { libc::mlock(block.as_ptr().cast(), block.len()) } != 0 {
                println!("skipped: mlock: {}", io::Error::last_os_error());
                return;
            }
        }
        drop(locked);
        let report = memory.heap().purge().expect("not forked").heap.expect("jemalloc purges");
        assert_eq!(report.failure, Some(ReleaseFailure::Locked), "{report:?}");
        until("it is left out", || !memory.snapshot().unreleased.is_zero());
        drop(unused);
        memory.heap().purge().expect("not forked").heap.expect("jemalloc purges");
        let length = usize::try_from(OTHERS.get()).expect("64 bits");
        let (prot, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE);
        let flags = flags | libc::MAP_ANONYMOUS | libc::MAP_POPULATE;
        // SAFETY: a new mapping, which nothing else uses.
        let others = unsafe { libc::mmap(std::ptr::null_mut(), length, prot, flags, -1, 0) };
        assert_ne!(others, libc::MAP_FAILED);
        (0..2).for_each(|_| tick(&memory));
        let snapshot = memory.snapshot();
        assert!(snapshot.physical >= OTHERS.scaled(0.9), "{snapshot:?}");
        assert!(snapshot.unreleased <= LOCKED.scaled(1.1), "{snapshot:?}");
    });
}
