//! Instructions of a program, counted by callgrind.
//!
//! Callers run a program more often and less often and take the difference, so that its start and
//! end do not count.

use std::ffi::OsStr;
use std::process::Command;

/// Returns a command that runs a program under callgrind.
pub(crate) fn callgrind(program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new("valgrind");
    command.args(["--tool=callgrind", "--callgrind-out-file=/dev/null"]).arg(program);
    command
}

/// Runs a command of [`callgrind`] and returns the instructions of its program.
///
/// # Errors
/// There is no valgrind, or it counted nothing.
pub(crate) fn instructions(command: &mut Command) -> Result<f64, String> {
    let output = command.output().map_err(|_| "no valgrind".to_owned())?;
    let text = String::from_utf8_lossy(&output.stderr);
    let line = text.lines().find_map(|line| line.split_once("Collected : "));
    line.and_then(|(_, count)| count.trim().parse().ok())
        .ok_or_else(|| format!("valgrind: {}", text.lines().last().unwrap_or_default()))
}
