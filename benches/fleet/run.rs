//! One run: three services, Envoy, and load from this process.
//!
//! Invariant: each service has the same settings, and all policies meet the same requests.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use lowtide::{BoxError, ByteSize};

use crate::balancer::Balancer;
use crate::common::figures::{Figures, count};
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

/// The outcome of a run, of the time that counts: bodies of the requests that were served in MiB/s,
/// requests that were shed, and those that were shed or failed.
pub(crate) type Outcome = [f64; 3];

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
    /// Measures a policy, and adds its figures. Returns the outcome, and `true` if a service was
    /// killed.
    pub(crate) fn measure(
        &self,
        policy: &str,
        figures: &mut Figures,
    ) -> Result<(Outcome, bool), BoxError> {
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
        let offered = offer.arrivals().iter().filter(|one| at.contains(&one.at)).count();
        let offered = count(offered as u64);
        let (start, mut looks) = (Instant::now(), Vec::new());
        let seen = load::offer(balancer.front, offer, || {
            let seen = balancer.seen()?;
            if at.contains(&start.elapsed()) {
                looks.push(seen);
            }
            std::thread::sleep(LOOK_EVERY);
            Ok(true)
        })?;
        let mut add = |name: &str, value, unit| {
            figures.add(format!("fleet.{policy}.{name}"), value, unit);
        };
        let oom_kills: u64 = services.into_iter().map(Process::end).sum();
        add("oom_kills", count(oom_kills), "kills");
        let ends = looks.first().zip(looks.last());
        let pairs = ends.into_iter().flat_map(|(first, last)| first.iter().zip(last));
        for (limit, (first, last)) in LIMITS.iter().zip(pairs) {
            let mib = limit.get() >> 20;
            add(&format!("requests_{mib}"), count(last.requests - first.requests), "requests");
        }
        let in_time = |one: &&load::Seen| at.contains(&Duration::from_secs_f64(one.at / 1e3));
        let with = |fate| seen.iter().filter(in_time).filter(move |one| one.fate == fate);
        let [served, shed] =
            [Fate::Served, Fate::Shed].map(|fate| count(with(fate).count() as u64));
        let bytes = with(Fate::Served).map(|one| one.bytes).sum();
        let goodput = count(bytes) / ByteSize::mib(1).as_f64() / self.lasts.as_secs_f64();
        add("goodput_mib_s", goodput, "MiB/s");
        add("shed", shed, "requests");
        // Those without an answer count as not served.
        Ok(([goodput, shed, offered - served], oom_kills > 0))
    }
}
