//! Recordings that are none: each is refused with its line, and nothing panics, whatever is read.

use std::io::{self, Read};

use lowtide_gpu::record::{Log, LogError, LogFault};

use super::program::Random;
use super::{config, host, open};

const HEAD: &str = "\
lowtide-recording version=2
0 open backend=host asynchronous=no clock=5 limit=none reserve=8388608 decay=never growth=same \
name=a -> granularity=2097152 stable=8388608 dynamic=8388608
";

/// The header, then these lines.
fn parsed(lines: &str) -> Result<Log, LogError> {
    Log::parse(&format!("{HEAD}{lines}"))
}

/// Refused in this line, with these words.
fn refused(lines: &str, line: u64, words: &str) {
    let error = parsed(lines).expect_err(lines);
    let text = error.to_string();
    assert!(text == format!("line {line}: {words}"), "{lines}\n{text}");
}

const ALLOC: &str =
    "1 alloc id=1 kind=buffer region=dynamic bytes=9 align=1 lane=none -> at=dynamic:0 size=256\n";

#[test]
fn what_is_no_recording_is_refused_with_what_was_found() {
    for (text, line, words) in [
        ("", 1, "expected lowtide-recording version=2, found nothing"),
        ("\n", 1, "expected lowtide-recording, found nothing"),
        ("hello world\n", 1, "expected lowtide-recording, found \"hello\""),
        (
            "lowtide-recording version=3\n",
            1,
            "expected a recording of version 1 to 2, found version 3",
        ),
        (
            "lowtide-recording version=0\n",
            1,
            "expected a recording of version 1 to 2, found version 0",
        ),
        (
            "lowtide-recording version=x\n",
            1,
            "version=: expected a number of at most 18446744073709551615, found \"x\"",
        ),
        (
            "lowtide-recording version=1\n",
            2,
            "expected the line of the operation `open`, found nothing",
        ),
        ("lowtide-recording version=1 \n", 1, "expected the end of the line, found nothing"),
        ("lowtide-recording version=1\n0 alloc\n", 2, "expected open, found \"alloc\""),
    ] {
        let error = Log::parse(text).expect_err(text);
        assert_eq!(error.to_string(), format!("line {line}: {words}"), "{text:?}");
    }
    let crlf = HEAD.replace('\n', "\r\n");
    assert_eq!(Log::parse(&crlf).expect_err("no newline of ours").line, 1);
}

#[test]
fn a_line_that_is_wrong_is_refused_with_its_number_and_what_was_expected() {
    let most = "18446744073709551615";
    refused("x\n", 3, &format!("the time: expected a number of at most {most}, found \"x\""));
    refused("1\n", 3, "expected an operation, found nothing");
    refused("1 fly id=1\n", 3, "expected an operation, found \"fly\"");
    refused("1 free\n", 3, "expected id=, found nothing");
    refused("1 free  id=1\n", 3, "expected id=, found nothing");
    refused("1 free id=1 \n", 3, "expected after=, found nothing");
    refused("1 free name=1 after=all\n", 3, "expected id=, found \"name=1\"");
    refused(
        &format!("{ALLOC}2 free id=1 after=never\n"),
        4,
        "expected lanes or all, found \"never\"",
    );
    refused(
        &format!("{ALLOC}2 free id=1 after=all id=1\n"),
        4,
        "expected the end of the line, found \"id=1\"",
    );
    for number in ["-1", "+1", "1.5", "0x1", "", "99999999999999999999", "1e3", "١"] {
        let words = format!("id=: expected a number of at most {most}, found {number:?}");
        let words = words.replace("found \"\"", "found nothing");
        refused(&format!("1 free id={number} after=all\n"), 3, &words);
    }
    refused(
        "1 limit bytes=all\n",
        3,
        &format!("bytes=: expected a number of at most {most}, found \"all\""),
    );
    refused(
        "1 end operations=0 threads=one ended=gone -> hash=12\n",
        3,
        "expected a hash of 16 hexadecimal digits, found \"12\"",
    );
    refused(
        "1 compact region=stable goal=money budget=none raw=no -> busy moves=0 moved=0 skipped=0\n",
        3,
        "expected granules, or contiguous: and a number, found \"money\"",
    );
    let name = HEAD.replace("name=a", "name=%zz");
    let error = Log::parse(&name).expect_err("no such byte");
    assert_eq!((error.line, error.to_string().contains("%zz")), (2, true), "{error}");
}

