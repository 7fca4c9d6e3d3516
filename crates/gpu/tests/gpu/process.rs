//! The kernel's figures for the host driver's memory, and the calls that a forked child may make.
//!
//! It reads figures of the whole process, so it runs in a child process of its own.
#![expect(unsafe_code, reason = "fork and waitpid are C calls")]
#![cfg(target_os = "linux")]

use std::io::{Read as _, Seek as _, Write};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};

use lowtide_gpu::ByteSize;
use lowtide_gpu::clock::ManualClock;
use lowtide_gpu::driver::host::HostDriver;
use lowtide_gpu::driver::{DeviceAddress, StreamHandle};
use lowtide_gpu::record::Recorder;
use lowtide_gpu::{ArenaConfig, DeviceArena, DeviceError, Region, SleepOptions};

/// Calls of the release function, in this process.
static RELEASED: AtomicU64 = AtomicU64::new(0);

fn released() {
    RELEASED.fetch_add(1, Ordering::SeqCst);
}

fn resident_anonymous() -> ByteSize {
    let status = std::fs::read_to_string("/proc/self/status").expect("proc");
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).expect("RssAnon");
    let kib = line.trim().trim_end_matches(" kB").parse().expect("a number");
    ByteSize::kib(kib)
}

#[test_fork::test]
fn given_back_is_given_back_to_the_kernel_and_a_forked_child_is_refused() {
    let file = tempfile::tempfile().expect("a file");
    let recorder = Recorder::new(file.try_clone().expect("a file"));
    let recorded = Some(recorder.clone());
    let config = ArenaConfig { recorder: recorded, ..ArenaConfig::new("process") };
    let (driver, clock) = (Arc::new(HostDriver::new()), Arc::new(ManualClock::new()));
    let arena = DeviceArena::open(driver, clock, config).expect("open");
    let size = ByteSize::mib(64);
    let before = resident_anonymous();
    let lease = arena.enter().expect("awake");
    let mut buffer = arena.alloc::<u8>(64 << 20, Region::Dynamic).expect("room");
    buffer.slice_mut(&lease).expect("own lease").fill(1);
    let full = resident_anonymous();
    let slack = ByteSize::mib(4);
    assert!(full >= before.saturating_add(size).saturating_sub(slack), "{before} -> {full}");
    drop(buffer);
    arena.purge().expect("purge");
    let after = resident_anonymous();
    assert!(after <= before.saturating_add(slack), "{before} -> {full} -> {after}");

    let mut buffer = arena.alloc_from(&[3_u8; 100], Region::Stable).expect("room");
    // SAFETY: the host driver has no streams.
    let lane = unsafe { arena.lane(StreamHandle::new(1)) }.expect("a lane");
    let mut guard = Some(arena.on_shortage(|_| false));
    let mut exported =
        Some(arena.alloc::<u8>(256, Region::Dynamic).expect("room").export().expect("awake"));
    let mut theirs = [5_u8; 64];
    let place = DeviceAddress::new(theirs.as_mut_ptr().expose_provenance() as u64);
    // SAFETY: bytes of this test's, which it uses no more until they are released.
    let imported = unsafe { arena.import::<u8>(place, 32, |_, _| released()) };
    let mut imported = Some(imported.expect("theirs"));
    // SAFETY: the child does nothing but ask the arena, whose answer in a child takes no lock
    // and no memory, drop without effect, and end; the callback's box is memory of its own.
    let child = unsafe { libc::fork() };
    if child == 0 {
        drop(guard.take()); // forgets nothing of the parent's, and takes no lock
        drop(arena.on_shortage(|_| true));
        drop((exported.take(), imported.take()));
        // SAFETY: it is refused.
        let again = unsafe { arena.import::<u8>(DeviceAddress::new(4096), 1, |_, _| released()) };
        if !matches!(again, Err(DeviceError::Forked)) || RELEASED.load(Ordering::SeqCst) != 0 {
            // SAFETY: as below.
            unsafe { libc::_exit(98) };
        }
        let code = match buffer.record_use(&lane) {
            Err(DeviceError::Forked) => child_code(&arena, &buffer, &lease, &recorder),
            _ => 99,
        };
        // SAFETY: ends the child at once, without running the parent's exit handlers.
        unsafe { libc::_exit(code) };
    }
    assert!(child > 0, "fork failed");
    let mut status = 0;
    // SAFETY: `status` is a valid place for an int, and `child` is our own child.
    let waited = unsafe { libc::waitpid(child, &raw mut status, 0) };
    assert_eq!(waited, child);
    assert!(libc::WIFEXITED(status), "status {status:#x}");
    assert_eq!(libc::WEXITSTATUS(status), 0, "the act with this number was not refused");
    assert_eq!(buffer.slice(&lease), Ok(&[3_u8; 100][..]));
    // The parent's callback is there still.
    arena.set_limit(ByteSize::ZERO);
    arena.alloc::<u8>(8 << 20, Region::Dynamic).expect_err("no room");
    assert_eq!(arena.snapshot().shortage_callbacks_total, 1);
    assert_eq!(arena.snapshot().exported_count, 1);
    drop((buffer, lane, lease, guard, exported, imported));
    assert_eq!(RELEASED.load(Ordering::SeqCst), 0);
    arena.decay(lowtide_gpu::clock::Moment::ORIGIN).expect("looked");
    assert_eq!((RELEASED.load(Ordering::SeqCst), theirs[0]), (1, 5));
    arena.validate();
    drop(arena);
    assert_ended_once(file);
    assert_eq!(recorder.error(), None);
}

