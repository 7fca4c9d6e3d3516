//! The recorder of an arena: writes its events to a sink as JSON, one object per line.
//!
//! The thread that causes an event writes its line into a bounded buffer, under the arena's lock.
//! The thread that finds enough waiting lines passes them on to the sink, without holding a lock of
//! the arena. The recorder calls no driver and makes no decisions. An error stops only the
//! recording. `docs/RECORDING.md` lists the events and their keys.
//!
//! Invariant: the sink receives complete lines in order, or an error is stored.

use std::fmt::{self, Display, Write as _};
use std::io::Write;
use std::mem::{self, ManuallyDrop};
use std::sync::{Arc, PoisonError};

use crate::driver::{Backend, DeviceAddress};
use crate::types::config::{ArenaConfig, decay_nanos};
use crate::types::{DeviceError, Result};
use lowtide_core::clock::{Clock, Moment};
use lowtide_core::fork::Birth;
use lowtide_core::sync::atomic::{AtomicUsize, Ordering};
use lowtide_core::sync::{Mutex, MutexGuard, caught, lock, try_lock};
use lowtide_core::{ByteSize, log};

/// The maximum number of bytes that wait for the sink. Reached only if the sink itself uses the
/// arena, because a thread that finds [`WAIT_FROM`] waits for the sink.
const WAITING_MAX: usize = 1 << 20;

/// The number of waiting bytes from which on they are passed on. A guess: one write for several
/// hundred events.
const DUE_FROM: usize = 64 << 10;

/// The number of waiting bytes from which on threads wait for a slow sink. A guess.
const WAIT_FROM: usize = 256 << 10;

/// Records the events of one arena. Clones are cheap handles to the same recorder.
///
/// Pass it to an arena when it is opened ([`ArenaConfig::recorder`]). Thread caches are then
/// disabled, so that every block is recorded. Each event is a line, a JSON object
/// (`docs/RECORDING.md`). Lines are written in batches of about 64 KiB, by a thread that uses the
/// arena: any call or drop may take as long as a write to the sink. Threads wait for a slow sink
/// once 256 KiB are pending. The sink needs no buffer of its own. A recording has sizes, addresses
/// and times, and no contents.
///
/// If the sink fails or panics, the recording stops, the error is logged once through `tracing` and
/// available from [`Recorder::error`], and the arena continues to work. The sink may use the arena
/// itself; its events then wait to be written, and more than 1 MiB of them stop the recording.
///
/// ```
/// # use std::sync::Arc;
/// use lowtide_gpu::clock::SystemClock;
/// use lowtide_gpu::record::Recorder;
/// use lowtide_gpu::{ArenaConfig, DeviceArena, HostDriver, Region};
///
/// # let folder = tempfile::tempdir()?;
/// let path = folder.path().join("arena.jsonl");
/// let recorder = Recorder::new(std::fs::File::create(&path)?);
/// let config = ArenaConfig { recorder: Some(recorder.clone()), ..ArenaConfig::new("embedder") };
/// let driver = Arc::new(HostDriver::new());
/// let arena = DeviceArena::open(driver, Arc::new(SystemClock::new()), config)?;
/// drop(arena.alloc::<f32>(1 << 20, Region::Dynamic)?);
/// drop(arena); // writes the last line
///
/// let text = std::fs::read_to_string(&path)?;
/// let events = ["open", "commit", "alloc", "free", "end"];
/// assert!(text.lines().zip(events).all(|(line, event)| line.contains(event)));
/// assert_eq!(recorder.error(), None);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// [`ArenaConfig::recorder`]: crate::ArenaConfig::recorder
#[derive(Clone)]
pub struct Recorder {
    inner: Arc<RecorderInner>,
}

struct RecorderInner {
    lines: Mutex<RecordedLines>,
    /// The number of waiting bytes: a copy that is readable without the lock.
    waiting: AtomicUsize,
    sink: Mutex<Sink>,
    /// The thread that is writing to the sink; 0 for none.
    writer: AtomicUsize,
    birth: Birth,
}

/// The lines that the sink has not received yet. No other code is called under their lock.
#[derive(Default)]
struct RecordedLines {
    /// The arena's name, once it is open.
    arena: Option<String>,
    is_over: bool,
    text: String,
    /// The time of the last line.
    last: Moment,
    /// The size limit of the recording, and the bytes written.
    most: ByteSize,
    written: ByteSize,
    error: Option<DeviceError>,
    /// `true` once the error was logged.
    is_logged: bool,
}

struct Sink {
    /// The sink; `None` once the recording is over.
    to: Option<Box<dyn Write + Send>>,
    /// The text that is being written; else cleared, as a spare buffer.
    spare: String,
}

