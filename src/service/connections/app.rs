//! `axum::serve` on the connections of a [`ConnectionListener`].

use std::convert::Infallible;
use std::future::{Ready, ready};
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::{body::Body, serve::IncomingStream};
use http::{Request, Response};
use tokio::time::sleep;
use tower_service::Service;

use super::{ConnectionBody, ConnectionListener, ConnectionService, ConnectionStream};

/// The pause after an error of `accept`, mostly a lack of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// For `axum::serve`, with a [`ConnectionApp`]. A connection that is to be closed ends with an error
/// of its stream.
impl axum::serve::Listener for ConnectionListener {
    type Io = ConnectionStream;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (ConnectionStream, SocketAddr) {
        // Ends with the next connection.
        loop {
            match Self::accept(self).await {
                Ok((connection, mut stream, from)) => {
                    stream.connection = Some(connection);
                    return (stream, from);
                }
                Err(error) => {
                    log!(warn, %error, "connection not accepted");
                    sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

/// An application of axum on the connections of a [`ConnectionListener`]. It takes two allocations
/// for each request.
///
/// ```
/// use axum::{Router, routing::get};
/// use lowtide::{Memory, service::{ConnectionApp, Connections}};
///
/// async fn serve(memory: &Memory, listener: tokio::net::TcpListener) -> std::io::Result<()> {
///     let app: Router = Router::new().route("/", get(async || "hello")).layer(memory.layer());
///     let connections = Connections::new(memory.admission(), 1024);
///     axum::serve(connections.listen(listener), ConnectionApp::new(app)).await
/// }
/// ```
#[derive(Clone, Debug)]
pub struct ConnectionApp<S>(S);

impl<S> ConnectionApp<S> {
    /// Creates one of an application such as a `Router`.
    pub const fn new(app: S) -> Self {
        Self(app)
    }
}

impl<S: Clone> Service<IncomingStream<'_, ConnectionListener>> for ConnectionApp<S> {
    type Response = ConnectionApp<ConnectionService<S>>;
    type Error = Infallible;
    type Future = Ready<Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, stream: IncomingStream<'_, ConnectionListener>) -> Self::Future {
        let ConnectionStream { state, connections, .. } = stream.io();
        let (state, admission) = (Arc::clone(state), connections.admission.clone());
        ready(Ok(ConnectionApp(ConnectionService { inner: self.0.clone(), state, admission })))
    }
}

impl<S> Service<Request<Body>> for ConnectionApp<ConnectionService<S>>
where
    S: Service<Request<ConnectionBody<Body>>, Response = Response<Body>, Error = Infallible>,
    S::Future: Send + 'static,
{
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.0.poll_ready(cx)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let answer = self.0.call(request);
        Box::pin(async { Ok(answer.await?.map(Body::new)) })
    }
}
