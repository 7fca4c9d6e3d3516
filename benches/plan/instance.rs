//! The instances, as they lie beside the tests.
//!
//! Invariant: a file reads as the same problem each time.

use std::fs::File;
use std::path::Path;
use std::time::Duration;

use flate2::read::GzDecoder;
use lowtide_planner::{LifetimeEnds, Problem};

/// The capacity of the instances of MiniMalloc's challenging set.
pub(crate) const CAPACITY: u64 = 1_048_576;

/// The one with the most buffers.
pub(crate) const LARGEST: &str = "S_1";

#[derive(Clone, Copy, Debug)]
pub(crate) struct Instance {
    pub(crate) name: &'static str,
    file: &'static str,
    pub(crate) has_capacity: bool,
    /// For the smallest peak.
    pub(crate) budget: Duration,
}

const fn set(name: &'static str, file: &'static str) -> Instance {
    Instance { name, file, has_capacity: true, budget: Duration::from_secs(10) }
}

const fn other(name: &'static str, file: &'static str, seconds: u64) -> Instance {
    Instance { name, file, has_capacity: false, budget: Duration::from_secs(seconds) }
}

pub(crate) const INSTANCES: &[Instance] = &[
    set("A", "A.1048576.csv"),
    set("B", "B.1048576.csv"),
    set("C", "C.1048576.csv"),
    set("D", "D.1048576.csv"),
    set("E", "E.1048576.csv"),
    set("F", "F.1048576.csv"),
    set("I", "I.1048576.csv"),
    set("J", "J.1048576.csv"),
    other("resnet50", "resnet50.csv", 10),
    other("G_1", "G_1.csv", 10),
    other("pangu_2.6B", "pangu_2.6B.csv.gz", 2),
    other("S_1", "S_1.csv.gz", 10),
];

impl Instance {
    pub(crate) fn problem(&self) -> Problem {
        let folder =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../crates/planner/tests/data/planning");
        let file = File::open(folder.join(self.file)).expect("an instance of the project");
        let read = if self.file.ends_with(".gz") {
            Problem::read_csv(GzDecoder::new(file), LifetimeEnds::AsNamed)
        } else {
            Problem::read_csv(file, LifetimeEnds::AsNamed)
        };
        read.expect("a file of its field")
    }
}
