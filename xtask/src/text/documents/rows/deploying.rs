//! Sentences of the page on deployment: limits, times, formulas, and the example proxy.
//!
//! `deploying` checks the tables of variables and of ONNX Runtime's settings.
//!
//! Invariant: the result of a formula is computed here, not copied.

use super::super::alert::duration;
use super::{Row, expect, jemalloc, k, of_loop, of_profile, rows as of_page, seconds, values};
use crate::text::code::Code;
use crate::text::words::{size, spoken, time, word};

const PAGE: &str = "docs/DEPLOYING.md";
const POD: &str = "deploy/kubernetes.yaml";

/// The example of the page: 64 MiB of weights, 10 MiB of other memory, a body of 8 MiB.
const WEIGHTS: f64 = 64.0;
const OTHER: f64 = 10.0;
const BODY: f64 = 8.0;

pub(super) fn rows(code: &Code<'_>) -> Vec<Row> {
    [limits, formulas, proxy, times, autoscaling, balancer]
        .into_iter()
        .flat_map(|rows| rows(code))
        .collect()
}

/// Mebibytes, as Docker and `ByteSize` read `512m`; the tests of `ByteSize` have that very text.
fn mebibytes(code: &Code<'_>, text: &str) -> String {
    let count = text.strip_suffix('m').and_then(|count| count.parse::<u64>().ok());
    code.faults.expect(count.is_some(), || format!("{text:?}: expected a size such as 512m"));
    count.and_then(|count| size(count << 20)).unwrap_or_default()
}

fn limits(code: &Code<'_>) -> Vec<Row> {
    let low = |method| of_profile(code, "LowMemory", method);
    let unit = code.within("deploy/lowtide-proxy.service", "\nMemoryMax=", "M\n");
    // The proxy is the first service.
    let proxy = code.within("compose.yaml", "\n  proxy:\n", "\n  prometheus:\n");
    let of_proxy = |name: &str| {
        let value = proxy.split(name).nth(1).and_then(|rest| rest.split('\n').next());
        code.faults.expect(value.is_some(), || format!("compose.yaml: the proxy has no {name}"));
        value.unwrap_or_default().to_owned()
    };
    let limit = mebibytes(code, &of_proxy("mem_limit: "));
    let cpus = of_proxy("cpus: ").parse().map_or_else(|_| String::new(), word);
    let pod = code.within(POD, "limits: { memory: ", "Mi }");
    let default = code.setting("Balanced", "profile").value;
    of_page(
        PAGE,
        [
            ("The unit sets a limit of {} MiB (systemd's `M` is MiB)", values![unit]),
            (
                "`_RJEM_MALLOC_CONF` | {} arenas, no huge pages",
                values![jemalloc(code, "LowMemory", "narenas")],
            ),
            (
                "{} background thread; purge after {} without traffic |",
                values![low("background_threads").count(), seconds(&low("purge_when_idle_for"))],
            ),
            ("model that was idle for {} is unloaded", values![spoken(low("idle_unload").time())]),
            ("starts the proxy under {}, {} CPU and the low-memory profile", values![limit, cpus]),
            ("| memory requested = limit, {} MiB |", values![pod]),
            (
                "`LOWTIDE_FLIGHT_RECORDER` | absolute path of a file of {} for",
                values![code.constant("flight::format::FILE_BYTES").size()],
            ),
            ("such as `512m` means {}, as Docker reads it", values![mebibytes(code, "512m")]),
            ("sets the columns on the right; unset: `{}` |", values![code.name_of(&default)]),
        ],
    )
}

/// The example with Envoy.
fn balancer(code: &Code<'_>) -> Vec<Row> {
    const ENVOY: &str = "deploy/envoy/envoy.yaml";
    let bytes = |file: &str, mark: &str, end: &str| {
        let bytes = code.within(file, mark, end).parse();
        bytes.ok().and_then(size).unwrap_or_default()
    };
    let text = bytes("deploy/envoy/run.sh", "head -c ", " ");
    let kept = bytes(ENVOY, "request_body_buffer_limit: ", "\n");
    let blackout = code.within(ENVOY, "blackout_period: ", "s\n");
    of_page(
        PAGE,
        [
            ("Envoy 1.40 and proxies of 128, 256 and 512 MiB: each proxy", vec![]),
            ("The script sends texts of {} to `/words`", values![text]),
            ("For {} s all proxies count the same", values![blackout.clone()]),
            ("| `blackout_period: {}s` |", values![blackout]),
            ("Envoy keeps up to {} of each body", values![kept]),
        ],
    )
}

