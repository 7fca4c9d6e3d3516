//! A simulator in virtual time of the whole controller: the real one over a fake process.
//!
//! `scenario` is what a seed means: the process in its cgroup, and what is offered. `world` joins them
//! with the crate's own loop, admission, worker and resource; `claims` says what must hold. `days` runs
//! a month, and tries the limits that are advised; `fit` lowers a limit. No policy is written here.
//!
//! Invariant: the same seed gives the same run, on every machine with the same floats.

#[allow(dead_code, clippy::duplicate_mod, reason = "other simulations have it too")]
pub(crate) mod chance;
pub(crate) mod claims;
pub(crate) mod days;
pub(crate) mod fit;
pub(crate) mod scenario;
mod world;
