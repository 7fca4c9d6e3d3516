//! The operator endpoints `/metrics`, `/healthz`, `/readyz` and `/memory`.
//!
//! The application routes these paths, outside the memory layer. `/healthz` never fails because of
//! pressure; it fails if the policy for exhaustion asks for a restart. `/readyz` fails while the
//! pressure level is critical, while memory outside requests leaves no room for requests (except
//! if single ones are served), and during shutdown. It lists sleeping arenas, which do not affect
//! readiness: they wake when used. `/memory` is JSON, or the live page for clients that prefer
//! HTML; the commands below it are those of `admin`.
//!
//! Invariant: without [`Endpoints::with_admin`] no answer changes anything.

use std::fmt;
use std::time::Duration;

use http::header::{CACHE_CONTROL, VARY, X_CONTENT_TYPE_OPTIONS};
use http::{HeaderValue, Request, Response, StatusCode};
use serde_json::{Value, json};

use crate::bytes::ByteSize;
use crate::memory::{self, Breakdown, Finding, Memory, MemorySnapshot};
use crate::metrics::record::{BUDGETS, part};
use crate::sync::atomic::{AtomicBool, Ordering};
use lowtide_admission::{
    Cost, EventCounts, Level, LimitBound, ReclaimerStats, RejectReason, ResourceStats, Stall,
    UnloadReason,
};
use lowtide_heap::HostArenaStats;

use super::admin::{Admin, PROFILE, host_refusal};
use super::answer::{JSON, answer, budget, limit, pretty, seconds};
use super::asked::{Format, Query, QueryError};
use super::devices::{self, Maps};
use super::page;
use super::parts::Part;
use super::rejection::problem;

const TEXT: &str = "text/plain; charset=utf-8";
/// The query parameters of `/memory`.
const NAMES: &[&str] = &["format", "limit", "with"];
const METRICS: &str = "text/plain; version=0.0.4; charset=utf-8";

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
pub struct Endpoints {
    memory: Option<Memory>,
    metrics: Option<Box<dyn Fn() -> String + Send + Sync>>,
    admin: Option<Admin>,
    hosts: Vec<String>,
    is_ending: AtomicBool,
    maps: Maps,
}

impl Endpoints {
    /// The paths of the endpoints, for [`MemoryLayer::exempt_paths`](super::MemoryLayer).
    pub const PATHS: [&str; 4] = ["/healthz", "/readyz", "/memory", "/metrics"];

    /// The additional paths with [`Endpoints::with_admin`].
    pub const ADMIN_PATHS: &[&str] = devices::ADMIN_PATHS;

    /// Creates the endpoints of this memory. With `None` they report that memory is not managed.
    #[must_use]
    pub fn new(memory: Option<Memory>) -> Self {
        Self {
            memory,
            metrics: installed_metrics(),
            admin: None,
            hosts: Vec::new(),
            is_ending: AtomicBool::new(false),
            maps: Maps::default(),
        }
    }

    /// Sets the source of `/metrics`: a function that returns the Prometheus text format.
    #[must_use]
    pub fn with_metrics(mut self, render: impl Fn() -> String + Send + Sync + 'static) -> Self {
        self.metrics = Some(Box::new(render));
        self
    }

