//! Random schedules that step the engine's operations in a single thread.
//!
//! A seed determines a schedule. Operations begin at random and are stepped in a random order, so
//! any of them may be in any of its steps while another continues. Driver calls are made when their
//! turn comes, and their results return in any order. Some calls fail, and some results are lost:
//! the operation then ends in the middle. Meanwhile the work of streams writes and reads blocks, in
//! an order that the seed determines.
//!
//! `cargo xtask figures arena` compares their number per second with that of the schedules that
//! drive a whole arena. `LOWTIDE_STEPS` at build time sets the number of schedules,
//! `LOWTIDE_STEPS_FROM` the first seed.
//!
//! Invariants: the simulation detects no breach of the driver's contract; a block keeps the data
//! written to it; the state is valid after each schedule; without a lost result no memory stays
//! committed.

use std::cell::Cell;
use std::fmt;
use std::ops::ControlFlow;
use std::pin::Pin;

use super::*;
use crate::driver::{DeviceAddress, Driver, StreamHandle};
use crate::engine::alloc::{self, Begun};
use crate::engine::callbacks::Callbacks;
use crate::engine::context::{OpContext, OpRequest, Surroundings, run_outside, step};
use crate::engine::{commit, completion, move_block, resume, stores, suspend};
use crate::exec::reserve;
use crate::state::RequestOrigin;
use crate::state::arena::{ArenaState, CommitOptions};
use crate::state::compact::plan::Move;
use crate::state::region::{AllocRequest, Placement, Search};
use crate::state::streams::StreamKey;
use crate::types::compact::CompactOptions;
use lowtide_cuda_sim::{Order, Pattern, SimDriver, SimOptions, sample};

/// The number of acts of a schedule.
const ACTS: usize = 400;
/// The maximum number of operations in progress.
const OPERATIONS_MAX: usize = 4;
/// The maximum number of blocks.
const BLOCKS_MAX: usize = 24;
const STEP_GRANULE: ByteSize = ByteSize::kib(4);

/// An arena without callbacks, with caches that seem to hold blocks: two of three allocations that
/// lack memory begin again.
#[derive(Debug, Default)]
pub(super) struct StepSurroundings(Cell<u64>);

impl Surroundings for StepSurroundings {
    fn caches_hold(&self) -> bool {
        true
    }

    fn empty_caches_for(&self, _: Option<StreamKey>) -> bool {
        self.0.set(self.0.get() + 1);
        !self.0.get().is_multiple_of(3)
    }

    fn note_live(&self, _: u64, _: u64) {}

    fn shut_caches(&self) -> bool {
        false
    }

    fn reopen_caches(&self) {}

    fn set_asleep(&self, _: bool) {}
}

/// A live block.
#[derive(Debug)]
struct StepBlock {
    region: Region,
    placed: Placement,
    lane: usize,
    /// The written pattern, and its size.
    written: Option<(Pattern, ByteSize)>,
}

/// The outcome of an operation.
enum Ended {
    Allocated(Option<StepBlock>),
    /// The block, and its new place if it was resized.
    Resized(StepBlock, Option<Placement>),
    Entered(bool),
    Other,
}

/// A request of an operation.
enum StepRequest {
    Step,
    /// A driver call, or other code.
    Outside,
    /// A change of the state after this many changes.
    Change(u64),
}

struct Running<'a> {
    cx: usize,
    operation: Pin<Box<dyn Future<Output = Ended> + 'a>>,
    asked: StepRequest,
}

struct Lane {
    handle: StreamHandle,
    key: StreamKey,
}

struct World<'a> {
    chance: Chance,
    slot: Option<Box<ArenaState>>,
    sim: &'a SimDriver,
    clock: &'a ManualClock,
    ports: &'a [OpContext<'a>],
    free_ports: Vec<usize>,
    running: Vec<Running<'a>>,
    blocks: Vec<StepBlock>,
    lanes: Vec<Lane>,
    leases: u32,
    changes: u64,
    mark: u64,
    is_lossy: bool,
    done: Totals,
}

/// The events that occurred in the schedules.
#[derive(Clone, Copy, Debug, Default)]
struct Totals {
    steps: u64,
    calls: u64,
    lost: u64,
    sleeps: u64,
    moves: u64,
    refused: u64,
}

impl fmt::Debug for World<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("World").field("done", &self.done).finish_non_exhaustive()
    }
}

