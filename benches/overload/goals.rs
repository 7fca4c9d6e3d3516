//! The goals, and which of them hold.
//!
//! Invariant: a goal whose figures were not measured is told as such and is not missed; so is one
//! of time whose cell is void.

use crate::figures::Figures;

/// On which side of its mark a goal holds.
#[derive(Clone, Copy, Debug)]
enum Mark {
    AtMost(f64),
    AtLeast(f64),
}

/// The table of the goals.
pub(crate) fn told(figures: &Figures) -> String {
    let mut text = format!("{:<66}{:>12}{:>11}\n", "goal", "is to be", "measured");
    for (what, mark, found) in all(figures) {
        let (bound, held) = match (mark, found) {
            (Mark::AtMost(most), found) => {
                (format!("<= {most}"), found.is_none_or(|found| found <= most))
            }
            (Mark::AtLeast(least), found) => {
                (format!(">= {least}"), found.is_none_or(|found| found >= least))
            }
        };
        let found = found.map_or_else(|| "-".to_owned(), |found| format!("{found:.3}"));
        let verdict = if held { "" } else { "  missed" };
        text += &format!("{what:<66}{bound:>12}{found:>11}{verdict}\n");
    }
    text
}

fn all(figures: &Figures) -> Vec<(String, Mark, Option<f64>)> {
    let of = |name: &str| figures.of(name);
    // Of a cell that is not void.
    let timed = |cell: &str, end: &str| {
        let void = of(&format!("overload.{cell}.void"))? > 0.0;
        if void { None } else { of(&format!("overload.{cell}.{end}")) }
    };
    let most = |values: Vec<f64>| values.into_iter().reduce(f64::max);
    let kills = figures.all("overload.lowtide.", ".oom_kills");
    let drawn = of("overload.survive.runs").unwrap_or(0.0);
    let four = "lowtide.4x.heavy";
    let mut goals = vec![
        ("OOM kills under lowtide, all cells".to_owned(), Mark::AtMost(0.0), most(kills)),
        (
            format!("OOM kills, {drawn} runs drawn"),
            Mark::AtMost(0.0),
            of("overload.survive.oom_kills"),
        ),
        (
            "goodput at 4x over the best static budget's".to_owned(),
            Mark::AtLeast(0.95),
            of("overload.ratio.static"),
        ),
        (
            "goodput at 4x over the best safe concurrency limit's".to_owned(),
            Mark::AtLeast(2.0),
            of("overload.ratio.concurrency"),
        ),
    ];
    for load in ["0.5x", "1x"] {
        let cell = format!("overload.lowtide.{load}.heavy");
        let bytes = of(&format!("{cell}.shed_bytes_ratio"));
        goals.push((format!("part of the bytes shed at {load}"), Mark::AtMost(0.01), bytes));
        let small = of(&format!("{cell}.sheds_small"));
        goals.push((format!("small requests shed at {load}"), Mark::AtMost(0.0), small));
    }
    for class in crate::mix::CLASSES {
        let share = of(&format!("overload.{four}.share.{class}"));
        goals.push((format!("share of the {class} ones at 4x"), Mark::AtLeast(0.5), share));
    }
    let mut more = |what: &str, mark: Mark, found: Option<f64>| {
        goals.push((what.to_owned(), mark, found));
    };
    for (case, what) in [("decay_off", "decay off"), ("page_cache", "a full page cache")] {
        let last = of(&format!("latch.{case}.ms"));
        more(&format!("last shed after the load fell, {what}, ms"), Mark::AtMost(250.0), last);
    }
    let cache = of("latch.page_cache.sheds_from_cache");
    more("sheds from page cache alone", Mark::AtMost(0.0), cache);
    more("added p99 at 4x, ms", Mark::AtMost(10.0), timed(four, "p99_ms"));
    more("answer to a shed at 4x, p99, ms", Mark::AtMost(1.0), timed(four, "shed_p99_ms"));
    let levels = timed(four, "level_changes_per_s");
    more("changes of level at 4x, each second", Mark::AtMost(1.0), levels);
    let unplaced = of("overload.device.4x.heavy.unplaced");
    more("device: admitted and no room in the arena", Mark::AtMost(0.0), unplaced);
    goals
}
