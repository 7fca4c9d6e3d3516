//! Accepting connections over TCP with tokio, the time of their last byte, and their close.
//!
//! A connection for which there is no place waits for one, before anything is read of it. Those
//! that wait get their places in the order of their arrival, so that a client that connects again
//! whenever it is closed comes after those that wait already.
//!
//! If a socket is closed with unread bytes, or more of them arrive later, the kernel resets the
//! connection, and the client may lose an answer that it has not read yet (RFC 9112, 9.6). So the
//! stream first sends no more, and then reads and discards what arrives until the client has
//! closed its side: the `lingering_close` of nginx. It lingers only if something of a request was
//! not read: the service left a part of the last body, or bytes have arrived that the server did
//! not read.
//!
//! Invariants: at most a quarter as many connections wait as there are places, the number that gets
//! places within a grace period if all open connections do nothing. A connection lingers for at
//! most [`LINGER_TIME`], and discards at most [`DRAIN_MAX`]; it holds no memory for what it
//! discards. The number of lingering connections is bounded with all others: they are open, and the
//! first to be closed for another one.

use std::collections::VecDeque;
use std::future::{Future, poll_fn};
use std::io;
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{Sleep, sleep};

use crate::clock::Moment;
use crate::service::DRAIN_MAX;
use crate::sync::lock;

use super::{CloseReason, Connection, ConnectionState, Connections, PACE, TEND_EVERY};

/// The time for which no further connection is accepted after one was refused. A client that
/// connects again at once waits in the queue of the listener meanwhile, and costs little.
const REFUSED_PAUSE: Duration = Duration::from_millis(1);

/// The pause while no connection is open, which the next one ends.
const IDLE: Duration = Duration::from_secs(3600);

/// The longest time that a connection lingers. An estimate: most clients have read an answer and
/// closed by then.
const LINGER_TIME: Duration = Duration::from_secs(2);

/// Bytes that are read and discarded at once, on the stack.
const DISCARDED: usize = 8 << 10;

impl Connections {
    /// Returns a listener that accepts connections within these bounds.
    pub fn listen(&self, listener: TcpListener) -> ConnectionListener {
        let connections = self.clone();
        let (waiting, accepts_at) = (VecDeque::new(), Moment::ORIGIN);
        ConnectionListener { listener, connections, waiting, accepts_at }
    }
}

/// A TCP listener that accepts connections for which there is a place.
#[derive(Debug)]
pub struct ConnectionListener {
    pub(super) listener: TcpListener,
    connections: Connections,
    /// With the time until which each waits.
    waiting: VecDeque<(TcpStream, SocketAddr, Moment)>,
    /// The time from which connections are accepted.
    accepts_at: Moment,
}

