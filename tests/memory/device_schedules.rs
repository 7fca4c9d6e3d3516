//! Random schedules over several simulated devices of one `Memory`, of which one is lost at a
//! random point. Each schedule runs twice, with the loss and without: a device that is not lost
//! must get the same calls, and give the same answers, in both.
//!
//! The `Memory` runs without threads, and its work is done between the steps, so a seed repeats.
#![expect(unsafe_code, reason = "a lane is of a stream that the caller vouches for")]

use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Duration;

use lowtide::clock::ManualClock;
use lowtide::config::Profile;
use lowtide::decay::DecayTime;
use lowtide::device::driver::{DeviceUuid, Driver, StreamHandle};
use lowtide::device::{Buffer, DeviceArena, DeviceError, Lane, Region, SleepOptions};
use lowtide::memory::{DeviceSelector, MemoryError};
use lowtide::{ByteSize, Memory, Permit};
use lowtide_cuda_sim::{DriverCosts, Order, SimDriver, SimError, SimOptions};

use self::chance::Chance;

#[path = "../../crates/admission/tests/admission/sim/chance.rs"]
#[allow(dead_code, reason = "others use more of it")]
pub(crate) mod chance;

/// The steps of a schedule.
const STEPS: usize = 120;
/// The most blocks of an arena, and reservations of a device.
const HELD_MAX: usize = 8;
const ARENAS: usize = 2;
/// The most calls that a lost device may get after the call that reported the loss: those that undo
/// that call.
const UNDOES_MAX: u64 = 8;

/// The loss of a device at a step.
#[derive(Clone, Copy, Debug)]
struct Loss {
    device: usize,
    at: usize,
    /// `None`: lost between two calls. Otherwise this call from then on fails and loses it.
    nth_call: Option<u64>,
    error: SimError,
}

impl Loss {
    fn of(seed: u64, devices: usize) -> Self {
        let mut chance = Chance::new(!seed);
        let errors = [
            SimError::EccUncorrectable,
            SimError::IllegalAddress,
            SimError::LaunchFailed,
            SimError::Code(709),
        ];
        Self {
            device: chance.below(devices),
            at: chance.below(STEPS),
            nth_call: (chance.below(2) == 0).then(|| chance.below(40) as u64),
            error: errors[chance.below(4)],
        }
    }
}

struct Place {
    arena: DeviceArena,
    lane: Lane,
    stream: StreamHandle,
    blocks: Vec<Buffer<u8>>,
}

struct World {
    clock: ManualClock,
    sims: Vec<Arc<SimDriver>>,
    memory: Memory,
    steps: Box<dyn FnMut() -> bool>,
    /// By device.
    places: Vec<Vec<Place>>,
    held: Vec<Vec<Permit>>,
    /// The answers of each device.
    answers: Vec<String>,
    faults: Vec<String>,
}

fn uuid(device: usize) -> DeviceUuid {
    DeviceUuid::new([u8::try_from(device).expect("few devices") + 1; 16])
}

impl World {
    fn new(seed: u64, devices: usize) -> Self {
        let clock = ManualClock::new();
        let sim = |device: usize| {
            Arc::new(SimDriver::new(SimOptions {
                order: Order::Random { seed: seed ^ device as u64 },
                address_base: (1 + 64 * device as u64) << 36,
                address_space: ByteSize::gib(1024),
                capacity: ByteSize::gib(4),
                ordinal: u32::try_from(device).ok(),
                uuid: Some(uuid(device)),
                costs: DriverCosts::zero(),
                clock: clock.clone(),
                ..SimOptions::default()
            }))
        };
        let sims: Vec<_> = (0..devices).map(sim).collect();
        let builder = Memory::builder()
            .clock(Arc::new(clock.clone()))
            .profile(Profile::Throughput) // which purges no heap while nothing is short
            .memory_limit(ByteSize::gib(1 << 20))
            .drivers(sims.iter().map(|sim| Arc::clone(sim) as Arc<dyn Driver>))
            .device_limit(ByteSize::gib(1))
            .device_decay(DecayTime::from_millis(1_000))
            .device_sleep_after(Some(Duration::from_secs(3)));
        let (memory, steps) = builder.start_stepped().expect("starts");
        let places = |(device, sim): (usize, &Arc<SimDriver>)| {
            let place = |nth| {
                let (on, name) = (DeviceSelector::Uuid(uuid(device)), format!("{device}.{nth}"));
                let arena = memory.devices().on(on).open_arena(&name).expect("opens");
                let stream = sim.stream_create().expect("a stream");
                // SAFETY: the stream is of the arena's device, and destroyed after the lane.
                let lane = unsafe { arena.lane(stream) }.expect("a lane");
                Place { arena, lane, stream, blocks: Vec::new() }
            };
            (0..ARENAS).map(place).collect()
        };
        let places = sims.iter().enumerate().map(places).collect();
        let held = (0..devices).map(|_| Vec::new()).collect();
        let (answers, faults) = (vec![String::new(); devices], Vec::new());
        let steps = Box::new(steps);
        Self { clock, sims, memory, steps, places, held, answers, faults }
    }