fn formulas(code: &Code<'_>) -> Vec<Row> {
    let (start, least, most) = (k(code, "K_START"), k(code, "K_MIN"), k(code, "K_MAX"));
    let factor = code.constant("WORDS_FACTOR").number();
    let (measured, unmeasured) = (k(code, "MEASURED_PART"), k(code, "UNMEASURED"));
    let waits = of_loop(code, "idle_tick").time().mul_f64(unmeasured);
    let share = code.constant("Config::CEILING").number();
    let ceiling = format!("{share:.2}");
    let ceiling_max = format!("{:.2}", of_loop(code, "ceiling_max").number());
    let one = BODY * factor;
    let held = OTHER + WEIGHTS;
    let all = (held + start * one) / share;
    let alone = share * (1.0 - start / measured);
    of_page(
        PAGE,
        [
            (
                "| the memory per byte that requests hold, as measured; \
                 `LOWTIDE_CORRECTION_FACTOR`, {}, until measured, then {} to {} |",
                values![start.to_string(), least.to_string(), most.to_string()],
            ),
            (
                "| ceiling | `LOWTIDE_CEILING`; unset, it starts at {} and \
                 [rises](OPERATING.md#pressure-levels-and-rejections) to at most {} | {} |",
                values![ceiling.clone(), ceiling_max, ceiling.clone()],
            ),
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

fn proxy(code: &Code<'_>) -> Vec<Row> {
    let of = |name: &str| code.constant(&format!("proxy::{name}"));
    let more = code.written("saturating_mul(WORDS_FACTOR).saturating_add(", ")");
    let buffers = size(4 * of("BUFFER_MAX").whole()).unwrap_or_default();
    let words = code.between("    (1024 + text_bytes / ", ")\n");
    expect(code, words == "4, 1024 + text_bytes / 24", "docs/DEPLOYING.md: too many words");
    of_page(
        PAGE,
        [
            (
                "| `/words`: {} bytes for each byte of body and {}; `/embed`: {} and {}; \
                 forwarded: {} |",
                values![
                    of("WORDS_FACTOR").count(),
                    more.size(),
                    of("embed::BODY_FACTOR").count(),
                    of("embed::REST").size(),
                    buffers
                ],
            ),
            (
                "more than 1,024 + length / 4 words, or of more than 1,024 + length / 24 different",
                values![],
            ),
            (
                "| size of the model's weights, {} or more |",
                values![code.between("weights of {size}: expected ", " or more")],
            ),
            ("must also come at {}/s on average", values![of("RATE_MIN").size()]),
            (
                "at most (`ulimit -n` - {}) / {}.25, as each may take {} descriptors",
                values![
                    of("DESCRIPTORS_SPARE").count(),
                    of("DESCRIPTORS").count(),
                    of("DESCRIPTORS").count()
                ],
            ),
            ("with {} connections of its own;", values![of("OPERATORS").count()]),
        ],
    )
}

fn autoscaling(code: &Code<'_>) -> Vec<Row> {
    const KEDA: &str = "deploy/keda.yaml";
    let target = code.within(KEDA, "threshold: \"", "\"");
    let more = 100.0 / target.parse().unwrap_or(f64::NAN) - 100.0;
    let rest = format!("{:.1}", 1.0 - target.parse().unwrap_or(f64::NAN));
    let faster = code.within(KEDA, "type: Percent, value: 100, periodSeconds: ", " }");
    let stays = code.within(KEDA, "scaleDown:\n          stabilizationWindowSeconds: ", "\n");
    let minutes = stays.parse::<f64>().unwrap_or(f64::NAN) / 60.0;
    let least = code.within(KEDA, "minReplicaCount: ", "\n");
    of_page(
        PAGE,
        [
            (
                "| target {}, the mean of all pods | the autoscaler sets `replicas x mean / {}`: \
                 at a mean of 1, {} % more. The remaining {} serves",
                values![target.clone(), target, more.round().to_string(), rest],
            ),
            (
                "| up at once, at most twice as many in {} s | the saturation is a mean over \
                 about {} already |",
                values![faster, seconds(&code.constant("saturation::AVERAGED"))],
            ),
            ("| down after {} minutes, at most half in a minute |", values![minutes.to_string()]),
            ("| at least {} replicas |", values![least]),
        ],
    )
}

fn times(code: &Code<'_>) -> Vec<Row> {
    let end =
        code.parsed(&code.within("examples/proxy/cli.rs", "memory.shutdown(", ")).await")).time();
    let asks = duration(code, &code.within("Dockerfile", "HEALTHCHECK --interval=", " "));
    let sleeps = code.within(POD, "preStop: { sleep: { seconds: ", " }");
    let patience = code.within(POD, "terminationGracePeriodSeconds: ", "\n");
    let [drain, grace] = ["PROXY_DRAIN", "PROXY_GRACE"]
        .map(|name| code.within(POD, &format!("{{ name: {name}, value: "), "s }"));
    let [image_drain, image_grace] =
        ["PROXY_DRAIN=", "PROXY_GRACE="].map(|name| code.within("Dockerfile", name, " "));
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
