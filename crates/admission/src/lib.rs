//! Admission, pressure levels, reclaim and managed resources. Policy only: it depends on traits,
//! not on the heap or an arena.
//!
//! A sample of the machine ([`signal`]) becomes a level with hysteresis ([`pressure`]) and an
//! allowance in bytes ([`ledger`]). Requests and resources reserve bytes of it ([`admission`],
//! [`managed`]). [`maintenance`] decides which memory to release, in the order of the reclaim steps
//! ([`reclaim`]); implementations of its traits release it. Nothing here purges, allocates device
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
//! [`Admission`] to correct, the [`Resources`] and the [`Ladder`]. Create its
//! [`Worker`](Maintenance::worker) from [`MaintenanceActions`], which carry out jobs. Run both on
//! threads of your own with [`run_control`] and [`run_worker`]. `src/memory/builder.rs` does this
//! for [`Memory`](https://docs.rs/lowtide/latest/lowtide/memory/struct.Memory.html).
//!
//! Invariant: `reserved + requested <= allowance` at every admission that is not exempt. A request
//! that is nearly alone counts once while nothing is measured: it is the measurement. While memory
//! that no request owns leaves no room, [`ExhaustionPolicy::ServeOne`] admits single ones.
#![cfg_attr(docsrs, feature(doc_cfg))]

pub mod admission;
mod ceiling;
mod correction;
mod cost;
mod desk;
mod eviction;
mod exhaustion;
mod fairness;
#[doc(hidden)]
pub mod fit;
mod large;
#[doc(hidden)]
pub mod learning;
pub mod ledger;
mod level_watch;
mod limit_advice;
pub mod maintenance;
pub mod managed;
mod permit;
pub mod pressure;
pub mod reclaim;
mod reclaimer;
pub mod signal;
mod tally;
mod unused;
mod usage;
mod waiting;
pub mod watermark;

pub use lowtide_core::{BoxError, ByteSize, clock};

pub use admission::{Admission, AdmissionStats};
pub use ceiling::CeilingParts;
pub use cost::{Budget, Cost, Priority, RejectReason, Rejected};
pub use eviction::{EvictionCause, Requester};
#[doc(hidden)]
pub use eviction::{Idle, RequestLabel};
pub use exhaustion::ExhaustionPolicy;
#[doc(hidden)]
pub use large::{GRACE, LARGE_MIN, LargeRequest, REGISTERED_MIN, SLOW_AFTER};
pub use large::{RequestMemory, RequestPhase};
pub use ledger::{Books, Correction, Ledger, Measured, Shortfall, Turnover};
pub use level_watch::{LevelChanged, LevelWatch};
pub use limit_advice::{LimitAdvice, LimitForecast, LimitHour};
pub use maintenance::{
    DeviceFigures, Job, JobQueue, Jobs, Maintenance, MaintenanceActions, PressureState,
    PurgeGrowth, Sample, Sensor, Settings, SettingsError, Tick, Trigger, Worker, run_control,
    run_worker,
};
#[doc(hidden)]
pub use maintenance::{REPORT_WINDOW, SHED_SHOWN, mean_weight};
pub use managed::{
    Acquire, AcquireError, AddError, Backoff, LastUnload, LoadError, LoadScope, Managed,
    ManagedBuilder, Resource, ResourceStats, Resources, UnloadError, UnloadReason, Unloads, Use,
};
#[doc(hidden)]
pub use permit::Waiting;
pub use permit::{Permit, Released, Reserve};
pub use pressure::{Band, Level, Pressure, Thresholds, ThresholdsError};
pub use reclaim::{Ask, Ladder, LadderError, Pace, Reclaim, Recovered};
pub use reclaimer::{Reclaimable, Reclaimer, ReclaimerStats};
pub use signal::{
    BoundScope, Cpus, EventCounts, Freshness, Limit, LimitBound, LimitSource, Mappings,
    MemoryEvents, Psi, Resident, Signal, SignalError, SignalTracker, Signals, Stall,
};
pub use tally::{ClassStats, SizeClass};
#[doc(hidden)]
pub use usage::{KeptUsage, NAME_MAX, NameSource, Usage, shortened};
pub use usage::{MemoryUsage, RouteUsage, TenantUsage};
pub use watermark::{Decision, DeviceSample, Trend, Watermark};

/// The README's code, compiled.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
