//! One cycle of the calls, each timed, with an optional load on another stream.
//!
//! It records the calls made, and the device time between the load's events. It prints nothing and decides nothing.
//!
//! Invariant: a call is recorded only if the load's kernels were still running when it began.
#![expect(clippy::disallowed_methods, reason = "a benchmark reads the clock")]
#![expect(unsafe_code, reason = "calling the driver")]

use std::ffi::c_void;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cudarc::driver::{CudaEvent, CudaFunction, CudaStream, LaunchConfig, PushKernelArg, sys};
use cudarc::nvrtc::Ptx;

use super::super::cases::{Fault, Outcome};
use super::gpu::{Gpu, Physical, Range};

/// The bytes that the load's kernel works on: a power of two.
const LOAD_BYTES: usize = 64 << 20;

/// The time that the first kernel of a load has to start.
const PATIENCE: Duration = Duration::from_secs(5);

/// `cuEventElapsedTime`; cudarc calls a version of it that drivers before 12.8 lack.
type Elapsed = unsafe extern "C" fn(*mut f32, sys::CUevent, sys::CUevent) -> sys::CUresult;

fn elapsed() -> Result<Elapsed, Fault> {
    // SAFETY: the name is a C string; the library is loaded already, and never closed.
    let library = unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW) };
    // SAFETY: the name is a C string; a null library is the whole program's symbols.
    let found = unsafe { libc::dlsym(library, c"cuEventElapsedTime".as_ptr()) };
    // SAFETY: an optional function pointer is as large as a pointer and null is `None`; the type is
    // that of cuda.h.
    let found = unsafe { std::mem::transmute::<*mut c_void, Option<Elapsed>>(found) };
    found.ok_or_else(|| "the driver library lacks the function cuEventElapsedTime".into())
}

/// A stream with a chain of kernels and an event after each, and the memory that they work on.
pub(crate) struct Load {
    kernel: CudaFunction,
    blocks: u32,
    stream: Arc<CudaStream>,
    events: Vec<CudaEvent>,
    elapsed: Elapsed,
    pub(crate) buffer: Range,
    rounds: u64,
    plug_rounds: u64,
    launched: bool,
    /// Device time of one kernel as measured at the start.
    pub(crate) kernel_us: f64,
}

impl Load {
    /// A chain of `kernels` that take about `kernel_us` each. A first kernel, not counted, lasts
    /// while the others are queued.
    pub(crate) fn new(gpu: &Gpu, kernels: u32, kernel_us: f64) -> Result<Self, Fault> {
        let context = &gpu.context;
        let timed = Some(sys::CUevent_flags::CU_EVENT_DEFAULT);
        let piece = LOAD_BYTES.next_multiple_of(gpu.granularity);
        let mut buffer = Range::reserve(gpu, piece, 1)?;
        buffer.map(0, &Physical::create(gpu, piece)?)?;
        buffer.set_access(Some(0))?;
        let cores = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
        let mut load = Self {
            kernel: context
                .load_module(Ptx::from_src(include_str!("touch.ptx")))?
                .load_function("touch")?,
            blocks: u32::try_from(context.attribute(cores)?)?.max(1),
            stream: context.new_stream()?,
            events: (0..=kernels).map(|_| context.new_event(timed)).collect::<Result<_, _>>()?,
            elapsed: elapsed()?,
            buffer,
            rounds: 2000,
            plug_rounds: 0,
            launched: false,
            kernel_us: 0.0,
        };
        // The first pass warms up, the second measures, the third checks the result.
        load.measure_kernel()?;
        let round_us = (load.measure_kernel()? / 2000.0).max(1e-4);
        load.rounds = super::whole(kernel_us / round_us).max(1);
        load.plug_rounds = super::whole(15.0 * f64::from(kernels) / round_us);
        load.kernel_us = load.measure_kernel()?;
        Ok(load)
    }

    /// Queues the kernel `touch` with so many rounds.
    fn queue(&self, rounds: u64) -> Outcome {
        let mask = LOAD_BYTES as u64 - 4;
        let config = LaunchConfig {
            grid_dim: (self.blocks, 1, 1),
            block_dim: (128, 1, 1),
            shared_mem_bytes: 0,
        };
        let mut launch = self.stream.launch_builder(&self.kernel);
        launch.arg(&self.buffer.base).arg(&mask).arg(&rounds);
        // SAFETY: the kernel takes these three (touch.ptx) and stays within the buffer, which is
        // mapped; `provoke` unmaps it to see the error code.
        unsafe { launch.launch(config) }?;
        Ok(())
    }

    fn measure_kernel(&self) -> Result<f64, Fault> {
        self.events[0].record(&self.stream)?;
        self.queue(self.rounds)?;
        self.events[1].record(&self.stream)?;
        self.stream.synchronize()?;
        self.between_us(&self.events[0], &self.events[1])
    }

    /// Microseconds of device time between two events; resolution about 0.5 us.
    fn between_us(&self, from: &CudaEvent, to: &CudaEvent) -> Result<f64, Fault> {
        let mut ms = 0.0;
        // SAFETY: both events live as long as their owners; the reference outlives the call.
        unsafe { (self.elapsed)(&mut ms, from.cu_event(), to.cu_event()) }.result()?;
        Ok(f64::from(ms) * 1e3)
    }

