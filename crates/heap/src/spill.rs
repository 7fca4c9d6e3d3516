//! Spill: work that outgrows its claim while memory is short goes on allocating on disk.
//!
//! One arena has its pages in a file without a name, which is mapped shared. The kernel writes such
//! pages back and drops them under the limit, also without swap. A checkpoint binds a thread to the
//! arena (`checkpoint`), and the end of its outermost work binds it back: from then on blocks of the
//! arena are like others, and any thread may use and free them.
//!
//! A page is handed out only once the disk has reserved its block, and only while the disk has
//! [`MARGIN`] free beyond that: a page without a block would end the process with SIGBUS. Without
//! room on disk the arena takes anonymous memory. The pager, a thread of the caller, writes ahead of
//! the kernel's reclaim and releases unused pages, because both wait for the disk. jemalloc's own
//! threads never purge the arena.
//!
//! A forked child maps the file privately: what it writes stays its own, but pages that it has not
//! written show what the parent writes there, and zeros once the parent has released them. It must
//! not use what was spilled before the fork.
//!
//! Invariants: `pages in use <= blocks on disk + anonymous ones`; a thread is bound to the arena
//! only within work; only the pager waits for a hole to be punched.
#![cfg_attr(target_os = "linux", expect(unsafe_code, reason = "extent hooks over a mapped file"))]

use lowtide_core::bytes::ByteSize;

#[cfg(not(target_os = "linux"))]
pub use elsewhere::*;
#[cfg(target_os = "linux")]
pub use platform::*;

/// The share of the limit that is left when work begins to spill, and the most. An estimate, from
/// limits of 256 MiB: three windows of the file, and as much for other growth.
const RESERVE_PART: f64 = 0.375;
const RESERVE_MAX: ByteSize = ByteSize::mib(384);
/// The share of the limit that the pager leaves of the file in memory, and the most.
const WINDOW_PART: f64 = 0.0625;
const WINDOW_MAX: ByteSize = ByteSize::mib(64);