/// The bug: after the largest number of all the same one was taken for a larger.
#[test]
fn the_last_number_of_all_was_given_twice() {
    let most = u64::MAX;
    let words =
        |key| format!("{key}=: expected a number of at most {}, found \"{most}\"", most - 1);
    let block = ALLOC.replace("id=1 ", &format!("id={most} "));
    refused(&format!("{block}{block}"), 3, &words("id"));
    refused(&format!("1 lane lane={most} stream=1\n").repeat(2), 3, &words("lane"));
    let last = ALLOC.replace("id=1 ", &format!("id={} ", most - 1));
    parsed(&last).expect("the last that is one");
    refused(
        &format!("{last}{last}"),
        4,
        &format!("id=: expected a number of at least {most}, found {}", most - 1),
    );
}

#[test]
fn sleeps_wakes_and_contents_that_are_wrong_are_refused_with_their_line() {
    let why = "expected leased, cancelled, capturing, budget, state or driver, found \"tired\"";
    let state = "expected awake, draining, asleep or waking, found \"dead\"";
    let done = "slept released=1 offloaded=2 stayed=3";
    for (line, words) in [
        ("stable=keep dynamic=keep", "expected ->, found nothing"),
        ("dynamic=keep stable=keep", "expected stable=, found \"dynamic=keep\""),
        ("stable=all dynamic=keep", "expected discard, keep or stay, found \"all\""),
        ("stable=keep dynamic=usual", "expected discard, keep or stay, found \"usual\""),
    ] {
        refused(&format!("{ALLOC}2 sleep {line}\n"), 4, words);
    }
    for (outcome, words) in [
        ("done", "expected slept or failed, found \"done\""),
        (&*format!("{done} why=state"), "expected the end of the line, found \"why=state\""),
        ("slept released=1 offloaded=2", "expected stayed=, found nothing"),
        ("failed why=tired state=awake", why),
        ("failed why=state state=dead", state),
        ("failed why=state", "expected state=, found nothing"),
    ] {
        let line = format!("2 sleep stable=keep dynamic=keep -> {outcome}\n");
        refused(&format!("{ALLOC}{line}"), 4, words);
    }
    for (line, words) in [
        ("sleep", "expected stable=, found nothing"),
        ("wake", "expected ->, found nothing"),
        ("wake -> slept", "expected done or failed, found \"slept\""),
        ("wake -> done committed=5", "expected restored=, found nothing"),
        ("wake -> failed committed=5", "expected the end of the line, found \"committed=5\""),
        ("contents id=1", "expected what=, found nothing"),
        ("contents id=1 what=lost", "expected discard, keep, stay or usual, found \"lost\""),
        ("contents id=7 what=keep", "expected an allocated block, found block 7"),
    ] {
        refused(&format!("{ALLOC}2 {line}\n"), 4, words);
    }
    let (large, most) = (u64::MAX / 2, 1_u64 << 62);
    for (line, field) in [
        ("sleep stable=keep dynamic=keep -> slept released=", "released="),
        ("wake -> done committed=1 restored=", "restored="),
    ] {
        let words = format!("{field}: expected a number of at most {most}, found \"{large}\"");
        refused(&format!("{ALLOC}2 {line}{large}\n"), 4, &words);
    }
    let freed = format!("{ALLOC}2 free id=1 after=all\n3 contents id=1 what=stay\n");
    refused(&freed, 5, "expected a live block, found block 1, which was freed in line 4");
}

#[test]
fn a_recording_of_version_1_is_read_and_has_no_word_of_version_2() {
    let first = HEAD.replace("version=2", "version=1");
    let text = format!("{first}{ALLOC}2 free id=1 after=all\n");
    let log = Log::parse(&text).expect("as it was written then");
    assert_eq!((log.header().version, log.to_string()), (1, text));
    let replayed = log.replay(host(), log.header().config()).expect("open");
    assert_eq!(replayed.operations, 2);
    for line in ["wake -> failed", "contents id=1 what=keep", "sleep stable=keep"] {
        let error = Log::parse(&format!("{first}{ALLOC}2 {line}\n")).expect_err(line);
        let word = line.split(' ').next().expect("a word");
        let words = format!("line 4: expected an operation of version 1, found {word:?}");
        assert_eq!(error.to_string(), words);
    }
}

#[test]
fn blocks_and_lanes_that_are_not_there_are_refused() {
    let unknown = "expected an allocated block, found block 7";
    for what in ["free id=7 after=all", "pin id=7", "unpin id=7", "use id=7 lane=1"] {
        refused(&format!("1 {what}\n"), 3, unknown);
    }
    let freed = format!("{ALLOC}2 free id=1 after=all\n");
    let twice = "expected a live block, found block 1, which was freed in line 4";
    refused(&format!("{freed}3 free id=1 after=all\n"), 5, twice);
    refused(&format!("{freed}3 resize id=1 bytes=3 -> why=limit\n"), 5, twice);
    refused(&format!("{freed}3 move id=1 -> from=dynamic:0 to=dynamic:256 size=256\n"), 5, twice);
    let raw = ALLOC.replace("kind=buffer", "kind=raw");
    refused(&format!("{raw}2 reset -> blocks=1 bytes=256\n3 free id=1 after=all\n"), 5, twice);
    let again = "id=: expected a number of at least 2, found 1";
    refused(&format!("{freed}{ALLOC}").replace("\n1 alloc", "\n3 alloc"), 5, again);
    let gone = "expected an existing lane, found lane 1";
    refused("1 end_run lane=1 -> done\n", 3, gone);
    refused("1 lane lane=1 stream=1\n2 lane_end lane=1\n3 lane_end lane=1\n", 5, gone);
    refused(&ALLOC.replace("lane=none", "lane=1"), 3, gone);
    refused(
        &format!("{ALLOC}2 unpin id=1\n"),
        4,
        "the pins of the block: expected a number of at least 1, found 0",
    );
}

