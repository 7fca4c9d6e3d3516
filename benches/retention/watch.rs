//! The burst of one allocator after the other, watched from outside.
//!
//! Processor time is that of the whole process from the beginning of the traffic until 2 s after
//! its end: what an allocator leaves for later, or to threads of its own, is counted.
//!
//! Invariant: one process is measured at a time.
#![expect(clippy::disallowed_methods, reason = "it measures real time")]

use std::time::{Duration, Instant};

use lowtide::heap::HeapProfile;
use retention::BoxError;

use crate::contestants::{self, Contestant};
use crate::figures::Figures;
use crate::process::{Running, field};

/// The size of the burst, and the time for which it is watched.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    /// The prefix of the figures.
    prefix: &'static str,
    arguments: [String; 4],
    /// Seconds after the end of the traffic at which resident memory is read.
    looks: &'static [u64],
}

impl Plan {
    /// The one that is told of, or a small one.
    pub(crate) fn of(smoke: bool) -> Self {
        let (operations, held) = if smoke { (2_000, 20) } else { (60_000, 200) };
        let arguments = ["burst".into(), "4".into(), operations.to_string(), held.to_string()];
        Self { prefix: "retention", arguments, looks: Self::looks(smoke) }
    }

    /// The one of documents of which none is left. As much is held as in the other one.
    pub(crate) fn of_documents(smoke: bool) -> Self {
        let (operations, held) = if smoke { (100, 5) } else { (2_000, 50) };
        let arguments = ["documents".into(), "4".into(), operations.to_string(), held.to_string()];
        Self { prefix: "documents", arguments, looks: Self::looks(smoke) }
    }

    const fn looks(smoke: bool) -> &'static [u64] {
        if smoke { &[0, 1, 2] } else { &[0, 1, 2, 10] }
    }
}

/// The results of a run.
#[derive(Clone, Debug)]
struct Found {
    cpu_us: f64,
    /// Median, 95th, 99th, 99.9th percentile.
    latency_us: [f64; 4],
    peak_mib: f64,
    live_mib: f64,
    /// By look.
    resident_mib: Vec<f64>,
}

/// Operations of a thread in each phase where processor time is all that counts: traffic of some 20
/// s. jemalloc's default decay is 10 s, so within a shorter time it gives back nothing and pays for
/// nothing.
const PAIR_OPERATIONS: usize = 240_000;
/// The look at which processor time is taken.
const CPU_LOOK: u64 = 2;
/// The figure of resident over live bytes at rest.
pub(crate) const APART_AT_REST: &str = "measured.rest.resident_per_live";
const LATENCY: [&str; 4] = ["p50", "p95", "p99", "p999"];

/// All of them, in turn, so many times.
pub(crate) fn rounds(
    figures: &mut Figures,
    plan: &Plan,
    contestants: &[Contestant],
    rounds: usize,
) -> Result<(), BoxError> {
    for round in 1..=rounds {
        for who in contestants {
            let found = run(who, plan).map_err(|error| format!("{}: {error}", who.name))?;
            println!(
                "{} {round} of {rounds}: {:<18}{:>7.2} us CPU/op {:>7.2} us p50 {:>6.0} MiB \
                 peak, then {:.1?}",
                plan.arguments[0],
                who.name,
                found.cpu_us,
                found.latency_us[0],
                found.peak_mib,
                found.resident_mib
            );
            note(figures, who, plan, &found);
        }
    }
    if plan.prefix != "retention" {
        return Ok(());
    }
    rest(figures, plan);
    let cpu = |name: &str| format!("retention.{name}.cpu_us");
    for who in contestants {
        let pairs = figures.each(&cpu(&who.name)).iter();
        let pairs = pairs.zip(figures.each(&cpu("jemalloc_default")));
        for ratio in pairs.map(|(one, other)| one / other).collect::<Vec<_>>() {
            figures.add(cpu_ratio(&who.name), ratio, "ratio");
        }
    }
    Ok(())
}

