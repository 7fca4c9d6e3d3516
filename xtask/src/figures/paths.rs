//! What a path of the arena, a request or a tick runs: its functions and files in a debug build, and
//! those of the arena their instructions in a release build over those of an older commit.
//!
//! The program of the arena is an example of the package, `arena_paths`. A package of its own builds it, once
//! against this tree and once against a worktree of the older commit, with the same versions of all
//! dependencies.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use super::{Figure, callgrind, count, figure};
use crate::run::{Run, cargo};
use crate::tree;

/// The last commit before the arena was rebuilt.
const REFERENCE: &str = "ae5191a1";
/// The folder of the arena's package.
const FOLDER: &str = "crates/gpu/";
const PROGRAM: &str = "examples/arena_paths.rs";
/// Where all of it is built.
const BUILT: &str = "target/figures/arena";
/// The function of the program in which callgrind counts.
const MEASURED: &str = "*arena_paths::measured*";

/// The function that is a tick.
const TICK: &str = "lowtide_admission::maintenance::Maintenance::tick";

/// A path and the number of times that it runs to be counted.
const PATHS: [(&str, &str, usize); 5] = [
    ("warm_pair.instructions_ratio", "warm_pair", 10_000),
    ("cold_alloc.instructions_ratio", "cold_alloc", 1_000),
    ("drop.instructions_ratio", "drop", 1_000),
    ("sleep.instructions_ratio", "sleep", 10),
    ("wake.instructions_ratio", "wake", 10),
];

/// Counts the functions and files that one allocation of committed memory runs.
pub(super) fn measure_warm() -> Result<Vec<Figure>, String> {
    Ok(figures_of("warm.functions", "warm.files", &run(&build_debug()?, "warm", 1)?))
}

/// Counts the functions and files that one drop to the state of the arena runs.
pub(super) fn measure_drop() -> Result<Vec<Figure>, String> {
    Ok(figures_of("drop.functions", "drop.files", &run(&build_debug()?, "drop", 1)?))
}

/// Counts the functions and files that a request runs from its head to the end of its answer.
pub(super) fn measure_request() -> Result<Vec<Figure>, String> {
    let written = run_bench("requests", "request", "'valgrind'", "requests::measured")?;
    let text = written.first().ok_or("callgrind wrote nothing")?;
    Ok(figures_of("request.functions", "request.files", text))
}

/// Counts the functions and files of a tick of the control loop: the median of an idle process.
pub(super) fn measure_tick() -> Result<Vec<Figure>, String> {
    // The process ends with its standard input. Each tick is written to a file of its own.
    let valgrind = format!("'sh','-c','sleep 15 | \"$@\"','sh','valgrind','--dump-after={TICK}'");
    let mut ticks = run_bench("idle", "managed", &valgrind, TICK)?;
    ticks.sort_by_key(|text| own_functions(text).len());
    let text = ticks.get(ticks.len() / 2).ok_or("callgrind wrote nothing")?;
    Ok(figures_of("tick.functions", "tick.files", text))
}

/// Runs a bench of this kind, in which callgrind counts in a function. Returns what it writes.
fn run_bench(
    bench: &str,
    kind: &str,
    valgrind: &str,
    function: &str,
) -> Result<Vec<String>, String> {
    let folder = tree::root().join("target/figures").join(bench);
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).map_err(|error| error.to_string())?;
    let runner = format!(
        "target.'cfg(all())'.runner=[{valgrind},'--tool=callgrind','--quiet',\
         '--collect-atstart=no','--toggle-collect={function}','--callgrind-out-file={}']",
        folder.join("out").display()
    );
    let run = cargo("bench --locked --quiet --profile dev --config").arg(runner);
    run.words("--bench").arg(bench).words("-- --be").arg(kind).run()?;
    let files = fs::read_dir(&folder).map_err(|error| error.to_string())?.flatten();
    Ok(files.filter_map(|file| fs::read_to_string(file.path()).ok()).collect())
}

fn build_debug() -> Result<PathBuf, String> {
    build("new", &tree::root(), "dev")
}

/// Counts the functions and the files of this repository that a path ran in a debug build.
fn figures_of(functions: &'static str, files: &'static str, text: &str) -> Vec<Figure> {
    let own = own_functions(text);
    let of: BTreeSet<_> = own.iter().map(|(file, _)| file).collect();
    own.iter().for_each(|(file, name)| eprintln!("    {file}: {name}"));
    vec![figure(functions, count(own.len()), "functions"), figure(files, count(of.len()), "files")]
}

