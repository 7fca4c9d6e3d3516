//! A small embedding model with real arithmetic, in device memory.
//!
//! A text becomes hashed n-grams (words and letter trigrams). Each n-gram selects a row of a weight
//! table; the rows are averaged and projected by a matrix. The weights are random from a seed:
//! texts that share n-grams are close, others nearly orthogonal. It learns nothing and knows no
//! language; its memory behaves like that of a model that does.
//!
//! Weights are in the arena's stable region, activations in the dynamic one. If the host cannot
//! access the arena's memory, the device computes. Invariant: the embedding of a text depends only
//! on the text, the seed and the shape, except for the rounding of sums.

#[cfg(feature = "cuda")]
#[path = "model_cuda.rs"]
mod cuda;

use std::sync::Arc;
use std::time::Duration;

use lowtide::admission::{Managed, ResourceError, Use};
use lowtide::clock::SystemClock;
#[cfg(feature = "cuda")]
use lowtide::cudarc::driver::DriverError;
use lowtide::device::{ArenaConfig, Buffer, DeviceArena, DeviceError, HostDriver, Lease, Region};
use lowtide::{BoxError, ByteSize, Cost, Memory};
use thiserror::Error;

use crate::chance::Chance;

/// Numbers in an embedding.
pub(crate) const WIDTH: usize = 256;
/// N-grams of a text that are looked at; the rest of a longer text is ignored, as real embedding
/// models cut their input.
pub(crate) const NGRAMS_MAX: usize = 8192;

/// Device bytes that the activations of one request take at most: the rows of one text and their
/// sum.
pub(crate) const DEVICE_COST: ByteSize = ByteSize::new(((NGRAMS_MAX + 1) * WIDTH * 4) as u64);

/// The name of the arena and of the resource.
const NAME: &str = "embedder";
/// The fewest bytes of weights that the program accepts.
const WEIGHTS_MIN: ByteSize = ByteSize::mib(64);
const ROW_BYTES: u64 = (WIDTH * size_of::<f32>()) as u64;

/// Returns the host bytes of the activations: none, they are in the arena.
pub(crate) const fn host_activations(_body_bytes: u64) -> ByteSize {
    ByteSize::ZERO
}

/// The settings of the model.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Settings {
    /// Size of the embedding model's weights, at least 64 MiB.
    #[arg(long, env = "PROXY_WEIGHTS", default_value = "64m", value_parser = weights)]
    pub(crate) weights: ByteSize,
    /// Seed of the weights.
    #[arg(long, env = "PROXY_SEED", default_value_t = 1)]
    pub(crate) seed: u64,
}

fn weights(text: &str) -> Result<ByteSize, String> {
    let size: ByteSize = text.parse().map_err(|expected: &str| format!("expected {expected}"))?;
    if size < WEIGHTS_MIN {
        return Err(format!("weights of {size}: expected 64 MiB or more"));
    }
    Ok(size)
}

/// The model as a resource that is loaded on first use, and the arena that it is loaded into.
#[derive(Clone, Debug)]
pub(crate) struct ManagedModel {
    /// The arena.
    pub(crate) arena: DeviceArena,
    /// The resource.
    pub(crate) resource: Managed<Model>,
}

impl ManagedModel {
    /// Opens the arena and registers the model, which is unloaded after this idle time or that of
    /// the profile. Without `memory` it stays loaded.
    pub(crate) fn open(
        settings: &Settings,
        idle_unload: Option<Duration>,
        memory: Option<&Memory>,
    ) -> Result<Self, BoxError> {
        let Settings { weights, seed } = *settings;
        let load = move |arena: &DeviceArena| Ok(Model::load(arena, weights, seed)?);
        let Some(memory) = memory else {
            let clock = Arc::new(SystemClock::new());
            let driver = Arc::new(HostDriver::new());
            let arena = DeviceArena::open(driver, clock.clone(), ArenaConfig::new(NAME))?;
            let of_load = arena.clone();
            let resource = Managed::builder(NAME, move || load(&of_load)).build(clock, None);
            return Ok(Self { arena, resource });
        };
        let arena = memory.devices().open_arena(NAME)?;
        let cost = Cost::device(Model::weight_bytes(weights));
        let mut builder = memory.managed_in(&arena, NAME, load).cost(cost);
        if let Some(idle) = idle_unload {
            builder = builder.idle(idle);
        }
        let resource = builder.register()?;
        Ok(Self { arena, resource })
    }

    /// Loads the model if it is not loaded, and keeps it loaded while it is used.
    pub(crate) async fn acquire(&self) -> Result<Use<Model>, ResourceError> {
        self.resource.acquire().await
    }
}

