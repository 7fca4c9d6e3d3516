//! The packages of the workspace, as Cargo lists them.

use std::collections::BTreeSet;

use serde_json::Value;

use crate::run::cargo;
use crate::tree;

/// A package of the workspace.
#[derive(Clone, Debug)]
pub(crate) struct Package {
    pub(crate) name: String,
    /// Its folder from the root, with a `/` at the end; empty for the root.
    pub(crate) folder: String,
    pub(crate) is_published: bool,
    /// `true` if `cargo test` without `-p` tests it.
    pub(crate) is_default: bool,
    /// Its features but `default`.
    pub(crate) features: Vec<String>,
    /// The features that docs.rs builds with.
    pub(crate) documented: Vec<String>,
    pub(crate) version: String,
    pub(crate) rust_version: String,
    /// The packages of the workspace that it depends on, for its tests too.
    pub(crate) dependencies: Vec<String>,
    /// Those of them without which its library cannot be built.
    pub(crate) needs: Vec<String>,
}

/// Returns all of them.
pub(crate) fn packages() -> Result<Vec<Package>, String> {
    let text = cargo("metadata --no-deps --format-version 1").output()?;
    let metadata: Value = serde_json::from_str(&text).map_err(|error| error.to_string())?;
    let root = tree::root();
    let root = root.canonicalize().unwrap_or(root);
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let package = |package: &Value| {
        let manifest = text(&package["manifest_path"]);
        let folder = manifest.trim_end_matches("Cargo.toml");
        let folder = folder.strip_prefix(&*root.to_string_lossy()).unwrap_or(folder);
        let features = package["features"].as_object().into_iter().flatten();
        let dependencies = list(&package["dependencies"]);
        let inside = || dependencies.iter().filter(|dependency| dependency["path"].is_string());
        let name = |dependency: &Value| text(&dependency["name"]);
        let on_docs_rs = &package["metadata"]["docs"]["rs"]["features"];
        Package {
            name: text(&package["name"]),
            folder: folder.trim_start_matches('/').to_owned(),
            is_published: package["publish"].as_array().is_none_or(|to| !to.is_empty()),
            is_default: list(&metadata["workspace_default_members"]).contains(&package["id"]),
            features: features.map(|(name, _)| name.clone()).filter(|n| n != "default").collect(),
            documented: list(on_docs_rs).iter().map(text).collect(),
            version: text(&package["version"]),
            rust_version: text(&package["rust_version"]),
            dependencies: inside().map(name).collect(),
            needs: inside().filter(|one| one["kind"].is_null()).map(name).collect(),
        }
    };
    let all: Vec<_> = list(&metadata["packages"]).iter().map(package).collect();
    if all.is_empty() { Err("cargo metadata lists no packages".to_owned()) } else { Ok(all) }
}

/// Returns the packages that depend on one of these, directly or not, without these.
pub(crate) fn dependents(all: &[Package], of: &BTreeSet<String>) -> BTreeSet<String> {
    let mut found = of.clone();
    loop {
        let next = all.iter().filter(|package| {
            !found.contains(&package.name) && package.dependencies.iter().any(|n| found.contains(n))
        });
        let next: Vec<_> = next.map(|package| package.name.clone()).collect();
        if next.is_empty() {
            return found.difference(of).cloned().collect();
        }
        found.extend(next);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dependents_are_found_through_others() {
        let package = |name: &str, on: &[&str]| Package {
            name: name.to_owned(),
            folder: String::new(),
            is_published: true,
            is_default: true,
            features: Vec::new(),
            documented: Vec::new(),
            version: String::new(),
            rust_version: String::new(),
            dependencies: on.iter().map(ToString::to_string).collect(),
            needs: Vec::new(),
        };
        let all = [
            package("core", &[]),
            package("gpu", &["core"]),
            package("top", &["gpu", "heap"]),
            package("heap", &["core"]),
        ];
        let of = |name: &str| dependents(&all, &BTreeSet::from([name.to_owned()]));
        assert_eq!(of("gpu").into_iter().collect::<Vec<_>>(), ["top"]);
        assert_eq!(of("core").len(), 3);
        assert!(of("top").is_empty());
    }
}
