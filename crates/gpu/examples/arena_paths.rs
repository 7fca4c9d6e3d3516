//! Runs one path of an arena many times, for callgrind, which counts the instructions and the
//! functions inside [`measured`] and nothing else.
//!
//! `cargo xtask figures arena` builds it against two versions of the arena, so it uses only the
//! public interface. `lowtide_reference` is set for the older one, whose drivers have no handles.
//! By hand:
//!
//! ```text
//! valgrind --tool=callgrind --collect-atstart=no --toggle-collect='*::measured*' \
//!     target/release/examples/arena_paths PATH TIMES
//! ```
//!
//! Invariant: the driver of every path but `warm_pair` does nothing, so that only the arena's own
//! work is counted.
#![expect(unsafe_code, reason = "implements a driver")]
#![expect(clippy::print_stdout, reason = "it names the paths that it knows")]

use std::env;
use std::error::Error;
use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use lowtide_gpu::clock::ManualClock;
use lowtide_gpu::driver::{
    Backend, Capabilities, DeviceAddress, DeviceMemory, Driver, DriverError, HostStore,
    StreamHandle,
};
use lowtide_gpu::{
    ArenaConfig, Buffer, ByteSize, Contents, DeviceArena, DeviceError, HostDriver, Region,
    SleepOptions,
};

#[cfg(not(lowtide_reference))]
type StorePart = HostStore;
#[cfg(lowtide_reference)]
type StorePart = lowtide_gpu::driver::StoreSpan;

const PATHS: &str = "warm_pair, warm, cold_alloc, drop, sleep or wake";
/// The driver's granule.
const GRANULE: usize = 2 << 20;
/// The size of blocks that share granules.
const SMALL: usize = 128 << 10;
/// Live blocks in each region of an arena that sleeps.
const ASLEEP: usize = 128;

type Block = Result<Buffer<u8>, DeviceError>;
type Held = Vec<Buffer<u8>>;

/// Runs what is counted. Its name is the one at which callgrind starts and stops to count.
#[inline(never)]
fn measured<T>(path: impl FnOnce() -> T) -> T {
    black_box(path())
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = env::args().skip(1);
    let (path, times) = (arguments.next(), arguments.next().and_then(|times| times.parse().ok()));
    let Some((path, times)) = path.zip(times) else {
        println!("usage: arena_paths PATH TIMES, where PATH is {PATHS}");
        return Ok(());
    };
    match &*path {
        "warm_pair" => warm_pair(times)?,
        "warm" => warm(times)?,
        "cold_alloc" => cold_alloc(times)?,
        "drop" => free(times)?,
        "sleep" | "wake" => sleep_and_wake(&path, times)?,
        _ => return Err(format!("unknown path {path:?}: expected {PATHS}").into()),
    }
    Ok(())
}

/// Opens an arena that keeps no blocks in caches of threads, over the driver that does nothing.
fn open() -> Result<DeviceArena, DeviceError> {
    let config = ArenaConfig {
        reserve: ByteSize::gib(16),
        thread_cache: ByteSize::ZERO,
        ..ArenaConfig::new("paths")
    };
    let driver = Arc::new(NoDriver(AtomicU64::new(1 << 40)));
    DeviceArena::open(driver, Arc::new(ManualClock::new()), config)
}

/// An allocation from the thread's cache and the drop into it.
fn warm_pair(times: usize) -> Result<(), DeviceError> {
    let (driver, clock) = (Arc::new(HostDriver::new()), Arc::new(ManualClock::new()));
    let arena = DeviceArena::open(driver, clock, ArenaConfig::new("paths"))?;
    let pair = || arena.alloc::<u8>(SMALL, Region::Dynamic).map(drop);
    (0..1_000).try_for_each(|_| pair())?; // the size becomes one that the cache keeps
    measured(|| (0..times).try_for_each(|_| pair()))
}

/// Allocations of memory that is committed and idle, from the arena's state.
fn warm(times: usize) -> Result<(), DeviceError> {
    let arena = open()?;
    let mut held = Vec::new();
    fill(&mut held, times, || granule(&arena))?;
    held.clear(); // the memory stays committed: the clock stands still
    measured(|| fill(&mut held, times, || granule(&arena)))
}

/// Allocations of which each commits a granule.
fn cold_alloc(times: usize) -> Result<(), DeviceError> {
    let arena = open()?;
    let mut held = Vec::with_capacity(times);
    measured(|| fill(&mut held, times, || granule(&arena)))
}

