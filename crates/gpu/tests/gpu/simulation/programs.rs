//! Programs with a bug of ordering, and the same programs without it.
//!
//! Three bugs that real allocators had: a wait that was forgotten, a block given to another stream
//! before the first was done with it, memory unmapped too early. In lazy order each is seen in
//! every run; without the bug no order ever finds anything.

use lowtide_cuda_sim::{DriverCosts, Order, Pattern, SimDriver, SimOptions};
use lowtide_gpu::ByteSize;
use lowtide_gpu::driver::{Driver as _, DriverError};

use super::{GRANULE, committed, on};

/// The settings of a run of the program.
struct Run {
    sim: SimDriver,
    seed: u64,
    /// `true` if the program has its bug.
    wrong: bool,
}

impl Run {
    fn new(order: Order, seed: u64, wrong: bool) -> Self {
        let costs = DriverCosts::zero();
        let sim = SimDriver::new(SimOptions { order, costs, ..SimOptions::default() });
        Self { sim, seed, wrong }
    }

    /// A size that depends on the seed and a round.
    fn size(&self, round: u64) -> ByteSize {
        ByteSize::new(1 + (self.seed * 7919 + round * 104_729) % 300)
    }

    fn pattern(&self, round: u64) -> Pattern {
        Pattern::new(self.seed << 16 | round)
    }

    /// Returns `true` if the simulation found a fault.
    fn is_caught(&self) -> bool {
        self.sim.validate();
        self.sim.faults_total() > 0 || self.sim.differences() > 0
    }
}

const ROUNDS: u64 = 4;

/// One stream produces, another consumes; wrong: the consumer does not wait.
fn hand_over(run: &Run) -> Result<(), DriverError> {
    let sim = &run.sim;
    let at = committed(sim, 1);
    let (producer, consumer) = (sim.stream_create()?, sim.stream_create()?);
    let (full, empty) = (sim.event_create()?, sim.event_create()?);
    for round in 0..ROUNDS {
        let (size, pattern) = (run.size(round), run.pattern(round));
        sim.stream_wait_event(producer, empty)?;
        sim.fill(producer, at, size, pattern)?;
        sim.event_record(full, producer)?;
        if !run.wrong {
            sim.stream_wait_event(consumer, full)?;
        }
        sim.check(consumer, at, size, pattern)?;
        sim.event_record(empty, consumer)?;
    }
    sim.stream_synchronize(consumer)?;
    sim.synchronize()
}

/// A block is freed while its stream is busy, and given to another stream; wrong: at once.
fn reuse(run: &Run) -> Result<(), DriverError> {
    let sim = &run.sim;
    let block = committed(sim, 1);
    let (old, new) = (sim.stream_create()?, sim.stream_create()?);
    let freed = sim.event_create()?;
    for round in 0..ROUNDS {
        let (size, first) = (run.size(round), run.pattern(2 * round));
        sim.fill(old, block, size, first)?;
        sim.check(old, block, size, first)?;
        sim.event_record(freed, old)?; // the free
        if !run.wrong {
            sim.stream_wait_event(new, freed)?;
        }
        let second = run.pattern(2 * round + 1); // the block's new owner
        sim.fill(new, block, size, second)?;
        sim.stream_synchronize(new)?;
        sim.stream_synchronize(old)?;
        sim.check(new, block, size, second)?;
        sim.stream_synchronize(new)?;
    }
    Ok(())
}

/// Memory goes back when it is idle; wrong: when its stream was given all the work, not when it
/// was done.
fn give_back(run: &Run) -> Result<(), DriverError> {
    let sim = &run.sim;
    let at = committed(sim, 2);
    let second = on(at, GRANULE.get());
    let (a, b) = (sim.stream_create()?, sim.stream_create()?);
    let mark = sim.event_create()?;
    for round in 0..ROUNDS {
        let (size, pattern) = (run.size(round), run.pattern(round));
        sim.fill(a, at, size, pattern)?;
        sim.event_record(mark, a)?;
        sim.stream_wait_event(b, mark)?;
        sim.copy_async(at, second, size, b)?;
        sim.check(b, second, size, pattern)?;
        sim.event_record(mark, b)?;
        if !run.wrong {
            sim.event_synchronize(mark)?;
        }
        sim.decommit(at, GRANULE, GRANULE)?;
        sim.commit(at, GRANULE, GRANULE)?;
    }
    sim.synchronize()
}

type Program = fn(&Run) -> Result<(), DriverError>;
const PROGRAMS: [(&str, Program); 3] =
    [("a missing wait", hand_over), ("use after free", reuse), ("early unmap", give_back)];

/// Returns the number of seeds that catch the wrong program.
fn caught(program: Program, seeds: u64, order: impl Fn(u64) -> Order) -> u64 {
    let caught = |seed: &u64| {
        let run = Run::new(order(*seed), *seed, true);
        let ended = program(&run);
        assert!(ended.is_ok() || run.is_caught(), "seed {seed}: an error without a cause");
        run.is_caught()
    };
    (0..seeds).filter(caught).count() as u64
}

#[test]
fn in_lazy_order_every_seeded_bug_is_caught_in_every_run() {
    for (bug, program) in PROGRAMS {
        assert_eq!(caught(program, 10, |_| Order::Lazy), 10, "{bug}");
    }
}

#[test]
fn in_random_order_bugs_are_caught_in_some_runs_and_in_synchronous_order_hardly_ever() {
    for (bug, program) in PROGRAMS {
        let random = caught(program, 100, |seed| Order::Random { seed });
        let synchronous = caught(program, 10, |_| Order::Synchronous);
        println!("{bug}: {random} of 100 random orders, {synchronous} of 10 synchronous runs");
        assert!(random >= 10, "{bug}: {random} of 100");
        assert_eq!(synchronous, 0, "{bug}: the synchronous order is blind, as it must be");
    }
}

#[test]
fn right_programs_are_never_accused() {
    for (name, program) in PROGRAMS {
        for seed in 0..lowtide_cuda_sim::sample(1000) {
            for order in [Order::Lazy, Order::Random { seed }, Order::Synchronous] {
                let run = Run::new(order, seed, false);
                let ended = program(&run);
                assert_eq!(ended, Ok(()), "without {name}: {order:?}, seed {seed}");
                run.sim.assert_no_faults();
                run.sim.validate();
                assert_eq!(run.sim.unsafe_unmaps(), 0, "without {name}: {order:?}, seed {seed}");
            }
        }
    }
}
