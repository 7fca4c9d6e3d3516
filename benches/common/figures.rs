//! The figures that a bench prints, and their goals.

#[derive(Clone, Debug)]
struct Figure {
    name: String,
    values: Vec<f64>,
    unit: &'static str,
    /// The least and the most that it may be; infinite without a goal.
    bounds: [f64; 2],
}

const NO_GOAL: [f64; 2] = [f64::NEG_INFINITY, f64::INFINITY];

/// The measured values, in the order in which they were added first.
#[derive(Clone, Debug, Default)]
pub struct Figures {
    all: Vec<Figure>,
    /// `true` if no time is judged.
    is_counted: bool,
}

impl Figures {
    /// Returns none, of which times are judged or not.
    pub fn new(is_counted: bool) -> Self {
        Self { all: Vec::new(), is_counted }
    }

    /// Adds a figure that depends on the speed of the machine and must not exceed `goal`.
    pub fn timed(&mut self, name: &str, value: f64, unit: &'static str, goal: f64) {
        self.at_most(name, value, unit, if self.is_counted { f64::INFINITY } else { goal });
    }

    /// Adds a value. A figure that was added several times is the median of its values.
    pub fn add(&mut self, name: impl Into<String>, value: f64, unit: &'static str) {
        let name = name.into();
        match self.all.iter_mut().find(|one| one.name == name) {
            Some(figure) => figure.values.push(value),
            None => self.all.push(Figure { name, values: vec![value], unit, bounds: NO_GOAL }),
        }
    }

    /// Adds a figure whose value must not exceed `goal`.
    pub fn at_most(&mut self, name: impl Into<String>, value: f64, unit: &'static str, goal: f64) {
        let name = name.into();
        self.add(name.as_str(), value, unit);
        self.set_bounds(&name, [NO_GOAL[0], goal]);
    }

    /// Adds a figure whose value must be at least `goal`.
    pub fn at_least(&mut self, name: impl Into<String>, value: f64, unit: &'static str, goal: f64) {
        let name = name.into();
        self.add(name.as_str(), value, unit);
        self.set_bounds(&name, [goal, NO_GOAL[1]]);
    }

    /// Sets the least and the most that a figure may be, if it was measured.
    pub fn set_bounds(&mut self, name: &str, bounds: [f64; 2]) {
        let of_name = self.all.iter_mut().filter(|one| one.name == name);
        of_name.for_each(|figure| figure.bounds = bounds);
    }

    /// Returns a figure's value.
    pub fn of(&self, name: &str) -> Option<f64> {
        self.all.iter().find(|one| one.name == name).map(|one| median(&one.values))
    }

    /// Returns all values of a figure.
    pub fn each(&self, name: &str) -> &[f64] {
        self.all.iter().find(|one| one.name == name).map_or(&[], |one| &one.values)
    }

    /// Prints every figure and every goal. Returns `true` if all goals held.
    #[expect(clippy::print_stdout, reason = "figures are for other programs")]
    pub fn print(&self) -> bool {
        let mut all_held = true;
        for Figure { name, values, unit, bounds: [least, most] } in &self.all {
            let value = median(values);
            println!("figure {name} {value:.4} {unit}");
            let (held, goal) = match (least.is_finite(), most.is_finite()) {
                (true, _) => (value >= *least, format!("at least {least}")),
                (_, true) => (value <= *most, format!("at most {most}")),
                _ => continue,
            };
            let word = if held { "held  " } else { "MISSED" };
            println!("{word}  {name} {goal}: {value:.4}");
            all_held &= held;
        }
        all_held
    }
}

/// Returns the value below which this part of the values lies; 0 without any.
pub fn quantile(values: &[f64], part: f64) -> f64 {
    let mut values = values.to_vec();
    values.sort_unstable_by(f64::total_cmp);
    let last = count(values.len().saturating_sub(1) as u64);
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "an index")]
    let at = (last * part).round() as usize;
    values.get(at).copied().unwrap_or(0.0)
}

/// Returns the value in the middle.
pub fn median(values: &[f64]) -> f64 {
    quantile(values, 0.5)
}

/// Converts a count.
#[expect(clippy::cast_precision_loss, reason = "counts and bytes of one run are far below 2^52")]
pub fn count(number: u64) -> f64 {
    number as f64
}

/// Returns a part of a whole; 0 of nothing.
pub fn part(part: f64, whole: f64) -> f64 {
    if whole > 0.0 { part / whole } else { 0.0 }
}
