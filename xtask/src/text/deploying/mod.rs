//! What is written for operators agrees with the code: variables, their defaults, the image, and
//! the files for Compose, Kubernetes and systemd (`files`).
//!
//! It reads text; that the image builds and runs is for `.ci/docker` and `.ci/image` to try.
//!
//! Invariant: a default, a name or a limit that stands in two places is the same in both.
#![cfg(feature = "memory")]

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::time::Duration;

use lowtide::config::env::VARIABLES;
use lowtide::config::{Config, Profile, Settings};
use lowtide::decay::DecayTime;
use lowtide::host::HeapProfile;

#[path = "deploying/files.rs"]
mod files;

const GUIDE: &str = "docs/DEPLOYING.md";

fn text(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(name);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// The cells of the table row that begins with this variable.
fn row(name: &str) -> Option<Vec<String>> {
    let guide = text(GUIDE);
    let found = guide.lines().find(|line| line.starts_with(&format!("| `{name}` |")))?;
    Some(found.trim_matches('|').split('|').map(|cell| cell.trim().to_owned()).collect())
}

/// Every name in a text that starts so.
fn names(text: &str, start: &str) -> BTreeSet<String> {
    let is_part = |c: char| c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_';
    text.split(|c: char| !is_part(c))
        .filter(|word| word.starts_with(start) && word.len() > start.len())
        .map(str::to_owned)
        .collect()
}

#[test]
fn every_variable_of_the_crate_has_its_row() {
    for variable in VARIABLES {
        assert!(row(variable.name).is_some(), "{} has no row in {GUIDE}", variable.name);
    }
}

#[test]
fn the_defaults_in_the_rows_are_those_of_the_profiles() {
    for (at, profile) in Profile::ALL.into_iter().enumerate() {
        let code = Settings { profile: Some(profile), ..Settings::default() };
        let config = Config::resolve(&code, &Settings::default()).expect("a profile is valid");
        let decay = |time| match time {
            DecayTime::Within(time) => short(time),
            other => panic!("{other:?}: no profile has that"),
        };
        for (name, default) in [
            ("LOWTIDE_CEILING", format!("{:.2}", config.ceiling.value)),
            ("LOWTIDE_CORRECTION_FACTOR", config.correction_factor.value.to_string()),
            ("LOWTIDE_DEVICE", config.device.value.to_string()),
            ("LOWTIDE_DEVICE_WATERMARK", format!("{:.2}", config.device_watermark.value)),
            ("LOWTIDE_DEVICE_BACKEND", config.device_backend.value.to_string()),
            ("LOWTIDE_DEVICE_DECAY", decay(config.device_decay.value)),
            ("LOWTIDE_DEVICE_SLEEP_AFTER", or_never(config.device_sleep_after.value)),
            ("LOWTIDE_DEVICE_MIN_AWAKE", short(config.device_min_awake.value)),
            ("LOWTIDE_DEVICE_SLEEP_STABLE", config.device_sleep_stable.value.to_string()),
            ("LOWTIDE_DEVICE_SLEEP_DYNAMIC", config.device_sleep_dynamic.value.to_string()),
            ("LOWTIDE_HEAP_DECAY", decay(config.heap_decay.value)),
            ("LOWTIDE_BACKGROUND_THREADS", config.background_threads.value.to_string()),
            ("LOWTIDE_PURGE_INTERVAL", or_never(config.purge_interval.value)),
            ("LOWTIDE_IDLE_UNLOAD", short(config.idle_unload.value)),
            ("LOWTIDE_METRICS_INTERVAL", short(config.metrics_interval.value)),
        ] {
            let cells = row(name).unwrap_or_default();
            assert_eq!(cells.get(2 + at), Some(&default), "{name}, {profile}: {cells:?}");
        }
    }
}

fn or_never(time: Option<Duration>) -> String {
    time.map_or_else(|| "never".to_owned(), short)
}

fn short(time: Duration) -> String {
    humantime::format_duration(time).to_string()
}

/// The proxy's source, all of it.
fn proxy() -> String {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/proxy");
    let parts = fs::read_dir(folder).expect("the proxy's modules").map(|entry| {
        let name = entry.expect("an entry").file_name();
        text(&format!("examples/proxy/{}", name.to_string_lossy()))
    });
    parts.chain([text("examples/proxy.rs")]).collect()
}

/// What stands in the source up to a mark.
fn until<'a>(text: &'a str, mark: &str) -> &'a str {
    text.split_once(mark).map_or(text, |(before, _)| before)
}

