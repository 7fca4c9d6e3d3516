//! One cell: a service in a fresh cgroup, load on it from this process, and what became of both.
//!
//! The service's death is an outcome, not a fault. The process and the cgroup end with the cell.
//!
//! Goodput is that of the steady part: answers that ended after the longest hold had passed once
//! and before the load ended, over that time. What was shed, and how the classes shared, is of all
//! requests. A request without an outcome is failed: what was under way when its service died.

use std::net::SocketAddr;
use std::process::Command;
use std::time::{Duration, Instant};

use bytes::Bytes;
use common::chance::Chance;
use common::figures::{Figures, count, part, quantile};
use common::http::{client, post};
use common::process::{self, Process};
use futures_util::{StreamExt as _, stream};
use http::StatusCode;
use lowtide::{BoxError, ByteSize};
use serde::{Deserialize, Serialize};

use crate::load::{self, Fate, Seen};
use crate::offer::{CLASSES, HOLD, Mix, Offer, Policy, Sending};

/// The limit of the service's cgroup.
pub(crate) const LIMIT: ByteSize = ByteSize::mib(256);
/// The time between two looks at the cgroup.
const LOOK_EVERY: Duration = Duration::from_millis(5);
/// Bytes of a MiB.
const MIB: f64 = 1_048_576.0;
/// A route and size is learned after so many requests.
const LEARNED: usize = 30;

/// Checks that a cgroup with a limit can be made here, and read.
pub(crate) fn check() -> Result<(), String> {
    let group = process::group(ByteSize::mib(64))?;
    let seen = process::usage(&group.folder).zip(process::oom_kills(&group.folder));
    seen.map(drop).ok_or_else(|| "its charge and its events cannot be read".to_owned())
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
    /// The time for which requests are offered.
    pub(crate) lasts: Duration,
    /// Of arrivals, sizes and holds.
    pub(crate) seed: u64,
    /// How requests are sent.
    pub(crate) sending: Sending,
    pub(crate) service: Service,
}

/// The kind of service, and where lowtide's requests wait for room: the proxy and the service behind
/// it admit in one ledger.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Service {
    /// The proxy; requests wait in front of the service that holds bodies.
    Proxy,
    /// The proxy; requests wait in it, for its model.
    WaitingProxy,
    Streams,
    /// One of those behind Envoy.
    Fleet,
    Poll,
    /// For mixed loads: lowtide, or a limit on large requests.
    Mixed {
        limit: Option<usize>,
    },
}

impl Cell {
    /// Returns the command that starts the service.
    pub(crate) fn command(&self) -> Result<Command, BoxError> {
        common::own(&["--serve", &serde_json::to_string(self)?])
    }

    /// Starts the service under this limit, and waits until it prints the address of its proxy.
    pub(crate) fn start(&self, limit: ByteSize) -> Result<(Process, SocketAddr), BoxError> {
        common::serve(&self.command()?, limit)
    }

    /// Runs it, and prints its outcome.
    pub(crate) fn run(&self) -> Result<Measures, BoxError> {
        let (mix, lasts, seed, sending) = (self.mix, self.lasts, self.seed, self.sending);
        let offer = Offer { mix, rate: self.load * mix.fits(LIMIT), lasts, seed, sending };
        let (mut service, front) = self.start(LIMIT)?;
        let folder = service.folder().ok_or("no cgroup")?.to_owned();
        let mut peak = ByteSize::ZERO;
        let seen = load::offer(front, offer.clone(), || {
            peak = peak.max(process::usage(&folder).unwrap_or_default());
            std::thread::sleep(LOOK_EVERY);
            Ok(service.ended().is_none())
        })?;
        let mut measures = Measures::of(&offer, &seen);
        measures.died = service.ended().is_some();
        measures.oom_kills = process::oom_kills(&folder).unwrap_or_default();
        let late: [f64; CLASSES.len()] = std::array::from_fn(|class| {
            let is_it = |one: &&Seen| one.arrival.class == class && one.fate == Fate::Served;
            let late = |one: &Seen| one.took.as_secs_f64() - one.arrival.hold.as_secs_f64();
            quantile(&seen.iter().filter(is_it).map(late).collect::<Vec<_>>(), 0.99)
        });
        println!("{self:?}: {measures:.5?}, peak {peak}, p99 of {CLASSES:?} {late:.3?} s");
        Ok(measures)
    }
}

