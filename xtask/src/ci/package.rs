//! The job that packs the published packages, and builds and tests what was packed.
//!
//! Nothing is on a registry, so the unpacked folders become a workspace of their own, in which each
//! package is taken from its folder. The folders have no other files, so that nothing is used which
//! is not packed.

use std::fs;
use std::path::{Path, PathBuf};

use super::build::{published, target, with_jemalloc};
use super::{Length, Outcome};
use crate::packages::Package;
use crate::run::{Run, cargo};
use crate::tree;

/// Packages whose unit tests need the simulation of CUDA, which is not published. What they pack is
/// built, and the code in their documents is tested.
const NEED_SIMULATION: &[&str] = &["lowtide-gpu"];

/// Likewise the unit tests that have this feature.
const NEEDS_SIMULATION: &str = "cuda";

/// No package has more files than this: sources, and what a user needs.
const FILES_MAX: usize = 200;

/// The development profile of the root manifest, so that dependencies built for the tests are used.
const PROFILE: &str = "\
[profile.dev]
debug = \"line-tables-only\"

[profile.dev.package.\"*\"]
debug = false
";

pub(super) fn package(_: Length) -> Outcome {
    let all = published()?;
    let words = all.iter().map(|package| format!("-p {}", package.name)).collect::<Vec<_>>();
    // Built below, and only once.
    let pack = "package --locked --no-verify --allow-dirty --exclude-lockfile";
    cargo(pack).words(&words.join(" ")).run()?;
    let folder = unpack(&all)?;
    let mut failed = Vec::new();
    for package in &all {
        let features = package.documented.iter().filter(|name| *name != NEEDS_SIMULATION);
        let features = features.map(String::as_str).collect::<Vec<_>>().join(",");
        let run = |words: String| {
            let run = with_jemalloc(cargo(&words).folder(&folder));
            run.env("CARGO_TARGET_DIR", target()).run().err()
        };
        let name = &package.name;
        failed.extend(run(format!("build --lib -p {name}")));
        let needs_simulation = NEED_SIMULATION.contains(&name.as_str());
        if needs_simulation {
            println!("{name}: no unit tests, nor that of Lane: they need the simulation of CUDA");
        } else {
            failed.extend(run(format!("test --lib -p {name} --features={features}")));
        }
        let documented = package.documented.join(",");
        let skip = if needs_simulation { " -- --skip lane::Lane" } else { "" };
        failed.extend(run(format!("test --doc -p {name} --features={documented}{skip}")));
    }
    if failed.is_empty() { Ok(()) } else { Err(failed.join("; ").into()) }
}

/// Makes a workspace of the packed files, and returns its folder.
fn unpack(all: &[Package]) -> Result<PathBuf, String> {
    let folder = target().join("package/unpacked");
    let wrong = |error: std::io::Error| format!("{}: {error}", folder.display());
    if folder.exists() {
        fs::remove_dir_all(&folder).map_err(wrong)?;
    }
    fs::create_dir_all(&folder).map_err(wrong)?;
    for package in all {
        let packed = format!("{}-{}.crate", package.name, package.version);
        let packed = target().join("package").join(packed);
        // All packed files carry the same old time, so Cargo would use an earlier build of them.
        let unpack = Run::new("tar").words("--extract --touch --gzip --file").arg(&packed);
        unpack.arg("--directory").arg(&folder).run()?;
        let inside = folder.join(format!("{}-{}", package.name, package.version));
        let files = count_files(&inside).map_err(wrong)?;
        println!("{}: {files} files", package.name);
        if files > FILES_MAX {
            let name = &package.name;
            return Err(format!("{name}: {files} files packed: expected at most {FILES_MAX}"));
        }
    }
    let list = |line: &dyn Fn(&Package) -> String| all.iter().map(line).collect::<String>();
    let members = list(&|one| format!("    \"{}-{}\",\n", one.name, one.version));
    let patches = list(&|one| format!("{0} = {{ path = \"{0}-{1}\" }}\n", one.name, one.version));
    let manifest = format!(
        "[workspace]\nresolver = \"3\"\nmembers = [\n{members}]\n\n{PROFILE}\n\
         [patch.crates-io]\n{patches}"
    );
    fs::write(folder.join("Cargo.toml"), manifest).map_err(wrong)?;
    // The versions that are tested.
    fs::copy(tree::root().join("Cargo.lock"), folder.join("Cargo.lock")).map_err(wrong)?;
    Ok(folder)
}

fn count_files(folder: &Path) -> std::io::Result<usize> {
    fs::read_dir(folder)?.try_fold(0, |count, entry| {
        let entry = entry?;
        let is_folder = entry.file_type()?.is_dir();
        Ok(count + if is_folder { count_files(&entry.path())? } else { 1 })
    })
}
