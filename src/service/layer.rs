//! The tower layer, which admits in `call` and holds the permit in the response body.
//!
//! `poll_ready` only polls the inner service: idle connections would hold a permit taken there. The
//! inner error type is unchanged. A rejected request never reaches the inner service; its body is
//! drained before it is answered (see `rejection`).
//!
//! If the admission belongs to a running `Memory`, requests are measured (see `permit`). The layer
//! records the bytes held for each estimated byte by method, route and size, and later requests of
//! that kind reserve accordingly. Until the first of them have ended, only a few large ones run at
//! once (`SlowStart`, in `admission/learning`).
//!
//! A request that does not fit waits in the queue of `lowtide-admission`, with its head, its unread
//! body and the inner service that was ready for it. Each attempt estimates it again. Meanwhile
//! requests that wait for their clients are suspended (see `permit`).
//!
//! A cancelled request (see `permit`) whose handler goes on is ended here: its future is dropped at
//! the end of a later poll, and the client gets the answer of a rejection. The control loop wakes
//! the future, so the layer needs no timer.
//!
//! Invariant: every admitted request reserves its estimate exactly once, and releases its
//! reservation when its response body, and every handle taken by a handler, are dropped.

use std::fmt;
use std::future::Future;
use std::hash::{BuildHasher, Hash};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use foldhash::quality::RandomState;
use http::header::CONTENT_TYPE;
use http::request::Parts;
use http::{HeaderName, HeaderValue, Request, Response, Version};
use http_body::Body;
use pin_project_lite::pin_project;
use tower_layer::Layer;
use tower_service::Service;

use crate::Memory;
use crate::bytes::ByteSize;
use crate::clock::{Clock, Moment, SystemClock};
use crate::config::Config;
use crate::memory::add_request_event;
use lowtide_admission::layer::{GRACE, Waiting};
use lowtide_admission::learning::{Compared, Kind, Needs, READS, SlowStartPermit};
use lowtide_admission::{Admission, Budget, Cost, Permit, Priority, Rejected};
use lowtide_heap::is_measured;

use super::admin::is_secret;
use super::body::{RequestBody, ResponseBody, has_unknown_length};
use super::connections::{ConnectionState, Upgraded};
use super::estimate::{ContentLength, Estimate, UNDECLARED, body_length, note_length};
use super::exempt::{ExemptPaths, ExemptShare, HEALTH_PATHS};
use super::load_report::{LOAD_REPORT_STREAM_PATH, LoadReportService, LoadReports};
use super::permit::{
    ARRIVAL_WINDOW, QueuePlace, RequestHolds, RequestPermit, RequestTerms, ResumeOptions,
    enter_slow_start, enter_turn,
};
use super::rejection::{Drain, negotiated};
use super::scoped::Scoped;
use super::time_limits::{MinDataRate, RegisteredPace, TimeLimits};
use super::usage::{RequestOrigin, RouteLabel, Tenant};

/// Returns the answer to the rejected request with this head.
type Reject = dyn Fn(&Rejected, &Parts) -> Response<String> + Send + Sync;

/// Returns the key under which the needs of requests are learned.
type RouteKey = dyn Fn(&Parts) -> u64 + Send + Sync;

/// Returns `true` for exempt requests.
type Exempt = Arc<dyn Fn(&Parts) -> bool + Send + Sync>;

/// A layer that admits requests by the bytes that they will need.
///
/// A reservation lasts until the response has been sent. A stream, which is a response of unknown
/// length that has lasted for a second, keeps no more than what it holds and 16 KiB, unless
/// estimates are trusted ([`without_slow_start`](Self::without_slow_start)). While
/// other requests wait for room, the reservation of a request whose body is slow to arrive is
/// suspended ([`with_max_wait`](Self::with_max_wait)). Still set a minimum rate at which bodies must arrive
/// and responses be taken ([`with_min_data_rate`](Self::with_min_data_rate)): `axum::serve` has no
/// body timeout, and a declared body that never arrives holds its connection forever. A rejection
/// also waits for the body, up to [`DRAIN_MAX`](super::DRAIN_MAX) bytes of it on HTTP/1.
///
/// If several layers of one admission stand around a handler, the outermost admits the request. The
/// others only pass it on, and the first such request logs a warning.
#[derive(Clone)]
#[must_use]
pub struct MemoryLayer {
    settings: Arc<LayerSettings>,
}

/// The settings of a layer, which its clones and requests share: one count for each to write.
#[derive(Clone)]
struct LayerSettings {
    admission: Admission,
    estimate: Arc<dyn Estimate>,
    exempt: Option<Exempt>,
    exempt_paths: ExemptPaths,
    reject: Arc<Reject>,
    needs: Arc<Needs>,
    /// Clients choose the paths, and so the keys of `needs`.
    hasher: RandomState,
    route_key: Option<Arc<RouteKey>>,
    starts_slowly: bool,
    request_cap: f64,
    max_wait: Duration,
    min_data_rate: Option<MinDataRate>,
    max_hold: Option<Duration>,
    load_reports: Option<Arc<LoadReports>>,
    clock: Arc<dyn Clock>,
}

/// The default of [`MemoryLayer::with_request_cap`]. An estimate: most measured requests hold about
/// what they reserve, and few requests of a new route need eight times their estimate.
const REQUEST_CAP: f64 = 8.0;

