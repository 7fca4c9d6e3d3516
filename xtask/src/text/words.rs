//! Formats of numbers, sizes and times on the pages.
//!
//! Invariant: the same value is written in one way only.

use std::time::Duration;

/// As few digits as it takes: `5`, `0.75`.
fn short(count: f64) -> String {
    let text = format!("{count:.3}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// With commas: `2,048`.
pub(crate) fn commas(count: u64) -> String {
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

/// In KiB, MiB or GiB, the largest that gives a whole number; `None` if none does.
pub(crate) fn size(bytes: u64) -> Option<String> {
    let units = [("GiB", 30), ("MiB", 20), ("KiB", 10)];
    let fits = |(_, shift): &(_, u32)| bytes > 0 && bytes.is_multiple_of(1 << shift);
    let (name, shift) = units.into_iter().find(fits)?;
    Some(format!("{} {name}", bytes >> shift))
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

/// Small numbers in words, others in digits.
pub(crate) fn word(count: f64) -> String {
    const WORDS: [&str; 11] =
        ["no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"];
    let digits = short(count);
    let known = digits.parse::<usize>().ok().and_then(|at| WORDS.get(at));
    known.map_or(digits, |word| (*word).to_owned())
}

fn of_seconds(seconds: u64) -> String {
    word(Duration::from_secs(seconds).as_secs_f64())
}

/// A time in prose.
pub(crate) fn spoken(time: Duration) -> String {
    match time.as_secs() {
        60 => "a minute".to_owned(),
        900 => "a quarter of an hour".to_owned(),
        1800 => "half an hour".to_owned(),
        3600 => "an hour".to_owned(),
        seconds if seconds % 60 == 0 => format!("{} minutes", of_seconds(seconds / 60)),
        seconds => format!("{} seconds", of_seconds(seconds)),
    }
}

/// The frequency of something that is done once in this time.
pub(crate) fn how_often(each: Duration) -> String {
    if each == Duration::from_secs(1) {
        "once a second".to_owned()
    } else {
        format!("{} times a second", word((1.0 / each.as_secs_f64()).round()))
    }
}

/// With a capital.
pub(crate) fn first_of_a_sentence(text: &str) -> String {
    let mut letters = text.chars();
    let first = letters.next().map(|letter| letter.to_ascii_uppercase());
    first.into_iter().chain(letters).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_sizes_and_times_are_written_as_pages_write_them() {
        let ms = Duration::from_millis;
        assert_eq!([2048, 64, 262_144].map(commas), ["2,048", "64", "262,144"]);
        assert_eq!([750, 20, 5000].map(|count| time(ms(count))), ["0.75 s", "20 ms", "5 s"]);
        assert_eq!((part(0.8), percent(0.075)), (".80".to_owned(), "7.5 %".to_owned()));
        assert_eq!((size(3 << 30), size(3)), (Some("3 GiB".to_owned()), None));
        assert_eq!((word(5.0), word(11.0)), ("five".to_owned(), "11".to_owned()));
        assert_eq!(spoken(ms(120_000)), "two minutes");
        assert_eq!(how_often(ms(100)), "ten times a second");
    }
}
