//! One run: three services, Envoy, and load from another process.
//!
//! Invariant: each service has the same settings, and all policies meet the same requests.

use std::io::{BufReader, Read as _};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use lowtide::{BoxError, ByteSize};

use crate::balancer::{Balancer, Changes, Policy, Seen};
use crate::cgroup::Group;
use crate::charge::{self, Ticks};
use crate::figures::{Figures, count, part, quantile};
use crate::load::{Fate, Order, Tally};
use crate::mix::{BASE, CEILING, HOLD, Mix};
use crate::process::{self, Process, remove};
use crate::schedule::{Offer, Sending};
use crate::service::Settings;

/// The limits of the services.
pub(crate) const LIMITS: [ByteSize; 3] =
    [ByteSize::mib(128), ByteSize::mib(256), ByteSize::mib(512)];
/// The body, collected whole, and a copy of it.
const COPIES: u32 = 2;
/// The time for which load is offered after the time that counts, so that the last requests meet
/// the same load as the others.
const AFTER: Duration = Duration::from_secs(3);
/// The time between two looks at the weights.
const LOOK_EVERY: Duration = Duration::from_millis(250);

/// The settings of a run.
#[derive(Clone, Debug)]
pub(crate) struct Run {
    pub(crate) envoy: PathBuf,
    pub(crate) seed: u64,
    /// The memory that requests hold on average, in parts of what the services can hold.
    pub(crate) load: f64,
    pub(crate) mix: Mix,
    /// Further copies of its body that a request holds.
    pub(crate) copies: u32,
    /// Memory that each service holds from its start.
    pub(crate) resident: ByteSize,
    /// The time that does not count.
    pub(crate) warm: Duration,
    /// The time that counts.
    pub(crate) lasts: Duration,
    pub(crate) has_retries: bool,
    pub(crate) is_quick: bool,
    pub(crate) shows_weights: bool,
}

/// The outcome of a run, of the time that counts.
#[derive(Clone, Debug, Default)]
pub(crate) struct Outcome {
    /// Bodies of the requests that were served, in MiB/s.
    pub(crate) goodput_mib: f64,
    pub(crate) offered: u64,
    pub(crate) served: u64,
    pub(crate) shed: u64,
    pub(crate) failed: u64,
    /// Requests at each service.
    requests: Vec<u64>,
    /// Median weight of each service.
    weights: Vec<f64>,
    pub(crate) oom_kills: u64,
    /// The delay of the sending, 99th percentile in milliseconds.
    late_ms: f64,
    /// The part of the processors' time that was used, by other programs too.
    busy: f64,
}

impl Run {
    /// Returns the memory that a service with this limit has for requests: a model for choosing the
    /// load, with lowtide's first ceiling.
    fn room(&self, limit: ByteSize) -> ByteSize {
        limit.scaled(CEILING).saturating_sub(BASE).saturating_sub(self.resident)
    }

    /// Requests a second.
    fn rate(&self) -> f64 {
        let hold = (HOLD[0] + HOLD[1]).as_secs_f64() / 2.0;
        let held = self.mix.mean(|body| body.as_f64()) * f64::from(COPIES + self.copies);
        let room: f64 = LIMITS.iter().map(|limit| self.room(*limit).as_f64()).sum();
        self.load * room / (hold * held)
    }

    /// Returns the load in words.
    pub(crate) fn explained(&self) -> String {
        let [small, medium, large] = LIMITS.map(|limit| self.room(limit));
        format!(
            "services of 128, 256 and 512 MiB with room for {small}, {medium} and {large} of \
             requests; {:.0} requests a second, each holds {} times its body for {:.1} to {:.1} s: \
             {:.0} % of that room",
            self.rate(),
            COPIES + self.copies,
            HOLD[0].as_secs_f64(),
            HOLD[1].as_secs_f64(),
            100.0 * self.load
        )
    }

