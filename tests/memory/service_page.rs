//! The page at `/memory`: who gets it, what it may do, and what the JSON tells for it.
#![cfg(all(feature = "service", target_os = "linux"))]

use std::sync::Arc;
use std::time::Duration;

use http::{Request, Response, StatusCode};
use lowtide::admission::Cost;
use lowtide::clock::{Clock, ManualClock};
use lowtide::config::DeviceChoice;
use lowtide::device::{Contents, Region, SleepOptions};
use lowtide::service::Endpoints;
use lowtide::{ByteSize, Memory};
use serde_json::{Value, json};
use test_fork::test;

use crate::support::{Tree, advance_until};

const SOON: Duration = Duration::from_secs(5);
const SECOND: Duration = Duration::from_secs(1);
const ANY_PART: &str = "expected map, history, events, admin_tasks, largest_requests, permits, \
                        routes, tenants, size_classes, mappings, device_processes, last_exit, \
                        limit_advice, leaks, settings";
const PARTS: [&str; 15] = [
    "map",
    "history",
    "events",
    "admin_tasks",
    "largest_requests",
    "permits",
    "routes",
    "tenants",
    "size_classes",
    "mappings",
    "device_processes",
    "last_exit",
    "limit_advice",
    "leaks",
    "settings",
];
const ALL: &str = "/memory?format=json&with=map,history,events,admin_tasks";
const BROWSER: &str = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8";

fn ask(endpoints: &Endpoints, address: &str, accept: Option<&str>) -> Response<String> {
    let mut request = Request::get(address);
    if let Some(accept) = accept {
        request = request.header("accept", accept);
    }
    let request = request.body(()).expect("a request");
    let answer = endpoints.answer_request(&request);
    let answer = answer.unwrap_or_else(|| panic!("{address} is not answered"));
    answer.map(|body| String::from_utf8(body).expect("UTF-8"))
}

fn told(endpoints: &Endpoints, address: &str) -> Value {
    let response = ask(endpoints, address, None);
    assert_eq!(response.status(), StatusCode::OK, "{}", response.body());
    serde_json::from_str(response.body()).expect("JSON")
}

fn start(clock: &Arc<ManualClock>, tree: &Tree) -> Memory {
    let clock: Arc<dyn Clock> = clock.clone();
    let builder = Memory::builder().clock(clock).signals(tree.open()).device(DeviceChoice::Host);
    builder.start().expect("starts")
}

#[test]
fn browsers_get_the_page_and_everybody_else_the_figures() {
    let endpoints = Endpoints::new(None);
    let kind = |address: &str, accept| {
        let response = ask(&endpoints, address, accept);
        assert_eq!(response.status(), StatusCode::OK);
        assert_eq!(response.headers()["vary"], "Accept", "{address} {accept:?}");
        assert_eq!(response.headers()["cache-control"], "no-store");
        assert_eq!(response.headers()["x-content-type-options"], "nosniff");
        response.headers()["content-type"].to_str().expect("text").to_owned()
    };
    let (html, json) = ("text/html; charset=utf-8", "application/json");
    assert_eq!(kind("/memory", Some(BROWSER)), html);
    for accept in [None, Some("*/*"), Some("application/json"), Some("text/plain, */*;q=0.1")] {
        assert_eq!(kind("/memory", accept), json, "{accept:?}");
    }
    assert_eq!(kind("/memory?format=json", Some(BROWSER)), json);
    assert_eq!(kind("/memory?format=html", None), html);
    let figures = endpoints.answer("/memory").expect("as before");
    assert_eq!(figures.body(), ask(&endpoints, "/memory", None).body());
    assert!(ask(&endpoints, "/healthz", Some(BROWSER)).body() == "ok\n", "others are as they were");
}

