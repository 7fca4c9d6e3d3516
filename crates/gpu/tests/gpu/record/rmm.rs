//! The log of RMM, read as a recording.

use lowtide_gpu::record::{Log, LogError, Operation};

use super::{host, simulation};
use lowtide_cuda_sim::Order;

const HEAD: &str = "Thread,Time,Action,Pointer,Size,Stream\n";

fn read(lines: &str) -> Result<Log, LogError> {
    Log::from_rmm(format!("{HEAD}{lines}").as_bytes())
}

#[test]
fn lines_become_operations_and_streams_lanes() {
    let log = read(
        "\
7,23:59:59.900000,allocate,0x7f22c0000000,1000,0x0
7,23:59:59.950000,allocate,0x7f22c0001000,5000000,0x55d1
8,23:59:59.940000,allocate failure,(nil),99999999999,0x0
7,00:00:00.000001,free,0x7f22c0000000,1000,0x55d1
7,00:00:01:5,FREE,0x7f22c0001000,5000000,0x55d1
7,00:00:01.6,allocate,(nil),0,0x0
7,00:00:01.6,free,(nil),0,0x0
7,00:00:02.0,ALLOCATE_FAILURE,(nil),64,0x0",
    )
    .expect("a log of RMM");
    let lines: Vec<_> = log.entries().iter().map(ToString::to_string).collect();
    assert_eq!(
        lines,
        [
            "0 lane lane=1 stream=1",
            "0 alloc id=1 kind=buffer region=dynamic bytes=1000 align=256 lane=1",
            "50000000 lane lane=2 stream=2",
            "50000000 alloc id=2 kind=buffer region=dynamic bytes=5000000 align=256 lane=2",
            "50000000 refuse kind=buffer region=dynamic bytes=99999999999 align=256 lane=1",
            "100001000 use id=1 lane=2",
            "100001000 free id=1 after=lanes",
            "1600000000 free id=2 after=lanes",
            "2100000000 refuse kind=buffer region=dynamic bytes=64 align=256 lane=1",
        ]
    );
    assert_eq!(log.entries()[6].line, 5);
    let again = Log::parse(&log.to_string()).expect("it is a recording");
    assert_eq!(again.to_string(), log.to_string());
    let replayed = log.replay(host(), log.header().config()).expect("open");
    assert_eq!((replayed.first_difference, replayed.matches()), (None, None), "it says nothing");
    assert_eq!((replayed.skipped, replayed.snapshot.live.get()), (0, 0));
    let sim = simulation(Order::Lazy);
    let on_streams = log.replay(sim.clone(), log.header().config()).expect("open");
    assert_eq!(on_streams.skipped, 0);
    sim.assert_no_faults();
}

/// The bug: a line of the evening that came after the first of the new day was taken for one of
/// the next evening, and all lines after it for a day later still.
#[test]
fn a_late_line_at_midnight_made_a_day_of_it() {
    let log = read(
        "\
1,23:59:59.9,allocate,0x10,8,0x0
1,00:00:00.1,allocate,0x20,8,0x0
2,23:59:59.99,allocate,0x30,8,0x0
1,00:00:00.2,free,0x20,8,0x0
",
    )
    .expect("a log of RMM");
    let times: Vec<_> = log.entries().iter().map(|entry| entry.at.as_millis()).collect();
    assert_eq!(times, [0, 0, 200, 200, 300]);
    let quiet = read("1,00:00:00.1,allocate,0x10,8,0x0\n1,23:58:00.1,free,0x10,8,0x0\n");
    let quiet = quiet.expect("a log of RMM");
    assert_eq!(quiet.entries()[2].at.as_secs(), 24 * 3600 - 120, "a day without a line");
}

#[test]
fn a_wrong_line_is_refused_with_its_number() {
    let one = "1,00:00:00.1,allocate,0x10,8,0x0\n";
    let two = "1,00:00:00.2,allocate,0x20,8,0x0\n";
    let free = "1,00:00:00.3,free,0x10,8,0x0\n";
    for (lines, line, words) in [
        ("hello\n".to_owned(), 2, "expected six fields, found \"hello\""),
        (
            one.replace("0x0", "0x0,1"),
            2,
            "expected six fields, found \"1,00:00:00.1,allocate,0x10,8,0x0,1\"",
        ),
        (
            one.replace("00:00:00", "25:00:00"),
            2,
            "expected a time such as 23:59:59.999999, found \"25:00:00.1\"",
        ),
        (
            one.replace("allocate", "grab"),
            2,
            "expected allocate, free or allocate failure, found \"grab\"",
        ),
        (
            one.replace(",8,", ",99999999999999999999,"),
            2,
            "Size: expected a number of at most 4611686018427387904, \
             found \"99999999999999999999\"",
        ),
        (
            one.replace("0x10", "ten"),
            2,
            "Pointer: expected a number of at most 18446744073709551615, found \"ten\"",
        ),
        (
            one.replace(",0x0", ",-"),
            2,
            "Stream: expected a number of at most 18446744073709551615, found \"-\"",
        ),
        (
            format!("{one}{two}{one}"),
            4,
            "expected a new address, found 0x10, which was allocated in line 2",
        ),
        (format!("{one}{free}{free}"), 4, "expected a live address, found 0x10"),
        (
            format!("{one}{}", free.replace(",8,", ",9,")),
            3,
            "expected the requested size of 8 for 0x10, found 9",
        ),
        (format!("{one}\n"), 3, "expected six fields, found nothing"),
    ] {
        let error = read(&lines).expect_err(&lines);
        assert_eq!(error.to_string(), format!("line {line}: {words}"), "{lines}");
    }
    let error = Log::from_rmm(&b"lowtide-recording version=1\n"[..]).expect_err("another format");
    assert_eq!(error.line, 1);
    let refused = |entry: &&lowtide_gpu::record::Entry| {
        matches!(entry.operation, Operation::Refuse { why: None, .. })
    };
    let log = read("1,00:00:00.1,allocate_failure,0,7,0\n").expect("no pointer is read");
    assert_eq!(log.entries().iter().filter(refused).count(), 1);
}
