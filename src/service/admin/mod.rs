//! Admin commands over HTTP: `POST /memory/purge`, `trim`, `sleep`, `wake`, `unload`, `fit` and
//! `admission`; `trim`, `sleep` and `wake` find an arena only with the feature `device`.
//! `GET /memory/profile` answers with the live heap by call stack, in the format of `pprof`. It is
//! taken on the caller's thread, which it blocks for some milliseconds. It reveals names of files
//! and addresses, so it needs the authorization of commands.
//!
//! Off unless [`Endpoints`](super::Endpoints) are created with admin commands. This module checks
//! authorization and rate; the worker executes the command ([`MemoryAdmin::run`](crate::memory::MemoryAdmin::run)). It never reads
//! a body.
//!
//! Invariants: a command is queued only for a request that passed the guard and the rate limit, and
//! each of those requests is logged; at most one profile is taken every five seconds.

mod guard;

use std::borrow::Cow;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use http::header::ALLOW;
#[cfg(feature = "profiling")]
use http::header::{CONTENT_DISPOSITION, CONTENT_TYPE};
use http::{HeaderValue, Method, Request, Response, StatusCode};
use serde_json::json;
use tracing::field::{DisplayValue, display};

use crate::clock::Clock;
use crate::heap::{Profiler, profiler};
use crate::memory::{AdminCommand, Memory, MemoryError};
use crate::rate::TokenBucket;
use crate::sync::{Mutex, lock};

use super::answer::{JSON, answer, pretty};
use super::query::{self, Query, invalid_value};
use super::rejection::Denial;

pub use guard::Peer;
pub(super) use guard::{AdminToken, check_host, is_secret};

/// The burst of commands, and the time until another one is accepted. Estimates: a person is not
/// faster.
const COMMANDS: (u32, Duration) = (10, Duration::from_secs(1));
/// The burst of logged rejections, and the time until another one is logged, so that clients cannot
/// fill the log.
const LOGGED: (u32, Duration) = (10, Duration::from_secs(1));

/// The admin commands that are accepted.
pub(super) struct Admin {
    token: Option<AdminToken>,
    clock: Arc<dyn Clock>,
    buckets: Mutex<Buckets>,
}

struct Buckets {
    commands: TokenBucket,
    profiles: TokenBucket,
    logged: TokenBucket,
    /// The rejections since the last logged one.
    unlogged: u64,
}

impl Admin {
    /// Accepts commands with this token, or without one from this machine.
    pub(super) fn new(clock: Arc<dyn Clock>, token: Option<AdminToken>) -> Self {
        let bucket = |(burst, every)| TokenBucket::new(burst, every, clock.now());
        let (commands, logged) = (bucket(COMMANDS), bucket(LOGGED));
        let profiles = bucket(PROFILES);
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
        let command = AdminCommand::NAMES.into_iter().find(|name| *name == command)?;
        if *request.method() != Method::POST {
            return Some(wrong_method(request.method(), "POST"));
        }
        let answer = self.queue(request, memory, command);
        Some(answer.unwrap_or_else(|denial| self.denied(request, &denial)))
    }

    /// Checks the authorization of a request, and the rate limit.
    fn authorize<B>(&self, request: &Request<B>) -> Result<(), Denial> {
        guard::check(request, self.token.as_ref())?;
        let taken = lock(&self.buckets).commands.take(self.clock.now());
        let detail = || format!("rate limit: {} requests at once, then one per second", COMMANDS.0);
        taken.map_err(|wait| too_many(wait, detail()))
    }

    /// Queues the command.
    fn queue<B>(
        &self,
        request: &Request<B>,
        memory: Option<&Memory>,
        name: &'static str,
    ) -> Result<Response<String>, Denial> {
        self.authorize(request)?;
        let Some(memory) = memory else {
            return Ok(ended("memory is not managed in this process").answer());
        };
        let command = read(request.uri().query(), name)?;
        let subject = command.subject().into_owned();
        let admin_task = memory.admin().run(command).map_err(|error| not_asked(&error))?;
        let peer = peer(request);
        log!(info, command = name, subject, admin_task, peer, "admin task requested");
        let told = json!({ "admin_task": admin_task, "command": name, "subject": subject });
        Ok(answer(StatusCode::ACCEPTED, JSON, pretty(&told)))
    }

