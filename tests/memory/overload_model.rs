//! The arithmetic of the bench `overload`: what fits, and when requests come.
//!
//! It starts no service and makes no cgroup: that is the bench's. Invariant: none of its own.

use std::collections::BTreeSet;
use std::time::Duration;

use lowtide::ByteSize;

use crate::offer::{BASE, CEILING, CLASSES, HOLD, Mix, Offer, Sending, taken};

const LIMIT: ByteSize = ByteSize::mib(256);

fn offer(mix: Mix, rate: f64, lasts: Duration, seed: u64) -> Offer {
    Offer { mix, rate, lasts, seed, sending: Sending::default() }
}

/// The part of the time for which what all requests take is above the ceiling.
fn above_ceiling(mix: Mix, load: f64) -> f64 {
    let lasts = Duration::from_secs(2000);
    let room = LIMIT.scaled(CEILING).saturating_sub(BASE);
    let mut steps = Vec::new();
    for arrival in offer(mix, load * mix.fits(LIMIT), lasts, 3).arrivals() {
        steps.push((arrival.at, true, taken(arrival.size)));
        steps.push((arrival.at + arrival.hold, false, taken(arrival.size)));
    }
    steps.sort();
    let (mut sum, mut since, mut above) = (ByteSize::ZERO, Duration::ZERO, Duration::ZERO);
    for (at, comes, bytes) in steps {
        if sum > room {
            above += at - since;
        }
        since = at;
        sum = if comes { sum.saturating_add(bytes) } else { sum.saturating_sub(bytes) };
    }
    above.as_secs_f64() / lasts.as_secs_f64()
}

#[test]
fn what_fits_is_some_35_heavy_requests_a_second_and_hardly_ever_too_much() {
    let rate = Mix::Heavy.fits(LIMIT);
    assert!((30.0..40.0).contains(&rate), "{rate}");
    for mix in Mix::ALL {
        let (fits, twice) = (above_ceiling(mix, 1.0), above_ceiling(mix, 2.0));
        assert!(fits < 0.01, "{mix:?}: above for {fits} of the time at 1x");
        assert!(twice > 0.05, "{mix:?}: above for {twice} of the time at 2x");
    }
}

#[test]
fn the_same_offer_gives_the_same_requests_at_its_rate() {
    let offer = offer(Mix::Small, 200.0, Duration::from_secs(20), 11);
    let (one, other) = (offer.arrivals(), offer.arrivals());
    assert_eq!(format!("{one:?}"), format!("{other:?}"));
    assert!(one.windows(2).all(|pair| pair[0].at <= pair[1].at));
    assert!(one.iter().all(|arrival| (HOLD[0]..=HOLD[1]).contains(&arrival.hold)));
    // Poisson: 4000, five deviations at most.
    assert!((3684..=4316).contains(&one.len()), "{}", one.len());
    let classes: BTreeSet<usize> = one.iter().map(|arrival| arrival.class).collect();
    assert_eq!(classes.len(), CLASSES.len());
}
