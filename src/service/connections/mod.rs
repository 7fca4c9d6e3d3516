//! Connections as a class: how many are open, and which one is closed when there is no place for
//! another or when memory is short.
//!
//! A server opens a [`Connection`] for each that it accepts, and drops what it serves there when
//! [`Connection::closed`] completes. The module relies on the server for the time of the last byte
//! (`tcp`, or [`Connection::progress`]) and on [`ConnectionService`] for what the client is waited
//! for (`requests`). With the feature `tokio`, a [`ConnectionListener`] does the rest.
//!
//! A connection that lingers (`tcp`) keeps its place until another needs it.
//!
//! Invariants: open connections <= `most`, except that a closed one lives on until its server drops
//! it; a connection that has moved a byte within the grace period, and does not linger, is not
//! closed.
//!
//! It does not look at addresses, and knows neither TLS nor the frames of HTTP: the server limits
//! the streams of a connection of HTTP/2.

#[cfg(all(feature = "axum", feature = "tokio"))]
mod app;
mod requests;
#[cfg(feature = "tokio")]
mod tcp;

use std::future::poll_fn;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use crate::bytes::ByteSize;
use crate::clock::{Clock, Moment, SystemClock};
use crate::metrics::record::{CloseReason, OPEN};
use crate::sync::lock;
use lowtide_admission::{Admission, AdmissionStats, Budget, Level, RejectReason};

use super::permit::RequestPermit;

#[cfg(all(feature = "axum", feature = "tokio"))]
pub use app::ConnectionApp;
pub use requests::{ConnectionBody, ConnectionFuture, ConnectionService};
#[cfg(feature = "tokio")]
pub use tcp::{ConnectionListener, ConnectionStream};

/// The default of [`Connections::with_estimate`]: two buffers of 32 KiB.
const ESTIMATE: ByteSize = ByteSize::kib(64);
/// The default of [`Connections::with_grace`]. An estimate: several round trips.
const GRACE: Duration = Duration::from_secs(1);
/// The part of the ceiling that connections may fill by their estimate.
const PART: u64 = 4;
/// While all connections are idle, each of them stays for this many grace periods: they are closed
/// one after the other, at the same pace. A client that connects again at once then waits in the
/// queue of the listener like every other, and what is slow and not idle keeps its place.
const PACE: u32 = 4;
/// The part of the allowance that is free once unread connections were closed. An estimate: enough
/// for some small requests.
const SPARE_PART: u64 = 128;
/// The most tasks that wait for the end of a connection: more than there are, unless each wait is
/// another task's.
const WAKERS_MAX: usize = 8;
/// The time between two looks for connections that hold memory.
const TEND_EVERY: Duration = Duration::from_millis(100);

/// The open connections of a server. Cheap to clone; clones share the connections.
///
/// At most `most` connections are open at once, and no more than fill a quarter of the ceiling of
/// host memory by their estimate. That bound follows the ceiling; nothing is reserved for a single
/// connection, because an idle one holds far less than its buffers may, and what it holds is
/// measured with the rest of the heap.
///
/// If all places are taken, the connection that has made no progress for the longest time is closed
/// for the new one: no byte was read or written, for longer than the grace period. Connections
/// on which the server works are closed only while they hold more than three quarters of the
/// places, and the latest first, so that long work ends under overload and a dependency that hangs
/// does not take all places. If none may be closed, [`Connections::open`] returns `None`. A
/// `ConnectionListener` lets the new connection wait for up to the grace period first. Connections
/// that linger (see `ConnectionStream`) are closed before all others, without a grace period.
///
/// While memory is short, connections whose clients have taken nothing of their responses for
/// longer than the grace period are closed too, the longest unread first, every 100 ms as many as
/// hold what is lacking by the mean of all requests. Memory is short at level high, while more is reserved than allowed or requests wait for
/// room, and when some were rejected for lack of it. At level high, connections also end with their
/// next response.
///
/// After an answer that upgrades a connection of HTTP/1, such as to a WebSocket, the connection keeps
/// the request's permit to its end; the memory of the session is measured if it runs in
/// [`RequestPermit::scope`](super::RequestPermit::scope).
///
/// It does not protect from a client that moves a byte within every grace period: a trickle, or
/// HTTP/2 pings that the server answers. Over HTTP/2 one stream that moves, or on which the server
/// works, keeps the others. Set a minimum rate for bodies
/// ([`MemoryLayer::with_min_data_rate`](super::MemoryLayer::with_min_data_rate)), which also ends
/// the connections of clients that take nothing, and a limit per address in front.
///
/// ```
/// use std::time::Duration;
/// use lowtide::admission::Admission;
/// use lowtide::service::Connections;
/// use lowtide::ByteSize;
///
/// let admission = Admission::with_limit(ByteSize::mib(256)); // or `memory.admission()`
/// let connections = Connections::new(&admission, 512)
///     .with_estimate(ByteSize::kib(96))
///     .with_grace(Duration::from_secs(2));
/// let connection = connections.open().expect("a place is free");
/// connection.progress();
/// drop(connection); // leaves its place
/// ```
#[derive(Clone, Debug)]
#[must_use]
pub struct Connections {
    admission: Admission,
    most: usize,
    estimate: ByteSize,
    grace: Duration,
    clock: Arc<dyn Clock>,
    table: Arc<Mutex<ConnectionTable>>,
}

