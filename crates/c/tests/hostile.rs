//! Values that no caller should pass, streams that are destroyed, threads beside each other, forks
//! and exits: each call answers with a status, and what is valid goes on.
#![expect(unsafe_code, reason = "the functions of the header are unsafe for their pointers")]

use std::collections::BTreeMap;
use std::ffi::{CStr, c_int, c_uint, c_ulonglong, c_void};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering};
use std::sync::{Barrier, Mutex};
use std::thread;

use lowtide_c::{
    Block, LOWTIDE_ALL_DEVICES, LOWTIDE_BACKEND_HOST, Options, Statistics, Status, lowtide_alloc,
    lowtide_close, lowtide_end_stream, lowtide_find_block, lowtide_free, lowtide_get_statistics,
    lowtide_last_error, lowtide_open, lowtide_record_use, lowtide_release_captured,
    lowtide_set_capturing, lowtide_set_limit, lowtide_shrink, lowtide_torch_alloc,
    lowtide_torch_free, lowtide_torch_memory_fraction, lowtide_torch_record_stream,
};
use lowtide_fake_cuda::{Fake, Guard, Options as FakeOptions};
use test_fork::test;

fn options() -> Options {
    Options {
        struct_size: size_of::<Options>(),
        backend: LOWTIDE_BACKEND_HOST,
        reserved: 0,
        name: c"hostile".as_ptr(),
        limit_bytes: 0,
        reserve_bytes: 1 << 32,
        decay_ms: 0,
    }
}

fn open() -> u64 {
    let mut allocator = 0;
    // SAFETY: options of their size, and a place for the handle.
    let status = unsafe { lowtide_open(&options(), &raw mut allocator) };
    assert_eq!(status, Status::Ok, "{}", text());
    allocator
}

fn alloc(
    allocator: u64,
    device: i32,
    size: usize,
    align: usize,
    stream: u64,
) -> Result<u64, Status> {
    let mut block = ptr::null_mut();
    // SAFETY: a place for the address; the host has no streams.
    let status =
        unsafe { lowtide_alloc(allocator, device, size, align, pointer(stream), &raw mut block) };
    if status == Status::Ok { Ok(block.addr() as u64) } else { Err(status) }
}

fn free(allocator: u64, device: i32, block: u64, stream: u64) -> Status {
    // SAFETY: the host has no streams, and nothing uses the block.
    unsafe { lowtide_free(allocator, device, pointer(block), pointer(stream)) }
}

fn statistics(allocator: u64) -> Result<Statistics, Status> {
    let mut figures = Statistics { struct_size: size_of::<Statistics>(), ..Statistics::default() };
    // SAFETY: a struct of its size.
    let status =
        unsafe { lowtide_get_statistics(allocator, LOWTIDE_ALL_DEVICES, &raw mut figures) };
    if status == Status::Ok { Ok(figures) } else { Err(status) }
}

fn pointer(number: u64) -> *mut c_void {
    ptr::without_provenance_mut(usize::try_from(number).expect("64 bits"))
}

fn text() -> String {
    // SAFETY: the text of this thread, which ends in NUL.
    unsafe { CStr::from_ptr(lowtide_last_error()) }.to_string_lossy().into_owned()
}

/// Numbers from a seed: `SplitMix64`.
struct Chance(u64);

impl Chance {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    /// A number that is small, near a border, near one that is known, or anything.
    fn number(&mut self, known: u64) -> u64 {
        match self.below(8) {
            0 => self.below(4),
            1 => u64::MAX - self.below(4),
            2 => 1 << self.below(64),
            3 => known.wrapping_add(self.below(9)).wrapping_sub(4),
            4 => known ^ (1 << self.below(64)),
            5 | 6 => known,
            _ => self.next(),
        }
    }
}

