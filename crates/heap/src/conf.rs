//! The heap settings that can change while the process runs: writing them and reading them back.
//!
//! jemalloc sets a decay time arena by arena (it refuses to set all at once), so the default for
//! later arenas is written first, then every initialised arena. Each setting is read back; one that
//! differs becomes a [`Difference`]. Settings that are fixed at start are in
//! [`effective`](super::effective).
//!
//! An arena must not be destroyed while settings are applied: jemalloc looks it up without a lock.
//!
//! Invariant: a setting that is not in a difference is in effect in every arena.
#![expect(unsafe_code, reason = "extent hooks are C functions in a table")]

use std::ffi::{c_uint, c_void};
use std::fs;
use std::sync::OnceLock;
use std::time::Duration;

use lowtide_core::bytes::ByteSize;
use lowtide_core::decay::DecayTime;
use lowtide_core::kernel::physical_memory;
use tikv_jemalloc_sys::extent_hooks_t;

use super::effective::Difference;
use super::error::HostError;
use super::mallctl::Key;
use super::profile::HeapSettings;
use super::{arenas, mallctl as ctl, spill};

/// The longest decay time, in ms: jemalloc holds times as nanoseconds in 64 bits and takes no more
/// than the whole seconds in it (`NSTIME_SEC_MAX`).
const DECAY_MS_MAX: u64 = (u64::MAX / 1_000_000_000 - 1) * 1_000;

/// Applies settings to the running process, reads them back, and calls [`limit_mappings`]. Returns
/// those that differ from the requested value, each at most once.
///
/// Costs about 0.1 us per arena, plus starting or ending background threads if their setting
/// changes.
///
/// While background threads are off, jemalloc sets the decay times of the arena for very large
/// blocks (8 MiB and more) to 0 when it creates it; apply again to correct that. An arena that
/// another thread is creating at the same time may start with the previous times.
///
/// # Errors
/// [`HostError::Mallctl`] if jemalloc refuses a valid setting; the settings before it are in
/// effect. Settings that the platform does not support are differences, not errors.
pub fn apply(settings: &HeapSettings) -> Result<Vec<Difference>, HostError> {
    let mut differences = Vec::new();
    let kept = arenas::keep();
    let keys = (&ctl::ARENAS_DIRTY_DECAY, &ctl::ARENA_DIRTY_DECAY);
    differences.extend(set_decay("dirty_decay_ms", keys, settings.dirty_decay)?);
    let keys = (&ctl::ARENAS_MUZZY_DECAY, &ctl::ARENA_MUZZY_DECAY);
    differences.extend(set_decay("muzzy_decay_ms", keys, settings.muzzy_decay)?);
    drop(kept);
    limit_mappings()?;
    differences.extend(set_max_threads(settings)?);
    differences.extend(set_threads(settings.background_threads)?);
    Ok(differences)
}

/// Returns `true` if this build of jemalloc can run background threads; it cannot on musl and some
/// other targets.
#[must_use]
pub fn background_threads_supported() -> bool {
    ctl::BACKGROUND_THREAD.read().is_ok()
}

/// Arenas are gone through again until all are found right, at most so often: an arena that was
/// being made during the first pass shows in the second.
const PASSES_MAX: usize = 4;

/// Writes one decay time, for arenas to come and then for every one that exists, so that an arena
/// made in between has it as well.
fn set_decay(
    setting: &'static str,
    (to_come, in_arena): (&Key<isize, 2>, &Key<isize, 3>),
    asked: DecayTime,
) -> Result<Option<Difference>, HostError> {
    let asked_ms = decay_to_ms(asked);
    to_come.write(asked_ms)?;
    let mut found = to_come.read()?;
    for _ in 0..PASSES_MAX {
        let mut changed = None;
        let arenas = 0..ctl::ARENAS_COUNT.read()?.min(ctl::ARENA_LIMIT);
        // The pager alone releases pages on disk.
        for arena in arenas.filter(|index| spill::arena() != Some(*index)) {
            // Reading is refused only if no arena is initialised. Writing restarts an arena's
            // curve, so that memory that is already idle would stay longer.
            if let Ok(other) = in_arena.read_in(arena)
                && other != asked_ms
            {
                in_arena.write_in(arena, asked_ms)?;
                changed = Some(other);
            }
        }
        let Some(other) = changed else {
            found = to_come.read()?;
            break;
        };
        found = other;
    }
    let found = u64::try_from(found).map_or(DecayTime::Never, DecayTime::from_millis);
    let difference = || Difference::new(setting, asked.to_string(), found.to_string());
    Ok((found != asked).then(difference))
}

