//! Admin commands over HTTP: `POST /memory/purge`, `trim`, `sleep`, `wake`, `unload` and `fit`; in
//! a build without the feature `device` only `purge`, `unload` and `fit`. `GET /memory/profile`
//! answers with a heap profile (`profile`).
//!
//! Off unless [`Endpoints::with_admin`](super::Endpoints::with_admin) is called. This module checks
//! authorization and rate; the worker executes the command ([`MemoryAdmin::run`](crate::memory::MemoryAdmin::run)). It never reads
//! a body.
//!
//! Invariant: a command is queued only for a request that passed the guard and the rate limit, and
//! each of those requests is logged.

mod guard;
mod profile;

use std::sync::Arc;
use std::time::Duration;

use http::header::{ALLOW, WWW_AUTHENTICATE};
use http::{HeaderValue, Method, Request, Response, StatusCode};
use serde_json::json;

use crate::bytes::ParseByteSizeError;
use crate::clock::{Clock, Moment};
use crate::config::ConfigError;
use crate::memory::{AdminCommand, AdminError, Memory};
use crate::rate::TokenBucket;
use crate::sync::{Mutex, lock};

use super::answer::{JSON, answer, pretty};
use super::query::{Query, QueryError};
use super::rejection::{problem, with_retry_after};

pub(super) use profile::PROFILE;

pub use guard::Peer;
pub(super) use guard::is_secret;

use guard::{AdminToken, Denial, TOKEN_REASON};

/// The burst of commands, and the time until another one is accepted. Estimates: a person is not
/// faster.
const COMMANDS: (u32, Duration) = (10, Duration::from_secs(1));
/// The burst of logged rejections, and the time until another one is logged, so that clients cannot
/// fill the log.
const LOGGED: (u32, Duration) = (10, Duration::from_secs(1));

/// Settings of the admin commands.
///
/// ```
/// use std::sync::Arc;
/// use http::{Request, StatusCode};
/// use lowtide::Memory;
/// use lowtide::clock::SystemClock;
/// use lowtide::service::{Admin, Endpoints, Peer};
///
/// let memory = Memory::builder().start()?;
/// let admin = Admin::loopback(Arc::new(SystemClock::new()));
/// let endpoints = Endpoints::new(Some(memory)).with_admin(admin);
/// let request = Request::post("/memory/purge")
///     .header("host", "localhost:8080")
///     .header("lowtide-admin", "1")
///     .extension(Peer(([127, 0, 0, 1], 50_000).into()))
///     .body(())?;
/// let answer = endpoints.answer_request(&request).expect("one of its paths");
/// assert_eq!(answer.status(), StatusCode::ACCEPTED);
/// # Ok::<(), lowtide::BoxError>(())
/// ```
#[derive(Debug)]
pub struct Admin {
    token: Option<AdminToken>,
    clock: Arc<dyn Clock>,
    buckets: Mutex<Buckets>,
}

#[derive(Debug)]
struct Buckets {
    commands: TokenBucket,
    profiles: TokenBucket,
    logged: TokenBucket,
    /// The rejections since the last logged one.
    unlogged: u64,
}

impl Admin {
    /// Accepts commands only from this machine, without a token: requests whose [`Peer`] is a
    /// loopback address, whose host is `localhost` or a loopback address, and that did not pass a
    /// proxy.
    ///
    /// Every user of this machine who can open a connection can send commands.
    #[must_use]
    pub fn loopback(clock: Arc<dyn Clock>) -> Self {
        Self::new(clock, None)
    }

    /// Accepts commands with the token, from any address including this machine: `Authorization:
    /// Bearer` and the token, for example from `openssl rand -hex 32`. Use TLS in front of the
    /// service; otherwise the token can be read on the network.
    ///
    /// ```
    /// use std::sync::Arc;
    /// use lowtide::clock::SystemClock;
    /// use lowtide::service::Admin;
    ///
    /// let error = Admin::with_token(Arc::new(SystemClock::new()), "hunter2").unwrap_err();
    /// assert_eq!(error.to_string(), "admin token of 7 bytes: expected 32 to 256 bytes");
    /// ```
    ///
    /// # Errors
    /// [`ConfigError`] unless the token is 32 to 256 printable ASCII characters without spaces. It
    /// does not contain the token.
    pub fn with_token(clock: Arc<dyn Clock>, token: &str) -> Result<Self, ConfigError> {
        Ok(Self::new(clock, Some(AdminToken::new(token)?)))
    }

