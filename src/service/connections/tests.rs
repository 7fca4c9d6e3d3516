//! Which connection is closed, and when, by a clock that the test moves.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::convert::Infallible;
use std::future::{Future as _, Pending, Ready, pending, ready};
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::Context;

use bytes::Bytes;
use http::header::CONNECTION;
use http::{Request, Response, Version};
use http_body::{Body, Frame};
use tower_service::Service as _;

use super::*;
use crate::clock::ManualClock;
use lowtide_admission::{Cost, Permit};

const SECOND: Duration = Duration::from_secs(1);

/// A body whose polls return what the test put there, and wait otherwise.
#[derive(Clone, Debug, Default)]
struct Scripted {
    parts: Rc<RefCell<VecDeque<Bytes>>>,
    /// It ends after the parts that are there.
    ends: bool,
    /// Its end is not known before, as of a chunked body.
    is_chunked: bool,
}

impl Scripted {
    fn arrive(&self) {
        self.parts.borrow_mut().push_back(Bytes::from_static(b"part"));
    }

    fn whole(parts: usize, is_chunked: bool) -> Self {
        let whole = Self { ends: true, is_chunked, ..Self::default() };
        (0..parts).for_each(|_| whole.arrive());
        whole
    }
}

impl Body for Scripted {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        match self.parts.borrow_mut().pop_front() {
            Some(part) => Poll::Ready(Some(Ok(Frame::data(part)))),
            None if self.ends => Poll::Ready(None),
            None => Poll::Pending,
        }
    }

    fn is_end_stream(&self) -> bool {
        self.ends && !self.is_chunked && self.parts.borrow().is_empty()
    }
}

/// Answers each request at once with a body of the test's.
#[derive(Clone, Debug, Default)]
struct Answers(Scripted);

impl tower_service::Service<Request<ConnectionBody<Scripted>>> for Answers {
    type Response = Response<Scripted>;
    type Error = Infallible;
    type Future = Ready<Result<Response<Scripted>, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Request<ConnectionBody<Scripted>>) -> Self::Future {
        ready(Ok(Response::new(self.0.clone())))
    }
}

/// Keeps the body of a request, and answers never.
#[derive(Clone, Debug, Default)]
struct Keeps(Rc<RefCell<Option<ConnectionBody<Scripted>>>>);

impl tower_service::Service<Request<ConnectionBody<Scripted>>> for Keeps {
    type Response = Response<Scripted>;
    type Error = Infallible;
    type Future = Pending<Result<Response<Scripted>, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<ConnectionBody<Scripted>>) -> Self::Future {
        *self.0.borrow_mut() = Some(request.into_body());
        pending()
    }
}

/// Starts a request and returns its response, which the client has not taken yet.
fn answer(connection: &Connection, version: Version) -> Response<ConnectionBody<Scripted>> {
    let mut request = Request::new(Scripted::default());
    *request.version_mut() = version;
    let mut future = pin!(connection.service(Answers::default()).call(request));
    match future.as_mut().poll(&mut noop()) {
        Poll::Ready(Ok(response)) => response,
        Poll::Pending => unreachable!("it answers at once"),
    }
}

fn noop() -> Context<'static> {
    Context::from_waker(Waker::noop())
}

fn has_frame(body: &mut (impl Body + Unpin)) -> bool {
    Pin::new(body).poll_frame(&mut noop()).is_ready()
}

fn connections(most: usize) -> (Connections, ManualClock, Admission) {
    let (clock, admission) = (ManualClock::new(), Admission::with_limit(ByteSize::mib(64)));
    let connections = Connections::new(&admission, most).clock(Arc::new(clock.clone()));
    (connections, clock, admission)
}

fn opened(connections: &Connections) -> Connection {
    connections.open().expect("a place")
}

fn is_closed(connection: &Connection) -> bool {
    pin!(connection.closed()).poll(&mut noop()).is_ready()
}

fn closed<const N: usize>(all: &[Connection; N]) -> [bool; N] {
    std::array::from_fn(|at| is_closed(&all[at]))
}

/// Fills the memory, so that a request is rejected.
fn fill(admission: &Admission) -> Permit {
    let held = admission.try_admit(Cost::host(ByteSize::mib(60))).expect("fits");
    assert!(admission.try_admit(Cost::host(ByteSize::mib(60))).is_err());
    held
}

