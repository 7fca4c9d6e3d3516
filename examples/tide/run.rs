//! One run of the tide: the proxy, its load, and its memory at each stage.
//!
//! The managed run and its twin with jemalloc's defaults have the same stages and the same seed;
//! only the memory management differs. It does not judge: the report does.

use std::time::{Duration, Instant};

use lowtide::admission::{RejectReason, Signals};
use lowtide::heap::HeapProbe;
use lowtide::{BoxError, ByteSize, Memory};
use serde::{Deserialize, Serialize};

use crate::app::{self, Running};
use crate::chance::Chance;
use crate::load;
use crate::model::Settings;

/// The memory limit of the service.
pub(crate) const LIMIT: ByteSize = ByteSize::mib(1536);
/// The memory limit in the last run.
pub(crate) const TIGHT_LIMIT: ByteSize = ByteSize::mib(192);
/// Connections at once.
pub(crate) const CONNECTIONS: usize = 56;
/// Size of the text in one request.
pub(crate) const TEXT_SIZE: ByteSize = ByteSize::mib(1);
/// Size of the model's weights.
pub(crate) const WEIGHTS: ByteSize = ByteSize::mib(64);
/// Seed of load and weights.
const SEED: u64 = 7;

const WARM_UP: Duration = Duration::from_secs(4);
const QUIET: Duration = Duration::from_secs(4);
const BURST: Duration = Duration::from_secs(6);
/// Idle time of the model: after the last figure of the quiet stage.
const IDLE_UNLOAD: Duration = Duration::from_secs(15);
/// The unload is waited for until this long after the model was last used.
const UNLOAD_PATIENCE: Duration = Duration::from_secs(20);
/// The time after an unload for the decay of its granules and the purge of its traces in the heap.
const AFTER_UNLOAD: Duration = Duration::from_secs(3);
/// One of so many requests is for embeddings, if any are.
const EMBED_EVERY: usize = 8;
/// The sampling interval.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// Samples for each line that is printed: a line every two seconds.
const SAMPLES_PER_LINE: usize = 20;

/// Which run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Kind {
    /// lowtide manages the memory, under the limit.
    Managed,
    /// The same program and load with jemalloc's defaults, nothing managed.
    Defaults,
    /// lowtide under an eighth of the limit: a short burst that does not fit at once.
    Tight,
}

impl Kind {
    /// Returns the title in what is shown.
    pub(crate) const fn title(self) -> &'static str {
        match self {
            Self::Managed => "lowtide",
            Self::Defaults => "jemalloc's defaults",
            Self::Tight => "lowtide at an eighth of the limit",
        }
    }
}

/// Memory at one instant, in bytes.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Water {
    /// The process's resident set.
    pub(crate) rss: u64,
    /// Anonymous and shared memory of the process.
    pub(crate) charged: u64,
    /// The heap: resident and live.
    pub(crate) resident: u64,
    pub(crate) heap_live: u64,
    /// The device: live and committed.
    pub(crate) device_live: u64,
    pub(crate) device_committed: u64,
}

impl Water {
    /// Returns the bytes that the heap holds beyond the live ones.
    pub(crate) fn heap_retained(&self) -> u64 {
        self.resident.saturating_sub(self.heap_live)
    }

    /// Returns the bytes that the device arena holds beyond the live ones.
    pub(crate) fn device_retained(&self) -> u64 {
        self.device_committed.saturating_sub(self.device_live)
    }
}

/// A stage's row in the table.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Row {
    /// The name of the stage.
    pub(crate) stage: String,
    /// Memory at its end; in a burst, at the heap's peak.
    pub(crate) water: Water,
    /// The answers of a burst.
    pub(crate) answers: Option<Answers>,
}

/// The answers of a burst: 2xx, 503 with Retry-After, and others; and their latency in ms.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Answers {
    pub(crate) counts: [u64; 3],
    pub(crate) p50: f64,
    pub(crate) p99: f64,
}

