//! Random schedules: threads, lanes, buffers that are written, checked, used elsewhere and freed,
//! beside purges, decays and compactions.
//!
//! Invariant: every check finds what its owner wrote, nothing is unmapped that work refers to, and
//! at the end nothing is left.

use std::sync::Arc;
use std::thread;

use lowtide::ByteSize;
use lowtide::clock::Clock as _;
use lowtide::device::driver::Driver as _;
use lowtide::device::driver::sim::{Order, Outcome, Pattern, SimDriver, Ticket};
use lowtide::device::{Buffer, CompactOptions, DeviceArena, Lane};

use super::{DYNAMIC, at, lane, open_with};

struct Chance(u64);

impl Chance {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(0x1405_7B7E_F767_814F);
        (self.0 >> 33) % bound
    }

    fn index(&mut self, bound: usize) -> usize {
        usize::try_from(self.below(bound as u64)).expect("small")
    }
}

/// A buffer, the lane that it is of, and what is in it.
struct Held {
    buffer: Buffer<u8>,
    lane: Lane,
    mark: u64,
}

/// Steps of one thread; returns its checks.
fn steps(arena: &DeviceArena, sim: &SimDriver, seed: u64, steps: usize) -> Vec<Ticket> {
    let mut chance = Chance(seed);
    let fresh = || lane(arena, sim);
    let mut lanes: Vec<_> = (0..4).map(|_| fresh()).collect();
    let mut held: Vec<Held> = Vec::new();
    let mut checks = Vec::new();
    for step in 0..steps as u64 {
        match chance.below(16) {
            0..=5 => {
                let lane = lanes[chance.index(lanes.len())].clone();
                let bits = chance.below(18);
                let size = 1 + chance.below(1 << bits);
                let size = usize::try_from(size).expect("small");
                let Ok(buffer) = lane.alloc::<u8>(size, DYNAMIC) else { continue };
                // While it is held nothing moves: what is queued finds the buffer there.
                let _lease = arena.enter().expect("a lease");
                let mark = seed << 32 | step;
                let pattern = Pattern::new(mark);
                sim.fill(lane.stream(), at(&buffer), buffer.bytes(), pattern).expect("queued");
                held.push(Held { buffer, lane, mark });
            }
            6..=10 if !held.is_empty() => {
                let Held { mut buffer, lane, mark } = held.swap_remove(chance.index(held.len()));
                let _lease = arena.enter().expect("a lease");
                let pattern = Pattern::new(mark);
                let (place, size) = (at(&buffer), buffer.bytes());
                checks.push(sim.check(lane.stream(), place, size, pattern).expect("queued"));
                if chance.below(4) == 0 {
                    let other = &lanes[chance.index(lanes.len())];
                    let ready = sim.event_create().expect("an event");
                    sim.event_record(ready, lane.stream()).expect("recorded");
                    sim.stream_wait_event(other.stream(), ready).expect("waits");
                    sim.event_destroy(ready).expect("after its use");
                    buffer.record_use(other).expect("of this arena");
                    checks.push(sim.check(other.stream(), place, size, pattern).expect("queued"));
                }
            }
            11 => lanes[chance.index(lanes.len())].end_run().expect("an event"),
            12 => {
                // The old stream ends once its last buffer is gone.
                let at = chance.index(lanes.len());
                lanes[at] = fresh();
            }
            13 => {
                arena.purge().expect("no error");
            }
            14 => {
                arena.decay(sim.clock().now()).expect("no error");
            }
            15 if chance.below(8) == 0 => {
                arena.compact(CompactOptions::new(DYNAMIC), |_| {}).expect("no error");
            }
            _ => drop(sim.advance(chance.index(8))),
        }
    }
    for Held { buffer, lane, mark } in held {
        let _lease = arena.enter().expect("a lease");
        let pattern = Pattern::new(mark);
        let check = sim.check(lane.stream(), at(&buffer), buffer.bytes(), pattern);
        checks.push(check.expect("queued"));
    }
    checks
}

fn run(order: Order, seed: u64, threads: u64) {
    println!("{order:?}, seed {seed}, {threads} threads");
    let (arena, sim) = open_with(order, ByteSize::kib(512), ByteSize::kib(64));
    let workers: Vec<_> = (0..threads)
        .map(|nth| {
            let (arena, sim) = (arena.clone(), Arc::clone(&sim));
            thread::spawn(move || steps(&arena, &sim, seed * 16 + nth, 200))
        })
        .collect();
    let checks = workers.into_iter().flat_map(|worker| worker.join().expect("no panic"));
    let checks: Vec<_> = checks.collect();
    arena.validate();
    arena.close().expect("nothing is live");
    sim.run_all();
    for check in checks {
        assert_eq!(sim.outcome(check), Outcome::Held, "{order:?}, seed {seed}");
    }
    sim.assert_no_faults();
    assert_eq!((sim.unsafe_unmaps(), arena.snapshot().committed), (0, ByteSize::ZERO));
}

#[test]
fn random_schedules_of_one_thread_keep_every_byte() {
    for seed in 0..60 {
        run(Order::Lazy, seed, 1);
        run(Order::Random { seed }, seed, 1);
    }
}

#[test]
fn random_schedules_of_several_threads_keep_every_byte() {
    for seed in 0..40 {
        run(Order::Lazy, seed, 3);
        run(Order::Random { seed }, seed, 3);
    }
}
