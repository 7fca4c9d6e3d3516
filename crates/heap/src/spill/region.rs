//! The file that spilled memory is in, and its mapping.
//!
//! A block of the file is reserved before its page is handed out, and released with it. Only Linux
//! has the system calls for that: elsewhere no region is created.
//!
//! Invariant: `pages in use <= blocks on disk`, while the file is the process's.

use std::ffi::c_void;
use std::fs::{self, File};
use std::os::fd::AsRawFd as _;
use std::path::Path;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicU64, AtomicUsize};
use std::{io, ptr};

use lowtide_core::bytes::ByteSize;
use lowtide_core::file::OwnedFile;
use lowtide_core::fork::Birth;
use lowtide_core::kernel::{file_size_limit, kib_of};

use crate::error::HostError;
use crate::process::{locked, statm};

/// The disk that stays free for others: a full one fails even for blocks that were reserved.
pub(super) const MARGIN: ByteSize = ByteSize::mib(64);
/// The least free disk at the start.
const FREE_MIN: ByteSize = ByteSize::mib(128);
/// The growth of the arena that is reserved at once. Larger blocks reserve what they take.
pub(super) const GROWTH_MAX: usize = 8 << 20;
/// The bytes that the pager writes and drops in one step.
pub(super) const PIECE: usize = 4 << 20;

/// The mapped file.
pub(super) struct Region {
    file: OwnedFile,
    start: usize,
    pub(super) size: usize,
    pub(super) birth: Birth,
    /// The part that jemalloc ever got.
    pub(super) taken: AtomicUsize,
    /// The bytes with blocks on disk.
    on_disk: AtomicU64,
    /// The mapped file pages of the process beyond it: its program, libraries and other files.
    others: AtomicU64,
}

impl Region {
    pub(super) fn create(dir: &Path, most: ByteSize) -> Result<(Self, ByteSize), HostError> {
        let dir_text = || dir.display().to_string();
        let fails =
            |error: io::Error| HostError::SpillFile { dir: dir_text(), error: error.to_string() };
        if !locked().is_zero() {
            // The whole file would be locked.
            return Err(fails(io::Error::other("the memory is locked (mlockall)")));
        }
        let owned = calls::open_nameless(dir).and_then(OwnedFile::new).map_err(fails)?;
        let file = owned.file();
        let (kind, free) = calls::file_system(file);
        if let Some(kind) = kind {
            return Err(HostError::SpillInMemory { dir: dir_text(), kind });
        }
        let most = most.min(file_size_limit());
        let room = most.min(free);
        let most = ByteSize::new(most.get() / PIECE as u64 * PIECE as u64);
        if room < FREE_MIN {
            return Err(HostError::SpillRoom { dir: dir_text(), room, least: FREE_MIN });
        }
        file.set_len(most.get()).map_err(fails)?;
        // Fails if the file system cannot reserve blocks or, below, release them.
        calls::reserve(file, 0, PIECE).map_err(fails)?;
        let (size, flags) = (most.as_usize().unwrap_or(usize::MAX), libc::MAP_SHARED);
        // SAFETY: a new mapping, at an address that the kernel chooses.
        let start = unsafe { map(ptr::null_mut(), size, flags, Some(file)) }.map_err(fails)?;
        // Its pages are exposed to jemalloc by their addresses.
        let (start, others) = (start.expose_provenance(), AtomicU64::new(mapped_files()));
        let (birth, taken, on_disk) = (Birth::now(), AtomicUsize::new(0), AtomicU64::new(0));
        let region = Self { file: owned, start, size, birth, taken, on_disk, others };
        calls::release(region.pages(0), PIECE).map_err(fails)?;
        Ok((region, room))
    }

    /// Returns the address of an offset.
    fn pages(&self, offset: usize) -> *mut c_void {
        ptr::with_exposed_provenance_mut(self.start + offset)
    }

    pub(super) const fn contains(&self, at: usize) -> bool {
        at.wrapping_sub(self.start) < self.size
    }

    pub(super) fn on_disk(&self) -> ByteSize {
        ByteSize::new(self.on_disk.load(Relaxed))
    }

    /// Returns the bytes of the file that are in memory: those that are mapped, and the piece that
    /// is being written.
    pub(super) fn in_memory(&self) -> u64 {
        let mapped = mapped_files().saturating_sub(self.others.load(Relaxed));
        (mapped + PIECE as u64).min(self.taken.load(Relaxed) as u64)
    }