impl Recorder {
    /// Creates a recorder that writes to a sink without a size limit.
    #[must_use]
    pub fn new(sink: impl Write + Send + 'static) -> Self {
        Self::bounded(sink, ByteSize::MAX)
    }

    /// Creates a recorder that writes at most `most` bytes, in complete lines.
    #[must_use]
    pub fn bounded(sink: impl Write + Send + 'static, most: ByteSize) -> Self {
        let lines = RecordedLines { most, ..RecordedLines::default() };
        let sink = Sink { to: Some(Box::new(sink)), spare: String::new() };
        Self {
            inner: Arc::new(RecorderInner {
                lines: Mutex::new(lines),
                waiting: AtomicUsize::new(0),
                sink: Mutex::new(sink),
                writer: AtomicUsize::new(0),
                birth: Birth::now(),
            }),
        }
    }

    /// Returns the reason that the recording stopped early; `None` while it runs or after it was
    /// finished.
    #[must_use]
    pub fn error(&self) -> Option<DeviceError> {
        self.lines().map_or(Some(DeviceError::Forked), |lines| lines.error.clone())
    }

    /// Writes all pending lines to the sink and flushes it. Does nothing if called by the sink
    /// itself.
    ///
    /// # Errors
    /// The error of [`Recorder::error`].
    pub fn flush(&self) -> Result<()> {
        if self.inner.is_writing() {
            return Ok(());
        }
        if self.inner.birth.is_here() {
            self.inner.pass_on(lock(&self.inner.sink), true);
        }
        self.error().map_or(Ok(()), Err)
    }

    /// Ends the recording with its last line. The arena continues to work unrecorded. Without this
    /// call the recording ends when the arena is dropped.
    ///
    /// # Errors
    /// The error of [`Recorder::error`].
    pub fn finish(&self) -> Result<()> {
        if let Some(mut lines) = self.lines() {
            lines.end();
        }
        self.flush()
    }

