//! Estimators that are ready, what learns, what is exempt, and when a permit is taken.
#![cfg(feature = "service")]

use std::convert::Infallible;
use std::future::{Future, pending, ready};
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use bytes::Bytes;
use http::request::{Builder, Parts};
use http::{HeaderName, HeaderValue, Request, Response, StatusCode, Version};
use http_body::{Body, Frame, SizeHint};
use http_body_util::{Empty, Full};
use lowtide::ByteSize;
use lowtide::service::{
    ContentLength, EXEMPT_BODY_MAX, Endpoints, Estimate, MemoryLayer, RequestBody, RequestPermit,
    from_header,
};
use lowtide_admission::learning::{Compared, Kind, Needs, ROUTES_MAX, Room};
use lowtide_admission::{Admission, Budget, Cost, Level, Priority};
use tower::{Layer, Service, service_fn};
use tower_test::mock;

use crate::polled::now;

const CEILING: ByteSize = ByteSize::mib(100);

type Asked = Request<Empty<Bytes>>;
type Received = Request<RequestBody<Empty<Bytes>>>;
type Answer = Response<Full<Bytes>>;

fn head(request: Builder) -> Parts {
    request.body(()).expect("a valid head").into_parts().0
}

fn asked(request: Builder) -> Asked {
    request.body(Empty::new()).expect("a valid head")
}

fn reserved(admission: &Admission) -> ByteSize {
    admission.ledger(Budget::Host).reserved()
}

fn host(estimate: &impl Estimate, request: Builder) -> ByteSize {
    let (cost, priority) = estimate.estimate(&head(request));
    assert_eq!((cost.device, priority), (ByteSize::ZERO, Priority::Normal));
    cost.host
}

#[test]
fn a_body_costs_its_length_times_the_factor_and_never_less_than_the_least() {
    let estimate = ContentLength::new(ByteSize::mib(3)).factor(2.5).least(ByteSize::kib(4));
    let post = || Request::post("/").header("content-length", 1_000_000);
    assert_eq!(host(&estimate, post()), ByteSize::new(2_500_000));
    for (length, expected) in [
        ("0", ByteSize::kib(4)),
        ("1", ByteSize::kib(4)),
        ("18446744073709551615", ByteSize::MAX),
        ("99999999999999999999999999", ByteSize::MAX),
        ("", ByteSize::mib(3)),
        ("-1", ByteSize::mib(3)),
        ("1, 1", ByteSize::mib(3)),
        ("1e3", ByteSize::mib(3)),
    ] {
        let request = Request::post("/").header("content-length", length);
        assert_eq!(host(&estimate, request), expected, "{length:?}");
    }
    let nothing = ContentLength::new(ByteSize::MAX).factor(0.0);
    assert_eq!(host(&nothing, post()), ByteSize::ZERO);
    let sized = |length: u64| Request::post("/").header("content-length", length);
    let exact = ContentLength::new(ByteSize::ZERO);
    assert_eq!(host(&exact, sized(u64::MAX)), ByteSize::MAX, "not a byte less by rounding");
}

#[test]
fn a_body_of_unknown_length_is_told_from_no_body() {
    let estimate = ContentLength::new(ByteSize::mib(3));
    let (none, unknown) = (ByteSize::ZERO, ByteSize::mib(3));
    let pieces = ("transfer-encoding", "chunked");
    for (request, expected) in [
        (Request::get("/"), none),
        (Request::post("/"), none),
        (Request::post("/").header(pieces.0, pieces.1), unknown),
        (Request::get("/").header(pieces.0, pieces.1), unknown),
        (Request::post("/").header(pieces.0, pieces.1).header("content-length", 5), unknown),
        (Request::get("/").version(Version::HTTP_2), none),
        (Request::post("/").version(Version::HTTP_2), unknown),
        (Request::delete("/").version(Version::HTTP_3), unknown),
    ] {
        let text = format!("{request:?}");
        assert_eq!(host(&estimate, request), expected, "{text}");
    }
}

