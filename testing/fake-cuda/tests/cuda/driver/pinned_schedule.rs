//! Random schedules of copies with page-locked memory, in safe code and with unmodified cudarc,
//! over the fake of the driver's library.
//!
//! A schedule allocates, writes, reads, copies, waits, drops and frees pinned buffers on one or two
//! streams, with cudarc's tracking of events on and off, with failing calls, and with captures that
//! are replayed. A model knows which bytes every buffer holds. If a buffer or the device holds
//! others, they were written or read too early or too late: a race.
//!
//! Invariant: a schedule depends on its seed alone.

use std::fmt;
use std::sync::Arc;

use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use cudarc::driver::{CudaContext, CudaGraph, CudaStream};
use lowtide::ByteSize;
use lowtide::clock::ManualClock;
use lowtide_fake_cuda::{Guard, Options};
use lowtide_gpu::driver::cuda::{CudaDriver, CudaOptions};
use lowtide_gpu::{
    ArenaConfig, Buffer, DeviceArena, DeviceError, Lane, Lease, PinnedBuffer, PinnedConfig,
    PinnedCopy, PinnedPool, Region,
};

use crate::chance::Chance;

/// Bytes of every device buffer, and the most of a pinned one.
const LEN: usize = 4 << 10;

/// The unit of the model in bytes: all bytes of a part are the same.
const PART: usize = 256;

/// Acts of one schedule.
const ACTS: u64 = 60;

/// Calls that a schedule lets fail, with a code that leaves the context usable.
const FAILING: [&std::ffi::CStr; 9] = [
    c"cuEventCreate",
    c"cuEventRecord",
    c"cuEventQuery",
    c"cuEventSynchronize",
    c"cuStreamSynchronize",
    c"cuStreamWaitEvent",
    c"cuStreamIsCapturing",
    c"cuMemcpyHtoDAsync_v2",
    c"cuMemcpyDtoHAsync_v2",
];

/// The figures of a schedule.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Done {
    pub(crate) copies: u64,
    pub(crate) quarantined_bytes: u64,
    pub(crate) failed_calls: u64,
    pub(crate) launches: u64,
    pub(crate) reads: u64,
    pub(crate) races: u64,
}

impl Done {
    pub(crate) fn add(&mut self, other: Self) {
        self.copies += other.copies;
        self.quarantined_bytes += other.quarantined_bytes;
        self.failed_calls += other.failed_calls;
        self.launches += other.launches;
        self.reads += other.reads;
        self.races += other.races;
    }
}

/// Races that a schedule found, with its acts.
#[derive(Debug)]
pub(crate) struct Race {
    pub(crate) seed: u64,
    pub(crate) done: Done,
    found: String,
    acts: Vec<String>,
}

impl fmt::Display for Race {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "seed {}: {} of {:?}", self.seed, self.found, self.done)?;
        self.acts.iter().try_for_each(|act| writeln!(f, "  {act}"))
    }
}

impl Chance {
    fn below(&mut self, bound: usize) -> usize {
        usize::try_from(self.bits() % bound.max(1) as u64).expect("small")
    }
}

/// The byte in each part; none if a call failed, so that any may be there.
type Contents = Vec<Option<u8>>;

fn all_of(byte: u8, len: usize) -> Contents {
    vec![Some(byte); len / PART]
}

/// The first part with other bytes than it should have: that byte and the one found.
fn different(contents: &Contents, bytes: &[u8]) -> Option<(u8, u8)> {
    contents.iter().zip(bytes.chunks(PART)).find_map(|(byte, part)| {
        let byte = (*byte)?;
        Some((byte, *part.iter().find(|&&found| found != byte)?))
    })
}

/// A pinned buffer and what is in it.
struct Host {
    buffer: PinnedBuffer<u8>,
    holds: Contents,
}

/// A copy on a lane and what its buffer then holds.
struct Queued {
    copy: PinnedCopy<u8>,
    holds: Contents,
}

/// A stream, its lane, and a device buffer that only its work uses.
struct Side {
    stream: Arc<CudaStream>,
    lane: Lane,
    device: Buffer<u8>,
    holds: Contents,
    is_capturing: bool,
    graph: Option<CudaGraph>,
}