#[test]
fn numbers_of_any_kind_are_answered_and_live_blocks_stay_live() {
    for seed in 0..8 {
        println!("seed {seed}");
        let (mut chance, allocator) = (Chance(seed), open());
        let mut live = BTreeMap::new();
        for _ in 0..4_000 {
            let known = live.keys().copied().nth(usize::try_from(chance.below(8)).expect("small"));
            let handle = if chance.below(4) == 0 { chance.number(allocator) } else { allocator };
            #[expect(clippy::cast_possible_truncation, reason = "any bits will do")]
            let device = if chance.below(4) == 0 { chance.number(1) as i32 } else { 0 };
            let stream = chance.number(7);
            let at = chance.number(known.unwrap_or(0));
            match chance.below(8) {
                0..=2 => {
                    let most = 1 << chance.below(24);
                    let size = chance.below(most);
                    let size =
                        usize::try_from(if chance.below(8) == 0 { chance.number(1) } else { size });
                    let align = if chance.below(8) == 0 { chance.number(256) } else { 0 };
                    let (size, align) =
                        (size.expect("64 bits"), usize::try_from(align).expect("64 bits"));
                    if let Ok(block) = alloc(handle, device, size.min(1 << 62), align, stream) {
                        assert!(handle == allocator && (size == 0) == (block == 0));
                        assert!(block == 0 || live.insert(block, device).is_none());
                    }
                }
                3 | 4 => {
                    if free(handle, device, at, stream) == Status::Ok && at != 0 {
                        assert_eq!((handle, live.remove(&at)), (allocator, Some(device)));
                    }
                }
                5 => {
                    // SAFETY: the host has no streams.
                    let used =
                        unsafe { lowtide_record_use(handle, device, pointer(at), pointer(stream)) };
                    assert_eq!(
                        used == Status::Ok,
                        handle == allocator && live.get(&at) == Some(&device)
                    );
                }
                6 => {
                    // SAFETY: as above.
                    let _ = unsafe { lowtide_end_stream(handle, device, pointer(stream)) };
                    let _ = lowtide_set_limit(handle, device, u64::MAX);
                    // SAFETY: null is allowed.
                    let _ =
                        unsafe { lowtide_shrink(handle, device, chance.next(), ptr::null_mut()) };
                }
                _ => {
                    let struct_size = size_of::<Block>();
                    let base = ptr::null_mut();
                    let mut found =
                        Block { struct_size, base, size: 0, requested: 0, device: 0, reserved: 0 };
                    // SAFETY: a struct of its size.
                    let status = unsafe { lowtide_find_block(handle, pointer(at), &raw mut found) };
                    if status == Status::Ok {
                        assert_eq!(live.get(&(found.base.addr() as u64)), Some(&found.device));
                    }
                }
            }
        }
        assert_eq!(statistics(allocator).expect("open").live_blocks, live.len() as u64);
        for (block, device) in live {
            assert_eq!(free(allocator, device, block, 3), Status::Ok, "{}", text());
        }
        assert_eq!(lowtide_close(allocator), Status::Ok, "{}", text());
    }
}

#[test]
fn options_of_random_bytes_open_an_allocator_or_are_refused() {
    let mut chance = Chance(1);
    let mut opened = 0;
    for _ in 0..20_000 {
        let mut words = [0_u64; 64];
        for word in &mut words {
            *word = if chance.below(3) == 0 { chance.number(1) } else { 0 };
        }
        // Never more than is there, and no invented name.
        words[0] = chance.below(2 * size_of::<[u64; 64]>() as u64);
        words[0] =
            if words[0] <= size_of::<[u64; 64]>() as u64 { words[0] } else { u64::MAX - words[0] };
        words[2] = 0;
        let mut allocator = 7;
        // SAFETY: as many bytes as the size says, or a size that is refused.
        let status = unsafe { lowtide_open(words.as_ptr().cast(), &raw mut allocator) };
        if status == Status::Ok {
            opened += 1;
            assert_eq!(lowtide_close(allocator), Status::Ok);
        } else {
            assert!(allocator == 0 && !text().is_empty());
        }
    }
    assert!(opened > 10, "{opened}");
}

