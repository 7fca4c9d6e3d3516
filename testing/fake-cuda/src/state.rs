//! The only state of the library: devices, lifetimes of their contexts, threads, settings of tests.
//!
//! Its lock is never held across a call of the simulation, because a host function runs inside such
//! a call and uses this state. Only primary contexts exist. A thread has its own current context,
//! which a reset ends.
//!
//! Invariant: a device has a context iff `retains > 0`; each lifetime has a new simulation.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::ThreadId;

use lowtide_core::bytes::ByteSize;
use lowtide_cuda_sim::{Order, Planned, SimDriver, SimError, SimOptions};

use crate::call::{
    Answer, CONTEXT_DESTROYED, INVALID_CONTEXT, INVALID_DEVICE, INVALID_HANDLE, NO_DEVICE,
    NOT_INITIALIZED,
};
use crate::control::Options;
use crate::handle::{Handle, Kind, LIVES};
use crate::nvml::Nvml;

/// The address space between the devices of a process, in bytes.
const APART: u64 = 1 << 44;

/// The number of entries that the record keeps; the rest are dropped.
const RECORD_MAX: usize = 1_000;

/// A device.
#[derive(Debug)]
pub(crate) struct Device {
    pub(crate) sim: Arc<SimDriver>,
    pub(crate) life: u64,
    pub(crate) retains: u64,
    /// What its context holds beside the simulation.
    pub(crate) context: ContextObjects,
    /// Granules, by address, with the other devices that access them.
    pub(crate) peers: BTreeMap<u64, Vec<usize>>,
    /// Handles of memory for network cards.
    pub(crate) rdma: BTreeSet<u64>,
}

/// What ends with a context, beside the simulation.
#[derive(Debug, Default)]
pub(crate) struct ContextObjects {
    pub(crate) event_flags: BTreeMap<u64, u32>,
    /// Handles of destroyed streams, which name the next streams with `REUSED_STREAMS`.
    pub(crate) spare_streams: Vec<u64>,
    /// The numbers of streams that have a reused handle.
    pub(crate) reused_streams: BTreeMap<u64, u64>,
    pub(crate) modules: BTreeSet<u64>,
    /// The memory that graphs use, its peak, and the memory that is cached for them.
    pub(crate) graph_memory: [u64; 3],
    thread_streams: BTreeMap<String, u64>,
}

#[derive(Debug, Default)]
pub(crate) struct State {
    pub(crate) options: Options,
    pub(crate) devices: Vec<Device>,
    /// The devices that this process sees; `None` before `cuInit`.
    pub(crate) visible: Option<Vec<usize>>,
    pub(crate) modules_loaded: u64,
    /// Waits of the host that would keep a core busy: those without a blocking event.
    pub(crate) spins: u64,
    /// Of waits of streams for events, every so many-th is dropped; 0 for none.
    pub(crate) drop_every: u64,
    pub(crate) dropped: u64,
    pub(crate) nvml: Nvml,
    waits: u64,
    calls: BTreeMap<&'static str, u64>,
    pub(crate) planned: Planned<String>,
    /// What went wrong beside what the simulations have on record.
    pub(crate) record: Vec<String>,
    /// The objects with which contexts were destroyed.
    pub(crate) left: Vec<String>,
    /// The number of resets: a thread's current context belongs to one of these eras.
    era: u64,
}

/// A device in the life of its context in which a call was made.
#[derive(Clone, Debug)]
pub(crate) struct Seat {
    pub(crate) device: usize,
    pub(crate) life: u64,
    pub(crate) sim: Arc<SimDriver>,
}

static STATE: Mutex<Option<State>> = Mutex::new(None);

thread_local! {
    /// The current context, and the era in which it was set.
    static CURRENT: Cell<(u64, u64)> = const { Cell::new((0, 0)) };
}

