//! Cases of lowtide's own: whether a fall of the load ends the shedding at once, and a device as
//! the budget that binds.
//!
//! Requests that were admitted hold their memory for up to 2.5 s after a fall, so that room comes
//! back over that time and not at once: what is measured is whether that is enough for all that
//! comes. Invariant: what a case leaves in the file system is gone when it is over.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use lowtide::{BoxError, ByteSize};

use crate::cell::{Bed, Outcome};
use crate::charge;
use crate::figures::{count, part};
use crate::load::{Fate, Seen};
use crate::measures::{MIB, Measures};
use crate::mix::Mix;
use crate::policy::Policy;
use crate::runner::{Plan, Runner};
use crate::schedule::{Offer, Phase, Sending, millis};
use crate::service::{Queue, Settings};

const BEFORE: Duration = Duration::from_secs(5);
const HIGH: Duration = Duration::from_secs(6);
const AFTER: Duration = Duration::from_secs(5);
/// The load of a burst, and the number of seeds that it is drawn from.
const BURST: f64 = 1.2;
const BURST_SEEDS: u64 = 6;

/// The limits of the case with a device: the host's is wide, the device's is not.
const HOST: ByteSize = ByteSize::gib(1);
const DEVICE: ByteSize = ByteSize::mib(128);

/// All of them.
pub(crate) fn all(runner: &mut Runner) -> Result<(), BoxError> {
    decay_off(runner)?;
    page_cache(runner)?;
    device(runner)
}

/// As the cells of lowtide are, at this load.
const fn plan(load: f64) -> Plan {
    Plan { policy: Policy::Lowtide, load, mix: Mix::Heavy, estimate: 1.0 }
}

/// jemalloc gives nothing back by itself: all that is free stays resident until lowtide purges.
fn decay_off(runner: &mut Runner) -> Result<(), BoxError> {
    let settings = Settings { decay_off: true, ..runner.settings(Policy::Lowtide, 1.0) };
    let offer = falling(runner, &[(4.0, HIGH), (0.5, AFTER)]);
    let outcome = Bed::start(&settings)?.offer(offer.clone())?;
    fell(runner, "decay_off", &offer, &outcome);
    Ok(())
}

/// A burst of [`BURST`] times what fits: the requests that are shed, beside those of the same
/// service without its queue.
pub(crate) fn burst(runner: &mut Runner) -> Result<(), BoxError> {
    let mut sheds = [0; 2];
    let seed = runner.seed;
    for more in 0..BURST_SEEDS {
        runner.seed = seed + more;
        for (sheds, queue) in sheds.iter_mut().zip([Queue::Service, Queue::None]) {
            let settings = Settings { queue, ..runner.settings(Policy::Lowtide, 1.0) };
            let offer = falling(runner, &[(0.5, BEFORE), (BURST, BEFORE), (0.5, AFTER)]);
            let outcome = Bed::start(&settings)?.offer(offer.clone())?;
            let measures = Measures::of(&offer, &outcome);
            let name = if queue == Queue::None { "no queue" } else { "queue" };
            runner.say(name, plan(BURST), &measures, &outcome);
            *sheds += measures.sheds.iter().sum::<u64>();
            if outcome.death.is_some() {
                runner.lost.push(format!("burst, {name}"));
            }
        }
    }
    runner.seed = seed;
    let [queued, without] = sheds.map(count);
    let figures = &mut runner.figures;
    figures.add("room.burst.sheds", queued, "requests");
    figures.add("room.burst.sheds_without_queue", without, "requests");
    figures.add("room.burst.shed_ratio", part(queued, without), "ratio");
    Ok(())
}

/// The page cache fills the limit before the first request, and again when the load falls; files
/// that are read again and again become active pages.
fn page_cache(runner: &mut Runner) -> Result<(), BoxError> {
    let bed = Bed::start(&runner.settings(Policy::Lowtide, 1.0))?;
    let file = Scratch::new()?;
    let entrance = bed.group.entrance();
    let mib = (runner.limit.get() >> 20) * 5 / 4;
    let fill = format!("dd if=/dev/zero of=\"$1\" bs=1M count={mib} conv=fsync 2>/dev/null");
    within(&entrance, &file.0, &fill)?.wait()?;
    within(&entrance, &file.0, "cat \"$1\" \"$1\" >/dev/null")?.wait()?;
    let charged = charge::usage(&bed.group.folder).unwrap_or_default();
    let filled = charged.as_f64() / runner.limit.as_f64();
    println!("  page cache: {:.1} % of the limit is charged before the load", 100.0 * filled);
    let again = format!(
        "sleep {}; cat \"$1\" >/dev/null",
        (BEFORE + HIGH).saturating_sub(Duration::from_millis(500)).as_secs_f64()
    );
    let mut reader = within(&entrance, &file.0, &again)?;
    let offer = falling(runner, &[(0.5, BEFORE), (4.0, HIGH), (0.5, AFTER)]);
    let outcome = bed.offer(offer.clone());
    let _ = reader.kill();
    let _ = reader.wait();
    let outcome = outcome?;
    let early = |one: &&Seen| one.fate == Fate::Shed && one.at < count(millis(BEFORE));
    let alone = outcome.tally.seen.iter().filter(early).count();
    fell(runner, "page_cache", &offer, &outcome);
    let figures = &mut runner.figures;
    figures.add("latch.page_cache.sheds_from_cache", count(alone as u64), "requests");
    figures.add("latch.page_cache.charged_ratio", filled, "ratio");
    println!("  page cache: {alone} sheds before the load rose");
    Ok(())
}

