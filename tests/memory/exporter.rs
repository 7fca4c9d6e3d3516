//! The exporter beside the crate: buckets, its own listener, and its upkeep.
//!
//! `service_endpoints` has the other way, the text in a server that is there already. Nothing is
//! installed: each test has a recorder of its own, for its own thread.
//!
//! Invariant: every histogram of the table is one in the text, with all of its buckets.
#![cfg(all(feature = "prometheus", target_os = "linux"))]

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use http_body_util::{BodyExt as _, Empty};
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use lowtide::clock::{Clock, ManualClock};
use lowtide::config::DeviceChoice;
use lowtide::metrics::names::{MetricKind, SECONDS_BUCKETS, TABLE};
use lowtide::{ByteSize, Memory};
use lowtide_heap::HeapProbe;

use crate::recorder;
use crate::support::{Tree, advance_until};

/// An observation in every histogram of the table.
fn observe_all() {
    for metric in TABLE.iter().filter(|metric| metric.kind == MetricKind::Histogram) {
        metrics::histogram!(metric.name).record(0.002);
    }
}

/// Each histogram of the table is one, and not a summary, with its buckets and the one above all.
fn every_histogram_has_its_buckets(text: &str) {
    let histograms = TABLE.iter().filter(|metric| metric.kind == MetricKind::Histogram);
    let mut count = 0;
    for metric in histograms {
        let name = metric.name;
        assert!(text.contains(&format!("# TYPE {name} histogram")), "{name}: {text}");
        let bucket = format!("{name}_bucket{{");
        let buckets: Vec<_> = text.lines().filter(|line| line.starts_with(&bucket)).collect();
        assert_eq!(buckets.len(), SECONDS_BUCKETS.len() + 1, "{name}: {buckets:?}");
        let holds = |le: &str, value: &str| {
            let found = buckets.iter().find(|line| line.contains(&format!("le=\"{le}\"")));
            assert!(found.is_some_and(|line| line.ends_with(value)), "{name}: {buckets:?}");
        };
        holds("0.001", " 0");
        holds("0.003", " 1");
        holds("+Inf", " 1");
        count += 1;
    }
    assert!(count >= 2, "there are histograms");
}

#[test]
fn every_histogram_has_its_buckets_in_a_text_that_is_rendered() {
    let recorder = recorder::builder().build_recorder();
    metrics::with_local_recorder(&recorder, observe_all);
    every_histogram_has_its_buckets(&recorder.handle().render());
}

#[tokio::test]
async fn every_histogram_has_its_buckets_on_the_exporters_own_listener() {
    // A port that was free a moment ago: the exporter does not tell which one it took.
    let free = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
    let address: SocketAddr = free.local_addr().expect("its address");
    drop(free);
    let builder = recorder::builder();
    let (recorder, exporter) = builder.with_http_listener(address).build().expect("listens");
    let exporter = tokio::spawn(exporter);
    metrics::with_local_recorder(&recorder, observe_all);
    let client = Client::builder(TokioExecutor::new()).build_http::<Empty<bytes::Bytes>>();
    let answer = client.get(format!("http://{address}/metrics").parse().expect("an address"));
    let answer = answer.await.expect("an answer");
    assert!(answer.status().is_success());
    let body = answer.into_body().collect().await.expect("a text").to_bytes();
    every_histogram_has_its_buckets(std::str::from_utf8(&body).expect("UTF-8"));
    exporter.abort();
}

/// Bytes that samples of histograms take until somebody folds them: 16 each.
const PILE: u32 = 400_000;

/// In a process of its own, since it reads the live bytes of the heap.
#[test_fork::test]
fn samples_pile_up_until_the_workers_hook_runs_the_upkeep() {
    let recorder = recorder::builder().build_recorder();
    let (clock, tree) = (Arc::new(ManualClock::new()), Tree::new(ByteSize::mib(512)));
    let upkeep = recorder.handle();
    let upkeeps = Arc::new(AtomicU32::new(0));
    let counted = Arc::clone(&upkeeps);
    let memory = Memory::builder()
        .clock(Arc::clone(&clock) as Arc<dyn Clock>)
        .signals(tree.open())
        .device(DeviceChoice::Host)
        .after_publish(move || {
            upkeep.run_upkeep();
            counted.fetch_add(1, Ordering::Relaxed);
        })
        .start()
        .expect("starts");
    // The exporter once lost a sample that was recorded during the first upkeep. After it, none
    // runs until the clock moves.
    advance_until(&clock, Duration::from_millis(250), "the first upkeep", || {
        upkeeps.load(Ordering::Relaxed) > 0
    });
    let probe = HeapProbe::new().expect("jemalloc");
    let live = || probe.snapshot().expect("statistics").live;
    let before = live();
    metrics::with_local_recorder(&recorder, || {
        for _ in 0..PILE {
            metrics::histogram!("lowtide_sampler_duration_seconds").record(0.002);
        }
    });
    let piled = live().saturating_sub(before);
    assert!(piled > ByteSize::mib(4), "{piled} for {PILE} samples");
    advance_until(&clock, Duration::from_millis(250), "the pile is gone", || {
        live().saturating_sub(before) < ByteSize::mib(1)
    });
    assert!(memory.shutdown_blocking(Duration::from_secs(5)).is_clean());
    let text = recorder.handle().render();
    assert!(text.contains(&format!("lowtide_sampler_duration_seconds_count {PILE}")), "{text}");
}