#[test]
fn a_place_is_taken_until_its_connection_is_dropped() {
    let (connections, _, _) = connections(2);
    let [first, second] = [opened(&connections), opened(&connections)];
    assert!(connections.open().is_none(), "no place is free, and none may be closed yet");
    drop(first);
    let third = opened(&connections);
    assert_eq!(closed(&[second, third]), [false, false]);
}

#[test]
fn the_connection_without_a_byte_for_longest_is_closed_for_another() {
    let (connections, clock, _) = connections(3);
    let all = [opened(&connections), opened(&connections), opened(&connections)];
    clock.advance(SECOND / 2);
    all[0].progress();
    all[2].progress();
    clock.advance(SECOND / 2);
    let another = opened(&connections);
    assert_eq!(closed(&all), [false, true, false]);
    assert!(!is_closed(&another));
    let [_, second, _] = all;
    drop((second, another));
    let _last = opened(&connections);
    assert!(connections.open().is_none(), "the place of the closed one was not left twice");
}

#[test]
fn none_is_closed_that_moved_a_byte_within_the_grace_period() {
    let (connections, clock, _) = connections(2);
    let all = [opened(&connections), opened(&connections)];
    clock.advance(SECOND);
    all.iter().for_each(Connection::progress);
    clock.advance(SECOND - Duration::from_millis(1));
    assert!(connections.open().is_none());
    assert_eq!(closed(&all), [false, false]);
}

/// The bug: attackers that connect again at once renewed all places within milliseconds, and for
/// the rest of each grace period no honest client got one.
#[test]
fn idle_connections_are_closed_one_after_the_other() {
    let (connections, clock, _) = connections(8);
    let mut all = VecDeque::new();
    for _ in 0..8 {
        all.push_back(opened(&connections));
        clock.advance(Duration::from_millis(1));
    }
    clock.advance(SECOND);
    for _ in 0..16 {
        all.push_back(opened(&connections));
        assert!(connections.open().is_none(), "the next one has its turn later");
        assert!(all.pop_front().is_some_and(|oldest| is_closed(&oldest)));
        clock.advance(SECOND / 2);
    }
}

/// The bug: once the server had worked on all of at most three places for longer than the grace
/// period, no connection was ever closed for another again, and idle ones kept their places.
#[test]
fn an_idle_connection_is_closed_for_another_also_after_all_were_busy() {
    for most in 1..=4 {
        let (connections, clock, _) = connections(most);
        let all: Vec<_> = (0..most).map(|_| opened(&connections)).collect();
        let work: Vec<_> = all
            .iter()
            .map(|it| it.service(Keeps::default()).call(Request::new(Scripted::default())))
            .collect();
        clock.advance(2 * SECOND);
        assert_eq!(connections.open().is_some(), most > 3, "{most}: all are busy");
        drop(work);
        clock.advance(2 * SECOND);
        assert!(connections.open().is_some(), "{most}: all are idle");
    }
}

#[test]
fn a_connection_on_which_the_server_works_is_kept_longest() {
    let (connections, clock, _) = connections(3);
    let all = [opened(&connections), opened(&connections), opened(&connections)];
    // The first one's handler works; the second one's response is not taken.
    let _works = all[0].service(Keeps::default()).call(Request::new(Scripted::default()));
    let _unread = answer(&all[1], Version::HTTP_11);
    clock.advance(SECOND / 2);
    all[1].progress();
    clock.advance(SECOND / 2);
    all[2].progress();
    let mut newer = Vec::new();
    for expected in [[false, true, false], [false, true, true]] {
        clock.advance(2 * SECOND);
        newer.iter().for_each(Connection::progress);
        newer.push(opened(&connections));
        assert_eq!(closed(&all), expected);
    }
    clock.advance(2 * SECOND);
    newer.iter().for_each(Connection::progress);
    assert!(connections.open().is_none());
}

/// A flood of rejected clients that do not close their connections takes no place of others.
#[test]
fn connections_that_linger_are_closed_first_the_oldest_before_the_others() {
    let (connections, clock, _) = connections(4);
    let all = [(); 4].map(|()| opened(&connections));
    for (at, connection) in [(3, &all[2]), (1, &all[0]), (2, &all[3])] {
        connection.state.lingers_since.store(at, Ordering::Relaxed);
    }
    let mut newer = Vec::new();
    for expected in [
        [true, false, false, false],
        [true, false, false, true],
        [true, false, true, true],
        [true, false, true, true],
    ] {
        newer.extend(connections.open());
        assert_eq!(closed(&all), expected);
    }
    assert_eq!(newer.len(), 3, "no time has passed, so the others keep their places");
    clock.advance(SECOND);
    newer.iter().for_each(Connection::progress);
    newer.extend(connections.open());
    assert_eq!((closed(&all), newer.len()), ([true; 4], 4), "they cost no other its turn");
}

