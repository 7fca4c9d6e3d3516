//! The program that checks a GPU, in this process over the fake driver: its logic, and that it
//! tells what went wrong.
//!
//! Sizes are tiny, and the figures mean nothing but where they count: what came back, what changed,
//! what failed.
//!
//! Invariant: a test ends with no fault on record and nothing left.

mod support;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::process::Command;

use clap::Parser as _;
use lowtide_fake_cuda::{Fake, Options};

use support::program::report::{Ended, GOALS, Report};
use support::program::{Args, check_apart};
use support::{SMALL, args, random, run, run_apart, run_seeing};

/// Cases of the contract, each of which runs on three rungs.
const CASES: usize = 27;

#[test]
fn all_parts_run_what_is_counted_is_right_and_everything_is_in_the_file() {
    let fake = Fake::start(SMALL);
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("figures.json");
    let (code, text, figures) = run(&[&format!("--json={}", path.display())]);
    assert_eq!(code, 0, "{text}");
    assert_eq!(text.matches("case held: ").count(), 3 * CASES);
    counted(&figures);
    assert!(figures["gpu.decay.returned_ratio"] >= 0.95);
    // A call of each kind at several sizes, and the costs made of them.
    for name in ["create", "map", "set_access", "unmap", "release"] {
        for mib in [2, 4, 8, 16, 32, 64] {
            let name = format!("gpu.calls.{name}_{mib}mib_us");
            assert!(figures.contains_key(&name), "{name}: {text}");
        }
    }
    for name in ["cuMemCreate", "cuMemSetAccess", "cuMemUnmap", "cuMemcpyHtoDAsync"] {
        assert!(figures.contains_key(&format!("gpu.costs.{name}.mib_ns")), "{name}: {text}");
    }
    assert!(text.contains(".with(Call::SetAccess, Cost { call_ns: "), "{text}");
    let unmeasured = |name: &&str| !figures.contains_key(*name);
    let unmeasured: Vec<_> = GOALS.iter().map(|(name, ..)| *name).filter(unmeasured).collect();
    // Between two of its samples the fake may have given all back.
    assert!(unmeasured.iter().all(|name| *name == "gpu.decay.p99_ratio"), "{unmeasured:?}");
    let found = std::fs::read_to_string(path).expect("a file");
    let found: serde_json::Value = serde_json::from_str(&found).expect("JSON");
    assert_eq!(found["device"]["device"], "lowtide simulated device 0");
    assert_eq!(found["figures"]["gpu.pair.driver_calls"]["value"], 0.0);
    assert_eq!(found["cases"].as_array().map(Vec::len), Some(3 * CASES));
    assert_eq!(found["goals"].as_array().map(Vec::len), Some(GOALS.len()));
    assert_eq!(found["goals"][1]["holds"], true);
    fake.validate(0);
    fake.assert_clean();
}

/// But for the decay: nothing that was freed ever ends where work is done when it is waited for.
#[test]
fn work_that_is_done_as_late_as_may_be_changes_no_count() {
    let fake = Fake::start(Options { order: 0, ..SMALL });
    let parts = "--only=contract,pair,lanes,cuarena,sleep-keep,sleep-discard,fragmentation,remap,\
                 compact,governor";
    let (code, text, figures) = run(&[parts]);
    assert_eq!(code, 0, "{text}");
    counted(&figures);
    fake.validate(0);
    fake.assert_clean();
}

fn counted(figures: &BTreeMap<String, f64>) {
    for (name, value) in [
        ("gpu.pair.driver_calls", 0.0),
        ("gpu.sleep_keep.freed_ratio", 1.0),
        ("gpu.sleep_keep.cycles", 3.0),
        ("gpu.sleep_keep.bytes_changed", 0.0),
        ("gpu.fragmentation.failures", 0.0),
        ("gpu.compact.bytes_changed", 0.0),
        ("gpu.governor.idle_held_bytes", 0.0),
        ("gpu.governor.busy_held_bytes", 64.0 * 1024.0),
        ("gpu.memory.context_overhead_bytes", 16.0 * 1024.0 * 1024.0),
    ] {
        assert_eq!(figures.get(name), Some(&value), "{name}");
    }
    assert!(figures["gpu.fragmentation.one_remap_bytes"] > 0.0);
}

