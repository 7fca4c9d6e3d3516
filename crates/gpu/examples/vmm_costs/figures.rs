//! The figures: named values with units, and a Rust constant made of them.
//!
//! Invariant: a name has one value; a later one of the same name replaces it.
#![expect(clippy::print_stdout, reason = "the tables are the product")]

use crate::measure::Call;

/// The measured values, in order.
pub(crate) struct Figures {
    pub(crate) device: String,
    version: i32,
    values: Vec<(String, f64, &'static str)>,
}

impl Figures {
    pub(crate) fn new(device: String, version: i32) -> Self {
        Self { device, version, values: Vec::new() }
    }

    pub(crate) fn set(&mut self, name: impl Into<String>, value: f64, unit: &'static str) {
        let name = name.into();
        self.values.retain(|(other, ..)| *other != name);
        self.values.push((name, value, unit));
    }

    fn value(&self, name: &str) -> Option<f64> {
        let found = self.values.iter().find(|(other, ..)| other == name);
        found.map(|&(_, value, _)| value).filter(|value| value.is_finite())
    }

    /// One line for each: `figure NAME VALUE UNIT`.
    pub(crate) fn print(&self) {
        println!();
        for (name, value, unit) in &self.values {
            println!("figure {name} {value:.3} {unit}");
        }
    }

    /// Prints the constant `DriverCosts` as source text. The cost of a call is a line through its
    /// medians at the smallest and the largest handle measured idle; a value that was not measured
    /// is 0, with a comment.
    pub(crate) fn print_rust(&self) {
        println!("\n/// Measured by `crates/gpu/examples/vmm_costs` on {},", self.device);
        println!("/// driver {}.", crate::version_text(self.version));
        println!("pub const MEASURED: DriverCosts = DriverCosts {{");
        for call in Call::EVERY.into_iter().filter(|&call| call != Call::PlainFree) {
            let sizes = crate::tables::SIZES_MIB.map(|mib| {
                let name = format!("{}_{mib}mib_us", call.name());
                self.value(&name).map(|us| (crate::float(mib), us))
            });
            let mut sizes = sizes.into_iter().flatten();
            let Some(small) = sizes.next() else {
                println!("    {}: CallCost::ZERO, // not measured", call.name());
                continue;
            };
            let large = sizes.next_back().unwrap_or(small);
            let run = (large.0 - small.0).max(1.0);
            let per_mib_us = ((large.1 - small.1) / run).max(0.0);
            let fixed_us = (small.1 - per_mib_us * small.0).max(0.0);
            let stall_us = self.value(&format!("{}_stall_us", call.name())).unwrap_or(0.0);
            println!(
                "    {}: CallCost {{ fixed_ns: {}, per_mib_ns: {}, stall_ns: {} }},",
                call.name(),
                crate::whole(fixed_us * 1e3),
                crate::whole(per_mib_us * 1e3),
                crate::whole(stall_us * 1e3)
            );
        }
        for (field, unit) in [
            ("granularity", "bytes"),
            ("context_device", "bytes"),
            ("context_host", "bytes"),
            ("handle_host", "bytes"),
            ("to_device", "bytes_per_s"),
            ("to_host", "bytes_per_s"),
        ] {
            let name = format!("{field}_{unit}");
            match self.value(&name) {
                Some(value) => println!("    {name}: {},", crate::whole(value)),
                None => println!("    {name}: 0, // not measured"),
            }
        }
        match self.value("unmap_waits") {
            Some(waits) => println!("    unmap_waits: {},", waits > 0.0),
            None => println!("    unmap_waits: false, // not measured"),
        }
        println!("}};");
    }
}
