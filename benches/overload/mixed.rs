//! Mixed loads: small requests beside large ones, slow clients, and a model that is used now and
//! then.
//!
//! Each round sends the same load to lowtide with its defaults and to the hardest rival that a user
//! could choose: jemalloc's three settings and a limit on the routes of large requests, the highest
//! one with which the service survives each of some runs. Clients send their next request when the
//! last one was answered, after a pause. The first mix is fixed, the others are drawn by the seed.

use std::convert::Infallible;
use std::iter::zip;
use std::net::SocketAddr;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::extract::{DefaultBodyLimit, State};
use axum::routing::{get, post};
use axum::{Json, Router};
use bytes::Bytes;
use common::figures::{Figures, count, median, part, quantile};
use common::http::{client, post as post_to, send};
use common::process;
use futures_util::future::{BoxFuture, join_all};
use futures_util::{StreamExt as _, stream};
use http::{Request, StatusCode};
use lowtide::admission::Managed;
use lowtide::{BoxError, ByteSize, Cost, Memory};
use serde_json::{Value, json};
use tower::limit::GlobalConcurrencyLimitLayer;

use crate::cell::{Cell, LIMIT, Service};
use crate::chance::Chance;

/// The time of a run, and that of the search for the rival's limit.
const LASTS: Duration = Duration::from_secs(8);
/// The limits of the rival that are tried, the highest first.
const LIMITS: [usize; 9] = [16, 12, 10, 8, 6, 4, 3, 2, 1];
const THREE: &str = "background_thread:true,dirty_decay_ms:1000,muzzy_decay_ms:0";
const MODEL: usize = 48 << 20;
const FORM: usize = 4 << 20;
const SLOW: usize = 2 << 20;
/// What a slow client sends each 100 ms.
const SLOW_PIECE: usize = 51 << 10;
/// A small request computes on so many bytes.
const PAGE: usize = 16 << 10;

/// The clients of each class at once, and the MiB of their bodies of JSON.
#[derive(Clone, Copy, Debug)]
struct Mix {
    small: usize,
    large: usize,
    mib: [usize; 4],
    forms: usize,
    slow: usize,
}

impl Mix {
    const FIRST: Self = Self { small: 16, large: 14, mib: [1, 2, 4, 8], forms: 3, slow: 2 };

    fn drawn(chance: &mut Chance) -> Self {
        let mut draw = |from, to: usize| {
            from + usize::try_from(chance.bits() >> 33).unwrap_or(0) % (to - from)
        };
        let (small, large) = (draw(8, 33), draw(6, 17));
        let mib = std::array::from_fn(|_| draw(1, 9));
        Self { small, large, mib, forms: draw(1, 6), slow: draw(0, 4) }
    }
}

/// Serves until standard input ends: under lowtide, or with a limit on large requests.
pub(crate) async fn serve(limit: Option<usize>) -> Result<(), BoxError> {
    let mut large = Router::new().route("/ingest", post(ingest)).route("/upload", post(upload));
    let mut app = Router::new().route("/small", post(small));
    let load = || vec![1_u8; MODEL];
    let memory = if let Some(limit) = limit {
        large = large.layer(GlobalConcurrencyLimitLayer::new(limit));
        let model = OnceLock::new();
        app = app.route("/embed", post(async move || sum(model.get_or_init(load))));
        None
    } else {
        let memory = Memory::start()?;
        let model = memory.managed("model", move || Ok(load()));
        let model = model.cost(Cost::host(ByteSize::of(MODEL))).register()?;
        let routes = Router::new().route("/embed", post(embed)).route("/loads", get(loads));
        app = app.merge(routes.with_state(model));
        Some(memory)
    };
    app = app.merge(large).layer(DefaultBodyLimit::disable());
    if let Some(memory) = &memory {
        app = app.layer(memory.layer());
    }
    common::listen(app).await
}

fn sum(bytes: &[u8]) -> String {
    bytes.iter().step_by(64).map(|byte| u64::from(*byte)).sum::<u64>().to_string()
}

async fn small(body: Json<Value>) -> String {
    sum(&vec![u8::from(body.is_object()); PAGE])
}

async fn ingest(body: Json<Value>) -> String {
    // The database.
    tokio::time::sleep(Duration::from_millis(20)).await;
    body.as_array().map_or(0, Vec::len).to_string()
}

async fn upload(body: Bytes) -> String {
    sum(&body)
}

async fn embed(State(model): State<Managed<Vec<u8>>>) -> Result<String, StatusCode> {
    let model = model.acquire().await.map_err(|_| StatusCode::SERVICE_UNAVAILABLE)?;
    Ok(sum(&model))
}

