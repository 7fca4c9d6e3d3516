//! What the C ABI costs: the instructions of an alloc/free pair through the shared library, less
//! those of the same pair in Rust.
//!
//! Each kind of pair runs in a process of its own under callgrind, once and three times as often;
//! the difference has neither start nor end in it. Both use a lane of a stream on the host driver,
//! and the same block every time. The library is loaded by `dlopen`, as an engine loads it.
//!
//! Exit codes: 0 every goal held; 1 one was missed, or something could not be measured.
#![expect(unsafe_code, reason = "C functions are called by their address")]

use std::ffi::{c_int, c_void};
use std::hint::black_box;
use std::process::ExitCode;
use std::ptr;
use std::sync::Arc;

use clap::Parser;
use common::callgrind::{Counted, per_step};
use common::figures::Figures;
use libloading::Library;
use lowtide_gpu::clock::SystemClock;
use lowtide_gpu::driver::StreamHandle;
use lowtide_gpu::{ArenaConfig, BoxError, ByteSize, DeviceArena, HostDriver, Region};

/// Pairs of the shorter run.
const PAIRS: u32 = 50_000;
/// The size of a block: small, so that nothing is committed.
const SIZE: usize = 4096;
const STREAM: usize = 100;
/// The most instructions that C may add to a pair.
const GOAL: f64 = 150.0;

/// What the C ABI costs.
#[derive(Clone, Debug, Parser)]
struct Cli {
    #[command(flatten)]
    counted: Counted,
}

fn main() -> ExitCode {
    common::main(|Cli { counted: Counted { be, steps } }| {
        match be.as_deref() {
            Some("rust") => rust(steps)?,
            Some(_) => c(steps)?,
            None => return Ok(measure()?),
        }
        Ok(true)
    })
}

/// Measures the figures; returns whether the goals hold.
fn measure() -> Result<bool, String> {
    let mut figures = Figures::default();
    let rust = per_step("", "rust", PAIRS)?;
    let c = per_step("", "c", PAIRS)? - rust;
    figures.add("engines.rust.pair_instructions", rust, "instructions");
    figures.at_most("engines.c.pair_instructions", c, "instructions", GOAL);
    Ok(figures.print())
}

/// The pairs in Rust.
fn rust(pairs: usize) -> Result<(), BoxError> {
    let clock = Arc::new(SystemClock::new());
    let arena = DeviceArena::open(Arc::new(HostDriver::new()), clock, ArenaConfig::new("rust"))?;
    // SAFETY: the host driver has no streams.
    let lane = unsafe { arena.lane(StreamHandle::new(STREAM as u64)) }?;
    for _ in 0..pairs {
        let size = black_box(ByteSize::of(SIZE));
        let block = lane.alloc_raw(size, ByteSize::new(256), Region::Dynamic)?;
        lane.free(black_box(block.at))?;
    }
    Ok(())
}

type Open = unsafe extern "C" fn(*const lowtide_c::Options, *mut u64) -> c_int;
type Alloc = unsafe extern "C" fn(u64, c_int, usize, usize, *mut c_void, *mut *mut c_void) -> c_int;
type Free = unsafe extern "C" fn(u64, c_int, *mut c_void, *mut c_void) -> c_int;

/// The pairs through the library.
fn c(pairs: usize) -> Result<(), BoxError> {
    // Cargo built it beside this program.
    let path = std::env::current_exe()?.with_file_name("liblowtide_c.so");
    // SAFETY: its initialisers are Rust's own, which start nothing.
    let library = std::mem::ManuallyDrop::new(unsafe { Library::new(path) }?);
    // SAFETY: the function of this name in the header has this type.
    let open: Open = *unsafe { library.get::<Open>(c"lowtide_open") }?;
    // SAFETY: as above.
    let alloc: Alloc = *unsafe { library.get::<Alloc>(c"lowtide_alloc") }?;
    // SAFETY: as above.
    let free: Free = *unsafe { library.get::<Free>(c"lowtide_free") }?;
    let mut allocator = 0;
    let options = lowtide_c::Options {
        struct_size: size_of::<lowtide_c::Options>(),
        backend: lowtide_c::LOWTIDE_BACKEND_HOST,
        reserved: 0,
        name: ptr::null(),
        limit_bytes: 0,
        reserve_bytes: 0,
        decay_ms: 0,
    };
    // SAFETY: options of their size, and a place for the handle.
    let opened = unsafe { open(&raw const options, &raw mut allocator) };
    if opened != 0 {
        return Err("the library opens no allocator".into());
    }
    let stream: *mut c_void = ptr::without_provenance_mut(STREAM);
    for _ in 0..pairs {
        let mut block = ptr::null_mut();
        // SAFETY: a place for the address; the host driver has no streams.
        let had = unsafe { alloc(allocator, 0, black_box(SIZE), 0, stream, &raw mut block) };
        // SAFETY: as above; nothing uses the block.
        let freed = unsafe { free(allocator, 0, black_box(block), stream) };
        if (had, freed) != (0, 0) {
            return Err(format!("a pair failed: {had}, {freed}").into());
        }
    }
    Ok(())
}
