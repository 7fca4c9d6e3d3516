//! The figures, and the goals of those that have one.
//!
//! Invariant: every figure stands once as `figure NAME VALUE UNIT`, as the median of what was
//! added under its name; a goal whose figure was not measured is told as such and is not missed.

/// The most that a figure may be.
const GOALS: &[(&str, f64)] = &[
    ("admission.allocated_bytes", 0.0),
    ("managed.loads", 1.0),
    ("managed.unload_late_ticks", 1.0),
    ("managed.after_unload_over_goal", 1.0),
    ("sampler.allocated_bytes", 0.0),
];

/// The same for what is timed.
const TIMED: &[(&str, f64)] = &[
    ("admission.one_threads_ns", 15.0),
    ("admission.two_threads_ns", 80.0),
    ("admission.one_over_atomics", 1.3),
    // The same goal over what two atomic operations took where it was set: 48 ns.
    ("admission.two_over_atomics", 1.67),
    ("admission.rejected_ns", 15.0),
    ("managed.acquire_ns", 50.0),
    ("managed.acquire_over_atomics", 2.5),
    ("managed.other_wait_ms", 1.0),
    ("sampler.cpu_ratio", 0.003),
    ("sampler.over_floor", 1.5),
    ("sampler.read_us", 25.0),
];

/// The measured values.
#[derive(Clone, Debug, Default)]
pub(crate) struct Figures(Vec<(&'static str, &'static str, Vec<f64>)>);

impl Figures {
    pub(crate) fn add(&mut self, name: &'static str, value: f64, unit: &'static str) {
        match self.0.iter_mut().find(|(other, ..)| *other == name) {
            Some((.., values)) => values.push(value),
            None => self.0.push((name, unit, vec![value])),
        }
    }

    fn of(&self, name: &str) -> Option<f64> {
        let (.., values) = self.0.iter().find(|(other, ..)| *other == name)?;
        let mut values = values.clone();
        values.sort_by(f64::total_cmp);
        values.get(values.len() / 2).copied()
    }

    /// Prints everything; whether no goal was missed, of what was counted alone if it says so.
    pub(crate) fn print(&self, counted: bool) -> bool {
        println!("{:<36}{:>9}{:>12}", "goal", "at most", "measured");
        let mut held = true;
        let timed = if counted { &[][..] } else { TIMED };
        for &(name, most) in GOALS.iter().chain(timed) {
            let Some(found) = self.of(name) else {
                println!("{name:<36}{most:>9}{:>12}", "-");
                continue;
            };
            let verdict = if found <= most { "" } else { "  missed" };
            held &= found <= most;
            println!("{name:<36}{most:>9}{found:>12.4}{verdict}");
        }
        println!();
        for (name, unit, _) in &self.0 {
            println!("figure {name} {:.4} {unit}", self.of(name).unwrap_or(f64::NAN));
        }
        held
    }
}
