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
    Rig, blocks, changed, changed_all, fill, float, kernel_bytes, median, page_locked, rate,
    stream, whole_blocks, words_of,
};

/// The time allowed for the driver to report memory as free, which may lag.
const PATIENCE: Duration = Duration::from_secs(2);

/// Words that are looked at after each wake, at each of three places of a block.
const SAMPLE: usize = 512;

const DISCARD: SleepOptions =
    SleepOptions { drain: Duration::ZERO, stable: Contents::Discard, dynamic: Contents::Discard };

/// Keeps contents in host memory: with all options as they are by default, and then in memory that
/// is reused.
pub(crate) fn keep(rig: &Rig<'_>, report: &mut Report<'_>) -> Outcome {
    let (block, seed) = (rig.args.block, rig.args.seed);
    // Half of the host's memory, if the kernel reports it.
    let share = kernel_bytes("/proc/meminfo", "MemAvailable:").map(|bytes| bytes.scaled(0.5));
    let most = rig.args.sleep_size.min(share.unwrap_or(ByteSize::MAX));
    let size = rig.fitting(most, block)?;
    let (arena, lane) = rig.arena("sleep_keep", ByteSize::MAX, DecayTime::Never)?;
    let mut held = blocks(&lane, size, block)?;
    report.figure("gpu.sleep_keep.bytes", size.as_f64(), "bytes");
    let [to_host, to_device, plain] = plain(rig, &lane, &mut held, block)?;
    report.figure("gpu.baseline.to_host_bytes_per_s", to_host, "bytes/s");
    report.figure("gpu.baseline.to_device_bytes_per_s", to_device, "bytes/s");
    report.figure("gpu.sleep_keep.plain_bytes_per_s", plain, "bytes/s");
    fill(&lane, &mut held, seed)?;
    let addresses = addresses(&lane, &held)?;
    let (mut usual, mut seen) = (Seen::default(), Seen::default());
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
    let mut differ = 0;
    let outcome = (0..rig.args.cycles).try_for_each(|round| {
        cycle(rig, &arena, &mut seen)?;
        differ += sampled(&lane, &held, round, seed)?;
        Ok::<_, Fault>(())
    });
    let freed = seen.freed.iter().copied().fold(f64::INFINITY, f64::min);
    report.figure("gpu.sleep_keep.freed_ratio", freed, "of what was committed");
    report.figure("gpu.sleep_keep.sleep_bytes_per_s", median(&seen.down), "bytes/s");
    report.figure("gpu.sleep_keep.wake_bytes_per_s", median(&seen.up), "bytes/s");
    report.figure("gpu.sleep_keep.copy_rate_ratio", median(&seen.both) / plain, "of a plain copy");
    let ratio = median(&usual.both) / plain;
    report.figure("gpu.sleep_keep.released_rate_ratio", ratio, "of a plain copy");
    report.figure("gpu.sleep_keep.cycles", float(seen.both.len()), "cycles");
    outcome?;
    differ += changed_all(&lane, &held, seed)?;
    report.figure("gpu.sleep_keep.bytes_changed", float(differ), "bytes");
    if addresses != self::addresses(&lane, &held)? {
        return Err("the address of a block has changed".into());
    }
    drop((held, lane));
    Ok(arena.close()?)
}

/// Returns the number of changed bytes at a few places of each block, which vary by round.
fn sampled(lane: &Lane, held: &[Buffer<u64>], round: usize, seed: u64) -> Result<u64, Fault> {
    let mut differ = 0;
    for (number, block) in held.iter().enumerate() {
        let span = SAMPLE.min(block.len());
        let room = block.len() - span;
        let middle = (round.wrapping_mul(7_919) + number * 104_729) % (room + 1);
        for start in [0, middle, room] {
            differ += changed(lane, (number, block), start..start + span, seed)?;
        }
    }
    Ok(differ)
}

/// The results of the cycles: the fractions of the committed memory that the driver got back, and
/// bytes a second.
#[derive(Default)]
struct Seen {
    freed: Vec<f64>,
    down: Vec<f64>,
    up: Vec<f64>,
    both: Vec<f64>,
}

fn cycle(rig: &Rig<'_>, arena: &DeviceArena, seen: &mut Seen) -> Outcome {
    let committed = arena.snapshot().committed;
    let before = rig.headroom()?;
    let (down, slept) = rig.timed(|| arena.sleep(SleepOptions::default()))?;
    seen.freed.push(rig.poll(PATIENCE, Duration::from_millis(10), || {
        let ratio = rig.headroom()?.saturating_sub(before).as_f64() / committed.as_f64();
        Ok((ratio >= 0.99, ratio))
    })?);
    let (up, woken) = rig.timed(|| arena.wake())?;
    let (out, back) = (slept.copied, woken.copied);
    if out != back {
        return Err(format!("{out} were offloaded, {back} restored").into());
    }
    seen.down.push(rate(out, down));
    seen.up.push(rate(back, up));
    seen.both.push(rate(out.saturating_add(back), down + up));
    Ok(())
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
        let both = (bytes.saturating_add(bytes), down + up);
        for (rates, (bytes, took)) in rates.iter_mut().zip([(bytes, down), (bytes, up), both]) {
            rates.push(rate(bytes, took));
        }
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
    let (arena, lane) = rig.arena("sleep_discard", ByteSize::MAX, DecayTime::Never)?;
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
    let (arena, lane) = rig.arena("calls_alone", ByteSize::MAX, DecayTime::Never)?;
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