/// Returns the name of a request's route: the pattern that axum matched, the gRPC method, or else
/// the first segment of the path. The flag is `true` for a pattern, which clients cannot choose.
fn route(head: &Parts) -> (&str, bool) {
    #[cfg(feature = "axum")]
    if let Some(path) = head.extensions.get::<axum::extract::MatchedPath>() {
        return (path.as_str(), true);
    }
    let path = head.uri.path();
    // gRPC needs HTTP/2.
    let kind = if head.version == Version::HTTP_2 { head.headers.get(CONTENT_TYPE) } else { None };
    if kind.is_some_and(|kind| kind.as_bytes().starts_with(b"application/grpc")) {
        return (path, false);
    }
    let path = path.strip_prefix('/').unwrap_or(path);
    let end = path.bytes().position(|byte| byte == b'/').unwrap_or(path.len());
    let first = path.get(..end).unwrap_or(path);
    (if first.is_empty() { "/" } else { first }, false)
}

impl MemoryLayer {
    /// Creates a layer over this admission. It exempts only health checks
    /// ([`HEALTH_PATHS`](super::HEALTH_PATHS)). Route other endpoints that must answer under
    /// pressure, such as metrics, outside the layer, or exempt them.
    pub fn new(admission: Admission, estimate: impl Estimate) -> Self {
        let settings = LayerSettings {
            admission,
            estimate: Arc::new(estimate),
            exempt: None,
            exempt_paths: ExemptPaths::default(),
            reject: Arc::new(negotiated),
            needs: Arc::default(),
            hasher: RandomState::default(),
            route_key: None,
            starts_slowly: true,
            request_cap: REQUEST_CAP,
            max_wait: Config::MAX_WAIT,
            min_data_rate: None,
            max_hold: None,
            load_reports: None,
            clock: Arc::new(SystemClock::new()),
        };
        Self { settings: Arc::new(settings) }.exempt_paths(HEALTH_PATHS)
    }

    fn settings(&mut self) -> &mut LayerSettings {
        Arc::make_mut(&mut self.settings)
    }

    /// Replaces the estimate.
    pub fn with_estimate(mut self, estimate: impl Estimate) -> Self {
        self.settings().estimate = Arc::new(estimate);
        self
    }

    /// Sets the key of a request: what requests of one key held determines what later ones reserve.
    /// By default the key is the method, the route (the pattern that axum matched, the gRPC method,
    /// or the first segment of the path), and whether the length of the body is declared. At most
    /// 256 keys are kept apart, each with a size class of its estimate; the others share one.
    ///
    /// Use it for needs that the route does not show. Handlers report memory that is not measured,
    /// such as that of a C library, with [`RequestPermit::hold`]; with a key, the layer learns from
    /// these reports even without a running [`Memory`].
    ///
    /// ```
    /// use http::request::Parts;
    /// use lowtide::ByteSize;
    /// use lowtide::admission::{Admission, Cost};
    /// use lowtide::service::MemoryLayer;
    ///
    /// let model = |head: &Parts| head.headers.get("model").cloned();
    /// let guess = Cost::host(ByteSize::mib(4)); // until it is known
    /// let _layer =
    ///     MemoryLayer::new(Admission::with_limit(ByteSize::gib(1)), guess).with_route_key(model);
    /// ```
    pub fn with_route_key<K: Hash>(
        mut self,
        key: impl Fn(&Parts) -> K + Send + Sync + 'static,
    ) -> Self {
        let hasher = self.settings.hasher.clone();
        self.settings().route_key = Some(Arc::new(move |head| hasher.hash_one(key(head))));
        self
    }

    /// Trusts estimates. Requests of a route that is not measured yet reserve their estimate, and
    /// as many run as fit. Later requests reserve at least their estimate, even if less was
    /// measured. Use it if handlers reject requests that need more than their estimate, or if
    /// estimates cover memory that is not measured, such as that of tasks without a scope or of C
    /// code. While its body arrives, a request may be suspended all the same
    /// ([`with_max_wait`](Self::with_max_wait)): report such memory with [`RequestPermit::hold`],
    /// so that it stays reserved. Without this setting an estimate is a hint, which the layer uses
    /// until it has measured eight requests of the route.
    pub fn without_slow_start(mut self) -> Self {
        let settings = self.settings();
        settings.starts_slowly = false;
        self
    }

    /// Sets the multiple of its claim above which a request is cancelled while memory is short. The
    /// default is 8. A request that holds at most 1 MiB is not cancelled because of the multiple.
    /// With [`f64::INFINITY`] no request is ever cancelled, not even at level critical.
    ///
    /// The claim is what the request reserved when it was admitted, or later with
    /// [`RequestPermit::grow`]. In a route in which needs vary, the multiple is of what a large
    /// request needs, if that is more. Memory is short if more is reserved than allowed, so that
    /// other requests are rejected. While there is room, a request may hold any multiple.
    ///
    /// At level critical, the request that is furthest above its claim is cancelled, even if it is
    /// below the multiple. The next one is cancelled when that one has released its memory, or
    /// after 100 ms.
    ///
    /// [`RequestPermit::cancelled`] notifies the handler; its documentation lists what cannot be
    /// interrupted. If the handler goes on, the layer drops it and answers as for
    /// [`Rejected::Outgrown`]. The head that the function of
    /// [`with_rejection`](Self::with_rejection) gets then has the method, the version and the route
    /// of the request. Of its headers, it has the content type on HTTP/2 and no other. Exempt
    /// requests, and those that are not measured, are never cancelled.
    ///
    /// # Panics
    /// Panics if the multiple is below 1 or not a number.
    pub fn with_request_cap(mut self, multiple: f64) -> Self {
        assert!(multiple >= 1.0, "request cap of {multiple}: expected 1 or more");
        self.settings().request_cap = multiple;
        self
    }