    /// Measures a policy.
    pub(crate) fn measure(&self, policy: Policy) -> Result<Outcome, BoxError> {
        let services: Vec<Service> =
            LIMITS.iter().map(|limit| Service::start(self, *limit)).collect::<Result<_, _>>()?;
        let addresses: Vec<_> = services.iter().map(|service| service.address).collect();
        let Self { has_retries, is_quick, .. } = *self;
        let changes = Changes { policy, has_retries, is_quick };
        let balancer = Balancer::start(&self.envoy, changes, &addresses)?;
        balancer.check_reports()?;
        let mut offer =
            Offer::steady(self.mix, self.rate(), self.warm + self.lasts + AFTER, self.seed);
        offer.sending = Sending { copies: self.copies, ..Sending::default() };
        let at = self.warm..self.warm + self.lasts;
        let offered = offer.arrivals().iter().filter(|one| at.contains(&one.at)).count() as u64;
        let order = Order { to: balancer.front, offer };
        let mut command = process::own()?;
        command.arg("--generate").arg(serde_json::to_string(&order)?);
        let mut load = Process::start(command)?;
        let output = load.0.stdout.take().ok_or("no pipe from the load process")?;
        let is_over = AtomicBool::new(false);
        let (text, looks) = std::thread::scope(|scope| {
            let read = scope.spawn(|| {
                let mut text = String::new();
                let read = BufReader::new(output).read_to_string(&mut text);
                is_over.store(true, Ordering::Relaxed);
                read.map(|_| text)
            });
            let looks = self.look(&balancer, &is_over);
            let text = read.join().map_err(|_| "the reader of the load process panicked")?;
            Ok::<_, BoxError>((text?, looks?))
        })?;
        let tally: Tally =
            serde_json::from_str(&text).map_err(|error| format!("no tally: {error}"))?;
        let oom_kills = services.into_iter().map(Service::end).sum::<Result<u64, BoxError>>()?;
        Ok(Outcome { oom_kills, ..self.outcome(&tally, offered, &looks) })
    }

    /// Looks at the weights until the load is over.
    fn look(&self, balancer: &Balancer, is_over: &AtomicBool) -> Result<Looks, BoxError> {
        let start = Instant::now();
        let mut looks = Looks::default();
        let mut shown = 0;
        while !is_over.load(Ordering::Relaxed) {
            let seen = balancer.seen()?;
            let at = start.elapsed();
            if self.shows_weights && at.as_secs() > shown {
                shown = at.as_secs();
                let each = seen.iter().map(|one| format!("{} ({})", one.weight, one.active));
                println!("  {shown:>3} s: weights {}", each.collect::<Vec<_>>().join(", "));
            }
            if at >= self.warm && at < self.warm + self.lasts {
                if looks.counted.is_empty() {
                    looks.ticks = Some(Ticks::now());
                }
                looks.busy = looks.ticks.map_or(0.0, |ticks| Ticks::now().busy_since(ticks));
                looks.counted.push(seen);
            }
            std::thread::sleep(LOOK_EVERY);
        }
        Ok(looks)
    }

    fn outcome(&self, tally: &Tally, offered: u64, looks: &Looks) -> Outcome {
        let millis = |time: Duration| time.as_secs_f64() * 1e3;
        let at = millis(self.warm)..millis(self.warm + self.lasts);
        let counted: Vec<_> = tally.seen.iter().filter(|one| at.contains(&one.at)).collect();
        let number = |fate: Fate| counted.iter().filter(|one| one.fate == fate).count() as u64;
        let served = counted.iter().filter(|one| one.fate == Fate::Served);
        let bytes: u64 = served.map(|one| one.bytes).sum();
        let late: Vec<f64> = counted.iter().map(|one| one.late).collect();
        let (served, shed) = (number(Fate::Served), number(Fate::Shed));
        Outcome {
            goodput_mib: part(ByteSize::new(bytes).as_f64(), ByteSize::mib(1).as_f64())
                / self.lasts.as_secs_f64(),
            offered,
            served,
            shed,
            // Those without an answer too.
            failed: offered.saturating_sub(served + shed),
            requests: looks.requests(),
            weights: looks.weights(),
            oom_kills: 0,
            late_ms: quantile(&late, 0.99),
            busy: looks.busy,
        }
    }
}

