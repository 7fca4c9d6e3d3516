//! Checks that the files for operators agree with the code: variables, their defaults, the image,
//! the files for Compose, Kubernetes and systemd (`files`), also behind Envoy (`fleet`), and those
//! for autoscalers (`autoscaling`).
//!
//! It reads text; that the image builds and runs is for `.ci/docker` and `.ci/image` to try.
//!
//! Invariant: a default, a name or a limit that stands in two places is the same in both.

pub(crate) mod autoscaling;
mod files;
mod fleet;

use std::collections::BTreeSet;

use super::code::{Code, Found};
use super::variables;
use crate::tree::{Faults, Tree};

/// A function that returns a default as the guide writes it.
type Written<'a> = &'a dyn Fn(Found<'_>) -> String;

const GUIDE: &str = "docs/DEPLOYING.md";
const ENGINES: &str = "docs/ENGINES.md";

/// The inputs of the comparison.
struct Deploying<'a> {
    tree: &'a Tree,
    code: &'a Code<'a>,
    faults: &'a Faults,
}

/// Checks the guide and the files.
pub(super) fn check<'a>(tree: &'a Tree, code: &'a Code<'a>, faults: &'a Faults) {
    let all = Deploying { tree, code, faults };
    all.check_rows();
    all.check_defaults();
    all.check_proxy();
    all.check_cost();
    all.check_variables();
    all.check_image();
    all.check_onnxruntime();
    files::check(&all);
    autoscaling::check(&all);
    fleet::check(&all);
}

/// Every name in a text that starts so.
fn names(text: &str, start: &str) -> BTreeSet<String> {
    let is_part = |c: char| c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_';
    text.split(|c: char| !is_part(c))
        .filter(|word| word.starts_with(start) && word.len() > start.len())
        .map(str::to_owned)
        .collect()
}

/// Returns the source up to a mark.
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