/// The state, locked.
#[derive(Debug)]
pub(crate) struct Locked(MutexGuard<'static, Option<State>>);

impl std::ops::Deref for Locked {
    type Target = State;

    fn deref(&self) -> &State {
        self.0.as_ref().unwrap_or_else(|| unreachable!("filled when it was locked"))
    }
}

impl std::ops::DerefMut for Locked {
    fn deref_mut(&mut self) -> &mut State {
        self.0.as_mut().unwrap_or_else(|| unreachable!("filled when it was locked"))
    }
}

pub(crate) fn state() -> Locked {
    let mut locked = STATE.lock().unwrap_or_else(PoisonError::into_inner);
    locked.get_or_insert_with(|| State::new(Options::default(), 1));
    Locked(locked)
}

/// Begins anew. What was there is dropped after the lock is given back.
pub(crate) fn reset(options: Options) {
    let mut locked = STATE.lock().unwrap_or_else(PoisonError::into_inner);
    let era = locked.as_ref().map_or(1, |state| state.era + 1);
    let old = locked.replace(State::new(options, era));
    drop(locked);
    drop(old);
}

fn simulation(options: &Options, device: usize) -> Arc<SimDriver> {
    let size = |bytes: u64, otherwise: ByteSize| {
        if bytes == 0 { otherwise } else { ByteSize::new(bytes) }
    };
    let usual = SimOptions::default();
    let granularity = size(options.granularity, usual.granularity);
    Arc::new(SimDriver::new(SimOptions {
        order: match options.order {
            0 => Order::Lazy,
            1 => Order::Random { seed: options.seed },
            _ => Order::Synchronous,
        },
        granularity,
        handle_min: granularity,
        address_base: usual.address_base + device as u64 * APART,
        address_space: size(options.address_space, ByteSize::gib(8 << 10)),
        capacity: size(options.capacity, usual.capacity),
        context_overhead: ByteSize::new(options.context_overhead),
        virtual_memory: options.flags & Options::NO_VIRTUAL_MEMORY == 0,
        ..usual
    }))
}

impl State {
    fn new(options: Options, era: u64) -> Self {
        let count = usize::try_from(options.devices.clamp(1, 3)).unwrap_or(1);
        let devices = (0..count).map(|at| Device {
            sim: simulation(&options, at),
            life: 1,
            retains: 0,
            context: ContextObjects::default(),
            peers: BTreeMap::new(),
            rdma: BTreeSet::new(),
        });
        Self { devices: devices.collect(), options, era, ..Self::default() }
    }

    /// Counts a call, and says how it was told to fail.
    pub(crate) fn count(&mut self, name: &'static str) -> Option<u32> {
        *self.calls.entry(name).or_insert(0) += 1;
        self.planned.of(name).map(SimError::code)
    }

    /// Counts a wait of a stream for an event: `true` if it is to be dropped.
    pub(crate) fn drops_wait(&mut self) -> bool {
        self.waits += 1;
        let is_dropped = self.drop_every > 0 && self.waits.is_multiple_of(self.drop_every);
        self.dropped += u64::from(is_dropped);
        is_dropped
    }

    pub(crate) fn calls(&self, name: &str) -> u64 {
        self.calls.get(name).copied().unwrap_or(0)
    }

    pub(crate) fn calls_total(&self) -> u64 {
        self.calls.values().sum()
    }

    /// Keeps what went wrong beside what the simulations have on record.
    pub(crate) fn on_record(&mut self, what: String) {
        if self.record.len() < RECORD_MAX {
            self.record.push(what);
        }
    }

    /// The device that a program means by a number.
    pub(crate) fn ordinal(&self, device: i32) -> Answer<usize> {
        let visible = self.visible.as_ref().ok_or(NOT_INITIALIZED)?;
        let at = usize::try_from(device).map_err(|_| INVALID_DEVICE)?;
        visible.get(at).copied().ok_or(INVALID_DEVICE)
    }

    /// The number that a program means a device by.
    pub(crate) fn number_of(&self, device: usize) -> i32 {
        let visible = self.visible.iter().flatten();
        let at = visible.enumerate().find(|(_, seen)| **seen == device).map(|(at, _)| at);
        at.and_then(|at| i32::try_from(at).ok()).unwrap_or(0)
    }

    pub(crate) fn started(&self) -> Answer {
        self.visible.as_ref().map_or(Err(NOT_INITIALIZED), |_| Ok(()))
    }

    pub(crate) fn init(&mut self, visible: Option<&str>) -> Answer {
        if self.visible.is_none() {
            self.visible = Some(crate::devices::visible(visible, self.devices.len()));
        }
        if self.visible.as_ref().is_none_or(Vec::is_empty) {
            self.visible = None;
            return Err(NO_DEVICE);
        }
        Ok(())
    }

    fn seat(&self, device: usize) -> Seat {
        let it = &self.devices[device];
        Seat { device, life: it.life, sim: Arc::clone(&it.sim) }
    }

    /// A seat at a device, whether or not its context lives: for virtual memory and pools.
    pub(crate) fn anywhere(&self, device: usize) -> Answer<Seat> {
        self.started()?;
        if device < self.devices.len() { Ok(self.seat(device)) } else { Err(INVALID_DEVICE) }
    }

    /// A seat in the context that is current on this thread.
    pub(crate) fn current(&self) -> Answer<Seat> {
        self.started()?;
        let handle = Handle::decode(self.current_context()).ok_or(INVALID_CONTEXT)?;
        if self.devices[handle.device].retains == 0 {
            return Err(CONTEXT_DESTROYED);
        }
        Ok(self.seat(handle.device))
    }

    pub(crate) fn current_context(&self) -> u64 {
        let (era, context) = CURRENT.get();
        if era == self.era { context } else { 0 }
    }

    pub(crate) fn set_current(&self, context: u64) -> Answer {
        self.started()?;
        if context != 0 {
            let handle = Handle::decode(context).filter(|it| it.kind == Kind::Context);
            let device = handle.and_then(|it| self.devices.get(it.device));
            if device.is_none_or(|it| it.retains == 0) {
                return Err(INVALID_CONTEXT);
            }
        }
        CURRENT.set((self.era, context));
        Ok(())
    }

    pub(crate) fn context(device: usize) -> u64 {
        Handle { kind: Kind::Context, device, life: 0, number: 1 }.encode()
    }

    /// Gives one share of a context back; the last one ends it, and answers what it was: for
    /// [`bury`], without this lock.
    pub(crate) fn release(&mut self, device: usize) -> Answer<Option<Arc<SimDriver>>> {
        let it = &mut self.devices[device];
        it.retains = it.retains.checked_sub(1).ok_or(INVALID_CONTEXT)?;
        if it.retains > 0 {
            return Ok(None);
        }
        it.life = (it.life + 1) % LIVES;
        it.context = ContextObjects::default();
        Ok(Some(std::mem::replace(&mut it.sim, simulation(&self.options, device))))
    }

    /// The seat and the number behind a handle of this kind; `code` where there is none.
    pub(crate) fn find(&mut self, bits: u64, kind: Kind, code: u32) -> Answer<(Seat, u64)> {
        self.started()?;
        let handle = Handle::decode(bits).filter(|it| it.kind == kind);
        let Some(handle) = handle.filter(|it| it.device < self.devices.len()) else {
            self.on_record(format!("{bits:#x} is no {kind:?}"));
            return Err(code);
        };
        let seat = self.seat(handle.device);
        let needs_context = !matches!(kind, Kind::Physical | Kind::Pool);
        if needs_context && self.devices[handle.device].retains == 0 {
            return Err(CONTEXT_DESTROYED);
        }
        if handle.life != seat.life {
            self.on_record(format!("{handle:?} is of a context that was destroyed"));
            return Err(code);
        }
        Ok((seat, handle.number))
    }
}

impl Seat {
    /// The handle of a number here.
    pub(crate) fn handle(&self, kind: Kind, number: u64) -> u64 {
        Handle { kind, device: self.device, life: self.life, number }.encode()
    }

    /// The default stream of this thread.
    fn thread_stream(&self) -> u64 {
        let thread: ThreadId = std::thread::current().id();
        let name = format!("{thread:?}");
        let known = state().devices[self.device].context.thread_streams.get(&name).copied();
        known.unwrap_or_else(|| {
            let made = self.sim.raw().thread_stream();
            state().devices[self.device].context.thread_streams.insert(name, made);
            made
        })
    }
}

/// Notes what a context that was destroyed had on record, and what was left in it; then drops it.
pub(crate) fn bury(device: usize, context: &SimDriver) {
    let faults = context.faults();
    let left = crate::control::left(&context.raw().numbers(), 0);
    let mut state = state();
    for fault in faults {
        state.on_record(format!("device {device}: {fault:?}"));
    }
    if let Some(left) = left {
        state.left.push(format!("context of device {device} destroyed with {left}"));
    }
}

/// A seat in the current context.
pub(crate) fn current() -> Answer<Seat> {
    state().current()
}

/// The seat and the number of a stream: 0 and 1 are the legacy default one, 2 is this thread's.
pub(crate) fn stream(bits: u64) -> Answer<(Seat, u64)> {
    match bits {
        0 | 1 => {
            let seat = current()?;
            let legacy = seat.sim.raw().legacy_stream()?;
            Ok((seat, legacy))
        }
        2 => {
            let seat = current()?;
            let own = seat.thread_stream();
            Ok((seat, own))
        }
        _ => {
            let mut state = state();
            let (seat, number) = state.find(bits, Kind::Stream, INVALID_HANDLE)?;
            let reused = state.devices[seat.device].context.reused_streams.get(&bits);
            Ok((seat, reused.copied().unwrap_or(number)))
        }
    }
}

pub(crate) fn event(bits: u64) -> Answer<(Seat, u64)> {
    state().find(bits, Kind::Event, INVALID_HANDLE)
}

/// The device whose address space an address is of.
pub(crate) fn of_address(at: u64) -> Option<Seat> {
    seats().into_iter().find(|seat| seat.sim.raw().is_inside(at))
}

/// All devices.
pub(crate) fn seats() -> Vec<Seat> {
    let state = state();
    (0..state.devices.len()).map(|device| state.seat(device)).collect()
}
