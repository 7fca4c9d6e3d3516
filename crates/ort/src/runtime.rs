//! ONNX Runtime, opened once for the process.
//!
//! `open` checks the version of the library, creates the environment, registers the allocator and
//! observes that the settings have an effect. ONNX Runtime has one environment for each process,
//! and the allocator must outlive every session, so neither is ever dropped.
//!
//! Invariant: at most one environment is created. A failure before that leaves nothing behind.
#![expect(unsafe_code, reason = "calls a function of a shared library")]

use std::error::Error as _;
use std::ffi::CStr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use libloading::Library;
use lowtide::decay::DecayTime;
#[cfg(feature = "cuda")]
use lowtide::device::DeviceArena;
use lowtide::heap::HostArena;
use lowtide::memory::{Memory, MemoryError, ResourceBuilder};
use lowtide::{BoxError, ByteSize, Cost};
use lowtide_core::sync::lock;
use ort::environment::Environment;
use ort::session::builder::SessionBuilder;
use ort::sys::OrtApiBase;

use super::allocator::{MemorySource, OrtAllocator};
use super::blocks::RunArena;
use super::error::{OLDEST_MINOR, OrtError, failed, text};
use super::session::{Configure, LoadedSession, Loader, SessionContext, SessionSettings};
use super::{session, verify};

/// The name of the arena for the memory of runs.
const ARENA_NAME: &str = "onnxruntime";
/// The shortest time that the arena keeps idle memory, unless the heap keeps none. Longer than the
/// pauses within a burst: with 1 s, bursts on a busy machine took up to 1.6 times the page faults.
const DECAY_MIN: Duration = Duration::from_secs(2);

/// Held while a runtime is opened; has the environment from then on.
static ENVIRONMENT: Mutex<Option<Environment>> = Mutex::new(None);

/// ONNX Runtime in this process. Cheap to clone.
#[derive(Clone)]
pub struct Runtime {
    sessions: Arc<SessionContext>,
    allocator: &'static OrtAllocator,
    memory: Memory,
}

impl Runtime {
    /// Opens the shared library of ONNX Runtime and sets it up for the profile of `memory`.
    ///
    /// The memory of runs comes from an arena named `onnxruntime`: a device arena, if arenas of
    /// `memory` are in host memory, else a heap arena. It keeps idle memory as long as the heap
    /// does (`LOWTIDE_HEAP_DECAY`), but at least 2 s.
    ///
    /// Runs a model of 48 KiB to observe that the settings have an effect. Takes some milliseconds.
    ///
    /// # Errors
    /// [`OrtError::Library`], [`OrtError::Version`], [`OrtError::Arena`]: nothing has changed, and
    /// the service may try again. [`OrtError::AlreadyOpen`]. [`OrtError::Runtime`],
    /// [`OrtError::NotInForce`].
    pub fn open(memory: &Memory, library: impl AsRef<Path>) -> Result<Self, OrtError> {
        Self::open_path(memory, library.as_ref(), None)
    }

    /// Like [`Runtime::open`], with another arena for the memory of runs.
    ///
    /// # Errors
    /// Those of [`Runtime::open`], and [`OrtError::DeviceMemory`].
    pub fn open_in(
        memory: &Memory,
        library: impl AsRef<Path>,
        arena: RunArena,
    ) -> Result<Self, OrtError> {
        Self::open_path(memory, library.as_ref(), Some(arena))
    }

    fn open_path(memory: &Memory, path: &Path, arena: Option<RunArena>) -> Result<Self, OrtError> {
        let mut opened = lock(&ENVIRONMENT);
        if opened.is_some() {
            return Err(OrtError::AlreadyOpen { path: path.to_owned() });
        }
        let version = version(path)?;
        let arena = arena.map_or_else(|| default_arena(memory), Ok)?;
        if !arena.is_readable() {
            return Err(OrtError::DeviceMemory);
        }
        let builder = ort::init_from(path).map_err(|error| OrtError::Library {
            path: path.to_owned(),
            cause: error.to_string(),
        })?;
        let builder = builder.with_name("lowtide").with_telemetry(false);
        let environment = builder.build().map_err(failed("create the environment"))?;
        *opened = Some(environment.clone());
        let register = OrtAllocator::register(&environment, MemorySource::Cpu(arena));
        let allocator = register.map_err(failed("register the allocator"))?;
        let cpus = memory.snapshot().cpus.whole().unwrap_or(1);
        let settings = SessionSettings::of(memory.config().profile.value, cpus);
        verify::observe(&environment, allocator, &settings, &version)?;
        let sessions =
            SessionContext { environment, settings, version, memory: memory.downgrade() };
        Ok(Self { sessions: Arc::new(sessions), allocator, memory: memory.clone() })
    }
}

