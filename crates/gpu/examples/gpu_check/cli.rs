//! The command line: the parts to run, their sizes, and the output of figures.
//!
//! The default sizes are those of the goals, for a device with 80 GiB or more; on a smaller device
//! a part uses less and prints that. It measures nothing.
//!
//! Invariant: without arguments every part but `provoke` runs, at the size of its goal; only the
//! number of sleeps is 10 instead of 100.

use std::path::PathBuf;
use std::time::Duration;

use clap::builder::{PossibleValue, PossibleValuesParser, RangedU64ValueParser, TypedValueParser};
use clap::{Parser, ValueEnum as _};
use lowtide_gpu::ByteSize;

use super::process::Plant;
use super::torture::LANES;
use super::{PARTS, PROVOKE, Part};

/// Checks lowtide's guarantees on this machine's GPU, and measures their costs.
#[derive(Clone, Debug, Parser)]
#[command(args_override_self = true)]
pub(crate) struct Args {
    /// Runs these parts only, with commas between them.
    #[arg(long, value_parser = parts(), value_delimiter = ',')]
    pub(crate) only: Vec<Part>,
    /// The device's ordinal, as the driver counts.
    #[arg(long, default_value_t = 0)]
    pub(crate) device: u32,
    /// The unit in which memory is allocated; default: the device's granularity.
    #[arg(long)]
    pub(crate) handle: Option<ByteSize>,
    /// Writes everything to this file as well, as JSON; replaced after each part.
    #[arg(long)]
    pub(crate) json: Option<PathBuf>,
    /// The time for all parts together. At its end the running part is killed and the rest are
    /// skipped.
    #[arg(long, default_value = "9m 30s", value_parser = humantime::parse_duration)]
    pub(crate) budget: Duration,
    /// The time after which a part is killed: DURATION for all parts, PART=DURATION for one,
    /// separated by commas. Default: 1 to 4 minutes, by part; 8 for `calls` with `--thorough`;
    /// `--torture-seconds` and 1 minute for `torture`.
    #[arg(long, value_parser = deadline, value_delimiter = ',')]
    pub(crate) deadline: Vec<(Option<Part>, Duration)>,
    /// Runs all parts in this process, without deadlines: for debuggers and sanitizers.
    #[arg(long)]
    pub(crate) in_process: bool,
    /// Runs this part as a child process.
    #[arg(long, value_parser = parts(), hide = true)]
    pub(crate) child: Option<Part>,
    /// Lets a part abort, hang or panic after its first result, or lose the context before, to test
    /// this program.
    #[arg(long, value_parser = plant, value_delimiter = ',', hide = true)]
    pub(crate) plant: Vec<(Plant, Part)>,
    /// Measures more calls, of more handles, in the part `calls`: 7 minutes instead of 45 s.
    #[arg(long)]
    pub(crate) thorough: bool,
    /// The number of measurements per median.
    #[arg(long, default_value_t = 5, value_parser = at_least_one())]
    pub(crate) repetitions: usize,
    /// The seed of random sizes.
    #[arg(long, default_value_t = 42)]
    pub(crate) seed: u64,
    /// The size of an allocation in the pairs.
    #[arg(long, default_value = "1MiB")]
    pub(crate) pair_size: ByteSize,
    /// Pairs that are timed together.
    #[arg(long, default_value_t = 1_000, value_parser = at_least_one())]
    pub(crate) pairs: usize,
    /// The number of timed batches of pairs.
    #[arg(long, default_value_t = 200, value_parser = at_least_one())]
    pub(crate) batches: usize,
    /// Threads, each with a lane and a stream of its own.
    #[arg(long, default_value_t = 16, value_parser = at_least_one())]
    pub(crate) threads: usize,
    /// Rounds of each loop of cuArena's benchmark.
    #[arg(long, default_value_t = 5_000, value_parser = at_least_one())]
    pub(crate) cuarena_rounds: usize,
    /// Divisor of the sizes in those loops, for devices with less memory.
    #[arg(long, default_value_t = 1, value_parser = at_least_one())]
    pub(crate) cuarena_part: usize,
    /// The size of the burst in the decay part.
    #[arg(long, default_value = "60GiB")]
    pub(crate) decay_size: ByteSize,
    /// The time after which idle memory is released.
    #[arg(long, default_value = "5s", value_parser = humantime::parse_duration)]
    pub(crate) decay_time: Duration,
    /// The time to wait for memory to be released.
    #[arg(long, default_value = "10s", value_parser = humantime::parse_duration)]
    pub(crate) decay_within: Duration,
    /// The amount of memory put to sleep; at most half of the available host memory.
    #[arg(long, default_value = "40GiB")]
    pub(crate) sleep_size: ByteSize,
    /// The size of each block in the sleep and decay parts.
    #[arg(long, default_value = "256MiB")]
    pub(crate) block: ByteSize,
    /// The number of sleeps and wakes; the goal is 100.
    #[arg(long, default_value_t = 10, value_parser = at_least_one())]
    pub(crate) cycles: usize,
    /// The limit of the fragmentation part; default: as much as fits.
    #[arg(long)]
    pub(crate) fragmentation_size: Option<ByteSize>,
    /// Allocations of the fragmentation.
    #[arg(long, default_value_t = 20_000)]
    pub(crate) fragmentation_steps: usize,
    /// The amount of memory remapped; twice as much is needed.
    #[arg(long, default_value = "10GiB")]
    pub(crate) remap_size: ByteSize,
    /// The size of the holes from which memory is remapped.
    #[arg(long, default_value = "64MiB")]
    pub(crate) remap_block: ByteSize,
    /// The amount live before every second block is freed and the rest is compacted.
    #[arg(long, default_value = "8GiB")]
    pub(crate) compact_size: ByteSize,
    /// The size of each block in the compaction part.
    #[arg(long, default_value = "32MiB")]
    pub(crate) compact_block: ByteSize,
    /// The duration of the torture: seconds, or a time with a unit.
    #[arg(long, default_value = "30s", value_parser = seconds)]
    pub(crate) torture_seconds: Duration,
    /// The steps of each thread in the torture; 0 for no limit.
    #[arg(long, default_value_t = 0)]
    pub(crate) torture_steps: u64,
    /// The limit of the arena in the torture; at most half of it is live.
    #[arg(long, default_value = "2GiB")]
    pub(crate) torture_size: ByteSize,
    /// The largest block in the torture.
    #[arg(long, default_value = "32MiB")]
    pub(crate) torture_block: ByteSize,
    /// The host threads of the torture, 1 to 8; its eight lanes are divided among them.
    #[arg(long, default_value_t = 2)]
    #[arg(value_parser = RangedU64ValueParser::<usize>::new().range(1..=LANES as u64))]
    pub(crate) torture_threads: usize,
}

