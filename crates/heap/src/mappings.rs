//! Keeps the number of the heap's mappings low where the kernel does not overcommit.
//!
//! jemalloc then releases unused pages by mapping them again without access, so that they do not
//! count as committed (`os_pages_commit` in `pages.c`). Each such range between live pages is a
//! mapping of its own, and a fragmented heap reaches `vm.max_map_count`, at which allocations fail.
//! Here, extent hooks let only large ranges be released so. Smaller ones are released with
//! `madvise`, as where the kernel overcommits, and stay committed.
//!
//! Invariant: ranges without access `<= max_map_count / 8` while the heap has no more addresses
//! than the machine has memory, so at most a quarter of the mappings are the heap's.
#![expect(unsafe_code, reason = "extent hooks are C functions in a table")]

use std::ffi::{c_uint, c_void};
use std::fs;
use std::sync::OnceLock;

use lowtide_core::bytes::ByteSize;
use lowtide_core::kernel::physical_memory;
use tikv_jemalloc_sys::extent_hooks_t;

use super::error::HostError;
use super::{arenas, mallctl as ctl};

/// The kernel's default for `vm.max_map_count`.
const MAPPINGS_MAX: u64 = 65_530;

/// The table of the hooks, and the one that it replaces.
struct Hooks {
    own: extent_hooks_t,
    replaced: *mut extent_hooks_t,
    /// The least length of a range that becomes a mapping.
    least: usize,
}

// SAFETY: written once, before it is shared; the pointer is to jemalloc's own table, which is
// constant.
unsafe impl Sync for Hooks {}
// SAFETY: as above.
unsafe impl Send for Hooks {}

static HOOKS: OnceLock<Hooks> = OnceLock::new();

/// Returns `true` if jemalloc found at start that the kernel overcommits: `vm.overcommit_memory` is
/// 0 or 1. Otherwise it is 2 or cannot be read.
#[must_use]
pub fn overcommits() -> bool {
    static ANSWER: OnceLock<bool> = OnceLock::new();
    *ANSWER.get_or_init(|| {
        // Only Linux has the file, and jemalloc looks there only on Linux.
        let found = fs::read("/proc/sys/vm/overcommit_memory");
        !cfg!(target_os = "linux")
            || found.is_ok_and(|text| matches!(text.first(), Some(b'0' | b'1')))
    })
}

/// Returns the maximum number of mappings of a process, `vm.max_map_count`.
#[must_use]
pub fn mappings_max() -> u64 {
    let text = fs::read_to_string("/proc/sys/vm/max_map_count").ok();
    text.and_then(|text| text.trim().parse().ok()).unwrap_or(MAPPINGS_MAX)
}

/// Keeps the number of mappings low in the arenas that exist, where the kernel does not overcommit
/// ([`overcommits`]): unused ranges of less than the machine's memory divided by an eighth of
/// [`mappings_max`] are released in place, and stay committed. Returns that length; `None` if
/// there is nothing to do.
///
/// [`apply`](super::apply) calls it. Call it again for arenas that were created since then. Costs
/// about 0.1 us per arena. Hooks of the application are not replaced.
///
/// # Errors
/// [`HostError::Mallctl`] if jemalloc refuses.
pub fn limit_mappings() -> Result<Option<ByteSize>, HostError> {
    if overcommits() {
        return Ok(None);
    }
    let kept = arenas::keep();
    let hooks = match HOOKS.get() {
        Some(hooks) => hooks,
        None => {
            let replaced = jemallocs_table()?;
            // SAFETY: jemalloc's own table, which is constant.
            let table = unsafe { *replaced };
            let own = extent_hooks_t { decommit: table.decommit.map(|_| decommit as _), ..table };
            HOOKS.get_or_init(|| Hooks { own, replaced, least: least_length() })
        }
    };
    for arena in 0..ctl::ARENAS_COUNT.read()?.min(ctl::ARENA_LIMIT) {
        // Writing the hooks of an arena that does not exist would create it.
        let exists = ctl::ARENA_DIRTY_DECAY.read_in(arena).is_ok();
        if exists && ctl::ARENA_HOOKS.read_in(arena)? == hooks.replaced {
            let own = (&raw const hooks.own).cast_mut();
            // SAFETY: the table is static and complete; its functions are jemalloc's, and
            // `decommit`, which calls jemalloc's.
            unsafe { ctl::ARENA_HOOKS.write_in(arena, own) }?;
        }
    }
    drop(kept);
    Ok(Some(ByteSize::of(hooks.least)))
}

/// Returns jemalloc's own table, which a new arena has. The application may have replaced that of
/// others.
fn jemallocs_table() -> Result<*mut extent_hooks_t, HostError> {
    let fresh = ctl::ARENAS_CREATE.read()?;
    let table = ctl::ARENA_HOOKS.read_in(fresh);
    // SAFETY: no block is in this arena, and no thread uses it.
    unsafe { ctl::ARENA_DESTROY.perform_in(fresh) }?;
    table
}

fn least_length() -> usize {
    let ranges = (mappings_max() / 8).max(1);
    let memory = physical_memory().unwrap_or_default().get();
    usize::try_from(memory / ranges).unwrap_or(usize::MAX)
}

/// Releases a range as jemalloc does; returns `true`, for "not done", if it is short.
unsafe extern "C" fn decommit(
    _: *mut extent_hooks_t,
    extent: *mut c_void,
    size: usize,
    offset: usize,
    length: usize,
    arena: c_uint,
) -> bool {
    let Some(hooks) = HOOKS.get().filter(|hooks| length >= hooks.least) else { return true };
    // SAFETY: the table stays.
    let replaced = unsafe { (*hooks.replaced).decommit };
    // SAFETY: jemalloc's arguments, passed on to its own function.
    replaced.is_none_or(|act| unsafe { act(hooks.replaced, extent, size, offset, length, arena) })
}
