//! Middleware and endpoints for web services: a tower layer that admits requests by bytes, and
//! operator endpoints.
//!
//! Works with axum, hyper and tonic, and depends on none of them. It starts no server and routes
//! nothing. For servers that accept connections themselves, [`Connections`] bounds them.
//!
//! Invariant: an admitted request holds its bytes until the last byte of its response is sent or
//! the connection has ended.

mod admin;
mod answer;
mod body;
mod connections;
#[cfg(feature = "device")]
mod devices;
mod endpoints;
mod estimate;
mod exempt;
mod json;
mod layer;
mod load_report;
mod permit;
mod query;
mod rejection;
mod scoped;
mod time_limits;
mod usage;

pub use admin::Peer;
pub use body::{RequestBody, ResponseBody, ResponseBodyError};
#[cfg(all(feature = "axum", feature = "tokio"))]
pub use connections::ConnectionApp;
pub use connections::{
    Connection, ConnectionBody, ConnectionFuture, ConnectionService, Connections,
};
#[cfg(feature = "tokio")]
pub use connections::{ConnectionListener, ConnectionStream};
pub use endpoints::{Endpoints, healthcheck};
pub use estimate::{ContentLength, Estimate, from_header};
pub use exempt::{EXEMPT_BODY_MAX, HEALTH_PATHS};
pub use layer::{MemoryLayer, MemoryService, ResponseFuture};
pub use load_report::{LOAD_REPORT_STREAM_PATH, LoadReportService};
pub use permit::RequestPermit;
pub use rejection::{DRAIN_MAX, rejection, unavailable};
pub use scoped::{scope, scope_blocking};
pub use usage::Tenant;
