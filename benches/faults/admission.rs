//! Admission of what must not be shed: gRPC health checks while everything else is, and a model and
//! a request beside an idle model.

use std::net::SocketAddr;
use std::time::Duration;

use lowtide::clock::{Bell, Clock as _, SystemClock};
use lowtide::memory::Memory;
use lowtide::service::MemoryLayer;
use lowtide::{BoxError, ByteSize};
use lowtide_admission::{Admission, Cost, Level, Managed, UnloadReason};
use tokio::net::TcpListener;
use tonic::Code;
use tonic::transport::server::TcpIncoming;
use tonic::transport::{Channel, Endpoint, Server};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;

use crate::common::figures::{Figures, count};

const CEILING: ByteSize = ByteSize::mib(256);
const COST: ByteSize = ByteSize::mib(16);
/// Tasks that book `COST` again and again: as many as fit.
const LOADERS: usize = 16;
const CLIENTS: usize = 8;
/// Checks and watches of each client.
const CALLS: usize = 250;

/// A real tonic server with the layer around it and the real health service in it. Memory is full
/// all the time, since 16 tasks book it as soon as it is free, and the level is critical in the
/// second half.
#[tokio::main]
pub(crate) async fn health(figures: &mut Figures) -> Result<(), BoxError> {
    let admission = Admission::with_limit(CEILING);
    let listener = TcpListener::bind(("127.0.0.1", 0)).await?;
    let address = listener.local_addr()?;
    let (reporter, health) = tonic_health::server::health_reporter();
    reporter.set_service_status("", tonic_health::ServingStatus::Serving).await;
    let layer = MemoryLayer::new(admission.clone(), Cost::host(COST));
    let server = Server::builder().layer(layer).add_service(health);
    tokio::spawn(server.serve_with_incoming(TcpIncoming::from(listener)));
    let loaders: Vec<_> = (0..LOADERS).map(|_| tokio::spawn(load(admission.clone()))).collect();

    let mut codes = Vec::new();
    for level in [Level::None, Level::Critical] {
        admission.set_level(level);
        let probes: Vec<_> = (0..CLIENTS).map(|_| tokio::spawn(probe(address))).collect();
        for probe in probes {
            codes.extend(probe.await??);
        }
    }
    loaders.iter().for_each(tokio::task::JoinHandle::abort);
    let of = |is_wanted: fn(&Code) -> bool| {
        count(codes.iter().filter(|it| is_wanted(it)).count() as u64)
    };
    figures.add("faults.health.calls", of(|_| true), "calls");
    let shed = of(|code| *code == Code::ResourceExhausted);
    figures.at_most("faults.health.shed", shed, "calls", 0.0);
    let failed = of(|code| ![Code::Ok, Code::ResourceExhausted].contains(code));
    if failed > 0.0 {
        Err(format!("{failed} health checks failed otherwise").into())
    } else {
        Ok(())
    }
}

/// Keeps memory full.
async fn load(admission: Admission) {
    loop {
        let permit = admission.try_admit(Cost::host(COST));
        tokio::time::sleep(Duration::from_millis(1)).await;
        drop(permit);
    }
}

async fn probe(address: SocketAddr) -> Result<Vec<Code>, BoxError> {
    let channel: Channel = Endpoint::from_shared(format!("http://{address}"))?.connect().await?;
    let mut client = HealthClient::new(channel);
    let mut codes = Vec::new();
    for _ in 0..CALLS {
        let asked = HealthCheckRequest { service: String::new() };
        codes.push(client.check(asked.clone()).await.map_or_else(|it| it.code(), |_| Code::Ok));
        let first = match client.watch(asked).await {
            Ok(stream) => stream.into_inner().message().await.map(drop),
            Err(status) => Err(status),
        };
        codes.push(first.map_or_else(|it| it.code(), |()| Code::Ok));
    }
    Ok(codes)
}

const MODEL: ByteSize = ByteSize::mib(60);
const REQUEST: ByteSize = ByteSize::mib(45);

/// An idle model of 60 MiB under a limit of 128 MiB, beside a second one and a request of 45 MiB,
/// which comes again once, when it is told to.
pub(crate) fn swap(figures: &mut Figures) -> Result<(), BoxError> {
    // Longer than a test waits: no model goes by itself.
    let idle = Duration::from_secs(3600);
    let memory = Memory::builder().memory_limit(ByteSize::mib(128)).idle_unload(idle).start()?;
    let model = |name| -> Result<Managed<Vec<u8>>, BoxError> {
        let load = || Ok(vec![1_u8; MODEL.as_usize().unwrap_or_default()]);
        Ok(memory.managed(name, load).cost(Cost::host(MODEL)).register()?)
    };
    let models = [model("first")?, model("second")?];
    for model in &models {
        drop(model.acquire_blocking()?);
    }
    let [first, second] = models.each_ref().map(|model| model.stats());
    let evictions =
        [&first, &second].map(|stats| stats.unloads_total(UnloadReason::Eviction)).iter().sum();
    let is_loaded = u64::from(second.loaded && !first.loaded);
    figures.at_least("faults.swap.loaded", count(is_loaded), "models", 1.0);
    figures.at_most("faults.swap.evictions", count(evictions), "unloads", 1.0);
    if let Err(rejected) = memory.admission().try_admit(Cost::host(REQUEST)) {
        let wait = rejected.retry_after().ok_or("a request that fits later has no time")?;
        let clock = SystemClock::new();
        clock.wait_until(&Bell::new(), clock.now() + wait);
        drop(memory.admission().try_admit(Cost::host(REQUEST))?);
    }
    figures.add("faults.swap.request_served", 1.0, "requests");
    println!("{}", memory.shutdown_blocking(Duration::from_secs(5)));
    Ok(())
}
