//! The saturation in `/metrics` of a service that is idle, busy, full, waited for and leaking, in
//! virtual time. The kernel's figures are read from a file tree.
//!
//! The recorder stays in the process, so the test has one of its own.
#![cfg(all(feature = "prometheus", feature = "service", target_os = "linux"))]

use std::future::Future as _;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Waker};
use std::time::Duration;

use lowtide::clock::{Clock, ManualClock};
use lowtide::config::DeviceChoice;
use lowtide::service::Endpoints;
use lowtide::{ByteSize, Memory};
use lowtide_admission::{Cost, Permit};
use test_fork::test;

use crate::support::{Tree, advance_until};

const SOON: Duration = Duration::from_secs(5);
const SECOND: Duration = Duration::from_secs(1);
/// After this time, nothing is left of what was before.
const SETTLES: Duration = Duration::from_secs(180);

/// A service whose `/metrics` is read.
struct Service {
    clock: Arc<ManualClock>,
    tree: Tree,
    memory: Memory,
    endpoints: Endpoints,
}

impl Service {
    /// Starts a service that holds 10 MiB of 256.
    fn start() -> Self {
        let (clock, tree) = (Arc::new(ManualClock::new()), Tree::new(ByteSize::mib(256)));
        let memory = Memory::builder()
            .clock(Arc::clone(&clock) as Arc<dyn Clock>)
            .signals(tree.open())
            .device(DeviceChoice::None)
            .correction_factor(1.0)
            .prometheus()
            .expect("the first of this process")
            .start()
            .expect("starts");
        let endpoints = Endpoints::new(Some(memory.clone()));
        Self { clock, tree, memory, endpoints }
    }

    /// Returns the values of a series without labels; none before the first publication.
    fn metric(&self, name: &str) -> Option<f64> {
        let text = self.endpoints.answer("/metrics").expect("there is a recorder").into_body();
        let value = |line: &str| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok();
        text.lines().find_map(value)
    }

    /// Returns what is published once this time has passed. The snapshot agrees with it, unless the
    /// worker is late: then with a later publication.
    fn after(&self, time: Duration) -> f64 {
        let end = (self.clock.since_epoch() + time).as_secs_f64();
        let mut saturation = f64::NAN;
        advance_until(&self.clock, SECOND, "it is published as in the snapshot", || {
            let last = self.metric("lowtide_sampler_last_run_timestamp_seconds");
            saturation = self.metric("lowtide_saturation_ratio").unwrap_or(f64::NAN);
            let is_as_taken = (self.memory.snapshot().saturation - saturation).abs() < 0.1;
            last.is_some_and(|last| last >= end) && is_as_taken
        });
        assert!((0.0..=1.0).contains(&saturation), "{saturation}");
        saturation
    }

    /// Admits a request that holds what it reserves.
    fn admit(&self, mib: u64, held: u64) -> Permit {
        self.tree.hold(10 + held + mib);
        self.memory.admission().try_admit(Cost::host(ByteSize::mib(mib))).expect("fits")
    }
}

#[test]
fn the_saturation_orders_a_service_that_is_idle_busy_full_and_waited_for_and_rises_with_a_leak() {
    let service = Service::start();
    let idle = service.after(SETTLES);
    assert!(idle < 0.1, "{idle}");
    let mut held = vec![service.admit(80, 0)];
    let busy = service.after(SETTLES);
    held.push(service.admit(60, 80));
    let busier = service.after(SETTLES);
    held.push(service.admit(36, 140));
    let full = service.after(SETTLES);
    assert!(idle < busy && busy < busier && busier < full, "{idle} {busy} {busier} {full}");
    assert!(full > 0.95, "{full}");

    held.pop();
    service.tree.hold(150);
    let waits_not = service.after(SETTLES);
    let waits = {
        let mut waiting = pin!(service.memory.admission().reserve(Cost::host(ByteSize::mib(100))));
        let mut cx = Context::from_waker(Waker::noop());
        assert!(waiting.as_mut().poll(&mut cx).is_pending());
        service.after(SETTLES)
    };
    assert!(waits > waits_not && waits >= full - 0.01, "{waits_not} {waits}");

    held.clear();
    service.tree.hold(10);
    let mut last = service.after(SETTLES);
    assert!((last - idle).abs() < 0.05, "{idle}, then {last}");
    for mib in (20..=220).step_by(20) {
        service.tree.hold(mib);
        let leaks = service.after(4 * SECOND);
        assert!(leaks > last, "{last}, then {leaks} at {mib} MiB");
        last = leaks;
    }
    let leaked = service.after(SETTLES);
    assert!(leaked > 0.95, "{leaked}");
    assert!(service.memory.shutdown_blocking(SOON).is_clean());
    println!("figure fleet.saturation.in_range 1 yes");
}
