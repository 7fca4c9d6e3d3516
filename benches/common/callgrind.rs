//! Instructions of a program, counted by callgrind.

use std::process::Command;

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
/// There is no valgrind, or it counted nothing.
pub fn per_step(conf: &str, kind: &str, steps: u32) -> Result<f64, String> {
    let program = std::env::current_exe().map_err(|error| error.to_string())?;
    let of = |steps: u32| {
        let mut command = Command::new("valgrind");
        command.args(["--tool=callgrind", "--callgrind-out-file=/dev/null"]).arg(&program);
        command.args(["--bench", "--be", kind, "--steps", &steps.to_string()]);
        let output = command.env("_RJEM_MALLOC_CONF", conf).output();
        let output = output.map_err(|_| "no valgrind".to_owned())?;
        let text = String::from_utf8_lossy(&output.stderr);
        let line = text.lines().find_map(|line| line.split_once("Collected : "));
        line.and_then(|(_, count)| count.trim().parse::<f64>().ok())
            .ok_or_else(|| format!("valgrind: {}", text.lines().last().unwrap_or_default()))
    };
    Ok((of(3 * steps)? - of(steps)?) / f64::from(2 * steps))
}
