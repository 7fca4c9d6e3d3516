//! Device addresses: plain numbers that are never dereferenced.
//!
//! Invariant: no sum wraps.

use std::fmt;

use lowtide_core::bytes::ByteSize;

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
    pub const fn checked_add(self, offset: ByteSize) -> Option<Self> {
        match self.0.checked_add(offset.get()) {
            Some(address) => Some(Self(address)),
            None => None,
        }
    }

    /// Returns the distance from `base` to this address, or `None` if `base` is larger.
    #[must_use]
    pub const fn offset_from(self, base: Self) -> Option<ByteSize> {
        match self.0.checked_sub(base.0) {
            Some(offset) => Some(ByteSize::new(offset)),
            None => None,
        }
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
