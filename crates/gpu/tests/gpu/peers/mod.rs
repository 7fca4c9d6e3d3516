//! The tests of the device arenas that others wrote, as claims about ours; what their bugs were;
//! and what no caller, thread or order of acts may do to an arena.
//!
//! Each test names in a comment the test of another project that it answers to. Nothing here sees
//! more of an arena than a user does; the tests over a watched driver are in `src/device/tests`.
//!
//! Invariant: every arena is whole (`validate`) at the end of every test.
#![expect(clippy::print_stdout, reason = "seeds are printed")]

use std::sync::Arc;
use std::time::Duration;

use lowtide_gpu::ByteSize;
use lowtide_gpu::clock::ManualClock;
use lowtide_gpu::decay::DecayTime;
use lowtide_gpu::{
    ArenaConfig, ArenaSnapshot, Buffer, DeviceArena, DeviceError, HostDriver, Lease, RawBlock,
    Region,
};

mod bad_input;
mod bugs;
mod cuarena;
mod fronts;
mod onnxruntime;
mod races;
mod random;
mod resizing;

const GRANULE: ByteSize = ByteSize::mib(2);
const SECOND: Duration = Duration::from_secs(1);

/// The default configuration of the tests: 64 MiB of memory, 1 GiB of addresses a region.
fn config() -> ArenaConfig {
    ArenaConfig {
        limit: ByteSize::mib(64),
        reserve: ByteSize::gib(1),
        decay: DecayTime::Within(10 * SECOND),
        ..ArenaConfig::new("peers")
    }
}

fn open_with(config: ArenaConfig) -> (DeviceArena, ManualClock) {
    let clock = ManualClock::new();
    let arena = DeviceArena::open(Arc::new(HostDriver::new()), Arc::new(clock.clone()), config);
    (arena.expect("the host driver works everywhere"), clock)
}

/// A fixed pool, as `cuArena` has: so much memory and no more, at so many addresses a region.
fn pool(size: ByteSize) -> DeviceArena {
    open_with(ArenaConfig { limit: size, reserve: size, ..config() }).0
}

fn raw(arena: &DeviceArena, size: ByteSize, region: Region) -> Result<RawBlock, DeviceError> {
    arena.alloc_raw(size, ByteSize::new(256), region)
}

/// Returns the bytes that may still be allocated, as `gpu_available` reports them.
fn headroom(snapshot: &ArenaSnapshot) -> ByteSize {
    snapshot.limit.saturating_sub(snapshot.live)
}

/// # Panics
/// Where two of the blocks share a byte.
fn assert_apart(blocks: impl IntoIterator<Item = RawBlock>) {
    let mut blocks: Vec<_> = blocks.into_iter().collect();
    blocks.sort_unstable_by_key(|block| block.at);
    for pair in blocks.windows(2) {
        let end = pair[0].at.checked_add(pair[0].size).expect("an address");
        assert!(end <= pair[1].at, "{} and {} overlap", pair[0], pair[1]);
    }
}

/// That an arena is whole and hands out memory: what must hold after every error.
fn assert_usable(arena: &DeviceArena) {
    arena.validate();
    let before = arena.snapshot().live;
    for region in Region::ALL {
        let lease = arena.enter().expect("awake");
        let buffer = arena.alloc_from(&[7_u32; 1000], region).expect("room");
        assert_eq!(buffer.slice(&lease), Ok(&[7_u32; 1000][..]));
    }
    assert_eq!(arena.snapshot().live, before, "something was lost");
    arena.validate();
}

/// Every element that is marked: one in each 256 bytes.
const STRIDE: usize = 31;

/// Marks a buffer as one holder's.
fn mark(buffer: &mut Buffer<u64>, lease: &Lease, mark: u64) {
    let elements = buffer.slice_mut(lease).expect("own lease");
    for at in (0..elements.len()).step_by(STRIDE) {
        elements[at] = mark ^ at as u64;
    }
}

/// # Panics
/// Where one of the first `len` elements is not as it was marked: somebody else had the block.
fn assert_marked(buffer: &Buffer<u64>, lease: &Lease, mark: u64, len: usize) {
    let elements = buffer.slice(lease).expect("own lease");
    for at in (0..len).step_by(STRIDE) {
        assert_eq!(elements[at], mark ^ at as u64, "element {at} of {}", elements.len());
    }
}

/// Numbers that look random, from a seed that is printed.
struct Chance(u64);

impl Chance {
    fn new(seed: u64) -> Self {
        println!("seed {seed:#x}");
        Self(seed)
    }

    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 % bound as u64).expect("below a usize")
    }

    /// As often small as large: uniform in the number of bits.
    fn bits(&mut self, bits: usize) -> usize {
        let bits = self.below(bits + 1);
        (1 << bits) + self.below(1 << bits)
    }

    fn region(&mut self) -> Region {
        Region::ALL[self.below(2)]
    }
}
