//! The commands of this repository: checks over text, the inner loop, the jobs of the continuous
//! integration, and the figures.
//!
//! Each command is a module. A command prints what it finds, and ends with status 1 if it failed.

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
}

fn main() -> ExitCode {
    let result = match Arguments::parse().command {
        Command::Text { write } => text::run(write),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("failed: {error}");
            ExitCode::FAILURE
        }
    }
}
