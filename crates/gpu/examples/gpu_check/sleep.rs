//! Sleep and wake of an arena: the memory released, the copy rates of its contents, and a check of
//! every byte.
//!
//! It needs no kernel: a pattern is copied in, and compared when it is copied out. The baselines
//! are plain copies of as many bytes, queued, with page-locked memory, in each direction, in the
//! same run.
//!
//! Invariant: after each wake every block is sampled, and after the last one all bytes are
//! compared.

use std::time::Duration;

use lowtide_gpu::ByteSize;
use lowtide_gpu::decay::DecayTime;
use lowtide_gpu::driver::Driver;
use lowtide_gpu::{Buffer, Contents, DeviceArena, Lane, SleepOptions};

use super::cases::{Fault, Outcome};
use super::report::Report;
use super::rig::{
    Rig, blocks, changed, changed_samples, fill, float, kernel_bytes, median, page_locked, rate,
    stream, whole_blocks, words_of,
};

/// The time allowed for the driver to report memory as free, which may lag.
const PATIENCE: Duration = Duration::from_secs(2);

const DISCARD: SleepOptions =
    SleepOptions { drain: Duration::ZERO, stable: Contents::Discard, dynamic: Contents::Discard };

/// Keeps contents in host memory: with all options as they are by default, and then in memory that
/// is reused.
pub(crate) fn keep(rig: &Rig<'_>, report: &mut Report<'_>) -> Outcome {
    let (block, seed) = (rig.args.block, rig.args.seed);
    let size = rig.fitting(rig.args.sleep_size.min(host_share()), block)?;
    let mut staging = vec![0_u64; words_of(block)?];
    let arena = rig.arena("sleep_keep", ByteSize::MAX, DecayTime::Never)?;
    let lane = rig.lane(&arena)?;
    let mut held = blocks(&lane, size, block)?;
    report.figure("gpu.sleep_keep.bytes", size.as_f64(), "bytes");
    let [to_host, to_device, plain] = plain(rig, &lane, &mut held, block)?;
    report.figure("gpu.baseline.to_host_bytes_per_s", to_host, "bytes/s");
    report.figure("gpu.baseline.to_device_bytes_per_s", to_device, "bytes/s");
    report.figure("gpu.sleep_keep.plain_bytes_per_s", plain, "bytes/s");
    fill(&lane, &mut held, &mut staging, seed)?;
    let mut seen = Seen { freed: f64::INFINITY, ..Seen::default() };
    let addresses = addresses(&lane, &held)?;
    let mut usual = Seen { freed: f64::INFINITY, ..Seen::default() };
    for _ in 0..rig.args.repetitions {
        cycle(rig, &arena, &mut usual)?;
    }
    for (what, rates, alone) in [("sleep", &usual.down, to_host), ("wake", &usual.up, to_device)] {
        let (first, warm) = rates.split_first().ok_or("no cycle")?;
        for (when, rate) in [("first", *first), ("warm", median(warm))] {
            let name = format!("gpu.sleep_keep.{when}_{what}");
            report.figure(&format!("{name}_bytes_per_s"), rate, "bytes/s");
            report.figure(&format!("{name}_ratio"), rate / alone, "of a plain copy");
        }
    }
    arena.set_stores_max(ByteSize::MAX);
    let outcome = (0..rig.args.cycles).try_for_each(|round| {
        cycle(rig, &arena, &mut seen)?;
        for it in held.iter().enumerate() {
            seen.changed += changed_samples(&lane, it, round, seed)?;
        }
        seen.cycles += 1;
        Ok::<_, Fault>(())
    });
    report.figure("gpu.sleep_keep.freed_ratio", seen.freed, "of what was committed");
    report.figure("gpu.sleep_keep.sleep_bytes_per_s", median(&seen.down), "bytes/s");
    report.figure("gpu.sleep_keep.wake_bytes_per_s", median(&seen.up), "bytes/s");
    report.figure("gpu.sleep_keep.copy_rate_ratio", median(&seen.both) / plain, "of a plain copy");
    if let Some(&first) = seen.both.first() {
        report.figure("gpu.sleep_keep.first_bytes_per_s", first, "bytes/s");
    }
    let ratio = median(&usual.both) / plain;
    report.figure("gpu.sleep_keep.released_rate_ratio", ratio, "of a plain copy");
    report.figure("gpu.sleep_keep.cycles", float(seen.cycles), "cycles");
    outcome?;
    for it in held.iter().enumerate() {
        seen.changed += changed(&lane, it, &mut staging, seed)?;
    }
    report.figure("gpu.sleep_keep.bytes_changed", float(seen.changed), "bytes");
    if addresses != self::addresses(&lane, &held)? {
        return Err("the address of a block has changed".into());
    }
    drop((held, lane));
    Ok(arena.close()?)
}

/// The results of the cycles.
#[derive(Default)]
struct Seen {
    /// The smallest of all cycles.
    freed: f64,
    down: Vec<f64>,
    up: Vec<f64>,
    both: Vec<f64>,
    cycles: u64,
    changed: u64,
}