/// Opens the arena for the memory of runs.
fn default_arena(memory: &Memory) -> Result<RunArena, OrtError> {
    let decay = match memory.config().heap_decay.value {
        DecayTime::Within(time) => DecayTime::Within(time.max(DECAY_MIN)),
        other => other,
    };
    match memory.devices().open_arena(ARENA_NAME) {
        Ok(arena) if arena.capabilities().host_backed => {
            arena.set_decay(decay);
            return Ok(RunArena::Device(arena));
        }
        // Its memory is on the GPU.
        Ok(arena) => drop(arena.close()),
        Err(MemoryError::OpenArena { cause, .. }) if *cause == MemoryError::NoDevice => {}
        Err(error) => return Err(OrtError::Arena(error.into())),
    }
    let arena = HostArena::new(ARENA_NAME).map_err(|error| OrtError::Arena(error.into()))?;
    arena.set_decay(decay).map_err(|error| OrtError::Arena(error.into()))?;
    Ok(RunArena::Heap(arena))
}

impl Runtime {
    /// Returns a builder for a session of this model, which ends in [`ResourceBuilder::register`].
    /// Its file is read by each load.
    ///
    /// The session is loaded on first use, once for all callers that wait, and unloaded when it has
    /// been idle (`LOWTIDE_IDLE_UNLOAD`) or memory is short. Its declared cost is the size of its
    /// files, external data included. A failed load is an error of those who wait for it, with an
    /// [`OrtError`] that names the model; the next one may succeed.
    ///
    /// Store the weights as external data
    /// (`onnx.save(model, path, save_as_external_data=True)`), which ONNX Runtime maps: a load of
    /// 86 MiB of weights then takes 88 MiB at most. Without, it takes 180 MiB, twice the
    /// declared cost, until it has ended.
    pub fn session(&self, name: &str, model: impl Into<PathBuf>) -> ResourceBuilder<LoadedSession> {
        self.managed(name, model.into(), None)
    }

    /// Like [`Runtime::session`], with changes to the builder of the session, such as execution
    /// providers. They are applied after the settings of the profile, and may replace them; the
    /// number of threads is not checked then.
    pub fn session_with(
        &self,
        name: &str,
        model: impl Into<PathBuf>,
        configure: impl Fn(SessionBuilder) -> Result<SessionBuilder, BoxError> + Send + Sync + 'static,
    ) -> ResourceBuilder<LoadedSession> {
        self.managed(name, model.into(), Some(Box::new(configure)))
    }

    fn managed(
        &self,
        name: &str,
        model: PathBuf,
        configure: Option<Box<Configure>>,
    ) -> ResourceBuilder<LoadedSession> {
        let cost = Cost::host(ByteSize::new(session::bytes_on_disk(&model)));
        let context = Arc::clone(&self.sessions);
        let loader = Loader { name: name.to_owned(), model, context, configure };
        let of_unload = name.to_owned();
        let builder = self.memory.managed(name, move || loader.load());
        builder.cost(cost).unload(move |loaded| session::unload(&of_unload, loaded))
    }

    /// Registers an arena in CUDA memory as the allocator of its device, for sessions with the CUDA
    /// provider ([`Runtime::session_with`]) that load from now on. Its blocks are aligned to 256
    /// bytes. It stays registered until the process ends.
    ///
    /// Memory that was allocated for a stream is reused in the order of the stream, and released
    /// when it has been idle for the decay time of the arena, by the worker of its `Memory`: ONNX
    /// Runtime never asks for that. Other memory becomes idle after a wait for the device, which an
    /// unload, [`OrtAllocator::shrink`] and an allocation that needs it make.
    ///
    /// If the arena has no memory, the allocation returns null and the cause is logged. ONNX
    /// Runtime does not check the address, and kernels that use it fail; the context is lost then.
    /// Limit requests by admission. Sessions cannot use CUDA graphs, which keep addresses.
    ///
    /// An allocation takes a lock, and calls the driver if memory is to be committed.
    ///
    /// # Errors
    /// [`OrtError::HostMemory`]; [`OrtError::Registered`] if the device has an allocator, of an
    /// earlier call or of a provider library; [`OrtError::Runtime`].
    #[cfg(feature = "cuda")]
    pub fn register_cuda(&self, arena: DeviceArena) -> Result<&'static OrtAllocator, OrtError> {
        super::cuda::register(&self.sessions.environment, arena)
    }

    /// Returns the version of ONNX Runtime, such as `1.32.0`.
    #[must_use]
    pub fn version(&self) -> &str {
        &self.sessions.version
    }

    /// Returns the allocator that all sessions use for the CPU.
    #[must_use]
    pub fn allocator(&self) -> &'static OrtAllocator {
        self.allocator
    }

    /// Returns the environment, for sessions that are not managed.
    #[must_use]
    pub fn environment(&self) -> &Environment {
        &self.sessions.environment
    }
}

