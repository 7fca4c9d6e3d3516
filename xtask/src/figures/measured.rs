//! Figures of measured requests: what is attributed to them, what that costs, and how a service
//! fares that admits by it. Each is printed by a bench, some under another name.

use crate::run::cargo;

/// A bench, and the figures that it prints under names of its own.
struct Bench {
    arguments: &'static str,
    /// The figures of the subject that it measures, and their names there; the same if `None`.
    figures: &'static [(&'static str, Option<&'static str>)],
}

const BENCHES: &[Bench] = &[
    Bench {
        arguments: "bench --locked --bench requests",
        figures: &[
            ("measured.scope.instructions", None),
            ("measured.layer.ratio", None),
            ("measured.live_error_percent", None),
            ("measured.peak_error_percent", None),
            ("measured.learned_after_requests", None),
        ],
    },
    Bench {
        arguments: "bench --locked --bench render",
        figures: &[("measured.tick_us", Some("tick.median_us"))],
    },
    Bench {
        arguments: "bench --locked --bench controller -- --compare 0",
        figures: &[("measured.simulator.failed", Some("controller.failed"))],
    },
    Bench {
        arguments: "bench --locked --bench faults -- runaway",
        figures: &[("measured.runaway.ended", None)],
    },
    Bench {
        arguments: "bench --locked --manifest-path benches/retention/Cargo.toml \
                    --no-default-features -- --parts burst --only low_memory,low_memory_apart",
        figures: &[("measured.rest.resident_per_live", None)],
    },
    Bench {
        arguments: "bench --locked --bench overload -- --measured",
        figures: &[("measured.1x.shed_ratio", None), ("measured.4x.goodput_ratio", None)],
    },
    Bench {
        arguments: "bench --locked --bench overload -- --survive 60 --seed 1",
        figures: &[("measured.oom_kills", Some("overload.survive.oom_kills"))],
    },
];

/// Measures these figures, or all, and prints them.
pub(super) fn measure(only: &[String]) -> Result<(), String> {
    let names = || BENCHES.iter().flat_map(|bench| bench.figures).map(|(name, _)| *name);
    if let Some(unknown) = only.iter().find(|one| names().all(|name| name != one.as_str())) {
        let names: Vec<_> = names().collect();
        return Err(format!("unknown figure {unknown:?}: expected one of {}", names.join(", ")));
    }
    let mut failed = Vec::new();
    for Bench { arguments, figures } in BENCHES {
        let is_chosen = |name: &str| only.is_empty() || only.iter().any(|one| one == name);
        if !figures.iter().any(|(name, _)| is_chosen(name)) {
            continue;
        }
        let (text, is_held) = cargo(arguments).shown()?;
        if !is_held {
            failed.push(format!("{arguments} missed a goal"));
        }
        for (name, theirs) in *figures {
            let begin = format!("figure {} ", theirs.unwrap_or(name));
            match text.lines().find_map(|line| line.strip_prefix(&*begin)) {
                Some(value) if theirs.is_some() => println!("figure {name} {value}"),
                Some(_) => {}
                None => failed.push(format!("{name} was not printed")),
            }
        }
    }
    if failed.is_empty() { Ok(()) } else { Err(failed.join("; ")) }
}
