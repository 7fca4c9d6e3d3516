//! The examples that a reader starts with, each run as a program to its end.
//!
//! An example checks what it shows and fails where that does not hold, so its exit status is what
//! is tested here, and that it says what a person would look for. Cargo is asked to build and run
//! each: `cargo test` has built them already, and a change to one is never missed.
//!
//! Invariant: an example of this list ends by itself with 0, and is shorter than 120 lines.
#![cfg(target_os = "linux")]

use std::fs;
use std::path::Path;
use std::process::Command;

const LINES_MAX: usize = 120;

/// Each example by its file, and what of its output a person would look for.
const EXAMPLES: &[(&str, &[&str])] = &[
    ("examples/global_allocator.rs", &["64 MiB in blocks of 1 KiB", "the purge released"]),
    (
        "examples/embedded_in_axum.rs",
        &[
            "THE TIDE GOES OUT",
            "needs more memory than can ever be free",
            "shut down: nothing outstanding",
        ],
    ),
    (
        "examples/tonic/embedded_in_tonic.rs",
        &["1 MiB served", "ResourceExhausted", "are held elsewhere"],
    ),
    (
        "crates/gpu/examples/device_buffers.rs",
        &["refused: ", "sleep released 16.0 MiB", "awake, refilled"],
    ),
    ("examples/managed_model.rs", &["refused: ", "loads 2", "shut down: nothing outstanding"]),
    (
        "examples/low_memory.rs",
        &["served", "rejected", "afterwards: ", "enable_cpu_mem_arena = false"],
    ),
];

fn read(file: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(file);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn name_of(file: &str) -> &str {
    file.rsplit('/').next().unwrap_or(file).trim_end_matches(".rs")
}

fn run(name: &str, arguments: &[&str]) -> (Option<i32>, String) {
    // One that does not end fails with status 124.
    let output = Command::new("timeout")
        .args(["600", env!("CARGO")])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .args(["run", "--quiet", "--locked", "--example", name, "--"])
        .args(arguments)
        .env_remove("LOWTIDE_PROFILE") // whatever this process was started with
        .output()
        .expect("coreutils, and Cargo, which runs this test");
    let [text, errors] = [&output.stdout, &output.stderr].map(|of| String::from_utf8_lossy(of));
    (output.status.code(), format!("{text}{errors}"))
}

#[test]
fn each_example_is_short_and_says_what_it_is() {
    for (file, _) in EXAMPLES {
        let (name, text) = (name_of(file), read(file));
        let lines = text.lines().count();
        assert!(lines < LINES_MAX, "{name} has {lines} lines");
        let run = format!("//! `cargo run --example {name}`");
        assert!(text.contains(&run), "{name} does not say how it is run");
    }
}

#[test]
fn each_example_ends_by_itself_and_shows_what_it_says() {
    for (file, expected) in EXAMPLES {
        let name = name_of(file);
        let (code, text) = run(name, &[]);
        assert_eq!(code, Some(0), "{name}:\n{text}");
        for part in *expected {
            assert!(text.contains(part), "{name} does not say {part:?}:\n{text}");
        }
        println!("{name}\n{text}");
    }
}

#[test]
fn a_file_is_planned_beside_the_plans_of_others() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = |name: &str| folder.path().join(name).display().to_string();
    let wrong = file("wrong.csv");
    let data = "crates/planner/tests/data/planning/input.12.csv";
    let (code, text) = run("plan", &[data, "--budget", "1s"]);
    assert_eq!(code, Some(0), "{text}");
    for part in ["live at once", "ggml", "tflite", "proved: no plan needs less"] {
        assert!(text.contains(part), "{part:?} is not in:\n{text}");
    }
    let (code, text) = run("plan", &[data, "--segment-bytes", "4", "--capacity", "1"]);
    assert_eq!(code, Some(1), "it needs more than that:\n{text}");
    assert!(text.contains("segments"), "{text}");
    fs::write(&wrong, "id,lower,upper,size\na,0,1,4\nb,5,1,4\n").expect("a file");
    let (code, text) = run("plan", &[&wrong]);
    assert_eq!(code, Some(2), "{text}");
    assert!(text.contains("wrong.csv: line 3: b: live from 5 until 1"), "{text}");
    let (code, text) = run("plan", &[&file("none.csv")]);
    assert_eq!((code, text.contains("none.csv: No such file")), (Some(2), true), "{text}");
}

#[test]
fn getting_started_names_each_example() {
    const PAGE: &str = "docs/GETTING_STARTED.md";
    let page = read(PAGE);
    for (file, _) in EXAMPLES {
        assert!(page.contains(&format!("(../{file})")), "{PAGE} does not name {file}");
    }
}