impl ConnectionListener {
    /// Accepts the next connection for which there is a place, and closes others as
    /// [`Connections`] says: call it again without delay. If no place is free and none can be made,
    /// a connection waits up to a grace period. At most a quarter as many wait as there are places;
    /// further ones are refused, 1,000 a second at most.
    ///
    /// A call that is cancelled loses nothing. Needs a runtime of tokio with time and IO.
    ///
    /// ```
    /// use std::convert::Infallible;
    /// use std::pin::pin;
    /// use std::time::Duration;
    ///
    /// use http::{Request, Response};
    /// use hyper::server::conn::http1;
    /// use hyper::service::service_fn;
    /// use hyper_util::rt::{TokioIo, TokioTimer};
    /// use lowtide::service::Connections;
    /// use tokio::net::TcpListener;
    /// use tower::ServiceExt as _;
    ///
    /// /// Accepts connections until `ending` completes, such as `Memory::terminated`.
    /// async fn serve(listener: TcpListener, connections: Connections, ending: impl Future) {
    ///     let (mut listener, mut ending) = (connections.listen(listener), pin!(ending));
    ///     loop {
    ///         let accepted = tokio::select! {
    ///             _ = &mut ending => return,
    ///             accepted = listener.accept() => accepted,
    ///         };
    ///         let Ok((connection, stream, _from)) = accepted else {
    ///             tokio::time::sleep(Duration::from_millis(50)).await;
    ///             continue;
    ///         };
    ///         # let app = tower::service_fn(async |_| {
    ///         #     Ok::<_, Infallible>(Response::new(String::new()))
    ///         # });
    ///         let app = connection.service(app.clone()); // a tower service, such as a router
    ///         let service = service_fn(move |request: Request<_>| app.clone().oneshot(request));
    ///         let served = http1::Builder::new()
    ///             .max_buf_size(32 << 10)
    ///             .timer(TokioTimer::new())
    ///             .serve_connection(TokioIo::new(stream), service);
    ///         tokio::spawn(async move {
    ///             tokio::select! {
    ///                 _ = served => {}
    ///                 () = connection.closed() => {}
    ///             }
    ///         });
    ///     }
    /// }
    /// ```
    ///
    /// # Errors
    /// Those of [`TcpListener::accept`], mostly a lack of descriptors: wait a moment, and call it
    /// again.
    pub async fn accept(&mut self) -> io::Result<(Connection, ConnectionStream, SocketAddr)> {
        let Self { listener, connections, waiting, accepts_at } = self;
        let Connections { clock, grace, .. } = &*connections;
        loop {
            connections.tend();
            let now = clock.now();
            // Without connections there is nothing to look after.
            let is_idle = waiting.is_empty() && lock(&connections.table).open.is_empty();
            let mut pause = if is_idle { IDLE } else { TEND_EVERY };
            if !waiting.is_empty() {
                match connections.try_open() {
                    Ok(connection) => {
                        let Some((stream, from, _)) = waiting.pop_front() else { continue };
                        let state = Arc::clone(&connection.state);
                        let stream = ConnectionStream {
                            stream,
                            state,
                            connections: connections.clone(),
                            connection: None,
                            has_shut_down: false,
                            discarded: 0,
                            timer: None,
                        };
                        return Ok((connection, stream, from));
                    }
                    Err(earliest) => pause = pause.min(earliest - now),
                }
            }
            let before = waiting.len();
            waiting.retain(|(_, _, until)| now < *until);
            (waiting.len()..before).for_each(|_| CloseReason::Refused.count());
            let accepts = now >= *accepts_at;
            if !accepts {
                pause = pause.min(*accepts_at - now);
            }
            let mut pause = pin!(sleep(pause));
            let accepted = poll_fn(|cx| {
                if accepts && let Poll::Ready(accepted) = listener.poll_accept(cx) {
                    return Poll::Ready(Some(accepted));
                }
                let has_place = !waiting.is_empty() && connections.poll_free(cx).is_ready();
                let is_over = has_place || pause.as_mut().poll(cx).is_ready();
                if is_over { Poll::Ready(None) } else { Poll::Pending }
            });
            let Some(accepted) = accepted.await else { continue };
            let (stream, from) = accepted?;
            if waiting.len() <= connections.most() / PACE as usize {
                waiting.push_back((stream, from, clock.now() + *grace));
            } else {
                CloseReason::Refused.count();
                *accepts_at = clock.now() + REFUSED_PAUSE;
            }
        }
    }
}

impl Connections {
    /// Waits until a place is free.
    fn poll_free(&self, cx: &Context<'_>) -> Poll<()> {
        let most = self.most();
        let mut table = lock(&self.table);
        if table.open.len() < most {
            return Poll::Ready(());
        }
        if !table.waiting.iter().any(|waker| waker.will_wake(cx.waker())) {
            table.waiting.push(cx.waker().clone());
        }
        Poll::Pending
    }
}