/// Returns the functions from files of the repository's packages, each with its file.
fn own_functions(text: &str) -> BTreeSet<(&str, &str)> {
    let root = tree::root();
    let own = callgrind::functions(text).into_iter().filter_map(|(file, name)| {
        let file = Path::new(file).strip_prefix(&root).ok()?.to_str()?;
        let is_own = file.starts_with("src/") || file.starts_with("crates/");
        (is_own && file.contains("src/")).then_some((file, name))
    });
    own.collect()
}

/// Divides the instructions of each path by those of the older commit.
pub(super) fn measure_ratios() -> Result<Vec<Figure>, String> {
    let new = build("new", &tree::root(), "release")?;
    let old = build("old", &reference()?, "release")?;
    let ratio = |(name, path, times): (&'static str, &str, usize)| {
        let instructions = |program: &Path| {
            let text = run(program, path, times)?;
            let all = callgrind::instructions(&text).filter(|all| *all > 0.0);
            Ok::<_, String>(all.ok_or("callgrind counted nothing")? / count(times))
        };
        let (new, old) = (instructions(&new)?, instructions(&old)?);
        println!("  {path}: {new:.0} instructions, {old:.0} at {REFERENCE}");
        Ok(figure(name, new / old, "ratio"))
    };
    PATHS.into_iter().map(ratio).collect()
}

/// Returns a worktree of the older commit. Forced, since git still knows one that was removed with
/// the whole folder.
fn reference() -> Result<PathBuf, String> {
    let folder = tree::root().join(BUILT).join(REFERENCE);
    if !folder.join("Cargo.toml").is_file() {
        let add = Run::new("git").words("worktree add --force --detach").arg(&folder);
        add.arg(REFERENCE).run()?;
    }
    Ok(folder)
}

/// Builds the program against the arena of a tree, and returns it.
fn build(name: &str, tree: &Path, profile: &str) -> Result<PathBuf, String> {
    let (root, folder) = (tree::root(), tree::root().join(BUILT).join(name));
    let manifest = format!(
        "[package]\nname = \"arena-paths\"\nversion = \"0.0.0\"\nedition = \"2024\"\n\n\
         [dependencies]\nlowtide-gpu = {{ path = \"{}\" }}\n\n\
         [[bin]]\nname = \"arena-paths\"\npath = \"{}\"\n\n\
         [profile.release]\ncodegen-units = 1\n\n[workspace]\n",
        tree.join(FOLDER).display(),
        root.join(FOLDER).join(PROGRAM).display()
    );
    fs::create_dir_all(&folder)
        .and_then(|()| fs::write(folder.join("Cargo.toml"), manifest))
        // The same versions in both.
        .and_then(|()| fs::copy(root.join("Cargo.lock"), folder.join("Cargo.lock")))
        .map_err(|error| format!("{}: {error}", folder.display()))?;
    let target = folder.join("target");
    let build = cargo("build --quiet --profile").arg(profile).arg("--target-dir").arg(&target);
    let flags = if tree == root { "" } else { "--cfg lowtide_reference" };
    build.env("RUSTFLAGS", flags).folder(&folder).run()?;
    let folder = if profile == "dev" { "debug" } else { profile };
    Ok(target.join(folder).join("arena-paths"))
}

/// Runs a path of the program under callgrind, and returns what callgrind writes.
fn run(program: &Path, path: &str, times: usize) -> Result<String, String> {
    let file = tree::root().join(BUILT).join("callgrind.out");
    let file = file.to_string_lossy();
    let valgrind = Run::new("valgrind").words("--tool=callgrind --quiet --collect-atstart=no");
    let counted = valgrind
        .arg(format!("--toggle-collect={MEASURED}"))
        .arg(format!("--callgrind-out-file={file}"));
    counted.arg(program).arg(path).arg(times.to_string()).run()?;
    fs::read_to_string(&*file).map_err(|error| format!("{file}: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_of_other_crates_are_left_out() {
        let root = tree::root();
        let text = format!(
            "fl=(1) {0}/crates/gpu/src/one.rs\nfn=(1) one\nfl=(2) /rustc/core/src/option.rs\n\
             fn=(2) two\nfl=(3) {0}/crates/gpu/examples/arena_paths.rs\nfn=(3) three\n",
            root.display()
        );
        let own = own_functions(&text);
        assert_eq!(own.into_iter().collect::<Vec<_>>(), [("crates/gpu/src/one.rs", "one")]);
    }
}
