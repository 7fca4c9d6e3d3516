//! Makes room by unloading idle resources in one step, and by asking reclaimers of the application:
//! enough for the requester, or none.
//!
//! Called if a load or a request does not fit. An [`Evictor`] chooses idle resources, claims them,
//! and reserves what the load needs beyond their bytes. Separate threads unload them. Their
//! reservations stay until the last one is unloaded and then pass to the load in one exchange, so
//! that no other request takes that room. A request is not kept waiting: it is rejected, with the
//! time that the unloads take, and finds the room when it retries.
//!
//! Reclaimers are functions of the application, so they are neither chosen nor called on the thread
//! of a request. A round on a thread of its own chooses among them and the idle resources. For
//! requests, the thread runs a round every 100 ms while one waits for bytes; for a load, it runs
//! one for reclaimers only, and the load then evicts what it still needs. Meanwhile no other choice
//! is made for requests, since the memory that a round frees is not measured yet.
//!
//! It relies on resources that can be claimed ([`Claimable`]): not in use, not waited for, and past
//! their minimum residency. It knows neither their types nor their registry.
//!
//! An eviction for a request costs a reload, and most requests end sooner than that takes. So below
//! level high, a request that fits once the others have ended evicts only resources that are seldom
//! used ([`Idle::used_for`]) and of whose bytes it lacks an eighth or more; after a wait of
//! [`PATIENCE`](super::waiting::PATIENCE), also those whose loads have paid off
//! ([`Idle::loaded_for`]). One that would not fit even then evicts those at once, and all after the
//! wait.
//!
//! Invariants: the claimed resources make enough room together with the free room, otherwise
//! nothing is claimed; a claimed resource is unloaded or put back; bytes of an unload that has not
//! ended are reserved. Bytes of a reclaimer are never reserved or handed over: they are room when a
//! sample finds them freed. No lock is held while a resource is unloaded or put back, or while a
//! function of the application runs.
//!
//! It deliberately does not wait for resources in use, and does not measure what an unload freed.

use std::fmt;
use std::io;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError, Weak};
use std::thread;
use std::time::Duration;

use lowtide_core::bytes::ByteSize;
use lowtide_core::clock::{Bell, Clock, Moment};
use lowtide_core::fork::Birth;
use lowtide_core::sync::{Mutex, caught, lock};

use super::cost::{Budget, Cost};
use super::ledger::{InsufficientBudget, Reservation};
use super::permit::Permit;
use super::pressure::Level;
use super::reclaim::{PAUSE_MIN, elsewhere};
use super::state::AdmissionState;

/// The time that a load waits for the unloads that make room for it. A guess: an unload that takes
/// longer is stuck.
const UNLOAD_MAX: Duration = Duration::from_secs(30);
/// The threads that unload for one eviction. A stuck unload delays at most the unloads that its
/// thread would have run next.
const THREADS_MAX: usize = 16;
/// The number of attempts to choose again because a chosen resource came into use.
const CHOICES_MAX: usize = 8;
/// The time that a round waits for its reclaimers and unloads. Slower ones go on without it.
const ROUND_MAX: Duration = Duration::from_secs(1);
/// The time that a load waits for a sample to find memory freed, and asks for ticks. A guess.
const OBSERVED_MAX: Duration = Duration::from_millis(500);
/// A request that fits once others have ended and lacks a smaller part of what unloads would release
/// waits before they begin. A guess.
const LACK_PART: f64 = 0.125;
/// The ticks after a round before the next one: the second has sampled what the round released.
const TICKS_OBSERVED: u64 = 2;
/// The bytes that a reclaimer is asked for in addition: reservations are rounded, and memory is
/// freed by pages.
const ROUNDING: u64 = 4096;
/// The time between its attempts: a tick of a busy service.
const OBSERVED_STEP: Duration = Duration::from_millis(10);

/// The caller for which room is made.
#[derive(Clone)]
enum Requester {
    /// A request, by its method and route if it came through a layer.
    Request(Option<Box<str>>),
    /// Requests that wait for room.
    WaitingRequests,
    /// The load of the resource of this name.
    Load(Arc<str>),
}

impl fmt::Display for Requester {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Request(Some(label)) => write!(f, "a request {label}"),
            Self::Request(None) => f.write_str("a request"),
            Self::WaitingRequests => f.write_str("waiting requests"),
            Self::Load(name) => write!(f, "the load of {name:?}"),
        }
    }
}