impl<'a> World<'a> {
    fn state(&mut self) -> &mut ArenaState {
        self.slot.as_deref_mut().expect("no operation makes a step")
    }

    fn one_in(&mut self, of: u64) -> bool {
        self.chance.below(of) == 0
    }

    fn pick(&mut self, from: usize) -> usize {
        usize::try_from(self.chance.below(from as u64)).expect("small")
    }

    /// Begins an operation.
    fn begin<F: Future<Output = Ended> + 'a>(
        &mut self,
        operation: impl FnOnce(&'a OpContext<'a>) -> F,
    ) {
        let Some(cx) = self.free_ports.pop() else { return };
        let operation = Box::pin(operation(&self.ports[cx]));
        self.running.push(Running { cx, operation, asked: StepRequest::Step });
    }

    /// Continues a random operation.
    fn go_on(&mut self) {
        if self.running.is_empty() {
            return;
        }
        let nth = self.pick(self.running.len());
        let asked = std::mem::replace(&mut self.running[nth].asked, StepRequest::Step);
        match asked {
            StepRequest::Step => {}
            StepRequest::Change(seen) if seen == self.changes => {
                self.running[nth].asked = StepRequest::Change(seen);
                return;
            }
            StepRequest::Change(_) => {}
            StepRequest::Outside => {
                self.done.calls += 1;
                let Running { cx, operation, .. } = &mut self.running[nth];
                run_outside(&self.ports[*cx], operation.as_mut());
                if self.is_lossy && self.one_in(400) {
                    self.done.lost += 1;
                    self.free_ports.push(self.running.swap_remove(nth).cx);
                    self.changes += 1;
                    return;
                }
            }
        }
        self.step(nth);
    }

    /// Makes one step of an operation.
    fn step(&mut self, nth: usize) {
        self.done.steps += 1;
        let running = &mut self.running[nth];
        let cx = &self.ports[running.cx];
        loop {
            match step(cx, &mut self.slot, running.operation.as_mut()) {
                ControlFlow::Break(ended) => {
                    self.free_ports.push(running.cx);
                    drop(self.running.swap_remove(nth));
                    self.end(ended);
                    break;
                }
                ControlFlow::Continue(OpRequest::Wait { is_repeated }) => {
                    self.changes += u64::from(!is_repeated);
                    running.asked = StepRequest::Change(self.changes);
                    return;
                }
                // No time passes for the operation: the deadline of a drain is now.
                ControlFlow::Continue(OpRequest::WaitUntil(..)) => {}
                // Others continue before it takes the lock again.
                ControlFlow::Continue(OpRequest::Outside) => {
                    running.asked = StepRequest::Outside;
                    break;
                }
            }
        }
        self.changes += 1;
    }

    fn end(&mut self, ended: Ended) {
        match ended {
            Ended::Allocated(Some(block)) => self.blocks.push(block),
            Ended::Allocated(None) => self.done.refused += 1,
            Ended::Resized(mut block, resized) => {
                if let Some(placed) = resized {
                    block.placed = placed;
                    let size = ByteSize::new(placed.requested);
                    block.written =
                        block.written.map(|(pattern, written)| (pattern, written.min(size)));
                }
                self.blocks.push(block);
            }
            Ended::Entered(is_in) => self.leases += u32::from(is_in),
            Ended::Other => {}
        }
    }

    /// Performs one random act.
    fn act(&mut self) {
        match self.chance.below(24) {
            0..5 if self.blocks.len() + self.running.len() < BLOCKS_MAX => self.alloc(),
            5..9 => self.free(),
            9 => self.resize(),
            10..13 => self.use_block(),
            13 => self.release(),
            14 => self.enter(),
            15 | 16 => self.leave(),
            17 => self.sleep(),
            18 => self.move_block(),
            19 => self.complete(),
            20 => {
                self.clock.advance(Duration::from_secs(self.chance.below(8)));
            }
            21 => {
                self.sim.advance(1 + self.pick(8));
            }
            22 if self.one_in(8) => self.set_limit(),
            _ => {}
        }
    }

    fn alloc(&mut self) {
        let bits = 6 + self.chance.below(9);
        let size = 1 + self.chance.below(1 << bits);
        let region = if self.one_in(8) { Region::Stable } else { Region::Dynamic };
        let lane = self.pick(self.lanes.len());
        let wanted = AllocRequest::new(region, size, 256, RequestOrigin::BUFFER);
        let target = AllocRequest { taker: Some(self.lanes[lane].key), ..wanted };
        let begun = alloc::begin(self.state(), &target);
        self.changes += 1;
        let block = move |placed| StepBlock { region, placed, lane, written: None };
        if let Begun::Done(placed) = begun {
            self.blocks.push(block(placed));
            return;
        }
        if self.free_ports.is_empty() {
            // The first step needs the others.
            if let Begun::Placed(placed, claim) = begun {
                self.state().cancel_placement(placed, claim);
            }
            return;
        }
        self.begin(|cx| async move {
            Ended::Allocated(alloc::alloc(cx, (target, begun)).await.ok().map(block))
        });
    }

    fn free(&mut self) {
        if self.blocks.is_empty() {
            return;
        }
        let nth = self.pick(self.blocks.len());
        let block = self.blocks.swap_remove(nth);
        self.check(&block);
        self.free_block(&block);
    }

    fn free_block(&mut self, block: &StepBlock) {
        let key = self.lanes[block.lane].key;
        self.state().release_after(block.placed, &[key]);
        self.changes += 1;
    }

    /// Returns the address of a block under a lease.
    fn address(&mut self, block: &StepBlock) -> DeviceAddress {
        let region = self.state().region(block.region);
        region.refreshed(block.placed).at
    }

    /// Queues a check of the data written to a block, if a lease is held.
    fn check(&mut self, block: &StepBlock) {
        let Some((pattern, size)) = block.written.filter(|_| self.leases > 0) else { return };
        let (at, stream) = (self.address(block), self.lanes[block.lane].handle);
        self.sim.check(stream, at, size, pattern).expect("queued");
        self.note_used(block.lane);
    }

    fn note_used(&mut self, lane: usize) {
        let key = self.lanes[lane].key;
        self.state().sleep.used.insert(key);
    }

    fn use_block(&mut self) {
        if self.leases == 0 || self.blocks.is_empty() {
            return;
        }
        let nth = self.pick(self.blocks.len());
        let block = self.blocks.swap_remove(nth);
        self.check(&block);
        self.mark += 1;
        let (pattern, size) = (Pattern::new(self.mark), ByteSize::new(block.placed.requested));
        let (at, stream) = (self.address(&block), self.lanes[block.lane].handle);
        self.sim.fill(stream, at, size, pattern).expect("queued");
        self.note_used(block.lane);
        self.blocks.push(StepBlock { written: Some((pattern, size)), ..block });
    }

    fn resize(&mut self) {
        if self.blocks.is_empty() || self.free_ports.is_empty() {
            return;
        }
        let nth = self.pick(self.blocks.len());
        let block = self.blocks.swap_remove(nth);
        let size = 1 + self.chance.below(1 << 14);
        self.begin(|cx| async move {
            let resized = alloc::resize_in_place(cx, block.placed, size).await;
            Ended::Resized(block, resized.ok().flatten())
        });
    }

    fn release(&mut self) {
        let (now, keep) = (self.clock.now(), ByteSize::kib(4 * self.chance.below(16)));
        let decays = self.one_in(2);
        self.begin(|cx| async move {
            let _ = completion::look_for_ends(cx, !decays).await;
            if decays {
                let ages = cx.with(|state| state.aging.ages(now));
                let given = commit::release_granules(cx, u64::MAX, Some(ages)).await;
                cx.with(|state| state.set_looked(now, given.error.is_some()));
            } else {
                let _ = commit::release_down_to(cx, keep).await;
            }
            Ended::Other
        });
    }

    fn enter(&mut self) {
        self.begin(|cx| async move { Ended::Entered(resume::enter(cx).await.is_ok()) });
    }

    fn leave(&mut self) {
        if self.leases > 0 {
            self.leases -= 1;
            self.state().leave();
            self.changes += 1;
        }
    }

    fn sleep(&mut self) {
        let options = SleepOptions { drain: Duration::ZERO, ..SleepOptions::default() };
        let sleeps = self.one_in(2);
        self.begin(|cx| async move {
            if sleeps {
                let _ = suspend::suspend(cx, options).await;
            } else {
                let _ = resume::wake_at_once(cx).await;
            }
            Ended::Other
        });
    }

    /// Moves a block to a free place below it.
    fn move_block(&mut self) {
        if self.blocks.is_empty() {
            return;
        }
        let nth = self.pick(self.blocks.len());
        let (region, id) = (self.blocks[nth].region, self.blocks[nth].placed.id);
        let state = self.state();
        let Some(span) = state.region(region).index.span_of(id) else { return };
        let places = state.region(region).index.blocks();
        let free: Vec<_> = places.filter(|(_, name)| name.is_none()).map(|(at, _)| at).collect();
        let fits = free.iter().find(|at| at.size >= span.size && at.offset < span.offset);
        let Some(to) = fits.map(|at| at.offset) else { return };
        let made = Move { from: span.offset, to, size: span.size };
        let options = CompactOptions::new(region);
        self.begin(|cx| async move {
            let _ = move_block::move_batch(cx, options, &[(id, made)]).await;
            Ended::Other
        });
    }

    fn complete(&mut self) {
        let lane = self.pick(self.lanes.len());
        let (key, waits) = (self.lanes[lane].key, self.one_in(2));
        self.begin(|cx| async move {
            if waits {
                let _ = completion::complete_pending(cx).await;
            } else {
                let _ = completion::mark_end(cx, key).await;
            }
            Ended::Other
        });
    }

    fn set_limit(&mut self) {
        let granules = 8 + self.chance.below(56);
        self.state().limit = ByteSize::new(granules * STEP_GRANULE.get());
        self.changes += 1;
    }

    /// Ends every operation, frees every block, and releases all memory.
    fn finish(&mut self) {
        self.sim.forget_failures();
        self.state().limit = ByteSize::MAX;
        self.changes += 1;
        // An operation ends in a number of steps, waits for one that does, or waits for a lost
        // result.
        let turns_max = if self.is_lossy { 2_000 } else { 200_000 };
        for _ in 0..turns_max {
            if self.running.is_empty() {
                break;
            }
            self.go_on();
        }
        assert!(self.is_lossy || self.running.is_empty(), "an operation never ended");
        if self.is_lossy {
            self.running.clear();
            return;
        }
        while self.leases > 0 {
            self.leave();
        }
        self.enter();
        self.drive();
        for block in std::mem::take(&mut self.blocks) {
            self.check(&block);
            self.free_block(&block);
        }
        self.leave();
        self.begin(|cx| async move {
            completion::complete_all(cx).await.expect("nothing fails");
            let _ = commit::release_down_to(cx, ByteSize::ZERO).await;
            stores::end(cx).await;
            Ended::Other
        });
        self.drive();
        let state = self.state();
        let (live, backed, pending) = (state.live(), state.memory().backed, state.pending());
        assert_eq!((live, backed, pending), (0, 0, 0), "memory is left");
    }

    fn drive(&mut self) {
        while !self.running.is_empty() {
            self.go_on();
        }
    }
}

