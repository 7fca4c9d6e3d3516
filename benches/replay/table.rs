//! The results of the traces: tables for people, a line for each figure, and the goals that held.
//!
//! A ratio is the most that was taken from the device over the most that was live, and live counts
//! what was asked for, before any rounding.
//!
//! Invariant: every number in a table that is ours stands once more as `figure NAME VALUE UNIT`.

use lowtide_gpu::ByteSize;

use crate::ours::Ours;
use crate::rivals::{self, Need};
use crate::trace::Trace;

/// Goals. The ratios are judged for the project's own traces: what a trace of a few blocks needs is
/// a granule, and no fault.
const RATIO_MAX: f64 = 1.06;
const MEAN_MAX: f64 = 1.03;
/// With the default decay, which services run: the most committed per live, to three digits, and
/// the most driver calls of each trace.
const DEFAULT_DECAY: [(&str, f64, u64); 5] = [
    ("bert-embed", 1.122, 52),
    ("gpt2-generate", 1.031, 27),
    ("llama-generate", 1.012, 38),
    ("vit-images", 1.085, 57),
    ("gpt2-train", 1.144, 89),
];

/// All that was found about one trace.
#[derive(Clone, Debug)]
pub(crate) struct Row {
    pub(crate) trace: Trace,
    pub(crate) ours: Ours,
    pub(crate) peers: [Need; 4],
}

impl Row {
    fn ratio(&self, bytes: u64) -> f64 {
        ByteSize::new(bytes).as_f64() / ByteSize::new(self.trace.live_peak).as_f64()
    }

    fn committed(&self) -> f64 {
        self.ratio(self.ours.at_once.committed_peak)
    }
}

/// Prints everything; whether every goal held.
pub(crate) fn print(rows: &[Row], own: bool) -> bool {
    let ratios: Vec<f64> = rows.iter().map(Row::committed).collect();
    let mean = ratios.iter().sum::<f64>() / ByteSize::of(rows.len().max(1)).as_f64();
    against_peers(rows, mean);
    in_detail(rows);
    let held = goals(rows, mean, own);
    figures(rows, mean);
    held
}

fn against_peers(rows: &[Row], mean: f64) {
    println!("most taken from the device / most live; (as measured with the peer itself)");
    println!();
    print!("{:<18}{:>9}{:>11}{:>10}", "trace", "events", "live, MiB", "lowtide");
    for need in rows.first().map_or(&[][..], |row| &row.peers) {
        print!("{:>24}", need.peer);
    }
    println!();
    for row in rows {
        let live = mib(row.trace.live_peak);
        print!("{:<18}{:>9}{live:>11.1}", row.trace.name, row.trace.events.len());
        print!(" {:>9.3}", row.committed());
        let measured = rivals::measured(&row.trace);
        for (nth, need) in row.peers.iter().enumerate() {
            let ratio = need.taken_peak.map(|taken| format!("{:.3}", row.ratio(taken)));
            let measured = measured.map(|measured| format!(" ({:.3})", measured[nth]));
            let ratio = ratio.unwrap_or_else(|| "-".to_owned());
            print!("{:>24}", ratio + &measured.unwrap_or_default());
        }
        println!();
    }
    println!("{:<38} {mean:>9.3}", "mean");
    println!();
    println!("kept when all is freed and given back, MiB");
    println!();
    for row in rows {
        print!("{:<38} {:>9.1}", row.trace.name, mib(row.ours.at_once.after_unload));
        for need in &row.peers {
            print!(
                "{:>24}",
                need.kept.map_or_else(|| "-".to_owned(), |kept| format!("{:.1}", mib(kept)))
            );
        }
        println!();
    }
}

