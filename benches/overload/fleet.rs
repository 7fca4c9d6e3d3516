//! A fleet: three services of 128, 256 and 512 MiB behind a real Envoy, which distributes requests
//! by the load that the services report, or in turn.
//!
//! Envoy has the configuration of `deploy/envoy`, with the addresses of this machine and the policy
//! that is measured. The load is open-loop and memory-bound: each request holds its memory for
//! seconds. Together the services can hold it, but the small one cannot hold a third of it. Each
//! policy meets the same requests, in pairs of runs that alternate. What is offered in the first 20
//! s does not count: until Envoy's blackout period is over, all services have the same weight, and
//! lowtide learns the needs of requests.

use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use axum::body::Body;
use common::figures::{Figures, count, part};
use common::http::{Http, client, get};
use common::process::{Process, free_port};
use http::Request;
use lowtide::{BoxError, ByteSize, Memory};

use crate::cell::{Cell, Service};
use crate::load::{self, Fate, HOLD_HEADER};
use crate::offer::{BASE, CEILING, HOLD, Mix, Offer, Sending};

/// How often each policy is measured, each time with another seed.
const PAIRS: u64 = 3;

/// Measures all pairs, or if it is quick a short one, and adds the figures. Returns `true` if no
/// service was killed and, if it is quick, load reports halved the requests that are not served.
pub(crate) fn run(
    base: &Cell,
    envoy: &Path,
    is_quick: bool,
    figures: &mut Figures,
) -> Result<bool, BoxError> {
    // The time that does not count is more than Envoy's blackout period.
    let (pairs, warm, lasts) = if is_quick { (1, 10, 12) } else { (PAIRS, 20, 30) };
    let mut all_held = true;
    for pair in 0..pairs {
        let run = Run {
            cell: Cell { service: Service::Fleet, seed: base.seed + pair, ..base.clone() },
            envoy,
            warm: Duration::from_secs(warm),
            lasts: Duration::from_secs(lasts),
            is_quick,
        };
        let mut outcomes = [[0.0; 3]; 2];
        // In turns: what changes on the machine meanwhile falls on both.
        for at in if pair % 2 == 0 { [0, 1] } else { [1, 0] } {
            let policy = ["round_robin", "orca"][at];
            let (outcome, is_killed) = run.measure(policy, figures)?;
            println!("seed {} {policy}: {outcome:.1?}", run.cell.seed);
            all_held &= !is_killed;
            outcomes[at] = outcome;
        }
        let [base, orca] = outcomes;
        for (name, at) in [("goodput_ratio", 0), ("shed_ratio", 1)] {
            figures.add(format!("fleet.orca.{name}"), part(orca[at], base[at]), "ratio");
        }
        if 2.0 * orca[2] >= base[2] {
            println!("load reports did not halve the requests that are not served");
            all_held &= !is_quick;
        }
    }
    Ok(all_held)
}

/// The limits of the services.
const LIMITS: [ByteSize; 3] = [ByteSize::mib(128), ByteSize::mib(256), ByteSize::mib(512)];
/// Memory that each service holds from its start, such as a cache or a small model.
const RESIDENT: ByteSize = ByteSize::mib(32);
/// The memory that requests hold on average, in parts of what the services can hold.
const LOAD: f64 = 0.95;
const MIX: Mix = Mix::Small;
/// The body, collected whole, and a copy of it.
const COPIES: u32 = 2;
/// Further copies of its body that each request holds.
const MORE_COPIES: u32 = 2;
/// The time for which load is offered after the time that counts, so that the last requests meet
/// the same load as the others.
const AFTER: Duration = Duration::from_secs(3);

/// The settings of a run: three services with the same settings, Envoy, and load from this process.
struct Run<'a> {
    cell: Cell,
    envoy: &'a Path,
    /// The time that does not count.
    warm: Duration,
    /// The time that counts.
    lasts: Duration,
    /// `true` if Envoy's blackout period is 2 s.
    is_quick: bool,
}

/// The outcome of a run, of the time that counts: bodies of the requests that were served in MiB/s,
/// requests that were shed, and those that were shed or failed.
type Outcome = [f64; 3];

/// Requests a second. The room of a service is a model for choosing the load, with lowtide's first
/// ceiling.
fn rate() -> f64 {
    let hold = (HOLD[0] + HOLD[1]).as_secs_f64() / 2.0;
    let held = MIX.mean(|body| body.as_f64()) * f64::from(COPIES + MORE_COPIES);
    let room = |limit: ByteSize| {
        limit.scaled(CEILING).saturating_sub(BASE).saturating_sub(RESIDENT).as_f64()
    };
    LOAD * LIMITS.map(room).iter().sum::<f64>() / (hold * held)
}

