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
mod asked;
#[cfg(feature = "axum")]
mod axum;
mod base64;
mod body;
mod connections;
#[cfg(feature = "device")]
mod devices;
mod drain;
mod endpoints;
mod estimate;
mod exempt;
mod last_exit;
mod layer;
mod learned;
mod load_report;
mod origin;
mod pace;
mod page;
mod parts;
mod permit;
mod rejection;
mod scoped;
mod time_limits;
mod usage;

pub use admin::{Admin, AdminToken, Peer, TokenError};
pub use body::{RequestBody, ResponseBody, ResponseBodyError};
pub use connections::{
    Connection, ConnectionBody, ConnectionFuture, ConnectionService, Connections,
};
#[cfg(feature = "tokio")]
pub use connections::{ConnectionListener, ConnectionStream};
pub use drain::DRAIN_MAX;
pub use endpoints::Endpoints;
pub use estimate::{Constant, ContentLength, Estimate, Estimated, FromHeader};
pub use exempt::{EXEMPT_BODY_MAX, HEALTH_PATHS};
pub use layer::{MemoryLayer, MemoryService, ResponseFuture};
pub use learned::{Learned, Lesson, ROUTES_MAX};
pub use load_report::{
    LOAD_REPORT_STREAM_PATH, LoadReportFormat, LoadReportService, LoadReportStream,
};
pub use origin::Tenant;
pub use pace::MinDataRate;
pub use permit::SharedPermit;
pub use rejection::{rejection, unavailable};
pub use scoped::{Scoped, scope, scope_blocking};
