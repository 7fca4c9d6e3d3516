//! The figures, and the goals of those that have one.
//!
//! Invariant: every figure stands once as `figure NAME VALUE UNIT`, in the order it was added.

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
];

/// Instances at whose bound a plan is to be found and proved.
const PROVEN: [&str; 8] = ["A", "B", "C", "E", "F", "I", "resnet50", "G_1"];

/// Seconds that an instance of the set may take to fit its capacity.
const SECONDS: f64 = 0.5;

/// What was measured.
#[derive(Clone, Debug, Default)]
pub(crate) struct Figures(Vec<(String, f64, &'static str)>);

impl Figures {
    pub(crate) fn add(&mut self, name: String, value: f64, unit: &'static str) {
        self.0.push((name, value, unit));
    }

    fn of(&self, name: &str) -> Option<f64> {
        self.0.iter().find(|(other, ..)| other == name).map(|(_, value, _)| *value)
    }

    /// Prints everything; whether every goal held. What was not measured has not failed.
    pub(crate) fn print(&mut self) -> bool {
        let short: Vec<f64> = self.ending("10ms.peak_per_bound").collect();
        if !short.is_empty() {
            let count = u32::try_from(short.len()).expect("some instances");
            let mean = short.iter().sum::<f64>() / f64::from(count);
            self.add("plan.set.10ms.mean_peak_per_bound".into(), mean, "ratio");
        }
        for (name, value, unit) in &self.0 {
            println!("figure {name} {value:.4} {unit}");
        }
        println!();
        let mut all = true;
        for &(name, most) in GOALS {
            all &= held(name, self.of(name), most);
        }
        for name in PROVEN {
            let missed = self.of(&format!("plan.{name}.proven")).map(|proven| 1.0 - proven);
            all &= held(&format!("plan.{name} not proven"), missed, 0.0);
        }
        for (name, value, _) in &self.0 {
            let is_of_set = self.of(&name.replace(".seconds", ".10ms.peak_per_bound")).is_some();
            if name.ends_with(".seconds") && is_of_set {
                all &= held(name, Some(*value), SECONDS);
            }
            if name.ends_with(".1s.peak_per_best_peer") {
                all &= held(name, Some(*value), 1.0);
            }
        }
        all
    }

    fn ending(&self, end: &str) -> impl Iterator<Item = f64> {
        let found = self.0.iter().filter(move |(name, ..)| name.ends_with(end));
        found.map(|(_, value, _)| *value)
    }
}

fn held(name: &str, value: Option<f64>, most: f64) -> bool {
    let Some(value) = value else {
        println!("skipped {name}: not measured");
        return true;
    };
    let held = value <= most;
    println!("{}  {name} at most {most}: {value:.4}", if held { "held  " } else { "MISSED" });
    held
}