/// The numbers of one cell.
#[derive(Clone, Debug, Default)]
pub(crate) struct Measures {
    /// MiB of bodies that were served a second, and the same of the second half of the time: once
    /// everything is learned.
    goodput_mib: [f64; 2],
    /// Requests that were shed after the first [`LEARNED`] ones of their class, and the number of
    /// all requests after those.
    pub(crate) learned_sheds: u64,
    pub(crate) learned_sent: u64,
    /// Of each class: its part of the served bytes over its part of the offered ones.
    pub(crate) shares: [f64; CLASSES.len()],
    /// `true` if the service ended too early.
    pub(crate) died: bool,
    /// The number of processes of the cgroup that the kernel killed for memory.
    pub(crate) oom_kills: u64,
}

impl Measures {
    /// Of this offer and what came of it.
    fn of(offer: &Offer, seen: &[Seen]) -> Self {
        let class_of = |class: usize| seen.iter().filter(move |one| one.arrival.class == class);
        // Offered is what the schedule says: what was under way when the time was up is in no tally.
        let arrivals = offer.arrivals();
        let offered: [f64; CLASSES.len()] = std::array::from_fn(|class| {
            let of_class = arrivals.iter().filter(|arrival| arrival.class == class);
            of_class.map(|arrival| arrival.size.as_f64()).sum()
        });
        let served: [f64; CLASSES.len()] = std::array::from_fn(|class| {
            let served = class_of(class).filter(|one| one.fate == Fate::Served);
            served.map(|one| one.arrival.size.as_f64()).sum()
        });
        let [all_offered, all_served] = [offered, served].map(|of| of.iter().sum::<f64>());
        // The steady part; all of it where the load is too short for one.
        let (hold, to) = (HOLD[1], offer.lasts);
        let from = if to > hold.mul_f64(1.5) { hold } else { Duration::ZERO };
        let goodput_since = |from: Duration| {
            let in_time = |one: &&Seen| {
                one.fate == Fate::Served && (from..=to).contains(&(one.arrival.at + one.took))
            };
            let bytes = seen.iter().filter(in_time).map(|one| one.arrival.size.get()).sum();
            count(bytes) / MIB / (to - from).as_secs_f64()
        };
        let learned = (0..CLASSES.len()).flat_map(|class| {
            let mut all: Vec<_> = class_of(class).collect();
            all.sort_by_key(|one| one.arrival.at);
            all.into_iter().skip(LEARNED)
        });
        let learned: Vec<_> = learned.collect();
        Self {
            goodput_mib: [from, from.max(to / 2)].map(goodput_since),
            learned_sent: learned.len() as u64,
            learned_sheds: learned.iter().filter(|one| one.fate == Fate::Shed).count() as u64,
            shares: std::array::from_fn(|class| {
                part(part(served[class], all_served), part(offered[class], all_offered))
            }),
            ..Self::default()
        }
    }
}

// Which cells are run: the table of the documents, the drawn runs, the comparison, the check.
//
// It decides what is run and nothing of what comes of it, but for the check, which is none where
// the load does not kill.

/// Loads of the runs that are drawn.
const HIGH: [f64; 3] = [2.0, 4.0, 8.0];
/// Estimates of the runs that are drawn; 0 gives none.
const DRAWN: [f64; 6] = [0.0, 0.0, 0.25, 0.5, 1.0, 4.0];
/// Times in which their bodies are sent.
const BODIES: [Duration; 3] = [Duration::ZERO, SLOW, Duration::from_secs(3)];
/// The time in which a body is sent slowly.
const SLOW: Duration = Duration::from_secs(1);
/// Seeds of the comparison with static budgets, and those budgets in percent of the limit.
const SEEDS: u64 = 6;
const STATIC: [u32; 8] = [60, 64, 68, 72, 76, 80, 84, 88];

/// What all cells share, and the results.
pub(crate) struct Runner {
    pub(crate) base: Cell,
    pub(crate) figures: Figures,
    /// The number of lowtide's services that did not live to the end.
    pub(crate) lost: u64,
}

