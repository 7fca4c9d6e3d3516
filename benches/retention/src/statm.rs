//! The kernel's figures for a process: resident memory, processor time, threads, descriptors.
//!
//! It reads `/proc` and changes nothing; what it reads of another process costs that one nothing.
//! Invariant: resident bytes are `statm`'s, all kinds of pages.

use std::fs;
use std::path::PathBuf;

use crate::BoxError;

/// A process that is looked at.
#[derive(Clone, Debug)]
pub struct Process(PathBuf);

impl Process {
    /// The one that asks.
    #[must_use]
    pub fn own() -> Self {
        Self("/proc/self".into())
    }

    /// The one with this id.
    #[must_use]
    pub fn other(id: u32) -> Self {
        Self(format!("/proc/{id}").into())
    }

    /// Resident bytes.
    ///
    /// # Errors
    /// Where the process is gone.
    pub fn resident(&self) -> Result<u64, BoxError> {
        let text = fs::read_to_string(self.0.join("statm"))?;
        let pages: u64 = text.split(' ').nth(1).ok_or("statm has no second field")?.parse()?;
        Ok(pages * page())
    }

    /// The most that was resident since it started, in bytes.
    ///
    /// # Errors
    /// Where the process is gone.
    pub fn peak(&self) -> Result<u64, BoxError> {
        let text = fs::read_to_string(self.0.join("status"))?;
        let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let kib = line.and_then(|line| line.trim().strip_suffix("kB")).ok_or("no VmHWM")?;
        Ok(kib.trim().parse::<u64>()? << 10)
    }

    /// Seconds of a processor that all its threads have had, those that ended too.
    ///
    /// # Errors
    /// Where the process is gone.
    pub fn processor_seconds(&self) -> Result<f64, BoxError> {
        let text = fs::read_to_string(self.0.join("stat"))?;
        let (_, fields) = text.rsplit_once(')').ok_or("stat has no name")?;
        let mut fields = fields.split_whitespace().skip(11);
        let mut next = || -> Result<f64, BoxError> {
            Ok(fields.next().ok_or("stat is short")?.parse::<f64>()?)
        };
        Ok((next()? + next()?) / TICKS)
    }

    /// Its threads.
    ///
    /// # Errors
    /// Where the process is gone.
    pub fn threads(&self) -> Result<usize, BoxError> {
        Ok(fs::read_dir(self.0.join("task"))?.count())
    }

    /// Its open descriptors.
    ///
    /// # Errors
    /// Where the process is gone.
    pub fn descriptors(&self) -> Result<usize, BoxError> {
        Ok(fs::read_dir(self.0.join("fd"))?.count())
    }
}

/// Ticks of `stat` in a second: `USER_HZ`, 100 on every Linux that Rust runs on.
const TICKS: f64 = 100.0;

/// The kernel's page: 4 KiB where nothing says otherwise.
fn page() -> u64 {
    4096
}
