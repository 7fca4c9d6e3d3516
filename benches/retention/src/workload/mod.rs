//! The workloads: what a process does while it is measured.

pub mod burst;
pub mod http;
pub mod model;