#[derive(Debug, Default)]
struct ConnectionTable {
    open: Vec<Arc<ConnectionState>>,
    /// No connection is closed for another before this time.
    earliest: Moment,
    /// The time of the next look for connections that hold memory.
    tend_at: Moment,
    /// Requests rejected for lack of room, at the last look.
    rejected: u64,
    /// Connections that were closed and are not dropped yet.
    closing: usize,
    /// Tasks that wait for a place.
    waiting: Vec<Waker>,
}

impl ConnectionTable {
    /// Returns the place of the connection that may be closed for another one.
    fn least_active(&self, most: usize, now: Moment, grace: Duration) -> Option<usize> {
        let is_due = |state: &&Arc<ConnectionState>| state.moved() + grace <= now;
        let due = || self.open.iter().filter(is_due);
        let unused = due().filter(|state| !state.is_working()).min_by_key(|state| state.moved());
        let working = || due().filter(|state| state.is_working());
        let least = unused.or_else(|| {
            let is_hung = working().count() > most - most / PACE as usize;
            working().max_by_key(|state| state.moved()).filter(|_| is_hung)
        })?;
        self.open.iter().position(|state| Arc::ptr_eq(state, least))
    }

    /// Like [`ConnectionTable::least_active`], at the pace at which connections are closed. Returns
    /// the earliest time at which one may be closed.
    fn displace(&mut self, most: usize, now: Moment, grace: Duration) -> Result<usize, Moment> {
        if now < self.earliest {
            return Err(self.earliest);
        }
        let Some(at) = self.least_active(most, now, grace) else {
            let due = self.open.iter().map(|state| state.moved() + grace);
            self.earliest = due.filter(|due| *due > now).min().unwrap_or(now + grace);
            return Err(self.earliest);
        };
        let pace = grace * PACE / u32::try_from(most).unwrap_or(u32::MAX);
        self.earliest = now + pace.min(grace);
        Ok(at)
    }
}

/// A connection, shared by its handle, its stream and its requests, which have it in their
/// extensions.
#[derive(Debug, Default)]
pub(super) struct ConnectionState {
    /// The time of the last byte, in nanoseconds since the clock's origin.
    moved: AtomicU64,
    /// Requests that the server works on.
    working: AtomicU32,
    /// Requests of whose responses the connection has a part that the client has not taken.
    sending: AtomicU32,
    /// The client takes no bytes.
    is_blocked: AtomicBool,
    /// It carries several requests at once.
    is_shared: AtomicBool,
    /// Each request whose time limit has passed, and of whose response a part is not sent, has a
    /// handle.
    pub(super) overdue: Arc<()>,
    /// A part of the last request's body was not read.
    has_unread: AtomicBool,
    /// The time since which it lingers, in nanoseconds since the clock's origin and at least 1;
    /// 0 if it does not.
    lingers_since: AtomicU64,
    is_closed: AtomicBool,
    /// No request after the present ones is to be served.
    is_ending: AtomicBool,
    wakers: Mutex<Vec<Waker>>,
    /// The request that has upgraded it.
    upgraded: Mutex<Option<Upgraded>>,
}