#[test]
fn threads_that_allocate_while_others_close_get_a_status_and_lose_no_block() {
    for round in 0..100 {
        let (allocator, start) = (open(), Barrier::new(4));
        let (held, is_closed) = (Mutex::new(Vec::new()), AtomicBool::new(false));
        let works = |device: i32| {
            start.wait();
            for stream in 3.. {
                match alloc(allocator, device, 4096, 0, stream % 50 + 3) {
                    Ok(block) if stream % 3 == 0 => {
                        held.lock().expect("no panic").push((device, block))
                    }
                    Ok(block) => {
                        let status = free(allocator, device, block, stream % 7 + 3);
                        assert_eq!(status, Status::Ok, "{}", text());
                    }
                    Err(Status::Closed | Status::InvalidHandle)
                        if is_closed.load(Ordering::Relaxed) =>
                    {
                        break;
                    }
                    Err(Status::Closed) => {}
                    Err(status) => assert_eq!(status, Status::InvalidHandle, "{}", text()),
                }
            }
        };
        let closes = || {
            start.wait();
            for turn in 0.. {
                for (device, block) in held.lock().expect("no panic").drain(..) {
                    assert_eq!(free(allocator, device, block, 3), Status::Ok, "{}", text());
                }
                match lowtide_close(allocator) {
                    Status::Ok | Status::InvalidHandle => break,
                    status => assert_eq!(status, Status::LiveBlocks, "{turn}: {}", text()),
                }
                thread::yield_now();
            }
            is_closed.store(true, Ordering::Relaxed);
        };
        thread::scope(|scope| {
            scope.spawn(|| works(0));
            scope.spawn(|| works(round % 2));
            scope.spawn(closes);
            scope.spawn(closes);
        });
        assert!(held.lock().expect("no panic").is_empty(), "a block of a closed allocator");
        assert_eq!(statistics(allocator).expect_err("closed"), Status::InvalidHandle);
    }
}

#[test]
fn more_allocators_than_there_may_be_are_refused() {
    let mut allocators: Vec<_> = (0..64).map(|_| open()).collect();
    let mut allocator = 7;
    // SAFETY: options of their size, and a place for the handle.
    let status = unsafe { lowtide_open(&options(), &raw mut allocator) };
    assert_eq!((status, allocator), (Status::TooMany, 0));
    assert!(text().starts_with("64 allocators are open"), "{}", text());
    let last = allocators.pop().expect("64");
    assert_eq!(lowtide_close(last), Status::Ok);
    let again = open();
    assert_ne!(again, last, "a handle of a closed allocator is given again");
    assert_eq!(lowtide_close(last), Status::InvalidHandle);
    for allocator in allocators.into_iter().chain([again]) {
        assert_eq!(lowtide_close(allocator), Status::Ok, "{}", text());
    }
}

#[test]
fn in_the_child_of_a_fork_every_call_is_refused() {
    let allocator = open();
    let block = alloc(allocator, 0, 4096, 0, 3).expect("room");
    // A thread that holds and releases the lock all the time.
    let (stop, turns) = (AtomicBool::new(false), AtomicU64::new(0));
    thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                let block =
                    alloc(allocator, 0, 64, 0, turns.fetch_add(1, Ordering::Relaxed) % 9 + 3);
                assert_eq!(free(allocator, 0, block.expect("room"), 3), Status::Ok);
            }
        });
        while turns.load(Ordering::Relaxed) < 100 {
            thread::yield_now();
        }
        for _ in 0..20 {
            // SAFETY: the child makes only the calls under test, which return without a lock, and
            // ends.
            let child = unsafe { libc::fork() };
            if child == 0 {
                let is_refused = alloc(allocator, 0, 1, 0, 3) == Err(Status::Forked)
                    && free(allocator, 0, block, 3) == Status::Forked
                    && lowtide_close(allocator) == Status::Forked
                    && statistics(allocator).is_err();
                // SAFETY: ends the child at once.
                unsafe { libc::_exit(i32::from(!is_refused)) };
            }
            let mut status = 0;
            // SAFETY: our own child, and a place for its status.
            assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
            assert_eq!((libc::WIFEXITED(status), libc::WEXITSTATUS(status)), (true, 0));
        }
        stop.store(true, Ordering::Relaxed);
    });
    assert_eq!(free(allocator, 0, block, 3), Status::Ok);
    assert_eq!(lowtide_close(allocator), Status::Ok);
}

