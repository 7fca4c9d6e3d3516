//! The program of the proxy, for benches that start it as a process.

use std::path::{Path, PathBuf};
use std::process::Command;

use lowtide::BoxError;

/// Builds the proxy with the profile of this program, and returns its path.
pub(crate) fn program() -> Result<PathBuf, BoxError> {
    let profile = if cfg!(debug_assertions) { "dev" } else { "release" };
    let status = Command::new(env!("CARGO"))
        .current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
        .args(["build", "--locked", "--quiet", "--example", "proxy", "--profile", profile])
        .status()?;
    if !status.success() {
        return Err(format!("the proxy was not built: {status}").into());
    }
    // This program lies in `deps`, beside `examples`.
    let own = std::env::current_exe()?;
    let folder = own.parent().and_then(Path::parent).ok_or("this program lies in no folder")?;
    Ok(folder.join("examples/proxy"))
}
