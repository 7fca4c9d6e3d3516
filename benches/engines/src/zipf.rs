//! Three sessions of ONNX Runtime and a model of candle under a limit for two of the four: requests
//! by Zipf's law, of two clients.
//!
//!     engines-zipf REQUESTS LIBRARY MODEL FOLDER
//!
//! FOLDER has the weights and the tokenizer of candle's model.
//!
//! With two clients and room for two models, each rejection is a failure. So is a look at the
//! process that finds more anonymous memory than the limit.
#![expect(clippy::disallowed_methods, reason = "it looks in real time")]

use std::ops::Range;
use std::path::Path;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::thread::{scope, sleep};
use std::time::Duration;

use candle_core::Device;
use engines::process::Proc;
use engines::{BoxError, answer};
use lowtide::admission::{Budget, Managed, ResourceError, ResourceStats};
use lowtide::config::DeviceChoice;
use lowtide::{ByteSize, Cost, Memory};
use lowtide_candle::embedder::Embedder;
use lowtide_ort::{LoadedSession, Runtime};

lowtide::global_allocator!(balanced);

const CLIENTS: u64 = 2;
/// The declared size of candle's model: weights of 86 MiB, and the tokenizer.
const EMBEDDER: ByteSize = ByteSize::mib(100);
/// Two models, the memory of runs, and the process itself; .8 of it is less than three models.
const LIMIT: ByteSize = ByteSize::mib(310);
const LOOK: Duration = Duration::from_millis(2);
/// The pause of a client whose request was rejected.
const PAUSE: Duration = Duration::from_millis(20);
/// The most attempts after the first of one request.
const ATTEMPTS_MAX: u32 = 50;
/// The parts of the requests by Zipf's law, summed: 1, 1/2, 1/3, 1/4.
const PARTS: [f64; 4] = [12.0, 18.0, 22.0, 25.0];
/// As many tokens as a request of the sessions has.
const TEXT: &str = "the tide comes in twice a day and takes back what it had left";

struct Models {
    sessions: Vec<Managed<LoadedSession>>,
    embedder: Managed<Embedder>,
}

#[derive(Default)]
struct Counts {
    served: AtomicU64,
    /// Rejected while another model was idle.
    refused: AtomicU64,
    /// Rejected while all models were in use.
    busy: AtomicU64,
    over_limit: AtomicU64,
    ended: AtomicBool,
}

impl Models {
    fn stats(&self) -> Vec<ResourceStats> {
        let sessions = self.sessions.iter().map(|session| session.stats());
        sessions.chain([self.embedder.stats()]).collect()
    }

    /// Serves a request, which `seed` chooses.
    fn serve(&self, seed: u64) -> Result<(), BoxError> {
        match self.sessions.get(model_of(seed)) {
            Some(session) => answer(&mut session.acquire_blocking()?.lock(), seed),
            None => {
                self.embedder.acquire_blocking()?.embed(&[format!("{TEXT} {seed}")])?;
                Ok(())
            }
        }
    }
}

/// A number of a model, by Zipf's law.
fn model_of(seed: u64) -> usize {
    let mixed = (seed ^ (seed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    let part = f64::from(u32::try_from(mixed >> 32).unwrap_or(0)) / f64::from(u32::MAX);
    PARTS.iter().position(|&end| part * PARTS[3] <= end).unwrap_or(3)
}

fn open(memory: &Memory, library: &str, model: &str, folder: &str) -> Result<Models, BoxError> {
    let runtime = Runtime::open(memory, library)?;
    let names = ["first", "second", "third"];
    let sessions = names.map(|name| runtime.session(name, model).register());
    let folder = Path::new(folder).to_owned();
    let load = move || Embedder::load(&folder, &Device::Cpu);
    let embedder = memory.managed("embedder", load);
    let embedder = embedder.cost(Cost::host(EMBEDDER));
    Ok(Models {
        sessions: sessions.into_iter().collect::<Result<_, _>>()?,
        embedder: embedder.register()?,
    })
}

/// One client's requests. A rejected one is tried again, as clients do.
fn client(models: &Models, counts: &Counts, seeds: Range<u64>) -> Result<(), BoxError> {
    for seed in seeds {
        let seed = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let mut attempts = 0..ATTEMPTS_MAX;
        while let Err(error) = models.serve(seed) {
            let rejected = error.downcast_ref::<ResourceError>();
            let is_rejected = matches!(rejected, Some(ResourceError::Rejected { .. }));
            if !is_rejected || attempts.next().is_none() {
                return Err(error);
            }
            let stats = models.stats();
            let is_idle = |one: &ResourceStats| one.loaded && one.guards == 0;
            let count = if stats.iter().any(is_idle) { &counts.refused } else { &counts.busy };
            count.fetch_add(1, SeqCst);
            sleep(PAUSE);
        }
        counts.served.fetch_add(1, SeqCst);
    }
    Ok(())
}

fn watch(memory: &Memory, counts: &Counts) {
    let limit = LIMIT.as_f64() / 1_048_576.0;
    while !counts.ended.load(SeqCst) {
        let ledger = memory.admission().ledger(Budget::Host);
        let is_over = Proc::own().anonymous_mib().map_or(true, |held| held > limit)
            || ledger.reserved_bytes() > ledger.ceiling();
        counts.over_limit.fetch_add(u64::from(is_over), SeqCst);
        sleep(LOOK);
    }
}

fn main() -> Result<ExitCode, BoxError> {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    let [requests, library, model, folder] = &*arguments else {
        return Err("expected REQUESTS LIBRARY MODEL FOLDER".into());
    };
    let requests = requests.parse::<u64>()? / CLIENTS;
    let memory = Memory::builder().device(DeviceChoice::Host).memory_limit(LIMIT).start()?;
    let models = open(&memory, library, model, folder)?;
    let counts = Counts::default();
    scope(|scope| {
        let watching = scope.spawn(|| watch(&memory, &counts));
        let clients = (0..CLIENTS).map(|number| {
            let (models, counts) = (&models, &counts);
            let seeds = number * requests..(number + 1) * requests;
            scope.spawn(move || client(models, counts, seeds))
        });
        let clients: Vec<_> = clients.collect();
        let ends = clients.into_iter().map(|client| client.join().map_err(|_| "a client panicked"));
        let ends: Vec<_> = ends.collect();
        counts.ended.store(true, SeqCst);
        drop(watching);
        ends.into_iter().try_for_each(|end| end?)
    })?;
    let loads: u64 = models.stats().iter().map(|stats| stats.loads_ok_total).sum();
    println!("figure engines.zipf.served {} requests", counts.served.load(SeqCst));
    println!("figure engines.zipf.loads {loads} loads");
    let [refused, busy, over] =
        [&counts.refused, &counts.busy, &counts.over_limit].map(|count| count.load(SeqCst));
    println!("figure engines.zipf.busy {busy} requests");
    println!("figure engines.zipf.refused {refused} requests");
    println!("figure engines.zipf.over_limit {over} looks");
    let _ = memory.shutdown_blocking(Duration::from_secs(5));
    Ok(if refused + busy + over == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
