//! The shared library from Rust: loads it by its path, and configures it through safe calls.
//!
//! [`Fake::start`] loads the library that was built next to the running test, and its alias. Later
//! lookups of `libcuda.so.1` or `libcuda.so` in this process find it, so call it before anything
//! looks for CUDA. One test at a time has the library, each time reset.
//!
//! Invariant: at most one [`Guard`] exists, and the library behind it was reset.
#![expect(unsafe_code, reason = "opening a library and calling C functions by pointer")]

use std::ffi::{CStr, CString, c_char, c_void};
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use crate::control::{Numbers, Options, Row, numbers};

/// The files that Cargo builds, beside the tests that depend on them: the driver, and its second
/// name.
const FILES: [&str; 2] = ["liblowtide_fake_cuda.so", "liblowtide_fake_alias.so"];

/// The driver under the name of NVML.
const NVML: &str = "liblowtide_fake_nvml.so";

type Reset = unsafe extern "C" fn(*const Options) -> u32;
type Fail = unsafe extern "C" fn(*const c_char, u64, u32) -> u32;
type Bare = unsafe extern "C" fn() -> u32;
type Count = unsafe extern "C" fn(*const c_char) -> u64;
type Number = unsafe extern "C" fn() -> u64;
type Ask = unsafe extern "C" fn(u32, *mut Row) -> u32;
type Text = unsafe extern "C" fn(*mut c_char, usize) -> usize;
type Poison = unsafe extern "C" fn(u32, u32) -> u32;
type SetBytes = unsafe extern "C" fn(u32, u64) -> u32;
type Set = unsafe extern "C" fn(u64) -> u32;
type Run = unsafe extern "C" fn(u32, u64) -> u64;
type Check = unsafe extern "C" fn(u32) -> u32;
type Process = unsafe extern "C" fn(u32, u32, u32, u64) -> u32;

/// The functions of the loaded library, which is never closed.
#[derive(Debug)]
pub struct Fake {
    reset: Reset,
    fail: Fail,
    forget_failures: Bare,
    calls: Count,
    spins: Number,
    drop_waits: Set,
    dropped_waits: Number,
    numbers: Ask,
    faults: Text,
    leaks: Text,
    poison: Poison,
    neighbours: SetBytes,
    capacity: SetBytes,
    lock_limit: SetBytes,
    graph_memory: SetBytes,
    run: Run,
    validate: Check,
    process: Process,
    own_pid: Check,
    entry_words: Check,
    hold_nvml: Check,
    nvml_sessions: Number,
}

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

/// The address of a function of the library; never null.
fn symbol(library: *mut c_void, name: &CStr) -> Result<*mut c_void, String> {
    // SAFETY: the handle came from `dlopen` and is never closed; the name is a C string.
    let found = unsafe { libc::dlsym(library, name.as_ptr()) };
    if found.is_null() { Err(format!("the library has no {name:?}")) } else { Ok(found) }
}

