//! Jobs that build, lint and test the packages.

use std::fs;
use std::path::PathBuf;

use super::{Length, Outcome, skip};
use crate::packages::{Package, packages};
use crate::run::{Run, cargo, has};
use crate::text;
use crate::tree::{self, Tree};

pub(super) fn fmt(_: Length) -> Outcome {
    Ok(cargo("fmt --all --check").run()?)
}

pub(super) fn text(_: Length) -> Outcome {
    text::run(false)?;
    Ok(cargo("test --locked --package xtask").run()?)
}

pub(super) fn clippy(_: Length) -> Outcome {
    let lint = |what: &str| cargo(&format!("clippy --locked {what} -- -D warnings"));
    lint("--workspace --all-targets").run()?;
    // The benches of the heap profiler.
    Ok(with_jemalloc(lint("-p lowtide-benches --features profiling --benches")).run()?)
}

pub(super) fn published() -> Result<Vec<Package>, String> {
    let all = packages()?.into_iter();
    Ok(all.filter(|package| package.is_published).collect())
}

pub(super) fn target() -> PathBuf {
    let named = std::env::var_os("CARGO_TARGET_DIR").map(PathBuf::from);
    tree::root().join(named.unwrap_or_else(|| "target".into()))
}

/// The jemalloc of the tests, if they have been built. It stands in for one that takes two minutes
/// of configure and make, where nothing is linked with it or it would be built in the same way.
fn jemalloc_of_tests() -> Option<PathBuf> {
    let builds = fs::read_dir(target().join("debug/build")).ok()?;
    builds.filter_map(Result::ok).map(|entry| entry.path()).find_map(|folder| {
        let name = folder.file_name()?.to_string_lossy().into_owned();
        let said = fs::read(folder.join("output"))
            .ok()
            .filter(|_| name.starts_with("tikv-jemalloc-sys-"))?;
        let said = String::from_utf8_lossy(&said).into_owned();
        let is_plain = said.contains("--with-jemalloc-prefix=_rjem_");
        let library = folder.join("out/lib/libjemalloc_pic.a");
        (is_plain && !said.contains("--enable-prof") && library.exists()).then_some(library)
    })
}

pub(super) fn with_jemalloc(run: Run) -> Run {
    match jemalloc_of_tests() {
        Some(library) => run.env("JEMALLOC_OVERRIDE", library),
        None => run,
    }
}

/// Returns the arguments for a package without features, and with each feature alone.
fn each_alone(package: &Package) -> Vec<String> {
    const NONE: &str = "--no-default-features";
    let alone = package.features.iter().map(|name| format!("{NONE} --features {name}"));
    std::iter::once(NONE.to_owned()).chain(alone).collect()
}

/// Returns `true` if jemalloc is built for these features alone. Lints and documents never link it.
fn has_own_jemalloc(features: &str) -> bool {
    features.ends_with("interpose") || features.ends_with("profiling")
}

/// Each library alone: development dependencies would switch features on.
pub(super) fn features(_: Length) -> Outcome {
    let mut failed = Vec::new();
    for package in published()? {
        let lint = |features: &str| {
            let words = format!("clippy --locked --lib -p {} {features}", package.name);
            let lint = cargo(&words).words("-- -D warnings");
            if has_own_jemalloc(features) { with_jemalloc(lint).run() } else { lint.run() }
        };
        let mut all = each_alone(&package);
        if package.name == "lowtide" {
            // A web service without device arenas.
            all.push("--features axum,prometheus,service,tokio".to_owned());
        }
        all.extend((!package.features.is_empty()).then(|| "--all-features".to_owned()));
        failed.extend(all.iter().filter_map(|features| lint(features).err()));
    }
    if failed.is_empty() { Ok(()) } else { Err(failed.join("; ").into()) }
}

/// The oldest Rust that the manifest states still builds the libraries.
pub(super) fn oldest(_: Length) -> Outcome {
    let all = published()?;
    let facade = all.iter().find(|package| package.name == "lowtide");
    let oldest = facade.map_or("", |package| &package.rust_version);
    let install = format!("toolchain install {oldest} --profile minimal");
    if !has("rustup") || !Run::new("rustup").words(&install).succeeds() {
        return skip(format!("Rust {oldest} cannot be installed"));
    }
    let check = |words: &str| {
        let check = Run::new("cargo").words(&format!("+{oldest} check --locked --lib {words}"));
        // The toolchain that runs this command is not the one that is meant.
        let check = check.without_env("RUSTC").without_env("RUSTUP_TOOLCHAIN");
        with_jemalloc(check).env("CARGO_TARGET_DIR", "target/oldest").run()
    };
    check("-p lowtide --features service,prometheus,cuda")?;
    // Some need a newer one, as what they depend on does.
    let same = all.iter().filter(|package| package.rust_version == *oldest);
    let names = same.map(|package| format!("-p {}", package.name));
    Ok(check(&names.collect::<Vec<_>>().join(" "))?)
}

