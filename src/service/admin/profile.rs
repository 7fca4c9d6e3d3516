//! `GET /memory/profile`: the live heap by call stack, in the format of `pprof`.
//!
//! It is taken on the caller's thread, which it blocks for some milliseconds. It reveals names of
//! files and addresses, so it needs the authorization of admin commands.
//!
//! Invariant: at most one profile is taken every five seconds.

use std::time::Duration;

#[cfg(feature = "profiling")]
use http::HeaderValue;
#[cfg(feature = "profiling")]
use http::header::{CONTENT_DISPOSITION, CONTENT_TYPE};
use http::{Method, Request, Response, StatusCode};

use crate::heap::{Profiler, profiler};
use crate::sync::lock;

use super::super::rejection::problem;
use super::{Admin, Query, too_many, wrong_method, wrong_query};

/// The burst of profiles, and the time until another one is taken. An estimate.
pub(super) const PROFILES: (u32, Duration) = (1, Duration::from_secs(5));

pub(in super::super) const PROFILE: &str = "/memory/profile";

impl Admin {
    /// Returns the profile, or the reason that there is none.
    pub(in super::super) fn profile<B>(&self, request: &Request<B>) -> Response<Vec<u8>> {
        let refusal = self.profile_refused(request);
        refusal.map_or_else(|| self.take_profile(request), |answer| answer.map(String::into_bytes))
    }

    fn profile_refused<B>(&self, request: &Request<B>) -> Option<Response<String>> {
        if *request.method() != Method::GET {
            return Some(wrong_method(request.method(), "GET"));
        }
        if let Some(refusal) = self.refused(request, PROFILE) {
            return Some(refusal);
        }
        if let Err(error) = Query::read(request.uri().query(), &[], "no query") {
            return Some(wrong_query(&error));
        }
        let detail = match profiler() {
            Profiler::Active { .. } => {
                let taken = lock(&self.buckets).profiles.take(self.clock.now());
                let detail = format!("rate limit: one heap profile in {:?}", PROFILES.1);
                return taken.err().map(|wait| too_many(wait, &detail));
            }
            Profiler::NotBuilt => {
                "this build has no heap profiler: expected the feature `profiling`"
            }
            _ => {
                "the heap profiler is not active: expected prof:true in jemalloc's settings when \
                 the process starts"
            }
        };
        let status = StatusCode::NOT_FOUND;
        Some(problem(status, "no heap profiler", "profiler", detail))
    }

    #[cfg(not(feature = "profiling"))]
    #[expect(clippy::unused_self, reason = "as in a build with the profiler")]
    fn take_profile<B>(&self, _: &Request<B>) -> Response<Vec<u8>> {
        // Another crate built the profiler in.
        failed("this build of lowtide cannot convert profiles: expected the feature `profiling`")
    }

    #[cfg(feature = "profiling")]
    fn take_profile<B>(&self, request: &Request<B>) -> Response<Vec<u8>> {
        let peer = request.extensions().get::<super::Peer>().map(|peer| peer.0);
        let start = self.clock.now();
        let profile = match crate::heap::take_profile() {
            Ok(profile) => profile,
            Err(error) => {
                let peer = peer.map(tracing::field::display);
                log!(warn, target: "lowtide", peer, %error, "heap profile not sent");
                let mut answer = failed(&error.to_string());
                if matches!(error, crate::heap::HostError::ProfileBusy) {
                    *answer.status_mut() = StatusCode::SERVICE_UNAVAILABLE;
                }
                return answer;
            }
        };
        let stacks = profile.stacks.len();
        let body = profile.to_pprof(self.clock.since_epoch());
        let took = self.clock.now() - start;
        log!(
            info,
            target: "lowtide",
            peer = peer.map(tracing::field::display),
            stacks,
            size = %crate::ByteSize::of(body.len()),
            took = %crate::clock::short(took),
            "heap profile sent"
        );
        let mut answer = Response::new(body);
        for (name, value) in [
            (CONTENT_TYPE, "application/octet-stream"),
            (CONTENT_DISPOSITION, "attachment; filename=\"heap.pb.gz\""),
        ] {
            answer.headers_mut().insert(name, HeaderValue::from_static(value));
        }
        answer
    }
}

fn failed(detail: &str) -> Response<Vec<u8>> {
    let status = StatusCode::INTERNAL_SERVER_ERROR;
    let answer = problem(status, "no heap profile", "profile", detail);
    answer.map(String::into_bytes)
}
