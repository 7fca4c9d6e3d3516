//! `cargo xtask ci` and `cargo xtask soak`: the jobs of the continuous integration.
//!
//! A job is a function that runs commands. All jobs run, one after the other, and every failure is
//! reported at the end. Jobs that use one core or wait run two at a time, each in a process of its
//! own, whose output is printed when it ends. Long jobs run a sample in `ci` and their full length
//! in `soak`. With `CI=true` a job that cannot run on this machine has failed; elsewhere it is
//! skipped.
//!
//! `.ci/run` installs the tools that the jobs need and calls `cargo xtask ci`.
//!
//! Invariant: a job passes, is skipped with a reason, or fails with a reason; none is left out.

mod build;
mod long;
mod package;
mod system;

pub(crate) use build::executables;
pub(crate) use system::{Build, envoy, page_check};

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;
use std::{env, fmt, thread};

use crate::run::{children_cpu_seconds, set_for_commands};
use crate::tree::{Faults, Tree};

/// The reason why a job did not pass.
#[derive(Debug)]
pub(crate) enum Stop {
    /// It cannot run on this machine.
    Skipped(String),
    Failed(String),
}

impl From<String> for Stop {
    fn from(why: String) -> Self {
        Self::Failed(why)
    }
}

impl From<&str> for Stop {
    fn from(why: &str) -> Self {
        Self::Failed(why.to_owned())
    }
}

impl fmt::Display for Stop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Skipped(why) => write!(f, "skipped: {why}"),
            Self::Failed(why) => write!(f, "failed: {why}"),
        }
    }
}

type Outcome = Result<(), Stop>;

fn skip(why: impl Into<String>) -> Outcome {
    Err(Stop::Skipped(why.into()))
}

/// The length of a job's run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Length {
    Sample,
    Full,
}

/// One job.
struct Job {
    name: &'static str,
    about: &'static str,
    /// Tools that `.ci/run` installs for it.
    tools: &'static [&'static str],
    /// `true` if its full length is more than `ci` runs.
    soaks: bool,
    /// `true` if it leaves a core to another job, and measures nothing that this changes.
    shares: bool,
    run: fn(Length) -> Outcome,
}

/// The jobs in their order: the quick ones first.
const JOBS: &[Job] = &[
    job("fmt", "formatting", &["components"], build::fmt),
    job("text", "source, documents, dashboards and deployment files as text", &[], build::text),
    job("clippy", "clippy over all targets", &["components"], build::clippy),
    job(
        "features",
        "clippy over each library with each feature alone",
        COMPONENTS,
        build::features,
    ),
    job("oldest-rust", "the libraries with the oldest Rust that is claimed", &[], build::oldest),
    job("package", "what is packed, built and tested from the packed files", &[], package::package),
    job("musl", "the unit tests over musl", &["musl"], build::musl),
    job("doc", "the documentation", &[], build::doc),
    job("fuzz", "the fuzz target still builds", COMPONENTS, build::fuzz),
    job("datafusion", "the pool for DataFusion, and a sort", COMPONENTS, build::datafusion),
    long("test", "cargo test", &[], build::test),
    job("interposed", "the tests with jemalloc serving C code too", &[], build::interposed),
    job("limits", "memory limits under cgroups of a real kernel", &[], system::limits),
    job("memcheck", "the driver contract under valgrind", &["valgrind"], build::memcheck),
    long("models", "every interleaving of the lock-free parts, by loom", &[], build::models),
    long("schedules", "random schedules of an arena and streams", &[], long::schedules),
    shared(long("mutants", "faults in the arena's source that tests find", &[], long::mutants)),
    shared(long("retention", "the memory that allocators retain", COMPONENTS, long::retention)),
    shared(long("engines", "a real ONNX Runtime", &["components", "python"], long::engines)),
    shared(long(
        "candle",
        "an embedding server with candle",
        &["components", "python"],
        long::candle,
    )),
    shared(job("grpc", "load reports, read by grpcio", &["python"], system::grpc)),
    shared(job("demo", "the demonstration and the comparison", &[], system::demo)),
    shared(long("faults", "known faults, reproduced", &[], long::faults)),
    shared(job("page", "the page in a real browser", &["browser"], system::page)),
    job("dashboards", "dashboards against a real Prometheus", LIVE, system::dashboards),
    long("controller", "the controller in virtual time", &[], long::controller),
    long("overload", "overload in a real memory cgroup", &[], long::overload),
    job("fleet", "load reports, read by Envoy and gRPC", &["python"], long::fleet),
    long("field", "cases from public reports, and a soak", &[], long::field),
    job("counted", "figures that do not depend on the machine's speed", COUNTED, long::counted),
    job("rules", "the Prometheus rules, by promtool", &["promtool"], system::rules),
    job("deployment", "unit, manifests, Compose file, Prometheus", LIVE, system::deployment),
    job("image", "the image's root file system under a limit", &["curl"], system::image),
];