impl Args {
    /// Returns `true` if a part should run.
    pub(crate) fn wants(&self, name: &str) -> bool {
        let is_named = self.only.iter().any(|part| part.name == name);
        name == PARTS[0].name || is_named || self.only.is_empty() && name != PROVOKE
    }

    /// The time after which a part is killed.
    pub(crate) fn deadline(&self, part: Part) -> Duration {
        let given = |of: Option<&str>| {
            let mut all = self.deadline.iter().rev();
            all.find(|(it, _)| it.map(|part| part.name) == of).map(|(_, time)| *time)
        };
        let usual = Duration::from_secs(part.limit_s);
        let usual = match part.name {
            "calls" if self.thorough => Duration::from_secs(480),
            "torture" => usual + self.torture_seconds,
            _ => usual,
        };
        given(Some(part.name)).or_else(|| given(None)).unwrap_or(usual)
    }
}

/// Reads the name of a part.
fn parts() -> impl TypedValueParser<Value = Part> {
    let names = PARTS.iter().map(|part| PossibleValue::new(part.name).help(part.about));
    PossibleValuesParser::new(names).try_map(|name| named(&name))
}

fn named(name: &str) -> Result<Part, String> {
    let part = PARTS.iter().find(|part| part.name == name);
    part.ok_or_else(|| format!("{name:?} is no part"))
}

/// Reads `DURATION` or `PART=DURATION`.
fn deadline(text: &str) -> Result<(Option<Part>, Duration), String> {
    let (part, time) = match text.split_once('=') {
        Some((part, time)) => (Some(named(part)?), time),
        None => (None, text),
    };
    let time = humantime::parse_duration(time).map_err(|error| format!("{error}: {time}"))?;
    Ok((part, time))
}

/// Reads `KIND=PART`.
fn plant(text: &str) -> Result<(Plant, Part), String> {
    let (kind, part) = text.split_once('=').ok_or("expected KIND=PART")?;
    Ok((Plant::from_str(kind, false)?, named(part)?))
}

/// Reads a number of seconds, or a time with a unit.
fn seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().map(Duration::from_secs);
    seconds.or_else(|_| humantime::parse_duration(text).map_err(|it| format!("{it}: {text}")))
}

fn at_least_one() -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(1..)
}
