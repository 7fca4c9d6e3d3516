//! The processes: proxies that are scraped, and the Prometheus that does.
//!
//! Each listens on a port of this machine that was free a moment ago, and ends with its value.
//!
//! Invariant: no process outlives the bench.

use std::fmt::Write as _;
use std::net::SocketAddr;
use std::ops::Range;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;

use bytes::Bytes;
use common::http::{Http, client, send};
use common::process::{Process, free_port};
use http::Request;
use lowtide::BoxError;
use serde_json::Value;

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

/// The text of an address, where the answer is a good one.
pub(crate) async fn get(url: &str) -> Result<String, BoxError> {
    let body = common::http::get(&client(), url).await?;
    Ok(String::from_utf8_lossy(&body).into_owned())
}

/// Posts a body and reads the answer away; its status, and 0 where the connection broke.
pub(crate) async fn post(http: &Http, url: &str, kind: &str, body: Bytes) -> u16 {
    let request = Request::post(url).header("content-type", kind);
    let Ok((status, _)) = send(http, request, body).await else { return 0 };
    ANSWERED.fetch_add(1, Relaxed);
    status.as_u16()
}

/// A proxy that runs.
pub(crate) struct Proxy {
    address: SocketAddr,
    process: Process,
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

    /// Returns its process id.
    pub(crate) fn id(&self) -> u32 {
        self.process.child.id()
    }

    /// An error where it has ended.
    pub(crate) fn lives(&mut self) -> Result<(), BoxError> {
        let ended = self.process.ended();
        ended.map_or(Ok(()), |status| Err(format!("the proxy ended: {status}").into()))
    }

    /// Returns its metrics as Prometheus scrapes them.
    pub(crate) async fn metrics(&self) -> Result<String, BoxError> {
        get(&format!("http://{}/metrics", self.address)).await
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
        let (query, start, end) = (encoded(expr), time.start, time.end);
        self.api(&format!("query_range?query={query}&start={start}&end={end}&step=1")).await
    }

    /// Returns the value of `data` in an answer of its interface.
    pub(crate) async fn api(&self, path: &str) -> Result<Value, BoxError> {
        let text = get(&format!("{}/api/v1/{path}", self.url())).await?;
        let mut answer: Value = serde_json::from_str(&text)?;
        Ok(answer["data"].take())
    }
}

/// As a query of an address has it.
fn encoded(text: &str) -> String {
    let mut encoded = String::new();
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() {
            encoded.push(byte.into());
        } else {
            let _ = write!(encoded, "%{byte:02X}");
        }
    }
    encoded
}