impl Runner {
    /// Runs a cell of this policy, load and estimate with another seed.
    fn run(
        &mut self,
        policy: Policy,
        load: f64,
        estimate: f64,
        more: u64,
    ) -> Result<Measures, BoxError> {
        let seed = self.base.seed + more;
        let cell = Cell { policy, load, estimate, seed, ..self.base.clone() };
        let measures = cell.run()?;
        self.lost += u64::from(measures.died && policy == Policy::Lowtide);
        Ok(measures)
    }

    /// A threshold, a budget and lowtide under the same load.
    pub(crate) fn compare(&mut self, budget: u32) -> Result<bool, BoxError> {
        for policy in [Policy::Rss10, Policy::Static(budget), Policy::Lowtide] {
            self.run(policy, 4.0, 1.0, 0)?;
        }
        Ok(true)
    }

    /// Runs of lowtide, drawn by the seed.
    pub(crate) fn survive(&mut self, runs: u32) -> Result<bool, BoxError> {
        let (mut chance, mut kills) = (Chance::new(self.base.seed), 0);
        for run in 0..runs {
            let (load, mix) = (chance.pick(&HIGH), chance.pick(&Mix::ALL));
            let estimate = chance.pick(&DRAWN);
            self.base.mix = mix;
            self.base.sending = Sending {
                body: chance.pick(&BODIES),
                is_chunked: chance.pick(&[0, 1, 2, 3]) == 0,
                copies: 0,
                has_giants: chance.pick(&[0, 1, 2, 3]) == 0,
            };
            kills += self.run(Policy::Lowtide, load, estimate, run.into())?.oom_kills;
        }
        self.figures.add("overload.survive.runs", f64::from(runs), "runs");
        self.figures.add("overload.survive.oom_kills", count(kills), "kills");
        Ok(true)
    }

    /// The seeds of a policy with bodies of this time, up to the first that it does not survive.
    fn seeds(
        &mut self,
        policy: Policy,
        estimate: f64,
        body: Duration,
    ) -> Result<(Vec<Measures>, bool), BoxError> {
        let mut all = Vec::new();
        self.base.sending.body = body;
        for more in 0..SEEDS {
            let measures = self.run(policy, 4.0, estimate, more)?;
            if measures.died {
                break;
            }
            all.push(measures);
        }
        let survives = all.len() as u64 == SEEDS;
        Ok((all, survives))
    }

    /// Sheds of lowtide where the load fits, and its goodput beside the best static budget that
    /// survives each seed with quick and with slow bodies, and beside a threshold on the resident
    /// set. Requests have no estimate, or a right one.
    pub(crate) fn measured(&mut self) -> Result<bool, BoxError> {
        let (mut sheds, mut sent) = (0, 0);
        for (estimate, more) in [(0.0, 0), (0.0, 1), (1.0, 0), (1.0, 1)] {
            let measures = self.run(Policy::Lowtide, 1.0, estimate, more)?;
            sheds += measures.learned_sheds;
            sent += measures.learned_sent;
        }
        let (slow, _) = self.seeds(Policy::Lowtide, 0.0, SLOW)?;
        let (quick, _) = self.seeds(Policy::Lowtide, 0.0, Duration::ZERO)?;
        let (rss10, _) = self.seeds(Policy::Rss10, 1.0, Duration::ZERO)?;
        let mut best = None;
        // Ends: the lower budgets hold less than the limit.
        for percent in STATIC.into_iter().rev() {
            let fixed = Policy::Static(percent);
            if let (quick, true) = self.seeds(fixed, 1.0, Duration::ZERO)?
                && let (slow, true) = self.seeds(fixed, 1.0, SLOW)?
            {
                best = Some((percent, quick, slow));
                break;
            }
        }
        let (percent, fixed_quick, fixed_slow) =
            best.ok_or("no static budget survives each seed, with quick and with slow bodies")?;
        let [ours, fixed, ours_slow, fixed_slow, threshold] =
            [&quick, &fixed_quick, &slow, &fixed_slow, &rss10].map(|runs| goodput(runs));
        let mut add = |name: &str, value, unit| {
            self.figures.add(format!("measured.{name}"), value, unit);
        };
        add("1x.shed_ratio", part(count(sheds), count(sent)), "ratio");
        add("4x.goodput_mib_s", ours, "MiB/s");
        add("4x.static_goodput_mib_s", fixed, "MiB/s");
        add("4x.static_percent", f64::from(percent), "%");
        add("4x.goodput_ratio", part(ours, fixed), "ratio");
        add("4x.slow.goodput_mib_s", ours_slow, "MiB/s");
        add("4x.slow.static_goodput_mib_s", fixed_slow, "MiB/s");
        add("4x.slow.goodput_ratio", part(ours_slow, fixed_slow), "ratio");
        add("4x.over_rss10_ratio", part(ours, threshold), "ratio");
        for (class, name) in CLASSES.into_iter().enumerate() {
            let shares: Vec<_> = quick.iter().map(|measures| measures.shares[class]).collect();
            add(&format!("4x.share.{name}"), quantile(&shares, 0.5), "ratio");
        }
        Ok(true)
    }