impl Run<'_> {
    /// Measures a policy, and adds its figures. Returns the outcome, and `true` if a service was
    /// killed.
    fn measure(&self, policy: &str, figures: &mut Figures) -> Result<(Outcome, bool), BoxError> {
        let services = LIMITS.map(|limit| self.cell.start(limit)).into_iter();
        let services = services.collect::<Result<Vec<_>, _>>()?;
        let (services, addresses): (Vec<_>, Vec<_>) = services.into_iter().unzip();
        let balancer = Balancer::start(self.envoy, policy, self.is_quick, &addresses)?;
        balancer.check_reports(&addresses)?;
        let sending = Sending { copies: MORE_COPIES, ..Sending::default() };
        let lasts = self.warm + self.lasts + AFTER;
        let offer = Offer { mix: MIX, rate: rate(), lasts, seed: self.cell.seed, sending };
        let at = self.warm..self.warm + self.lasts;
        let offered = offer.arrivals().iter().filter(|one| at.contains(&one.at)).count();
        let offered = count(offered as u64);
        let seen = load::offer(balancer.front, offer, || {
            std::thread::sleep(HEALTH_EVERY);
            Ok(true)
        })?;
        let mut add = |name: &str, value, unit| {
            figures.add(format!("fleet.{policy}.{name}"), value, unit);
        };
        let oom_kills: u64 = services.into_iter().map(Process::end).sum();
        add("oom_kills", count(oom_kills), "kills");
        let in_time = |one: &&load::Seen| at.contains(&one.arrival.at);
        let with = |fate| seen.iter().filter(in_time).filter(move |one| one.fate == fate);
        let [served, shed] =
            [Fate::Served, Fate::Shed].map(|fate| count(with(fate).count() as u64));
        let bytes = with(Fate::Served).map(|one| one.arrival.size.get()).sum();
        let goodput = count(bytes) / ByteSize::mib(1).as_f64() / self.lasts.as_secs_f64();
        add("goodput_mib_s", goodput, "MiB/s");
        add("shed", shed, "requests");
        // Those without an answer count as not served.
        Ok(([goodput, shed, offered - served], oom_kills > 0))
    }
}

/// Is a service: `POST /hold` behind lowtide's layer, with the settings of a user who sets none but load
/// reports. Serves until standard input ends.
pub(crate) async fn serve() -> Result<(), BoxError> {
    let _resident = vec![1_u8; RESIDENT.as_usize().unwrap_or(0)];
    let memory = Memory::builder().start()?;
    let routes = load::routes().layer(memory.layer().with_load_reports());
    println!("{}", crate::serve_routes(routes.merge(memory.routes())).await?);
    common::told_to_end().await
}

const CONFIGURATION: &str = include_str!("../../deploy/envoy/envoy.yaml");
const REPORT_HEADER: &str = "endpoint-load-metrics";
/// The longest time until Envoy's health checks have found all services.
const HEALTH_PATIENCE: Duration = Duration::from_secs(10);
/// The time between two looks.
const HEALTH_EVERY: Duration = Duration::from_millis(100);

/// An Envoy that runs.
struct Balancer {
    _envoy: Process,
    front: SocketAddr,
    admin: SocketAddr,
    client: Http,
    runtime: tokio::runtime::Runtime,
}

impl Balancer {
    /// Starts Envoy in front of these services, and waits until it has found all of them healthy.
    fn start(
        program: &Path,
        policy: &str,
        is_quick: bool,
        services: &[SocketAddr],
    ) -> Result<Self, BoxError> {
        let (front, admin) = (free_port()?, free_port()?);
        let configuration = configuration(policy, is_quick, [front, admin], services)?;
        let balancer = Self {
            _envoy: start_envoy(program, &configuration, front)?,
            front,
            admin,
            client: client(),
            runtime: tokio::runtime::Builder::new_current_thread().enable_all().build()?,
        };
        let end = Instant::now() + HEALTH_PATIENCE;
        while balancer.healthy()? < services.len() {
            if Instant::now() > end {
                return Err("Envoy found no healthy services".into());
            }
            std::thread::sleep(HEALTH_EVERY);
        }
        Ok(balancer)
    }

    /// Checks that each service reports its load, and that Envoy keeps the reports from clients.
    fn check_reports(&self, services: &[SocketAddr]) -> Result<(), BoxError> {
        let services = services.iter().map(|at| (at, true));
        for (at, is_expected) in services.chain([(&self.front, false)]) {
            let request = Request::post(format!("http://{at}/hold")).header(HOLD_HEADER, 0);
            let answer = self.client.request(request.body(Body::empty())?);
            let answer = self.runtime.block_on(answer)?;
            let is_shown = answer.headers().contains_key(REPORT_HEADER);
            if is_shown != is_expected || !answer.status().is_success() {
                return Err(format!("{at}: {}, load report: {is_shown}", answer.status()).into());
            }
        }
        Ok(())
    }

    /// Returns how many services Envoy has found healthy.
    fn healthy(&self) -> Result<usize, BoxError> {
        let url = format!("http://{}/clusters", self.admin);
        let text = self.runtime.block_on(get(&self.client, &url))?;
        Ok(text.matches("::health_flags::healthy\n").count())
    }
}

/// Starts Envoy with this configuration and waits until it listens at its address. It ends with
/// this process, even if this process is killed.
fn start_envoy(
    program: &Path,
    configuration: &str,
    front: SocketAddr,
) -> Result<Process, BoxError> {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL"]).arg(program);
    command.args(["--disable-hot-restart", "--concurrency", "2", "--log-level", "error"]);
    let mut envoy = Process::spawn(command.args(["--config-yaml", configuration]))?;
    envoy.accepts(front)?;
    Ok(envoy)
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
    if policy == "round_robin" {
        let typed = "typed_extension_config: { name: envoy.load_balancing_policies.round_robin, \
             typed_config: { \"@type\": type.googleapis.com/envoy.extensions.\
             load_balancing_policies.round_robin.v3.RoundRobin } }\n";
        set("typed_extension_config:", "    health_checks:", typed)?;
    } else if is_quick {
        set("blackout_period: 10s", "\n", "blackout_period: 2s")?;
    }
    Ok(text)
}
