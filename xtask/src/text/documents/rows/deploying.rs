//! The page on deployment: limits, times and formulas, and what the example proxy goes by.
//!
//! The tables of variables and of ONNX Runtime's settings are `tests/deploying`'s.
//!
//! Invariant: what a formula gives is worked out here, not copied.

use lowtide::ByteSize;
use lowtide::config::{Config, Profile};
use lowtide::host::HeapProfile;

use super::{Row, config, jemalloc, k, loop_settings, rows as of_page, seconds, values};
use crate::code::{Amount, between, constant, size, spoken, time, word, written};
use crate::text;

const PAGE: &str = "docs/DEPLOYING.md";
const POD: &str = "deploy/kubernetes.yaml";
const UPSTREAM: &str = "examples/proxy/upstream.rs";

/// The example of the page: 64 MiB of weights, 10 MiB of other memory, a body of 8 MiB.
const WEIGHTS: f64 = 64.0;
const OTHER: f64 = 10.0;
const BODY: f64 = 8.0;

pub(super) fn rows() -> Vec<Row> {
    [limits(), formulas(), proxy(), times()].into_iter().flatten().collect()
}

fn limits() -> Vec<Row> {
    let low = config(Profile::LowMemory);
    let unit = between("deploy/lowtide-proxy.service", "\nMemoryMax=", "M\n");
    let compose = text("compose.yaml");
    let limit = compose.split("mem_limit: ").nth(1).and_then(|rest| rest.split('\n').next());
    let limit: ByteSize = limit.expect("the proxy is first").parse().expect("an amount");
    let cpus = compose.split("cpus: ").nth(1).and_then(|rest| rest.split('\n').next());
    let cpus: f64 = cpus.expect("the proxy is first").parse().expect("a number");
    let pod = between(POD, "limits: { memory: ", "Mi }");
    let docker: ByteSize = "512m".parse().expect("an amount");
    of_page(
        PAGE,
        [
            ("The unit sets a limit of {} MiB (systemd's `M` is MiB)", values![unit]),
            (
                "`_RJEM_MALLOC_CONF` | {} arenas, no huge pages",
                values![jemalloc(HeapProfile::LowMemory, "narenas")],
            ),
            (
                "{} background thread; purge after {} without traffic |",
                values![low.background_threads.value.to_string(), seconds(low.purge_when_idle_for)],
            ),
            ("model that was idle for {} is unloaded", values![spoken(low.idle_unload.value)]),
            (
                "starts the proxy under {}, {} CPU and the low-memory profile",
                values![size(limit.get()), word(cpus)],
            ),
            ("| memory requested = limit, {} MiB |", values![pod]),
            (
                "such as `512m` means {}, as Docker reads it",
                values![format!("{} MiB", docker.get() >> 20)],
            ),
            ("sets the columns on the right; unset: `{}` |", values![Profile::default().name()]),
        ],
    )
}

fn formulas() -> Vec<Row> {
    let (start, least, most) = (k("K_START"), k("K_MIN"), k("K_MAX"));
    let factor = constant(UPSTREAM, "WORDS_FACTOR").number();
    let (measured, unmeasured) = (k("MEASURED_PART"), k("UNMEASURED"));
    let waits = loop_settings().idle_tick.mul_f64(unmeasured);
    let ceiling = format!("{:.2}", Config::CEILING);
    let one = BODY * factor;
    let held = OTHER + WEIGHTS;
    let all = (held + start * one) / Config::CEILING;
    let alone = Config::CEILING * (1.0 - start / measured);
    of_page(
        PAGE,
        [
            (
                "| the measured need of a reserved byte; `LOWTIDE_CORRECTION_FACTOR`, {}, until \
                 measured, then {} to {} |",
                values![start.to_string(), least.to_string(), most.to_string()],
            ),
            ("| ceiling | `LOWTIDE_CEILING` | {} |", values![ceiling.clone()]),
            (
                "limit >= (other + {} x largest cost) / {} For",
                values![start.to_string(), ceiling.clone()],
            ),
            (
                "For 8 MiB of body at `/words` with 64 MiB of weights that is (10 + 64 + {} x {}) \
                 / {} = {} MiB.",
                values![
                    start.to_string(),
                    one.to_string(),
                    ceiling.clone(),
                    all.round().to_string()
                ],
            ),
            (
                "After {} samples in a row without a measurement (about {} in an idle service), a \
                 request is admitted at its plain cost, without the factor, if the requests in \
                 progress have reserved at most 1/{} of the ceiling.",
                values![word(unmeasured), spoken(waits), measured.to_string()],
            ),
            (
                "limit >= (other + largest cost) / ({} x (1 - {} / {}))",
                values![ceiling, start.to_string(), measured.to_string()],
            ),
            (
                "which is (10 + 64 + {}) / {} = {} MiB for the example. So 256 MiB lets it pass",
                values![
                    one.to_string(),
                    format!("{alone:.2}"),
                    ((held + one) / alone).round().to_string()
                ],
            ),
        ],
    )
}