const COMPONENTS: &[&str] = &["components"];
const COUNTED: &[&str] = &["valgrind", "promtool"];
const LIVE: &[&str] = &["promtool", "python"];

/// By request alone: a Docker daemon and a base image are needed, and 12 to 21 minutes.
const DOCKER: Job = job("docker", "the image, by Docker", &[], system::docker);
/// By request alone: the counted figures that take more than half a minute each.
const COUNTED_FULL: Job = job("counted-full", "all counted figures", COUNTED, long::counted_full);

const fn job(
    name: &'static str,
    about: &'static str,
    tools: &'static [&'static str],
    run: fn(Length) -> Outcome,
) -> Job {
    Job { name, about, tools, soaks: false, shares: false, run }
}

const fn long(
    name: &'static str,
    about: &'static str,
    tools: &'static [&'static str],
    run: fn(Length) -> Outcome,
) -> Job {
    Job { name, about, tools, soaks: true, shares: false, run }
}

const fn shared(mut job: Job) -> Job {
    job.shares = true;
    job
}

/// The arguments of both commands.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Runs this job alone; may be repeated.
    #[arg(long, value_name = "NAME")]
    job: Vec<String>,
    /// Runs `counted-full` in place of `counted`.
    #[arg(long)]
    full: bool,
    /// Lists the jobs and runs none.
    #[arg(long)]
    list: bool,
    /// Lists the tools that the jobs need and runs none.
    #[arg(long)]
    tools: bool,
}

/// Checks that the workflow has every job.
pub(crate) fn check_workflow(tree: &Tree, faults: &Faults) {
    const FILE: &str = ".github/workflows/ci.yml";
    let text = tree.text(FILE, faults);
    let lines = text.lines().filter_map(|line| line.strip_prefix("          - "));
    let shown: Vec<_> = lines.collect();
    let jobs: Vec<_> = JOBS.iter().map(|job| job.name).collect();
    faults.expect(shown == jobs, || format!("{FILE}: jobs {shown:?}: expected {jobs:?}"));
}

/// Runs the jobs with a sample of the long ones.
pub(crate) fn ci(arguments: &Arguments) -> Result<(), String> {
    all(arguments, Length::Sample)
}

/// Runs the long jobs in full.
pub(crate) fn soak(arguments: &Arguments) -> Result<(), String> {
    all(arguments, Length::Full)
}

pub(crate) fn is_set(name: &str) -> bool {
    env::var(name).is_ok_and(|value| value == "true")
}