    /// Finds out which mapped file pages are those of other files. Reads the map of the process,
    /// which takes milliseconds and allocates.
    pub(super) fn know_others(&self) {
        let (mapped, map) = (mapped_files(), fs::read_to_string("/proc/self/smaps"));
        let start = format!("{:x}-", self.start);
        let own = map.ok().and_then(|map| kib_of(map.split_once(&start)?.1.as_bytes(), b"Rss:"));
        self.others.store(mapped.saturating_sub(own.unwrap_or_default().get()), Relaxed);
    }

    /// Returns `true` if the disk has so many bytes free, and the file is not closed.
    fn has_room(&self, size: usize) -> bool {
        let least = ByteSize::of(size).saturating_add(MARGIN);
        let is_free = || calls::file_system(self.file.file()).1 >= least;
        self.birth.is_here() && self.file.is_own() && is_free()
    }

    /// Reserves blocks on disk for a part of the region, if there is room.
    pub(super) fn reserve(&self, at: usize, size: usize) -> bool {
        let is_done =
            self.has_room(size) && calls::reserve(self.file.file(), at - self.start, size).is_ok();
        self.on_disk.fetch_add(if is_done { size as u64 } else { 0 }, Relaxed);
        is_done
    }

    /// Releases the blocks of a part of the region that holds no block of jemalloc, also once the
    /// file is closed.
    pub(super) fn release(&self, at: usize, size: usize) -> bool {
        let is_here = self.birth.is_here();
        let is_done = is_here && calls::release(self.pages(at - self.start), size).is_ok();
        self.on_disk.fetch_sub(if is_done { size as u64 } else { 0 }, Relaxed);
        is_done
    }

    /// Takes a part of the region that jemalloc never got, at `place` unless that is 0. Returns its
    /// address, and `true` if its blocks are reserved, as they must be if `must` is set.
    pub(super) fn take(
        &self,
        place: usize,
        size: usize,
        align: usize,
        must: bool,
    ) -> Option<(*mut c_void, bool)> {
        if !self.has_room(size) {
            return None;
        }
        let from = |taken: usize| (self.start + taken).next_multiple_of(align);
        let next = |taken| {
            let (at, end) = (from(taken), (from(taken) - self.start).checked_add(size)?);
            (end <= self.size && (place == 0 || place == at)).then_some(end)
        };
        let at = from(self.taken.fetch_update(Relaxed, Relaxed, next).ok()?);
        let is_reserved = (must || size <= GROWTH_MAX) && self.reserve(at, size);
        (is_reserved || !must).then_some((self.pages(at - self.start), is_reserved))
    }

    /// Writes a piece if it `writes`, and waits for it if it `waits`. Then it fails if any could not
    /// be written since the last call.
    pub(super) fn sync(&self, piece: usize, writes: bool, waits: bool) -> io::Result<()> {
        // An error of another file that has the number is its owner's, and is reported only once.
        if !self.file.is_own() {
            return Ok(());
        }
        let done = calls::sync(self.file.file(), piece, writes, waits);
        if self.file.is_own() { done } else { Ok(()) }
    }

    /// Writes a piece, waits for it and drops it from memory; the next one is written meanwhile.
    pub(super) fn page_out(&self, piece: usize, top: usize) -> io::Result<()> {
        let next = (piece + PIECE) % top;
        calls::unmap(self.pages(next), PIECE);
        self.sync(next, true, false)?;
        calls::unmap(self.pages(piece), PIECE);
        self.sync(piece, true, true)?;
        if self.file.is_own() {
            calls::drop_from_memory(self.file.file(), piece);
        }
        Ok(())
    }

    /// Maps the file privately, at the same addresses. Returns `true` if it did.
    pub(super) fn map_privately(&self) -> bool {
        let (at, flags) = (self.pages(0), libc::MAP_PRIVATE | libc::MAP_FIXED);
        // SAFETY: the same file at the same addresses: a block has the contents that it has in the
        // parent.
        self.file.is_own() && unsafe { map(at, self.size, flags, Some(self.file.file())) }.is_ok()
    }
}

