//! Admission, pressure levels, reclaim and managed resources. Policy only: it depends on traits,
//! not on the heap or an arena.
//!
//! A sample of the machine ([`Signals`]) becomes a level with hysteresis ([`Level`]) and an
//! allowance in bytes ([`Ledger`]). Requests and resources reserve bytes of it ([`Admission`],
//! [`Managed`]). [`Maintenance`] decides which memory to release, in the order of the reclaim steps
//! ([`ReclaimStep`]); implementations of its traits release it. Nothing here purges, allocates device
//! memory, starts a permanent thread or needs an async runtime.
//!
//! On its own, admission works against a fixed ceiling. No thread runs and nothing is measured:
//!
//! ```
//! use lowtide_admission::ByteSize;
//! use lowtide_admission::{Admission, Cost, Rejected};
//!
//! let admission = Admission::with_limit(ByteSize::mib(100));
//! let mut permit = admission.try_admit(Cost::host(ByteSize::mib(60)))?;
//! let second = admission.try_admit(Cost::host(ByteSize::mib(50)));
//! assert!(matches!(second, Err(Rejected::Full { .. }))); // answer with 503
//! permit.shrink(ByteSize::mib(20)); // the body turned out smaller
//! let second = admission.try_admit(Cost::host(ByteSize::mib(50)))?;
//! drop((permit, second)); // releases both
//! # Ok::<(), Rejected>(())
//! ```
//!
//! To measure, create a [`Maintenance`] from settings, a [`Sensor`] that takes samples, the
//! [`Admission`] to correct, the [`Resources`] and each [`ReclaimStep`]. Create its
//! [`Worker`](Maintenance::worker) from [`MaintenanceActions`], which carry out jobs. Run both on
//! threads of your own with [`run_control`] and [`run_worker`]. `src/memory/builder.rs` does this
//! for [`Memory`](https://docs.rs/lowtide/latest/lowtide/memory/struct.Memory.html).
//!
//! Invariant: `reserved + requested <= allowance` at every admission that is not exempt. A request
//! that is nearly alone counts once while nothing is measured: it is the measurement. While memory
//! that no request owns leaves no room, [`ExhaustionPolicy::ServeOne`] admits single ones.
#![cfg_attr(docsrs, feature(doc_cfg))]

#[macro_use(debug_as)]
extern crate lowtide_core;

#[doc(hidden)]
pub use lowtide_core::debug_as;
#[cfg(not(all(test, not(lowtide_loom))))]
use lowtide_core::sync as shared;

mod admission;
mod ceiling;
mod correction;
mod cost;
mod eviction;
mod exhaustion;
mod fairness;
pub mod fit;
mod large;
pub mod learning;
mod ledger;
mod limit_advice;
mod maintenance;
mod managed;
mod permit;
mod pressure;
mod reclaim;
mod reclaimer;
#[cfg(all(test, not(lowtide_loom)))]
mod shared;
mod signal;
mod state;
mod tally;
mod turns;
mod unused;
mod usage;
mod waiting;

pub use lowtide_core::{BoxError, ByteSize, clock};

pub use admission::{Admission, LevelWatch};
pub use ceiling::CeilingParts;
pub use correction::{K_MAX, K_MIN, K_START};
pub use cost::{AdmissionMode, Budget, Cost, Priority, RejectReason, Rejected};
pub use exhaustion::ExhaustionPolicy;
pub use large::{RequestMemory, RequestPhase};
pub use ledger::Ledger;
pub use limit_advice::{LimitAdvice, LimitForecast, LimitHour};
pub use maintenance::{
    DeviceFigures, Job, Maintenance, MaintenanceActions, PressureState, Sample, Sensor, Settings,
    SettingsError, Trigger, Worker, run_control, run_worker,
};
pub use managed::{
    LoadFailure, LoadScope, Managed, ManagedBuilder, ResourceError, ResourceStats, Resources,
    UnloadReason, Use,
};
pub use permit::Permit;
pub use pressure::{Level, Thresholds};
pub use reclaim::ReclaimStep;
pub use reclaimer::{Reclaimable, Reclaimer, ReclaimerStats};
pub use signal::{
    Cpus, EventCounts, Limit, LimitBound, LimitSource, Mappings, MemoryEvents, Psi, Resident,
    Signal, SignalError, SignalTracker, Signals,
};
pub use tally::{AdmissionStats, ClassStats};
pub use usage::MemoryUsage;

/// For a layer of a service that measures its requests, suspends and cancels them, and reports
/// load. Other programs do not need it.
pub mod layer {
    pub use crate::large::{
        GRACE, LARGE_MIN, LargeRequest, REGISTERED_MIN, RequestFigures, SLOW_AFTER,
    };
    pub use crate::maintenance::{REPORT_WINDOW, SHED_SHOWN, mean_weight};
    pub use crate::permit::Waiting;
    pub use crate::state::AdmissionState;
    pub use crate::turns::Turn;
    pub use crate::usage::{NAME_MAX, Usage, Usages, shortened};
}

/// The README's code, compiled.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

#[cfg(test)]
mod chance {
    /// Returns a function that draws numbers below a bound. Prints the seed.
    pub(crate) fn draws(seed: u64) -> impl FnMut(u64) -> u64 {
        println!("seed {seed}");
        let mut state = seed;
        move |below| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state % below
        }
    }
}