#[test]
fn a_header_says_what_is_needed_and_nonsense_says_nothing() {
    let name = HeaderName::from_static("x-memory-needed");
    let estimate = from_header(name, ByteSize::mib(1));
    let with = |value: &str| Request::get("/").header("x-memory-needed", value);
    for (value, expected) in [
        ("4096", ByteSize::kib(4)),
        ("512m", ByteSize::mib(512)),
        ("0", ByteSize::ZERO),
        ("18446744073709551616", ByteSize::MAX),
        ("much", ByteSize::mib(1)),
        ("", ByteSize::mib(1)),
    ] {
        assert_eq!(host(&estimate, with(value)), expected, "{value:?}");
    }
    let two = with("1MiB").header("x-memory-needed", "3MiB").header("x-memory-needed", "x");
    assert_eq!(host(&estimate, two), ByteSize::mib(3), "the largest");
}

#[test]
fn estimates_of_nothing_and_of_everything_book_nothing_or_are_refused_as_never_fitting() {
    let admission = Admission::with_limit(CEILING);
    let answer = |bytes: ByteSize| {
        let constant = Cost::host(bytes);
        let handler = |_: Received| ready(Ok::<_, Infallible>(Answer::default()));
        let mut service = MemoryLayer::new(admission.clone(), constant).layer(service_fn(handler));
        let response = now(service.call(asked(Request::get("/")))).expect("no error");
        (response.status(), reserved(&admission))
    };
    assert_eq!(answer(ByteSize::ZERO), (StatusCode::OK, ByteSize::ZERO));
    assert_eq!(answer(CEILING), (StatusCode::OK, CEILING));
    assert_eq!(answer(ByteSize::MAX), (StatusCode::PAYLOAD_TOO_LARGE, ByteSize::ZERO));
    assert_eq!(reserved(&admission), ByteSize::ZERO);
}

/// A service of these paths that learns from a guess. Its requests hold what their header says, tell
/// the permit, and answer with what they had reserved at first.
fn serve(
    admission: &Admission,
    guess: ByteSize,
) -> impl Service<Asked, Response = Response<impl Body<Data = Bytes>>, Error = Infallible> {
    let handler = |request: Received| {
        let held = request.headers().get("held").and_then(|held| held.to_str().ok()?.parse().ok());
        let permit = request.extensions().get::<RequestPermit>().expect("put there");
        let reserved = permit.reserved().get();
        let _ = held.map(|held| permit.hold(ByteSize::new(held)));
        assert_eq!(permit.peak().map(ByteSize::get), held);
        let answer =
            Response::builder().header("reserved", reserved).body(Full::<Bytes>::default());
        ready(Ok::<_, Infallible>(answer.expect("a valid answer")))
    };
    let by_path = |head: &Parts| head.uri.path().to_owned();
    MemoryLayer::new(admission.clone(), Cost::host(guess))
        .with_route_key(by_path)
        .layer(service_fn(handler))
}

/// Returns what the next request of a path reserves.
fn next<R>(
    service: &mut impl Service<Asked, Response = Response<R>, Error = Infallible>,
    request: Builder,
) -> ByteSize {
    let answer = now(service.call(asked(request))).expect("no error");
    let reserved = answer.headers()["reserved"].to_str().expect("digits").parse();
    ByteSize::new(reserved.expect("digits"))
}

#[test]
fn a_key_learns_what_its_requests_said_to_hold_and_others_do_not() {
    let admission = Admission::with_limit(CEILING);
    let mut service = serve(&admission, ByteSize::mib(8));
    for (path, held) in [("/small", 1 << 20), ("/large", 20 << 20)] {
        for _ in 0..40 {
            next(&mut service, Request::get(path).header("held", held));
        }
        assert_eq!(next(&mut service, Request::get(path)).get(), held, "{path}");
    }
    for _ in 0..40 {
        next(&mut service, Request::get("/silent"));
    }
    let silent = next(&mut service, Request::get("/silent"));
    assert_eq!(silent, ByteSize::mib(16), "what was only reserved is no news");
    assert_eq!(reserved(&admission), ByteSize::ZERO);
    // Of a request that is rejected half-way the wish counts, or it would never be estimated.
    for _ in 0..10 {
        next(&mut service, Request::get("/wish").header("held", CEILING.get() + 1));
    }
    assert!(next(&mut service, Request::get("/wish")) > ByteSize::mib(60));
}

