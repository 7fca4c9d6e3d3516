//! The operator endpoints `/metrics`, `/healthz`, `/readyz` and `/memory`.
//!
//! The application routes these paths, outside the memory layer. `/healthz` never fails because of
//! pressure; it fails if the policy for exhaustion asks for a restart. `/readyz` fails while the
//! pressure level is critical (except in observe mode), while memory outside requests leaves no room for requests (except
//! if single ones are served), and during shutdown. It lists sleeping arenas, which do not affect
//! readiness: they wake when used. `/memory` is JSON, or the live page for clients that prefer
//! HTML; the commands below it are those of `admin`.
//!
//! Invariant: without admin commands no answer changes anything.

use std::io::{self, ErrorKind::WouldBlock, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::sync::{Arc, Once};
use std::time::Duration;

#[cfg(feature = "axum")]
use axum::{body::Body, extract::ConnectInfo};
use http::header::VARY;
use http::{HeaderValue, Method, Request, Response, StatusCode};
use serde_json::{Value, json};

use crate::bytes::ByteSize;
use crate::clock::SystemClock;
use crate::config::ConfigError;
use crate::memory::{Breakdown, Memory, MemorySnapshot};
use crate::metrics::record as read;
use crate::sync::atomic::{AtomicBool, Ordering};
use lowtide_admission::{Level, LimitBound, ReclaimerStats, ResourceStats};
use lowtide_heap::HeapSnapshot;

use super::admin::{Admin, AdminToken, PROFILE, check_host, wrong_method};
use super::answer::{JSON, answer, budget, figures, guard, limit, page, pretty, seconds};
#[cfg(feature = "device")]
use super::devices::{self, Maps};
use super::json::{self, JsonPart, PartContext};
use super::query::{Query, invalid_value, prefers_html};
use super::rejection::Denial;

const TEXT: &str = "text/plain; charset=utf-8";
const METRICS: &str = "text/plain; version=0.0.4; charset=utf-8";

/// The longest time of each step of a health check.
const WITHIN: Duration = Duration::from_secs(2);

/// Requests `/healthz` of the service at this address: the health check of an image without a shell.
/// Blocks for up to 2 s for a connection, and for each part of the answer.
///
/// # Errors
/// If the service cannot be reached, does not answer in time, or not with the status 200; the text
/// names the address and the cause.
pub fn healthcheck(at: SocketAddr) -> io::Result<()> {
    const REQUEST: &[u8] = b"GET /healthz HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n";
    let ask = |mut service: TcpStream| {
        service.set_read_timeout(Some(WITHIN))?;
        service.write_all(REQUEST)?;
        io::read_to_string(service)
    };
    let told = match TcpStream::connect_timeout(&at, WITHIN).and_then(ask) {
        Ok(answer) if answer.split(' ').nth(1) == Some("200") => return Ok(()),
        Ok(answer) => format!("answered {}", answer.split(' ').nth(1).unwrap_or("nothing")),
        Err(error) if error.kind() == WouldBlock => format!("did not answer within {WITHIN:?}"),
        Err(error) => format!("cannot be reached: {error}"),
    };
    Err(io::Error::other(format!("{at} {told}")))
}

/// The operator endpoints of a service.
///
/// ```
/// use lowtide::Memory;
/// use lowtide::service::Endpoints;
///
/// let memory = Memory::builder().start()?;
/// let endpoints = Endpoints::new(Some(memory)).with_metrics(|| String::from("# no recorder\n"));
/// assert_eq!(endpoints.answer("/healthz").map(|answer| answer.status().as_u16()), Some(200));
/// assert!(endpoints.answer("/elsewhere").is_none()); // left to the application
/// # Ok::<(), lowtide::memory::StartError>(())
/// ```
#[must_use]
pub struct Endpoints {
    memory: Option<Memory>,
    metrics: Option<Box<dyn Fn() -> String + Send + Sync>>,
    pub(super) admin: Option<Admin>,
    hosts: Vec<String>,
    is_ending: AtomicBool,
    #[cfg(feature = "device")]
    maps: Maps,
}

impl Endpoints {
    /// The paths of the endpoints, for [`MemoryLayer::exempt_paths`](super::MemoryLayer).
    pub const PATHS: [&str; 4] = ["/healthz", "/readyz", "/memory", "/metrics"];

    /// The additional paths with admin commands.
    pub const ADMIN_PATHS: &[&str] = &[
        "/memory/purge",
        "/memory/trim",
        "/memory/sleep",
        "/memory/wake",
        "/memory/unload",
        "/memory/fit",
        "/memory/admission",
        "/memory/profile",
    ];

    /// Creates the endpoints of this memory. With `None` they report that memory is not managed.
    pub fn new(memory: Option<Memory>) -> Self {
        Self {
            memory,
            metrics: installed_metrics(),
            admin: None,
            hosts: Vec::new(),
            is_ending: AtomicBool::new(false),
            #[cfg(feature = "device")]
            maps: Maps::default(),
        }
    }

    /// Sets the source of `/metrics`: a function that returns the Prometheus text format.
    pub fn with_metrics(mut self, render: impl Fn() -> String + Send + Sync + 'static) -> Self {
        self.metrics = Some(Box::new(render));
        self
    }

    /// Accepts admin commands from this machine, without a token: requests whose
    /// [`Peer`](super::Peer) is a loopback address, whose host is `localhost` or a loopback address,
    /// and that did not pass a proxy. Every user of this machine who can open a connection can send commands.
    ///
    /// By default none are accepted. Their paths are [`Endpoints::ADMIN_PATHS`]; use
    /// [`Endpoints::answer_request`] for them.
    ///
    /// ```
    /// use http::{Request, StatusCode};
    /// use lowtide::Memory;
    /// use lowtide::service::{Endpoints, Peer};
    ///
    /// let memory = Memory::builder().start()?;
    /// let endpoints = Endpoints::new(Some(memory)).with_local_admin();
    /// let request = Request::post("/memory/purge")
    ///     .header("host", "localhost:8080")
    ///     .header("lowtide-admin", "1")
    ///     .extension(Peer(([127, 0, 0, 1], 50_000).into()))
    ///     .body(())?;
    /// let answer = endpoints.answer_request(&request).expect("one of its paths");
    /// assert_eq!(answer.status(), StatusCode::ACCEPTED);
    /// # Ok::<(), lowtide::BoxError>(())
    /// ```
    pub fn with_local_admin(self) -> Self {
        self.with_admin(None)
    }

    /// Accepts admin commands with the token, from any address including this machine:
    /// `Authorization: Bearer` and the token, for example from `openssl rand -hex 32`. Use TLS in
    /// front of the service; otherwise the token can be read on the network.
    ///
    /// ```
    /// use lowtide::service::Endpoints;
    ///
    /// let error = Endpoints::new(None).with_admin_token("hunter2").unwrap_err();
    /// assert_eq!(error.to_string(), "admin token of 7 bytes: expected 32 to 256 bytes");
    /// ```
    ///
    /// # Errors
    /// [`ConfigError`] unless the token is 32 to 256 printable ASCII characters without spaces. It
    /// does not contain the token.
    pub fn with_admin_token(self, token: &str) -> Result<Self, ConfigError> {
        Ok(self.with_admin(Some(AdminToken::new(token)?)))
    }

    fn with_admin(self, token: Option<AdminToken>) -> Self {
        let own = || Arc::new(SystemClock::new()) as _;
        let clock = self.memory.as_ref().map_or_else(own, Memory::clock);
        Self { admin: Some(Admin::new(clock, token)), ..self }
    }

    /// Adds host names under which `/memory` and `/metrics` are answered. Ports are ignored, and
    /// case does not matter. By default only `localhost` and IP addresses are accepted, and
    /// requests without a host, which no browser sends.
    ///
    /// This protects against DNS rebinding: any site can point one of its names at this service's
    /// address, and then read in a browser what that browser can reach. It cannot use a name that
    /// it does not own. Add the names that operators use: `proxy` for a Prometheus that scrapes
    /// `proxy:8081`, or the name that a reverse proxy passes on. `/healthz` and `/readyz` accept
    /// every host, since load balancers choose it.
    ///
    /// ```
    /// use http::{Request, StatusCode};
    /// use lowtide::service::Endpoints;
    ///
    /// let endpoints = Endpoints::new(None).with_hosts(["proxy"]);
    /// for (host, status) in [("proxy:8081", 200), ("10.0.0.7", 200), ("evil.example", 403)] {
    ///     let request = Request::get("/memory").header("host", host).body(())?;
    ///     let answer = endpoints.answer_request(&request).expect("one of its paths");
    ///     assert_eq!(answer.status().as_u16(), status, "{host}");
    /// }
    /// # Ok::<(), http::Error>(())
    /// ```
    pub fn with_hosts(mut self, hosts: impl IntoIterator<Item: Into<String>>) -> Self {
        self.hosts.extend(hosts.into_iter().map(Into::into));
        self
    }

    /// Makes `/readyz` answer 503 from now on, like [`Memory::set_ending`]; also without a
    /// `Memory`.
    pub fn set_ending(&self) {
        self.is_ending.store(true, Ordering::Relaxed);
    }

    /// Returns the answer to this request; `None` if its path is not an endpoint.
    ///
    /// In addition to [`Endpoints::answer`]: a request for `/memory` or `/metrics` to an unknown
    /// host is 403 ([`Endpoints::with_hosts`]), and one with another method than GET and HEAD 405. `/memory` answers with the live page if the
    /// `Accept` header prefers HTML (`?format=json` and `?format=html` override the header).
    /// `?with=` adds parts to the JSON: `map`, `history`, `events`, `admin_tasks`,
    /// `largest_requests`, `permits` (the oldest requests), `routes`, `tenants`, `size_classes`,
    /// `mappings`, `device_processes` (for at most 50 ms; see `MemoryDevices::processes`),
    /// `last_exit` (`MemoryReport::last_exit`), `limit_advice`, `leaks`, `settings` (each value in
    /// force with its source), separated by commas. `?with=limit_advice&limit=256Mi` adds what a
    /// limit of 256 MiB would have done. An invalid query is 400.
    ///
    /// `/memory/profile` answers with the live heap by call stack for `pprof`, gzipped. It needs
    /// admin commands and an active heap profiler
    /// ([`heap::profiler`](crate::heap::profiler)), and blocks for some milliseconds.
    ///
    /// ```
    /// use http::Request;
    /// use lowtide::service::Endpoints;
    ///
    /// let endpoints = Endpoints::new(None);
    /// let browser = Request::get("/memory").header("accept", "text/html,*/*;q=0.8").body(())?;
    /// let answer = endpoints.answer_request(&browser).expect("one of its paths");
    /// assert_eq!(answer.headers()["content-type"], "text/html; charset=utf-8");
    /// let curl = Request::get("/memory").header("accept", "*/*").body(())?;
    /// let answer = endpoints.answer_request(&curl).expect("one of its paths");
    /// assert_eq!(answer.headers()["content-type"], "application/json");
    /// # Ok::<(), http::Error>(())
    /// ```
    #[must_use]
    pub fn answer_request<B>(&self, request: &Request<B>) -> Option<Response<Vec<u8>>> {
        let path = request.uri().path();
        if path == PROFILE {
            return Some(guard(self.admin.as_ref()?.profile(request)));
        }
        let shows_figures = path == "/memory" || (path == "/metrics" && self.metrics.is_some());
        let answer = if !shows_figures {
            let command = || self.admin.as_ref()?.answer(request, self.memory.as_ref());
            self.answer(path).or_else(command)?
        } else if !matches!(*request.method(), Method::GET | Method::HEAD) {
            wrong_method(request.method(), "GET, HEAD")
        } else if let Err(denial) = check_host(request, &self.hosts) {
            static LOGGED: Once = Once::new(); // so that clients cannot fill the log
            let detail = &*denial.detail;
            LOGGED.call_once(|| log!(warn, path, detail, "request for figures rejected"));
            denial.answer()
        } else if path == "/memory" {
            self.asked(request).unwrap_or_else(|problem| problem.answer())
        } else {
            self.answer(path)?
        };
        Some(guard(answer.map(String::into_bytes)))
    }

    /// Returns the answer for this path, without checks of host, query or headers; `None` if the
    /// path is not an endpoint.
    #[must_use]
    pub fn answer(&self, path: &str) -> Option<Response<String>> {
        match path {
            "/healthz" if self.memory.as_ref().is_some_and(Memory::needs_restart) => {
                let text = "memory exhausted: restart needed\n".to_owned();
                Some(answer(StatusCode::SERVICE_UNAVAILABLE, TEXT, text))
            }
            "/healthz" => Some(answer(StatusCode::OK, TEXT, "ok\n".to_owned())),
            "/readyz" => Some(self.ready()),
            "/memory" => Some(self.memory(&[], None)),
            "/metrics" => {
                let render = self.metrics.as_ref()?;
                Some(answer(StatusCode::OK, METRICS, render()))
            }
            _ => None,
        }
    }

    fn ready(&self) -> Response<String> {
        let is_ending = self.is_ending.load(Ordering::Relaxed)
            || self.memory.as_ref().is_some_and(Memory::is_ending);
        let status = |ready| if ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
        let Some(memory) = &self.memory else {
            let body = json!({ "ready": !is_ending, "managed": false, "ending": is_ending });
            return answer(status(!is_ending), JSON, pretty(&body));
        };
        let level = memory.level();
        let ending = is_ending || memory.admission().is_closed();
        let snapshot = memory.snapshot();
        let serves = match snapshot.exhausted {
            true => memory.serves_one(),
            false => level < Level::Critical || snapshot.admission.observe_mode,
        };
        let ready = serves && !ending;
        let resources = snapshot.resources.iter().map(|resource| {
            let state = if resource.loaded {
                "loaded"
            } else if resource.loading || resource.waiting > 0 {
                "loading"
            } else {
                "unloaded"
            };
            (resource.name.to_string(), json!(state))
        });
        let body = json!({
            "ready": ready,
            "managed": true,
            "ending": ending,
            "level": level.name(),
            "exhausted": snapshot.exhausted,
            "resources": resources.collect::<serde_json::Map<_, _>>(),
            "diagnostics": diagnostics(&snapshot),
        });
        #[cfg(feature = "device")]
        let body = devices::with_states(&snapshot, body);
        answer(status(ready), JSON, pretty(&body))
    }

    fn asked<B>(&self, request: &Request<B>) -> Result<Response<String>, Denial> {
        let query = Query::read(request.uri().query(), &["format", "limit", "with"])?;
        let is_html = match query.get("format") {
            None => prefers_html(request.headers()),
            Some("json") => false,
            Some("html") => true,
            Some(other) => return Err(invalid_value("format", other, "json or html")),
        };
        let parts = json::read(query.get("with").unwrap_or_default())?;
        let limit = query.get("limit").map(|text| json::read_limit(text, &parts)).transpose()?;
        Ok(if is_html { page() } else { self.memory(&parts, limit) })
    }

    /// Returns the figures and these parts. With parts the JSON is one line, since a page reads it.
    fn memory(&self, parts: &[&JsonPart], limit: Option<ByteSize>) -> Response<String> {
        let mut body = json!({ "schema": SCHEMA, "managed": false });
        if let Some(memory) = &self.memory {
            body = document(memory);
            let asked = PartContext {
                memory,
                #[cfg(feature = "device")]
                maps: &self.maps,
                needs_token: self.admin.as_ref().map(Admin::needs_token),
                limit,
            };
            for (name, part) in parts {
                body[*name] = part(&asked);
            }
        }
        let body = if parts.is_empty() { pretty(&body) } else { format!("{body}\n") };
        let mut answer = answer(StatusCode::OK, JSON, body);
        answer.headers_mut().insert(VARY, HeaderValue::from_static("Accept"));
        answer
    }
}

/// A function that renders the metrics of the recorder that `Builder::prometheus` installed.
fn installed_metrics() -> Option<Box<dyn Fn() -> String + Send + Sync>> {
    #[cfg(feature = "prometheus")]
    if crate::metrics::prometheus::render().is_some() {
        return Some(Box::new(|| crate::metrics::prometheus::render().unwrap_or_default()));
    }
    None
}

#[cfg(feature = "axum")]
impl Memory {
    /// Returns the operator endpoints (`/healthz`, `/readyz`, `/memory`, and `/metrics` after
    /// `Builder::prometheus`) as routes. Merge them after the layer, so that they answer under
    /// overload:
    ///
    /// ```
    /// use axum::{Router, routing::post};
    /// use lowtide::Memory;
    ///
    /// let memory = Memory::start()?;
    /// let app: Router = Router::new()
    ///     .route("/length", post(|body: String| async move { body.len().to_string() }))
    ///     .layer(memory.layer())
    ///     .merge(memory.routes());
    /// # drop(app);
    /// # Ok::<(), lowtide::BoxError>(())
    /// ```
    ///
    /// They are for operators: `/memory` and `/metrics` show figures of the service. To keep them
    /// from the public, serve them on a port of their own.
    pub fn routes<S: Clone + Send + Sync + 'static>(&self) -> axum::Router<S> {
        Endpoints::new(Some(self.clone())).into_routes()
    }
}

