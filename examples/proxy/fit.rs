//! The `fit` subcommand: asks a running proxy to fit in a smaller memory limit, and waits until it
//! does or cannot.
//!
//! Run it before the limit of the container is lowered in place; see "Lower the limit in place"
//! in docs/OPERATING.md. It decides nothing: the proxy does, and goes on if this program is ended.
//!
//! Exit codes: 0 if the limit can be lowered, 1 with the reason if not.

use std::fmt::Write as _;
use std::io::{self, Write as _};
use std::net::SocketAddr;
use std::time::Duration;

use axum::http::StatusCode;
use clap::Args;
use lowtide::{BoxError, ByteSize};
use serde_json::Value;
use tokio::time::Instant;

/// The time between two looks at the progress.
const LOOK_EVERY: Duration = Duration::from_millis(250);
/// The shortest time between two lines of progress.
const LINE_EVERY: Duration = Duration::from_secs(1);
/// The longest time that the proxy takes beyond that of the fit: other admin tasks may run first.
const SPARE: Duration = Duration::from_secs(30);
/// The number of looks in a row that may fail: 5 s if each fails at once. A proxy that makes room
/// has places for fewer connections, and is slow if it is busy.
const FAILURES_MAX: u32 = 20;

#[derive(Clone, Debug, Args)]
pub(super) struct Fit {
    /// The limit to fit in, such as 512Mi, or none to lift the one in force.
    #[arg(value_parser = limit)]
    limit: String,
    /// Longest time until it fits, 1s to 1h.
    #[arg(long, value_parser = humantime::parse_duration, default_value = "30s")]
    within: Duration,
    /// Do not count page cache: for a limit that is lowered without a check of the usage. The
    /// kubelet checks it.
    #[arg(long)]
    ignore_page_cache: bool,
}

/// Returns the value of the query: an amount in bytes, or `none`.
fn limit(text: &str) -> Result<String, String> {
    if text == "none" {
        return Ok(text.to_owned());
    }
    match text.parse() {
        Ok(ByteSize::ZERO) => Err("expected an amount of memory above zero, or none".to_owned()),
        Ok(limit) => Ok(limit.get().to_string()),
        Err(error) => Err(format!("{error}, or none")),
    }
}

impl Fit {
    /// Sends the command to the proxy at this address and waits for its end.
    ///
    /// # Errors
    /// The reason if the process does not fit, or if the command was not accepted.
    pub(super) async fn run(&self, at: SocketAddr, token: Option<&str>) -> Result<(), BoxError> {
        let task = self.send(at, token).await?;
        let deadline = Instant::now() + self.within + SPARE;
        let (mut shown, mut next_line, mut failures) = (String::new(), Instant::now(), 0);
        // Ends with the task, or at the deadline.
        loop {
            let figures = super::ask(at, "GET", "/memory?with=admin_tasks", None);
            let (status, figures) = match figures.await {
                Err(_) if failures < FAILURES_MAX && Instant::now() < deadline => {
                    failures += 1;
                    tokio::time::sleep(LOOK_EVERY).await;
                    continue;
                }
                figures => figures?,
            };
            failures = 0;
            if !status.is_success() {
                return Err(format!("{at} answered {status}: expected the figures").into());
            }
            let figures: Value = serde_json::from_slice(&figures)?;
            let list = figures["admin_tasks"]["list"].as_array();
            let of = list.and_then(|list| list.iter().find(|one| one["id"] == task));
            let of = of.ok_or_else(|| format!("{at} has no admin task {task} any more"))?;
            let text = |key: &str| of[key].as_str().unwrap_or_default().to_owned();
            match text("state").as_str() {
                "done" => return Ok(say(&text("outcome"))?),
                "failed" => return Err(text("outcome").into()),
                _ => {}
            }
            let progress = text("progress");
            // The sum, without the holders, which vary.
            let sum = progress.split(':').next().unwrap_or_default();
            if sum != shown && Instant::now() >= next_line {
                say(&progress)?;
                (shown, next_line) = (sum.to_owned(), Instant::now() + LINE_EVERY);
            }
            if Instant::now() >= deadline {
                return Err(format!("{at} did not end admin task {task} in time").into());
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    /// Sends the command. Returns the number of its task.
    async fn send(&self, at: SocketAddr, token: Option<&str>) -> Result<u64, BoxError> {
        let mut path = format!("/memory/fit?limit={}", self.limit);
        write!(path, "&within={}ms", self.within.as_millis())?;
        if self.ignore_page_cache {
            path.push_str("&page_cache=ignore");
        }
        let (status, body) = super::ask(at, "POST", &path, token).await?;
        let told: Value = serde_json::from_slice(&body).unwrap_or_default();
        match told["admin_task"].as_u64() {
            Some(task) if status == StatusCode::ACCEPTED => Ok(task),
            _ if status == StatusCode::NOT_FOUND => {
                Err(format!("{at} accepts no admin commands: expected PROXY_ADMIN=yes").into())
            }
            _ => {
                let detail = told["detail"].as_str().unwrap_or("expected an admin task");
                Err(format!("{at} answered {status}: {detail}").into())
            }
        }
    }
}

fn say(line: &str) -> io::Result<()> {
    // Not `println!`, which panics if standard output is closed.
    writeln!(io::stdout(), "{line}")
}
