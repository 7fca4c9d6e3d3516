//! Spill: work that outgrows its claim while memory is short goes on allocating on disk.
//!
//! One arena has its pages in a file without a name, which is mapped shared. The kernel writes such
//! pages back and drops them under the limit, also without swap. A checkpoint binds a thread to the
//! arena (`checkpoint`), and the end of its outermost work binds it back: from then on blocks of the
//! arena are like others, and any thread may use and free them.
//!
//! A page is handed out only once the disk has reserved its block, and only while the disk has a
//! margin free beyond that: a page without a block would end the process with SIGBUS. Without room
//! on disk the arena takes anonymous memory. The pager, a thread of the caller, writes ahead of the
//! kernel's reclaim and releases unused pages, because both wait for the disk. jemalloc's own
//! threads never purge the arena.
//!
//! A forked child maps the file privately: what it writes stays its own, but pages that it has not
//! written show what the parent writes there, and zeros once the parent has released them. It must
//! not use what was spilled before the fork.
//!
//! Invariants: `pages in use <= blocks on disk + anonymous ones`; a thread is bound to the arena
//! only within work; only the pager waits for a hole to be punched.
#![expect(unsafe_code, reason = "extent hooks over a mapped file")]

use std::cell::Cell;
use std::ffi::{c_uint, c_void};
use std::path::Path;
use std::ptr::{self, NonNull};
use std::sync::atomic::Ordering::{Acquire, Relaxed};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize};
use std::sync::{Arc, LazyLock, OnceLock};
use std::time::Duration;
use std::{io, process};

use lowtide_core::bytes::ByteSize;
use lowtide_core::clock::{Bell, Clock, Moment};
use lowtide_core::fork;
use lowtide_core::sync::{Mutex, lock};
use tikv_jemalloc_sys::extent_hooks_t;

use self::region::{GROWTH_MAX, PIECE, Region};
use super::account;
use super::error::HostError;
use super::mallctl as ctl;
use super::recall::flush_thread_cache;
use super::redirect;

mod region;

/// The share of the limit that is left when work begins to spill, and the most. An estimate, from
/// limits of 256 MiB: three windows of the file, and as much for other growth.
const RESERVE_PART: f64 = 0.375;
const RESERVE_MAX: ByteSize = ByteSize::mib(384);
/// The share of the limit that the pager leaves of the file in memory, and the most.
const WINDOW_PART: f64 = 0.0625;
const WINDOW_MAX: ByteSize = ByteSize::mib(64);
/// The most pieces that the pager writes between two looks.
const PIECES: usize = 16;
/// The time between two looks of the pager while work spills, and the longest while blocks stay.
const REST: Duration = Duration::from_millis(2);
const REST_MAX: Duration = Duration::from_secs(10);
/// The time between two purges of the arena.
const PURGE_EVERY: Duration = Duration::from_millis(100);
/// The most waits of 1 ms of a thread that is three windows ahead of the pager.
const WAITS_MAX: u32 = 500;

/// Set once: blocks in it may outlive the caller that set it up.
static REGION: OnceLock<Region> = OnceLock::new();
/// The index of the arena, or [`NONE`].
static ARENA: AtomicU32 = AtomicU32::new(NONE);
const NONE: u32 = u32::MAX;
/// jemalloc's count of its active pages.
static ACTIVE_PAGES: AtomicPtr<usize> = AtomicPtr::new(ptr::null_mut());
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
/// the latest. Only the first call in a process creates a file; later calls keep it. Returns the
/// room that the first call found: the least of `most`, the limit of a file's size and the free
/// disk; later calls return `most`.
///
/// # Errors
/// [`HostError::SpillInMemory`], [`HostError::SpillRoom`] or [`HostError::SpillFile`] if the
/// folder does not serve, [`HostError::NotRedirected`] if [`Heap`](crate::Heap) is not the
/// global allocator, [`HostError::ArenasByCpu`] if jemalloc runs with `percpu_arena`.
pub fn spill_into(dir: &Path, most: ByteSize) -> Result<ByteSize, HostError> {
    if !redirect::is_served() {
        return Err(HostError::NotRedirected);
    }
    if let Some(found) = ctl::OPT_PERCPU_ARENA.read()?.filter(|mode| *mode != "disabled") {
        return Err(HostError::ArenasByCpu { found });
    }
    if arena().is_some() {
        return Ok(most);
    }
    let (region, room) = Region::create(dir, most)?;
    if REGION.set(region).is_err() {
        return Ok(most); // another thread was first
    }
    LazyLock::force(&BELL);
    // In a child, handlers run in the order of registration: these after jemalloc's, and after
    // that of `Birth`.
    let _ = ctl::ARENAS_PAGE.read();
    fork::around(None, after_fork);
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
    Ok(room)
}