    /// Logs a rejection, unless many were logged recently, and returns the answer.
    fn denied<B>(&self, request: &Request<B>, denial: &Denial) -> Response<String> {
        let unlogged = {
            let mut buckets = lock(&self.buckets);
            if buckets.logged.take(self.clock.now()).is_err() {
                buckets.unlogged += 1;
                return denial.answer();
            }
            std::mem::take(&mut buckets.unlogged)
        };
        let (path, reason) = (request.uri().path(), denial.reason);
        let peer = peer(request);
        log!(warn, path, reason, peer, unlogged, "admin request rejected");
        denial.answer()
    }
}

fn peer<B>(request: &Request<B>) -> Option<DisplayValue<SocketAddr>> {
    request.extensions().get::<Peer>().map(|peer| display(peer.0))
}

/// Returns the denial of a request above a rate limit.
fn too_many(wait: Duration, detail: String) -> Denial {
    let (status, title) = (StatusCode::TOO_MANY_REQUESTS, "too many admin requests");
    let retry_after = Some(wait.max(Duration::from_secs(1)));
    Denial { retry_after, ..Denial::new(status, title, "rate", detail) }
}

/// Parses the command of this name from the query.
fn read(query: Option<&str>, name: &str) -> Result<AdminCommand, Denial> {
    let one = |of: &'static [&str; 1]| Query::read(query, of)?.need(of[0]).map(str::to_owned);
    Ok(match name {
        "trim" => {
            let query = Query::read(query, &["arena", "keep"])?;
            let text = query.get("keep").unwrap_or("0");
            let keep = text.parse().map_err(|expected: &str| invalid_value("keep", text, expected));
            let keep = keep?;
            AdminCommand::Trim { arena: query.need("arena")?.to_owned(), keep }
        }
        "sleep" => AdminCommand::Sleep { arena: one(&["arena"])? },
        "wake" => AdminCommand::Wake { arena: one(&["arena"])? },
        "unload" => AdminCommand::Unload { resource: one(&["resource"])? },
        "fit" => fit(query)?,
        "admission" => {
            let text = one(&["mode"])?;
            let invalid = |expected: &str| invalid_value("mode", &text, expected);
            AdminCommand::Admission { mode: text.parse().map_err(invalid)? }
        }
        _ => {
            Query::read(query, &[])?;
            AdminCommand::Purge
        }
    })
}

/// Parses the command `fit`.
fn fit(query: Option<&str>) -> Result<AdminCommand, Denial> {
    let query = Query::read(query, &["limit", "within", "page_cache"])?;
    let limit = match query.need("limit")? {
        "none" => None,
        text => Some(text.parse().map_err(|expected: &str| {
            invalid_value("limit", text, format!("{expected}, or none"))
        })?),
    };
    let within = match query.get("within") {
        None => AdminCommand::FIT_WITHIN,
        Some(text) => humantime::parse_duration(text)
            .map_err(|_| invalid_value("within", text, "a duration such as 30s or 2m"))?,
    };
    let counts_page_cache = match query.get("page_cache") {
        None | Some("count") => true,
        Some("ignore") => false,
        Some(other) => return Err(invalid_value("page_cache", other, "count or ignore")),
    };
    Ok(AdminCommand::Fit { limit, within, counts_page_cache })
}

pub(super) fn wrong_method(method: &Method, allowed: &'static str) -> Response<String> {
    let status = StatusCode::METHOD_NOT_ALLOWED;
    let detail = format!("{method}: expected {allowed}");
    let mut response = Denial::new(status, "method not allowed", "method", detail).answer();
    response.headers_mut().insert(ALLOW, HeaderValue::from_static(allowed));
    response
}

