//! Sentences of the page for operators, about the loop, the worker, the arenas and the alerts.
//!
//! Invariant: each sentence with a number of this crate has one row.

use std::time::Duration;

use super::super::alert::Alert;
use super::{Row, band, expect, jemalloc, k, of_loop, of_profile, same, seconds, ticks, values};
use crate::text::code::Code;
use crate::text::words::{first_of_a_sentence, how_often, percent, spoken, time, word};

const PAGE: &str = "docs/OPERATING.md";

/// The service of the bench, with settings that the page repeats.
const BENCH: &str = "benches/room/hostage/service.rs";

/// Idle memory is released until this many times the watermark are free: the tests of `Watermark`
/// give 150 of 1000 MiB for a watermark of 0.1.
const RELEASED_UNTIL: f64 = 1.5;

/// `ten` of `(10, Duration::from_secs(1))`.
fn at_once(code: &Code<'_>, name: &str) -> String {
    let pair = code.constant(&format!("admin::{name}")).list();
    if let [burst, each] = pair.as_slice() {
        let each = each.time() == Duration::from_secs(1);
        expect(code, each, &format!("{PAGE}: one a second of {name}"));
        return word(burst.number());
    }
    code.faults.say(format!("{name}: expected a burst and a time"));
    String::new()
}

pub(super) fn rows(code: &Code<'_>) -> Vec<Row> {
    let all = [
        published,
        levels,
        slow_clients,
        time_limits,
        load_reports,
        connections,
        caches,
        profiles,
        admin_rates,
        routes,
        usage,
        kernel,
        fits,
        purges,
        threads,
        device,
        sleep,
        last_exit,
    ];
    let rows = all.into_iter().flat_map(|rows| rows(code));
    rows.map(|(says, values)| Row { page: PAGE, says, values }).collect()
}