/// The room that a requester needs.
#[derive(Clone)]
pub(super) struct NeededRoom {
    admission: &'static AdmissionState,
    cost: Cost,
    requester: Requester,
}

impl NeededRoom {
    /// Describes the reason for an eviction, with the figures of now for the budget that lacks room.
    fn cause(&self, budget: Budget) -> Arc<str> {
        let Self { admission, cost, requester } = self;
        let (ledger, needed) = (admission.ledger(budget), cost.of(budget));
        let (reserved, allowance) = (ledger.reserved_bytes(), ledger.allowance_bytes());
        format!(
            "evicted for {requester}, which needed {needed} of {budget} memory while {reserved} \
             of {allowance} were reserved"
        )
        .into()
    }
}

/// A resource that can be taken out of use.
pub(super) trait Claimable: Send + Sync {
    /// Takes it out of use if it may be evicted now. Callers that acquire it then wait. A divisible
    /// one is to release these bytes, others all of theirs.
    fn claim(self: Arc<Self>, bytes: ByteSize) -> Option<EvictionClaim>;
}

/// A resource that is out of use: its reservation, or what it is to release without one; and the
/// function that unloads it on this thread for a cause and returns its reservation, if it has one.
/// Dropping that function puts the resource back.
pub(super) type EvictionClaim = (Cost, Box<dyn FnOnce(&Arc<str>) -> Option<Permit> + Send>);

/// A resource that may be evicted, now or after its minimum residency.
pub(crate) struct Idle {
    /// The admission state that holds its reservation.
    pub(super) admission: &'static AdmissionState,
    /// Its reservation.
    pub(super) cost: Cost,
    /// The remaining minimum residency.
    pub(super) stays_for: Duration,
    /// The time until its load has paid off: its break-even interval, counted from the load.
    pub(super) loaded_for: Duration,
    /// Zero if that is over, and its uses are at least the break-even interval apart.
    pub(super) used_for: Duration,
    /// The duration of its last unload.
    pub(super) unload_time: Duration,
    /// The larger, the sooner it is unloaded.
    pub(super) score: f64,
    /// `true` for a reclaimer, which has no reservation and can release a part of its bytes.
    pub(super) is_divisible: bool,
    pub(super) resource: Arc<dyn Claimable>,
}

/// A source of idle resources.
pub(super) trait EvictionSource: Send + Sync {
    /// Returns the resources that may be evicted, now or after their minimum residency.
    fn idle(&self) -> Vec<Idle>;

    /// Returns the time from which a reclaimer may be asked, [`Moment::NEVER`] while each runs, and
    /// `None` without one.
    fn next_ask(&self) -> Option<Moment>;

    /// Returns the reclaimers that may be asked now. Calls functions of the application.
    fn reclaimers(&self) -> Vec<Idle>;
}

/// How a request weighs its wait against the reload of a resource.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Patience {
    /// It can wait for other requests to end.
    Waits,
    /// It has waited for [`PATIENCE`](super::waiting::PATIENCE).
    HasWaited,
    /// It evicts what is idle: a load, a request that was admitted and grows, or at level high.
    None,
}

/// When a request that does not fit should retry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RetryHint {
    /// Resources are being unloaded for it, which takes this long.
    Unloading(Duration),
    /// Idle resources make room for it after their minimum residency, which ends in this time.
    Resident(Duration),
    /// No idle resource makes room for it.
    Unknown,
}

/// Makes room by unloading idle resources.
pub(super) struct Evictor {
    pool: Box<dyn EvictionSource>,
    pub(super) clock: Arc<dyn Clock>,
    /// Called after the unloads, before the room is used: releases the memory that they left in the
    /// heap.
    after: Box<dyn Fn() + Send + Sync>,
    birth: Birth,
    /// Serialises the choices.
    choosing: Mutex<()>,
    /// Counted while they are held elsewhere.
    coming: Mutex<Vec<Weak<PendingFree>>>,
    rounds: Mutex<Rounds>,
}

/// The rounds in which reclaimers are asked.
#[derive(Debug, Default)]
struct Rounds {
    /// No other round begins before.
    until: Moment,
    /// `true` if requests wait for the current round or the next one, and nothing else is done for
    /// them.
    helps: bool,
    /// `true` while a thread runs rounds for requests.
    has_thread: bool,
}

/// Bytes that are being unloaded for a rejected request.
struct PendingFree {
    cost: Cost,
    /// The time when they are expected to be free.
    ready: Moment,
    /// They are not counted after this time.
    until: Moment,
}