/// Without a CUDA driver, as on a machine that builds images.
#[test]
fn the_functions_for_engines_without_a_device_fail_and_say_why() {
    // SAFETY: NULL is the default stream.
    let block = unsafe { lowtide_torch_alloc(4096, 0, ptr::null_mut()) };
    if block.is_null() {
        assert!(!text().is_empty());
    } else {
        println!("skipped: there is a CUDA device");
        // SAFETY: as above; nothing uses the block.
        unsafe { lowtide_torch_free(block, 4096, 0, ptr::null_mut()) };
    }
}

/// Calls of another library that uses the same device, over the fake driver.
struct Cuda {
    fake: Guard,
    create: Create,
    destroy: Destroy,
    fill: Fill,
    read: Read,
    synchronize: Synchronize,
    begin: Begin,
    end: End,
    instantiate: Instantiate,
    launch: Launch,
}

type Begin = extern "C" fn(*mut c_void, c_uint) -> c_int;
type End = extern "C" fn(*mut c_void, *mut *mut c_void) -> c_int;
type Instantiate = extern "C" fn(*mut *mut c_void, *mut c_void, c_ulonglong) -> c_int;
type Launch = extern "C" fn(*mut c_void, *mut c_void) -> c_int;
type Create = extern "C" fn(*mut *mut c_void, c_uint) -> c_int;
type Destroy = extern "C" fn(*mut c_void) -> c_int;
type Fill = extern "C" fn(c_ulonglong, u8, usize, *mut c_void) -> c_int;
type Read = extern "C" fn(*mut u8, c_ulonglong, usize) -> c_int;
type Synchronize = extern "C" fn() -> c_int;
type Init = extern "C" fn(c_uint) -> c_int;
type Retain = extern "C" fn(*mut *mut c_void, c_int) -> c_int;

/// Returns a function of the driver.
macro_rules! function {
    ($library:expr, $name:literal, $type:ty) => {{
        // SAFETY: an open library, and a C string.
        let found = unsafe { libc::dlsym($library, $name.as_ptr()) };
        assert!(!found.is_null(), "{:?}", $name);
        // SAFETY: the function of this name has this type (cuda.h).
        unsafe { std::mem::transmute::<*mut c_void, $type>(found) }
    }};
}

impl Cuda {
    fn start(flags: u32) -> Self {
        let fake = Fake::start(FakeOptions { devices: 1, flags, ..FakeOptions::default() });
        // SAFETY: a C string; the fake is loaded under that name.
        let library = unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW) };
        assert!(!library.is_null());
        let init = function!(library, c"cuInit", Init);
        let retain = function!(library, c"cuDevicePrimaryCtxRetain", Retain);
        let set = function!(library, c"cuCtxSetCurrent", Destroy);
        let mut context = ptr::null_mut();
        assert_eq!([init(0), retain(&raw mut context, 0), set(context)], [0; 3]);
        Self {
            fake,
            create: function!(library, c"cuStreamCreate", Create),
            destroy: function!(library, c"cuStreamDestroy_v2", Destroy),
            fill: function!(library, c"cuMemsetD8Async", Fill),
            read: function!(library, c"cuMemcpyDtoH_v2", Read),
            synchronize: function!(library, c"cuCtxSynchronize", Synchronize),
            begin: function!(library, c"cuStreamBeginCapture_v2", Begin),
            end: function!(library, c"cuStreamEndCapture", End),
            instantiate: function!(library, c"cuGraphInstantiateWithFlags", Instantiate),
            launch: function!(library, c"cuGraphLaunch", Launch),
        }
    }

    /// Creates a stream that is ordered with no other.
    fn stream(&self) -> *mut c_void {
        let mut stream = ptr::null_mut();
        assert_eq!((self.create)(&raw mut stream, 1), 0);
        stream
    }

    fn fill(&self, block: *mut c_void, byte: u8, size: usize, stream: *mut c_void) {
        assert_eq!((self.fill)(block.addr() as u64, byte, size, stream), 0);
    }
}

