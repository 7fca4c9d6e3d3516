//! The version of a shared library, which is read before `ort` opens it.
//!
//! `ort` checks the version too, and reports a text.
#![expect(unsafe_code, reason = "calls a function of a shared library")]

use std::error::Error as _;
use std::ffi::CStr;
use std::path::Path;

use libloading::Library;
use ort::sys::OrtApiBase;

use super::error::{OLDEST_MINOR, OrtError, text};

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
mod tests {
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
