//! Replay: what recorded allocations of model code need of the device.
//!
//! Each trace goes through an arena over the host driver, with idle memory given back at once and
//! with the default decay, of whose time nothing passes. The figures are the most that was taken
//! from the device for the most that was live, which does not depend on the machine. Live counts
//! what was asked for, before any rounding.
//!
//! The project's own traces are also played with pauses, whose driver calls are counted (`time`).
//!
//! Exit codes: 0 every goal held; 1 one was missed, or a file is no trace.

mod time;

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use clap::Parser;
use common::figures::{Figures, count};
use common::player::Player;
use common::trace::{self, Trace};
use lowtide_gpu::decay::DecayTime;
use lowtide_gpu::{ArenaConfig, BoxError, ByteSize, HostDriver};

/// Goals of the project's own traces: what a trace of a few blocks needs is a granule, and no
/// fault.
const RATIO_MAX: f64 = 1.06;
const MEAN_MAX: f64 = 1.03;
/// With the default decay, which services run: the most committed per live, to three digits.
const DEFAULT_DECAY: [(&str, f64); 5] = [
    ("bert-embed", 1.122),
    ("gpt2-generate", 1.031),
    ("llama-generate", 1.012),
    ("vit-images", 1.085),
    ("gpt2-train", 1.144),
];

/// What recorded allocations of model code need of the device.
#[derive(Clone, Debug, Parser)]
struct Cli {
    /// Recordings to replay in place of the project's own traces: JSON lines, plain or compressed
    /// with gzip.
    files: Vec<PathBuf>,
}

fn main() -> ExitCode {
    common::main(|Cli { files }| {
        let own = trace::own();
        let (files, is_own) = if files.is_empty() { (&own[..], true) } else { (&files[..], false) };
        let (mut figures, mut ratios) = (Figures::default(), Vec::new());
        let traces = files.iter().map(|file| Trace::open(file)).collect::<Result<Vec<_>, _>>()?;
        for trace in &traces {
            ratios.push(measure(trace, is_own, &mut figures)?);
        }
        let mean = ratios.iter().sum::<f64>() / count(ratios.len() as u64);
        let goal = if is_own { MEAN_MAX } else { f64::INFINITY };
        figures.at_most("replay.mean.committed_per_live", mean, "ratio", goal);
        if is_own {
            time::pauses(&traces, &mut figures)?;
            time::scattered(&mut figures)?;
        }
        Ok(figures.print())
    })
}

/// Measures a trace. Returns what was committed for each byte that was live at most.
fn measure(trace: &Trace, is_own: bool, figures: &mut Figures) -> Result<f64, BoxError> {
    let name = format!("replay.{}", trace.name);
    let most = |goal: f64| if is_own { goal } else { f64::INFINITY };
    let ratio = replay(trace, DecayTime::AtOnce)?;
    figures.at_most(format!("{name}.committed_per_live"), ratio, "ratio", most(RATIO_MAX));
    let usual = replay(trace, ArenaConfig::new("").decay)?;
    let goal = DEFAULT_DECAY.iter().find(|(name, _)| *name == trace.name);
    let goal = most(goal.map_or(f64::INFINITY, |(_, most)| most + 5e-4));
    figures.at_most(format!("{name}.default_decay.committed_per_live"), usual, "ratio", goal);
    Ok(ratio)
}

/// Replays a trace. Returns the most that was committed at once for each byte that was live at most.
fn replay(trace: &Trace, decay: DecayTime) -> Result<f64, BoxError> {
    let config = ArenaConfig { decay, ..ArenaConfig::new(&trace.name) };
    let mut player = Player::new(trace, Arc::new(HostDriver::new()), config)?;
    let mut peak = ByteSize::ZERO;
    for &event in &trace.events {
        player.play(event)?;
        // Before what is due is released: the most that it was in between.
        peak = peak.max(player.arena.glance().committed);
        player.decay()?;
    }
    Ok(peak.as_f64() / count(trace.live_peak))
}
