//! The standard metrics of a process (`process_*`), from `/proc/self`.
//!
//! The worker reads them when it publishes: one file, and two more for the tier `detail`. The crate
//! `metrics-process` would publish all or none of them, with a start time in whole seconds.
//!
//! It parses only what Linux writes; a file that cannot be read or parsed makes its metrics absent.

use std::fs;
use std::path::Path;
use std::time::Duration;

use crate::bytes::ByteSize;

/// Clock ticks per second in `/proc/self/stat`: `USER_HZ`, 100 on every architecture on which
/// lowtide runs.
const TICKS_PER_SECOND: u64 = 100;

/// Figures of the process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ProcessStats {
    /// The CPU time in user and system mode.
    pub(crate) cpu: Option<Duration>,
    /// The start, since the Unix epoch.
    pub(crate) start: Option<Duration>,
    /// The mapped addresses.
    pub(crate) address_space: Option<ByteSize>,
    /// The threads.
    pub(crate) threads: Option<u64>,
    /// The open file descriptors; read for the tier `detail`.
    pub(crate) open_fds: Option<u64>,
    /// The limit of file descriptors, if there is one; read for the tier `detail`.
    pub(crate) max_fds: Option<u64>,
}

impl ProcessStats {
    /// Parses `/proc/self/stat`; `boot` is the start of the machine, since the Unix epoch. The
    /// program's name, in parentheses, may contain any character.
    fn parse(text: &str, boot: Option<Duration>) -> Option<Self> {
        // Behind the name comes field 3.
        let fields: Vec<_> = text.rsplit_once(')')?.1.split_ascii_whitespace().collect();
        let field = |number: usize| fields.get(number - 3)?.parse::<u64>().ok();
        let time =
            |ticks: u64| Duration::from_millis(ticks.saturating_mul(1000 / TICKS_PER_SECOND));
        let since_boot = time(field(22)?);
        Some(Self {
            cpu: Some(time(field(14)?.saturating_add(field(15)?))),
            start: boot.map(|boot| boot.saturating_add(since_boot)),
            threads: Some(field(20)?),
            address_space: Some(ByteSize::new(field(23)?)),
            ..Self::default()
        })
    }
}

/// Parses the start of the machine since the Unix epoch from `/proc/stat`.
fn boot_time(text: &str) -> Option<Duration> {
    let line = text.lines().find_map(|line| line.strip_prefix("btime "))?;
    Some(Duration::from_secs(line.trim().parse().ok()?))
}

/// Parses the limit of file descriptors from `/proc/self/limits`.
fn descriptors_max(text: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix("Max open files"))?;
    line.split_ascii_whitespace().next()?.parse().ok() // `unlimited` is no number
}

/// Reads the figures of the process.
#[derive(Debug, Default)]
pub(crate) struct ProcessReader {
    /// The start of the machine, since the Unix epoch; read once.
    boot: Option<Duration>,
}

impl ProcessReader {
    /// Reads the figures; those of file descriptors only with `has_detail`.
    pub(crate) fn read(&mut self, has_detail: bool) -> ProcessStats {
        let proc = Path::new("/proc");
        let text = |name: &str| fs::read_to_string(proc.join(name)).ok();
        if self.boot.is_none() {
            self.boot = text("stat").and_then(|text| boot_time(&text));
        }
        let stats = text("self/stat").and_then(|text| ProcessStats::parse(&text, self.boot));
        let mut stats = stats.unwrap_or_default();
        if has_detail {
            // Less the descriptor through which the folder is read.
            let open = fs::read_dir(proc.join("self/fd")).ok().map(Iterator::count);
            stats.open_fds = open.map(|open| (open as u64).saturating_sub(1));
            stats.max_fds = text("self/limits").and_then(|text| descriptors_max(&text));
        }
        stats
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_with_spaces_and_parentheses_does_not_shift_the_fields() {
        let text = "42 (a ) b) S 1 42 42 0 -1 4194304 900 0 0 0 150 75 0 0 20 0 9 0 2000 4096 10 1";
        let boot = Duration::from_secs(1_700_000_000);
        let expected = ProcessStats {
            cpu: Some(Duration::from_millis(2250)),
            start: Some(boot + Duration::from_secs(20)),
            threads: Some(9),
            address_space: Some(ByteSize::new(4096)),
            ..ProcessStats::default()
        };
        assert_eq!(ProcessStats::parse(text, Some(boot)), Some(expected));
        assert_eq!(ProcessStats::parse(text, None), Some(ProcessStats { start: None, ..expected }));
        // The bug: a nonsensical time of the boot was a panic.
        let late = ProcessStats::parse(text, Some(Duration::MAX)).and_then(|stats| stats.start);
        assert_eq!(late, Some(Duration::MAX));
        for text in ["", "42 (a", "42 (a) S 1", "42 (a) S 1 42 42 0 -1 4194304 900 0 0 0 x 75"] {
            assert_eq!(ProcessStats::parse(text, Some(boot)), None, "{text:?}");
        }
    }

    #[test]
    fn other_files_are_parsed_and_an_unlimited_number_of_files_is_no_limit() {
        let boot = boot_time("cpu 1 2\nbtime 1700000000\nprocesses 9\n");
        assert_eq!(boot, Some(Duration::from_secs(1_700_000_000)));
        let limits = |soft| {
            let text =
                format!("Max processes  1 1 processes\nMax open files  {soft}  4096 files\n");
            descriptors_max(&text)
        };
        assert_eq!((limits("1024"), limits("unlimited")), (Some(1024), None));
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn this_process_has_all_figures_that_its_tier_reads() {
        let mut reader = ProcessReader::default();
        let basic = reader.read(false);
        assert!(basic.cpu.is_some() && basic.start.is_some() && basic.threads.is_some());
        assert_eq!((basic.open_fds, basic.max_fds), (None, None));
        assert!(reader.read(true).open_fds.is_some_and(|open| open > 0));
    }
}
