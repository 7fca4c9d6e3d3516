//! The text files of the repository, read once, and the list of what is wrong with them.
//!
//! Every text check takes a [`Tree`] and adds to [`Faults`]. A check never stops at a fault.
//!
//! Invariant: `.git`, `target` and `node_modules` are left out; all other files are in the tree.

use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::{env, fs};

/// Returns the repository's root: the folder above this package.
pub(crate) fn root() -> PathBuf {
    // Cargo sets the variable for `cargo run`, also in a clone that another copy has built.
    let package = env::var_os("CARGO_MANIFEST_DIR").map_or_else(|| "xtask".into(), PathBuf::from);
    package.parent().map_or_else(|| ".".into(), Path::to_owned)
}

/// A text file of the repository.
#[derive(Debug)]
pub(crate) struct Source {
    /// Its path from the root of the repository, with `/`.
    pub(crate) name: String,
    pub(crate) text: String,
}

impl Source {
    pub(crate) fn is_rust(&self) -> bool {
        self.name.ends_with(".rs")
    }

    pub(crate) fn is_under(&self, folder: &str) -> bool {
        self.name.strip_prefix(folder).is_some_and(|rest| rest.starts_with('/'))
    }
}

/// A package of the tree.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Package {
    /// Its folder with a `/` at the end; empty for the root.
    pub(crate) folder: String,
    /// The name of its crate, with `_`.
    pub(crate) crate_name: String,
    /// `true` if users get it.
    pub(crate) is_published: bool,
}

/// The files of a repository.
#[derive(Debug, Default)]
pub(crate) struct Tree {
    pub(crate) files: Vec<Source>,
    /// The names of files that are no text, such as pictures.
    pub(crate) binaries: Vec<String>,
}

impl Tree {
    /// Reads the files under the root.
    pub(crate) fn read(root: &Path) -> Result<Self, String> {
        let mut tree = Self::default();
        tree.add(root, root).map_err(|error| format!("cannot read the repository: {error}"))?;
        tree.files.sort_by(|one, other| one.name.cmp(&other.name));
        Ok(tree)
    }

    fn add(&mut self, root: &Path, folder: &Path) -> std::io::Result<()> {
        for entry in fs::read_dir(folder)? {
            let entry = entry?;
            let (kind, path) = (entry.file_type()?, entry.path());
            if [".git", "target", "node_modules"].iter().any(|name| entry.file_name() == *name) {
                continue;
            }
            if kind.is_dir() {
                self.add(root, &path)?;
            } else if kind.is_file() {
                let name = path.strip_prefix(root).unwrap_or(&path).to_string_lossy().into_owned();
                match String::from_utf8(fs::read(&path)?) {
                    Ok(text) => self.files.push(Source { name, text }),
                    Err(_) => self.binaries.push(name),
                }
            }
        }
        Ok(())
    }

    /// Returns the file of this name.
    pub(crate) fn file(&self, name: &str) -> Option<&Source> {
        self.files.iter().find(|source| source.name == name)
    }

    /// Returns the text of the file of this name. A missing file is a fault.
    pub(crate) fn text<'a>(&'a self, name: &str, faults: &Faults) -> &'a str {
        faults.expect(self.file(name).is_some(), || format!("{name}: no such file"));
        self.file(name).map_or("", |source| &source.text)
    }

    /// Returns `true` if this is a file, or a folder that holds one.
    pub(crate) fn has(&self, path: &str) -> bool {
        let is_it = |source: &Source| source.name == path || source.is_under(path);
        self.files.iter().any(is_it) || self.binaries.iter().any(|name| name == path)
    }

    /// Returns the packages: every folder with a manifest that has a `[package]`.
    pub(crate) fn packages(&self) -> Vec<Package> {
        let manifests = self.files.iter().filter_map(|source| {
            let folder = source.name.strip_suffix("Cargo.toml")?;
            let is_manifest = folder.is_empty() || folder.ends_with('/');
            is_manifest.then_some((folder, &source.text))
        });
        let package = |(folder, text): (&str, &String)| {
            let section = text.split("[package]").nth(1)?.split("\n[").next()?;
            let name = section.lines().find_map(|line| line.strip_prefix("name = \""))?;
            Some(Package {
                folder: folder.to_owned(),
                crate_name: name.trim_end_matches('"').replace('-', "_"),
                is_published: !section.contains("\npublish = false"),
            })
        };
        manifests.filter_map(package).collect()
    }

    /// Returns the Rust files of published packages: their `src` folders.
    pub(crate) fn library(&self) -> Vec<&Source> {
        let packages = self.packages();
        let published = packages.iter().filter(|package| package.is_published);
        let folders: Vec<_> = published.map(|package| format!("{}src", package.folder)).collect();
        let is_library = |source: &&Source| folders.iter().any(|folder| source.is_under(folder));
        self.files.iter().filter(|source| source.is_rust()).filter(is_library).collect()
    }
}

/// A list of faults, one line each: place, value, what was expected.
#[derive(Debug, Default)]
pub(crate) struct Faults(RefCell<Vec<String>>);

impl Faults {
    /// Adds a fault.
    pub(crate) fn say(&self, what: impl Into<String>) {
        self.0.borrow_mut().push(what.into());
    }

    /// Adds a fault at a line of a file.
    pub(crate) fn add(&self, source: &Source, line: usize, what: &str) {
        self.say(format!("{}:{line}: {what}", source.name));
    }

    /// Adds a fault if the condition does not hold.
    pub(crate) fn expect(&self, holds: bool, what: impl FnOnce() -> String) {
        if !holds {
            self.say(what());
        }
    }

    /// Returns the faults in order, each once.
    pub(crate) fn sorted(self) -> Vec<String> {
        let mut all = self.0.into_inner();
        all.sort();
        all.dedup();
        all
    }
}