impl Evictor {
    pub(super) fn new(
        pool: Box<dyn EvictionSource>,
        clock: Arc<dyn Clock>,
        after: Box<dyn Fn() + Send + Sync>,
    ) -> Self {
        let (choosing, coming, rounds) = (Mutex::new(()), Mutex::default(), Mutex::default());
        Self { pool, clock, after, birth: Birth::now(), choosing, coming, rounds }
    }

    /// Makes room for a rejected request, unless other unloads already make enough.
    pub(super) fn for_request(
        self: &Arc<Self>,
        admission: &'static AdmissionState,
        cost: Cost,
        label: Option<&dyn fmt::Display>,
        patience: Patience,
    ) -> RetryHint {
        if !self.birth.is_here() {
            return RetryHint::Unknown;
        }
        let (coming, takes) = self.coming();
        if admission.fits(cost, coming) {
            return RetryHint::Unloading(takes);
        }
        let requester = Requester::Request(label.map(|label| label.to_string().into()));
        let need = NeededRoom { admission, cost, requester };
        if let Some(rest) = self.ask_for_request(&need) {
            return RetryHint::Unloading(rest);
        }
        match self.claim(&need, false, patience) {
            // Without a cause room became free. Nothing runs on this thread, which may belong to an
            // async runtime.
            Ok(step) if step.cause.is_none() || step.start().is_ok() => {
                RetryHint::Unloading(self.coming().1)
            }
            Err(Some(stays)) => RetryHint::Resident(stays),
            Ok(_) | Err(None) => RetryHint::Unknown,
        }
    }

    /// Claims resources that make room for a load, and reserves what the load needs in addition. If
    /// it `asks` and a reclaimer may be asked, that is tried first, when the eviction runs.
    ///
    /// # Errors
    /// The time after which the minimum residency of enough resources ends, if any suffice.
    pub(super) fn for_load(
        self: &Arc<Self>,
        admission: &'static AdmissionState,
        cost: Cost,
        asks: bool,
        resource: &Arc<str>,
    ) -> Result<Eviction, Option<Duration>> {
        if !self.birth.is_here() {
            return Err(None);
        }
        let need = NeededRoom { admission, cost, requester: Requester::Load(Arc::clone(resource)) };
        if asks && self.turn(&lock(&self.rounds)).is_some() {
            return Ok(Eviction::Asks(Arc::clone(self), need));
        }
        self.claim(&need, false, Patience::None).map(Eviction::Unloads)
    }

    /// Returns `true` if reclaimers of the application are registered.
    pub(super) fn has_reclaimers(&self) -> bool {
        self.pool.next_ask().is_some()
    }

    /// Starts the thread that asks reclaimers for requests, unless it runs. Returns the time for
    /// which requests wait for it; `None` if it does not help.
    fn ask_for_request(self: &Arc<Self>, need: &NeededRoom) -> Option<Duration> {
        self.pool.next_ask()?;
        let mut rounds = lock(&self.rounds);
        if rounds.has_thread && rounds.until <= self.clock.now() {
            return None; // it is about to go on, or a function of the application hangs
        }
        let turn = self.begin_round(&mut rounds);
        let starts = !std::mem::replace(&mut rounds.has_thread, true);
        drop(rounds);
        let begun = turn == Some(Duration::ZERO);
        if starts {
            // Also while reclaimers pause: the request may wait until they can be asked.
            let (evictor, need) = (Arc::clone(self), need.clone());
            let thread = thread::Builder::new().name("lowtide-reclaim".to_owned());
            if thread.spawn(move || evictor.run_rounds(need, begun)).is_err() {
                *lock(&self.rounds) = Rounds::default();
                return None;
            }
        }
        if begun { Some(PAUSE_MIN) } else { turn }
    }

    /// Returns zero if a round may begin now, and the remaining time if another one runs or has
    /// just ended. `None` if no reclaimer may be asked, or the last round released nothing.
    fn turn(&self, rounds: &Rounds) -> Option<Duration> {
        let now = self.clock.now();
        if now < rounds.until {
            return rounds.helps.then(|| rounds.until - now);
        }
        self.pool.next_ask().filter(|next| *next <= now).map(|_| Duration::ZERO)
    }

