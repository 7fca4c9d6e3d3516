//! Opens the CUDA driver library and finds its functions, with the loader alone.
//!
//! This module calls none of them. cudarc panics if the library or a function is missing, so this
//! module looks for both first, under the same names and in the same order as cudarc. It finds the
//! same library as cudarc, except for a toolkit's stub, which this module skips and cudarc does
//! not. A library that is used stays open for the rest of the process, because `cuInit` may start
//! threads in it.
//!
//! Invariant: a function is `Some` only if the open library has a symbol of that name.
#![expect(unsafe_code, reason = "opening a library and looking a symbol up")]

use std::ffi::{CStr, CString, c_void};
use std::ptr::NonNull;

/// Names of the driver's library in the order in which cudarc tries them. The first may be a
/// toolkit's stub, which answers `cuInit` with code 34; the last is the one that drivers install.
pub(super) const LIBRARIES: &[&str] = &[
    "libcuda.so",
    "libcuda64.so",
    "libcuda64_10.so",
    "libcuda64_11.so",
    "libcuda64_12.so",
    "libcuda64_9.so",
    "libcuda.so.13",
    "libcuda.so.12",
    "libcuda.so.11",
    "libcuda.so.10",
    "libcuda.so.9",
    "libcuda.so.1",
];

/// A library that is open.
#[derive(Clone, Copy, Debug)]
pub(super) struct Library(NonNull<c_void>);

// SAFETY: the handle is the loader's, whose functions any thread may call with it (dlsym(3),
// MT-Safe).
unsafe impl Send for Library {}
// SAFETY: as above.
unsafe impl Sync for Library {}

/// The result of examining a library.
pub(super) enum Look<T> {
    /// It is the driver's library.
    Found(T),
    /// It is a stub or not a driver at all. The search continues, and this is the result if no
    /// other library is found. The library is closed and nothing of it is kept.
    Passed(T),
}

/// Examines the libraries of these names, in order, until one is the driver's. Otherwise returns
/// the result for the first that opened.
///
/// # Errors
/// The loader's message for the last name, if none opens.
pub(super) fn search<T>(
    names: &[&'static str],
    look: impl Fn(&'static str, Library) -> Look<T>,
) -> Result<T, String> {
    let (mut passed, mut error) = (None, "no library name to try".to_owned());
    for name in names {
        let library = match Library::open(name) {
            Ok(library) => library,
            Err(said) => {
                error = said;
                continue;
            }
        };
        match look(name, library) {
            Look::Found(found) => return Ok(found),
            Look::Passed(answer) => {
                // A stub has the driver's soname: while it is open the loader finds no other.
                library.close();
                passed.get_or_insert(answer);
            }
        }
    }
    passed.ok_or(error)
}

impl Library {
    /// Opens the library of this name. The error is the loader's message.
    fn open(name: &str) -> Result<Self, String> {
        let name = CString::new(name).map_err(|error| error.to_string())?;
        // SAFETY: the name is a C string that outlives the call. "dlopen() ... returns NULL" on
        // failure (dlopen(3)). The initialisers that run are those of the system's own driver,
        // which any process that uses CUDA runs.
        let opened = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        NonNull::new(opened).map(Self).ok_or_else(loader_error)
    }

    /// Closes a library that has not started anything.
    fn close(self) {
        // SAFETY: the handle came from `dlopen` and is closed once, here; `Look::Passed` says that
        // nothing found in it is kept.
        let _ = unsafe { libc::dlclose(self.0.as_ptr()) };
    }

    /// Finds a function or a variable; `None` if the library has none of that name.
    pub(super) fn symbol(self, name: &CStr) -> Option<NonNull<c_void>> {
        // SAFETY: the handle came from `dlopen` and is open; the name is a C string.
        NonNull::new(unsafe { libc::dlsym(self.0.as_ptr(), name.as_ptr()) })
    }
}

fn loader_error() -> String {
    // SAFETY: no precondition; the message is this thread's own (dlerror(3), MT-Safe).
    let text = unsafe { libc::dlerror() };
    if text.is_null() {
        return "no message from the loader".to_owned();
    }
    // SAFETY: not null, and then a null-terminated string that lives until this thread's next
    // call of the dl family; it is copied before one.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Some of cudarc's names depend on the version of its bindings; the others are in its order.
    #[test]
    fn the_names_are_cudarcs_in_its_order() {
        let theirs = cudarc::get_lib_name_candidates("cuda");
        let known: Vec<_> =
            theirs.iter().filter(|name| LIBRARIES.contains(&name.as_str())).collect();
        let mut ours = LIBRARIES.to_vec();
        ours.retain(|name| theirs.iter().any(|their| their == name));
        assert_eq!(known, ours.iter().collect::<Vec<_>>());
        assert!(known.len() >= LIBRARIES.len() - 1, "{theirs:?}");
    }

    #[test]
    fn what_is_not_there_is_said_in_the_loaders_words() {
        let open = |names: &[&'static str]| search(names, |_, _| Look::Found(()));
        let error = open(&["liblowtide-absent.so.1", "liblowtide-absent.so"]);
        let error = error.expect_err("absent");
        assert!(error.contains("liblowtide-absent.so:"), "{error}");
        assert!(open(&[]).is_err() && open(&["nul\0"]).is_err());
    }

    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    #[test]
    fn a_library_that_is_passed_over_does_not_end_the_search() {
        fn is_libc(name: &'static str, _: Library) -> Look<&'static str> {
            if name == "libc.so.6" { Look::Found(name) } else { Look::Passed(name) }
        }
        let names = ["libm.so.6", "liblowtide-absent.so", "libc.so.6"];
        assert_eq!(search(&names, is_libc), Ok("libc.so.6"));
        assert_eq!(
            search(&names[..2], is_libc),
            Ok("libm.so.6"),
            "the answer if no other is found"
        );
    }
}
