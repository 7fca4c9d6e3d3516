//! Support for services on tokio: an orderly shutdown, and loaders that are async.
//!
//! It starts no runtime, and of tasks only an empty one. It installs handlers for signals only in
//! [`Memory::terminated`].
//!
//! A worker of tokio that begins a long poll watches no more for I/O, and if the others sleep, tokio
//! wakes none of them to do so: the service would answer nothing until that poll ends. The control
//! loop wakes one ([`wake_runtime`]).
//!
//! Invariant: nothing here blocks a thread of the runtime.

use std::future::{Future, pending, poll_fn};
use std::io;
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use crate::BoxError;
use crate::fork::Birth;
use crate::sync::{Mutex, lock};
use tokio::runtime::Handle;
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::sleep;

use super::error::Shutdown;
use super::manager::Memory;
use super::resources::ResourceBuilder;

/// The runtime that serves requests, and the process that it is of.
static SERVING: Mutex<Option<(Handle, Birth)>> = Mutex::new(None);

/// Keeps the runtime of the caller for [`wake_runtime`], instead of that of an earlier call, unless
/// it has only one worker.
pub(crate) fn keep_runtime() {
    let kept = Handle::try_current().ok().filter(|it| it.metrics().num_workers() > 1);
    // Dropped without the lock: it may be the last handle, and hooks of the application with it.
    let _before = kept.map(|runtime| lock(&SERVING).replace((runtime, Birth::now())));
}

/// Wakes a worker of the runtime if one is busy, none has gone to sleep or woken since the last
/// call, and no queued task is about to wake one. Keeps a runtime that has ended no longer: its
/// workers seem busy for ever.
pub(super) fn wake_runtime() {
    /// How often workers had gone to sleep or woken at the last call.
    static TURNS: AtomicU64 = AtomicU64::new(0);
    let serving = lock(&SERVING).clone();
    // A child has neither the parent's workers nor those that hold the runtime's locks.
    let Some((runtime, _)) = serving.filter(|(_, birth)| birth.is_here()) else { return };
    let metrics = runtime.metrics();
    let turns = (0..metrics.num_workers()).map(|nth| metrics.worker_park_unpark_count(nth));
    // Even while the worker is awake.
    let (is_busy, turns) = (turns.clone().any(|turn| turn.is_multiple_of(2)), turns.sum());
    if TURNS.swap(turns, Relaxed) == turns && is_busy && metrics.global_queue_depth() == 0 {
        let woken = pin!(runtime.spawn(async {})).poll(&mut Context::from_waker(Waker::noop()));
        if matches!(woken, Poll::Ready(Err(_))) {
            let _ended = lock(&SERVING).take_if(|(kept, _)| kept.id() == runtime.id());
        }
    }
}

