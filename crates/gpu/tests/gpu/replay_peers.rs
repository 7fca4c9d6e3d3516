//! The peers of the benches, against what was measured with the real ones, and their rules.
//!
//! The figures to meet come from cuArena (37fe0e1, 2026-06) and ONNX Runtime's arena (2026-08),
//! compiled from their sources and run over the same traces. It also holds the reader of traces to
//! its word about files that are none.

#[path = "../../../../benches/peers/mod.rs"]
#[allow(dead_code, unreachable_pub, reason = "the benches use more of them")]
mod peers;
#[path = "../../../../benches/replay/rivals.rs"]
mod rivals;
#[path = "../../../../benches/replay/trace.rs"]
#[allow(dead_code, unreachable_pub, reason = "the bench uses more of it")]
mod trace;

use std::io::Write as _;
use std::path::Path;

use peers::{Bfc, CuArena, Extend, Peer};
use trace::Trace;

const MIB: u64 = 1 << 20;
const NO_LIMIT: u64 = 1 << 62;

/// The bytes that the peers themselves were measured to take for some of the project's traces, for
/// each byte that is live at most, in the order of [`rivals::needs`]; and what the arena that
/// doubles kept after a shrink.
const MEASURED: [(&str, [f64; 4], u64); 2] = [
    ("bert-embed", [1.132, 1.167, 1.651, 1.421], 128 * MIB),
    ("gpt2-train", [1.123, 1.211, 2.146, 1.207], 32 * MIB),
];

fn own(name: &str) -> Trace {
    let path = format!("{}/../../benches/traces/{name}.jsonl.gz", env!("CARGO_MANIFEST_DIR"));
    Trace::open(Path::new(&path)).expect("a trace of ours")
}

#[test]
#[expect(clippy::cast_precision_loss, reason = "ratios of sizes far below 2^52")]
fn the_peers_need_what_the_real_ones_were_measured_to_need() {
    for (name, measured, kept) in MEASURED {
        let trace = own(name);
        let needs = rivals::needs(&trace);
        for (need, measured) in needs.iter().zip(measured) {
            let taken = need.taken_peak.expect("the trace fits") as f64;
            let ratio = taken / trace.live_peak as f64;
            println!("{name} {}: {ratio:.4}, measured {measured}, {:?}", need.peer, need.kept);
            let off = (ratio / measured - 1.0).abs();
            assert!(off <= 0.02, "{name} on {}: {ratio:.4}, not {measured}", need.peer);
        }
        assert_eq!((needs[2].kept, needs[3].kept), (Some(kept), Some(0)), "{name}");
    }
}

#[test]
fn the_model_of_cuarena_cannot_reuse_a_pool_that_is_empty_again() {
    let mut pool = CuArena::new(64 * MIB);
    let block = pool.alloc(40 * MIB).expect("room");
    pool.free(block);
    assert_eq!(pool.live(), 0);
    assert_eq!(pool.alloc(50 * MIB), None, "freed blocks never join the tail");
    assert_eq!(pool.alloc(40 * MIB), Some(block));
}

#[test]
fn the_model_of_cuarena_takes_the_lowest_block_of_the_own_bin_that_holds_the_request() {
    let mut pool = CuArena::new(64 * MIB);
    let sizes = [300, 1, 520, 1, 500, 1, 1100, 1];
    let blocks: Vec<_> = sizes.iter().map(|kib| pool.alloc(kib << 10).expect("room")).collect();
    for free in [0, 2, 4, 6] {
        pool.free(blocks[free]);
    }
    assert_eq!(pool.alloc(290 << 10), Some(blocks[0]), "300 KiB is of its own bin");
    assert_eq!(pool.alloc(400 << 10), Some(blocks[4]), "500 KiB too, before the lower 520 KiB");
    assert_eq!(pool.alloc(260 << 10), Some(blocks[2]), "then the next bin");
}

#[test]
fn the_model_of_bfc_doubles_its_segments_and_whatever_is_asked_for() {
    let mut arena = Bfc::new(Extend::NextPowerOfTwo, NO_LIMIT);
    let large = arena.alloc(1126 * MIB).expect("no limit");
    assert_eq!(arena.taken(), 2048 * MIB, "1.1 GiB takes 2 GiB");
    arena.free(large);
    arena.shrink();
    assert_eq!(arena.taken(), 2048 * MIB, "the first segment stays");
    let mut arena = Bfc::new(Extend::SameAsRequested, NO_LIMIT);
    let large = arena.alloc(1126 * MIB).expect("no limit");
    assert_eq!(arena.taken(), 1126 * MIB);
    arena.free(large);
    arena.shrink();
    assert_eq!(arena.taken(), 0);
}

#[test]
fn the_model_of_bfc_gives_back_whole_segments_only() {
    let mut arena = Bfc::new(Extend::NextPowerOfTwo, NO_LIMIT);
    let blocks: Vec<_> = (0..200).map(|_| arena.alloc(10 * MIB).expect("no limit")).collect();
    for (nth, block) in blocks.into_iter().enumerate() {
        if nth % 50 != 49 {
            arena.free(block);
        }
    }
    let taken = arena.taken();
    arena.shrink();
    assert!(arena.live() == 40 * MIB && arena.taken() > 20 * arena.live(), "{arena:?}");
    assert!(arena.taken() < taken);
}

#[test]
fn the_model_of_bfc_splits_at_twice_the_request_and_at_128_mib_left_over() {
    let mut arena = Bfc::new(Extend::SameAsRequested, NO_LIMIT);
    for (whole, request, given) in
        [(200, 101, 200), (200, 100, 100), (400, 273, 400), (400, 272, 272)]
    {
        let block = arena.alloc(whole * MIB).expect("no limit");
        arena.free(block);
        let block = arena.alloc(request * MIB).expect("no limit");
        assert_eq!(arena.live(), given * MIB, "{request} MiB of {whole} MiB");
        arena.free(block);
        arena.shrink();
    }
}

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
    assert_eq!((plain.live_peak, plain.blocks_peak), (128, 2));
}
