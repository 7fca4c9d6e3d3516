//! The right to use an arena's memory while it lasts.
//!
//! A slice of a buffer is had only by showing a lease, so that use without one does not compile.
//! Leases nest and are counted; while one is held the arena is awake. It names no streams yet:
//! on drivers whose work completes at once there are none.
//!
//! Invariant: `leases held = leases entered - leases dropped`, in the process of the arena.

use std::sync::Arc;

use super::error::DeviceError;
use super::shared::Shared;

/// Keeps an arena awake; had from [`DeviceArena::enter`](super::DeviceArena::enter).
///
/// One lease serves all buffers of its arena, and no buffer of another:
/// ```
/// use std::sync::Arc;
/// use lowtide::clock::SystemClock;
/// use lowtide::device::{ArenaConfig, DeviceArena, DeviceError, HostDriver, Region};
///
/// let driver = Arc::new(HostDriver::new());
/// let open = |name: &str| {
///     let clock = Arc::new(SystemClock::new());
///     DeviceArena::open(driver.clone(), clock, ArenaConfig::new(name))
/// };
/// let (arena, other) = (open("one")?, open("other")?);
/// let ones = arena.alloc_from(&[1_u8; 16], Region::Stable)?;
/// let twos = arena.alloc_from(&[2_u8; 16], Region::Stable)?;
/// let lease = arena.enter()?;
/// assert_eq!((ones.slice(&lease)?[0], twos.slice(&lease)?[0]), (1, 2));
/// let foreign = other.enter()?;
/// assert!(matches!(ones.slice(&foreign), Err(DeviceError::ForeignLease { .. })));
/// # Ok::<(), DeviceError>(())
/// ```
#[derive(Debug)]
#[must_use = "an arena is awake only while the lease is held"]
pub struct Lease {
    pub(super) arena: Arc<Shared>,
}

impl Lease {
    /// One more lease of an arena. Waits for the end of a move that is under way; none follows
    /// while the lease is held.
    pub(super) fn of(arena: &Arc<Shared>) -> Result<Self, DeviceError> {
        arena.check_open()?;
        let mut books = arena.wait_for_move(arena.books());
        let leases = books.leases.checked_add(1);
        books.leases = leases.ok_or(DeviceError::TooManyLeases { limit: u32::MAX })?;
        drop(books);
        Ok(Self { arena: Arc::clone(arena) })
    }
}

impl Drop for Lease {
    /// Takes the arena's lock for one subtraction; in a forked child does nothing.
    fn drop(&mut self) {
        if self.arena.check_here().is_ok() {
            self.arena.books().leases -= 1;
        }
    }
}