macro_rules! resolve {
    ($library:expr, $name:literal, $type:ty) => {{
        let found = symbol($library, $name)?;
        // SAFETY: not null, and the function of this name in `control` has this type: both are of
        // this crate and of one build.
        unsafe { std::mem::transmute::<*mut c_void, $type>(found) }
    }};
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
        Ok(Self {
            reset: resolve!(library, c"fake_reset", Reset),
            fail: resolve!(library, c"fake_fail", Fail),
            forget_failures: resolve!(library, c"fake_forget_failures", Bare),
            calls: resolve!(library, c"fake_calls", Count),
            spins: resolve!(library, c"fake_spins", Number),
            drop_waits: resolve!(library, c"fake_drop_waits", Set),
            dropped_waits: resolve!(library, c"fake_dropped_waits", Number),
            numbers: resolve!(library, c"fake_numbers", Ask),
            faults: resolve!(library, c"fake_faults", Text),
            leaks: resolve!(library, c"fake_leaks", Text),
            poison: resolve!(library, c"fake_poison", Poison),
            neighbours: resolve!(library, c"fake_neighbours", SetBytes),
            capacity: resolve!(library, c"fake_capacity", SetBytes),
            lock_limit: resolve!(library, c"fake_lock_limit", SetBytes),
            graph_memory: resolve!(library, c"fake_graph_memory", SetBytes),
            run: resolve!(library, c"fake_run", Run),
            validate: resolve!(library, c"fake_validate", Check),
            process: resolve!(library, c"fake_process", Process),
            own_pid: resolve!(library, c"fake_own_pid", Check),
            entry_words: resolve!(library, c"fake_entry_words", Check),
            hold_nvml: resolve!(library, c"fake_hold_nvml", Check),
            nvml_sessions: resolve!(library, c"fake_nvml_sessions", Number),
        })
    }

    /// All of a text of the library.
    fn text(function: Text) -> String {
        // SAFETY: with no room nothing is written.
        let length = unsafe { function(std::ptr::null_mut(), 0) };
        let mut bytes = vec![0_u8; length.max(1)];
        // SAFETY: the buffer is as large as it is said to be.
        unsafe { function(bytes.as_mut_ptr().cast(), bytes.len()) };
        let text = CStr::from_bytes_until_nul(&bytes).map(|text| text.to_string_lossy());
        text.map(std::borrow::Cow::into_owned).unwrap_or_default()
    }
}

impl Guard {
    /// Begins anew with these options: nothing is left of devices, contexts, counts and plans.
    ///
    /// # Panics
    /// If the options name no possible device.
    pub fn reset(&self, options: Options) {
        // SAFETY: a pointer to options that outlive the call.
        let code = unsafe { (self.fake.reset)(&raw const options) };
        assert_eq!(code, 0, "{options:?}: no possible device");
    }

    /// Lets the `nth` call of this name from now on, counted from 1, fail with a code.
    ///
    /// # Panics
    /// If the library is broken.
    pub fn fail(&self, name: &CStr, nth: u64, code: u32) {
        // SAFETY: a C string that outlives the call.
        let done = unsafe { (self.fake.fail)(name.as_ptr(), nth, code) };
        assert_eq!(done, 0);
    }

    /// Forgets all failures that were planned.
    pub fn forget_failures(&self) {
        // SAFETY: no precondition.
        unsafe { (self.fake.forget_failures)() };
    }

    /// Returns the number of calls of this name, failed ones included.
    #[must_use]
    pub fn calls(&self, name: &CStr) -> u64 {
        // SAFETY: a C string that outlives the call.
        unsafe { (self.fake.calls)(name.as_ptr()) }
    }

    /// Returns the number of all calls.
    #[must_use]
    pub fn calls_total(&self) -> u64 {
        // SAFETY: null asks for the sum.
        unsafe { (self.fake.calls)(std::ptr::null()) }
    }

    /// Returns the number of waits of the host that would have kept a core busy on a device: for a
    /// stream, for the context, and for events that do not block.
    #[must_use]
    pub fn spins(&self) -> u64 {
        // SAFETY: no precondition.
        unsafe { (self.fake.spins)() }
    }

    /// Plants a missing wait: of the calls of `cuStreamWaitEvent` from now on, every so many-th
    /// succeeds and orders nothing. 0 ends it.
    ///
    /// # Panics
    /// If the library is broken.
    pub fn drop_waits(&self, every: u64) {
        // SAFETY: a number only.
        let done = unsafe { (self.fake.drop_waits)(every) };
        assert_eq!(done, 0);
    }

    /// Returns the number of waits that were dropped.
    #[must_use]
    pub fn dropped_waits(&self) -> u64 {
        // SAFETY: no precondition.
        unsafe { (self.fake.dropped_waits)() }
    }

    fn row(&self, device: u32) -> (Numbers, u64) {
        let mut row = Row::default();
        // SAFETY: a pointer to a row that outlives the call.
        let code = unsafe { (self.fake.numbers)(device, &raw mut row) };
        assert_eq!(code, 0, "there is no device {device}");
        numbers(&row)
    }

    /// Returns the figures of a device; devices are counted whether they are visible or not.
    #[must_use]
    pub fn numbers(&self, device: u32) -> Numbers {
        self.row(device).0
    }