/// Drops of blocks to the arena's state, after which their granules are idle.
fn free(times: usize) -> Result<(), DeviceError> {
    let arena = open()?;
    let mut held = Vec::new();
    fill(&mut held, times, || granule(&arena))?;
    measured(|| held.clear());
    Ok(())
}

/// Sleeps and wakes, of which one is counted: live blocks in several granules, half of which are
/// copied to a store and back.
fn sleep_and_wake(counted: &str, times: usize) -> Result<(), DeviceError> {
    let arena = open()?;
    let mut held = Vec::new();
    for region in Region::ALL {
        fill(&mut held, ASLEEP, || arena.alloc(SMALL, region))?;
    }
    let options =
        SleepOptions { drain: Duration::ZERO, stable: Contents::Keep, dynamic: Contents::Discard };
    for turn in 0..=times {
        // Not the first turn, which finds nothing ready.
        let act = |name: &str, act: &dyn Fn() -> Result<(), DeviceError>| {
            if turn > 0 && counted == name { measured(act) } else { act() }
        };
        act("sleep", &|| arena.sleep(options).map(drop))?;
        act("wake", &|| arena.wake().map(drop))?;
    }
    Ok(())
}

fn granule(arena: &DeviceArena) -> Block {
    arena.alloc(GRANULE, Region::Dynamic)
}

fn fill(held: &mut Held, times: usize, alloc: impl Fn() -> Block) -> Result<(), DeviceError> {
    (0..times).try_for_each(|_| alloc().map(|block| held.push(block)))
}

type Answer<T = ()> = Result<T, DriverError>;

/// A driver that hands out addresses, from this one on, and does nothing else. Its streams and
/// stores have addresses for numbers.
#[derive(Debug)]
struct NoDriver(AtomicU64);

impl NoDriver {
    fn take(&self) -> u64 {
        self.0.fetch_add(GRANULE as u64, Ordering::Relaxed)
    }
}

/// Calls that do nothing.
macro_rules! does_nothing {
    ($($name:ident: $($of:ty),+;)+) => {
        $(unsafe fn $name(&self, $(_: $of),+) -> Answer { Ok(()) })+
    };
}

// SAFETY: there is no memory to which a pointer could lead: no address of it can be read, neither
// by the host nor by a device. The ranges do not overlap, since addresses are handed out once.
unsafe impl Driver for NoDriver {
    fn backend(&self) -> Backend {
        Backend::Custom
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            virtual_memory: true,
            host_access: false,
            host_backed: false,
            unified: false,
            #[cfg(lowtide_reference)]
            same_address_wake: true,
            remap: false,
            asynchronous: false,
            page_locked: false,
            #[cfg(not(lowtide_reference))]
            handles: false,
            granularity: ByteSize::of(GRANULE),
        }
    }

    fn reserve(&self, size: ByteSize) -> Answer<DeviceAddress> {
        Ok(DeviceAddress::new(self.0.fetch_add(size.get(), Ordering::Relaxed)))
    }

    does_nothing! {
        unreserve: DeviceAddress, ByteSize;
        copy: DeviceAddress, DeviceAddress, ByteSize;
        stream_destroy: StreamHandle;
        stream_synchronize: StreamHandle;
        host_store_destroy: HostStore;
        offload: DeviceAddress, StorePart, StreamHandle;
        restore: StorePart, DeviceAddress, StreamHandle;
    }

    #[cfg(not(lowtide_reference))]
    does_nothing! {
        commit: DeviceAddress, ByteSize, ByteSize;
        decommit: DeviceAddress, ByteSize, ByteSize;
    }

    #[cfg(lowtide_reference)]
    does_nothing! {
        commit: DeviceAddress, ByteSize;
        decommit: DeviceAddress, ByteSize;
    }

    fn device_memory(&self) -> Answer<Option<DeviceMemory>> {
        let total = ByteSize::gib(80);
        Ok(Some(DeviceMemory { total, free: total }))
    }

    fn stream_create(&self) -> Answer<StreamHandle> {
        Ok(StreamHandle::new(self.take()))
    }

    fn host_store_create(&self, size: ByteSize) -> Answer<HostStore> {
        #[cfg(not(lowtide_reference))]
        return Ok(HostStore { at: self.take(), size });
        #[cfg(lowtide_reference)]
        Ok(HostStore::new(self.take()))
    }
}