    /// Queues the chain and returns when its first kernel begins.
    pub(crate) fn launch(&mut self) -> Outcome {
        self.queue(self.plug_rounds)?;
        for (index, event) in self.events.iter().enumerate() {
            if index > 0 {
                self.queue(self.rounds)?;
            }
            event.record(&self.stream)?;
        }
        self.launched = true;
        let start = Instant::now();
        while !self.events[0].try_is_complete()? {
            if start.elapsed() > PATIENCE {
                return Err(format!("the kernel did not start within {PATIENCE:?}").into());
            }
        }
        Ok(())
    }

    /// Returns `true` if the last kernel has ended (or none was launched).
    fn is_done(&self) -> Result<bool, Fault> {
        match self.events.last() {
            Some(last) if self.launched => Ok(last.try_is_complete()?),
            _ => Ok(true),
        }
    }

    /// Waits for the chain and adds the times between its events, in microseconds.
    pub(crate) fn finish(&mut self, gaps_us: &mut Vec<f64>) -> Outcome {
        if !std::mem::take(&mut self.launched) {
            return Ok(());
        }
        self.stream.synchronize()?;
        for pair in self.events.windows(2) {
            gaps_us.push(self.between_us(&pair[0], &pair[1])?);
        }
        Ok(())
    }
}

/// The observations of one kind of call.
#[derive(Default)]
pub(crate) struct Seen {
    /// Host time of each call, in order, in microseconds.
    pub(crate) costs_us: Vec<f64>,
    /// Device time between the load's events, in microseconds.
    pub(crate) gaps_us: Vec<f64>,
}

/// The records of all calls by name, and the concurrent load. `_all` = one call for the range.
#[derive(Default)]
pub(crate) struct Watch<'l> {
    load: Option<&'l mut Load>,
    seen: Vec<(&'static str, Seen)>,
}

impl<'l> Watch<'l> {
    pub(crate) fn new(load: Option<&'l mut Load>) -> Self {
        Self { load, ..Self::default() }
    }

    /// The calls that were made, in order.
    pub(crate) fn made(&self) -> impl Iterator<Item = (&'static str, &Seen)> {
        let all = self.seen.iter().map(|(name, seen)| (*name, seen));
        all.filter(|(_, seen)| !seen.costs_us.is_empty())
    }

    /// How often a call was made.
    pub(crate) fn count(&self, call: &str) -> usize {
        self.made().find(|(name, _)| *name == call).map_or(0, |(_, seen)| seen.costs_us.len())
    }

    /// Makes `count` calls of one kind, each timed, while the load runs.
    fn phase<T>(
        &mut self,
        call: &'static str,
        count: usize,
        mut each: impl FnMut(usize) -> Result<T, Fault>,
    ) -> Result<Vec<T>, Fault> {
        let at = self.seen.iter().position(|(name, _)| *name == call).unwrap_or_else(|| {
            self.seen.push((call, Seen::default()));
            self.seen.len() - 1
        });
        let seen = &mut self.seen[at].1;
        let mut made = Vec::with_capacity(count);
        for index in 0..count {
            if let Some(load) = self.load.as_deref_mut()
                && load.is_done()?
            {
                load.finish(&mut seen.gaps_us)?;
                load.launch()?;
            }
            let began = Instant::now();
            let result = each(index);
            let took = began.elapsed();
            made.push(result?);
            seen.costs_us.push(took.as_secs_f64() * 1e6);
        }
        if let Some(load) = self.load.as_deref_mut() {
            load.finish(&mut seen.gaps_us)?;
        }
        Ok(made)
    }

    /// Reserve, create, map, give access, retain, unmap, release, free: `count` handles of
    /// `piece` bytes. With `all`, access and unmap are one call each.
    pub(crate) fn cycle(
        &mut self,
        gpu: &Gpu,
        (piece, count): (usize, usize),
        all: bool,
    ) -> Outcome {
        let ranges = self.phase("reserve", 1, |_| Range::reserve(gpu, piece, count))?;
        // Handles are declared after the range, so that a failing part drops them first; the
        // memory then goes when the range unmaps.
        let Some(mut range) = ranges.into_iter().next() else { return Ok(()) };
        let mut handles = self.phase("create", count, |_| Physical::create(gpu, piece))?;
        self.phase("map", count, |index| range.map(index, &handles[index]))?;
        if all {
            self.phase("set_access_all", 1, |_| range.set_access(None))?;
        } else {
            self.phase("set_access", count, |index| range.set_access(Some(index)))?;
        }
        self.phase("retain", count.min(16), |index| range.retain(index))?;
        self.phase("granularity", 1, |_| gpu.granule())?;
        if all {
            self.phase("unmap_all", 1, |_| range.unmap(None))?;
        } else {
            self.phase("unmap", count, |index| range.unmap(Some(index)))?;
        }
        self.phase("release", count, |index| handles[index].release())?;
        self.phase("address_free", 1, |_| range.free())?;
        Ok(())
    }
}