/// The results of a run.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Outcome {
    /// The stages in order.
    pub(crate) rows: Vec<Row>,
    /// Responses other than 2xx and 503 with Retry-After, by kind.
    pub(crate) other: Vec<(String, u64)>,
    /// Requests that admission rejected, by reason.
    pub(crate) rejected: Vec<(String, u64)>,
    /// The device's granule, in bytes.
    pub(crate) granule: u64,
}

impl Outcome {
    /// Returns the memory of this stage.
    pub(crate) fn water(&self, stage: &str) -> Result<Water, String> {
        let row = self.rows.iter().find(|row| row.stage == stage);
        row.map(|row| row.water).ok_or_else(|| format!("a run lacks the stage {stage:?}"))
    }

    /// All answers of the run: 2xx, 503 with Retry-After, others.
    pub(crate) fn answers(&self) -> [u64; 3] {
        let each = self.rows.iter().filter_map(|row| row.answers);
        each.fold([0; 3], |[a, b, c], Answers { counts: [x, y, z], .. }| [a + x, b + y, c + z])
    }
}

/// Names of the stages.
pub(crate) mod stage {
    /// Before any load.
    pub(crate) const START: &str = "start";
    /// Load without the model, at the heap's peak.
    pub(crate) const WARM_UP: &str = "burst without model";
    /// Quiet after it.
    pub(crate) const WARM: &str = "quiet, +4 s";
    /// Load with the model, at the heap's peak.
    pub(crate) const BURST: &str = "burst with model";
    /// A second after it.
    pub(crate) const QUIET_1: &str = "quiet, +1 s";
    /// Ten seconds after it.
    pub(crate) const QUIET_10: &str = "quiet, +10 s";
    /// After the model was unloaded.
    pub(crate) const UNLOADED: &str = "idle, model unloaded";
}

/// Makes a run, and prints some samples of it.
pub(crate) async fn run(kind: Kind) -> Result<Outcome, BoxError> {
    let limit = match kind {
        Kind::Defaults => None,
        Kind::Managed => Some(LIMIT),
        Kind::Tight => Some(TIGHT_LIMIT),
    };
    let memory = limit.map(|limit| Memory::builder().memory_limit(limit).start()).transpose()?;
    let options = app::Options {
        model: Settings { weights: WEIGHTS, seed: SEED },
        idle_unload: Some(IDLE_UNLOAD),
        ..app::Options::default()
    };
    let running = app::start(options, memory.clone(), String::new).await?;
    let mut gauge = Gauge {
        kind,
        heap: HeapProbe::new()?,
        signals: Signals::open(),
        memory: memory.clone(),
        start: Instant::now(),
        samples: 0,
        outcome: Outcome {
            granule: running.model.arena.capabilities().granularity.get(),
            ..Outcome::default()
        },
        running,
    };
    if kind == Kind::Tight {
        gauge.burst(stage::WARM_UP, WARM_UP, false).await?;
    } else {
        gauge.quiet(stage::START, Duration::from_millis(500)).await?;
        gauge.burst(stage::WARM_UP, WARM_UP, false).await?;
        gauge.quiet(stage::WARM, QUIET).await?;
        gauge.burst(stage::BURST, BURST, true).await?;
        let unused_since = Instant::now();
        gauge.quiet(stage::QUIET_1, Duration::from_secs(1)).await?;
        gauge.quiet(stage::QUIET_10, Duration::from_secs(9)).await?;
        if kind == Kind::Managed {
            while gauge.running.model.resource.stats().loaded
                && unused_since.elapsed() < UNLOAD_PATIENCE
            {
                gauge.wait(stage::UNLOADED, LOOK_EVERY, || false).await?;
            }
            gauge.quiet(stage::UNLOADED, AFTER_UNLOAD).await?;
        }
    }
    let Gauge { running, mut outcome, .. } = gauge;
    running.stop(Duration::from_secs(2)).await;
    if let Some(memory) = memory {
        let counts = RejectReason::ALL.into_iter().zip(memory.admission().stats().rejected);
        let counts = counts.filter(|(_, count)| *count > 0);
        outcome.rejected = counts.map(|(why, count)| (why.name().to_owned(), count)).collect();
        memory.shutdown(Duration::from_secs(2)).await;
    }
    Ok(outcome)
}