/// The bug: without measured requests the route was refused from then on, so that nothing could
/// teach it that its requests are small.
#[test]
fn one_request_that_wished_for_too_much_closed_its_route_for_ever() {
    let admission = Admission::with_limit(CEILING);
    let mut service = serve(&admission, ByteSize::mib(4));
    let mut status = |held: u64| {
        let request = Request::get("/").header("held", held);
        now(service.call(asked(request))).expect("no error").status()
    };
    for _ in 0..10 {
        assert_eq!(status(1 << 20), StatusCode::OK);
    }
    status(u64::MAX);
    for _ in 0..30 {
        assert_eq!(status(1 << 20), StatusCode::OK);
    }
}

#[test]
fn a_permit_that_grew_teaches_and_one_that_only_shrank_does_not() {
    let admission = Admission::with_limit(CEILING);
    for (grows, learned) in [(true, 14), (false, 8)] {
        let handler = move |request: Received| {
            let permit = request.extensions().get::<RequestPermit>().expect("put there");
            let reserved = permit.reserved();
            if grows {
                permit.grow(ByteSize::mib(6)).expect("fits");
            }
            permit.shrink(ByteSize::mib(3));
            let answer = Response::builder().header("reserved", reserved.get());
            ready(Ok::<_, Infallible>(answer.body(Full::<Bytes>::default()).expect("valid")))
        };
        let mut service = MemoryLayer::new(admission.clone(), Cost::host(ByteSize::mib(4)))
            .with_route_key(|_| ())
            .layer(service_fn(handler));
        assert_eq!(next(&mut service, Request::get("/")), ByteSize::mib(8), "twice the guess");
        assert_eq!(next(&mut service, Request::get("/")), ByteSize::mib(learned));
    }
}

/// The need of the requests of a route, with an estimate of 1 MiB.
fn need(needs: &Needs, route: u64) -> Compared {
    let kind = Kind { route: route << 32, is_declared: true, has_many_routes: false };
    needs.of(kind, ByteSize::mib(1), false)
}

#[test]
fn routes_beyond_the_bound_share_one_estimate() {
    let needs = Needs::default();
    for nth in 0..ROUTES_MAX as u64 {
        need(&needs, nth).learn(ByteSize::kib(1));
    }
    for nth in 0..10_000 {
        need(&needs, 1_000 + nth).learn(ByteSize::mib(7));
    }
    assert_eq!(need(&needs, 100_000).claim(Room::UNLIMITED), ByteSize::mib(7));
    assert_eq!(need(&needs, 0).claim(Room::UNLIMITED), ByteSize::mib(2), "too few of it");
    assert!(format!("{needs:?}").contains(&format!("known: {ROUTES_MAX}")), "{needs:?}");
}

/// The bug: each path that a client made up took a place for ever, and the routes that came later
/// shared one estimate.
#[test]
fn paths_that_taught_nothing_give_up_their_places() {
    let needs = Needs::default();
    for nth in 0..10_000 {
        need(&needs, 1_000 + nth);
    }
    for (route, held) in [(1, ByteSize::kib(16)), (2, ByteSize::mib(7))] {
        (0..8).for_each(|_| need(&needs, route).learn(held));
    }
    assert_eq!(need(&needs, 1).claim(Room::UNLIMITED), ByteSize::kib(16));
    assert_eq!(need(&needs, 2).claim(Room::UNLIMITED), ByteSize::mib(7));
}

/// The bug: a client that had been answered at as many paths as have a place kept all of them for
/// ever, and no other route was told apart from then on.
#[test]
fn paths_that_are_not_used_any_more_kept_their_places() {
    let needs = Needs::default();
    for nth in 0..ROUTES_MAX as u64 {
        need(&needs, 1_000 + nth).learn(ByteSize::kib(1));
    }
    for (route, held) in [(1, ByteSize::kib(16)), (2, ByteSize::mib(7))] {
        (0..20_000).for_each(|_| need(&needs, route).learn(held));
    }
    assert_eq!(need(&needs, 1).claim(Room::UNLIMITED), ByteSize::kib(16));
    assert_eq!(need(&needs, 2).claim(Room::UNLIMITED), ByteSize::mib(7));
}