/// A device on which many schedules run, one after the other.
pub(crate) struct Bed<'a> {
    fake: &'a Guard,
    plain: bool,
    driver: Arc<CudaDriver>,
    context: Arc<CudaContext>,
    arena: DeviceArena,
}

impl<'a> Bed<'a> {
    /// Resets the library and opens a device on which work is done in this order: 0 as late as
    /// possible, 1 at random.
    pub(crate) fn new(fake: &'a Guard, order: u32, seed: u64) -> Self {
        fake.reset(Options { order, seed, devices: 1, ..Options::default() });
        let driver = Arc::new(CudaDriver::open(CudaOptions::default()).expect("a device"));
        let context = CudaContext::new(0).expect("the same context");
        let config = ArenaConfig::new("schedules");
        let arena = DeviceArena::open(driver.clone(), Arc::new(ManualClock::new()), config);
        Self { fake, plain: false, driver, context, arena: arena.expect("an arena") }
    }

    /// Gives cudarc plain slices of the buffers, as safe code once could: such schedules race.
    pub(crate) fn with_plain_slices(self) -> Self {
        Self { plain: true, ..self }
    }

    /// Runs the schedule of a seed.
    ///
    /// # Errors
    /// If it raced.
    pub(crate) fn run(&self, seed: u64) -> Result<Done, Race> {
        let mut chance = Chance(seed);
        // Small segments, so that freed blocks are soon another's, and segments soon idle.
        let segment = ByteSize::kib(64);
        let pool = PinnedConfig { segment, ..PinnedConfig::new("schedules") };
        let pool = PinnedPool::open(self.driver.clone(), Arc::new(ManualClock::new()), pool)
            .expect("a pool");
        let sides = (0..1 + chance.below(2)).map(|_| self.side()).collect();
        let before = self.fake.faults().matches(GONE).count();
        let mut run = Run {
            bed: self,
            chance,
            pool,
            sides,
            hosts: Vec::new(),
            queued: Vec::new(),
            value: 0,
            unasked: false,
            done: Done::default(),
            found: Vec::new(),
            acts: Vec::new(),
        };
        for _ in 0..ACTS {
            run.act();
        }
        run.end();
        let Run { pool, mut found, mut done, acts, .. } = run;
        let gone = self.fake.faults().matches(GONE).count() - before;
        found.extend((0..gone).map(|_| "memory was freed under a queued copy".to_owned()));
        done.quarantined_bytes = pool.snapshot().quarantined.get();
        done.races = found.len() as u64;
        pool.validate();
        drop(pool);
        if found.is_empty() {
            Ok(done)
        } else {
            Err(Race { seed, done, found: found.join("; "), acts })
        }
    }

    fn side(&self) -> Side {
        let stream = self.context.new_stream().expect("a stream");
        let lane = self.arena.cuda_lane(&stream).expect("a lane");
        let device: Buffer<u8> = lane.alloc(LEN, Region::Dynamic).expect("room");
        // Now, since cudarc panics if it cannot create the events of a view.
        let lease = lane.enter().expect("awake");
        let _ = device.cuda(&lease).expect("a view");
        drop(lease);
        let holds = vec![None; LEN / PART];
        Side { stream, lane, device, holds, is_capturing: false, graph: None }
    }
}

/// The library's name for host memory that was freed under a queued copy.
const GONE: &str = "HostGoneBeforeDone";

struct Run<'a> {
    bed: &'a Bed<'a>,
    chance: Chance,
    pool: PinnedPool,
    sides: Vec<Side>,
    hosts: Vec<Host>,
    queued: Vec<Queued>,
    value: u8,
    /// `true` if the query for a stream that captures may fail: cudarc then copies nothing.
    unasked: bool,
    done: Done,
    found: Vec<String>,
    acts: Vec<String>,
}

