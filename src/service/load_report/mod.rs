//! ORCA load reports, which load balancers read: how full this service is, and what it serves.
//!
//! This file counts the responses of a layer, and has the encoded report that they carry; `message`
//! has its forms. `service` streams the same reports to balancers that ask for them. The
//! definitions are `xds.data.orca.v3` of github.com/cncf/xds, Envoy's parser of the header, and
//! gRFC A51.
//!
//! The layer calls [`LoadReports::attach`] for each response that it returns. The control loop
//! publishes utilizations ([`PressureState`]); the rest is counted here. Rates and utilizations are
//! averages over the same time, since balancers divide one by the other.
//!
//! A service that sheds answers fast and holds little memory, so a balancer that does not know it
//! would send more. Therefore, for [`SHED_SHOWN`] after a rejection and while requests wait, the
//! utilization is at least 1, multiplied by the offered load divided by the admitted load. The
//! weight that a balancer derives is then what the service can serve.
//!
//! Invariants: a report is encoded at most once for each tick of the control loop, and once more
//! when the service begins to shed; all other responses get a copy of shared bytes. The report of a
//! rejection says that the service sheds. No response waits for a lock that another holds for
//! longer than it takes to encode a report.

mod message;
mod service;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use base64::prelude::{BASE64_STANDARD, Engine as _};
use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::{HeaderMap, HeaderName, HeaderValue, Response};
use http_body::Body;
use lowtide_admission::layer::{REPORT_WINDOW, SHED_SHOWN, mean_weight};
use lowtide_admission::{Admission, Budget, PressureState};

use crate::bytes::ByteSize;
use crate::clock::{Clock, Moment};
use crate::fork::Birth;
use crate::memory::{is_ending, published_state};
use crate::sync::{Mutex, lock};

use message::{LoadReport, framed};
use service::Streams;

pub use service::{LOAD_REPORT_STREAM_PATH, LoadReportService};

/// The least utilization of a service with a limit. Balancers ignore a report of 0, and Envoy logs
/// an error for each. Below it, the weight is in proportion to the rate of requests, so that an
/// idle fleet keeps its shares.
const UTILIZATION_MIN: f64 = 0.01;

/// The header of responses, and the metadata of gRPC.
static METRICS: HeaderName = HeaderName::from_static("endpoint-load-metrics");
static METRICS_BIN: HeaderName = HeaderName::from_static("endpoint-load-metrics-bin");

/// The utilization while requests are shed is at most this multiple of what it is otherwise.
const DEMAND_MAX: f64 = 100.0;
/// Without a control loop, a report is encoded when it is older than this.
const AGE_MAX: Duration = Duration::from_millis(100);

/// The reports of a layer and its clones.
#[derive(Debug)]
pub(super) struct LoadReports {
    admission: Admission,
    /// `None` if no control loop ticks.
    state: Option<Arc<PressureState>>,
    clock: Arc<dyn Clock>,
    birth: Birth,
    /// Responses, and the failures among them, since the start.
    responses: AtomicU64,
    errors: AtomicU64,
    encoded: Mutex<Encoded>,
    /// `true` once a service streams the reports.
    pub(super) has_streams: AtomicBool,
    streams: Streams,
}

/// A report as it is sent, and what the next one continues.
#[derive(Debug)]
struct Encoded {
    /// Its time, by [`LoadReports::time`].
    at: u64,
    /// The rejections that it knows.
    sheds: u64,
    /// `true` if it says that the service sheds.
    is_shedding: bool,
    header: HeaderValue,
    metadata: HeaderValue,
    /// The message of a stream, with its prefix.
    message: Bytes,
    rates: Rates,
}

impl LoadReports {
    pub(super) fn new(admission: Admission, clock: Arc<dyn Clock>) -> Self {
        let (now, counts) = (clock.now(), counts(&admission, 0, 0));
        let empty = Encoded {
            at: 0,
            sheds: counts[SHEDS],
            is_shedding: false,
            header: HeaderValue::from_static(""),
            metadata: HeaderValue::from_static(""),
            message: Bytes::new(),
            rates: Rates::new(now, counts),
        };
        let reports = Self {
            state: published_state(&admission),
            birth: Birth::now(),
            responses: AtomicU64::new(0),
            errors: AtomicU64::new(0),
            encoded: Mutex::new(empty),
            has_streams: AtomicBool::new(false),
            streams: Streams::default(),
            admission,
            clock,
        };
        reports.encode(&mut lock(&reports.encoded), reports.time());
        reports
    }

