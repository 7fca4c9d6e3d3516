//! A service of the fleet: `POST /hold` behind lowtide's layer, with the settings of a user who
//! sets none but load reports. It ends when its standard input does.

use std::net::{Ipv4Addr, SocketAddr};

use lowtide::admission::Admission;
use lowtide::service::LoadReportFormat;
use lowtide::{BoxError, Memory};
use serde::{Deserialize, Serialize};
use tokio::net::TcpListener;
use tokio::sync::watch;

use crate::app::serve::{Phase, serve as serve_routes};
use crate::hold::{self, Unplaced};

/// The settings of a service.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Settings {
    /// Memory that it holds from its start.
    pub(crate) resident_bytes: usize,
}

/// Serves until standard input ends. Prints `listening ADDRESS ADDRESS` when it does.
pub(crate) fn serve(settings: &str) -> Result<(), BoxError> {
    let settings: Settings = serde_json::from_str(settings)?;
    let resident = vec![1_u8; settings.resident_bytes];
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let (address, _phase) = runtime.block_on(start())?;
    println!("listening {address} {address}");
    std::io::copy(&mut std::io::stdin(), &mut std::io::sink())?;
    drop(resident);
    Ok(())
}

async fn start() -> Result<(SocketAddr, watch::Sender<Phase>), BoxError> {
    let memory = Memory::builder().start()?;
    let layer = memory.layer().with_load_reports(LoadReportFormat::Text);
    let routes = hold::routes(None, Unplaced::default(), true).layer(layer);
    let routes = routes.merge(memory.routes());
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
    let address = listener.local_addr()?;
    let (phase, phases) = watch::channel(Phase::Serving);
    // With the proxy's bound on hyper's buffers, which no request reserves.
    serve_routes(listener, routes, None, &Admission::new(), phases);
    Ok((address, phase))
}