    /// Three drawn runs of lowtide, and one without admission: where that one lives, the load was
    /// none.
    pub(crate) fn ci(&mut self) -> Result<bool, BoxError> {
        self.survive(3)?;
        (self.base.mix, self.base.sending) = (Mix::Heavy, Sending::default());
        let bound = self.run(Policy::None, 4.0, 1.0, 0)?.oom_kills > 0;
        if !bound {
            println!("FAILED: without admission nothing was OOM-killed: the load is too low");
        }
        Ok(bound)
    }
}

/// The mean goodput of runs once everything is learned, in MiB/s.
fn goodput(runs: &[Measures]) -> f64 {
    part(runs.iter().map(|measures| measures.goodput_mib[1]).sum(), count(runs.len() as u64))
}

// A burst: 400 small requests to `/embed` at once, and the same with six at a time. A client that
// keeps a queue of its own is what a service without one expects. The service's queue should need
// about as long. Both runs use one service, one after the other; the model is loaded before.

/// The requests of a burst.
const REQUESTS: usize = 400;
/// The requests at once of the client that has a queue.
const AT_ONCE: usize = 6;
/// The texts of a request: enough that the work outweighs the new connections of a burst.
const TEXTS: usize = 32;
/// The longest time for all of them.
const PATIENCE: Duration = Duration::from_secs(60);

/// Runs both, and adds the figures. Returns `true` if the service survived.
pub(crate) fn burst(base: &Cell, figures: &mut Figures) -> Result<bool, BoxError> {
    let cell = Cell { service: Service::WaitingProxy, ..base.clone() };
    let (service, to) = cell.start(LIMIT)?;
    let runtime = tokio::runtime::Runtime::new()?;
    let both = async {
        embed_all(to, 1, 1).await; // loads the model
        let queued = embed_all(to, REQUESTS, AT_ONCE).await;
        (queued, embed_all(to, REQUESTS, REQUESTS).await)
    };
    let both = runtime.block_on(async { tokio::time::timeout(PATIENCE, both).await })?;
    let ((queued, queue_time), (served, time)) = both;
    let kills = service.end();
    println!("{queued} of {REQUESTS} with {AT_ONCE} at a time in {queue_time:.2} s");
    figures.at_least("room.burst400.served", count(served), "requests", 396.0);
    figures.at_most("room.burst400.over_queue_ratio", time / queue_time, "ratio", 1.5);
    figures.at_most("room.burst400.kills", count(kills), "kills", 0.0);
    Ok(kills == 0)
}

/// Sends so many requests, so many at once. Returns the number served, and the seconds.
async fn embed_all(to: SocketAddr, requests: usize, at_once: usize) -> (u64, f64) {
    let (http, url) = (client(), format!("http://{to}/embed"));
    let text = "the sea draws back and returns ".repeat(20);
    let body = Bytes::from(serde_json::json!({ "texts": vec![text; TEXTS] }).to_string());
    let start = Instant::now();
    let all = stream::iter(0..requests).map(|_| post(&http, &url, body.clone()));
    let answers: Vec<_> = all.buffer_unordered(at_once).collect().await;
    let served = answers.iter().filter(|(status, _)| *status == Some(StatusCode::OK)).count();
    (served as u64, start.elapsed().as_secs_f64())
}
