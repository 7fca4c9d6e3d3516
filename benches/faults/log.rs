//! A proxy whose log cannot be written: how many answers are lost.
//!
//! The real proxy, with both of its outputs on a full disk, and with both on a pipe that is closed
//! once it listens. Its upstream is dead, so that each forwarded request logs a warning; verbs and
//! the load of a model log as well.
#![expect(clippy::disallowed_methods, reason = "another process is waited for")]

use std::fs::File;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use lowtide::BoxError;
use serde_json::Value;

use crate::common::figures::{Figures, count};
use crate::common::process::{Process, free_port};

/// Requests to a proxy with either kind of output.
const REQUESTS: usize = 200;
/// The longest time to wait for an answer, and the looks for a connection or an admin task.
const PATIENCE: Duration = Duration::from_secs(20);
const LOOKS: usize = 1_000;
/// The pause between two of these.
const PAUSE: Duration = Duration::from_millis(20);

pub(crate) fn run(figures: &mut Figures) -> Result<(), BoxError> {
    let program = crate::proxy::program()?;
    let (mut lost, mut running) = (0, 0);
    for is_full in [true, false] {
        let (mut proxy, at) = start(&program, is_full)?;
        lost += (0..REQUESTS).filter(|nth| !is_answered(at, *nth)).count();
        running += admin_tasks_running(at)?;
        if let Some(status) = proxy.ended() {
            return Err(format!("the proxy ended: {status}").into());
        }
    }
    figures.add("faults.log.requests", count(2 * REQUESTS as u64), "requests");
    figures.at_most("faults.log.lost", count(lost as u64), "answers", 0.0);
    figures.at_most("faults.log.running", count(running as u64), "tasks", 0.0);
    Ok(())
}

/// Starts a proxy whose outputs are a full disk, or a pipe that breaks, and waits until it accepts
/// connections.
fn start(program: &Path, is_full: bool) -> Result<(Process, SocketAddr), BoxError> {
    let [at, dead] = [free_port()?, free_port()?];
    let mut command = Command::new(program);
    command
        .args(["--admin", "--listen", &at.to_string(), "--upstream", &format!("http://{dead}")])
        .env("RUST_LOG", "debug")
        .env("LOWTIDE_DEVICE", "host")
        .stdin(Stdio::null());
    let mut proxy = if is_full {
        let full = File::options().write(true).open("/dev/full")?;
        Process::spawn(command.stdout(full.try_clone()?).stderr(full))?
    } else {
        let (reader, writer) = std::io::pipe()?;
        let process = Process::spawn(command.stdout(writer.try_clone()?).stderr(writer))?;
        // The command holds writing ends too, which would keep the pipe from ending.
        drop(command);
        let mut lines = BufReader::new(reader).lines().map_while(Result::ok);
        // The reader is dropped after this line, and the pipe is broken from then on.
        if !lines.any(|line| line.contains("the proxy is listening")) {
            return Err("the proxy ended before it listened".into());
        }
        process
    };
    for _ in 0..LOOKS {
        if TcpStream::connect(at).is_ok() {
            return Ok((proxy, at));
        }
        if let Some(status) = proxy.ended() {
            return Err(format!("the proxy ended: {status}").into());
        }
        std::thread::sleep(PAUSE);
    }
    Err(format!("{at} accepts no connection").into())
}

/// Returns `true` if a request is answered: of four two are forwarded, one is a verb and one loads
/// the model.
fn is_answered(at: SocketAddr, nth: usize) -> bool {
    let verb = "POST /memory/purge HTTP/1.1\r\nlowtide-admin: 1\r\ncontent-length: 0";
    let embed = "POST /embed HTTP/1.1\r\ncontent-length: 18";
    let answer = match nth % 4 {
        0 => ask(at, verb, ""),
        1 => ask(at, embed, "{\"texts\": [\"ebb\"]}"),
        _ => ask(at, "GET / HTTP/1.1", ""),
    };
    answer.is_ok_and(|answer| answer.starts_with("HTTP/1.1 "))
}

/// Returns the number of admin tasks that have not ended within the time.
fn admin_tasks_running(at: SocketAddr) -> Result<usize, BoxError> {
    let mut running = usize::MAX;
    for _ in 0..LOOKS {
        let answer = ask(at, "GET /memory?with=admin_tasks HTTP/1.1", "")?;
        let body = answer.split_once("\r\n\r\n").map(|(_, body)| body);
        let memory: Value = serde_json::from_str(body.ok_or("no body")?)?;
        let list = memory["admin_tasks"]["list"].as_array().ok_or("no list of admin tasks")?;
        if list.is_empty() {
            return Err("no admin task was taken".into());
        }
        let is_over = |task: &&Value| ["done", "failed"].map(Value::from).contains(&task["state"]);
        running = list.len() - list.iter().filter(is_over).count();
        if running == 0 {
            break;
        }
        std::thread::sleep(PAUSE);
    }
    Ok(running)
}

/// Sends a request and reads until the connection ends.
fn ask(at: SocketAddr, head: &str, body: &str) -> std::io::Result<String> {
    let mut stream = TcpStream::connect(at)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    let host = "host: localhost\r\nconnection: close\r\n\r\n";
    stream.write_all(format!("{head}\r\n{host}{body}").as_bytes())?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer)
}
