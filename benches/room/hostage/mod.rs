//! Attacks that hold memory or connections hostage, and what honest clients get meanwhile.
//!
//! A service runs as a child process with a limit of 256 MiB: the proxy of `examples/proxy`, or a
//! service of HTTP/2 ([`service`]). Honest clients send requests at a rate that it serves, first
//! alone and then under attack; the ratio of both is the figure. A request that is not answered
//! within five seconds is not served.

mod attacks;
mod honest;
pub(crate) mod service;

use std::net::{SocketAddr, TcpStream};
use std::process::Command;
use std::time::Duration;

use clap::Args;
use lowtide::{BoxError, ByteSize};
use tokio::net::TcpListener;

use self::attacks::{Attack, Attackers, Heads};
use self::honest::{AllKept, Kind, Tally, drive, drive_with};
use crate::common::own;
use crate::common::process::{Process, free_port, raise_descriptors};

/// The limit of each service.
const LIMIT: ByteSize = ByteSize::mib(256);
/// The least part of the goodput alone that honest clients get under attack.
const RATIO_MIN: f64 = 0.90;
/// The time for which honest clients are alone.
const ALONE: Duration = Duration::from_secs(5);
/// The connections that are offered at once.
const OFFERED: usize = 10_000;
/// The time between two attempts to connect to a service that starts, and their number.
const LOOK_EVERY: Duration = Duration::from_millis(20);
const LOOKS_MAX: u32 = 500;

#[derive(Clone, Debug, Args)]
pub(crate) struct Arguments {
    /// Only forms whose name contains this.
    #[arg(long)]
    only: Option<String>,
    /// The time for which each attack lasts.
    #[arg(long, default_value = "12s", value_parser = humantime::parse_duration)]
    lasts: Duration,
}

/// The forms of attack by name, with the requests of the honest clients.
const FORMS: [(&str, Kind); 5] = [
    ("slow_bodies", Kind::Words),
    ("silent_bodies", Kind::Http2),
    ("zero_window", Kind::Http2),
    ("unread", Kind::Words),
    ("hung_upstream", Kind::Embed),
];

/// Runs the forms and prints their figures. Returns `true` if every goal held.
pub(crate) fn measure(arguments: &Arguments) -> Result<bool, BoxError> {
    raise_descriptors()?;
    let mut holds = true;
    let is_chosen = |name: &str| arguments.only.as_ref().is_none_or(|only| name.contains(only));
    for (name, kind) in FORMS.into_iter().filter(|(name, _)| is_chosen(name)) {
        let runtime = tokio::runtime::Runtime::new()?;
        holds &= runtime.block_on(run(name, kind, arguments.lasts))?;
    }
    Ok(holds)
}

async fn run(name: &str, kind: Kind, lasts: Duration) -> Result<bool, BoxError> {
    // Accepts and never answers.
    let hung = TcpListener::bind("127.0.0.1:0").await?;
    let upstream = (name == "hung_upstream").then(|| hung.local_addr()).transpose()?;
    tokio::spawn(async move {
        let mut taken = Vec::new();
        while let Ok((stream, _)) = hung.accept().await {
            taken.push(stream);
        }
    });
    let is_proxy = matches!(kind, Kind::Words | Kind::Embed);
    let start = if is_proxy { start_proxy(upstream).await } else { start_service().await };
    let (mut service, to) = start?;
    // What is loaded on first use is there.
    drive(to, kind, Duration::from_secs(1)).await;
    let alone = drive(to, kind, ALONE).await;
    let (count, attack) = match name {
        "slow_bodies" => (25, Attack::SlowBody),
        "silent_bodies" => (60, Attack::SilentBody),
        "zero_window" => (40, Attack::ZeroWindow),
        "unread" => (512, Attack::Unread("GET /bytes/1073741824 HTTP/1.1\r\nhost: h\r\n\r\n")),
        _ => (512, Attack::Unread("GET / HTTP/1.1\r\nhost: h\r\n\r\n")),
    };
    let attackers = Attackers::start(count, to, &attack);
    let attacked = drive(to, kind, lasts).await;
    show(name, alone, attacked, &mut service);
    println!("  {count} attackers opened {} connections", attackers.connections());
    let ratio = ratio(alone, attacked);
    println!("figure room.hostage.{name}.honest_ratio {ratio:.4} ratio");
    Ok(ratio >= RATIO_MIN && service.ended().is_none())
}

