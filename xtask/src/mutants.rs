//! `cargo xtask mutants`: faults that are put into the arena's source, each of which a test must
//! find.
//!
//! A search that finds nothing says little by itself; one that finds each of these, and nothing
//! without them, says that such a fault is not there. A mutant replaces one text of the source. It
//! is put into a copy of the repository under `target/mutants`, and one build folder serves all
//! mutants, so that each rebuilds the arena and the test program only.
//!
//! Invariant: the tests pass without a mutant, and a mutant is found only if the program with it
//! builds, and its test fails.

use std::fs;
use std::path::PathBuf;

use crate::run::{Run, cargo, executables};
use crate::tree::{self, Faults, Tree};

/// The folder of the sources that are changed.
const SOURCES: &str = "crates/gpu/src";

/// Random schedules: a few hundred, the first failure ends them.
const SCHEDULES: &str = "schedules::random_schedules_keep_every_byte_and_leave_nothing_behind";

/// A fault.
#[derive(Debug)]
struct Mutant {
    name: &'static str,
    /// A description of the fault.
    about: &'static str,
    /// A text that is in one file of [`SOURCES`], once.
    text: &'static str,
    /// The text that replaces it.
    replacement: &'static str,
    /// A test of `crates/gpu/tests/gpu` that must fail.
    test: &'static str,
}

/// The mutants that `.ci/run --full` tries.
const SAMPLE: [&str; 3] = ["cross-stream-reuse", "lock-across-call", "release-before-done"];

const MUTANTS: &[Mutant] = &[
    Mutant {
        name: "no-event-wait",
        about: "a stream that reuses another stream's memory does not wait for it",
        text: "        cx.outside(|| unsafe { cx.driver.stream_wait_event(stream, event.handle) })\
               .await?;\n",
        replacement: "",
        test: SCHEDULES,
    },
    Mutant {
        name: "cross-stream-reuse",
        about: "pending memory is reused as if its uses were complete",
        text: "if outcome.is_ok() && !claim.is_empty() {",
        replacement: "if false {",
        test: SCHEDULES,
    },
    Mutant {
        name: "early-unmap",
        about: "an event counts as complete without a query",
        text: "            if is_complete? {\n",
        replacement: "            if true {\n",
        test: SCHEDULES,
    },
    Mutant {
        name: "stale-owner",
        about: "a stream stays known after its last lane is dropped",
        text: "    cx.with(|state| state.streams.retire(stream));\n",
        replacement: "    if stream != StreamKey::CONTEXT {\n        return;\n    }\n",
        test: SCHEDULES,
    },
    Mutant {
        name: "stale-call",
        about: "the end of a stream does not wait for calls that use its handle",
        text: "    cx.wait_while(|state| state.streams.is_lent(stream)).await;\n",
        replacement: "",
        test: "schedules::calls::no_call_is_made_with_the_handle_of_a_stream_that_is_gone",
    },
    Mutant {
        name: "forgotten-use",
        about: "a use on another lane is not recorded",
        text: "            self.add_lane(lane);\n        }\n        Ok(())",
        replacement: "        }\n        Ok(())",
        test: SCHEDULES,
    },
    Mutant {
        name: "move-before-done",
        about: "a compaction copies before the work on the blocks is complete",
        text: "cx.wait_for_event(event).await.map(|()| true)\n",
        replacement: "Ok::<_, DriverError>(true)\n",
        test: "streams::batches::a_batch_waits_once_for_each_stream_and_once_for_its_copies",
    },
    Mutant {
        name: "divide-in-use",
        about: "a handle is divided before the work on its blocks is complete",
        text: "        if !is_complete? {\n",
        replacement: "        if !is_complete? && false {\n",
        test: "sleep::handles::no_handle_is_divided_while_work_may_use_its_blocks",
    },
    Mutant {
        name: "unwaited-copies",
        about: "a compaction lets leases in before its copies are complete",
        text: "    let mut waited = cx.synchronize(stream).await;\n",
        replacement: "    let mut waited = Ok::<_, DriverError>(drop(stream));\n",
        test: "streams::batches::a_batch_waits_once_for_each_stream_and_once_for_its_copies",
    },
    Mutant {
        name: "lost-claim",
        about: "a failed allocation frees its space as if nothing had been pending there",
        text: "state.cancel_placement(placed, claim);\n                \
               Err(failure",
        replacement: "state.cancel_placement(placed, Dependencies::default());\n\
                      Err(failure",
        test: SCHEDULES,
    },
    Mutant {
        name: "moves-what-arrives",
        about: "a block that waits for the work of others may be moved meanwhile",
        text: "    state.region_mut(target.region).pins.begin_operation(placed.id);\n",
        replacement: "",
        test: "streams::a_block_that_comes_after_anothers_work_is_not_moved_before_it_has_arrived",
    },
    Mutant {
        name: "captured-event",
        about: "an event is recorded while its stream captures a graph",
        text: CHECKED_RECORD,
        replacement: RECORD,
        test: SCHEDULES,
    },
    Mutant {
        name: "lock-across-call",
        about: "a driver call is made with the arena's lock held",
        text: "                    drop(slot);\n                    \
               run_outside(cx, operation.as_mut());\n",
        replacement: "                    run_outside(cx, operation.as_mut());\n                    \
                      drop(slot);\n",
        test: "schedules::calls::no_call_is_made_with_the_lock_held",
    },
    Mutant {
        name: "lost-result",
        about: "granules of a call whose result is not recorded yet count as released",
        text: "        let outcome = cx.decommit(leaving).await;\n        \
               cx.with(|state| state.end_leave(leaving, outcome.is_ok()));\n",
        replacement: "        cx.with(|state| state.end_leave(leaving, true));\n        \
                      let outcome = cx.decommit(leaving).await;\n",
        test: SCHEDULES,
    },
    Mutant {
        name: "sleep-before-done",
        about: "the arena falls asleep without waiting for work under leases",
        text: "        complete_used(cx).await?;\n        \
               stores::complete_copies(cx).await?;\n",
        replacement: "",
        test: SCHEDULES,
    },
    Mutant {
        name: "forgotten-loan",
        about: "an export is not recorded as a use by any stream",
        text: "        self.owned.foreign = true;\n",
        replacement: "",
        test: "interop::exported::\
               lent_memory_is_another_blocks_only_after_all_work_of_the_context",
    },
    Mutant {
        name: "release-before-done",
        about: "imported memory is released without a wait",
        text: "let after = state.uses(&[]);",
        replacement: "let after = crate::state::pending::StreamUses::default();",
        test: "interop::imported::\
               adopted_memory_is_released_only_after_all_work_of_the_context",
    },
];

