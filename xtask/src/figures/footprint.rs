//! Figures of what lowtide adds to a clean release build: over plain jemalloc, and over a service
//! that has axum, jemalloc and Prometheus already.

use std::fs;
use std::path::Path;

use super::clone::{Folder, as_newcomer, cpu_seconds};
use super::{Figure, figure};
use crate::run::cargo;
use crate::tree;

/// The CPU seconds to build a program with these dependencies.
fn build_seconds(name: &str, dependencies: &str, main: &str) -> Result<f64, String> {
    let folder = Folder::new(name)?;
    let root = tree::root();
    let manifest = format!(
        "[package]\nname = \"{name}\"\nversion = \"0.0.0\"\nedition = \"2024\"\n\n\
         [dependencies]\n{dependencies}\n[workspace]\n"
    );
    let source = folder.path().join("src");
    let write = |path: &Path, text: &str| fs::write(path, text);
    fs::create_dir(&source)
        .and_then(|()| write(&folder.path().join("Cargo.toml"), &manifest))
        .and_then(|()| write(&source.join("main.rs"), main))
        // The same versions on both sides.
        .and_then(|()| fs::copy(root.join("Cargo.lock"), folder.path().join("Cargo.lock")))
        .map_err(|error| format!("{name}: {error}"))?;
    as_newcomer(cargo("fetch --quiet"), folder.path()).run()?;
    cpu_seconds(|| as_newcomer(cargo("build --release"), folder.path()).run())
}

/// A dependency on a package of this workspace.
fn on(package: &str, folder: &str, features: &str) -> String {
    let path = tree::root().join(folder);
    format!("{package} = {{ path = \"{}\", features = [{features}] }}\n", path.display())
}

const JEMALLOC: &str = "tikv-jemallocator = \"0.7\"\n";
const PLAIN: &str = "#[global_allocator]\nstatic HEAP: tikv_jemallocator::Jemalloc = \
                     tikv_jemallocator::Jemalloc;\nfn main() {}\n";
const MANAGED: &str = "#[global_allocator]\nstatic HEAP: lowtide_heap::Heap = \
                       lowtide_heap::Heap;\nfn main() {}\n";
const SERVICE: &str = "use lowtide as _;\nfn main() {}\n";

/// The package of the heap over plain jemalloc.
pub(super) fn measure_heap() -> Result<Vec<Figure>, String> {
    let plain = build_seconds("plain", JEMALLOC, PLAIN)?;
    let managed = build_seconds("managed", &on("lowtide-heap", "crates/heap", ""), MANAGED)?;
    println!("  {plain:.0} s with plain jemalloc, {managed:.0} s with lowtide");
    Ok(vec![figure("heap_build_cpu_seconds", managed - plain, "seconds")])
}

/// The features `service` and `prometheus` over a service that has axum, jemalloc and Prometheus.
pub(super) fn measure_service() -> Result<Vec<Figure>, String> {
    let rest = "axum = \"0.8\"\n\
                metrics = \"0.24\"\n\
                metrics-exporter-prometheus = { version = \"0.18\", default-features = false }\n\
                tokio = { version = \"1\", features = [\"macros\", \"rt-multi-thread\"] }\n";
    let plain = build_seconds("plain-service", &format!("{JEMALLOC}{rest}"), PLAIN)?;
    let lowtide = on("lowtide", "", "\"service\", \"prometheus\"");
    let managed = build_seconds("managed-service", &format!("{lowtide}{rest}"), SERVICE)?;
    println!("  {plain:.0} s with axum, jemalloc and Prometheus, {managed:.0} s with lowtide too");
    Ok(vec![figure("service_build_cpu_seconds", managed - plain, "seconds")])
}
