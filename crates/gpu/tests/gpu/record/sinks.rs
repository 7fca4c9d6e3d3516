//! Sinks that fail, panic, block, are full, or use the arena: the arena works on.

use std::io::{self, Write};
use std::sync::{Arc, Mutex, OnceLock};

use lowtide_gpu::ByteSize;
use lowtide_gpu::clock::SystemClock;
use lowtide_gpu::record::Recorder;
use lowtide_gpu::{ArenaConfig, DeviceArena, Region};

use super::{Books, Kept, config, events, host, name, recorder};

/// Fails, or panics, after so many bytes.
struct Failing {
    left: usize,
    panics: bool,
    drops: Arc<Mutex<u32>>,
}

impl Write for Failing {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let taken = bytes.len().min(self.left);
        self.left -= taken;
        if taken > 0 {
            return Ok(taken);
        }
        if self.panics {
            std::panic::panic_any("the sink panics");
        }
        Err(io::Error::other("no room on the disk"))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for Failing {
    fn drop(&mut self) {
        *self.drops.lock().expect("nobody panics with it") += 1;
        assert!(!self.panics, "its drop panics too");
    }
}

fn opened(recorder: Recorder) -> DeviceArena {
    let config = ArenaConfig { recorder: Some(recorder), ..config() };
    DeviceArena::open(host(), Arc::new(SystemClock::new()), config).expect("open")
}

/// Enough for several writes.
fn use_it(arena: &DeviceArena) {
    for _ in 0..4_000 {
        drop(arena.alloc::<u8>(4096, Region::Dynamic).expect("room"));
    }
}

#[test]
fn a_sink_that_fails_or_panics_stops_the_recording_and_nothing_else() {
    for (left, panics) in [(0, false), (0, true), (100_000, false), (100_000, true)] {
        let drops = Arc::new(Mutex::new(0));
        let recorder = Recorder::new(Failing { left, panics, drops: drops.clone() });
        let arena = opened(recorder.clone());
        assert_eq!(recorder.error(), None);
        use_it(&arena);
        let error = recorder.error().expect("it was found out");
        match panics {
            true => assert!(error.to_string().contains("the sink panicked"), "{error}"),
            false => {
                assert_eq!(
                    error.to_string(),
                    "recording stopped: the sink failed: no room on the disk"
                )
            }
        }
        assert_eq!(*drops.lock().expect("ok"), 1, "the sink is let go of at once");
        use_it(&arena);
        assert_eq!(recorder.finish(), Err(error.clone()));
        arena.validate();
        drop(arena);
        assert_eq!(recorder.error(), Some(error));
    }
}

#[test]
fn a_bounded_recording_ends_with_a_complete_line() {
    for most in [0, 10, 300, 1_000, 70_000, 200_000] {
        let kept = Kept::default();
        let recorder = Recorder::bounded(kept.clone(), ByteSize::new(most));
        let arena = opened(recorder.clone());
        use_it(&arena);
        drop(arena);
        let full = recorder.error().expect("full").to_string();
        let limit = format!("its size limit of {} is reached", ByteSize::new(most));
        assert!(full.contains(&limit), "{full}");
        let text = kept.text();
        assert!(text.len() as u64 <= most, "{} of {most}", text.len());
        assert!(text.len() as u64 + 300 > most, "{} of {most}", text.len());
        Books::of(&events(&text));
    }
}

#[test]
fn a_recording_that_is_finished_is_closed_while_the_arena_works_on() {
    let (recorder, kept) = recorder();
    let arena = opened(recorder.clone());
    let buffer = arena.alloc::<u8>(4096, Region::Dynamic).expect("room");
    assert_eq!(kept.text(), "", "it waits");
    recorder.flush().expect("written");
    assert_eq!(kept.text().lines().count(), 3);
    recorder.finish().expect("written");
    assert_eq!(recorder.finish(), Ok(()), "once more does nothing");
    use_it(&arena);
    drop((buffer, arena));
    let events = kept.events();
    assert_eq!(events.iter().map(name).collect::<Vec<_>>(), ["open", "commit", "alloc", "end"]);
    assert_eq!(recorder.error(), None);
}

/// Bug: the event of a failed allocation or resize came after the flush of its operation.
#[test]
fn operations_that_fail_pass_their_events_on() {
    let (recorder, kept) = recorder();
    let limit = ByteSize::mib(4);
    let config = ArenaConfig { limit, recorder: Some(recorder), ..config() };
    let arena = DeviceArena::open(host(), Arc::new(SystemClock::new()), config).expect("open");
    let mut buffer = arena.alloc::<u8>(1 << 20, Region::Dynamic).expect("room");
    for turn in 0..2 {
        let before = kept.text().len();
        for _ in 0..1_000 {
            if turn == 0 {
                arena.alloc::<u8>(8 << 20, Region::Dynamic).expect_err("no room");
            } else {
                buffer.resize(8 << 20).expect_err("no room");
            }
        }
        assert!(kept.text().len() > before, "the lines wait for another operation");
    }
}

/// Uses the arena whose recording it is.
struct Selfish {
    arena: Arc<OnceLock<DeviceArena>>,
    recorder: Arc<OnceLock<Recorder>>,
    to: Kept,
    blocks: usize,
}

impl Write for Selfish {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let arena = self.arena.get().expect("set");
        for _ in 0..self.blocks {
            drop(arena.alloc::<u8>(100, Region::Stable).expect("room"));
        }
        self.recorder.get().expect("set").flush().expect("does nothing here");
        self.to.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_sink_may_use_the_arena_and_one_that_never_stops_stops_the_recording() {
    for blocks in [2, 20_000] {
        let (arena, own) = (Arc::new(OnceLock::new()), Arc::new(OnceLock::new()));
        let to = Kept::default();
        let sink = Selfish { arena: arena.clone(), recorder: own.clone(), to: to.clone(), blocks };
        let recorder = Recorder::new(sink);
        own.set(recorder.clone()).expect("once");
        arena.set(opened(recorder.clone())).expect("once");
        use_it(arena.get().expect("set"));
        if blocks == 2 {
            recorder.finish().expect("written");
            let events = to.events();
            Books::of(&events).assert_are_of(arena.get().expect("set"));
            let is_own = |event: &&serde_json::Value| event["region"] == "stable";
            assert!(events.iter().any(|event| is_own(&event)), "what the sink did is recorded");
        } else {
            let error = recorder.error().expect("more than waits");
            assert!(error.to_string().contains("the sink is too slow"), "{error}");
        }
        arena.get().expect("set").validate();
    }
}