#[cfg(feature = "axum")]
impl Endpoints {
    /// Returns these endpoints as routes: [`Endpoints::PATHS`], and [`Endpoints::ADMIN_PATHS`] with
    /// admin commands. Those need the client's address: serve the routes with
    /// `into_make_service_with_connect_info::<SocketAddr>()`.
    pub fn into_routes<S: Clone + Send + Sync + 'static>(self) -> axum::Router<S> {
        let admin =
            self.admin.is_some().then_some(Self::ADMIN_PATHS).into_iter().flatten().copied();
        let endpoints = Arc::new(self);
        Self::PATHS.into_iter().chain(admin).fold(axum::Router::new(), |router, path| {
            let endpoints = Arc::clone(&endpoints);
            router.route(path, axum::routing::any(async move |request| routed(&endpoints, request)))
        })
    }
}

#[cfg(feature = "axum")]
fn routed(endpoints: &Endpoints, mut request: Request<Body>) -> Response<Body> {
    if let Some(&ConnectInfo(peer)) = request.extensions().get::<ConnectInfo<SocketAddr>>() {
        request.extensions_mut().insert(super::Peer(peer));
    }
    let missing = || {
        let expected = "no metrics: expected `Builder::prometheus` or `Endpoints::with_metrics`";
        Denial::new(StatusCode::NOT_FOUND, "no metrics", "metrics", expected).answer()
    };
    let answer = endpoints.answer_request(&request);
    answer.unwrap_or_else(|| guard(missing().map(String::into_bytes))).map(Body::from)
}

