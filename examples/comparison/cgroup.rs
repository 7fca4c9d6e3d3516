//! A private memory cgroup for a child process.
//!
//! It works if the process may create folders in its cgroup (root, or a delegated cgroup), for
//! cgroup v1 and v2. Otherwise it returns the cause.

use std::fs;
use std::path::{Path, PathBuf};

/// A memory cgroup below the present one, removed on drop once it is empty.
#[derive(Debug)]
pub struct Group {
    /// Its folder.
    pub folder: PathBuf,
}

impl Group {
    /// Creates a cgroup with a limit.
    pub fn make(name: &str, limit_bytes: u64) -> Result<Self, String> {
        let (home, v2) = home()?;
        let folder = home.join(name);
        let fault = |what: &str, error: std::io::Error| format!("{what}: {error}");
        fs::create_dir(&folder).map_err(|error| fault("cannot create a cgroup", error))?;
        let group = Self { folder };
        if v2 && !group.folder.join("memory.stat").exists() {
            return Err("the memory controller is not delegated to this cgroup".to_owned());
        }
        set_limit(&group.folder, limit_bytes)
            .map_err(|error| fault("cannot set a limit", error))?;
        Ok(group)
    }

    /// The file into which a process writes its id to enter.
    pub fn entrance(&self) -> PathBuf {
        self.folder.join("cgroup.procs")
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // Best effort: a folder that stays behind is empty and harmless.
        let _ = fs::remove_dir(&self.folder);
    }
}

/// Sets the limit of a cgroup, also that of memory and swap together.
pub(crate) fn set_limit(folder: &Path, bytes: u64) -> std::io::Result<()> {
    let (limit, v2) = (bytes.to_string(), folder.join("memory.max"));
    if v2.exists() {
        let _ = fs::write(folder.join("memory.swap.max"), "0");
        return fs::write(v2, limit);
    }
    // There only where swap is accounted, and never below the limit without swap.
    let both = folder.join("memory.memsw.limit_in_bytes");
    let is_raised = fs::write(&both, &limit).is_ok();
    fs::write(folder.join("memory.limit_in_bytes"), &limit)?;
    if !is_raised {
        let _ = fs::write(both, limit);
    }
    Ok(())
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
