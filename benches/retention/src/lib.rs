//! The work of a process under measurement: the workloads, and its reports to the driver.
//!
//! One library under one small program for each allocator, so that no call pays for a choice
//! between them, and none carries another's heap along. It knows no allocator: what one does to
//! give memory back is behind [`Allocator`].
//!
//! Invariant: with the same arguments every allocator is asked for the same blocks, in the same
//! order on each thread.

pub mod burst;
pub mod chance;
pub mod child;
pub mod histogram;

use std::any::Any;

/// An error, which is printed and ends the process.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// The calls that an allocator's user makes besides allocating.
pub trait Allocator: Sync {
    /// Called before the traffic; what it returns is dropped when the traffic ends.
    fn begin(&self) -> Box<dyn Any> {
        Box::new(())
    }

    /// Called on each thread that runs out of work.
    fn rest(&self) {}

    /// Called for each request that outlives a wave. It may run `copy`, which makes a copy of the
    /// request and drops the original; does nothing by default.
    fn keep(&self, copy: &mut dyn FnMut()) {
        let _ = copy;
    }

    /// Called once, when all threads have.
    fn settle(&self) {}
}

/// Converts a count to `f64`; without loss, because counts are far below 2^52.
#[must_use]
#[expect(clippy::cast_precision_loss, reason = "counts of a run of seconds")]
pub fn count(number: u64) -> f64 {
    number as f64
}

/// Bytes as MiB.
#[must_use]
pub fn mib(bytes: u64) -> f64 {
    count(bytes) / 1_048_576.0
}
