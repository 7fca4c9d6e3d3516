//! Two programs that run the same bursts in turns: the ratio of their CPU times with its 95 %
//! interval, and the times of requests.
//!
//!     engines-pairs PAIRS NAME LIBRARY MODEL PROGRAM REFERENCE
//!
//! Each program loads the model and is warm before the first pair. The order within a pair
//! alternates, so that a change of the machine's speed affects both alike.

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use engines::BoxError;
use engines::figures::{count, median, quantile};

/// Pairs that are not counted.
const WARM_UP: u64 = 3;
/// Of the normal distribution, for a two-sided interval of 95 %.
const QUANTILE: f64 = 1.96;

/// A program that obeys.
struct Program {
    child: Child,
    commands: ChildStdin,
    answers: BufReader<ChildStdout>,
    /// Of all bursts that count.
    cpu_seconds: Vec<f64>,
    milliseconds: Vec<f64>,
}

impl Program {
    fn start(program: &str, library: &str, model: &str) -> Result<Self, BoxError> {
        let mut command = Command::new(program);
        let command = command.args([library, model, "serve"]).env("ENGINES_SPIN_OFF", "1");
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let commands = child.stdin.take().ok_or("no input")?;
        let answers = BufReader::new(child.stdout.take().ok_or("no output")?);
        let (cpu_seconds, milliseconds) = Default::default();
        Ok(Self { child, commands, answers, cpu_seconds, milliseconds })
    }

    fn burst(&mut self, seed: u64, counts: bool) -> Result<(), BoxError> {
        writeln!(self.commands, "{seed}")?;
        self.commands.flush()?;
        let mut line = String::new();
        self.answers.read_line(&mut line)?;
        let numbers = line.split_whitespace().map(str::parse).collect::<Result<Vec<f64>, _>>()?;
        let (cpu, milliseconds) = numbers.split_first().ok_or("an empty answer")?;
        if counts {
            self.cpu_seconds.push(*cpu);
            self.milliseconds.extend(milliseconds);
        }
        Ok(())
    }

    /// Ends it, and prints the figures of its requests.
    fn end(mut self, name: &str) -> Result<Vec<f64>, BoxError> {
        drop(self.commands);
        self.child.wait()?;
        println!("figure {name}.p50_ms {:.2} ms", median(&self.milliseconds));
        println!("figure {name}.p99_ms {:.2} ms", quantile(&self.milliseconds, 0.99));
        Ok(self.cpu_seconds)
    }
}

/// The mean of the logarithms of the ratios, and the half width of its interval.
fn mean_and_half_width(logarithms: &[f64]) -> (f64, f64) {
    let count = count(logarithms.len() as u64);
    let mean = logarithms.iter().sum::<f64>() / count;
    let squares: f64 = logarithms.iter().map(|one| (one - mean).powi(2)).sum();
    (mean, QUANTILE * (squares / (count - 1.0) / count).sqrt())
}

fn main() -> Result<(), BoxError> {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    let [pairs, name, library, model, program, reference] = &*arguments else {
        return Err("expected PAIRS NAME LIBRARY MODEL PROGRAM REFERENCE".into());
    };
    let mut first = Program::start(program, library, model)?;
    let mut second = Program::start(reference, library, model)?;
    for seed in 0..pairs.parse::<u64>()? + WARM_UP {
        let counts = seed >= WARM_UP;
        let mut both = [&mut first, &mut second];
        if seed % 2 == 1 {
            both.reverse();
        }
        both.into_iter().try_for_each(|program| program.burst(seed, counts))?;
    }
    let (first, second) = (first.end(name)?, second.end(&format!("{name}.reference"))?);
    let logarithms: Vec<_> =
        first.iter().zip(&second).map(|(one, other)| (one / other).ln()).collect();
    let (mean, half) = mean_and_half_width(&logarithms);
    for (end, log) in [("", mean), ("_low", mean - half), ("_high", mean + half)] {
        println!("figure {name}.cpu_ratio{end} {:.4} times", log.exp());
    }
    Ok(())
}