#[test]
fn a_query_that_means_nothing_is_refused_by_name() {
    let endpoints = Endpoints::new(None);
    for (query, about) in [
        ("format=xml", r#"format="xml": expected json or html"#),
        ("with=map,everything", ANY_PART),
        ("with=map,history,map", r#""map" is given twice"#),
        ("wth=map", r#"unknown query parameter "wth": expected format, limit or with"#),
        ("format=json&format=html", r#""format" is given twice"#),
        ("with=%ff", "the query is not percent-encoded"),
        ("with=limit_advice&limit=256MB", r#"limit="256MB": expected digits, then B, k, m"#),
        ("with=limit_advice&limit=", r#"limit="": expected digits, then B, k, m"#),
        ("with=limit_advice&limit=0", r#"limit="0": expected an amount of memory above zero"#),
        ("limit=256Mi", r#"limit="256Mi": expected with=limit_advice in the same query"#),
    ] {
        let response = ask(&endpoints, &format!("/memory?{query}"), Some(BROWSER));
        assert_eq!(response.status(), StatusCode::BAD_REQUEST, "{query}");
        assert_eq!(response.headers()["content-type"], "application/problem+json");
        let told: Value = serde_json::from_str(response.body()).expect("JSON");
        let detail = told["detail"].as_str().expect("a text");
        assert!(detail.contains(about), "{query}: {detail}");
    }
}

#[test]
fn the_page_runs_nothing_but_its_own_script_and_asks_nobody_else() {
    let endpoints = Endpoints::new(None);
    let page = ask(&endpoints, "/memory", Some(BROWSER));
    let policy = page.headers()["content-security-policy"].to_str().expect("text");
    let rules: Vec<_> = policy.split(';').map(str::trim).collect();
    for rule in [
        "default-src 'none'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ] {
        assert!(rules.contains(&rule), "{rule}: {policy}");
    }
    for unsafe_word in ["unsafe", "http:", "https:", "*", "blob:"] {
        assert!(!policy.contains(unsafe_word), "{unsafe_word}: {policy}");
    }
    let body = page.body();
    let nonce = body.split("<script nonce=\"").nth(1).and_then(|rest| rest.split('"').next());
    let nonce = nonce.expect("the script has one");
    assert_eq!(nonce.len(), 32, "128 bits: {nonce}");
    assert_eq!(body.matches("<script").count(), 1);
    assert!(body.contains(&format!("<style nonce=\"{nonce}\">")), "{nonce}");
    for kind in ["script-src", "style-src"] {
        assert!(rules.contains(&format!("{kind} 'nonce-{nonce}'").as_str()), "{policy}");
    }
    let again = ask(&endpoints, "/memory", Some(BROWSER));
    assert!(!again.body().contains(nonce), "each answer has its own");
    assert!(body.len() <= 150 << 10, "{} bytes", body.len());
    assert!(!body.contains("{{"), "each part is in its place");
    for outside in ["src=\"", "@import", "url(", " style=\"", " onclick"] {
        assert!(!body.contains(outside), "{outside}");
    }
    let links = body.matches("http").filter(|_| true).count();
    assert_eq!(
        links,
        body.matches("http://www.w3.org/2000/svg").count(),
        "names of namespaces alone"
    );
    assert!(body.contains("<noscript>") && body.contains("?format=json"), "without a script");
}

#[test]
fn the_advice_on_limits_has_the_recorded_hours_and_the_effect_of_the_limit_that_was_given() {
    let (clock, tree) = (Arc::new(ManualClock::new()), Tree::new(ByteSize::mib(1000)));
    let memory = start(&clock, &tree);
    let endpoints = Endpoints::new(Some(memory.clone()));
    let admit = || drop(memory.admission().try_admit(Cost::host(ByteSize::mib(8))));
    advance_until(&clock, SECOND / 100, "requests are recorded", || {
        admit();
        memory.report().limit_advice().requests > 0
    });
    let told = |query: &str| told(&endpoints, &format!("/memory?{query}"))["limit_advice"].clone();
    let advice = told("with=limit_advice&limit=1.5Mi");
    assert_eq!(advice["limit_bytes"], ByteSize::mib(1000).get());
    assert_eq!(advice["smallest_limit_bytes"], Value::Null);
    assert_eq!(advice["requests_min"], 3_000);
    let text = advice["sentence"].as_str().expect("a sentence");
    assert!(text.starts_with("no advice yet: "), "{text}");
    let [hour] = &advice["hours"].as_array().expect("hours")[..] else { panic!("{advice}") };
    for key in ["start_seconds", "required_p999_bytes", "required_max_bytes", "requests"] {
        assert!(hour[key].is_number(), "{key}: {hour}");
    }
    let at = &advice["at"];
    assert_eq!(at["limit_bytes"], ByteSize::kib(1536).get());
    assert_eq!((&at["rejected_share"], &at["requests"]), (&json!(1.0), &advice["requests"]));
    assert!(at["exceeded_seconds"].is_number(), "{at}");
    assert!(at["sentence"].as_str().expect("a sentence").contains("1.5 MiB"), "{at}");
    assert_eq!(told("with=limit_advice")["at"], Value::Null);
    assert!(memory.shutdown_blocking(SOON).is_clean());
}

#[test]
fn every_setting_is_told_with_its_source() {
    let (clock, tree) = (Arc::new(ManualClock::new()), Tree::new(ByteSize::mib(100)));
    let memory = start(&clock, &tree);
    let settings = &told(&Endpoints::new(Some(memory)), "/memory?with=settings")["settings"];
    let ceiling = serde_json::json!({ "value": "0.8", "source": "default" });
    assert_eq!(settings["LOWTIDE_CEILING"], ceiling, "{settings}");
    let device = serde_json::json!({ "value": "host", "source": "code" });
    assert_eq!(settings["LOWTIDE_DEVICE"], device, "{settings}");
    assert_eq!(settings.as_object().map(|all| all.len()), Some(29));
    let heap = settings["heap"]["value"].as_str().expect("those of jemalloc");
    assert!(heap.starts_with("jemalloc ") && heap.contains(" narenas="), "{heap}");
}

#[test]
fn the_figures_are_told_alone_unless_parts_are_asked_for() {
    let (clock, tree) = (Arc::new(ManualClock::new()), Tree::new(ByteSize::mib(100)));
    let memory = start(&clock, &tree);
    let endpoints = Endpoints::new(Some(memory.clone()));
    let alone = told(&endpoints, "/memory");
    for part in PARTS {
        assert!(alone.get(part).is_none(), "{part}");
        let with = told(&endpoints, &format!("/memory?with={part}"));
        assert!(with.get(part).is_some(), "{part}");
        assert_eq!(with.as_object().map(|it| it.len()), alone.as_object().map(|it| it.len() + 1));
    }
    assert_eq!(told(&endpoints, ALL)["admin_tasks"], Value::Null, "no commands are heard");
    let hears = Endpoints::new(Some(memory.clone())).with_local_admin();
    let admin_tasks = json!({ "needs_token": false, "list": [] });
    assert_eq!(told(&hears, ALL)["admin_tasks"], admin_tasks);
    assert!(memory.shutdown_blocking(SOON).is_clean());
}

#[test]
fn the_map_tells_blocks_holes_idle_bare_and_asleep_bytes_without_addresses() {
    let (clock, tree) = (Arc::new(ManualClock::new()), Tree::new(ByteSize::mib(100)));
    let memory = start(&clock, &tree);
    let endpoints = Endpoints::new(Some(memory.clone()));
    let arena = memory.devices().open_arena("weights").expect("opens");
    let first = arena.alloc::<u8>(3 << 20, Region::Stable).expect("room");
    let second = arena.alloc::<u8>(1 << 20, Region::Stable).expect("room");
    let sums = || {
        clock.advance(SECOND); // a map is told for a while
        let told = told(&endpoints, ALL);
        let map = &told["map"][0];
        assert_eq!(map["arena"], "weights");
        let region = &map["regions"][0];
        let mut sums = [0; 4];
        for run in region["cells"].as_array().expect("cells") {
            let run: Vec<u64> = serde_json::from_value(run.clone()).expect("numbers");
            for (sum, bytes) in sums.iter_mut().zip(&run[2..]) {
                *sum += run[1] * bytes;
            }
        }
        (region["blocks"].as_u64().expect("a count"), sums.map(ByteSize::new))
    };
    let snapshot = arena.snapshot();
    let (live, none) = (ByteSize::mib(4), ByteSize::ZERO);
    assert_eq!(sums(), (2, [live, none, snapshot.active, snapshot.idle]));
    drop(first);
    let snapshot = arena.snapshot();
    assert_eq!(sums(), (1, [ByteSize::mib(1), none, snapshot.active, snapshot.idle]));
    assert!(!snapshot.idle.is_zero(), "{snapshot:?}");
    let (discard, drain) = (Contents::Discard, Duration::ZERO);
    arena.sleep(SleepOptions { drain, stable: discard, dynamic: discard }).expect("asleep");
    assert_eq!(sums(), (1, [ByteSize::mib(1), none, none, none]));
    drop(second);
    assert!(memory.shutdown_blocking(SOON).is_clean());
}

/// The bug: each that looked on had all blocks walked under the lock of their arena, and one that
/// named the map a thousand times a thousand times.
#[test]
fn a_map_is_kept_for_who_else_asks_until_its_time_or_until_arenas_change() {
    let (clock, tree) = (Arc::new(ManualClock::new()), Tree::new(ByteSize::mib(100)));
    let memory = start(&clock, &tree);
    let endpoints = Endpoints::new(Some(memory.clone()));
    let arena = memory.devices().open_arena("weights").expect("opens");
    let blocks = || told(&endpoints, ALL)["map"][0]["regions"][0]["blocks"].as_u64();
    assert_eq!(blocks(), Some(0));
    let alloc = || arena.alloc::<u8>(1 << 20, Region::Stable).expect("room");
    let first = alloc();
    clock.advance(Duration::from_millis(499));
    assert_eq!(blocks(), Some(0), "as it was told before");
    clock.advance(Duration::from_millis(1));
    assert_eq!(blocks(), Some(1), "who asks each second is told anew");
    let second = alloc();
    memory.devices().open_arena("another").expect("opens");
    assert_eq!(blocks(), Some(2), "of all arenas that there are");
    drop((first, second));
    assert!(memory.shutdown_blocking(SOON).is_clean());
}

#[test]
fn the_trail_and_the_events_tell_what_went_on_before_somebody_looked() {
    let (clock, tree) = (Arc::new(ManualClock::new()), Tree::new(ByteSize::mib(100)));
    let memory = start(&clock, &tree);
    let endpoints = Endpoints::new(Some(memory.clone()));
    let events = || told(&endpoints, ALL)["events"].as_array().expect("a list").clone();
    let has = |kind: &str, about: &str, text: &str| {
        events().iter().any(|event| {
            let of = |name: &str| event[name].as_str().expect("a text").to_owned();
            of("kind") == kind && of("about") == about && of("text").contains(text)
        })
    };
    let points =
        || told(&endpoints, ALL)["history"]["at_seconds"].as_array().expect("a list").len();
    advance_until(&clock, SECOND, "two points", || points() >= 2);
    let fails = || Err::<(), _>(lowtide::BoxError::from("no such file"));
    let broken = memory.managed("broken", fails).register().expect("registered");
    let model = memory.managed("model", || Ok(())).register().expect("registered");
    drop(model.acquire_blocking().expect("loads"));
    assert!(broken.acquire_blocking().is_err());
    // Each: the worker may publish between the two.
    advance_until(&clock, SECOND, "the load is told", || has("load", "model", "loaded"));
    advance_until(&clock, SECOND, "the failure is told", || has("load", "broken", "load failed"));
    assert_eq!(model.unload_now(SOON).ok(), Some(true));
    advance_until(&clock, SECOND, "the unload is told", || has("unload", "model", "manual"));
    tree.hold(99);
    advance_until(&clock, SECOND, "the level is told", || has("level", "host", "critical"));
    let arena = memory.devices().open_arena("weights").expect("opens");
    let buffer = arena.alloc::<u8>(1 << 20, Region::Stable).expect("room");
    let (discard, drain) = (Contents::Discard, Duration::ZERO);
    clock.advance(SECOND);
    advance_until(&clock, SECOND, "it is known", || memory.report().history().len() > 3);
    arena.sleep(SleepOptions { drain, stable: discard, dynamic: discard }).expect("asleep");
    drop(arena.enter().expect("wakes"));
    advance_until(&clock, SECOND, "the wake is told", || has("wake", "weights", "woke"));
    let history = &told(&endpoints, ALL)["history"];
    let columns = history.as_object().expect("columns");
    assert_eq!(columns.len(), 6);
    let lengths: Vec<_> = columns.values().map(|column| column.as_array().map(Vec::len)).collect();
    assert!(lengths.iter().all(|length| *length == lengths[0]), "{lengths:?}");
    drop(buffer);
    assert!(memory.shutdown_blocking(SOON).is_clean());
}

#[test]
fn a_resource_says_in_how_many_seconds_it_goes() {
    let (clock, tree) = (Arc::new(ManualClock::new()), Tree::new(ByteSize::mib(100)));
    let memory = start(&clock, &tree);
    let endpoints = Endpoints::new(Some(memory.clone()));
    let model = memory.managed("model", || Ok(())).idle(Duration::from_secs(60));
    let model = model.register().expect("registered");
    let unload_in = || told(&endpoints, "/memory")["resources"][0]["unload_in_seconds"].clone();
    assert_eq!(unload_in(), Value::Null, "it is not loaded");
    let guard = model.acquire_blocking().expect("loads");
    assert_eq!(unload_in(), Value::Null, "it is held");
    drop(guard);
    assert_eq!(unload_in(), 60.0);
    clock.advance(Duration::from_millis(12_500));
    assert_eq!(unload_in(), 47.5);
    assert!(memory.shutdown_blocking(SOON).is_clean());
}

#[test]
fn the_document_stays_under_a_mebibyte_with_a_million_blocks_and_a_thousand_names() {
    let (clock, tree) = (Arc::new(ManualClock::new()), Tree::new(ByteSize::gib(4)));
    let memory = start(&clock, &tree);
    let endpoints = Endpoints::new(Some(memory.clone()));
    let arena = memory.devices().open_arena("weights").expect("opens");
    let mut chance = 11_u64; // a seed
    let mut blocks: Vec<_> = (0..1_100_000)
        .map(|_| {
            chance = chance.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(1);
            let size = 1 + usize::try_from(chance >> 55).expect("below 512");
            arena.alloc::<u8>(size, Region::Dynamic).expect("room")
        })
        .collect();
    let mut nth = 0;
    blocks.retain(|_| {
        nth += 1;
        nth % 11 > 0 // so that there are holes everywhere
    });
    let name = |nth: usize| format!("resource number {nth} with a name that is not short");
    for nth in 0..1024 {
        memory.managed(&name(nth), || Ok(())).register().expect("registered");
    }
    for nth in 0..63 {
        memory.devices().open_arena(&format!("another arena, number {nth}")).expect("opens");
    }
    let body = ask(&endpoints, ALL, None).into_body();
    assert!(body.len() <= 1 << 20, "{} bytes", body.len());
    let told: Value = serde_json::from_str(&body).expect("JSON");
    let found = told["map"][0]["regions"][1]["blocks"].as_u64().expect("a count");
    assert!(found >= 1_000_000, "and what fronts keep: {found}");
    let again = |nth: usize| told["map"][nth]["again_in_seconds"].as_u64().expect("seconds");
    assert!((10..=12).contains(&again(0)), "{} s: its lock is held for all blocks", again(0));
    assert_eq!(again(1), 1, "an arena without blocks");
    let cells = told["map"][0]["regions"][1]["cells"].as_array().expect("cells").len();
    assert!((8..=16).contains(&cells), "{cells} runs of cells");
    drop(blocks);
    assert!(memory.shutdown_blocking(SOON).is_clean());
}