lowtide_core::debug_as!(Runtime, |it| version: it.sessions.version, allocator: it.allocator);

// The version of a shared library, which is read before `ort` opens it.
//
// `ort` checks the version too, and reports a text.

/// Returns the version of ONNX Runtime in this file.
///
/// # Errors
/// [`OrtError::Library`], [`OrtError::Version`].
pub(crate) fn version(path: &Path) -> Result<String, OrtError> {
    let cannot = |cause: String| OrtError::Library { path: path.to_owned(), cause };
    // SAFETY: the initialisers of a shared library run, as whenever one is loaded; the caller chose
    // it. The handle is dropped here; `ort` opens another one.
    let library = unsafe { Library::new(path) };
    // The dynamic linker's message is the source of the error.
    let library = library.map_err(|error| match error.source() {
        Some(source) => cannot(text(&source)),
        None => cannot(text(&error)),
    })?;
    // SAFETY: the type is the one that ONNX Runtime's header declares for this name.
    let base =
        unsafe { library.get::<unsafe extern "C" fn() -> *const OrtApiBase>(c"OrtGetApiBase") };
    let base = base.map_err(|_| cannot("it does not export OrtGetApiBase".to_owned()))?;
    // SAFETY: it may be called at any time, and returns null or a static table.
    let base = unsafe { base() };
    // SAFETY: the table is static, and the library is open.
    let base = unsafe { base.as_ref() }.ok_or_else(|| cannot("it has no API".to_owned()))?;
    // SAFETY: it may be called at any time.
    let version = unsafe { (base.GetVersionString)() };
    // SAFETY: a static text that ends with NUL.
    let version = unsafe { CStr::from_ptr(version) }.to_string_lossy().into_owned();
    if is_accepted(&version) {
        Ok(version)
    } else {
        Err(OrtError::Version { path: path.to_owned(), found: version })
    }
}

/// Returns `true` for `1.x` with an `x` of at least [`OLDEST_MINOR`].
fn is_accepted(version: &str) -> bool {
    let mut parts = version.split('.').map(str::parse::<u32>);
    let major = parts.next().and_then(Result::ok);
    let minor = parts.next().and_then(Result::ok);
    major == Some(1) && minor.is_some_and(|minor| minor >= OLDEST_MINOR)
}

#[cfg(test)]
mod library_tests {
    use super::*;

    #[test]
    fn only_new_enough_versions_are_accepted() {
        let oldest = format!("1.{OLDEST_MINOR}.0");
        for version in ["1.32.0", "1.32", &oldest] {
            assert!(is_accepted(version), "{version}");
        }
        for version in ["1.22.1", "2.0.0", "1.x", "1", "", "abc"] {
            assert!(!is_accepted(version), "{version:?}");
        }
    }

    #[test]
    fn a_file_that_is_no_library_is_named() {
        let missing = Path::new("/nonexistent/libonnxruntime.so");
        let error = version(missing).unwrap_err();
        assert!(matches!(&error, OrtError::Library { path, .. } if path == missing), "{error}");
        let text = error.to_string();
        assert!(text.contains("/nonexistent/libonnxruntime.so"), "{text}");
        assert!(
            text.contains("expected the shared library of ONNX Runtime 1.23 or later"),
            "{text}"
        );

        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "no library").unwrap();
        let other = version(file.path()).unwrap_err();
        assert!(matches!(other, OrtError::Library { .. }), "{other}");
        // The bug: both causes were "dlopen failed".
        assert!(text.contains("No such file"), "{text}");
        assert!(!other.to_string().contains("No such file"), "{other}");
    }

    #[test]
    fn a_library_without_the_entry_point_is_refused() {
        let libc = Path::new("libc.so.6");
        let error = version(libc).unwrap_err();
        assert!(error.to_string().contains("does not export OrtGetApiBase"), "{error}");
    }
}