    /// Enables admin commands, which are disabled by default. Their paths are
    /// [`Endpoints::ADMIN_PATHS`]; use [`Endpoints::answer_request`] for them.
    #[must_use]
    pub fn with_admin(mut self, admin: Admin) -> Self {
        self.admin = Some(admin);
        self
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
    #[must_use]
    pub fn with_hosts(mut self, hosts: impl IntoIterator<Item: Into<String>>) -> Self {
        self.hosts.extend(hosts.into_iter().map(Into::into));
        self
    }

    #[cfg(feature = "axum")]
    pub(super) const fn has_admin(&self) -> bool {
        self.admin.is_some()
    }

    /// Makes `/readyz` answer 503 from now on, like [`Memory::set_ending`]; also without a
    /// `Memory`.
    pub fn set_ending(&self) {
        self.is_ending.store(true, Ordering::Relaxed);
    }

    /// Returns the answer to this request; `None` if its path is not an endpoint.
    ///
    /// In addition to [`Endpoints::answer`]: a request for `/memory` or `/metrics` to an unknown
    /// host is 403 ([`Endpoints::with_hosts`]). `/memory` answers with the live page if the
    /// `Accept` header prefers HTML (`?format=json` and `?format=html` override the header).
    /// `?with=` adds parts to the JSON: `map`, `history`, `events`, `admin_tasks`,
    /// `largest_requests`, `permits` (the oldest requests), `routes`, `tenants`, `size_classes`,
    /// `mappings`, `device_processes` (for at most 50 ms; see `Memory::device_processes`),
    /// `last_exit` ([`Memory::last_exit`]), `limit_advice`, `leaks`, `settings` (each value in
    /// force with its source), separated by commas. `?with=limit_advice&limit=256Mi` adds what a
    /// limit of 256 MiB would have done. An invalid query is 400.
    ///
    /// `/memory/profile` answers with the live heap by call stack for `pprof`, gzipped, which is no
    /// text. It needs [`Endpoints::with_admin`] and an active heap profiler
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
            return Some(guarded(self.admin.as_ref()?.profile(request)));
        }
        let shows_figures = path == "/memory" || (path == "/metrics" && self.metrics.is_some());
        let refusal = shows_figures.then(|| host_refusal(request, &self.hosts)).flatten();
        let answer = if let Some(refusal) = refusal {
            refusal
        } else if path == "/memory" {
            self.asked(request).unwrap_or_else(|error| {
                let (status, none) = (StatusCode::BAD_REQUEST, Duration::ZERO);
                problem(status, "invalid query", "query", &error.to_string(), none)
            })
        } else {
            let command = || self.admin.as_ref()?.answer(request, self.memory.as_ref());
            self.answer(path).or_else(command)?
        };
        Some(guarded(answer.map(String::into_bytes)))
    }

    /// Returns the answer for this path, without checks of host, query or headers; `None` if the
    /// path is not an endpoint.
    #[must_use]
    pub fn answer(&self, path: &str) -> Option<Response<String>> {
        match path {
            "/healthz" => Some(self.healthy()),
            "/readyz" => Some(self.ready()),
            "/memory" => Some(self.memory(&[], None)),
            "/metrics" => {
                let render = self.metrics.as_ref()?;
                Some(answer(StatusCode::OK, METRICS, render()))
            }
            _ => None,
        }
    }

    fn healthy(&self) -> Response<String> {
        let (status, text) = match &self.memory {
            Some(memory) if memory.needs_restart() => {
                (StatusCode::SERVICE_UNAVAILABLE, "memory exhausted: restart needed\n")
            }
            _ => (StatusCode::OK, "ok\n"),
        };
        answer(status, TEXT, text.to_owned())
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
            false => level < Level::Critical,
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
        let mut body = json!({
            "ready": ready,
            "managed": true,
            "ending": ending,
            "level": level.name(),
            "exhausted": snapshot.exhausted,
            "resources": resources.collect::<serde_json::Map<_, _>>(),
            "diagnostics": diagnostics(&snapshot),
        });
        devices::add_states(&snapshot, &mut body);
        answer(status(ready), JSON, pretty(&body))
    }

    fn asked<B>(&self, request: &Request<B>) -> Result<Response<String>, QueryError> {
        let query = Query::read(request.uri().query(), NAMES, "format, limit or with")?;
        let format = match query.get("format") {
            None => Format::preferred(request.headers()),
            Some("json") => Format::Json,
            Some("html") => Format::Html,
            Some(other) => {
                let (value, expected) = (other.to_owned(), "json or html".to_owned());
                return Err(QueryError::Value { name: "format", value, expected });
            }
        };
        let parts = Part::read(query.get("with").unwrap_or_default())?;
        let limit = query.get("limit").map(|text| Part::read_limit(text, &parts)).transpose()?;
        Ok(match format {
            Format::Html => page::answer(),
            Format::Json => self.memory(&parts, limit),
        })
    }

    /// Returns the figures and these parts. With parts the JSON is one line, since a page reads it.
    fn memory(&self, parts: &[Part], limit: Option<ByteSize>) -> Response<String> {
        let mut body = self
            .memory
            .as_ref()
            .map_or_else(|| json!({ "schema": SCHEMA, "managed": false }), document);
        let body = match (&self.memory, &mut body) {
            (Some(memory), Value::Object(members)) if !parts.is_empty() => {
                let needs_token = self.admin.as_ref().map(Admin::needs_token);
                for part in parts {
                    part.add(memory, &self.maps, needs_token, limit, members);
                }
                format!("{body}\n")
            }
            (_, body) => pretty(body),
        };
        let mut answer = answer(StatusCode::OK, JSON, body);
        answer.headers_mut().insert(VARY, HeaderValue::from_static("Accept"));
        answer
    }
}

