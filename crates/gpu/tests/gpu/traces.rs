//! The reader of traces that the benches replay.

#[path = "../../../../benches/replay/trace.rs"]
#[allow(dead_code, unreachable_pub, reason = "the bench uses more of it")]
mod trace;

use std::io::Write as _;
use std::path::Path;

use trace::Trace;

#[test]
fn a_file_that_is_no_trace_is_refused_with_its_line_and_what_was_expected() {
    let alloc = r#"{"event":"alloc","address":1,"bytes":64}"#;
    let free = r#"{"event":"free","address":1}"#;
    for (text, line, what) in [
        (format!("{alloc}\nx 1\n"), 2, "expected value"),
        (r#"{"event":"alloc","address":1}"#.to_owned(), 1, "missing field `bytes`"),
        (alloc.replace("64", "\"many\""), 1, "expected u64"),
        (alloc.replace("64", "-1"), 1, "expected u64"),
        (alloc.replace("64", "0"), 1, "expected from 1 to"),
        (alloc.replace("64", "18446744073709551615"), 1, "expected from 1 to"),
        (format!("{alloc}\n{free}\n{free}\n"), 3, "expected the address of a live block, found 1"),
        (format!("{alloc}\n{alloc}\n"), 2, "expected a free address, found 1"),
        (String::new(), 0, "expected the event `alloc`"),
        (r#"{"event":"mark","name":"load"}"#.to_owned(), 1, "expected the event `alloc`"),
    ] {
        let mut file = tempfile::NamedTempFile::new().expect("a file");
        file.write_all(text.as_bytes()).expect("written");
        let error = Trace::open(file.path()).expect_err(&text).to_string();
        assert!(error.contains(&format!(": line {line}: ")), "{text:?}: {error}");
        assert!(error.contains(what), "{text:?}: {error}");
    }
    let mut file = tempfile::NamedTempFile::new().expect("a file");
    file.write_all(&[0x1f, 0x8b, 8, 0, 1, 2, 3]).expect("written");
    assert!(Trace::open(file.path()).is_err(), "no gzip after all");
    assert!(Trace::open(Path::new("/no/such/file")).is_err());
}

#[test]
fn a_trace_is_read_plain_and_compressed_alike() {
    let text = r#"{"time_ns":0,"event":"open","arena":"a"}
{"event":"mark","name":"load"}
{"time_ns":1,"event":"alloc","address":7,"bytes":100,"size":256}
{"event":"alloc","address":3,"bytes":28}
{"event":"mark","name":"request0"}
{"event":"free","address":7}
{"event":"alloc","address":7,"bytes":1}
{"event":"move","address":3,"to":9,"size":256}
{"event":"resize","address":9,"bytes":20,"size":256}
{"event":"free","address":9}
"#;
    let folder = tempfile::tempdir().expect("a folder");
    let (plain, packed) = (folder.path().join("a.one.jsonl"), folder.path().join("two b.jsonl.gz"));
    std::fs::write(&plain, text).expect("written");
    let file = std::fs::File::create(&packed).expect("a file");
    let mut gzip = flate2::write::GzEncoder::new(file, flate2::Compression::best());
    gzip.write_all(text.as_bytes()).expect("written");
    gzip.finish().expect("written");
    let (plain, packed) = (Trace::open(&plain), Trace::open(&packed));
    let (plain, packed) = (plain.expect("a trace"), packed.expect("a trace"));
    assert_eq!((plain.name.as_str(), packed.name.as_str()), ("a.one", "two-b"));
    assert_eq!(plain.events, packed.events);
    assert_eq!((plain.events.len(), plain.blocks), (8, 4), "freed at the end, and resized");
    assert_eq!(plain.marks, [0, 2]);
    assert_eq!(plain.live_peak, 128);
}
