//! The figures of a part, and the goals of those that have one.

/// The goal of a figure.
#[derive(Clone, Copy, Debug)]
enum Goal {
    AtMost(f64),
    AtLeast(f64),
    /// The figure is only for information.
    None,
}

/// The measured values, in the order in which they were added.
#[derive(Clone, Debug, Default)]
pub(crate) struct Figures(Vec<(String, f64, &'static str, Goal)>);

#[allow(dead_code, reason = "not every kind of goal has a figure")]
impl Figures {
    /// Adds a figure without a goal.
    pub(crate) fn add(&mut self, name: impl Into<String>, value: f64, unit: &'static str) {
        self.0.push((name.into(), value, unit, Goal::None));
    }

    /// Adds a figure whose value must not exceed `goal`.
    pub(crate) fn at_most(
        &mut self,
        name: impl Into<String>,
        value: f64,
        unit: &'static str,
        goal: f64,
    ) {
        self.0.push((name.into(), value, unit, Goal::AtMost(goal)));
    }

    /// Adds a figure whose value must be at least `goal`.
    pub(crate) fn at_least(
        &mut self,
        name: impl Into<String>,
        value: f64,
        unit: &'static str,
        goal: f64,
    ) {
        self.0.push((name.into(), value, unit, Goal::AtLeast(goal)));
    }

    /// Prints everything. Returns `true` if every goal held.
    pub(crate) fn print(&self) -> bool {
        let mut all_held = true;
        for (name, value, unit, goal) in &self.0 {
            println!("figure {name} {value:.3} {unit}");
            let (held, goal) = match *goal {
                Goal::AtMost(goal) => (*value <= goal, format!("at most {goal}")),
                Goal::AtLeast(goal) => (*value >= goal, format!("at least {goal}")),
                Goal::None => continue,
            };
            let word = if held { "held  " } else { "MISSED" };
            println!("{word}  {name} {goal}: {value:.3}");
            all_held &= held;
        }
        all_held
    }
}