/// Returns the bytes that spilled work has on disk now, and how often work began to spill.
#[must_use]
pub fn spilled() -> (ByteSize, u64) {
    (REGION.get().map_or(ByteSize::ZERO, Region::on_disk), BEGUN.load(Relaxed))
}

/// Returns the arena's index.
pub(crate) fn arena() -> Option<u32> {
    Some(ARENA.load(Relaxed)).filter(|arena| *arena != NONE)
}

/// Returns the number of its active pages now.
pub(crate) fn active_pages() -> usize {
    let at = NonNull::new(ACTIVE_PAGES.load(Relaxed));
    // SAFETY: a count of an arena that is never destroyed, which jemalloc changes atomically.
    at.map_or(0, |at| unsafe { AtomicUsize::from_ptr(at.as_ptr()) }.load(Relaxed))
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
        SPILLING.fetch_add(1, Relaxed);
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
    BELL.ring();
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

struct Hooks(extent_hooks_t);

// SAFETY: jemalloc reads the table, and nothing writes to it.
unsafe impl Sync for Hooks {}

static HOOKS: Hooks = Hooks(extent_hooks_t {
    alloc: Some(extent_alloc),
    dalloc: None,
    destroy: None,
    commit: Some(extent_change::<true>),
    decommit: Some(extent_change::<false>),
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
        Some(taken) => taken,
        None if place.is_null() => (region::anonymous(size, align), true),
        None => return ptr::null_mut(),
    };
    // SAFETY: as above.
    unsafe { *zero = true };
    // SAFETY: as above.
    unsafe { *commit = is_committed };
    pages
}

/// Reserves the blocks of pages that have none if it `RESERVES`, or releases pages. Returns `true`
/// for "not done".
unsafe extern "C" fn extent_change<const RESERVES: bool>(
    _: *mut extent_hooks_t,
    extent: *mut c_void,
    _: usize,
    offset: usize,
    length: usize,
    _: c_uint,
) -> bool {
    let pages = extent.wrapping_byte_add(offset);
    match REGION.get().filter(|region| region.contains(pages.addr())) {
        Some(region) if RESERVES => !region.reserve(pages.addr(), length),
        Some(region) => !region.release(pages.addr(), length),
        // SAFETY: anonymous pages of the arena, without a block in them.
        None => !RESERVES && unsafe { libc::madvise(pages, length, libc::MADV_DONTNEED) != 0 },
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

/// Maps the file privately in the child, and ends the spill of its thread.
extern "C" fn after_fork() {
    let Some(region) = REGION.get().filter(|region| !region.birth.is_here()) else { return };
    if !region.map_privately() && active_pages() > 0 {
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
    let mut did_spill = false;
    // Ends when `stop` is set; each iteration waits.
    while !stop.load(Acquire) {
        // Fails if any page could not be written since the last call: the kernel writes on its own.
        region.sync(region.size - PIECE, false, true)?;
        let is_many = || region.in_memory() > WINDOW.load(Relaxed);
        let (top, now) = (region.taken.load(Relaxed) / PIECE * PIECE, clock.now());
        let spills = SPILLING.load(Relaxed) > 0;
        if !std::mem::replace(&mut did_spill, spills) && spills {
            region.know_others();
        }
        // Before the purge, which releases what was freed by then.
        let is_empty = active_pages() == 0;
        // Once more around after the end of a spill.
        left = if spills { top / PIECE } else { left };
        let is_busy = spills || left > 0 && is_many();
        rest = if is_busy { REST } else { (rest * 2).min(REST_MAX) };
        if region.taken.load(Relaxed) > 0 && (now - purged >= PURGE_EVERY || !is_busy) {
            purged = now;
            // SAFETY: a purge releases pages without blocks, and no other.
            let _ = arena().map(|index| unsafe { ctl::ARENA_PURGE.perform_in(index) });
        }
        for _ in 0..PIECES.min(left) {
            if !is_many() {
                break;
            }
            region.page_out(piece, top)?;
            PAGED.fetch_add(1, Relaxed);
            piece = (piece + PIECE) % top;
            left -= 1;
        }
        let is_quiet = !is_busy && is_empty;
        clock.wait_until(&BELL, if is_quiet { Moment::NEVER } else { clock.now() + rest });
    }
    IS_PAGED.store(false, Relaxed);
    Ok(())
}