/// Maps a file, or anonymous memory.
///
/// # Safety
/// With `MAP_FIXED`, nothing may rely on what is mapped there.
unsafe fn map(
    at: *mut c_void,
    size: usize,
    flags: i32,
    file: Option<&File>,
) -> io::Result<*mut c_void> {
    let (access, flags) = (libc::PROT_READ | libc::PROT_WRITE, flags | libc::MAP_NORESERVE);
    let handle = file.map_or(-1, |file| file.as_raw_fd());
    // SAFETY: as the caller promises.
    let start = unsafe { libc::mmap(at, size, access, flags, handle, 0) };
    if start == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(start) }
}

/// Returns new anonymous pages, or null.
pub(super) fn anonymous(size: usize, align: usize) -> *mut c_void {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    let Some(all) = size.checked_add(align) else { return ptr::null_mut() };
    // SAFETY: a new mapping, at an address that the kernel chooses.
    let Ok(start) = (unsafe { map(ptr::null_mut(), all, flags, None) }) else {
        return ptr::null_mut();
    };
    let before = start.addr().next_multiple_of(align) - start.addr();
    let pages = start.wrapping_byte_add(before);
    for (at, size) in [(start, before), (pages.wrapping_byte_add(size), align - before)] {
        if size > 0 {
            // SAFETY: a part of the new mapping that is not returned.
            unsafe { libc::munmap(at, size) };
        }
    }
    pages
}

/// Returns the mapped file pages of the process that are in memory.
fn mapped_files() -> u64 {
    statm().map_or(0, |now| now.rss.saturating_sub(now.anon).get())
}

/// The system calls that only Linux has.
#[cfg(target_os = "linux")]
mod calls {
    use std::ffi::{c_int, c_void};
    use std::fs::{File, OpenOptions};
    use std::io;
    use std::mem::MaybeUninit;
    use std::os::fd::AsRawFd as _;
    use std::os::unix::fs::OpenOptionsExt as _;
    use std::path::Path;

    use crate::spill::region::{ByteSize, PIECE};

    const FIEMAP: libc::Ioctl = libc::_IOWR::<[u64; 4]>(b'f' as u32, 11);

    fn result(status: c_int) -> io::Result<()> {
        if status == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    pub(super) fn open_nameless(dir: &Path) -> io::Result<File> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).mode(0o600).custom_flags(libc::O_TMPFILE).open(dir)
    }

    /// Returns the name of the file system if its files are memory, and the disk that it has free.
    pub(super) fn file_system(file: &File) -> (Option<&'static str>, ByteSize) {
        let mut found = MaybeUninit::<libc::statfs>::zeroed();
        // SAFETY: an open file, and room for the answer.
        unsafe { libc::fstatfs(file.as_raw_fd(), found.as_mut_ptr()) };
        // SAFETY: numbers, which are zero if the call failed.
        let found = unsafe { found.assume_init() };
        let free = i128::from(found.f_frsize).saturating_mul(i128::from(found.f_bavail));
        // A file system in memory maps no extents. Overlayfs asks the one below.
        let mut extents = [0, 1, 0, 0_u64]; // `struct fiemap`: only the number, of the first byte
        // SAFETY: an open file, and room for the answer.
        let mut are_mapped = || unsafe { libc::ioctl(file.as_raw_fd(), FIEMAP, &mut extents) == 0 };
        let kind = match i128::from(found.f_type) {
            0x0102_1994 => Some("tmpfs"),
            0x8584_58f6 => Some("ramfs"),
            0x794c_7630 if !are_mapped() => Some("overlayfs over tmpfs"),
            _ => None,
        };
        (kind, ByteSize::new(u64::try_from(free).unwrap_or(u64::MAX)))
    }

    /// Reserves blocks; the file has its size from the start.
    pub(super) fn reserve(file: &File, at: usize, size: usize) -> io::Result<()> {
        let (at, size) = (at.cast_signed() as i64, size.cast_signed() as i64);
        // SAFETY: it changes no contents.
        result(unsafe { libc::fallocate(file.as_raw_fd(), libc::FALLOC_FL_KEEP_SIZE, at, size) })
    }

    /// Releases the blocks of pages that nothing uses, which read as zeros afterwards.
    pub(super) fn release(pages: *mut c_void, size: usize) -> io::Result<()> {
        // SAFETY: nothing uses them.
        result(unsafe { libc::madvise(pages, size, libc::MADV_REMOVE) })
    }

    /// Starts to write a piece of the file if it `writes`, and waits until it is written if it
    /// `waits`.
    pub(super) fn sync(file: &File, at: usize, writes: bool, waits: bool) -> io::Result<()> {
        let (before, after) = (libc::SYNC_FILE_RANGE_WAIT_BEFORE, libc::SYNC_FILE_RANGE_WAIT_AFTER);
        let write = if writes { libc::SYNC_FILE_RANGE_WRITE } else { 0 };
        let flags = write | if waits { before | after } else { 0 };
        let (at, size) = (at.cast_signed() as i64, PIECE.cast_signed() as i64);
        // SAFETY: it changes no contents.
        result(unsafe { libc::sync_file_range(file.as_raw_fd(), at, size, flags) })
    }

    /// Unmaps pages of a shared file, all at once: the kernel unmaps those that it writes one by one,
    /// and interrupts the other processors for each.
    pub(super) fn unmap(pages: *mut c_void, size: usize) {
        // SAFETY: the file keeps what they hold.
        unsafe { libc::madvise(pages, size, libc::MADV_DONTNEED) };
    }

    /// Drops a written piece of the file from memory.
    pub(super) fn drop_from_memory(file: &File, at: usize) {
        let (at, size) = (at.cast_signed() as i64, PIECE.cast_signed() as i64);
        // SAFETY: it changes no contents.
        unsafe { libc::posix_fadvise(file.as_raw_fd(), at, size, libc::POSIX_FADV_DONTNEED) };
    }
}