    /// Returns the lines; `None` in a forked child, in which another thread may have held the lock.
    fn lines(&self) -> Option<MutexGuard<'_, RecordedLines>> {
        self.inner.birth.is_here().then(|| lock(&self.inner.lines))
    }

    /// Adds a line for an event that takes effect now.
    #[cold]
    #[inline(never)]
    pub(crate) fn write(
        &self,
        clock: &dyn Clock,
        name: &'static str,
        fields: impl for<'a, 'b> FnOnce(&'a mut Line<'b>) -> &'a mut Line<'b>,
    ) {
        let now = clock.now();
        let mut lines = lock(&self.inner.lines);
        lines.write(now, name, fields);
        self.inner.waiting.store(lines.waiting(), Ordering::Relaxed);
    }

    /// Passes lines on to the sink if enough of them are waiting. No lock is held. Does nothing in
    /// a forked child: the parent writes the lines, and another thread may have held a lock.
    pub(crate) fn pass_on(&self) {
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
pub(crate) struct Recording(pub(crate) Recorder);

impl Recording {
    /// Begins the recording of an arena, if there is to be one, with its settings.
    ///
    /// # Errors
    /// `RecorderTaken`, `Forked`.
    pub(crate) fn begin(
        config: &ArenaConfig,
        backend: Backend,
        clock: &dyn Clock,
        granule: ByteSize,
    ) -> Result<Option<Self>> {
        let Some(recorder) = &config.recorder else { return Ok(None) };
        // Before the recorder's lock is taken: the clock may be the program's own.
        let (since_epoch, now) = (u64::try_from(clock.since_epoch().as_nanos()), clock.now());
        let mut lines = recorder.lines().ok_or(DeviceError::Forked)?;
        if let Some(by) = &lines.arena {
            return Err(DeviceError::RecorderTaken { by: by.clone() });
        }
        lines.arena = Some(config.name.clone());
        lines.write(now, "open", |line| {
            line.number("version", 1)
                .text("arena", &config.name)
                .text("backend", backend.name())
                .number("unix_ns", since_epoch.ok())
                .bytes("granule", granule)
                .bytes("reserve", config.reserve)
                .limit("limit", config.limit)
                .number("decay_ns", decay_nanos(config.decay))
        });
        Ok(Some(Self(recorder.clone())))
    }
}

impl Drop for Recording {
    /// Ends the recording: the arena was dropped.
    fn drop(&mut self) {
        let _ = self.0.finish(); // the error was logged
    }
}

impl RecordedLines {
    fn write(
        &mut self,
        at: Moment,
        name: &'static str,
        fields: impl for<'a, 'b> FnOnce(&'a mut Line<'b>) -> &'a mut Line<'b>,
    ) {
        if self.is_over {
            return;
        }
        self.last = at;
        let before = self.text.len();
        let mut line = Line::new(&mut self.text, self.last, name);
        fields(&mut line);
        line.end();
        let written = self.written.saturating_add(ByteSize::of(self.text.len() - before));
        if written > self.most {
            self.text.truncate(before);
            self.is_over = true;
            self.error = Some(stopped(format!("its size limit of {} is reached", self.most)));
            return;
        }
        self.written = written;
        if self.text.len() > WAITING_MAX {
            let [waiting, most] = [self.text.len(), WAITING_MAX].map(ByteSize::of);
            self.stop(stopped(format!(
                "the sink is too slow: {waiting} wait for it, limit {most}"
            )));
        }
    }

    /// Ends the recording with its last line.
    fn end(&mut self) {
        if self.arena.is_some() {
            self.write(self.last, "end", |line| line);
        }
        self.is_over = true;
    }

    /// Stops the recording with this error.
    fn stop(&mut self, error: DeviceError) {
        self.is_over = true;
        self.text = String::new();
        self.error.get_or_insert(error);
    }

    /// Returns the number of waiting bytes; at least the threshold if an error is to be logged.
    fn waiting(&self) -> usize {
        let is_news = self.error.is_some() && !self.is_logged;
        if is_news { self.text.len().max(DUE_FROM) } else { self.text.len() }
    }
}

impl RecorderInner {
    /// Returns `true` if this thread is within the sink.
    fn is_writing(&self) -> bool {
        self.writer.load(Ordering::Relaxed) == here()
    }

    /// Writes pending lines to the sink, including lines added meanwhile if the recording ended.
    fn pass_on(&self, mut sink: MutexGuard<'_, Sink>, flush: bool) {
        while self.write(&mut sink, flush) {}
        drop(sink);
        let mut lines = lock(&self.lines);
        let Some(error) = lines.error.clone().filter(|_| !lines.is_logged) else { return };
        lines.is_logged = true;
        let arena = lines.arena.clone().unwrap_or_default();
        drop(lines);
        log!(warn, arena, %error, "recording stopped");
    }

    /// Writes the waiting lines. Returns `true` if the recording ended meanwhile.
    fn write(&self, sink: &mut Sink, flush: bool) -> bool {
        let is_over = {
            let mut lines = lock(&self.lines);
            self.waiting.store(0, Ordering::Relaxed);
            mem::swap(&mut lines.text, &mut sink.spare);
            lines.is_over
        };
        let mut failed = None;
        self.writer.store(here(), Ordering::Relaxed);
        if let Some(to) = &mut sink.to {
            let written = caught(|| {
                to.write_all(sink.spare.as_bytes())?;
                if flush || is_over { to.flush() } else { Ok(()) }
            });
            failed = match written {
                Ok(Ok(())) => None,
                Ok(Err(error)) => Some(stopped(format!("the sink failed: {error}"))),
                Err(message) => Some(stopped(format!("the sink panicked: {message}"))),
            };
        }
        let done = if is_over || failed.is_some() { sink.to.take() } else { None };
        // Dropping the sink runs code of the program.
        let _ = caught(|| drop(done));
        self.writer.store(0, Ordering::Relaxed);
        sink.spare.clear();
        let mut lines = lock(&self.lines);
        if let Some(error) = failed {
            lines.stop(error);
        }
        !is_over && lines.is_over && sink.to.is_some()
    }
}

impl Drop for RecorderInner {
    /// Drops the sink, which is foreign code: nothing may unwind out of a drop. Not in a forked
    /// child, which shares the sink's file with the parent: its drop may write what it holds.
    fn drop(&mut self) {
        let to = &mut self.sink.get_mut().unwrap_or_else(PoisonError::into_inner).to;
        let sink = ManuallyDrop::new(to.take());
        if self.birth.is_here() {
            let _ = caught(|| drop(ManuallyDrop::into_inner(sink)));
        }
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

lowtide_core::debug_as!(Recorder, |it| error: it.error());

// Writes JSON objects, a line each. This module knows no arena.
//
// Invariant: a finished line is one JSON object and one newline, whatever its texts contain.

/// Returns the error of a recording that stopped.
const fn stopped(reason: String) -> DeviceError {
    DeviceError::Recording { reason }
}

/// A line that is being written: an object whose first key is the time. Allocates nothing while the
/// text has room.
pub(crate) struct Line<'a>(&'a mut String);

impl<'a> Line<'a> {
    /// Begins the line of an event.
    pub(crate) fn new(text: &'a mut String, at: Moment, event: &str) -> Self {
        // Writing to a string cannot fail, here and below.
        let nanos = at.since_origin().as_nanos();
        let _ = write!(text, "{{\"time_ns\":{nanos},\"event\":\"{event}\"");
        Self(text)
    }

    /// Adds a number; nothing for `None`.
    pub(crate) fn number(&mut self, key: &str, value: impl Into<Option<u64>>) -> &mut Self {
        if let Some(value) = value.into() {
            let _ = write!(self.0, ",\"{key}\":{value}");
        }
        self
    }

    /// Adds a number of bytes.
    pub(crate) fn bytes(&mut self, key: &str, value: ByteSize) -> &mut Self {
        self.number(key, value.get())
    }

    /// Adds the address of a block or of granules.
    pub(crate) fn address(&mut self, at: DeviceAddress) -> &mut Self {
        self.number("address", at.get())
    }

    /// Adds a limit; nothing for [`ByteSize::MAX`], which is none.
    pub(crate) fn limit(&mut self, key: &str, value: ByteSize) -> &mut Self {
        self.number(key, Some(value.get()).filter(|&limit| limit != u64::MAX))
    }

    /// Adds a boolean.
    pub(crate) fn flag(&mut self, key: &str, value: bool) -> &mut Self {
        let _ = write!(self.0, ",\"{key}\":{value}");
        self
    }

    /// Adds a text.
    pub(crate) fn text(&mut self, key: &str, value: impl Display) -> &mut Self {
        let _ = write!(self.0, ",\"{key}\":\"");
        let _ = write!(Escaped(self.0), "{value}");
        self.0.push('"');
        self
    }

    /// Ends the line.
    pub(crate) fn end(self) {
        self.0.push_str("}\n");
    }
}

/// Writes the inside of a JSON string.
struct Escaped<'a>(&'a mut String);

impl fmt::Write for Escaped<'_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for char in text.chars() {
            match char {
                '"' | '\\' => self.0.extend(['\\', char]),
                '\0'..' ' => write!(self.0, "\\u{:04x}", u32::from(char))?,
                _ => self.0.push(char),
            }
        }
        Ok(())
    }
}