/// Offers 10,000 connections and prints the figures: of clients that had connections before, and of
/// those that connect for each request. Returns `true` if every goal held.
pub(crate) fn measure_connections() -> Result<bool, BoxError> {
    raise_descriptors()?;
    let runtime = tokio::runtime::Runtime::new()?;
    runtime.block_on(async {
        let (mut service, to) = start_service().await?;
        if service.folder().is_none() {
            println!("no memory cgroup can be made here: the kernel kills nothing");
        }
        let kept = AllKept::default();
        let drive_kept = |lasts| drive_with(to, Kind::Http2Kept, lasts, &kept);
        drive_kept(Duration::from_secs(1)).await;
        let alone = drive_kept(ALONE).await;
        let heads = Heads::start(OFFERED, 256, to);
        let lasts = Duration::from_secs(12);
        let newcomers = drive(to, Kind::Http2, lasts);
        let (attacked, newcomers) = tokio::join!(drive_kept(lasts), newcomers);
        let (opened, refused) = heads.counts();
        let kills = u32::from(service.ended().is_some());
        show("h2", alone, attacked, &mut service);
        println!("  {opened} of {OFFERED} connections opened");
        let ratio = ratio(alone, attacked);
        println!("figure room.h2.kills {kills} kills");
        println!("figure room.h2.honest_ratio {ratio:.4} ratio");
        println!("figure room.h2.newcomer_part {:.4} ratio", newcomers.part());
        println!("figure room.h2.refused {refused} connections");
        Ok(kills == 0 && ratio >= RATIO_MIN)
    })
}

async fn start_proxy(upstream: Option<SocketAddr>) -> Result<(Process, SocketAddr), BoxError> {
    let at = free_port()?;
    let mut command = Command::new(crate::proxy::program()?);
    command.args(["--listen", &at.to_string()]);
    if let Some(upstream) = upstream {
        command.args(["--upstream", &format!("http://{upstream}")]);
    }
    start(command, at).await
}

async fn start_service() -> Result<(Process, SocketAddr), BoxError> {
    let (at, mut command) = (free_port()?, own()?);
    command.args(["serve-attacked", &at.to_string()]);
    start(command, at).await
}

/// Starts a service under the limit, and waits until it accepts connections.
async fn start(mut command: Command, at: SocketAddr) -> Result<(Process, SocketAddr), BoxError> {
    command
        .env("LOWTIDE_MEMORY_LIMIT", LIMIT.exact())
        .env("LOWTIDE_DEVICE", "host")
        .env("LOWTIDE_METRICS_INTERVAL", "100ms")
        .env("RUST_LOG", "error");
    let mut service = Process::start_in_group(&command, LIMIT)?;
    for _ in 0..LOOKS_MAX {
        if TcpStream::connect(at).is_ok() {
            return Ok((service, at));
        }
        if let Some(status) = service.ended() {
            return Err(format!("the service ended: {status}").into());
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
    Err("the service did not start".into())
}

fn ratio(alone: Tally, attacked: Tally) -> f64 {
    attacked.part() / alone.part().max(f64::MIN_POSITIVE)
}

fn show(name: &str, alone: Tally, attacked: Tally, service: &mut Process) {
    let ended = if service.ended().is_some() { ", and was killed" } else { "" };
    println!(
        "{name}: {} of {} requests served alone, {} of {} under attack{ended}",
        alone.served, alone.sent, attacked.served, attacked.sent
    );
}
