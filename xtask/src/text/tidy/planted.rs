//! Tests of the rules: small trees with one fault each, which must be found, and clean texts, which
//! must pass.
//!
//! A case fails if another fault is found too, so one fault cannot hide behind another. The sources
//! of the repository are checked by the command itself.
//!
//! Invariant: each rule has a case.

use std::collections::BTreeMap;

use super::imports::Layers;
use crate::tree::{Faults, Source, Tree};

/// The directions in these trees, which are not those of the repository.
const LAYERS: &[Layers] = &[
    Layers {
        folder: "",
        floors: &[
            &["bytes", "clock", "fork", "sync"],
            &["decay", "log"],
            &["host", "device", "control"],
            &["metrics"],
            &["config"],
            &["memory"],
            &["service"],
        ],
        walls: &[
            ("device::index", "device::driver"),
            ("device::index", "device::arena"),
            ("device::driver", "device::arena"),
            ("control::pressure", "control::signal"),
        ],
    },
    Layers {
        folder: "crates/core/",
        floors: &[&["bytes", "clock", "fork", "sync"], &["decay", "log"]],
        walls: &[],
    },
    Layers {
        folder: "crates/gpu/",
        floors: &[],
        walls: &[("index", "lowtide_gpu_driver"), ("index", "arena")],
    },
];

/// A repository of these files, whose root is the package `lowtide`.
fn tree(files: &[(&str, &str)]) -> Tree {
    let mut texts: BTreeMap<&str, String> =
        files.iter().map(|&(name, text)| (name, text.to_owned())).collect();
    let manifest = texts.entry("Cargo.toml").or_default();
    *manifest = format!("[package]\nname = \"lowtide\"\n\n{manifest}");
    let source = |(name, text): (&str, String)| Source { name: name.to_owned(), text };
    Tree { files: texts.into_iter().map(source).collect(), binaries: Vec::new() }
}

fn check(tree: &Tree) -> Vec<String> {
    let faults = Faults::default();
    super::check_with(tree, LAYERS, &faults);
    faults.sorted()
}

/// The faults of one file of the library, headed and declared.
fn faults_of(name: &str, text: &str) -> Vec<String> {
    let root = declaration_of(name);
    let text = format!("//! A.\n{text}");
    let files = [("src/lib.rs", root.as_str()), (name, text.as_str())];
    check(&tree(if name.starts_with("src/") && name != "src/lib.rs" {
        &files
    } else {
        &files[1..]
    }))
}

/// A `lib.rs` that declares a file of the library.
fn declaration_of(name: &str) -> String {
    let inside = name.trim_start_matches("src/").trim_end_matches(".rs").trim_end_matches("/mod");
    let mut text = format!("mod {};", inside.rsplit('/').next().unwrap_or(inside));
    for folder in inside.split('/').rev().skip(1) {
        text = format!("mod {folder} {{ {text} }}");
    }
    format!("//! L.\n{text}\n")
}

fn finds(expected: &str, name: &str, text: &str) {
    let faults = faults_of(name, text);
    assert!(
        faults.len() == 1 && faults[0].contains(expected),
        "{name}: expected {expected:?} alone in\n{text}\nfound {faults:#?}"
    );
}

fn passes(name: &str, text: &str) {
    let faults = faults_of(name, text);
    assert!(faults.is_empty(), "{name}: clean, but found {faults:#?} in\n{text}");
}

/// Faults planted in one file each: the expected fault, the file, its text.
type Planted<'a> = (&'a str, &'a str, &'a str);

