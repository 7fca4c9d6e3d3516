//! One cycle of the calls, each timed, with an optional load on another stream.
//!
//! It records the calls made, the calls that the load's kernel did not outlive, and the device time
//! between the load's events. It prints nothing and decides nothing.
//!
//! Invariant: a call is recorded only if the load's kernels were still running when it began.
#![expect(clippy::disallowed_methods, reason = "a benchmark reads the clock")]

use std::time::{Duration, Instant};

use super::driver::Fault;
use super::gpu::{Event, Gpu, Kernel, Physical, Plain, Range, Stream};

/// The timed calls. `All` = one call for the whole range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Call {
    Reserve,
    Create,
    Map,
    SetAccess,
    SetAccessAll,
    Retain,
    Unmap,
    UnmapAll,
    Release,
    AddressFree,
    PlainFree,
    Granularity,
}

impl Call {
    pub(crate) const EVERY: [Self; 12] = [
        Self::Reserve,
        Self::Create,
        Self::Map,
        Self::SetAccess,
        Self::SetAccessAll,
        Self::Retain,
        Self::Unmap,
        Self::UnmapAll,
        Self::Release,
        Self::AddressFree,
        Self::PlainFree,
        Self::Granularity,
    ];

    /// The call's name in tables and figures.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Reserve => "reserve",
            Self::Create => "create",
            Self::Map => "map",
            Self::SetAccess => "set_access",
            Self::SetAccessAll => "set_access_all",
            Self::Retain => "retain",
            Self::Unmap => "unmap",
            Self::UnmapAll => "unmap_all",
            Self::Release => "release",
            Self::AddressFree => "address_free",
            Self::PlainFree => "plain_free",
            Self::Granularity => "granularity",
        }
    }
}

/// The bytes that the load's kernel works on: a power of two.
pub(crate) const LOAD_BYTES: usize = 64 << 20;

/// A stream with a chain of kernels and an event after each.
pub(crate) struct Load<'g> {
    kernel: &'g Kernel<'g>,
    stream: Stream<'g>,
    events: Vec<Event<'g>>,
    base: u64,
    rounds: u64,
    plug_rounds: u64,
    launched: bool,
    /// Device time of one kernel as measured at the start.
    pub(crate) kernel_us: f64,
}

impl<'g> Load<'g> {
    /// A chain of `kernels` that take about `kernel_us` each, on the buffer at `base`. A first
    /// kernel, not counted, lasts while the others are queued.
    pub(crate) fn new(
        gpu: &'g Gpu<'g>,
        kernel: &'g Kernel<'g>,
        base: u64,
        (kernels, kernel_us): (usize, f64),
    ) -> Result<Self, Fault> {
        let stream = Stream::new(gpu)?;
        let events = (0..=kernels).map(|_| Event::new(gpu)).collect::<Result<_, _>>()?;
        let (rounds, plug_rounds) = (2000, 0);
        let mut load = Self {
            kernel,
            stream,
            events,
            base,
            rounds,
            plug_rounds,
            launched: false,
            kernel_us: 0.0,
        };
        // The first pass warms up, the second measures, the third checks the result.
        load.measure_kernel()?;
        let round_us = (load.measure_kernel()? / 2000.0).max(1e-4);
        load.rounds = super::whole(kernel_us / round_us).max(1);
        load.plug_rounds = super::whole(15.0 * super::float(kernels) / round_us);
        load.kernel_us = load.measure_kernel()?;
        Ok(load)
    }

    fn measure_kernel(&self) -> Result<f64, Fault> {
        self.events[0].record(&self.stream)?;
        self.kernel.launch(&self.stream, self.base, LOAD_BYTES as u64, self.rounds)?;
        self.events[1].record(&self.stream)?;
        self.stream.synchronize()?;
        self.events[1].us_since(&self.events[0])
    }

    /// Queues the chain and returns when its first kernel begins.
    pub(crate) fn launch(&mut self) -> Result<(), Fault> {
        self.kernel.launch(&self.stream, self.base, LOAD_BYTES as u64, self.plug_rounds)?;
        for (index, event) in self.events.iter().enumerate() {
            if index > 0 {
                self.kernel.launch(&self.stream, self.base, LOAD_BYTES as u64, self.rounds)?;
            }
            event.record(&self.stream)?;
        }
        self.launched = true;
        let patience = Duration::from_secs(5);
        let start = Instant::now();
        while !self.events[0].is_done()? {
            if start.elapsed() > patience {
                return Err(Fault::NotBegun { seconds: patience.as_secs() });
            }
        }
        Ok(())
    }

    /// Returns `true` if the last kernel has ended (or none was launched).
    pub(crate) fn is_done(&self) -> Result<bool, Fault> {
        match self.events.last() {
            Some(last) if self.launched => last.is_done(),
            _ => Ok(true),
        }
    }

    /// Waits for the chain and adds the times between its events, in microseconds.
    pub(crate) fn finish(&mut self, gaps_us: &mut Vec<f64>) -> Result<(), Fault> {
        if !std::mem::take(&mut self.launched) {
            return Ok(());
        }
        self.stream.synchronize()?;
        for pair in self.events.windows(2) {
            gaps_us.push(pair[1].us_since(&pair[0])?);
        }
        Ok(())
    }
}