    /// Sets how long a request that does not fit may wait for room before it is rejected. The
    /// default is 2 s, or for a layer of [`Memory::layer`] that of its configuration
    /// (`LOWTIDE_MAX_WAIT`). With zero it is rejected immediately.
    ///
    /// Its body is not read while it waits, and it reserves nothing. Over HTTP/2 the unread body
    /// would fill the window of its connection. So if handlers of its route read bodies, the
    /// handler starts, reserves 64 KiB and what it holds, and reads its body as far as there is
    /// room, but it gets the end of the body only when the claim is reserved. A handler that drops
    /// the body instead reserves its claim at once. Requests of higher priority come first, then those of the tenant that waits for less ([`Tenant`](super::Tenant)), then
    /// the earlier ones; a request that fits may pass a larger one that does not. The estimate is
    /// called again at each attempt. At most 4,096 requests wait, and no more than one for each
    /// 256 KiB of the ceiling; others are rejected immediately.
    ///
    /// A client that leaves is noticed at once over HTTP/2. Over HTTP/1 with an unread body it is
    /// noticed at the deadline, which the control loop checks at each tick, every 10 ms while
    /// requests wait. Without a running [`Memory`] no request waits.
    ///
    /// While requests do not fit, the reservations of measured requests that have waited for their
    /// clients for 100 ms are suspended: those whose handlers wait for more of their bodies, and
    /// answers of known length that are not sent yet. They keep what they hold and 64 KiB. The end
    /// of a suspended body reaches the handler only once the whole claim is reserved again, before
    /// requests that were not admitted yet. After `max_wait` without room, or 2 s if that is zero,
    /// the request is rejected.
    ///
    /// While large requests compute on all processors, further ones wait for their turn even if they
    /// fit, and begin after `max_wait` at the latest. With zero there are no turns.
    ///
    /// Use zero for a service that this process calls while it serves another request. The caller
    /// would keep its reservation, and its connection, while the call waits.
    pub fn with_max_wait(mut self, max_wait: Duration) -> Self {
        self.settings().max_wait = max_wait;
        self
    }

    /// Sets the rate at which clients must send the bodies of requests and take responses, such as
    /// 16 KiB, a poor line's, with a grace period of 10 s. By default there is none.
    ///
    /// A client may pause for the grace period and must keep up the rate on average. With zero
    /// bytes per second, a byte in each grace period is enough for a request, and a response does
    /// not end once a part of it was sent. Choose a grace period of a second or more; with zero, a
    /// body ends when its client has to be waited for until the second check. Only time
    /// spent waiting for the client counts: not while the handler works or does not read, and not
    /// while the request waits for room. A request whose body is slower is cancelled, and answered
    /// with 408 (gRPC: `DEADLINE_EXCEEDED`). Once its handler has answered, the rest of a body
    /// without a declared length may take any time, unless estimates are trusted. A response that
    /// the client reads more slowly ends with an error ([`Rejected::SlowClient`]). A rejection that waits for its body is sent.
    ///
    /// A part of a response counts as read when the connection asks for the next part. Up to 1 MiB
    /// may be in the connection's buffers in addition to the rate. If a client reads nothing, the
    /// connection does not ask: it is closed if the server has
    /// [`Connections`](super::Connections). Over HTTP/2 it stays open while the server works on
    /// another request or other bytes move.
    ///
    /// The control loop checks requests every 100 to 250 ms, those with the largest reservations if
    /// more than 4,096 wait. Exempt requests have no limit, and none has one without a running
    /// [`Memory`].
    pub fn with_min_data_rate(mut self, bytes_per_second: ByteSize, grace: Duration) -> Self {
        self.settings().min_data_rate = Some(MinDataRate { bytes_per_second, grace });
        self
    }

    /// Sets how long a request may hold its permit, from its admission to the end of its response.
    /// By default there is no bound. With zero, every request that has to wait is ended.
    ///
    /// A request that holds it for longer is cancelled, and answered with 503 without Retry-After
    /// (gRPC: `DEADLINE_EXCEEDED`), because another try may take as long. If its handler has
    /// answered, the response ends with an error ([`Rejected::HeldTooLong`]). Requests are checked,
    /// and connections closed, as for [`with_min_data_rate`](Self::with_min_data_rate); what cannot
    /// be interrupted is listed at [`RequestPermit::cancelled`].
    pub fn with_max_hold(mut self, max_hold: Duration) -> Self {
        self.settings().max_hold = Some(max_hold);
        self
    }

    /// Adds an ORCA load report to each response, rejections included, for load balancers such as
    /// Envoy's `client_side_weighted_round_robin` and gRPC's `weighted_round_robin`. By default
    /// there is none.
    ///
    /// A response has it in the header `endpoint-load-metrics`, as text of about 200 bytes, a gRPC
    /// response in the trailer `endpoint-load-metrics-bin`. It replaces one that the handler has
    /// set, since that may be of another service; the same headers of requests are ignored. The
    /// report has
    ///
    /// * `mem_utilization`: physical memory by its limit, from 0 to 1;
    /// * `application_utilization`: the reserved part of the allowance, of host or device,
    ///   whichever is largest, as an average over 2 s, and at least 0.01. For 1 s after the service
    ///   has rejected a request for lack of memory, while requests wait for room, and during
    ///   shutdown, it is at least 1, multiplied by the offered load divided by the admitted load
    ///   (in requests or in bytes, whichever is larger);
    /// * `rps_fractional` and `eps`: the responses of this layer and its clones in each second, and
    ///   those among them with a status of 5xx or a gRPC status that is a failure of the service,
    ///   as averages over the same time;
    /// * `named_metrics`: `host_utilization`, `device0_utilization`, `device1_utilization` and so
    ///   on, the parts of which `application_utilization` is the largest.
    ///
    /// Fields that need a limit are omitted while no limit is known. Without a running [`Memory`]
    /// there is no `mem_utilization`, and utilizations are those of the moment.
    ///
    /// The report is encoded when the control loop has ticked, and when the service begins to shed.
    /// Otherwise a response costs less than 200 ns, measured on one thread, and allocates nothing
    /// unless its headers have to grow. Configure the load balancer to remove the report: it shows
    /// clients how full this instance is.
    pub fn with_load_reports(mut self) -> Self {
        let settings = self.settings();
        let (admission, clock) = (settings.admission.clone(), Arc::clone(&settings.clock));
        settings.load_reports = Some(Arc::new(LoadReports::new(admission, clock)));
        self
    }

