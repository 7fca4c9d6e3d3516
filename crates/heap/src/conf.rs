//! The heap settings that can change while the process runs: writing them and reading them back.
//!
//! jemalloc sets a decay time arena by arena (it refuses to set all at once), so the default for
//! later arenas is written first, then every initialised arena. Each setting is read back; one that
//! differs becomes a [`Difference`]. Settings that are fixed at start are in
//! [`effective`](super::effective).
//!
//! An arena must not be destroyed while settings are applied: jemalloc looks it up without a lock.
//!
//! Invariant: `arenas_set + arenas_uninitialised = arenas`.

use std::time::Duration;

use lowtide_core::bytes::ByteSize;
use lowtide_core::decay::DecayTime;

use super::error::HostError;
use super::knobs::Difference;
use super::mallctl::{self as ctl, Key};
use super::profile::HeapSettings;
use super::{arenas, mappings};

/// The longest decay time, in ms: jemalloc holds times as nanoseconds in 64 bits and takes no more
/// than the whole seconds in it (`NSTIME_SEC_MAX`).
const DECAY_MS_MAX: u64 = (u64::MAX / 1_000_000_000 - 1) * 1_000;

/// The settings in effect after [`apply`], read back.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Applied {
    /// The number of arenas that have these decay times.
    pub arenas_set: u32,
    /// The number of indices without an arena; an arena created there takes these times.
    pub arenas_uninitialised: u32,
    /// Dirty decay of later arenas, and of every arena unless a difference says otherwise.
    pub dirty_decay: DecayTime,
    /// Muzzy decay, likewise.
    pub muzzy_decay: DecayTime,
    /// `true` if jemalloc's background threads are on.
    pub background_threads: bool,
    /// The maximum number of background threads; 0 if they are unsupported.
    pub max_background_threads: u32,
    /// The result of [`limit_mappings`](super::limit_mappings).
    pub mapping_min: Option<ByteSize>,
    /// Settings that differ from the requested value; at most one entry each.
    pub differences: Vec<Difference>,
}

/// Applies settings to the running process and reads them back.
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
pub fn apply(settings: &HeapSettings) -> Result<Applied, HostError> {
    let mut differences = Vec::new();
    let count = ctl::ARENAS_COUNT.read()?.min(ctl::ARENA_LIMIT);
    let kept = arenas::keep();
    let dirty = set_decay(
        "dirty_decay_ms",
        (&ctl::ARENAS_DIRTY_DECAY, &ctl::ARENA_DIRTY_DECAY),
        settings.dirty_decay,
        count,
        &mut differences,
    )?;
    let muzzy = set_decay(
        "muzzy_decay_ms",
        (&ctl::ARENAS_MUZZY_DECAY, &ctl::ARENA_MUZZY_DECAY),
        settings.muzzy_decay,
        count,
        &mut differences,
    )?;
    drop(kept);
    let mapping_min = mappings::limit_mappings()?;
    let max_background_threads = set_max_threads(settings, &mut differences)?;
    let background_threads = set_threads(settings.background_threads, &mut differences)?;
    let arenas_set = dirty.arenas_set.min(muzzy.arenas_set);
    Ok(Applied {
        arenas_set,
        arenas_uninitialised: count - arenas_set,
        dirty_decay: dirty.found,
        muzzy_decay: muzzy.found,
        background_threads,
        max_background_threads,
        mapping_min,
        differences,
    })
}

/// Returns `true` if this build of jemalloc can run background threads; it cannot on musl and some
/// other targets.
#[must_use]
pub fn background_threads_supported() -> bool {
    ctl::BACKGROUND_THREAD.read().is_ok()
}

struct DecaySet {
    arenas_set: u32,
    found: DecayTime,
}

