//! One run of the tide: the proxy, its load, and its memory at each stage.
//!
//! The managed run and its twin with jemalloc's defaults have the same stages and the same seed;
//! only the memory management differs. It does not judge: the report does.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use lowtide::admission::{Resource as _, Signal, Signals};
use lowtide::heap::HeapProbe;
use lowtide::{BoxError, ByteSize, Memory};
use serde::{Deserialize, Serialize};

use crate::app::{self, Running};
use crate::cgroup::OwnCgroup;
use crate::door::Door;
use crate::load::{self, Answered, Burst, Corpus, Tally};
use crate::model::Settings;

const WARM_UP: Duration = Duration::from_secs(4);
const QUIET: Duration = Duration::from_secs(4);
const BURST: Duration = Duration::from_secs(6);
const HALF_BURST: Duration = Duration::from_secs(4);
/// Idle time of the model: after the last figure of the quiet stage.
const IDLE_UNLOAD: Duration = Duration::from_secs(15);
/// The unload is waited for until this long after the model was last used.
const UNLOAD_PATIENCE: Duration = Duration::from_secs(20);
/// The time after an unload for the decay of its granules and the purge of its traces in the heap.
const AFTER_UNLOAD: Duration = Duration::from_secs(3);
/// The sampling interval.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// Which run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
pub(crate) enum Kind {
    /// lowtide manages the memory, under the limit.
    Managed,
    /// The same program and load with jemalloc's defaults, nothing managed.
    Defaults,
    /// lowtide under half of the limit: a short burst that does not fit.
    Half,
}

impl Kind {
    /// Returns the title in the live picture.
    pub(crate) fn title(self) -> &'static str {
        match self {
            Self::Managed => "lowtide",
            Self::Defaults => "jemalloc's defaults",
            Self::Half => "lowtide at half the limit",
        }
    }

    /// About how long it takes.
    pub(crate) fn lasts(self) -> Duration {
        match self {
            Self::Managed => WARM_UP + QUIET + BURST + IDLE_UNLOAD + AFTER_UNLOAD,
            Self::Defaults => WARM_UP + QUIET + BURST + Duration::from_secs(10),
            Self::Half => HALF_BURST,
        }
    }
}

/// The parameters of a run.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    /// Which run.
    pub(crate) kind: Kind,
    /// The limit of the managed run.
    pub(crate) limit: ByteSize,
    /// Connections at once.
    pub(crate) connections: usize,
    /// Bytes of text in a request.
    pub(crate) text_bytes: usize,
    /// Size of the model's weights.
    pub(crate) weights: ByteSize,
    /// Seed of load and weights.
    pub(crate) seed: u64,
}

/// Memory at one instant, in bytes.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Water {
    /// The process's resident set.
    pub(crate) rss: u64,
    /// Anonymous and shared memory, as the kernel charges it.
    pub(crate) charged: u64,
    /// The heap: resident and live.
    pub(crate) resident: u64,
    /// Live bytes of the heap.
    pub(crate) heap_live: u64,
    /// Live bytes of the device.
    pub(crate) device_live: u64,
    /// Committed bytes of the device.
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
    /// Answers 2xx, 503 with Retry-After, and others.
    pub(crate) answers: Option<[u64; 3]>,
    /// Median and 99th percentile of the latency, in milliseconds.
    pub(crate) latency: Option<[f64; 2]>,
}

/// The results of a run.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Outcome {
    /// The stages in order.
    pub(crate) rows: Vec<Row>,
    /// Responses other than 2xx and 503 with Retry-After, by kind.
    pub(crate) other: Vec<(String, u64)>,
    /// Whose memory `charged` is: the run's own cgroup, or the process's pages and why.
    pub(crate) charged_from: String,
    /// The device's granule, in bytes.
    pub(crate) granule: u64,
    /// The requests that admission rejected.
    pub(crate) door: Door,
}

impl Outcome {
    /// The row of this stage.
    pub(crate) fn row(&self, stage: &str) -> Option<&Row> {
        self.rows.iter().find(|row| row.stage == stage)
    }

