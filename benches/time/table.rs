//! The figures, and the goals of those that have one.
//!
//! Invariant: every figure stands once as `figure NAME VALUE UNIT`, in the order it was added.

/// The most that a figure may be.
const GOALS: &[(&str, f64)] = &[
    ("decay.retained_byte_seconds.ratio", 0.5),
    ("decay.short_gap.extra_driver_calls", 0.0),
    ("decay.long_gap.driver_calls_per_handle", 6.0),
    ("decay.idle_to_zero.decays", 2.0),
    ("purge.random90.committed_per_live", 1.25),
    ("compact.random90_64k.committed_per_live", 1.3),
    ("streams.fresh.committed_growth_bytes", 0.0),
    ("sleep.driver_calls_per_handle", 1.2),
    ("sleep.driver_calls.large_blocks", 1200.0),
    ("sleep.driver_calls.100x_blocks_ratio", 1.02),
    ("streams.steady.driver_calls_per_allocation", 0.0),
    ("streams.unsafe_unmaps", 0.0),
    ("oom.false_refusals", 0.0),
];

/// The least that a figure may be.
const LEAST: (&str, f64) = ("simulation.events_per_second", 1e6);

/// The measured values.
#[derive(Clone, Debug, Default)]
pub(crate) struct Figures(Vec<(String, f64, &'static str)>);

impl Figures {
    pub(crate) fn add(&mut self, name: impl Into<String>, value: f64, unit: &'static str) {
        self.0.push((name.into(), value, unit));
    }

    /// Prints everything; whether every goal held, of what was counted alone if it says so.
    pub(crate) fn print(&self, counted: bool) -> bool {
        for (name, value, unit) in &self.0 {
            println!("figure {name} {value:.4} {unit}");
        }
        println!();
        let (least, enough) = LEAST;
        let mut all = counted || self.judge(least, "at least", enough, |value| value >= enough);
        for &(name, most) in GOALS {
            all &= self.judge(name, "at most", most, |value| value <= most);
        }
        all
    }

    fn judge(&self, name: &str, what: &str, goal: f64, holds: impl Fn(f64) -> bool) -> bool {
        let value = self.0.iter().find(|(other, ..)| other == name).map(|(_, value, _)| *value);
        let held = value.is_some_and(holds);
        let found = value.map_or_else(|| "not measured".to_owned(), |of| format!("{of:.4}"));
        println!("{}  {name} {what} {goal}: {found}", if held { "held  " } else { "MISSED" });
        held
    }
}