#[cfg(all(test, unix, not(lowtide_loom)))]
#[expect(unsafe_code, reason = "fork and waitpid are C calls")]
mod tests {
    use std::io::{self, Read as _, Seek as _};

    use super::*;
    use crate::api::arena::DeviceArena;
    use crate::driver::host::HostDriver;
    use lowtide_core::clock::SystemClock;

    /// A sink that writes when it is dropped, as one that compresses.
    struct Trailing(std::fs::File);

    impl Write for Trailing {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    impl Drop for Trailing {
        fn drop(&mut self) {
            self.0.write_all(b"end").expect("a file");
        }
    }

    fn in_child(act: impl FnOnce() -> bool) {
        // SAFETY: the child makes the calls under test, and ends.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: sets a timer of this process, which ends it if it waits for a lock.
            unsafe { libc::alarm(20) };
            let is_right = act();
            // SAFETY: ends the child at once, without running the parent's exit handlers.
            unsafe { libc::_exit(i32::from(!is_right)) };
        }
        let mut status = 0;
        // SAFETY: `status` is a valid place for an int, and `child` is our own child.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0, "status {status:#x}");
    }

    /// The bug: the sink was dropped in the child too, so that its last bytes came twice.
    #[test]
    fn a_forked_child_does_not_drop_the_sink_of_its_parent() {
        for is_locked in [false, true] {
            let mut file = tempfile::tempfile().expect("a file");
            let recorder = Recorder::new(Trailing(file.try_clone().expect("a file")));
            let sink = ManuallyDrop::new(is_locked.then(|| lock(&recorder.inner.sink)));
            in_child(|| {
                // SAFETY: the child drops its only handle once.
                drop(unsafe { std::ptr::read(&raw const recorder) });
                true
            });
            drop(ManuallyDrop::into_inner(sink));
            drop(recorder);
            let mut text = String::new();
            file.rewind().expect("a file");
            file.read_to_string(&mut text).expect("a text");
            assert_eq!(text, "end");
        }
    }

    /// The bug: the child waited for the lock of a thread that it does not have.
    #[test]
    fn an_arena_of_a_forked_child_is_refused_the_recorder_of_the_parent() {
        let recorder = Recorder::new(io::sink());
        let lines = ManuallyDrop::new(lock(&recorder.inner.lines));
        in_child(|| {
            let recorder = Some(recorder.clone());
            let config = ArenaConfig { recorder, ..ArenaConfig::new("child") };
            let (driver, clock) = (Arc::new(HostDriver::new()), Arc::new(SystemClock::new()));
            matches!(DeviceArena::open(driver, clock, config), Err(DeviceError::Forked))
        });
        drop(ManuallyDrop::into_inner(lines));
    }
}
