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

use crate::common::process::{Process, free_port};

/// Requests to a proxy with either kind of output.
const REQUESTS: usize = 200;
/// The longest time to wait for a connection, an answer or an admin task.
const PATIENCE: Duration = Duration::from_secs(20);
/// The pause between two looks for one of these.
const PAUSE: Duration = Duration::from_millis(20);

/// The failures of a proxy's outputs.
#[derive(Clone, Copy, Debug)]
enum Sink {
    Full,
    Closed,
}

pub(crate) fn run() -> Result<(), BoxError> {
    let program = crate::proxy::program()?;
    let (mut lost, mut running) = (0, 0);
    for sink in [Sink::Full, Sink::Closed] {
        let mut proxy = Proxy::start(&program, sink)?;
        lost += (0..REQUESTS).filter(|nth| !proxy.answers(*nth)).count();
        running += proxy.admin_tasks_running()?;
        if let Some(status) = proxy.process.ended() {
            return Err(format!("the proxy ended: {status}").into());
        }
    }
    println!("figure faults.log.requests {} requests", 2 * REQUESTS);
    println!("figure faults.log.lost {lost} answers");
    println!("figure faults.log.running {running} tasks");
    if lost + running > 0 {
        return Err("a log that cannot be written loses answers or admin_tasks".into());
    }
    Ok(())
}

/// A proxy that runs.
struct Proxy {
    process: Process,
    at: SocketAddr,
}

impl Proxy {
    fn start(program: &Path, sink: Sink) -> Result<Self, BoxError> {
        let [at, dead] = [free_port()?, free_port()?];
        let mut command = Command::new(program);
        command
            .args(["--admin", "--listen", &at.to_string(), "--upstream", &format!("http://{dead}")])
            .env("RUST_LOG", "debug")
            .env("LOWTIDE_DEVICE", "host")
            .stdin(Stdio::null());
        let process = match sink {
            Sink::Full => {
                let full = File::options().write(true).open("/dev/full")?;
                Process::spawn(command.stdout(full.try_clone()?).stderr(full))?
            }
            Sink::Closed => {
                let (reader, writer) = std::io::pipe()?;
                let process = Process::spawn(command.stdout(writer.try_clone()?).stderr(writer))?;
                // The command holds writing ends too, which would keep the pipe from ending.
                drop(command);
                let mut lines = BufReader::new(reader).lines();
                // The reader is dropped after this line, and the pipe is broken from then on.
                let listens = lines
                    .by_ref()
                    .any(|line| line.is_ok_and(|line| line.contains("the proxy is listening")));
                if !listens {
                    return Err("the proxy ended before it listened".into());
                }
                process
            }
        };
        let mut proxy = Self { process, at };
        proxy.wait()?;
        Ok(proxy)
    }

    /// Waits until it accepts connections.
    fn wait(&mut self) -> Result<(), BoxError> {
        for _ in 0..PATIENCE.as_millis() / PAUSE.as_millis() {
            if TcpStream::connect(self.at).is_ok() {
                return Ok(());
            }
            if let Some(status) = self.process.ended() {
                return Err(format!("the proxy ended: {status}").into());
            }
            std::thread::sleep(PAUSE);
        }
        Err(format!("{} accepts no connection", self.at).into())
    }

    /// Returns `true` if a request is answered: of four two are forwarded, one is a verb and one
    /// loads the model.
    fn answers(&self, nth: usize) -> bool {
        let verb = "POST /memory/purge HTTP/1.1\r\nlowtide-admin: 1\r\ncontent-length: 0";
        let embed = "POST /embed HTTP/1.1\r\ncontent-length: 18";
        let answer = match nth % 4 {
            0 => self.ask(verb, ""),
            1 => self.ask(embed, "{\"texts\": [\"ebb\"]}"),
            _ => self.ask("GET / HTTP/1.1", ""),
        };
        answer.is_ok_and(|answer| answer.starts_with("HTTP/1.1 "))
    }

    /// The admin tasks that have not ended within the time.
    fn admin_tasks_running(&self) -> Result<usize, BoxError> {
        let mut running = usize::MAX;
        for _ in 0..PATIENCE.as_millis() / PAUSE.as_millis() {
            let answer = self.ask("GET /memory?with=admin_tasks HTTP/1.1", "")?;
            let body = answer.split_once("\r\n\r\n").map(|(_, body)| body);
            let memory: Value = serde_json::from_str(body.ok_or("no body")?)?;
            let list = memory["admin_tasks"]["list"].as_array().ok_or("no list of admin_tasks")?;
            if list.is_empty() {
                return Err("no admin task was taken".into());
            }
            let is_over = |admin_task: &&Value| {
                ["done", "failed"].map(Value::from).contains(&admin_task["state"])
            };
            running = list.len() - list.iter().filter(is_over).count();
            if running == 0 {
                break;
            }
            std::thread::sleep(PAUSE);
        }
        Ok(running)
    }

    /// Sends a request and reads until the connection ends.
    fn ask(&self, head: &str, body: &str) -> std::io::Result<String> {
        let mut stream = TcpStream::connect(self.at)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        let host = "host: localhost\r\nconnection: close\r\n\r\n";
        stream.write_all(format!("{head}\r\n{host}{body}").as_bytes())?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer)
    }
}
