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

/// The arguments of a program that runs itself to have its instructions counted.
#[derive(Clone, Debug, clap::Args)]
pub struct Counted {
    /// Be the process whose instructions are counted, of this kind.
    #[arg(long, hide = true)]
    pub be: Option<String>,
    #[arg(long, hide = true, default_value_t = 0)]
    pub steps: usize,
}

/// Returns the instructions of a step of this program: of a run of three times so many steps less a
/// run of them once, so that start and end do not count. It runs with these settings of jemalloc.
///
/// # Errors
/// Those of [`instructions`].
pub fn per_step(conf: &str, kind: &str, steps: u32) -> Result<f64, String> {
    let program = std::env::current_exe().map_err(|error| error.to_string())?;
    let of = |steps: u32| {
        let mut command = callgrind(&program);
        command.env("_RJEM_MALLOC_CONF", conf);
        instructions(command.args(["--bench", "--be", kind, "--steps", &steps.to_string()]))
    };
    Ok((of(3 * steps)? - of(steps)?) / f64::from(2 * steps))
}
