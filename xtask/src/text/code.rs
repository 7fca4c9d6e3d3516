//! What the code says: constants read out of the source, thresholds out of the rules, defaults
//! asked of the crate; and how a page writes them.
//!
//! Most bounds are private, and a test sees only what is public. So a constant is found by its
//! file and name, and the few forms in which constants are written here are worked out.
//!
//! Invariant: a constant that is not found, or is written in another form, is a panic and never a
//! value.

use std::time::Duration;

use yaml_rust2::{Yaml, YamlLoader};

use crate::text;

/// What a constant is written with.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Amount {
    Time(Duration),
    Bytes(u64),
    Number(f64),
}

/// The constant of this name in this file.
pub(crate) fn constant(file: &str, name: &str) -> Amount {
    let source = text(file);
    let after = source.split_once(&format!("const {name}: "));
    let after = after.unwrap_or_else(|| panic!("{file} has no constant {name}")).1;
    let written = after.split_once(" = ").or_else(|| after.split_once("=\n"));
    let written = written.unwrap_or_else(|| panic!("{file}: {name} has no value")).1;
    let written = written.split(';').next().unwrap_or_default().trim();
    amount(written).unwrap_or_else(|| panic!("{file}: {name} is written {written:?}"))
}

/// What stands in a file between two marks, of which the first is there once.
pub(crate) fn between(file: &str, mark: &str, end: &str) -> String {
    let source = text(file);
    let parts: Vec<_> = source.split(mark).collect();
    assert_eq!(parts.len(), 2, "{file}: expected {mark:?} once");
    parts[1].split(end).next().unwrap_or_default().to_owned()
}

/// The same, of a value that has no constant of its own.
pub(crate) fn written(file: &str, mark: &str, end: &str) -> Amount {
    let value = between(file, mark, end);
    amount(&value).unwrap_or_else(|| panic!("{file}: after {mark:?} stands {value:?}"))
}

fn amount(written: &str) -> Option<Amount> {
    let call = |name: &str| {
        let inner = written.strip_prefix(name)?.strip_prefix('(')?;
        number(inner.strip_suffix(')')?)
    };
    let times = [("from_secs", 1e9), ("from_millis", 1e6), ("from_micros", 1e3)];
    for (name, nanos) in times {
        if let Some(count) = call(&format!("Duration::{name}")) {
            return Some(Amount::Time(Duration::from_secs_f64(count * nanos / 1e9)));
        }
    }
    for (name, shift) in [("new", 0), ("kib", 10), ("mib", 20), ("gib", 30)] {
        if let Some(count) = call(&format!("ByteSize::{name}")) {
            return Some(Amount::Bytes(whole(count) << shift));
        }
    }
    number(written).map(Amount::Number)
}

/// A number, a product, or a number shifted to the left.
fn number(written: &str) -> Option<f64> {
    if let Some((left, right)) = written.split_once(" << ") {
        return Some(number(left)? * 2_f64.powf(number(right)?));
    }
    if let Some((left, right)) = written.split_once(" * ") {
        return Some(number(left)? * number(right)?);
    }
    written.trim().replace('_', "").parse().ok()
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "checked before")]
fn whole(count: f64) -> u64 {
    assert!(count >= 0.0 && count.fract() == 0.0 && count < 2_f64.powi(53), "{count} is not whole");
    count as u64
}

