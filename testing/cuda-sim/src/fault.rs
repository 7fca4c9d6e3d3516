//! The faults that the simulation records, and the failures that it can inject.
//!
//! A [`Fault`] is a breach of CUDA's contract, recorded even if it did no harm. Tests of a correct
//! program assert that there is none. This module records; it decides nothing.
//!
//! Invariant: a program that keeps the contract has no fault in any order.

use std::collections::VecDeque;

use super::call::Call;
use super::memory::Range;
use lowtide_core::bytes::ByteSize;
use lowtide_gpu_driver::{DeviceAddress, StreamHandle};

/// An error that can be injected into a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum SimError {
    /// `CUDA_ERROR_INVALID_VALUE`, 1.
    InvalidValue,
    /// `CUDA_ERROR_OUT_OF_MEMORY`, 2.
    OutOfMemory,
    /// `CUDA_ERROR_ECC_UNCORRECTABLE`, 214; the context is lost.
    EccUncorrectable,
    /// `CUDA_ERROR_ILLEGAL_ADDRESS`, 700; the context is lost.
    IllegalAddress,
    /// `CUDA_ERROR_LAUNCH_FAILED`, 719; the context is lost.
    LaunchFailed,
    /// `CUDA_ERROR_NOT_SUPPORTED`, 801.
    NotSupported,
    /// `CUDA_ERROR_UNKNOWN`, 999.
    Unknown,
    /// Any other result of cuda.h; 0 is not an error and is returned as 999.
    Code(u32),
}

impl SimError {
    /// Returns the result code.
    #[must_use]
    pub const fn code(self) -> u32 {
        match self {
            Self::InvalidValue => 1,
            Self::OutOfMemory => 2,
            Self::EccUncorrectable => 214,
            Self::IllegalAddress => 700,
            Self::LaunchFailed => 719,
            Self::NotSupported => 801,
            Self::Unknown | Self::Code(0) => 999,
            Self::Code(code) => code,
        }
    }
}

/// A kind of work on a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum WorkKind {
    /// A kernel that writes a pattern.
    Fill,
    /// A kernel that adds to each byte.
    Add,
    /// A kernel that compares with a pattern.
    Check,
    /// A kernel that sums bytes.
    Sum,
    /// A copy within the device.
    Copy,
    /// A copy into a store.
    Offload,
    /// A copy out of a store.
    Restore,
    /// The record of an event.
    Record,
    /// A wait for an event.
    Wait,
    /// A host function, in its place in the stream.
    HostFunction,
    /// A named kernel.
    Kernel,
    /// A copy between real host memory and the device.
    HostCopy,
    /// A memset.
    Set,
    /// The start of a stream-ordered allocation.
    PoolAlloc,
    /// The end of a stream-ordered allocation.
    PoolFree,
}

/// A kind of handle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HandleKind {
    /// A stream.
    Stream,
    /// An event.
    Event,
    /// A store of host memory.
    Store,
    /// A captured graph.
    Graph,
    /// Host memory from `host_alloc`.
    HostMemory,
    /// A physical handle.
    Physical,
    /// A pool of stream-ordered memory.
    Pool,
}