    /// Notes an answer. Only a device that is lost may report a loss.
    fn note<T>(&mut self, device: usize, act: &str, answer: Result<T, DeviceError>) -> Option<T> {
        let is_lost = self.sims[device].lost().is_some();
        let answers = &mut self.answers[device];
        match &answer {
            Ok(_) => writeln!(answers, "{act}").expect("a string"),
            Err(error) => writeln!(answers, "{act}: {error:?}").expect("a string"),
        }
        if let Err(DeviceError::Driver(error)) = &answer
            && !(is_lost && error.is_context_lost())
        {
            self.faults.push(format!("{act} on device {device}: {error}"));
        }
        answer.ok()
    }

    /// One step. Draws the same numbers whatever the answers are.
    fn step(&mut self, chance: &mut Chance) {
        let device = chance.below(self.sims.len());
        let (nth, act) = (chance.below(ARENAS), chance.below(16));
        let (size, pick) = (1 + chance.below(12 << 20), chance.below(64));
        let place = &mut self.places[device][nth];
        match act {
            0..=3 => {
                if place.blocks.len() == HELD_MAX {
                    place.blocks.remove(0);
                }
                let answer = place.lane.alloc::<u8>(size, Region::Dynamic);
                let block = self.note(device, "alloc", answer);
                self.places[device][nth].blocks.extend(block);
            }
            4..=5 => {
                if !place.blocks.is_empty() {
                    let at = pick % place.blocks.len();
                    drop(place.blocks.swap_remove(at));
                }
            }
            6 => {
                let answer = place.lane.enter().map(drop);
                self.note(device, "enter", answer);
            }
            7 => {
                let answer = place.arena.sleep(SleepOptions::default()).map(drop);
                self.note(device, "sleep", answer);
            }
            8 => {
                let limit = ByteSize::mib(200 + 16 * pick as u64);
                place.arena.set_limit(limit);
            }
            9 => {
                let keep = ByteSize::mib(pick as u64);
                let answer = place.arena.trim(keep).map(drop);
                self.note(device, "trim", answer);
            }
            10 => self.reserve(device, ByteSize::of(size)),
            11 => {
                if !self.held[device].is_empty() {
                    let at = pick % self.held[device].len();
                    drop(self.held[device].swap_remove(at));
                }
            }
            12 => self.open_and_close(device, size),
            _ => self.work(Duration::from_millis(100 + 30 * pick as u64)),
        }
    }

    /// Reserves bytes in the budget of a device.
    fn reserve(&mut self, device: usize, bytes: ByteSize) {
        if self.held[device].len() == HELD_MAX {
            drop(self.held[device].remove(0));
        }
        let is_lost = self.sims[device].lost().is_some();
        let ordinal = DeviceSelector::Ordinal(u32::try_from(device).expect("few devices"));
        match self.memory.devices().on(ordinal).reserve(bytes) {
            Ok((_, permit)) => self.held[device].push(permit),
            Err(MemoryError::DeviceLost { device: name, .. })
                if is_lost && name == uuid(device).to_string() => {}
            Err(error) => self.faults.push(format!("reserve on device {device}: {error}")),
        }
    }

    /// Opens an arena, uses it and closes it.
    fn open_and_close(&mut self, device: usize, size: usize) {
        let name = format!("{device}.more");
        let opened = self.memory.devices().on(DeviceSelector::Uuid(uuid(device))).open_arena(&name);
        let arena = match opened {
            Ok(arena) => arena,
            // Lost, or the first to be told, or an arena that is lost before it was closed.
            Err(MemoryError::OpenArena { cause, .. })
                if self.sims[device].lost().is_some()
                    && matches!(
                        *cause,
                        MemoryError::DeviceLost { .. } | MemoryError::Device(_)
                    ) =>
            {
                return;
            }
            Err(MemoryError::DuplicateArena { .. }) if self.sims[device].lost().is_some() => return,
            Err(error) => return self.faults.push(format!("open on device {device}: {error}")),
        };
        let answer = arena.alloc::<u8>(size, Region::Stable).map(drop);
        self.note(device, "alloc in another", answer);
        let answer = arena.close();
        self.note(device, "close", answer);
        drop(arena);
        // Closed arenas are dropped now, and not when some device's memory is due to decay.
        let _ = self.memory.devices().on(DeviceSelector::Number(99)).open_arena("none");
    }

    /// Lets time pass, and does the work of the `Memory`.
    fn work(&mut self, time: Duration) {
        self.clock.advance(time);
        if !(self.steps)() {
            self.faults.push("the work of the memory did not end".to_owned());
        }
    }