type Rows = Vec<(&'static str, Vec<String>)>;

/// Fits in a smaller limit.
fn fits(code: &Code<'_>) -> Rows {
    let of = |name: &str| code.constant(name).time();
    let margin = code.constant("fit::MARGIN_PART");
    vec![
        (
            "`within` ({} by default, from {} to {})",
            values![
                time(of("admin_tasks::FIT_WITHIN")),
                time(of("admin_tasks::FIT_TIME_MIN")),
                spoken(of("admin_tasks::FIT_TIME_MAX")),
            ],
        ),
        (
            "stayed below {}/{} of the limit for {}.",
            values![(margin.whole() - 1).to_string(), margin.count(), time(of("fit::STAYS"))],
        ),
        ("the limit was not lowered within {}", values![spoken(of("fit::HOLD"))]),
        ("fails once no memory was freed for {}", values![time(of("fit::STILL"))]),
        ("After {}, lowtide asks caches", values![time(of("fit::RELEASE_EVERY"))]),
    ]
}

/// Heap profiles.
fn profiles(code: &Code<'_>) -> Rows {
    let pair = code.constant("profile::PROFILES").list();
    let each = pair.get(1).map_or_else(String::new, |each| time(each.time()));
    vec![
        ("One profile is taken per {}; further requests", values![each]),
        (
            "when the service has run for {} (`baseline`)",
            values![time(code.constant("trigger::SETTLED").time())],
        ),
        (
            "At most {} files of a run are kept, of {} in all",
            values![
                code.constant("folder::FILES_MAX").count(),
                code.constant("folder::BYTES_MAX").size()
            ],
        ),
    ]
}

fn published(code: &Code<'_>) -> Rows {
    let hook = code.constant("HOOK_EVERY").time();
    let each = code.constant("PAUSE_PER_MIB").time();
    vec![
        (
            "Its worker thread publishes {} (`LOWTIDE_METRICS_INTERVAL`)",
            values![how_often(code.constant("Config::METRICS_INTERVAL").time())],
        ),
        ("runs it after a publication, at most once in {}.", values![time(hook)]),
        // A hundred times as long lies between two.
        ("| a purge: about {} per MiB |", values![time(each / 100)]),
    ]
}

fn slow_clients(code: &Code<'_>) -> Rows {
    vec![
        (
            "those that have waited for their clients for {}:",
            values![time(code.constant("large::SLOW_AFTER").time())],
        ),
        (
            "keeps what it holds, and {} for what arrives next",
            values![code.constant("permit::WINDOW").size()],
        ),
        (
            "the caller of a load waits for room for at most {}, ahead of requests",
            values![time(code.constant("evict::LOAD_WAIT").time())],
        ),
        (
            "after `max_wait` ({} if that is zero)",
            values![time(code.constant("Config::MAX_WAIT").time())],
        ),
        (
            "`/memory?with=permits` lists the {} oldest requests",
            values![code.constant("memory::LARGEST_MAX").count()],
        ),
    ]
}

fn time_limits(code: &Code<'_>) -> Rows {
    let timeout = time(code.default_with("body_timeout").field("body_timeout").time());
    vec![
        ("The proxy's are {}/s and {}.", values![code.constant("RATE_MIN").size(), timeout]),
        ("up to {} more than the rate", values![code.constant("pace::BUFFERED").size()]),
        (
            "The control loop looks every {},",
            values![time(code.constant("large::TIME_CHECKED_EVERY").time())],
        ),
        (
            "if more than {} requests wait, it looks",
            values![code.constant("large::LARGE_MAX").count()],
        ),
    ]
}

fn load_reports(code: &Code<'_>) -> Rows {
    let (window, shown) = (code.constant("REPORT_WINDOW"), code.constant("SHED_SHOWN"));
    let shortest = &time(code.constant("request::INTERVAL_MIN").time());
    let hour = code.constant("request::INTERVAL_MAX").time() == Duration::from_secs(3600);
    expect(code, hour, &format!("{PAGE}: an hour between reports"));
    vec![
        ("Utilizations and rates are averages over {}, except", values![time(window.time())]),
        ("from the first rejection until {} after the last one,", values![time(shown.time())]),
        (
            "every `report_interval`: {} by default; shorter than {} counts as {}, and longer than \
             an hour as an hour.",
            values![time(code.constant("INTERVAL_DEFAULT").time()), shortest, shortest],
        ),
        (
            "At most {} streams are open; further ones end",
            values![code.constant("streams::STREAMS_MAX").count()],
        ),
    ]
}

fn connections(code: &Code<'_>) -> Rows {
    let of = |name: &str| code.constant(&format!("connections::{name}"));
    let (part, pace) = (of("PART").count(), of("PACE").count());
    expect(code, part == "4" && pace == "4", &format!("{PAGE}: a quarter, and three quarters"));
    let grace = time(of("GRACE").time());
    let in_bench = |name: &str| {
        format!("{} KiB", code.within(BENCH, &format!("const {name}: u32 = "), " << 10;"))
    };
    vec![
        ("(`with_estimate`, {} by default)", values![of("ESTIMATE").size()]),
        ("and for more than {} (`with_grace`)", values![grace.clone()]),
        ("the new connection waits, for {} at most;", values![grace]),
        (
            "until the client closes, for at most {} and {}.",
            values![
                time(code.constant("linger::LINGER_TIME").time()),
                code.constant("DRAIN_MAX").size()
            ],
        ),
        (
            "| `initial_connection_window_size` | {} | 1 MiB |",
            values![in_bench("CONNECTION_WINDOW")],
        ),
        ("| `initial_stream_window_size` | {} | 1 MiB |", values![in_bench("STREAM_WINDOW")]),
        ("| `max_frame_size` | {} | 16 KiB |", values![in_bench("FRAME")]),
        (
            "| `max_concurrent_streams` | {} | 200 |",
            values![code.within(BENCH, "const STREAMS: u32 = ", ";")],
        ),
        ("| `Connections::with_estimate` | 144 KiB | |", values![]),
    ]
}

fn levels(code: &Code<'_>) -> Rows {
    let band = |level| band(code, level).map(percent).into();
    let pause = code.constant("reclaim::PAUSE_MIN").time();
    let touched = (3.0 * 1024.0 * of_loop(code, "active_tick").time().as_secs_f64()).floor();
    let wait = code.constant("Config::MAX_WAIT").time();
    let entries = code.constant("waiting::ENTRIES_MAX").count();
    let each = code.constant("waiting::ENTRY_BYTES").size();
    let part = code.constant("waiting::PART").count();
    expect(code, each == "16 KiB" && part == "16", &format!("{PAGE}: a request for each 256 KiB"));
    vec![
        ("for at most {} (`LOWTIDE_MAX_WAIT`", values![time(wait)]),
        ("At most {} requests wait, and no more than one for each 256 KiB", values![entries]),
        (
            "up to the ceiling, {} of the limit",
            values![format!(
                "{:.0} to {}",
                100.0 * code.constant("Config::CEILING").number(),
                percent(of_loop(code, "ceiling_max").number())
            )],
        ),
        (
            "The ceiling starts at {} of the limit, where no run of the overload bench was killed,",
            values![percent(code.constant("Config::CEILING").number())],
        ),
        (
            "it rises by at most {} of the limit with each generation of requests",
            values![percent(code.constant("ceiling::STEP").number())],
        ),
        ("needed at least {} of it", values![percent(code.constant("ceiling::USED").number())]),
        (
            "The reserve is the largest of - {} of the limit, or {} if that is more",
            values![
                percent(1.0 - of_loop(code, "ceiling_max").number()),
                code.constant("ceiling::RESERVE_MIN").size(),
            ],
        ),
        ("| elevated | {} | {} |", band("Elevated")),
        ("| high | {} | {} |", band("High")),
        ("| critical | {} | {} |", band("Critical")),
        ("heap and the arenas, at most {} and less often", values![how_often(pause)]),
        (
            "left one step at a time, after {} below",
            values![time(code.default_with("dwell").field("dwell").time())],
        ),
        (
            "A request that declares more than {} is treated like any other",
            values![code.constant("EXEMPT_BODY_MAX").size()],
        ),
        ("reserves {};", values![code.constant("EXEMPT_BODY_MAX").size()]),
        ("before it answers, up to {} of it,", values![code.constant("DRAIN_MAX").size()]),
        (
            "counts until it is sent, except the first {} of less than {}",
            values![
                code.constant("body::PLAIN_FRAMES").number().to_string(),
                code.constant("FOLLOWED_MIN").size()
            ],
        ),
        ("within one poll, to {};", values![code.constant("account::PEAK_MIN").size()]),
        (
            "frames of up to {} that the handler reads and others free, up to {} too much",
            values![code.constant("COPIED_MAX").size(), code.constant("PLAIN_MAX").size()],
        ),
        ("which are larger, up to {}.", values![code.constant("LENT_MAX").size()]),
        (
            "so fast that the limit is {} samples away",
            values![word(code.constant("TICKS_TO_FULL").number())],
        ),
        ("up to 3 GiB a second, which is {} MiB between two samples", values![touched.to_string()]),
        ("that is wrong by more than {} times", values![word(k(code, "K_MAX"))]),
    ]
}

fn caches(code: &Code<'_>) -> Rows {
    let pauses = ["PAUSE_MIN", "PAUSE_MAX"].map(|name| code.constant(&format!("reclaim::{name}")));
    let [_, low] = band(code, "Elevated").map(percent);
    expect(code, code.constant("ANSWER_MAX").time() == Duration::from_secs(1), "a second");
    expect(code, code.constant("eviction::ROUND_MAX").time() == Duration::from_secs(1), "a second");
    vec![
        (
            "at level high, for what is held above {} of the limit and a purge does not release.",
            values![low],
        ),
        (
            "the pause before the next one doubles, from {} to {}.",
            pauses.map(|pause| time(pause.time())).into(),
        ),
        (
            "(`AdmissionMemoryPool::with_min`, default {})",
            values![code.constant("pool::MIN").size()],
        ),
    ]
}

fn admin_rates(code: &Code<'_>) -> Rows {
    vec![
        (
            "{} commands at once, then one a second",
            values![first_of_a_sentence(&at_once(code, "COMMANDS"))],
        ),
        (
            "Rejected ones are logged too: {} at once, then one a second",
            values![at_once(code, "LOGGED")],
        ),
    ]
}

fn routes(code: &Code<'_>) -> Rows {
    let of = |name: &str| code.constant(name).count();
    vec![
        ("The map has at most {} cells.", values![of("devices::CELLS_MAX")]),
        (
            "`again_in_seconds` says when to request it again, a second for each {} blocks",
            values![of("devices::BLOCKS_EACH_SECOND")],
        ),
        ("The document stays under {}.", values![code.constant("render::BYTES_MAX").size()]),
        ("lists the {} running requests that hold most memory", values![of("memory::LARGEST_MAX")]),
        (
            "listed once it is [measured](#measured-requests) to hold {}",
            values![code.constant("large::LARGE_MIN").size()],
        ),
        (
            "`with=permits` lists the {} oldest of those that have reserved {} and",
            values![of("memory::LARGEST_MAX"), code.constant("large::REGISTERED_MIN").size()],
        ),
        ("`keep` (default {}) |", values![code.between("query.get(\"keep\").unwrap_or(\"", "\"")]),
        (
            "`list` (the last {}, oldest first) and `needs_token`. At most {} wait;",
            values![of("admin_tasks::KEPT_MAX"), of("admin_tasks::WAITING_MAX")],
        ),
        (
            "the token, of {} to {} characters",
            values![of("token::LENGTH_MIN"), of("token::LENGTH_MAX")],
        ),
        (
            "it doubles every {} while requests of the route wait and do not grow beyond",
            values![time(code.constant("slow_start::STEP").time())],
        ),
        ("would fit if each needed {} times its estimate", values![of("slow_start::EXPANSION")]),
        ("that takes {} times as long", values![of("slow_start::ARRIVING")]),
        ("are of about the last {} requests", values![of("need::WINDOW")]),
        (
            "The margin is {} standard deviations of the sum of all requests",
            values![code.constant("need::DEVIATIONS").number().to_string()],
        ),
        (
            "to need {} or more until {} of them are measured",
            values![
                code.constant("estimate::UNDECLARED").size(),
                code.constant("LESSONS_UNDECLARED").number().to_string()
            ],
        ),
        (
            "holds more than {} times its claim and more than {}, and memory is short",
            values![
                k(code, "layer::REQUEST_CAP").to_string(),
                code.constant("permit::CAP_MIN").size()
            ],
        ),
        (
            "released its memory, or after {}. Requests that are less than {} above",
            values![
                time(code.constant("large::GRACE").time()),
                code.constant("large::LARGE_MIN").size()
            ],
        ),
        ("the layer drops it {} later,", values![time(code.constant("large::GRACE").time())]),
        (
            "for each of at most {} routes, the {}th percentile",
            values![of("routes::ROUTES_MAX"), of("learned::PERCENTILE")],
        ),
    ]
}

fn usage(code: &Code<'_>) -> Rows {
    let of = |name: &str| code.constant(name).count();
    vec![
        (
            "once it holds {}, and when that has changed by as much",
            values![code.constant("permit::REPORTED_MIN").size()],
        ),
        ("At most {} routes have figures of their own,", values![of("usage::ROUTES_MAX")]),
        (
            "and only while fewer than {} routes have them",
            values![(code.constant("usage::ROUTES_MAX").number() / 2.0).to_string()],
        ),
        ("At most {} tenants have figures of their own,", values![of("usage::TENANTS_MAX")]),
        ("Names are shortened to {} bytes.", values![of("usage::NAME_MAX")]),
    ]
}

fn kernel(code: &Code<'_>) -> Rows {
    let [moving, still] = ["MOVING_MAX", "STILL_MAX"].map(|name| time(code.constant(name).time()));
    vec![("at most {} later, or {} in an idle process", values![moving, still])]
}

fn last_exit(code: &Code<'_>) -> Rows {
    let of = |name: &str| code.constant(&format!("flight::last_exit::{name}"));
    let half = same(of("KILLED_NEARBY").number(), 0.5);
    expect(code, half, "docs/OPERATING.md: half of the limit");
    let of_format = |name: &str| code.constant(&format!("flight::format::{name}"));
    let counts = ["EVENTS_MAX", "PERMITS_MAX", "RESOURCES_MAX"].map(|name| of_format(name).count());
    let [events, permits, resources] = counts;
    let look = code.constant("flight::recorder::LOOK_EVERY").time();
    let moved = code.constant("flight::recorder::MOVED_PART").count();
    vec![
        ("its last five minutes in a file of {}, which", values![of_format("FILE_BYTES").size()]),
        (
            "physical memory was at {} of the limit, or at its growth would have been at {} \
             within {};",
            values![
                percent(of("AT_LIMIT").number()),
                percent(of("REACHED").number()),
                time(of("EXPECTED").time())
            ],
        ),
        (
            "the last {} events, the {} requests that had reserved most memory, and {} \
             resources. Physical memory is looked at every {} and written when it has moved by \
             1/{} of the limit",
            values![events, permits, resources, time(look), moved],
        ),
    ]
}

fn purges(code: &Code<'_>) -> Rows {
    let pause = code.constant("reclaim::PAUSE_MIN").time();
    let each = code.constant("PAUSE_PER_MIB").time();
    let looks = code.constant("LOOKS_PER_DECAY").number();
    let heap = |name: &str| time(code.constant(&format!("heap::{name}")).time());
    let quarter = of_loop(code, "purge_part").number();
    expect(code, same(quarter, 0.25), "docs/OPERATING.md: a quarter of the live bytes");
    for method in ["purge_when_idle_for", "purge_growth"] {
        let never = of_profile(code, "Throughput", method).is_nothing();
        expect(code, never, &format!("docs/OPERATING.md: {method}, never in throughput"));
    }
    let quiet = ["LowMemory", "Balanced"].map(|of| of_profile(code, of, "purge_when_idle_for"));
    let [a, b] = ["LowMemory", "Balanced"].map(|of| of_profile(code, of, "purge_growth"));
    let hold = a.field("hold").time();
    expect(code, hold == b.field("hold").time(), "docs/OPERATING.md: one time for both");
    vec![
        ("the level is elevated or higher: at most once in {}, less", values![time(pause)]),
        (
            "no request was held for {} (`low-memory`) or {} (`balanced`; never in `throughput`)",
            quiet.map(|time| seconds(&time)).into(),
        ),
        (
            "more than {} is purgeable, and more than a quarter of the live bytes.",
            values![of_loop(code, "purge_floor").size()],
        ),
        (
            "for {} the process has kept more than at the minimum since the last purge: by more \
             than {} and {} of its anonymous memory (`low-memory`), or {} and {} (`balanced`); \
             never in `throughput`",
            values![
                time(hold),
                a.field("floor").size(),
                percent(a.field("part").number()),
                b.field("floor").size(),
                percent(b.field("part").number())
            ],
        ),
        (
            "at least {} for each MiB kept, so they take at most {} of a core",
            values![time(each), percent(0.0001 / each.as_secs_f64())],
        ),
        (
            "{} times in a decay time, at intervals of {} to {}.",
            values![word(looks), heap("DECAY_INTERVAL_MIN"), heap("DECAY_INTERVAL_MAX")],
        ),
    ]
}

fn threads(code: &Code<'_>) -> Rows {
    let each = code.constant("ARENAS_PER_CPU").number();
    vec![
        ("over the first `{} x CPUs` arenas", values![each.to_string()]),
        (
            "with 64 CPUs and a quota of 2 it makes room for {} arenas, each with free pages of \
             its own; with the hook threads use {}.",
            values![(64.0 * each).to_string(), (2.0 * each).to_string()],
        ),
        (
            "`global_allocator!(balanced)` has {}, or",
            values![jemalloc(code, "Balanced", "narenas")],
        ),
    ]
}

fn device(code: &Code<'_>) -> Rows {
    let looks = code.constant("DEVICE_INTERVAL_MAX").time();
    let low = code.constant("DeviceConfig::WATERMARK").number();
    let calm = code.constant("CALM").time();
    let decay = code.written("let decay = DecayTime::from_duration(", ");").time();
    vec![
        (
            "{} the worker reads the device's free memory",
            values![first_of_a_sentence(&how_often(looks))],
        ),
        ("`LOWTIDE_DEVICE_WATERMARK`, {} of the device by default,", values![percent(low)]),
        ("the last {} of the device are not kept idle", values![percent(low * RELEASED_UNTIL)]),
        ("when the target has been free for {},", values![spoken(calm)]),
        ("released after the decay time ({})", values![time(decay)]),
        (
            "A list is kept for {}, whatever the number of clients",
            values![time(code.constant("process_lists::KEPT").time())],
        ),
        (
            "the answer waits for it for at most {};",
            values![time(code.constant("slow_value::ANSWER_WAIT").time())],
        ),
        (
            "`is_this_process`. At most {}, those with most memory first",
            values![code.constant("nvml::PROCESSES_MAX").count()],
        ),
        (
            "as `device_lost` from the next tick of the sampler ({}), which makes",
            values![ticks(code)],
        ),
    ]
}

fn sleep(code: &Code<'_>) -> Rows {
    let again = code.constant("AGAIN").time();
    vec![
        ("within the idle time and a tick of the sampler ({})", values![ticks(code)]),
        ("the arena stays awake and tries again after {};", values![time(again)]),
        (
            "waits for the memory, for up to {} if the device is full",
            values![spoken(code.default_with("wake_timeout").field("wake_timeout").time())],
        ),
        (
            "It releases whole stores, each of up to {}, so less than the limit may stay: of one \
             store of 64 MiB with a limit of 32 MiB, nothing.",
            values![code.constant("stores::STORE_MAX").size()],
        ),
    ]
}

pub(super) fn alerts(code: &Code<'_>) -> Vec<Row> {
    let all = [heap_alerts, host_alerts, request_alerts, device_alerts];
    let rows = all.into_iter().flat_map(|rows| rows(code));
    rows.map(|(says, values)| Row { page: PAGE, says, values }).collect()
}

fn heap_alerts(code: &Code<'_>) -> Rows {
    let retained = Alert::named(code, "LowtideHeapRetainedHigh");
    let fragmented = Alert::named(code, "LowtideHeapFragmented");
    vec![
        (
            "for {} more than {} of the heap has been retained, and more than {} of the memory \
             limit",
            values![
                spoken(retained.lasts),
                percent(retained.after("live_bytes > 0) > ")),
                percent(retained.after("retained_bytes > "))
            ],
        ),
        (
            "for {} more than {} of the heap (live and fragmentation) has been fragmentation, and \
             more than {} of the memory limit",
            values![
                spoken(fragmented.lasts),
                percent(fragmented.after("> 0 ) > ")),
                percent(fragmented.after("> on (job, instance) "))
            ],
        ),
    ]
}

fn host_alerts(code: &Code<'_>) -> Rows {
    let up = |level| percent(band(code, level)[0]);
    let near = Alert::named(code, "LowtideMemoryNearLimit");
    let hours = Alert::named(code, "LowtideMemoryLimitInHours");
    let fast = Alert::recorded(code, "instance:lowtide_pressure_limit_fast:hours");
    let slow = Alert::recorded(code, "instance:lowtide_pressure_limit_slow:hours");
    let stale = Alert::named(code, "LowtideLimitStale");
    let sampler = Alert::named(code, "LowtideSamplerStale");
    let old = Duration::from_secs_f64(sampler.after("timestamp_seconds > "));
    let refused = code.constant("REFUSED_FOR").time();
    let exhausted = code.constant("EXHAUSTED").time();
    let policy = code.setting("Balanced", "exhaustion_policy");
    let of = |policy: &str, name: &str| {
        code.constant(&format!("ExhaustionPolicy::{policy}")).field(name).time()
    };
    vec![
        (
            "above {} of the limit for {}, with less than {} left. Purging began at {}, unloading \
             at {}; from {} on only high-priority requests that fit",
            values![
                percent(near.after("per_limit:ratio > ")),
                spoken(near.lasts),
                near.size_after("physical_bytes < "),
                up("Elevated"),
                up("High"),
                up("Critical")
            ],
        ),
        (
            "after requests have been rejected for {}. Requests are rejected as `exhausted` with a \
             retry time of {} to {},",
            values![time(refused), time(exhausted), time(2 * exhausted)],
        ),
        ("| `{}` (default) | rejected |", values![code.name_of(&policy.value)]),
        ("if it fits below {} of the limit (level `critical`)", values![up("Critical")]),
        (
            "503 once requests have been rejected for {} and none was admitted",
            values![time(refused)],
        ),
        ("It ends once there has been room for {}.", values![time(refused)]),
        (
            "503 after {} (`serve-one:10m` sets another time)",
            values![time(of("SERVE_ONE", "grace"))],
        ),
        ("at least {} old (`exit:10m` sets another time)", values![time(of("EXIT", "min_uptime"))]),
        (
            "growth of the last hour would reach the limit within {} hours, from at least {} of it",
            values![word(fast.after(" > 0 ) < ")), percent(fast.after("min10m > "))],
        ),
        (
            "growth of the last six hours, at least {} of the limit, would reach it within {} \
             hours, from at least {}, or {} if the process has run for a day",
            values![
                percent(slow.after("6h > ")),
                word(slow.after("_bytes ) < ")),
                percent(slow.after(" and ( instance:lowtide_pressure_required:min10m > ")),
                percent(slow.after("or ( instance:lowtide_pressure_required:min10m > "))
            ],
        ),
        ("It must last for {}.", values![spoken(hours.lasts)]),
        ("**Meaning:** for {} the cgroup file", values![spoken(stale.lasts)]),
        ("has not updated its figures for {}. The", values![spoken(old)]),
        ("if `LOWTIDE_METRICS_INTERVAL` is above {}, raise", values![spoken(old)]),
    ]
}

fn request_alerts(code: &Code<'_>) -> Rows {
    let shed = Alert::named(code, "LowtideRequestsShed");
    let thrashing = Alert::named(code, "LowtideResourceThrashing");
    let fail = Alert::named(code, "LowtideResourceLoadsFail");
    let kill = Alert::named(code, "LowtideOomKill");
    let down = Alert::named(code, "LowtideDown");
    let restarts = Alert::named(code, "LowtideRestarts");
    vec![
        (
            "**Meaning:** more than {} of the requests of the last minute, or more than {} of \
             those of the last half hour, were rejected.",
            values![percent(shed.after("ratio1m > ")), percent(shed.after("ratio30m > "))],
        ),
        (
            "a resource was loaded more than {} times in {}.",
            values![word(thrashing.after("[30m])) > ")), spoken(thrashing.window())],
        ),
        ("has failed within the last {}. Every request", values![spoken(fail.window())]),
        ("for memory within the last {} (`lowtide_pressure", values![spoken(kill.window())]),
        ("**Meaning:** for {} an instance that was scraped", values![spoken(down.lasts)]),
        (
            "has started {} times or more within {}: `process_start",
            values![word(restarts.after("[30m])) > ") + 1.0), spoken(restarts.window())],
        ),
    ]
}

fn device_alerts(code: &Code<'_>) -> Rows {
    let fail = Alert::named(code, "LowtideDeviceAllocationsFail");
    let retained = Alert::named(code, "LowtideDeviceRetainedHigh");
    let wake = Alert::named(code, "LowtideWakeFailures");
    let stuck = Alert::named(code, "LowtideDeviceStuck");
    let half = retained.after("per_committed:ratio > ");
    assert!((half - 0.5).abs() < f64::EPSILON, "the page says half");
    vec![
        (
            "(`lowtide_device_alloc_failures_total`) in the last {}. The work",
            values![spoken(fail.window())],
        ),
        (
            "more than half of the device memory of an arena has been without a live block for \
             {}, and that is more than {} of the device's memory",
            values![
                spoken(retained.lasts),
                percent(retained.after("> on (job, instance, device) group_left () "))
            ],
        ),
        ("was used within the last {} and could", values![spoken(wake.window())]),
        (
            "has failed within the last {} (`lowtide_device_rollback_failures",
            values![spoken(stuck.window()).trim_start_matches("an ")],
        ),
    ]
}
