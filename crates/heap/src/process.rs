//! The kernel's figures of this process. Reading them allocates nothing.
//!
//! On systems without `/proc` they are zero, or missing.

use std::fs::File;
use std::io::Read as _;
use std::path::Path;
use std::sync::LazyLock;

use lowtide_core::bytes::ByteSize;
use lowtide_core::file::KeptFile;
use lowtide_core::kernel::{Statm, kib_of, page_size};

const STATM_PATH: &str = "/proc/self/statm";
/// It stays open. In a forked child it tells of the parent.
static STATM: LazyLock<Option<KeptFile>> =
    LazyLock::new(|| KeptFile::open(Path::new(STATM_PATH)).ok());

/// Returns the figures of the process that called this first, which allocates once.
pub(super) fn statm() -> Option<Statm> {
    let mut text = [0; 128];
    let length = STATM.as_ref()?.read_at(&mut text, 0).ok()?;
    Statm::parse(text.get(..length)?, page_size()?)
}

/// Returns the resident memory that belongs to no file and no shared memory.
pub(super) fn anonymous_resident() -> ByteSize {
    let read = |text: &[u8]| Statm::parse(text, page_size()?);
    with_text(STATM_PATH, read).map_or(ByteSize::ZERO, |held| held.anon)
}

/// Returns the bytes that are locked.
pub(super) fn locked() -> ByteSize {
    with_text("/proc/self/status", |text| kib_of(text, b"VmLck:")).unwrap_or(ByteSize::ZERO)
}

/// Parses the first 4 KiB of a file.
fn with_text<T>(path: &str, parse: impl FnOnce(&[u8]) -> Option<T>) -> Option<T> {
    let mut text = [0_u8; 4096];
    let length = File::open(path).ok()?.read(&mut text).ok()?;
    parse(text.get(..length)?)
}
