//! Admission of requests by bytes, pressure levels and managed resources, from the package
//! `lowtide-admission`.
//!
//! [`Memory::admission`](crate::Memory::admission) returns the [`Admission`] of a running `Memory`.
//! The loops that measure and decide are in that package; a `Memory` runs them.

pub use lowtide_admission::{
    Admission, AdmissionMode, AdmissionStats, Budget, CeilingParts, ClassStats, Cost, Cpus,
    EventCounts, Ledger, Level, LevelWatch, Limit, LimitAdvice, LimitBound, LimitForecast,
    LimitHour, LimitSource, LoadFailure, LoadScope, Managed, ManagedBuilder, Mappings,
    MemoryEvents, MemoryUsage, Permit, Priority, Psi, Reclaimable, Reclaimer, ReclaimerStats,
    RejectReason, Rejected, RequestMemory, RequestPhase, ResourceError, ResourceStats,
    SettingsError, Signal, Signals, UnloadReason, Use,
};
