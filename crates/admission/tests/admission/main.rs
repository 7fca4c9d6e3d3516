//! Admission: the control loop, managed resources, and the signals that they go by.
//!
//! Tests that fork run in a process each, by `test_fork`.

mod control_loop;
mod counting;
mod fits;
mod managed;
mod observe;
mod process;
mod real_cgroup;
mod settings;
mod signals;
mod simulated;
mod waiting;
