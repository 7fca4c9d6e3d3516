//! The pool governor: its effect for users of cudarc that know nothing of it.
//!
//! An allocation, its free and a wait, repeatedly: from the device's pool as found, which releases
//! everything at each wait unless its threshold was changed, and from a governed pool. The memory
//! that the governed pool holds after it was unused for the decay time is its own figure.
//!
//! Invariant: the device's current pool is restored afterwards.

use std::sync::Arc;

use cudarc::driver::CudaStream;
use lowtide_gpu::ByteSize;
use lowtide_gpu::clock::Clock;
use lowtide_gpu::decay::DecayTime;
use lowtide_gpu::driver::cuda::{DeviceChoice, GovernorOptions, PoolGovernor};

use super::cases::{Fault, Outcome};
use super::report::Report;
use super::rig::{Rig, median, nanos, plain};

/// Rounds before the first that is timed.
const WARM: usize = 10;

pub(crate) fn governor(rig: &Rig<'_>, report: &mut Report<'_>) -> Outcome {
    let stream = rig.context.new_stream()?;
    let found = rounds(rig, &stream)?;
    let options = GovernorOptions {
        device: DeviceChoice::Ordinal(rig.args.device),
        decay: DecayTime::from_duration(rig.args.decay_time),
        ..GovernorOptions::default()
    };
    let governor = PoolGovernor::open(options)?;
    let governed = rounds(rig, &stream)?;
    report.figure("gpu.governor.default_p50_ns", found, "ns");
    report.figure("gpu.governor.p50_ns", governed, "ns");
    report.figure("gpu.governor.p50_speedup", found / governed, "times");
    let at_work = governor.report(ByteSize::ZERO)?;
    report.figure("gpu.governor.busy_held_bytes", at_work.held().as_f64(), "bytes");
    report.figure("gpu.governor.unmanaged_bytes", at_work.unmanaged.as_f64(), "bytes");
    let (time, within) = (rig.args.decay_time, rig.args.decay_within);
    let held = rig.poll(time + within, time / 8, || {
        governor.decay(rig.clock.now())?;
        let held = governor.report(ByteSize::ZERO)?.held();
        Ok((held.is_zero(), held))
    })?;
    report.figure("gpu.governor.idle_held_bytes", held.as_f64(), "bytes");
    let left = PoolGovernor::left_total();
    drop((stream, governor));
    if PoolGovernor::left_total() > left {
        return Err("the governor's pool could not be destroyed".into());
    }
    Ok(())
}

/// Nanoseconds of an allocation, its free and a wait: the median.
fn rounds(rig: &Rig<'_>, stream: &Arc<CudaStream>) -> Result<f64, Fault> {
    let len = rig.pair_len()?;
    let round = || -> Outcome {
        drop(plain::<u8>(stream, len)?);
        Ok(stream.synchronize()?)
    };
    (0..WARM).try_for_each(|_| round())?;
    let mut costs = Vec::with_capacity(rig.args.pairs);
    for _ in 0..rig.args.pairs {
        costs.push(nanos(rig.timed(round)?.0));
    }
    Ok(median(&costs))
}
