//! Admission of requests by bytes, pressure levels and managed resources, from the package
//! `lowtide-admission`.
//!
//! [`Memory::admission`](crate::Memory::admission) returns the [`Admission`] of a running `Memory`.
//! The loops that measure and decide are in that package; a `Memory` runs them.

pub use lowtide_admission::{
    Acquire, AcquireError, AddError, Admission, AdmissionStats, Backoff, BoundScope, Budget,
    CeilingParts, ClassStats, Cost, Cpus, EventCounts, EvictionCause, Freshness, LastUnload,
    Ledger, Level, LevelChanged, LevelWatch, Limit, LimitAdvice, LimitBound, LimitForecast,
    LimitHour, LimitSource, LoadError, LoadScope, Managed, ManagedBuilder, Mappings, MemoryEvents,
    MemoryUsage, Permit, Priority, Psi, Reclaimable, Reclaimer, ReclaimerStats, RejectReason,
    Rejected, RequestMemory, RequestPhase, Requester, Resource, ResourceStats, RouteUsage,
    SettingsError, Signal, Signals, SizeClass, Stall, TenantUsage, UnloadError, UnloadReason,
    Unloads, Use,
};
