//! Problems as text: the CSV files of MiniMalloc and of idealloc.
//!
//! The first line names the columns in any order: `id` (`buffer`, `buffer_id`), `lower` (`begin`,
//! `start`), `upper` or `end`, `size`, and optionally `alignment`, `offset`, `gaps` and `hint`.
//! `upper` is the first step at which a buffer is not live, `end` the last at which it is. Gaps are
//! separated by spaces: `3-5` needs no memory at steps 3 and 4, `3-5@0:16` only the first 16 bytes.
//! Hints are ignored. An empty line ends the file. Quoting is not supported.

use std::borrow::Cow;
use std::io;
use std::io::{BufRead, BufReader, Read};

use lowtide_core::bytes::ByteSize;

use super::error::PlanError;
use super::problem::{Demand, Gap, Problem};

/// The longest line that is read: room for some ten thousand gaps.
const LINE_MAX: u64 = 1 << 20;

impl PlanError {
    fn at(self, line: u64) -> Self {
        Self::AtLine { line, error: Box::new(self) }
    }
}

/// The names of columns.
const COLUMNS: [&str; 8] = ["id", "lower", "upper", "size", "alignment", "offset", "hint", "gaps"];

impl Problem {
    /// Reads a problem from a file or another reader, with buffering. If `is_inclusive`, the end of
    /// a lifetime is its last step for any name of the column.
    ///
    /// # Errors
    /// [`PlanError::AtLine`] for the first invalid line.
    ///
    /// ```
    /// use lowtide_planner::Problem;
    /// let text = "id,lower,upper,size,gaps\nb1,0,9,4,3-5\nb2,3,5,4,\n";
    /// let problem = Problem::read_csv(text.as_bytes(), false)?;
    /// assert_eq!(problem.lower_bound()?.get(), 4);
    /// let wrong = Problem::read_csv("id,lower,upper,size\nb1,9,0,4\n".as_bytes(), false);
    /// assert!(wrong.unwrap_err().to_string().starts_with("line 2: b1: live from 9"));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn read_csv(from: impl Read, is_inclusive: bool) -> Result<Self, PlanError> {
        let mut lines = LineReader { from: BufReader::new(from), text: Vec::new(), number: 0 };
        let header = lines.next()?.unwrap_or_default();
        let columns = Columns::of(header, is_inclusive).map_err(|fault| fault.at(1))?;
        let mut problem = Self::new();
        let mut has_ended = false;
        loop {
            let number = lines.number + 1;
            let Some(line) = lines.next()? else { return Ok(problem) };
            if line.is_empty() {
                has_ended = true;
                continue;
            }
            let demand = if has_ended { Err(PlanError::AfterEnd) } else { columns.demand(line) };
            let added = demand.and_then(|demand| problem.add(demand));
            added.map_err(|fault| fault.at(number))?;
        }
    }
}

/// The index of each column.
struct Columns {
    /// The names, in the order of the file.
    names: Vec<&'static str>,
    is_inclusive: bool,
}

impl Columns {
    fn of(header: &str, is_inclusive: bool) -> Result<Self, PlanError> {
        let mut columns = Self { names: Vec::new(), is_inclusive };
        for name in header.split(',').map(str::trim) {
            let known = match name {
                "buffer" | "buffer_id" => Some("id"),
                "begin" | "start" => Some("lower"),
                "end" => {
                    columns.is_inclusive = true;
                    Some("upper")
                }
                _ => COLUMNS.into_iter().find(|known| *known == name),
            };
            let expected = "id, lower, upper, size, alignment, offset, gaps";
            let known = known.ok_or_else(|| wrong("column", name, expected))?;
            if columns.names.contains(&known) {
                return Err(wrong("column", name, "each at most once"));
            }
            columns.names.push(known);
        }
        let mut needed = COLUMNS.into_iter().take(4);
        match needed.find(|column| !columns.names.contains(column)) {
            Some(missing) => Err(wrong("header", header, format!("a column {missing}"))),
            None => Ok(columns),
        }
    }

