//! What the C ABI costs: the instructions of an alloc/free pair through the shared library, less
//! those of the same pair in Rust.
//!
//! Each kind of pair runs in a process of its own under callgrind, once and three times as often;
//! the difference has neither start nor end in it. Both use a lane of a stream on the host driver,
//! and the same block every time. The library is loaded by `dlopen`, as an engine loads it.
//!
//! Exit codes: 0 every goal held; 1 one was missed, or something could not be measured.
#![expect(unsafe_code, reason = "C functions are called by their address")]

use std::ffi::{CString, c_int, c_void};
use std::hint::black_box;
use std::process::ExitCode;
use std::ptr;
use std::sync::Arc;

use clap::Parser;
use common::callgrind;
use common::figures::Figures;
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
    /// Be the process whose instructions are counted.
    #[arg(long, hide = true)]
    be: Option<String>,
    #[arg(long, hide = true, default_value_t = 0)]
    pairs: usize,
}

fn main() -> ExitCode {
    common::main(|cli: Cli| {
        match cli.be.as_deref() {
            Some("rust") => rust(cli.pairs)?,
            Some(kind) => c(kind == "torch", cli.pairs)?,
            None => return Ok(measure()?),
        }
        Ok(true)
    })
}

/// Measures the figures; returns whether the goals hold.
fn measure() -> Result<bool, String> {
    let mut figures = Figures::default();
    let of = |kind: &str| callgrind::per_step(&["--be", kind, "--pairs"], PAIRS);
    let rust = of("rust")?;
    let [c, torch] = [of("c")? - rust, of("torch")? - rust];
    figures.add("engines.rust.pair_instructions", rust, "instructions");
    figures.add("engines.torch.pair_instructions", torch, "instructions");
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
type SetDefault = unsafe extern "C" fn(u64) -> c_int;
type Alloc = unsafe extern "C" fn(u64, c_int, usize, usize, *mut c_void, *mut *mut c_void) -> c_int;
type Free = unsafe extern "C" fn(u64, c_int, *mut c_void, *mut c_void) -> c_int;
type TorchAlloc = unsafe extern "C" fn(isize, c_int, *mut c_void) -> *mut c_void;
type TorchFree = unsafe extern "C" fn(*mut c_void, isize, c_int, *mut c_void);

/// The pairs through the library, by its own functions or as PyTorch calls it.
fn c(is_torch: bool, pairs: usize) -> Result<(), BoxError> {
    // Cargo built it beside this program.
    let path = std::env::current_exe()?.with_file_name("liblowtide_c.so");
    let path = CString::new(path.to_string_lossy().as_bytes())?;
    // SAFETY: a C string; the library's initialisers are Rust's own, which start nothing.
    let library = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW) };
    if library.is_null() {
        return Err("liblowtide_c.so does not load".into());
    }
    macro_rules! function {
        ($name:literal, $type:ty) => {{
            // SAFETY: a library that stays loaded, and a C string.
            let found = unsafe { libc::dlsym(library, $name.as_ptr()) };
            if found.is_null() {
                return Err(format!("the library has no {:?}", $name).into());
            }
            // SAFETY: not null, and the function of this name in the header has this type.
            unsafe { std::mem::transmute::<*mut c_void, $type>(found) }
        }};
    }
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
    let (open, set_default) =
        (function!(c"lowtide_open", Open), function!(c"lowtide_set_default", SetDefault));
    // SAFETY: options of their size, and a place for the handle.
    let opened = unsafe { open(&raw const options, &raw mut allocator) };
    // SAFETY: takes a number.
    let chosen = unsafe { set_default(allocator) };
    if (opened, chosen) != (0, 0) {
        return Err("the library opens no allocator".into());
    }
    let stream: *mut c_void = ptr::without_provenance_mut(STREAM);
    let (alloc, free) = (function!(c"lowtide_alloc", Alloc), function!(c"lowtide_free", Free));
    let torch_alloc = function!(c"lowtide_torch_alloc", TorchAlloc);
    let torch_free = function!(c"lowtide_torch_free", TorchFree);
    for _ in 0..pairs {
        if is_torch {
            let size = black_box(SIZE.cast_signed());
            // SAFETY: the host driver has no streams.
            let block = unsafe { torch_alloc(size, 0, stream) };
            // SAFETY: as above; nothing uses the block.
            unsafe { torch_free(black_box(block), size, 0, stream) };
            continue;
        }
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
