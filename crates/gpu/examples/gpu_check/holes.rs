//! Fragmented memory: random sizes near the limit, remapped holes, and compacted live blocks.
//!
//! The first is a load on which a CUDA pool fragments (rapidsai/rmm, number 1245: a request of 127
//! MiB failed on a device of which 63 % were live). The other two are compared with plain copies of
//! as many bytes.
//!
//! Invariant: live bytes and the request together are never more than two thirds of the limit.

use lowtide_gpu::ByteSize;
use lowtide_gpu::decay::DecayTime;
use lowtide_gpu::{Buffer, CompactOptions, Goal, Region, StopReason};

use super::cases::{Fault, Outcome};
use super::report::Report;
use super::rig::{
    Random, Rig, blocks, changed, copied, fill, float, median, rate, whole_blocks, words_of,
};

/// The largest live fraction of the limit.
const LIVE: f64 = 0.67;

/// The smallest request, and the largest as a part of the limit: about 640 MiB of 80 GiB.
const SMALLEST: u64 = 512;
const LARGEST: u64 = 128;

/// Random sizes come and go at two thirds of the limit; none may be refused.
pub(crate) fn fragmentation(rig: &Rig<'_>, report: &mut Report<'_>) -> Outcome {
    let wanted = rig.args.fragmentation_size.unwrap_or(ByteSize::MAX);
    let limit = rig.fitting(wanted, ByteSize::mib(2).min(wanted))?;
    let arena = rig.arena("fragmentation", limit, DecayTime::Never)?;
    let lane = rig.lane(&arena)?;
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
                let gone = held.swap_remove(random.index(held.len()));
                live -= gone.bytes().get();
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
    report.figure("gpu.fragmentation.limit_bytes", limit.as_f64(), "bytes");
    report.figure("gpu.fragmentation.failures", float(failures), "allocations");
    report.figure("gpu.fragmentation.seconds", took.as_secs_f64(), "s");
    report.figure("gpu.fragmentation.remapped_bytes", float(seen.remapped_bytes_total), "bytes");
    report.figure("gpu.fragmentation.commits", float(seen.commits_total), "calls");
    drop((held, lane));
    rig.settle(&arena)?;
    Ok(arena.close()?)
}

/// One block out of the memory of many holes, against a copy of as many bytes.
pub(crate) fn remap(rig: &Rig<'_>, report: &mut Report<'_>) -> Outcome {
    let hole = rig.args.remap_block;
    let twice = rig.args.remap_size.checked_mul(2).ok_or(
        "the number of blocks exceeds the \
        supported range",
    )?;
    let size = ByteSize::new(rig.fitting(twice, hole)?.get() / 2);
    let size = whole_blocks(size, hole)?;
    let limit = ByteSize::new(size.get() * 2);
    let (mut moved, mut remapped) = (Vec::new(), 0);
    for _ in 0..rig.args.repetitions {
        let arena = rig.arena("remap", limit, DecayTime::Never)?;
        let lane = rig.lane(&arena)?;
        let held = every_second(blocks(&lane, limit, hole)?);
        rig.settle(&arena)?;
        let (took, whole) =
            rig.timed(|| lane.alloc::<u64>(words_of(size)?, Region::Dynamic).map_err(Fault::from))?;
        let by_remap = arena.snapshot().remapped_bytes_total;
        if by_remap == 0 {
            return Err(
                "no memory was remapped: the device or its driver does not support it".into()
            );
        }
        moved.push(rate(ByteSize::new(by_remap), took));
        remapped = by_remap;
        drop((held, whole, lane));
        arena.close()?;
    }
    let copy = copy_rate(rig, size)?;
    report.figure("gpu.fragmentation.one_remap_bytes", float(remapped), "bytes");
    report.figure("gpu.fragmentation.remap_bytes_per_s", median(&moved), "bytes/s");
    report.figure("gpu.fragmentation.copy_bytes_per_s", copy, "bytes/s");
    report.figure("gpu.fragmentation.remap_speedup", median(&moved) / copy, "times");
    Ok(())
}

/// Bytes a second of plain copies from one block of this size into another.
fn copy_rate(rig: &Rig<'_>, size: ByteSize) -> Result<f64, Fault> {
    let arena = rig.arena("copy", ByteSize::MAX, DecayTime::Never)?;
    let lane = rig.lane(&arena)?;
    let words = words_of(size)?;
    let from = lane.alloc::<u64>(words, Region::Dynamic)?;
    let mut to = lane.alloc::<u64>(words, Region::Dynamic)?;
    copied(rig, &lane, &from, &mut to)?;
    let rates = (0..rig.args.repetitions.max(5))
        .map(|_| Ok(rate(size, copied(rig, &lane, &from, &mut to)?)))
        .collect::<Result<Vec<_>, Fault>>()?;
    drop((from, to, lane));
    arena.close()?;
    Ok(median(&rates))
}

/// Live blocks moved together, against plain copies of blocks of that size.
pub(crate) fn compact(rig: &Rig<'_>, report: &mut Report<'_>) -> Outcome {
    let (block, seed) = (rig.args.compact_block, rig.args.seed);
    let size = rig.fitting(rig.args.compact_size, block)?;
    let mut staging = vec![0_u64; words_of(block)?];
    let (mut rates, mut wrong) = (Vec::new(), 0);
    for _ in 0..rig.args.repetitions {
        let arena = rig.arena("compact", size, DecayTime::Never)?;
        let lane = rig.lane(&arena)?;
        let mut held = every_second(blocks(&lane, size, block)?);
        fill(&lane, &mut held, &mut staging, seed)?;
        rig.settle(&arena)?;
        let goal = Goal::Contiguous(ByteSize::MAX);
        let options = CompactOptions { goal, ..CompactOptions::new(Region::Dynamic) };
        // The blocks were viewed, so any stream may use them.
        arena.wait_for_pending()?;
        let (took, done) = rig.timed(|| arena.compact(options, |_| {}))?;
        if done.stopped != StopReason::Finished || done.moved.is_zero() {
            let how = done.stopped.name();
            return Err(format!("compaction ended with {how}, {} moved", done.moved).into());
        }
        rates.push(rate(done.moved, took));
        for it in held.iter().enumerate() {
            wrong += changed(&lane, it, &mut staging, seed)?;
        }
        drop((held, lane));
        arena.close()?;
    }
    let copy = copy_rate(rig, block)?;
    report.figure("gpu.compact.bytes_changed", float(wrong), "bytes");
    report.figure("gpu.compact.bytes_per_s", median(&rates), "bytes/s");
    report.figure("gpu.compact.copy_bytes_per_s", copy, "bytes/s");
    report.figure("gpu.compact.copy_rate_ratio", median(&rates) / copy, "of a plain copy");
    if wrong == 0 { Ok(()) } else { Err(format!("{wrong} bytes changed").into()) }
}

fn every_second<T>(all: Vec<T>) -> Vec<T> {
    all.into_iter().step_by(2).collect()
}
