//! The figures, and the goals of those that have one.
//!
//! Invariant: every figure stands once as `figure NAME VALUE UNIT`, in the order it was added.

/// The most that a figure may be.
const GOALS: &[(&str, f64)] = &[
    ("index.random_mix.instructions", 300.0),
    ("index.load90.failures.seed42", 100.0),
    ("index.load90.failures.seed7", 100.0),
    ("index.load90.failures.seed1234", 100.0),
    ("index.virtual.two_ranges.load90.failures", 0.0),
    ("index.virtual.two_ranges.active_per_live.worst", 1.03),
    ("index.metadata.bytes_per_block", 64.0),
    ("index.metadata.bytes_per_block_worst", 64.0),
    ("arena.pair.driver_calls", 0.0),
    ("arena.two_threads.contended_locks", 0.0),
    ("arena.virtual.load90.failures", 0.0),
    ("arena.virtual.load90.active_per_live.worst", 1.03),
];

/// The same for what is timed.
const TIMED: &[(&str, f64)] = &[
    ("index.random_mix.median_ns", 50.0),
    ("index.random_mix.p999_ns", 500.0),
    ("index.holes_8192.median_ns", 300.0),
    ("arena.pair.median_ns", 60.0),
    ("arena.two_threads.wall_ratio_over_loop", 1.15),
];

/// The measured values.
#[derive(Clone, Debug, Default)]
pub(crate) struct Figures(Vec<(String, f64, &'static str)>);

impl Figures {
    pub(crate) fn add(&mut self, name: String, value: f64, unit: &'static str) {
        self.0.push((name, value, unit));
    }

    /// Prints everything; whether every goal held, of what was counted alone if it says so. What
    /// was not measured has not failed.
    pub(crate) fn print(&self, counted: bool) -> bool {
        let is_timed = |name: &str| TIMED.iter().any(|(timed, _)| *timed == name);
        for (name, value, unit) in self.0.iter().filter(|one| !counted || !is_timed(&one.0)) {
            println!("figure {name} {value:.3} {unit}");
        }
        println!();
        let mut all = true;
        let timed = if counted { &[][..] } else { TIMED };
        for &(name, most) in GOALS.iter().chain(timed) {
            let Some((_, value, _)) = self.0.iter().find(|(other, ..)| other == name) else {
                println!("skipped {name}: not measured");
                continue;
            };
            let held = *value <= most;
            println!(
                "{}  {name} at most {most}: {value:.3}",
                if held { "held  " } else { "MISSED" }
            );
            all &= held;
        }
        all
    }
}