/// Sets the number of background threads if one is requested.
fn set_max_threads(settings: &HeapSettings) -> Result<Option<Difference>, HostError> {
    let supported = background_threads_supported();
    let at_start = ctl::OPT_MAX_BACKGROUND_THREADS.read()?;
    let asked = settings.max_background_threads.map_or(0, |asked| asked as usize);
    if supported && (1..=at_start).contains(&asked) {
        ctl::MAX_BACKGROUND_THREADS.write(asked)?;
    }
    let found = if supported { ctl::MAX_BACKGROUND_THREADS.read()? } else { 0 };
    let found = u32::try_from(found).unwrap_or(u32::MAX);
    let asked = settings.max_background_threads.filter(|&asked| asked != found);
    Ok(asked.map(|asked| {
        Difference::new("max_background_threads", asked.to_string(), found.to_string())
    }))
}

/// Switches background threads.
fn set_threads(asked: bool) -> Result<Option<Difference>, HostError> {
    let (mut found, mut cause) = (false, String::new());
    if background_threads_supported() {
        // jemalloc marks them as on before it starts them, even if that fails.
        if let Err(error) = ctl::BACKGROUND_THREAD.write(asked)
            && asked
        {
            ctl::BACKGROUND_THREAD.write(false)?;
            cause = format!(" ({error})");
        }
        found = ctl::BACKGROUND_THREAD.read()?;
    }
    let difference =
        || Difference::new("background_thread", asked.to_string(), format!("{found}{cause}"));
    Ok((found != asked).then(difference))
}

/// jemalloc's figure for a decay time: whole milliseconds rounded up, 0 at once, -1 never.
pub(super) fn decay_to_ms(time: DecayTime) -> isize {
    match time {
        DecayTime::AtOnce => 0,
        DecayTime::Never => -1,
        DecayTime::Within(time) => {
            let ms = u64::try_from(time.as_nanos().div_ceil(1_000_000)).unwrap_or(DECAY_MS_MAX);
            isize::try_from(ms.clamp(1, DECAY_MS_MAX)).unwrap_or(isize::MAX)
        }
    }
}

// The longest time that is written fits jemalloc's nanoseconds.
const _: () = assert!(Duration::from_millis(DECAY_MS_MAX).as_nanos() <= u64::MAX as u128);

// Keeps the number of the heap's mappings low where the kernel does not overcommit.
//
// jemalloc then releases unused pages by mapping them again without access, so that they do not
// count as committed (`os_pages_commit` in `pages.c`). Each such range between live pages is a
// mapping of its own, and a fragmented heap reaches `vm.max_map_count`, at which allocations fail.
// Here, extent hooks let only large ranges be released so. Smaller ones are released with
// `madvise`, as where the kernel overcommits, and stay committed.
//
// Invariant: ranges without access `<= max_map_count / 8` while the heap has no more addresses
// than the machine has memory, so at most a quarter of the mappings are the heap's.

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decay_times_are_jemallocs_milliseconds() {
        for (time, ms) in [
            (DecayTime::AtOnce, 0),
            (DecayTime::Never, -1),
            (DecayTime::from_millis(1_000), 1_000),
            (DecayTime::Within(Duration::from_nanos(1)), 1),
            (DecayTime::Within(Duration::from_micros(1_001)), 2),
        ] {
            assert_eq!(decay_to_ms(time), ms, "{time:?}");
        }
        let longest = decay_to_ms(DecayTime::Within(Duration::MAX));
        assert_eq!(longest, isize::try_from(DECAY_MS_MAX).unwrap());
    }
}
