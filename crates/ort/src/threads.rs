//! The threads of a session's pools, which ONNX Runtime requests and which are counted here.
//!
//! A session starts them in its load and joins them when it is dropped.
//!
//! Invariant: `running <= started`.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use ort::environment::ThreadManager;

/// Address space of a stack: as much as ONNX Runtime's own threads get on Linux. Memory is used
/// only as deep as the stack grows.
const STACK: usize = 8 << 20;
/// The longest name that Linux shows.
const NAME_MAX: usize = 15;

/// Starts and counts the threads of one session.
#[derive(Clone, Debug)]
pub(crate) struct PoolThreads(Arc<Counts>);

#[derive(Debug)]
struct Counts {
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
        Self(Arc::new(Counts { name, started, running, folders: Mutex::default() }))
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
        let folders = self.0.folders.lock().unwrap_or_else(PoisonError::into_inner);
        let nanoseconds = folders.iter().filter_map(|folder| {
            let text = fs::read_to_string(folder.join("schedstat")).ok()?;
            text.split_whitespace().next()?.parse::<u64>().ok()
        });
        Duration::from_nanos(nanoseconds.sum())
    }

    /// Returns `true` if none of its threads runs or waits for a CPU, as far as the system reports
    /// it.
    pub(crate) fn are_asleep(&self) -> bool {
        let folders = self.0.folders.lock().unwrap_or_else(PoisonError::into_inner);
        folders.len() == self.started()
            && folders.iter().all(|folder| {
                let stat = fs::read_to_string(folder.join("stat")).unwrap_or_default();
                // After the name, which is in parentheses.
                stat.rsplit_once(") ").is_none_or(|(_, fields)| fields.starts_with('S'))
            })
    }
}

/// Counts the end of a thread, also if its work panics.
struct Running(Arc<Counts>);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.running.fetch_sub(1, Ordering::SeqCst);
    }
}

impl ThreadManager for PoolThreads {
    type Thread = JoinHandle<()>;

    fn create(&self, work: impl FnOnce() + Send + 'static) -> ort::Result<JoinHandle<()>> {
        self.0.running.fetch_add(1, Ordering::SeqCst);
        let running = Running(Arc::clone(&self.0));
        let builder = Builder::new().name(self.0.name.clone()).stack_size(STACK);
        let thread = builder.spawn(move || {
            if let Ok(folder) = fs::read_link("/proc/thread-self") {
                let folders = running.0.folders.lock();
                folders
                    .unwrap_or_else(PoisonError::into_inner)
                    .push(Path::new("/proc").join(folder));
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
