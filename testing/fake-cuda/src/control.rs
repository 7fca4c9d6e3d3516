//! The commands with which tests configure and query the library.
//!
//! They are no calls of the driver: they are not counted, need no context, and work after a context
//! is lost.
//!
//! Invariant: only a reset, a poison and a run change the queued work.
#![expect(unsafe_code, reason = "exports functions under C names: the attribute alone")]

use std::ffi::{c_char, c_int};

use lowtide_core::bytes::ByteSize;
use lowtide_cuda_sim::SimError;
pub use lowtide_cuda_sim::raw::Numbers;

use crate::call::{Answer, INVALID_DEVICE};
use crate::ffi::{In, Out, Text, put_text};
use crate::nvml::Process;
use crate::state::{Seat, reset, seats, state};

/// The settings of the devices, from a reset on.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// The order of work: 0 lazy, 1 random, 2 synchronous.
    pub order: u32,
    /// The missing features: the constants of this type, added.
    pub flags: u32,
    /// The seed of the random order.
    pub seed: u64,
    /// The memory of each device in bytes; 0 is the simulation's own, 80 GiB.
    pub capacity: u64,
    /// The granularity in bytes; 0 is 2 MiB.
    pub granularity: u64,
    /// The address space of a device in bytes; 0 is 8 TiB, which is also the most.
    pub address_space: u64,
    /// The memory that a context takes from a device, in bytes.
    pub context_overhead: u64,
    /// The number of devices, 1 to 3.
    pub devices: u32,
    /// The answer of `cuDriverGetVersion`.
    pub driver_version: c_int,
}

impl Options {
    /// No virtual memory: its calls answer 801, and attribute 102 is 0.
    pub const NO_VIRTUAL_MEMORY: u32 = 1;
    /// No pools: their calls answer 801, and attribute 115 is 0.
    pub const NO_POOLS: u32 = 2;
    /// Pools cannot be created (801); the device's own is there.
    pub const NO_POOL_CREATE: u32 = 4;
    /// Attribute 102 is 1, whether or not there is virtual memory: shares of devices say so.
    pub const CLAIMS_VIRTUAL_MEMORY: u32 = 8;
    /// The device has no memory of its own: attribute 18 is 1.
    pub const INTEGRATED: u32 = 16;
    /// NVML knows the devices as MIG instances.
    pub const MIG: u32 = 64;
    /// Modules have every kernel that is asked for. One that is not modelled takes its turn on its
    /// stream and touches nothing: real engines run, allocate and free, and compute nothing.
    pub const UNKNOWN_KERNELS: u32 = 32;
    /// A new stream has the handle of the stream that was destroyed last, as in CUDA.
    pub const REUSED_STREAMS: u32 = 128;
    /// No device can access memory of another.
    pub const NO_PEERS: u32 = 256;
    /// No virtual memory for network cards: attribute 110 is 0.
    pub const NO_RDMA: u32 = 512;
}

impl Default for Options {
    fn default() -> Self {
        Self {
            order: 0,
            flags: 0,
            seed: 0,
            capacity: 0,
            granularity: 0,
            address_space: 0,
            context_overhead: ByteSize::mib(512).get(),
            devices: 2,
            driver_version: 12_080,
        }
    }
}

/// A command, with the places of answers that are no number.
#[repr(C, u32)]
#[derive(Clone, Copy, Debug)]
pub(crate) enum Command {
    Reset(Options),
    Fail {
        name: Text,
        nth: u64,
        code: u32,
    },
    ForgetFailures,
    Calls {
        name: Text,
    },
    CallsTotal,
    Spins,
    DropWaits {
        every: u64,
    },
    DroppedWaits,
    Numbers {
        device: u32,
        to: Out<Numbers>,
    },
    Retains {
        device: u32,
    },
    /// Answers the bytes of the text with its zero.
    Faults {
        to: Out<c_char>,
        room: usize,
    },
    Leaks {
        to: Out<c_char>,
        room: usize,
    },
    Poison {
        device: u32,
        code: u32,
    },
    Neighbours {
        device: u32,
        bytes: u64,
    },
    Capacity {
        device: u32,
        bytes: u64,
    },
    LockLimit {
        device: u32,
        bytes: u64,
    },
    GraphMemory {
        device: u32,
        bytes: u64,
    },
    Run {
        device: u32,
        count: u64,
    },
    Validate {
        device: u32,
    },
    Process {
        device: u32,
        kind: u32,
        pid: u32,
        used: u64,
    },
    OwnPid {
        pid: u32,
    },
    EntryWords {
        words: u32,
    },
    HoldNvml {
        is_held: bool,
    },
    NvmlSessions,
}

/// The answer of a command that failed.
pub(crate) const FAILED: u64 = u64::MAX;

