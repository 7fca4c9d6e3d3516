//! A simulator in virtual time of the whole controller: the real one over a fake process.
//!
//! `plant` is the process in its cgroup, `load` what is offered, `scenario` what a seed means,
//! `world` joins them with the crate's own loop, admission, worker and resource, `claims` says what
//! must hold. `days` runs a month, `advice` tries the limits that are advised, `fit`
//! lowers a limit. No policy is written
//! here.
//!
//! Invariant: the same seed gives the same run, on every machine with the same floats.

pub(crate) mod advice;
#[path = "../../index/chance.rs"]
#[allow(clippy::duplicate_mod, reason = "other simulations have it too")]
#[allow(dead_code, reason = "others use more of it")]
pub(crate) mod chance;
pub(crate) mod claims;
pub(crate) mod days;
mod events;
pub(crate) mod fit;
pub(crate) mod load;
mod plant;
mod requests;
pub(crate) mod scenario;
pub(crate) mod seen;
mod world;
