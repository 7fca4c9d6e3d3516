//! The operator endpoints as routes of axum.
//!
//! Invariant: the routes answer as [`Endpoints::answer_request`] does, and no other path.

use std::net::SocketAddr;
use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::extract::{ConnectInfo, Request};
use axum::routing::any;
use http::{Response, StatusCode};

use crate::Memory;

use super::{Endpoints, Peer};

impl Memory {
    /// Returns the operator endpoints (`/healthz`, `/readyz`, `/memory`, and `/metrics` after
    /// `Builder::prometheus`) as routes. Merge them after the layer, so that they answer under
    /// overload:
    ///
    /// ```
    /// use axum::{Router, routing::post};
    /// use lowtide::Memory;
    ///
    /// let memory = Memory::start()?;
    /// let app: Router = Router::new()
    ///     .route("/length", post(|body: String| async move { body.len().to_string() }))
    ///     .layer(memory.layer())
    ///     .merge(memory.routes());
    /// # drop(app);
    /// # Ok::<(), lowtide::BoxError>(())
    /// ```
    ///
    /// They are for operators: `/memory` and `/metrics` show figures of the service. To keep them
    /// from the public, serve them on a port of their own.
    pub fn routes<S: Clone + Send + Sync + 'static>(&self) -> Router<S> {
        Endpoints::new(Some(self.clone())).into_routes()
    }
}

impl Endpoints {
    /// Returns these endpoints as routes: [`Endpoints::PATHS`], and [`Endpoints::ADMIN_PATHS`] with
    /// admin commands. Those need the client's address: serve the routes with
    /// `into_make_service_with_connect_info::<SocketAddr>()`.
    pub fn into_routes<S: Clone + Send + Sync + 'static>(self) -> Router<S> {
        let admin =
            self.admin.is_some().then_some(Self::ADMIN_PATHS).into_iter().flatten().copied();
        let endpoints = Arc::new(self);
        Self::PATHS.into_iter().chain(admin).fold(Router::new(), |router, path| {
            let endpoints = Arc::clone(&endpoints);
            router.route(path, any(async move |request| answer(&endpoints, request)))
        })
    }
}

fn answer(endpoints: &Endpoints, mut request: Request) -> Response<Body> {
    let peer = request.extensions().get::<ConnectInfo<SocketAddr>>().map(|peer| peer.0);
    if let Some(peer) = peer {
        request.extensions_mut().insert(Peer(peer));
    }
    match endpoints.answer_request(&request) {
        Some(answer) => answer.map(Body::from),
        None => {
            let mut missing = Response::new(Body::empty());
            *missing.status_mut() = StatusCode::NOT_FOUND;
            missing
        }
    }
}