/// An error of the model.
#[derive(Debug, Error)]
pub(crate) enum ModelError {
    /// An error of the arena.
    #[error(transparent)]
    Arena(#[from] DeviceError),
    /// An error of cudarc, or of the driver under it.
    #[cfg(feature = "cuda")]
    #[error("CUDA: {0}")]
    Cuda(#[from] DriverError),
}

impl ModelError {
    /// Returns `true` if memory ran out, so that a later attempt may succeed.
    pub(crate) const fn is_out_of_memory(&self) -> bool {
        matches!(self, Self::Arena(error) if error.is_out_of_memory())
    }
}

/// Weights in device memory.
#[derive(Debug)]
pub(crate) struct Model {
    arena: DeviceArena,
    /// `rows x WIDTH`: a row for each hash value.
    table: Buffer<f32>,
    /// `WIDTH x WIDTH`, by rows.
    projection: Buffer<f32>,
    rows: usize,
    /// The device computation, if the host cannot access the memory.
    #[cfg(feature = "cuda")]
    cuda: Option<cuda::Cuda>,
}

impl Model {
    /// Device bytes that a model with a table of this size takes.
    pub(crate) fn weight_bytes(table: ByteSize) -> ByteSize {
        table.saturating_add(ByteSize::of(WIDTH * WIDTH * size_of::<f32>()))
    }

    /// Makes the weights: a table of about `table` bytes, filled from the seed.
    pub(crate) fn load(
        arena: &DeviceArena,
        table: ByteSize,
        seed: u64,
    ) -> Result<Self, ModelError> {
        let rows = usize::try_from(table.get() / ROW_BYTES).unwrap_or(usize::MAX).max(1);
        let lease = arena.enter()?;
        #[cfg(feature = "cuda")]
        let cuda =
            (!arena.capabilities().host_access).then(|| cuda::Cuda::open(arena)).transpose()?;
        let room = |len| {
            #[cfg(feature = "cuda")]
            if let Some(cuda) = &cuda {
                return cuda.alloc(len);
            }
            Ok::<_, ModelError>(arena.alloc(len, Region::Stable)?)
        };
        let (table, projection) = (room(rows.saturating_mul(WIDTH))?, room(WIDTH * WIDTH)?);
        let mut model = Self {
            arena: arena.clone(),
            table,
            projection,
            rows,
            #[cfg(feature = "cuda")]
            cuda,
        };
        let mut chance = Chance(seed);
        for weights in [&mut model.table, &mut model.projection] {
            let next = || between_minus_one_and_one(&mut chance);
            #[cfg(feature = "cuda")]
            if let Some(cuda) = &model.cuda {
                cuda.fill(weights, &lease, next)?;
                continue;
            }
            weights.slice_mut(&lease)?.fill_with(next);
        }
        Ok(model)
    }

    /// Returns [`WIDTH`] numbers for each text, which the service scales to a vector of length 1
    /// (all zero for a text without a letter or digit).
    pub(crate) fn embed(&self, texts: &[String]) -> Result<Vec<Vec<f32>>, ModelError> {
        let lease = self.arena.enter()?;
        texts.iter().map(|text| self.embed_one(text, &lease)).collect()
    }

    fn embed_one(&self, text: &str, lease: &Lease) -> Result<Vec<f32>, ModelError> {
        let rows = ngram_rows(text, self.rows);
        #[cfg(feature = "cuda")]
        if let Some(cuda) = &self.cuda {
            let rows: Vec<u32> = rows.iter().filter_map(|&row| row.try_into().ok()).collect();
            return cuda.embed(&self.table, &self.projection, &rows, lease);
        }
        Ok(self.on_host(&rows, lease)?)
    }

    /// The projection of the sum of these rows of the table.
    fn on_host(&self, rows: &[usize], lease: &Lease) -> Result<Vec<f32>, DeviceError> {
        let room = |len| self.arena.alloc::<f32>(len, Region::Dynamic);
        let (mut gathered, mut pooled) = (room(rows.len().max(1) * WIDTH)?, room(WIDTH)?);
        let (gathered, pooled) = (gathered.slice_mut(lease)?, pooled.slice_mut(lease)?);
        let table = self.table.slice(lease)?;
        for (place, row) in gathered.chunks_exact_mut(WIDTH).zip(rows) {
            place.copy_from_slice(&table[row * WIDTH..(row + 1) * WIDTH]);
        }
        pooled.fill(0.0);
        for row in gathered.chunks_exact(WIDTH).take(rows.len()) {
            for (sum, value) in pooled.iter_mut().zip(row) {
                *sum += value;
            }
        }
        let rows = self.projection.slice(lease)?.chunks_exact(WIDTH);
        let product =
            |row: &[f32]| row.iter().zip(&*pooled).map(|(weight, sum)| weight * sum).sum::<f32>();
        Ok(rows.map(product).collect())
    }
}

/// The table rows of a text's n-grams: each word whole, and its trigrams between word marks.
fn ngram_rows(text: &str, rows: usize) -> Vec<usize> {
    let lower = text.to_lowercase();
    let words = lower.split(|c: char| !c.is_alphanumeric()).filter(|word| !word.is_empty());
    let mut found = Vec::new();
    for word in words {
        found.push(row_of(word.chars(), rows));
        let marked: Vec<char> =
            std::iter::once('^').chain(word.chars().take(NGRAMS_MAX)).chain(['$']).collect();
        for trigram in marked.windows(3) {
            found.push(row_of(trigram.iter().copied(), rows));
        }
        if found.len() >= NGRAMS_MAX {
            found.truncate(NGRAMS_MAX);
            break;
        }
    }
    found
}

/// FNV-1a over the letters (Fowler, Noll, Vo; 64 bits), reduced to a row.
fn row_of(letters: impl Iterator<Item = char>, rows: usize) -> usize {
    let hash = letters.fold(0xCBF2_9CE4_8422_2325_u64, |hash, letter| {
        (hash ^ u64::from(letter)).wrapping_mul(0x0100_0000_01B3)
    });
    let spread = (u128::from(hash) * rows as u128) >> 64;
    usize::try_from(spread).unwrap_or(0)
}

fn between_minus_one_and_one(chance: &mut Chance) -> f32 {
    let part = u16::try_from(chance.bits() >> 48).unwrap_or(0);
    f32::from(part) / f32::from(u16::MAX) * 2.0 - 1.0
}
