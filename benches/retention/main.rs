//! Retention: what allocators keep after a burst, and what giving it back costs.
//!
//! Each allocator is a process of its own, started here and watched from outside. The runs take
//! turns; a ratio is taken within a round, and the median of the rounds is told.
//!
//! Exit codes: 0 every goal held; 1 one was missed, or something could not be measured.
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a program that shows something")]

#[path = "../common/callgrind.rs"]
#[allow(dead_code, reason = "other benches count steps of themselves")]
mod callgrind;
#[path = "../common/figures.rs"]
#[allow(dead_code, reason = "other benches use more of it")]
mod figures;
#[path = "../common/process.rs"]
#[allow(dead_code, reason = "other benches use more of it")]
mod process;
mod watch;

use std::process::ExitCode;

use clap::Parser;
use lowtide::BoxError;
use lowtide::heap::HeapProfile;

use crate::callgrind::callgrind;
use crate::figures::Figures;
use crate::watch::{Plan, rounds};

/// The parts of the bench, in the order in which they run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Part {
    /// Instructions of a pair of calls, counted by callgrind: of a loop three times as long less one,
/// less the same of an empty loop, so that what starting the process takes is in no figure.
fn pair(figures: &mut Figures) {
    let collected = |of: &str, times: u32| {
        let mut command = callgrind(PAIR);
        // Background threads would be counted as well.
        command.args([of, &times.to_string()]).env(CONF, "narenas:4");
        callgrind::instructions(&mut command)
    };
    let of = |of| Ok((collected(of, 3 * PAIRS)? - collected(of, PAIRS)?) / f64::from(2 * PAIRS));
    let all = ["heap", "plain", "nothing"].into_iter().map(of).collect::<Result<Vec<_>, String>>();
    match all.as_deref() {
        Ok([heap, plain, nothing]) => {
            figures.add("heap.pair.instructions", heap - nothing, "instructions");
            figures.add("heap.pair.plain_instructions", plain - nothing, "instructions");
            figures.at_most("heap.pair.more_instructions", heap - plain, "instructions", 4.0);
        }
        failed => println!("skipped: {failed:?}"),
    }
}
