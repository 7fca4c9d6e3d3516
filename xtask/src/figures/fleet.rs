//! Figures of a fleet: what load balancers and autoscalers make of what a service reports.

use super::{Figure, Measure, at_least, figure, printed};
use crate::ci::envoy;
use crate::run::{Run, cargo};

pub(super) const FLEET: &[Measure] = &[
    Measure { names: &["orca.goodput_ratio", "orca.shed_ratio"], run: measure_balancer },
    Measure { names: &["report_ns", "report.allocations"], run: measure_reports },
    Measure { names: &["grpc.read"], run: measure_grpc },
    Measure {
        names: &["fit.seconds", "fit.kills", "fit.refused_although_possible"],
        run: measure_fit,
    },
    Measure { names: &["saturation.in_range"], run: measure_saturation },
];

/// Runs a bench, and returns what it printed, also if it missed a goal: the figures tell.
fn bench(run: Run) -> Result<String, String> {
    Ok(run.shown()?.0)
}

/// Three services behind Envoy.
fn measure_balancer() -> Result<Vec<Figure>, String> {
    let envoy = envoy().map_err(|stop| stop.to_string())?;
    let (text, has_survived) =
        cargo("bench --locked --bench fleet -- --envoy").arg(envoy).shown()?;
    if !has_survived {
        return Err("a service was killed, or a run failed".to_owned());
    }
    let ratio = |name| printed(&text, &format!("fleet.orca.{name}"));
    Ok(vec![
        at_least("orca.goodput_ratio", ratio("goodput_ratio")?, "ratio", 1.3),
        figure("orca.shed_ratio", ratio("shed_ratio")?, "ratio", Some(0.25)),
    ])
}

/// What a report costs a response.
fn measure_reports() -> Result<Vec<Figure>, String> {
    let text = bench(cargo("bench --locked --bench reports"))?;
    Ok(vec![
        figure("report_ns", printed(&text, "fleet.report_ns")?, "ns", Some(200.0)),
        figure(
            "report.allocations",
            printed(&text, "fleet.report.allocations")?,
            "allocations",
            Some(0.0),
        ),
    ])
}

/// The reports as grpcio reads them.
fn measure_grpc() -> Result<Vec<Figure>, String> {
    let is_read = printed(&bench(Run::new(".ci/grpc"))?, "fleet.grpc.read")?;
    Ok(vec![at_least("grpc.read", is_read, "yes", 1.0)])
}

/// A service in a cgroup that is told to fit in half of its limit, and random schedules.
fn measure_fit() -> Result<Vec<Figure>, String> {
    let text = bench(cargo("bench --locked --bench fit"))?;
    let value = |name: &str| printed(&text, &format!("fleet.{name}"));
    Ok(vec![
        figure("fit.seconds", value("fit.seconds")?, "s", Some(5.0)),
        figure("fit.kills", value("fit.kills")?, "kills", Some(0.0)),
        figure(
            "fit.refused_although_possible",
            value("fit.refused_although_possible")?,
            "schedules",
            Some(0.0),
        ),
    ])
}

/// The saturation of a service that is idle, busy, full, waited for and leaking.
fn measure_saturation() -> Result<Vec<Figure>, String> {
    let test = "test --locked -p lowtide --test memory memory_saturation -- --nocapture";
    let is_in_range = printed(&bench(cargo(test))?, "fleet.saturation.in_range")?;
    Ok(vec![at_least("saturation.in_range", is_in_range, "yes", 1.0)])
}
