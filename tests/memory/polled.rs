//! Futures that tests poll themselves, so that each step happens when they say.

use std::cell::RefCell;
use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

/// Polls a future once.
pub(crate) fn poll<F: Future + ?Sized>(future: &mut Pin<Box<F>>) -> Poll<F::Output> {
    future.as_mut().poll(&mut Context::from_waker(Waker::noop()))
}

/// Returns the output of a future that is ready at its first poll.
pub(crate) fn now<F: Future>(future: F) -> F::Output {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(output) => output,
        Poll::Pending => panic!("it waits"),
    }
}

/// Is ready at its second poll.
pub(crate) async fn wait_once() {
    let mut waited = false;
    poll_fn(|_| if std::mem::replace(&mut waited, true) { Poll::Ready(()) } else { Poll::Pending })
        .await;
}

/// Returns a handler that can be cloned, as the layer needs it.
pub(crate) fn cloneable<Q, F>(handler: impl FnMut(Q) -> F) -> impl FnMut(Q) -> F + Clone {
    let handler = Rc::new(RefCell::new(handler));
    move |request| (*handler.borrow_mut())(request)
}
