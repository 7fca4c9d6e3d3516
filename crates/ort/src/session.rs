//! A loaded session, and how it is loaded.
//!
//! One run at a time: `ort` takes the session by `&mut`, because parts of ONNX Runtime are not
//! thread-safe, and a run uses all threads of the pool anyway. A second run at once would add its
//! memory to the peak.
//!
//! Invariant: a session that is unloaded has no threads, unless a value of it is still held.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use lowtide::BoxError;
use lowtide::admission::Managed;
use lowtide::memory::WeakMemory;
use ort::environment::Environment;
use ort::session::Session;
use ort::session::builder::SessionBuilder;

use super::blocks;
use super::error::{NotInForce, OrtError, text};
use super::settings::{INTRA_THREADS, SessionSettings};
use super::threads::PoolThreads;

/// A session that is loaded on first use and unloaded when idle.
///
/// `acquire().await` or `acquire_blocking()` returns a guard, which keeps the session loaded.
pub type ManagedSession = Managed<LoadedSession>;

/// A loaded session of ONNX Runtime.
///
/// Copy the results out of a run. A value that is moved out of the outputs keeps the session, with
/// its threads and its memory, after the unload.
pub struct LoadedSession {
    session: Mutex<Session>,
    threads: PoolThreads,
}

impl LoadedSession {
    /// Waits for the end of other runs, and returns the session for one run. A run computes on this
    /// thread: in an async service, call it within `tokio::task::spawn_blocking`.
    pub fn lock(&self) -> MutexGuard<'_, Session> {
        self.session.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the number of its threads that run now, without those that call it.
    #[must_use]
    pub fn threads(&self) -> usize {
        self.threads.running()
    }
}

impl fmt::Debug for LoadedSession {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LoadedSession").field("threads", &self.threads()).finish_non_exhaustive()
    }
}

/// The changed builder of a session, or why it cannot be changed.
pub type Configured = Result<SessionBuilder, BoxError>;

/// A change to the builder of a session.
pub(crate) type Configure = dyn Fn(SessionBuilder) -> Configured + Send + Sync;

/// All that a load needs.
pub(crate) struct Loader {
    pub(crate) name: String,
    pub(crate) model: PathBuf,
    pub(crate) environment: Environment,
    pub(crate) settings: SessionSettings,
    pub(crate) version: Arc<str>,
    pub(crate) memory: WeakMemory,
    pub(crate) configure: Option<Box<Configure>>,
}

impl Loader {
    /// Loads the session, on this thread.
    pub(crate) fn load(&self) -> Result<LoadedSession, BoxError> {
        check_file(&self.model)
            .map_err(|cause| OrtError::ModelFile { path: self.model.clone(), cause })?;
        let threads = PoolThreads::of(&self.name);
        let session = blocks::load(|| {
            let mut builder = self.builder(&threads)?;
            if let Some(configure) = &self.configure {
                builder = configure(builder)?;
            }
            builder.commit_from_file(&self.model).map_err(|error| self.failed(&error).into())
        });
        let session: Result<Session, BoxError> = session;
        let session = session?;
        if self.configure.is_none() {
            self.check_threads(threads.started())?;
        }
        // The copies of the model that the load made are freed by now.
        if let Some(memory) = self.memory.upgrade() {
            let _ = memory.heap().purge();
        }
        Ok(LoadedSession { session: Mutex::new(session), threads })
    }

    fn builder(&self, threads: &PoolThreads) -> Result<SessionBuilder, OrtError> {
        let cannot = |cause| OrtError::Runtime { act: "create a session", cause };
        let builder = Session::builder(&self.environment).map_err(|error| cannot(text(&error)))?;
        let builder = self.settings.apply(builder).map_err(cannot)?;
        builder.with_thread_manager(threads.clone()).map_err(|error| cannot(text(&error)))
    }

    /// Returns the typed error for a failed load.
    fn failed(&self, error: &ort::Error) -> OrtError {
        let (path, cause) = (self.model.clone(), text(error));
        if is_about_external_data(&cause) {
            OrtError::ExternalData { path, cause }
        } else {
            OrtError::Model { path, cause }
        }
    }

    fn check_threads(&self, started: usize) -> Result<(), NotInForce> {
        match (self.settings.pool_threads(), self.settings.get(INTRA_THREADS)) {
            (Some(expected), Some(value)) if started != expected => Err(NotInForce {
                key: INTRA_THREADS,
                value: value.to_owned(),
                observed: format!("{started} threads of the pool (expected {expected})"),
                version: self.version.to_string(),
            }),
            _ => Ok(()),
        }
    }
}

/// Drops the session, with its threads.
pub(crate) fn unload(name: &str, loaded: LoadedSession) {
    let LoadedSession { session, threads } = loaded;
    let session = session.into_inner().unwrap_or_else(PoisonError::into_inner);
    let held = Arc::downgrade(&session.inner());
    drop(session);
    if held.strong_count() > 0 {
        log!(
            warn,
            target: "lowtide",
            name,
            threads = threads.running(),
            "session not released: a value of a run is still held"
        );
    }
    #[cfg(feature = "cuda")]
    super::cuda::wait_for_freed();
}

/// Checks that a file can be opened, for an error that names it. A folder can be opened too.
fn check_file(path: &Path) -> io::Result<()> {
    let file = std::fs::File::open(path)?;
    if file.metadata()?.is_file() { Ok(()) } else { Err(io::Error::other("it is not a file")) }
}

/// ONNX Runtime has no code for it. The second text is that of 1.23 for a missing file.
fn is_about_external_data(message: &str) -> bool {
    let message = message.to_lowercase();
    ["external", "cannot get file size"].iter().any(|text| message.contains(text))
}

/// Returns the bytes of the model's files. External data is taken to be in files next to the model
/// whose names begin with its name, as exporters write them (`model.onnx.data`, `model.onnx_data`).
pub(crate) fn bytes_on_disk(model: &Path) -> u64 {
    let len = |path: &Path| std::fs::metadata(path).map_or(0, |metadata| metadata.len());
    let name = model.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let folder = model.parent().filter(|folder| !folder.as_os_str().is_empty());
    let entries = std::fs::read_dir(folder.unwrap_or_else(|| Path::new(".")));
    let external = entries.into_iter().flatten().flatten().filter(|entry| {
        let other = entry.file_name().to_string_lossy().into_owned();
        let end = other.strip_prefix(&name);
        end.is_some_and(|end| end.starts_with(['.', '_']) && end.contains("data"))
    });
    external.map(|entry| len(&entry.path())).fold(len(model), u64::saturating_add)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_size_of_a_model_includes_its_external_data() {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str, len: usize| {
            let path = folder.path().join(name);
            std::fs::write(&path, vec![0; len]).unwrap();
            path
        };
        let model = file("model.onnx", 10);
        file("model.onnx.data", 100);
        file("model.onnx_data", 1_000);
        file("model.onnx.bak", 10_000);
        file("other.onnx.data", 10_000);
        assert_eq!(bytes_on_disk(&model), 1_110);
        assert_eq!(bytes_on_disk(&folder.path().join("missing.onnx")), 0);
    }

    #[test]
    fn a_path_that_is_no_file_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        assert!(check_file(folder.path()).is_err());
        assert!(check_file(&folder.path().join("missing")).is_err());
    }
}
