//! The calls with which tests configure and query the library: `fake_*`.
//!
//! They are no calls of the driver: they are not counted, need no context, and work after a context
//! is lost.
//!
//! Invariant: only a reset, a poison and `fake_run` change the queued work.
#![expect(unsafe_code, reason = "exports functions under C names: the attribute alone")]

use std::ffi::{c_char, c_int};

use lowtide_core::bytes::ByteSize;
use lowtide_cuda_sim::SimError;
pub use lowtide_cuda_sim::raw::Numbers;

use crate::call::{Answer, INVALID_VALUE};
use crate::ffi::{In, Out, Text, put_text};
use crate::nvml::Process;
use crate::state::{reset, seats, state};

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

/// [`Numbers`] as they cross the boundary.
pub(crate) type Row = [u64; ROW];

/// The number of these figures.
pub(crate) const ROW: usize = 14;

/// The names of the numbers, for a text of what is left.
const NAMES: [&str; ROW] = [
    "bytes used",
    "reservations",
    "handles",
    "mappings",
    "plain allocations",
    "pool allocations",
    "pools",
    "streams",
    "events",
    "graphs",
    "bytes locked",
    "bytes managed",
    "pieces of work",
    "context retains",
];

fn row(numbers: &Numbers, retains: u64) -> Row {
    [
        numbers.taken_bytes,
        numbers.reservations,
        numbers.handles,
        numbers.mappings,
        numbers.plain_live,
        numbers.pooled_live,
        numbers.pools,
        numbers.streams,
        numbers.events,
        numbers.graphs,
        numbers.locked_bytes,
        numbers.managed_bytes,
        numbers.unfinished,
        retains,
    ]
}

/// The numbers that [`row`] made, and the retains.
pub(crate) const fn numbers(row: &Row) -> (Numbers, u64) {
    let numbers = Numbers {
        taken_bytes: row[0],
        reservations: row[1],
        handles: row[2],
        mappings: row[3],
        plain_live: row[4],
        pooled_live: row[5],
        pools: row[6],
        streams: row[7],
        events: row[8],
        graphs: row[9],
        locked_bytes: row[10],
        managed_bytes: row[11],
        unfinished: row[12],
    };
    (numbers, row[13])
}

/// Returns the objects that have not been released, in words. Memory that a pool keeps is its own,
/// and no leak; nor is work that was never waited for.
pub(crate) fn left(numbers: &Numbers) -> Option<String> {
    left_of(numbers, 0)
}

fn left_of(numbers: &Numbers, retains: u64) -> Option<String> {
    let mut row = row(numbers, retains);
    (row[0], row[12]) = (0, 0);
    let named = row.iter().zip(NAMES).filter(|(count, _)| **count > 0);
    let parts: Vec<_> = named.map(|(count, name)| format!("{count} {name}")).collect();
    (!parts.is_empty()).then(|| parts.join(", "))
}

