//! Commands that are run: each is printed, and its output appears as it comes.
//!
//! Invariant: a command that cannot be started, or that fails, is an error with its line.

use std::ffi::OsStr;
use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::{env, fs};

use crate::tree;

/// A command in the root of the repository.
pub(crate) struct Run {
    command: Command,
}

/// Returns `cargo` with these arguments, separated by spaces.
pub(crate) fn cargo(arguments: &str) -> Run {
    // The cargo that runs this program, unless an argument names another toolchain.
    let own = env::var_os("CARGO").filter(|_| !arguments.starts_with('+'));
    let program = own.unwrap_or_else(|| "cargo".into());
    let mut run = Run::new(program).words(arguments);
    // What cargo sets for this program is not for the programs that it starts.
    for (name, _) in env::vars_os() {
        let name = name.to_string_lossy();
        if name.starts_with("CARGO_PKG_") || name == "CARGO_MANIFEST_DIR" {
            run.command.env_remove(&*name);
        }
    }
    run
}

impl Run {
    pub(crate) fn new(program: impl AsRef<OsStr>) -> Self {
        let mut command = Command::new(program);
        command.current_dir(tree::root());
        Self { command }
    }

    /// Adds arguments that are separated by spaces.
    pub(crate) fn words(mut self, words: &str) -> Self {
        self.command.args(words.split_whitespace());
        self
    }

    pub(crate) fn arg(mut self, argument: impl AsRef<OsStr>) -> Self {
        self.command.arg(argument);
        self
    }

    pub(crate) fn env(mut self, name: &str, value: impl AsRef<OsStr>) -> Self {
        self.command.env(name, value);
        self
    }

    pub(crate) fn without_env(mut self, name: &str) -> Self {
        self.command.env_remove(name);
        self
    }

    pub(crate) fn folder(mut self, folder: &Path) -> Self {
        self.command.current_dir(folder);
        self
    }

    /// Returns the command as it would be typed.
    fn line(&self) -> String {
        let program = Path::new(self.command.get_program());
        let name = program.file_name().unwrap_or(program.as_os_str()).to_string_lossy();
        let words = self.command.get_args().map(OsStr::to_string_lossy);
        let words: Vec<_> = std::iter::once(name).chain(words).collect();
        words.join(" ")
    }

    /// Runs the command; a status other than 0 is an error.
    pub(crate) fn run(mut self) -> Result<(), String> {
        let line = self.line();
        println!("$ {line}");
        let status = self.command.status().map_err(|error| format!("{line}: {error}"))?;
        if status.success() { Ok(()) } else { Err(format!("{line}: {status}")) }
    }

    /// Runs the command and returns what it writes to standard output.
    pub(crate) fn output(mut self) -> Result<String, String> {
        let line = self.line();
        self.command.stderr(Stdio::inherit());
        let output = self.command.output().map_err(|error| format!("{line}: {error}"))?;
        if !output.status.success() {
            return Err(format!("{line}: {}", output.status));
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Runs the command, shows what it writes to standard output as it comes, and returns it with
    /// whether the command succeeded.
    pub(crate) fn shown(mut self) -> Result<(String, bool), String> {
        let line = self.line();
        println!("$ {line}");
        let fault = |error: std::io::Error| format!("{line}: {error}");
        let mut child = self.command.stdout(Stdio::piped()).spawn().map_err(fault)?;
        let mut all = String::new();
        for shown in child.stdout.take().into_iter().flat_map(|out| BufReader::new(out).lines()) {
            let shown = shown.map_err(fault)?;
            println!("{shown}");
            all.push_str(&shown);
            all.push('\n');
        }
        Ok((all, child.wait().map_err(fault)?.success()))
    }

    /// Runs the command and returns `None` if it succeeds, or all that it wrote.
    ///
    /// For a program that is expected to fail: in the output of a job, its words would be taken for
    /// a failure of the job.
    pub(crate) fn failure(mut self) -> Result<Option<String>, String> {
        let line = self.line();
        println!("$ {line}");
        let output = self.command.output().map_err(|error| format!("{line}: {error}"))?;
        let written = [output.stdout, output.stderr].concat();
        Ok((!output.status.success()).then(|| String::from_utf8_lossy(&written).into_owned()))
    }
}

/// Returns the programs in Cargo's messages.
pub(crate) fn executables(messages: &str) -> Vec<String> {
    let message = |line: &str| serde_json::from_str::<serde_json::Value>(line).ok();
    let program = |message: serde_json::Value| Some(message["executable"].as_str()?.to_owned());
    messages.lines().filter_map(message).filter_map(program).collect()
}

/// Returns the CPU seconds of the processes that this one has waited for, and of theirs.
pub(crate) fn children_cpu_seconds() -> Result<f64, String> {
    const TICKS_EACH_SECOND: f64 = 100.0;
    let stat = fs::read_to_string("/proc/self/stat").map_err(|error| error.to_string())?;
    // After the name, which is in parentheses, cutime and cstime are the 14th and 15th field.
    let fields = stat.rsplit(')').next().unwrap_or_default().split_whitespace();
    let ticks = fields.skip(13).take(2).map(str::parse::<f64>);
    let ticks = ticks.sum::<Result<f64, _>>().map_err(|error| format!("/proc: {error}"))?;
    Ok(ticks / TICKS_EACH_SECOND)
}
