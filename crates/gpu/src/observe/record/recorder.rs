//! The recorder: writes the operations of an arena to a sink, in the order in which they take
//! effect.
//!
//! The recorder observes the events of the arena. The thread that caused an event writes its line
//! into a bounded buffer. The thread that finds enough waiting lines passes them on to the sink,
//! without holding a lock of the arena. The recorder calls no driver and makes no decisions. An
//! error stops only the recording.
//!
//! Invariant: the sink receives complete lines in order, or an error is stored.

use lowtide_core::log;
use std::fmt;
use std::io::Write;
use std::mem;
use std::sync::Arc;

use super::error::RecordError;
use super::hash::OperationHash;
use super::lines::{DUE_FROM, WAIT_FROM, WaitingLines};
use super::operation::{Ended, Header};
use crate::exec::observer::Observer;
use crate::state::event::SequencedEvent;
use crate::types::error::DeviceError;
use lowtide_core::bytes::ByteSize;
use lowtide_core::fork::Birth;
use lowtide_core::sync::atomic::{AtomicUsize, Ordering};
use lowtide_core::sync::{Mutex, MutexGuard, caught, lock, try_lock};

/// Records the operations of one arena. Clones are cheap handles to the same recorder.
///
/// Pass it to an arena when it is opened ([`ArenaConfig::recorder`]). Thread caches are then
/// disabled, so that every block is recorded. Operations are written as lines of text
/// (`docs/RECORDING.md`), in batches of about 64 KiB, by a thread that uses the arena: any call or
/// drop may take as long as a write to the sink. Threads wait for a slow sink once 256 KiB are
/// pending. The sink needs no buffer of its own.
///
/// If the sink fails or panics, the recording stops, the error is logged once through `tracing` and
/// available from [`Recorder::error`], and the arena continues to work. The sink may use the arena
/// itself; its operations then wait to be written, and more than 1 MiB of them stop the recording.
///
/// ```
/// # use std::sync::Arc;
/// use lowtide_gpu::clock::SystemClock;
/// use lowtide_gpu::record::{Log, Recorder};
/// use lowtide_gpu::{ArenaConfig, DeviceArena, HostDriver, Region};
///
/// # let folder = tempfile::tempdir()?;
/// let path = folder.path().join("arena.log");
/// let recorder = Recorder::new(std::fs::File::create(&path)?);
/// let config = ArenaConfig { recorder: Some(recorder.clone()), ..ArenaConfig::new("embedder") };
/// let driver = Arc::new(HostDriver::new());
/// let arena = DeviceArena::open(driver.clone(), Arc::new(SystemClock::new()), config)?;
/// drop(arena.alloc::<f32>(1 << 20, Region::Dynamic)?);
/// drop(arena); // writes the last line
///
/// let log = Log::read(std::fs::File::open(&path)?)?;
/// let replayed = log.replay(driver, log.header().config())?;
/// assert_eq!(replayed.matches(), Some(true));
/// assert_eq!(replayed.hash, recorder.hash());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// [`ArenaConfig::recorder`]: crate::ArenaConfig::recorder
#[derive(Clone)]
pub struct Recorder {
    inner: Arc<Inner>,
}

struct Inner {
    lines: Mutex<WaitingLines>,
    /// The number of waiting bytes: a copy that is readable without the lock.
    waiting: AtomicUsize,
    sink: Mutex<Sink>,
    /// The thread that is writing to the sink; 0 for none.
    writer: AtomicUsize,
    birth: Birth,
}

struct Sink {
    /// The sink; `None` once the recording is over.
    to: Option<Box<dyn Write + Send>>,
    /// The last written text, cleared, as a spare buffer.
    spare: String,
}

impl Recorder {
    /// Creates a recorder that writes to a sink without a size limit.
    #[must_use]
    pub fn new(sink: impl Write + Send + 'static) -> Self {
        Self::with(Some(Box::new(sink)), usize::MAX)
    }

    /// Creates a recorder that writes at most `most` bytes, including a last line that names the
    /// limit as the reason of the end.
    #[must_use]
    pub fn bounded(sink: impl Write + Send + 'static, most: ByteSize) -> Self {
        Self::with(Some(Box::new(sink)), most.as_usize().unwrap_or(usize::MAX))
    }

    /// Creates a recorder that writes nothing and only computes the hash.
    #[must_use]
    pub fn hash_only() -> Self {
        Self::with(None, usize::MAX)
    }

    fn with(to: Option<Box<dyn Write + Send>>, most: usize) -> Self {
        let lines = Mutex::new(WaitingLines::new(to.is_none(), most));
        let sink = Mutex::new(Sink { to, spare: String::new() });
        let (waiting, writer) = (AtomicUsize::new(0), AtomicUsize::new(0));
        Self { inner: Arc::new(Inner { lines, waiting, sink, writer, birth: Birth::now() }) }
    }

    /// Returns the hash of the operations recorded so far; in a forked child the hash of no
    /// operations.
    #[must_use]
    pub fn hash(&self) -> OperationHash {
        self.lines().map_or(OperationHash::EMPTY, |lines| lines.hash)
    }

    /// Returns the number of operations recorded so far; 0 in a forked child.
    #[must_use]
    pub fn operations(&self) -> u64 {
        self.lines().map_or(0, |lines| lines.operations)
    }

    /// Returns the reason that the recording stopped early; `None` while it runs or after it was
    /// finished.
    #[must_use]
    pub fn error(&self) -> Option<RecordError> {
        self.lines().map_or(Some(RecordError::Forked), |lines| lines.error.clone())
    }