    /// All answers of the run: 2xx, 503 with Retry-After, others.
    pub(crate) fn answers(&self) -> [u64; 3] {
        let each = self.rows.iter().filter_map(|row| row.answers);
        each.fold([0; 3], |[a, b, c], [x, y, z]| [a + x, b + y, c + z])
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

/// Something to be shown while a run goes on.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Glimpse {
    /// The current activity, and its progress.
    pub(crate) doing: String,
    /// Seconds since the start of the run.
    pub(crate) seconds: f64,
    /// Memory now.
    pub(crate) water: Water,
    /// Answers so far: 2xx, 503 with Retry-After, others.
    pub(crate) answered: [u64; 3],
    /// The pressure level, where anyone measures it.
    pub(crate) level: String,
}

/// The current activity, for the picture; table rows are named by the measurement at its end.
#[derive(Clone, Copy, Debug)]
struct Doing {
    what: &'static str,
    /// The text shown after the planned time, if it continues.
    then: Option<&'static str>,
    since: Instant,
    lasts: Duration,
}

impl Doing {
    fn now(what: &'static str, lasts: Duration) -> Self {
        Self { what, then: None, since: Instant::now(), lasts }
    }

    fn text(&self) -> String {
        let (past, all) = (self.since.elapsed(), self.lasts.as_secs());
        match past.as_secs() {
            _ if all == 0 => self.what.to_owned(),
            past if past < all => format!("{}, {past} of {all} s", self.what),
            _ => match self.then {
                Some(then) => format!("{}, {then}", self.what),
                None => format!("{}, {all} of {all} s", self.what),
            },
        }
    }
}

/// Runs the plan; `show` is called ten times a second.
pub(crate) async fn run(
    plan: &Plan,
    corpus: &Corpus,
    mut show: impl FnMut(&Glimpse) + Send + 'static,
) -> Result<Outcome, BoxError> {
    let own = OwnCgroup::enter(None);
    let memory = manage(plan)?;
    let options = app::Options {
        model: Settings { weights: plan.weights, seed: plan.seed },
        idle_unload: Some(IDLE_UNLOAD),
        ..app::Options::default()
    };
    let running = app::start(options, memory.clone(), String::new).await?;
    let mut gauge = Gauge {
        heap: HeapProbe::new()?,
        signals: Signals::open(),
        running,
        memory: memory.clone(),
        alone: own.is_ok(),
        start: Instant::now(),
        answered: Arc::default(),
        outcome: Outcome {
            charged_from: match &own {
                Ok(_) => "the run's own memory cgroup".to_owned(),
                Err(cause) => format!("the process's own pages ({cause})"),
            },
            ..Outcome::default()
        },
    };
    gauge.outcome.granule = gauge.running.model.arena.capabilities().granularity.get();
    match plan.kind {
        Kind::Half => {
            gauge.burst(stage::WARM_UP, plan, corpus, HALF_BURST, false, &mut show).await?;
        }
        Kind::Managed | Kind::Defaults => tide(&mut gauge, plan, corpus, &mut show).await?,
    }
    gauge.look_at_door();
    let Gauge { running, outcome, .. } = gauge;
    running.stop(Duration::from_secs(2)).await;
    if let Some(memory) = memory {
        let ended = move || memory.shutdown(Duration::from_secs(2));
        let _ = tokio::task::spawn_blocking(ended).await?;
    }
    Ok(outcome)
}

/// Starts what manages the memory in this kind of run.
fn manage(plan: &Plan) -> Result<Option<Memory>, BoxError> {
    let limit = match plan.kind {
        Kind::Defaults => return Ok(None),
        Kind::Managed => plan.limit,
        Kind::Half => ByteSize::new(plan.limit.get() / 2),
    };
    Ok(Some(Memory::builder().memory_limit(limit).start()?))
}

async fn tide(
    gauge: &mut Gauge,
    plan: &Plan,
    corpus: &Corpus,
    show: &mut (impl FnMut(&Glimpse) + Send),
) -> Result<(), BoxError> {
    let quiet = |lasts| Doing::now("quiet", lasts);
    let start = Duration::from_millis(500);
    gauge.quiet(stage::START, Doing::now("start", start), start, show).await?;
    gauge.burst(stage::WARM_UP, plan, corpus, WARM_UP, false, show).await?;
    gauge.quiet(stage::WARM, quiet(QUIET), QUIET, show).await?;
    gauge.burst(stage::BURST, plan, corpus, BURST, true, show).await?;
    let doing = quiet(Duration::from_secs(10));
    gauge.quiet(stage::QUIET_1, doing, Duration::from_secs(1), show).await?;
    gauge.quiet(stage::QUIET_10, doing, Duration::from_secs(9), show).await?;
    if plan.kind == Kind::Managed {
        let what = "idle until the unload";
        let doing = Doing { what, then: Some("due"), since: doing.since, lasts: IDLE_UNLOAD };
        let patience = Instant::now() + UNLOAD_PATIENCE;
        while gauge.running.model.resource.stats().loaded && Instant::now() < patience {
            gauge.wait(doing, LOOK_EVERY, &AtomicBool::new(false), show).await?;
        }
        let doing = Doing::now(stage::UNLOADED, AFTER_UNLOAD);
        gauge.quiet(stage::UNLOADED, doing, AFTER_UNLOAD, show).await?;
    }
    Ok(())
}

struct Gauge {
    heap: HeapProbe,
    signals: Signals,
    running: Running,
    memory: Option<Memory>,
    /// `true` if the process is alone in its cgroup.
    alone: bool,
    start: Instant,
    answered: Arc<Answered>,
    outcome: Outcome,
}

impl Gauge {
    fn water(&self) -> Result<Water, BoxError> {
        let heap = self.heap.snapshot()?;
        let device = self.running.model.arena.snapshot();
        let signal = self.signals.sample();
        let rss = signal.rss.unwrap_or_default();
        Ok(Water {
            rss: rss.get(),
            charged: self.charged(signal).unwrap_or(rss).get(),
            resident: heap.resident.get(),
            heap_live: heap.live.get(),
            device_live: device.live.get(),
            device_committed: device.committed.get(),
        })
    }

