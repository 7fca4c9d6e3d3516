//! Silence after a burst: how long a `Memory` takes to give everything idle back by itself.
//!
//! Nobody calls the arena after the burst: control thread and worker do what is done, on a clock
//! that the bench moves by 50 ms at a time, once both threads wait for it.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use lowtide::config::{DeviceChoice, Profile};
use lowtide::{BoxError, Memory};
use lowtide_gpu::clock::{Clock, ManualClock};
use lowtide_gpu::decay::DecayTime;
use lowtide_gpu::{DeviceArena, DeviceError, Region};

use crate::common::figures::Figures;

const TICK: Duration = Duration::from_millis(50);
/// The worker may have been told to act and not yet have begun: so long it gets to begin.
const BREATH: Duration = Duration::from_micros(500);
/// The longest real time that the threads may take to come back to the clock.
const PATIENCE: Duration = Duration::from_secs(10);
/// Decay times after which it is given up.
const PATIENCE_DECAYS: u32 = 20;

/// All figures of silence: the longest of the profiles.
pub(crate) fn measure(figures: &mut Figures) -> Result<(), BoxError> {
    let (mut worst, mut first): (f64, f64) = (0.0, f64::MAX);
    for profile in Profile::ALL {
        let [least, decays] = silence(profile)?;
        figures.add(format!("decay.{}.idle_to_zero.decays", profile.name()), decays, "decays");
        worst = worst.max(decays);
        first = first.min(least);
    }
    figures.add("decay.idle_to_first.decays", first, "decays");
    figures.add("decay.idle_to_zero.decays", worst, "decays");
    Ok(())
}

/// When the first of it had gone, and when all of it, in decay times.
fn silence(profile: Profile) -> Result<[f64; 2], BoxError> {
    let clock = Arc::new(ManualClock::new());
    let shared: Arc<dyn Clock> = clock.clone();
    let memory = Memory::builder()
        .clock(shared)
        .profile(profile)
        .device(DeviceChoice::Host)
        .background_threads(0)
        .start()?;
    let arena = memory.devices().open_arena("burst")?;
    let DecayTime::Within(decay) = memory.config().device_decay.value else {
        return Err("the profile's decay time is no time".into());
    };
    burst(&arena)?;
    let freed = clock.now();
    let since = || (clock.now() - freed).as_secs_f64() / decay.as_secs_f64();
    let (full, mut first) = (arena.glance().committed, None);
    while !arena.glance().idle.is_zero() || !arena.snapshot().cached.is_zero() {
        if clock.now() - freed > decay * PATIENCE_DECAYS {
            return Err(
                format!("{}: idle memory stays: {:?}", profile.name(), arena.glance()).into()
            );
        }
        clock.advance(TICK);
        if !clock.wait_for_waiters(2, PATIENCE) {
            return Err("the threads of the memory do not wait".into());
        }
        thread::sleep(BREATH);
        if arena.glance().committed < full {
            first.get_or_insert_with(since);
        }
    }
    let took = [first.unwrap_or_default(), since()];
    let left = arena.glance();
    if !left.committed.is_zero() {
        return Err(format!("nothing is live, and {} stay", left.committed).into());
    }
    if memory.shutdown_blocking(PATIENCE).is_clean() {
        Ok(took)
    } else {
        Err("an unclean end".into())
    }
}

/// Half a gibibyte in each region, in blocks of many sizes, some of them hot, at one moment: all
/// of it was last used then.
fn burst(arena: &DeviceArena) -> Result<(), DeviceError> {
    for turn in 0..100 {
        let blocks: Result<Vec<_>, _> = (0..24_usize)
            .map(|nth| arena.alloc::<u8>((64 << 10) << (nth % 12), Region::ALL[turn % 2]))
            .collect();
        drop(blocks?);
    }
    Ok(())
}
