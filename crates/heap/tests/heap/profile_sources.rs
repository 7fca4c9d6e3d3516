//! One process for each configuration of jemalloc by its variable: what took effect is read back,
//! and each difference from what the binary asks is told.
//!
//! The tests run this program again with other variables; the test that then runs says on its
//! standard output what it found. The binary asks for `balanced`.
#![cfg(target_os = "linux")]

use lowtide_heap::{Difference, HeapProfile};

use crate::start::{BALANCED, again};

const READ: &str = if cfg!(feature = "interpose") { "MALLOC_CONF" } else { "_RJEM_MALLOC_CONF" };

/// The test for which this program's other tests run it again.
#[test]
fn what_took_effect_in_this_process_is_said() {
    BALANCED.run(|| {
        let found = lowtide_heap::effective().unwrap();
        let list = |what: &str, differences: Vec<Difference>| {
            differences.iter().for_each(|difference| println!("\n{what}: {difference}"));
        };
        println!("\neffective: {found}");
        list("from binary", found.differences_from(HeapProfile::Balanced));
        list("from low-memory", found.differences_from(HeapProfile::LowMemory));
        list("ignored", found.differences());
        // The heap serves whatever was configured.
        let blocks: Vec<Vec<u8>> = (0..256).map(|at| vec![7; at * 64]).collect();
        assert!(blocks.iter().flatten().all(|byte| *byte == 7));
    });
}

/// The output of the test above in a process with this value of jemalloc's variable, and its
/// standard error.
struct Said(String, String);

impl Said {
    fn with(value: &str) -> Self {
        let output = again("profile_sources::what_took_effect_in_this_process_is_said")
            .env_clear()
            .envs([BALANCED.variable()])
            .env(READ, value)
            .output()
            .expect("runs");
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let said = Self(text(&output.stdout), text(&output.stderr));
        assert!(output.status.success(), "{value}: {}{}", said.0, said.1);
        said
    }

    /// The lines about this.
    fn about(&self, what: &str) -> Vec<&str> {
        let start = format!("{what}: ");
        let of_kernel = |line: &&str| line.starts_with("transparent_hugepage: ");
        let lines = self.0.lines().filter_map(|line| line.strip_prefix(&start));
        lines.filter(|line| !of_kernel(line)).collect()
    }
}

#[test]
fn a_process_without_variables_has_what_the_binary_asks() {
    let said = Said::with("");
    assert_eq!((said.about("from binary"), said.about("ignored")), (vec![], vec![]));
}

#[test]
fn a_decay_of_zero_by_the_variable_is_read_back() {
    let said = Said::with("dirty_decay_ms:0");
    assert_eq!(said.about("from binary"), ["dirty_decay_ms: requested 1000, effective 0"]);
    assert!(said.about("effective")[0].contains("dirty_decay_ms=0 "), "{}", said.0);
    assert_eq!(said.about("ignored"), [""; 0]);
}

#[test]
fn background_threads_are_off_where_the_variable_says_so() {
    let supported = lowtide_heap::background_threads_supported();
    let said = Said::with("background_thread:false");
    let difference = "background_thread: requested true, effective false";
    assert!(said.about("from binary").contains(&difference), "{}", said.0);
    let effective = said.about("effective")[0];
    assert!(effective.contains("background_thread=false"), "{effective}");
    if supported {
        let said = Said::with("background_thread:true");
        assert_eq!(said.about("from binary"), [""; 0]);
        assert!(
            said.about("effective")[0].contains("background_thread=true max_background_threads=2 ")
        );
    }
}

#[test]
fn the_string_of_low_memory_makes_low_memory_of_a_balanced_binary() {
    BALANCED.run(|| {
        let found = lowtide_heap::effective().unwrap();
        let text = found.requested_by(HeapProfile::LowMemory);
        assert_eq!(Some(&*text), HeapProfile::LowMemory.conf().to_str().ok());
        let said = Said::with(&text);
        assert_eq!((said.about("from low-memory"), said.about("ignored")), (vec![], vec![]));
        assert_eq!(said.about("from binary").len(), 3, "{}", said.0);
    });
}

#[test]
fn a_bad_string_is_told_piece_by_piece_and_the_process_runs_on() {
    let bad = "narenas:two,narena:3,dirty_decay_ms:500,tcache_max:4096 ,thp:never, narenas:2";
    let said = Said::with(bad);
    assert_eq!(
        said.about("ignored"),
        [
            "narenas: requested two, effective 4",
            "narena: requested 3, effective none",
            "tcache_max: requested 4096 , effective 32768",
            " narenas: requested 2, effective none",
        ]
    );
    // The rest of it took effect; jemalloc itself says the same on standard error.
    let differences = said.about("from binary");
    assert_eq!(differences[0], "dirty_decay_ms: requested 1000, effective 500");
    assert_eq!(differences[1], "thp: requested default, effective never");
    for complaint in ["value: narenas:two", "pair: narena:3", "value: tcache_max", "Malformed"] {
        assert!(said.1.contains(complaint), "{complaint:?} is missing in {}", said.1);
    }
}

#[test]
fn a_variable_cannot_raise_the_number_of_background_threads() {
    let said = Said::with("max_background_threads:4");
    assert!(said.about("effective")[0].contains("max_background_threads=2 "), "{}", said.0);
    assert_eq!(said.about("ignored"), ["max_background_threads: requested 4, effective 2"]);
}
