//! A device, streams of cudarc's on it, an arena over it, and a life of such an arena in which
//! every function of the table is called.
//!
//! Invariant: a life goes on after an error and to its end, and says each.

use std::fmt::Display;
use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::{CudaContext, CudaStream};
use lowtide::ByteSize;
use lowtide::clock::{Clock, ManualClock};
use lowtide_fake_cuda::{Fake, Guard, Options};
use lowtide_gpu::driver::Driver as _;
use lowtide_gpu::driver::cuda::{CudaDriver, CudaOptions};
use lowtide_gpu::{
    ArenaConfig, Buffer, CompactOptions, DeviceArena, Lane, Region, SleepConfig, SleepOptions,
};

/// A granule, and as many bytes.
pub(crate) const UNIT: usize = 64 << 10;

/// Two devices with small granules, on which work is done as late as may be.
pub(crate) const LAZY: Options = Options {
    order: 0,
    flags: 0,
    seed: 0,
    capacity: 0,
    granularity: UNIT as u64,
    address_space: 0,
    context_overhead: 0,
    devices: 2,
    driver_version: 12_080,
};

/// A device with two streams.
pub(crate) struct Bed {
    pub(crate) driver: Arc<CudaDriver>,
    pub(crate) context: Arc<CudaContext>,
    pub(crate) one: Arc<CudaStream>,
    pub(crate) two: Arc<CudaStream>,
    pub(crate) clock: Arc<ManualClock>,
}

impl Bed {
    pub(crate) fn new() -> Self {
        Self::over(CudaDriver::open(CudaOptions::default()).expect("a device"))
    }

    pub(crate) fn over(driver: CudaDriver) -> Self {
        let ordinal = usize::try_from(driver.device().ordinal).expect("a small number");
        let context = CudaContext::new(ordinal).expect("a context");
        let [one, two] = [(); 2].map(|()| context.new_stream().expect("a stream"));
        Self { driver: Arc::new(driver), context, one, two, clock: Arc::new(ManualClock::new()) }
    }

    pub(crate) fn config() -> ArenaConfig {
        let unit = ByteSize::of(UNIT);
        ArenaConfig {
            limit: unit.checked_mul(24).expect("little"),
            reserve: unit.checked_mul(64).expect("little"),
            sleep: SleepConfig { wake_timeout: Duration::ZERO, ..SleepConfig::default() },
            ..ArenaConfig::new("cuda")
        }
    }

    fn open(&self) -> Result<DeviceArena, lowtide_gpu::DeviceError> {
        let clock = Arc::clone(&self.clock) as Arc<dyn Clock>;
        DeviceArena::open(self.driver.clone(), clock, Self::config())
    }

    pub(crate) fn arena(&self) -> DeviceArena {
        self.open().expect("an arena")
    }

    /// Waits until all work is done and what was freed is idle.
    pub(crate) fn settle(&self, arena: &DeviceArena) {
        // The second look takes out what the lane cached, the third marks what was freed by an
        // event, and the fourth sees it done.
        for _ in 0..4 {
            self.driver.synchronize().expect("done");
            arena.decay(self.clock.now()).expect("looked at");
        }
    }
}

/// An arena on the first device of a fake, with a lane of its first stream.
pub(crate) fn start() -> (Guard, Bed, DeviceArena, Lane) {
    let fake = Fake::start(LAZY);
    let bed = Bed::new();
    let arena = bed.arena();
    let lane = arena.cuda_lane(&bed.one).expect("a lane");
    (fake, bed, arena, lane)
}

/// Ends it: nothing is live, nothing stays and nothing is on record.
#[track_caller]
pub(crate) fn end((fake, bed, arena, lane): (Guard, Bed, DeviceArena, Lane)) {
    drop(lane);
    arena.close().expect("closed");
    drop((arena, bed));
    fake.validate(0);
    fake.assert_clean();
}

/// Writes a value to every byte, in the order of a stream, by a view.
pub(crate) fn write(
    stream: &Arc<CudaStream>,
    buffer: &mut Buffer<u8>,
    value: u8,
) -> Result<(), Box<dyn std::error::Error>> {
    let lease = buffer.enter()?;
    let bytes = vec![value; buffer.len()];
    stream.memcpy_htod(&bytes, &mut buffer.cuda_mut(&lease)?)?;
    Ok(())
}

