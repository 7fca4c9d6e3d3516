//! Policy: when to admit, purge, unload and shed. Knows neither heap nor arena, only traits.
//!
//! A sample of the machine ([`signal`]) becomes a level with hysteresis ([`pressure`]) and an
//! allowance of bytes ([`ledger`]); requests and resources book against it ([`admission`],
//! [`managed`]); what has to be given back is decided by [`maintenance`] in the order of the ladder
//! ([`reclaim`]) and carried out by whoever implements its traits. Nothing here purges, allocates
//! device memory, starts a thread that stays, or needs an async runtime.
//!
//! Invariant: `booked + asked <= allowance` at every admission that is not exempt.

pub mod admission;
pub mod ledger;
pub mod maintenance;
pub mod managed;
pub mod pressure;
pub mod reclaim;
pub mod signal;

pub use admission::{Admission, AdmissionStats, Cost, Permit, Priority, Rejected, ShedReason};
pub use ledger::{Budget, Ledger, Shortfall};
pub use maintenance::{
    Hands, Job, JobQueue, Jobs, Maintenance, PressureState, Sample, Sensor, Settings,
    SettingsError, Tick, Trigger, Worker, run_control, run_worker,
};
pub use managed::{
    Acquire, AcquireError, AddError, Backoff, LoadError, Managed, ManagedBuilder, Resource,
    ResourceStats, Resources, UnloadError, UnloadReason, Unloads, Use,
};
pub use pressure::{Band, Level, Pressure, Thresholds, ThresholdsError};
pub use reclaim::{Ask, Ladder, LadderError, Pace, Reclaim, Recovered};
pub use signal::{Limit, LimitSource, Resident, Signal, SignalError, Signals};
