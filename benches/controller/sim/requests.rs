//! Requests: how they come, what they hold while they last, and how they end.
//!
//! A request books what it says before it starts, and touches what is true as its body arrives, in
//! parts. The door is the crate's; nothing here admits.
//!
//! Invariant: a request's memory is freed once, at its end or where it is given up.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use lowtide_admission::ByteSize;
use lowtide_admission::clock::Moment;
use lowtide_admission::learning::{Compared, Kind, SlowStartPermit};
use lowtide_admission::{Budget, Cost, Permit, Rejected, Use};
use lowtide_core::sync::lock;

use super::events::Event;
use super::plant::bytes;
use super::scenario::{HOLD, HOLD_SPREAD};
use super::world::{Weight, World};

/// A body of this much or more arrives in several parts.
const PARTS_FROM: f64 = 0.25;
const PARTS: u32 = 8;
/// The time after which a request that waits for the resource asks again.
const ASK_EVERY: Duration = Duration::from_millis(10);

/// One request.
pub(super) struct Request {
    class: usize,
    /// MiB by its estimate, and in truth.
    said: f64,
    truth: f64,
    /// MiB that it holds by now.
    held: f64,
    parts_left: u32,
    part_every: Duration,
    permit: Option<Permit>,
    /// `None` if it is not measured.
    terms: Option<Terms>,
    guard: Option<Use<Weight>>,
}

/// What is kept for a measured request, as the tower layer does.
struct Terms {
    need: Compared,
    claim: ByteSize,
    slot: Option<Box<SlowStartPermit>>,
}

impl Terms {
    /// A poll has ended in which it grew.
    fn grows(&self, is_beyond: bool, has_arrived: bool) {
        if let Some(slot) = &self.slot {
            slot.begins_work();
            slot.ends_work(is_beyond);
            if has_arrived {
                slot.arrived();
            }
        }
    }

    /// It was served.
    fn ends(mut self, held: f64) {
        self.need.learn(bytes(held));
        if let Some(slot) = &mut self.slot {
            slot.succeeded = true;
        }
    }
}

/// Those that are under way, by their serial numbers.
#[derive(Default)]
pub(super) struct Requests {
    all: BTreeMap<u64, Request>,
    serial: u64,
    claimed: f64,
}

impl Requests {
    /// Returns the need of all of them, by their estimates or by the truth.
    pub(super) const fn claimed(&self) -> f64 {
        self.claimed
    }

    fn sit(&mut self, request: Request) -> u64 {
        self.serial += 1;
        self.claimed += request.said.max(request.truth);
        self.all.insert(self.serial, request);
        self.serial
    }

    fn leave(&mut self, serial: u64) -> Option<Request> {
        let request = self.all.remove(&serial)?;
        self.claimed = (self.claimed - request.said.max(request.truth)).max(0.0);
        Some(request)
    }
}

impl World {
    /// The next arrival is posted, and one comes.
    pub(super) fn arrival(&self, comes: bool) {
        let start = {
            let state = &mut *lock(&self.state);
            let second = state.now.since_origin().as_secs_f64();
            if second >= self.scenario.lasts {
                return;
            }
            let rate = self.scenario.load.at(second) * self.scenario.fitting_rate();
            let grain = self.scenario.load.grain();
            let gap = if rate > 0.0 { state.chance.gap(rate) } else { grain };
            let next = state.now + Duration::from_secs_f64(gap.min(grain));
            state.events.post(next, Event::Arrival { comes: gap < grain });
            comes.then_some((state.now, second))
        };
        if let Some((now, second)) = start {
            self.come(now, second);
        }
    }

    fn come(&self, now: Moment, second: f64) {
        let standing = self.admission.ledger(Budget::Host).resource_reservations();
        let (class, said, truth, wants) = {
            let state = &mut *lock(&self.state);
            let chance = &mut state.chance;
            let class = self.scenario.mix.draw(chance);
            let said = self.scenario.mix.classes[class].0;
            let noise = 1.0 + self.scenario.truth.noise;
            let truth = said * self.scenario.truth.at(second) * chance.around(1.0 / noise, noise);
            let wants = self.scenario.resource.is_some_and(|part| chance.happens(part));
            let largest = self.scenario.largest(second);
            let roomy = state.claimed(standing) + largest <= 0.4 * state.plant.limit;
            state.seen.offers(class, said, second, roomy);
            (class, said, truth, wants)
        };
        let admitted = self.admit(bytes(said));
        let state = &mut *lock(&self.state);
        let (permit, terms) = match admitted {
            Ok(admitted) => admitted,
            Err(rejected) => {
                state.seen.sheds(class, said, second, rejected.reason());
                return;
            }
        };
        let away = state.chance.between(1.0 - HOLD_SPREAD / HOLD, 1.0 + HOLD_SPREAD / HOLD);
        let lasts = Duration::from_secs_f64(HOLD * away);
        let parts = if said >= PARTS_FROM { PARTS } else { 1 };
        let request = Request {
            class,
            said,
            truth,
            held: 0.0,
            parts_left: parts,
            part_every: lasts.mul_f64(self.scenario.arrives / f64::from(parts)),
            permit: Some(permit),
            terms,
            guard: None,
        };
        let serial = state.requests.sit(request);
        state.events.post(now, Event::Part(serial));
        state.events.post(now + lasts, Event::End(serial));
        if wants {
            state.events.post(now, Event::Ask(serial));
        }
    }

