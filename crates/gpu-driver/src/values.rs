//! Device addresses: plain numbers that are never dereferenced.
//!
//! Invariant: no sum wraps.

use std::fmt;
use std::str::FromStr;

use lowtide_core::bytes::ByteSize;

use super::DriverError;

/// An address in a driver's address space.
///
/// With the host backend it is an address of this process. Memory is never accessed through it
/// directly, only through [`Driver::host_pointer`].
///
/// [`Driver::host_pointer`]: super::Driver::host_pointer
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeviceAddress(u64);

impl DeviceAddress {
    /// Creates an address from its numeric value.
    #[must_use]
    pub const fn new(address: u64) -> Self {
        Self(address)
    }

    /// Returns the numeric value.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0
    }

    /// Returns the address `offset` bytes above this one, or `None` if the sum overflows.
    #[must_use]
    #[inline]
    pub fn checked_add(self, offset: ByteSize) -> Option<Self> {
        self.0.checked_add(offset.get()).map(Self)
    }

    /// Returns the distance from `base` to this address, or `None` if `base` is larger.
    #[must_use]
    #[inline]
    pub fn offset_from(self, base: Self) -> Option<ByteSize> {
        self.0.checked_sub(base.0).map(ByteSize::new)
    }

    /// Returns `true` if the address is a multiple of `alignment`.
    ///
    /// # Panics
    /// If `alignment` is zero.
    #[must_use]
    #[inline]
    pub const fn is_multiple_of(self, alignment: ByteSize) -> bool {
        assert!(!alignment.is_zero(), "the alignment must not be zero");
        self.0.is_multiple_of(alignment.get())
    }
}

impl fmt::Debug for DeviceAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeviceAddress({:#x})", self.0)
    }
}

impl fmt::Display for DeviceAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

// Handles of driver objects (streams, events, host stores), and the values of driver queries.
//
// A handle is a number and owns nothing. An invented handle does no harm by itself: every call
// that takes one is unsafe, and so is passing a stream to an arena (`DeviceArena::lane`).
//
// Invariant: a driver never reuses a number while the object with that number exists.

/// A stream: a queue of device work that runs in order (`CUstream`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StreamHandle(u64);

impl StreamHandle {
    /// CUDA's legacy default stream (`CU_STREAM_LEGACY`), for code that queues its work there, such
    /// as PyTorch. Its work waits for that of every stream that was not created as non-blocking,
    /// and the other way round. A handle of 0 and the default stream of a thread (2) are rejected:
    /// the first is usually a mistake, and the second is a different stream in each thread.
    pub const LEGACY: Self = Self(1);

    /// Creates a handle from its number.
    #[must_use]
    pub const fn new(number: u64) -> Self {
        Self(number)
    }

    /// Returns the stream that a handle from other code stands for: the legacy default stream for 0
    /// and 1. Returns `None` for 2, which is another stream in each thread.
    #[inline]
    #[must_use]
    pub const fn of_cuda(handle: u64) -> Option<Self> {
        match handle {
            0 | 1 => Some(Self::LEGACY),
            2 => None,
            handle => Some(Self(handle)),
        }
    }

    /// Returns the number of the stream.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0
    }
}

/// The total and free memory of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "two facts")]
pub struct DeviceMemory {
    /// The total memory.
    pub total: ByteSize,
    /// Memory that no process has allocated.
    pub free: ByteSize,
}

impl DeviceMemory {
    /// Returns the memory in use by all processes.
    #[must_use]
    pub const fn taken(self) -> ByteSize {
        self.total.saturating_sub(self.free)
    }
}

/// An event: a mark in a stream that completes when all work before it is done (`CUevent`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EventHandle(u64);

impl EventHandle {
    /// Creates a handle from its number.
    #[must_use]
    pub const fn new(number: u64) -> Self {
        Self(number)
    }

    /// Returns the number of the event.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0
    }
}

/// Host memory held by a driver, into which device memory is offloaded, or a part of it.
///
/// It is a number rather than a pointer, and only the driver accesses the memory. No slice of it
/// can therefore exist while the device writes to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "an address and a size")]
pub struct HostStore {
    /// Its address in the driver's own numbering: that of a part is higher by the part's offset.
    pub at: u64,
    /// Its size in bytes, or that of the part.
    pub size: ByteSize,
}