fn chosen(names: &[String], length: Length, is_full: bool) -> Result<Vec<&'static Job>, String> {
    let offered = || {
        let of_length = |job: &&Job| length == Length::Sample || job.soaks;
        let by_request = [&DOCKER, &COUNTED_FULL].into_iter().filter(|_| length == Length::Sample);
        JOBS.iter().filter(of_length).chain(by_request)
    };
    if names.is_empty() {
        let is_wanted = |job: &&Job| match job.name {
            "docker" => is_set("WITH_DOCKER"),
            "counted" => !is_full,
            "counted-full" => is_full,
            _ => true,
        };
        return Ok(offered().filter(is_wanted).collect());
    }
    let find = |name: &String| {
        offered().find(|job| job.name == name).ok_or_else(|| {
            let names: Vec<_> = offered().map(|job| job.name).collect();
            format!("unknown job {name:?}: expected one of {}", names.join(", "))
        })
    };
    names.iter().map(find).collect()
}

fn all(arguments: &Arguments, length: Length) -> Result<(), String> {
    let jobs = chosen(&arguments.job, length, arguments.full)?;
    if arguments.tools {
        let tools: BTreeSet<_> = jobs.iter().flat_map(|job| job.tools).collect();
        for tool in tools {
            println!("{tool}");
        }
        return Ok(());
    }
    if arguments.list {
        for job in jobs {
            println!("{:<12} {}", job.name, job.about);
        }
        return Ok(());
    }
    set_environment();
    run_all(&jobs, length, is_set("CI"))
}

/// Sets what holds for every command of every job.
fn set_environment() {
    for (name, value) in [("CARGO_TERM_COLOR", "never"), ("CARGO_INCREMENTAL", "0")] {
        set_for_commands(name, value);
    }
}

/// What came of a job.
struct Report {
    name: &'static str,
    line: String,
    outcome: Outcome,
}

fn run_all(jobs: &[&Job], length: Length, is_ci: bool) -> Result<(), String> {
    let begin = Instant::now();
    let mut reports = Vec::new();
    for group in jobs.chunk_by(|one, other| one.shares && other.shares) {
        match group {
            [job] => {
                println!("\n== {}: {} ({} s)", job.name, job.about, begin.elapsed().as_secs());
                reports.push(run_here(job, length, is_ci)?);
            }
            group => reports.extend(run_pairwise(group, length, begin)?),
        }
    }
    let lines: Vec<_> = reports.iter().map(|report| report.line.as_str()).collect();
    println!("\n== report ({} s)\n{}", begin.elapsed().as_secs(), lines.join("\n"));
    let skipped = reports.iter().filter(|one| matches!(one.outcome, Err(Stop::Skipped(_)))).count();
    let failed = reports.iter().filter(|one| matches!(one.outcome, Err(Stop::Failed(_))));
    let failed: Vec<_> = failed.map(|report| report.name).collect();
    if failed.is_empty() {
        let skipped = if skipped == 0 { String::new() } else { format!(", {skipped} skipped") };
        println!("\n== all checks passed{skipped} ({} s)", begin.elapsed().as_secs());
        return Ok(());
    }
    Err(format!("{} of {} jobs: {}", failed.len(), jobs.len(), failed.join(", ")))
}

fn run_here(job: &Job, length: Length, is_ci: bool) -> Result<Report, String> {
    let (from, cpu) = (Instant::now(), children_cpu_seconds()?);
    let mut outcome = (job.run)(length);
    if let (true, Err(Stop::Skipped(why))) = (is_ci, &outcome) {
        outcome = Err(Stop::Failed(why.clone()));
    }
    let what = outcome.as_ref().map_or_else(ToString::to_string, |()| "passed".to_owned());
    println!("{}: {what}", job.name);
    let (wall, cpu) = (from.elapsed().as_secs(), children_cpu_seconds()? - cpu);
    let line = format!("{:<12} {wall:>5} s {cpu:>6.0} CPU s  {what}", job.name);
    Ok(Report { name: job.name, line, outcome })
}

