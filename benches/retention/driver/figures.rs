//! The figures: what each round found under a name, and the medians.
//!
//! Invariant: a figure is printed once, as the median of all that was found.

use std::collections::BTreeMap;

/// The results by name.
#[derive(Debug, Default)]
pub(crate) struct Figures(BTreeMap<String, (Vec<f64>, &'static str)>);

/// Columns of the table: end of the figure's name, heading.
const COLUMNS: [(&str, &str); 11] = [
    ("cpu_per_op_ratio", "CPU/op"),
    ("p50_us", "p50 us"),
    ("p95_us", "p95 us"),
    ("p99_us", "p99 us"),
    ("p999_us", "p999 us"),
    ("peak_mib", "peak"),
    ("resident_0s_mib", "+0 s"),
    ("resident_1s_mib", "+1 s"),
    ("resident_2s_mib", "+2 s"),
    ("resident_10s_mib", "+10 s"),
    ("live_mib", "live"),
];

impl Figures {
    /// One more finding.
    pub(crate) fn add(&mut self, name: &str, value: f64, unit: &'static str) {
        self.0.entry(name.to_owned()).or_insert_with(|| (Vec::new(), unit)).0.push(value);
    }

    /// Drops what was found under a name, for something better.
    pub(crate) fn forget(&mut self, name: &str) {
        self.0.remove(name);
    }

    /// The median.
    pub(crate) fn of(&self, name: &str) -> Option<f64> {
        let (values, _) = self.0.get(name)?;
        Some(median(values))
    }

    /// Returns the results of each round.
    pub(crate) fn each(&self, name: &str) -> &[f64] {
        self.0.get(name).map_or(&[], |(values, _)| values)
    }

    /// The median of the ratios of two figures, round by round.
    pub(crate) fn ratio(&self, above: &str, below: &str) -> Option<f64> {
        let pairs = self.each(above).iter().zip(self.each(below));
        let ratios: Vec<f64> = pairs.map(|(above, below)| above / below).collect();
        (!ratios.is_empty()).then(|| median(&ratios))
    }

    /// A line for each allocator, and its resident memory against two of them.
    pub(crate) fn table(&self, burst: &str, names: &[&str]) {
        if names.iter().all(|name| self.of(&format!("{burst}.{name}.live_mib")).is_none()) {
            return;
        }
        print!("\n{burst:<18}");
        for (_, heading) in COLUMNS {
            print!("{heading:>9}");
        }
        println!("{:>12}{:>12}{:>12}", "peak/je", "+2 s/je", "+10 s/trim");
        for name in names {
            let figure = |end: &str| format!("{burst}.{name}.{end}");
            print!("{name:<18}");
            for (end, _) in COLUMNS {
                print!("{:>9}", shown(self.of(&figure(end))));
            }
            let against = |end: &str, whom: &str| {
                shown(self.ratio(&figure(end), &format!("{burst}.{whom}.{end}")))
            };
            println!(
                "{:>12}{:>12}{:>12}",
                against("peak_mib", "jemalloc_default"),
                against("resident_2s_mib", "jemalloc_default"),
                against("resident_10s_mib", "glibc_trim")
            );
        }
    }

    /// Every figure once, in lines `figure NAME VALUE UNIT`.
    pub(crate) fn print(&self) {
        println!();
        for (name, (values, unit)) in &self.0 {
            println!("figure {name} {:.4} {unit}", median(values));
        }
    }
}

fn shown(value: Option<f64>) -> String {
    value.map_or_else(
        || "-".to_owned(),
        |value| {
            if value < 100.0 { format!("{value:.2}") } else { format!("{value:.0}") }
        },
    )
}

/// The value in the middle; the mean of two.
pub(crate) fn median(values: &[f64]) -> f64 {
    let mut values = values.to_vec();
    values.sort_unstable_by(f64::total_cmp);
    let at = |at: usize| values.get(at).copied().unwrap_or(0.0);
    let half = values.len() / 2;
    if values.len().is_multiple_of(2) && half > 0 {
        f64::midpoint(at(half - 1), at(half))
    } else {
        at(half)
    }
}
