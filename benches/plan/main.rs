//! Plan: what the lifetime planner makes of the instances of its field, and in what time.
//!
//! Each instance is solved as often as asked, in this process; the median counts. Heuristics of
//! others are run on the same instances, by rules of our own that do what theirs do (GGML's and
//! ONNX Runtime's also as the online allocators that they are). Random problems of up to eight
//! buffers are compared with brute force.
//!
//! Exit codes: 0 every goal held; 1 one was missed.
#![expect(clippy::print_stdout, reason = "a program that shows something")]
#![expect(clippy::disallowed_methods, reason = "it measures real time")]

#[path = "../../tests/device_plan/brute.rs"]
mod brute;
mod instance;
#[path = "../../tests/device_plan/peers.rs"]
mod peers;
#[path = "../../tests/device_plan/random.rs"]
#[allow(dead_code, reason = "the tests use more of it")]
mod random;
mod table;

use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Parser;
use lowtide::ByteSize;
use lowtide::clock::SystemClock;
use lowtide::device::plan::{Budget, Heuristic, Plan, Planner, Problem};

use crate::instance::{CAPACITY, INSTANCES, Instance};
use crate::random::{Gaps, Kind};
use crate::table::Figures;

/// Lookups of one timed loop.
const LOOKUPS: usize = 10_000_000;

#[derive(Clone, Debug, Parser)]
#[command(about = "What the lifetime planner makes of the instances of its field")]
struct Cli {
    /// How often each instance is solved.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Random problems that are compared with brute force.
    #[arg(long, default_value_t = 100_000)]
    random: u64,
    /// The first of their seeds.
    #[arg(long, default_value_t = 0)]
    from: u64,
    /// Only the instances of these names.
    #[arg(long)]
    only: Vec<String>,
    /// Cargo says this when benches are asked for.
    #[arg(long, hide = true)]
    bench: bool,
}

