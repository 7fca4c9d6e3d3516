//! One process for each configuration of jemalloc by its variable: what took effect is read back,
//! and each difference from what the binary asks names its cause.
//!
//! The tests run this program again with other variables; the test that then runs says on its
//! standard output what it found. The binary asks for `balanced`.
#![cfg(target_os = "linux")]

use lowtide_heap::{Difference, HeapProfile};

use crate::start::{BALANCED, again};

const READ: &str = if cfg!(feature = "interpose") { "MALLOC_CONF" } else { "_RJEM_MALLOC_CONF" };

/// In the causes of what the kernel does about huge pages, and of the build's page size.
const GIVEN: [&str; 2] = ["transparent_hugepage", "LG_PAGE"];

/// The test for which this program's other tests run it again.
#[test]
fn what_took_effect_in_this_process_is_said() {
    BALANCED.run(|| {
        let found = lowtide_heap::effective().unwrap();
        let list = |what: &str, differences: Vec<Difference>| {
            differences.iter().for_each(|difference| println!("\n{what}: {difference}"));
        };
        println!("\neffective: {found}");
        list("from binary", found.differences_from(found.requested_by_binary().unwrap()));
        list("from low-memory", found.differences_from(HeapProfile::LowMemory));
        list("ignored", found.ignored());
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

    /// The lines about this, but for what the kernel and the build decide.
    fn about(&self, what: &str) -> Vec<&str> {
        let start = format!("{what}: ");
        let lines = self.0.lines().filter_map(|line| line.strip_prefix(&start));
        lines.filter(|line| GIVEN.iter().all(|given| !line.contains(given))).collect()
    }
}

#[test]
fn a_process_without_variables_has_what_the_binary_asks() {
    let said = Said::with("");
    assert_eq!((said.about("from binary"), said.about("ignored")), (vec![], vec![]));
}

#[test]
fn a_decay_of_zero_by_the_variable_is_read_back_with_its_cause() {
    let said = Said::with("dirty_decay_ms:0");
    let difference = format!("dirty_decay_ms: requested 1000, found 0: set by the variable {READ}");
    assert_eq!(said.about("from binary"), [&*difference]);
    assert!(said.about("effective")[0].contains("dirty_decay=at once"), "{}", said.0);
    assert_eq!(said.about("ignored"), [""; 0]);
}

#[test]
fn background_threads_are_off_where_the_variable_says_so() {
    let supported = lowtide_heap::background_threads_supported();
    let said = Said::with("background_thread:false");
    let mut found = said.about("from binary");
    found.retain(|line| line.starts_with("background_thread"));
    let cause = if supported { "set by the variable" } else { "this build of jemalloc cannot" };
    let difference = format!("background_thread: requested true, found false: {cause}");
    assert!(found.len() == 1 && found[0].starts_with(&difference), "{found:?}");
    let effective = said.about("effective")[0];
    let off = if supported { "background_threads=(off)" } else { "(unsupported)" };
    assert!(effective.contains(off), "{effective}");
    if supported {
        let said = Said::with("background_thread:true");
        assert_eq!(said.about("from binary"), [""; 0]);
        assert!(said.about("effective")[0].contains("background_threads=(on, at most 2)"));
    }
}

#[test]
fn the_string_of_low_memory_makes_low_memory_of_a_balanced_binary() {
    BALANCED.run(|| {
        let found = lowtide_heap::effective().unwrap();
        let text = found.variable_for(&HeapProfile::LowMemory.into());
        assert_eq!(Some(&*text), HeapProfile::LowMemory.conf().to_str().ok());
        let said = Said::with(&text);
        assert_eq!((said.about("from low-memory"), said.about("ignored")), (vec![], vec![]));
        let causes = said.about("from binary");
        let by = format!(": set by the variable {READ}");
        assert!(causes.len() == 3 && causes.iter().all(|line| line.ends_with(&by)), "{causes:?}");
    });
}

#[test]
fn a_bad_string_is_told_piece_by_piece_and_the_process_runs_on() {
    let bad = "narenas:two,narena:3,dirty_decay_ms:500,tcache_max:4096 ,thp:never, narenas:2";
    let said = Said::with(bad);
    let ignored = said.about("ignored");
    let expected = [
        "narenas: requested \"two\", found 4: jemalloc refused the value from the variable",
        "malloc_conf: requested \"narena:3\", found nothing: unknown jemalloc setting",
        "tcache_max: requested \"4096 \", found 32768: jemalloc refused the value from the",
        "malloc_conf: requested \" narenas:2\", found nothing: jemalloc stopped reading the",
    ];
    assert_eq!(ignored.len(), expected.len(), "{ignored:?}");
    for (line, start) in ignored.iter().zip(expected) {
        assert!(line.starts_with(start), "{line}");
    }
    // The rest of it took effect; jemalloc itself says the same on standard error.
    let differences = said.about("from binary");
    assert!(
        differences[0].starts_with("dirty_decay_ms: requested 1000, found 500"),
        "{differences:?}"
    );
    assert!(differences[1].starts_with("thp: requested default, found never"), "{differences:?}");
    for complaint in ["value: narenas:two", "pair: narena:3", "value: tcache_max", "Malformed"] {
        assert!(said.1.contains(complaint), "{complaint:?} is missing in {}", said.1);
    }
}

#[test]
fn a_variable_cannot_raise_the_number_of_background_threads() {
    let said = Said::with("max_background_threads:4");
    assert!(said.about("effective")[0].contains("at most 2"), "{}", said.0);
    let ignored = said.about("ignored");
    let capped = "max_background_threads: requested 4, found 2: jemalloc accepts at most 2";
    assert!(ignored.len() == 1 && ignored[0].starts_with(capped), "{ignored:?}");
}