    /// Returns the number of times that its primary context is retained.
    #[must_use]
    pub fn retains(&self, device: u32) -> u64 {
        self.row(device).1
    }

    /// The breaches of CUDA's contract so far, a line each.
    #[must_use]
    pub fn faults(&self) -> String {
        Fake::text(self.fake.faults)
    }

    /// Returns the objects that have not been released, a line for each device and each context
    /// destroyed with something in it.
    #[must_use]
    pub fn leaks(&self) -> String {
        Fake::text(self.fake.leaks)
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
        // SAFETY: numbers only.
        let done = unsafe { (self.fake.poison)(device, code) };
        assert_eq!(done, 0, "there is no device {device}");
    }

    /// Takes so many bytes of a device as another process would; 0 gives them back.
    ///
    /// # Panics
    /// If there is no such device.
    pub fn neighbours(&self, device: u32, bytes: u64) {
        // SAFETY: numbers only.
        let done = unsafe { (self.fake.neighbours)(device, bytes) };
        assert_eq!(done, 0, "there is no device {device}");
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
        // SAFETY: numbers only.
        let done = unsafe { (self.fake.process)(device, kind, pid, used) };
        assert_eq!(done, 0, "there is no device {device}");
    }

    /// Sets the number under which NVML lists this process; 0 hides it.
    ///
    /// # Panics
    /// If the library is broken.
    pub fn own_pid(&self, pid: u32) {
        // SAFETY: a number only.
        let done = unsafe { (self.fake.own_pid)(pid) };
        assert_eq!(done, 0);
    }

    /// Sets the size of an entry in NVML's lists, in units of 8 bytes: 2, 3 (the usual) or 4.
    ///
    /// # Panics
    /// If the library is broken.
    pub fn entry_words(&self, words: u32) {
        // SAFETY: a number only.
        let done = unsafe { (self.fake.entry_words)(words) };
        assert_eq!(done, 0);
    }

    /// Lets the lists of NVML not return until it is called with `false`, or a reset.
    ///
    /// # Panics
    /// If the library is broken.
    pub fn hold_nvml(&self, is_held: bool) {
        // SAFETY: a number only.
        let done = unsafe { (self.fake.hold_nvml)(u32::from(is_held)) };
        assert_eq!(done, 0);
    }

    /// Returns the number of sessions of NVML that have not ended.
    #[must_use]
    pub fn nvml_sessions(&self) -> u64 {
        // SAFETY: no precondition.
        unsafe { (self.fake.nvml_sessions)() }
    }

    /// Sets the memory of a device in bytes, until its context ends.
    ///
    /// # Panics
    /// If there is no such device.
    pub fn capacity(&self, device: u32, bytes: u64) {
        // SAFETY: numbers only.
        let done = unsafe { (self.fake.capacity)(device, bytes) };
        assert_eq!(done, 0, "there is no device {device}");
    }

    /// Sets how many bytes of host memory may be page-locked for a device.
    ///
    /// # Panics
    /// If there is no such device.
    pub fn lock_limit(&self, device: u32, bytes: u64) {
        // SAFETY: numbers only.
        let done = unsafe { (self.fake.lock_limit)(device, bytes) };
        assert_eq!(done, 0, "there is no device {device}");
    }

    /// Launches a graph that allocates so many bytes and frees them: the device keeps them.
    ///
    /// # Panics
    /// If there is no such device.
    pub fn graph_memory(&self, device: u32, bytes: u64) {
        // SAFETY: numbers only.
        let done = unsafe { (self.fake.graph_memory)(device, bytes) };
        assert_eq!(done, 0, "there is no device {device}");
    }

    /// Does at most so many pieces of queued work, as time would; how many were there to do.
    pub fn run(&self, device: u32, count: u64) -> u64 {
        // SAFETY: numbers only.
        unsafe { (self.fake.run)(device, count) }
    }

    /// Checks the model's own books.
    ///
    /// # Panics
    /// If the model is wrong.
    pub fn validate(&self, device: u32) {
        // SAFETY: a number only.
        let done = unsafe { (self.fake.validate)(device) };
        assert_eq!(done, 0, "the books of device {device} are wrong");
    }
}