/// Adds the headers of every answer: it is not kept, and its type is not guessed.
fn guarded<T>(mut answer: Response<T>) -> Response<T> {
    answer.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    let nosniff = HeaderValue::from_static("nosniff");
    answer.headers_mut().insert(X_CONTENT_TYPE_OPTIONS, nosniff);
    answer
}

/// A function that renders the metrics of the recorder that `Builder::prometheus` installed.
fn installed_metrics() -> Option<Box<dyn Fn() -> String + Send + Sync>> {
    #[cfg(feature = "prometheus")]
    if crate::metrics::prometheus::render().is_some() {
        return Some(Box::new(|| crate::metrics::prometheus::render().unwrap_or_default()));
    }
    None
}

impl fmt::Debug for Endpoints {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Endpoints").field("memory", &self.memory).finish_non_exhaustive()
    }
}

/// The version of the JSON document. It rises if a key is removed or changes its meaning.
const SCHEMA: u32 = 1;

/// Returns every figure as JSON; amounts are in bytes, and null means no limit.
fn document(memory: &Memory) -> Value {
    let snapshot = &memory.snapshot();
    let (verdict, breakdown) = memory.explain(snapshot);
    let mut document = json!({
        "schema": SCHEMA,
        "managed": true,
        "verdict": verdict.summary,
        "findings": verdict.findings.iter().map(finding).collect::<Vec<_>>(),
        "process": {
            "pid": std::process::id(),
            "started_at_seconds": seconds(memory.started_at()),
            "service_version": memory.config().service_version.value,
        },
        "profile": snapshot.profile.name(),
        "saturation": snapshot.saturation,
        "at_seconds": seconds(snapshot.since_epoch),
        "host": host(snapshot, &breakdown),
        "heap": snapshot.heap.map(|heap| json!({
            "live_bytes": heap.live.get(),
            "active_bytes": heap.active.get(),
            "resident_bytes": heap.resident.get(),
            "retained_bytes": heap.retained().get(),
            "dirty_bytes": heap.dirty.get(),
            "muzzy_bytes": heap.muzzy.get(),
            "metadata_bytes": heap.metadata.get(),
            "mapped_bytes": heap.mapped.get(),
            "unbacked_bytes": heap.unbacked.get(),
            "thread_cache_bytes": heap.thread_caches.get(),
            "arenas": snapshot.heap_arenas.iter().map(heap_arena).collect::<Vec<_>>(),
        })),
        "requests": {
            "admitted": snapshot.admission.admitted_total,
            "held": snapshot.admission.held(),
            "waiting": snapshot.admission.waiting,
            "waited": snapshot.admission.waited_total,
            "suspended": snapshot.admission.suspended_total,
            "oldest_permit_seconds": seconds(snapshot.admission.oldest_permit),
            "outlived_bytes": snapshot.admission.outlived_bytes_total,
            "rejected": RejectReason::ALL
                .map(|why| (why.name().to_owned(), json!(snapshot.admission.rejected_total(why))))
                .into_iter()
                .collect::<serde_json::Map<_, _>>(),
        },
        "resources": snapshot
            .resources
            .iter()
            .map(|stats| resource(stats, snapshot))
            .collect::<Vec<_>>(),
        "reclaimers": snapshot.reclaimers.iter().map(reclaimer).collect::<Vec<_>>(),
        "diagnostics": diagnostics(snapshot),
    });
    devices::add_figures(snapshot, &mut document);
    document
}