    /// Counts a response and adds the report, in place of any that it has: one of another service
    /// would be taken for this one's. Returns `true` if the report belongs in the trailers of the body,
    /// which are still to come.
    #[inline]
    pub(super) fn attach<R: Body>(&self, response: &mut Response<R>) -> bool {
        self.responses.fetch_add(1, Ordering::Relaxed);
        let is_grpc = is_grpc(response.headers());
        // A status in the head is the whole response.
        let in_trailers = is_grpc
            && !response.headers().contains_key(&GRPC_STATUS)
            && !response.body().is_end_stream();
        if response.status().is_server_error() || is_grpc_failure(response.headers()) {
            self.errors.fetch_add(1, Ordering::Relaxed);
        }
        let headers = response.headers_mut();
        headers.remove(&METRICS);
        headers.remove(&METRICS_BIN);
        if !is_grpc {
            self.put(&METRICS, |encoded| &encoded.header, headers);
        } else if !in_trailers {
            self.put(&METRICS_BIN, |encoded| &encoded.metadata, headers);
        }
        in_trailers
    }

    /// Adds the report to the trailers of a gRPC response, and counts it if it failed.
    pub(super) fn attach_to_trailers(&self, trailers: &mut HeaderMap) {
        if is_grpc_failure(trailers) {
            self.errors.fetch_add(1, Ordering::Relaxed);
        }
        trailers.remove(&METRICS);
        self.put(&METRICS_BIN, |encoded| &encoded.metadata, trailers);
    }

    /// Returns `true` if the service shuts down, or is about to.
    fn is_ending(&self) -> bool {
        self.admission.is_closed() || is_ending(&self.admission)
    }

    /// Counts a request for which there is no response.
    #[cold]
    pub(super) fn count_failed_call(&self) {
        self.responses.fetch_add(1, Ordering::Relaxed);
        self.errors.fetch_add(1, Ordering::Relaxed);
    }

    fn put(
        &self,
        name: &'static HeaderName,
        value: fn(&Encoded) -> &HeaderValue,
        headers: &mut HeaderMap,
    ) {
        if let Some(value) = self.current(|encoded| value(encoded).clone()) {
            headers.insert(name, value);
        }
    }

    /// Encodes the report again if it is stale, and returns a part of it. `None` in a forked child,
    /// in which a thread of the parent may hold the lock.
    #[inline]
    fn current<T>(&self, part: impl FnOnce(&Encoded) -> T) -> Option<T> {
        if !self.birth.is_here() {
            return None;
        }
        let (time, mut encoded) = (self.time(), lock(&self.encoded));
        let is_old = if self.state.is_some() {
            time != encoded.at
        } else {
            Duration::from_nanos(time.saturating_sub(encoded.at)) >= AGE_MAX
        };
        let sheds = self.admission.state().sheds_total();
        if is_old || (sheds != encoded.sheds && !encoded.is_shedding) {
            self.encode(&mut encoded, time);
        }
        Some(part(&encoded))
    }

    /// Returns the time of the control loop's last tick, or without one the time, in nanoseconds.
    #[inline]
    fn time(&self) -> u64 {
        let ticked = self.state.as_ref().map(|_| self.admission.state().last_tick());
        let at = ticked.unwrap_or_else(|| self.clock.now());
        u64::try_from(at.since_origin().as_nanos()).unwrap_or(u64::MAX)
    }

    /// Encodes the report again.
    #[cold]
    #[inline(never)]
    fn encode(&self, encoded: &mut Encoded, time: u64) {
        let now = self.clock.now();
        let [responses, errors] =
            [&self.responses, &self.errors].map(|count| count.load(Ordering::Relaxed));
        let counts = counts(&self.admission, responses, errors);
        encoded.rates.add(now, counts);
        encoded.is_shedding = self.admission.state().has_waiting()
            || self.is_ending()
            || encoded.rates.shed_at.is_some_and(|at| now - at < SHED_SHOWN);
        let report = self.report(&encoded.rates, encoded.is_shedding);
        let message = report.message();
        let value = |text: String| {
            let value = HeaderValue::from_maybe_shared(Bytes::from(text));
            value.unwrap_or_else(|_| HeaderValue::from_static(""))
        };
        (encoded.at, encoded.sheds) = (time, counts[SHEDS]);
        (encoded.header, encoded.metadata) =
            (value(report.header()), value(BASE64_STANDARD.encode(&message)));
        encoded.message = Bytes::from(framed(&message));
    }

    fn report(&self, rates: &Rates, is_shedding: bool) -> LoadReport {
        let mut ledgers: Vec<_> =
            self.state.iter().flat_map(|state| state.utilizations()).collect();
        // Without a tick so far there is no average.
        ledgers.resize(ledgers.len().max(2), None);
        for (ledger, budget) in ledgers.iter_mut().zip([Budget::Host, Budget::Device]) {
            *ledger = ledger.or_else(|| self.admission.ledger(budget).utilization());
        }
        let fullest = ledgers.iter().copied().flatten().reduce(f64::max);
        let application_utilization = if is_shedding {
            Some(fullest.unwrap_or(0.0).max(1.0) * rates.demand())
        } else {
            fullest.map(|fullest| fullest.max(UTILIZATION_MIN))
        };
        let mem_utilization = self.state.as_ref().and_then(|state| {
            let (physical, limit) = (state.physical(), state.limit());
            // Zero before the first sample.
            let is_known = limit != ByteSize::MAX && !limit.is_zero();
            is_known.then(|| (physical.as_f64() / limit.as_f64()).min(1.0))
        });
        let [rps, eps, ..] = rates.averages();
        LoadReport { mem_utilization, application_utilization, rps, eps, ledgers }
    }
}

