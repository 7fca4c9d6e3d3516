//! ORCA load reports, which load balancers read: how full this service is, and what it serves.
//!
//! `report` has the figures and their forms, and `reports` what a layer keeps of its responses and
//! the report that it sends with them. The layer calls `reports` for each response. `service`
//! streams the same reports to balancers that ask for them, as `request` says. The definitions are
//! `xds.data.orca.v3` of github.com/cncf/xds, Envoy's parser of the header, and gRFC A51.
//!
//! Invariant: a report is encoded at most once for each tick of the control loop, and once more
//! when the service begins to shed. All other responses get a copy of shared bytes.

mod report;
mod reports;
mod request;
mod service;

pub(super) use reports::{Carrier, LoadReports};
pub use service::{LOAD_REPORT_STREAM_PATH, LoadReportService, LoadReportStream};
