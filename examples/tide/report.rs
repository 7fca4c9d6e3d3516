//! The report: the table of stages next to the twin's, and the bounds that must hold.
//!
//! Every bound is printed with its measured value, even if it holds.

use std::fmt::Write as _;

use lowtide::ByteSize;

use crate::run::{Answers, Kind, Outcome, TIGHT_LIMIT, stage};

const LIVE_PEAK_MIN: u64 = 256 << 20;
const LIVE_RISE_MIN: u64 = 8;
const TWIN_PART: u64 = 3;
const RETURN_BYTES: u64 = 8 << 20;
const REGIONS: u64 = 2;

/// Every bound, measured. An error if a run lacks a stage.
pub(crate) fn bounds(
    managed: &Outcome,
    twin: &Outcome,
    tight: &Outcome,
) -> Result<Vec<(bool, String)>, String> {
    let mut bounds = Vec::new();
    let mut bound = |holds: bool, what: String, measured: String| {
        bounds.push((holds, format!("{what}:\n          {measured}")));
    };
    let idle = managed.water(stage::QUIET_10)?;
    let [peak, defaults] =
        [managed.water(stage::BURST)?, twin.water(stage::BURST)?].map(|of| of.heap_live);
    bound(
        peak >= LIVE_RISE_MIN * idle.heap_live,
        format!("live heap at peak >= {LIVE_RISE_MIN} x idle"),
        format!("{} against {} idle", size(peak), size(idle.heap_live)),
    );
    bound(
        defaults >= LIVE_PEAK_MIN,
        format!("live heap at peak with jemalloc's defaults >= {}", size(LIVE_PEAK_MIN)),
        size(defaults),
    );
    let (ours, theirs) = (idle.heap_retained(), twin.water(stage::QUIET_10)?.heap_retained());
    bound(
        ours <= theirs / TWIN_PART,
        format!("heap retained at +10 s <= 1/{TWIN_PART} of jemalloc's defaults"),
        format!("{} against {}", size(ours), size(theirs)),
    );
    let (kept, granule) = (idle.device_retained(), managed.granule);
    bound(
        kept <= REGIONS * granule,
        format!("device committed back to live within {REGIONS} granules of {}", size(granule)),
        format!("{} retained over {} live", size(kept), size(idle.device_live)),
    );
    let gone = managed.water(stage::UNLOADED)?;
    let what = "device committed after unload = 0".to_owned();
    bound(gone.device_committed == 0, what, size(gone.device_committed));
    let warm = managed.water(stage::WARM)?.charged;
    let room = RETURN_BYTES.max(warm / 20);
    bound(
        gone.charged <= warm + room,
        format!("the process's own pages after unload <= warm-up's end + {}", size(room)),
        format!("{} against {}", size(gone.charged), size(warm)),
    );
    let [ok, shed, other] = managed.answers();
    let holds = ok > 0 && shed == 0 && other == 0;
    bound(holds, "only 2xx at the limit".to_owned(), answers(managed, holds));
    let (peak, [ok, _, other]) = (tight.water(stage::WARM_UP)?.rss, tight.answers());
    let holds = ok > 0 && other == 0 && peak <= TIGHT_LIMIT.get();
    let what = format!("at {TIGHT_LIMIT}: only 2xx, and 503 with Retry-After; rss below it");
    bound(holds, what, format!("{}; rss {} at the peak", answers(tight, holds), size(peak)));
    Ok(bounds)
}

/// The answers of a run; if the bound fails, with the reasons of rejections and kinds of others.
fn answers(outcome: &Outcome, holds: bool) -> String {
    let [ok, shed, other] = outcome.answers();
    let mut text = format!("{ok} of 2xx, {shed} of 503, {other} others");
    for (why, count) in outcome.rejected.iter().chain(&outcome.other).filter(|_| !holds) {
        let _ = write!(text, "\n          {count} {why}");
    }
    text
}

/// The stages of both runs, one above the other, in 80 columns: memory in MiB, then answers.
pub(crate) fn table(managed: &Outcome, twin: &Outcome) -> String {
    let runs = [(Kind::Managed, managed), (Kind::Defaults, twin)];
    let mut text = String::new();
    let _ = writeln!(text, "{:<22}{:^32}|{:>16}", "MiB", "process and heap", "device");
    let _ = write!(text, "{:<22}{:>6}{:>9}{:>7}", "stage", "rss", "resident", "live");
    let _ = writeln!(text, "{:>9} |{:>6}{:>10}{:>9}", "retained", "live", "committed", "retained");
    for (kind, outcome) in runs {
        let _ = writeln!(text, "{}", kind.title());
        for row in &outcome.rows {
            let water = &row.water;
            let [rss, resident, live, retained] =
                [water.rss, water.resident, water.heap_live, water.heap_retained()].map(mib);
            let _ = write!(text, "  {:<20}{rss:>6.0}{resident:>9.0}", row.stage);
            let _ = write!(text, "{live:>7.1}{retained:>9.1} |");
            let [live, committed, retained] =
                [water.device_live, water.device_committed, water.device_retained()].map(mib);
            let _ = writeln!(text, "{live:>6.1}{committed:>10.1}{retained:>9.1}");
        }
    }
    text.push_str(
        "\nThe row of a burst shows the instant with the most live heap. resident is\njemalloc's \
         own count of pages and includes pages never touched, so it can be\nmore than rss, the \
         kernel's count for the process. retained is resident - live,\nand committed - live.\n\n",
    );
    let _ = write!(text, "{:<22}{:>6}{:>9}{:>7}", "answers", "2xx", "503", "others");
    let _ = writeln!(text, "{:>9}{:>9}", "p50 ms", "p99 ms");
    for (kind, outcome) in runs {
        let _ = writeln!(text, "{}", kind.title());
        for row in &outcome.rows {
            if let Some(Answers { counts: [ok, shed, other], p50, p99 }) = row.answers {
                let _ = write!(text, "  {:<20}{ok:>6}{shed:>9}{other:>7}", row.stage);
                let _ = writeln!(text, "{p50:>9.0}{p99:>9.0}");
            }
        }
    }
    text
}

fn mib(bytes: u64) -> f64 {
    ByteSize::new(bytes).as_f64() / ByteSize::mib(1).as_f64()
}

fn size(bytes: u64) -> String {
    ByteSize::new(bytes).to_string()
}
