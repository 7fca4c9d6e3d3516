//! The burst of one allocator after the other, watched from outside.
//!
//! Processor time is that of the whole process from the beginning of the traffic until 2 s after
//! its end: what an allocator leaves for later, or to threads of its own, is counted.
//!
//! Invariant: one process is measured at a time.
#![expect(clippy::disallowed_methods, reason = "it measures real time")]

use std::time::{Duration, Instant};

use lowtide::heap::HeapProfile;
use retention::{BoxError, mib};

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

/// Resident MiB by seconds, 0 being the end of the traffic.
#[derive(Clone, Debug)]
pub(crate) struct Course {
    /// Whose.
    pub(crate) name: String,
    /// When, and how much.
    pub(crate) points: Vec<(f64, f64)>,
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
    points: Vec<(f64, f64)>,
}

const SAMPLE_EVERY: Duration = Duration::from_millis(50);
/// Operations of a thread in each phase where processor time is all that counts: traffic of some 20
/// s. jemalloc's default decay is 10 s, so within a shorter time it gives back nothing and pays for
/// nothing.
const PAIR_OPERATIONS: usize = 240_000;
/// The look at which processor time is taken.
const CPU_LOOK: u64 = 2;
/// The figure of resident over live bytes at rest.
pub(crate) const APART_AT_REST: &str = "measured.rest.resident_per_live";
const LATENCY: [&str; 4] = ["p50", "p95", "p99", "p999"];

/// All of them, in turn, so many times; the courses of the last round.
pub(crate) fn rounds(
    figures: &mut Figures,
    plan: &Plan,
    contestants: &[Contestant],
    rounds: usize,
) -> Result<Vec<Course>, BoxError> {
    let mut courses = Vec::new();
    for round in 1..=rounds {
        courses.clear();
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
            courses.push(Course { name: who.name.clone(), points: found.points });
        }
    }
    if plan.prefix != "retention" {
        return Ok(courses);
    }
    rest(figures, plan);
    for who in contestants {
        let figure = |name: &str| format!("retention.{name}.cpu_us");
        let pairs = figures.each(&figure(&who.name)).iter();
        let pairs = pairs.zip(figures.each(&figure("jemalloc_default")));
        let ratios: Vec<f64> = pairs.map(|(one, other)| one / other).collect();
        for ratio in ratios {
            figures.add(&cpu_ratio(&who.name), ratio, "ratio");
        }
    }
    Ok(courses)
}

/// Resident over live bytes at the last look: with lasting requests apart, and beside it without.
fn rest(figures: &mut Figures, plan: &Plan) {
    let last = plan.looks.last().copied().unwrap_or_default();
    let of = |figures: &Figures, name: &str| {
        let figure = |end: &str| format!("{}.{name}.{end}", plan.prefix);
        figures.ratio(&figure(&format!("resident_{last}s_mib")), &figure("live_mib"))
    };
    let (apart, mixed) = (of(figures, contestants::APART), of(figures, "low_memory"));
    if let (Some(apart), Some(mixed)) = (apart, mixed) {
        figures.add(APART_AT_REST, apart, "ratio");
        figures.add("measured.rest.resident_per_live_mixed", mixed, "ratio");
    }
}

fn cpu_ratio(name: &str) -> String {
    format!("retention.{name}.cpu_per_op_ratio")
}

fn note(figures: &mut Figures, who: &Contestant, plan: &Plan, found: &Found) {
    let mut add = |end: &str, value: f64, unit| {
        figures.add(&format!("{}.{}.{end}", plan.prefix, who.name), value, unit);
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
    let name = cpu_ratio("balanced");
    figures.forget(&name);
    for pair in 0..pairs {
        // Each goes first as often as the other.
        let (one, other) = if pair % 2 == 0 { (plain, &balanced) } else { (&balanced, plain) };
        let (first, second) = (run(one, &plan)?, run(other, &plan)?);
        let (plain, balanced) = if pair % 2 == 0 { (first, second) } else { (second, first) };
        figures.add(&name, balanced.cpu_us / plain.cpu_us, "ratio");
        for (at, latency) in LATENCY.iter().enumerate() {
            let ratio = balanced.latency_us[at] / plain.latency_us[at];
            figures.add(&format!("pairs.balanced.{latency}_ratio"), ratio, "ratio");
        }
        println!(
            "pair {} of {pairs}: balanced {:.2}, jemalloc's default {:.2} us CPU/op; ratio so far \
             {:.3}",
            pair + 1,
            balanced.cpu_us,
            plain.cpu_us,
            figures.of(&name).unwrap_or(0.0)
        );
    }
    Ok(())
}

/// Balanced while another thread purges each second, against balanced.
pub(crate) fn purging(figures: &mut Figures, plan: &Plan, rounds: usize) -> Result<(), BoxError> {
    let plan = Plan { looks: &[0], ..plan.clone() };
    let quiet = contestants::lowtide(HeapProfile::Balanced);
    let purging = Contestant { way: "balanced/purging".into(), ..quiet.clone() };
    for _ in 0..rounds {
        let (quiet, purging) = (run(&quiet, &plan)?, run(&purging, &plan)?);
        let ratio = purging.latency_us[2] / quiet.latency_us[2];
        figures.add("retention.balanced_purging.p99_ratio", ratio, "ratio");
        figures.add("retention.balanced_purging.p99_us", purging.latency_us[2], "us");
    }
    Ok(())
}

fn run(who: &Contestant, plan: &Plan) -> Result<Found, BoxError> {
    let running = Running::start(who, &plan.arguments.each_ref().map(String::as_str))?;
    running.expect("traffic")?;
    let begun = running.process.processor_seconds()?;
    let mut points = Vec::new();
    let look = |points: &mut Vec<(Instant, f64)>| -> Result<f64, BoxError> {
        let resident = mib(running.process.resident()?);
        points.push((Instant::now(), resident));
        Ok(resident)
    };
    let said = loop {
        if let Some(said) = running.expect_within("idle", SAMPLE_EVERY)? {
            break said;
        }
        look(&mut points)?;
    };
    let end = Instant::now();
    let peak_mib = mib(running.process.peak()?);
    let (mut resident_mib, mut seconds) = (Vec::new(), None);
    for after in plan.looks {
        let due = end + Duration::from_secs(*after);
        while Instant::now() < due {
            std::thread::sleep(SAMPLE_EVERY.min(due - Instant::now()));
            look(&mut points)?;
        }
        resident_mib.push(look(&mut points)?);
        if *after <= CPU_LOOK {
            seconds = Some(running.process.processor_seconds()? - begun);
        }
    }
    running.end()?;
    let cpu = seconds.ok_or("no look at processor time")?;
    let mut latency_us = [0.0; 4];
    for (value, name) in latency_us.iter_mut().zip(LATENCY) {
        *value = field(&said, name)?;
    }
    let since = |at: Instant| match at.checked_duration_since(end) {
        Some(after) => after.as_secs_f64(),
        None => -(end - at).as_secs_f64(),
    };
    Ok(Found {
        cpu_us: cpu * 1e6 / field(&said, "operations")?,
        latency_us,
        peak_mib,
        live_mib: field(&said, "live")? / 1_048_576.0,
        resident_mib,
        points: points.into_iter().map(|(at, resident)| (since(at), resident)).collect(),
    })
}
