//! One suite over every driver: what an arena keeps holds on the host, on the simulation in each
//! order, on CUDA's driver over a fake of its library, and on a real device where there is one.

mod cases;
#[cfg(all(target_os = "linux", feature = "cuda"))]
mod cuda;
#[cfg(all(target_os = "linux", feature = "cuda"))]
mod fake;
mod host;
mod simulation;

use cases::{CASES, Device};

/// Runs all cases, and says which did not hold.
fn run(device: &dyn Device) {
    let failed: Vec<_> = CASES
        .iter()
        .filter_map(|(name, case)| case(device).err().map(|fault| format!("{name}: {fault}")))
        .collect();
    assert!(failed.is_empty(), "{} of {}:\n{}", failed.len(), CASES.len(), failed.join("\n"));
}
