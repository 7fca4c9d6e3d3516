//! The processes: proxies that are scraped, the Prometheus that does, and the load on the proxies.
//!
//! Each listens on a port of this machine that was free a moment ago, and ends with its value.
//!
//! Invariant: no process outlives the bench.

use std::net::SocketAddr;
use std::ops::Range;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use axum::body::Body;
use bytes::Bytes;
use common::http::{Http, client, get, get_json, post as post_to};
use common::process::{Process, free_port};
use http::StatusCode;
use lowtide::BoxError;
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use serde_json::Value;
use tokio::time::{Instant, sleep, sleep_until, timeout_at};

/// The settings of the proxies: small and impatient, so that within a minute all happens that
/// happens in a day elsewhere. For the C library, they are those of the image, and the stacks of
/// threads that have ended are unmapped: glibc keeps up to 40 MiB of them, and an arena for each of
/// the most threads that ran at once, so the mappings would rise with each new maximum.
const SETTINGS: [(&str, &str); 14] = [
    ("MALLOC_ARENA_MAX", "2"),
    ("GLIBC_TUNABLES", "glibc.pthread.stack_cache_size=0"),
    ("LOWTIDE_MEMORY_LIMIT", "132m"),
    ("LOWTIDE_CEILING", "0.92"),
    ("LOWTIDE_DEVICE_LIMIT", "128m"),
    ("LOWTIDE_DEVICE_DECAY", "1s"),
    ("LOWTIDE_DEVICE_SLEEP_AFTER", "3s"),
    ("LOWTIDE_DEVICE_MIN_AWAKE", "1s"),
    ("LOWTIDE_HEAP_DECAY", "2s"),
    ("LOWTIDE_PURGE_INTERVAL", "5s"),
    ("LOWTIDE_METRICS_INTERVAL", "500ms"),
    ("LOWTIDE_METRICS", "detail"),
    ("PROXY_IDLE_UNLOAD", "10s"),
    ("RUST_LOG", "error"),
];

/// Posts that were answered.
pub(crate) static ANSWERED: AtomicUsize = AtomicUsize::new(0);

/// Posts a body and reads the answer away. Returns its status, `None` where the connection broke.
pub(crate) async fn post(http: &Http, url: &str, body: impl Into<Body>) -> Option<StatusCode> {
    let (status, _) = post_to(http, url, body).await;
    ANSWERED.fetch_add(usize::from(status.is_some()), Relaxed);
    status
}

/// A proxy that runs.
pub(crate) struct Proxy {
    address: SocketAddr,
    pub(crate) process: Process,
}

impl Proxy {
    /// Starts it with its arenas in host memory, or on the device of a library that stands in for
    /// CUDA's, and waits until it accepts connections.
    pub(crate) fn start(
        program: &Path,
        address: SocketAddr,
        driver: Option<&Path>,
    ) -> Result<Self, BoxError> {
        let mut command = Command::new(program);
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("LOWTIDE_") {
                command.env_remove(name);
            }
        }
        command.envs(SETTINGS).env("PROXY_LISTEN", address.to_string());
        match driver {
            None => command.env("LOWTIDE_DEVICE", "host").env("LOWTIDE_SERVICE_VERSION", "1.0.0"),
            // Room for its device, which is this machine's memory, and for what sleeps.
            Some(library) => command
                .env("LOWTIDE_DEVICE", "cuda")
                .env("LOWTIDE_SERVICE_VERSION", "1.1.0")
                .env("LOWTIDE_MEMORY_LIMIT", "384m")
                .env("LD_PRELOAD", library),
        };
        let mut process = Process::spawn(command.stdin(Stdio::null()))?;
        process.accepts(address)?;
        Ok(Self { address, process })
    }

    /// An error where it has ended.
    pub(crate) fn lives(&mut self) -> Result<(), BoxError> {
        let ended = self.process.ended();
        ended.map_or(Ok(()), |status| Err(format!("the proxy ended: {status}").into()))
    }

    /// Returns its metrics as Prometheus scrapes them.
    pub(crate) async fn metrics(&self) -> Result<String, BoxError> {
        get(&client(), &format!("http://{}/metrics", self.address)).await
    }
}

/// A Prometheus that runs.
pub(crate) struct Prometheus {
    address: SocketAddr,
    _process: Process,
}

