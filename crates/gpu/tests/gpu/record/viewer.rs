//! The picture that `examples/memory_viz.py` makes of a recording, as PyTorch's viewers read it.

use std::collections::BTreeMap;
use std::process::Command;
use std::time::Duration;

use lowtide_gpu::clock::Clock as _;
use lowtide_gpu::{ArenaConfig, ByteSize, Region};
use serde_json::Value;

use super::{Books, Kept, config, host, number, open};

const PROGRAM: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/memory_viz.py");

/// The picture of a recording, read back by Python; `None` without Python.
#[expect(clippy::print_stdout, reason = "a test that was skipped says so")]
fn pictured(kept: &Kept) -> Option<Value> {
    let folder = tempfile::tempdir().expect("a folder");
    let (recording, picture) = (folder.path().join("a.jsonl"), folder.path().join("a.pickle"));
    std::fs::write(&recording, kept.text()).expect("written");
    let run = |program: &mut Command| match program.output() {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            println!("skipped: no python3");
            None
        }
        output => {
            let output = output.expect("started");
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            Some(output.stdout)
        }
    };
    run(Command::new("python3").arg(PROGRAM).args([&recording, &picture]))?;
    let read = "import json, pickle, sys; print(json.dumps(pickle.load(open(sys.argv[1], 'rb'))))";
    let json = run(Command::new("python3").args(["-c", read]).arg(&picture))?;
    Some(serde_json::from_slice(&json).expect("JSON"))
}

fn list(value: &Value) -> &[Value] {
    value.as_array().unwrap_or_else(|| panic!("{value} is no list"))
}

fn text<'a>(value: &'a Value, name: &str) -> &'a str {
    value[name].as_str().unwrap_or_else(|| panic!("{name} of {value}"))
}

/// As the viewer does: starts from the final state, and undoes every event.
#[test]
fn the_events_of_a_picture_undone_from_its_end_leave_nothing() {
    let (arena, clock, recorder, kept) =
        open(host(), ArenaConfig { limit: ByteSize::mib(64), ..config() });
    let mut buffers = Vec::new();
    for nth in 0..500_usize {
        clock.advance(Duration::from_millis(100));
        buffers.push(arena.alloc::<u8>((nth * 7919) % 300_000 + 1, Region::Dynamic).expect("room"));
        if nth % 5 > 1 {
            let mut other = buffers.remove(nth * 31 % buffers.len());
            other.resize(nth % 1000).expect("smaller, or there is room");
        }
        arena.decay(clock.now()).expect("decay");
    }
    arena.alloc::<u8>(1 << 30, Region::Dynamic).expect_err("no room");
    recorder.flush().expect("written");
    let books = Books::of(&kept.events());
    let Some(snapshot) = pictured(&kept) else { return };
    let (mut blocks, mut backed) = (BTreeMap::new(), 0);
    for segment in list(&snapshot["segments"]) {
        backed += number(segment, "total_size");
        let mut at = number(segment, "address");
        for block in list(&segment["blocks"]) {
            assert_eq!(number(block, "address"), at, "blocks tile their segment");
            at += number(block, "size");
            if text(block, "state") == "active_allocated" {
                blocks.insert(number(block, "address"), number(block, "size"));
            }
        }
        assert_eq!(at, number(segment, "address") + number(segment, "total_size"));
        assert_eq!(number(segment, "device"), 0);
    }
    assert_eq!((&blocks, backed), (&books.live, arena.snapshot().committed.get()));
    let traces = list(&snapshot["device_traces"]);
    let mut short = 0;
    for event in list(&traces[0]).iter().rev() {
        let (address, size) = (number(event, "addr"), number(event, "size"));
        match text(event, "action") {
            "alloc" => assert_eq!(blocks.remove(&address), Some(size), "{address:#x}"),
            "free_requested" => assert!(blocks.contains_key(&address)),
            "free_completed" => assert_eq!(blocks.insert(address, size), None),
            "segment_map" => backed -= size,
            "segment_unmap" => backed += size,
            "oom" => short += number(event, "device_free"),
            other => panic!("{other}"),
        }
    }
    assert!(blocks.is_empty() && backed == 0 && short > 0, "{backed} {short} {blocks:?}");
}