    /// Like [`Evictor::turn`], and begins a round that may begin.
    fn begin_round(&self, rounds: &mut Rounds) -> Option<Duration> {
        let turn = self.turn(rounds);
        if turn == Some(Duration::ZERO) {
            (rounds.until, rounds.helps) = (self.clock.now() + ROUND_MAX, true);
        }
        turn
    }

    /// Ends a round: no other one begins before this pause is over.
    fn end_round(&self, pause: Duration, helps: bool) {
        let until = self.clock.now() + pause;
        let mut rounds = lock(&self.rounds);
        (rounds.until, rounds.helps) = (until, helps);
    }

    /// Runs rounds on this thread while requests wait for bytes. The first one may have begun, for
    /// this request.
    fn run_rounds(self: &Arc<Self>, mut need: NeededRoom, mut begun: bool) {
        let (admission, mut ended_at) = (need.admission, 0);
        let ticks = || admission.ticks.load(Ordering::Relaxed);
        // Ends when no request waits, at its deadline at the latest, or with the last reclaimer.
        // Each iteration waits for the pause.
        loop {
            if begun {
                let helps = caught(|| self.round(&need)).unwrap_or(false);
                need.requester = Requester::WaitingRequests;
                // Longer than the pause of this thread, so that the next round is not begun by a
                // request, but by this thread.
                self.end_round(2 * PAUSE_MIN, helps);
                ended_at = ticks();
                admission.hurry();
            }
            self.clock.wait_until(&Bell::new(), self.clock.now() + PAUSE_MIN);
            let waits = admission.queue.lacking(|_| true);
            let mut rounds = lock(&self.rounds);
            let Some((first, _)) = waits.filter(|_| self.pool.next_ask().is_some()) else {
                rounds.has_thread = false;
                if rounds.helps {
                    rounds.until = Moment::ORIGIN;
                }
                return;
            };
            let now = self.clock.now();
            // The first tick since then may have taken its sample before.
            let is_observed = ticks().wrapping_sub(ended_at) >= TICKS_OBSERVED;
            if !is_observed && rounds.helps {
                rounds.until = rounds.until.max(now + 2 * PAUSE_MIN);
                begun = false;
                continue;
            }
            // A part of this pause may be left, but not more: that would be a load's round.
            begun = !admission.fits(first, Cost::ZERO) && rounds.until - now <= PAUSE_MIN;
            if begun {
                need.cost = first;
                (rounds.until, rounds.helps) = (now + ROUND_MAX, true);
            }
        }
    }

    /// Asks and unloads what is chosen, and waits for that for at most [`ROUND_MAX`]. Returns
    /// `true` if anything was chosen.
    fn round(self: &Arc<Self>, need: &NeededRoom) -> bool {
        let deadline = self.clock.now() + ROUND_MAX;
        let patience = match need.requester {
            Requester::Load(_) => Patience::None,
            _ if need.admission.queue.overdue() == Some(need.cost) => Patience::HasWaited,
            _ => Patience::Waits,
        };
        let Ok(step) = self.claim(need, true, patience) else { return false };
        let has_begun = step.cause.is_some() && step.start().is_ok();
        if has_begun {
            step.wait(deadline);
        }
        has_begun
    }

    /// Returns the permit of a load, for which reclaimers are asked and then resources evicted.
    /// Blocks this thread.
    fn room_for_load(self: &Arc<Self>, need: NeededRoom) -> Result<Permit, EvictionError> {
        let (admission, cost) = (need.admission, need.cost);
        let deadline = self.clock.now() + 2 * ROUND_MAX;
        // Ends at the deadline at the latest: each iteration waits for the end of another round.
        let begun = loop {
            let turn = self.begin_round(&mut lock(&self.rounds));
            let rest = turn.filter(|rest| !rest.is_zero() && self.clock.now() < deadline);
            let Some(rest) = rest else { break turn == Some(Duration::ZERO) };
            let until = (self.clock.now() + rest).min(deadline);
            self.clock.wait_until(&Bell::new(), until);
        };
        if begun {
            // Not on this thread, which may be the caller's, and hold locks of the application.
            let (evictor, of) = (Arc::clone(self), need.clone());
            let round = move || evictor.round(&of);
            let helps = elsewhere(&*self.clock, 2 * ROUND_MAX, round).unwrap_or(false);
            let reserved = if helps { self.observe(admission, cost) } else { None };
            self.end_round(PAUSE_MIN, helps);
            if let Some(permit) = reserved {
                return Ok(permit);
            }
        }
        let Requester::Load(resource) = &need.requester else { return Err(EvictionError::NoRoom) };
        let room = admission.reserve_or_evict(cost, false, resource);
        room.map_or(Err(EvictionError::NoRoom), Eviction::run)
    }