impl Run<'_> {
    fn act(&mut self) {
        match self.chance.below(100) {
            0..14 => self.alloc(),
            14..22 => self.write(),
            22..30 => self.read(),
            30..40 => self.cudarc_copy(true),
            40..50 => self.cudarc_copy(false),
            50..58 => self.lane_copy(true),
            58..66 => self.lane_copy(false),
            66..72 => self.wait(),
            72..76 => self.drop_copy(),
            76..80 => self.drop_buffer(),
            80..84 => self.reclaim(),
            84..88 => self.look_at_device(),
            88..91 => self.track(),
            91..94 => self.fail(),
            94..98 => self.capture(),
            _ => self.launch(),
        }
        if self.chance.below(4) == 0 {
            let count = self.chance.bits() % 3;
            self.bed.fake.run(0, count);
        }
    }

    fn say(&mut self, act: impl Into<String>) {
        self.acts.push(act.into());
    }

    fn fresh(&mut self) -> u8 {
        self.value = self.value.wrapping_add(1);
        self.value
    }

    /// One of the buffers, taken out.
    fn take(&mut self) -> Option<Host> {
        let nth = self.chance.below(self.hosts.len());
        (nth < self.hosts.len()).then(|| self.hosts.swap_remove(nth))
    }

    fn side(&mut self) -> usize {
        self.chance.below(self.sides.len())
    }

    fn alloc(&mut self) {
        let (len, byte) = (PART << self.chance.below(5), self.fresh());
        let Ok(mut buffer) = self.pool.alloc::<u8>(len) else { return };
        let _ = buffer.fill(byte);
        self.say(format!("alloc {len} bytes of {byte}"));
        self.hosts.push(Host { buffer, holds: all_of(byte, len) });
    }

    fn write(&mut self) {
        let Some(mut host) = self.take() else { return };
        let byte = self.fresh();
        let done = host.buffer.fill(byte);
        self.say(format!("write {byte}: {done:?}"));
        if done.is_ok() {
            host.holds = all_of(byte, host.buffer.len());
        }
        self.hosts.push(host);
    }

    fn read(&mut self) {
        let Some(host) = self.take() else { return };
        self.check_host(&host);
        self.hosts.push(host);
    }

    fn check_host(&mut self, host: &Host) {
        let found = host.buffer.to_vec();
        self.say(format!("read: {:?}", found.as_ref().map(|bytes| bytes.first().copied())));
        let Ok(bytes) = found else { return };
        self.done.reads += 1;
        if let Some((byte, other)) = different(&host.holds, &bytes) {
            self.found.push(format!("a buffer of {byte} holds {other}"));
        }
    }

    /// A copy by cudarc's own calls.
    fn cudarc_copy(&mut self, to_device: bool) {
        let (Some(mut host), at) = (self.take(), self.side()) else { return };
        let forget = self.chance.below(16) == 0;
        let plain = self.bed.plain;
        let side = &mut self.sides[at];
        let len = host.buffer.len();
        let outcome = (|| -> Result<(), Box<dyn std::error::Error>> {
            let lease = side.lane.enter()?;
            if plain {
                return plain_copy(side, &lease, &mut host.buffer, to_device);
            }
            let mut view = host.buffer.cuda(&side.lane)?;
            if to_device {
                let mut device = side.device.cuda_mut(&lease)?;
                side.stream.memcpy_htod(&view, &mut device)?;
            } else {
                let device = side.device.cuda(&lease)?;
                side.stream.memcpy_dtoh(&device.slice(..len), &mut view)?;
            }
            if forget {
                #[expect(clippy::mem_forget, reason = "safe code may")]
                std::mem::forget(view);
            }
            Ok(())
        })();
        self.done.copies += 1;
        // While the stream captures, cudarc's call returns and nothing is copied. Nothing is copied
        // either if it cannot be asked whether it captures.
        if !side.is_capturing {
            let (from, to) = if to_device {
                (&host.holds, &mut side.holds)
            } else {
                (&side.holds, &mut host.holds)
            };
            let is_done = outcome.is_ok() && !self.unasked;
            for (to, from) in to.iter_mut().zip(from) {
                *to = from.filter(|_| is_done);
            }
        }
        let error = outcome.map_err(|error| error.to_string());
        self.say(format!("cudarc copies {len} bytes, to device {to_device}: {error:?}"));
        self.hosts.push(host);
    }

    /// A copy by the lane, which owns the buffer.
    fn lane_copy(&mut self, to_device: bool) {
        let (Some(host), at) = (self.take(), self.side()) else { return };
        let Host { buffer, mut holds } = host;
        let side = &mut self.sides[at];
        let len = buffer.len();
        let started = if to_device {
            side.lane.copy_to_device(buffer, &mut side.device)
        } else {
            side.lane.copy_to_host(&mut side.device, buffer)
        };
        self.done.copies += 1;
        let said = started.as_ref().map(|_| ()).map_err(|refused| refused.error.clone());
        match started {
            Ok(copy) => {
                let parts = side.holds.iter_mut().zip(&mut holds);
                parts.for_each(
                    |(device, host)| {
                        if to_device { *device = *host } else { *host = *device }
                    },
                );
                self.queued.push(Queued { copy, holds });
            }
            Err(refused) => {
                // It is not known if a call that failed copied anything, except for a capture.
                if !matches!(refused.error, DeviceError::Capturing { .. }) {
                    let to = if to_device { &mut side.holds[..len / PART] } else { &mut holds };
                    to.fill(None);
                }
                self.hosts.push(Host { buffer: *refused.value, holds });
            }
        }
        self.say(format!("lane copies {len} bytes, to device {to_device}: {said:?}"));
    }

    fn wait(&mut self) {
        let nth = self.chance.below(self.queued.len());
        if nth < self.queued.len() {
            let queued = self.queued.swap_remove(nth);
            self.wait_for(queued);
        }
    }

    fn wait_for(&mut self, Queued { copy, holds }: Queued) {
        let waited = copy.wait();
        self.say(format!("wait: {:?}", waited.as_ref().map(|_| ())));
        if let Ok(buffer) = waited {
            let host = Host { buffer, holds };
            self.check_host(&host);
            self.hosts.push(host);
        }
    }

    fn drop_copy(&mut self) {
        let nth = self.chance.below(self.queued.len());
        if nth < self.queued.len() {
            let queued = self.queued.swap_remove(nth);
            if self.chance.below(8) == 0 {
                #[expect(clippy::mem_forget, reason = "safe code may")]
                std::mem::forget(queued.copy);
                return self.say("forget a copy");
            }
            drop(queued);
            self.say("drop a copy");
        }
    }

    fn drop_buffer(&mut self) {
        drop(self.take());
        self.say("drop a buffer");
    }

    fn reclaim(&mut self) {
        let outcome = match self.chance.below(3) {
            0 => self.pool.maintain(),
            1 => self.pool.trim(ByteSize::kib(64)),
            _ => self.pool.purge(),
        };
        self.say(format!("reclaim: {outcome:?}"));
    }

    fn look_at_device(&mut self) {
        let at = self.side();
        self.check_device(at);
    }

    fn check_device(&mut self, at: usize) {
        let side = &self.sides[at];
        let found = (|| -> Result<Vec<u8>, Box<dyn std::error::Error>> {
            let lease = side.lane.enter()?;
            let bytes = side.stream.clone_dtoh(side.device.cuda(&lease)?)?;
            side.stream.synchronize()?;
            Ok(bytes)
        })();
        let expected = side.holds.clone();
        let first = found.as_ref().map(|bytes| bytes[0]).map_err(ToString::to_string);
        self.say(format!("look at the device: {first:?}"));
        let Ok(bytes) = found else { return };
        self.done.reads += 1;
        if let Some((byte, other)) = different(&expected, &bytes) {
            self.found.push(format!("device memory of {byte} holds {other}"));
        }
    }

    fn track(&mut self) {
        let on = self.chance.below(2) == 0;
        self.say(format!("tracking of events: {on}"));
        set_tracking(&self.bed.context, on);
    }

    fn fail(&mut self) {
        let name = FAILING[self.chance.below(FAILING.len())];
        let nth = 1 + self.chance.bits() % 2;
        self.say(format!("call {nth} of {name:?} will fail"));
        self.bed.fake.fail(name, nth, 999);
        self.unasked |= name == c"cuStreamIsCapturing";
        self.done.failed_calls += 1;
    }

    /// Captures some acts, and a setting of the device buffer to zero.
    fn capture(&mut self) {
        let at = self.side();
        // With it, cudarc's waits for earlier events invalidate nearly every capture.
        set_tracking(&self.bed.context, self.chance.below(4) == 0);
        let side = &mut self.sides[at];
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        side.is_capturing = side.stream.begin_capture(mode).is_ok();
        if !side.is_capturing {
            return;
        }
        self.acts.push(format!("begin a capture on stream {at}"));
        let side = &mut self.sides[at];
        let lease = side.lane.enter().expect("awake");
        if let Ok(mut view) = side.device.cuda_mut(&lease) {
            let _ = side.stream.memset_zeros(&mut view);
        }
        drop(lease);
        for _ in 0..self.chance.below(3) {
            match self.chance.below(8) {
                0 | 1 => self.cudarc_copy(true),
                2 => self.cudarc_copy(false),
                3 => self.lane_copy(true),
                4 => self.lane_copy(false),
                5 => self.drop_copy(),
                6 => self.drop_buffer(),
                _ => self.write(),
            }
        }
        self.end_capture(at);
    }

    fn end_capture(&mut self, at: usize) {
        let side = &mut self.sides[at];
        // The first call may answer an error that was parked, and end nothing.
        for _ in 0..4 {
            let _ = side.stream.context().check_err();
            match side.stream.end_capture(CUgraphInstantiate_flags(0)) {
                Ok(graph) => {
                    side.graph = graph;
                    side.is_capturing = false;
                }
                Err(_) => side.is_capturing = side.stream.capture_status().is_ok_and(is_active),
            }
            if !side.is_capturing {
                break;
            }
        }
        let sound = side.graph.is_some();
        self.say(format!("end a capture: {sound}"));
    }

    fn launch(&mut self) {
        let at = self.side();
        let side = &mut self.sides[at];
        let Some(graph) = &side.graph else { return };
        let launched = graph.launch();
        // It zeroes the buffer if that was captured: what is there is no longer known.
        side.holds.fill(None);
        self.done.launches += u64::from(launched.is_ok());
        self.say(format!("launch: {launched:?}"));
    }

    /// Looks at everything, and drops it.
    fn end(&mut self) {
        self.bed.fake.forget_failures();
        for at in 0..self.sides.len() {
            // Once more: a captured copy would do it to memory that is another's now.
            if let Some(graph) = &self.sides[at].graph {
                let _ = self.bed.context.check_err();
                let launched = graph.launch();
                self.sides[at].holds.fill(None);
                self.done.launches += u64::from(launched.is_ok());
            }
        }
        let _ = self.bed.context.check_err();
        for queued in std::mem::take(&mut self.queued) {
            self.wait_for(queued);
        }
        for at in 0..self.sides.len() {
            self.check_device(at);
        }
        // What is queued and was forgotten is done before the last look.
        self.bed.fake.run(0, u64::MAX);
        for host in std::mem::take(&mut self.hosts) {
            self.check_host(&host);
        }
        set_tracking(&self.bed.context, true);
        self.sides.clear();
        let _ = self.bed.context.check_err();
    }
}