/// Writes one decay time, for arenas to come and then for every one that exists, so that an arena
/// made in between has it as well.
fn set_decay(
    setting: &'static str,
    (to_come, in_arena): (&Key<isize, 2>, &Key<isize, 3>),
    asked: DecayTime,
    count: u32,
    differences: &mut Vec<Difference>,
) -> Result<DecaySet, HostError> {
    let asked_ms = decay_to_ms(asked);
    to_come.write(asked_ms)?;
    let found = decay_from_ms(to_come.read()?);
    let mut pass = DecayPass::default();
    for _ in 0..PASSES_MAX {
        pass = DecayPass::run(in_arena, asked_ms, count)?;
        if pass.changed.is_none() {
            break;
        }
    }
    let read_back = pass.changed.map_or(found, decay_from_ms);
    if read_back != asked {
        differences.push(Difference::new(setting, decay_text(asked), decay_text(read_back)));
    }
    Ok(DecaySet { arenas_set: pass.arenas, found })
}

/// Arenas are gone through again until all are found right, at most so often: an arena that was
/// being made during the first pass shows in the second.
const PASSES_MAX: usize = 4;

/// One pass over the arenas.
#[derive(Default)]
struct DecayPass {
    /// Arenas that exist.
    arenas: u32,
    /// Another decay time that one of them had, in ms.
    changed: Option<isize>,
}

impl DecayPass {
    /// Writes only if another value is found: writing restarts an arena's curve, so that memory
    /// that is already idle would stay longer.
    fn run(key: &Key<isize, 3>, asked_ms: isize, count: u32) -> Result<Self, HostError> {
        let mut pass = Self::default();
        for arena in 0..count {
            // Reading is refused only if no arena is initialised.
            let Ok(found) = key.read_in(arena) else { continue };
            pass.arenas += 1;
            if found != asked_ms {
                key.write_in(arena, asked_ms)?;
                pass.changed.get_or_insert(found);
            }
        }
        Ok(pass)
    }
}

/// Sets the number of background threads if one is requested, and returns the one in effect.
fn set_max_threads(
    settings: &HeapSettings,
    differences: &mut Vec<Difference>,
) -> Result<u32, HostError> {
    let supported = background_threads_supported();
    let at_start = ctl::OPT_MAX_BACKGROUND_THREADS.read()?;
    let possible = |asked: u32| asked > 0 && asked as usize <= at_start;
    if let Some(asked) =
        settings.max_background_threads.filter(|&asked| supported && possible(asked))
    {
        ctl::MAX_BACKGROUND_THREADS.write(asked as usize)?;
    }
    let found = if supported { ctl::MAX_BACKGROUND_THREADS.read()? } else { 0 };
    let found = u32::try_from(found).unwrap_or(u32::MAX);
    if let Some(asked) = settings.max_background_threads.filter(|&asked| asked != found) {
        let setting = "max_background_threads";
        differences.push(Difference::new(setting, asked.to_string(), found.to_string()));
    }
    Ok(found)
}

/// Switches background threads, and returns whether they are on.
fn set_threads(asked: bool, differences: &mut Vec<Difference>) -> Result<bool, HostError> {
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
    if found != asked {
        let (asked, found) = (asked.to_string(), format!("{found}{cause}"));
        differences.push(Difference::new("background_thread", asked, found));
    }
    Ok(found)
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

/// The decay time of jemalloc's figure.
pub(super) fn decay_from_ms(ms: isize) -> DecayTime {
    u64::try_from(ms).map_or(DecayTime::Never, DecayTime::from_millis)
}

/// A decay time as people read it.
pub(super) fn decay_text(time: DecayTime) -> String {
    match time {
        DecayTime::AtOnce => "at once".to_owned(),
        DecayTime::Never => "never".to_owned(),
        DecayTime::Within(time) if time.subsec_nanos() % 1_000_000 == 0 => {
            format!("{} ms", time.as_millis())
        }
        DecayTime::Within(time) => format!("{time:?}"),
    }
}

// The longest time that is written fits jemalloc's nanoseconds.
const _: () = assert!(Duration::from_millis(DECAY_MS_MAX).as_nanos() <= u64::MAX as u128);

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
        for ms in [-1, 0, 1, 1_000, isize::try_from(DECAY_MS_MAX).unwrap()] {
            assert_eq!(decay_to_ms(decay_from_ms(ms)), ms);
        }
        let longest = decay_to_ms(DecayTime::Within(Duration::MAX));
        assert_eq!(longest, isize::try_from(DECAY_MS_MAX).unwrap());
    }
}
