//! Figures of a fleet: what load balancers and autoscalers make of what a service reports.

use super::{Figure, Measure, at_least, figure, printed};
use crate::ci::envoy;
use crate::run::{Run, cargo};

pub(super) const FLEET: &[Measure] = &[
    Measure { names: &["orca.goodput_ratio", "orca.shed_ratio"], run: measure_balancer },
    Measure { names: &["saturation.in_range"], run: measure_saturation },
];

/// Runs a bench, and returns what it printed.
fn bench(run: Run) -> Result<String, String> {
    match run.shown()? {
        (text, true) => Ok(text),
        (_, false) => Err("the bench failed".to_owned()),
    }
}

/// Three services behind Envoy.
fn measure_balancer() -> Result<Vec<Figure>, String> {
    let envoy = envoy().map_err(|stop| stop.to_string())?;
    let text = bench(cargo("bench --locked --bench fleet -- --envoy").arg(envoy))?;
    let ratio = |name| printed(&text, &format!("fleet.orca.{name}"));
    Ok(vec![
        at_least("orca.goodput_ratio", ratio("goodput_ratio")?, "ratio", 1.3),
        figure("orca.shed_ratio", ratio("shed_ratio")?, "ratio", Some(0.25)),
    ])
}

/// The saturation of a service that is idle, busy, full, waited for and leaking.
fn measure_saturation() -> Result<Vec<Figure>, String> {
    let test = "test --locked -p lowtide --test memory memory_saturation -- --nocapture";
    let is_in_range = printed(&bench(cargo(test))?, "fleet.saturation.in_range")?;
    Ok(vec![at_least("saturation.in_range", is_in_range, "yes", 1.0)])
}