#[cfg(target_os = "linux")]
mod platform {
    use std::cell::Cell;
    use std::ffi::{c_int, c_uint, c_void};
    use std::fs::{File, OpenOptions};
    use std::mem::MaybeUninit;
    use std::os::fd::AsRawFd as _;
    use std::os::unix::fs::OpenOptionsExt as _;
    use std::path::Path;
    use std::ptr::{self, NonNull};
    use std::sync::atomic::Ordering::{Acquire, Relaxed};
    use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize};
    use std::sync::{Arc, LazyLock, OnceLock};
    use std::time::Duration;
    use std::{io, process};

    use lowtide_core::clock::{Bell, Clock, Moment};
    use lowtide_core::file::OwnedFile;
    use lowtide_core::fork::{self, Birth};
    use lowtide_core::kernel::file_size_limit;
    use lowtide_core::sync::{Mutex, lock};
    use tikv_jemalloc_sys::extent_hooks_t;

    use super::{ByteSize, RESERVE_MAX, RESERVE_PART, WINDOW_MAX, WINDOW_PART};
    use crate::account;
    use crate::checkpoint::statm;
    use crate::error::HostError;
    use crate::libc_heap::locked;
    use crate::mallctl as ctl;
    use crate::recall::flush_thread_cache;
    use crate::redirect;

    /// The disk that stays free for others: a full one fails even for blocks that were reserved.
    const MARGIN: ByteSize = ByteSize::mib(64);
    /// The least free disk at the start.
    const FREE_MIN: ByteSize = ByteSize::mib(128);
    /// The growth of the arena that is reserved at once. Larger blocks reserve what they take.
    const GROWTH_MAX: usize = 8 << 20;
    /// The bytes that the pager writes and drops in one step.
    const PIECE: usize = 4 << 20;
    /// The most pieces that the pager writes between two looks.
    const PIECES: usize = 16;
    /// The time between two looks of the pager while work spills, and the longest while blocks stay.
    const REST: Duration = Duration::from_millis(2);
    const REST_MAX: Duration = Duration::from_secs(10);
    /// The time between two purges of the arena.
    const PURGE_EVERY: Duration = Duration::from_millis(100);
    /// The most waits of 1 ms of a thread that is three windows ahead of the pager.
    const WAITS_MAX: u32 = 500;

    /// The mapped file.
    struct Region {
        file: OwnedFile,
        start: usize,
        size: usize,
        birth: Birth,
        /// The mapped file pages of the process beyond it: its program, libraries and other files.
        mapped: AtomicU64,
    }

    /// Set once: blocks in it may outlive the caller that set it up.
    static REGION: OnceLock<Region> = OnceLock::new();
    /// The index of the arena, or [`NONE`].
    static ARENA: AtomicU32 = AtomicU32::new(NONE);
    const NONE: u32 = u32::MAX;
    /// jemalloc's count of its active pages.
    static ACTIVE_PAGES: AtomicPtr<usize> = AtomicPtr::new(ptr::null_mut());
    /// The part of the region that jemalloc ever got.
    static TAKEN: AtomicUsize = AtomicUsize::new(0);
    /// The bytes with blocks on disk.
    static ON_DISK: AtomicU64 = AtomicU64::new(0);
    /// The number of threads that spill, and how often one began.
    static SPILLING: AtomicU32 = AtomicU32::new(0);
    static BEGUN: AtomicU64 = AtomicU64::new(0);
    static WINDOW: AtomicU64 = AtomicU64::new(WINDOW_MAX.get());
    /// The pieces that the pager has written and dropped.
    static PAGED: AtomicU64 = AtomicU64::new(0);
    /// `true` while a pager runs. The next one waits for its end: both would take rings of the bell.
    static IS_PAGED: AtomicBool = AtomicBool::new(false);
    static PAGER: Mutex<()> = Mutex::new(());
    static BELL: LazyLock<Arc<Bell>> = LazyLock::new(Bell::new);

    thread_local! {
        /// The arena of the thread before it spilled.
        static BEFORE: Cell<u32> = const { Cell::new(0) };
    }

    /// Lets work that outgrows its claim ([`Account::set_claim`](crate::Account::set_claim)) while
    /// memory is short allocate in a file in this folder, up to `most` bytes, if a pager runs
    /// ([`run_pager`]). The file has no name, and its space is released at the end of the process at
    /// the latest. Only the first call in a process creates a file; later calls keep it.
    ///
    /// # Errors
    /// [`HostError::SpillInMemory`], [`HostError::SpillRoom`] or [`HostError::SpillFile`] if the
    /// folder does not serve, [`HostError::NotRedirected`] if [`Heap`](crate::Heap) is not the
    /// global allocator, [`HostError::ArenasByCpu`] if jemalloc runs with `percpu_arena`.
    pub fn spill_into(dir: &Path, most: ByteSize) -> Result<(), HostError> {
        if !redirect::is_served() {
            return Err(HostError::NotRedirected);
        }
        if let Some(found) = ctl::OPT_PERCPU_ARENA.read()?.filter(|mode| *mode != "disabled") {
            return Err(HostError::ArenasByCpu { found });
        }
        if arena().is_some() {
            return Ok(());
        }
        let region = Region::create(dir, most)?;
        if REGION.set(region).is_err() {
            return Ok(()); // another thread was first
        }
        LazyLock::force(&BELL);
        // In a child, handlers run in the order of registration: these after jemalloc's, and after
        // that of `Birth`.
        let _ = ctl::ARENAS_PAGE.read();
        fork::around(before_fork, after_fork);
        let hooks = (&raw const HOOKS.0).cast_mut();
        let config = ctl::ArenaConfig { hooks, metadata_use_hooks: false };
        // SAFETY: the table is static, jemalloc only reads it, and its functions keep to the
        // contract of extent hooks.
        let arena = unsafe { ctl::ARENAS_CREATE_WITH.create(config) }?;
        ctl::ARENA_DIRTY_DECAY.write_in(arena, -1)?;
        ctl::ARENA_MUZZY_DECAY.write_in(arena, -1)?;
        ctl::ARENA_GROWTH_MAX.write_in(arena, GROWTH_MAX)?;
        ctl::EPOCH.exchange(1)?; // so that it has figures
        let active = ctl::ARENA_ACTIVE_AT.read_of(arena)?;
        ACTIVE_PAGES.store(active.map_or(ptr::null_mut(), NonNull::as_ptr), Relaxed);
        ARENA.store(arena, Relaxed);
        Ok(())
    }

    /// Returns the bytes that spilled work has on disk now, and how often work began to spill.
    #[must_use]
    pub fn spilled() -> (ByteSize, u64) {
        (ByteSize::new(ON_DISK.load(Relaxed)), BEGUN.load(Relaxed))
    }

    /// Returns the arena's index.
    pub(crate) fn arena() -> Option<u32> {
        Some(ARENA.load(Relaxed)).filter(|arena| *arena != NONE)
    }

    /// Returns the number of its active pages now.
    pub(crate) fn active_pages() -> usize {
        let at = NonNull::new(ACTIVE_PAGES.load(Relaxed));
        at.map_or(0, |at| {
            // SAFETY: a count of an arena that is never destroyed, which jemalloc changes
            // atomically.
            unsafe { AtomicUsize::from_ptr(at.as_ptr()) }.load(Relaxed)
        })
    }

    /// Returns the bytes of a limit that are left when work begins to spill, and sets the window of
    /// the pager; `None` if no work spills.
    pub(crate) fn reserve(limit: ByteSize) -> Option<u64> {
        arena().filter(|_| limit != ByteSize::MAX)?;
        WINDOW.store(limit.scaled(WINDOW_PART).min(WINDOW_MAX).get(), Relaxed);
        Some(limit.scaled(RESERVE_PART).min(RESERVE_MAX).get())
    }

    /// Returns `true` if the block lies in the file.
    pub(crate) fn contains<T>(block: *const T) -> bool {
        REGION.get().is_some_and(|region| region.contains(block.addr()))
    }

    /// Binds the thread to the arena until its work ends, unless a scope of another arena is open.
    pub(crate) fn begin() {
        let Some(arena) = arena().filter(|_| IS_PAGED.load(Relaxed) && redirect::is_plain()) else {
            return;
        };
        let (Ok(before), Ok(own)) = (ctl::THREAD_ARENA.read(), ctl::OPT_ARENAS.read()) else {
            return;
        };
        if before < own && ctl::THREAD_ARENA.write(arena).is_ok() {
            BEFORE.set(before);
            account::begin_spill();
            redirect::set_spills(true);
            if SPILLING.fetch_add(1, Relaxed) == 0
                && active_pages() == 0
                && let Some(region) = REGION.get()
            {
                region.mapped.store(mapped_files(), Relaxed);
            }
            BEGUN.fetch_add(1, Relaxed);
            BELL.ring();
        }
    }

    /// Binds the thread back.
    pub(crate) fn end() {
        redirect::set_spills(false);
        // Otherwise it would serve blocks of the arena to other work.
        let _ = flush_thread_cache();
        let _ = ctl::THREAD_ARENA.write(BEFORE.get());
        SPILLING.fetch_sub(1, Relaxed);
        if REGION.get().is_some_and(|region| region.birth.is_here()) {
            BELL.ring();
        }
    }

    /// Waits if the file has three windows in memory, until the pager has dropped another one.
    pub(crate) fn keep_pace() {
        let (window, before) = (WINDOW.load(Relaxed), PAGED.load(Relaxed));
        let is_ahead = |region: &Region| {
            let paged = (PAGED.load(Relaxed) - before) * PIECE as u64;
            IS_PAGED.load(Relaxed) && paged < window && region.in_memory() > 3 * window
        };
        for _ in 0..WAITS_MAX {
            if !REGION.get().is_some_and(is_ahead) {
                return;
            }
            // SAFETY: it only waits.
            unsafe { libc::usleep(1000) };
        }
    }

    impl Region {
        fn create(dir: &Path, most: ByteSize) -> Result<Self, HostError> {
            let dir_text = || dir.display().to_string();
            let fails = |error: io::Error| HostError::SpillFile {
                dir: dir_text(),
                error: error.to_string(),
            };
            let lacks = |room| HostError::SpillRoom { dir: dir_text(), room, least: FREE_MIN };
            if !locked().is_zero() {
                // The whole file would be locked.
                return Err(fails(io::Error::other("the memory is locked (mlockall)")));
            }
            let mut options = OpenOptions::new();
            options.read(true).write(true).mode(0o600).custom_flags(libc::O_TMPFILE);
            let owned = options.open(dir).and_then(OwnedFile::new).map_err(fails)?;
            let file = owned.file();
            if let Some(kind) = kind_in_memory(file) {
                return Err(HostError::SpillInMemory { dir: dir_text(), kind });
            }
            let most = most.min(file_size_limit());
            let most = ByteSize::new(most.get() / PIECE as u64 * PIECE as u64);
            let room = most.min(free_disk(file));
            if room < FREE_MIN {
                return Err(lacks(room));
            }
            file.set_len(most.get()).map_err(fails)?;
            // Fails if the file system cannot reserve blocks and release them.
            for mode in [KEEP, KEEP | libc::FALLOC_FL_PUNCH_HOLE] {
                fallocate(file, mode, 0, PIECE).map_err(fails)?;
            }
            let size = most.as_usize().unwrap_or(usize::MAX);
            let access = libc::PROT_READ | libc::PROT_WRITE;
            let (flags, handle) = (libc::MAP_SHARED | libc::MAP_NORESERVE, file.as_raw_fd());
            // SAFETY: a new mapping, at an address that the kernel chooses.
            let start = unsafe { libc::mmap(ptr::null_mut(), size, access, flags, handle, 0) };
            if start == libc::MAP_FAILED {
                return Err(fails(io::Error::last_os_error()));
            }
            let mapped = AtomicU64::new(mapped_files());
            // Its pages are exposed to jemalloc by their addresses.
            let (start, birth) = (start.expose_provenance(), Birth::now());
            Ok(Self { file: owned, start, size, birth, mapped })
        }

        const fn contains(&self, at: usize) -> bool {
            at.wrapping_sub(self.start) < self.size
        }

        /// Returns the bytes of the file that are mapped in memory.
        fn in_memory(&self) -> u64 {
            mapped_files().saturating_sub(self.mapped.load(Relaxed))
        }

        /// Returns `false` in a forked child, and once the application has closed the file.
        fn is_usable(&self) -> bool {
            self.birth.is_here() && self.file.is_own()
        }

        /// Reserves blocks on disk for a part of the region, if there is room.
        fn reserve(&self, at: usize, size: usize) -> bool {
            let bytes = ByteSize::of(size);
            if free_disk(self.file.file()) < bytes.saturating_add(MARGIN)
                || !self.is_usable()
                || fallocate(self.file.file(), KEEP, at - self.start, size).is_err()
            {
                return false;
            }
            ON_DISK.fetch_add(bytes.get(), Relaxed);
            true
        }

        /// Releases the blocks of a part of the region, also once the file is closed.
        fn release(&self, at: usize, size: usize) -> bool {
            let pages = ptr::with_exposed_provenance_mut(at);
            // SAFETY: pages of the region that hold no block of jemalloc.
            let punch = || unsafe { libc::madvise(pages, size, libc::MADV_REMOVE) == 0 };
            let is_done = self.birth.is_here() && punch();
            if is_done {
                ON_DISK.fetch_sub(size as u64, Relaxed);
            }
            is_done
        }

        /// Takes a part of the region that jemalloc never got, at `place` unless that is 0. Returns
        /// its address, and `true` if its blocks are reserved, as they must be if `must` is set.
        fn take(
            &self,
            place: usize,
            size: usize,
            align: usize,
            must: bool,
        ) -> Option<(usize, bool)> {
            let free = || free_disk(self.file.file());
            if !self.is_usable() || free() < ByteSize::of(size).saturating_add(MARGIN) {
                return None;
            }
            let from = |taken: usize| (self.start + taken).next_multiple_of(align);
            let next = |taken| {
                let (at, end) = (from(taken), (from(taken) - self.start).checked_add(size)?);
                (end <= self.size && (place == 0 || place == at)).then_some(end)
            };
            let at = from(TAKEN.fetch_update(Relaxed, Relaxed, next).ok()?);
            let is_reserved = (must || size <= GROWTH_MAX) && self.reserve(at, size);
            (is_reserved || !must).then_some((at, is_reserved))
        }

        /// Writes a piece and waits for it; the next ones are written meanwhile.
        fn page_out(&self, piece: usize, top: usize) -> io::Result<()> {
            let (write, wait) = (libc::SYNC_FILE_RANGE_WRITE, libc::SYNC_FILE_RANGE_WAIT_BEFORE);
            let both = write | wait | libc::SYNC_FILE_RANGE_WAIT_AFTER;
            let handle = self.file.file().as_raw_fd();
            for (at, flags) in [((piece + 4 * PIECE) % top, write), (piece, both)] {
                let (at, size) = (at.cast_signed() as i64, PIECE.cast_signed() as i64);
                // SAFETY: it writes pages of the file.
                let written = unsafe { libc::sync_file_range(handle, at, size, flags) };
                if written != 0 && self.file.is_own() {
                    return Err(io::Error::last_os_error());
                }
            }
            let at = ptr::with_exposed_provenance_mut(self.start + piece);
            // SAFETY: a part of the region; pages that are dropped are read again when used.
            unsafe { libc::madvise(at, PIECE, libc::MADV_PAGEOUT) };
            PAGED.fetch_add(1, Relaxed);
            Ok(())
        }
    }

    /// It has its size from the start.
    const KEEP: c_int = libc::FALLOC_FL_KEEP_SIZE;

    fn fallocate(file: &File, mode: c_int, at: usize, size: usize) -> io::Result<()> {
        let (at, size) = (at.cast_signed() as i64, size.cast_signed() as i64);
        // SAFETY: it reserves blocks of the file, or releases those of one without contents.
        let done = unsafe { libc::fallocate(file.as_raw_fd(), mode, at, size) };
        if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// Returns the mapped file pages of the process that are in memory.
    fn mapped_files() -> u64 {
        statm().map_or(0, |now| now.rss.saturating_sub(now.anon).get())
    }

    fn free_disk(file: &File) -> ByteSize {
        let mut found = MaybeUninit::<libc::statvfs>::uninit();
        // SAFETY: an open file, and room for the answer.
        if unsafe { libc::fstatvfs(file.as_raw_fd(), found.as_mut_ptr()) } != 0 {
            return ByteSize::ZERO;
        }
        // SAFETY: written, as a result of 0 means.
        let found = unsafe { found.assume_init() };
        ByteSize::new(found.f_frsize).checked_mul(found.f_bavail).unwrap_or(ByteSize::MAX)
    }

    /// Returns the file system's name if its files are memory.
    fn kind_in_memory(file: &File) -> Option<&'static str> {
        let mut found = MaybeUninit::<libc::statfs>::uninit();
        // SAFETY: an open file, and room for the answer.
        if unsafe { libc::fstatfs(file.as_raw_fd(), found.as_mut_ptr()) } != 0 {
            return None;
        }
        // SAFETY: written, as a result of 0 means.
        match i128::from(unsafe { found.assume_init() }.f_type) {
            0x0102_1994 => Some("tmpfs"),
            0x8584_58f6 => Some("ramfs"),
            _ => None,
        }
    }

    struct Hooks(extent_hooks_t);

    // SAFETY: jemalloc reads the table, and nothing writes to it.
    unsafe impl Sync for Hooks {}

    static HOOKS: Hooks = Hooks(extent_hooks_t {
        alloc: Some(extent_alloc),
        dalloc: None,
        destroy: None,
        commit: Some(extent_commit),
        decommit: Some(extent_decommit),
        purge_lazy: None,
        purge_forced: None,
        split: Some(extent_split),
        merge: Some(extent_merge),
    });

    /// Returns new pages, on disk if there is room.
    unsafe extern "C" fn extent_alloc(
        _: *mut extent_hooks_t,
        place: *mut c_void,
        size: usize,
        align: usize,
        zero: *mut bool,
        commit: *mut bool,
        _: c_uint,
    ) -> *mut c_void {
        // SAFETY: jemalloc passes a valid pointer.
        let must = unsafe { *commit };
        let taken = REGION.get().and_then(|it| it.take(place.addr(), size, align, must));
        let (pages, is_committed) = match taken {
            Some((at, is_committed)) => (ptr::with_exposed_provenance_mut(at), is_committed),
            None if place.is_null() => (anonymous(size, align), true),
            None => return ptr::null_mut(),
        };
        // SAFETY: as above.
        unsafe { *zero = true };
        // SAFETY: as above.
        unsafe { *commit = is_committed };
        pages
    }

    /// Returns new anonymous pages, or null.
    fn anonymous(size: usize, align: usize) -> *mut c_void {
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let Some(all) = size.checked_add(align) else { return ptr::null_mut() };
        // SAFETY: a new mapping, at an address that the kernel chooses.
        let start = unsafe { libc::mmap(ptr::null_mut(), all, access, flags, -1, 0) };
        if start == libc::MAP_FAILED {
            return ptr::null_mut();
        }
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

    /// Reserves the blocks of pages that have none. Returns `true` for "not done".
    unsafe extern "C" fn extent_commit(
        _: *mut extent_hooks_t,
        extent: *mut c_void,
        _: usize,
        offset: usize,
        length: usize,
        _: c_uint,
    ) -> bool {
        let at = extent.addr() + offset;
        let region = REGION.get().filter(|region| region.contains(at));
        // Others are anonymous.
        region.is_some_and(|region| !region.reserve(at, length))
    }

    /// Releases pages. Returns `true` for "not done".
    unsafe extern "C" fn extent_decommit(
        _: *mut extent_hooks_t,
        extent: *mut c_void,
        _: usize,
        offset: usize,
        length: usize,
        _: c_uint,
    ) -> bool {
        let pages = extent.wrapping_byte_add(offset);
        match REGION.get().filter(|region| region.contains(pages.addr())) {
            Some(region) => !region.release(pages.addr(), length),
            // SAFETY: anonymous pages of the arena, without a block in them.
            None => unsafe { libc::madvise(pages, length, libc::MADV_DONTNEED) != 0 },
        }
    }

    unsafe extern "C" fn extent_split(
        _: *mut extent_hooks_t,
        _: *mut c_void,
        _: usize,
        _: usize,
        _: usize,
        _: bool,
        _: c_uint,
    ) -> bool {
        false
    }

    /// Merges neighbours, unless only one is in the file.
    unsafe extern "C" fn extent_merge(
        _: *mut extent_hooks_t,
        first: *mut c_void,
        _: usize,
        second: *mut c_void,
        _: usize,
        _: bool,
        _: c_uint,
    ) -> bool {
        contains(first) != contains(second)
    }

    extern "C" fn before_fork() {}

    /// Maps the file privately in the child, and ends the spill of its thread.
    extern "C" fn after_fork() {
        let Some(region) = REGION.get().filter(|region| !region.birth.is_here()) else { return };
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_FIXED | libc::MAP_NORESERVE;
        let at = ptr::with_exposed_provenance_mut(region.start);
        let map = |file: &File| {
            // SAFETY: the same file at the same addresses: a block has the contents that it has in
            // the parent.
            unsafe { libc::mmap(at, region.size, access, flags, file.as_raw_fd(), 0) }
        };
        let is_own = region.file.is_own() && map(region.file.file()) != libc::MAP_FAILED;
        if !is_own && active_pages() > 0 {
            process::abort(); // it would write into the parent's memory
        }
        account::forget_spill();
    }

    /// Returns the bell that makes [`run_pager`] check if it is to stop.
    #[must_use]
    pub fn pager_bell() -> Arc<Bell> {
        Arc::clone(&BELL)
    }

    /// Runs the pager on this thread until `stop` is set and [`pager_bell`] is rung: it writes
    /// spilled memory to disk, drops it from memory, and releases what was freed. It sleeps while
    /// there is none. Work spills only while it runs.
    ///
    /// # Errors
    /// The error of a failed write to the disk. What was written last may be lost, so that a block
    /// may have other contents: the caller must end the process.
    pub fn run_pager(stop: &AtomicBool, clock: &dyn Clock) -> io::Result<()> {
        let Some(region) = REGION.get().filter(|it| it.birth.is_here()) else { return Ok(()) };
        let _alone = lock(&PAGER);
        IS_PAGED.store(true, Relaxed);
        let (mut piece, mut left, mut rest, mut purged) = (0, 0, REST, Moment::ORIGIN);
        // Ends when `stop` is set; each iteration waits.
        while !stop.load(Acquire) {
            let is_many = || region.in_memory() > WINDOW.load(Relaxed);
            let (top, now) = (TAKEN.load(Relaxed) / PIECE * PIECE, clock.now());
            let spills = SPILLING.load(Relaxed) > 0;
            // Before the purge, which releases what was freed by then.
            let is_empty = active_pages() == 0;
            // Once more around after the end of a spill.
            left = if spills { top / PIECE } else { left };
            let is_busy = spills || left > 0 && is_many();
            rest = if is_busy { REST } else { (rest * 2).min(REST_MAX) };
            if TAKEN.load(Relaxed) > 0 && (now - purged >= PURGE_EVERY || !is_busy) {
                purged = now;
                // SAFETY: a purge releases pages without blocks, and no other.
                let _ = arena().map(|index| unsafe { ctl::ARENA_PURGE.perform_in(index) });
            }
            for _ in 0..PIECES.min(left) {
                if !is_many() {
                    break;
                }
                region.page_out(piece, top)?;
                piece = (piece + PIECE) % top;
                left -= 1;
            }
            let is_quiet = !is_busy && is_empty;
            clock.wait_until(&BELL, if is_quiet { Moment::NEVER } else { clock.now() + rest });
        }
        IS_PAGED.store(false, Relaxed);
        Ok(())
    }
}

