//! What there is to choose from, and what each choice can do: plain values.
//!
//! Invariant: each name fits a label of a metric.

use std::fmt;

use crate::bytes::ByteSize;

/// A kind of memory of the host, for data on its way to a device or back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum HostMemory {
    /// Its pages stay where they are: never swapped, and a device copies from them directly.
    PageLocked,
    /// Plain memory: the kernel may swap it, and a device copies from it by way of a buffer of
    /// the driver's own.
    Pageable,
}

impl HostMemory {
    /// The name under which metrics and endpoints show it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::PageLocked => "page_locked",
            Self::Pageable => "pageable",
        }
    }
}

impl fmt::Display for HostMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// What a driver can do; asked for before use, because what is missing is a typed error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(clippy::struct_excessive_bools, reason = "independent facts, each with its name")]
pub struct Capabilities {
    /// Address space can be reserved apart from memory. Without it, memory is had in segments, at
    /// addresses of the driver's choice:
    /// [`Driver::segment_create`](super::Driver::segment_create).
    pub virtual_memory: bool,
    /// The host reads and writes the memory through
    /// [`Driver::host_pointer`](super::Driver::host_pointer).
    pub host_access: bool,
    /// The memory is memory of this process, in its resident set: it counts in the host's budget.
    pub host_backed: bool,
    /// Device and host are one memory, as with integrated GPUs, though the kernel counts what the
    /// device commits neither in the resident set of this process nor against its cgroup. It counts
    /// in the host's budget all the same; see [`Capabilities::counts_as_host`].
    pub unified: bool,
    /// Live blocks can lose their memory and get it back at the same addresses.
    pub same_address_wake: bool,
    /// The memory behind one part of a reservation can go behind another without being given back:
    /// [`Driver::remap`](super::Driver::remap).
    pub remap: bool,
    /// Work goes on after the call that started it returned, so that a freed block may still be
    /// used by the device.
    pub asynchronous: bool,
    /// Host memory can be page-locked. A limit of the system may still refuse it.
    pub page_locked: bool,
    /// The smallest unit that is committed; a power of two. Every address and size given to the
    /// driver is a multiple of it.
    pub granularity: ByteSize,
}

impl Capabilities {
    /// Whether device memory counts in the host's budget, and the device has none of its own: every
    /// byte that is committed is a byte less for the host.
    #[must_use]
    pub const fn counts_as_host(&self) -> bool {
        self.host_backed || self.unified
    }
}

/// The driver in use, out of the ladder.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Backend {
    /// CUDA's virtual memory calls: reserve, create, map.
    CudaVirtualMemory,
    /// A CUDA stream-ordered pool of our own.
    CudaPool,
    /// Plain CUDA allocations.
    CudaPlain,
    /// Private anonymous memory of this process.
    Host,
}

impl Backend {
    /// The name under which metrics and endpoints show it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::CudaVirtualMemory => "cuda_virtual_memory",
            Self::CudaPool => "cuda_pool",
            Self::CudaPlain => "cuda_plain",
            Self::Host => "host",
        }
    }
}

impl fmt::Display for Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rungs_have_names_that_fit_a_metric_label() {
        for backend in
            [Backend::CudaVirtualMemory, Backend::CudaPool, Backend::CudaPlain, Backend::Host]
        {
            let name = backend.to_string();
            assert!(name.chars().all(|c| c.is_ascii_lowercase() || c == '_'), "{name}");
        }
    }
}
