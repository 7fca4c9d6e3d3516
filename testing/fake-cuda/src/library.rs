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
    pub(crate) fn act(&self, command: Command) -> u64 {
        let answer = (self.fake.0)(In::of(&command));
        assert_ne!(answer, FAILED, "{command:?}: no possible device, or the library is broken");
        answer
    }

    /// Lets the `nth` call of this name from now on, counted from 1, fail with a code.
    pub fn fail(&self, name: &CStr, nth: u64, code: u32) {
        self.plan(Text::of(name), nth, code);
    }

    /// Returns the number of calls of this name, failed ones included.
    #[must_use]
    pub fn calls(&self, name: &CStr) -> u64 {
        self.calls_of(Text::of(name))
    }

    /// Returns the figures of a device; devices are counted whether they are visible or not.
    ///
    /// # Panics
    /// If there is no such device.
    #[must_use]
    pub fn numbers(&self, device: u32) -> Numbers {
        let mut numbers = Numbers::default();
        self.put_numbers(device, Out::of(&raw mut numbers));
        numbers
    }

    /// All of a text of the library.
    fn text(&self, put: fn(&Self, Out<c_char>, usize) -> u64) -> String {
        let length = put(self, Out::of(std::ptr::null_mut()), 0);
        let mut bytes: Vec<c_char> = vec![0; usize::try_from(length).unwrap_or(0).max(1)];
        let room = bytes.len();
        put(self, Out::of(bytes.as_mut_ptr()), room);
        let text = bytes.iter().map(|byte| byte.cast_unsigned()).take_while(|byte| *byte != 0);
        String::from_utf8_lossy(&text.collect::<Vec<_>>()).into_owned()
    }

    /// The breaches of CUDA's contract so far, a line each.
    #[must_use]
    pub fn faults(&self) -> String {
        self.text(Self::put_faults)
    }

    /// Returns the objects that have not been released, a line for each device and each context
    /// destroyed with something in it.
    #[must_use]
    pub fn leaks(&self) -> String {
        self.text(Self::put_leaks)
    }

    /// Asserts that the contract was kept and all is given back.
    ///
    /// # Panics
    /// If not.
    pub fn assert_clean(&self) {
        assert_eq!((self.faults().as_str(), self.leaks().as_str()), ("", ""));
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
}
