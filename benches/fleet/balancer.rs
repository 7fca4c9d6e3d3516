//! Envoy with the configuration of `deploy/envoy`, and what its admin interface says about the
//! services.

use std::net::SocketAddr;
use std::path::Path;
use std::time::{Duration, Instant};

use bytes::Bytes;
use common::http::{Http, client, get};
use common::process::{Process, free_port};
use http::Request;
use http_body_util::Full;
use lowtide::BoxError;
use serde_json::Value;

use crate::load::HOLD_HEADER;

const CONFIGURATION: &str = include_str!("../../deploy/envoy/envoy.yaml");
const REPORT_HEADER: &str = "endpoint-load-metrics";
/// The longest time until Envoy's health checks have found all services.
const HEALTH_PATIENCE: Duration = Duration::from_secs(10);
/// The time between two looks.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// The load balancing policies of Envoy, as figures name them, and their types: all services in turn;
/// weighted round robin by the load that services report, which is that of `deploy/envoy`; the
/// service with fewer requests under way, of two that are drawn.
pub(crate) const POLICIES: [(&str, &str); 3] = [
    ("round_robin", "round_robin.v3.RoundRobin"),
    ("orca", ""),
    ("least_request", "least_request.v3.LeastRequest"),
];

/// A service as Envoy sees it.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Seen {
    /// Requests so far.
    pub(crate) requests: u64,
    is_healthy: bool,
}

/// An Envoy that runs.
pub(crate) struct Balancer {
    _envoy: Process,
    pub(crate) front: SocketAddr,
    admin: SocketAddr,
    services: Vec<SocketAddr>,
    client: Http,
    runtime: tokio::runtime::Runtime,
}

impl Balancer {
    /// Starts Envoy in front of these services, and waits until it has found all of them healthy.
    pub(crate) fn start(
        program: &Path,
        policy: &str,
        is_quick: bool,
        services: &[SocketAddr],
    ) -> Result<Self, BoxError> {
        let (front, admin) = (free_port()?, free_port()?);
        let configuration = configuration(policy, is_quick, [front, admin], services)?;
        let balancer = Self {
            _envoy: common::start_envoy(program, &configuration, front)?,
            front,
            admin,
            services: services.to_vec(),
            client: client(),
            runtime: tokio::runtime::Builder::new_current_thread().enable_all().build()?,
        };
        let end = Instant::now() + HEALTH_PATIENCE;
        while !balancer.seen()?.iter().all(|service| service.is_healthy) {
            if Instant::now() > end {
                return Err("Envoy found no healthy services".into());
            }
            std::thread::sleep(LOOK_EVERY);
        }
        Ok(balancer)
    }

    /// Checks that each service reports its load, and that Envoy keeps the reports from clients.
    pub(crate) fn check_reports(&self) -> Result<(), BoxError> {
        let services = self.services.iter().map(|at| (at, true));
        for (at, is_expected) in services.chain([(&self.front, false)]) {
            let request = Request::post(format!("http://{at}/hold")).header(HOLD_HEADER, 0);
            let request = request.body(Full::<Bytes>::default())?;
            let answer = self.runtime.block_on(self.client.request(request))?;
            let is_shown = answer.headers().contains_key(REPORT_HEADER);
            if is_shown != is_expected || !answer.status().is_success() {
                return Err(format!("{at}: {}, load report: {is_shown}", answer.status()).into());
            }
        }
        Ok(())
    }

    /// Returns what Envoy says about each service, in their order.
    pub(crate) fn seen(&self) -> Result<Vec<Seen>, BoxError> {
        let url = format!("http://{}/clusters?format=json", self.admin);
        let text = self.runtime.block_on(get(&self.client, &url))?;
        let text: Value = serde_json::from_slice(&text)?;
        let hosts = text.pointer("/cluster_statuses/0/host_statuses").and_then(Value::as_array);
        let hosts = hosts.ok_or_else(|| format!("Envoy names no services: {text}"))?;
        let of = |service: &SocketAddr| {
            let port = |host: &&Value| {
                let port = host.pointer("/address/socket_address/port_value");
                port.and_then(Value::as_u64) == Some(service.port().into())
            };
            let host = hosts.iter().find(port);
            host.map(read).ok_or_else(|| format!("Envoy does not know {service}").into())
        };
        self.services.iter().map(of).collect()
    }
}

/// Reads the status of a service. Numbers that are 0 are left out.
fn read(host: &Value) -> Seen {
    let stats = host["stats"].as_array().map_or(&[][..], Vec::as_slice);
    let stat = |name: &str| {
        let found = stats.iter().find(|stat| stat["name"] == name);
        let text = found.and_then(|stat| stat["value"].as_str());
        text.and_then(|text| text.parse().ok()).unwrap_or(0)
    };
    let health = &host["health_status"];
    Seen {
        requests: stat("rq_total"),
        is_healthy: health["failed_active_health_check"] != true
            && health["eds_health_status"] == "HEALTHY",
    }
}

/// Returns the configuration of `deploy/envoy` with this policy and these addresses, without
/// retries, and if it is to be quick with a blackout period of 2 s.
fn configuration(
    policy: &str,
    is_quick: bool,
    [front, admin]: [SocketAddr; 2],
    services: &[SocketAddr],
) -> Result<String, String> {
    let mut text = CONFIGURATION.to_owned();
    // Replaces from the begin of one text up to another.
    let mut set = |from: &str, to: &str, by: &str| {
        let start = text.find(from).ok_or_else(|| format!("envoy.yaml has no {from:?}"))?;
        let end = text[start..].find(to).ok_or_else(|| format!("envoy.yaml has no {to:?}"))?;
        text.replace_range(start..start + end, by);
        Ok::<_, String>(())
    };
    set("port_value: 9901", " }", &format!("port_value: {}", admin.port()))?;
    set("port_value: 10000", " }", &format!("port_value: {}", front.port()))?;
    set("type: STRICT_DNS", "\n", "type: STATIC")?;
    let endpoints = services.iter().map(|at| {
        let (ip, port) = (at.ip(), at.port());
        format!(
            "- endpoint: {{ address: {{ socket_address: {{ address: {ip}, port_value: {port} }} }} \
             , health_check_config: {{ port_value: {port} }} }}"
        )
    });
    let endpoints = endpoints.collect::<Vec<_>>().join("\n        ");
    set("- endpoint: {", "\n", &endpoints)?;
    set("retry_policy:", "# Envoy keeps a copy", "\n                ")?;
    let kind = POLICIES.iter().find(|(name, _)| *name == policy).map_or("", |(_, kind)| kind);
    if !kind.is_empty() {
        let package = "type.googleapis.com/envoy.extensions.load_balancing_policies";
        let typed = format!(
            "typed_extension_config: {{ name: envoy.load_balancing_policies.{policy}, \
             typed_config: {{ \"@type\": {package}.{kind} }} }}\n"
        );
        set("typed_extension_config:", "    health_checks:", &typed)?;
    } else if is_quick {
        set("blackout_period: 10s", "\n", "blackout_period: 2s")?;
    }
    Ok(text)
}