/// The unit tests with another C library, as far as the documents claim that it works.
pub(super) fn musl(_: Length) -> Outcome {
    const TARGET: &str = "x86_64-unknown-linux-musl";
    if !cfg!(target_arch = "x86_64") || !has("musl-gcc") {
        return skip("no musl-gcc, or not on x86_64");
    }
    if !has("rustup") || !Run::new("rustup").words("target add").arg(TARGET).succeeds() {
        return skip(format!("no Rust for {TARGET}"));
    }
    let over_musl = |words: &str| cargo(&format!("{words} --locked --lib --target {TARGET}")).run();
    over_musl("test -p lowtide-admission -p lowtide-core -p lowtide-heap")?;
    Ok(over_musl("check -p lowtide --features service,prometheus,tokio")?)
}

/// With each feature alone, a link to an item of another feature is broken.
pub(super) fn doc(_: Length) -> Outcome {
    let doc = |words: &str| {
        let doc = cargo(&format!("doc --locked --no-deps {words}"));
        let doc = doc.env("RUSTDOCFLAGS", "-D warnings");
        if has_own_jemalloc(words) { with_jemalloc(doc).run() } else { doc.run() }
    };
    let mut failed = Vec::new();
    failed.extend(doc("-p lowtide --features service,prometheus").err());
    for package in published()? {
        let documented = format!("--features={}", package.documented.join(","));
        let all = each_alone(&package).into_iter().chain([documented]);
        let all = all.map(|features| format!("-p {} {features}", package.name));
        failed.extend(all.filter_map(|words| doc(&words).err()));
    }
    if failed.is_empty() { Ok(()) } else { Err(failed.join("; ").into()) }
}

/// The fuzz target, in a workspace of its own that no other job reaches.
pub(super) fn fuzz(_: Length) -> Outcome {
    let manifest = "--manifest-path fuzz/Cargo.toml";
    cargo("fmt --check").words(manifest).run()?;
    let lint = cargo("clippy --locked").words(manifest).words("-- -D warnings");
    // It needs no libFuzzer, which its package compiles with a C++ compiler if none is named.
    let lint = lint.env("CUSTOM_LIBFUZZER_PATH", "target/none.a").env("RUSTFLAGS", "--cfg fuzzing");
    Ok(lint.env("CARGO_TARGET_DIR", "target/fuzz").run()?)
}

/// The pool for DataFusion, in a workspace of its own that no other job reaches.
pub(super) fn datafusion(_: Length) -> Outcome {
    let run = |words: &str| {
        let (words, ends) = words.split_once(" -- ").unwrap_or((words, ""));
        let run = cargo(words).words("--locked --manifest-path crates/datafusion/Cargo.toml");
        let run = if ends.is_empty() { run } else { run.arg("--").words(ends) };
        let run = run.env("CARGO_TARGET_DIR", "target/datafusion");
        run.env("RUSTDOCFLAGS", "-D warnings").run()
    };
    cargo("fmt --check --manifest-path crates/datafusion/Cargo.toml").run()?;
    run("clippy --all-targets -- -D warnings")?;
    run("doc --no-deps")?;
    run("test")?;
    Ok(run("run --quiet --example sort")?)
}

/// The command that the README names; in full, with all cases of the random tests.
pub(super) fn test(length: Length) -> Outcome {
    let root = tree::root();
    let readme = fs::read_to_string(root.join("README.md")).map_err(|error| error.to_string())?;
    let is_command = |line: &str| line.trim().trim_start_matches("$ ") == "cargo test";
    if !readme.lines().any(is_command) {
        return Err("README.md does not say: cargo test".into());
    }
    let test = match length {
        Length::Sample => cargo("test"),
        Length::Full => {
            let test = cargo("test --locked").env("RUSTFLAGS", "--cfg lowtide_soak");
            test.env("CARGO_TARGET_DIR", "target/soak")
        }
    };
    Ok(test.run()?)
}

