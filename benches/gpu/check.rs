//! The program that checks a GPU, over the fake library: the time until its torture finds a missing
//! wait between lanes, and whether killed parts leave the results of the others.

use lowtide::BoxError;
use lowtide_fake_cuda::Fake;
use lowtide_gpu::clock::{Clock as _, SystemClock};

use crate::common::figures::{Figures, count};

#[allow(dead_code, reason = "tests use more of it")]
#[path = "../../testing/fake-cuda/tests/cuda/gpu_check/support.rs"]
mod support;

pub(crate) use support::{child, program};
use support::{random, run, run_apart};

/// Measures the seconds until a run finds that every tenth wait of a stream for an event is
/// missing: the most of ten seeds.
pub(crate) fn torture(figures: &mut Figures) -> Result<(), BoxError> {
    let mut worst = 0.0_f64;
    for seed in 1..=10 {
        let fake = Fake::start(random(seed));
        fake.drop_waits(10);
        let (run_seed, clock) = (format!("--seed={seed}"), SystemClock::new());
        let start = clock.now();
        let more = ["--only=torture", "--torture-seconds=60", "--torture-steps=0", &run_seed];
        let (_, text, found) = run(&more);
        worst = worst.max((clock.now() - start).as_secs_f64());
        if found.get("gpu.torture.wrong_words").is_none_or(|words| *words == 0.0) {
            return Err(format!("seed {seed}: not found; {text}").into());
        }
    }
    figures.at_most("gpu.torture.found_s", worst, "s", 5.0);
    Ok(())
}

/// Measures the share of the other parts that ran and left a figure, while four ended badly.
pub(crate) fn killed(figures: &mut Figures) -> Result<(), BoxError> {
    let (_, _, found) = run_apart(&[
        "--only=pair,lanes,decay,remap,compact,torture",
        "--plant=abort=pair,hang=lanes,panic=decay,lose=remap",
        "--deadline=lanes=5s",
        "--torture-steps=200",
    ]);
    let others = [
        ("device", "gpu.memory.total_bytes"),
        ("compact", "gpu.compact.copy_rate_ratio"),
        ("torture", "gpu.torture.wrong_words"),
    ];
    let ran = |part: &str| found.parts.get(part) == Some(&program::report::Ended::Ran);
    let kept = others.iter().filter(|(part, figure)| ran(part) && found.has(figure)).count();
    let kept = count(kept as u64) / count(others.len() as u64);
    let bad = found.parts.keys().filter(|part| !ran(part)).count();
    if bad != 4 {
        return Err(format!("4 parts should have ended badly: {:?}", found.parts).into());
    }
    figures.at_least("gpu.killed_part.results_kept", kept, "of the others' parts", 1.0);
    Ok(())
}
