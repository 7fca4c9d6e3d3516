//! `Memory`, its service, and the programs that embed it.
//!
//! A process has one `Memory`, so a test that starts one runs in a process of its own, by
//! `test_fork`; those of the proxy take turns in this one.
#![cfg(all(feature = "service", feature = "prometheus", target_os = "linux"))]

// The proxy, and the arithmetic of the bench `overload`, which name each other from the root.
#[path = "../../examples/proxy/app.rs"]
#[allow(dead_code, reason = "other programs that start it read more of it")]
mod app;
#[path = "../../examples/proxy/chance.rs"]
mod chance;
#[path = "../../examples/proxy/cli.rs"]
mod cli;
mod device_schedules;
#[path = "../../examples/proxy/embed.rs"]
mod embed;
#[path = "../../examples/proxy/forward.rs"]
mod forward;
#[path = "../../examples/proxy/model.rs"]
mod model;
#[path = "../../benches/overload/offer.rs"]
#[allow(dead_code, reason = "the bench uses more of it")]
mod offer;
#[path = "../../examples/proxy/upstream.rs"]
mod upstream;

mod examples;
mod exporter;
mod memory_arenas;
mod memory_detached;
mod memory_device;
mod memory_devices;
mod memory_fit;
mod memory_flight;
mod memory_heap;
mod memory_kernel;
mod memory_life;
mod memory_loop;
mod memory_mappings;
mod memory_metrics;
mod memory_not_global;
mod memory_own_arena;
mod memory_process;
mod memory_profile;
mod memory_races;
mod memory_saturation;
mod memory_shrink;
mod memory_sleep;
mod memory_unreleased;
mod overload_model;
mod polled;
mod proxy;
#[path = "../support/recorder.rs"]
mod recorder;
mod service_accounts;
mod service_admin;
mod service_cap;
mod service_connection;
mod service_connections;
mod service_endpoints;
mod service_estimates;
mod service_layer;
mod service_linger;
mod service_load_report_streams;
mod service_load_reports;
mod service_measured;
mod service_observe;
mod service_page;
mod service_profile;
mod service_slow;
mod service_stacks;
mod service_streams;
mod service_time_limits;
mod service_usage;
mod service_waiting;
#[path = "../support/start.rs"]
mod start;
#[path = "../support/mod.rs"]
mod support;

#[global_allocator]
static HEAP: start::Allocator = start::Allocator;

/// As `global_allocator!(balanced)` in a service, but where a test starts otherwise.
const EXPORTED: start::Start = start::BALANCED;