/// Each line of the recording is there, once.
fn assert_ended_once(mut file: std::fs::File) {
    let mut text = String::new();
    file.rewind().expect("a file");
    file.read_to_string(&mut text).expect("a recording");
    let events = crate::record::events(&text);
    let of = |wanted| events.iter().filter(|event| crate::record::name(event) == wanted).count();
    assert_eq!((of("open"), of("end")), (1, 1));
    let times = events.iter().map(|event| event["time_ns"].as_u64());
    assert!(times.is_sorted(), "in order");
    assert_eq!(events.last().map(crate::record::name), Some("end"));
}

/// A sink whose first write ends when the test says so.
struct Gated {
    file: std::fs::File,
    gate: Option<(Sender<()>, Receiver<()>)>,
}

impl Write for Gated {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        if let Some((begun, go_on)) = self.gate.take() {
            begun.send(()).expect("the test waits");
            go_on.recv().expect("the test goes on");
        }
        self.file.write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Bug: an allocation whose callback forked wrote the waiting lines of the parent in the child, so
/// that the recording had them twice.
#[test_fork::test]
fn a_child_of_a_callback_that_forked_writes_no_lines() {
    let file = tempfile::tempfile().expect("a file");
    let ((begun, has_begun), (end, ended)) = (channel(), channel());
    let gate = Some((begun, ended));
    let recorder = Recorder::new(Gated { file: file.try_clone().expect("a file"), gate });
    let limit = ByteSize::mib(4);
    let config = ArenaConfig { limit, recorder: Some(recorder), ..ArenaConfig::new("process") };
    let (driver, clock) = (Arc::new(HostDriver::new()), Arc::new(ManualClock::new()));
    let arena = DeviceArena::open(driver, clock, config).expect("open");
    let is_writing = Arc::new(AtomicBool::new(false));
    let writer = std::thread::spawn({
        let (arena, is_writing) = (arena.clone(), Arc::clone(&is_writing));
        move || {
            while !is_writing.load(Ordering::SeqCst) {
                arena.set_limit(limit);
            }
        }
    });
    has_begun.recv().expect("the sink writes");
    is_writing.store(true, Ordering::SeqCst);
    // More lines than wait for the next write, and fewer than threads wait for.
    (0..4000).for_each(|_| arena.set_limit(limit));
    let writer = Mutex::new(Some((end, writer)));
    let child = Arc::new(AtomicI32::new(-1));
    let forked = Arc::clone(&child);
    let guard = arena.on_shortage(move |_| {
        let writer = writer.lock().expect("nobody panics with it").take();
        let (end, writer) = writer.expect("called once");
        end.send(()).expect("the sink waits");
        writer.join().expect("no panic");
        // SAFETY: the child only continues the allocation, whose error it reports, and ends.
        forked.store(unsafe { libc::fork() }, Ordering::SeqCst);
        false
    });
    let outcome = arena.alloc::<u8>(8 << 20, Region::Dynamic).map(drop);
    let pid = child.load(Ordering::SeqCst);
    if pid == 0 {
        let is_forked = outcome == Err(DeviceError::Forked);
        // SAFETY: ends the child at once, without running the parent's exit handlers.
        unsafe { libc::_exit(i32::from(!is_forked)) }
    }
    let mut status = 0;
    // SAFETY: `status` is a valid place for an int, and `pid` is our own child.
    assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
    assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0, "status {status:#x}");
    drop((guard, arena));
    assert_ended_once(file);
}

/// 0 where every act is refused, else the number of the first that was not.
fn child_code(
    arena: &DeviceArena,
    buffer: &lowtide_gpu::Buffer<u8>,
    lease: &lowtide_gpu::Lease,
    recorder: &Recorder,
) -> i32 {
    let refused = [
        matches!(arena.alloc::<u8>(1, Region::Dynamic), Err(DeviceError::Forked)),
        matches!(arena.enter(), Err(DeviceError::Forked)),
        matches!(arena.purge(), Err(DeviceError::Forked)),
        matches!(arena.decay(lowtide_gpu::clock::Moment::ORIGIN), Err(DeviceError::Forked)),
        matches!(buffer.slice(lease), Err(DeviceError::Forked)),
        matches!(arena.sleep(SleepOptions::default()), Err(DeviceError::Forked)),
        matches!(arena.wake(), Err(DeviceError::Forked)),
        matches!(arena.sleep_if_idle(lowtide_gpu::clock::Moment::ORIGIN), Err(DeviceError::Forked)),
        !buffer.take_discarded(),
        arena.next_sleep() == lowtide_gpu::clock::Moment::NEVER,
        recorder.finish() == Err(DeviceError::Forked),
        recorder.flush() == Err(DeviceError::Forked),
        arena.limit().is_zero() && arena.next_decay() == lowtide_gpu::clock::Moment::NEVER,
    ];
    let first = refused.iter().position(|&refused| !refused);
    first.map_or(0, |nth| i32::try_from(nth + 1).unwrap_or(i32::MAX))
}
