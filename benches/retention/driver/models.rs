//! A model that comes and goes: what its unloading leaves, once and after two hundred times.
//!
//! Invariant: each way has the same model and the same neighbours.

use lowtide::heap::HeapProfile;
use retention::BoxError;

use crate::contestants::{self, Contestant, GLIBC};
use crate::figures::Figures;
use crate::process::{Running, field};

/// Size of the model that is unloaded once.
const MODEL_MIB: u64 = 300;
/// Size of the one that comes and goes.
const CYCLE_MIB: u64 = 24;
const CYCLES: u64 = 200;

/// Loads and unloads a model in each way.
pub(crate) fn unload(figures: &mut Figures, rounds: usize) -> Result<(), BoxError> {
    for round in 1..=rounds {
        for name in ["shared", "shared_purge", "own_arena", "retired_arena", "glibc_trim"] {
            let running = Running::start(&way(name), &["unload", &MODEL_MIB.to_string()])?;
            let said = running.expect("unload")?;
            running.end()?;
            let mib = |name| Ok::<f64, BoxError>(field(&said, name)? / 1_048_576.0);
            let (base, loaded, after) = (mib("base")?, mib("loaded")?, mib("after")?);
            let (over, again) = ((after - base) / base, (mib("again")? - after) / base);
            println!(
                "unload {round} of {rounds}: {name:<14}base {base:.1}, loaded {loaded:.1}, after \
                 {after:.1} MiB: {:+.2} % of the base; a second one: {:+.2} % more",
                over * 100.0,
                again * 100.0
            );
            figures.add(&format!("unload.{name}.base_mib"), base, "MiB");
            figures.add(&format!("unload.{name}.loaded_mib"), loaded, "MiB");
            figures.add(&format!("unload.{name}.over_base_ratio"), over, "ratio");
            figures.add(&format!("unload.{name}.second_over_base_ratio"), again, "ratio");
        }
    }
    Ok(())
}

/// Loads and unloads one two hundred times in an arena that is purged and kept, as resources of a
/// `Memory` have theirs, and then in one that is retired with it each time.
pub(crate) fn cycles(figures: &mut Figures) -> Result<(), BoxError> {
    for (name, after) in [("own_arena", ""), ("retired_arena", "_retired")] {
        let arguments = ["cycles", &CYCLE_MIB.to_string(), &CYCLES.to_string()];
        let running = Running::start(&way(name), &arguments)?;
        let said = running.expect("cycles")?;
        running.end()?;
        let of = |name| field(&said, name);
        let name = |end: &str| format!("cycles.{CYCLES}{after}.{end}");
        figures.add(&name("resident_slope_kib"), of("slope")? / 1024.0, "KiB");
        figures.add(&name("descriptor_growth"), of("descriptors")?, "descriptors");
        figures.add(&name("thread_growth"), of("threads")?, "threads");
        figures.add(&name("arena_growth"), of("arenas")?, "arenas");
        println!("cycles{after}:{said}");
    }
    Ok(())
}

fn way(name: &str) -> Contestant {
    let balanced = contestants::lowtide(HeapProfile::Balanced);
    if name == "glibc_trim" {
        return Contestant { program: GLIBC, way: name.into(), variable: None, ..balanced };
    }
    Contestant { way: format!("{}/{name}", balanced.way), ..balanced }
}
