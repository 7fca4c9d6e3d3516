//! Two programs that run the same bursts in turns: the ratio of their CPU times with its 95 %
//! interval, and the times of requests.
//!
//!     engines-pairs PAIRS NAME LIBRARY MODEL PROGRAM REFERENCE
//!
//! Each program loads the model and is warm before the first pair. The order within a pair
//! alternates, so that a change of the machine's speed affects both alike.

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitCode, Stdio};

use engines::{BoxError, percentile};

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
    thousand_faults: Vec<f64>,
    milliseconds: Vec<f64>,
}

impl Program {
    fn start(program: &str, library: &str, model: &str) -> Result<Self, BoxError> {
        let mut command = Command::new(program);
        let command = command.args([library, model, "serve"]).env("ENGINES_SPIN_OFF", "1");
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let commands = child.stdin.take().ok_or("no input")?;
        let answers = BufReader::new(child.stdout.take().ok_or("no output")?);
        let (cpu_seconds, thousand_faults, milliseconds) = Default::default();
        Ok(Self { child, commands, answers, cpu_seconds, thousand_faults, milliseconds })
    }

    fn burst(&mut self, seed: u64, counts: bool) -> Result<(), BoxError> {
        writeln!(self.commands, "{seed}")?;
        self.commands.flush()?;
        let mut line = String::new();
        self.answers.read_line(&mut line)?;
        let mut numbers = line.split_whitespace().map(str::parse::<f64>);
        let mut next = || -> Result<f64, BoxError> { Ok(numbers.next().ok_or("too short")??) };
        let (cpu, faults) = (next()?, next()?);
        if counts {
            self.cpu_seconds.push(cpu);
            self.thousand_faults.push(faults / 1e3);
            for milliseconds in numbers {
                self.milliseconds.push(milliseconds?);
            }
        }
        Ok(())
    }

    fn end(mut self) -> Result<Ended, BoxError> {
        drop(self.commands);
        self.child.wait()?;
        self.milliseconds.sort_by(f64::total_cmp);
        self.thousand_faults.sort_by(f64::total_cmp);
        Ok(Ended {
            thousand_faults: percentile(&self.thousand_faults, 0.5),
            p50: percentile(&self.milliseconds, 0.5),
            p99: percentile(&self.milliseconds, 0.99),
            cpu_seconds: self.cpu_seconds,
        })
    }
}

struct Ended {
    cpu_seconds: Vec<f64>,
    thousand_faults: f64,
    p50: f64,
    p99: f64,
}

/// The mean of the logarithms of the ratios, and the half width of its interval.
fn mean_and_half_width(logarithms: &[f64]) -> (f64, f64) {
    let count = u32::try_from(logarithms.len()).map_or(f64::NAN, f64::from);
    let mean = logarithms.iter().sum::<f64>() / count;
    let squares: f64 = logarithms.iter().map(|one| (one - mean).powi(2)).sum();
    (mean, QUANTILE * (squares / (count - 1.0) / count).sqrt())
}

fn main() -> Result<ExitCode, BoxError> {
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
    let (first, second) = (first.end()?, second.end()?);
    let of_pairs = first.cpu_seconds.iter().zip(&second.cpu_seconds);
    let logarithms: Vec<_> = of_pairs.map(|(one, other)| (one / other).ln()).collect();
    let (mean, half) = mean_and_half_width(&logarithms);
    println!("figure {name}.cpu_ratio {:.4} times", mean.exp());
    println!("figure {name}.cpu_ratio_low {:.4} times", (mean - half).exp());
    println!("figure {name}.cpu_ratio_high {:.4} times", (mean + half).exp());
    for (end, of) in [("", &first), (".reference", &second)] {
        println!("figure {name}{end}.p50_ms {:.2} ms", of.p50);
        println!("figure {name}{end}.p99_ms {:.2} ms", of.p99);
        println!("figure {name}{end}.warm_thousand_faults {:.2} thousands", of.thousand_faults);
    }
    println!("pairs: {}, of {} requests each", logarithms.len(), 32);
    Ok(ExitCode::SUCCESS)
}
