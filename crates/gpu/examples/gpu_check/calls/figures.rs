//! The figures of the calls, and the simulation's `DriverCosts` made of them.
//!
//! Invariant: a name has one value; a later one of the same name replaces it.

use lowtide_cuda_sim::{Call, Cost, DriverCosts};

use super::super::report::Report;
use super::driver::Fault;
use super::measure::quantile;
use super::tables::{ALL_HANDLES, SIZES_MIB};
use super::{float, whole};

/// The calls of the sweep: the name in figures, the name of the same call over a range of handles,
/// and the call in the simulation.
const SWEPT: [(&str, Option<&str>, Call); 8] = [
    ("reserve", None, Call::AddressReserve),
    ("create", None, Call::Create),
    ("map", None, Call::Map),
    ("set_access", Some("set_access_all"), Call::SetAccess),
    ("retain", None, Call::RetainHandle),
    ("unmap", Some("unmap_all"), Call::Unmap),
    ("release", None, Call::Release),
    ("address_free", None, Call::AddressFree),
];

/// The figures and the lines of this part, written to the report as they are found.
pub(crate) struct Figures<'a, 'r> {
    report: &'a mut Report<'r>,
}

impl<'a, 'r> Figures<'a, 'r> {
    pub(crate) fn new(report: &'a mut Report<'r>) -> Self {
        Self { report }
    }

    pub(crate) fn line(&mut self, text: &str) {
        self.report.line(text);
    }

    /// Notes that a table failed.
    pub(crate) fn table(&mut self, name: &str, done: Result<(), Fault>) {
        if let Err(fault) = done {
            self.report.fail("calls", format!("table {name}: {fault}"));
        }
    }

    pub(crate) fn set(&mut self, name: impl AsRef<str>, value: f64, unit: &'static str) {
        self.report.figure(&format!("gpu.calls.{}", name.as_ref()), value, unit);
    }

    fn value(&self, name: &str) -> Option<f64> {
        self.report.figures.get(&format!("gpu.calls.{name}")).map(|&(value, _)| value)
    }

    /// Microseconds of a call by the size of the handle in MiB.
    fn by_size(&self, call: &str) -> Vec<(f64, f64)> {
        let row = |mib: usize| Some((float(mib), self.value(&format!("{call}_{mib}mib_us"))?));
        SIZES_MIB.into_iter().filter_map(row).collect()
    }

    /// Writes the costs of the calls as figures, and as the source text of a `DriverCosts`. A call
    /// that was not measured keeps its guess.
    pub(crate) fn costs(&mut self) {
        let mut costs = DriverCosts::default();
        let mut measured = Vec::new();
        for (name, over_range, call) in SWEPT {
            let ranges = over_range.map(|name| self.by_size(name)).unwrap_or_default();
            if let Some(cost) = cost(&self.by_size(name), &ranges) {
                measured.push((call, cost));
            }
        }
        let per_mib = [
            ("pinned_alloc_us_per_mib", Call::HostAlloc),
            ("pinned_free_us_per_mib", Call::HostFree),
            ("to_device_us_per_mib", Call::Restore),
            ("to_host_us_per_mib", Call::Offload),
            ("within_us_per_mib", Call::CopyAsync),
        ];
        for (name, call) in per_mib {
            let mib_ns = self.value(name).map(nanoseconds);
            measured.extend(mib_ns.map(|mib_ns| (call, Cost { mib_ns, ..costs.of(call) })));
        }
        for (name, call) in [("pool_alloc_us", Call::AllocAsync), ("pool_free_us", Call::FreeAsync)]
        {
            let call_ns = self.value(name).map(nanoseconds);
            measured.extend(call_ns.map(|call_ns| (call, Cost { call_ns, ..Cost::default() })));
        }
        say!(self, "\ncosts for the simulation; calls that are not here keep their guesses");
        say!(self, "DriverCosts::default()");
        for (call, cost) in measured {
            costs = costs.with(call, cost);
            say!(self, "    .with(Call::{call:?}, {:?})", costs.of(call));
            for (unit, value) in
                [("call_ns", cost.call_ns), ("handle_ns", cost.handle_ns), ("mib_ns", cost.mib_ns)]
            {
                let value = float(usize::try_from(value).unwrap_or(usize::MAX));
                self.report.figure(&format!("gpu.costs.{}.{unit}", call.name()), value, "ns");
            }
        }
    }
}

fn nanoseconds(us: f64) -> u64 {
    whole((us * 1e3).round())
}

/// The cost of a call from its microseconds by size: for one handle, and for [`ALL_HANDLES`] of
/// them in one call. A line is fitted by the median of all slopes, so a row that was disturbed does
/// not move it. `None` if nothing was measured.
fn cost(one: &[(f64, f64)], all: &[(f64, f64)]) -> Option<Cost> {
    if one.is_empty() {
        return None;
    }
    let pairs =
        one.iter().enumerate().flat_map(|(at, a)| one[at + 1..].iter().map(move |b| (a, b)));
    let slopes: Vec<f64> = pairs.map(|(a, b)| (b.1 - a.1) / (b.0 - a.0)).collect();
    let median = |values: &[f64]| if values.is_empty() { 0.0 } else { quantile(values, 0.5) };
    let mib_us = median(&slopes).max(0.0);
    let rest: Vec<f64> = one.iter().map(|(mib, us)| us - mib * mib_us).collect();
    let both = all.iter().filter_map(|(mib, us)| {
        let (_, one_us) = one.iter().find(|(other, _)| other == mib)?;
        Some((us - one_us) / float(ALL_HANDLES - 1) - mib * mib_us)
    });
    let handle_us = median(&both.collect::<Vec<_>>()).max(0.0);
    let call_us = (median(&rest) - handle_us).max(0.0);
    let (call_ns, handle_ns, mib_ns) =
        (nanoseconds(call_us), nanoseconds(handle_us), nanoseconds(mib_us));
    Some(Cost { call_ns, handle_ns, mib_ns })
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_cost_is_the_line_through_the_sizes_and_one_disturbed_row_does_not_move_it() {
        // Here, since a bench without a harness has no tests.
        use super::{ALL_HANDLES, Cost, SIZES_MIB, cost, float};

        // 20 us a call, 5 us a handle, 0.1 us a MiB.
        let us = |handles: f64, mib: f64| 20.0 + handles * 5.0 + handles * mib * 0.1;
        let sizes = SIZES_MIB.map(float);
        let mut one = sizes.map(|mib| (mib, us(1.0, mib)));
        let all = sizes.map(|mib| (mib, us(float(ALL_HANDLES), mib)));
        let wanted = Cost { call_ns: 20_000, handle_ns: 5_000, mib_ns: 100 };
        assert_eq!(cost(&one, &all), Some(wanted));
        one[3].1 = 900.0;
        assert_eq!(cost(&one, &all), Some(wanted));
        assert_eq!(cost(&[], &all), None);
        let alone = Cost { call_ns: 25_200, ..Cost::default() };
        assert_eq!(cost(&one[..1], &[]), Some(alone));
    }
}
