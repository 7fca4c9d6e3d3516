//! One cell: a service in a fresh cgroup, load on it from another process, and what became of both.
//!
//! The service's death is an outcome, not a fault. Both processes and the cgroup end with the cell.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use lowtide::{BoxError, ByteSize};

use crate::common::figures::Figures;
use crate::common::own;
use crate::common::process::{self, Process};
use crate::load::{self, Seen};
use crate::measures::Measures;
use crate::mix::Mix;
use crate::policy::Policy;
use crate::schedule::{Offer, Sending};
use crate::service::Settings;

/// The time between two looks at the cgroup.
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// Checks that a cgroup with a limit can be made here, and read.
pub(crate) fn check() -> Result<(), String> {
    let group = process::group(ByteSize::mib(64))?;
    let charge = process::working_set(&group.folder);
    let seen = charge.is_some() && process::oom_kills(&group.folder).is_some();
    seen.then_some(()).ok_or_else(|| "its charge and its events cannot be read".to_owned())
}

/// A cell to be run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Plan {
    /// The policy that admits requests.
    pub(crate) policy: Policy,
    /// Times what fits.
    pub(crate) load: f64,
    /// Which sizes.
    pub(crate) mix: Mix,
    /// The factor by which estimates are multiplied.
    pub(crate) estimate: f64,
}

/// The settings and results that all cells share.
#[derive(Debug)]
pub(crate) struct Runner {
    /// The limit of the service's cgroup.
    pub(crate) limit: ByteSize,
    /// The time for which requests are offered.
    pub(crate) lasts: Duration,
    /// Of arrivals, sizes and holds.
    pub(crate) seed: u64,
    /// How requests are sent.
    pub(crate) sending: Sending,
    /// `true` if a request holds its body once, and not twice.
    pub(crate) one_copy: bool,
    /// The program of the policy `envoy80`.
    pub(crate) envoy: Option<PathBuf>,
    /// The results.
    pub(crate) figures: Figures,
    /// Cells of lowtide whose service did not live to the end.
    pub(crate) lost: Vec<String>,
}

impl Runner {
    /// Runs a cell, prints its line and keeps its figures.
    pub(crate) fn run(&mut self, plan: Plan) -> Result<Measures, BoxError> {
        let Plan { load, mix, .. } = plan;
        let mut offer = Offer::steady(mix, load * mix.fits(self.limit), self.lasts, self.seed);
        offer.sending = self.sending;
        let measures = self.offer(&name(plan), &self.settings(plan), &offer)?;
        measures.tell(&name(plan), &mut self.figures);
        Ok(measures)
    }

    /// Runs a service under an offer, and prints its line.
    pub(crate) fn offer(
        &mut self,
        name: &str,
        settings: &Settings,
        offer: &Offer,
    ) -> Result<Measures, BoxError> {
        let outcome = Bed::start(settings, self.limit)?.offer(offer.clone())?;
        let measures = Measures::of(offer, &outcome);
        println!("{name:<30} seed {:>3}  {measures}", self.seed);
        if settings.policy == Policy::Lowtide.to_string() && measures.died {
            self.lost.push(name.to_owned());
        }
        Ok(measures)
    }

    /// Returns the settings of the service in a cell.
    pub(crate) fn settings(&self, plan: Plan) -> Settings {
        Settings {
            policy: plan.policy.to_string(),
            estimate: plan.estimate,
            limit_bytes: self.limit.get(),
            one_copy: self.one_copy,
            envoy: self.envoy.clone(),
            waits_in_proxy: false,
        }
    }
}

/// The name of a cell in figures: all static budgets are one policy.
fn name(plan: Plan) -> String {
    let policy = match plan.policy {
        Policy::Static(_) => "static".to_owned(),
        policy => policy.to_string(),
    };
    let mut name = format!("{policy}.{}x.{}", plan.load, plan.mix.name());
    if (plan.estimate - 1.0).abs() > 1e-9 {
        name += &format!(".estimate_{}", plan.estimate);
    }
    name
}

/// The outcome of a cell.
#[derive(Clone, Debug)]
pub(crate) struct Outcome {
    /// `true` if the service ended too early.
    pub(crate) died: bool,
    /// The number of processes of the cgroup that the kernel killed for memory.
    pub(crate) oom_kills: u64,
    /// Highest working set of the cgroup that was seen.
    pub(crate) peak: ByteSize,
    /// The outcomes of the requests.
    pub(crate) seen: Vec<Seen>,
}

/// A service in its cgroup.
pub(crate) struct Bed {
    service: Process,
    /// The address of the proxy.
    pub(crate) front: SocketAddr,
}

impl Bed {
    /// Starts the service and waits until it listens.
    pub(crate) fn start(settings: &Settings, limit: ByteSize) -> Result<Self, BoxError> {
        let mut command = own()?;
        command.arg("--serve").arg(serde_json::to_string(settings)?);
        let mut service = Process::start_in_group(&command, limit)?;
        let front = service.first_line()?;
        Ok(Self { service, front })
    }

    /// Ends it, and returns the number of processes that the kernel killed.
    pub(crate) fn finish(self) -> u64 {
        self.service.end()
    }

    /// Puts the offered load on it, and ends it.
    fn offer(mut self, offer: Offer) -> Result<Outcome, BoxError> {
        let folder = self.service.folder().ok_or("no cgroup")?.to_owned();
        let mut peak = ByteSize::ZERO;
        let seen = load::offer(self.front, offer, || {
            peak = peak.max(process::working_set(&folder).unwrap_or_default());
            std::thread::sleep(LOOK_EVERY);
            Ok(self.service.ended().is_none())
        })?;
        let died = self.service.ended().is_some();
        let oom_kills = process::oom_kills(&folder).unwrap_or_default();
        Ok(Outcome { died, oom_kills, peak, seen })
    }
}