    /// Returns a service that streams the same reports to gRPC clients that ask for them:
    /// `OpenRcaService.StreamCoreMetrics` of ORCA. Route [`LOAD_REPORT_STREAM_PATH`] to it, outside
    /// the layer if you can. Under the layer that path is exempt after this call, and a stream
    /// reserves 64 KiB.
    ///
    /// A client gets a report at once, and then one after each `report_interval`: 10 s if it names
    /// none, at least 100 ms and at most an hour. A report may be a second late, because the control
    /// loop wakes the streams. An invalid request ends with `INVALID_ARGUMENT` and the value. At
    /// most 256 streams are open; a further one ends with `RESOURCE_EXHAUSTED`. All end with
    /// `UNAVAILABLE` after [`Memory::set_ending`] or when the service shuts down. Without a running
    /// [`Memory`], a stream ends with `UNIMPLEMENTED`.
    ///
    /// ```
    /// use axum::{Router, routing::get};
    /// use lowtide::Memory;
    /// use lowtide::service::LOAD_REPORT_STREAM_PATH;
    ///
    /// let memory = Memory::start()?;
    /// let layer = memory.layer().with_load_reports();
    /// let streams = layer.load_report_service();
    /// let app: Router = Router::new()
    ///     .route("/", get(async || "hello"))
    ///     .layer(layer)
    ///     .route_service(LOAD_REPORT_STREAM_PATH, streams);
    /// # drop(app);
    /// # Ok::<(), lowtide::BoxError>(())
    /// ```
    ///
    /// # Panics
    /// Panics without [`MemoryLayer::with_load_reports`].
    #[must_use]
    pub fn load_report_service(&self) -> LoadReportService {
        let Some(reports) = &self.settings.load_reports else {
            panic!("a layer without load reports has none to stream: call with_load_reports first")
        };
        LoadReportService::new(reports)
    }

    /// Replaces the machine's clock, for tests. Call it before
    /// [`with_load_reports`](Self::with_load_reports), which copies the clock.
    #[doc(hidden)]
    pub fn clock(mut self, clock: Arc<dyn Clock>) -> Self {
        self.settings().clock = clock;
        self
    }

    /// Sets the answer to rejected requests. By default gRPC clients get `RESOURCE_EXHAUSTED` with
    /// `grpc-retry-pushback-ms` (-1: a retry cannot succeed), or `UNAVAILABLE` during shutdown, and
    /// all others [`rejection`](super::rejection()).
    ///
    /// ```
    /// use http::request::Parts;
    /// use http::{Response, StatusCode};
    /// use lowtide::ByteSize;
    /// use lowtide::admission::{Admission, Rejected};
    /// use lowtide::service::{ContentLength, MemoryLayer};
    ///
    /// let plain = |rejected: &Rejected, _: &Parts| {
    ///     let mut response = Response::new(format!("{}\n", rejected.reason().name()));
    ///     *response.status_mut() = StatusCode::TOO_MANY_REQUESTS;
    ///     response
    /// };
    /// let admission = Admission::with_limit(ByteSize::gib(1));
    /// let _layer = MemoryLayer::new(admission, ContentLength::new(ByteSize::mib(1)))
    ///     .with_rejection(plain);
    /// ```
    pub fn with_rejection(
        mut self,
        reject: impl Fn(&Rejected, &Parts) -> Response<String> + Send + Sync + 'static,
    ) -> Self {
        self.settings().reject = Arc::new(reject);
        self
    }

    /// Exempts requests for which this returns `true`, in addition to those exempt already. Exempt
    /// requests are never rejected, not even during shutdown. They are not estimated and reserve
    /// nothing, unless a handler grows the permit, which never fails for them.
    ///
    /// A client that can make its requests exempt can use all memory. Base the decision on
    /// properties that clients cannot choose freely: see [`MemoryLayer::exempt_paths`] and
    /// [`MemoryLayer::exempt_header`].
    pub fn exempt(mut self, is_exempt: impl Fn(&Parts) -> bool + Send + Sync + 'static) -> Self {
        let settings = self.settings();
        settings.exempt = Some(match settings.exempt.take() {
            Some(before) => Arc::new(move |head: &Parts| before(head) || is_exempt(head)),
            None => Arc::new(is_exempt),
        });
        self
    }

    /// Exempts requests for these paths, whatever their method: metrics, or admin commands. Whole
    /// paths are compared byte by byte, without the query; a path below one of them is not exempt.
    ///
    /// Clients cannot use memory through such a path by sending bodies. A request that declares
    /// more than [`EXEMPT_BODY_MAX`](super::EXEMPT_BODY_MAX) is not exempt. One of unknown length,
    /// such as every gRPC request, reserves that much. While exempt requests hold a sixteenth of
    /// the ceiling, further requests with a body are not exempt; those without a body always are.
    ///
    /// ```
    /// use lowtide::ByteSize;
    /// use lowtide::admission::Admission;
    /// use lowtide::service::{ContentLength, Endpoints, MemoryLayer};
    ///
    /// let admission = Admission::with_limit(ByteSize::gib(1));
    /// let _layer = MemoryLayer::new(admission, ContentLength::new(ByteSize::mib(1)))
    ///     .exempt_paths(Endpoints::PATHS);
    /// ```
    pub fn exempt_paths<P: Into<String>>(mut self, paths: impl IntoIterator<Item = P>) -> Self {
        self.settings().exempt_paths.add(paths);
        self
    }