/// A test target: its package and name.
struct Target {
    package: String,
    name: String,
}

/// Returns the test target with this file, or whose sources contain this text.
fn target_of(is_it: impl Fn(&str, &str) -> bool, what: &str) -> Result<Target, String> {
    let tree = Tree::read(&tree::root())?;
    let mut found = Vec::new();
    for package in packages()? {
        let tests = format!("{}tests/", package.folder);
        for file in tree.files.iter().filter(|file| file.is_rust()) {
            let Some(inside) = file.name.strip_prefix(&tests) else { continue };
            let name = inside.split('/').next().unwrap_or_default().trim_end_matches(".rs");
            if is_it(name, &file.text) {
                found.push(Target { package: package.name.clone(), name: name.to_owned() });
            }
        }
    }
    found.into_iter().next().ok_or_else(|| format!("no test target with {what}"))
}

/// Tests the differences if jemalloc serves C code too. All features, because clippy has built that
/// jemalloc already.
pub(super) fn interposed(_: Length) -> Outcome {
    let run = cargo("test --locked --all-features -p lowtide -p lowtide-heap");
    let tests = "--test heap --test memory -- \
                 interpose not_global profile_sources profile_symbol profile_wrong_name unwind";
    run.words(tests).run()?;
    // The modules of the feature `profiling`, which no other job tests.
    let run = cargo("test --locked --all-features -p lowtide-heap --lib --");
    Ok(run.words("pprof profiler unwind").run()?)
}

/// Runs an arena's contract over each backend for CUDA memory, in the order that finds most, and
/// checks each access to memory.
pub(super) fn memcheck(_: Length) -> Outcome {
    const TEST: &str = "cuda_keeps_it_when_work_is_done_as_late_as_may_be";
    if !has("valgrind") {
        return skip("no valgrind");
    }
    let mark = format!("fn {TEST}(");
    let target = target_of(|_, text| text.contains(&mark), TEST)?;
    let words = format!("test --locked -p {} --test {} --no-run", target.package, target.name);
    let built = cargo(&words).words("--message-format json").output()?;
    let program = executables(&built).pop().ok_or("the driver contract has no program")?;
    let valgrind = Run::new("valgrind").words(
        "--quiet --error-exitcode=9 --leak-check=full --show-leak-kinds=definite \
         --errors-for-leak-kinds=definite",
    );
    let listed = Run::new(&program).arg("--list").output()?;
    let mut names = listed.lines().filter_map(|line| line.strip_suffix(": test"));
    let name = names.find(|name| name.ends_with(TEST)).ok_or("the program lacks the test")?;
    Ok(valgrind.arg(&program).words("--test-threads=1 --exact").arg(name).run()?)
}

/// The programs in Cargo's messages.
pub(crate) fn executables(messages: &str) -> Vec<String> {
    let message = |line: &str| serde_json::from_str::<serde_json::Value>(line).ok();
    let program = |message: serde_json::Value| Some(message["executable"].as_str()?.to_owned());
    messages.lines().filter_map(message).filter_map(program).collect()
}

/// Every interleaving of what must hold without a lock, with up to two preemptions, in full with up
/// to three. Optimised a little: loom's threads have small stacks.
pub(super) fn models(length: Length) -> Outcome {
    let preemptions = if length == Length::Full { "3" } else { "2" };
    let tree = Tree::read(&tree::root())?;
    let all = published()?;
    let has_models = |package: &&Package| {
        let folder = format!("{}src/", package.folder);
        let files = tree.files.iter().filter(|file| file.name.starts_with(&folder));
        files.into_iter().any(|file| file.text.contains("#[cfg(all(test, lowtide_loom))]"))
    };
    let of: Vec<_> = all.iter().filter(has_models).map(|one| format!("-p {}", one.name)).collect();
    if of.is_empty() {
        return Err("no package has a model".into());
    }
    let mut test = with_jemalloc(cargo("test --locked --lib").words(&of.join(" ")));
    for package in &all {
        let name = &package.name;
        test = test.arg("--config").arg(format!("profile.dev.package.{name}.opt-level=1"));
    }
    let test = test.env("RUSTFLAGS", "--cfg lowtide_loom").env("LOOM_MAX_PREEMPTIONS", preemptions);
    Ok(test.env("CARGO_TARGET_DIR", "target/loom").arg("models").run()?)
}
