//! The figures, and the goals of those that have one.
//!
//! Invariant: every figure is printed once as `figure NAME VALUE UNIT`, when it is known; every
//! goal that was measured has one line in the table.

/// The most that a figure may be.
const GOALS: &[(&str, f64)] = &[
    ("plan.D.peak", 1_048_576.0),
    ("plan.J.peak", 1_048_576.0),
    ("plan.pangu_2.6B.peak_per_bound", 1.01),
    ("plan.S_1.peak_per_bound", 1.02),
    ("plan.resident_mib", 100.0),
    ("plan.lookup_ns", 2.0),
    ("plan.random.not_optimal", 0.0),
    ("plan.set.10ms.mean_peak_per_bound", 1.25),
    ("plan.one_rule_us", 100.0),
];

/// The same where more was hoped for: no line of these fails a run.
const STRETCH: &[(&str, f64)] = &[
    ("plan.D.peak", 1_029_120.0),
    ("plan.J.peak", 1_029_120.0),
    ("plan.pangu_2.6B.peak_per_bound", 1.003),
    ("plan.S_1.peak_per_bound", 1.005),
];

/// Instances at whose bound a plan is to be found and proved.
const PROVEN: [&str; 8] = ["A", "B", "C", "E", "F", "I", "resnet50", "G_1"];

/// Seconds that an instance of the set may take to fit its capacity.
const SECONDS: f64 = 0.5;

/// The measured values.
#[derive(Clone, Debug, Default)]
pub(crate) struct Figures(Vec<(String, f64)>);

impl Figures {
    pub(crate) fn add(&mut self, name: String, value: f64, unit: &str) {
        println!("figure {name} {value:.4} {unit}");
        self.0.push((name, value));
    }

    pub(crate) fn of(&self, name: &str) -> Option<f64> {
        self.0.iter().find(|(other, _)| other == name).map(|(_, value)| *value)
    }

    /// The mean of the figures with this end.
    pub(crate) fn mean(&self, end: &str) -> Option<f64> {
        let values: Vec<f64> = self
            .0
            .iter()
            .filter(|(name, _)| name.ends_with(end))
            .map(|(_, value)| *value)
            .collect();
        let count = f64::from(u32::try_from(values.len()).ok().filter(|count| *count > 0)?);
        Some(values.iter().sum::<f64>() / count)
    }

    /// Prints the table; whether every goal held, of what was counted alone if it says so. What was
    /// not measured has not failed.
    pub(crate) fn goals(&self, counted: bool) -> bool {
        println!("\nGoals");
        let mut all = true;
        for &(name, most) in GOALS {
            all &= held(name, self.of(name), most, "MISSED ");
        }
        for name in PROVEN {
            let missed = self.of(&format!("plan.{name}.proven")).map(|proven| 1.0 - proven);
            all &= held(&format!("plan.{name} not proven"), missed, 0.0, "MISSED ");
        }
        for (name, value) in &self.0 {
            let instance = |end: &str| name.strip_suffix(end).map(str::to_owned);
            let is_of_the_set = |of: String| self.of(&(of + ".10ms.peak_per_bound")).is_some();
            if !counted && instance(".seconds").is_some_and(is_of_the_set) {
                all &= held(name, Some(*value), SECONDS, "MISSED ");
            }
            if name.ends_with(".1s.peak_per_best_peer") {
                all &= held(name, Some(*value), 1.0, "MISSED ");
            }
            if let Some(of) = instance(".segments.total") {
                let ggml = self.of(&(of.clone() + ".segments.ggml_total"));
                all &= held(name, Some(*value), ggml.unwrap_or(0.0), "MISSED ");
            }
        }
        for &(name, most) in STRETCH {
            held(name, self.of(name), most, "not yet");
        }
        for (name, value) in &self.0 {
            if let Some(of) = name.strip_suffix(".segments.total") {
                let ggml = self.of(&format!("{of}.segments.ggml_total")).unwrap_or(0.0);
                if self.of(&format!("{of}.bound")).is_some_and(|bound| ggml > 1.5 * bound) {
                    held(name, Some(*value), 0.75 * ggml, "not yet");
                }
            }
        }
        all
    }
}

fn held(name: &str, value: Option<f64>, most: f64, missed: &str) -> bool {
    let Some(value) = value else { return true };
    let held = value <= most;
    println!("{} {name} at most {most}: {value:.4}", if held { "held   " } else { missed });
    held
}