    /// Exempts requests with this secret in this header, for calls of the service to itself, which
    /// would otherwise wait for memory that their caller holds. Generate the secret at start and
    /// keep it private; a header name alone would exempt every client.
    ///
    /// # Panics
    /// Panics if the secret is shorter than 16 bytes.
    pub fn exempt_header(self, name: HeaderName, secret: &HeaderValue) -> Self {
        let length = secret.len();
        assert!(length >= SECRET_MIN, "secret of {length} bytes: expected {SECRET_MIN} or more");
        let secret = secret.clone();
        self.exempt(move |head| {
            let given = head.headers.get(&name);
            given.is_some_and(|given| is_secret(secret.as_bytes(), given.as_bytes()))
        })
    }
}

/// The minimum length of a secret, in bytes: that of a UUID.
const SECRET_MIN: usize = 16;

lowtide_core::debug_as!(MemoryLayer, |layer| max_wait: layer.settings.max_wait);

impl Memory {
    /// Returns a layer that admits requests by the length of their body, with the default of
    /// [`ContentLength`]; [`MemoryLayer::with_estimate`] changes that. Requests wait for room for
    /// as long as configured ([`Builder::max_wait`](crate::memory::Builder::max_wait)). It keeps
    /// this `Memory` running.
    pub fn layer(&self) -> MemoryLayer {
        #[cfg(feature = "tokio")]
        crate::memory::runtime::keep_runtime();
        MemoryLayer::new(self.admission().clone(), ContentLength::default())
            .with_max_wait(self.config().max_wait.value)
    }
}

impl MemoryLayer {
    /// Returns what a request costs, its priority, and its share if it is exempt: by its path, or as
    /// a stream of load reports.
    #[inline]
    fn cost(
        &self,
        head: &Parts,
        body: &impl Body,
        length: Option<ByteSize>,
    ) -> (Cost, Priority, Option<ExemptShare>) {
        let LayerSettings { exempt, exempt_paths, load_reports, admission, .. } = &*self.settings;
        if exempt.as_ref().is_some_and(|is_exempt| is_exempt(head)) {
            return (Cost::ZERO, Priority::Exempt, None);
        }
        let path = head.uri.path();
        let streams = load_reports
            .as_ref()
            .is_some_and(|reports| reports.has_streams.load(Ordering::Relaxed));
        if (exempt_paths.contains(path) || streams && path == LOAD_REPORT_STREAM_PATH)
            && let Some(share) =
                exempt_paths.share(head, body, admission.ledger(Budget::Host).ceiling())
        {
            return (Cost::host(share.bytes), Priority::Exempt, Some(share));
        }
        let (cost, priority) = self.settings.estimate.estimate_with_length(head, length);
        (cost, priority, None)
    }

    /// Reserves the estimate of the request. A rejection is not counted.
    fn admit(
        &self,
        head: &Parts,
        body: &impl Body,
        length: Option<ByteSize>,
        waiting: Option<&Waiting>,
        is_last: bool,
    ) -> Result<RequestPermit, NotAdmitted> {
        let settings = &*self.settings;
        let LayerSettings { admission, clock, max_wait, starts_slowly, .. } = settings;
        let (state, within) = (admission.state(), *max_wait);
        let (mut cost, priority, share) = self.cost(head, body, length);
        let is_exempt = priority == Priority::Exempt;
        let is_measured = admission.is_managed() && is_measured();
        let (route, is_matched) = route(head);
        let (mut need, mut slot) = (None, Ok(None));
        if !is_exempt && (is_measured || settings.route_key.is_some()) {
            let learned = settings.need(head, route, length, &mut cost);
            let estimate = cost.host;
            let room = admission.ledger(Budget::Host).learned_room();
            cost.host = learned.claim(room);
            // A request that is too large, or that arrives during shutdown, is rejected for that
            // reason, by the admission.
            if is_measured && *starts_slowly && estimate <= room.first && !admission.is_closed() {
                slot = enter_slow_start(&learned, room, (state, clock), waiting);
            }
            need = Some(learned);
        }
        let mut turn = None;
        if is_measured && !is_exempt && !within.is_zero() {
            turn = state.turn(cost.host);
            if let (Some(turn), Ok(_)) = (&turn, &slot)
                && let Err(rejected) = enter_turn(turn, state, waiting, is_last)
            {
                slot = Err(rejected);
            }
        }
        // The device memory of one budget for both is not measured.
        let is_host = cost.device.is_zero() || state.by_budget(cost).host == cost.host;
        let can_suspend = is_measured && is_host && !is_exempt;
        let is_http2 = head.version == Version::HTTP_2;
        let is_arriving = !body.is_end_stream();
        let reads = is_http2 && need.as_ref().is_some_and(|need| need.has(READS));
        let may_receive = can_suspend && reads && is_arriving;
        let (method, asked) = (&head.method, (cost, priority));
        let booked =
            settings.book(slot, asked, &format_args!("{method} {route}"), waiting, may_receive);
        let (permit, slot) = match booked {
            Ok(booked) => booked,
            Err(rejected) => return Err(NotAdmitted { rejected, cost, priority }),
        };
        let is_suspended = permit.is_suspended();
        if let (Some(turn), true) = (&turn, is_suspended) {
            // Until it resumes.
            turn.leave();
        }
        let enters = *starts_slowly && (slot.is_some() || is_suspended);
        let enters = enters.then(|| (admission.clone(), Arc::clone(clock)));
        let within = if within.is_zero() { Config::MAX_WAIT } else { within };
        let tenant: Option<&Tenant> = if is_measured { head.extensions.get() } else { None };
        let number = tenant.map_or(0, |tenant| self.number_of(tenant));
        let has_limits = settings.max_hold.is_some() || settings.min_data_rate.is_some();
        let terms = RequestTerms {
            origin: RequestOrigin {
                method: head.method.clone(),
                version: head.version,
                route: RouteLabel::new(route),
                is_matched,
                tenant: tenant.cloned(),
                // gRPC needs HTTP/2.
                content_type: if is_http2 { head.headers.get(CONTENT_TYPE).cloned() } else { None },
            },
            cap: if is_measured && !is_exempt { settings.request_cap } else { f64::INFINITY },
            turn,
            is_measured,
            is_exempt,
            resumes: can_suspend.then_some(ResumeOptions { priority, tenant: number, within }),
            // A trusted estimate may cover memory that is not measured, so it is not replaced.
            reports: is_measured && *starts_slowly,
            limits: if has_limits { settings.time_limits(head, priority) } else { None },
        };
        let holds = RequestHolds { permit, need, share, slot, enters };
        Ok(RequestPermit::new(terms, holds, (is_arriving, !has_unknown_length(body))))
    }

