//! The command line: which parts run, how large they are, where the figures go.
//!
//! The sizes are those for which the goals were set, on a device with 80 GiB or more; a part takes
//! less where less is there, and says so. It measures nothing.
//!
//! Invariant: without arguments every part runs, at the size of its goal.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Parser, ValueEnum};
use lowtide::ByteSize;

/// A part of the check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Part {
    /// The contract that an arena keeps over every driver, case by case, on each rung.
    Contract,
    /// An allocation and its free, alone and beside cudarc's.
    Pair,
    /// The same from many threads.
    Lanes,
    /// The loops of cuArena's own benchmark.
    Cuarena,
    /// A burst, and the memory's way back.
    Decay,
    /// Sleep and wake with contents kept.
    SleepKeep,
    /// Sleep and wake with contents discarded.
    SleepDiscard,
    /// Random sizes at two thirds of the memory.
    Fragmentation,
    /// Memory moved to other addresses, against a copy.
    Remap,
    /// Live blocks moved together, against a copy.
    Compact,
    /// cudarc's own allocations from a governed pool.
    Governor,
}

/// Checks on this machine's GPU what lowtide promises, and measures what it costs.
#[derive(Clone, Debug, Parser)]
#[command(args_override_self = true)]
pub(crate) struct Args {
    /// Runs these parts only, with commas between them.
    #[arg(long, value_enum, value_delimiter = ',')]
    pub(crate) only: Vec<Part>,
    /// The device's ordinal, as the driver counts.
    #[arg(long, default_value_t = 0)]
    pub(crate) device: u32,
    /// How large the pieces are in which memory is taken; the device's granularity unless told
    /// otherwise.
    #[arg(long)]
    pub(crate) handle: Option<ByteSize>,
    /// Writes everything to this file as well, as JSON.
    #[arg(long)]
    pub(crate) json: Option<PathBuf>,
    /// How often each thing is measured whose median is taken.
    #[arg(long, default_value_t = 5, value_parser = at_least_one)]
    pub(crate) repetitions: usize,
    /// Where chance begins.
    #[arg(long, default_value_t = 42)]
    pub(crate) seed: u64,
    /// The size of an allocation in the pairs.
    #[arg(long, default_value = "1MiB")]
    pub(crate) pair_size: ByteSize,
    /// Pairs that are timed together.
    #[arg(long, default_value_t = 1_000, value_parser = at_least_one)]
    pub(crate) pairs: usize,
    /// How many times so many pairs are timed.
    #[arg(long, default_value_t = 200, value_parser = at_least_one)]
    pub(crate) batches: usize,
    /// Threads, each with a lane and a stream of its own.
    #[arg(long, default_value_t = 16, value_parser = at_least_one)]
    pub(crate) threads: usize,
    /// Rounds of each loop of cuArena's.
    #[arg(long, default_value_t = 5_000, value_parser = at_least_one)]
    pub(crate) cuarena_rounds: usize,
    /// By what their sizes are divided, where all of them are too much.
    #[arg(long, default_value_t = 1, value_parser = at_least_one)]
    pub(crate) cuarena_part: usize,
    /// The burst whose memory is to come back.
    #[arg(long, default_value = "60GiB")]
    pub(crate) decay_size: ByteSize,
    /// How long idle memory stays.
    #[arg(long, default_value = "5s", value_parser = humantime::parse_duration)]
    pub(crate) decay_time: Duration,
    /// How long memory is waited for.
    #[arg(long, default_value = "10s", value_parser = humantime::parse_duration)]
    pub(crate) decay_within: Duration,
    /// How much sleeps; at most half of the host memory that is available.
    #[arg(long, default_value = "40GiB")]
    pub(crate) sleep_size: ByteSize,
    /// The size of each block of it, and of those of the decay.
    #[arg(long, default_value = "256MiB")]
    pub(crate) block: ByteSize,
    /// How often it sleeps and wakes; the goal is 100.
    #[arg(long, default_value_t = 10, value_parser = at_least_one)]
    pub(crate) cycles: usize,
    /// The limit under which fragmentation is tried; as much as fits unless told otherwise.
    #[arg(long)]
    pub(crate) fragmentation_size: Option<ByteSize>,
    /// Allocations of the fragmentation.
    #[arg(long, default_value_t = 20_000)]
    pub(crate) fragmentation_steps: usize,
    /// How much memory is remapped; twice as much is needed.
    #[arg(long, default_value = "10GiB")]
    pub(crate) remap_size: ByteSize,
    /// How large the holes are that it comes from.
    #[arg(long, default_value = "64MiB")]
    pub(crate) remap_block: ByteSize,
    /// How much is live before every second block goes and the rest is compacted.
    #[arg(long, default_value = "8GiB")]
    pub(crate) compact_size: ByteSize,
    /// The size of each block of it.
    #[arg(long, default_value = "32MiB")]
    pub(crate) compact_block: ByteSize,
}

impl Args {
    /// Whether a part is to run.
    pub(crate) fn wants(&self, part: Part) -> bool {
        self.only.is_empty() || self.only.contains(&part)
    }
}

fn at_least_one(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) => Err("0, wanted 1 or more".to_owned()),
        Ok(count) => Ok(count),
        Err(error) => Err(format!("{error}: {text}")),
    }
}
