//! Faults in random schedules over two and eight devices of one `Memory`, of which one is lost.

use lowtide::BoxError;

use crate::device_schedules;
use crate::figures::Figures;

/// The schedules over each number of devices.
const SCHEDULES: u64 = 10_000;
/// The most faults that are printed.
const SHOWN_MAX: usize = 20;

/// Runs all schedules and counts the faults.
pub(crate) fn measure(figures: &mut Figures) -> Result<(), BoxError> {
    let mut all = 0_u32;
    for devices in [2, 8] {
        let (mut found, mut lost) = (Vec::new(), 0_u32);
        for seed in 0..SCHEDULES {
            let (faults, is_lost) = device_schedules::faults(seed, devices);
            found.extend(faults);
            lost += u32::from(is_lost);
        }
        found.iter().take(SHOWN_MAX).for_each(|fault| eprintln!("{fault}"));
        println!("{devices} devices: seeds 0 to {}, {lost} with a lost device", SCHEDULES - 1);
        figures.add(format!("gpu.devices.{devices}.lost"), f64::from(lost), "schedules");
        all = all.saturating_add(u32::try_from(found.len())?);
    }
    figures.at_most("gpu.devices.faults", f64::from(all), "faults", 0.0);
    Ok(())
}