const RECORD: &str =
    "    cx.outside(|| unsafe { cx.driver.event_record(event.handle, stream) }).await?;\n";

const CHECKED_RECORD: &str = r#"    if cx.is_capturing(stream).await? {
        return Err(captures("cuEventRecord"));
    }
    // SAFETY: an event of the state that no other operation uses, and a stream that exists until
    // the answer is recorded.
    cx.outside(|| unsafe { cx.driver.event_record(event.handle, stream) }).await?;
    if cx.is_capturing(stream).await? {
        return Err(captures("cuEventRecord"));
    }
"#;

/// The mutants to try.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Names of mutants; all, if there is none.
    #[arg(value_name = "NAME")]
    names: Vec<String>,
    /// Only the sample that `.ci/run --full` tries.
    #[arg(long)]
    sample: bool,
    /// Lists the mutants and tries none.
    #[arg(long)]
    list: bool,
}

/// Tries the mutants of these names.
pub(crate) fn run(arguments: &Arguments) -> Result<(), String> {
    if arguments.list {
        for Mutant { name, about, .. } in MUTANTS {
            println!("{name:<20} {about}");
        }
        return Ok(());
    }
    let named = |name: &String| {
        let found = MUTANTS.iter().find(|mutant| mutant.name == name);
        found.ok_or_else(|| format!("unknown mutant {name:?}: see --list"))
    };
    let mutants: Vec<_> = match arguments.names.as_slice() {
        [] => {
            let is_wanted = |one: &&Mutant| !arguments.sample || SAMPLE.contains(&one.name);
            MUTANTS.iter().filter(is_wanted).collect()
        }
        names => names.iter().map(named).collect::<Result<_, _>>()?,
    };
    try_all(&mutants)
}

