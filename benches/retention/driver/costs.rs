//! The costs of single acts: instructions of a pair, a scrape, a purge, scopes of an arena.
//!
//! Instructions are counted by callgrind: of a loop three times as long less one, less the same of
//! an empty loop. Invariant: what starting the process takes is in no figure.

use lowtide::heap::HeapProfile;
use retention::{BoxError, count};

use crate::callgrind::{self, callgrind};
use crate::contestants::{self, CONF, COSTS, Contestant};
use crate::figures::Figures;
use crate::process::{Running, field};

const PAIRS: u64 = 50_000;

/// All of it.
pub(crate) fn measure(figures: &mut Figures, smoke: bool) -> Result<(), BoxError> {
    let balanced = contestants::lowtide(HeapProfile::Balanced);
    let costs = Contestant { program: COSTS, way: String::new(), ..balanced };
    // Nothing decays meanwhile: the purge finds all of it.
    let kept = Some((CONF, "dirty_decay_ms:-1,muzzy_decay_ms:0".to_owned()));
    let keeps = Contestant { variable: kept, ..costs.clone() };
    let said = once(&costs, "scrape")?;
    figures.add("heap.scrape.us", field(&said, "us")?, "us");
    figures.add("heap.scrape.allocations", field(&said, "allocations")?, "allocations");
    let said = once(&keeps, "purge")?;
    figures.add("heap.purge.ms_per_mib", field(&said, "ms_per_mib")?, "ms");
    let said = once(&costs, "scopes")?;
    for name in ["ordinary", "scope", "uncached"] {
        figures.add(format!("heap.entry.{name}_ns"), field(&said, name)?, "ns");
    }
    figures.add("heap.scope_uncached.empty_ns", field(&said, "empty")?, "ns");
    if smoke {
        return Ok(());
    }
    match (pair(&costs, "heap"), pair(&costs, "plain"), pair(&costs, "nothing")) {
        (Ok(heap), Ok(plain), Ok(nothing)) => {
            figures.add("heap.pair.instructions", heap - nothing, "instructions");
            figures.add("heap.pair.plain_instructions", plain - nothing, "instructions");
            figures.add("heap.pair.more_instructions", heap - plain, "instructions");
        }
        (Err(error), ..) | (_, Err(error), _) | (.., Err(error)) => println!("skipped: {error}"),
    }
    Ok(())
}

fn once(who: &Contestant, act: &str) -> Result<String, BoxError> {
    let running = Running::start(who, &[act])?;
    let said = running.expect(act)?;
    running.end()?;
    println!("{act}:{said}");
    Ok(said)
}

fn pair(who: &Contestant, of: &str) -> Result<f64, String> {
    let (once, thrice) = (collected(who, of, PAIRS)?, collected(who, of, 3 * PAIRS)?);
    Ok((thrice - once) / count(2 * PAIRS))
}

fn collected(who: &Contestant, of: &str, times: u64) -> Result<f64, String> {
    let mut command = callgrind(who.program);
    // Background threads would be counted as well.
    command.args(["pair", of, &times.to_string()]).env(CONF, "narenas:4");
    callgrind::instructions(&mut command)
}
