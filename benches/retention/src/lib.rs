//! What a process under measurement does: the workloads, and what is said to the driver about them.
//!
//! One library under one small program for each allocator, so that no call pays for a choice
//! between them, and none carries another's heap along. It knows no allocator: what one does to
//! give memory back is behind [`Allocator`].
//!
//! Invariant: with the same arguments every allocator is asked for the same blocks, in the same
//! order on each thread.

pub mod chance;
pub mod child;
pub mod histogram;
pub mod statm;
pub mod workload;

use std::any::Any;

/// What goes wrong is told and ends the process.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// What an allocator's user does besides allocating.
pub trait Allocator: Sync {
    /// Called before the traffic; what it returns is dropped when the traffic ends.
    fn begin(&self) -> Box<dyn Any> {
        Box::new(())
    }

    /// Called on each thread that runs out of work.
    fn rest(&self) {}

    /// Called once, when all threads have.
    fn settle(&self) {}
}

/// How many, of a count that is far below 2^52.
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
