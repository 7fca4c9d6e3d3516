//! Runs bursts at the command of another program, so that two programs take turns.
//!
//! Each line of the standard input is the seed of a burst. The answer is a line with the CPU time
//! in seconds, the page faults, and the milliseconds of each request.

use std::io::{BufRead as _, Write as _, stdin, stdout};

use super::{BoxError, Service, burst};

pub(super) fn obey(service: &mut dyn Service) -> Result<(), BoxError> {
    service.load()?;
    for line in stdin().lock().lines() {
        let found = burst(service, line?.trim().parse()?, false)?;
        let mut out = stdout().lock();
        write!(out, "{} {}", found.cpu_seconds, found.faults)?;
        found.milliseconds.iter().try_for_each(|time| write!(out, " {time:.3}"))?;
        writeln!(out)?;
        out.flush()?;
    }
    Ok(())
}
