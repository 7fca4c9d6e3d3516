//! One cell: a service in a fresh cgroup, load on it from this process, and what became of both.
//!
//! The service's death is an outcome, not a fault. The process and the cgroup end with the cell.
//!
//! Goodput is that of the steady part: answers that ended after the longest hold had passed once
//! and before the load ended, over that time. What was shed, and how the classes shared, is of all
//! requests. A request without an outcome is failed: what was under way when its service died.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use common::figures::{Figures, count, part, quantile};
use common::process::{self, Process};
use lowtide::{BoxError, ByteSize};
use serde::{Deserialize, Serialize};

use crate::load::{self, Fate, Seen};
use crate::offer::{CLASSES, HOLD, Mix, Offer, Policy, Sending};

/// The time between two looks at the cgroup.
const LOOK_EVERY: Duration = Duration::from_millis(5);
/// Bytes of a MiB.
const MIB: f64 = 1_048_576.0;
/// A route and size is learned after so many requests.
const LEARNED: usize = 30;

/// Checks that a cgroup with a limit can be made here, and read.
pub(crate) fn check() -> Result<(), String> {
    let group = process::group(ByteSize::mib(64))?;
    let charge = process::working_set(&group.folder);
    let seen = charge.is_some() && process::oom_kills(&group.folder).is_some();
    seen.then_some(()).ok_or_else(|| "its charge and its events cannot be read".to_owned())
}

/// A cell to be run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Cell {
    pub(crate) policy: Policy,
    /// Times what fits.
    pub(crate) load: f64,
    /// Which sizes.
    pub(crate) mix: Mix,
    /// The factor by which estimates from the body's length are multiplied, to make them wrong; 0
    /// if the service gives none.
    pub(crate) estimate: f64,
    /// The limit of the service's cgroup.
    pub(crate) limit_bytes: u64,
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
    /// Where lowtide's requests wait for room, since the proxy and the service admit in one ledger:
    /// `true` if in the proxy, for its model, and else in front of the service that holds bodies.
    pub(crate) waits_in_proxy: bool,
}

impl Cell {
    pub(crate) const fn limit(&self) -> ByteSize {
        ByteSize::new(self.limit_bytes)
    }

    /// Starts the service, and waits until it prints the address of its proxy.
    pub(crate) fn start(&self) -> Result<(Process, SocketAddr), BoxError> {
        common::serve(&["--serve", &serde_json::to_string(self)?], self.limit())
    }

    /// Runs it, prints its outcome and adds its figures.
    pub(crate) fn run(&self, figures: &mut Figures) -> Result<Measures, BoxError> {
        let rate = self.load * self.mix.fits(self.limit());
        let mut offer = Offer::steady(self.mix, rate, self.lasts, self.seed);
        offer.sending = self.sending;
        let (mut service, front) = self.start()?;
        let folder = service.folder().ok_or("no cgroup")?.to_owned();
        let mut peak = ByteSize::ZERO;
        let seen = load::offer(front, offer.clone(), || {
            peak = peak.max(process::working_set(&folder).unwrap_or_default());
            std::thread::sleep(LOOK_EVERY);
            Ok(service.ended().is_none())
        })?;
        let mut measures = Measures::of(&offer, &seen);
        measures.died = service.ended().is_some();
        measures.oom_kills = process::oom_kills(&folder).unwrap_or_default();
        measures.peak_mib = peak.as_f64() / MIB;
        println!("{} seed {}: {measures:.2?}", self.name(), self.seed);
        measures.tell(&format!("overload.{}", self.name()), figures);
        if self.policy == Policy::Lowtide && measures.died {
            println!("FAILED: the service under lowtide did not survive {}", self.name());
        }
        Ok(measures)
    }

    /// Its name in figures: all static budgets are one policy.
    fn name(&self) -> String {
        let policy = match self.policy {
            Policy::Static(_) => "static".to_owned(),
            other => other.to_string(),
        };
        let mut name = format!("{policy}.{}x.{}", self.load, self.mix.name());
        if (self.estimate - 1.0).abs() > 1e-9 {
            name += &format!(".estimate_{}", self.estimate);
        }
        name
    }
}

