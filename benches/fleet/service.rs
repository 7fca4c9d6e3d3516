//! A service of the fleet: `POST /hold` behind lowtide's layer, with the settings of a user who
//! sets none but load reports. It ends when its standard input does.

use std::net::{Ipv4Addr, SocketAddr};

use lowtide::admission::Admission;
use lowtide::{BoxError, Memory};
use tokio::net::TcpListener;
use tokio::sync::watch;

use crate::app::serve::{Phase, serve as serve_routes};
use crate::hold;
use crate::run::RESIDENT;

/// Serves until standard input ends. Prints its address when it does.
pub(crate) fn serve() -> Result<bool, BoxError> {
    let resident = vec![1_u8; RESIDENT.as_usize().unwrap_or(0)];
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let (address, _phase) = runtime.block_on(start())?;
    println!("{address}");
    std::io::copy(&mut std::io::stdin(), &mut std::io::sink())?;
    drop(resident);
    Ok(true)
}

async fn start() -> Result<(SocketAddr, watch::Sender<Phase>), BoxError> {
    let memory = Memory::builder().start()?;
    let layer = memory.layer().with_load_reports();
    let routes = hold::routes(true).layer(layer);
    let routes = routes.merge(memory.routes());
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
    let address = listener.local_addr()?;
    let (phase, phases) = watch::channel(Phase::Serving);
    // With the proxy's bound on hyper's buffers, which no request reserves.
    serve_routes(listener, routes, None, &Admission::new(), phases);
    Ok((address, phase))
}