impl<'a> Deploying<'a> {
    fn text(&self, name: &str) -> &'a str {
        self.tree.text(name, self.faults)
    }

    fn expect(&self, holds: bool, what: impl FnOnce() -> String) {
        self.faults.expect(holds, what);
    }

    /// The cells of the guide's row that begins with this variable; a missing row is a fault.
    fn row(&self, name: &str) -> Vec<&'a str> {
        let guide = self.text(GUIDE);
        let found = guide.lines().find(|line| line.starts_with(&format!("| `{name}` |")));
        self.expect(found.is_some(), || format!("{GUIDE}: {name} has no row"));
        let row = found.unwrap_or_default().trim_matches('|');
        row.split('|').map(str::trim).collect()
    }

    /// Every variable of the crate has its row.
    fn check_rows(&self) {
        for name in variables(self.code) {
            self.row(&name);
        }
    }

    /// The defaults in the rows are those of the profiles.
    fn check_defaults(&self) {
        let ratio = |found: Found<'_>| format!("{:.2}", found.number());
        let plain = |found: Found<'_>| found.number().to_string();
        let time = |found: Found<'_>| {
            if found.is_nothing() {
                return "never".to_owned();
            }
            humantime::format_duration(found.time()).to_string()
        };
        let name = |found: Found<'_>| self.code.name_of(&found.value);
        let rows: [(&str, Written<'_>); 18] = [
            ("CEILING", &ratio),
            ("CORRECTION_FACTOR", &plain),
            ("DEVICE", &name),
            ("DEVICE_WATERMARK", &ratio),
            ("DEVICE_BACKEND", &name),
            ("DEVICE_DECAY", &time),
            ("DEVICE_SLEEP_AFTER", &time),
            ("DEVICE_MIN_AWAKE", &time),
            ("DEVICE_SLEEP_STABLE", &name),
            ("DEVICE_SLEEP_DYNAMIC", &name),
            ("HEAP_DECAY", &time),
            ("BACKGROUND_THREADS", &plain),
            ("PURGE_INTERVAL", &time),
            ("IDLE_UNLOAD", &time),
            ("MAX_WAIT", &time),
            ("METRICS_INTERVAL", &time),
            ("METRICS", &name),
            ("EXHAUSTION_POLICY", &name),
        ];
        for (at, profile) in ["LowMemory", "Balanced", "Throughput"].into_iter().enumerate() {
            for (setting, written) in rows {
                let default = written(self.code.setting(profile, &setting.to_lowercase()));
                let cells = self.row(&format!("LOWTIDE_{setting}"));
                self.expect(cells.get(2 + at) == Some(&&*default), || {
                    format!("{GUIDE}: LOWTIDE_{setting}, {profile}: {cells:?}: expected {default}")
                });
            }
        }
    }

    /// The proxy's source, all of it.
    fn proxy(&self) -> String {
        let is_its = |name: &str| {
            name == "examples/proxy.rs"
                || name.strip_prefix("examples/proxy/").is_some_and(|rest| !rest.contains('/'))
        };
        let files = self.tree.files.iter().filter(|file| is_its(&file.name));
        files.map(|file| file.text.as_str()).collect()
    }

    /// Every variable of the proxy has its row with its default and the image's value.
    fn check_proxy(&self) {
        let image = self.text("Dockerfile");
        let own = options(&self.proxy());
        let is_read =
            own.len() >= 6 && own.iter().any(|(_, value)| value.as_deref() == Some("64m"));
        self.expect(is_read, || format!("the proxy's variables are not found: {own:?}"));
        for (name, default) in own {
            let cells = self.row(&name);
            let shown = cells.get(1).copied().unwrap_or_default();
            let is_right = match &default {
                Some(default) => shown == format!("`{default}`"),
                None => !shown.contains('`'),
            };
            self.expect(is_right, || format!("{GUIDE}: {name}: {shown}: expected {default:?}"));
            let set = image.split_once(&format!("{name}="));
            let set = set.map(|(_, value)| value.split([' ', '\n']).next().unwrap_or_default());
            let expected = set.map_or_else(String::new, |value| format!("`{value}`"));
            let of_image = cells.get(2).copied().unwrap_or_default();
            self.expect(of_image == expected, || {
                format!("{GUIDE}: {name} of the image: {of_image}: expected {expected}")
            });
        }
    }

    /// Checks that a request to `/words` reserves the same in the code, the guide and the load of
    /// `.ci`.
    fn check_cost(&self) {
        let source = self.proxy();
        for (what, code) in [
            ("a factor of 10", "const WORDS_FACTOR: u64 = 10;"),
            ("256 KiB besides", "saturating_mul(WORDS_FACTOR).saturating_add(256 << 10)"),
            ("128 KiB to forward it", "const BUFFER_MAX: usize = 32 << 10;"),
            ("four of these", "ByteSize::of(4 * forward::BUFFER_MAX)"),
        ] {
            let has = source.contains(code);
            self.expect(has, || format!("examples/proxy no longer has {what}: {code}"));
        }
        for (file, part) in [
            (GUIDE, "`/words`: 10 bytes for each byte of body and 256 KiB;"),
            (GUIDE, "forwarded: 128 KiB"),
            (".ci/overload.sh", "COST_KIB=$((BODY_KIB * 10 + 256 + 128))"),
        ] {
            self.expect(self.text(file).contains(part), || format!("{file}: expected {part:?}"));
        }
    }

    /// Checks that the variables that are set for operators exist.
    fn check_variables(&self) {
        let known: BTreeSet<_> = variables(self.code).into_iter().collect();
        for file in files::ALL {
            // A comment may name a part: `LOWTIDE_*`.
            let lines = self.text(file).lines().filter(|line| !line.trim().starts_with('#'));
            let set = names(&lines.collect::<String>(), "LOWTIDE_");
            self.expect(!set.is_empty(), || format!("{file} sets no variable"));
            for name in set.difference(&known) {
                self.faults.say(format!("{file}: {name}: no such variable"));
            }
        }
    }

    /// The image starts jemalloc with the low-memory profile to the letter: the string stands in
    /// the image by hand, since an image cannot ask the crate for it.
    fn check_image(&self) {
        let conf = self.code.of("HeapProfile", "LowMemory", "conf").text();
        let image = self.text("Dockerfile");
        let has_profile = image.contains("LOWTIDE_PROFILE=low-memory");
        self.expect(has_profile, || "Dockerfile: no LOWTIDE_PROFILE=low-memory".to_owned());
        for file in ["Dockerfile", GUIDE, "deploy/lowtide-proxy.service"] {
            let set: Vec<_> = self
                .text(file)
                .split("_RJEM_MALLOC_CONF=")
                .skip(1)
                .map(|after| after.split(['`', ' ', '\n', '"']).next().unwrap_or_default())
                .filter(|value| !value.is_empty()) // how to reset it
                .collect();
            self.expect(!set.is_empty(), || format!("{file} does not set _RJEM_MALLOC_CONF"));
            for found in set.iter().filter(|found| **found != conf) {
                self.faults.say(format!("{file}: {found}: expected {conf}"));
            }
        }
    }

    /// The table of the page is that of the function's documentation, which a test beside the
    /// function compares with the code, key by key.
    fn check_onnxruntime(&self) {
        let mark = "pub fn onnxruntime(";
        let sources = self.tree.library();
        let source = sources.iter().find(|source| source.text.contains(mark));
        self.expect(source.is_some(), || format!("{mark}: no such function"));
        let lines = source.map_or("", |source| &source.text).lines();
        let rows = lines.filter_map(|line| line.trim().strip_prefix("/// | `"));
        let rows: Vec<_> =
            rows.map(|row| format!("| `{row}").replace("| session ", "| ")).collect();
        self.expect(!rows.is_empty(), || format!("{mark}: no table in its documentation"));
        for row in rows {
            self.expect(self.text(ENGINES).contains(&row), || format!("{ENGINES}: no row {row}"));
        }
    }
}
