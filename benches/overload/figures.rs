//! The figures: what each cell found under a name, told once and in the order of their names.
//!
//! Invariant: a figure that was found more than once is told as its median.

use std::collections::BTreeMap;

/// The results by name.
#[derive(Debug, Default)]
pub(crate) struct Figures(BTreeMap<String, (Vec<f64>, &'static str)>);

impl Figures {
    /// One more finding.
    pub(crate) fn add(&mut self, name: &str, value: f64, unit: &'static str) {
        self.0.entry(name.to_owned()).or_insert_with(|| (Vec::new(), unit)).0.push(value);
    }

    /// The median.
    pub(crate) fn of(&self, name: &str) -> Option<f64> {
        self.0.get(name).map(|(values, _)| quantile(values, 0.5))
    }

    /// All that was found under names that begin and end so.
    pub(crate) fn all(&self, begin: &str, end: &str) -> Vec<f64> {
        let fits = |name: &str| name.starts_with(begin) && name.ends_with(end);
        let found = self.0.iter().filter(|(name, _)| fits(name));
        found.flat_map(|(_, (values, _))| values.iter().copied()).collect()
    }

    /// Every figure once, in lines `figure NAME VALUE UNIT`.
    pub(crate) fn text(&self) -> String {
        let lines = self.0.iter().map(|(name, (values, unit))| {
            format!("figure {name} {:.4} {unit}\n", quantile(values, 0.5))
        });
        lines.collect()
    }
}

/// The value below which this part lies; 0 without any.
pub(crate) fn quantile(values: &[f64], part: f64) -> f64 {
    let mut values = values.to_vec();
    values.sort_unstable_by(f64::total_cmp);
    let last = count(values.len().saturating_sub(1) as u64);
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "an index below the length"
    )]
    let at = (last * part).round() as usize;
    values.get(at).copied().unwrap_or(0.0)
}

/// A count as a number to compute with.
#[expect(clippy::cast_precision_loss, reason = "counts and bytes of one run are far below 2^52")]
pub(crate) fn count(number: u64) -> f64 {
    number as f64
}

/// A part of a whole; 0 of nothing.
pub(crate) fn part(part: f64, whole: f64) -> f64 {
    if whole > 0.0 { part / whole } else { 0.0 }
}