    /// Writes all pending lines to the sink and flushes it. Does nothing if called by the sink
    /// itself.
    ///
    /// # Errors
    /// The error of [`Recorder::error`].
    pub fn flush(&self) -> Result<(), RecordError> {
        if !self.inner.birth.is_here() {
            return Err(RecordError::Forked);
        }
        if self.inner.is_writing() {
            return Ok(());
        }
        self.inner.pass_on(lock(&self.inner.sink), true);
        self.error().map_or(Ok(()), Err)
    }

    /// Ends the recording with its last line and returns the hash. The arena continues to work
    /// unrecorded. Without this call the recording ends when the arena is dropped.
    ///
    /// # Errors
    /// The error of [`Recorder::error`].
    pub fn finish(&self) -> Result<OperationHash, RecordError> {
        self.end(Ended::Finished);
        self.flush().map(|()| self.hash())
    }

    fn end(&self, ended: Ended) {
        if let Some(mut lines) = self.lines() {
            lines.end(ended);
        }
    }

    /// Returns the lines; `None` in a forked child, in which another thread may have held the lock.
    fn lines(&self) -> Option<MutexGuard<'_, WaitingLines>> {
        self.inner.birth.is_here().then(|| lock(&self.inner.lines))
    }

    /// Passes lines on to the sink if enough of them are waiting. No lock is held. Does nothing in
    /// a forked child: the parent writes the lines, and another thread may have held a lock.
    fn pass_on(&self) {
        let inner = &*self.inner;
        let waiting = inner.waiting.load(Ordering::Relaxed);
        if waiting < DUE_FROM || inner.is_writing() || !inner.birth.is_here() {
            return;
        }
        let sink =
            if waiting < WAIT_FROM { try_lock(&inner.sink) } else { Some(lock(&inner.sink)) };
        if let Some(sink) = sink {
            inner.pass_on(sink, false);
        }
    }
}

/// The recording of one arena. Ends when dropped.
pub(crate) struct Recording(Recorder);

impl Recording {
    /// Begins the recording of an arena.
    ///
    /// # Errors
    /// `RecorderTaken`.
    pub(crate) fn new(recorder: &Recorder, header: &Header) -> Result<Self, DeviceError> {
        let opened = lock(&recorder.inner.lines).open(header);
        opened.map_err(|by| DeviceError::RecorderTaken { by })?;
        Ok(Self(recorder.clone()))
    }
}

impl Observer for Recording {
    fn observe(&self, events: &[SequencedEvent]) {
        let Self(Recorder { inner }) = self;
        let (thread, mut lines) = (here(), lock(&inner.lines));
        events.iter().for_each(|event| lines.observe(event, thread));
        inner.waiting.store(lines.waiting(), Ordering::Relaxed);
    }

    fn flush(&self) {
        self.0.pass_on();
    }
}

impl Drop for Recording {
    /// Ends the recording: the arena was dropped.
    fn drop(&mut self) {
        self.0.end(Ended::Gone);
        let _ = self.0.flush(); // the error was logged
    }
}

impl Inner {
    /// Returns `true` if this thread is within the sink.
    fn is_writing(&self) -> bool {
        self.writer.load(Ordering::Relaxed) == here()
    }

    /// Writes pending lines to the sink, including lines added meanwhile if the recording ended.
    fn pass_on(&self, mut sink: MutexGuard<'_, Sink>, flush: bool) {
        while self.write(&mut sink, flush) {}
        drop(sink);
        let mut lines = lock(&self.lines);
        let Some(error) = lines.unsaid() else { return };
        let arena = lines.arena().cloned().unwrap_or_default();
        drop(lines);
        log!(warn, arena, %error, "recording stopped");
    }

    /// Writes the waiting lines. Returns `true` if the recording ended meanwhile.
    fn write(&self, sink: &mut Sink, flush: bool) -> bool {
        let spare = mem::take(&mut sink.spare);
        let (mut text, is_over) = {
            let mut lines = lock(&self.lines);
            self.waiting.store(0, Ordering::Relaxed);
            (lines.take(spare), lines.is_over())
        };
        let mut failed = None;
        self.writer.store(here(), Ordering::Relaxed);
        if let Some(to) = &mut sink.to {
            let written = caught(|| {
                to.write_all(text.as_bytes())?;
                if flush || is_over { to.flush() } else { Ok(()) }
            });
            failed = match written {
                Ok(Ok(())) => None,
                Ok(Err(error)) => Some(RecordError::Sink { message: error.to_string() }),
                Err(message) => Some(RecordError::Panicked { message }),
            };
        }
        let done = if is_over || failed.is_some() { sink.to.take() } else { None };
        // Dropping the sink runs code of the program.
        let _ = caught(|| drop(done));
        self.writer.store(0, Ordering::Relaxed);
        text.clear();
        sink.spare = text;
        let mut lines = lock(&self.lines);
        if let Some(error) = failed {
            lines.stop(error);
        }
        !is_over && lines.is_over() && sink.to.is_some()
    }
}

impl Drop for Inner {
    /// Drops the sink, which is foreign code: nothing may unwind out of a drop.
    fn drop(&mut self) {
        // In a forked child another thread may have held the lock.
        let sink = try_lock(&self.sink).and_then(|mut sink| sink.to.take());
        let _ = caught(|| drop(sink));
    }
}

/// Returns a number of this thread that no other thread has while it runs; not 0.
fn here() -> usize {
    thread_local! {
        /// It has no drop, so that it exists until the thread's end.
        static HERE: u8 = const { 0 };
    }
    HERE.with(|here| std::ptr::from_ref(here).addr())
}

/// Returns `true` if both are handles to the same recorder.
impl PartialEq for Recorder {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }
}

impl Eq for Recorder {}

impl fmt::Debug for Recorder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Recorder")
            .field("operations", &self.operations())
            .field("error", &self.error())
            .finish_non_exhaustive()
    }
}
