//! Random programs, with every book checked after each step.

use super::*;
use crate::chance::Chance;

const SEEDS: u64 = lowtide_cuda_sim::sample(40);
const STEPS: usize = 300;
const LIMIT: u64 = 96;

/// Asserts that an error is one that is allowed: the rule of the limit by the error's own figures.
fn judge<T>(outcome: Result<T, DeviceError>, fails: bool) -> Option<T> {
    let error = match outcome {
        Ok(got) => return Some(got),
        Err(error) => error,
    };
    match &error {
        DeviceError::OutOfMemory { requested, active, limit, .. } if !fails => {
            let needed = requested.next_multiple_of(ByteSize::mib(2)).expect("small");
            assert!(active.saturating_add(needed) > *limit, "refused with room: {error:?}");
        }
        DeviceError::OutOfMemory { .. } => {}
        DeviceError::Driver(_) => assert!(fails, "{error}"),
        other => panic!("{other}"),
    }
    None
}

fn program(seed: u64) {
    let mut chance = Chance::new(seed);
    let (pool, fails) = (seed.is_multiple_of(2), seed.is_multiple_of(3));
    let growth = Growth::NextPowerOfTwo {
        initial: ByteSize::mib(4),
        after_shrink: ByteSize::mib(2),
        cap: ByteSize::mib(32),
    };
    let bed = Bed::open(pool, |config| {
        config.limit = ByteSize::mib(LIMIT * if chance.below(3) == 0 { 10 } else { 1 });
        config.growth = if chance.below(3) == 0 { growth } else { config.growth };
    });
    let (mut buffers, mut raws) = (Vec::new(), Vec::new());
    for _ in 0..STEPS {
        let region = Region::ALL[chance.below(2)];
        let size = [MIB / 3, 700, 3 * MIB, 9 * MIB][chance.below(4)] + chance.below(MIB);
        if fails && chance.below(8) == 0 {
            let call = [Call::Alloc, Call::Free, Call::AllocAsync, Call::FreeAsync, Call::PoolTrim]
                [chance.below(5)];
            let error = [SimError::OutOfMemory, SimError::Unknown][chance.below(2)];
            bed.sim.fail_nth(Some(call), 0, error);
        }
        match chance.below(20) {
            0..7 => buffers.extend(judge(bed.alloc::<u8>(size, region), fails)),
            7 => buffers.extend(judge(bed.reserve::<u8>(size, region), fails)),
            8..13 if !buffers.is_empty() => {
                drop(buffers.swap_remove(chance.below(buffers.len())));
            }
            13 if !buffers.is_empty() => {
                let nth = chance.below(buffers.len());
                let _ = judge(buffers[nth].resize(size), fails);
            }
            14 => {
                let align = ByteSize::new(1 << chance.below(22));
                let block = judge(bed.alloc_raw(ByteSize::of(size), align, region), fails);
                assert!(block.is_none_or(|block| block.at.is_multiple_of(align)));
                raws.extend(block);
            }
            15 if !raws.is_empty() => {
                let block: lowtide_gpu::RawBlock = raws.swap_remove(chance.below(raws.len()));
                assert_eq!(bed.free(block.at), Ok(block));
            }
            16 => {
                let keep = ByteSize::mib(chance.below(64) as u64);
                let given = judge(bed.trim(keep), fails).is_some();
                let snapshot = bed.snapshot();
                assert!(!given || snapshot.idle.is_zero() || snapshot.committed <= keep);
            }
            17 => {
                bed.sim.clock().advance(Duration::from_millis(chance.below(8000) as u64));
                let _ = judge(bed.decay(bed.now()), fails);
            }
            18 => {
                let compacted = bed.compact(CompactOptions::new(region), |_| {});
                let _ = judge(compacted.map_err(DeviceError::from), fails);
            }
            _ => drop(bed.occupancy(64)),
        }
        let [committed, ..] = bed.figures();
        assert_eq!(committed, bed.on_device()[0], "the books say what the device does");
    }
    bed.sim.forget_failures();
    drop(buffers);
    bed.reset().expect("here");
    bed.trim(ByteSize::MAX).expect("waits for what was used on no lane");
    for _ in 0..8 {
        bed.sim.clock().advance(Duration::from_secs(11));
        bed.decay(bed.now()).expect("no call fails");
    }
    assert_eq!((bed.figures(), bed.on_device()), ([0; 3], [0; 2]), "it decays to nothing");
    bed.end();
}

#[test]
fn random_programs_keep_every_book_and_every_bound() {
    for seed in 0..SEEDS {
        println!("seed {seed}");
        program(seed);
    }
}
