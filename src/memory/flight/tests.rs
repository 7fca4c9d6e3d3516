//! Recordings that are torn, damaged, hostile; and what is concluded from them.

use std::time::Duration;

use super::format::*;
use super::last_exit::{ExitCause, LastExit, Now};
use crate::bytes::ByteSize;
use lowtide_admission::{Level, RequestMemory, RequestPhase};

const SECOND: Duration = Duration::from_secs(1);

/// Random numbers of a seed (Marsaglia's xorshift).
struct Chance(u64);

impl Chance {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, end: usize) -> usize {
        usize::try_from(self.next() % end as u64).expect("below a usize")
    }
}

fn run() -> Run {
    let started_at = Duration::from_secs(1_700_000_000);
    Run { pid: 7, started_at, boot_id: [3; 16], cgroup: 4, version: "1.2.3".to_owned() }
}

fn sample(nth: u64) -> FlightSample {
    let mib = |count| ByteSize::mib(count);
    FlightSample {
        at: run().started_at + SECOND * u32::try_from(nth).expect("small"),
        uptime: Duration::from_secs(nth),
        physical: mib(100 + nth),
        growth: mib(1),
        limit: mib(1000),
        required: mib(90),
        heap_live: mib(60),
        heap_retained: mib(20),
        other: Some(mib(3)),
        device_live: mib(4),
        device_retained: mib(5),
        device_reserved: mib(6),
        reserved: mib(7),
        allowance: mib(8),
        ceiling: ByteSize::MAX,
        level: Level::High,
        held: 9,
        waiting: 10,
        rejected_total: 11,
        oom_kills: Some(12),
        exhausted: true,
        ending: false,
    }
}

fn permit(tenant: Option<&str>) -> RequestMemory {
    RequestMemory {
        method: "POST".to_owned(),
        route: "/words".to_owned(),
        tenant: tenant.map(str::to_owned),
        phase: RequestPhase::Receiving,
        reserved: ByteSize::mib(4),
        live: ByteSize::mib(3),
        peak: ByteSize::mib(5),
        claim: ByteSize::mib(2),
        age: SECOND,
        is_cancelled: true,
    }
}

/// A recording with so many samples.
fn recording(samples: u64, end: RunEnd) -> Recording {
    let event = |at, kind: &str| FlightEvent {
        at: Duration::from_secs(at),
        kind: kind.to_owned(),
        about: "host".to_owned(),
        text: "pressure high, was none".to_owned(),
        times: at,
    };
    let [host, device] = [ByteSize::mib(8), ByteSize::mib(9)];
    Recording {
        run: run(),
        end,
        machine_kills: Some(5),
        samples: (0..samples).map(sample).collect(),
        events: vec![event(1, "level"), event(2, "reject")],
        permits: vec![permit(None), permit(Some("a"))],
        resources: vec![FlightResource { name: "model".to_owned(), loaded: true, host, device }],
    }
}

/// Writes a recording as a half with this sequence number.
fn half(recording: &Recording, sequence: u64) -> Vec<u8> {
    let mut writer = Writer::new();
    writer.begin(&recording.run, recording.end, recording.machine_kills);
    writer.samples(&recording.samples.iter().copied().collect());
    let list = writer.begin_list();
    for FlightEvent { at, kind, about, text, times } in &recording.events {
        writer.event(*at, *times, [kind, about, text]);
    }
    writer.end_list(list, recording.events.len());
    writer.permits(&recording.permits);
    let resource = |of: &FlightResource| PublishedResource {
        name: of.name.as_str().into(),
        loaded: of.loaded,
        host: of.host,
        device: of.device,
    };
    writer.resources(&recording.resources.iter().map(resource).collect::<Vec<_>>());
    writer.finish(&recording.run, sequence).to_vec()
}

fn empty_file() -> Vec<u8> {
    let mut file = vec![0; FILE_BYTES];
    file[..MARK.len()].copy_from_slice(MARK);
    file
}

fn put(file: &mut [u8], at: usize, bytes: &[u8]) {
    file[at..at + bytes.len()].copy_from_slice(bytes);
}

/// Returns the number of samples of the recording in a file.
fn samples(file: &[u8]) -> Option<usize> {
    match read(file) {
        Contents::Recording(recording) => Some(recording.samples.len()),
        _ => None,
    }
}

#[test]
fn a_recording_is_read_as_it_was_written() {
    let mut file = empty_file();
    assert_eq!(read(&file), Contents::Nothing, "it was never written");
    for (nth, end) in RunEnd::ALL.into_iter().enumerate() {
        let written = recording(SAMPLES_MAX as u64, end);
        put(&mut file, HALVES_AT[nth % 2], &half(&written, nth as u64));
        assert_eq!(read(&file), Contents::Recording(Box::new(written)));
    }
}