    /// Returns the charge of its own cgroup, or without one the process's own pages.
    fn charged(&self, signal: Signal) -> Option<ByteSize> {
        if self.alone {
            return signal.charged;
        }
        let pages = self.signals.resident()?;
        Some(pages.anon.saturating_add(pages.shmem))
    }

    fn look_at_door(&mut self) {
        if let Some(memory) = &self.memory {
            self.outcome.door.look(memory, self.start.elapsed().as_secs_f64());
        }
    }

    /// Waits, showing what happens, until `done` or the time is up; gives the highest water.
    async fn wait(
        &mut self,
        doing: Doing,
        time: Duration,
        done: &AtomicBool,
        show: &mut impl FnMut(&Glimpse),
    ) -> Result<Water, BoxError> {
        let end = Instant::now() + time;
        let mut peak = Water::default();
        while !done.load(Ordering::Acquire) && Instant::now() < end {
            tokio::time::sleep(LOOK_EVERY.min(end - Instant::now())).await;
            let water = self.water()?;
            if water.heap_live >= peak.heap_live {
                peak = water;
            }
            self.look_at_door();
            let level = self.memory.as_ref().map(|memory| memory.level().to_string());
            show(&Glimpse {
                doing: doing.text(),
                seconds: self.start.elapsed().as_secs_f64(),
                water,
                answered: self.answered.so_far(),
                level: level.unwrap_or_else(|| "not sampled".to_owned()),
            });
        }
        Ok(peak)
    }

    async fn quiet(
        &mut self,
        stage: &str,
        doing: Doing,
        time: Duration,
        show: &mut impl FnMut(&Glimpse),
    ) -> Result<(), BoxError> {
        self.wait(doing, time, &AtomicBool::new(false), show).await?;
        let water = self.water()?;
        self.outcome.rows.push(Row {
            stage: stage.to_owned(),
            water,
            answers: None,
            latency: None,
        });
        Ok(())
    }

    async fn burst(
        &mut self,
        stage: &'static str,
        plan: &Plan,
        corpus: &Corpus,
        lasts: Duration,
        with_model: bool,
        show: &mut impl FnMut(&Glimpse),
    ) -> Result<(), BoxError> {
        let burst = Burst {
            lasts,
            connections: plan.connections,
            text_bytes: plan.text_bytes,
            embed_every: with_model.then_some(8),
            seed: plan.seed,
        };
        let done = Arc::new(AtomicBool::new(false));
        let load = {
            let (corpus, done) = (corpus.clone(), Arc::clone(&done));
            let (to, answered) = (self.running.address, Arc::clone(&self.answered));
            tokio::spawn(async move {
                let tally = load::run(to, &corpus, burst, answered).await;
                done.store(true, Ordering::Release);
                tally
            })
        };
        let doing = Doing { then: Some("until all have finished"), ..Doing::now(stage, lasts) };
        let peak = self.wait(doing, lasts * 4, &done, show).await?;
        // Requests under way are read to their end, unless that does not come.
        let tally: Tally = tokio::time::timeout(lasts, load)
            .await
            .map_err(|_| format!("{stage}: requests did not end within {:?}", lasts * 5))??;
        self.outcome.other.extend(tally.other.clone());
        self.outcome.rows.push(Row {
            stage: stage.to_owned(),
            water: peak,
            answers: Some([tally.ok, tally.shed, tally.other.values().sum()]),
            latency: Some([tally.quantile(0.5), tally.quantile(0.99)]),
        });
        Ok(())
    }
}
