//! The shared library from Rust: loads it by its path, and configures it through safe calls.
//!
//! [`Fake::start`] loads the library that was built next to the running test, and its alias. Later
//! lookups of `libcuda.so.1` or `libcuda.so` in this process find it, so call it before anything
//! looks for CUDA. One test at a time has the library, each time reset.
//!
//! Invariant: at most one [`Guard`] exists, and the library behind it was reset.
#![expect(unsafe_code, reason = "opening a library and finding its function")]

use std::ffi::{CStr, CString, c_char, c_void};
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use crate::control::{Command, FAILED, Numbers, Options};
use crate::ffi::{In, Out, Text};

/// The files that Cargo builds, beside the tests that depend on them: the driver, and its second
/// name.
const FILES: [&str; 2] = ["liblowtide_fake_cuda.so", "liblowtide_fake_alias.so"];

/// The driver under the name of NVML.
const NVML: &str = "liblowtide_fake_nvml.so";

type Control = extern "C" fn(In<Command>) -> u64;

/// The loaded library, which is never closed.
#[derive(Debug)]
pub struct Fake(Control);

/// The library, for one test: the others in the process wait until it is dropped.
#[derive(Debug)]
pub struct Guard {
    fake: &'static Fake,
    _one: MutexGuard<'static, ()>,
}

static FAKE: OnceLock<Result<Fake, String>> = OnceLock::new();
static ONE: Mutex<()> = Mutex::new(());

/// Returns the path of a library: in the folder of the running test, or the one named `deps` in it.
///
/// # Errors
/// Where it is in neither.
fn path(file: &str) -> Result<PathBuf, String> {
    let program = std::env::current_exe().map_err(|error| error.to_string())?;
    let folder = program.parent().ok_or("a program without a folder")?;
    let near = [folder.join(file), folder.join("deps").join(file)];
    let beside = folder.parent().map(|above| above.join("deps").join(file));
    let mut all = near.into_iter().chain(beside);
    all.find(|path| path.exists()).ok_or_else(|| format!("no {file} in {}", folder.display()))
}

fn open(file: &str) -> Result<*mut c_void, String> {
    let path = path(file)?;
    let name = CString::new(path.to_string_lossy().as_bytes()).map_err(|it| it.to_string())?;
    // SAFETY: a C string that outlives the call; the library's initialisers are Rust's own, which
    // start nothing.
    let library = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    if library.is_null() { Err(format!("{} does not load", path.display())) } else { Ok(library) }
}

/// Finds the library's control.
fn control(library: *mut c_void) -> Result<Control, String> {
    // SAFETY: the handle came from `dlopen` and is never closed; the name is a C string.
    let found = unsafe { libc::dlsym(library, c"fake_control".as_ptr()) };
    if found.is_null() {
        return Err("the library has no fake_control".to_owned());
    }
    // SAFETY: not null, and the function of this name in `control` has this type: both are of this
    // crate and of one build.
    Ok(unsafe { std::mem::transmute::<*mut c_void, Control>(found) })
}

impl Fake {
    /// Loads the library, resets it to these options and hands it out; waits while another test of
    /// the process has it. Every `cu*` state that others hold is void from then on.
    ///
    /// # Panics
    /// If the library is not there: Cargo builds it with the tests that depend on it.
    pub fn start(options: Options) -> Guard {
        let one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
        let fake = match FAKE.get_or_init(Self::load) {
            Ok(fake) => fake,
            Err(error) => panic!("{error}"),
        };
        let guard = Guard { fake, _one: one };
        guard.reset(options);
        guard
    }

    fn load() -> Result<Self, String> {
        // The alias stands for what is loaded under the name `libcuda.so.1`: that comes first.
        let [library, _] = [open(FILES[0])?, open(FILES[1])?];
        control(library).map(Self)
    }
}

impl Guard {
    /// Gives a command, and returns its answer.
    ///
    /// # Panics
    /// If there is no such device, or the library is broken.
    fn act(&self, command: Command) -> u64 {
        let answer = (self.fake.0)(In::of(&command));
        assert_ne!(answer, FAILED, "{command:?}: no possible device, or the library is broken");
        answer
    }

    /// Begins anew with these options: nothing is left of devices, contexts, counts and plans.
    ///
    /// # Panics
    /// If the options name no possible device.
    pub fn reset(&self, options: Options) {
        self.act(Command::Reset(options));
    }

    /// Lets the `nth` call of this name from now on, counted from 1, fail with a code.
    pub fn fail(&self, name: &CStr, nth: u64, code: u32) {
        self.act(Command::Fail { name: Text::of(name), nth, code });
    }

    /// Forgets all failures that were planned.
    pub fn forget_failures(&self) {
        self.act(Command::ForgetFailures);
    }

    /// Returns the number of calls of this name, failed ones included.
    #[must_use]
    pub fn calls(&self, name: &CStr) -> u64 {
        self.act(Command::Calls { name: Text::of(name) })
    }

    /// Returns the number of all calls.
    #[must_use]
    pub fn calls_total(&self) -> u64 {
        self.act(Command::CallsTotal)
    }

    /// Returns the number of waits of the host that would have kept a core busy on a device: for a
    /// stream, for the context, and for events that do not block.
    #[must_use]
    pub fn spins(&self) -> u64 {
        self.act(Command::Spins)
    }