#[test]
fn lists_and_texts_are_cut_at_their_bounds_and_fit_in_a_half() {
    let mut all = recording(2 * SAMPLES_MAX as u64, RunEnd::Running);
    let long = "ä".repeat(1000);
    for event in &mut all.events {
        (event.kind, event.about, event.text) = (long.clone(), long.clone(), long.clone());
    }
    all.run.version = long.clone();
    all.events = all.events.iter().cycle().take(EVENTS_MAX).cloned().collect();
    let mut permit = permit(Some(&long));
    (permit.method, permit.route) = (long.clone(), long.clone());
    all.permits = vec![permit; 2 * PERMITS_MAX];
    all.resources = vec![all.resources[0].clone(); 2 * RESOURCES_MAX];
    let bytes = half(&all, 1);
    assert!(bytes.len() <= HALF_BYTES, "{}", bytes.len());
    let mut file = empty_file();
    put(&mut file, HALVES_AT[0], &bytes);
    let Contents::Recording(found) = read(&file) else { panic!("it is whole") };
    assert_eq!((found.samples.len(), found.events.len()), (SAMPLES_MAX, EVENTS_MAX));
    assert_eq!((found.permits.len(), found.resources.len()), (PERMITS_MAX, RESOURCES_MAX));
    assert_eq!((found.events[0].text.len(), found.permits[0].route.len()), (400, 64));
}

#[test]
fn a_half_that_is_torn_at_any_byte_leaves_the_other_one() {
    let [before, newer] = [2, 3].map(|count| recording(count, RunEnd::Running));
    let (before, newer) = (half(&before, 8), half(&newer, 9));
    let mut file = empty_file();
    put(&mut file, HALVES_AT[1], &before);
    put(&mut file, HALVES_AT[0], &half(&recording(1, RunEnd::Running), 7));
    for torn in 0..=newer.len() {
        let mut file = file.clone();
        put(&mut file, HALVES_AT[0], &newer[..torn]);
        // The last bytes of the older half may be those of the newer one.
        let is_whole = file[HALVES_AT[0]..].starts_with(&newer);
        assert!(!is_whole || torn + 16 >= newer.len(), "torn at {torn}");
        let expected = if is_whole { 3 } else { 2 };
        assert_eq!(samples(&file), Some(expected), "torn at {torn}");
    }
}

#[test]
fn with_both_halves_damaged_the_cause_is_unknown() {
    let mut file = empty_file();
    for (at, sequence) in HALVES_AT.into_iter().zip(1..) {
        let mut bytes = half(&recording(2, RunEnd::ShutDown), sequence);
        bytes[100] ^= 1;
        put(&mut file, at, &bytes);
    }
    let found = read(&file);
    assert_eq!(found, Contents::Unreadable);
    let last = LastExit::of(found, &Now::default()).expect("there was a run");
    assert_eq!((last.cause, last.samples.len()), (ExitCause::Unknown, 0));
}

#[test]
fn a_later_look_of_the_same_run_is_the_last_sample() {
    let mut file = empty_file();
    put(&mut file, HALVES_AT[0], &half(&recording(2, RunEnd::Running), 1));
    let mut writer = Writer::new();
    let later = [5, 6].map(sample);
    for (nth, at) in LOOKS_AT.into_iter().enumerate() {
        put(&mut file, at, writer.look(&run(), 2 - nth as u64, &later[1 - nth]));
    }
    let Contents::Recording(found) = read(&file) else { panic!("it is whole") };
    assert_eq!(found.samples[2..], later);
    // One of an earlier run, and one that the half already has.
    let other = Run { pid: 8, ..run() };
    put(&mut file, LOOKS_AT[0], writer.look(&other, 9, &later[1]));
    put(&mut file, LOOKS_AT[1], writer.look(&run(), 3, &sample(1)));
    assert_eq!(samples(&file), Some(2));
}

#[test]
fn other_files_and_other_versions_are_told_apart() {
    assert_eq!(read(&[]), Contents::Nothing);
    assert_eq!(read(&[0; 100]), Contents::Nothing);
    assert_eq!(read(b"root:x:0:0"), Contents::Foreign);
    assert_eq!(read(&MARK[..5]), Contents::Foreign);
    let mut file = empty_file();
    put(&mut file, HALVES_AT[0], &half(&recording(2, RunEnd::Running), 1));
    assert_eq!(samples(&file[..HALVES_AT[1]]), Some(2), "the other half is cut off");
    file[MARK.len() - 2] = b'2';
    assert_eq!(read(&file), Contents::Unreadable);
}