    /// Checks what is known of a loss once the memory has worked.
    fn check_loss(&mut self) {
        // Twice: the last job of the first may be told of the loss.
        self.work(Duration::from_secs(1));
        self.work(Duration::from_secs(1));
        let lost: Vec<_> = self.sims.iter().map(|sim| sim.lost().is_some()).collect();
        for (device, status) in self.memory.devices().all().iter().enumerate() {
            let name = uuid(device).to_string();
            let reports = self.memory.report().diagnostics();
            let reports = reports.iter().filter(|it| it.text.contains(&format!("{name} is lost")));
            let found = (status.lost.is_some(), status.name == name, reports.count());
            if found != (lost[device], true, usize::from(lost[device])) {
                self.faults
                    .push(format!("device {device} is shown as {found:?}, {:?}", status.lost));
            }
            if lost[device] && status.memory.is_some() {
                self.faults.push(format!("the lost device {device} has {:?}", status.memory));
            }
        }
        let roomiest = self.memory.devices().on(DeviceSelector::MostHeadroom).status();
        if !roomiest.is_ok_and(|status| !lost[status.number as usize]) {
            self.faults.push("no device with room was found".to_owned());
        }
    }

    /// Releases everything. Healthy devices must be empty then, and budgets balanced.
    fn end(mut self) -> Trace {
        self.check_loss();
        self.held.clear();
        for (device, places) in std::mem::take(&mut self.places).into_iter().enumerate() {
            for Place { arena, lane, stream, blocks } in places {
                drop(blocks);
                drop(lane);
                let answer = arena.close();
                self.note(device, "close", answer);
                let sim = &self.sims[device];
                if sim.lost().is_none()
                    && let Err(error) = sim.stream_destroy(stream)
                    && !error.is_context_lost()
                {
                    self.faults.push(format!("stream of device {device}: {error}"));
                }
            }
        }
        self.work(Duration::from_secs(1));
        for status in self.memory.devices().all() {
            let reserved = status.budget.map(|budget| budget.reserved);
            if reserved != Some(ByteSize::ZERO) {
                self.faults.push(format!("{} has {reserved:?} reserved", status.name));
            }
        }
        let held = self.memory.shutdown_blocking(Duration::ZERO).requests;
        if held != 0 {
            self.faults.push(format!("{held} reservations are held"));
        }
        drop((self.memory, self.steps));
        let mut hashes = Vec::new();
        for (device, sim) in self.sims.iter().enumerate() {
            let (leaks, breaches) = (sim.leaks(), sim.faults_total());
            if breaches > 0 || sim.lost().is_none() && !leaks.is_empty() {
                self.faults.push(format!("device {device}: {breaches} breaches, {leaks:?}"));
            }
            if sim.calls_after_loss() > UNDOES_MAX {
                let calls = sim.calls_after_loss();
                self.faults.push(format!("device {device}: {calls} calls after its loss"));
            }
            hashes.push(sim.log_hash());
        }
        let lost = self.sims.iter().position(|sim| sim.lost().is_some());
        Trace { hashes, answers: self.answers, faults: self.faults, lost }
    }
}

/// The results that are compared.
struct Trace {
    /// Of all calls and work of each device.
    hashes: Vec<u64>,
    answers: Vec<String>,
    faults: Vec<String>,
    lost: Option<usize>,
}

fn run(seed: u64, devices: usize, loss: Option<Loss>) -> Trace {
    let (mut world, mut chance) = (World::new(seed, devices), Chance::new(seed));
    for at in 0..STEPS {
        if let Some(loss) = loss.filter(|loss| loss.at == at) {
            let sim = &world.sims[loss.device];
            match loss.nth_call {
                Some(nth) => sim.fail_nth(None, nth, loss.error),
                None => sim.poison(loss.error),
            }
        }
        world.step(&mut chance);
    }
    world.end()
}

/// Runs the schedule of a seed with a loss and without. Returns the faults, each with the seed, and
/// whether a device was lost.
pub(crate) fn faults(seed: u64, devices: usize) -> (Vec<String>, bool) {
    let loss = Loss::of(seed, devices);
    let (calm, rough) = (run(seed, devices, None), run(seed, devices, Some(loss)));
    let mut faults = calm.faults;
    faults.extend(rough.faults);
    for device in (0..devices).filter(|device| rough.lost != Some(*device)) {
        if calm.answers[device] != rough.answers[device] {
            faults.push(format!("device {device} gives other answers"));
        } else if calm.hashes[device] != rough.hashes[device] {
            faults.push(format!("device {device} gets other calls"));
        }
    }
    let name = |fault: &mut String| *fault = format!("seed {seed}, {devices} devices: {fault}");
    faults.iter_mut().for_each(name);
    (faults, rough.lost.is_some())
}
