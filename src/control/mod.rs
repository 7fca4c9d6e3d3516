//! Policy: when to admit, purge, unload and shed. Knows neither heap nor arena, only traits.
//!
//! A sample of the machine ([`signal`]) becomes a level with hysteresis ([`pressure`]) and an
//! allowance of bytes ([`ledger`]); requests and resources book against it ([`admission`],
//! [`managed`]); what has to be given back is decided by [`maintenance`] in the order of the ladder
//! ([`reclaim`]) and carried out by whoever implements its traits. Nothing here purges, allocates
//! device memory, starts a thread that stays, or needs an async runtime.
//!
//! Alone it admits by bytes against a fixed ceiling; no thread runs and nothing is measured:
//!
//! ```
//! use lowtide::ByteSize;
//! use lowtide::control::{Admission, Cost, Rejected};
//!
//! let admission = Admission::with_limit(ByteSize::mib(100));
//! let mut permit = admission.try_admit(Cost::host(ByteSize::mib(60)))?;
//! let second = admission.try_admit(Cost::host(ByteSize::mib(50)));
//! assert!(matches!(second, Err(Rejected::Full { .. }))); // to be answered 503: come again
//! permit.shrink(ByteSize::mib(20)); // the body turned out smaller
//! let second = admission.try_admit(Cost::host(ByteSize::mib(50)))?;
//! drop((permit, second)); // gives back what they hold
//! # Ok::<(), Rejected>(())
//! ```
//!
//! To have it measure: a [`Maintenance`] is made of settings, a [`Sensor`] that takes samples, the
//! [`Admission`] that it corrects, the [`Resources`] and the [`Ladder`]; its
//! [`Worker`](Maintenance::worker) is made of [`MaintenanceActions`] that carry jobs out;
//! [`run_control`] and [`run_worker`] run the two on threads of the caller's.
//! `src/memory/builder.rs` does just that for
//! [`Memory`](https://docs.rs/lowtide/latest/lowtide/memory/struct.Memory.html).
//!
//! Invariant: `booked + asked <= allowance` at every admission that is not exempt.

pub mod admission;
mod correction;
mod desk;
mod eviction;
mod exhaustion;
mod fairness;
pub mod ledger;
pub mod maintenance;
pub mod managed;
mod permit;
pub mod pressure;
pub mod reclaim;
mod rejected;
pub mod signal;
mod size_class;
mod tally;
pub mod watermark;

pub use admission::{Admission, AdmissionStats, Cost, Priority};
#[doc(hidden)]
pub use eviction::Idle;
pub use ledger::{Books, Budget, Correction, Ledger, Measured, Shortfall, Turnover};
pub use maintenance::{
    Job, JobQueue, Jobs, Maintenance, MaintenanceActions, PressureState, PurgeGrowth, Sample,
    Sensor, Settings, SettingsError, Tick, Trigger, Worker, run_control, run_worker,
};
pub use managed::{
    Acquire, AcquireError, AddError, Backoff, LoadError, LoadScope, Managed, ManagedBuilder,
    Resource, ResourceStats, Resources, UnloadError, UnloadReason, Unloads, Use,
};
pub use permit::Permit;
pub use pressure::{Band, Level, Pressure, Thresholds, ThresholdsError};
pub use reclaim::{Ask, Ladder, LadderError, Pace, Reclaim, Recovered};
pub use rejected::{RejectReason, Rejected};
pub use signal::{
    Cpus, EventCounts, Glance, Limit, LimitSource, MemoryEvents, Psi, Resident, Signal,
    SignalError, Signals, Stall,
};
pub use size_class::SizeClass;
pub use tally::ClassStats;
pub use watermark::{Decision, DeviceSample, Trend, Watermark};