#[test]
fn a_body_of_which_a_part_is_left_is_unread() {
    let (connections, _, _) = connections(1);
    let connection = opened(&connections);
    let has_unread = || connection.state.has_unread.load(Ordering::Relaxed);
    let keeps = Keeps::default();
    for (is_chunked, reads, expected) in
        [(false, 0, true), (false, 1, true), (false, 2, false), (true, 2, true), (true, 3, false)]
    {
        let sent = Scripted::whole(2, is_chunked);
        let _handler = connection.service(keeps.clone()).call(Request::new(sent));
        let mut body = keeps.0.borrow_mut().take().expect("a body");
        for _ in 0..reads {
            assert!(has_frame(&mut body));
        }
        assert_eq!(has_unread(), expected, "after {reads} reads");
    }
    let _handler = connection.service(keeps).call(Request::new(Scripted::whole(0, false)));
    assert!(!has_unread(), "without a body");
}

/// The bug: under overload each request that took longer than the grace period was ended for a new
/// one, and none was finished; or a dependency that hung took all places.
#[test]
fn long_work_keeps_three_quarters_of_the_places() {
    let (connections, clock, _) = connections(8);
    let mut all = Vec::new();
    let mut work = Vec::new();
    for _ in 0..8 {
        let connection = opened(&connections);
        work.push(connection.service(Keeps::default()).call(Request::new(Scripted::default())));
        all.push(connection);
        clock.advance(Duration::from_millis(1));
    }
    let mut newer = Vec::new();
    for _ in 0..4 {
        clock.advance(2 * SECOND);
        newer.iter().for_each(Connection::progress);
        newer.extend(connections.open());
    }
    let closed: Vec<_> = all.iter().map(is_closed).collect();
    assert_eq!(closed, [false, false, false, false, false, false, true, true]);
}

#[test]
fn an_unread_response_ends_its_connection_only_while_memory_is_short() {
    let (connections, clock, admission) = connections(8);
    let all = [opened(&connections), opened(&connections), opened(&connections)];
    let _unread = answer(&all[0], Version::HTTP_2);
    let mut works = answer(&all[1], Version::HTTP_2);
    assert!(!has_frame(works.body_mut()), "the server has no part of it yet");
    clock.advance(2 * SECOND);
    connections.tend();
    assert_eq!(closed(&all), [false; 3], "nothing is short");
    let held = fill(&admission);
    clock.advance(SECOND);
    connections.tend();
    assert_eq!(closed(&all), [true, false, false], "the others work, or are idle");
    drop(held);
    // A stream that moves keeps the others of its connection.
    let _unread = answer(&all[2], Version::HTTP_2);
    admission.set_level(Level::High);
    clock.advance(SECOND);
    all[2].progress();
    connections.tend();
    assert!(!is_closed(&all[2]));
    clock.advance(SECOND + Duration::from_nanos(1));
    connections.tend();
    assert!(is_closed(&all[2]));
}

/// A response whose time limit has passed, and of which the client takes nothing.
/// The bug: all of them were closed at once, however little was lacking.
#[test]
fn no_more_unread_connections_are_closed_than_hold_what_is_lacking_the_longest_unread_first() {
    let (connections, clock, admission) = connections(64);
    let open = || {
        clock.advance(SECOND / 64);
        let connection = opened(&connections);
        let response = answer(&connection, Version::HTTP_11);
        (connection, response)
    };
    let all: Vec<_> = std::iter::repeat_with(open).take(64).collect();
    clock.advance(2 * SECOND);
    let held = || admission.try_admit(Cost::host(ByteSize::mib(1))).expect("fits");
    let mut held: Vec<_> = std::iter::repeat_with(held).take(64).collect();
    let _ = held[0].raise(ByteSize::mib(3));
    // 66 of 64 MiB are reserved, and one is to be free: those of two requests, and one more.
    connections.tend();
    let are_closed: Vec<_> = all.iter().map(|(connection, _)| is_closed(connection)).collect();
    assert_eq!(are_closed.iter().filter(|is_closed| **is_closed).count(), 3);
    assert_eq!(are_closed[..3], [true; 3]);
}

