//! Jobs that take long: `ci` runs a sample, `soak` the full length.

use super::{Length, Outcome, envoy, skip};
use crate::figures::{counted, field};
use crate::mutants;
use crate::run::{Run, cargo, has};

fn bench(name: &str, words: &str) -> Run {
    cargo(&format!("bench --locked --bench {name} -- {words}"))
}

/// Random schedules over the simulation: twenty thousand, or ten times as many.
pub(super) fn schedules(length: Length) -> Outcome {
    let count = if length == Length::Full { 200_000 } else { 20_000 };
    let ran = bench("schedules", &format!("--count {count}")).run();
    Ok(ran.map_err(|error| format!("{error}: the seed is printed above"))?)
}

/// Faults in the arena's source, each of which a test must find.
pub(super) fn mutants(length: Length) -> Outcome {
    Ok(mutants::run_some(length == Length::Full)?)
}

/// Scenarios by seed, and some days.
pub(super) fn controller(length: Length) -> Outcome {
    let words = match length {
        Length::Full => "--seeds 3000 --days 90",
        Length::Sample => "--seeds 100 --days 1",
    };
    let ran = bench("controller", words).run();
    Ok(ran.map_err(|error| format!("{error}: the seed is printed above"))?)
}

/// Without the peers that are C and C++. A package of its own, which no other job reaches.
pub(super) fn retention(length: Length) -> Outcome {
    let manifest = "--manifest-path benches/retention/Cargo.toml";
    cargo("fmt --check").words(manifest).run()?;
    let in_target = |run: Run| run.env("CARGO_TARGET_DIR", "target");
    let lint = cargo("clippy --locked --no-default-features --all-targets").words(manifest);
    in_target(lint.words("-- -D warnings")).run()?;
    let run = cargo("bench --locked --no-default-features").words(manifest);
    let run = match length {
        Length::Full => run,
        Length::Sample => run.words("--profile dev -- --smoke"),
    };
    Ok(in_target(run).run()?)
}

/// lowtide survives where a service without admission dies.
pub(super) fn overload(length: Length) -> Outcome {
    let ci = bench("overload", "--ci").status()?;
    let status = match (ci, length) {
        (0, Length::Full) => bench("overload", "--survive 20").status()?,
        (status, _) => status,
    };
    match status {
        0 => Ok(()),
        2 => skip("no memory cgroup can be made here"),
        status => Err(format!("the overload bench: status {status}").into()),
    }
}

/// Envoy accepts the configuration of the example, and by load reports leaves less than half as
/// many requests unserved as with round robin. A gRPC client reads the reports too.
pub(super) fn fleet(_: Length) -> Outcome {
    let envoy = envoy()?;
    let validate = Run::new(&envoy).words("--mode validate --log-level warn");
    validate.words("-c deploy/envoy/envoy.yaml").run()?;
    bench("fleet", "--ci --envoy").arg(envoy).run()?;
    Ok(Run::new(".ci/grpc").run()?)
}

/// The cases from public reports, and what the benches `time` and `replay` count; in full, two
/// hours of load in their place.
pub(super) fn field(length: Length) -> Outcome {
    match length {
        Length::Full => Ok(bench("dashboards", "--soak 2h").run()?),
        Length::Sample => Ok(field::run(&[])?),
    }
}

/// Figures that do not depend on the machine's speed, against their goals and the documents.
pub(super) fn counted(_: Length) -> Outcome {
    counted_figures(false)
}

/// The same with those that take long.
pub(super) fn counted_full(_: Length) -> Outcome {
    counted_figures(true)
}

fn counted_figures(is_full: bool) -> Outcome {
    match ["valgrind", "promtool"].into_iter().find(|tool| !has(tool)) {
        Some(tool) => skip(format!("no {tool}")),
        None => Ok(counted::run(is_full, false)?),
    }
}

/// Reproduces each known fault.
pub(super) fn faults(length: Length) -> Outcome {
    let words = if length == Length::Full { "" } else { "--ci" };
    Ok(bench("faults", words).run()?)
}

/// Tests with a real ONNX Runtime, and the memory that it keeps; in full, also the figures, without
/// lowtide and with other allocators.
pub(super) fn engines(length: Length) -> Outcome {
    for (package, features) in [("benches/engines", "--features zipf"), ("examples/onnx", "")] {
        let manifest = format!("--manifest-path {package}/Cargo.toml");
        cargo("fmt --check").words(&manifest).run()?;
        let lint = cargo("clippy --locked --all-targets").words(&manifest).words(features);
        lint.words("-- -D warnings").env("CARGO_TARGET_DIR", "target").run()?;
    }
    let script = Run::new(".ci/engines");
    let script = if length == Length::Full { script.words("--figures --peers") } else { script };
    Ok(script.run()?)
}

/// Tests the embedding server with candle; in full, also with a real model, next to other
/// allocators, and on CUDA over the fake driver.
pub(super) fn candle(length: Length) -> Outcome {
    let script = || Run::new(".ci/candle");
    script().run()?;
    if length == Length::Full {
        script().arg("--cuda").run()?;
        script().arg("--measure").run()?;
    }
    Ok(())
}
