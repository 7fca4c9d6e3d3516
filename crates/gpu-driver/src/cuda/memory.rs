//! The memory of a device, with the selected backend.
//!
//! This module only dispatches between the two kinds. A call that the backend does not support is a
//! typed error.
//!
//! Invariant: `backend = CudaVirtualMemory <=> Virtual`.

use super::calls::Answer;
use super::context::Seat;
use super::segments::{Segments, Source};
use super::vmm::VirtualMemory;
use crate::{Backend, DriverError};
use lowtide_core::bytes::ByteSize;

/// Address space with mapped memory, or segments.
pub(super) enum Memory {
    Virtual(VirtualMemory),
    Segments(Segments),
}

impl Memory {
    pub(super) const fn backend(&self) -> Backend {
        match self {
            Self::Virtual(_) => Backend::CudaVirtualMemory,
            Self::Segments(segments) => match segments.source() {
                Source::Pool(_) => Backend::CudaPool,
                Source::Plain(_) => Backend::CudaPlain,
            },
        }
    }

    /// Returns the unit of addresses and sizes.
    pub(super) const fn unit(&self) -> ByteSize {
        match self {
            Self::Virtual(memory) => memory.unit(),
            Self::Segments(segments) => segments.unit(),
        }
    }

    pub(super) const fn can_remap(&self) -> bool {
        match self {
            Self::Virtual(memory) => memory.can_remap(),
            Self::Segments(_) => false,
        }
    }

    /// Returns `true` for managed memory, which the driver moves between device and host by itself.
    pub(super) fn is_managed(&self) -> bool {
        matches!(self.source(), Some(Source::Plain(pieces)) if pieces.is_managed())
    }

    /// Returns `true` if the memory comes from a pool that other code uses as well.
    pub(super) fn is_shared(&self) -> bool {
        matches!(self.source(), Some(Source::Pool(pool)) if pool.is_shared())
    }

    fn source(&self) -> Option<&Source> {
        match self {
            Self::Virtual(_) => None,
            Self::Segments(segments) => Some(segments.source()),
        }
    }

    pub(super) fn stuck(&self) -> u64 {
        match self {
            Self::Virtual(memory) => memory.stuck(),
            Self::Segments(segments) => segments.stuck(),
        }
    }

    pub(super) fn space(&self) -> Answer<&VirtualMemory> {
        match self {
            Self::Virtual(memory) => Ok(memory),
            Self::Segments(_) => Err(DriverError::Unsupported { what: "virtual memory" }),
        }
    }

    pub(super) fn segments(&self) -> Answer<&Segments> {
        match self {
            Self::Segments(segments) => Ok(segments),
            Self::Virtual(_) => {
                let what = "memory in segments";
                Err(DriverError::Unsupported { what })
            }
        }
    }

    /// Closes the backend, of which no memory is left.
    pub(super) fn close(&self, seat: &Seat) -> Answer {
        match self {
            Self::Virtual(_) => Ok(()),
            Self::Segments(segments) => seat.call(|calls| segments.close(calls, seat.own)),
        }
    }
}