    fn new(clock: Arc<dyn Clock>, token: Option<AdminToken>) -> Self {
        let bucket = |(burst, every)| TokenBucket::new(burst, every, clock.now());
        let (commands, logged) = (bucket(COMMANDS), bucket(LOGGED));
        let profiles = bucket(profile::PROFILES);
        let buckets = Mutex::new(Buckets { commands, profiles, logged, unlogged: 0 });
        Self { token, buckets, clock }
    }

    pub(super) const fn needs_token(&self) -> bool {
        self.token.is_some()
    }

    /// Returns the answer to a request for one of these paths; `None` for others.
    pub(super) fn answer<B>(
        &self,
        request: &Request<B>,
        memory: Option<&Memory>,
    ) -> Option<Response<String>> {
        let path = request.uri().path();
        let command = path.strip_prefix("/memory/")?;
        let command = AdminCommand::NAMES.iter().copied().find(|name| *name == command)?;
        if *request.method() != Method::POST {
            return Some(wrong_method(request.method(), "POST"));
        }
        if let Some(refusal) = self.refused(request, path) {
            return Some(refusal);
        }
        Some(match memory {
            None => ended("memory is not managed in this process"),
            Some(memory) => self.ask(request, memory, command),
        })
    }

    /// Returns the answer to a request that is rejected; `None` if it is accepted.
    fn refused<B>(&self, request: &Request<B>, path: &str) -> Option<Response<String>> {
        let now = self.clock.now();
        let peer = request.extensions().get::<Peer>().map(|peer| peer.0);
        if let Err(refused) = guard::check(request, self.token.as_ref()) {
            self.log(now, path, refused.reason, peer);
            return Some(refusal(&refused));
        }
        let taken = lock(&self.buckets).commands.take(now);
        let wait = taken.err()?;
        self.log(now, path, "rate", peer);
        let detail = format!("rate limit: {} requests at once, then one per second", COMMANDS.0);
        Some(too_many(wait, &detail))
    }

    /// Queues the command, and logs that or the rejection.
    fn ask<B>(
        &self,
        request: &Request<B>,
        memory: &Memory,
        name: &'static str,
    ) -> Response<String> {
        let peer = request.extensions().get::<Peer>().map(|peer| peer.0);
        let refused = |reason| self.log(self.clock.now(), request.uri().path(), reason, peer);
        let command = match read(request.uri().query(), name) {
            Ok(command) => command,
            Err(error) => {
                refused("query");
                return wrong_query(&error);
            }
        };
        let subject = command.subject().into_owned();
        match memory.admin().run(command) {
            Ok(admin_task) => {
                log!(
                    info,
                    target: "lowtide",
                    command = name,
                    subject,
                    admin_task,
                    peer = peer.map(tracing::field::display),
                    "admin task requested"
                );
                let told = json!({ "admin_task": admin_task, "command": name, "subject": subject });
                answer(StatusCode::ACCEPTED, JSON, pretty(&told))
            }
            Err(error) => {
                let (reason, answer) = not_asked(&error);
                refused(reason);
                answer
            }
        }
    }

    /// Logs a rejection, unless many were logged recently.
    fn log(&self, now: Moment, path: &str, reason: &str, peer: Option<std::net::SocketAddr>) {
        let unlogged = {
            let mut buckets = lock(&self.buckets);
            if buckets.logged.take(now).is_err() {
                buckets.unlogged += 1;
                return;
            }
            std::mem::take(&mut buckets.unlogged)
        };
        let peer = peer.map(tracing::field::display);
        log!(warn, target: "lowtide", path, reason, peer, unlogged, "admin request rejected");
    }
}

/// Returns the answer to a request above a rate limit.
fn too_many(wait: Duration, detail: &str) -> Response<String> {
    let (status, title) = (StatusCode::TOO_MANY_REQUESTS, "too many admin requests");
    let wait = wait.max(Duration::from_secs(1));
    with_retry_after(problem(status, title, "rate", detail), Some(wait))
}