    /// Returns `true` if this permit, of a layer outside, is of this admission, so that the request
    /// has a reservation already. Bug: it reserved twice, and waited for itself in the slow start.
    fn has_admitted(&self, permit: &RequestPermit, head: &Parts) -> bool {
        static WARNED: AtomicBool = AtomicBool::new(false);
        let has_admitted = permit.is_admitted_by(&self.settings.admission);
        if has_admitted && !WARNED.swap(true, Ordering::Relaxed) {
            let path = head.uri.path();
            log!(warn, path, "memory layer inside another one is ignored");
        }
        has_admitted
    }

    /// Returns the number under which the requests of a tenant keep their order.
    #[inline]
    fn number_of(&self, tenant: &Tenant) -> u64 {
        self.settings.hasher.hash_one(tenant.name())
    }

    /// Calls the service for a request, which has no permit if another layer has admitted it.
    #[inline]
    fn start<S, Q, R>(
        &self,
        inner: &mut S,
        mut head: Parts,
        body: Q,
        permit: Option<RequestPermit>,
    ) -> RequestState<S, S::Future, Q>
    where
        S: Service<Request<RequestBody<Q>>, Response = Response<R>>,
        Q: Body<Data = Bytes>,
    {
        let body = RequestBody::new(body, permit.as_ref());
        let future = match &permit {
            Some(permit) => {
                head.extensions.insert(permit.clone());
                permit.measure(|| inner.call(Request::from_parts(head, body)))
            }
            None => inner.call(Request::from_parts(head, body)),
        };
        RequestState::Admitted {
            future: Scoped { inner: Some(future), permit },
            settings: Arc::clone(&self.settings),
            cancelled_at: None,
            place: QueuePlace::NONE,
        }
    }

    /// Rejects a request, and counts and logs that. Its body is read, and then it is answered.
    fn turn_away<S, F, Q: Body>(
        &self,
        head: &Parts,
        body: Q,
        rejected: Rejected,
    ) -> RequestState<S, F, Q> {
        let settings = &self.settings;
        let rejected = settings.admission.state().reject(rejected);
        log!(debug, %rejected, path = head.uri.path(), "request rejected");
        let rate = settings.min_data_rate.filter(|_| settings.admission.is_managed());
        let pace = || Some(RegisteredPace::new(rate?, &settings.admission));
        let answer = (settings.reject)(&rejected, head);
        let rest = Box::pin(Drain::new(head, body, answer, pace));
        RequestState::Rejected { rest, reports: settings.load_reports.clone() }
    }
}

/// What an admitted request has reserved, and its slot of the slow start.
type Booked = (Permit, Option<Arc<SlowStartPermit>>);

/// A request that was not admitted.
struct NotAdmitted {
    rejected: Rejected,
    cost: Cost,
    priority: Priority,
}

impl LayerSettings {
    /// Returns the need of requests like this one. Raises a cost for which no length is declared.
    #[inline]
    fn need(
        &self,
        head: &Parts,
        route: &str,
        length: Option<ByteSize>,
        cost: &mut Cost,
    ) -> Compared {
        let is_minimum = !self.starts_slowly;
        let kind = match &self.route_key {
            Some(key) => Kind { route: key(head), is_declared: true, has_many_routes: true },
            None => {
                let route = self.hasher.hash_one((&head.method, route));
                Kind { route, is_declared: length.is_some(), has_many_routes: false }
            }
        };
        if !kind.is_declared && !is_minimum {
            cost.host = cost.host.max(UNDECLARED);
        }
        self.needs.of(kind, cost.host, is_minimum)
    }

