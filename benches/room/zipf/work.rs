//! Models and requests, drawn from a seed.
//!
//! Invariant: the same case, seed and count give the same work.

use std::time::Duration;

use lowtide_admission::ByteSize;

use super::chance::Chance;

/// The number of models.
pub(super) const MODELS: usize = 10;
/// There is room for so many models of mean size.
const ROOM: u64 = 3;
/// The mean time between two requests, and that for which a request holds its model.
const ARRIVAL: f64 = 1.0;
const HOLD: f64 = 0.5;

/// The sizes and load times of the models.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Draw {
    /// 1 GiB and 4 s each.
    Equal,
    /// 0.5 to 2 GiB; 0.5 s and the time to read them at 256 to 1024 MiB/s.
    Sizes,
    /// 0.5 to 2 GiB, and 0.5 to 8 s independent of the size.
    Independent,
}

/// How the popularity of the models changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Drift {
    Never,
    /// Two models change places after each so many requests.
    Swap(usize),
    /// All models change places after each so many requests.
    Shuffle(usize),
}

/// What is drawn.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Case {
    pub(crate) name: &'static str,
    /// The model of rank k is requested in proportion to `1 / k^exponent`.
    pub(crate) exponent: f64,
    pub(crate) draw: Draw,
    pub(crate) drift: Drift,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Model {
    pub(super) size: ByteSize,
    pub(super) load_time: Duration,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Request {
    /// The time of its arrival without loads.
    pub(super) at: Duration,
    pub(super) model: usize,
    pub(super) hold: Duration,
}

pub(crate) struct Work {
    pub(super) models: [Model; MODELS],
    pub(super) room: ByteSize,
    pub(super) requests: Vec<Request>,
}

impl Work {
    pub(super) fn draw(case: &Case, seed: u64, count: usize) -> Self {
        let mut chance = Chance::new(seed);
        let models: [Model; MODELS] = std::array::from_fn(|_| model(case.draw, &mut chance));
        let sizes = || models.iter().map(|model| model.size.get());
        let mean = sizes().sum::<u64>() / MODELS as u64;
        let room = ByteSize::new((ROOM * mean).max(sizes().max().unwrap_or_default()));
        let mut ranks: [usize; MODELS] = std::array::from_fn(|rank| rank);
        shuffle(&mut ranks, &mut chance);
        let weights: [f64; MODELS] =
            std::array::from_fn(|rank| ((rank + 1) as f64).powf(-case.exponent));
        let mut at = Duration::ZERO;
        let requests = (0..count).map(|nth| {
            match case.drift {
                Drift::Swap(each) if nth > 0 && nth % each == 0 => {
                    ranks.swap(chance.below(MODELS), chance.below(MODELS));
                }
                Drift::Shuffle(each) if nth > 0 && nth % each == 0 => {
                    shuffle(&mut ranks, &mut chance);
                }
                _ => {}
            }
            let mut left = unit(&mut chance) * weights.iter().sum::<f64>();
            let is_over = |weight: &f64| {
                left -= weight;
                left < 0.0
            };
            let rank = weights.iter().position(is_over).unwrap_or(MODELS - 1);
            at += exponential(ARRIVAL, &mut chance);
            Request { at, model: ranks[rank], hold: exponential(HOLD, &mut chance) }
        });
        let requests = requests.collect();
        Self { models, room, requests }
    }
}

fn model(draw: Draw, chance: &mut Chance) -> Model {
    let mut between = |least: f64, most: f64| least * (most / least).powf(unit(chance));
    let (mib, seconds) = match draw {
        Draw::Equal => (1024.0, 4.0),
        Draw::Sizes => {
            let mib = between(512.0, 2048.0);
            (mib, 0.5 + mib / between(256.0, 1024.0))
        }
        Draw::Independent => (between(512.0, 2048.0), between(0.5, 8.0)),
    };
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "512 to 2048")]
    let size = ByteSize::mib(mib as u64);
    Model { size, load_time: Duration::from_secs_f64(seconds) }
}

fn shuffle(ranks: &mut [usize; MODELS], chance: &mut Chance) {
    for at in (1..MODELS).rev() {
        ranks.swap(at, chance.below(at + 1));
    }
}

/// Evenly from 0 up to 1.
fn unit(chance: &mut Chance) -> f64 {
    (chance.next() >> 11) as f64 / (1_u64 << 53) as f64
}

/// Seconds of an exponential distribution.
fn exponential(mean: f64, chance: &mut Chance) -> Duration {
    Duration::from_secs_f64(-mean * (1.0 - unit(chance)).ln())
}