    /// Waits for a sample that finds room for a load, at most for [`OBSERVED_MAX`].
    fn observe(&self, admission: &'static AdmissionState, cost: Cost) -> Option<Permit> {
        let deadline = self.clock.now() + OBSERVED_MAX;
        // Ends at the deadline at the latest: each iteration waits for a part of the time.
        loop {
            admission.hurry();
            if let Ok(permit) = admission.reserve_resource(cost, || RetryHint::Unknown) {
                return Some(permit);
            }
            if self.clock.now() >= deadline {
                return None;
            }
            self.clock.wait_until(&Bell::new(), self.clock.now() + OBSERVED_STEP);
        }
    }

    /// Chooses and claims, and reserves while no other thread chooses: idle resources for a load or
    /// for a request. If it `asks`, reclaimers too, for all requests that wait; for a load only
    /// those, since it exchanges resources in one step, by what it still needs then.
    ///
    /// # Errors
    /// The time after which the minimum residency of enough resources ends, if any suffice.
    fn claim(
        self: &Arc<Self>,
        need: &NeededRoom,
        asks: bool,
        patience: Patience,
    ) -> Result<Arc<UnloadStep>, Option<Duration>> {
        let NeededRoom { admission, cost, ref requester } = *need;
        let is_load = matches!(requester, Requester::Load(_));
        let patience = if admission.level() < Level::High { patience } else { Patience::None };
        let waiting = if is_load || !asks { None } else { admission.queue.lacking(|_| true) };
        let all = waiting.map_or(Cost::ZERO, |(_, all)| all);
        let all = Cost { host: all.host.max(cost.host), device: all.device.max(cost.device) };
        let fits = |cost, freed: Cost| match is_load {
            true => admission.fits_resource(cost, freed),
            // Read again for each choice: another thread may have started unloads.
            false => admission.fits(cost, self.coming().0.and(freed)),
        };
        for _ in 0..CHOICES_MAX {
            // Dropped after the lock: the last handle of a resource runs its unload.
            let mut handles = Vec::new();
            // Before the lock: it calls functions of the application.
            let mut idle = if asks { self.pool.reclaimers() } else { Vec::new() };
            let choosing = lock(&self.choosing);
            idle.extend(self.pool.idle());
            handles.extend(idle.iter().map(|idle| Arc::clone(&idle.resource)));
            idle.retain(|idle| std::ptr::eq(idle.admission, admission));
            let fits_later = fits_later(admission, cost);
            for idle in &mut idle {
                let keeps = match patience {
                    Patience::Waits if fits_later => idle.used_for,
                    Patience::Waits => idle.loaded_for,
                    Patience::HasWaited if fits_later => idle.loaded_for,
                    Patience::HasWaited | Patience::None => Duration::ZERO,
                };
                idle.stays_for = idle.stays_for.max(keeps);
            }
            let mut chosen = choose(idle, |freed| fits(cost, freed))?;
            let waits = fits_later && patience == Patience::Waits;
            if waits && fits(cost, chosen.iter().fold(Cost::ZERO, add_part)) {
                chosen.retain(|idle| idle.is_divisible);
                if chosen.is_empty() && !fits(cost, Cost::ZERO) {
                    return Err(None);
                }
            }
            if asks {
                divide(&mut chosen, |freed| fits(all, freed));
                chosen.retain(|idle| !is_load || idle.is_divisible);
            }
            let takes = chosen.iter().map(|idle| idle.unload_time).max().unwrap_or_default();
            let count = chosen.len();
            let claimed = |idle: Idle| idle.resource.claim(idle.cost.host);
            let claims: Vec<_> = chosen.into_iter().map_while(claimed).collect();
            let freed = claims.iter().fold(Cost::ZERO, |sum, (cost, _)| sum.and(*cost));
            let is_device = !cost.device.is_zero() && fits(Cost::host(cost.host), Cost::ZERO);
            let budget = if is_device { Budget::Device } else { Budget::Host };
            let cause = (!claims.is_empty()).then(|| need.cause(budget));
            let is_whole = claims.len() == count;
            let owed = if !is_whole {
                None
            } else if is_load && !asks {
                let reserved = admission.reserve(cost, freed);
                reserved.map(|reserved| Owed::Load { cost, reserved })
            } else {
                Some(Owed::Announced(self.announce(freed, takes)))
            };
            let has_room = owed.is_some();
            let freed = Vec::with_capacity(count);
            let state = UnloadsState { claims, unloading: count, freed, owed, made: None };
            let (evictor, state, bell) = (Arc::clone(self), Mutex::new(state), Bell::new());
            let step = Arc::new(UnloadStep { admission, evictor, cause, state, bell });
            if has_room {
                return Ok(step);
            }
            // One of them came into use, or another request took the room. The others are put back,
            // which wakes their waiters.
            drop(choosing);
            drop(step);
        }
        Err(None)
    }