fn in_detail(rows: &[Row]) {
    println!();
    println!("lowtide by itself. at once: idle memory given back at once; default: none of the");
    println!("default decay's time passes; calls: commits and decommits; limit: the smallest that");
    println!("does, with the default decay; kept: MiB after unload");
    println!();
    println!(
        "{:<18}{:>12}{:>12}{:>12}{:>14}{:>14}{:>10}{:>12}{:>10}",
        "trace", "at once", "calls", "ns/event", "default", "calls", "kept", "ns/event", "limit"
    );
    for row in rows {
        let (at_once, standing) = (&row.ours.at_once, &row.ours.standing);
        println!(
            "{:<18}{:>12.3}{:>12}{:>12.0}{:>14.3}{:>14}{:>10.1}{:>12.0}{:>10}",
            row.trace.name,
            row.committed(),
            at_once.driver_calls,
            at_once.event_nanos,
            row.ratio(standing.committed_peak),
            standing.driver_calls,
            mib(standing.after_unload),
            standing.event_nanos,
            row.ours
                .limit
                .map_or_else(|| "-".to_owned(), |limit| format!("{:.3}", row.ratio(limit)))
        );
    }
}

fn figures(rows: &[Row], mean: f64) {
    println!();
    for row in rows {
        let (at_once, standing) = (&row.ours.at_once, &row.ours.standing);
        let name = format!("replay.{}", row.trace.name);
        println!("figure {name}.committed_per_live {:.4} ratio", row.committed());
        println!("figure {name}.committed_after_unload_bytes {} bytes", at_once.after_unload);
        if let Some(limit) = row.ours.limit {
            println!("figure {name}.limit_per_live {:.4} ratio", row.ratio(limit));
        }
        println!("figure {name}.driver_calls {} calls", at_once.driver_calls);
        println!("figure {name}.event_ns {:.1} ns", at_once.event_nanos);
        let held = row.ratio(standing.committed_peak);
        println!("figure {name}.default_decay.committed_per_live {held:.4} ratio");
        let kept = standing.after_unload;
        println!("figure {name}.default_decay.committed_after_unload_bytes {kept} bytes");
        println!("figure {name}.default_decay.driver_calls {} calls", standing.driver_calls);
        println!("figure {name}.default_decay.event_ns {:.1} ns", standing.event_nanos);
        for need in &row.peers {
            let name = format!("peer.{}.{name}", need.peer);
            if let Some(taken) = need.taken_peak {
                println!("figure {name}.committed_per_live {:.4} ratio", row.ratio(taken));
            }
            if let Some(kept) = need.kept {
                println!("figure {name}.committed_after_unload_bytes {kept} bytes");
            }
        }
    }
    println!("figure replay.mean.committed_per_live {mean:.4} ratio");
}

/// Prints each goal and whether it held; whether all did.
fn goals(rows: &[Row], mean: f64, own: bool) -> bool {
    println!();
    let mut all = true;
    let mut judge = |held: bool, what: String| {
        println!("{}  {what}", if held { "held  " } else { "MISSED" });
        all &= held;
    };
    for row in rows {
        let kept = row.ours.at_once.after_unload;
        judge(kept == 0, format!("{}: nothing committed after unload: {kept}", row.trace.name));
        if own {
            let ratio = row.committed();
            let name = &row.trace.name;
            let what = format!("{name}: committed per live at most {RATIO_MAX}: {ratio:.4}");
            judge(ratio <= RATIO_MAX, what);
        }
        let of = |goal: &&(&str, f64, u64)| own && goal.0 == row.trace.name;
        if let Some((name, most, calls_max)) = DEFAULT_DECAY.iter().find(of) {
            let standing = &row.ours.standing;
            let ratio = row.ratio(standing.committed_peak);
            let what =
                format!("{name}: the same with the default decay at most {most}: {ratio:.4}");
            judge(ratio < most + 5e-4, what);
            let calls = standing.driver_calls;
            judge(calls <= *calls_max, format!("{name}: its calls at most {calls_max}: {calls}"));
        }
    }
    if own {
        judge(mean <= MEAN_MAX, format!("mean committed per live at most {MEAN_MAX}: {mean:.4}"));
    }
    all
}

fn mib(bytes: u64) -> f64 {
    ByteSize::new(bytes).as_f64() / ByteSize::mib(1).as_f64()
}
