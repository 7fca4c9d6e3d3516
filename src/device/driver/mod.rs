//! What gives device memory: address space first, physical memory behind parts of it later.
//!
//! A driver moves memory and keeps no policy. It knows nothing of arenas, blocks, limits or time,
//! and it is called with no lock of ours held. Every call is all or nothing: on an error the range
//! is as it was before.
//!
//! Invariant: `committed ranges <= reserved ranges`; a byte is accessible iff its granule is
//! committed.

#[cfg(feature = "cuda")]
pub mod cuda;
mod error;
pub mod host;
#[cfg(all(test, not(lowtide_loom)))]
pub(crate) mod trial;

use std::fmt;
use std::ptr::NonNull;

pub use error::DriverError;

use crate::bytes::ByteSize;

/// An address in a driver's address space. On the host rung it is an address of this process; it
/// is never read or written through, but by way of [`Driver::host_pointer`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeviceAddress(u64);

impl DeviceAddress {
    /// The address with this number.
    #[must_use]
    pub const fn new(address: u64) -> Self {
        Self(address)
    }

    /// The number of the address.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0
    }

    /// The address this much further on, or `None` where there is none.
    #[must_use]
    pub const fn checked_add(self, offset: ByteSize) -> Option<Self> {
        match self.0.checked_add(offset.get()) {
            Some(address) => Some(Self(address)),
            None => None,
        }
    }

    /// How far this address lies behind `base`, or `None` where it lies before it.
    #[must_use]
    pub const fn offset_from(self, base: Self) -> Option<ByteSize> {
        match self.0.checked_sub(base.0) {
            Some(offset) => Some(ByteSize::new(offset)),
            None => None,
        }
    }

    /// Whether the address is a multiple of `alignment`.
    ///
    /// # Panics
    /// If `alignment` is zero.
    #[must_use]
    #[inline]
    pub const fn is_multiple_of(self, alignment: ByteSize) -> bool {
        assert!(!alignment.is_zero(), "an alignment is not zero");
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

/// What every size of [`Driver::host_alloc`] is a multiple of. 64 KiB: the largest page in use, and
/// so a multiple of every page.
pub const HOST_GRANULARITY: ByteSize = ByteSize::kib(64);

/// What every address from [`Driver::host_alloc`] is a multiple of: the smallest page in use.
pub const HOST_ALIGNMENT: ByteSize = ByteSize::kib(4);

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
#[expect(clippy::struct_excessive_bools, reason = "six independent facts, each with its name")]
pub struct Capabilities {
    /// Address space can be reserved apart from memory.
    pub virtual_memory: bool,
    /// The host reads and writes the memory through [`Driver::host_pointer`].
    pub host_access: bool,
    /// The memory is host memory: it counts in the host's budget.
    pub host_backed: bool,
    /// Live blocks can lose their memory and get it back at the same addresses.
    pub same_address_wake: bool,
    /// Work goes on after the call that started it returned, so that a freed block may still be
    /// used by the device.
    pub asynchronous: bool,
    /// Host memory can be page-locked. A limit of the system may still refuse it.
    pub page_locked: bool,
    /// The smallest unit that is committed; a power of two. Every address and size given to the
    /// driver is a multiple of it.
    pub granularity: ByteSize,
}

/// The driver in use, out of the ladder.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Rung {
    /// CUDA's virtual memory calls: reserve, create, map.
    CudaVirtualMemory,
    /// A CUDA stream-ordered pool of our own.
    CudaPool,
    /// Plain CUDA allocations.
    CudaPlain,
    /// Private anonymous memory of this process.
    Host,
}

impl Rung {
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

impl fmt::Display for Rung {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Keeps [`Driver`] to this crate: to implement, and to take memory away with.
pub(crate) mod sealed {
    /// Implemented by the drivers of this crate and by nothing else.
    #[expect(unnameable_types, reason = "that is what seals the other")]
    pub trait Sealed {}

    /// Shows that an arena calls: it knows which granules nobody uses.
    #[expect(unnameable_types, reason = "nobody else is to have one")]
    #[derive(Clone, Copy, Debug)]
    pub struct Key(());