/// Returns the device of a schedule.
pub(super) fn device(seed: u64, chance: &mut Chance, clock: &ManualClock) -> SimDriver {
    let virtual_memory = chance.below(4) > 0;
    SimDriver::new(SimOptions {
        order: if chance.below(2) == 0 { Order::Lazy } else { Order::Random { seed } },
        granularity: STEP_GRANULE,
        handle_min: STEP_GRANULE,
        capacity: if chance.below(4) == 0 { ByteSize::kib(128) } else { ByteSize::gib(1) },
        context_overhead: ByteSize::ZERO,
        virtual_memory,
        pool: chance.below(2) == 0,
        remap: chance.below(2) == 0,
        clock: clock.clone(),
        ..SimOptions::default()
    })
}

/// Returns the state of a new arena.
pub(super) fn state(sim: &SimDriver, clock: &ManualClock, config: &ArenaConfig) -> ArenaState {
    let segments = reserve::segments(sim, STEP_GRANULE, (config.reserve, None)).expect("addresses");
    let of_driver = (sim.capabilities(), sim.backend());
    ArenaState::new(segments, STEP_GRANULE, config, of_driver, Arc::new(clock.clone()))
}

/// Runs the schedule of a seed.
fn play(seed: u64) -> Totals {
    let mut chance = Chance(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1);
    for _ in 0..4 {
        chance.below(2);
    }
    let clock = ManualClock::new();
    let sim = device(seed, &mut chance, &clock);
    let config = ArenaConfig {
        limit: ByteSize::new((12 + chance.below(52)) * STEP_GRANULE.get()),
        reserve: ByteSize::kib(512),
        decay: DecayTime::Within(10 * SECOND),
        handle_max: ByteSize::new(STEP_GRANULE.get() * (1 + chance.below(4))),
        handles_min: 0,
        ..ArenaConfig::new("steps")
    };
    let mut state = state(&sim, &clock, &config);
    let lanes = (0..3).map(|_| {
        let handle = sim.stream_create().expect("a stream");
        Lane { handle, key: state.streams.enter(handle) }
    });
    let lanes: Vec<_> = lanes.collect();
    let surroundings = StepSurroundings::default();
    let callbacks = Callbacks::new();
    let cx = |_| OpContext::new(&sim, &clock, &surroundings, &callbacks);
    let ports: Vec<_> = (0..OPERATIONS_MAX).map(cx).collect();
    let mut world = World {
        slot: Some(Box::new(state)),
        sim: &sim,
        clock: &clock,
        ports: &ports,
        free_ports: (0..OPERATIONS_MAX).collect(),
        running: Vec::new(),
        blocks: Vec::new(),
        lanes,
        leases: 0,
        changes: 0,
        mark: 0,
        is_lossy: chance.below(4) == 0,
        done: Totals::default(),
        chance,
    };
    for _ in 0..ACTS {
        world.act();
        for _ in 0..1 + world.pick(4) {
            world.go_on();
        }
    }
    world.done.sleeps = world.state().totals.sleeps_total;
    world.done.moves = world.state().totals.moves_total;
    world.finish();
    world.state().validate();
    let World { done, mut slot, is_lossy, .. } = world;
    sim.run_all();
    sim.validate();
    assert_eq!((sim.faults_total(), sim.differences()), (0, 0), "{:?}", sim.faults());
    let mut state = slot.take().expect("no operation makes a step");
    for event in state.streams.take_events() {
        sim.event_destroy(event).expect("an event of the arena");
    }
    if !is_lossy {
        let leaks = sim.leaks();
        assert_eq!((leaks.handles, leaks.segments, leaks.host_stores), (0, 0, 0), "{leaks:?}");
    }
    done
}

