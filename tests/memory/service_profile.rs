//! Heap profiles: by HTTP, and in a folder as memory grows.
#![cfg(all(feature = "service", target_os = "linux"))]

use std::net::SocketAddr;
use std::sync::Arc;

use http::{Method, Request, Response};
use lowtide::Memory;
use lowtide::clock::ManualClock;
use lowtide::service::{Endpoints, Peer};
use serde_json::Value;
use test_fork::test;

fn ask(endpoints: &Endpoints, method: Method) -> Response<Vec<u8>> {
    let peer: SocketAddr = ([127, 0, 0, 1], 50_000).into();
    let request = Request::builder().method(method).uri("/memory/profile").extension(Peer(peer));
    let request = request.header("host", "localhost").header("lowtide-admin", "1");
    endpoints.answer_request(&request.body(()).expect("a request")).expect("an answer")
}

fn reason(answer: &Response<Vec<u8>>) -> (u16, Value) {
    let body: Value = serde_json::from_slice(answer.body()).expect("JSON");
    (answer.status().as_u16(), body["reason"].clone())
}

fn with_admin() -> (Endpoints, Arc<ManualClock>) {
    let clock = Arc::new(ManualClock::new());
    let memory = Memory::builder().detached().clock(clock.clone()).start().expect("it starts");
    (Endpoints::new(Some(memory)).with_local_admin(), clock)
}

#[test]
fn without_an_active_profiler_the_route_says_so() {
    let (endpoints, _clock) = with_admin();
    let answer = ask(&endpoints, Method::GET);
    assert_eq!(reason(&answer), (404, "profiler".into()));
    assert_eq!(answer.headers()["cache-control"], "no-store");
    assert_eq!(reason(&ask(&endpoints, Method::POST)), (405, "method".into()));
    let request = Request::get("/memory/profile").header("host", "localhost").body(());
    let request = request.expect("a request");
    let guarded = endpoints.answer_request(&request).expect("an answer");
    assert_eq!(reason(&guarded), (403, "header".into()));
    let plain = Endpoints::new(None);
    assert!(plain.answer_request(&request).is_none(), "no admin commands, no profile");
}

#[cfg(feature = "profiling")]
mod active {
    use std::fs;
    use std::hint::black_box;
    use std::time::Duration;

    use lowtide::heap::{AllocationProfile, Profiler, profiler, take_profile};
    use lowtide::{ByteSize, Memory};
    use test_fork::test;

    use super::*;
    use crate::support::{Tree, run_again, until};

    const ACTIVE: &[(&str, &str)] = &[("_RJEM_MALLOC_CONF", "prof:true,lg_prof_sample:19")];

    /// Returns `true` in the process that runs with the profiler.
    fn is_active() -> bool {
        matches!(profiler(), Profiler::Active { interval } if interval == ByteSize::kib(512))
    }

    #[inline(never)]
    fn held() -> Vec<Vec<u8>> {
        black_box((0..512).map(|_| vec![1; 64 << 10]).collect())
    }

    /// The test that runs again with the profiler.
    #[test]
    fn a_profile_is_answered_once_in_five_seconds() {
        if !is_active() {
            run_again(
                "service_profile::active::a_profile_is_answered_once_in_five_seconds",
                ACTIVE,
            );
            return;
        }
        let held = held();
        let profile = take_profile().expect("active");
        let most = profile.stacks.iter().map(|stack| stack.bytes).max().expect("a stack");
        // 64 samples of 512 KiB: their standard error is 4 MiB.
        assert!((16..=48).contains(&(most.get() >> 20)), "{most} of 32 MiB");
        drop(held);
        let (endpoints, clock) = with_admin();
        let answer = ask(&endpoints, Method::GET);
        assert_eq!(answer.status(), 200);
        assert_eq!(answer.headers()["content-type"], "application/octet-stream");
        assert_eq!(answer.body()[..2], [0x1f, 0x8b], "gzip");
        assert_eq!(reason(&ask(&endpoints, Method::GET)), (429, "rate".into()));
        clock.advance(Duration::from_secs(5));
        assert_eq!(ask(&endpoints, Method::GET).status(), 200);
    }

    #[test]
    fn a_growth_is_written_to_the_folder_before_the_limit() {
        if !is_active() {
            run_again(
                "service_profile::active::a_growth_is_written_to_the_folder_before_the_limit",
                ACTIVE,
            );
            return;
        }
        let (tree, folder) =
            (Tree::new(ByteSize::mib(100)), tempfile::tempdir().expect("a folder"));
        tree.hold(20);
        let builder = Memory::builder().signals(tree.open());
        let memory = builder.heap_profile_dir(folder.path()).start().expect("starts");
        let files = || {
            let entries = fs::read_dir(folder.path()).expect("the folder");
            let paths = entries.map(|entry| entry.expect("an entry").path());
            // Not those that are being written.
            paths.filter(|path| path.extension() == Some("heap".as_ref())).collect::<Vec<_>>()
        };
        let written = |cause: &str| {
            until(cause, || files().iter().any(|path| path.to_string_lossy().contains(cause)));
        };
        tree.hold(50);
        written(".growth.");
        tree.hold(95);
        written(".limit.");
        for path in files() {
            let text = fs::read_to_string(&path).expect("a file");
            AllocationProfile::parse(&text).expect("a profile");
        }
        assert!(memory.shutdown_blocking(Duration::from_secs(5)).is_clean());
    }
}
