//! The commands with which tests configure and query the library.
//!
//! They are no calls of the driver: they are not counted, need no context, and work after a context
//! is lost.
//!
//! Invariant: only a reset, a poison and a run change the queued work.
#![expect(unsafe_code, reason = "exports functions under C names: the attribute alone")]

use std::ffi::{c_char, c_int};

use lowtide_core::bytes::ByteSize;
pub use lowtide_cuda_sim::raw::Numbers;
use lowtide_cuda_sim::{Planned, SimError};

use crate::call::{Answer, INVALID_DEVICE};
use crate::ffi::{In, Out, Text, put_text};
use crate::library::Guard;
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
    let mut all = state().left.clone();
    for seat in seats() {
        let retains = state().devices[seat.device].retains;
        let left = left(&seat.sim.raw().numbers(), retains);
        all.extend(left.map(|left| format!("device {}: {left}", seat.device)));
    }
    all
}

fn faults() -> Vec<String> {
    let mut all = state().record.clone();
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

/// Declares the commands: those that tell, and those that ask for a number. Each is a method of
/// [`Guard`], whose arguments cross the boundary as a [`Command`], and what the library does there.
macro_rules! commands {
    (
        tell { $(
            $(#[$doc:meta])*
            $tell:ident $vis:vis fn $name:ident($($argument:ident: $type:ty),*) $body:block
        )* }
        ask { $(
            $(#[$ask_doc:meta])*
            $ask:ident $ask_vis:vis fn $asked:ident($($of:ident: $of_type:ty),*) $answer:block
        )* }
    ) => {
        /// A command, with the places of answers that are no number.
        #[repr(C, u32)]
        #[derive(Clone, Copy, Debug)]
        pub(crate) enum Command {
            $($tell { $($argument: $type),* },)*
            $($ask { $($of: $of_type),* },)*
        }

        fn act(command: Command) -> Answer<u64> {
            match command {
                $(Command::$tell { $($argument),* } => $body,)*
                $(Command::$ask { $($of),* } => return Ok($answer),)*
            }
            Ok(0)
        }

        impl Guard {
            $($(#[$doc])* $vis fn $name(&self, $($argument: $type),*) {
                self.act(Command::$tell { $($argument),* });
            })*
            $($(#[$ask_doc])* $ask_vis fn $asked(&self, $($of: $of_type),*) -> u64 {
                self.act(Command::$ask { $($of),* })
            })*
        }
    };
}

// A command for a device that does not exist panics; devices are counted whether they are visible
// or not.
commands! {
    tell {
        /// Begins anew with these options: nothing is left of devices, contexts, counts and plans.
        ///
        /// # Panics
        /// If the options name no possible device.
        Reset pub fn reset(options: Options) {
            crate::nvml::hold(false);
            reset(options);
        }
        Fail pub(crate) fn plan(name: Text, nth: u64, code: u32) {
            let left = nth.saturating_sub(1);
            state().planned.once(Some(name.get()?), left, SimError::Code(code));
        }
        /// Forgets all failures that were planned.
        ForgetFailures pub fn forget_failures() {
            state().planned = Planned::default();
        }
        /// Plants a missing wait: of the calls of `cuStreamWaitEvent` from now on, every so
        /// many-th succeeds and orders nothing. 0 ends it.
        DropWaits pub fn drop_waits(every: u64) {
            state().drop_every = every;
        }
        Numbers pub(crate) fn put_numbers(device: u32, to: Out<Numbers>) {
            to.put(seat(device)?.sim.raw().numbers())?;
        }
        /// Loses the context of a device with a code: every later call in it answers that.
        ///
        /// # Panics
        /// If there is no such device.
        Poison pub fn poison(device: u32, code: u32) {
            seat(device)?.sim.poison(SimError::Code(code));
        }
        /// Takes so many bytes of a device as another process would; 0 gives them back.
        ///
        /// # Panics
        /// If there is no such device.
        Neighbours pub fn neighbours(device: u32, bytes: u64) {
            seat(device)?.sim.set_neighbours(ByteSize::new(bytes));
        }
        /// Sets the memory of a device in bytes, until its context ends.
        ///
        /// # Panics
        /// If there is no such device.
        Capacity pub fn capacity(device: u32, bytes: u64) {
            seat(device)?.sim.set_capacity(ByteSize::new(bytes));
        }
        /// Sets how many bytes of host memory may be page-locked for a device.
        ///
        /// # Panics
        /// If there is no such device.
        LockLimit pub fn lock_limit(device: u32, bytes: u64) {
            seat(device)?.sim.set_lock_limit(ByteSize::new(bytes));
        }
        /// Launches a graph that allocates so many bytes and frees them: the device keeps them.
        ///
        /// # Panics
        /// If there is no such device.
        GraphMemory pub fn graph_memory(device: u32, bytes: u64) {
            let seat = seat(device)?;
            let [_, high, reserved] = &mut state().devices[seat.device].context.graph_memory;
            (*high, *reserved) = ((*high).max(bytes), (*reserved).max(bytes));
        }
        /// Checks the model's own books.
        ///
        /// # Panics
        /// If the model is wrong, or there is no such device.
        Validate pub fn validate(device: u32) {
            seat(device)?.sim.validate();
        }
        /// Adds a process to the list of NVML: 0 for one that computes, 1 for one that draws, 2
        /// for a client of the multi-process service. Takes no memory of the device; `u64::MAX` is
        /// memory that NVML does not know.
        ///
        /// # Panics
        /// If there is no such device.
        Process pub fn process(device: u32, kind: u32, pid: u32, used: u64) {
            let process = Process { device: seat(device)?.device, kind, pid, used };
            state().nvml.processes.push(process);
        }
        /// Sets the number under which NVML lists this process; 0 hides it.
        OwnPid pub fn own_pid(pid: u32) {
            state().nvml.own_pid = pid;
        }
        /// Sets the size of an entry in NVML's lists, in units of 8 bytes: 2, 3 (the usual) or 4.
        EntryWords pub fn entry_words(words: u32) {
            state().nvml.words = usize::try_from(words).unwrap_or(3);
        }
        /// Lets the lists of NVML not return until it is called with `false`, or a reset.
        HoldNvml pub fn hold_nvml(is_held: bool) {
            crate::nvml::hold(is_held);
        }
    }
    ask {
        Calls pub(crate) fn calls_of(name: Text) {
            state().calls(&name.get()?)
        }
        /// Returns the number of all calls.
        #[must_use]
        CallsTotal pub fn calls_total() {
            state().calls_total()
        }
        /// Returns the number of waits of the host that would have kept a core busy on a device:
        /// for a stream, for the context, and for events that do not block.
        #[must_use]
        Spins pub fn spins() {
            state().spins
        }
        /// Returns the number of waits that were dropped.
        #[must_use]
        DroppedWaits pub fn dropped_waits() {
            state().dropped
        }
        /// Returns the number of times that a device's primary context is retained.
        ///
        /// # Panics
        /// If there is no such device.
        #[must_use]
        Retains pub fn retains(device: u32) {
            let seat = seat(device)?;
            state().devices[seat.device].retains
        }
        Faults pub(crate) fn put_faults(to: Out<c_char>, room: usize) {
            put_lines(&faults(), to, room)
        }
        Leaks pub(crate) fn put_leaks(to: Out<c_char>, room: usize) {
            put_lines(&leaks(), to, room)
        }
        /// Does at most so many pieces of queued work, as time would; how many were there to do.
        ///
        /// # Panics
        /// If there is no such device.
        Run pub fn run(device: u32, count: u64) {
            seat(device)?.sim.advance(usize::try_from(count).unwrap_or(usize::MAX)) as u64
        }
        /// Returns the number of sessions of NVML that have not ended.
        #[must_use]
        NvmlSessions pub fn nvml_sessions() {
            state().nvml.sessions
        }
    }
}