/// The numbers of one cell.
#[derive(Clone, Debug, Default)]
pub(crate) struct Measures {
    /// MiB of bodies that were served a second.
    goodput_mib: f64,
    /// The same of the second half of the time: once everything is learned.
    pub(crate) learned_goodput_mib: f64,
    /// The part of the offered bytes that was shed.
    shed_bytes: f64,
    /// Requests that were shed after the first [`LEARNED`] ones of their class, and the number of
    /// all requests after those.
    pub(crate) learned_sheds: u64,
    pub(crate) learned_sent: u64,
    /// Of each class: its part of the served bytes over its part of the offered ones.
    pub(crate) shares: [f64; CLASSES.len()],
    /// Latency of what was served beyond the hold that it asked for, of each class.
    p99s_ms: [f64; CLASSES.len()],
    /// Highest working set of the cgroup that was seen.
    peak_mib: f64,
    /// `true` if the service ended too early.
    pub(crate) died: bool,
    /// The number of processes of the cgroup that the kernel killed for memory.
    pub(crate) oom_kills: u64,
}

impl Measures {
    /// Of this offer and what came of it.
    fn of(offer: &Offer, seen: &[Seen]) -> Self {
        let class_of = |class: usize| seen.iter().filter(move |one| one.class == class);
        let with = |class, fate| class_of(class).filter(move |one| one.fate == fate);
        let bytes = |class, fate| count(with(class, fate).map(|one| one.bytes).sum());
        // Offered is what the schedule says: what was under way when the time was up is in no tally.
        let arrivals = offer.arrivals();
        let offered: [f64; CLASSES.len()] = std::array::from_fn(|class| {
            let of_class = arrivals.iter().filter(|arrival| arrival.class == class);
            of_class.map(|arrival| arrival.size.as_f64()).sum()
        });
        let served: [f64; CLASSES.len()] = std::array::from_fn(|class| bytes(class, Fate::Served));
        let [all_offered, all_served] = [offered, served].map(|of| of.iter().sum::<f64>());
        // The steady part in milliseconds; all of it where the load is too short for one.
        let millis = |time: Duration| time.as_secs_f64() * 1e3;
        let (hold, to) = (millis(HOLD[1]), millis(offer.lasts));
        let from = if to > hold * 1.5 { hold } else { 0.0 };
        let goodput_since = |from: f64| {
            let in_time = |one: &&Seen| {
                one.fate == Fate::Served && (from..=to).contains(&(one.at + one.took))
            };
            let bytes = seen.iter().filter(in_time).map(|one| one.bytes).sum();
            1e3 * count(bytes) / MIB / (to - from)
        };
        let learned = (0..CLASSES.len()).flat_map(|class| {
            let mut all: Vec<_> = class_of(class).collect();
            all.sort_by(|one, other| one.at.total_cmp(&other.at));
            all.into_iter().skip(LEARNED)
        });
        let learned: Vec<_> = learned.collect();
        let shed = (0..CLASSES.len()).map(|class| bytes(class, Fate::Shed)).sum();
        Self {
            goodput_mib: goodput_since(from),
            learned_goodput_mib: goodput_since(from.max(to / 2.0)),
            shed_bytes: part(shed, all_offered),
            learned_sent: learned.len() as u64,
            learned_sheds: learned.iter().filter(|one| one.fate == Fate::Shed).count() as u64,
            shares: std::array::from_fn(|class| {
                part(part(served[class], all_served), part(offered[class], all_offered))
            }),
            p99s_ms: std::array::from_fn(|class| {
                let late = with(class, Fate::Served).map(|one| one.took - one.hold);
                quantile(&late.collect::<Vec<_>>(), 0.99)
            }),
            ..Self::default()
        }
    }

    /// Adds the figures.
    fn tell(&self, name: &str, figures: &mut Figures) {
        let mut add = |end: &str, value, unit| figures.add(format!("{name}.{end}"), value, unit);
        add("oom_kills", count(self.oom_kills), "kills");
        add("shed_bytes_ratio", self.shed_bytes, "ratio");
        add("peak_mib", self.peak_mib, "MiB");
        for (nth, class) in CLASSES.iter().enumerate() {
            add(&format!("share.{class}"), self.shares[nth], "ratio");
            add(&format!("p99_ms.{class}"), self.p99s_ms[nth], "ms");
        }
        add("goodput_mib_s", self.goodput_mib, "MiB/s");
        add("learned_goodput_mib_s", self.learned_goodput_mib, "MiB/s");
    }
}