fn try_all(mutants: &[&Mutant]) -> Result<(), String> {
    let tree = Tree::read(&tree::root())?;
    let places = mutants.iter().map(|mutant| Ok((*mutant, place_of(mutant, &tree)?)));
    let places = places.collect::<Result<Vec<_>, String>>()?;
    let copy = Copy::new()?;
    let tests: Vec<_> = mutants.iter().map(|mutant| mutant.test).collect();
    if let Some(written) = copy.build()?.failure(&tests)? {
        return Err(format!("the tests fail without a mutant:\n{written}"));
    }
    let mut missed = Vec::new();
    for (mutant, (file, text)) in places {
        println!("\n-- {}: {}", mutant.name, mutant.about);
        copy.write(&file, &text)?;
        let tried = copy.build().and_then(|program| program.failure(&[mutant.test]));
        copy.write(&file, &tree.file(&file).map_or_else(String::new, |one| one.text.clone()))?;
        match tried {
            Ok(None) => missed.push(format!("{}: {} passes", mutant.name, mutant.test)),
            Ok(Some(_)) => println!("found by {}", mutant.test),
            Err(error) => missed.push(format!("{}: {error}", mutant.name)),
        }
    }
    println!("figure mutants.tried {} mutants", mutants.len());
    println!("figure mutants.missed {} mutants", missed.len());
    if missed.is_empty() { Ok(()) } else { Err(missed.join("\n")) }
}

/// Checks that the source still has the text of each mutant.
pub(crate) fn check(tree: &Tree, faults: &Faults) {
    for error in MUTANTS.iter().filter_map(|mutant| place_of(mutant, tree).err()) {
        faults.say(format!("mutant {error}"));
    }
}

/// Returns the file that a mutant changes, and the changed text.
fn place_of(mutant: &Mutant, tree: &Tree) -> Result<(String, String), String> {
    let sources = tree.files.iter().filter(|file| file.is_under(SOURCES));
    let counts = sources.map(|file| (file, file.text.matches(mutant.text).count()));
    let found: Vec<_> = counts.filter(|(_, count)| *count > 0).collect();
    match found.as_slice() {
        [(file, 1)] => Ok((file.name.clone(), file.text.replace(mutant.text, mutant.replacement))),
        found => {
            let names: Vec<_> =
                found.iter().map(|(file, count)| format!("{} ({count})", file.name)).collect();
            let (name, text) = (mutant.name, mutant.text);
            Err(format!("{name}: its text is to occur once, and is in {names:?}: {text}"))
        }
    }
}

/// A copy of the repository, which keeps its build between runs.
struct Copy {
    root: PathBuf,
    build: PathBuf,
}

impl Copy {
    /// Makes a copy in which each file has its time, so that what was built of it stays.
    fn new() -> Result<Self, String> {
        let folder = tree::root().join("target/mutants");
        let copy = Self { root: folder.join("source"), build: folder.join("build") };
        let script = "rm -rf target/mutants/source && mkdir -p target/mutants/source && \
                      git ls-files -z --cached --others --exclude-standard | \
                      tar --create --null --files-from - --ignore-failed-read | \
                      tar --extract --directory target/mutants/source";
        Run::new("sh").arg("-c").arg(script).run().map(|()| copy)
    }

    fn write(&self, name: &str, text: &str) -> Result<(), String> {
        fs::write(self.root.join(name), text).map_err(|error| format!("{name}: {error}"))
    }

    /// Builds the test program of the arena.
    fn build(&self) -> Result<Program<'_>, String> {
        let build = cargo("test --locked -p lowtide-gpu --test gpu --no-run --message-format json");
        // All cases of the random tests: a sample finds less.
        let build = build.env("RUSTFLAGS", "--cfg lowtide_soak");
        let build = build.folder(&self.root).env("CARGO_TARGET_DIR", &self.build);
        let built = build.output()?;
        let path = executables(&built).pop().ok_or("the tests of the arena have no program")?;
        Ok(Program { path, copy: self })
    }
}

/// The test program of a copy.
struct Program<'a> {
    path: String,
    copy: &'a Copy,
}

impl Program<'_> {
    /// Runs these tests, and returns what they wrote if one fails.
    fn failure(&self, tests: &[&str]) -> Result<Option<String>, String> {
        let run = Run::new(&self.path).folder(&self.copy.root).words("--exact");
        tests.iter().fold(run, |run, test| run.arg(test)).failure()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_mutant_finds_its_text_once() {
        let tree = Tree::read(&tree::root()).expect("read");
        let faults: Vec<_> = MUTANTS.iter().filter_map(|one| place_of(one, &tree).err()).collect();
        assert!(faults.is_empty(), "{}", faults.join("\n"));
    }

    #[test]
    fn every_mutant_names_a_test_that_there_is() {
        let tree = Tree::read(&tree::root()).expect("read");
        for Mutant { name, test, .. } in MUTANTS {
            let function = format!("fn {}(", test.rsplit("::").next().unwrap_or_default());
            let mut tests = tree.files.iter().filter(|file| file.name.contains("tests/gpu/"));
            assert!(tests.any(|file| file.text.contains(&function)), "{name}: no test {test}");
        }
    }
}