/// Returns `true` for a gRPC message. Others with such a type are for browsers, such as
/// `application/grpc-web`, and send trailers as data.
fn is_grpc(headers: &HeaderMap) -> bool {
    let kind = headers.get(CONTENT_TYPE).map(HeaderValue::as_bytes);
    let rest = kind.and_then(|kind| kind.strip_prefix(b"application/grpc"));
    matches!(rest, Some([] | [b'+' | b';', ..]))
}

static GRPC_STATUS: HeaderName = HeaderName::from_static("grpc-status");

/// Returns `true` for the gRPC status of a failure of the service: `UNKNOWN`,
/// `DEADLINE_EXCEEDED`, `RESOURCE_EXHAUSTED`, `UNIMPLEMENTED`, `INTERNAL`, `UNAVAILABLE` or
/// `DATA_LOSS`. With exhausted resources, those that OpenTelemetry counts as errors of a server.
fn is_grpc_failure(headers: &HeaderMap) -> bool {
    let status = headers.get(&GRPC_STATUS).map(HeaderValue::as_bytes);
    matches!(status, Some(b"2" | b"4" | b"8" | b"12" | b"13" | b"14" | b"15"))
}

/// Counts since the start: responses, errors, rejections, and of each budget the bytes that were
/// admitted and those that did not fit.
type ResponseCounts = [u64; 7];

/// The place of the rejections among the counts.
const SHEDS: usize = 2;

fn counts(admission: &Admission, responses: u64, errors: u64) -> ResponseCounts {
    let bytes = |budget| {
        admission.classes(budget).iter().fold([0; 2], |[admitted, rejected], class| {
            [admitted + class.admitted_bytes_total, rejected + class.rejected_bytes_total]
        })
    };
    let [[host, host_rejected], [device, device_rejected]] =
        [Budget::Host, Budget::Device].map(bytes);
    let sheds = admission.state().sheds_total();
    [responses, errors, sheds, host, host_rejected, device, device_rejected]
}

/// The rates of counts, averaged over [`REPORT_WINDOW`].
#[derive(Debug)]
struct Rates {
    at: Moment,
    counts: ResponseCounts,
    /// The time of the last rejection, as far as it was looked at.
    shed_at: Option<Moment>,
    /// The sums of rates by their weights, and of the weights.
    sums: [f64; 7],
    weight: f64,
}

impl Rates {
    const fn new(now: Moment, counts: ResponseCounts) -> Self {
        Self { at: now, counts, shed_at: None, sums: [0.0; 7], weight: 0.0 }
    }

    /// Adds what was counted since the last call.
    #[expect(clippy::cast_precision_loss, reason = "counts of a few seconds")]
    fn add(&mut self, now: Moment, counts: ResponseCounts) {
        if counts[SHEDS] != self.counts[SHEDS] {
            self.shed_at = Some(now);
        }
        let step = now - self.at;
        if step.is_zero() {
            return;
        }
        let before = std::mem::replace(&mut self.counts, counts);
        self.at = now;
        let weight = mean_weight(step, REPORT_WINDOW);
        let counted = counts.into_iter().zip(before);
        for (sum, (now, before)) in self.sums.iter_mut().zip(counted) {
            let count = now.wrapping_sub(before);
            *sum += weight * (count as f64 / step.as_secs_f64() - *sum);
        }
        self.weight += weight * (1.0 - self.weight);
    }

    /// Returns the rates of all counts, in each second.
    fn averages(&self) -> [f64; 7] {
        // The first response after the start is no rate yet.
        let weight = self.weight.max(mean_weight(REPORT_WINDOW / 2, REPORT_WINDOW));
        self.sums.map(|sum| sum / weight)
    }

    /// Returns the offered load divided by the admitted load, in requests or in the bytes of a
    /// budget, whichever is larger: 1 if all is admitted. If large requests are rejected and small
    /// ones fit, few requests are rejected but much of the memory that they ask for. A rejection
    /// that the handler makes up for, such as one of a permit that was to grow, is no error and no
    /// request.
    fn demand(&self) -> f64 {
        let [rps, eps, sheds, host, host_rejected, device, device_rejected] = self.averages();
        let sheds = sheds.min(eps);
        let admitted = [rps - sheds, host, device];
        let rejected = [sheds, host_rejected, device_rejected];
        let demands = admitted.iter().zip(rejected).filter(|(_, rejected)| *rejected > 0.0);
        let demands = demands.map(|(admitted, rejected)| 1.0 + rejected / admitted.max(0.0));
        demands.fold(1.0, f64::max).min(DEMAND_MAX)
    }
}