impl Memory {
    /// Returns a future that completes when the process is asked to end: by SIGTERM or SIGINT, or
    /// because memory is exhausted and the policy is
    /// [`ExhaustionPolicy::Exit`](crate::config::ExhaustionPolicy::Exit). From then on `/readyz`
    /// answers 503. Pass it to the server's graceful shutdown, and the server to
    /// [`Memory::serve`]. The library itself never ends the process.
    ///
    /// A graceful shutdown closes the service's port at once, so only a separate port for operators
    /// can still answer 503. To drain before it, so that load balancers choose another instance,
    /// sleep after this future in the one that the server gets: until the sleep ends, the service
    /// serves, as after [`Memory::set_ending`]. The `grace` of [`Memory::serve`] includes that time.
    ///
    /// The signals are handled from this call on, and never end the process by themselves any more.
    ///
    /// # Errors
    /// The operating system's error if a handler cannot be installed.
    ///
    /// # Panics
    /// Panics outside a tokio runtime with I/O enabled.
    pub fn terminated(&self) -> io::Result<impl Future<Output = ()> + Send + use<>> {
        keep_runtime();
        let (mut term, mut int) =
            (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
        let (memory, mut ending) = (self.downgrade(), self.0.shared.ending.subscribe());
        Ok(async move {
            let mut exhausted = pin!(async {
                if ending.wait_for(|ends| *ends).await.is_err() {
                    pending::<()>().await; // the manager is gone, and signals are left
                }
            });
            poll_fn(|cx| {
                let asked = term.poll_recv(cx).is_ready() | int.poll_recv(cx).is_ready();
                let asked = asked || exhausted.as_mut().poll(cx).is_ready();
                if asked { Poll::Ready(()) } else { Poll::Pending }
            })
            .await;
            memory.upgrade().iter().for_each(Self::set_ending);
        })
    }

    /// Waits until the server has ended, or for `grace` after the process was asked to end
    /// ([`Memory::terminated`]), and then shuts the manager down; resources have 5 s for that.
    ///
    /// A server that shuts down gracefully waits for open streams, upgraded connections and clients
    /// that send half a request: without a bound, for ever. What is still open after `grace` is cut
    /// when the runtime ends; requests among it are logged, and are no error.
    ///
    /// ```no_run
    /// # async fn run(app: axum::Router) -> Result<(), lowtide::BoxError> {
    /// use std::time::Duration;
    ///
    /// let memory = lowtide::Memory::start()?;
    /// let listener = tokio::net::TcpListener::bind("127.0.0.1:8080").await?;
    /// let server = axum::serve(listener, app).with_graceful_shutdown(memory.terminated()?);
    /// memory.serve(server, Duration::from_secs(10)).await
    /// # }
    /// ```
    ///
    /// # Errors
    /// The error of the server, or the report of the shutdown ([`Shutdown::into_result`]): a `main`
    /// that returns it exits with status 1. That of a process that ends because of exhaustion is an
    /// error, so that its supervisor restarts it.
    ///
    /// # Panics
    /// Panics outside a tokio runtime with I/O and time enabled.
    pub async fn serve<E: Into<BoxError>>(
        &self,
        server: impl IntoFuture<Output = Result<(), E>>,
        grace: Duration,
    ) -> Result<(), BoxError> {
        let asked = self.terminated()?;
        let mut late = pin!(async { (asked.await, sleep(grace).await) });
        let mut server = pin!(server.into_future());
        let served = poll_fn(|cx| match server.as_mut().poll(cx) {
            Poll::Ready(served) => Poll::Ready(Some(served)),
            Poll::Pending => late.as_mut().poll(cx).map(|_| None),
        });
        let served = served.await;
        // With a grace of 10 s less than the 30 s after which Kubernetes kills the process.
        let mut report = self.shutdown(Duration::from_secs(5)).await;
        let cut = if served.is_none() { std::mem::take(&mut report.requests) } else { 0 };
        if cut > 0 {
            log!(warn, requests = cut, ?grace, "requests cut at the shutdown");
        }
        served.transpose().map_err(Into::into)?;
        Ok(report.into_result()?)
    }

    /// Like [`Memory::shutdown_blocking`], without blocking the runtime: it runs on a blocking
    /// thread of tokio.
    ///
    /// # Panics
    /// Panics outside a tokio runtime.
    pub async fn shutdown(&self, deadline: Duration) -> Shutdown {
        let memory = self.clone();
        let ended = tokio::task::spawn_blocking(move || memory.shutdown_blocking(deadline)).await;
        // The task is not cancelled.
        ended.unwrap_or_else(|error| std::panic::resume_unwind(error.into_panic()))
    }

    /// Like [`Memory::managed`], with an async loader. It runs on the thread that loads, inside the
    /// runtime in which this was called, so it can use sockets, timers and tasks of that runtime.
    /// Memory of tasks that it spawns is not attributed to the resource.
    ///
    /// [`ResourceBuilder::load_timeout`] bounds the load. A future that is still pending then stays
    /// on its thread until it completes; to cancel it, use `tokio::time::timeout` inside.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), lowtide::BoxError> {
    /// use lowtide::{ByteSize, Cost, Memory};
    ///
    /// let memory = Memory::start()?;
    /// let words = memory.managed_async("words", || async {
    ///     Ok(tokio::fs::read_to_string("Cargo.toml").await?)
    /// });
    /// let words = words.cost(Cost::host(ByteSize::mib(1))).register()?;
    /// assert!(words.acquire().await?.contains("lowtide"));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Panics
    /// Panics outside a tokio runtime.
    pub fn managed_async<T, L, F>(&self, name: &str, load: L) -> ResourceBuilder<T>
    where
        T: Send + Sync + 'static,
        L: Fn() -> F + Send + Sync + 'static,
        F: Future<Output = Result<T, BoxError>>,
    {
        let runtime = Handle::current();
        self.managed(name, move || runtime.block_on(load()))
    }
}