#[test]
fn sizes_and_times_beyond_all_bounds_are_refused() {
    let bytes_max = 1_u64 << 62;
    refused(
        &ALLOC.replace("size=256", "size=9223372036854775808"),
        3,
        &format!("size=: expected a number of at most {bytes_max}, found \"9223372036854775808\""),
    );
    refused(
        &ALLOC.replace("size=256", "size=16777216"),
        3,
        "size=: expected a number of at most 8388608, found \"16777216\"",
    );
    refused(
        &ALLOC.replace("dynamic:0", "dynamic:8388608"),
        3,
        "the offset of the place: expected a number of at most 8388352, found \"8388608\"",
    );
    refused(
        &ALLOC.replace("size=256", "size=8"),
        3,
        "size=: expected a number of at least 9, found 8",
    );
    refused(
        &ALLOC.replace("bytes=9", "bytes=0"),
        3,
        "bytes=: expected a number of at least 1, found 0",
    );
    refused(
        &ALLOC.replace("align=1", "align=3"),
        3,
        "expected an alignment of a power of two, found \"3\"",
    );
    refused(
        &ALLOC.replace("align=1", "align=4194304"),
        3,
        "align=: expected a number of at most 2097152, found \"4194304\"",
    );
    refused(
        &format!("{ALLOC}0 free id=1 after=all\n"),
        4,
        "the time: expected a number of at least 1, found 0",
    );
}

#[test]
fn the_last_line_is_whole_and_nothing_comes_after_the_end() {
    let error = parsed("1 limit bytes=7").expect_err("no newline");
    assert_eq!(error.line, 3);
    assert!(matches!(error.fault, LogFault::Truncated { .. }), "{error}");
    assert!(parsed("1 limit bytes=7\n").is_ok(), "without a last line");
    let end = "1 end operations=0 threads=one ended=gone -> hash=0123456789abcdef\n";
    let more = format!("{end}2 limit bytes=7\n");
    refused(&more, 4, "expected no line after the end, found \"2 limit bytes=7\"");
    for cut in 1..HEAD.len() {
        let error = Log::parse(&HEAD[..cut]).expect_err("cut off");
        assert!(error.line <= 2, "{error}");
    }
}

#[test]
fn lines_without_end_and_bytes_that_are_no_text_are_refused() {
    /// Gives the header and then one byte for ever.
    struct Endless(u8, usize);
    impl Read for Endless {
        fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
            let head = HEAD.as_bytes().get(self.1..).unwrap_or_default();
            let length = if head.is_empty() { to.len() } else { head.len().min(to.len()) };
            match head.is_empty() {
                true => to.fill(self.0),
                false => to[..length].copy_from_slice(&head[..length]),
            }
            self.1 += length;
            Ok(length)
        }
    }
    let error = Log::read(Endless(b'7', 0)).expect_err("it never ends");
    assert_eq!(error, LogError::clone(&error));
    assert_eq!(error.to_string(), "line 3: expected at most 4096 bytes, found a longer line");
    let long = parsed(&format!("1 free id=1 after={}\n", "x".repeat(300))).expect_err("no word");
    assert!(long.to_string().len() < 200, "what is found is cut short: {long}");
    let mut bytes = HEAD.as_bytes().to_vec();
    bytes.extend(b"1 free \xFFid=1\n");
    let error = Log::read(&bytes[..]).expect_err("no text");
    assert_eq!(error.to_string(), "line 3: expected UTF-8, found the byte 0xff after 7 bytes");
    struct Broken;
    impl Read for Broken {
        fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
            Err(io::Error::other("a bad sector"))
        }
    }
    let error = Log::read(Broken).expect_err("it cannot be read");
    assert!(matches!(error.fault, LogFault::Read { .. }), "{error}");
}

