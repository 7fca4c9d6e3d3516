//! The memory of the simulation beside a naive model of it, over random calls, right and wrong.
//!
//! The naive model keeps a set of granules and a list of reservations. Every call must succeed or
//! fail as it says, and the books of both must agree after each.

use std::collections::{BTreeMap, BTreeSet};

use lowtide_cuda_sim::{DriverCosts, Order, Pattern, SimDriver, SimOptions};
use lowtide_gpu::ByteSize;
use lowtide_gpu::driver::{DeviceAddress, Driver as _, DriverError};

use super::{GRANULE, Numbers, on};

/// Granules of address space and of memory: few, so that both run out.
const SPACE: u64 = 64;
const MEMORY: u64 = 24;

#[derive(Default)]
struct Naive {
    /// The start of each reservation, and its number of granules.
    reserved: BTreeMap<u64, u64>,
    committed: BTreeSet<u64>,
}

impl Naive {
    fn is_reserved(&self, first: u64, count: u64) -> bool {
        self.reserved.iter().any(|(at, size)| *at <= first && first + count <= at + size)
    }

    fn committed_in(&self, first: u64, count: u64) -> u64 {
        self.committed.range(first..first + count).count() as u64
    }
}

fn granule(at: DeviceAddress) -> u64 {
    at.get() / GRANULE.get()
}

fn address(granule: u64) -> DeviceAddress {
    DeviceAddress::new(granule * GRANULE.get())
}

fn granules(count: u64) -> ByteSize {
    ByteSize::new(count * GRANULE.get())
}

#[test]
fn random_calls_succeed_and_fail_as_a_naive_model_says() {
    for seed in 0..40 {
        println!("seed {seed}");
        let sim = SimDriver::new(SimOptions {
            order: Order::Random { seed },
            address_space: granules(SPACE),
            capacity: granules(MEMORY),
            context_overhead: ByteSize::ZERO,
            costs: DriverCosts::zero(),
            ..SimOptions::default()
        });
        let mut naive = Naive::default();
        let mut numbers = Numbers::new(seed);
        let base = granule(sim.reserve(GRANULE).expect("addresses"));
        naive.reserved.insert(base, 1);
        for _ in 0..1000 {
            step(&sim, &mut naive, &mut numbers, base);
            let leaks = sim.leaks();
            let committed = naive.committed.len() as u64;
            assert_eq!(leaks.reserved, granules(naive.reserved.values().sum()));
            assert_eq!(leaks.committed, granules(committed));
            assert_eq!(sim.headroom(), Ok(Some(granules(MEMORY - committed))));
        }
        sim.validate();
    }
}

/// One call, with its outcome foretold.
fn step(sim: &SimDriver, naive: &mut Naive, numbers: &mut Numbers, base: u64) {
    let (first, count) = (base + numbers.below(SPACE), 1 + numbers.below(6));
    let (at, size) = (address(first), granules(count));
    match numbers.below(7) {
        0 => match sim.reserve(size) {
            Ok(at) => {
                let first = granule(at);
                let apart = |(at, size): (&u64, &u64)| at + size <= first || first + count <= *at;
                assert!(naive.reserved.iter().all(apart), "reserved twice");
                assert!(first + count <= base + SPACE);
                naive.reserved.insert(first, count);
            }
            Err(error) => {
                assert!(matches!(error, DriverError::OutOfMemory { .. }), "{error}");
                let held: u64 = naive.reserved.values().sum();
                let gaps = naive.reserved.len() as u64 + 1;
                assert!(SPACE - held < gaps * count, "a gap was overlooked");
            }
        },
        1 => {
            let at = naive.reserved.keys().nth(usize::try_from(first % 5).expect("small"));
            let Some((first, count)) = at.map(|at| (*at, naive.reserved[at])) else { return };
            let bare = naive.committed_in(first, count) == 0;
            assert_eq!(sim.unreserve(address(first), granules(count)).is_ok(), bare);
            if bare {
                naive.reserved.remove(&first);
            }
        }
        2..=4 => {
            let bare = naive.committed_in(first, count) == 0;
            let room = naive.committed.len() as u64 + count <= MEMORY;
            let right = naive.is_reserved(first, count) && bare && room;
            assert_eq!(sim.commit(at, size, GRANULE).is_ok(), right, "{size} at {at}");
            if right {
                naive.committed.extend(first..first + count);
            }
        }
        5 => {
            let whole = naive.committed_in(first, count) == count;
            let right = whole && naive.is_reserved(first, count);
            assert_eq!(sim.decommit(at, size, GRANULE).is_ok(), right, "{size} at {at}");
            naive.committed.retain(|granule| !right || !(first..first + count).contains(granule));
        }
        _ => {
            // Work on what is committed is right, to the last byte, and never harms the books.
            if naive.committed_in(first, count) == count {
                let stream = sim.stream_create().expect("stream");
                let (tail, part) = (on(at, size.get() - 99), ByteSize::new(99));
                sim.fill(stream, tail, part, Pattern::new(first)).expect("queued");
                sim.stream_synchronize(stream).expect("done");
                sim.stream_destroy(stream).expect("at once");
            }
        }
    }
}