#[cfg(not(target_os = "linux"))]
mod calls {
    use std::ffi::c_void;
    use std::fs::File;
    use std::io::{ErrorKind, Result};
    use std::path::Path;

    use crate::spill::region::ByteSize;

    pub(super) fn open_nameless(_: &Path) -> Result<File> {
        Err(ErrorKind::Unsupported.into())
    }
    pub(super) const fn file_system(_: &File) -> (Option<&'static str>, ByteSize) {
        (None, ByteSize::ZERO)
    }
    pub(super) fn reserve(_: &File, _: usize, _: usize) -> Result<()> {
        Err(ErrorKind::Unsupported.into())
    }
    pub(super) fn release(_: *mut c_void, _: usize) -> Result<()> {
        Err(ErrorKind::Unsupported.into())
    }
    pub(super) fn sync(_: &File, _: usize, _: bool, _: bool) -> Result<()> {
        Err(ErrorKind::Unsupported.into())
    }
    pub(super) fn unmap(_: *mut c_void, _: usize) {}
    pub(super) fn drop_from_memory(_: &File, _: usize) {}
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;

    fn fill(pages: *mut c_void, size: usize) {
        // SAFETY: writable pages that nothing else uses.
        unsafe { pages.write_bytes(1, size) };
    }

    /// The bug: a file that the process mapped while spilled memory was kept counted as part of it,
    /// so that all work that spilled later waited for the pager.
    #[test]
    fn mapped_pages_of_other_files_are_not_the_regions() {
        let dir = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).expect("a folder");
        let (region, _) = Region::create(dir.path(), ByteSize::mib(256)).expect("a disk");
        let (kept, is_reserved) = region.take(0, 128 * MIB, 4096, true).expect("room");
        assert!(is_reserved);
        fill(kept, 8 * MIB);
        let other = tempfile::tempfile_in(dir.path()).expect("a file");
        other.set_len(64 << 20).expect("a size");
        // SAFETY: a new mapping.
        let pages = unsafe { map(ptr::null_mut(), 64 * MIB, libc::MAP_SHARED, Some(&other)) };
        fill(pages.expect("a mapping"), 64 * MIB);
        region.know_others();
        let in_memory = (region.in_memory() >> 20) - 4;
        assert!((7..16).contains(&in_memory), "{in_memory} MiB");
    }

    /// The bug: a piece that did not exist was being written. Under a limit below 21 MiB the first
    /// work that spilled waited a second for the pager, which had nothing to write yet.
    #[test]
    fn no_more_than_what_was_taken_is_in_memory() {
        let dir = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).expect("a folder");
        let (region, _) = Region::create(dir.path(), ByteSize::mib(256)).expect("a disk");
        assert_eq!(region.in_memory(), 0);
        let (taken, _) = region.take(0, 2 * MIB, 4096, true).expect("room");
        fill(taken, 2 * MIB);
        assert_eq!(region.in_memory() >> 20, 2);
    }
}
