//! Device memory: who holds it, random sizes near the limit, remapped holes, and compacted live
//! blocks. The last two are compared with plain copies of as many bytes.
//!
//! Invariant: live bytes and the request together are never more than two thirds of the limit.

use std::time::Duration;

use lowtide_gpu::ByteSize;
use lowtide_gpu::decay::DecayTime;
use lowtide_gpu::driver::cuda::{DeviceUsage, Nvml};
use lowtide_gpu::{Buffer, CompactOptions, Lane, Region};

use super::cases::{Fault, Outcome};
use super::report::Report;
use super::rig::{
    Random, Rig, blocks, changed_all, fill, float, median, nanos, rate, resident, stream,
    whole_blocks, words_of,
};

/// The memory that an arena commits while processes are listed.
const COMMITTED: ByteSize = ByteSize::mib(64);

/// The processes on the device, as NVML lists them, with and without an arena of this process, next
/// to what `cuMemGetInfo` reports; and the cost of NVML's calls. Without NVML it prints the cause
/// and fails nothing.
pub(crate) fn processes(rig: &Rig<'_>, report: &mut Report<'_>) -> Outcome {
    let before_nvml = resident();
    let (opened, nvml) = match rig.timed(Nvml::open) {
        Ok(opened) => opened,
        Err(cause) => {
            report.line(&format!("processes not listed: {cause}"));
            return Ok(());
        }
    };
    let micros = |took: Duration| nanos(took) / 1e3;
    report.figure("gpu.nvml.open_us", micros(opened), "us");
    let uuid = rig.driver.device().uuid;
    let before = nvml.usage(uuid)?;
    let costs = (0..rig.args.repetitions).map(|_| Ok(micros(rig.timed(|| nvml.usage(uuid))?.0)));
    let costs = costs.collect::<Result<Vec<_>, Fault>>()?;
    report.figure("gpu.nvml.list_us", median(&costs), "us");
    let grown = resident().saturating_sub(before_nvml);
    report.figure("gpu.nvml.resident_bytes", grown.as_f64(), "bytes");
    show(rig, report, "without an arena", &before)?;
    let (arena, lane) = rig.arena("processes", ByteSize::MAX, DecayTime::AtOnce)?;
    let size = rig.fitting(COMMITTED, COMMITTED.scaled(0.5))?;
    let buffer = lane.alloc::<u8>(size.as_usize().ok_or("too large")?, Region::Stable)?;
    let committed = arena.snapshot().committed;
    let after = nvml.usage(uuid)?;
    show(rig, report, &format!("with {committed} committed"), &after)?;
    let own = |usage: &DeviceUsage| {
        let mut all = usage.processes.iter();
        all.find(|process| process.is_this_process == Some(true)).and_then(|process| process.used)
    };
    if let (Some(before), Some(after)) = (own(&before), own(&after)) {
        let grown = after.saturating_sub(before);
        report.figure("gpu.nvml.arena_ratio", grown.as_f64() / committed.as_f64(), "");
    }
    drop((buffer, lane));
    Ok(arena.close()?)
}

/// Prints a list and what CUDA reports at the same time.
fn show(rig: &Rig<'_>, report: &mut Report<'_>, when: &str, usage: &DeviceUsage) -> Outcome {
    let (free, total) = rig.memory()?;
    let used = |of: Option<ByteSize>| of.map_or_else(|| "unknown".to_owned(), |it| it.to_string());
    report.line(&format!(
        "{when}: NVML {} in use, cuMemGetInfo {} in use of {total}; {} processes omitted",
        used(usage.used),
        total.saturating_sub(free),
        usage.omitted
    ));
    for process in &usage.processes {
        report.line(&format!(
            "  process {}: {}, {}, this process: {}",
            process.pid,
            process.name.as_deref().unwrap_or("name unknown"),
            used(process.used),
            process.is_this_process.map_or("unknown", |is| if is { "yes" } else { "no" }),
        ));
    }
    Ok(())
}

/// The largest live fraction of the limit.
const LIVE: f64 = 0.67;

/// The smallest request, and the largest as a part of the limit: about 640 MiB of 80 GiB.
const SMALLEST: u64 = 512;
const LARGEST: u64 = 128;