fn find_all(cases: &[Planted<'_>]) {
    for (expected, name, text) in cases {
        finds(expected, name, text);
    }
}

fn pass_all(cases: &[(&str, &str)]) {
    for (name, text) in cases {
        passes(name, text);
    }
}

#[test]
fn an_import_in_the_wrong_direction_is_found_in_every_spelling() {
    let spellings = [
        "use crate::control::Level;",
        "use crate::control;",
        "use crate::control as other;",
        "use crate::r#control::Level;",
        "use crate /* here */ :: control :: Level;",
        "use crate::{bytes::ByteSize, control::Level};",
        "use crate::{\n bytes::{\n  ByteSize,\n },\n control::{\n  Level,\n },\n};",
        "use {crate::control::Level, std::fmt};",
        "pub(crate) use super::super::control::Level;",
        "use self::super::super::{control::Level};",
        "mod inner { use super::super::super::control::Level; }",
        "mod a {} mod inner { mod b {} use super::super::super::control::Level; } mod c {}",
        "#[cfg(test)]\nmod tests { use crate::control::Level; }",
        "fn f(_: crate::control::Level) {}",
        "fn f() { let x = Vec::<crate::control::Level>::new(); }",
        "impl<T> crate::control::Reclaim for T {}",
        "fn f() -> impl Sized + use<'static> { crate::control::f::<u8>() }",
        "macro_rules! m { () => { $crate::control::f() } }",
        "macro_rules! m { () => { ::lowtide::control::f() } }",
        "macro_rules! m { () => { lowtide::control::f() } }",
    ];
    for text in spellings {
        finds("host must not import control: wrong direction", "src/host/stats.rs", text);
        passes("src/memory/join.rs", text);
    }
    find_all(&[
        ("wrong direction", "src/device/arena.rs", "use crate::control::Level;"),
        ("wrong direction", "src/control/idle.rs", "use crate::device::Arena;"),
        ("wrong direction", "src/host/mod.rs", "use super::device::Arena;"),
        ("wrong direction", "src/bytes.rs", "use crate::clock::Moment;"),
        ("wrong direction", "src/bytes.rs", "use crate::decay::Decay;"),
        ("wrong direction", "src/metrics/record.rs", "use crate::memory::Memory;"),
        ("wrong direction", "src/config/resolve.rs", "use crate::service::Layer;"),
        ("the whole crate", "src/host/stats.rs", "use crate::*;"),
        ("the whole crate", "src/host/stats.rs", "use super::super as root;"),
        ("the whole crate", "src/host/stats.rs", "use crate::{self as root};"),
        ("has no floor", "src/new_part.rs", ""),
    ]);
}

#[test]
fn an_import_through_another_name_is_found() {
    let cases = [
        ("pub use memory::Memory;", "use crate::Memory;", "host must not import memory"),
        ("pub use crate::memory::{Memory as M};", "use crate::M;", "host must not import memory"),
        ("use memory as m;", "fn f(_: crate::m::Memory) {}", "host must not import memory"),
        ("pub use memory::*;", "", "re-exports all of memory"),
    ];
    for (export, import, expected) in cases {
        let root = format!("//! L.\nmod host;\nmod memory;\n{export}\n");
        let import = format!("//! H.\n{import}\n");
        let files = [("src/lib.rs", &*root), ("src/host.rs", &import), ("src/memory.rs", "//! M.")];
        let faults = check(&tree(&files));
        assert!(faults.len() == 1 && faults[0].contains(expected), "{export}: {faults:#?}");
    }
}

#[test]
fn each_package_is_looked_at_by_itself() {
    let core = "[package]\nname = \"lowtide-core\"";
    let gpu = "[package]\nname = \"lowtide-gpu\"";
    let driver = "[package]\nname = \"lowtide-gpu-driver\"";
    let files = |index: &'static str, bytes: &'static str| {
        check(&tree(&[
            ("crates/core/Cargo.toml", core),
            ("crates/core/src/lib.rs", "//! L.\nmod bytes;\nmod decay;"),
            ("crates/core/src/bytes.rs", bytes),
            ("crates/core/src/decay.rs", "//! D.\nuse crate::bytes::ByteSize;"),
            ("crates/gpu/Cargo.toml", gpu),
            ("crates/gpu/src/lib.rs", "//! L.\nmod index;\npub use lowtide_gpu_driver::Driver;"),
            ("crates/gpu/src/index.rs", index),
            ("crates/gpu-driver/Cargo.toml", driver),
            ("crates/gpu-driver/src/lib.rs", "//! L."),
        ]))
    };
    assert_eq!(files("//! I.\nuse lowtide_core::ByteSize;", "//! B."), [""; 0]);
    for (expected, index, bytes) in [
        ("crates/gpu/src/index.rs:2: index must not", "//! I.\nuse lowtide_gpu_driver as d;", ""),
        ("crates/gpu/src/index.rs:2: index must not", "//! I.\nuse crate::Driver;", ""),
        ("bytes must not import decay", "//! I.", "use crate::decay::Decay;"),
        ("bytes must not import decay", "//! I.", "use lowtide_core::decay::Decay;"),
        ("Instant: time is read", "//! I.", "use std::time::Instant;"),
    ] {
        let faults = files(index, format!("//! B.\n{bytes}").leak());
        assert!(faults.len() == 1 && faults[0].contains(expected), "{expected}: {faults:#?}");
    }
}

#[test]
fn a_wall_is_not_climbed_over_nor_walked_round() {
    let index = "src/device/index/bins.rs";
    find_all(&[
        ("must not import device::driver", index, "use crate::device::driver::Driver;"),
        ("must not import device::driver", index, "use super::super::{driver::Driver};"),
        ("must not import device::driver", "src/device/index.rs", "use super::driver::Driver;"),
        ("must not import device::arena", index, "use crate::device::arena::Arena;"),
        ("imports all of device", index, "use crate::device;"),
        ("imports all of device", index, "use super::super::*;"),
        ("must not import device::arena", "src/device/driver/host.rs", "use super::super::arena;"),
        (
            "must not import control::signal",
            "src/control/pressure.rs",
            "use super::signal::Sample;",
        ),
    ]);
    let files = [
        ("src/lib.rs", "//! L.\nmod device;"),
        ("src/device/mod.rs", "//! D.\nmod driver;\nmod index;\npub use driver::Driver;"),
        ("src/device/driver.rs", "//! D."),
        ("src/device/index.rs", "//! I.\nuse super::Driver;"),
    ];
    let faults = check(&tree(&files));
    assert!(faults.len() == 1 && faults[0].contains("must not import"), "{faults:#?}");
    pass_all(&[
        (index, "use super::super::index::Block;\nmod tests { use super::*; }"),
        ("src/device/indexes.rs", "use super::driver::Driver;"),
        ("src/device/arena.rs", "use super::{driver::Driver, index::Index};"),
    ]);
}

#[test]
fn downward_imports_and_mere_mentions_pass() {
    pass_all(&[
        ("src/metrics/record.rs", "use crate::host::Stats;"),
        ("src/decay.rs", "use crate::{bytes::ByteSize, clock::Moment};"),
        ("src/host/stats.rs", "use super::purge::Purge;\nuse crate::sync::{Arc, Mutex};"),
        ("src/host/stats.rs", "//! See [`crate::control::Level`].\n/// [l](crate::control::Level)"),
        ("src/host/stats.rs", "/* crate::control::Level */ const S: &str = \"crate::control::f\";"),
        ("src/host/stats.rs", "const S: &str = r#\"use crate::control; \" \"#; // super::super::x"),
        ("src/host/stats.rs", "mod inner { use super::super::control::OwnModuleOfHost; }"),
        ("src/host/stats.rs", "use std::sync::Arc;\npub(in crate::host) fn f() {}"),
        ("src/host/conf.rs", "macro_rules! m { () => { $crate::host::conf::f() } }"),
        ("src/lib.rs", "use crate::*;"),
    ]);
}

#[test]
fn an_orphan_is_found_whatever_a_comment_says() {
    let orphan = ("src/host/lost.rs", "//! L.");
    let library = ("src/lib.rs", "//! L.\nmod host;");
    for host in [
        "//! H. mod lost;",
        "//! H.\n// mod lost;\n/* mod lost; */\nconst S: &str = \"mod lost;\";",
        "//! H.\nmod lost {}",
        "//! H.\nmod lost_and_found { mod lost; }",
    ] {
        let faults = check(&tree(&[library, ("src/host/mod.rs", host), orphan]));
        assert!(
            faults.len() == 1 && faults[0].contains("no module declares"),
            "{host}: {faults:?}"
        );
    }
    let pair = [("src/lib.rs", "//! L."), ("src/host/mod.rs", "//! H.\nmod lost;"), orphan];
    assert_eq!(check(&tree(&pair)).len(), 2, "two that declare each other");
    let example = [("examples/tide.rs", "//! T."), ("examples/tide_parts/load.rs", "//! L.")];
    assert_eq!(check(&tree(&example)).len(), 1, "an example's part");
}

#[test]
fn a_declared_file_passes_however_it_is_declared() {
    let child = |host: &str, lost: &str| {
        let library = ("src/lib.rs", "//! L.\npub mod host;");
        let host = format!("//! H.\n{host}");
        let faults = check(&tree(&[library, ("src/host/mod.rs", &host), (lost, "//! C.")]));
        assert!(faults.is_empty(), "{host}: {faults:?}");
    };
    child("mod lost;", "src/host/lost.rs");
    child("pub(crate) mod lost;", "src/host/lost/mod.rs");
    child("#[cfg(x)]\n#[path = \"b.rs\"]\npub(super) mod lost;", "src/host/b.rs");
    child("#[cfg_attr(loom, path = \"b.rs\")]\nmod lost;", "src/host/b.rs");
    child("mod inner { mod lost; }", "src/host/inner/lost.rs");
    child("mod inner { #[path = \"b.rs\"] mod lost; }", "src/host/inner/b.rs");
    let files = [
        ("Cargo.toml", "[[bench]]\npath = \"benches/odd/place.rs\""),
        ("benches/odd/place.rs", "//! B."),
        ("examples/tide.rs", "//! T.\n#[path = \"tide_parts/load.rs\"]\nmod load;"),
        ("examples/tide_parts/load.rs", "//! L."),
        ("src/lib.rs", "//! L.\nmod host;"),
        ("src/host.rs", "//! H.\n#[path = \"bytes.rs\"]\nmod lost;\nmod found;"),
        ("src/bytes.rs", "//! B."),
        ("src/host/found.rs", "//! F."),
        ("examples/proxy/main.rs", "//! P.\nmod load;"),
        ("examples/proxy/load.rs", "//! L."),
        ("tests/fake/Cargo.toml", ""),
        ("tests/fake/src/lib.rs", "//! F.\nmod calls;"),
        ("tests/fake/src/calls.rs", "//! C.\nmod deep;"),
        ("tests/fake/src/calls/deep.rs", "//! D."),
        ("tests/fake/build.rs", "//! B."),
    ];
    assert_eq!(check(&tree(&files)), [""; 0]);
}

#[test]
fn shape_is_checked() {
    let wide = "-".repeat(98);
    finds("101 columns", "src/host/stats.rs", &format!("// {wide}"));
    pass_all(&[
        ("src/host/stats.rs", &format!("// {}", &wide[1..])),
        ("src/host/stats.rs", &format!("// https://{wide}")),
    ]);
    for name in ["src/lib.rs", "examples/tide.rs", "benches/peers.rs", "tests/host.rs"] {
        for text in ["", "fn main() {}", "// A.\n//! B.", "/// A."] {
            let faults = check(&tree(&[(name, text)]));
            assert!(faults.len() == 1 && faults[0].contains("begins with"), "{name}: {faults:?}");
        }
    }
}

#[test]
fn what_is_banned_is_found() {
    let host = "src/host/stats.rs";
    find_all(&[
        ("order of iteration", host, "use std::collections::{BTreeMap, HashMap};"),
        ("order of iteration", host, "fn f(_: std::collections::HashSet<u8>) {}"),
        ("order of iteration", host, "type T = FxHashMap<u8, u8>;"),
        ("order of iteration", host, "type T = HashMap<u8, u8>; // tidy: fixed order"),
        (
            "order of iteration",
            host,
            "let a = 1; // tidy: fixed order: no\ntype T = HashMap<u8, u8>;",
        ),
        ("config::env only", host, "fn f() { std::env::var(\"X\"); }"),
        ("config::env only", host, "use std::env;"),
        ("config::env only", host, "use std::{env as e, fmt};"),
        ("config::env only", host, "fn f() { libc::getenv(p) }"),
        ("config::env only", "src/config/raw.rs", "use std::env::{self};"),
        ("through a Clock", host, "use std::time::{Duration, Instant};"),
        ("through a Clock", host, "fn f() { std::time::SystemTime::now(); }"),
        ("thread::sleep", host, "fn f() { std::thread::sleep(d) }"),
        ("thread::sleep", "tests/host.rs", "use std::thread::{self, sleep};"),
        ("write `log!`", host, "fn f() { tracing::warn!(\"a\") }"),
        ("write `log!`", host, "fn f() { ::tracing::event!(x, \"a\") }"),
        ("no async runtime", "src/control/reclaim.rs", "fn f() { tokio::spawn(g) }"),
        ("no async runtime", "src/service/layer.rs", "#[tokio::test]\nfn f() {}"),
        ("ignored test", "tests/host.rs", "#[test]\n#[ignore]\nfn f() {}"),
        ("ignored test", host, "#[ignore = \"slow\"]\nfn f() {}"),
        ("ignored test", "tests/host.rs", "#[cfg_attr(not(x), ignore)]\nfn f() {}"),
        ("not run", host, "/// ```ignore\n/// f();\n/// ```\nfn f() {}"),
        ("unfinished", host, "fn f() { todo!() }"),
        ("unfinished", "examples/tide.rs", "fn f() { unimplemented!(\"later\") }"),
    ]);
}

#[test]
fn what_only_looks_banned_passes() {
    pass_all(&[
        ("src/host/stats.rs", "// HashMap, Instant, tokio, todo!, #[ignore]; std::env::var"),
        ("src/host/stats.rs", "const S: &str = \"HashMap Instant tokio std::env::var #[ignore]\";"),
        ("src/host/stats.rs", "type T = HashMap<u8, u8>; // tidy: fixed order: never iterated"),
        ("src/host/stats.rs", "// tidy: fixed order: never iterated\ntype T = HashMap<u8, u8>;"),
        ("src/host/stats.rs", "const V: &str = env!(\"CARGO_PKG_VERSION\");"),
        ("src/host/stats.rs", "fn f(ignore: u8, todo: u8) { g(a, ignore); arena.sleep(); }"),
        ("src/host/stats.rs", "const OS: &str = std::env::consts::OS;"),
        ("src/config/env.rs", "use std::env;\nfn f() { std::env::vars(); }"),
        ("src/clock.rs", "use std::time::{Instant, SystemTime};"),
        ("src/memory/runtime.rs", "use tokio::runtime::Handle;"),
        ("src/log.rs", "fn f() { tracing::warn!(\"a\") }"),
        ("src/host/stats.rs", "use tracing::Subscriber; // tracing::warn!"),
        ("examples/tide.rs", "use std::{env, time::Instant};\nfn f() { std::thread::sleep(d) }"),
        ("tests/host.rs", "#[tokio::test]\nasync fn f() { let x: HashMap<u8, u8>; }"),
    ]);
}

#[test]
fn a_path_of_a_build_machine_is_found_in_any_text() {
    for folder in [["/wo", "rk/"], ["/ro", "ot/"], ["/ho", "me/"]].map(|pieces| pieces.concat()) {
        for name in ["src/lib.rs", "Cargo.lock", ".ci/run", "docs/STYLE.md", "docs/a.svg"] {
            for before in ["", "see ", "(", "\"", "x=", "file:", "`", "\n"] {
                let text = format!("//! {before}{folder}x");
                let faults = check(&tree(&[(name, &text)]));
                let found = faults.len() == 1 && faults[0].contains("one machine");
                assert!(found, "{name}: {text:?}: {faults:?}");
            }
            for before in ["https://example.org", "net", "..", "$HOME", "~", "<name>/x"] {
                let text = format!("//! {before}{folder}x");
                assert_eq!(check(&tree(&[(name, &text)])), [""; 0], "{text:?}");
            }
        }
    }
}

/// The head of an example or bench may say that it prints and reads the wall clock.
#[test]
fn an_opening_with_a_reason_is_no_fault() {
    let opening = "#![expect(clippy::print_stdout, clippy::disallowed_methods, reason = \"r\")]";
    passes("examples/tide.rs", &format!("{opening}\nfn main() {{}}"));
    passes("benches/peers.rs", &format!("{opening}\nfn main() {{}}"));
}
