//! A server in a process of its own: its start, requests to it, and the kernel's figures for it.

use std::fs;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use plain::BoxError;

/// Ticks a second of the times in `/proc`.
const TICKS: f64 = 100.0;

/// How a server is started.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Program<'a> {
    pub(crate) path: &'a Path,
    /// The idle time is a variable, not an argument.
    pub(crate) is_lowtide: bool,
    /// `_RJEM_MALLOC_CONF`.
    pub(crate) jemalloc: &'a str,
}

/// A running server, which is killed when it is dropped.
#[derive(Debug)]
pub(crate) struct Server {
    child: Child,
    stream: BufReader<TcpStream>,
}

impl Server {
    /// Starts it, and connects.
    pub(crate) fn start(program: Program<'_>, model: &Path, idle: u64) -> Result<Self, BoxError> {
        let mut command = Command::new(program.path);
        command.arg(model).arg("127.0.0.1:0").stdout(Stdio::piped());
        if program.is_lowtide {
            command.env("LOWTIDE_IDLE_UNLOAD", format!("{idle}s"));
        } else {
            command.arg(idle.to_string());
        }
        if !program.jemalloc.is_empty() {
            command.env("_RJEM_MALLOC_CONF", program.jemalloc);
        }
        let mut child = command.spawn()?;
        let mut line = String::new();
        let output = child.stdout.take().ok_or("no output of the server")?;
        BufReader::new(output).read_line(&mut line)?;
        let address = line.trim().strip_prefix("listening on http://");
        let connected = address.map(TcpStream::connect);
        match connected {
            Some(Ok(stream)) => {
                stream.set_nodelay(true)?;
                Ok(Self { child, stream: BufReader::new(stream) })
            }
            other => {
                child.kill()?;
                Err(format!("{} does not serve: {other:?}", program.path.display()).into())
            }
        }
    }

    /// Sends a body of JSON, and returns the status and the body of the answer.
    pub(crate) fn post(&mut self, path: &str, body: &[u8]) -> Result<(u16, Vec<u8>), BoxError> {
        let mut request = format!(
            "POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n\
             Content-Length: {}\r\n\r\n",
            body.len()
        )
        .into_bytes();
        request.extend(body);
        self.stream.get_mut().write_all(&request)?;
        self.answer()
    }

    fn answer(&mut self) -> Result<(u16, Vec<u8>), BoxError> {
        let mut line = String::new();
        self.stream.read_line(&mut line)?;
        let status = line.split(' ').nth(1).ok_or("no status in the answer")?.parse()?;
        let mut length = 0;
        loop {
            line.clear();
            self.stream.read_line(&mut line)?;
            let head = line.trim().to_ascii_lowercase();
            if head.is_empty() {
                break;
            }
            if let Some(value) = head.strip_prefix("content-length:") {
                length = value.trim().parse()?;
            }
        }
        let mut body = vec![0; length];
        self.stream.read_exact(&mut body)?;
        Ok((status, body))
    }

    /// Anonymous memory, in MiB.
    pub(crate) fn anonymous_mib(&self) -> Result<f64, BoxError> {
        self.mib("smaps_rollup", "Anonymous:")
    }

    /// The largest resident set since [`Server::reset_peak`], in MiB.
    pub(crate) fn peak_mib(&self) -> Result<f64, BoxError> {
        self.mib("status", "VmHWM:")
    }

    /// Makes the present resident set the peak.
    pub(crate) fn reset_peak(&self) -> Result<(), BoxError> {
        Ok(fs::write(self.file("clear_refs"), "5")?)
    }

    /// CPU seconds of all threads so far, those that ended too.
    pub(crate) fn cpu_seconds(&self) -> Result<f64, BoxError> {
        let (user, kernel) = (self.stat(11)?, self.stat(12)?);
        Ok((user + kernel) / TICKS)
    }

    /// Page faults without a read of a file so far.
    pub(crate) fn faults(&self) -> Result<f64, BoxError> {
        self.stat(7)
    }

    /// A field of `/proc/PID/stat`, counted from the one behind the name.
    fn stat(&self, number: usize) -> Result<f64, BoxError> {
        let stat = fs::read_to_string(self.file("stat"))?;
        // The name of the program, in parentheses, may hold spaces.
        let fields = stat.rsplit_once(')').map_or("", |(_, fields)| fields);
        let field = fields.split_whitespace().nth(number).ok_or("/proc/PID/stat is too short")?;
        Ok(field.parse()?)
    }

    fn mib(&self, file: &str, field: &str) -> Result<f64, BoxError> {
        let text = fs::read_to_string(self.file(file))?;
        let line = text.lines().find_map(|line| line.strip_prefix(field));
        let kib = line.and_then(|line| line.trim().strip_suffix("kB"));
        let kib: f64 = kib.ok_or_else(|| format!("{file} has no {field}"))?.trim().parse()?;
        Ok(kib / 1024.0)
    }

    fn file(&self, name: &str) -> String {
        format!("/proc/{}/{name}", self.child.id())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