/// As few digits as it takes: `5`, `0.75`.
fn short(count: f64) -> String {
    let text = format!("{count:.3}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

impl Amount {
    pub(crate) fn time(self) -> Duration {
        let Self::Time(time) = self else { panic!("{self:?} is no time") };
        time
    }

    pub(crate) fn number(self) -> f64 {
        let Self::Number(number) = self else { panic!("{self:?} is no number") };
        number
    }

    /// As a count, with commas.
    pub(crate) fn count(self) -> String {
        commas(whole(self.number()))
    }

    fn bytes(self) -> u64 {
        match self {
            Self::Bytes(bytes) => bytes,
            Self::Number(bytes) => whole(bytes),
            Self::Time(_) => panic!("{self:?} is no size"),
        }
    }

    /// In KiB, MiB or GiB, the largest that gives a whole number.
    pub(crate) fn size(self) -> String {
        size(self.bytes())
    }
}

fn commas(count: u64) -> String {
    let digits = count.to_string();
    let mut text = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

pub(crate) fn size(bytes: u64) -> String {
    for (name, shift) in [("GiB", 30), ("MiB", 20), ("KiB", 10)] {
        if bytes > 0 && bytes.is_multiple_of(1 << shift) {
            return format!("{} {name}", bytes >> shift);
        }
    }
    panic!("{bytes} bytes have no short name")
}

/// `5 s`, `0.75 s`, `250 ms`.
pub(crate) fn time(time: Duration) -> String {
    if time < Duration::from_millis(500) {
        format!("{} ms", short(time.as_secs_f64() * 1e3))
    } else {
        format!("{} s", short(time.as_secs_f64()))
    }
}

/// `5 %`, `7.5 %`.
pub(crate) fn percent(part: f64) -> String {
    format!("{} %", short(part * 100.0))
}

/// `.80`, `.05`: without the zero before the point.
pub(crate) fn part(part: f64) -> String {
    format!("{part:.2}").trim_start_matches('0').to_owned()
}

/// Small numbers, in words.
pub(crate) fn word(count: f64) -> &'static str {
    const WORDS: [&str; 11] =
        ["no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"];
    let at = usize::try_from(whole(count)).expect("a small number");
    WORDS.get(at).unwrap_or_else(|| panic!("{count} has no word here"))
}

/// How prose says a time.
pub(crate) fn spoken(time: Duration) -> String {
    match time.as_secs() {
        60 => "a minute".to_owned(),
        900 => "a quarter of an hour".to_owned(),
        1800 => "half an hour".to_owned(),
        3600 => "an hour".to_owned(),
        seconds if seconds % 60 == 0 => {
            format!("{} minutes", word(Duration::from_secs(seconds / 60).as_secs_f64()))
        }
        seconds => format!("{} seconds", word(Duration::from_secs(seconds).as_secs_f64())),
    }
}

/// How often something is that is done each time.
pub(crate) fn how_often(each: Duration) -> String {
    if each == Duration::from_secs(1) {
        "once a second".to_owned()
    } else {
        format!("{} times a second", word((1.0 / each.as_secs_f64()).round()))
    }
}

/// One alert of the rules.
pub(crate) struct Alert {
    expr: String,
    pub(crate) lasts: Duration,
}

impl Alert {
    pub(crate) fn named(name: &str) -> Self {
        let rules = text("dashboards/lowtide.rules.yml");
        let rules = YamlLoader::load_from_str(&rules).expect("YAML");
        let groups = rules[0]["groups"].as_vec().expect("groups");
        let rules = groups.iter().filter_map(|group| group["rules"].as_vec()).flatten();
        let mut found = rules.filter(|rule| rule["alert"].as_str() == Some(name));
        let rule = found.next().unwrap_or_else(|| panic!("no alert {name}"));
        let expr = crate::flat(rule["expr"].as_str().expect("an expression"));
        let lasts = match &rule["for"] {
            Yaml::BadValue => Duration::ZERO,
            time => duration(time.as_str().expect("a time")),
        };
        Self { expr, lasts }
    }

    /// The number, or the product, that follows a mark.
    pub(crate) fn after(&self, mark: &str) -> f64 {
        let parts: Vec<_> = self.expr.split(mark).collect();
        assert_eq!(parts.len(), 2, "expected {mark:?} once in {}", self.expr);
        let is_part = |c: char| c.is_ascii_digit() || matches!(c, '.' | '*' | ' ');
        let product: String = parts[1].chars().take_while(|&c| is_part(c)).collect();
        let factors = product.split('*').map(|factor| factor.trim().parse::<f64>());
        factors.map(|factor| factor.unwrap_or_else(|_| panic!("{mark:?}: {product}"))).product()
    }

    pub(crate) fn size_after(&self, mark: &str) -> String {
        size(whole(self.after(mark)))
    }

    /// The one range that it looks back over.
    pub(crate) fn window(&self) -> Duration {
        let mut windows: Vec<_> =
            self.expr.split('[').skip(1).filter_map(|after| after.split(']').next()).collect();
        windows.dedup();
        assert_eq!(windows.len(), 1, "one range in {}", self.expr);
        duration(windows[0])
    }
}

fn duration(time: &str) -> Duration {
    humantime::parse_duration(time).unwrap_or_else(|error| panic!("{time}: {error}"))
}

#[test]
fn constants_are_read_in_the_forms_in_which_they_are_written() {
    assert_eq!(amount("Duration::from_millis(1_500)"), Some(Amount::Time(ms(1500))));
    assert_eq!(amount("Duration::from_micros(100 * 100)"), Some(Amount::Time(ms(10))));
    assert_eq!(amount("ByteSize::mib(16)"), Some(Amount::Bytes(16 << 20)));
    assert_eq!(amount("1 << 20"), Some(Amount::Number(1_048_576.0)));
    assert_eq!(amount("0.75"), Some(Amount::Number(0.75)));
    assert_eq!(amount("SOMETHING_ELSE"), None);
    assert_eq!((commas(2048), commas(64), commas(262_144)), own("2,048", "64", "262,144"));
    assert_eq!((time(ms(750)), time(ms(20)), time(ms(5000))), own("0.75 s", "20 ms", "5 s"));
    assert_eq!((part(0.8), percent(0.075), size(3 << 30)), own(".80", "7.5 %", "3 GiB"));
}

#[cfg(test)]
fn ms(count: u64) -> Duration {
    Duration::from_millis(count)
}

#[cfg(test)]
fn own(a: &str, b: &str, c: &str) -> (String, String, String) {
    (a.to_owned(), b.to_owned(), c.to_owned())
}
