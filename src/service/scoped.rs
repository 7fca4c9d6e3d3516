//! Futures and bodies that are polled, and dropped, for the account of a request.
//!
//! Invariant: the wrapped value is dropped before its permit, and in its scope.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use pin_project_lite::pin_project;

use super::permit::RequestPermit;

pin_project! {
    /// A future whose memory is attributed to a request.
    #[derive(Debug)]
    #[must_use = "futures do nothing unless polled"]
    pub(super) struct Scoped<F> {
        // `None` once it has completed.
        #[pin]
        pub(super) inner: Option<F>,
        pub(super) permit: Option<RequestPermit>,
    }

    impl<F> PinnedDrop for Scoped<F> {
        fn drop(this: Pin<&mut Self>) {
            let mut this = this.project();
            if let (Some(permit), true) = (this.permit, this.inner.is_some()) {
                permit.measure(|| this.inner.set(None));
            }
        }
    }
}

impl<T> Scoped<T> {
    /// Drops the wrapped value in its scope.
    pub(super) fn end(self: Pin<&mut Self>) {
        let mut this = self.project();
        match this.permit {
            Some(permit) => permit.measure(|| this.inner.set(None)),
            None => this.inner.set(None),
        }
    }

    /// Polls the wrapped value in its scope, and drops it there if the poll says that it is done.
    #[inline]
    pub(super) fn poll_with<R>(
        self: Pin<&mut Self>,
        poll: impl FnOnce(Pin<&mut T>) -> (R, bool),
    ) -> R {
        let this = self.project();
        let (mut inner, permit) = (this.inner, this.permit);
        let work = || {
            let Some(now) = inner.as_mut().as_pin_mut() else { unreachable!("it is done") };
            let (result, is_done) = poll(now);
            if is_done {
                inner.set(None);
            }
            result
        };
        match permit {
            Some(permit) => permit.poll(work),
            None => work(),
        }
    }
}

impl RequestPermit {
    /// Attributes the memory of a future to this request, wherever it is polled and dropped. The
    /// reservation lasts at least as long as the future.
    ///
    /// ```
    /// # async fn work(permit: lowtide::service::RequestPermit) {
    /// let parts = tokio::spawn(permit.scope(async { vec![0_u8; 1 << 20] }));
    /// # }
    /// ```
    pub fn scope<F: Future>(&self, future: F) -> impl Future<Output = F::Output> + use<F> {
        Scoped { inner: Some(future), permit: Some(self.clone()) }
    }
}

impl<F: Future> Future for Scoped<F> {
    type Output = F::Output;

    #[inline]
    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        self.poll_with(|inner| {
            let polled = inner.poll(cx);
            let is_ready = polled.is_ready();
            (polled, is_ready)
        })
    }
}

/// Attributes the memory of a future to the request for which this thread runs, if there is one.
/// Use it for tasks that a handler spawns. Equals [`RequestPermit::scope`] of
/// [`RequestPermit::current`].
///
/// ```
/// # async fn handler() {
/// let part = tokio::spawn(lowtide::service::scope(async { vec![0_u8; 1 << 20] }));
/// # }
/// ```
pub fn scope<F: Future>(future: F) -> impl Future<Output = F::Output> {
    Scoped { inner: Some(future), permit: RequestPermit::current() }
}

/// Attributes the memory of a closure to the request for which this thread runs, if there is one.
/// Use it for work on another thread; it counts like a poll, and at each [`RequestPermit::check`].
///
/// ```
/// # async fn handler(text: String) {
/// let work = lowtide::service::scope_blocking(move || text.to_uppercase());
/// let upper = tokio::task::spawn_blocking(work).await;
/// # }
/// ```
pub fn scope_blocking<R>(work: impl FnOnce() -> R) -> impl FnOnce() -> R {
    let permit = RequestPermit::current();
    move || match permit {
        Some(permit) => permit.measure(work),
        None => work(),
    }
}