#[test]
fn a_part_runs_in_a_process_of_its_own() {
    if support::child().is_some() {
        return;
    }
    let (code, text, found) = run_apart(&["--only=pair,compact"]);
    assert_eq!(code, 0, "{text}");
    assert!(found.has("gpu.pair.median_ns") && found.has("gpu.compact.bytes_changed"), "{text}");
    let ran: Vec<_> = found.parts.iter().collect();
    let all = ["compact", "device", "pair"];
    assert_eq!(ran, all.iter().zip([&Ended::Ran; 3]).collect::<Vec<_>>(), "{text}");
    assert!(text.contains("device: lowtide simulated device 0"), "{text}");
}

#[test]
fn parts_that_abort_hang_panic_or_lose_the_context_leave_all_results_until_then() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("figures.json");
    let (code, text, found) = run_apart(&[
        "--only=contract,pair,lanes,decay,remap,compact",
        "--plant=abort=pair,hang=lanes,panic=decay,lose=remap",
        "--deadline=lanes=10s",
        &format!("--json={}", path.display()),
    ]);
    assert_eq!(code, 2, "{text}");
    assert_eq!(found.parts["contract"], Ended::Ran, "{text}");
    assert!(matches!(&found.parts["pair"], Ended::Died(how) if how.contains("signal")), "{text}");
    assert!(matches!(found.parts["lanes"], Ended::Killed(_)), "{text}");
    assert_eq!(found.parts["decay"], Ended::Failed, "{text}");
    assert_eq!(found.parts["remap"], Ended::Failed, "{text}");
    assert!(text.contains("part FAILED: remap: "), "{text}");
    assert_eq!(found.parts["compact"], Ended::Ran, "{text}");
    // The first figure of each part came before its end.
    for name in [
        "gpu.pair.median_ns",
        "gpu.lanes.one_thread_pairs_per_s",
        "gpu.decay.burst_bytes",
        "gpu.compact.copy_rate_ratio",
    ] {
        assert!(found.has(name), "{name}: {text}");
    }
    assert!(text.contains("part FAILED: decay: panicked: a planted panic"), "{text}");
    let saved = std::fs::read_to_string(path).expect("a file");
    let saved: serde_json::Value = serde_json::from_str(&saved).expect("JSON");
    assert_eq!(saved["parts"].as_array().map(Vec::len), Some(7), "{saved}");
    assert_eq!(saved["parts"][3]["ended"], "killed");
    assert_eq!(saved["cases"].as_array().map(Vec::len), Some(3 * CASES));
}

#[test]
fn the_results_file_is_replaced_after_each_part() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("figures.json");
    let parts_seen = RefCell::new(Vec::new());
    let start = |_| {
        let saved = std::fs::read_to_string(&path).unwrap_or_default();
        let saved: serde_json::Value = serde_json::from_str(&saved).unwrap_or_default();
        parts_seen.borrow_mut().push(saved["parts"].as_array().map(Vec::len));
        let mut command = Command::new("sh");
        command.args(["-c", r#"echo '{"record":"ended"}'"#]);
        Ok(command)
    };
    let (mut out, json) = (Vec::new(), format!("--json={}", path.display()));
    let code =
        check_apart(&args(&["--only=pair,lanes", &json]), &mut Report::new(&mut out), &start);
    assert_eq!(code, 0, "{}", String::from_utf8_lossy(&out));
    assert_eq!(*parts_seen.borrow(), [None, Some(1), Some(2)]);
}

#[test]
fn without_a_device_nothing_runs_nothing_fails_and_the_file_says_why() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("figures.json");
    let (code, text, found) = run_seeing(Some(""), &[&format!("--json={}", path.display())]);
    assert_eq!(code, 0, "{text}");
    assert!(text.contains("skipped: no device"), "{text}");
    assert!(!text.contains("goal "), "{text}");
    assert_eq!(found.parts.into_keys().collect::<Vec<_>>(), ["device"], "{text}");
    let saved = std::fs::read_to_string(path).expect("a file");
    let saved: serde_json::Value = serde_json::from_str(&saved).expect("JSON");
    assert!(saved["skipped"].as_str().is_some_and(|why| why.starts_with("no device")), "{saved}");
    assert!(saved["version"].is_string(), "{saved}");
}

