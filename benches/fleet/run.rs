//! One run: three services, Envoy, and load from another process.
//!
//! Invariant: each service has the same settings, and all policies meet the same requests.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use lowtide::{BoxError, ByteSize};

use crate::balancer::{Balancer, Seen};
use crate::common::figures::{Figures, count, part, quantile};
use crate::common::own;
use crate::common::process::Process;
use crate::load::{self, Fate};
use crate::mix::{BASE, CEILING, HOLD, Mix};
use crate::schedule::{Offer, Sending};

/// The limits of the services.
pub(crate) const LIMITS: [ByteSize; 3] =
    [ByteSize::mib(128), ByteSize::mib(256), ByteSize::mib(512)];
/// Memory that each service holds from its start, such as a cache or a small model.
pub(crate) const RESIDENT: ByteSize = ByteSize::mib(32);
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
/// The time between two looks at the weights.
const LOOK_EVERY: Duration = Duration::from_millis(250);

/// The settings of a run.
#[derive(Clone, Debug)]
pub(crate) struct Run {
    pub(crate) envoy: PathBuf,
    pub(crate) seed: u64,
    /// The time that does not count.
    pub(crate) warm: Duration,
    /// The time that counts.
    pub(crate) lasts: Duration,
    /// `true` if Envoy's blackout period is 2 s.
    pub(crate) is_quick: bool,
}

/// The outcome of a run, of the time that counts.
#[derive(Clone, Debug, Default)]
pub(crate) struct Outcome {
    /// Bodies of the requests that were served, in MiB/s.
    pub(crate) goodput_mib: f64,
    pub(crate) served: u64,
    pub(crate) shed: u64,
    pub(crate) failed: u64,
    /// Requests at each service.
    requests: Vec<u64>,
    pub(crate) oom_kills: u64,
}

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

impl Run {
    /// Measures a policy.
    pub(crate) fn measure(&self, policy: &str) -> Result<Outcome, BoxError> {
        let mut services = Vec::new();
        let mut addresses = Vec::new();
        for limit in LIMITS {
            let mut command = own()?;
            command.arg("--serve");
            let mut service = Process::start_in_group(&command, limit)?;
            addresses.push(service.first_line()?);
            services.push(service);
        }
        let balancer = Balancer::start(&self.envoy, policy, self.is_quick, &addresses)?;
        balancer.check_reports()?;
        let mut offer = Offer::steady(MIX, rate(), self.warm + self.lasts + AFTER, self.seed);
        offer.sending = Sending { copies: MORE_COPIES, ..Sending::default() };
        let at = self.warm..self.warm + self.lasts;
        let offered = offer.arrivals().iter().filter(|one| at.contains(&one.at)).count() as u64;
        let (start, mut looks) = (Instant::now(), Vec::new());
        let seen = load::offer(balancer.front, offer, || {
            let seen = balancer.seen()?;
            if at.contains(&start.elapsed()) {
                looks.push(seen);
            }
            std::thread::sleep(LOOK_EVERY);
            Ok(true)
        })?;
        let oom_kills = services.into_iter().map(Process::end).sum();
        Ok(Outcome { oom_kills, ..self.outcome(&seen, offered, &looks) })
    }

    fn outcome(&self, seen: &[load::Seen], offered: u64, looks: &[Vec<Seen>]) -> Outcome {
        let millis = |time: Duration| time.as_secs_f64() * 1e3;
        let at = millis(self.warm)..millis(self.warm + self.lasts);
        let counted: Vec<_> = seen.iter().filter(|one| at.contains(&one.at)).collect();
        let number = |fate: Fate| counted.iter().filter(|one| one.fate == fate).count() as u64;
        let served = counted.iter().filter(|one| one.fate == Fate::Served);
        let bytes: u64 = served.map(|one| one.bytes).sum();
        let late: Vec<f64> = counted.iter().map(|one| one.late).collect();
        let weights = (0..LIMITS.len()).map(|nth| {
            let all = looks.iter().filter_map(|look| look.get(nth));
            quantile(&all.map(|one| count(one.weight)).collect::<Vec<_>>(), 0.5)
        });
        let weights: Vec<_> = weights.collect();
        println!("  median weights {weights:?}; sent up to {:.0} ms late", quantile(&late, 0.99));
        let ends = looks.first().zip(looks.last());
        let pairs = ends.into_iter().flat_map(|(first, last)| first.iter().zip(last));
        let (served, shed) = (number(Fate::Served), number(Fate::Shed));
        Outcome {
            goodput_mib: part(ByteSize::new(bytes).as_f64(), ByteSize::mib(1).as_f64())
                / self.lasts.as_secs_f64(),
            served,
            shed,
            // Those without an answer too.
            failed: offered.saturating_sub(served + shed),
            requests: pairs.map(|(first, last)| last.requests - first.requests).collect(),
            oom_kills: 0,
        }
    }
}

impl Outcome {
    /// Returns the requests that were shed or failed.
    pub(crate) const fn unserved(&self) -> u64 {
        self.shed + self.failed
    }

    /// Adds the figures of a run.
    pub(crate) fn add(&self, policy: &str, figures: &mut Figures) {
        let mut add = |name: &str, value, unit| {
            figures.add(format!("fleet.{}.{name}", policy), value, unit);
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