lowtide_core::debug_as!(Endpoints, |endpoints| memory: endpoints.memory);

/// The version of the JSON document. It rises if a key is removed or changes its meaning.
const SCHEMA: u32 = 1;

/// Returns every figure as JSON; amounts are in bytes, and null means no limit.
fn document(memory: &Memory) -> Value {
    let snapshot = &memory.snapshot();
    let (verdict, breakdown) = memory.report().explain(snapshot);
    let document = json!({
        "schema": SCHEMA,
        "managed": true,
        "verdict": verdict.summary,
        "findings": verdict.findings,
        "process": {
            "pid": std::process::id(),
            "started_at_seconds": seconds(memory.report().started_at()),
            "service_version": memory.config().service_version.value,
        },
        "profile": snapshot.profile.name(),
        "saturation": snapshot.saturation,
        "at_seconds": seconds(snapshot.since_epoch),
        "host": host(snapshot, &breakdown),
        "heap": snapshot.heap.as_ref().map(|heap| heap_figures(heap, snapshot)),
        "requests": figures(
            "lowtide_admission_",
            |each| read::admission(&snapshot.admission, each),
            json!({
                "held": snapshot.admission.held(),
                "oldest_permit_seconds": seconds(snapshot.admission.oldest_permit),
            }),
        ),
        "resources": snapshot
            .resources
            .iter()
            .map(|stats| resource(stats, snapshot))
            .collect::<Vec<_>>(),
        "reclaimers": snapshot.reclaimers.iter().map(reclaimer).collect::<Vec<_>>(),
        "diagnostics": diagnostics(snapshot),
    });
    #[cfg(feature = "device")]
    let document = devices::with_figures(snapshot, document);
    document
}

