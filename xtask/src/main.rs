//! The commands of this repository: checks over text, the inner loop, planted faults, and figures.
//! `.ci/run` has the jobs of the continuous integration.
//!
//! Each command is a module. A command prints what it finds, and ends with status 1 if it failed.

mod code;
mod figures;
mod mutants;
mod quick;
mod run;
mod text;
mod tree;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// The commands of this repository.
#[derive(Parser)]
#[command(name = "cargo xtask")]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Checks source, documents, dashboards and deployment files, without building the crate.
    Text {
        /// Writes the generated documents first.
        #[arg(long)]
        write: bool,
    },
    /// Checks what changed: format, texts, clippy and tests. Under a minute after most edits.
    Quick {
        /// The branch that this one left.
        #[arg(long, default_value = "main")]
        base: String,
    },
    /// Puts faults into copies of the arena's source, each of which a test must find.
    Mutants(mutants::Arguments),
    /// Measures a subject, and prints lines `figure NAME VALUE UNIT`.
    Figures(figures::Arguments),
}

fn main() -> ExitCode {
    let result = match Arguments::parse().command {
        Command::Text { write } => text::run(write),
        Command::Quick { base } => quick::run(&base),
        Command::Mutants(arguments) => mutants::run(&arguments),
        Command::Figures(arguments) => figures::run(&arguments),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("failed: {error}");
            ExitCode::FAILURE
        }
    }
}