fn main() -> ExitCode {
    // Cargo's tests start benches too, without that word and with arguments of their own.
    if !std::env::args().any(|argument| argument == "--bench") {
        println!("plan: a bench of some minutes: run `cargo bench --bench plan`");
        return ExitCode::SUCCESS;
    }
    let cli = Cli::parse();
    let mut figures = Figures::default();
    for instance in INSTANCES {
        if cli.only.is_empty() || cli.only.iter().any(|name| name == instance.name) {
            measure(&mut figures, instance, cli.rounds);
        }
    }
    lookups(&mut figures);
    figures.add("plan.resident_mib".into(), resident_mib(), "MiB");
    against_brute_force(&mut figures, &cli);
    if figures.print() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn measure(figures: &mut Figures, instance: &Instance, rounds: usize) {
    let problem = instance.problem();
    let name = instance.name;
    let capacity = if instance.has_capacity { CAPACITY } else { 0 };
    if instance.has_capacity {
        let timed = median(rounds, || {
            let plan = solve(&problem, Duration::from_secs(20), capacity);
            (plan.peak().get() <= capacity).then_some(()).ok_or("not within the capacity")
        });
        figures.add(format!("plan.{name}.seconds"), timed, "s");
        let plan = solve(&problem, Duration::from_millis(10), 0);
        let ratio = per(plan.peak(), plan.bound());
        figures.add(format!("plan.{name}.10ms.peak_per_bound"), ratio, "ratio");
    }
    let started = Instant::now();
    let plan = solve(&problem, instance.budget, 0);
    if !instance.has_capacity {
        let seconds = started.elapsed().as_secs_f64();
        figures.add(format!("plan.{name}.seconds"), seconds, "s");
    }
    figures.add(format!("plan.{name}.peak"), plan.peak().as_f64(), "bytes");
    figures.add(format!("plan.{name}.bound"), plan.bound().as_f64(), "bytes");
    let bound = problem.lower_bound().unwrap_or(ByteSize::MAX);
    figures.add(format!("plan.{name}.peak_per_bound"), per(plan.peak(), bound), "ratio");
    let proven = f64::from(u8::from(plan.is_optimal()));
    figures.add(format!("plan.{name}.proven"), proven, "of 1");
    let second = solve(&problem, Duration::from_secs(1), 0);
    let mut best = ByteSize::MAX;
    for heuristic in Heuristic::ALL {
        let theirs = problem.plan_by(heuristic).expect("it has plans").peak();
        best = best.min(theirs);
        let figure = format!("plan.{name}.peer.{}.peak_per_bound", heuristic.name());
        figures.add(figure, per(theirs, bound), "ratio");
    }
    let models = [peers::ggml(&problem), peers::onnx_runtime(&problem)];
    best = models.into_iter().map(ByteSize::new).fold(best, ByteSize::min);
    let figure = format!("plan.{name}.1s.peak_per_best_peer");
    figures.add(figure, per(second.peak(), best), "ratio");
    let one = median(rounds, || problem.plan_by(Heuristic::Ggml).map(drop));
    figures.add(format!("plan.{name}.one_rule_us"), one * 1e6, "us");
}

fn solve(problem: &Problem, time: Duration, enough: u64) -> Plan {
    let clock = SystemClock::new();
    let budget = Budget { time, nodes: u64::MAX };
    let mut planner = Planner::new(&clock).budget(budget).enough(ByteSize::new(enough));
    planner.plan(problem).expect("an instance that has plans")
}

/// The median of the seconds that it takes.
fn median<E: std::fmt::Debug>(rounds: usize, mut act: impl FnMut() -> Result<(), E>) -> f64 {
    let mut seconds: Vec<f64> = (0..rounds.max(1))
        .map(|_| {
            let started = Instant::now();
            act().expect("what is measured works");
            started.elapsed().as_secs_f64()
        })
        .collect();
    seconds.sort_by(f64::total_cmp);
    seconds[seconds.len() / 2]
}

fn per(one: ByteSize, other: ByteSize) -> f64 {
    one.as_f64() / other.as_f64()
}

/// What one lookup of an offset costs, in a random order of buffers.
fn lookups(figures: &mut Figures) {
    let problem = INSTANCES[0].problem();
    let plan = solve(&problem, Duration::from_millis(10), 0);
    let mut random = random::Random::new(5);
    let count = problem.demands().len() as u64;
    let ids: Vec<_> = problem.ids().collect();
    let order: Vec<_> =
        (0..4096).map(|_| ids[usize::try_from(random.below(count)).expect("below it")]).collect();
    let timed = median(5, || {
        let mut sum = 0_u64;
        for at in 0..LOOKUPS {
            sum = sum.wrapping_add(std::hint::black_box(&plan).offset(order[at % order.len()]));
        }
        std::hint::black_box(sum);
        Ok::<(), ()>(())
    });
    let each = timed * 1e9 / ByteSize::of(LOOKUPS).as_f64();
    figures.add("plan.lookup_ns".into(), each, "ns");
}

/// The most that this process has had resident.
fn resident_mib() -> f64 {
    let status = procfs::process::Process::myself().and_then(|process| process.status());
    let peak = status.ok().and_then(|status| status.vmhwm).unwrap_or(0);
    ByteSize::kib(peak).as_f64() / ByteSize::mib(1).as_f64()
}

fn against_brute_force(figures: &mut Figures, cli: &Cli) {
    let kinds = [
        Kind::default(),
        Kind { aligned: true, ..Kind::default() },
        Kind { gaps: Gaps::Empty, ..Kind::default() },
        Kind { roles: true, ..Kind::default() },
        Kind { aligned: true, gaps: Gaps::Empty, fixed: true, roles: true, shared: false },
        Kind { roles: true, shared: true, ..Kind::default() },
        Kind { aligned: true, gaps: Gaps::Windows, fixed: true, ..Kind::default() },
    ];
    let (mut worse, mut unproved) = (0_u32, 0_u32);
    for (seed, kind) in (cli.from..cli.from + cli.random).zip(kinds.iter().cycle()) {
        let (problem, shares) = random::posed(seed, 8, *kind);
        let plan = solve(&problem, Duration::from_secs(10), 0);
        // Where windows slide the search does not look at everything, and says so.
        let slides = kind.shared || kind.gaps == Gaps::Windows;
        let is_least = plan.peak().get() == brute::least_peak(&problem, &shares);
        if !is_least && slides && !plan.is_optimal() {
            unproved += 1;
        } else if !is_least || !slides && !plan.is_optimal() {
            println!("seed {seed}: {kind:?}: not optimal");
            worse += 1;
        }
    }
    figures.add("plan.random.windows.not_least".into(), f64::from(unproved), "instances");
    figures.add("plan.random.instances".into(), ByteSize::new(cli.random).as_f64(), "instances");
    figures.add("plan.random.not_optimal".into(), f64::from(worse), "instances");
}
