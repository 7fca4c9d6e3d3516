//! The device arena through its public interface: over host memory, over the simulation of the
//! driver, and against models of its peers; and the simulation itself.
//!
//! Tests that read figures of the whole process run in a child process each (`test_fork`).

mod arena;
#[path = "../../../admission/tests/admission/sim/chance.rs"]
#[allow(dead_code, reason = "others use more of it")]
mod chance;
mod compact;
mod contract;
mod days;
mod index;
mod interop;
mod ladder;
mod own_driver;
mod peers;
mod pinned_process;
mod planned;
mod process;
mod record;
mod schedules;
mod segments;
mod simulation;
mod sleep;
mod streams;
mod traces;

use std::thread;
use std::time::Duration;

use lowtide_gpu::clock::{Clock as _, SystemClock};

/// Waits for what another thread does soon.
fn wait_until(condition: impl Fn() -> bool) {
    let clock = SystemClock::new();
    let deadline = clock.now() + Duration::from_secs(120);
    while !condition() {
        assert!(clock.now() < deadline, "it did not come to pass");
        thread::yield_now();
    }
}
