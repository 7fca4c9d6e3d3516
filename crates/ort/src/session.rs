//! A loaded session, and how it is loaded.
//!
//! One run at a time: `ort` takes the session by `&mut`, because parts of ONNX Runtime are not
//! thread-safe, and a run uses all threads of the pool anyway. A second run at once would add its
//! memory to the peak.
//!
//! Invariant: a session that is unloaded has no threads, unless a value of it is still held.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, JoinHandle};
use std::time::Duration;
use std::{fs, io};

use lowtide::BoxError;
use lowtide::config::Profile;
use lowtide::memory::WeakMemory;
use lowtide_core::sync::lock;
use ort::environment::{Environment, ThreadManager};
use ort::session::Session;
use ort::session::builder::SessionBuilder;

use super::blocks;
use super::error::{OrtError, text};

/// A loaded session of ONNX Runtime: `acquire().await` or `acquire_blocking()` of the registered
/// session returns a guard, which keeps it loaded.
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
        lock(&self.session)
    }

    /// Returns the number of its threads that run now, without those that call it.
    #[must_use]
    pub fn threads(&self) -> usize {
        self.threads.running()
    }
}

lowtide_core::debug_as!(LoadedSession, |it| threads: it.threads());

/// A change to the builder of a session.
pub(crate) type Configure =
    dyn Fn(SessionBuilder) -> Result<SessionBuilder, BoxError> + Send + Sync;

/// What all sessions of a runtime have in common.
pub(crate) struct SessionContext {
    pub(crate) environment: Environment,
    pub(crate) settings: SessionSettings,
    pub(crate) version: String,
    pub(crate) memory: WeakMemory,
}