/// The permit of a request after which its connection has another protocol, in the extensions of
/// the answer. A connection of HTTP/1 keeps it to its end.
#[derive(Clone, Debug)]
pub(super) struct Upgraded(#[expect(dead_code, reason = "kept")] pub(super) RequestPermit);

impl ConnectionState {
    fn moved(&self) -> Moment {
        Moment::after_origin(Duration::from_nanos(self.moved.load(Ordering::Relaxed)))
    }

    fn lingers(&self) -> bool {
        self.lingers_since.load(Ordering::Relaxed) > 0
    }

    fn is_working(&self) -> bool {
        self.working.load(Ordering::Relaxed) > 0
    }

    /// Returns `true` if the client is to take a part of a response, and the server does no work.
    fn is_stalled(&self) -> bool {
        let is_sending = self.sending.load(Ordering::Relaxed) > 0;
        (is_sending || self.is_blocked.load(Ordering::Relaxed)) && !self.is_working()
    }

    /// Returns `true` if it is to be closed because a time limit has passed. One with several
    /// requests has to have made no progress.
    fn is_overdue(&self, now: Moment, grace: Duration) -> bool {
        let keeps = self.is_shared.load(Ordering::Relaxed)
            && (self.is_working() || now - self.moved() <= grace);
        Arc::strong_count(&self.overdue) > 1 && !keeps
    }

    fn close(&self, reason: CloseReason) {
        reason.count();
        self.set(&self.is_closed);
    }

    fn set(&self, flag: &AtomicBool) {
        if !flag.swap(true, Ordering::AcqRel) {
            let wakers = std::mem::take(&mut *lock(&self.wakers));
            wakers.into_iter().for_each(Waker::wake);
        }
    }

    fn poll(&self, flag: &AtomicBool, cx: &Context<'_>) -> Poll<()> {
        // Under the lock: either this sees the flag, or `set` finds the waker.
        let mut wakers = lock(&self.wakers);
        if flag.load(Ordering::Acquire) {
            return Poll::Ready(());
        }
        if !wakers.iter().any(|waker| waker.will_wake(cx.waker())) {
            // The oldest is one of a task that has ended, or comes again.
            let oldest = (wakers.len() >= WAKERS_MAX).then(|| wakers.remove(0));
            wakers.push(cx.waker().clone());
            drop(wakers);
            oldest.into_iter().for_each(Waker::wake);
        }
        Poll::Pending
    }
}

impl Connections {
    /// Creates the connections of a server, `most` at once, or one if that is 0. Takes the ceiling,
    /// the level and the requests that wait from `admission`; one without a limit bounds only the
    /// number. Keeps the [`Memory`](crate::Memory) of the admission running.
    pub fn new(admission: &Admission, most: usize) -> Self {
        Self {
            admission: admission.clone(),
            most,
            estimate: ESTIMATE,
            grace: GRACE,
            clock: Arc::new(SystemClock::new()),
            table: Arc::default(),
        }
    }

    /// Sets the memory that one connection may hold in its buffers. The default is 64 KiB, that of
    /// HTTP/1 over hyper with `max_buf_size(32 << 10)`. Over HTTP/2 it is the initial connection
    /// window and a frame.
    pub fn with_estimate(mut self, estimate: ByteSize) -> Self {
        self.estimate = estimate;
        self
    }

    /// Sets the time without progress for which no connection is closed. The default is 1 s. Choose
    /// at least a few round trips of slow clients. A response that takes longer to begin may lose
    /// its connection, but only when all places are taken, most of them by such requests.
    pub fn with_grace(mut self, grace: Duration) -> Self {
        self.grace = grace;
        self
    }

    /// Replaces the machine's clock, for tests.
    #[doc(hidden)]
    pub fn clock(mut self, clock: Arc<dyn Clock>) -> Self {
        self.clock = clock;
        self
    }

    /// Returns the number of connections that may be open now.
    fn most(&self) -> usize {
        let ceiling = self.admission.ledger(Budget::Host).ceiling().get();
        let fit = ceiling / PART / self.estimate.get().max(1);
        usize::try_from(fit).unwrap_or(usize::MAX).min(self.most).max(1)
    }

    /// Opens a connection, and closes another one for it if that is necessary and possible. Returns
    /// `None` otherwise: drop what was accepted at once. It is counted.
    ///
    /// Takes a lock, and looks at every open connection if no place is free and one may be closed.
    /// Call [`Connections::tend`] regularly.
    #[must_use]
    pub fn open(&self) -> Option<Connection> {
        let opened = self.try_open();
        if opened.is_err() {
            CloseReason::Refused.count();
        }
        opened.ok()
    }

    /// Like [`Connections::open`], without counting. Returns the earliest time at which another
    /// connection may be closed.
    fn try_open(&self) -> Result<Connection, Moment> {
        let (now, most, grace) = (self.clock.now(), self.most(), self.grace);
        let mut displaced = None;
        let mut table = lock(&self.table);
        if table.open.len() >= most {
            let lingering = table.open.iter().enumerate().filter(|(_, state)| state.lingers());
            let since = |state: &ConnectionState| state.lingers_since.load(Ordering::Relaxed);
            let oldest = lingering.min_by_key(|(_, state)| since(state)).map(|(at, _)| at);
            let at = oldest.map_or_else(|| table.displace(most, now, grace), Ok)?;
            displaced = Some(table.open.swap_remove(at));
            table.closing += 1;
        }
        let state = Arc::new(ConnectionState::default());
        self.progress(&state);
        table.open.push(Arc::clone(&state));
        drop(table);
        OPEN.fetch_add(1, Ordering::Relaxed);
        if let Some(displaced) = displaced {
            displaced.close(CloseReason::Displaced);
        }
        Ok(Connection { connections: self.clone(), state })
    }

    /// Closes connections whose clients take nothing of a response whose time limit has passed
    /// ([`MemoryLayer::with_min_data_rate`](super::MemoryLayer::with_min_data_rate),
    /// [`MemoryLayer::with_max_hold`](super::MemoryLayer::with_max_hold)). If memory is short, also
    /// closes some of those whose clients have taken nothing of their responses for longer than the
    /// grace period. Looks at most every 100 ms. A `ConnectionListener` calls it.
    pub fn tend(&self) {
        let Self { admission, grace, clock, .. } = self;
        let now = clock.now();
        let mut table = lock(&self.table);
        if now < table.tend_at {
            return;
        }
        table.tend_at = now + TEND_EVERY;
        let overdue = |state: &mut Arc<ConnectionState>| state.is_overdue(now, *grace);
        let overdue: Vec<_> = table.open.extract_if(.., overdue).collect();
        let stats = admission.stats();
        let lacking = [RejectReason::Full, RejectReason::Exhausted, RejectReason::Pressure];
        let rejected = lacking.iter().map(|reason| stats.rejected_total(*reason)).sum();
        let has_rejected = rejected > std::mem::replace(&mut table.rejected, rejected);
        let lacks = stats.waiting > 0 || has_rejected || admission.state().is_short();
        let is_short = admission.level() >= Level::High || lacks;
        let is_short = is_short && !stats.observe_mode;
        let is_stalled = |state: &ConnectionState| {
            is_short && state.is_stalled() && now - state.moved() > *grace
        };
        let mut stalled: Vec<_> =
            table.open.iter().filter(|state| is_stalled(state)).map(Arc::clone).collect();
        stalled.sort_unstable_by_key(|state| state.moved());
        stalled.truncate(self.lacking(&stats).saturating_sub(table.closing).max(1));
        let is_kept =
            |state: &Arc<ConnectionState>| !stalled.iter().any(|closed| Arc::ptr_eq(closed, state));
        table.open.retain(is_kept);
        table.closing += overdue.len() + stalled.len();
        let has_closed = !(overdue.is_empty() && stalled.is_empty());
        let waiting = if has_closed { std::mem::take(&mut table.waiting) } else { Vec::new() };
        drop(table);
        overdue.iter().for_each(|state| state.close(CloseReason::Overdue));
        stalled.iter().for_each(|state| state.close(CloseReason::Stalled));
        waiting.into_iter().for_each(Waker::wake);
    }

    /// Returns how many connections hold what is reserved beyond the allowance, and a little more:
    /// as many as requests of the mean size, and at least one.
    fn lacking(&self, stats: &AdmissionStats) -> usize {
        let ledger = self.admission.ledger(Budget::Host);
        let allowance = ledger.allowance();
        let spare = ByteSize::new(allowance.get() / SPARE_PART);
        let lacking = ledger.reserved().saturating_add(spare).saturating_sub(allowance);
        let each = ledger.requests().get() / stats.held().max(1);
        let lacking = lacking.get().checked_div(each).unwrap_or(0);
        usize::try_from(lacking).unwrap_or(usize::MAX).saturating_add(1)
    }

    fn progress(&self, state: &ConnectionState) {
        state.moved.store(self.now(), Ordering::Relaxed);
    }

    /// Returns the time in nanoseconds since the clock's origin.
    fn now(&self) -> u64 {
        u64::try_from(self.clock.now().since_origin().as_nanos()).unwrap_or(u64::MAX)
    }
}

/// An open connection. Leaves its place when dropped.
#[derive(Debug)]
#[must_use = "dropping it leaves its place"]
pub struct Connection {
    connections: Connections,
    state: Arc<ConnectionState>,
}

impl Connection {
    /// Records that a byte was read or written. Reads the clock and takes no lock.
    pub fn progress(&self) {
        self.connections.progress(&self.state);
    }

    /// Waits until the connection is to be closed at once: drop what serves it.
    pub async fn closed(&self) {
        poll_fn(|cx| self.state.poll(&self.state.is_closed, cx)).await;
    }

    /// Waits until an HTTP/2 connection is to end with its open requests, because a response was
    /// sent at level high or above: shut it down gracefully. HTTP/1 needs nothing, since such a
    /// response says `connection: close`.
    pub async fn ending(&self) {
        poll_fn(|cx| self.state.poll(&self.state.is_ending, cx)).await;
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        OPEN.fetch_sub(1, Ordering::Relaxed);
        let mut table = lock(&self.connections.table);
        let Some(at) = table.open.iter().position(|state| Arc::ptr_eq(state, &self.state)) else {
            table.closing -= 1;
            return;
        };
        table.open.swap_remove(at);
        let waiting = std::mem::take(&mut table.waiting);
        drop(table);
        waiting.into_iter().for_each(Waker::wake);
    }
}

#[cfg(all(test, not(lowtide_loom)))]
mod tests;
