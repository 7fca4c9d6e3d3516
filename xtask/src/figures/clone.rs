//! Figures of a fresh clone: the first demonstration, the tests, and the inner loop.
//!
//! The clone has what is committed, in a temporary folder, which is removed. Its commands see no
//! setting of Cargo's from outside.

use std::path::{Path, PathBuf};
use std::{env, fs, process};

use super::{Figure, count, figure};
use crate::run::{Run, cargo, children_cpu_seconds, executables};
use crate::tree::{self, Tree};

/// A temporary folder that is removed at the end.
pub(super) struct Folder(PathBuf);

impl Folder {
    pub(super) fn new(name: &str) -> Result<Self, String> {
        let path = env::temp_dir().join(format!("lowtide-{name}-{}", process::id()));
        fs::create_dir_all(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        Ok(Self(path))
    }

    pub(super) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        drop(fs::remove_dir_all(&self.0));
    }
}

/// A command as a newcomer gives it: without settings of Cargo's in the environment.
pub(super) fn as_newcomer(run: Run, folder: &Path) -> Run {
    let names = env::vars_os().map(|(name, _)| name.to_string_lossy().into_owned());
    let is_setting = |name: &String| {
        let starts = ["CARGO_PROFILE_", "CARGO_TARGET", "CARGO_INCREMENTAL", "CARGO_ENCODED"];
        starts.iter().any(|start| name.starts_with(start)) || name == "RUSTFLAGS"
    };
    names.filter(is_setting).fold(run, |run, name| run.without_env(&name)).folder(folder)
}

fn clone(name: &str) -> Result<Folder, String> {
    let folder = Folder::new(name)?;
    let from = tree::root();
    Run::new("git").words("clone --quiet").arg(&from).arg(folder.path()).run()?;
    Ok(folder)
}

/// Runs and returns the CPU seconds that it took.
pub(super) fn cpu_seconds(run: impl FnOnce() -> Result<(), String>) -> Result<f64, String> {
    let before = children_cpu_seconds()?;
    run()?;
    Ok(children_cpu_seconds()? - before)
}

pub(super) fn measure_demo() -> Result<Vec<Figure>, String> {
    let folder = clone("demo")?;
    let build = || as_newcomer(cargo("build --release --example tide"), folder.path()).run();
    let minutes = cpu_seconds(build)? / 60.0;
    Ok(vec![figure("demo_cpu_minutes", minutes, "minutes")])
}

pub(super) fn measure_tests() -> Result<Vec<Figure>, String> {
    let folder = clone("tests")?;
    let mut binaries = 0;
    let build = || {
        let build = cargo("test --no-run --message-format json");
        let programs = executables(&as_newcomer(build, folder.path()).output()?);
        // Examples are built beside the tests, and are none.
        let is_test = |program: &&String| program.contains("/debug/deps/");
        binaries = programs.iter().filter(is_test).count();
        Ok(())
    };
    let build = cpu_seconds(build)? / 60.0;
    let run = cpu_seconds(|| as_newcomer(cargo("test"), folder.path()).run())? / 60.0;
    Ok(vec![
        figure("test_cpu_minutes", build + run, "minutes"),
        figure("test_build_cpu_minutes", build, "minutes"),
        figure("test_binaries", count(binaries), "programs"),
    ])
}

/// The second run after an edit: the first one builds what does not change.
pub(super) fn measure_quick() -> Result<Vec<Figure>, String> {
    let folder = clone("quick")?;
    let tree = Tree::read(folder.path())?;
    let mut library = tree.library().into_iter();
    let file = library.find(|file| file.name.ends_with("/arena.rs") && file.name.contains("gpu"));
    let file = file.ok_or("no arena.rs in a package for GPUs")?;
    let edit = |comment: &str| {
        let text = format!("{}\n// {comment}\n", file.text);
        fs::write(folder.path().join(&file.name), text).map_err(|error| error.to_string())
    };
    let quick = || as_newcomer(cargo("xtask quick --base HEAD"), folder.path()).run();
    edit("A first edit.")?;
    quick()?;
    edit("A second edit.")?;
    let seconds = cpu_seconds(quick)?;
    Ok(vec![figure("quick_cpu_seconds", seconds, "seconds")])
}