// The available backends and the capabilities of each: plain values.
//
// Invariant: each name is a valid metric label.

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
/// [`DriverError::Unsupported`](super::DriverError::Unsupported). The default is none of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[expect(clippy::struct_excessive_bools, reason = "independent facts, each with its name")]
pub struct Capabilities {
    /// Address space can be reserved independently of memory, so the memory of live blocks can be
    /// released and later restored at the same addresses. Without it, memory is allocated in
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

// Stable device identifiers, in the format of nvidia-smi.
//
// An ordinal may refer to a different device after a restart; a UUID does not. This module looks
// up no device.
//
// Invariant: `DeviceUuid::from_str(uuid.to_string()) = uuid`.

/// The UUID of a device, which stays the same across restarts.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeviceUuid([u8; 16]);

impl DeviceUuid {
    /// Creates a UUID from its bytes, in the order of `CUuuid`.
    #[must_use]
    pub const fn new(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }

    /// Returns the bytes.
    #[must_use]
    pub const fn bytes(self) -> [u8; 16] {
        self.0
    }
}

impl fmt::Display for DeviceUuid {
    /// Writes the UUID like nvidia-smi: `GPU-` and groups of 8, 4, 4, 4 and 12 digits.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("GPU")?;
        for (at, byte) in self.0.iter().enumerate() {
            if [0, 4, 6, 8, 10].contains(&at) {
                f.write_str("-")?;
            }
            write!(f, "{byte:02x}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for DeviceUuid {
    /// Writes the UUID as its text.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for DeviceUuid {
    type Err = DriverError;

    fn from_str(text: &str) -> Result<Self, DriverError> {
        let refused = || DriverError::InvalidUuid { text: text.to_owned() };
        let digits = text.strip_prefix("GPU-").or_else(|| text.strip_prefix("MIG-"));
        let digits: String = digits.ok_or_else(refused)?.chars().filter(|&it| it != '-').collect();
        let is_hex = digits.len() == 32 && digits.bytes().all(|digit| digit.is_ascii_hexdigit());
        let number = u128::from_str_radix(&digits, 16).ok().filter(|_| is_hex);
        Ok(Self(number.ok_or_else(refused)?.to_be_bytes()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_do_not_wrap() {
        let last = DeviceAddress::new(u64::MAX);
        assert_eq!(last.checked_add(ByteSize::new(1)), None);
        assert_eq!(DeviceAddress::new(1).offset_from(last), None);
        let base = DeviceAddress::new(4096);
        let at = base.checked_add(ByteSize::new(512)).expect("fits");
        assert_eq!(at.offset_from(base), Some(ByteSize::new(512)));
        assert!(at.is_multiple_of(ByteSize::new(256)) && !at.is_multiple_of(ByteSize::kib(1)));
        assert_eq!(format!("{at} {at:?}"), "0x1200 DeviceAddress(0x1200)");
    }
}

#[cfg(test)]
mod capabilities_tests {
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

#[cfg(test)]
mod uuid_tests {
    use super::*;

    #[test]
    fn a_uuid_is_read_as_it_is_written() {
        let bytes = std::array::from_fn(|at| u8::try_from(at).expect("small") * 17);
        let uuid = DeviceUuid::new(bytes);
        assert_eq!(uuid.to_string(), "GPU-00112233-4455-6677-8899-aabbccddeeff");
        assert_eq!((uuid.to_string().parse(), format!("{uuid:?}")), (Ok(uuid), uuid.to_string()));
        assert_eq!("MIG-00112233-4455-6677-8899-AABBCCDDEEFF".parse(), Ok(uuid));
    }

    #[test]
    fn what_is_no_uuid_is_named() {
        let short = "GPU-00112233-4455-6677-8899-aabbccddeef";
        for text in ["", "0", "GPU-", "GPU-0", short, "00112233-4455-6677-8899-aabbccddeeff"] {
            let error = text.parse::<DeviceUuid>().expect_err(text);
            assert_eq!(error, DriverError::InvalidUuid { text: text.to_owned() });
        }
        let signed = "GPU-+0112233-4455-6677-8899-aabbccddeeff";
        assert!(signed.parse::<DeviceUuid>().is_err() && "GPU-é".parse::<DeviceUuid>().is_err());
    }
}