fn tensor(size: usize, stream: *mut c_void) -> *mut c_void {
    // SAFETY: the streams of these tests exist, but for those that the test destroys on purpose.
    unsafe { lowtide_torch_alloc(size.cast_signed(), 0, stream) }
}

fn drop_tensor(block: *mut c_void, size: usize, stream: *mut c_void) {
    // SAFETY: as above; nothing is queued on the block later.
    unsafe { lowtide_torch_free(block, size.cast_signed(), 0, stream) };
}

/// pytorch#66941, Paddle#38195, rmm#649: each later tensor on another stream was NULL.
#[test]
fn a_stream_that_is_destroyed_fails_no_tensor_of_another_stream() {
    const SIZE: usize = 16 << 20;
    let mut nulls = 0;
    let live = ["its other block is live", "its block is live"];
    for way in ["freed on it", "recorded on it", "too large for it"].into_iter().chain(live) {
        let cuda = Cuda::start(0);
        let (one, other) = (cuda.stream(), cuda.stream());
        let kept = if way.ends_with("live") { tensor(SIZE, other) } else { ptr::null_mut() };
        if way == "too large for it" {
            assert!(tensor(100 << 30, other).is_null());
        } else if way != "its block is live" {
            let owner = if way == "recorded on it" { one } else { other };
            let block = tensor(SIZE, owner);
            cuda.fill(block, 1, SIZE, other);
            if way == "recorded on it" {
                // SAFETY: both streams exist.
                unsafe { lowtide_torch_record_stream(block, other) };
            }
            drop_tensor(block, SIZE, owner);
        }
        assert_eq!((cuda.destroy)(other), 0);
        for nth in 0..20 {
            let size = SIZE * (1 + nth % 3);
            let block = tensor(size, one);
            if block.is_null() {
                println!("{way}: {}", text());
                nulls += 1;
            } else {
                cuda.fill(block, 2, size, one);
                drop_tensor(block, size, one);
            }
            if nth == 10 {
                drop_tensor(kept, SIZE, other);
                lowtide_c::lowtide_torch_empty_cache();
            }
        }
        // A block that outlives its stream breaks the contract of CUDA: one call is refused.
        let stale = cuda.fake.faults().lines().filter(|line| line.contains("Stale")).count();
        assert!(stale <= usize::from(way.ends_with("live")) * 2, "{way}: {}", cuda.fake.faults());
        let mut allocator = 0;
        // SAFETY: a place for the handle.
        assert_eq!(unsafe { lowtide_c::lowtide_get_default(&raw mut allocator) }, Status::Ok);
        assert_eq!(lowtide_close(allocator), Status::Ok, "{way}: {}", text());
    }
    println!("figure field.stream.null {nulls} tensors");
    assert_eq!(nulls, 0);
}