#[test]
fn an_overdue_response_ends_its_connection_unless_others_use_it() {
    for version in [Version::HTTP_11, Version::HTTP_2] {
        let is_shared = version == Version::HTTP_2;
        let (connections, clock, _) = connections(8);
        let all = [opened(&connections), opened(&connections), opened(&connections)];
        let _unread = all.each_ref().map(|connection| answer(connection, version));
        let overdue = all.each_ref().map(|connection| Arc::clone(&connection.state.overdue));
        let [_first, second, _third] = overdue;
        drop(second);
        let _works = all[2].service(Keeps::default()).call({
            let mut request = Request::new(Scripted::default());
            *request.version_mut() = version;
            request
        });
        connections.tend();
        assert_eq!(closed(&all), [!is_shared, false, !is_shared], "{version:?}");
        clock.advance(2 * SECOND);
        connections.tend();
        assert_eq!(closed(&all), [true, false, !is_shared], "{version:?}");
    }
}

#[test]
fn the_client_is_waited_for_until_its_body_arrives_and_its_response_is_taken() {
    let (connections, _, _) = connections(1);
    let connection = opened(&connections);
    let state = &connection.state;
    let stalled = || (state.is_stalled(), state.is_working());
    let (sent, keeps) = (Scripted::default(), Keeps::default());
    let handler = connection.service(keeps.clone()).call(Request::new(sent.clone()));
    assert_eq!(stalled(), (false, true), "a handler has begun");
    let mut body = keeps.0.borrow_mut().take().expect("a body");
    assert!(!has_frame(&mut body));
    assert_eq!(stalled(), (false, false), "the handler waits for its body");
    sent.arrive();
    assert!(has_frame(&mut body));
    assert_eq!(stalled(), (false, true), "a part has arrived");
    assert!(!has_frame(&mut body));
    drop(body);
    assert_eq!(stalled(), (false, true), "it is not read any more");
    drop(handler);
    assert_eq!(stalled(), (false, false), "no request is open");
    let mut response = answer(&connection, Version::HTTP_11);
    assert_eq!(stalled(), (true, false), "the head is to be sent");
    assert!(!has_frame(response.body_mut()));
    assert_eq!(stalled(), (false, true), "the client has taken what there is");
    drop(response);
    assert_eq!(stalled(), (false, false));
}

#[test]
fn a_response_at_level_high_is_the_last_of_its_connection() {
    let (connections, _, admission) = connections(2);
    let connection = opened(&connections);
    let is_ending = || pin!(connection.ending()).poll(&mut noop()).is_ready();
    for (level, is_last) in [(Level::Elevated, false), (Level::High, true)] {
        admission.set_level(level);
        let response = answer(&connection, Version::HTTP_11);
        let says = response.headers().get(CONNECTION).is_some_and(|value| value == "close");
        assert_eq!(says, is_last, "{level}");
        assert!(!is_ending(), "HTTP/1 needs no shutdown");
        let response = answer(&connection, Version::HTTP_2);
        assert!(!response.headers().contains_key(CONNECTION), "HTTP/2 has no such header");
        assert_eq!(is_ending(), is_last, "{level}");
    }
}

/// The bug: at level high the header with which an answer switches protocols was replaced, so that
/// every handshake of a WebSocket failed.
#[test]
fn an_answer_that_switches_protocols_keeps_its_header_at_level_high() {
    let (connections, _, admission) = connections(1);
    let connection = opened(&connections);
    admission.set_level(Level::High);
    let switches = tower::service_fn(async |_: Request<ConnectionBody<Scripted>>| {
        let answer = Response::builder().status(101).header(CONNECTION, "upgrade");
        Ok::<_, Infallible>(answer.body(Scripted::default()).expect("a valid head"))
    });
    let mut answer = pin!(connection.service(switches).call(Request::new(Scripted::default())));
    let Poll::Ready(Ok(answer)) = answer.as_mut().poll(&mut noop()) else { panic!("it answers") };
    assert_eq!(answer.headers()[CONNECTION], "upgrade");
}

#[test]
fn connections_fill_a_quarter_of_the_ceiling_at_most() {
    let (connections, _, _) = connections(1000);
    let connections = connections.with_estimate(ByteSize::mib(4));
    let all: Vec<_> = std::iter::from_fn(|| connections.open()).collect();
    assert_eq!(all.len(), 4, "of 64 MiB");
    let huge = connections.clone().with_estimate(ByteSize::gib(1));
    drop(all);
    assert!(huge.open().is_some(), "one at least");
}