#[test]
fn no_bytes_make_the_reader_panic_or_read_beyond_its_bounds() {
    let whole = half(&recording(3, RunEnd::Running), 1);
    for seed in 1..=2_000_u64 {
        let mut chance = Chance(seed);
        let mut file = vec![0; HALVES_AT[1] + 2 * whole.len()];
        put(&mut file, 0, MARK);
        put(&mut file, HALVES_AT[0], &whole);
        match seed % 4 {
            // Flipped bits anywhere.
            0 => {
                for _ in 0..=chance.below(8) {
                    let at = chance.below(file.len());
                    file[at] ^= 1 << chance.below(8);
                }
            }
            // Cut off.
            1 => file.truncate(chance.below(file.len())),
            // Noise in place of a half.
            2 => {
                for byte in &mut file[HALVES_AT[0]..HALVES_AT[0] + whole.len()] {
                    *byte = chance.next().to_le_bytes()[0];
                }
            }
            // A payload of noise whose checksum is right.
            _ => {
                let mut writer = Writer::new();
                writer.begin(&run(), RunEnd::Running, None);
                for _ in 0..chance.below(400) {
                    let texts = ["\u{1}", "\0", "\u{7f}"];
                    writer.event(Duration::from_nanos(chance.next()), chance.next(), texts);
                }
                put(&mut file, HALVES_AT[0], writer.finish(&run(), chance.next()));
            }
        }
        if let Contents::Recording(found) = read(&file) {
            let counts = [found.samples.len(), found.events.len()];
            let bounds = [SAMPLES_MAX + 2, EVENTS_MAX];
            assert!(counts.iter().zip(bounds).all(|(count, most)| *count <= most), "seed {seed}");
            let _ = LastExit::of(Contents::Recording(found), &Now::default());
        }
    }
}

/// Returns the conclusion from a run that ended with this sample.
fn concluded(last: FlightSample, end: RunEnd, now: Now) -> LastExit {
    let mut recording = recording(2, end);
    recording.samples.push(last);
    let found = LastExit::of(Contents::Recording(Box::new(recording)), &now);
    found.expect("there was a run")
}

#[test]
fn the_cause_follows_from_the_kernels_counts_and_the_memory_at_the_end() {
    let quiet = FlightSample { exhausted: false, level: Level::None, ..sample(60) };
    let at = |mib, growth| FlightSample {
        physical: ByteSize::mib(mib),
        growth: ByteSize::mib(growth),
        ..quiet
    };
    let here = Now { boot_id: [3; 16], cgroup: 4, cgroup_kills: Some(12), machine_kills: Some(5) };
    let (in_cgroup, on_machine) =
        (Now { cgroup_kills: Some(13), ..here }, Now { machine_kills: Some(6), ..here });
    let fresh_cgroup = Now { cgroup: 5, cgroup_kills: Some(20), ..here };
    let (ending, unlimited) = (
        FlightSample { ending: true, ..at(200, 0) },
        FlightSample { limit: ByteSize::MAX, ..at(2000, 0) },
    );
    let (running, memory) = (RunEnd::Running, ExitCause::OutOfMemory);
    for (case, last, end, now, cause) in [
        ("in order", at(990, 0), RunEnd::ShutDown, in_cgroup, ExitCause::Shutdown),
        ("by the policy", at(990, 0), RunEnd::Exhausted, here, ExitCause::Exhausted),
        ("dropped", at(990, 0), RunEnd::Dropped, here, ExitCause::Dropped),
        ("a panic", at(990, 0), RunEnd::Panicked, here, ExitCause::Panicked),
        ("a kill in the cgroup", at(100, 0), running, in_cgroup, memory),
        ("a kill in another cgroup", at(100, 0), running, fresh_cgroup, ExitCause::Killed),
        ("a kill on the machine", at(600, 0), running, on_machine, memory),
        ("a kill of another process", at(100, 0), running, on_machine, ExitCause::Killed),
        ("at the limit", at(931, 0), running, fresh_cgroup, memory),
        ("below the limit", at(929, 0), running, fresh_cgroup, ExitCause::Killed),
        ("fast growth", at(500, 4_600), running, fresh_cgroup, memory),
        ("slow growth", at(500, 1_000), running, fresh_cgroup, ExitCause::Killed),
        ("no limit", unlimited, running, here, ExitCause::Killed),
        ("asked to end", ending, running, here, ExitCause::KilledWhileEnding),
        ("a reboot", at(990, 0), running, Now { boot_id: [4; 16], ..here }, ExitCause::Rebooted),
        ("an unknown boot", at(990, 0), running, Now { boot_id: [0; 16], ..here }, memory),
    ] {
        let last = concluded(last, end, now);
        assert_eq!(last.cause, cause, "{case}: {}", last.summary);
    }
    let none = Recording { samples: Vec::new(), ..recording(0, running) };
    let last = LastExit::of(Contents::Recording(Box::new(none)), &here).expect("a run");
    assert_eq!((last.cause, last.at), (ExitCause::Killed, None));
}

#[test]
fn the_summary_has_the_figures_from_which_the_cause_was_concluded() {
    let mut last = sample(3_700);
    (last.physical, last.growth) = (ByteSize::mib(990), ByteSize::mib(300));
    let last = concluded(last, RunEnd::Running, Now::default());
    assert_eq!(
        last.summary,
        "killed most likely by the kernel's OOM killer, after 1 h 1 min; physical memory was \
         990.0 MiB, 99 % of the limit of 1000.0 MiB, and grew by 300.0 MiB/s; memory that no \
         request owns left no room for requests; most of it was allocated since metrics were last \
         published; the largest request was POST /words with 3.0 MiB"
    );
    let last = concluded(sample(30), RunEnd::ShutDown, Now::default());
    assert_eq!(last.summary, "shut down in order after 30.0 s");
    assert_eq!((last.pid, last.version.as_str()), (7, "1.2.3"));
}
