//! Safe code raced with copies from and to page-locked memory. Random schedules of such code run
//! over the fake libcuda with unmodified cudarc:
//! `testing/fake-cuda/tests/cuda/driver/pinned_schedule.rs`.

#[path = "../../testing/fake-cuda/tests/cuda/driver/pinned_schedule.rs"]
#[allow(dead_code, reason = "the tests use more of it")]
mod pinned_schedule;

use lowtide::BoxError;
use lowtide_fake_cuda::{Fake, Options};

use self::pinned_schedule::{Bed, Done};

/// Schedules; each seed is one.
const SCHEDULES: u64 = 100_000;

/// Schedules on one device, which is then replaced.
const ON_ONE_DEVICE: u64 = 20;

/// Races that are shown in full.
const SHOWN: usize = 3;

pub(crate) fn run() -> Result<(), BoxError> {
    let fake = Fake::start(Options::default());
    let (mut all, mut racing, mut seed) = (Done::default(), Vec::new(), 0);
    while seed < SCHEDULES {
        // Half of them with work as late as possible, the others in random order.
        let order = u32::from(seed / ON_ONE_DEVICE % 2 == 1);
        let bed = Bed::new(&fake, order, seed);
        for _ in 0..ON_ONE_DEVICE {
            match bed.run(seed) {
                Ok(done) => all.add(done),
                Err(race) => {
                    all.add(race.done);
                    if racing.len() < SHOWN {
                        eprintln!("{race}");
                    }
                    racing.push(race.seed);
                }
            }
            seed += 1;
        }
    }
    println!("figure faults.pinned.schedules {SCHEDULES} schedules");
    println!("figure faults.pinned.copies {} copies", all.copies);
    println!("figure faults.pinned.reads {} reads", all.reads);
    println!("figure faults.pinned.failed_calls {} calls", all.failed_calls);
    println!("figure faults.pinned.launches {} launches", all.launches);
    println!("figure faults.pinned.quarantined {} bytes", all.quarantined_bytes);
    println!("figure faults.pinned.races {} races", all.races);
    racing.truncate(SHOWN);
    if all.races == 0 { Ok(()) } else { Err(format!("races; the first seeds: {racing:?}").into()) }
}