/// Runs jobs two at a time, in their order.
fn run_pairwise(jobs: &[&Job], length: Length, begin: Instant) -> Result<Vec<Report>, String> {
    let (next, reports) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let work = || {
        while let Some(job) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
            let from = begin.elapsed().as_secs();
            let ran = run_apart(job, length);
            let mut reports = reports.lock().map_err(|_| "a job panicked")?;
            let (output, report) = ran?;
            println!("\n== {}: {} (from {from} s)\n{output}", job.name, job.about);
            reports.push(report);
        }
        Ok::<(), String>(())
    };
    thread::scope(|scope| {
        let other = scope.spawn(work);
        let mine = work();
        mine.and(other.join().map_err(|_| "a job panicked".to_owned())?)
    })?;
    reports.into_inner().map_err(|_| "a job panicked".to_owned())
}

/// Runs a job in a process of its own. Returns the output, and the report that is in it.
fn run_apart(job: &Job, length: Length) -> Result<(String, Report), String> {
    let wrong = |error: std::io::Error| format!("{}: {error}", job.name);
    let command = if length == Length::Sample { "ci" } else { "soak" };
    let path = build::target().join(format!("job-{}.log", job.name));
    let log = File::create(&path).map_err(wrong)?;
    let mut run = Command::new(env::current_exe().map_err(wrong)?);
    run.args([command, "--job", job.name]);
    run.stdout(log.try_clone().map_err(wrong)?).stderr(log);
    let status = run.status().map_err(wrong)?;
    let output = String::from_utf8_lossy(&fs::read(&path).map_err(wrong)?).into_owned();
    let is_report = |line: &&str| line.starts_with(job.name) && line.contains(" CPU s  ");
    let line = output.lines().rfind(is_report).map_or_else(
        || format!("{:<12} ended with {status} and without a report", job.name),
        str::to_owned,
    );
    let why = line.split_once(" CPU s  ").map_or(line.as_str(), |(_, what)| what).to_owned();
    let outcome = match why.strip_prefix("skipped: ") {
        Some(why) => skip(why),
        None if status.success() => Ok(()),
        None => Err(why.into()),
    };
    Ok((output, Report { name: job.name, line, outcome }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn passes(_: Length) -> Outcome {
        Ok(())
    }

    fn fails(_: Length) -> Outcome {
        Err("it broke".into())
    }

    fn skips(_: Length) -> Outcome {
        skip("no such tool")
    }

    #[test]
    fn every_failure_is_reported_and_a_skip_fails_in_ci() {
        let jobs = [
            job("first", "", &[], fails),
            job("second", "", &[], skips),
            job("third", "", &[], passes),
            job("fourth", "", &[], fails),
        ];
        let jobs: Vec<_> = jobs.iter().collect();
        let at_home = run_all(&jobs, Length::Sample, false).expect_err("two failures");
        assert_eq!(at_home, "2 of 4 jobs: first, fourth");
        let in_ci = run_all(&jobs, Length::Sample, true).expect_err("three failures");
        assert_eq!(in_ci, "3 of 4 jobs: first, second, fourth");
        assert!(run_all(&jobs[1..3], Length::Sample, false).is_ok());
    }

    #[test]
    fn jobs_are_chosen_by_name_and_soak_has_the_long_ones() {
        let names = |length| chosen(&[], length, false).expect("jobs").len();
        assert!(names(Length::Sample) > names(Length::Full));
        let of = |name: &str| chosen(&[name.to_owned()], Length::Sample, false);
        let one = of("fmt").expect("a job");
        assert_eq!(one.iter().map(|job| job.name).collect::<Vec<_>>(), ["fmt"]);
        assert!(of("docker").is_ok());
        let full = chosen(&[], Length::Sample, true).expect("jobs");
        let counted: Vec<_> = full.iter().filter(|job| job.name.contains("counted")).collect();
        assert!(matches!(*counted, [job] if job.name == "counted-full"));
        let unknown = of("gone").err().unwrap_or_default();
        assert!(unknown.starts_with("unknown job \"gone\": expected one of fmt, "), "{unknown}");
    }
}