#[test]
fn exempt_paths_are_answered_while_all_else_is_shed_and_nothing_like_them_is() {
    let admission = Admission::with_limit(CEILING);
    let most = Cost::host(CEILING);
    let handler = |_: Received| ready(Ok::<_, Infallible>(Answer::default()));
    let layer = MemoryLayer::new(admission.clone(), most).exempt_paths(Endpoints::PATHS);
    let mut service = layer.layer(service_fn(handler));
    let _held = admission.try_admit(Cost::host(CEILING)).expect("fits");
    admission.set_level(Level::Critical);
    for closed in [false, true] {
        if closed {
            admission.close();
        }
        for (method, path, served) in [
            ("GET", "/readyz", true),
            ("HEAD", "/healthz", true),
            ("GET", "/metrics?name[]=up", true),
            ("GET", "/memory", true),
            ("POST", "/metrics", true),
            ("GET", "/livez", true),
            ("GET", "/readyz/", false),
            ("GET", "/Readyz", false),
            ("GET", "/readyz/../upload", false),
            ("GET", "/%72eadyz", false),
            ("GET", "//readyz", false),
            ("GET", "/upload?to=/readyz", false),
        ] {
            let request = asked(Request::builder().method(method).uri(path));
            let status = now(service.call(request)).expect("no error").status();
            assert_eq!(status == StatusCode::OK, served, "{method} {path}: {status}");
        }
    }
    assert_eq!(reserved(&admission), CEILING, "they book nothing");
}

/// A body of which these many bytes are announced, or of unknown length.
struct Announced(Option<u64>);

impl Body for Announced {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        Poll::Pending
    }

    fn is_end_stream(&self) -> bool {
        self.0 == Some(0)
    }

    fn size_hint(&self) -> SizeHint {
        self.0.map_or_else(SizeHint::default, SizeHint::with_exact)
    }
}

#[test]
fn bodies_sent_to_an_exempt_path_take_no_more_than_a_sixteenth_of_the_ceiling() {
    let most = 20 * EXEMPT_BODY_MAX.get();
    let admission = Admission::with_limit(ByteSize::new(16 * most));
    let endless = |_: Request<RequestBody<Announced>>| pending::<Result<Answer, Infallible>>();
    let estimate = Cost::host(ByteSize::MAX); // never fits
    let mut service = MemoryLayer::new(admission.clone(), estimate)
        .exempt_paths(["/verb"])
        .layer(service_fn(endless));
    let mut call = |announced| {
        let request = Request::post("/verb").version(Version::HTTP_2).body(Announced(announced));
        let mut future = Box::pin(service.call(request.expect("a valid head")));
        let polled = future.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        polled.is_pending().then_some(future)
    };
    let longest = EXEMPT_BODY_MAX.get();
    assert!(call(Some(longest + 1)).is_none(), "too long");
    let mut held = vec![call(Some(longest)).expect("short enough")];
    held.extend((1..20).map(|nth| call(None).unwrap_or_else(|| panic!("{nth}"))));
    assert_eq!(reserved(&admission), ByteSize::new(most));
    assert!(call(None).is_none() && call(Some(1)).is_none(), "they hold enough");
    assert!(call(Some(0)).is_some(), "one without a body takes nothing");
    held.pop();
    assert!(call(None).is_some(), "what has ended holds nothing");
    drop(held);
    assert_eq!(reserved(&admission), ByteSize::ZERO);
}

/// The bug: the share grew by what was asked for, and fell by what 64 bits hold.
#[test]
fn an_exempt_request_that_grew_without_end_kept_its_share_for_ever() {
    let admission = Admission::with_limit(ByteSize::new(16 * EXEMPT_BODY_MAX.get()));
    let handler = |request: Request<RequestBody<Announced>>| {
        let permit = request.extensions().get::<RequestPermit>().expect("put there");
        permit.grow(ByteSize::MAX).expect("an exempt permit always grows");
        ready(Ok::<_, Infallible>(Answer::default()))
    };
    let estimate = Cost::host(ByteSize::MAX); // never fits
    let mut service = MemoryLayer::new(admission.clone(), estimate)
        .exempt_paths(["/verb"])
        .layer(service_fn(handler));
    for _ in 0..3 {
        let request = Request::post("/verb").version(Version::HTTP_2).body(Announced(None));
        let answer = now(service.call(request.expect("a valid head"))).expect("no error");
        assert_eq!(answer.status(), StatusCode::OK);
    }
    assert_eq!(reserved(&admission), ByteSize::ZERO);
}

