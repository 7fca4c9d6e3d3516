//! The processes on the device, as NVML lists them, next to what `cuMemGetInfo` reports.
//!
//! Prints the list with and without an arena of this process, and the cost of NVML's calls. Without
//! NVML it prints the cause and fails nothing.
//!
//! Invariant: the arena of this part is closed at its end.

use lowtide_gpu::driver::cuda::{DeviceUsage, Nvml};
use lowtide_gpu::{ByteSize, Region};

use super::cases::Outcome;
use super::report::Report;
use super::rig::{Rig, median, nanos, resident};

/// The memory that the arena commits.
const SIZE: ByteSize = ByteSize::mib(64);

pub(crate) fn processes(rig: &Rig<'_>, report: &mut Report<'_>) -> Outcome {
    let before_nvml = resident();
    let (opened, nvml) = match rig.timed(Nvml::open) {
        Ok(opened) => opened,
        Err(cause) => {
            report.line(&format!("processes not listed: {cause}"));
            return Ok(());
        }
    };
    report.figure("gpu.nvml.open_us", nanos(opened) / 1e3, "us");
    let uuid = rig.driver.device().uuid;
    let before = nvml.usage(uuid)?;
    let mut costs = Vec::with_capacity(rig.args.repetitions);
    for _ in 0..rig.args.repetitions {
        costs.push(nanos(rig.timed(|| nvml.usage(uuid))?.0) / 1e3);
    }
    report.figure("gpu.nvml.list_us", median(&costs), "us");
    if let (Some(before), Some(after)) = (before_nvml, resident()) {
        report.figure("gpu.nvml.resident_bytes", after.saturating_sub(before).as_f64(), "bytes");
    }
    show(rig, report, "without an arena", &before)?;
    let arena = rig.arena("processes", ByteSize::MAX, lowtide_gpu::decay::DecayTime::AtOnce)?;
    let size = rig.fitting(SIZE, SIZE.scaled(0.5))?;
    let buffer = arena.alloc::<u8>(size.as_usize().ok_or("too large")?, Region::Stable)?;
    let committed = arena.snapshot().committed;
    let after = nvml.usage(uuid)?;
    show(rig, report, &format!("with {committed} committed"), &after)?;
    if let (Some(before), Some(after)) = (own(&before), own(&after)) {
        let grown = after.saturating_sub(before);
        report.figure("gpu.nvml.arena_ratio", grown.as_f64() / committed.as_f64(), "");
    }
    drop(buffer);
    Ok(arena.close()?)
}

/// Prints a list and what CUDA reports at the same time.
fn show(rig: &Rig<'_>, report: &mut Report<'_>, when: &str, usage: &DeviceUsage) -> Outcome {
    let (free, total) = rig.memory()?;
    let used = |of: Option<ByteSize>| of.map_or_else(|| "unknown".to_owned(), |it| it.to_string());
    report.line(&format!(
        "{when}: NVML {} in use, cuMemGetInfo {} in use of {total}",
        used(usage.used),
        total.saturating_sub(free)
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
    if usage.omitted > 0 {
        report.line(&format!("  {} more with {}", usage.omitted, usage.omitted_bytes));
    }
    Ok(())
}

fn own(usage: &DeviceUsage) -> Option<ByteSize> {
    usage.processes.iter().find(|process| process.is_this_process == Some(true))?.used
}