    fn demand(&self, line: &str) -> Result<Demand, PlanError> {
        let values: Vec<&str> = line.split(',').map(str::trim).collect();
        if values.len() != self.names.len() {
            let found = values.len().to_string();
            return Err(wrong("number of values", &found, self.names.len().to_string()));
        }
        let value = |column: &str| {
            let at = self.names.iter().position(|name| *name == column);
            at.map_or("", |at| values[at])
        };
        let step = |column| number::<i64>(value(column), column, "a whole number below 2^63");
        let bytes = |column| number::<u64>(value(column), column, "a number of bytes below 2^64");
        let bytes_or_none =
            |column| if value(column).is_empty() { Ok(None) } else { bytes(column).map(Some) };
        let mut end = step("upper")?;
        if self.is_inclusive {
            let expected = "a last step below 2^63 - 1";
            end = end.checked_add(1).ok_or_else(|| wrong("upper", value("upper"), expected))?;
        }
        let gaps = value("gaps").split_ascii_whitespace().map(gap).collect::<Result<_, _>>()?;
        let demand = Demand::new(value("id"), ByteSize::new(bytes("size")?), step("lower")?..end);
        let align = bytes_or_none("alignment")?.unwrap_or(1);
        Ok(Demand { align, gaps, offset: bytes_or_none("offset")?, ..demand })
    }
}

fn number<T: std::str::FromStr>(
    found: &str,
    column: &'static str,
    expected: &'static str,
) -> Result<T, PlanError> {
    found.parse().map_err(|_| wrong(column, found, expected))
}

fn wrong(column: &'static str, found: &str, expected: impl Into<Cow<'static, str>>) -> PlanError {
    PlanError::InvalidValue { column, found: found.into(), expected: expected.into() }
}

/// `3-5` or `3-5@0:16`; steps may be negative.
fn gap(text: &str) -> Result<Gap, PlanError> {
    let wrong = || wrong("gaps", text, "gaps such as 3-5 or 3-5@0:16");
    let (steps, window) = match text.split_once('@') {
        Some((steps, window)) => (steps, Some(window)),
        None => (text, None),
    };
    let dash = steps.char_indices().skip(1).find(|(_, mark)| *mark == '-').map(|(at, _)| at);
    let (first, end) = steps.split_at(dash.ok_or_else(wrong)?);
    let step = |text: &str| text.parse::<i64>().map_err(|_| wrong());
    let span = step(first)?..step(&end[1..])?;
    let window = window.map(|window| {
        let (low, high) = window.split_once(':').ok_or_else(wrong)?;
        let bytes = |text: &str| text.parse::<u64>().map_err(|_| wrong());
        Ok::<_, PlanError>(bytes(low)?..bytes(high)?)
    });
    Ok(Gap { span, window: window.transpose()? })
}

/// Lines without their ends, one at a time.
struct LineReader<R> {
    from: BufReader<R>,
    text: Vec<u8>,
    number: u64,
}

impl<R: Read> LineReader<R> {
    fn next(&mut self) -> Result<Option<&str>, PlanError> {
        self.number += 1;
        self.text.clear();
        let fault = |fault: PlanError| fault.at(self.number);
        let read = self.from.by_ref().take(LINE_MAX + 1).read_until(b'\n', &mut self.text);
        let length = read.map_err(|error| fault(PlanError::Unreadable(error.kind())))?;
        if length as u64 > LINE_MAX {
            return Err(fault(PlanError::LineTooLong { limit: LINE_MAX }));
        }
        let not_text = |_| fault(PlanError::Unreadable(io::ErrorKind::InvalidData));
        let text = std::str::from_utf8(&self.text).map_err(not_text)?;
        Ok((length > 0).then(|| text.trim()))
    }
}