    /// Reserves the claim of a request with its slot of the slow start. If it `may_receive`, since
    /// handlers of its route read bodies, and there is no room for the claim now or the need of the
    /// route is not known, it reserves a window instead. Unread, its body would fill the window of
    /// its connection, and a slot that waits for a body would hold up those whose bodies are there.
    fn book(
        &self,
        slot: Result<Option<Arc<SlowStartPermit>>, Rejected>,
        (cost, priority): (Cost, Priority),
        label: &dyn fmt::Display,
        waiting: Option<&Waiting>,
        may_receive: bool,
    ) -> Result<Booked, Rejected> {
        let state = self.admission.state();
        let may_receive = may_receive && cost.device.is_zero() && !self.max_wait.is_zero();
        let receive = || state.admit_suspended(ARRIVAL_WINDOW, cost.host, priority);
        if may_receive
            && let Ok(Some(_)) = slot
            && let Some(permit) = receive()
        {
            return Ok((permit, None));
        }
        let rejected = match slot {
            Ok(slot) => match state.try_admit_uncounted(waiting, cost, priority, Some(label)) {
                Ok(permit) => return Ok((permit, slot)),
                Err(rejected) => rejected,
            },
            Err(rejected) => rejected,
        };
        let received = if may_receive && rejected.may_wait() { receive() } else { None };
        received.map(|permit| (permit, None)).ok_or(rejected)
    }

    /// Returns the time limits of a request, which need the ticks of a control loop.
    #[inline(never)]
    fn time_limits(&self, head: &Parts, priority: Priority) -> Option<Box<TimeLimits>> {
        if priority == Priority::Exempt || !self.admission.is_managed() {
            return None;
        }
        let connection = head.extensions.get::<Arc<ConnectionState>>().map(Arc::downgrade);
        Some(Box::new(TimeLimits::new(self.max_hold, self.min_data_rate, connection)))
    }

    /// Returns the answer to a cancelled request whose handler must end now. To end by itself, the
    /// handler of one that has outgrown its claim has one more poll, and 100 ms unless the request
    /// grows.
    #[cold]
    fn end(
        &self,
        permit: &RequestPermit,
        rejected: &Rejected,
        cancelled_at: &mut Option<Moment>,
    ) -> Option<Response<String>> {
        if !matches!(rejected, Rejected::Outgrown { .. }) {
            self.report(permit, rejected);
            return Some((self.reject)(rejected, &permit.head()));
        }
        let now = self.clock.now();
        let Some(since) = *cancelled_at else {
            *cancelled_at = Some(now);
            self.report(permit, rejected);
            return None;
        };
        let is_over = now - since >= GRACE || permit.has_grown_since(rejected);
        is_over.then(|| (self.reject)(rejected, &permit.head()))
    }

    /// Logs that a request was cancelled, and adds an event.
    #[cold]
    fn report(&self, permit: &RequestPermit, rejected: &Rejected) {
        let route = permit.route();
        let Rejected::Outgrown { held, claim, most, .. } = rejected else {
            log!(debug, %rejected, path = route, "request rejected");
            return;
        };
        log!(warn, route, %held, %claim, %most, "request cancelled");
        let text = format!("{rejected}; claim {claim}");
        add_request_event(&self.admission, self.clock.since_epoch(), &route, text);
    }
}

impl<S> Layer<S> for MemoryLayer {
    type Service = MemoryService<S>;

    fn layer(&self, inner: S) -> Self::Service {
        MemoryService { inner, layer: self.clone() }
    }
}

/// A service behind a [`MemoryLayer`].
#[derive(Clone, Debug)]
pub struct MemoryService<S> {
    inner: S,
    layer: MemoryLayer,
}

impl<S, Q, R> Service<Request<Q>> for MemoryService<S>
where
    S: Service<Request<RequestBody<Q>>, Response = Response<R>> + Clone,
    Q: Body<Data = Bytes>,
    R: Body<Data = Bytes>,
{
    type Response = Response<ResponseBody<R>>;
    type Error = S::Error;
    type Future = ResponseFuture<S, S::Future, Q>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<Q>) -> Self::Future {
        let (mut head, body) = request.into_parts();
        let outer = head.extensions.get::<RequestPermit>();
        let is_inner = outer.is_some();
        if outer.is_some_and(|outer| self.layer.has_admitted(outer, &head)) {
            return ResponseFuture { state: self.layer.start(&mut self.inner, head, body, None) };
        }
        let length = note_length(&mut head, &body, is_inner);
        let state = match self.layer.admit(&head, &body, length, None, false) {
            Ok(permit) => self.layer.start(&mut self.inner, head, body, Some(permit)),
            Err(refused) => self.refuse(head, body, refused),
        };
        ResponseFuture { state }
    }
}

impl<S: Clone> MemoryService<S> {
    /// Lets a request wait that was not admitted, or rejects it.
    #[cold]
    #[inline(never)]
    fn refuse<F, Q: Body>(
        &mut self,
        head: Parts,
        body: Q,
        refused: NotAdmitted,
    ) -> RequestState<S, F, Q> {
        let LayerSettings { admission, max_wait, .. } = &*self.layer.settings;
        let NotAdmitted { rejected, cost, priority } = refused;
        let wait = || {
            let tenant = head.extensions.get().map_or(0, |tenant| self.layer.number_of(tenant));
            admission.state().wait(cost, priority, tenant, Some(*max_wait))
        };
        let may_wait = !max_wait.is_zero() && rejected.may_wait();
        let Some(waiting) = may_wait.then(wait).flatten() else {
            return self.layer.turn_away(&head, body, rejected);
        };
        // The service that is ready, not its clone, is called later.
        let next = self.inner.clone();
        let inner = std::mem::replace(&mut self.inner, next);
        let layer = self.layer.clone();
        let request = Some((head, body));
        RequestState::Waiting { call: Box::new(WaitingCall { waiting, inner, layer, request }) }
    }
}

/// A request that waits for room.
struct WaitingCall<S, Q> {
    waiting: Waiting,
    /// It is ready.
    inner: S,
    layer: MemoryLayer,
    /// `None` once the request was admitted or rejected.
    request: Option<(Parts, Q)>,
}