/// Nothing spills on other systems.
#[cfg(not(target_os = "linux"))]
#[allow(missing_docs, clippy::missing_errors_doc, reason = "as on Linux")]
mod elsewhere {
    use std::path::Path;
    use std::sync::Arc;
    use std::sync::atomic::AtomicBool;

    use lowtide_core::clock::{Bell, Clock};

    use super::ByteSize;
    use crate::error::HostError;

    pub fn spill_into(_: &Path, _: ByteSize) -> Result<(), HostError> {
        Err(HostError::NotRedirected)
    }
    #[must_use]
    pub const fn spilled() -> (ByteSize, u64) {
        (ByteSize::ZERO, 0)
    }
    #[must_use]
    pub fn pager_bell() -> Arc<Bell> {
        Bell::new()
    }
    pub const fn run_pager(_: &AtomicBool, _: &dyn Clock) -> std::io::Result<()> {
        Ok(())
    }
    pub(crate) const fn arena() -> Option<u32> {
        None
    }
    pub(crate) const fn active_pages() -> usize {
        0
    }
    pub(crate) const fn reserve(_: ByteSize) -> Option<u64> {
        None
    }
    pub(crate) const fn contains<T>(_: *const T) -> bool {
        false
    }
    pub(crate) fn begin() {}
    pub(crate) fn end() {}
    pub(crate) fn keep_pace() {}
}
