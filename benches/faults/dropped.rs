//! A router that is built in a function, which drops its handle of the `Memory`: what the layer in
//! it then admits beyond the limit.
//!
//! The limit and the memory in use come from files, so that other processes do not matter. Each
//! request books a quarter of what it holds, which only measurement finds out.

use std::convert::Infallible;
use std::future::{Future, pending};
use std::pin::Pin;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Empty;
use lowtide::admission::Cost;
use lowtide::clock::{Bell, Clock, SystemClock};
use lowtide::config::DeviceChoice;
use lowtide::service::{MemoryLayer, MemoryService, RequestBody};
use lowtide::{BoxError, ByteSize, Memory};
use tower::{Layer, Service, util::BoxCloneService};

use crate::support::Tree;

const LIMIT: ByteSize = ByteSize::mib(256);
/// In use by the process itself.
const BASE_MIB: u64 = 10;
const BOOKED: ByteSize = ByteSize::mib(10);
const HELD_MIB: u64 = 40;
/// As many as would hold six times the limit.
const REQUESTS: u64 = 40;
/// Ten ticks of the control loop.
const SETTLE: Duration = Duration::from_millis(100);

type Asked = Request<RequestBody<Empty<Bytes>>>;
type Inner = BoxCloneService<Asked, Response<Empty<Bytes>>, Infallible>;

pub(crate) fn run() -> Result<(), BoxError> {
    let tree = Tree::new(LIMIT);
    let mut service = build(&tree)?;
    let (clock, bell) = (SystemClock::new(), Bell::new());
    let (mut held, mut refused) = (Vec::new(), 0);
    for _ in 0..REQUESTS {
        let mut request = Box::pin(service.call(Request::new(Empty::new())));
        if poll(request.as_mut()).is_pending() {
            held.push(request);
        } else {
            refused += 1;
        }
        tree.hold(BASE_MIB + HELD_MIB * held.len() as u64);
        clock.wait_until(&bell, clock.now() + SETTLE);
    }
    let admitted = ByteSize::mib(BASE_MIB + HELD_MIB * held.len() as u64);
    let over = admitted.saturating_sub(LIMIT);
    println!("figure faults.dropped.admitted {} requests", held.len());
    println!("figure faults.dropped.refused {refused} requests");
    println!("figure faults.dropped.over_limit_bytes {} bytes", over.get());
    if held.is_empty() {
        return Err("no request was admitted".into());
    }
    if over.is_zero() { Ok(()) } else { Err(format!("{over} beyond the limit").into()) }
}

/// Builds a service whose requests do not end. The only handle of the `Memory` is dropped here.
fn build(tree: &Tree) -> Result<MemoryService<Inner, Cost>, BoxError> {
    let memory = Memory::builder().device(DeviceChoice::None).signals(tree.open()).start()?;
    let layer = MemoryLayer::new(memory.admission().clone(), Cost::host(BOOKED));
    // A request that is pending is admitted: none waits for room.
    let layer = layer.with_max_wait(Duration::ZERO);
    Ok(layer.layer(BoxCloneService::new(tower::service_fn(|_: Asked| pending()))))
}

fn poll<F: Future>(future: Pin<&mut F>) -> Poll<F::Output> {
    future.poll(&mut Context::from_waker(Waker::noop()))
}