/// cubecl#1612: the launch of a graph wrote to tensors that had got the memory of its temporaries.
#[test]
fn a_graph_that_is_launched_again_writes_to_no_later_tensor() {
    const SIZE: usize = 16 << 20;
    let cuda = Cuda::start(0);
    let stream = cuda.stream();
    let kept = tensor(SIZE, stream);
    let allocator = {
        let mut allocator = 0;
        // SAFETY: a place for the handle.
        assert_eq!(unsafe { lowtide_c::lowtide_get_default(&raw mut allocator) }, Status::Ok);
        allocator
    };
    let set = |stream, is_capturing| lowtide_set_capturing(allocator, 0, stream, is_capturing);
    assert_eq!(set(ptr::null_mut(), 1), Status::InvalidArgument, "{}", text());
    assert_eq!([set(stream, 1), set(stream, 1)], [Status::Ok; 2], "{}", text());
    assert_eq!((cuda.begin)(stream, 2), 0);
    let within = tensor(SIZE, stream);
    cuda.fill(within, 1, SIZE, stream);
    drop_tensor(within, SIZE, stream);
    let after = tensor(SIZE, stream);
    cuda.fill(after, 1, SIZE, stream);
    let mut graph = ptr::null_mut();
    assert_eq!((cuda.end)(stream, &raw mut graph), 0);
    assert_eq!(set(stream, 0), Status::Ok);
    drop_tensor(after, SIZE, stream);
    let mut executable = ptr::null_mut();
    assert_eq!((cuda.instantiate)(&raw mut executable, graph, 0), 0);
    let others = [tensor(SIZE, stream), tensor(2 * SIZE, stream)];
    others.iter().for_each(|&other| cuda.fill(other, 7, SIZE, stream));
    assert_eq!((cuda.launch)(executable, stream), 0);
    assert_eq!((cuda.synchronize)(), 0);
    for other in others {
        let mut byte = 0;
        assert_eq!((cuda.read)(&raw mut byte, other.addr() as u64, 1), 0);
        assert_eq!(byte, 7);
    }
    assert_eq!(lowtide_close(allocator), Status::LiveBlocks);
    let mut released = 0;
    // SAFETY: a place for the bytes; the graph is not launched any more.
    let status = unsafe { lowtide_release_captured(allocator, 0, &raw mut released) };
    assert_eq!((status, released), (Status::Ok, 2 * SIZE as u64));
    drop_tensor(others[0], SIZE, stream);
    drop_tensor(others[1], 2 * SIZE, stream);
    drop_tensor(kept, SIZE, stream);
    assert_eq!(lowtide_close(allocator), Status::Ok, "{}", text());
}

/// pytorch#58466, vllm#13131: there was no limit, and no error.
#[test]
fn a_fraction_of_an_integrated_gpu_is_a_limit() {
    const GIB: usize = 1 << 30;
    for flags in [0, FakeOptions::INTEGRATED] {
        let cuda = Cuda::start(flags);
        let stream = cuda.stream();
        lowtide_torch_memory_fraction(0.5, 0); // of 80 GiB
        let mut allocator = 0;
        // SAFETY: a place for the handle.
        assert_eq!(unsafe { lowtide_c::lowtide_get_default(&raw mut allocator) }, Status::Ok);
        assert_eq!(
            statistics(allocator).map(|it| it.limit_bytes),
            Ok(40 << 30),
            "{flags}: {}",
            text()
        );
        assert!(tensor(41 * GIB, stream).is_null(), "{flags}");
        let half = tensor(40 * GIB, stream);
        assert!(!half.is_null(), "{flags}: {}", text());
        drop_tensor(half, 40 * GIB, stream);
        assert_eq!(lowtide_close(allocator), Status::Ok, "{}", text());
    }
}

/// timemachine#1203, ollama#1895: the arena of a dead device was never known to be lost.
#[test]
fn a_dead_device_gets_no_more_calls() {
    let cuda = Cuda::start(0);
    let stream = cuda.stream();
    drop_tensor(tensor(1 << 20, stream), 1 << 20, stream);
    cuda.fake.poison(0, 999);
    assert!(tensor(64 << 20, stream).is_null());
    let calls = cuda.fake.calls_total();
    for _ in 0..100 {
        assert!(tensor(64 << 20, stream).is_null());
    }
    assert!(text().contains("lost"), "{}", text());
    assert_eq!(cuda.fake.calls_total(), calls);
}

