//! Random schedules: those that step the engine's operations in one thread, against those that
//! drive a whole arena.

use super::super::{Figure, at_least, figure};
use crate::run::cargo;

/// Schedules of operations that are stepped.
const STEPPED: u32 = 20_000;
/// Schedules of whole arenas.
const WHOLE: u32 = 400;

/// Runs both kinds, one after the other.
pub(super) fn measure() -> Result<Vec<Figure>, String> {
    let test = "test --locked --release --package lowtide-gpu --lib steps:: -- --nocapture";
    let stepped = cargo(test).env("LOWTIDE_STEPS", STEPPED.to_string()).shown()?;
    let whole = format!("bench --locked --bench schedules -- --count {WHOLE} --threads 1");
    let whole = cargo(&whole).shown()?;
    let failed = [&stepped, &whole].into_iter().filter(|(_, is_held)| !is_held).count();
    let stepped_rate = f64::from(STEPPED) / seconds(&stepped.0)?;
    let ratio = stepped_rate * seconds(&whole.0)? / f64::from(WHOLE);
    Ok(vec![
        at_least("schedules_per_s_ratio", ratio, "ratio", 10.0),
        figure("schedules.failed", super::count(failed), "runs", Some(0.0)),
    ])
}

/// Returns the seconds in the line `N schedules ... in SECONDS s`.
fn seconds(text: &str) -> Result<f64, String> {
    let line = text.lines().find(|line| line.contains(" schedules ") && line.contains(" in "));
    let after = line.and_then(|line| line.split_once(" in ")).map(|(_, after)| after);
    let number = after.and_then(|after| after.split_once(" s")).map(|(number, _)| number);
    number.and_then(|number| number.parse().ok()).ok_or_else(|| "no time was printed".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_seconds_of_a_run_are_read_from_its_line() {
        let text = "running 1 test\n20 schedules from seed 0 in 7.3 s: Totals { steps: 1 }\n";
        assert_eq!(seconds(text), Ok(7.3));
        assert!(seconds("test result: ok. finished in 7.24s").is_err());
    }
}