fn number(text: Option<&str>) -> Option<u64> {
    text.map(|text| text.parse().expect("a number"))
}

#[test]
fn random_steps_keep_every_byte_and_leave_nothing_behind() {
    let from = number(option_env!("LOWTIDE_STEPS_FROM")).unwrap_or(0);
    let count = number(option_env!("LOWTIDE_STEPS")).unwrap_or(sample(20_000));
    let (mut all, clock) = (Totals::default(), SystemClock::new());
    let start = clock.now();
    for seed in from..from + count {
        let played = std::panic::catch_unwind(|| play(seed));
        let Ok(done) = played else { panic!("seed {seed}") };
        all.steps += done.steps;
        all.calls += done.calls;
        all.lost += done.lost;
        all.sleeps += done.sleeps;
        all.moves += done.moves;
        all.refused += done.refused;
    }
    let seconds = (clock.now() - start).as_secs_f64();
    println!("{count} schedules from seed {from} in {seconds:.1} s: {all:?}");
    assert!(count < 100 || (all.sleeps > 0 && all.moves > 0 && all.refused > 0 && all.lost > 0));
}

/// Regression test: the peak of committed memory was updated after the last of several calls only,
/// so it missed memory that left meanwhile, and all of it if a result was lost.
#[test]
fn the_peak_of_committed_memory_counts_each_commit() {
    let clock = ManualClock::new();
    let sim = device(1, &mut Chance(1), &clock);
    let mut state =
        state(&sim, &clock, &ArenaConfig { reserve: ByteSize::kib(512), ..config(ByteSize::MAX) });
    let (size, origin) = (STEP_GRANULE.get(), RequestOrigin::BUFFER);
    let target = AllocRequest::new(Region::Dynamic, size, 256, origin);
    let (placed, _) = state.place(&target, Search::Usual).expect("room");
    let options = CommitOptions { grow: false, large_handles: true };
    let runs = state.begin_commit(Region::Dynamic, placed.span, STEP_GRANULE.get(), options);
    for run in runs {
        let run = state.region(Region::Dynamic).placed_run(run);
        state.end_commit(run, true);
        state.validate();
    }
}
