//! The figures of the calls, and the simulation's `DriverCosts` made of them.
//!
//! Invariant: a name has one value; a later one of the same name replaces it.

use lowtide_cuda_sim::{Call, Cost, DriverCosts};

use super::super::cases::Outcome;
use super::super::report::Report;
use super::super::rig::{float, median};
use super::tables::{ALL_HANDLES, SIZES_MIB};
use super::whole;

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

/// The figures and the tables of this part, written to the report as they are found.
pub(crate) struct Figures<'a, 'r>(pub(crate) &'a mut Report<'r>);

impl Figures<'_, '_> {
    pub(crate) fn line(&mut self, text: &str) {
        self.0.line(text);
    }

    /// Begins a table, with a name and a number for each other column.
    pub(crate) fn heading(&mut self, text: &str, columns: &[&str]) {
        let (first, others) = columns.split_first().unwrap_or((&"", &[]));
        let others: String = others.iter().map(|column| format!(" {column:>10}")).collect();
        self.line(&format!("\n{text}\n  {first:<14}{others}"));
    }

    /// Writes a row; a cell of NaN is none.
    pub(crate) fn row(&mut self, name: &str, cells: &[f64]) {
        let cell = |cell: &f64| match cell {
            cell if cell.is_nan() => format!(" {:>10}", "-"),
            cell if cell.fract() == 0.0 => format!(" {cell:>10.0}"),
            cell => format!(" {cell:>10.2}"),
        };
        let cells: String = cells.iter().map(cell).collect();
        self.line(&format!("  {name:<14}{cells}"));
    }

    /// Notes that a table failed.
    pub(crate) fn table(&mut self, name: &str, done: Outcome) {
        if let Err(fault) = done {
            self.0.fail("calls", format!("table {name}: {fault}"));
        }
    }

    pub(crate) fn set(&mut self, name: &str, value: f64, unit: &str) {
        self.0.figure(&format!("gpu.calls.{name}"), value, unit);
    }

    fn value(&self, name: &str) -> Option<f64> {
        self.0.figures.get(&format!("gpu.calls.{name}")).map(|&(value, _)| value)
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
        self.line("\ncosts for the simulation; calls that are not here keep their guesses");
        self.line("DriverCosts::default()");
        for (call, cost) in measured {
            costs = costs.with(call, cost);
            self.line(&format!("    .with(Call::{call:?}, {:?})", costs.of(call)));
            for (unit, value) in
                [("call_ns", cost.call_ns), ("handle_ns", cost.handle_ns), ("mib_ns", cost.mib_ns)]
            {
                let name = format!("gpu.costs.{}.{unit}", call.name());
                self.0.figure(&name, float(value), "ns");
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
    let middle = |values: &[f64]| if values.is_empty() { 0.0 } else { median(values) };
    let mib_us = middle(&slopes).max(0.0);
    let rest: Vec<f64> = one.iter().map(|(mib, us)| us - mib * mib_us).collect();
    let both = all.iter().filter_map(|(mib, us)| {
        let (_, one_us) = one.iter().find(|(other, _)| other == mib)?;
        Some((us - one_us) / float(ALL_HANDLES - 1) - mib * mib_us)
    });
    let handle_us = middle(&both.collect::<Vec<_>>()).max(0.0);
    let call_us = (middle(&rest) - handle_us).max(0.0);
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