fn falling(runner: &Runner, phases: &[(f64, Duration)]) -> Offer {
    let fits = Mix::Heavy.fits(runner.limit);
    let phases =
        phases.iter().map(|(load, lasts)| Phase { rate: load * fits, millis: millis(*lasts) });
    Offer {
        mix: Mix::Heavy,
        phases: phases.collect(),
        seed: runner.seed,
        sending: Sending::default(),
    }
}

/// The time from the fall, which is the begin of the last phase, to the last request that came
/// after it and was shed.
fn fell(runner: &mut Runner, case: &str, offer: &Offer, outcome: &Outcome) {
    let measures = Measures::of(offer, outcome);
    runner.say(case, plan(4.0), &measures, outcome);
    let after = offer.phases.last().map_or(0, |phase| phase.millis);
    let fall = count(millis(offer.lasts()) - after);
    let shed = |one: &&Seen| one.fate == Fate::Shed && one.at >= fall;
    let sheds: Vec<f64> = outcome.tally.seen.iter().filter(shed).map(|one| one.at).collect();
    let last = sheds.iter().copied().fold(fall, f64::max) - fall;
    let count_after = count(sheds.len() as u64);
    println!("  {case}: the last of {count_after} sheds came {last:.0} ms after the load fell");
    let figures = &mut runner.figures;
    // A service that died sheds nothing any more; that is no end of a latch.
    let last = if outcome.death.is_some() { f64::INFINITY } else { last };
    figures.add(&format!("latch.{case}.ms"), last, "ms");
    figures.add(&format!("latch.{case}.sheds"), count_after, "requests");
    figures.add(&format!("latch.{case}.oom_kills"), count(outcome.oom_kills), "kills");
    if outcome.death.is_some() {
        runner.lost.push(format!("latch.{case}"));
    }
}

/// Each request needs device memory, and the device is short of it while the host is at ease.
fn device(runner: &mut Runner) -> Result<(), BoxError> {
    let settings = Settings {
        device_bytes: Some(DEVICE.get()),
        limit_bytes: HOST.get(),
        ..runner.settings(Policy::Lowtide, 1.0)
    };
    let rate = 4.0 * Mix::Heavy.fits_device(DEVICE);
    let offer = Offer::steady(Mix::Heavy, rate, runner.lasts, runner.seed);
    let outcome = Bed::start(&settings)?.offer(offer.clone())?;
    let measures = Measures::of(&offer, &outcome);
    runner.say("device", plan(4.0), &measures, &outcome);
    if outcome.death.is_some() {
        runner.lost.push("device.4x.heavy".to_owned());
    }
    let report = &outcome.report;
    println!(
        "  device: {:.0} of {DEVICE} committed at most, {} admitted without room; the host held \
         {:.0} MiB of {HOST}",
        count(report.device_peak_bytes) / MIB,
        report.unplaced,
        measures.peak_mib,
    );
    measures.tell("device.4x.heavy", &mut runner.figures);
    let figures = &mut runner.figures;
    figures.add("overload.device.4x.heavy.unplaced", count(report.unplaced), "requests");
    let peak = count(report.device_peak_bytes) / MIB;
    figures.add("overload.device.4x.heavy.device_peak_mib", peak, "MiB");
    Ok(())
}

/// Runs a line of shell inside the cgroup, with the file as its argument.
fn within(entrance: &Path, file: &Path, line: &str) -> Result<Child, BoxError> {
    let enter = format!("echo $$ >\"$0\" && {line}");
    let mut command = Command::new("/bin/sh");
    command.args(["-c", &enter]).arg(entrance).arg(file);
    Ok(command.stdin(Stdio::null()).spawn()?)
}

/// A file beside this program, so that it is on a disk and its pages are page cache.
struct Scratch(PathBuf);

impl Scratch {
    fn new() -> Result<Self, BoxError> {
        let mut path = std::env::current_exe()?;
        path.set_file_name(format!("overload-cache-{}", std::process::id()));
        Ok(Self(path))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}