/// Resident over live bytes at the last look: with lasting requests apart, and beside it without.
fn rest(figures: &mut Figures, plan: &Plan) {
    let last = plan.looks.last().copied().unwrap_or_default();
    for (figure, name) in [
        (APART_AT_REST, contestants::APART),
        ("measured.rest.resident_per_live_mixed", "low_memory"),
    ] {
        let of = |end: &str| figures.each(&format!("{}.{name}.{end}", plan.prefix)).to_vec();
        let (resident, live) = (of(&format!("resident_{last}s_mib")), of("live_mib"));
        for (resident, live) in resident.iter().zip(live) {
            figures.add(figure, resident / live, "ratio");
        }
    }
}

fn cpu_ratio(name: &str) -> String {
    format!("retention.{name}.cpu_per_op_ratio")
}

fn note(figures: &mut Figures, who: &Contestant, plan: &Plan, found: &Found) {
    let mut add = |end: &str, value: f64, unit| {
        figures.add(format!("{}.{}.{end}", plan.prefix, who.name), value, unit);
    };
    add("cpu_us", found.cpu_us, "us");
    for (name, value) in LATENCY.iter().zip(found.latency_us) {
        add(&format!("{name}_us"), value, "us");
    }
    add("peak_mib", found.peak_mib, "MiB");
    for (look, value) in plan.looks.iter().zip(&found.resident_mib) {
        add(&format!("resident_{look}s_mib"), *value, "MiB");
    }
    add("live_mib", found.live_mib, "MiB");
}

/// Balanced against jemalloc's default, pair by pair: processor time and nothing else.
pub(crate) fn pairs(figures: &mut Figures, plan: &Plan, pairs: usize) -> Result<(), BoxError> {
    let mut plan = Plan { looks: &[0, CPU_LOOK], ..plan.clone() };
    plan.arguments[2] = PAIR_OPERATIONS.to_string();
    let plain = contestants::named(&["jemalloc_default"]);
    let plain = plain.first().ok_or("no jemalloc")?;
    let balanced = contestants::lowtide(HeapProfile::Balanced);
    let name = "pairs.balanced.cpu_ratio";
    for pair in 0..pairs {
        // Each goes first as often as the other.
        let (one, other) = if pair % 2 == 0 { (plain, &balanced) } else { (&balanced, plain) };
        let (first, second) = (run(one, &plan)?, run(other, &plan)?);
        let (plain, balanced) = if pair % 2 == 0 { (first, second) } else { (second, first) };
        figures.add(name, balanced.cpu_us / plain.cpu_us, "ratio");
        for (at, latency) in LATENCY.iter().enumerate() {
            let ratio = balanced.latency_us[at] / plain.latency_us[at];
            figures.add(format!("pairs.balanced.{latency}_ratio"), ratio, "ratio");
        }
        println!(
            "pair {} of {pairs}: balanced {:.2}, jemalloc's default {:.2} us CPU/op; ratio so far \
             {:.3}",
            pair + 1,
            balanced.cpu_us,
            plain.cpu_us,
            figures.of(name).unwrap_or(0.0)
        );
    }
    Ok(())
}

fn run(who: &Contestant, plan: &Plan) -> Result<Found, BoxError> {
    let running = Running::start(who, &plan.arguments.each_ref().map(String::as_str))?;
    running.expect("traffic")?;
    let begun = running.processor_seconds()?;
    let said = running.expect("idle")?;
    let end = Instant::now();
    let peak_mib = running.status_mib("VmHWM:")?;
    let (mut resident_mib, mut seconds) = (Vec::new(), None);
    for after in plan.looks {
        let due = end + Duration::from_secs(*after);
        std::thread::sleep(due.saturating_duration_since(Instant::now()));
        resident_mib.push(running.resident_mib()?);
        if *after <= CPU_LOOK {
            seconds = Some(running.processor_seconds()? - begun);
        }
    }
    running.end()?;
    let cpu = seconds.ok_or("no look at processor time")?;
    let mut latency_us = [0.0; 4];
    for (value, name) in latency_us.iter_mut().zip(LATENCY) {
        *value = field(&said, name)?;
    }
    Ok(Found {
        cpu_us: cpu * 1e6 / field(&said, "operations")?,
        latency_us,
        peak_mib,
        live_mib: field(&said, "live")? / 1_048_576.0,
        resident_mib,
    })
}
