//! HTTP/1 over a raw socket, as text: what a library would tidy up is sent and seen as it is.
//!
//! Reads by the framing that the head announces, and says whether a message came whole. It checks
//! nothing else. Invariant: every wait has a deadline.

use std::net::SocketAddr;
use std::time::Duration;

use axum::http::Uri;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{TcpListener, TcpStream};

/// The longest time to wait for an event: far beyond what it takes on a busy machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(120);

/// Waits for this, and fails the test when it does not come.
pub(crate) async fn within<F: Future>(what: &str, future: F) -> F::Output {
    match tokio::time::timeout(PATIENCE, future).await {
        Ok(output) => output,
        Err(_) => panic!("waited {PATIENCE:?} in vain: {what}"),
    }
}

/// Waits until this holds.
pub(crate) async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let mut look = tokio::time::interval(Duration::from_millis(2));
    let held = async {
        while !holds() {
            look.tick().await;
        }
    };
    within(what, held).await;
}

/// A request or an answer, as it came.
#[derive(Clone, Debug, Default)]
pub(crate) struct Message {
    /// The request line or the status line.
    pub(crate) first: String,
    /// Names in lower case, in order.
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) body: Vec<u8>,
    pub(crate) trailers: Vec<(String, String)>,
    /// `true` if the body ended as its framing says.
    pub(crate) whole: bool,
}

impl Message {
    pub(crate) fn status(&self) -> u16 {
        let status = self.first.split(' ').nth(1).and_then(|status| status.parse().ok());
        status.unwrap_or_else(|| panic!("no status line: {self:?}"))
    }

    /// The values of this header, joined.
    pub(crate) fn header(&self, name: &str) -> Option<String> {
        let named = self.headers.iter().filter(|(found, _)| found == name);
        let values: Vec<_> = named.map(|(_, value)| value.as_str()).collect();
        (!values.is_empty()).then(|| values.join(", "))
    }

    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    pub(crate) fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body)
            .unwrap_or_else(|error| panic!("{error}: {} {}", self.first, self.text()))
    }

    fn is_in_pieces(&self) -> bool {
        self.header("transfer-encoding").is_some_and(|coding| coding.ends_with("chunked"))
    }

    fn length(&self) -> Option<usize> {
        self.header("content-length")?.parse().ok()
    }
}

/// One end of a connection.
#[derive(Debug)]
pub(crate) struct Wire(pub(crate) BufReader<TcpStream>);

impl Wire {
    pub(crate) fn new(stream: TcpStream) -> Self {
        Self(BufReader::new(stream))
    }

    pub(crate) async fn connect(to: SocketAddr) -> Self {
        Self::new(within("a connection", TcpStream::connect(to)).await.expect("a connection"))
    }

    pub(crate) async fn send(&mut self, text: impl AsRef<[u8]>) {
        self.try_send(text).await.expect("the other end takes it");
    }

    pub(crate) async fn try_send(&mut self, text: impl AsRef<[u8]>) -> std::io::Result<()> {
        within("the other end reads", self.0.get_mut().write_all(text.as_ref())).await
    }

    /// Reads a head; `None` where the other end closed instead.
    pub(crate) async fn head(&mut self) -> Option<Message> {
        within("a head", self.read_head()).await
    }

    /// Reads a request, body and all.
    pub(crate) async fn request(&mut self) -> Message {
        let mut message = self.head().await.expect("a request");
        within("a request's body", self.read_body(&mut message, true)).await;
        message
    }

    /// Reads an answer, body and all.
    pub(crate) async fn answer(&mut self) -> Message {
        self.answer_to("GET").await
    }

    /// Reads the answer to a request of this method.
    pub(crate) async fn answer_to(&mut self, method: &str) -> Message {
        let message = self.head().await.expect("an answer");
        self.rest_of(message, method).await
    }

    /// Reads the body of an answer whose head is here.
    pub(crate) async fn rest_of(&mut self, mut message: Message, method: &str) -> Message {
        if method == "HEAD" || [204, 304].contains(&message.status()) {
            message.whole = true;
        } else {
            within("an answer's body", self.read_body(&mut message, false)).await;
        }
        message
    }

    /// Returns `true` if nothing more comes: the other end closed, in order or not.
    pub(crate) async fn is_closed(&mut self) -> bool {
        let mut rest = Vec::new();
        let read = within("the other end closes", self.0.read_to_end(&mut rest)).await;
        read.is_err() || rest.is_empty()
    }

    /// Reads exactly this many bytes of a body.
    pub(crate) async fn bytes(&mut self, count: usize) -> Vec<u8> {
        let mut bytes = vec![0; count];
        within("bytes", self.0.read_exact(&mut bytes)).await.expect("the bytes");
        bytes
    }

    async fn line(&mut self) -> Option<String> {
        let mut line = Vec::new();
        self.0.read_until(b'\n', &mut line).await.ok().filter(|count| *count > 0)?;
        let line = line.strip_suffix(b"\r\n")?;
        Some(String::from_utf8_lossy(line).into_owned())
    }

    async fn read_head(&mut self) -> Option<Message> {
        let first = self.line().await?;
        let headers = self.fields().await?;
        Some(Message { first, headers, ..Message::default() })
    }

    async fn fields(&mut self) -> Option<Vec<(String, String)>> {
        let mut fields = Vec::new();
        loop {
            let line = self.line().await?;
            if line.is_empty() {
                return Some(fields);
            }
            let (name, value) = line.split_once(':').expect("a header");
            fields.push((name.to_ascii_lowercase(), value.trim().to_owned()));
        }
    }

    async fn read_body(&mut self, message: &mut Message, is_request: bool) {
        if message.is_in_pieces() {
            message.whole = self.read_pieces(message).await.is_some();
        } else if let Some(length) = message.length() {
            let mut part = (&mut self.0).take(length as u64);
            message.whole = part.read_to_end(&mut message.body).await.is_ok();
            message.whole &= message.body.len() == length;
        } else if is_request {
            message.whole = true;
        } else {
            message.whole = self.0.read_to_end(&mut message.body).await.is_ok();
        }
    }

    async fn read_pieces(&mut self, message: &mut Message) -> Option<()> {
        loop {
            let size = self.line().await?;
            let size = usize::from_str_radix(size.split(';').next()?, 16).ok()?;
            if size == 0 {
                message.trailers = self.fields().await?;
                return Some(());
            }
            let start = message.body.len();
            message.body.resize(start + size, 0);
            if self.0.read_exact(&mut message.body[start..]).await.is_err() {
                message.body.truncate(start);
                return None;
            }
            self.line().await?;
        }
    }
}

/// An upstream whose answers the test writes.
#[derive(Debug)]
pub(crate) struct Upstream {
    listener: TcpListener,
    pub(crate) address: SocketAddr,
}

impl Upstream {
    pub(crate) async fn new() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        Self { listener, address }
    }

    pub(crate) fn uri(&self, path: &str) -> Uri {
        format!("http://{}{path}", self.address).parse().expect("an address")
    }

    pub(crate) async fn accept(&self) -> Wire {
        let (stream, _) =
            within("the proxy connects", self.listener.accept()).await.expect("a connection");
        Wire::new(stream)
    }
}