/// A copy by cudarc with a plain slice, which it does not wait for.
#[expect(unsafe_code, reason = "what safe code once could do")]
fn plain_copy(
    side: &mut Side,
    lease: &Lease,
    buffer: &mut PinnedBuffer<u8>,
    to_device: bool,
) -> Result<(), Box<dyn std::error::Error>> {
    // SAFETY: not kept, on purpose: the fake copies while this thread waits, and nothing else runs.
    let slice = unsafe { buffer.as_mut_slice() }?;
    if to_device {
        side.stream.memcpy_htod(&*slice, &mut side.device.cuda_mut(lease)?)?;
    } else {
        let len = slice.len();
        side.stream.memcpy_dtoh(&side.device.cuda(lease)?.slice(..len), slice)?;
    }
    Ok(())
}

fn is_active(status: cudarc::driver::sys::CUstreamCaptureStatus) -> bool {
    status != cudarc::driver::sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE
}

#[expect(unsafe_code, reason = "cudarc's switch of its tracking is unsafe")]
fn set_tracking(context: &CudaContext, on: bool) {
    if on {
        // SAFETY: each side's buffer is used by one stream only.
        unsafe { context.enable_event_tracking() };
    } else {
        // SAFETY: as above.
        unsafe { context.disable_event_tracking() };
    }
}