fn host(snapshot: &MemorySnapshot, breakdown: &Breakdown) -> Value {
    json!({
        "rss_bytes": snapshot.signal.rss.map(ByteSize::get),
        "other_bytes": snapshot.other().map(ByteSize::get),
        "physical_bytes": snapshot.physical.get(),
        "parts": breakdown.parts,
        "headroom_bytes": breakdown.headroom.map(ByteSize::get),
        "purgeable_bytes": snapshot.purgeable.get(),
        "unreleased_bytes": snapshot.unreleased.get(),
        "required_bytes": snapshot.required().get(),
        "exhausted": snapshot.exhausted,
        "charged_bytes": snapshot.signal.charged.map(ByteSize::get),
        "usage_bytes": snapshot.signal.usage.map(ByteSize::get),
        "oom_kills": snapshot.oom_kills,
        "events": snapshot.events,
        "psi": snapshot.psi.map(|psi| psi.by_name().into_iter().map(stall).collect::<Value>()),
        "cgroup": snapshot.cgroup.as_ref().map(|folder| folder.display().to_string()),
        "bounds": snapshot.bounds.iter().map(bound).collect::<Vec<_>>(),
        "limit_is_stale": snapshot.signal.limit_is_stale,
        "limit_bytes": limit(snapshot.signal.limit.bytes),
        "limit_source": snapshot.signal.limit.source.name(),
        "budget": budget(&snapshot.host),
    })
}