    /// Returns the bytes that become free soon, because they are being unloaded for requests, and
    /// the expected time.
    fn coming(&self) -> (Cost, Duration) {
        let now = self.clock.now();
        let coming = lock(&self.coming);
        let counted = coming.iter().filter_map(Weak::upgrade).filter(|coming| now < coming.until);
        counted.fold((Cost::ZERO, Duration::ZERO), |(cost, takes), coming| {
            (cost.and(coming.cost), takes.max(coming.ready - now))
        })
    }

    /// Counts claimed bytes as coming.
    fn announce(&self, cost: Cost, takes: Duration) -> Arc<PendingFree> {
        let now = self.clock.now();
        let coming = Arc::new(PendingFree { cost, ready: now + takes, until: now + UNLOAD_MAX });
        let mut all = lock(&self.coming);
        all.retain(|other| other.strong_count() > 0);
        all.push(Arc::downgrade(&coming));
        coming
    }
}

/// Returns `true` if a request fits once all others have ended.
fn fits_later(admission: &AdmissionState, cost: Cost) -> bool {
    Budget::ALL.into_iter().all(|budget| {
        let (ledger, asked) = (admission.ledger(budget), cost.of(budget));
        let (reserved, allowance) = (ledger.reserved(), ledger.allowance());
        asked.is_zero() || ledger.drains(&InsufficientBudget { asked, reserved, allowance })
    })
}

/// Adds what a reclaimer releases, or [`LACK_PART`] of what a resource does.
fn add_part(sum: Cost, idle: &Idle) -> Cost {
    let part = if idle.is_divisible { 1.0 } else { LACK_PART };
    sum.and_host(idle.cost.host.scaled(part)).and_device(idle.cost.device.scaled(part))
}

/// Chooses the fewest resources that make room, those that cost least to load again first.
///
/// # Errors
/// The time after which the minimum residency of enough resources ends, if any suffice.
fn choose(mut idle: Vec<Idle>, fits: impl Fn(Cost) -> bool) -> Result<Vec<Idle>, Option<Duration>> {
    let cost_of = |sum: Cost, idle: &Idle| sum.and(idle.cost);
    if fits(Cost::ZERO) {
        return Ok(Vec::new());
    }
    idle.sort_by(|one, other| {
        let by_time = one.stays_for.cmp(&other.stays_for);
        by_time.then(other.score.total_cmp(&one.score))
    });
    let mut freed = Cost::ZERO;
    let enough = idle.iter().position(|idle| {
        freed = cost_of(freed, idle);
        fits(freed)
    });
    let Some(last) = enough else { return Err(None) };
    idle.truncate(last + 1);
    let stays = idle.last().map_or(Duration::ZERO, |idle| idle.stays_for);
    if !stays.is_zero() {
        return Err(Some(stays));
    }
    if idle.last().is_some_and(|last| last.is_divisible) {
        return Ok(idle); // it releases only what the others leave
    }
    // The last one may have made earlier ones superfluous.
    for at in (0..idle.len()).rev() {
        let others = idle.iter().enumerate().filter(|(other, _)| *other != at);
        if fits(others.fold(Cost::ZERO, |sum, (_, idle)| cost_of(sum, idle))) {
            idle.remove(at);
        }
    }
    Ok(idle)
}

