//! The dashboards against live data: the proxy under load, scraped by a real Prometheus, and every
//! query of every panel, annotation and rule asked of it.
//!
//! With `--soak` the proxy runs under the same load for hours, and what grows is judged.
//!
//! Nothing is drawn, and no Grafana takes part. What a panel needs that this machine does not have
//! is named in `named`, with a reason; what is named there and has it all the same is no fault.
//!
//! Exit codes: 0 all held; 1 something did not, or could not be run, and is named.
//!
//! Invariant: a panel that is not named has series for each of its queries, and one that changes.
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a program that shows something")]
#![expect(
    clippy::disallowed_methods,
    reason = "real processes, and the time at which they are asked"
)]

mod judge;
mod process;
mod soak;

use std::io::{Seek as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Duration;

use clap::Parser;
use common::process::free_port;
use lowtide::BoxError;
use tokio::time::sleep;

use crate::judge::Report;
use crate::process::{Prometheus, Proxy};

/// The proxy, as `cargo build --release --example proxy` makes it.
const PROXY: &str = "target/release/examples/proxy";

/// The dashboards against a real Prometheus and the proxy under load.
#[derive(Debug, Parser)]
struct Cli {
    /// The simulation as a shared library: a second proxy finds its device in it.
    #[arg(long)]
    fake_driver: Option<PathBuf>,
    /// A command to run while Prometheus still answers: `LOWTIDE_PROMETHEUS` is its address,
    /// `LOWTIDE_FROM` and `LOWTIDE_TO` are the seconds of the load.
    #[arg(long)]
    then: Option<String>,
    /// Run the proxy alone under the load for this long, such as 2h, and judge what grows after
    /// the first ten minutes.
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    #[arg(num_args = 0..=1, default_missing_value = "2h")]
    soak: Option<Duration>,
}

fn main() -> ExitCode {
    // Cargo starts a bench in the folder of its package; paths are those of the repository.
    if let Err(error) = std::env::set_current_dir(root()) {
        eprintln!("dashboards: cannot enter {}: {error}", root().display());
        return ExitCode::FAILURE;
    }
    common::main(|cli: Cli| {
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
        match cli.soak {
            Some(lasts) => runtime.block_on(soak::run(lasts)),
            None => runtime.block_on(run(&cli)).map(|report| report.print()),
        }
    })
}

/// The folder of the repository.
fn root() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
}

async fn run(cli: &Cli) -> Result<Report, BoxError> {
    let folder = tempfile::tempdir()?;
    let mut targets = vec![free_port()?];
    if cli.fake_driver.is_some() {
        targets.push(free_port()?);
    }
    let mut proxies = vec![Proxy::start(PROXY.as_ref(), targets[0], None)?];
    let prometheus = Prometheus::start(folder.path(), &targets)?;
    let from = judge::now()?;
    let (first, rest) = process::PHASES.split_at(3);
    process::run(&targets[..1], first).await?;
    // A second one comes while the first works, as in a fleet that grows.
    if let Some(library) = &cli.fake_driver {
        proxies.push(Proxy::start(PROXY.as_ref(), targets[1], Some(library))?);
    }
    process::run(&targets, rest).await?;
    // Two scrapes more, so that the end is in.
    sleep(Duration::from_secs(3)).await;
    let (to, mut report) = (judge::now()?, Report::default());
    for proxy in &mut proxies {
        proxy.lives()?;
    }
    check_metrics(&proxies[0].metrics().await?, &mut report)?;
    judge::boards(&prometheus, &(from..to), &mut report).await?;
    judge::rules(&prometheus, &(from..to), &mut report).await?;
    if let Some(command) = &cli.then {
        let status = Command::new("sh")
            .args(["-c", command])
            .env("LOWTIDE_PROMETHEUS", prometheus.url())
            .env("LOWTIDE_FROM", from.to_string())
            .env("LOWTIDE_TO", to.to_string())
            .status()?;
        report.expect(status.success(), || format!("{command}: {status}"));
    }
    Ok(report)
}

/// `promtool check metrics` has nothing to say of a live scrape.
fn check_metrics(text: &str, report: &mut Report) -> Result<(), BoxError> {
    let mut file = tempfile::tempfile()?;
    file.write_all(text.as_bytes())?;
    file.rewind()?;
    let output = Command::new("promtool").args(["check", "metrics"]).stdin(file).output();
    let output = output.map_err(|error| format!("promtool: {error}"))?;
    let words = [output.stdout, output.stderr].concat();
    let words = String::from_utf8_lossy(&words);
    let clean = output.status.success() && words.trim().is_empty();
    report.figure("metrics_faults", words.lines().count());
    report.expect(clean, || format!("promtool check metrics: {}", words.trim()));
    Ok(())
}
