//! Faults in random schedules over two and eight devices of one `Memory`, of which one is lost.

use std::panic::resume_unwind;
use std::thread;

use lowtide::BoxError;

use crate::common::figures::Figures;
use crate::device_schedules;

/// The schedules over each number of devices.
const SCHEDULES: u64 = 10_000;
/// The most threads. Each schedule has devices of its own.
const THREADS_MAX: usize = 8;
/// The most faults that are printed.
const SHOWN_MAX: usize = 20;

/// Runs all schedules and counts the faults.
pub(crate) fn measure(figures: &mut Figures) -> Result<(), BoxError> {
    let mut all = 0_u32;
    for devices in [2, 8] {
        let (found, lost) = run(devices);
        found.iter().take(SHOWN_MAX).for_each(|fault| eprintln!("{fault}"));
        println!("{devices} devices: seeds 0 to {}, {lost} with a lost device", SCHEDULES - 1);
        figures.add(format!("gpu.devices.{devices}.lost"), f64::from(lost), "schedules");
        all = all.saturating_add(u32::try_from(found.len())?);
    }
    figures.at_most("gpu.devices.faults", f64::from(all), "faults", 0.0);
    Ok(())
}

/// Runs the schedules on a few threads. Returns the faults, and how many lost a device.
fn run(devices: usize) -> (Vec<String>, u32) {
    let threads = thread::available_parallelism().map_or(1, |count| count.get().min(THREADS_MAX));
    let part = |first: usize| {
        let (mut found, mut lost) = (Vec::new(), 0_u32);
        for seed in (first as u64..SCHEDULES).step_by(threads) {
            let (faults, is_lost) = device_schedules::faults(seed, devices);
            found.extend(faults);
            lost += u32::from(is_lost);
        }
        (found, lost)
    };
    let (mut found, mut lost) = (Vec::new(), 0);
    thread::scope(|scope| {
        let running: Vec<_> = (0..threads).map(|first| scope.spawn(move || part(first))).collect();
        for one in running {
            let (faults, count) = one.join().unwrap_or_else(|panic| resume_unwind(panic));
            found.extend(faults);
            lost += count;
        }
    });
    (found, lost)
}