/// Returns the contents of a buffer, in the order of a stream, by a view.
pub(crate) fn read(
    stream: &Arc<CudaStream>,
    buffer: &Buffer<u8>,
) -> Result<Vec<u8>, Box<dyn std::error::Error>> {
    let lease = buffer.enter()?;
    let bytes = stream.clone_dtoh(buffer.cuda(&lease)?)?;
    stream.synchronize()?;
    Ok(bytes)
}

/// Asserts that every byte has the value, as a stream sees it.
#[track_caller]
pub(crate) fn check(stream: &Arc<CudaStream>, buffer: &Buffer<u8>, value: u8) {
    let bytes = read(stream, buffer).expect("read");
    let other = bytes.iter().find(|&&byte| byte != value);
    assert_eq!((bytes.len(), other), (buffer.len(), None), "not {value} everywhere");
}

/// The errors of a life, each with what was done.
#[derive(Debug, Default)]
pub(crate) struct Errors(pub(crate) Vec<String>);

impl Errors {
    fn note<T, E: Display>(&mut self, what: &str, outcome: Result<T, E>) -> Option<T> {
        outcome.map_err(|error| self.0.push(format!("{what}: {error}"))).ok()
    }
}

/// A life of an arena with two lanes: each step is done whatever became of those before. Calls
/// `between` after each.
pub(crate) fn life(bed: &Bed, between: &mut dyn FnMut()) -> Errors {
    let mut errors = Errors::default();
    let Some(arena) = errors.note("open", bed.open()) else { return errors };
    let lanes = [&bed.one, &bed.two].map(|stream| errors.note("lane", arena.cuda_lane(stream)));
    if let [Some(one), Some(two)] = &lanes {
        between();
        let blocks = on_lanes(bed, &arena, [one, two], &mut errors, between);
        drop(blocks);
    }
    between();
    drop(lanes);
    errors.note("the last wait", bed.driver.synchronize());
    errors.note("purge", arena.purge());
    between();
    errors.note("close", arena.close());
    errors
}

fn on_lanes(
    bed: &Bed,
    arena: &DeviceArena,
    [one, two]: [&Lane; 2],
    errors: &mut Errors,
    between: &mut dyn FnMut(),
) -> Vec<Buffer<u8>> {
    let mut kept: Vec<_> =
        (0..3).filter_map(|_| errors.note("alloc", one.alloc(2 * UNIT, Region::Stable))).collect();
    for (buffer, value) in kept.iter_mut().zip(1..) {
        errors.note("write", write(&bed.one, buffer, value));
    }
    between();
    let (mut stay, mut pieces) = (Vec::new(), Vec::new());
    for _ in 0..4 {
        pieces.extend(errors.note("alloc", one.alloc::<u8>(UNIT, Region::Dynamic)));
        stay.extend(errors.note("alloc", one.alloc::<u8>(UNIT / 2, Region::Dynamic)));
        stay.extend(errors.note("alloc", one.alloc::<u8>(UNIT / 2, Region::Dynamic)));
    }
    for piece in &mut pieces {
        errors.note("write by another stream", write(&bed.two, piece, 9));
    }
    drop(pieces);
    between();
    // After the first lane's work, by an event.
    errors.note("alloc on another lane", two.alloc::<u8>(UNIT, Region::Dynamic));
    errors.note("the end of a run", one.end_run());
    for _ in 0..2 {
        errors.note("wait", bed.driver.synchronize());
        errors.note("decay", arena.decay(bed.clock.now()));
    }
    // More than the limit leaves: the rest is idle, in pieces.
    let moved =
        errors.note("alloc behind which pieces move", one.alloc(12 * UNIT, Region::Dynamic));
    drop::<Option<Buffer<u8>>>(moved);
    between();
    // Without it the driver has no way back to the same addresses, and says so in a typed error.
    if arena.capabilities().virtual_memory {
        let options = SleepOptions { drain: Duration::ZERO, ..SleepOptions::default() };
        errors.note("sleep", arena.sleep(options));
    }
    between();
    for (buffer, value) in kept.iter().zip(1..) {
        if let Some(bytes) = errors.note("read", read(&bed.two, buffer))
            && bytes.iter().any(|&byte| byte != value)
        {
            errors.0.push("read: other contents".to_owned());
        }
    }
    between();
    let mut stay: Vec<_> = stay.into_iter().step_by(3).collect();
    errors.note("compact", arena.compact(CompactOptions::new(Region::Dynamic), |_| {}));
    between();
    if let Some(first) = kept.first_mut() {
        errors.note("resize", first.resize(5 * UNIT));
    }
    kept.append(&mut stay);
    kept
}