/// Each option of the proxy: its variable, and its default where it has one.
fn options(source: &str) -> Vec<(String, Option<String>)> {
    let all = source.split("env = \"").skip(1);
    all.map(|after| {
        let option = until(after, ",\n    ");
        let quoted = option.split_once("default_value = \"").map(|(_, value)| until(value, "\""));
        let number = option.split_once("default_value_t = ").map(|(_, value)| until(value, ")"));
        (until(after, "\"").to_owned(), quoted.or(number).map(str::to_owned))
    })
    .collect()
}

#[test]
fn every_variable_of_the_proxy_has_its_row_with_its_default_and_the_images_value() {
    let image = text("Dockerfile");
    let own = options(&proxy());
    assert!(own.len() >= 6, "the proxy's variables are not found any more: {own:?}");
    assert!(own.iter().any(|(_, default)| default.as_deref() == Some("64m")), "{own:?}");
    for (name, default) in own {
        let cells = row(&name).unwrap_or_else(|| panic!("{name} has no row in {GUIDE}"));
        if let Some(default) = default {
            assert_eq!(cells[1], format!("`{default}`"), "the default of {name}");
        } else {
            assert!(!cells[1].contains('`'), "{name} has no default of its own: {cells:?}");
        }
        let set = image.split_once(&format!("{name}="));
        let set = set.map(|(_, value)| value.split([' ', '\n']).next().unwrap_or_default());
        assert_eq!(cells[2], set.map_or_else(String::new, |value| format!("`{value}`")), "{name}");
    }
}

/// What the guide and the load of `.ci` say that a request to `/words` books.
#[test]
fn what_a_text_is_booked_with_is_the_same_in_code_guide_and_load() {
    let source = proxy();
    for (what, code) in [
        ("a factor of 10", "const WORDS_FACTOR: u64 = 10;"),
        ("256 KiB besides", "saturating_mul(WORDS_FACTOR).saturating_add(256 << 10)"),
        ("128 KiB to forward it", "const BUFFER_MAX: usize = 32 << 10;"),
        ("four of these", "ByteSize::of(4 * forward::BUFFER_MAX)"),
    ] {
        assert!(source.contains(code), "the proxy's code has no longer {what}: {code}");
    }
    assert!(text(GUIDE).contains("`/words`: 10 bytes for each byte of body and 256 KiB;"));
    assert!(text(GUIDE).contains("forwarded: 128 KiB"));
    assert!(text(".ci/overload.sh").contains("COST_KIB=$((BODY_KIB * 10 + 256 + 128))"));
}

#[test]
fn what_is_set_for_operators_are_variables_that_exist() {
    let known: BTreeSet<_> = VARIABLES.iter().map(|variable| variable.name.to_owned()).collect();
    for file in files::ALL {
        let text = text(file);
        // What is said of them, in comments, may name a part: `LOWTIDE_*`.
        let code: String = text.lines().filter(|line| !line.trim().starts_with('#')).collect();
        let set = names(&code, "LOWTIDE_");
        assert!(!set.is_empty(), "{file} sets none");
        assert!(set.is_subset(&known), "{file}: {:?}", set.difference(&known));
    }
}

/// The profile's string stands in the image by hand: an image cannot ask the crate for it.
#[test]
fn the_image_starts_jemalloc_with_the_low_memory_profile_to_the_letter() {
    let conf = HeapProfile::LowMemory.conf().to_str().expect("ASCII");
    let image = text("Dockerfile");
    assert!(image.contains("LOWTIDE_PROFILE=low-memory"), "the run-time half of the profile");
    let unit = "deploy/lowtide-proxy.service";
    for (file, text) in [("Dockerfile", image), (GUIDE, text(GUIDE)), (unit, text(unit))] {
        let set: Vec<_> = text
            .split("_RJEM_MALLOC_CONF=")
            .skip(1)
            .map(|after| after.split(['`', ' ', '\n', '"']).next().unwrap_or_default())
            .filter(|value| !value.is_empty()) // how to take it back
            .collect();
        assert!(!set.is_empty(), "{file} sets it nowhere");
        assert!(set.iter().all(|found| *found == conf), "{file}: {set:?}, expected {conf}");
    }
}

/// The table of the guide is that of the function's documentation, which a test beside the function
/// compares with the code for C++ code under either heap.
#[test]
fn the_settings_of_onnx_runtime_in_the_guide_are_the_profiles() {
    let (guide, source) = (text(GUIDE), text("src/config/onnxruntime.rs"));
    let rows = source.lines().filter_map(|line| line.trim().strip_prefix("/// | `"));
    let rows: Vec<_> = rows.map(|row| format!("| `{row}").replace("| session ", "| ")).collect();
    assert_eq!(rows.len(), Profile::LowMemory.onnxruntime(7).len(), "each key has a row");
    for row in rows {
        assert!(guide.contains(&row), "{GUIDE} has no row {row}");
    }
}