/// The observations of one kind of call.
#[derive(Clone, Debug, Default)]
pub(crate) struct Seen {
    /// Host time of each call, in order, in microseconds.
    pub(crate) costs_us: Vec<f64>,
    /// Calls at whose end the load had ended too.
    pub(crate) outlasted: usize,
    /// Host time from the last call's end to the load's end, in microseconds.
    pub(crate) remaining_us: Vec<f64>,
    /// Device time between the load's events, in microseconds.
    pub(crate) gaps_us: Vec<f64>,
}

/// The records of all calls, and the concurrent load.
#[derive(Default)]
pub(crate) struct Watch<'l, 'g> {
    pub(crate) load: Option<&'l mut Load<'g>>,
    seen: [Seen; Call::EVERY.len()],
    /// Host bytes resident while everything was mapped.
    pub(crate) mapped_rss: u64,
}

impl<'l, 'g> Watch<'l, 'g> {
    pub(crate) fn new(load: Option<&'l mut Load<'g>>) -> Self {
        Self { load, ..Self::default() }
    }

    pub(crate) fn of(&self, call: Call) -> &Seen {
        &self.seen[call as usize]
    }

    /// Makes `count` calls of one kind, each timed, while the load runs.
    fn phase<T>(
        &mut self,
        call: Call,
        count: usize,
        mut each: impl FnMut(usize) -> Result<T, Fault>,
    ) -> Result<Vec<T>, Fault> {
        let seen = &mut self.seen[call as usize];
        let mut made = Vec::with_capacity(count);
        let mut ended = Instant::now();
        for index in 0..count {
            if let Some(load) = self.load.as_deref_mut()
                && load.is_done()?
            {
                load.finish(&mut seen.gaps_us)?;
                load.launch()?;
            }
            let began = Instant::now();
            let result = each(index);
            ended = Instant::now();
            made.push(result?);
            seen.costs_us.push((ended - began).as_secs_f64() * 1e6);
            if let Some(load) = self.load.as_deref_mut() {
                seen.outlasted += usize::from(load.is_done()?);
            }
        }
        if let Some(load) = self.load.as_deref_mut() {
            load.finish(&mut seen.gaps_us)?;
            seen.remaining_us.push(ended.elapsed().as_secs_f64() * 1e6);
        }
        Ok(made)
    }

    /// Reserve, create, map, give access, retain, unmap, release, free: `count` handles of
    /// `piece` bytes. With `all`, access and unmap are one call each.
    pub(crate) fn cycle(
        &mut self,
        gpu: &'g Gpu<'g>,
        (piece, count): (usize, usize),
        all: bool,
    ) -> Result<(), Fault> {
        let ranges = self.phase(Call::Reserve, 1, |_| Range::reserve(gpu, piece, count))?;
        // Handles are declared after the range, so that a failing part drops them first; the
        // memory then goes when the range unmaps.
        let Some(mut range) = ranges.into_iter().next() else { return Ok(()) };
        let handles = self.phase(Call::Create, count, |_| Physical::create(gpu, piece))?;
        self.phase(Call::Map, count, |index| range.map(index, &handles[index]))?;
        if all {
            self.phase(Call::SetAccessAll, 1, |_| range.set_access_all())?;
        } else {
            self.phase(Call::SetAccess, count, |index| range.set_access(index))?;
        }
        self.mapped_rss = self.mapped_rss.max(super::rss_bytes());
        match self.phase(Call::Retain, count.min(16), |index| range.retain(index)) {
            // Not every library has it, and nothing after it needs it.
            Ok(_) | Err(Fault::NoSymbol { .. }) => {}
            Err(fault) => return Err(fault),
        }
        self.phase(Call::Granularity, 1, |_| gpu.granule(0))?;
        if all {
            self.phase(Call::UnmapAll, 1, |_| range.unmap_all())?;
        } else {
            self.phase(Call::Unmap, count, |index| range.unmap(index))?;
        }
        let mut handles = handles.into_iter();
        self.phase(Call::Release, count, |_| handles.next().map_or(Ok(()), Physical::release))?;
        let mut range = Some(range);
        self.phase(Call::AddressFree, 1, |_| range.take().map_or(Ok(()), Range::free))?;
        Ok(())
    }

    /// cuMemFree, of which the manual says that it waits: shows that a wait would be seen.
    pub(crate) fn plain_free(&mut self, gpu: &'g Gpu<'g>, bytes: usize) -> Result<(), Fault> {
        let mut plain = Some(Plain::allocate(gpu, bytes)?);
        self.phase(Call::PlainFree, 1, |_| plain.take().map_or(Ok(()), Plain::free))?;
        Ok(())
    }
}

/// The value below which `share` of the sorted samples lie; nothing of nothing.
pub(crate) fn quantile(samples: &[f64], share: f64) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    let last = sorted.len().saturating_sub(1);
    let index = usize::try_from(super::whole((super::float(last) * share).round())).unwrap_or(last);
    sorted.get(index.min(last)).copied().unwrap_or(f64::NAN)
}