async fn loads(State(model): State<Managed<Vec<u8>>>) -> String {
    model.stats().loads_ok_total.to_string()
}

/// An answer: its class, its status, its time in milliseconds and the bytes of the request.
type Answer = (&'static str, Option<StatusCode>, f64, usize);

/// What came of a run.
struct Outcome {
    /// The MiB of bodies served, p50 and p99 of small requests in milliseconds, and the seconds of
    /// CPU of the service for each MiB.
    values: [f64; 4],
    /// Large requests that were rejected, and uploads of slow clients that failed.
    rejected: u64,
    lost: u64,
    loads: u64,
    kills: u64,
}

/// Sends the load to one of the services.
fn run_once(base: &Cell, mix: Mix, limit: Option<usize>) -> Result<Outcome, BoxError> {
    let mut command = Cell { service: Service::Mixed { limit }, ..base.clone() }.command()?;
    command.envs(limit.map(|_| ("_RJEM_MALLOC_CONF", THREE)));
    let (service, to) = common::serve(&command, LIMIT)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let answers = runtime.block_on(offer(to, mix));
    let nanos = process::threads(service.child.id()).unwrap_or_default();
    let cpu: f64 = nanos.iter().map(|(_, nanos)| Duration::from_nanos(*nanos).as_secs_f64()).sum();
    let loads = runtime.block_on(common::http::get(&client(), &format!("http://{to}/loads")));
    let kills = service.end();
    // The time of a killed service is not known.
    let cpu = if kills > 0 { 0.0 } else { cpu };
    let (good, rejection) = (Some(StatusCode::OK), Some(StatusCode::SERVICE_UNAVAILABLE));
    let served = answers.iter().filter(|it| it.1 == good).map(|it| it.3 as u64).sum();
    let served = count(served) / f64::from(1 << 20);
    let small: Vec<_> = answers.iter().filter(|it| it.0 == "small").map(|it| it.2).collect();
    let count_of = |is_it: &dyn Fn(&Answer) -> bool| answers.iter().filter(|it| is_it(it)).count();
    Ok(Outcome {
        values: [served, quantile(&small, 0.5), quantile(&small, 0.99), part(cpu, served)],
        rejected: count_of(&|it| it.0 == "large" && it.1 == rejection) as u64,
        lost: count_of(&|it| it.0 == "slow" && it.1 != good) as u64,
        loads: loads.ok().and_then(|text| text.parse().ok()).unwrap_or(0),
        kills,
    })
}

async fn offer(to: SocketAddr, mix: Mix) -> Vec<Answer> {
    let text = Bytes::from(json!({ "key": 7, "note": "x".repeat(200) }).to_string());
    let bodies = mix.mib.map(|mib| customers(mib << 20));
    let (form, slow) = (Bytes::from(vec![7; FORM]), customers(SLOW));
    let end = Instant::now() + LASTS;
    let mut clients: Vec<BoxFuture<'_, Vec<Answer>>> = Vec::new();
    let mut add = |class, path, many: usize, bodies: &[Bytes], pause| {
        for nth in 0..many {
            let bodies = bodies.iter().cycle().skip(nth).take(bodies.len()).cloned().collect();
            clients.push(Box::pin(ask(to, class, path, bodies, Duration::from_millis(pause), end)));
        }
    };
    add("small", "/small", mix.small, &[text], 5);
    add("large", "/ingest", mix.large, &bodies, 50);
    add("large", "/upload", mix.forms, &[form], 50);
    add("model", "/embed", 2, &[Bytes::new()], 100);
    clients
        .extend((0..mix.slow).map(|_| Box::pin(drip(to, slow.clone(), end)) as BoxFuture<'_, _>));
    join_all(clients).await.concat()
}

/// Records of about so many bytes in all, which take some five times as much once they are parsed.
fn customers(bytes: usize) -> Bytes {
    let notes =
        "orders on Mondays, pays within thirty days, and asks for a call before. ".repeat(3);
    let record = |id| json!({ "id": id, "name": format!("customer {id}"), "notes": notes });
    let count = bytes / record(0).to_string().len();
    Value::from((0..count).map(record).collect::<Vec<_>>()).to_string().into()
}

/// Sends one request after the other, until one is not answered.
async fn ask(
    to: SocketAddr,
    class: &'static str,
    path: &'static str,
    bodies: Vec<Bytes>,
    pause: Duration,
    end: Instant,
) -> Vec<Answer> {
    let (http, url, mut answers) = (client(), format!("http://{to}{path}"), Vec::new());
    for body in bodies.iter().cycle() {
        if Instant::now() >= end {
            break;
        }
        let (status, took) = post_to(&http, &url, body.clone()).await;
        answers.push((class, status, took, body.len()));
        let Some(status) = status else { break };
        let is_served = status == StatusCode::OK;
        tokio::time::sleep(if is_served { pause } else { Duration::from_millis(100) }).await;
    }
    answers
}

/// Sends bodies at half a MiB in a second.
async fn drip(to: SocketAddr, body: Bytes, end: Instant) -> Vec<Answer> {
    let (http, url, mut answers) = (client(), format!("http://{to}/ingest"), Vec::new());
    let pieces: Vec<_> = body.chunks(SLOW_PIECE).map(|piece| body.slice_ref(piece)).collect();
    while Instant::now() < end {
        let slow = stream::iter(pieces.clone()).then(async |piece| {
            tokio::time::sleep(Duration::from_millis(100)).await;
            Ok::<_, Infallible>(piece)
        });
        let (begun, request) = (Instant::now(), Request::post(&url));
        let request = request.header("content-type", "application/json");
        let request = request.header("content-length", body.len());
        let answer = send(&http, request, Body::from_stream(slow)).await;
        let status = answer.ok().map(|(status, _)| status);
        answers.push(("slow", status, begun.elapsed().as_secs_f64() * 1e3, body.len()));
        if status.is_none() {
            break;
        }
    }
    answers
}

/// Runs so many rounds of each mix, and adds the figures. Returns `true` if lowtide's service
/// survived each.
pub(crate) fn run(base: &Cell, rounds: u32, figures: &mut Figures) -> Result<bool, BoxError> {
    let mut chance = Chance(base.seed);
    println!("seed {}", base.seed);
    let mut medians: [Vec<f64>; 4] = Default::default();
    let [mut kills, mut rejected, mut lost, mut loads] = [0; 4];
    for mix in [Mix::FIRST, Mix::drawn(&mut chance), Mix::drawn(&mut chance)] {
        let limit = rival(base, mix, 2 * rounds)?;
        let mut ratios: [Vec<f64>; 4] = Default::default();
        for round in 0..rounds {
            let first = run_once(base, mix, (round % 2 == 1).then_some(limit))?;
            let second = run_once(base, mix, (round % 2 == 0).then_some(limit))?;
            let [ours, theirs] = if round % 2 == 0 { [first, second] } else { [second, first] };
            for (of, (ours, theirs)) in ratios.iter_mut().zip(zip(ours.values, theirs.values)) {
                of.extend((theirs > 0.0).then_some(ours / theirs));
            }
            kills += ours.kills;
            rejected += ours.rejected;
            lost += ours.lost;
            loads = ours.loads.max(loads);
        }
        let of_mix = ratios.each_ref().map(|of| median(of));
        println!("{mix:?}, rival's limit {limit}: goodput, p50, p99, CPU {of_mix:.2?}");
        zip(&mut medians, of_mix).for_each(|(all, one)| all.push(one));
    }
    let [goodput, worst @ ..] = medians;
    let mut add =
        |name: &str, value| figures.add(format!("traffic.mixed.{name}_ratio"), value, "ratio");
    add("goodput", quantile(&goodput, 0.0));
    add("goodput_median", median(&goodput));
    for (name, of) in zip(["small_p50", "small_p99", "cpu"], worst) {
        add(name, quantile(&of, 1.0));
    }
    // The first load, and those after it at the pace of the worst run.
    let more = count(loads).max(1.0) - 1.0;
    figures.add("traffic.model_loads", 1.0 + more * 40.0 / LASTS.as_secs_f64(), "loads in 40 s");
    figures.at_most("traffic.mixed.large_503", count(rejected), "requests", 0.0);
    figures.at_most("traffic.mixed.slow_lost", count(lost), "requests", 0.0);
    figures.at_most("traffic.mixed.kills", count(kills), "kills", 0.0);
    Ok(kills == 0)
}

/// Returns the highest limit with which the rival survives so many runs.
fn rival(base: &Cell, mix: Mix, runs: u32) -> Result<usize, BoxError> {
    'limits: for limit in LIMITS {
        for run in 0..runs {
            if run_once(base, mix, Some(limit))?.kills > 0 {
                println!("the rival's limit {limit}: killed in run {} of {runs}", run + 1);
                continue 'limits;
            }
        }
        return Ok(limit);
    }
    Err("the rival survives no limit".into())
}