/// What was seen while the load counted.
#[derive(Debug, Default)]
struct Looks {
    counted: Vec<Vec<Seen>>,
    ticks: Option<Ticks>,
    busy: f64,
}

impl Looks {
    /// Returns the requests at each service.
    fn requests(&self) -> Vec<u64> {
        let (Some(first), Some(last)) = (self.counted.first(), self.counted.last()) else {
            return Vec::new();
        };
        let pairs = first.iter().zip(last);
        pairs.map(|(first, last)| last.requests.saturating_sub(first.requests)).collect()
    }

    /// Returns the median weight of each service.
    fn weights(&self) -> Vec<f64> {
        let weights = |at: usize| {
            let all = self.counted.iter().filter_map(|look| look.get(at));
            quantile(&all.map(|one| count(one.weight)).collect::<Vec<_>>(), 0.5)
        };
        (0..LIMITS.len()).map(weights).collect()
    }
}

impl Outcome {
    /// Returns the requests that were shed or failed.
    pub(crate) const fn unserved(&self) -> u64 {
        self.shed + self.failed
    }

    /// Returns the line of a run.
    pub(crate) fn line(&self, policy: Policy) -> String {
        let all = count(self.requests.iter().sum());
        let shares =
            self.requests.iter().map(|one| format!("{:.0}", 100.0 * part(count(*one), all)));
        format!(
            "{policy:<13} goodput {:.1} MiB/s; {} offered, {} served, {} shed, {} failed; \
             shares {} %; weights {:?}; {} OOM kills; sent up to {:.0} ms late; CPU {:.0} %",
            self.goodput_mib,
            self.offered,
            self.served,
            self.shed,
            self.failed,
            shares.collect::<Vec<_>>().join(", "),
            self.weights,
            self.oom_kills,
            self.late_ms,
            100.0 * self.busy
        )
    }

    /// Adds the figures of a run.
    pub(crate) fn add(&self, policy: Policy, figures: &mut Figures) {
        let mut add = |name: &str, value, unit| {
            figures.add(&format!("fleet.{policy}.{name}"), value, unit);
        };
        add("goodput_mib_s", self.goodput_mib, "MiB/s");
        add("served", count(self.served), "requests");
        add("shed", count(self.shed), "requests");
        add("failed", count(self.failed), "requests");
        for (limit, requests) in LIMITS.iter().zip(&self.requests) {
            let mib = limit.get() >> 20;
            add(&format!("requests_{mib}"), count(*requests), "requests");
        }
    }
}

/// A service in its cgroup, or with a limit of its own if no cgroup can be made.
struct Service {
    process: Process,
    group: Option<Group>,
    address: std::net::SocketAddr,
}

impl Service {
    fn start(run: &Run, limit: ByteSize) -> Result<Self, BoxError> {
        let name = format!("lowtide-fleet-{}-{}", std::process::id(), limit.get() >> 20);
        let group = Group::make(&name, Some(limit.get())).ok();
        let mut command = match &group {
            Some(group) => process::entering(group)?,
            None => {
                let mut command = process::own()?;
                command.env("LOWTIDE_MEMORY_LIMIT", limit.get().to_string());
                command
            }
        };
        let settings = Settings { resident_bytes: run.resident.as_usize().unwrap_or(0) };
        command.arg("--serve").arg(serde_json::to_string(&settings)?);
        let mut process = Process::start(command)?;
        let (address, _) = process.addresses()?;
        Ok(Self { process, group, address })
    }

    /// Ends it, and returns the number of processes that the kernel killed.
    fn end(mut self) -> Result<u64, BoxError> {
        let folder = self.group.as_ref().map(|group| group.folder.clone());
        let kills = folder.as_ref().and_then(|folder| charge::oom_kills(folder)).unwrap_or(0);
        let has_ended = self.process.ended().is_some();
        self.process.end()?;
        if let Some(folder) = folder {
            remove(&folder);
        }
        if has_ended && kills == 0 {
            return Err("a service ended early".into());
        }
        Ok(kills)
    }
}
