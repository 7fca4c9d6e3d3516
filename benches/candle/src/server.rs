//! A server in a process of its own: its start, and requests to it.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use plain::BoxError;

use crate::process::Proc;

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
    pub(crate) kernel: Proc,
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
                let kernel = Proc(child.id().to_string());
                Ok(Self { child, kernel, stream: BufReader::new(stream) })
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
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