/// Returns the objects that have not been released, in words. Memory that a pool keeps is its own,
/// and no leak; nor is work that was never waited for.
pub(crate) fn left(numbers: &Numbers, retains: u64) -> Option<String> {
    let all = [
        (numbers.reservations, "reservations"),
        (numbers.handles, "handles"),
        (numbers.mappings, "mappings"),
        (numbers.plain_live, "plain allocations"),
        (numbers.pooled_live, "pool allocations"),
        (numbers.pools, "pools"),
        (numbers.streams, "streams"),
        (numbers.events, "events"),
        (numbers.graphs, "graphs"),
        (numbers.locked_bytes, "bytes locked"),
        (numbers.managed_bytes, "bytes managed"),
        (retains, "context retains"),
    ];
    let left = all.iter().filter(|(count, _)| *count > 0);
    let parts: Vec<_> = left.map(|(count, name)| format!("{count} {name}")).collect();
    (!parts.is_empty()).then(|| parts.join(", "))
}

fn leaks() -> Vec<String> {
    let mut all = state().left().to_vec();
    for seat in seats() {
        let retains = state().devices[seat.device].retains;
        let left = left(&seat.sim.raw().numbers(), retains);
        all.extend(left.map(|left| format!("device {}: {left}", seat.device)));
    }
    all
}

fn faults() -> Vec<String> {
    let mut all = state().record().to_vec();
    for seat in seats() {
        let faults = seat.sim.faults();
        all.extend(faults.iter().map(|fault| format!("device {}: {fault:?}", seat.device)));
    }
    all
}

/// Puts lines of text, and answers how many bytes they have with their zero.
fn put_lines(lines: &[String], to: Out<c_char>, room: usize) -> u64 {
    let text = lines.join("\n");
    if room > 0 && !to.is_absent() {
        let _ = put_text(to, room, &text);
    }
    text.len() as u64 + 1
}

/// A device, whether it is visible or not.
fn seat(device: u32) -> Answer<Seat> {
    let at = usize::try_from(device).unwrap_or(usize::MAX);
    seats().into_iter().nth(at).ok_or(INVALID_DEVICE)
}

/// Does what a test asks for: no count, no planned failure, but no panic either.
#[unsafe(no_mangle)]
extern "C" fn fake_control(command: In<Command>) -> u64 {
    let body = std::panic::AssertUnwindSafe(|| command.get().and_then(act));
    std::panic::catch_unwind(body).ok().and_then(Result::ok).unwrap_or(FAILED)
}

fn act(command: Command) -> Answer<u64> {
    match command {
        Command::Reset(options) => {
            crate::nvml::hold(false);
            reset(options);
        }
        Command::Fail { name, nth, code } => state().plan(name.get()?, nth, code),
        Command::ForgetFailures => state().forget_plans(),
        Command::Calls { name } => return Ok(state().calls(&name.get()?)),
        Command::CallsTotal => return Ok(state().calls_total()),
        Command::Spins => return Ok(state().spins),
        Command::DropWaits { every } => state().drop_every = every,
        Command::DroppedWaits => return Ok(state().dropped),
        Command::Numbers { device, to } => to.put(seat(device)?.sim.raw().numbers())?,
        Command::Retains { device } => {
            let seat = seat(device)?;
            return Ok(state().devices[seat.device].retains);
        }
        Command::Faults { to, room } => return Ok(put_lines(&faults(), to, room)),
        Command::Leaks { to, room } => return Ok(put_lines(&leaks(), to, room)),
        Command::Poison { device, code } => seat(device)?.sim.poison(SimError::Code(code)),
        Command::Neighbours { device, bytes } => {
            seat(device)?.sim.set_neighbours(ByteSize::new(bytes));
        }
        Command::Capacity { device, bytes } => {
            seat(device)?.sim.set_capacity(ByteSize::new(bytes));
        }
        Command::LockLimit { device, bytes } => {
            seat(device)?.sim.set_lock_limit(ByteSize::new(bytes));
        }
        Command::GraphMemory { device, bytes } => {
            // A launch of a graph that allocates, to its end.
            let seat = seat(device)?;
            let [_, high, reserved] = &mut state().devices[seat.device].graph_memory;
            (*high, *reserved) = ((*high).max(bytes), (*reserved).max(bytes));
        }
        Command::Run { device, count } => {
            let count = usize::try_from(count).unwrap_or(usize::MAX);
            return Ok(seat(device)?.sim.advance(count) as u64);
        }
        Command::Validate { device } => seat(device)?.sim.validate(),
        Command::Process { device, kind, pid, used } => {
            let process = Process { device: seat(device)?.device, kind, pid, used };
            state().nvml.processes.push(process);
        }
        Command::OwnPid { pid } => state().nvml.own_pid = pid,
        Command::EntryWords { words } => {
            state().nvml.words = usize::try_from(words).unwrap_or(3);
        }
        Command::HoldNvml { is_held } => crate::nvml::hold(is_held),
        Command::NvmlSessions => return Ok(state().nvml.sessions),
    }
    Ok(0)
}