impl<S, Q, R> WaitingCall<S, Q>
where
    S: Service<Request<RequestBody<Q>>, Response = Response<R>>,
    Q: Body<Data = Bytes>,
{
    /// Waits until the request is admitted or rejected, and returns its next state.
    fn poll(&mut self, cx: &Context<'_>) -> Poll<RequestState<S, S::Future, Q>> {
        let Some((head, body)) = self.request.take() else { unreachable!("polled after its end") };
        // Ends: each iteration needs a wake of the queue.
        loop {
            let Poll::Ready(is_turn) = self.waiting.poll_turn(cx) else {
                self.request = Some((head, body));
                return Poll::Pending;
            };
            let waiting = is_turn.then_some(&self.waiting);
            match self.layer.admit(&head, &body, body_length(&head), waiting, !is_turn) {
                Ok(permit) => {
                    let permit = Some(permit);
                    return Poll::Ready(self.layer.start(&mut self.inner, head, body, permit));
                }
                Err(refused) if is_turn && refused.rejected.may_wait() => {}
                Err(refused) => {
                    return Poll::Ready(self.layer.turn_away(&head, body, refused.rejected));
                }
            }
        }
    }
}

pin_project! {
    /// The future of the response.
    pub struct ResponseFuture<S, F, Q> {
        #[pin]
        state: RequestState<S, F, Q>,
    }
}

pin_project! {
    #[project = RequestStateProject]
    enum RequestState<S, F, Q> {
        Waiting {
            call: Box<WaitingCall<S, Q>>,
        },
        Admitted {
            #[pin]
            future: Scoped<F>,
            settings: Arc<LayerSettings>,
            // The time at which the layer saw that the request was cancelled.
            cancelled_at: Option<Moment>,
            place: QueuePlace,
        },
        Rejected {
            rest: Pin<Box<Drain<Q>>>,
            reports: Option<Arc<LoadReports>>,
        },
    }
}

/// Returns the answer to a rejected request, with a load report if there are any.
#[cold]
fn reject_with<R>(
    mut answer: Response<String>,
    reports: Option<&LoadReports>,
) -> Response<ResponseBody<R>> {
    if let Some(reports) = reports {
        reports.attach(&mut answer);
    }
    answer.map(ResponseBody::rejected)
}

impl<S, F, Q> fmt::Debug for ResponseFuture<S, F, Q> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ResponseFuture").finish_non_exhaustive()
    }
}

impl<S, R, Q> Future for ResponseFuture<S, S::Future, Q>
where
    S: Service<Request<RequestBody<Q>>, Response = Response<R>>,
    Q: Body<Data = Bytes>,
    R: Body,
{
    type Output = Result<Response<ResponseBody<R>>, S::Error>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut state = self.project().state;
        if let RequestStateProject::Waiting { call } = state.as_mut().project() {
            let next = ready!(call.poll(cx));
            state.set(next);
        }
        match state.project() {
            RequestStateProject::Waiting { .. } => unreachable!("it waits no more"),
            RequestStateProject::Admitted { mut future, settings, cancelled_at, place } => {
                let starts = match &future.permit {
                    Some(permit) => permit.poll_start(place, cx).is_ready(),
                    None => true,
                };
                let polled = if starts { future.as_mut().poll(cx) } else { Poll::Pending };
                let Some(permit) = &future.permit else {
                    let passed = |body| ResponseBody::new(body, None, None);
                    return polled.map_ok(|response| response.map(passed));
                };
                let Poll::Ready(mut answered) = polled else {
                    let Some(rejected) = permit.waits(cx.waker()) else { return Poll::Pending };
                    let Some(response) = settings.end(permit, &rejected, cancelled_at) else {
                        return Poll::Pending;
                    };
                    future.end();
                    return Poll::Ready(Ok(reject_with(
                        response,
                        settings.load_reports.as_deref(),
                    )));
                };
                if cancelled_at.is_none()
                    && let Some(rejected) = permit.cancellation()
                {
                    settings.report(permit, &rejected);
                }
                if let Ok(response) = &mut answered
                    && permit.answered(response)
                {
                    permit.goes_on();
                    response.extensions_mut().insert(Upgraded(permit.clone()));
                }
                let mut trailers = None;
                if let Some(reports) = &settings.load_reports {
                    match &mut answered {
                        Ok(response) => {
                            if reports.attach(response) {
                                trailers = Some(Arc::clone(reports));
                            }
                        }
                        Err(_) => reports.count_failed_call(),
                    }
                }
                let permit = future.project().permit.take();
                let body = |body| ResponseBody::new(body, permit, trailers);
                Poll::Ready(answered.map(|response| response.map(body)))
            }
            RequestStateProject::Rejected { rest, reports } => {
                rest.as_mut().poll(cx).map(|answer| Ok(reject_with(answer, reports.as_deref())))
            }
        }
    }
}

#[cfg(all(test, not(lowtide_loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_route_is_the_grpc_method_or_the_first_segment_of_the_path() {
        let name = |path: &str, version, kind: &str| {
            let request = Request::post(path).version(version).header(CONTENT_TYPE, kind);
            let (head, ()) = request.body(()).expect("a valid head").into_parts();
            let (route, is_matched) = route(&head);
            assert!(!is_matched, "no router matched");
            route.to_owned()
        };
        let (one, two) = (Version::HTTP_11, Version::HTTP_2);
        assert_eq!(name("/a.B/C", two, "application/grpc+proto"), "/a.B/C");
        assert_eq!(name("/a.B/C", two, "application/json"), "a.B");
        assert_eq!(name("/a/b/c", one, "application/grpc"), "a", "gRPC needs HTTP/2");
        assert_eq!(name("/upload?x=/y", one, "text/plain"), "upload");
        assert_eq!(name("/", one, "text/plain"), "/");
    }
}
