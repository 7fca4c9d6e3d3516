//! Replay: what recorded allocations of model code need of the device.
//!
//! Each trace goes through an arena over the host driver, with idle memory given back at once and
//! with the default decay, of whose time nothing passes. The figures are the most that was taken
//! from the device for the most that was live, and calls: they do not depend on the machine. Live
//! counts what was asked for, before any rounding.
//!
//! The project's own traces are also played with pauses (`time`).
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
/// With the default decay, which services run: the most committed per live, to three digits, and
/// the most driver calls of each trace.
const DEFAULT_DECAY: [(&str, f64, f64); 5] = [
    ("bert-embed", 1.122, 52.0),
    ("gpt2-generate", 1.031, 27.0),
    ("llama-generate", 1.012, 38.0),
    ("vit-images", 1.085, 57.0),
    ("gpt2-train", 1.144, 89.0),
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
        figures.add("replay.mean.committed_per_live", mean, "ratio");
        if is_own {
            figures.set_goals(&[("replay.mean.committed_per_live", MEAN_MAX)]);
            time::pauses(&traces, &mut figures)?;
            time::scattered(&mut figures)?;
        }
        Ok(figures.print())
    })
}

/// Measures a trace. Returns what was committed for each byte that was live at most.
fn measure(trace: &Trace, is_own: bool, figures: &mut Figures) -> Result<f64, BoxError> {
    let name = format!("replay.{}", trace.name);
    let per_live = |bytes: u64| count(bytes) / count(trace.live_peak);
    let (peak, kept, calls) = replay(trace, DecayTime::AtOnce)?;
    let ratio = per_live(peak);
    figures.add(format!("{name}.committed_per_live"), ratio, "ratio");
    figures.at_most(format!("{name}.committed_after_unload_bytes"), count(kept), "bytes", 0.0);
    figures.add(format!("{name}.driver_calls"), count(calls), "calls");
    let (peak, kept, calls) = replay(trace, ArenaConfig::new("").decay)?;
    let name_of = |end: &str| format!("{name}.default_decay.{end}");
    figures.add(name_of("committed_per_live"), per_live(peak), "ratio");
    figures.add(name_of("committed_after_unload_bytes"), count(kept), "bytes");
    figures.add(name_of("driver_calls"), count(calls), "calls");
    if is_own {
        figures.set_goals(&[(&format!("{name}.committed_per_live"), RATIO_MAX)]);
    }
    let goal = DEFAULT_DECAY.iter().find(|(name, ..)| is_own && *name == trace.name);
    if let Some((_, most, calls)) = goal {
        figures.set_goals(&[
            (&name_of("committed_per_live"), most + 5e-4),
            (&name_of("driver_calls"), *calls),
        ]);
    }
    Ok(ratio)
}

/// Replays a trace. Returns the most that was committed at once, what stays committed when all was
/// freed and what is due was released, and the calls that committed or decommitted.
fn replay(trace: &Trace, decay: DecayTime) -> Result<(u64, u64, u64), BoxError> {
    let config = ArenaConfig { decay, ..ArenaConfig::new(&trace.name) };
    let mut player = Player::new(trace, Arc::new(HostDriver::new()), config)?;
    let mut peak = ByteSize::ZERO;
    for &event in &trace.events {
        player.play(event)?;
        // Before what is due is released: the most that it was in between.
        peak = peak.max(player.arena.glance().committed);
        if decay == DecayTime::AtOnce {
            player.decay()?;
        }
    }
    let end = player.arena.snapshot();
    Ok((peak.get(), end.committed.get(), end.commits_total + end.decommits_total))
}