/// All that a load needs.
pub(crate) struct Loader {
    pub(crate) name: String,
    pub(crate) model: PathBuf,
    pub(crate) context: Arc<SessionContext>,
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
        if let Some(memory) = self.context.memory.upgrade() {
            let _ = memory.heap().purge();
        }
        Ok(LoadedSession { session: Mutex::new(session), threads })
    }

    fn builder(&self, threads: &PoolThreads) -> Result<SessionBuilder, OrtError> {
        let cannot = |cause| OrtError::Runtime { act: "create a session", cause };
        let SessionContext { environment, settings, .. } = &*self.context;
        let builder = Session::builder(environment).map_err(|error| cannot(text(&error)))?;
        let builder = settings.apply(builder).map_err(cannot)?;
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

    fn check_threads(&self, started: usize) -> Result<(), OrtError> {
        let SessionContext { settings, version, .. } = &*self.context;
        match (settings.pool_threads(), settings.get(INTRA_THREADS)) {
            (Some(expected), Some(value)) if started != expected => Err(OrtError::NotInForce {
                key: INTRA_THREADS,
                value: value.to_owned(),
                observed: format!("{started} threads of the pool (expected {expected})"),
                version: version.clone(),
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
    let file = fs::File::open(path)?;
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
    let len = |path: &Path| fs::metadata(path).map_or(0, |metadata| metadata.len());
    let name = model.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let folder = model.parent().filter(|folder| !folder.as_os_str().is_empty());
    let entries = fs::read_dir(folder.unwrap_or_else(|| Path::new(".")));
    let external = entries.into_iter().flatten().flatten().filter(|entry| {
        let other = entry.file_name().to_string_lossy().into_owned();
        let end = other.strip_prefix(&name);
        end.is_some_and(|end| end.starts_with(['.', '_']) && end.contains("data"))
    });
    external.map(|entry| len(&entry.path())).fold(len(model), u64::saturating_add)
}

// A profile's settings, applied to a session.
//
// ONNX Runtime accepts any key and any value of a session entry, so nothing is known from the
// acceptance; `verify` observes the effect.
//
// Invariant: a setting that cannot be applied is an error, never skipped.

/// Sessions use the allocator that is registered with the environment.
pub(crate) const ENV_ALLOCATORS: &str = "session.use_env_allocators";
/// The threads that compute one operator, the caller included.
pub(crate) const INTRA_THREADS: &str = "intra_op_num_threads";
/// One block for a whole run.
pub(crate) const PATTERN: &str = "enable_mem_pattern";
/// Threads of the pool poll for work before they sleep.
pub(crate) const SPINNING: &str = "session.intra_op.allow_spinning";

const INTER_THREADS: &str = "inter_op_num_threads";
const ARENA: &str = "enable_cpu_mem_arena";
/// Without an observable effect in 1.32 for the CPU: packed weights are reserved anyway, and others
/// are used where they were read.
const WEIGHTS: &str = "session.use_device_allocator_for_initializers";
/// Settings of a profile that the registered allocator replaces.
const REPLACED: [&str; 3] = [ARENA, PATTERN, WEIGHTS];

/// The settings of every session of a runtime.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SessionSettings(Vec<(&'static str, String)>);

impl SessionSettings {
    /// The settings of a profile, with the registered allocator in the place of ONNX Runtime's
    /// arena.
    pub(crate) fn of(profile: Profile, cpus: u32) -> Self {
        let mut all = profile.onnxruntime(cpus);
        all.retain(|(name, _)| !REPLACED.contains(name));
        all.push((ENV_ALLOCATORS, "1".to_owned()));
        all.push((PATTERN, "false".to_owned()));
        Self(all)
    }

    /// Returns the value of a setting.
    pub(crate) fn get(&self, key: &str) -> Option<&str> {
        self.0.iter().find(|(name, _)| *name == key).map(|(_, value)| &**value)
    }

    /// Returns the same with another value.
    #[cfg(test)]
    pub(crate) fn with(&self, key: &'static str, value: &str) -> Self {
        let others = self.0.iter().filter(|(name, _)| *name != key).cloned();
        Self(others.chain([(key, value.to_owned())]).collect())
    }

    /// Returns the number of threads that a session starts.
    pub(crate) fn pool_threads(&self) -> Option<usize> {
        let threads: usize = self.get(INTRA_THREADS)?.parse().ok()?;
        threads.checked_sub(1) // the caller computes too
    }

    /// Applies them.
    pub(crate) fn apply(&self, mut builder: SessionBuilder) -> Result<SessionBuilder, String> {
        for (key, value) in &self.0 {
            let number =
                || value.parse().map_err(|_| format!("{key}={value:?}: expected a number"));
            let applied = match *key {
                INTRA_THREADS => builder.with_intra_threads(number()?),
                INTER_THREADS => builder.with_inter_threads(number()?),
                PATTERN => builder.with_memory_pattern(value != "false"),
                key if key.contains('.') => builder.with_config_entry(key, value),
                key => return Err(format!("no function of ONNX Runtime for the setting {key}")),
            };
            builder = applied.map_err(|error| text(&error))?;
        }
        Ok(builder)
    }
}

// The threads of a session's pools, which ONNX Runtime requests and which are counted here.
//
// A session starts them in its load and joins them when it is dropped.
//
// Invariant: `running <= started`.

/// Address space of a stack: as much as ONNX Runtime's own threads get on Linux. Memory is used
/// only as deep as the stack grows.
const STACK: usize = 8 << 20;
/// The longest name that Linux shows.
const NAME_MAX: usize = 15;

/// Starts and counts the threads of one session.
#[derive(Clone, Debug)]
pub(crate) struct PoolThreads(Arc<ThreadCounts>);

#[derive(Debug)]
struct ThreadCounts {
    name: String,
    started: AtomicUsize,
    running: AtomicUsize,
    /// The folders of the threads in `/proc`, from the root.
    folders: Mutex<Vec<PathBuf>>,
}

impl PoolThreads {
    /// For the session of this name.
    pub(crate) fn of(session: &str) -> Self {
        let name = format!("ort-{session}").replace('\0', "");
        let end = (0..=NAME_MAX.min(name.len())).rev().find(|at| name.is_char_boundary(*at));
        let name = name.get(..end.unwrap_or_default()).unwrap_or_default().to_owned();
        let (started, running) = (AtomicUsize::new(0), AtomicUsize::new(0));
        Self(Arc::new(ThreadCounts { name, started, running, folders: Mutex::default() }))
    }

    /// Returns the number of threads that were started.
    pub(crate) fn started(&self) -> usize {
        self.0.started.load(Ordering::SeqCst)
    }

    /// Returns the number of threads that run.
    pub(crate) fn running(&self) -> usize {
        self.0.running.load(Ordering::SeqCst)
    }

    /// Returns the CPU time of its running threads. Zero if the system does not report it.
    pub(crate) fn cpu_time(&self) -> Duration {
        let folders = lock(&self.0.folders);
        let nanoseconds = folders.iter().filter_map(|folder| {
            let text = fs::read_to_string(folder.join("schedstat")).ok()?;
            text.split_whitespace().next()?.parse::<u64>().ok()
        });
        Duration::from_nanos(nanoseconds.sum())
    }

    /// Returns `true` if none of its threads runs or waits for a CPU, as far as the system reports
    /// it.
    pub(crate) fn are_asleep(&self) -> bool {
        let folders = lock(&self.0.folders);
        folders.len() == self.started()
            && folders.iter().all(|folder| {
                let stat = fs::read_to_string(folder.join("stat")).unwrap_or_default();
                // After the name, which is in parentheses.
                stat.rsplit_once(") ").is_none_or(|(_, fields)| fields.starts_with('S'))
            })
    }
}

/// Counts the end of a thread, also if its work panics.
struct RunningThread(Arc<ThreadCounts>);

impl Drop for RunningThread {
    fn drop(&mut self) {
        self.0.running.fetch_sub(1, Ordering::SeqCst);
    }
}

impl ThreadManager for PoolThreads {
    type Thread = JoinHandle<()>;

    fn create(&self, work: impl FnOnce() + Send + 'static) -> ort::Result<JoinHandle<()>> {
        self.0.running.fetch_add(1, Ordering::SeqCst);
        let running = RunningThread(Arc::clone(&self.0));
        let builder = Builder::new().name(self.0.name.clone()).stack_size(STACK);
        let thread = builder.spawn(move || {
            if let Ok(folder) = fs::read_link("/proc/thread-self") {
                lock(&running.0.folders).push(Path::new("/proc").join(folder));
            }
            work();
            drop(running);
        });
        let thread = thread.map_err(ort::Error::wrap)?;
        self.0.started.fetch_add(1, Ordering::SeqCst);
        Ok(thread)
    }

    fn join(thread: JoinHandle<()>) -> ort::Result<()> {
        thread.join().map_err(|_| ort::Error::new("a thread of the pool panicked"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_size_of_a_model_includes_its_external_data() {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str, len: usize| {
            let path = folder.path().join(name);
            fs::write(&path, vec![0; len]).unwrap();
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

#[cfg(test)]
mod settings_tests {
    use super::*;

    #[test]
    fn every_setting_of_every_profile_can_be_applied() {
        for profile in Profile::ALL {
            let settings = SessionSettings::of(profile, 4);
            let known = |key: &str| {
                key.contains('.') || [INTRA_THREADS, INTER_THREADS, PATTERN].contains(&key)
            };
            assert!(settings.0.iter().all(|(key, _)| known(key)), "{settings:?}");
            let entries = profile.onnxruntime(4);
            let entries = entries.iter().filter(|(name, _)| name.starts_with("session."));
            let entries = entries.filter(|(name, _)| !REPLACED.contains(name));
            entries.for_each(|(name, value)| assert_eq!(settings.get(name), Some(&**value)));
        }
    }

    #[test]
    fn a_session_uses_the_registered_allocator_and_the_threads_of_the_profile() {
        let settings = SessionSettings::of(Profile::Balanced, 4);
        assert_eq!(settings.get(ENV_ALLOCATORS), Some("1"));
        assert_eq!((settings.get(PATTERN), settings.get(ARENA)), (Some("false"), None));
        assert_eq!(settings.pool_threads(), Some(3));
        assert_eq!(SessionSettings::of(Profile::LowMemory, 4).pool_threads(), Some(0));
    }
}

#[cfg(test)]
mod threads_tests {
    use super::*;
    use std::sync::mpsc::channel;

    #[test]
    fn threads_are_counted_until_they_end() {
        let threads = PoolThreads::of("embedder");
        let (end, ended) = channel::<()>();
        let thread = threads.create(move || _ = ended.recv()).unwrap();
        assert_eq!((threads.started(), threads.running()), (1, 1));
        assert_eq!(thread.thread().name(), Some("ort-embedder"));
        drop(end);
        PoolThreads::join(thread).unwrap();
        assert_eq!((threads.started(), threads.running()), (1, 0));
    }

    #[test]
    fn a_long_name_is_cut_between_characters() {
        assert_eq!(PoolThreads::of("sentence-encoder-large").0.name, "ort-sentence-en");
        assert_eq!(PoolThreads::of("ääääääääää").0.name, "ort-äääää");
    }
}