struct Gauge {
    kind: Kind,
    heap: HeapProbe,
    signals: Signals,
    running: Running,
    memory: Option<Memory>,
    start: Instant,
    samples: usize,
    outcome: Outcome,
}

impl Gauge {
    fn water(&self) -> Result<Water, BoxError> {
        let heap = self.heap.snapshot()?;
        let device = self.running.model.arena.snapshot();
        let rss = self.signals.sample().rss.unwrap_or_default();
        let pages = self.signals.resident();
        let charged = pages.map_or(rss, |pages| pages.anon.saturating_add(pages.shmem));
        Ok(Water {
            rss: rss.get(),
            charged: charged.get(),
            resident: heap.resident.get(),
            heap_live: heap.live.get(),
            device_live: device.live.get(),
            device_committed: device.committed.get(),
        })
    }

    /// Waits, taking samples, until `done` or the time is up; gives the highest water.
    async fn wait(
        &mut self,
        stage: &str,
        time: Duration,
        done: impl Fn() -> bool,
    ) -> Result<Water, BoxError> {
        let end = Instant::now() + time;
        let mut peak = Water::default();
        while !done() && Instant::now() < end {
            tokio::time::sleep(LOOK_EVERY.min(end - Instant::now())).await;
            let water = self.water()?;
            if water.heap_live >= peak.heap_live {
                peak = water;
            }
            if self.samples.is_multiple_of(SAMPLES_PER_LINE) {
                self.show(stage, &water);
            }
            self.samples += 1;
        }
        Ok(peak)
    }

    fn show(&self, stage: &str, water: &Water) {
        let seconds = self.start.elapsed().as_secs_f64();
        let size = |bytes| ByteSize::new(bytes).to_string();
        let level = self.memory.as_ref().map(|memory| memory.level().to_string());
        println!(
            "{seconds:5.1} s  {:<42} heap live {:>10} retained {:>10}  device live {:>10} retained \
             {:>10}  rss {:>10}  pressure {}",
            format!("{}: {stage}", self.kind.title()),
            size(water.heap_live),
            size(water.heap_retained()),
            size(water.device_live),
            size(water.device_retained()),
            size(water.rss),
            level.as_deref().unwrap_or("not sampled"),
        );
    }

    async fn quiet(&mut self, stage: &str, time: Duration) -> Result<(), BoxError> {
        self.wait(stage, time, || false).await?;
        let water = self.water()?;
        self.outcome.rows.push(Row { stage: stage.to_owned(), water, answers: None });
        Ok(())
    }

    async fn burst(
        &mut self,
        stage: &str,
        lasts: Duration,
        with_model: bool,
    ) -> Result<(), BoxError> {
        let (to, end) = (self.running.address, Instant::now() + lasts);
        let request = move |turn: usize, chance: &mut Chance| {
            if with_model && turn.is_multiple_of(EMBED_EVERY) {
                load::embed_request(to, chance)
            } else {
                load::words_request(to, TEXT_SIZE.as_usize().unwrap_or(0), chance)
            }
        };
        let goes_on = move || Instant::now() < end;
        let load = load::send(CONNECTIONS, SEED, goes_on, request);
        let load = tokio::spawn(load);
        let water = self.wait(stage, lasts * 4, || load.is_finished()).await?;
        // Requests under way are read to their end, unless that does not come.
        let tally = tokio::time::timeout(lasts, load)
            .await
            .map_err(|_| format!("{stage}: requests did not end within {:?}", lasts * 5))??;
        let counts = [tally.ok, tally.shed, tally.other.values().sum()];
        let (p50, p99) = (tally.quantile(0.5), tally.quantile(0.99));
        self.outcome.other.extend(tally.other);
        let answers = Some(Answers { counts, p50, p99 });
        self.outcome.rows.push(Row { stage: stage.to_owned(), water, answers });
        Ok(())
    }
}