/// Without a layout nothing bounds what is asked for: the arena does.
#[test]
fn the_largest_numbers_of_a_recording_without_a_layout_are_refused_by_the_arena() {
    let (most, bytes) = (u64::MAX, 1_u64 << 62);
    let head = HEAD.split(" ->").next().expect("a header").to_owned();
    let head = head.replace("growth=same", &format!("growth=double:{most}:{most}:{most}"));
    for kind in ["buffer", "raw", "reserve"] {
        for align in [1_u64, 2 << 20, 4 << 20, 1 << 40, bytes] {
            for size in [1, 9, 1 << 20, 7 << 20, bytes] {
                let lines = format!(
                    "{head}\n1 lane lane=1 stream={most}\n\
                    2 alloc id=1 kind=buffer region=dynamic bytes=300000 align=1 lane=1\n\
                    3 refuse kind={kind} region=dynamic bytes={most} align={align} lane=none\n\
                    4 alloc id=7 kind={kind} region=dynamic bytes={size} align={align} lane=1\n\
                    5 decay now={most} -> done released=0\n\
                    6 compact region=dynamic goal=contiguous:{most} budget=none raw=yes -> \
                    finished moves={most} moved={most} skipped={most}\n\
                    7 trim keep={most} -> done released=0\n\
                    8 sleep stable=keep dynamic=discard -> slept released=0 offloaded=0 stayed=0\n\
                    9 wake -> done committed=0 restored=0\n\
                    {most} limit bytes={most}\n"
                );
                let log = Log::parse(&lines).expect("a recording");
                for driver in [host(), super::simulation(lowtide_cuda_sim::Order::Lazy)] {
                    let mut replay = log.start(driver, log.header().config()).expect("open");
                    while replay.step() {
                        replay.arena().validate();
                    }
                    let _ = replay.finish();
                }
            }
        }
    }
}

/// A recording with every kind of line that a small program makes.
fn sample(seed: u64) -> String {
    let (arena, clock, kept) = open(host(), config());
    let streams = (1..4).map(lowtide_gpu::driver::StreamHandle::new).collect();
    super::program::Program::new(arena, clock, seed, streams).run(60);
    kept.text()
}

#[test]
fn whatever_is_read_nothing_panics_and_what_is_accepted_is_replayed() {
    let (mut accepted, mut refused) = (0, 0);
    for seed in 0..8 {
        println!("seed {seed}");
        let text = sample(seed).into_bytes();
        let mut random = Random::new(seed);
        for _ in 0..400 {
            let mut bytes = text.clone();
            for _ in 0..1 + random.below(4) {
                mutate(&mut bytes, &mut random);
            }
            match Log::read(&bytes[..]) {
                Ok(log) => {
                    accepted += 1;
                    assert_eq!(
                        Log::parse(&log.to_string()).as_ref().map(Log::entries),
                        Ok(log.entries())
                    );
                    if accepted % 4 == 0 {
                        let config = lowtide_gpu::ArenaConfig {
                            // A limit and a size that this machine can do.
                            limit: lowtide_gpu::ByteSize::mib(64),
                            reserve: lowtide_gpu::ByteSize::gib(1),
                            ..log.header().config()
                        };
                        let mut replay = log.start(host(), config).expect("open");
                        while replay.step() {}
                        replay.arena().validate();
                        let _ = replay.finish();
                    }
                }
                Err(error) => {
                    refused += 1;
                    let lines = bytes.split(|&byte| byte == b'\n').count() as u64;
                    assert!((1..=lines + 1).contains(&error.line), "{error} of {lines} lines");
                }
            }
        }
    }
    println!("{accepted} accepted, {refused} refused");
    assert!(accepted > 100 && refused > 1_000);
}

/// Changes a byte, a digit, a line, or the end.
fn mutate(bytes: &mut Vec<u8>, random: &mut Random) {
    let at = random.index(bytes.len());
    let line = |bytes: &[u8], at: usize| {
        let from = bytes[..at].iter().rposition(|&b| b == b'\n').map_or(0, |end| end + 1);
        let to = bytes[at..].iter().position(|&b| b == b'\n').map_or(bytes.len(), |n| at + n + 1);
        from..to
    };
    match random.below(8) {
        0 => bytes[at] = u8::try_from(random.below(256)).expect("a byte"),
        1 => drop(bytes.remove(at)),
        2 => bytes.insert(at, b"0 9=:\n-%\xC3"[random.index(9)]),
        3..=4 => {
            let digit = bytes[at..].iter().position(u8::is_ascii_digit);
            if let Some(digit) = digit {
                bytes[at + digit] = b'0' + u8::try_from(random.below(10)).expect("a digit");
            }
        }
        5 => drop(bytes.drain(line(bytes, at))),
        6 => {
            let copy = bytes[line(bytes, at)].to_vec();
            let to = line(bytes, random.index(bytes.len())).start;
            drop(bytes.splice(to..to, copy));
        }
        _ => bytes.truncate(at.max(1)),
    }
}
