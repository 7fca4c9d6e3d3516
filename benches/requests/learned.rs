//! How many requests a route takes to learn: until its estimate stays within 10 % of the true 95th
//! percentile of their needs.

use http::Request;
use http::request::Parts;
use lowtide::ByteSize;
use lowtide::service::{Estimate as _, Learned};

/// Routes, each with its own random needs.
const ROUTES: u64 = 200;
/// Requests of a route.
const REQUESTS: usize = 400;
/// The accepted error.
const ERROR_MAX: f64 = 0.1;
/// Requests until the error is accepted, in nine of ten routes.
const GOAL: f64 = 30.0;

/// Random numbers by a seed.
struct Chance(u64);

impl Chance {
    /// Returns a number from 0 to 1.
    fn part(&mut self) -> f64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// Returns the need of a request: around 10 MiB, most of them within 15 % of that.
    fn need(&mut self) -> f64 {
        let sum: f64 = (0..4).map(|_| self.part()).sum();
        10.0 * 1024.0 * 1024.0 * (0.7 + 0.15 * sum)
    }
}

/// Measures it and returns whether the goal held.
pub(crate) fn measure() -> bool {
    let mut all: Vec<_> = (0..100_000).scan(Chance(7), |chance, _| Some(chance.need())).collect();
    all.sort_by(f64::total_cmp);
    let truth = all.get(all.len() * 95 / 100).copied().unwrap_or_default();
    let mut after: Vec<_> = (1..=ROUTES).map(|seed| requests(seed, truth)).collect();
    after.sort_unstable();
    let at = |percent: usize| after.get(after.len() * percent / 100).copied().unwrap_or(REQUESTS);
    let (median, most) = (at(50), at(90));
    println!("a route's estimate stays within 10 % of the truth after {median} requests (median)");
    println!("figure measured.learned_after_requests {most} requests");
    most as f64 <= GOAL
}

/// Returns the number of requests after which the estimate of a route stays near the truth.
fn requests(seed: u64, truth: f64) -> usize {
    let (head, ()): (Parts, ()) = Request::new(()).into_parts();
    let learned = Learned::new(ByteSize::mib(1), |_: &Parts| ());
    let mut chance = Chance(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15));
    let mut wrong = 0;
    for nth in 1..=REQUESTS {
        let estimated = learned.estimate_to_learn(&head);
        let Some(lesson) = estimated.lesson else { return REQUESTS };
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "of some MiB")]
        lesson.learn(ByteSize::new(chance.need() as u64));
        let estimate = learned.estimate(&head).0.host.as_f64();
        if (estimate / truth - 1.0).abs() > ERROR_MAX {
            wrong = nth;
        }
    }
    wrong
}