impl Prometheus {
    /// Starts it over the shipped rules; it scrapes each target every second.
    pub(crate) fn start(folder: &Path, targets: &[SocketAddr]) -> Result<Self, BoxError> {
        let address = free_port()?;
        let rules = crate::root().join("dashboards/lowtide.rules.yml");
        let named = targets.iter().zip(1..).map(|(target, nth)| {
            format!("{{targets: [\"{target}\"], labels: {{instance: proxy-{nth}}}}}")
        });
        let targets = named.collect::<Vec<_>>().join(", ");
        let text = format!(
            "global: {{scrape_interval: 1s, evaluation_interval: 1s}}\n\
             rule_files: [\"{}\"]\n\
             scrape_configs: [{{job_name: lowtide, static_configs: [{targets}]}}]\n",
            rules.display(),
        );
        let file = folder.join("prometheus.yml");
        std::fs::write(&file, text)?;
        let log = std::fs::File::create(folder.join("prometheus.log"))?;
        let mut command = Command::new("prometheus");
        command
            .arg(format!("--config.file={}", file.display()))
            .arg(format!("--storage.tsdb.path={}", folder.join("data").display()))
            .arg(format!("--web.listen-address={address}"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log);
        Ok(Self { address, _process: Process::spawn(&mut command)? })
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// The series of an expression, at each second of the time.
    pub(crate) async fn range(&self, expr: &str, time: &Range<u64>) -> Result<Value, BoxError> {
        let (start, end) = (time.start, time.end);
        let query = utf8_percent_encode(expr, NON_ALPHANUMERIC);
        self.api(&format!("query_range?query={query}&start={start}&end={end}&step=1")).await
    }

    /// Returns the value of `data` in an answer of its interface.
    pub(crate) async fn api(&self, path: &str) -> Result<Value, BoxError> {
        let url = format!("{}/api/v1/{path}", self.url());
        Ok(get_json(&client(), &url).await?["data"].take())
    }
}

// The load: what a day brings, in a minute and a quarter.
//
// Embeddings that load the model, texts that make the heap rise and fall, pauses in which the
// arena falls asleep and the model is unloaded, a burst that is too large, and a request that can
// never fit. It asserts nothing: what came of it shows in the metrics.
//
// Invariant: a phase ends by time, whatever the proxies answer.

/// A part of the load, for each proxy: its name and seconds, the clients that send texts without a
/// pause, the KiB of their texts, and the clients that ask for embeddings.
pub(crate) type Phase = (&'static str, u64, usize, usize, usize);

/// The phase in which a text comes that no budget is large enough for.
const BURST: &str = "a burst that is too large";

/// In their order; the first three are for one proxy. Models are loaded without texts, beside which
/// they may not find the room.
pub(crate) const PHASES: [Phase; 11] = [
    ("nothing", 3, 0, 0, 0),
    ("the model is loaded", 3, 0, 0, 2),
    ("a load that fits", 12, 3, 256, 2),
    ("the arena falls asleep", 7, 0, 0, 0),
    ("it wakes", 3, 0, 0, 2),
    ("more than before", 6, 3, 512, 2),
    (BURST, 14, 20, 512, 2),
    ("the model is unloaded", 15, 0, 0, 0),
    ("it is loaded again", 3, 0, 0, 2),
    ("a load that fits again", 8, 3, 256, 4),
    ("the end", 5, 0, 0, 0),
];

/// Runs phases against proxies.
pub(crate) async fn run(targets: &[SocketAddr], phases: &[Phase]) -> Result<(), BoxError> {
    let client = client();
    for (name, seconds, readers, kib, embedders) in phases {
        println!("{seconds} s: {name}");
        let end = Instant::now() + Duration::from_secs(*seconds);
        let text = Bytes::from(text(kib << 10));
        let mut clients = tokio::task::JoinSet::new();
        for target in targets {
            let words = format!("http://{target}/words");
            for _ in 0..*readers {
                clients.spawn(ask(client.clone(), words.clone(), text.clone(), end));
            }
            for nth in 0..*embedders {
                let url = format!("http://{target}/embed");
                // Of another length for each, so that blocks are.
                let long = self::text(2000 * (nth + 1));
                let body = Bytes::from(format!(r#"{{"texts": ["the tide goes out", "{long}"]}}"#));
                clients.spawn(ask(client.clone(), url, body, end));
            }
            if *name == BURST {
                let giant = Bytes::from(vec![b'a'; 64 << 20]);
                let client = client.clone();
                clients.spawn(async move {
                    let _ = timeout_at(end, post(&client, &words, giant)).await;
                });
            }
        }
        while let Some(ended) = clients.join_next().await {
            ended?;
        }
        sleep_until(end).await;
    }
    Ok(())
}

/// Asks again and again; who is turned away waits a little, as a client should.
pub(crate) async fn ask(client: Http, url: String, body: Bytes, end: Instant) {
    while Instant::now() < end {
        match timeout_at(end, post(&client, &url, body.clone())).await {
            Ok(Some(StatusCode::OK)) => {}
            Ok(_) => sleep(Duration::from_millis(300)).await,
            Err(_) => return,
        }
        sleep(Duration::from_millis(20)).await;
    }
}

/// A text of this length that needs what is booked for it: a word for each four bytes, and as many
/// different ones as the upstream takes.
pub(crate) fn text(bytes: usize) -> String {
    const LETTERS: &[u8; 36] = b"abcdefghijklmnopqrstuvwxyz0123456789";
    let different = (bytes / 24).clamp(1, LETTERS.len().pow(3));
    let mut text = String::with_capacity(bytes + 4);
    for nth in 0..bytes / 4 {
        let word = nth % different;
        for place in [word / (36 * 36), word / 36, word] {
            text.push(LETTERS[place % 36].into());
        }
        text.push(' ');
    }
    text
}
