//! The available backends and the capabilities of each: plain values.
//!
//! Invariant: each name is a valid metric label.

use lowtide_core::bytes::ByteSize;

lowtide_core::named_enum! {
    /// A kind of host memory, used for transfers to and from a device.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub enum HostMemory {
        /// Page-locked memory: its pages are never swapped, and a device copies from them directly.
        PageLocked = "page_locked",
        /// Ordinary memory: the kernel may swap it, and a device copies from it through a staging
        /// buffer of the driver.
        Pageable = "pageable",
    }
}

/// The features that a driver supports.
///
/// Check them before use: a call to a missing feature returns
/// [`DriverError::Unsupported`](super::DriverError::Unsupported).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(clippy::struct_excessive_bools, reason = "independent facts, each with its name")]
pub struct Capabilities {
    /// Address space can be reserved independently of memory. Without it, memory is allocated in
    /// segments at addresses that the driver chooses:
    /// [`Driver::segment_create`](super::Driver::segment_create).
    pub virtual_memory: bool,
    /// The host can read and write the memory through
    /// [`Driver::host_pointer`](super::Driver::host_pointer).
    pub host_access: bool,
    /// The memory is part of this process's resident set, so it counts in the host's budget.
    pub host_backed: bool,
    /// Device and host share one memory, as in integrated GPUs, but the kernel counts committed
    /// device memory neither in the resident set of this process nor against its cgroup. It still
    /// counts in the host's budget; see [`Capabilities::counts_as_host`].
    pub unified: bool,
    /// The memory of live blocks can be released and later restored at the same addresses.
    pub same_address_wake: bool,
    /// Memory can be moved from one part of a reservation to another without being released:
    /// [`Driver::remap`](super::Driver::remap).
    pub remap: bool,
    /// Work continues after the call that started it has returned, so the device may still use a
    /// freed block.
    pub asynchronous: bool,
    /// Host memory can be page-locked. A system limit may still refuse it.
    pub page_locked: bool,
    /// Memory is committed in handles, each of which is released as a whole. A call costs per
    /// handle, so large handles are cheaper; memory in use anywhere in a handle keeps all of it.
    pub handles: bool,
    /// The smallest unit that can be committed; a power of two. Every address and size passed to
    /// the driver is a multiple of it.
    pub granularity: ByteSize,
}

impl Capabilities {
    /// Returns `true` if device memory counts in the host's budget because the device has no memory
    /// of its own. Each committed byte then leaves one byte less for the host.
    #[must_use]
    pub const fn counts_as_host(&self) -> bool {
        self.host_backed || self.unified
    }
}

lowtide_core::named_enum! {
    /// The way in which a driver allocates device memory.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub enum Backend {
        /// CUDA's virtual memory calls: reserve, create, map.
        CudaVirtualMemory = "cuda_virtual_memory",
        /// A CUDA stream-ordered pool owned by this crate.
        CudaPool = "cuda_pool",
        /// Plain CUDA allocations.
        CudaPlain = "cuda_plain",
        /// Private anonymous memory of this process.
        Host = "host",
        /// Host memory for copies to and from a device: a pool of page-locked memory.
        PinnedHost = "pinned_host",
        /// A driver from outside this workspace.
        #[default]
        Custom = "custom",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rungs_have_names_that_fit_a_metric_label() {
        for backend in [
            Backend::CudaVirtualMemory,
            Backend::CudaPool,
            Backend::CudaPlain,
            Backend::Host,
            Backend::PinnedHost,
            Backend::Custom,
        ] {
            let name = backend.to_string();
            assert!(name.chars().all(|c| c.is_ascii_lowercase() || c == '_'), "{name}");
        }
    }
}