    /// Plants a missing wait: of the calls of `cuStreamWaitEvent` from now on, every so many-th
    /// succeeds and orders nothing. 0 ends it.
    pub fn drop_waits(&self, every: u64) {
        self.act(Command::DropWaits { every });
    }

    /// Returns the number of waits that were dropped.
    #[must_use]
    pub fn dropped_waits(&self) -> u64 {
        self.act(Command::DroppedWaits)
    }

    /// Returns the figures of a device; devices are counted whether they are visible or not.
    ///
    /// # Panics
    /// If there is no such device.
    #[must_use]
    pub fn numbers(&self, device: u32) -> Numbers {
        let mut numbers = Numbers::default();
        self.act(Command::Numbers { device, to: Out::of(&raw mut numbers) });
        numbers
    }

    /// Returns the number of times that its primary context is retained.
    ///
    /// # Panics
    /// If there is no such device.
    #[must_use]
    pub fn retains(&self, device: u32) -> u64 {
        self.act(Command::Retains { device })
    }

    /// All of a text of the library.
    fn text(&self, command: fn(Out<c_char>, usize) -> Command) -> String {
        let length = self.act(command(Out::of(std::ptr::null_mut()), 0));
        let mut bytes: Vec<c_char> = vec![0; usize::try_from(length).unwrap_or(0).max(1)];
        let room = bytes.len();
        self.act(command(Out::of(bytes.as_mut_ptr()), room));
        let text = bytes.iter().map(|byte| byte.cast_unsigned()).take_while(|byte| *byte != 0);
        String::from_utf8_lossy(&text.collect::<Vec<_>>()).into_owned()
    }

    /// The breaches of CUDA's contract so far, a line each.
    #[must_use]
    pub fn faults(&self) -> String {
        self.text(|to, room| Command::Faults { to, room })
    }

    /// Returns the objects that have not been released, a line for each device and each context
    /// destroyed with something in it.
    #[must_use]
    pub fn leaks(&self) -> String {
        self.text(|to, room| Command::Leaks { to, room })
    }

    /// Asserts that the contract was kept and all is given back.
    ///
    /// # Panics
    /// If not.
    pub fn assert_clean(&self) {
        assert_eq!((self.faults().as_str(), self.leaks().as_str()), ("", ""));
    }

    /// Loses the context of a device with a code: every later call in it answers that.
    ///
    /// # Panics
    /// If there is no such device.
    pub fn poison(&self, device: u32, code: u32) {
        self.act(Command::Poison { device, code });
    }

    /// Takes so many bytes of a device as another process would; 0 gives them back.
    ///
    /// # Panics
    /// If there is no such device.
    pub fn neighbours(&self, device: u32, bytes: u64) {
        self.act(Command::Neighbours { device, bytes });
    }

    /// Loads NVML, which stays in the process.
    ///
    /// # Panics
    /// If the library is not there.
    pub fn nvml(&self) {
        static LOADED: OnceLock<Result<(), String>> = OnceLock::new();
        if let Err(error) = LOADED.get_or_init(|| open(NVML).map(drop)) {
            panic!("{error}");
        }
    }

    /// Adds a process to the list of NVML: 0 for one that computes, 1 for one that draws, 2 for a
    /// client of the multi-process service. Takes no memory of the device; `u64::MAX` is memory
    /// that NVML does not know.
    ///
    /// # Panics
    /// If there is no such device.
    pub fn process(&self, device: u32, kind: u32, pid: u32, used: u64) {
        self.act(Command::Process { device, kind, pid, used });
    }

    /// Sets the number under which NVML lists this process; 0 hides it.
    pub fn own_pid(&self, pid: u32) {
        self.act(Command::OwnPid { pid });
    }

    /// Sets the size of an entry in NVML's lists, in units of 8 bytes: 2, 3 (the usual) or 4.
    pub fn entry_words(&self, words: u32) {
        self.act(Command::EntryWords { words });
    }

    /// Lets the lists of NVML not return until it is called with `false`, or a reset.
    pub fn hold_nvml(&self, is_held: bool) {
        self.act(Command::HoldNvml { is_held });
    }

    /// Returns the number of sessions of NVML that have not ended.
    #[must_use]
    pub fn nvml_sessions(&self) -> u64 {
        self.act(Command::NvmlSessions)
    }

    /// Sets the memory of a device in bytes, until its context ends.
    ///
    /// # Panics
    /// If there is no such device.
    pub fn capacity(&self, device: u32, bytes: u64) {
        self.act(Command::Capacity { device, bytes });
    }

    /// Sets how many bytes of host memory may be page-locked for a device.
    ///
    /// # Panics
    /// If there is no such device.
    pub fn lock_limit(&self, device: u32, bytes: u64) {
        self.act(Command::LockLimit { device, bytes });
    }

    /// Launches a graph that allocates so many bytes and frees them: the device keeps them.
    ///
    /// # Panics
    /// If there is no such device.
    pub fn graph_memory(&self, device: u32, bytes: u64) {
        self.act(Command::GraphMemory { device, bytes });
    }

    /// Does at most so many pieces of queued work, as time would; how many were there to do.
    ///
    /// # Panics
    /// If there is no such device.
    pub fn run(&self, device: u32, count: u64) -> u64 {
        self.act(Command::Run { device, count })
    }

    /// Checks the model's own books.
    ///
    /// # Panics
    /// If the model is wrong.
    pub fn validate(&self, device: u32) {
        self.act(Command::Validate { device });
    }
}
