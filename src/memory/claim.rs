//! The claim that makes a `Memory` the only one of its process.
//!
//! Invariant: at most one claim is held in a process.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use crate::fork::Birth;

use super::error::StartError;

/// The number of threads that every `Memory` has.
pub(super) const THREADS: usize = 2;

/// The process generation in which a `Memory` runs, or [`NOWHERE`]. A forked child does not inherit
/// the parent's claim.
static STARTED: AtomicU64 = AtomicU64::new(NOWHERE);
/// No `Memory` runs.
const NOWHERE: u64 = u64::MAX;

/// The right to run the one `Memory` of this process. Released once: by the last of its threads
/// when it ends, or when every handle is dropped.
pub(super) struct Claim {
    held: AtomicBool,
    /// The number of threads that have not ended.
    pub(super) threads: AtomicUsize,
    pub(super) birth: Birth,
    /// `false` for a detached `Memory`.
    pub(super) is_attached: bool,
}

impl Claim {
    /// Takes the claim; `None` if another `Memory` holds it.
    ///
    /// # Errors
    /// [`StartError::AlreadyStarted`].
    pub(super) fn take() -> Result<Arc<Self>, StartError> {
        let birth = Birth::now();
        let here = birth.generation();
        let claim = |by| (by != here).then_some(here);
        let taken = STARTED.fetch_update(Ordering::AcqRel, Ordering::Acquire, claim);
        taken.map_err(|_| StartError::AlreadyStarted)?;
        let (held, threads) = (AtomicBool::new(true), AtomicUsize::new(THREADS));
        Ok(Arc::new(Self { held, threads, birth, is_attached: true }))
    }

    /// Returns what stands for the claim of a detached `Memory`, which needs none.
    pub(super) fn of_none() -> Arc<Self> {
        let (held, threads) = (AtomicBool::new(false), AtomicUsize::new(THREADS));
        Arc::new(Self { held, threads, birth: Birth::now(), is_attached: false })
    }

    /// Allows the next `Memory` to start, once. Does nothing in a forked child, which has its own
    /// claim.
    pub(super) fn release(&self) {
        if self.birth.is_here() && self.held.swap(false, Ordering::AcqRel) {
            STARTED.store(NOWHERE, Ordering::Release);
        }
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.release();
    }
}
