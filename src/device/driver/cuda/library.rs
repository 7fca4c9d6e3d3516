//! FENCE: opens the CUDA driver's library and finds functions in it, by the loader alone.
//!
//! It calls nothing that it finds. cudarc panics where the library or a function is missing, so
//! both are asked for here first, under the names and in the order that cudarc uses: what is found
//! here is what cudarc finds. The library stays open for the rest of the process, because `cuInit`
//! may start threads in it.
//!
//! Invariant: a function is `Some` only if the open library has a symbol of that name.
#![expect(unsafe_code, reason = "opening a library and looking a symbol up")]

use std::ffi::{CStr, CString, c_void};
use std::ptr::NonNull;

/// Names of the driver's library in the order in which cudarc tries them. The first may be a
/// toolkit's stub, which answers cuInit with code 34; the last is the one that drivers install.
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

/// A library that is open for good.
#[derive(Clone, Copy, Debug)]
pub(super) struct Library(NonNull<c_void>);

// SAFETY: the handle is the loader's, whose functions any thread may call with it (dlsym(3),
// MT-Safe); it is never closed.
unsafe impl Send for Library {}
// SAFETY: as above.
unsafe impl Sync for Library {}

impl Library {
    /// The first library of these that opens; else what the loader said of the last.
    pub(super) fn open(names: &[&str]) -> Result<Self, String> {
        let mut error = "no name to try".to_owned();
        for name in names {
            let Ok(name) = CString::new(*name) else { continue };
            // SAFETY: the name is a C string that outlives the call. "dlopen() ... returns NULL"
            // on failure (dlopen(3)). The initialisers that run are those of the system's own
            // driver, which any process that uses CUDA runs.
            let opened = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
            match NonNull::new(opened) {
                Some(handle) => return Ok(Self(handle)),
                None => error = loader_error(),
            }
        }
        Err(error)
    }

    /// A function or a variable of the library; `None` where it has none of that name.
    pub(super) fn symbol(self, name: &CStr) -> Option<NonNull<c_void>> {
        // SAFETY: the handle came from `dlopen` and is never closed; the name is a C string.
        NonNull::new(unsafe { libc::dlsym(self.0.as_ptr(), name.as_ptr()) })
    }
}

fn loader_error() -> String {
    // SAFETY: no precondition; the message is this thread's own (dlerror(3), MT-Safe).
    let text = unsafe { libc::dlerror() };
    if text.is_null() {
        return "the loader gives no reason".to_owned();
    }
    // SAFETY: not null, and then a null-terminated string that lives until this thread's next
    // call of the dl family; it is copied before one.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// cudarc's names go by the version of its bindings in part; what remains is in its order.
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
        let error = Library::open(&["liblowtide-absent.so.1", "liblowtide-absent.so"]);
        let error = error.expect_err("absent");
        assert!(error.contains("liblowtide-absent.so:"), "{error}");
        assert!(Library::open(&[]).is_err() && Library::open(&["nul\0"]).is_err());
    }
}