/// A breach of the contract.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fault {
    /// Work accessed an address with no memory behind it. The context is lost.
    IllegalAddress {
        /// The stream; `None` for a synchronous copy.
        stream: Option<StreamHandle>,
        /// The work.
        work: WorkKind,
        /// The range.
        range: Range,
        /// The first address in the range with no memory behind it.
        bare: DeviceAddress,
    },
    /// Memory was unmapped, or a segment released, while unfinished work referred to it. The fields
    /// name the first such work.
    UnmapBeforeDone {
        /// The range.
        range: Range,
        /// The stream of the work.
        stream: StreamHandle,
        /// The work.
        work: WorkKind,
    },
    /// A range was mapped that is partly mapped already.
    DoubleMap(Range),
    /// A range was unmapped that is partly bare.
    UnmapBare {
        /// The range.
        range: Range,
        /// The first bare address.
        bare: DeviceAddress,
    },
    /// An unmap covered only a part of a handle.
    UnmapPart {
        /// The range.
        range: Range,
        /// The handle's mapping.
        handle: Range,
    },
    /// A call treated several handles as one, or divided a range in another way than its commit.
    UnmapSeveral(Range),
    /// A reservation was released while memory was mapped in it.
    UnreserveMapped(Range),
    /// A range is not a reservation or a store, or not inside one.
    NotReserved {
        /// The call.
        call: Call,
        /// The range.
        range: Range,
    },
    /// A handle was released before, or never existed.
    StaleHandle {
        /// The call.
        call: Call,
        /// The expected kind of handle.
        kind: HandleKind,
        /// Its number.
        number: u64,
    },
    /// A map covered only a part of a handle, or extends beyond its end.
    MapPart {
        /// The range.
        range: Range,
        /// The size of the handle.
        handle_size: ByteSize,
    },
    /// Memory was freed that is not allocated: freed before, or never allocated at this address.
    NotAllocated {
        /// The call.
        call: Call,
        /// The address passed to the call.
        at: DeviceAddress,
    },
    /// Host memory or a store was released while unfinished work referred to it. The fields name the first
    /// such work.
    HostGoneBeforeDone {
        /// The start of the memory.
        at: DeviceAddress,
        /// The stream of the work.
        stream: StreamHandle,
        /// The work.
        work: WorkKind,
    },
    /// A call that is forbidden during a capture was made; it invalidated the captures.
    CaptureSpoiled {
        /// The call.
        call: Call,
    },
}

/// The most failures that can be planned at once.
const PLANNED_MAX: usize = 1_000;

/// The planned failures of calls, which `K` names.
#[derive(Debug)]
pub struct Planned<K> {
    /// The call, or any, the number of calls before the failure, and its error.
    once: VecDeque<(Option<K>, u64, SimError)>,
    always: Vec<(K, SimError)>,
}

impl<K> Default for Planned<K> {
    fn default() -> Self {
        Self { once: VecDeque::new(), always: Vec::new() }
    }
}

impl<K> Planned<K> {
    /// Makes a call fail once, after `left` others of its kind; any call with `None`.
    ///
    /// # Panics
    /// If more than a thousand failures are planned.
    pub fn once(&mut self, call: Option<K>, left: u64, error: SimError) {
        assert!(self.once.len() < PLANNED_MAX, "at most {PLANNED_MAX} failures can be planned");
        self.once.push_back((call, left, error));
    }

    /// Counts a call, and says how it fails, if it does.
    pub fn of<Q: ?Sized>(&mut self, call: &Q) -> Option<SimError>
    where
        K: PartialEq<Q>,
    {
        let mut hit = None;
        for (at, (of, left, error)) in self.once.iter_mut().enumerate() {
            if of.as_ref().is_none_or(|of| of == call) {
                match left.checked_sub(1) {
                    Some(less) => *left = less,
                    None if hit.is_none() => hit = Some((at, *error)),
                    None => {}
                }
            }
        }
        if let Some((at, error)) = hit {
            self.once.remove(at);
            return Some(error);
        }
        self.always.iter().find(|(of, _)| of == call).map(|(_, error)| *error)
    }
}

impl Planned<Call> {
    pub(super) fn always(&mut self, call: Call, error: Option<SimError>) {
        self.always.retain(|(of, _)| *of != call);
        self.always.extend(error.map(|error| (call, error)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_come_at_their_turn_and_once_or_always() {
        let mut planned = Planned::default();
        planned.once(Some(Call::Map), 1, SimError::OutOfMemory);
        planned.once(None, 2, SimError::Unknown);
        let calls = [Call::Map, Call::Create, Call::Map, Call::Map, Call::Map];
        let hits = calls.map(|call| planned.of(&call));
        let wanted = [None, None, Some(SimError::OutOfMemory), Some(SimError::Unknown), None];
        assert_eq!(hits, wanted);
        planned.always(Call::Map, Some(SimError::NotSupported));
        assert_eq!(planned.of(&Call::Map), Some(SimError::NotSupported));
        assert_eq!(planned.of(&Call::Map), Some(SimError::NotSupported));
        assert_eq!(planned.of(&Call::Create), None);
        planned.always(Call::Map, None);
        assert_eq!(planned.of(&Call::Map), None);
    }
}