/// Returns why a command was not accepted.
fn not_asked(error: &MemoryError) -> Denial {
    let text = error.to_string();
    match error {
        MemoryError::UnknownArena { .. } | MemoryError::UnknownResource { .. } => {
            Denial::new(StatusCode::NOT_FOUND, "unknown name", "unknown", text)
        }
        MemoryError::FitLimit { .. } | MemoryError::FitTime { .. } => query::invalid(text),
        MemoryError::TooManyTasks { .. } => {
            let (status, title) = (StatusCode::SERVICE_UNAVAILABLE, "too many admin tasks");
            let retry_after = Some(Duration::from_secs(1));
            Denial { retry_after, ..Denial::new(status, title, "full", text) }
        }
        _ => ended(text),
    }
}

fn ended(detail: impl Into<Cow<'static, str>>) -> Denial {
    let status = StatusCode::SERVICE_UNAVAILABLE;
    let retry_after = Some(Duration::from_secs(30));
    Denial { retry_after, ..Denial::new(status, "not available", "ended", detail) }
}

/// The burst of profiles, and the time until another one is taken. An estimate.
const PROFILES: (u32, Duration) = (1, Duration::from_secs(5));

pub(super) const PROFILE: &str = "/memory/profile";

impl Admin {
    /// Returns the profile, or the reason that there is none.
    pub(super) fn profile<B>(&self, request: &Request<B>) -> Response<Vec<u8>> {
        let refusal = if *request.method() != Method::GET {
            wrong_method(request.method(), "GET")
        } else if let Err(denial) = self.authorize(request) {
            self.denied(request, &denial)
        } else {
            let taken = self.check_profile(request).and_then(|()| self.take_profile(request));
            return taken.unwrap_or_else(|denial| denial.answer().map(String::into_bytes));
        };
        refusal.map(String::into_bytes)
    }

    fn check_profile<B>(&self, request: &Request<B>) -> Result<(), Denial> {
        Query::read(request.uri().query(), &[])?;
        let detail = match profiler() {
            Profiler::Active { .. } => {
                let taken = lock(&self.buckets).profiles.take(self.clock.now());
                let detail = || format!("rate limit: one heap profile in {:?}", PROFILES.1);
                return taken.map_err(|wait| too_many(wait, detail()));
            }
            Profiler::NotBuilt => {
                "this build has no heap profiler: expected the feature `profiling`"
            }
            _ => {
                "the heap profiler is not active: expected prof:true in jemalloc's settings when \
                 the process starts"
            }
        };
        Err(Denial::new(StatusCode::NOT_FOUND, "no heap profiler", "profiler", detail))
    }

    #[cfg(not(feature = "profiling"))]
    #[expect(clippy::unused_self, reason = "as in a build with the profiler")]
    fn take_profile<B>(&self, _: &Request<B>) -> Result<Response<Vec<u8>>, Denial> {
        // Another crate built the profiler in.
        let detail =
            "this build of lowtide cannot convert profiles: expected the feature `profiling`";
        Err(failed(StatusCode::INTERNAL_SERVER_ERROR, detail))
    }

    #[cfg(feature = "profiling")]
    fn take_profile<B>(&self, request: &Request<B>) -> Result<Response<Vec<u8>>, Denial> {
        let start = self.clock.now();
        let peer = peer(request);
        let profile = crate::heap::take_profile().map_err(|error| {
            log!(warn, peer, %error, "heap profile not sent");
            let status = match error {
                crate::heap::HostError::ProfileBusy => StatusCode::SERVICE_UNAVAILABLE,
                _ => StatusCode::INTERNAL_SERVER_ERROR,
            };
            failed(status, error.to_string())
        })?;
        let stacks = profile.stacks.len();
        let body = profile.to_pprof(self.clock.since_epoch());
        let size = crate::ByteSize::of(body.len());
        let took = crate::clock::short(self.clock.now() - start);
        log!(info, peer, stacks, %size, %took, "heap profile sent");
        let mut answer = Response::new(body);
        for (name, value) in [
            (CONTENT_TYPE, "application/octet-stream"),
            (CONTENT_DISPOSITION, "attachment; filename=\"heap.pb.gz\""),
        ] {
            answer.headers_mut().insert(name, HeaderValue::from_static(value));
        }
        Ok(answer)
    }
}

fn failed(status: StatusCode, detail: impl Into<Cow<'static, str>>) -> Denial {
    Denial::new(status, "no heap profile", "profile", detail)
}
