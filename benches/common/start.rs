//! How benches start.

use std::process::{Command, ExitCode};

use clap::Parser;
use lowtide::BoxError;

/// Runs a bench with its command line. Exit codes: 0 if it returns `true`; 1 if it returns `false`
/// or an error.
///
/// `cargo test --all-targets` starts benches too, without `--bench` and with arguments of its own:
/// then nothing runs.
#[expect(clippy::print_stdout, clippy::print_stderr, reason = "a program that prints figures")]
pub fn main<C: Parser>(run: impl FnOnce(C) -> Result<bool, BoxError>) -> ExitCode {
    let (bench, arguments): (Vec<_>, Vec<_>) = std::env::args().partition(|word| word == "--bench");
    if bench.is_empty() {
        println!("a bench, not a test: run it with `cargo bench`");
        return ExitCode::SUCCESS;
    }
    // Status 2 says that something cannot be tried here.
    let arguments = match C::try_parse_from(arguments) {
        Ok(arguments) => arguments,
        Err(error) => {
            let _ = error.print();
            return if error.use_stderr() { ExitCode::FAILURE } else { ExitCode::SUCCESS };
        }
    };
    match run(arguments) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Returns a command that runs this program again, with these arguments.
pub fn own(arguments: &[&str]) -> Result<Command, BoxError> {
    let mut command = Command::new(std::env::current_exe()?);
    command.arg("--bench").args(arguments);
    Ok(command)
}
