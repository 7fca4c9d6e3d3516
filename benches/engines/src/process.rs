//! The kernel's figures for this process.

use std::fs;

use crate::BoxError;

/// Anonymous memory, in MiB.
pub(crate) fn anonymous_mib() -> Result<f64, BoxError> {
    mib("/proc/self/smaps_rollup", "Anonymous:")
}

/// The largest resident set since [`reset_peak`], in MiB.
pub(crate) fn peak_mib() -> Result<f64, BoxError> {
    mib("/proc/self/status", "VmHWM:")
}

/// Makes the present resident set the peak.
pub(crate) fn reset_peak() -> Result<(), BoxError> {
    Ok(fs::write("/proc/self/clear_refs", "5")?)
}

/// Page faults without a read of a file so far.
pub(crate) fn faults() -> Result<f64, BoxError> {
    let stat = fs::read_to_string("/proc/self/stat")?;
    // The name of the program, in parentheses, may hold spaces.
    let fields = stat.rsplit_once(')').map_or("", |(_, fields)| fields);
    let faults = fields.split_whitespace().nth(7).ok_or("/proc/self/stat has no minflt")?;
    Ok(faults.parse()?)
}

fn mib(file: &str, field: &str) -> Result<f64, BoxError> {
    let text = fs::read_to_string(file)?;
    let line = text.lines().find_map(|line| line.strip_prefix(field));
    let kib = line.and_then(|line| line.trim().strip_suffix("kB"));
    let kib: f64 = kib.ok_or_else(|| format!("{file} has no {field}"))?.trim().parse()?;
    Ok(kib / 1024.0)
}