/// A TCP stream that records the time of its last byte. One that is closed for another connection,
/// or for memory, is reset, so that the kernel keeps nothing of what its client did not read.
///
/// It lingers when it is shut down before the client has sent all of a request, as after a
/// rejection: it sends no more, and reads and discards what arrives until the client closes its
/// side, for at most 2 s and [`DRAIN_MAX`](crate::service::DRAIN_MAX). Otherwise the kernel would
/// reset the connection, and the client might lose the answer. Meanwhile it counts as open, and is
/// the first to be closed for another.
#[derive(Debug)]
pub struct ConnectionStream {
    stream: TcpStream,
    pub(super) state: Arc<ConnectionState>,
    pub(super) connections: Connections,
    /// Its place, if nothing else drops the stream once it is to be closed.
    pub(super) connection: Option<Connection>,
    has_shut_down: bool,
    /// The bytes that were discarded after the shutdown.
    discarded: u64,
    /// Ends the lingering. `None` until the connection lingers.
    timer: Option<Pin<Box<Sleep>>>,
}

impl ConnectionStream {
    /// Returns the stream, for its options and addresses.
    #[must_use]
    pub const fn get_ref(&self) -> &TcpStream {
        &self.stream
    }

    /// Records the result of a write.
    fn written(
        &self,
        written: Poll<io::Result<usize>>,
        cx: &Context<'_>,
    ) -> Poll<io::Result<usize>> {
        self.state.is_blocked.store(written.is_pending(), Ordering::Relaxed);
        if matches!(written, Poll::Ready(Ok(1..))) {
            self.connections.progress(&self.state);
        }
        if written.is_pending() { self.poll_closed(cx) } else { written }
    }

    /// Waits until the connection is to be closed, if nothing else drops it then.
    fn poll_closed<T>(&self, cx: &Context<'_>) -> Poll<io::Result<T>> {
        if self.connection.is_none() {
            return Poll::Pending;
        }
        self.state.poll(&self.state.is_closed, cx).map(|()| {
            let cause = "its client made no progress, and its place or memory is needed";
            Err(io::Error::new(io::ErrorKind::ConnectionAborted, cause))
        })
    }
}

impl AsyncRead for ConnectionStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let Poll::Ready(read) = Pin::new(&mut self.stream).poll_read(cx, buffer) else {
            return self.poll_closed(cx);
        };
        read?;
        if buffer.filled().len() > before {
            self.connections.progress(&self.state);
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for ConnectionStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(cx, buffer);
        self.written(written, cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffers: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(cx, buffers);
        self.written(written, cx)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        // hyper does not always read or write while it waits for a handler.
        if let closed @ Poll::Ready(_) = self.poll_closed(cx) {
            return closed;
        }
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    /// Shuts the stream down for writing, and lingers if something of a request was not read.
    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if let closed @ Poll::Ready(_) = self.poll_closed(cx) {
            return closed;
        }
        let this = &mut *self;
        if !this.has_shut_down {
            ready!(Pin::new(&mut this.stream).poll_shutdown(cx))?;
            this.has_shut_down = true;
        }
        // Bounded: each iteration discards a byte or more, up to the maximum.
        while this.discarded < DRAIN_MAX.get() {
            let mut buffer = [std::mem::MaybeUninit::uninit(); DISCARDED];
            let mut buffer = ReadBuf::uninit(&mut buffer);
            let polled = Pin::new(&mut this.stream).poll_read(cx, &mut buffer);
            let is_over = polled.is_ready() && buffer.filled().is_empty();
            let lingers = this.timer.is_some() || this.state.has_unread.load(Ordering::Relaxed);
            if is_over || (polled.is_pending() && !lingers) {
                return Poll::Ready(Ok(()));
            }
            this.discarded += buffer.filled().len() as u64;
            let timer = this.timer.get_or_insert_with(|| {
                let now = this.connections.now().max(1);
                this.state.lingers_since.store(now, Ordering::Relaxed);
                Box::pin(sleep(LINGER_TIME))
            });
            if timer.as_mut().poll(cx).is_ready() {
                return Poll::Ready(Ok(()));
            }
            ready!(polled)?;
        }
        Poll::Ready(Ok(()))
    }
}

impl Drop for ConnectionStream {
    fn drop(&mut self) {
        if self.state.is_closed.load(Ordering::Acquire) {
            // A socket without this option is closed as well.
            let _ = self.stream.set_zero_linger();
        }
    }
}