fn leaks() -> Vec<String> {
    let mut all = state().left().to_vec();
    for seat in seats() {
        let retains = state().devices[seat.device].retains;
        let left = left_of(&seat.sim.raw().numbers(), retains);
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

/// Puts lines of text, and answers how many bytes they would have with their zero.
fn put_lines(lines: &[String], to: Out<c_char>, room: usize) -> usize {
    let text = lines.join("\n");
    if room > 0 && !to.is_absent() {
        let _ = put_text(to, room, &text);
    }
    text.len() + 1
}

fn seat(device: u32) -> Answer<crate::state::Seat> {
    let at = usize::try_from(device).unwrap_or(usize::MAX);
    seats().into_iter().nth(at).ok_or(INVALID_VALUE)
}

/// Exports a function of this file: no count, no planned failure, but no panic either.
macro_rules! control {
    ($(
        fn $name:ident($($argument:ident: $type:ty),*) -> $answer:ty = $otherwise:expr; $body:block
    )*) => { $(
        #[unsafe(no_mangle)]
        extern "C" fn $name($($argument: $type),*) -> $answer {
            let body = std::panic::AssertUnwindSafe(move || -> $answer { $body });
            std::panic::catch_unwind(body).unwrap_or($otherwise)
        }
    )* };
}

fn of(answer: Answer) -> u32 {
    answer.err().unwrap_or(0)
}

control! {
    fn fake_reset(options: In<Options>) -> u32 = 999; {
        let Ok(options) = options.get() else { return INVALID_VALUE };
        crate::nvml::hold(false);
        reset(options);
        0
    }

    fn fake_fail(name: Text, nth: u64, code: u32) -> u32 = 999; {
        let Ok(name) = name.get() else { return INVALID_VALUE };
        state().plan(name, nth, code);
        0
    }

    fn fake_forget_failures() -> u32 = 999; {
        state().forget_plans();
        0
    }

    fn fake_calls(name: Text) -> u64 = u64::MAX; {
        let name = name.get();
        let state = state();
        name.map_or_else(|_| state.calls_total(), |name| state.calls(&name))
    }

    fn fake_spins() -> u64 = u64::MAX; {
        state().spins
    }

    fn fake_drop_waits(every: u64) -> u32 = 999; {
        state().drop_every = every;
        0
    }

    fn fake_dropped_waits() -> u64 = u64::MAX; {
        state().dropped
    }

    fn fake_numbers(device: u32, to: Out<Row>) -> u32 = 999; {
        of(seat(device).and_then(|seat| {
            let retains = state().devices[seat.device].retains;
            to.put(row(&seat.sim.raw().numbers(), retains))
        }))
    }

    fn fake_faults(to: Out<c_char>, room: usize) -> usize = 0; {
        put_lines(&faults(), to, room)
    }

    fn fake_leaks(to: Out<c_char>, room: usize) -> usize = 0; {
        put_lines(&leaks(), to, room)
    }

    fn fake_poison(device: u32, code: u32) -> u32 = 999; {
        of(seat(device).map(|seat| seat.sim.poison(SimError::Code(code))))
    }

    fn fake_neighbours(device: u32, bytes: u64) -> u32 = 999; {
        of(seat(device).map(|seat| seat.sim.set_neighbours(ByteSize::new(bytes))))
    }

    fn fake_capacity(device: u32, bytes: u64) -> u32 = 999; {
        of(seat(device).map(|seat| seat.sim.set_capacity(ByteSize::new(bytes))))
    }

    fn fake_graph_memory(device: u32, bytes: u64) -> u32 = 999; {
        of(seat(device).map(|seat| {
            // A launch of a graph that allocates, to its end.
            let [_, high, reserved] = &mut state().devices[seat.device].graph_memory;
            (*high, *reserved) = ((*high).max(bytes), (*reserved).max(bytes));
        }))
    }

    fn fake_lock_limit(device: u32, bytes: u64) -> u32 = 999; {
        of(seat(device).map(|seat| seat.sim.set_lock_limit(ByteSize::new(bytes))))
    }

    fn fake_run(device: u32, count: u64) -> u64 = 0; {
        let count = usize::try_from(count).unwrap_or(usize::MAX);
        seat(device).map_or(0, |seat| seat.sim.advance(count) as u64)
    }

    fn fake_process(device: u32, kind: u32, pid: u32, used: u64) -> u32 = 999; {
        of(seat(device).map(|seat| {
            let process = Process { device: seat.device, kind, pid, used };
            state().nvml.processes.push(process);
        }))
    }

    fn fake_own_pid(pid: u32) -> u32 = 999; {
        state().nvml.own_pid = pid;
        0
    }

    fn fake_entry_words(words: u32) -> u32 = 999; {
        state().nvml.words = usize::try_from(words).unwrap_or(3);
        0
    }

    fn fake_hold_nvml(is_held: u32) -> u32 = 999; {
        crate::nvml::hold(is_held != 0);
        0
    }

    fn fake_nvml_sessions() -> u64 = u64::MAX; {
        state().nvml.sessions
    }

    fn fake_validate(device: u32) -> u32 = 999; {
        of(seat(device).map(|seat| seat.sim.validate()))
    }
}
