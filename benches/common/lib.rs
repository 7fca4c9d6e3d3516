//! What the benches share: how they start, figures and goals, processes, requests over HTTP,
//! recorded allocations, and an arena over the simulation.
//!
//! Programs of other packages include single files.
#![allow(
    missing_docs,
    missing_debug_implementations,
    clippy::missing_errors_doc,
    reason = "for the benches alone"
)]

pub mod callgrind;
#[path = "../../crates/admission/tests/admission/sim/chance.rs"]
pub mod chance;
pub mod figures;
pub mod http;
#[path = "../replay/player.rs"]
pub mod player;
pub mod process;
pub mod sim;
mod start;
#[path = "../replay/trace.rs"]
pub mod trace;

use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::Command;

use axum::Router;
use bytes::Bytes;
use lowtide::{BoxError, ByteSize};
use tokio::net::TcpListener;

use crate::process::Process;
pub use crate::start::{main, own};

/// Returns the number that a process of this kind prints with these settings of jemalloc.
pub fn number_of(conf: &str, kind: &str) -> Result<f64, BoxError> {
    let output = own(&["--be", kind])?.env("_RJEM_MALLOC_CONF", conf).output()?;
    Ok(String::from_utf8(output.stdout)?.trim().parse()?)
}

/// Starts a service under this limit, and waits until it prints its address.
pub fn serve(command: &Command, limit: ByteSize) -> Result<(Process, SocketAddr), BoxError> {
    let mut service = Process::start_in_group(command, limit)?;
    let address = service.first_line()?;
    Ok((service, address))
}

/// Serves these routes at an address that it prints, until standard input ends.
#[expect(clippy::print_stdout, reason = "the program that started this one reads it")]
pub async fn listen(routes: Router) -> Result<(), BoxError> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
    println!("{}", listener.local_addr()?);
    let routes = routes.into_make_service_with_connect_info::<SocketAddr>();
    tokio::spawn(async { axum::serve(listener, routes).await });
    told_to_end().await
}

/// Waits until standard input ends.
pub async fn told_to_end() -> Result<(), BoxError> {
    let until = || std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
    Ok(tokio::task::spawn_blocking(until).await?.map(drop)?)
}

/// Builds the proxy with the profile of this program, and returns its path.
pub fn build_proxy() -> Result<PathBuf, BoxError> {
    let profile = if cfg!(debug_assertions) { "dev" } else { "release" };
    let status = Command::new(env!("CARGO"))
        .current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
        .args(["build", "--locked", "--quiet", "--example", "proxy", "--profile", profile])
        .status()?;
    if !status.success() {
        return Err(format!("the proxy was not built: {status}").into());
    }
    // This program lies in `deps`, beside `examples`.
    let own = std::env::current_exe()?;
    let folder = own.parent().and_then(Path::parent).ok_or("this program lies in no folder")?;
    Ok(folder.join("examples/proxy"))
}

/// Objects as services exchange them, of about these many bytes.
pub fn json(bytes: usize) -> Bytes {
    let mut text = String::from("[");
    for id in 0_u32.. {
        let user = serde_json::json!({
            "id": id,
            "name": format!("customer {id}"),
            "score": f64::from(id % 1000) / 8.0,
            "tags": ["red", "blue"],
            "active": id % 2 == 0,
        });
        text.push_str(&user.to_string());
        if text.len() >= bytes {
            break;
        }
        text.push(',');
    }
    text.push(']');
    text.into()
}