/// Reduces the part of the last reclaimer to what is needed beyond the others.
fn divide(chosen: &mut [Idle], fits: impl Fn(Cost) -> bool) {
    let Some(at) = chosen.iter().rposition(|idle| idle.is_divisible) else { return };
    let others = chosen.iter().enumerate().filter(|(other, _)| *other != at);
    let others = others.fold(Cost::ZERO, |sum, (_, idle)| sum.and(idle.cost));
    let Some(last) = chosen.get_mut(at) else { return };
    // `fits` does not hold at `few`, as far as known, and `enough` is all it has, or fits.
    let (mut few, mut enough) = (0, last.cost.host.get());
    // Ends: the distance halves, at most 64 times.
    while enough - few > 1 {
        let half = few + (enough - few) / 2;
        if fits(others.and_host(ByteSize::new(half))) {
            enough = half;
        } else {
            few = half;
        }
    }
    last.cost.host = ByteSize::new(enough.saturating_add(ROUNDING)).min(last.cost.host);
}

/// How room is made for a load. Dropping it before the run puts claimed resources back.
pub(super) enum Eviction {
    /// There is room: nothing is evicted.
    Booked(Permit),
    /// Claimed resources are unloaded.
    Unloads(Arc<UnloadStep>),
    /// Reclaimers are asked first.
    Asks(Arc<Evictor>, NeededRoom),
}

/// The reason why a load has no room although resources were claimed for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum EvictionError {
    /// No thread could be started to unload them; they are back in use.
    NoThread(io::ErrorKind),
    /// The unloads have not ended within [`UNLOAD_MAX`]. Their bytes stay reserved until they do.
    Stuck,
    /// The reclaimers did not release enough, and no resources make room.
    NoRoom,
}

impl Eviction {
    /// Makes room and returns the permit of the load. Blocks this thread until the reclaimers and
    /// unloads end: for some seconds, and at most for [`UNLOAD_MAX`] more.
    pub(super) fn run(self) -> Result<Permit, EvictionError> {
        match self {
            Self::Booked(permit) => Ok(permit),
            Self::Unloads(step) => {
                let deadline = step.evictor.clock.now() + UNLOAD_MAX;
                step.start().map_err(|error| EvictionError::NoThread(error.kind()))?;
                step.wait(deadline);
                lock(&step.state).made.take().ok_or(EvictionError::Stuck)
            }
            Self::Asks(evictor, need) => evictor.room_for_load(need),
        }
    }
}

/// Resources that are claimed to make room, and unloaded from its start on. Dropping it puts those
/// back that no thread has taken.
pub(super) struct UnloadStep {
    admission: &'static AdmissionState,
    evictor: Arc<Evictor>,
    /// `None` only without resources.
    cause: Option<Arc<str>>,
    state: Mutex<UnloadsState>,
    bell: Arc<Bell>,
}

struct UnloadsState {
    /// Not started yet.
    claims: Vec<EvictionClaim>,
    /// The number that has not ended.
    unloading: usize,
    /// The permits of those that have ended.
    freed: Vec<Permit>,
    /// `None` once the unloads have ended.
    owed: Option<Owed>,
    /// The permit of the load, once it has room.
    made: Option<Permit>,
}

/// What the end of the unloads releases or hands over.
enum Owed {
    /// The bytes of a request that retries and finds the room free.
    Announced(Arc<PendingFree>),
    /// The additional reservation of a load.
    Load { cost: Cost, reserved: [Reservation; 2] },
}

