//! The report: the table of stages next to the twin's, and the bounds that must hold.
//!
//! Every bound is printed with its measured value, even if it holds.

use std::fmt::Write as _;

use lowtide::ByteSize;

use crate::run::{Outcome, Row, stage};

const LIVE_PEAK_MIN: u64 = 256 << 20;
const LIVE_RISE_MIN: u64 = 8;
const TWIN_PART: u64 = 3;
const RETURN_BYTES: u64 = 8 << 20;
const REGIONS: u64 = 2;

/// One bound.
#[derive(Debug)]
pub(crate) struct Bound {
    /// `true` if it holds.
    pub(crate) holds: bool,
    /// The bound.
    pub(crate) what: String,
    /// The measured value.
    pub(crate) measured: String,
    /// Lines that explain a failure.
    pub(crate) why: Vec<String>,
}

/// Every bound, measured.
pub(crate) fn bounds(managed: &Outcome, twin: &Outcome, half: &Outcome) -> Vec<Bound> {
    let mut bounds = Vec::new();
    let mut bound = |holds: Option<bool>, what: String, measured: String| {
        bounds.push(Bound { holds: holds.unwrap_or(false), what, measured, why: Vec::new() });
    };
    let water = |outcome: &Outcome, stage: &str| outcome.row(stage).map(|row| row.water);
    let show = |bytes: Option<u64>| bytes.map_or_else(|| "no figure".to_owned(), size);

    let peak = water(managed, stage::BURST).map(|water| water.heap_live);
    let idle = water(managed, stage::QUIET_10);
    let idle_live = idle.map(|water| water.heap_live);
    bound(
        peak.map(|peak| peak >= LIVE_PEAK_MIN),
        format!("live heap at peak >= {}", size(LIVE_PEAK_MIN)),
        show(peak),
    );
    bound(
        peak.zip(idle_live).map(|(peak, idle)| peak >= LIVE_RISE_MIN * idle),
        format!("live heap at peak >= {LIVE_RISE_MIN} x idle"),
        format!("{} against {} idle", show(peak), show(idle_live)),
    );
    let ours = idle.map(|water| water.heap_retained());
    let theirs = water(twin, stage::QUIET_10).map(|water| water.heap_retained());
    bound(
        ours.zip(theirs).map(|(ours, theirs)| ours <= theirs / TWIN_PART),
        format!("heap retained at +10 s <= 1/{TWIN_PART} of jemalloc's defaults"),
        format!("{} against {}", show(ours), show(theirs)),
    );
    let kept = idle.map(|water| water.device_retained());
    bound(
        kept.map(|kept| kept <= REGIONS * managed.granule),
        format!(
            "device committed back to live within {REGIONS} granules of {}",
            size(managed.granule)
        ),
        format!("{} retained over {} live", show(kept), show(idle.map(|water| water.device_live))),
    );
    let gone = water(managed, stage::UNLOADED);
    bound(
        gone.map(|water| water.device_committed == 0),
        "device committed after unload = 0".to_owned(),
        show(gone.map(|water| water.device_committed)),
    );
    let warm = water(managed, stage::WARM).map(|water| water.charged);
    let end = gone.map(|water| water.charged);
    let room = warm.map(|warm| RETURN_BYTES.max(warm / 20));
    bound(
        end.zip(warm).zip(room).map(|((end, warm), room)| end <= warm + room),
        format!("charged after unload <= warm-up's end + {}", show(room)),
        format!("{} against {} ({})", show(end), show(warm), managed.charged_from),
    );
    let [ok, shed, other] = managed.answers();
    bounds.push(answers(managed, "only 2xx at the limit", ok > 0 && shed == 0 && other == 0));
    let [ok, shed, other] = half.answers();
    bounds.push(answers(
        half,
        "at half of it: only 2xx, and 503 with Retry-After",
        ok > 0 && shed > 0 && other == 0,
    ));
    bounds
}

/// A bound on the answers of a run.
fn answers(outcome: &Outcome, what: &str, holds: bool) -> Bound {
    let [ok, shed, other] = outcome.answers();
    let mut why: Vec<_> =
        outcome.other.iter().map(|(what, count)| format!("others: {count} of {what}")).collect();
    why.extend(outcome.door.lines());
    let measured = format!("{ok} of 2xx, {shed} of 503, {other} others");
    Bound { holds, what: what.to_owned(), measured, why }
}

/// The stages of both runs, one above the other, in 80 columns: memory in MiB, then answers.
pub(crate) fn table(managed: &Outcome, twin: &Outcome) -> String {
    let runs = [("lowtide", managed), ("jemalloc's defaults", twin)];
    let mut text = String::new();
    let _ = writeln!(text, "{:<22}{:^32}|{:>16}", "MiB", "process and heap", "device");
    let _ = write!(text, "{:<22}{:>6}{:>9}{:>7}", "stage", "rss", "resident", "live");
    let _ = writeln!(text, "{:>9} |{:>6}{:>10}{:>9}", "retained", "live", "committed", "retained");
    for (name, outcome) in runs {
        let _ = writeln!(text, "{name}");
        for row in &outcome.rows {
            memory_line(&mut text, row);
        }
    }
    text.push_str(
        "\nThe row of a burst shows the instant with the most live heap. resident is\njemalloc's \
         own count of pages and includes pages never touched, so it can be\nmore than rss, the \
         kernel's count for the process. retained is resident - live,\nand committed - live.\n\n",
    );
    let _ = write!(text, "{:<22}{:>6}{:>9}{:>7}", "answers", "2xx", "503", "others");
    let _ = writeln!(text, "{:>9}{:>9}", "p50 ms", "p99 ms");
    for (name, outcome) in runs {
        let _ = writeln!(text, "{name}");
        for row in &outcome.rows {
            answers_line(&mut text, row);
        }
    }
    text
}

fn memory_line(text: &mut String, row: &Row) {
    let water = &row.water;
    let _ = write!(text, "  {:<20}{:>6.0}", row.stage, mib(water.rss));
    let [resident, live, retained] =
        [water.resident, water.heap_live, water.heap_retained()].map(mib);
    let _ = write!(text, "{resident:>9.0}{live:>7.1}{retained:>9.1} |");
    let [live, committed, retained] =
        [water.device_live, water.device_committed, water.device_retained()].map(mib);
    let _ = writeln!(text, "{live:>6.1}{committed:>10.1}{retained:>9.1}");
}

fn answers_line(text: &mut String, row: &Row) {
    if let (Some([p50, p99]), Some([ok, shed, other])) = (row.latency, row.answers) {
        let _ = write!(text, "  {:<20}{ok:>6}{shed:>9}{other:>7}", row.stage);
        let _ = writeln!(text, "{p50:>9.0}{p99:>9.0}");
    }
}

fn mib(bytes: u64) -> f64 {
    ByteSize::new(bytes).as_f64() / ByteSize::mib(1).as_f64()
}

fn size(bytes: u64) -> String {
    ByteSize::new(bytes).to_string()
}
