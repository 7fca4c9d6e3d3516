//! One alert of the rules: the numbers in its expression.
//!
//! Invariant: a number that is not found is a fault.

use std::time::Duration;

use yaml_rust2::{Yaml, YamlLoader};

use crate::text::code::Code;
use crate::text::words;

pub(super) struct Alert<'c> {
    code: &'c Code<'c>,
    name: &'static str,
    expr: String,
    pub(super) lasts: Duration,
}

impl<'c> Alert<'c> {
    pub(super) fn named(code: &'c Code<'c>, name: &'static str) -> Self {
        Self::of(code, "alert", name)
    }

    /// Reads a recording rule.
    pub(super) fn recorded(code: &'c Code<'c>, name: &'static str) -> Self {
        Self::of(code, "record", name)
    }

    fn of(code: &'c Code<'c>, kind: &str, name: &'static str) -> Self {
        let rules = code.within("dashboards/lowtide.rules.yml", "groups:\n", "\u{0}");
        let rules = YamlLoader::load_from_str(&format!("groups:\n{rules}")).unwrap_or_default();
        let groups = rules.first().and_then(|file| file["groups"].as_vec());
        let rules = groups.into_iter().flatten().filter_map(|group| group["rules"].as_vec());
        let found = rules.flatten().find(|rule| rule[kind].as_str() == Some(name));
        code.faults.expect(found.is_some(), || format!("{name}: no such rule"));
        let rule = found.unwrap_or(&Yaml::BadValue);
        let lasts = rule["for"].as_str().map_or(Duration::ZERO, |time| duration(code, time));
        Self { code, name, expr: super::flat(rule["expr"].as_str().unwrap_or_default()), lasts }
    }

    /// Returns the number, or the product, that follows a mark.
    pub(super) fn after(&self, mark: &str) -> f64 {
        let parts: Vec<_> = self.expr.split(mark).collect();
        let after = if let [_, after] = parts.as_slice() { *after } else { "" };
        let is_part = |c: char| c.is_ascii_digit() || matches!(c, '.' | '*' | ' ');
        let product: String = after.chars().take_while(|&c| is_part(c)).collect();
        let factors = product
            .trim_end_matches(['*', ' '])
            .split('*')
            .map(|factor| factor.trim().parse::<f64>());
        factors.product::<Result<f64, _>>().unwrap_or_else(|_| {
            self.code.faults.say(format!("{}: no number after {mark:?}: {}", self.name, self.expr));
            0.0
        })
    }

    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a size")]
    pub(super) fn size_after(&self, mark: &str) -> String {
        let bytes = self.after(mark);
        words::size(bytes as u64).unwrap_or_else(|| {
            self.code.faults.say(format!("{}: {bytes} bytes have no short name", self.name));
            String::new()
        })
    }

    /// Returns the one range that the expression looks back over.
    pub(super) fn window(&self) -> Duration {
        let mut windows: Vec<_> =
            self.expr.split('[').skip(1).filter_map(|after| after.split(']').next()).collect();
        windows.dedup();
        if let [window] = windows.as_slice() {
            return duration(self.code, window);
        }
        self.code.faults.say(format!("{}: expected one range in {}", self.name, self.expr));
        Duration::ZERO
    }
}

pub(super) fn duration(code: &Code<'_>, time: &str) -> Duration {
    humantime::parse_duration(time).unwrap_or_else(|error| {
        code.faults.say(format!("{time:?}: {error}"));
        Duration::ZERO
    })
}