fn stall((kind, avg10, total): (&'static str, f64, Duration)) -> (&'static str, Value) {
    (kind, json!({ "avg10": avg10, "total_seconds": total.as_secs_f64() }))
}

fn bound(bound: &LimitBound) -> Value {
    json!({
        "source": bound.source.name(),
        "name": bound.name,
        "limit_bytes": bound.limit.map(ByteSize::get),
        "used_bytes": bound.used.map(ByteSize::get),
        "scope": bound.scope,
        "freshness": bound.freshness,
    })
}

fn heap_figures(heap: &HeapSnapshot, snapshot: &MemorySnapshot) -> Value {
    let arenas = snapshot.heap_arenas.iter().map(|(name, arena)| {
        let name = json!({ "name": name });
        figures("lowtide_heap_arena_", |each| read::heap_arena(arena, each), name)
    });
    let others = json!({
        "mapped_bytes": heap.mapped.get(),
        "spills": lowtide_heap::spilled().1,
        "arenas": arenas.collect::<Value>(),
    });
    figures("lowtide_heap_", |each| read::heap(heap, each), others)
}

fn resource(stats: &ResourceStats, snapshot: &MemorySnapshot) -> Value {
    let last_used = stats.last_used.map(|at| snapshot.on_wall(at));
    let unload_in = stats.due.map(|due| due - snapshot.now);
    let others = json!({
        "name": &*stats.name,
        "loading": stats.loading || stats.waiting > 0,
        "loads": stats.loads_ok_total,
        "failed_loads": stats.loads_failed_total,
        "refused_loads": stats.loads_refused_total,
        "last_used_seconds": last_used.map(|at| at.as_secs_f64()),
        "unload_in_seconds": unload_in.map(seconds),
    });
    figures("lowtide_resource_", |each| read::resource(stats, each), others)
}

fn reclaimer(stats: &ReclaimerStats) -> Value {
    let others = json!({
        "name": &*stats.name,
        "registered": stats.registered,
        "releasable_bytes": stats.releasable.get(),
    });
    figures("lowtide_reclaimer_", |each| read::reclaimer(stats, each), others)
}

fn diagnostics(snapshot: &MemorySnapshot) -> Vec<String> {
    snapshot.diagnostics.iter().map(ToString::to_string).collect()
}
