//! Instructions of a program, counted by callgrind.

use std::ffi::OsStr;
use std::process::Command;

/// Returns a command that runs a program under callgrind.
pub fn callgrind(program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new("valgrind");
    command.args(["--tool=callgrind", "--callgrind-out-file=/dev/null"]).arg(program);
    command
}

/// Runs a command of [`callgrind`] and returns the instructions of its program.
///
/// # Errors
/// There is no valgrind, or it counted nothing.
pub fn instructions(command: &mut Command) -> Result<f64, String> {
    let output = command.output().map_err(|_| "no valgrind".to_owned())?;
    let text = String::from_utf8_lossy(&output.stderr);
    let line = text.lines().find_map(|line| line.split_once("Collected : "));
    line.and_then(|(_, count)| count.trim().parse().ok())
        .ok_or_else(|| format!("valgrind: {}", text.lines().last().unwrap_or_default()))
}

/// Returns the instructions of a step of this program: of a run of three times so many steps less a
/// run of them once, so that start and end do not count. The last argument is the number of steps.
///
/// # Errors
/// Those of [`instructions`].
pub fn per_step(arguments: &[&str], steps: u32) -> Result<f64, String> {
    let program = std::env::current_exe().map_err(|error| error.to_string())?;
    let of = |steps: u32| {
        let mut command = callgrind(&program);
        instructions(command.arg("--bench").args(arguments).arg(steps.to_string()))
    };
    Ok((of(3 * steps)? - of(steps)?) / f64::from(2 * steps))
}
