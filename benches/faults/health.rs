//! Health checks of gRPC while everything else is shed: how many are shed as well.
//!
//! A real tonic server with the layer around it and the real health service in it. Memory is full
//! all the time, since 16 tasks book it as soon as it is free, and the level is critical in the
//! second half.

use std::net::SocketAddr;

use lowtide::service::{MemoryLayer};
use lowtide::{BoxError, ByteSize};
use lowtide_admission::{Admission, Cost, Level};
use tokio::net::TcpListener;
use tonic::transport::server::TcpIncoming;
use tonic::transport::{Channel, Endpoint, Server};
use tonic::{Code, Status};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;

const CEILING: ByteSize = ByteSize::mib(256);
const COST: ByteSize = ByteSize::mib(16);
/// Tasks that book `COST` again and again: as many as fit.
const LOADERS: usize = 16;
const CLIENTS: usize = 8;
/// Checks and watches of each client.
const CALLS: u64 = 250;

pub(crate) fn run() -> Result<(), BoxError> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(measure())
}

async fn measure() -> Result<(), BoxError> {
    let admission = Admission::with_limit(CEILING);
    let listener = TcpListener::bind(("127.0.0.1", 0)).await?;
    let address = listener.local_addr()?;
    let (reporter, health) = tonic_health::server::health_reporter();
    reporter.set_service_status("", tonic_health::ServingStatus::Serving).await;
    let layer = MemoryLayer::new(admission.clone(), Cost::host(COST));
    let server = Server::builder().layer(layer).add_service(health);
    tokio::spawn(server.serve_with_incoming(TcpIncoming::from(listener)));
    let loaders: Vec<_> = (0..LOADERS).map(|_| tokio::spawn(load(admission.clone()))).collect();

    let (mut calls, mut shed, mut other) = (0, 0, 0);
    for level in [Level::None, Level::Critical] {
        admission.set_level(level);
        let probes: Vec<_> = (0..CLIENTS).map(|_| tokio::spawn(probe(address))).collect();
        for probe in probes {
            for outcome in probe.await?? {
                calls += 1;
                match outcome {
                    Ok(()) => {}
                    Err(status) if status.code() == Code::ResourceExhausted => shed += 1,
                    Err(_) => other += 1,
                }
            }
        }
    }
    loaders.iter().for_each(tokio::task::JoinHandle::abort);
    println!("figure faults.health.calls {calls} calls");
    println!("figure faults.health.shed {shed} calls");
    if shed + other == 0 {
        Ok(())
    } else {
        Err(format!("{shed} of {calls} health checks shed, {other} failed otherwise").into())
    }
}

/// Keeps memory full.
async fn load(admission: Admission) {
    loop {
        let permit = admission.try_admit(Cost::host(COST));
        tokio::time::sleep(std::time::Duration::from_millis(1)).await;
        drop(permit);
    }
}

async fn probe(address: SocketAddr) -> Result<Vec<Result<(), Status>>, BoxError> {
    let channel: Channel = Endpoint::from_shared(format!("http://{address}"))?.connect().await?;
    let mut client = HealthClient::new(channel);
    let mut outcomes = Vec::new();
    for _ in 0..CALLS {
        let asked = HealthCheckRequest { service: String::new() };
        outcomes.push(client.check(asked.clone()).await.map(drop));
        let first = match client.watch(asked).await {
            Ok(stream) => stream.into_inner().message().await.map(drop),
            Err(status) => Err(status),
        };
        outcomes.push(first);
    }
    Ok(outcomes)
}