fn cycle(rig: &Rig<'_>, arena: &DeviceArena, seen: &mut Seen) -> Outcome {
    let committed = arena.snapshot().committed;
    let before = rig.headroom()?;
    let (down, slept) = rig.timed(|| arena.sleep(SleepOptions::default()))?;
    seen.freed = seen.freed.min(freed(rig, before, committed)?);
    let (up, woken) = rig.timed(|| arena.wake())?;
    if slept.offloaded != woken.restored {
        return Err(
            format!("{} were offloaded, {} restored", slept.offloaded, woken.restored).into()
        );
    }
    seen.down.push(rate(slept.offloaded, down));
    seen.up.push(rate(woken.restored, up));
    seen.both.push(rate(slept.offloaded.saturating_add(woken.restored), down + up));
    Ok(())
}

/// Returns the fraction of the committed memory that the driver got back.
fn freed(rig: &Rig<'_>, before: ByteSize, committed: ByteSize) -> Result<f64, Fault> {
    rig.poll(PATIENCE, Duration::from_millis(10), || {
        let ratio = rig.headroom()?.saturating_sub(before).as_f64() / committed.as_f64();
        Ok((ratio >= 0.99, ratio))
    })
}

/// Bytes a second of plain copies: all blocks out, all in, and both.
fn plain(
    rig: &Rig<'_>,
    lane: &Lane,
    held: &mut [Buffer<u64>],
    block: ByteSize,
) -> Result<[f64; 3], Fault> {
    let mut host = page_locked(&rig.context, words_of(block)?)?;
    let (lease, stream) = (lane.enter()?, stream(lane)?);
    let mut rates = [Vec::new(), Vec::new(), Vec::new()];
    let bytes: ByteSize = held.iter().map(Buffer::bytes).sum();
    for _ in 0..rig.args.repetitions {
        let (down, ()) = rig.timed(|| -> Outcome {
            for block in &*held {
                stream.memcpy_dtoh(block.cuda(&lease)?, &mut host)?;
            }
            Ok(stream.synchronize()?)
        })?;
        let (up, ()) = rig.timed(|| -> Outcome {
            for block in &mut *held {
                stream.memcpy_htod(&host, &mut block.cuda_mut(&lease)?)?;
            }
            Ok(stream.synchronize()?)
        })?;
        rates[0].push(rate(bytes, down));
        rates[1].push(rate(bytes, up));
        rates[2].push(rate(bytes.saturating_add(bytes), down + up));
    }
    Ok(rates.map(|rates| median(&rates)))
}

fn addresses(lane: &Lane, held: &[Buffer<u64>]) -> Result<Vec<u64>, Fault> {
    let lease = lane.enter()?;
    let of = |block: &Buffer<u64>| {
        block.address(&lease)?.map(|at| at.get()).ok_or_else(|| "a block without address".into())
    };
    held.iter().map(of).collect()
}

/// Contents discarded: no more than the unmaps and the commits.
pub(crate) fn discard(rig: &Rig<'_>, report: &mut Report<'_>) -> Outcome {
    let block = rig.args.block;
    let size = rig.fitting(rig.args.sleep_size, block)?;
    let arena = rig.arena("sleep_discard", ByteSize::MAX, DecayTime::Never)?;
    let lane = rig.lane(&arena)?;
    let held = blocks(&lane, size, block)?;
    let (mut whole, mut downs, mut ups) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..rig.args.repetitions {
        rig.driver.synchronize()?;
        let (down, _) = rig.timed(|| arena.sleep(DISCARD))?;
        let (up, _) = rig.timed(|| arena.wake())?;
        whole.push((down + up).as_secs_f64());
        downs.push(down.as_secs_f64());
        ups.push(up.as_secs_f64());
    }
    drop((held, lane));
    arena.close()?;
    let alone = unmaps_and_commits(rig, size)?;
    report.figure("gpu.sleep_discard.sleep_s", median(&downs), "s");
    report.figure("gpu.sleep_discard.wake_s", median(&ups), "s");
    report.figure("gpu.sleep_discard.calls_alone_s", alone, "s");
    report.figure("gpu.sleep_discard.ratio", median(&whole) / alone, "of the calls alone");
    Ok(())
}

/// Measures the seconds to commit as much for new blocks, and to release it after they are freed.
fn unmaps_and_commits(rig: &Rig<'_>, size: ByteSize) -> Result<f64, Fault> {
    let arena = rig.arena("calls_alone", ByteSize::MAX, DecayTime::Never)?;
    let lane = rig.lane(&arena)?;
    // Runs of at most 1 GiB, as a sleep makes its calls.
    let block = size.min(ByteSize::gib(1));
    let size = whole_blocks(size, block).unwrap_or(block);
    let mut all = Vec::new();
    for _ in 0..rig.args.repetitions {
        let (up, held) = rig.timed(|| blocks(&lane, size, block))?;
        drop(held);
        rig.settle(&arena)?;
        let (down, released) = rig.timed(|| arena.purge())?;
        if released < size {
            return Err(format!("a purge released {released} of {size}").into());
        }
        all.push((up + down).as_secs_f64());
    }
    drop(lane);
    arena.close()?;
    Ok(median(&all))
}

/// Returns half of the available host memory; a very large value if the kernel does not report it.
fn host_share() -> ByteSize {
    kernel_bytes("/proc/meminfo", "MemAvailable:").map_or(ByteSize::MAX, |bytes| bytes.scaled(0.5))
}
