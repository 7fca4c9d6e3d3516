//! Recordings of several threads: whole, in the order of the books, and replayed twice alike.

use std::sync::Arc;
use std::thread;

use lowtide_cuda_sim::{Call, Order, sample};
use lowtide_gpu::ByteSize;
use lowtide_gpu::clock::{Clock as _, ManualClock};
use lowtide_gpu::record::Operation;
use lowtide_gpu::{ArenaConfig, Buffer, CompactOptions, DeviceArena, Region};

use super::program::Random;
use super::{MIB, config, host, open, simulation};

/// Runs the work of one thread.
fn work(arena: &DeviceArena, seed: u64) {
    let mut random = Random::new(seed);
    let mut buffers: Vec<Buffer<u8>> = Vec::new();
    for _ in 0..400 {
        let size = usize::try_from(1 + random.below(MIB)).expect("64 bits");
        match random.below(8) {
            0..=3 => buffers.extend(arena.alloc(size, Region::ALL[random.index(2)])),
            4..=5 if !buffers.is_empty() => {
                drop(buffers.swap_remove(random.index(buffers.len())));
            }
            6 if !buffers.is_empty() => {
                let buffer = random.index(buffers.len());
                let _ = buffers[buffer].resize(size);
            }
            _ => match random.below(16) {
                0 => drop(arena.compact(CompactOptions::new(Region::Dynamic), |_| {})),
                1 => drop(arena.trim(ByteSize::mib(random.below(64)))),
                2 => drop(arena.reset()),
                _ => {
                    let size = ByteSize::new(size as u64);
                    drop(arena.alloc_raw(size, ByteSize::new(1), Region::Dynamic));
                }
            },
        }
    }
}

#[test]
fn a_recording_of_several_threads_is_sound_and_replayed_twice_alike() {
    for seed in 0..sample(20) {
        println!("seed {seed}");
        let config = ArenaConfig { limit: ByteSize::mib(96), ..config() };
        let (arena, _, kept) = open(host(), config);
        thread::scope(|scope| {
            for number in 0..4 {
                let arena = &arena;
                scope.spawn(move || work(arena, seed * 10 + number));
            }
        });
        arena.validate();
        drop(arena);
        let log = kept.log();
        let closing = log.closing().expect("a last line");
        assert!(!closing.one_thread);
        assert_eq!(closing.hash, log.hash());
        let replay = || log.replay(host(), log.header().config()).expect("open");
        let (first, second) = (replay(), replay());
        assert_eq!(first, second);
        println!("{:?} of {:?}, {:?}", first.hash, closing.hash, first.first_difference);
    }
}

/// The order is that in which blocks arrived: another thread's block is placed and has its memory
/// while the first one's is on its way.
#[test]
fn a_block_that_overtakes_another_is_recorded_before_it() {
    let sim = simulation(Order::Synchronous);
    let (arena, _, kept) = open(sim.clone(), config());
    let first = arena.alloc::<u8>(100, Region::Stable).expect("a granule for small blocks");
    let other = arena.clone();
    sim.before(Call::Create, 0, move || {
        drop(thread::spawn(move || other.alloc::<u8>(200, Region::Stable)).join());
    });
    let second = arena.alloc::<u8>(8 << 20, Region::Dynamic).expect("room");
    drop((first, second, arena));
    let log = kept.log();
    let bytes = log.entries().iter().filter_map(|entry| match &entry.operation {
        Operation::Alloc { asked, .. } => Some(asked.bytes.get()),
        _ => None,
    });
    assert_eq!(bytes.collect::<Vec<_>>(), [100, 200, 8 << 20]);
    assert!(log.closing().is_some_and(|closing| !closing.one_thread));
    let replay = || log.replay(simulation(Order::Synchronous), log.header().config());
    assert_eq!(replay().expect("open"), replay().expect("open"));
}

#[test]
fn threads_that_take_turns_are_recorded_as_several_and_the_hash_is_the_same() {
    let (arena, clock, kept) = open(host(), config());
    for seed in 0..4 {
        let (arena, clock) = (&arena, &clock);
        thread::scope(|scope| {
            scope.spawn(move || {
                work(arena, seed);
                arena.decay(ManualClock::now(clock)).expect("given back");
            });
        });
    }
    let buffer = Arc::new(arena.alloc::<u8>(7, Region::Stable).expect("room"));
    drop((arena, buffer));
    let log = kept.log();
    let replayed = log.replay(host(), log.header().config()).expect("open");
    assert_eq!((replayed.matches(), replayed.first_difference), (Some(true), None));
}