fn proxy() -> Vec<Row> {
    let embed = "examples/proxy/embed.rs";
    let serve = "examples/proxy/serve.rs";
    let more = written(UPSTREAM, "saturating_mul(WORDS_FACTOR).saturating_add(", ")");
    let buffer = constant("examples/proxy/forward.rs", "BUFFER_MAX").number();
    let words = between(UPSTREAM, "    (1024 + text_bytes / ", ")\n");
    assert_eq!(words, "4, 1024 + text_bytes / 24", "what the page says of too many words");
    of_page(
        PAGE,
        [
            (
                "| `/words`: {} bytes for each byte of body and {}; `/embed`: {} and {}; \
                 forwarded: {} |",
                values![
                    constant(UPSTREAM, "WORDS_FACTOR").count(),
                    more.size(),
                    constant(embed, "BODY_FACTOR").count(),
                    constant(embed, "REST").size(),
                    Amount::Number(4.0 * buffer).size()
                ],
            ),
            (
                "more than 1,024 + length / 4 words, or of more than 1,024 + length / 24 different",
                values![],
            ),
            (
                "| size of the model's weights, {} or more |",
                values![between(
                    "examples/proxy/cli.rs",
                    "weights of {size}: expected ",
                    " or more"
                )],
            ),
            (
                "must also come at {}/s on average",
                values![constant("examples/proxy/patience.rs", "RATE_MIN").size()],
            ),
            (
                "at most (`ulimit -n` - {}) / {}, as each may take {} descriptors",
                values![
                    constant(serve, "DESCRIPTORS_SPARE").count(),
                    constant(serve, "DESCRIPTORS").count(),
                    constant(serve, "DESCRIPTORS").count()
                ],
            ),
            ("with {} connections of its own;", values![constant(serve, "OPERATORS").count()]),
        ],
    )
}

fn times() -> Vec<Row> {
    let end = written("examples/proxy/cli.rs", "memory.shutdown(", ")).await");
    let Amount::Time(end) = end else { panic!("{end:?} is no time") };
    let asks = between("Dockerfile", "HEALTHCHECK --interval=", " ");
    let asks = humantime::parse_duration(&asks).expect("a time");
    let sleeps = between(POD, "preStop: { sleep: { seconds: ", " }");
    let patience = between(POD, "terminationGracePeriodSeconds: ", "\n");
    let [drain, grace] = ["PROXY_DRAIN", "PROXY_GRACE"]
        .map(|name| between(POD, &format!("{{ name: {name}, value: "), "s }"));
    let [image_drain, image_grace] =
        ["PROXY_DRAIN=", "PROXY_GRACE="].map(|name| between("Dockerfile", name, " "));
    of_page(
        PAGE,
        [
            ("`/healthz` every {}; each check", values![time(asks)]),
            ("joins its threads, for {} at most;", values![time(end)]),
            ("PROXY_DRAIN + PROXY_GRACE + {} < kill", values![time(end)]),
            (
                // Docker's own time is the 10 s.
                "`docker stop` kills after 10 s, so the image sets `PROXY_DRAIN={}` and \
                 `PROXY_GRACE={}`.",
                values![image_drain, image_grace],
            ),
            ("| `preStop` sleeps {} s |", values![sleeps.clone()]),
            ("| `PROXY_DRAIN` {} s |", values![drain.clone()]),
            (
                "| `terminationGracePeriodSeconds: {}` | `preStop` {} + `PROXY_DRAIN` {} + \
                 `PROXY_GRACE` {} + {}, and",
                values![patience, sleeps, drain, grace, end.as_secs().to_string()],
            ),
        ],
    )
}