#[test]
fn a_results_file_that_cannot_be_written_is_named_with_the_part() {
    let start = |_| {
        let mut command = Command::new("sh");
        command.args(["-c", r#"echo '{"record":"ended"}'"#]);
        Ok(command)
    };
    let mut out = Vec::new();
    let arguments = args(&["--only=pair", "--json=/nowhere/figures.json"]);
    let code = check_apart(&arguments, &mut Report::new(&mut out), &start);
    let text = String::from_utf8(out).expect("text");
    assert_eq!(code, 2, "{text}");
    let named = "part FAILED: results file: cannot write /nowhere/figures.json after part device: ";
    assert!(text.contains(named), "{text}");
}

#[test]
fn the_part_that_breaks_the_context_runs_only_on_request() {
    let (code, text, found) = run_apart(&["--only=provoke"]);
    assert_eq!(code, 0, "{text}");
    assert!(text.contains("unmap took "), "{text}");
    assert_eq!(found.parts.len(), 2, "{text}");
    assert!(!args(&[]).wants("provoke"));
}

#[test]
fn parts_beyond_the_budget_are_skipped_and_listed() {
    let arguments = ["--only=pair,compact", "--plant=hang=pair", "--budget=10s"];
    let (code, text, found) = run_apart(&arguments);
    assert_eq!(code, 2, "{text}");
    assert!(matches!(found.parts["pair"], Ended::Killed(_)), "{text}");
    let skipped = Ended::Skipped("no time left in the budget");
    assert_eq!(found.parts["compact"], skipped, "{text}");
}

#[test]
fn the_processes_are_listed_next_to_the_memory_that_cuda_reports() {
    let fake = Fake::start(SMALL);
    fake.nvml();
    fake.process(0, 0, 1, 48 << 20);
    fake.process(0, 0, 5_000_000, u64::MAX);
    let (code, text, figures) = run(&["--only=processes"]);
    assert_eq!(code, 0, "{text}");
    for (when, used) in [("without an arena", "16.0"), ("with 64.0 MiB committed", "80.0")] {
        let both = format!("NVML {used} MiB in use, cuMemGetInfo {used} MiB in use of 1.0 GiB");
        assert!(text.contains(&format!("{when}: {both}")), "{text}");
    }
    assert!(text.contains("  process 1: ") && text.contains(", 48.0 MiB, this process"), "{text}");
    assert!(text.contains("  process 5000000: ") && text.contains(", unknown, "), "{text}");
    for name in ["open_us", "list_us", "resident_bytes"] {
        assert!(figures.contains_key(&format!("gpu.nvml.{name}")), "{name}: {text}");
    }
    // A part that NVML refuses fails alone.
    fake.fail(c"nvmlDeviceGetComputeRunningProcesses_v3", 1, 3);
    let (code, text, _) = run(&["--only=processes"]);
    assert_eq!(code, 2, "{text}");
    assert!(
        text.contains("part FAILED: processes: ") && text.contains("does not report it"),
        "{text}"
    );
    fake.fail(c"nvmlInit_v2", 1, 9);
    let (code, text, _) = run(&["--only=processes"]);
    assert_eq!(code, 0, "{text}");
    assert!(text.contains("processes not listed: nvmlInit failed: "), "{text}");
    fake.assert_clean();
}

#[test]
fn the_torture_finds_a_missing_wait_between_lanes_and_names_the_block() {
    for seed in 1..=5 {
        let fake = Fake::start(random(seed));
        fake.drop_waits(10);
        let run_seed = format!("--seed={seed}");
        let arguments =
            ["--only=torture", "--torture-threads=1", "--torture-steps=20000", &run_seed];
        let (code, text, figures) = run(&arguments);
        assert_eq!(code, 2, "seed {seed}: {text}");
        assert!(figures["gpu.torture.wrong_words"] > 0.0, "seed {seed}: {text}");
        assert!(fake.dropped_waits() > 0, "seed {seed}");
        let named = format!(" of the run with seed {seed}");
        assert!(text.contains("part FAILED: torture: ") && text.contains(&named), "{text}");
    }
}

#[test]
fn the_torture_finds_nothing_without_a_fault_while_the_arena_sleeps_and_releases() {
    for (seed, threads) in [(1, 1), (2, 2), (3, 8)] {
        let fake = Fake::start(random(seed));
        let (run_seed, threads) =
            (format!("--seed={seed}"), format!("--torture-threads={threads}"));
        let (code, text, figures) = run(&["--only=torture", &run_seed, &threads]);
        assert_eq!(code, 0, "seed {seed}: {text}");
        assert_eq!(figures["gpu.torture.wrong_words"], 0.0, "seed {seed}: {text}");
        for name in ["blocks", "sleeps", "released_bytes", "launch_p99_us"] {
            assert!(figures[&format!("gpu.torture.{name}")] > 0.0, "seed {seed}, {name}: {text}");
        }
        fake.validate(0);
        fake.assert_clean();
    }
}

#[test]
fn parts_are_chosen() {
    let fake = Fake::start(SMALL);
    let (code, text, figures) = run(&["--only=pair"]);
    assert_eq!(code, 0, "{text}");
    assert!(figures.contains_key("gpu.pair.median_ns"));
    assert!(!figures.contains_key("gpu.compact.copy_rate_ratio"));
    fake.assert_clean();
}

#[test]
fn a_part_that_fails_says_why_and_the_others_run() {
    let fake = Fake::start(SMALL);
    let (code, text, figures) = run(&["--only=sleep-keep,pair", "--block=600MiB"]);
    assert_eq!(code, 2, "{text}");
    assert!(text.contains("part FAILED: sleep-keep: "), "{text}");
    assert!(figures.contains_key("gpu.pair.median_ns"));
    fake.assert_clean();
}

#[test]
fn a_case_that_does_not_hold_is_named() {
    let fake = Fake::start(SMALL);
    // The copies of the second case's contents fail, and nothing else does.
    fake.fail(c"cuMemcpyHtoDAsync_v2", 12, 999);
    let (code, text, _) = run(&["--only=contract"]);
    assert_eq!(code, 1, "{text}");
    assert_eq!(text.matches("case FAILED: ").count(), 1, "{text}");
    assert!(text.contains(&format!("failed cases: 1 of {}", 3 * CASES)), "{text}");
}

#[test]
fn rungs_that_a_device_does_not_offer_are_said_and_passed_over() {
    let fake = Fake::start(Options { flags: Options::NO_POOLS, ..SMALL });
    let (code, text, _) = run(&["--only=contract"]);
    assert_eq!(code, 0, "{text}");
    assert_eq!(text.matches("case held: ").count(), 2 * CASES);
    assert!(
        text.contains("contract not run: cannot allocate on CUDA device 0: cuda_pool"),
        "{text}"
    );
    fake.assert_clean();
}

#[test]
fn a_device_that_is_not_there_is_a_part_that_could_not_run() {
    let fake = Fake::start(SMALL);
    let (code, text, _) = run(&["--device=7"]);
    assert_eq!(code, 2, "{text}");
    assert!(text.contains("part FAILED: device: "), "{text}");
    fake.assert_clean();
}

#[test]
fn numbers_that_make_no_sense_are_refused() {
    for wrong in ["--cycles=0", "--threads=0", "--threads=many", "--block=big", "--only=all"]
        .into_iter()
        .chain(["--deadline=soon", "--deadline=none=1s", "--budget=much", "--plant=abort"])
    {
        assert!(Args::try_parse_from(["gpu_check", wrong]).is_err(), "{wrong}");
    }
}
