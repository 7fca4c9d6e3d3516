//! Long random histories: one thread against a model, several threads with marks in the memory.
//!
//! The model knows each buffer's contents and the live bytes, but no segments.

use std::sync::Mutex;
use std::thread;

use super::*;
use crate::tests::Chance;
use lowtide_core::sync::lock;

fn len(chance: &mut Chance) -> usize {
    let size = (1 << chance.below(18)) + chance.below(300) - 1;
    usize::try_from(size).expect("small")
}

/// A buffer of words that all equal its mark.
struct Marked {
    buffer: PinnedBuffer<u64>,
    mark: u64,
}

impl Marked {
    fn new(pool: &PinnedPool, len: usize, mark: u64) -> Result<Self, DeviceError> {
        let mut buffer = pool.alloc(len)?;
        buffer.fill(mark)?;
        Ok(Self { buffer, mark })
    }

    fn assert_whole(&self) {
        assert!(
            self.buffer.elements().iter().all(|&word| word == self.mark),
            "somebody wrote into a block"
        );
    }

    /// Resizes the buffer. Returns the error if that failed.
    fn resize(&mut self, len: usize) -> Option<DeviceError> {
        let kept = self.buffer.len().min(len);
        let refused = self.buffer.resize(len).err();
        let whole = if refused.is_none() { kept } else { self.buffer.len() };
        assert!(
            self.buffer.elements()[..whole].iter().all(|&word| word == self.mark),
            "contents are kept"
        );
        self.buffer.fill(self.mark).expect("no copy");
        refused
    }
}

#[test]
fn random_histories_keep_every_content_and_fail_only_when_the_limit_is_near() {
    for seed in [0x9E37_79B9_7F4A_7C15, 0xD1B5_4A32_D192_ED03] {
        println!("seed {seed:#x}");
        let mut chance = Chance(seed);
        let limit = ByteSize::mib(24);
        let (pool, driver) = open(limit);
        let mut model: Vec<Marked> = Vec::new();
        let (mut failures, mut given) = (0, 0);
        for step in 0..4_000 {
            let live = model.iter().map(|marked| marked.buffer.bytes()).sum::<ByteSize>();
            let nth = usize::try_from(chance.below(1 + model.len() as u64)).expect("small");
            let failed = match chance.below(100) {
                0..50 => {
                    let len = len(&mut chance);
                    Marked::new(&pool, len, step).map(|marked| model.push(marked)).err()
                }
                50..62 if nth < model.len() => model[nth].resize(len(&mut chance)),
                62..97 if nth < model.len() => {
                    let marked = model.swap_remove(nth);
                    marked.assert_whole();
                    drop(marked);
                    None
                }
                97 => {
                    given += pool.maintain().expect("no failure was asked for").get();
                    assert!(pool.glance().idle <= ByteSize::mib(3), "above the high watermark");
                    None
                }
                98 => {
                    let keep = ByteSize::mib(chance.below(24));
                    given += pool.trim(keep).expect("no failure was asked for").get();
                    None
                }
                _ => None,
            };
            if let Some(error) = failed {
                assert!(matches!(error, DeviceError::OutOfMemory { .. }), "{error}");
                // The largest buffer has 1 MiB, and segments have holes.
                let full = live.get() * 5 > limit.get() * 3;
                assert!(full, "{error} with {live} asked for");
                failures += 1;
            }
            if step % 40 == 0 {
                check(&pool, &driver);
                let requested = model.iter().map(|marked| marked.buffer.bytes()).sum();
                assert_eq!(pool.snapshot().arena.requested, requested);
                assert!(pool.glance().committed <= limit);
            }
        }
        assert!(failures > 10 && given > 0, "{failures} failures: the test is too tame");
        model.iter().for_each(Marked::assert_whole);
        model.clear();
        pool.purge().expect("all of it");
        assert_eq!(driver.host_memory(), (ByteSize::ZERO, 0));
        check(&pool, &driver);
    }
}

#[test]
fn threads_share_a_pool_and_nobody_writes_into_anothers_block() {
    let (pool, driver) = open(ByteSize::mib(12));
    let shared: Mutex<Vec<Marked>> = Mutex::new(Vec::new());
    let history = |seed: u64| {
        let mut chance = Chance(0x9E37_79B9_7F4A_7C15 ^ (seed << 32));
        let mut own: Vec<Marked> = Vec::new();
        for step in 0..1_500 {
            match chance.below(10) {
                0..5 => own.extend(Marked::new(&pool, len(&mut chance) / 4, step * 8 + seed)),
                5 => {
                    // Any thread frees it later, and checks it.
                    let mut shared = lock(&shared);
                    shared.extend(own.pop());
                    let taken = if shared.len() > 8 { shared.pop() } else { None };
                    own.extend(taken);
                }
                6 => {
                    if let Some(marked) = own.first_mut() {
                        let _ = marked.resize(len(&mut chance) / 4);
                    }
                }
                7 => {
                    pool.maintain().expect("no failure was asked for");
                }
                _ => {
                    let nth = usize::try_from(chance.below(1 + own.len() as u64)).expect("small");
                    if nth < own.len() {
                        own.swap_remove(nth).assert_whole();
                    }
                }
            }
        }
        own.iter().for_each(Marked::assert_whole);
    };
    thread::scope(|scope| {
        for seed in 0..4 {
            let history = &history;
            scope.spawn(move || history(seed));
        }
    });
    lock(&shared).iter().for_each(Marked::assert_whole);
    lock(&shared).clear();
    check(&pool, &driver);
    assert_eq!(pool.snapshot().live(), ByteSize::ZERO);
    pool.purge().expect("all of it");
    assert_eq!(driver.host_memory(), (ByteSize::ZERO, 0));
}