/// Parses the command of this name from the query.
fn read(query: Option<&str>, name: &str) -> Result<AdminCommand, QueryError> {
    let arena = |query: Option<&str>| {
        let query = Query::read(query, &["arena"], "arena")?;
        query.need("arena").map(str::to_owned)
    };
    Ok(match name {
        "trim" => {
            let query = Query::read(query, &["arena", "keep"], "arena or keep")?;
            let text = query.get("keep").unwrap_or("0");
            let keep = text.parse().map_err(|error: ParseByteSizeError| {
                QueryError::value("keep", text, error.expected)
            })?;
            AdminCommand::Trim { arena: query.need("arena")?.to_owned(), keep }
        }
        "sleep" => AdminCommand::Sleep { arena: arena(query)? },
        "wake" => AdminCommand::Wake { arena: arena(query)? },
        "unload" => {
            let query = Query::read(query, &["resource"], "resource")?;
            AdminCommand::Unload { resource: query.need("resource")?.to_owned() }
        }
        "fit" => fit(query)?,
        _ => {
            Query::read(query, &[], "no query")?;
            AdminCommand::Purge
        }
    })
}

/// Parses the command `fit`.
fn fit(query: Option<&str>) -> Result<AdminCommand, QueryError> {
    let names = &["limit", "within", "page_cache"];
    let query = Query::read(query, names, "limit, within or page_cache")?;
    let limit = match query.need("limit")? {
        "none" => None,
        text => Some(text.parse().map_err(|error: ParseByteSizeError| {
            QueryError::value("limit", text, format!("{}, or none", error.expected))
        })?),
    };
    let within = match query.get("within") {
        None => AdminCommand::FIT_WITHIN,
        Some(text) => humantime::parse_duration(text)
            .map_err(|_| QueryError::value("within", text, "a duration such as 30s or 2m"))?,
    };
    let counts_page_cache = match query.get("page_cache") {
        None | Some("count") => true,
        Some("ignore") => false,
        Some(other) => return Err(QueryError::value("page_cache", other, "count or ignore")),
    };
    Ok(AdminCommand::Fit { limit, within, counts_page_cache })
}

fn wrong_query(error: &QueryError) -> Response<String> {
    problem(StatusCode::BAD_REQUEST, "invalid query", "query", &error.to_string())
}

pub(super) fn wrong_method(method: &Method, allowed: &'static str) -> Response<String> {
    let status = StatusCode::METHOD_NOT_ALLOWED;
    let detail = format!("{method}: expected {allowed}");
    let mut response = problem(status, "method not allowed", "method", &detail);
    response.headers_mut().insert(ALLOW, HeaderValue::from_static(allowed));
    response
}

/// Returns the answer to a request for figures with an unknown host; `None` for any other request.
pub(super) fn host_refusal<B>(request: &Request<B>, hosts: &[String]) -> Option<Response<String>> {
    guard::check_host(request, hosts).err().as_ref().map(refusal)
}

fn refusal(Denial { reason, detail }: &Denial) -> Response<String> {
    if *reason != TOKEN_REASON {
        return problem(StatusCode::FORBIDDEN, "not allowed", reason, detail);
    }
    let mut response = problem(StatusCode::UNAUTHORIZED, "token required", reason, detail);
    let challenge = HeaderValue::from_static("Bearer realm=\"lowtide\"");
    response.headers_mut().insert(WWW_AUTHENTICATE, challenge);
    response
}

/// Returns the reason for which a command was not accepted, as a word and as an answer.
fn not_asked(error: &AdminError) -> (&'static str, Response<String>) {
    let (status, title, reason, retry_after) = match error {
        AdminError::UnknownArena { .. } | AdminError::UnknownResource { .. } => {
            (StatusCode::NOT_FOUND, "unknown name", "unknown", None)
        }
        AdminError::FitLimit { .. } | AdminError::FitTime { .. } => {
            (StatusCode::BAD_REQUEST, "invalid query", "query", None)
        }
        AdminError::Full { .. } => {
            let wait = Some(Duration::from_secs(1));
            (StatusCode::SERVICE_UNAVAILABLE, "too many admin tasks", "full", wait)
        }
        _ => return ("ended", ended(&error.to_string())),
    };
    let answer = problem(status, title, reason, &error.to_string());
    (reason, with_retry_after(answer, retry_after))
}

fn ended(detail: &str) -> Response<String> {
    let status = StatusCode::SERVICE_UNAVAILABLE;
    let answer = problem(status, "not available", "ended", detail);
    with_retry_after(answer, Some(Duration::from_secs(30)))
}