    impl Key {
        /// For the arena that made the reservation, and for the drivers' own tests.
        pub(crate) const fn new() -> Self {
            Self(())
        }
    }
}

use sealed::Key;

/// The backend that gives device memory.
///
/// Sealed: buffers hand out references into what [`Driver::host_pointer`] names, so a driver that
/// broke the contract from safe code of another crate would break memory safety. For the same
/// reason what changes the memory behind an address takes a key that only this crate can make:
///
/// ```compile_fail,E0061
/// use lowtide::device::{HostDriver, driver::{DeviceAddress, Driver as _}};
/// let mine = [7_u8; 64];
/// let at = DeviceAddress::new(mine.as_ptr() as u64);
/// let _ = HostDriver::new().decommit(at, lowtide::ByteSize::mib(2)); // would unmap it
/// ```
///
/// Calls may come from several threads at once, for ranges that do not overlap.
///
/// Every `at` and `size` is a multiple of [`Capabilities::granularity`], `size` is not zero, and
/// the range lies in one reservation. Host memory has its own measure, [`HOST_GRANULARITY`].
pub trait Driver: sealed::Sealed + fmt::Debug + Send + Sync {
    /// Which driver this is.
    fn rung(&self) -> Rung;

    /// What it can do; the same for as long as it lives.
    fn capabilities(&self) -> Capabilities;

    /// Holds address space, with nothing behind it, at a multiple of the granularity.
    ///
    /// # Errors
    /// [`DriverError::OutOfMemory`] where there is no such range: a smaller one may be there.
    fn reserve(&self, size: ByteSize) -> Result<DeviceAddress, DriverError>;

    /// Gives a whole reservation back. Nothing in it is committed.
    ///
    /// # Errors
    /// As the driver says; the range then stays reserved.
    fn unreserve(&self, at: DeviceAddress, size: ByteSize, _: Key) -> Result<(), DriverError>;

    /// Puts memory behind a bare part of a reservation. Its contents are unspecified (host: zero).
    ///
    /// # Errors
    /// [`DriverError::OutOfMemory`] where the device has no more; the range then stays bare.
    fn commit(&self, at: DeviceAddress, size: ByteSize, _: Key) -> Result<(), DriverError>;

    /// Takes the memory behind a committed part away. The caller has proved that every use of it
    /// is complete. The range need not be one that was committed by one call.
    ///
    /// # Errors
    /// As the driver says; the range then stays committed, its contents lost.
    fn decommit(&self, at: DeviceAddress, size: ByteSize, _: Key) -> Result<(), DriverError>;

    /// Copies bytes between two committed parts that do not overlap, and waits until they are
    /// copied. Any address and any size is allowed; nobody uses either part meanwhile.
    ///
    /// # Errors
    /// As the driver says; the contents of `to` are unspecified then.
    fn copy(
        &self,
        from: DeviceAddress,
        to: DeviceAddress,
        size: ByteSize,
        _: Key,
    ) -> Result<(), DriverError>;

    /// How much more the device could give to anybody now; `None` where the host's budget rules.
    ///
    /// # Errors
    /// As the driver says.
    fn headroom(&self) -> Result<Option<ByteSize>, DriverError>;

    /// Host memory that the device can copy from and to; page-locked or an error, never something
    /// else in its place. It begins at a multiple of [`HOST_ALIGNMENT`]; `size` is a multiple of
    /// [`HOST_GRANULARITY`] and not zero. Every byte of it is initialised, and may be read and
    /// written until [`Driver::host_free`]. In a forked child it is readable still, as a copy.
    ///
    /// # Errors
    /// [`DriverError::LockLimit`] where the process may not lock so much,
    /// [`DriverError::OutOfMemory`], [`DriverError::Unsupported`] where there is no such memory.
    fn host_alloc(&self, size: ByteSize, memory: HostMemory) -> Result<NonNull<u8>, DriverError> {
        let _ = (size, memory);
        Err(DriverError::Unsupported { what: "memory of the host" })
    }

    /// Gives back, whole, what [`Driver::host_alloc`] gave. The caller has proved that every use of
    /// it is complete, copies of a device among them.
    ///
    /// # Errors
    /// As the driver says; the memory then stays, as it was.
    fn host_free(
        &self,
        at: NonNull<u8>,
        size: ByteSize,
        memory: HostMemory,
        _: Key,
    ) -> Result<(), DriverError> {
        let _ = (at, size, memory);
        Err(DriverError::Unsupported { what: "memory of the host" })
    }

    /// The pointer for an address in a reservation of this driver, with the provenance of that
    /// reservation; `None` without [`Capabilities::host_access`]. While the range is committed it
    /// may be read and written, and every byte of it is initialised.
    fn host_pointer(&self, at: DeviceAddress) -> Option<NonNull<u8>> {
        let _ = at;
        None
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

    #[test]
    fn rungs_have_names_that_fit_a_metric_label() {
        for rung in [Rung::CudaVirtualMemory, Rung::CudaPool, Rung::CudaPlain, Rung::Host] {
            let name = rung.to_string();
            assert!(name.chars().all(|c| c.is_ascii_lowercase() || c == '_'), "{name}");
        }
    }
}
