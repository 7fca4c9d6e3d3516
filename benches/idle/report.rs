//! The cost of idling, against its goals.
//!
//! Each figure is the median over the processes of a kind, or the difference of two medians.
//! Invariant: the CPU time of a process is the sum over its threads.

use std::collections::BTreeMap;

use crate::child::Kind;
use crate::common::figures::{Figures, count, median};
use crate::look::Look;

/// Goals, in the units of their figures.
const CPU_MAX_PERCENT: f64 = 0.05;
const THREADS: f64 = 2.0;
const RESIDENT_MAX_MIB: f64 = 2.0;
const START_MAX_MS: f64 = 10.0;

/// The prefix of our threads' names.
const OURS: &str = "lowtide-";

/// The cost of a process while it was watched.
#[derive(Clone, Debug)]
pub(crate) struct Standing {
    kind: Kind,
    /// By name: how many, percent of a core, times a second on a core.
    threads: BTreeMap<String, (u64, f64, f64)>,
    resident_mib: f64,
    private_mib: f64,
}

impl Standing {
    /// Returns the differences between two looks; memory as of the second.
    pub(crate) fn between(kind: Kind, before: &Look, after: Look, seconds: f64) -> Self {
        let mut threads: BTreeMap<String, (u64, f64, f64)> = BTreeMap::new();
        for (id, thread) in after.threads {
            let (nanos, turns) =
                before.threads.get(&id).map_or((0, 0), |then| (then.nanos, then.turns));
            let sum = threads.entry(thread.name).or_default();
            sum.0 += 1;
            sum.1 += count(thread.nanos - nanos) / 1e9 / seconds * 100.0;
            sum.2 += count(thread.turns - turns) / seconds;
        }
        let mib = |size: lowtide::ByteSize| size.as_f64() / 1_048_576.0;
        Self { kind, threads, resident_mib: mib(after.resident), private_mib: mib(after.private) }
    }

    fn cpu_percent(&self) -> f64 {
        self.threads.values().map(|(_, percent, _)| percent).sum()
    }

    fn ours(&self) -> u64 {
        self.threads.iter().filter(|(name, _)| name.starts_with(OURS)).map(|(_, sum)| sum.0).sum()
    }
}

/// Prints everything; whether every goal held, of what was counted alone if it says so.
pub(crate) fn print(standings: &[Standing], starts: &[(Kind, Vec<f64>)], counted: bool) -> bool {
    let of = |kind: Kind, figure: &dyn Fn(&Standing) -> f64| {
        let each = standings.iter().filter(|one| one.kind == kind).map(figure);
        median(&each.collect::<Vec<_>>())
    };
    for kind in Kind::ALL {
        println!("{}", kind.title());
        threads(standings, kind);
    }
    let (mut all, mut held) = (Figures::default(), true);
    for (kind, times) in starts {
        let kind = *kind;
        let over_bare =
            |figure: &dyn Fn(&Standing) -> f64| of(kind, figure) - of(Kind::Bare, figure);
        let slowest = times.iter().copied().fold(0.0, f64::max);
        let ours = of(kind, &|one| count(one.ours()));
        let name = |what: &str| format!("idle_{}_{what}", kind.figure());
        all.add(name("threads"), ours, "threads");
        held &= (ours - THREADS).abs() < 0.5;
        all.add(name("private"), over_bare(&|one| one.private_mib), "MiB");
        all.add(name("start_p50"), median(times), "ms");
        for (what, value, unit, most) in [
            ("cpu", over_bare(&Standing::cpu_percent), "%", CPU_MAX_PERCENT),
            ("resident", over_bare(&|one| one.resident_mib), "MiB", RESIDENT_MAX_MIB),
            ("start_max", slowest, "ms", START_MAX_MS),
        ] {
            all.add(name(what), value, unit);
            if !counted {
                all.set_goals(&[(&name(what), most)]);
            }
        }
    }
    if !held {
        println!("MISSED  threads: expected {THREADS}");
    }
    all.print() && held
}

/// A line for each name of a thread in processes of this kind.
fn threads(standings: &[Standing], kind: Kind) {
    let all: Vec<_> = standings.iter().filter(|one| one.kind == kind).collect();
    let mut names: Vec<&String> = all.iter().flat_map(|one| one.threads.keys()).collect();
    names.sort();
    names.dedup();
    for name in names {
        let each: Vec<_> =
            all.iter().map(|one| one.threads.get(name).copied().unwrap_or_default()).collect();
        println!(
            "  {name:<18}{:>9.4} % of a core  {:>6.1} turns/s  {} threads",
            median(&each.iter().map(|sum| sum.1).collect::<Vec<_>>()),
            median(&each.iter().map(|sum| sum.2).collect::<Vec<_>>()),
            median(&each.iter().map(|sum| count(sum.0)).collect::<Vec<_>>())
        );
    }
}