#[test]
fn calls_to_oneself_pass_by_a_secret_and_by_nothing_less() {
    const SECRET: &str = "8f14e45f-ceea-467f-a0e6-b1e5d2f3a901";
    let admission = Admission::with_limit(CEILING);
    let name = HeaderName::from_static("x-own-call");
    let handler = |request: Received| {
        let permit = request.extensions().get::<RequestPermit>().expect("put there");
        assert!(permit.grow(ByteSize::gib(1)).is_ok(), "it grows beyond the ceiling");
        ready(Ok::<_, Infallible>(Answer::default()))
    };
    let mut service = MemoryLayer::new(admission.clone(), Cost::ZERO)
        .exempt(|head| head.uri.path() == "/first")
        .exempt_header(name, &HeaderValue::from_static(SECRET))
        .layer(service_fn(handler));
    admission.close();
    let mut status = |value: Option<&str>, path: &str| {
        let request = Request::get(path);
        let request = match value {
            Some(value) => request.header("x-own-call", value),
            None => request,
        };
        now(service.call(asked(request))).expect("no error").status()
    };
    assert_eq!(status(Some(SECRET), "/"), StatusCode::OK);
    assert_eq!(status(None, "/first"), StatusCode::OK, "what was exempt before stays so");
    let upper = SECRET.to_uppercase();
    for wrong in [None, Some(""), Some("1"), Some(&SECRET[..35]), Some(&upper)] {
        assert_eq!(status(wrong, "/"), StatusCode::SERVICE_UNAVAILABLE, "{wrong:?}");
    }
    assert_eq!(reserved(&admission), ByteSize::ZERO);
}

#[test]
#[should_panic(expected = "secret of 0 bytes: expected 16 or more")]
fn a_secret_that_everybody_guesses_is_refused() {
    let layer = MemoryLayer::new(Admission::new(), Cost::ZERO);
    let _ =
        layer.exempt_header(HeaderName::from_static("x-own-call"), &HeaderValue::from_static(""));
}

/// The bug elsewhere: permits taken in `poll_ready` are held by idle connections, and by callers
/// that wait for their turn and never come.
#[test]
fn being_ready_takes_no_permit_however_long_it_waits() {
    let admission = Admission::with_limit(CEILING);
    let (inner, mut handle) = mock::pair::<Received, Answer>();
    let mut service = MemoryLayer::new(admission.clone(), Cost::host(CEILING)).layer(inner);
    let mut context = Context::from_waker(Waker::noop());
    handle.allow(0);
    for _ in 0..100 {
        assert!(service.poll_ready(&mut context).is_pending(), "as the inner service says");
        assert_eq!(reserved(&admission), ByteSize::ZERO);
    }
    handle.allow(1);
    assert!(matches!(service.poll_ready(&mut context), Poll::Ready(Ok(()))));
    assert!(matches!(service.poll_ready(&mut context), Poll::Ready(Ok(()))), "asked twice");
    assert_eq!((reserved(&admission), admission.stats().admitted_total), (ByteSize::ZERO, 0));
    let mut future = Box::pin(service.call(asked(Request::get("/"))));
    assert_eq!((reserved(&admission), admission.stats().admitted_total), (CEILING, 1));
    assert!(future.as_mut().poll(&mut context).is_pending());
    let (_, respond) = now(handle.next_request()).expect("it was passed on");
    respond.send_error("the inner error");
    let Poll::Ready(Err(error)) = future.as_mut().poll(&mut context) else { panic!("an error") };
    assert_eq!(error.to_string(), "the inner error", "of the inner service's own type");
    drop(future);
    assert_eq!(reserved(&admission), ByteSize::ZERO);
}