fn host(snapshot: &MemorySnapshot, breakdown: &Breakdown) -> Value {
    json!({
        "rss_bytes": snapshot.signal.rss.map(ByteSize::get),
        "other_bytes": snapshot.other().map(ByteSize::get),
        "physical_bytes": snapshot.physical.get(),
        "parts": breakdown.parts.iter().map(part_of_memory).collect::<Vec<_>>(),
        "headroom_bytes": breakdown.headroom.map(ByteSize::get),
        "purgeable_bytes": snapshot.purgeable.get(),
        "unreleased_bytes": snapshot.unreleased.get(),
        "required_bytes": snapshot.required().get(),
        "exhausted": snapshot.exhausted,
        "charged_bytes": snapshot.signal.charged.map(ByteSize::get),
        "usage_bytes": snapshot.signal.usage.map(ByteSize::get),
        "oom_kills": snapshot.oom_kills,
        "events": snapshot.events.map(|events| json!({
            "own": counts(events.own),
            "above": counts(events.above),
        })),
        "psi": snapshot.psi.map(|psi| json!({
            "some": stall(psi.some),
            "full": stall(psi.full),
        })),
        "cgroup": snapshot.cgroup.as_ref().map(|folder| folder.display().to_string()),
        "bounds": snapshot.bounds.iter().map(bound).collect::<Vec<_>>(),
        "limit_is_stale": snapshot.signal.limit_is_stale,
        "limit_bytes": limit(snapshot.signal.limit.bytes),
        "limit_source": snapshot.signal.limit.source.name(),
        "budget": budget(&snapshot.host),
    })
}

fn bound(bound: &LimitBound) -> Value {
    json!({
        "source": bound.source.name(),
        "name": bound.name,
        "limit_bytes": bound.limit.map(ByteSize::get),
        "used_bytes": bound.used.map(ByteSize::get),
        "scope": bound.scope.name(),
        "freshness": bound.freshness.name(),
    })
}

fn finding(finding: &Finding) -> Value {
    json!({ "about": finding.about, "is_problem": finding.is_problem, "text": finding.text })
}

fn part_of_memory(part: &memory::MemoryPart) -> Value {
    json!({ "kind": part.kind.name(), "name": part.name, "bytes": part.bytes.get() })
}

/// Returns counts under the kernel's names; null if not reported.
fn counts(counts: EventCounts) -> Value {
    counts.by_name().map(|(name, count)| (name.to_owned(), json!(count))).into_iter().collect()
}

fn stall(stall: Stall) -> Value {
    json!({ "avg10": stall.avg10, "total_seconds": stall.total.as_secs_f64() })
}

fn heap_arena((name, arena): &(String, HostArenaStats)) -> Value {
    json!({
        "name": name,
        "live_bytes": arena.live.get(),
        "retained_bytes": arena.retained().get(),
    })
}

fn resource(stats: &ResourceStats, snapshot: &MemorySnapshot) -> Value {
    let last_used = stats.last_used.map(|at| snapshot.on_wall(at));
    let unload_in = stats.due.map(|due| due - snapshot.now);
    json!({
        "name": &*stats.name,
        "loaded": stats.loaded,
        "loading": stats.loading || stats.waiting > 0,
        "guards": stats.guards,
        "waiting": stats.waiting,
        "loads": stats.loads_ok_total,
        "failed_loads": stats.loads_failed_total,
        "refused_loads": stats.loads_refused_total,
        "unloads": UnloadReason::ALL
            .map(|reason| (reason.name().to_owned(), json!(stats.unloads.total(reason))))
            .into_iter()
            .collect::<serde_json::Map<_, _>>(),
        "cost_bytes": cost(stats.cost),
        "measured_bytes": stats.measured.map(cost),
        "recovered_bytes": cost(stats.recovered_total),
        "last_used_seconds": last_used.map(|at| at.as_secs_f64()),
        "unload_in_seconds": unload_in.map(seconds),
        "last_load_seconds": stats.load_time.as_secs_f64(),
    })
}

fn reclaimer(stats: &ReclaimerStats) -> Value {
    json!({
        "name": &*stats.name,
        "registered": stats.registered,
        "releasable_bytes": stats.releasable.get(),
        "calls": stats.calls_total,
        "released_bytes": stats.released_total.get(),
        "run_seconds": stats.time_total.as_secs_f64(),
        "panics": stats.panics_total,
    })
}

fn cost(of: Cost) -> Value {
    BUDGETS
        .iter()
        .map(|&budget| (budget.name().to_owned(), json!(part(of, budget).get())))
        .collect()
}

fn diagnostics(snapshot: &MemorySnapshot) -> Vec<String> {
    snapshot.diagnostics.iter().map(ToString::to_string).collect()
}
