//! Closing a connection so that its client reads the last answer.
//!
//! If a socket is closed with unread bytes, or more of them arrive later, the kernel resets the
//! connection, and the client may lose an answer that it has not read yet (RFC 9112, 9.6). So the
//! stream first sends no more, and then reads and discards what arrives until the client has
//! closed its side: the `lingering_close` of nginx.
//!
//! A connection lingers only if something of a request was not read: the service left a part of the
//! last body, or bytes have arrived that the server did not read.
//!
//! Invariants: a connection lingers for at most [`LINGER_TIME`], and discards at most
//! [`DRAIN_MAX`]; it holds no memory for what it discards. The number of lingering connections is
//! bounded with all others: they are open, and the first to be closed for another one.

use std::future::Future as _;
use std::io;
use std::pin::Pin;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead as _, AsyncWrite as _, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Sleep, sleep};

use super::{ConnectionState, Settings};
use crate::service::DRAIN_MAX;

/// The longest time that a connection lingers. An estimate: most clients have read an answer and
/// closed by then.
const LINGER_TIME: Duration = Duration::from_secs(2);

/// Bytes that are read and discarded at once, on the stack.
const DISCARDED: usize = 8 << 10;

/// The shutdown of a stream.
#[derive(Debug, Default)]
pub(super) struct Linger {
    has_shut_down: bool,
    /// The bytes that were discarded.
    discarded: u64,
    /// Ends it. `None` until the connection lingers.
    timer: Option<Pin<Box<Sleep>>>,
}

impl Linger {
    /// Shuts the stream down for writing, and lingers if something of a request was not read.
    pub(super) fn poll_shutdown(
        &mut self,
        stream: &mut TcpStream,
        state: &ConnectionState,
        settings: &Settings,
        cx: &mut Context<'_>,
    ) -> Poll<io::Result<()>> {
        if !self.has_shut_down {
            ready!(Pin::new(&mut *stream).poll_shutdown(cx))?;
            self.has_shut_down = true;
        }
        // Bounded: each iteration discards a byte or more, up to the maximum.
        while self.discarded < DRAIN_MAX.get() {
            let mut buffer = [std::mem::MaybeUninit::uninit(); DISCARDED];
            let mut buffer = ReadBuf::uninit(&mut buffer);
            let polled = Pin::new(&mut *stream).poll_read(cx, &mut buffer);
            let is_over = polled.is_ready() && buffer.filled().is_empty();
            if is_over || (polled.is_pending() && !self.lingers(state)) {
                return Poll::Ready(Ok(()));
            }
            self.discarded += buffer.filled().len() as u64;
            let timer = self.timer.get_or_insert_with(|| {
                state.lingers_since.store(settings.now().max(1), Ordering::Relaxed);
                Box::pin(sleep(LINGER_TIME))
            });
            if timer.as_mut().poll(cx).is_ready() {
                return Poll::Ready(Ok(()));
            }
            ready!(polled)?;
        }
        Poll::Ready(Ok(()))
    }

    fn lingers(&self, state: &ConnectionState) -> bool {
        self.timer.is_some() || state.has_unread.load(Ordering::Relaxed)
    }
}
