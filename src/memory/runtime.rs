//! Support for services on tokio: an orderly shutdown, and loaders that are async.
//!
//! It starts no runtime and no task. It installs handlers for signals only in
//! [`Memory::terminated`].
//!
//! Invariant: nothing here blocks a thread of the runtime.

use std::future::{Future, poll_fn};
use std::io;
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use crate::BoxError;
use tokio::runtime::Handle;
use tokio::signal::unix::{SignalKind, signal};

use super::error::Shutdown;
use super::manager::Memory;
use super::resources::ResourceBuilder;

impl Memory {
    /// Returns a future that completes when the process is asked to end: by SIGTERM or SIGINT, or
    /// because memory is exhausted and the policy is
    /// [`ExhaustionPolicy::Exit`](crate::config::ExhaustionPolicy::Exit). From then on `/readyz`
    /// answers 503, so that load balancers choose another instance. Pass it to the server's
    /// graceful shutdown, which waits for open streams, so bound it; then call
    /// [`Memory::shutdown`]. The report of a process that ends
    /// because of exhaustion is an error: a `main` that returns it exits with status 1, and its
    /// supervisor restarts it. For another status, read [`Shutdown::exhausted`]. The library itself
    /// never ends the process.
    ///
    /// The signals are handled from this call on, and never end the process by themselves any more.
    ///
    /// ```no_run
    /// # async fn serve(app: axum::Router) -> Result<(), lowtide::BoxError> {
    /// use std::time::Duration;
    ///
    /// let memory = lowtide::Memory::start()?;
    /// let listener = tokio::net::TcpListener::bind("127.0.0.1:8080").await?;
    /// axum::serve(listener, app).with_graceful_shutdown(memory.terminated()?).await?;
    /// memory.shutdown(Duration::from_secs(5)).await.into_result()?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// The operating system's error if a handler cannot be installed.
    ///
    /// # Panics
    /// Panics outside a tokio runtime with I/O enabled.
    pub fn terminated(&self) -> io::Result<impl Future<Output = ()> + Send + use<>> {
        let (mut term, mut int) =
            (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
        let (memory, exhausted) = (self.downgrade(), self.0.shared.ending.begun());
        Ok(async move {
            let mut exhausted = pin!(exhausted);
            poll_fn(|cx| {
                let asked = term.poll_recv(cx).is_ready() | int.poll_recv(cx).is_ready();
                let asked = asked || exhausted.as_mut().poll(cx).is_ready();
                if asked { Poll::Ready(()) } else { Poll::Pending }
            })
            .await;
            if let Some(memory) = memory.upgrade() {
                memory.set_ending();
            }
        })
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