impl UnloadStep {
    /// Unloads the claimed resources on separate threads. Without a thread they are put back.
    fn start(self: &Arc<Self>) -> io::Result<()> {
        let count = lock(&self.state).claims.len();
        if count == 0 {
            self.finish();
        }
        for nth in 0..count.min(THREADS_MAX) {
            let of_thread = Arc::clone(self);
            let thread = thread::Builder::new().name("lowtide-unload".to_owned());
            match thread.spawn(move || of_thread.work()) {
                Ok(_) => {}
                // The running threads unload the rest.
                Err(_) if nth > 0 => break,
                Err(error) => {
                    let claims = std::mem::take(&mut lock(&self.state).claims);
                    drop(claims);
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    /// Waits until the unloads have ended, at most until the deadline.
    fn wait(&self, deadline: Moment) {
        let clock = &*self.evictor.clock;
        // Ends at the deadline at the latest: each iteration waits until then, or for the end.
        while lock(&self.state).owed.is_some() && clock.now() < deadline {
            clock.wait_until(&self.bell, deadline);
        }
    }

    /// Unloads the resources that no other thread has taken.
    fn work(&self) {
        let Some(cause) = &self.cause else { return };
        // Ends: each iteration takes one of the claims.
        loop {
            let Some((_, unload)) = lock(&self.state).claims.pop() else { return };
            let permit = unload(cause);
            let mut state = lock(&self.state);
            state.freed.extend(permit);
            state.unloading -= 1;
            let ended = state.unloading == 0;
            drop(state);
            if ended {
                self.finish();
            }
        }
    }

    /// Hands the room over.
    fn finish(&self) {
        let _ = caught(|| (self.evictor.after)());
        let mut state = lock(&self.state);
        let freed = std::mem::take(&mut state.freed);
        match state.owed.take() {
            Some(Owed::Load { cost, reserved }) => {
                state.made = Some(self.admission.exchange(freed, reserved, cost));
            }
            // A request's room is free before it is no longer counted as coming.
            Some(Owed::Announced(_coming)) => drop(freed),
            None => {}
        }
        drop(state);
        self.bell.ring();
    }
}

impl Drop for UnloadStep {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        state.claims.clear();
        if let Some(Owed::Load { reserved, .. }) = state.owed.take() {
            self.admission.unreserve(reserved);
        }
    }
}

#[cfg(all(test, not(lowtide_loom)))]
mod tests {
    use std::future::Future as _;
    use std::pin::pin;
    use std::sync::atomic::AtomicBool;
    use std::task::{Context, Wake, Waker};

    use lowtide_core::clock::{ManualClock, SystemClock};

    use super::*;
    use crate::admission::Admission;
    use crate::managed::{Managed, Resources};

    #[derive(Default)]
    struct Woken(AtomicBool);

    impl Wake for Woken {
        fn wake(self: Arc<Self>) {
            self.0.store(true, Ordering::SeqCst);
        }
    }

    #[test]
    fn an_eviction_that_does_not_run_puts_all_back_and_wakes_those_who_wait() {
        let limit = ByteSize::mib(100).saturating_add(ByteSize::kib(1));
        let (admission, resources) = (Admission::with_limit(limit), Resources::new());
        let clock = Arc::new(ManualClock::new());
        resources.evict_for(&admission, clock.clone(), || {});
        let cost = |mib| Cost::host(ByteSize::mib(mib));
        let managed = Managed::builder("first", || Ok(1_u8)).cost(cost(60));
        let managed = managed.build(clock, Some(admission.clone()));
        resources.add(&managed).expect("the only one");
        drop(managed.acquire_blocking().expect("fits"));
        let reserved = || admission.ledger(Budget::Host).reserved_bytes();
        let before = reserved();
        let eviction = admission.state().reserve_or_evict(cost(90), false, &Arc::from("second"));
        assert!(matches!(eviction, Ok(Eviction::Unloads(_))) && reserved() > before);
        let (mut waits, woken) = (pin!(managed.acquire()), Arc::new(Woken::default()));
        let waker = Waker::from(Arc::clone(&woken));
        let mut cx = Context::from_waker(&waker);
        assert!(waits.as_mut().poll(&mut cx).is_pending() && !managed.stats().loaded);
        drop(eviction);
        assert_eq!((reserved(), managed.stats().loaded), (before, true));
        assert!(woken.0.load(Ordering::SeqCst), "it is woken");
        assert!(waits.as_mut().poll(&mut cx).is_ready());
    }

    /// The bug: a load asked for one tick, after which those of a quiet service come once a second,
    /// and waited for half of that.
    #[test]
    fn a_load_asks_for_ticks_until_it_has_room() {
        const PATIENCE: Duration = Duration::from_secs(20);
        let (admission, resources) = (Admission::with_limit(ByteSize::mib(1)), Resources::new());
        let (clock, real) = (Arc::new(ManualClock::new()), SystemClock::new());
        resources.evict_for(&admission, clock.clone(), || {});
        let state = admission.state();
        let evictor = state.evictor.read().expect("no panic").clone().expect("it is set");
        let asked = thread::scope(|scope| {
            let load = scope.spawn(|| evictor.observe(state, Cost::host(ByteSize::mib(2))));
            let mut asked = 0;
            while asked < 5 && real.now() < Moment::ORIGIN + PATIENCE {
                if !state.is_slow.swap(true, Ordering::Relaxed) {
                    asked += 1;
                    // Only then, as it waits from the time that it finds.
                    assert!(clock.wait_for_waiters(1, PATIENCE));
                    clock.advance(if asked < 5 { OBSERVED_STEP } else { OBSERVED_MAX });
                }
                thread::yield_now();
            }
            clock.advance(OBSERVED_MAX);
            assert!(load.join().expect("no panic").is_none(), "it never fits");
            asked
        });
        assert_eq!(asked, 5);
    }
}
