//! A memory cgroup of one's own, so that what the kernel charges is this process's alone.
//!
//! Works where the process may make folders in its cgroup (root, or a delegated cgroup), for
//! cgroup v1 and v2. Elsewhere it says why not, and the run measures its own pages instead.

use std::fs;
use std::path::{Path, PathBuf};

/// A cgroup that this process moved into; on drop it moves back and removes the folder.
#[derive(Debug)]
pub(crate) struct OwnCgroup {
    folder: PathBuf,
    home: PathBuf,
}

impl OwnCgroup {
    /// Makes a memory cgroup below the present one and moves this process into it, under a limit
    /// where one is given.
    pub(crate) fn enter(limit_bytes: Option<u64>) -> Result<Self, String> {
        let (home, v2) = home()?;
        let folder = home.join(format!("lowtide-{}", std::process::id()));
        let fault = |what: &str, error: std::io::Error| format!("{what}: {error}");
        fs::create_dir(&folder).map_err(|error| fault("a cgroup cannot be made", error))?;
        let own = Self { folder, home };
        if v2 && !own.folder.join("memory.stat").exists() {
            return Err("the memory controller is not delegated to this cgroup".to_owned());
        }
        if let Some(bytes) = limit_bytes {
            let files: &[&str] = if v2 {
                &["memory.max"]
            } else {
                &["memory.limit_in_bytes", "memory.memsw.limit_in_bytes"]
            };
            for file in files {
                let set = fs::write(own.folder.join(file), bytes.to_string());
                // The second is there only where swap is accounted.
                if let (Err(error), "memory.max" | "memory.limit_in_bytes") = (set, *file) {
                    return Err(fault("a limit cannot be set", error));
                }
            }
        }
        let pid = std::process::id().to_string();
        fs::write(own.folder.join("cgroup.procs"), pid)
            .map_err(|error| fault("the cgroup cannot be entered", error))?;
        Ok(own)
    }
}

impl Drop for OwnCgroup {
    fn drop(&mut self) {
        let pid = std::process::id().to_string();
        // Best effort: a folder that stays behind is empty and harmless.
        let _ = fs::write(self.home.join("cgroup.procs"), pid);
        let _ = fs::remove_dir(&self.folder);
    }
}

/// The folder of the present memory cgroup, and whether it is version 2.
fn home() -> Result<(PathBuf, bool), String> {
    let text = fs::read_to_string("/proc/self/cgroup").map_err(|error| error.to_string())?;
    let path_of = |wanted: &dyn Fn(&str) -> bool| {
        text.lines().find_map(|line| {
            let mut parts = line.splitn(3, ':').skip(1);
            let controllers = parts.next()?;
            wanted(controllers).then(|| parts.next())?
        })
    };
    let v1 = path_of(&|controllers| controllers.split(',').any(|one| one == "memory"));
    let (root, path, v2) = match v1 {
        Some(path) => ("/sys/fs/cgroup/memory", path, false),
        None => {
            ("/sys/fs/cgroup", path_of(&str::is_empty).ok_or("no memory cgroup is mounted")?, true)
        }
    };
    let folder = Path::new(root).join(path.trim_start_matches('/'));
    folder.is_dir().then_some((folder, v2)).ok_or_else(|| format!("{root}{path} is not visible"))
}
