//! The report of a shutdown: what was outstanding when a `Memory` ended.

use std::fmt;

#[cfg(feature = "device")]
use crate::bytes::ByteSize;

/// The outstanding work when a [`Memory`](super::Memory) ended. Its `Debug` output is its message.
#[derive(Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Shutdown {
    /// The number of requests that hold permits.
    pub requests: u64,
    /// The resources that were in use until the deadline, each with the reason.
    pub resources: Vec<String>,
    /// The bytes of device memory in buffers that are still held.
    #[cfg(feature = "device")]
    pub device_live: ByteSize,
    /// The threads that panicked.
    pub panicked: Vec<String>,
    /// The threads that were still running a job at the deadline. They end after it.
    pub busy: Vec<String>,
    /// `true` if memory was exhausted and the policy is
    /// [`ExhaustionPolicy::Exit`](crate::config::ExhaustionPolicy). It makes the report an error,
    /// so that a `main` that returns it exits with a status above 0 and is restarted.
    pub exhausted: bool,
    /// `true` if called in a forked child, in which nothing runs.
    pub forked: bool,
}

impl Shutdown {
    /// Returns `true` if nothing is outstanding and memory was not exhausted.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        *self == Self::default()
    }

    /// Returns the report as an error if something is outstanding or memory was exhausted.
    ///
    /// # Errors
    /// The report itself.
    pub fn into_result(self) -> Result<(), Self> {
        if self.is_clean() { Ok(()) } else { Err(self) }
    }
}

impl std::error::Error for Shutdown {}

impl fmt::Display for Shutdown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.forked {
            return f.write_str("forked child: nothing to shut down");
        }
        if self.exhausted {
            f.write_str("memory exhausted; ")?;
        }
        if (Self { exhausted: false, ..self.clone() }).is_clean() {
            return f.write_str("nothing outstanding");
        }
        let plural = if self.requests == 1 { "" } else { "s" };
        write!(f, "{} request{plural}", self.requests)?;
        #[cfg(feature = "device")]
        write!(f, ", {} of device memory live", self.device_live)?;
        for resource in &self.resources {
            write!(f, "; {resource}")?;
        }
        for thread in &self.panicked {
            write!(f, "; {thread} panicked")?;
        }
        for thread in &self.busy {
            write!(f, "; {thread} still running")?;
        }
        Ok(())
    }
}