/// The same reports: CUDA gives the handle of a destroyed stream to the next one, whose work is not
/// ordered after the work of the first.
#[test]
fn a_reused_handle_is_another_stream() {
    const SIZE: usize = 16 << 20;
    let cuda = Cuda::start(FakeOptions::REUSED_STREAMS);
    let (first, reader) = (cuda.stream(), cuda.stream());
    let block = tensor(SIZE, first);
    cuda.fill(block, 1, SIZE, first);
    drop_tensor(block, SIZE, first);
    assert_eq!((cuda.destroy)(first), 0);
    let second = cuda.stream();
    assert_eq!(second, first, "the handle is not reused");
    let block = tensor(SIZE, second);
    cuda.fill(block, 2, SIZE, second);
    assert!(cuda.fake.calls(c"cuStreamWaitEvent") > 0, "it waits for the first stream");
    assert_eq!((cuda.synchronize)(), 0);
    let mut byte = 0;
    assert_eq!((cuda.read)(&raw mut byte, block.addr() as u64, 1), 0);
    assert_eq!(byte, 2);
    drop_tensor(block, SIZE, second);
    assert_eq!((cuda.destroy)(reader), 0);
    assert_eq!(cuda.fake.faults(), "");
}

/// The fake of a process that exits.
static EXITING: AtomicPtr<Guard> = AtomicPtr::new(ptr::null_mut());
/// The turns of its other thread.
static TURNS: AtomicU64 = AtomicU64::new(0);

/// Runs after the exit handlers of CUDA, which was loaded later: handlers run last in, first out.
extern "C" fn after_cuda() {
    // SAFETY: the test stored a value that is never freed.
    let fake = unsafe { &*EXITING.load(Ordering::Acquire) };
    let (before, turns) = (fake.calls_total(), TURNS.load(Ordering::Relaxed));
    while TURNS.load(Ordering::Relaxed) < turns + 100 {
        thread::yield_now();
    }
    let calls = fake.calls_total() - before;
    // SAFETY: ends the child at once.
    unsafe { libc::_exit(i32::from(u8::try_from(calls).unwrap_or(u8::MAX))) };
}

/// rmm#2366, dlib#2186, bpftime#521: a thread of the library called CUDA while the process exited.
#[test]
fn no_thread_calls_cuda_after_its_exit_handlers() {
    // SAFETY: the child is the only thread of a process that holds no lock of the library.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: a function of the required type.
        assert_eq!(unsafe { libc::atexit(after_cuda) }, 0);
        let cuda = Cuda::start(0);
        let kept = tensor(1 << 20, ptr::null_mut());
        assert!(!kept.is_null(), "{}", text());
        EXITING.store(Box::into_raw(Box::new(cuda.fake)), Ordering::Release);
        // As the thread that releases idle memory, but without its pauses.
        thread::spawn(|| {
            loop {
                drop_tensor(tensor(32 << 20, ptr::null_mut()), 32 << 20, ptr::null_mut());
                lowtide_c::lowtide_torch_empty_cache();
                TURNS.fetch_add(1, Ordering::Relaxed);
            }
        });
        while TURNS.load(Ordering::Relaxed) < 10 {
            thread::yield_now();
        }
        // SAFETY: runs the exit handlers, as the end of `main` does.
        unsafe { libc::exit(9) };
    }
    let mut status = 0;
    // SAFETY: our own child, and a place for its status.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert!(libc::WIFEXITED(status), "{status}");
    let calls = libc::WEXITSTATUS(status);
    println!("figure field.exit.calls {calls} calls");
    assert_eq!(calls, 0);
}