/// Random sizes come and go at two thirds of the limit; none may be refused. A load on which a CUDA
/// pool fragments (rapidsai/rmm, number 1245: a request of 127 MiB failed on a device of which 63 %
/// were live).
pub(crate) fn fragmentation(rig: &Rig<'_>, report: &mut Report<'_>) -> Outcome {
    let wanted = rig.args.fragmentation_size.unwrap_or(ByteSize::MAX);
    let limit = rig.fitting(wanted, ByteSize::mib(2).min(wanted))?;
    let (arena, lane) = rig.arena("fragmentation", limit, DecayTime::Never)?;
    report.line(&format!("fragmentation: limit {limit}, seed {}", rig.args.seed));
    let most = limit.scaled(LIVE).get();
    let largest = (limit.get() / LARGEST).max(2 * SMALLEST);
    let mut random = Random(rig.args.seed);
    let mut held: Vec<Buffer<u8>> = Vec::new();
    let (mut live, mut failures) = (0_u64, 0_u64);
    let (took, ()) = rig.timed(|| -> Outcome {
        for _ in 0..rig.args.fragmentation_steps {
            let size = SMALLEST + random.below(largest - SMALLEST);
            while live + size > most && !held.is_empty() {
                live -= held.swap_remove(random.index(held.len())).bytes().get();
            }
            match lane.alloc::<u8>(usize::try_from(size)?, Region::Dynamic) {
                Ok(buffer) => {
                    live += buffer.bytes().get();
                    held.push(buffer);
                }
                Err(error) if error.is_out_of_memory() => failures += 1,
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    })?;
    let seen = arena.snapshot();
    for (name, value, unit) in [
        ("limit_bytes", limit.as_f64(), "bytes"),
        ("failures", float(failures), "allocations"),
        ("seconds", took.as_secs_f64(), "s"),
        ("remapped_bytes", float(seen.remapped_bytes_total), "bytes"),
        ("commits", float(seen.commits_total), "calls"),
    ] {
        report.figure(&format!("gpu.fragmentation.{name}"), value, unit);
    }
    drop((held, lane));
    rig.settle(&arena)?;
    Ok(arena.close()?)
}

/// One block out of the memory of many holes, against a copy of as many bytes.
pub(crate) fn remap(rig: &Rig<'_>, report: &mut Report<'_>) -> Outcome {
    let hole = rig.args.remap_block;
    let twice = rig.args.remap_size.checked_mul(2).ok_or("twice the size is too large")?;
    let size = whole_blocks(ByteSize::new(rig.fitting(twice, hole)?.get() / 2), hole)?;
    let limit = ByteSize::new(size.get() * 2);
    let (mut moved, mut remapped) = (Vec::new(), 0);
    for _ in 0..rig.args.repetitions {
        let (arena, lane) = rig.arena("remap", limit, DecayTime::Never)?;
        let held = every_second(&lane, limit, hole)?;
        rig.settle(&arena)?;
        let (took, whole) =
            rig.timed(|| lane.alloc::<u64>(words_of(size)?, Region::Dynamic).map_err(Fault::from))?;
        remapped = arena.snapshot().remapped_bytes_total;
        if remapped == 0 {
            let why = "no memory was remapped: the device or its driver does not support it";
            return Err(why.into());
        }
        moved.push(rate(ByteSize::new(remapped), took));
        drop((held, whole, lane));
        arena.close()?;
    }
    let (copy, moved) = (copy_rate(rig, size)?, median(&moved));
    report.figure("gpu.fragmentation.one_remap_bytes", float(remapped), "bytes");
    report.figure("gpu.fragmentation.remap_bytes_per_s", moved, "bytes/s");
    report.figure("gpu.fragmentation.copy_bytes_per_s", copy, "bytes/s");
    report.figure("gpu.fragmentation.remap_speedup", moved / copy, "times");
    Ok(())
}

/// Bytes a second of plain copies from one block of this size into another.
fn copy_rate(rig: &Rig<'_>, size: ByteSize) -> Result<f64, Fault> {
    let (arena, lane) = rig.arena("copy", ByteSize::MAX, DecayTime::Never)?;
    let from = lane.alloc::<u64>(words_of(size)?, Region::Dynamic)?;
    let mut to = lane.alloc::<u64>(words_of(size)?, Region::Dynamic)?;
    let mut copied = || -> Result<f64, Fault> {
        let (lease, stream) = (lane.enter()?, stream(&lane)?);
        let (from, mut to) = (from.cuda(&lease)?, to.cuda_mut(&lease)?);
        stream.synchronize()?;
        let copy = || stream.memcpy_dtod(from, &mut to).and_then(|()| stream.synchronize());
        Ok(rate(size, rig.timed(copy)?.0))
    };
    copied()?;
    let rates = (0..rig.args.repetitions.max(5)).map(|_| copied());
    let rates = rates.collect::<Result<Vec<_>, _>>()?;
    drop((from, to, lane));
    arena.close()?;
    Ok(median(&rates))
}

/// Live blocks moved together, against plain copies of blocks of that size.
pub(crate) fn compact(rig: &Rig<'_>, report: &mut Report<'_>) -> Outcome {
    let (block, seed) = (rig.args.compact_block, rig.args.seed);
    let size = rig.fitting(rig.args.compact_size, block)?;
    let (mut rates, mut wrong) = (Vec::new(), 0);
    for _ in 0..rig.args.repetitions {
        let (arena, lane) = rig.arena("compact", size, DecayTime::Never)?;
        let mut held = every_second(&lane, size, block)?;
        fill(&lane, &mut held, seed)?;
        rig.settle(&arena)?;
        let contiguous = Some(ByteSize::MAX);
        let options = CompactOptions { contiguous, ..CompactOptions::new(Region::Dynamic) };
        // The blocks were viewed, so any stream may use them.
        arena.wait_for_pending()?;
        let (took, done) = rig.timed(|| arena.compact(options, |_| {}))?;
        if done.is_busy || done.moved.is_zero() {
            let (busy, moved) = (done.is_busy, done.moved);
            return Err(format!("compaction ended, busy: {busy}, {moved} moved").into());
        }
        rates.push(rate(done.moved, took));
        wrong += changed_all(&lane, &held, seed)?;
        drop((held, lane));
        arena.close()?;
    }
    let (copy, rate) = (copy_rate(rig, block)?, median(&rates));
    report.figure("gpu.compact.bytes_changed", float(wrong), "bytes");
    report.figure("gpu.compact.bytes_per_s", rate, "bytes/s");
    report.figure("gpu.compact.copy_bytes_per_s", copy, "bytes/s");
    report.figure("gpu.compact.copy_rate_ratio", rate / copy, "of a plain copy");
    if wrong == 0 { Ok(()) } else { Err(format!("{wrong} bytes changed").into()) }
}

/// Fills memory with blocks, of which every second is freed.
fn every_second(lane: &Lane, size: ByteSize, block: ByteSize) -> Result<Vec<Buffer<u64>>, Fault> {
    Ok(blocks(lane, size, block)?.into_iter().step_by(2).collect())
}