    /// What is known of requests with this estimate.
    pub(super) fn need_of(&self, estimate: ByteSize) -> Compared {
        self.needs.of(Kind { route: 1, is_declared: true, has_many_routes: false }, estimate, false)
    }

    /// Admits a request with this estimate, measured or not.
    fn admit(&self, estimate: ByteSize) -> Result<(Permit, Option<Terms>), Rejected> {
        if !self.scenario.measured {
            return Ok((self.admission.try_admit(Cost::host(estimate))?, None));
        }
        let need = self.need_of(estimate);
        let ledger = self.admission.ledger(Budget::Host);
        let room = ledger.learned_room();
        let slot = match estimate <= ledger.ceiling() {
            true => need.enter(room.all, &(Arc::clone(&self.clock) as _)).map_err(|running| {
                let state = self.admission.state();
                state.reject(state.slow_start(running))
            })?,
            false => None,
        };
        let claim = need.claim(room);
        let mut permit = self.admission.try_admit(Cost::host(claim))?;
        permit.report(ByteSize::ZERO);
        if slot.is_some() {
            permit.mark_unlearned();
        }
        Ok((permit, Some(Terms { need, claim, slot })))
    }

    /// A part of the body arrives.
    pub(super) fn part(&self, serial: u64) {
        let state = &mut *lock(&self.state);
        let now = state.now;
        let Some(request) = state.requests.all.get_mut(&serial) else { return };
        let Some(permit) = &mut request.permit else { return };
        let part = (request.truth - request.held) / f64::from(request.parts_left);
        let beyond = bytes(request.held + part).saturating_sub(permit.cost().host);
        if self.scenario.grows && !beyond.is_zero() && permit.grow(beyond).is_err() {
            if let Some(request) = state.requests.leave(serial) {
                state.plant.free(now, request.held);
            }
            return;
        }
        request.held += part;
        if let Some(terms) = &request.terms {
            permit.raise(bytes(request.held));
            permit.report(bytes(request.held));
            terms.grows(bytes(request.held) > terms.claim, request.parts_left == 0);
        }
        request.parts_left -= 1;
        if request.parts_left > 0 {
            state.events.post(now + request.part_every, Event::Part(serial));
        }
        state.plant.allocate(now, part);
    }

    /// A request asks for the resource, and waits while it is loaded.
    pub(super) fn ask(&self, serial: u64) {
        let Some(models) = self.managed.get() else { return };
        let Some(managed) = models.get(usize::try_from(serial).unwrap_or(0) % models.len()) else {
            return;
        };
        let stats = managed.stats();
        {
            let state = &mut *lock(&self.state);
            // The worker may be taking it apart, on this very thread.
            if stats.loading || self.working.load(Ordering::Relaxed) {
                state.events.post(state.now + ASK_EVERY, Event::Ask(serial));
                return;
            }
            if state.requests.all.get_mut(&serial).is_none() {
                return;
            }
        }
        // It must not wait: this thread advances the virtual clock.
        let has_room = stats.loaded || self.admission.try_reserve_resource(stats.cost).is_ok();
        let guard = has_room.then(|| managed.acquire_blocking());
        let state = &mut *lock(&self.state);
        match guard {
            Some(Ok(guard)) => {
                if let Some(request) = state.requests.all.get_mut(&serial)
                    && request.permit.is_some()
                {
                    request.guard = Some(guard);
                }
            }
            Some(Err(_)) | None => {
                if let Some(request) = state.requests.leave(serial) {
                    state.plant.free(state.now, request.held);
                }
            }
        }
    }

    /// A request ends: its permit and guard go, and its memory with them or a little later.
    pub(super) fn end(&self, serial: u64) {
        let lingers = self.scenario.lingers;
        let state = &mut *lock(&self.state);
        let (now, second) = (state.now, state.now.since_origin().as_secs_f64());
        let Some(request) = state.requests.all.get_mut(&serial) else { return };
        request.permit = None;
        if let Some(terms) = request.terms.take() {
            terms.ends(request.held);
        }
        request.guard = None;
        if second <= self.scenario.lasts {
            let (class, said) = (request.class, request.said);
            state.seen.serves(class, said);
        }
        let late = state.chance.time(Duration::ZERO, lingers);
        if late.is_zero() {
            Self::release(state, serial);
        } else {
            state.events.post(now + late, Event::Freed(serial));
        }
    }

    /// The memory of a request goes.
    pub(super) fn freed(&self, serial: u64) {
        Self::release(&mut lock(&self.state), serial);
    }

    fn release(state: &mut super::world::State, serial: u64) {
        if let Some(request) = state.requests.leave(serial) {
            state.plant.free(state.now, request.held);
        }
    }
}
