//! Makes room by unloading idle resources in one step: enough for the requester, or none.
//!
//! Called if a load or a request does not fit. An [`Evictor`] chooses idle resources, claims them,
//! and reserves what the load needs beyond their bytes. Separate threads unload them. Their
//! reservations stay until the last one is unloaded and then pass to the load in one exchange, so
//! that no other request takes that room. A request is not kept waiting: it is rejected, with the
//! time that the unloads take, and finds the room when it retries.
//!
//! It relies on resources that can be claimed ([`Claimable`]): not in use, not waited for, and past
//! their minimum residency. It knows neither their types nor their registry.
//!
//! Invariants: the claimed resources make enough room together with the free room, otherwise
//! nothing is claimed; a claimed resource is unloaded or put back; bytes of an unload that has not
//! ended are reserved. No lock is held while a resource is unloaded or put back.
//!
//! It deliberately does not wait for resources in use, and does not measure what an unload freed.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use lowtide_core::clock::{Bell, Clock, Moment};
use lowtide_core::sync::{Mutex, caught, lock};

use super::admission::Cost;
use super::desk::Desk;
use super::ledger::Reservation;
use super::permit::Permit;

/// The time that a load waits for the unloads that make room for it. A guess: an unload that takes
/// longer is stuck.
const UNLOAD_MAX: Duration = Duration::from_secs(30);
/// The threads that unload for one eviction. A stuck unload delays at most the unloads that its
/// thread would have run next.
const THREADS_MAX: usize = 16;
/// The number of attempts to choose again because a chosen resource came into use.
const CHOICES_MAX: usize = 8;

/// A resource that can be taken out of use.
pub(super) trait Claimable: Send + Sync {
    /// Takes it out of use if it may be evicted now. Callers that acquire it then wait.
    fn claim(self: Arc<Self>) -> Option<Box<dyn Claimed>>;
}

/// A resource that is out of use. Dropping it puts the resource back.
pub(super) trait Claimed: Send {
    /// Returns its reservation.
    fn cost(&self) -> Cost;

    /// Unloads it on this thread and returns its reservation.
    fn unload(self: Box<Self>) -> Option<Permit>;
}

/// A resource that may be evicted, now or after its minimum residency.
pub struct Idle {
    /// The admission state that holds its reservation.
    pub(super) desk: &'static Desk,
    /// Its reservation.
    pub(super) cost: Cost,
    /// The remaining minimum residency.
    pub(super) stays_for: Duration,
    /// The duration of its last unload.
    pub(super) unload_time: Duration,
    /// The larger, the sooner it is unloaded.
    pub(super) score: f64,
    pub(super) resource: Arc<dyn Claimable>,
}

impl fmt::Debug for Idle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Idle").field("cost", &self.cost).finish_non_exhaustive()
    }
}

/// A source of idle resources.
pub(super) trait Pool: Send + Sync {
    /// Returns the resources that may be evicted, now or after their minimum residency.
    fn idle(&self) -> Vec<Idle>;
}

/// When a request that does not fit should retry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Hint {
    /// Resources are being unloaded for it, which takes this long.
    Unloading(Duration),
    /// Idle resources make room for it after their minimum residency, which ends in this time.
    Resident(Duration),
    /// No idle resource makes room for it.
    Unknown,
}

/// Makes room by unloading idle resources.
pub(super) struct Evictor {
    pool: Box<dyn Pool>,
    clock: Arc<dyn Clock>,
    /// Called after the unloads, before the room is used: releases the memory that they left in the
    /// heap.
    after: Box<dyn Fn() + Send + Sync>,
    /// Serialises the choices.
    choosing: Mutex<()>,
    coming: Mutex<Vec<Arc<Coming>>>,
}

/// Bytes that are being unloaded for a rejected request.
struct Coming {
    cost: Cost,
    /// The time when they are expected to be free.
    ready: Moment,
    /// They are not counted after this time.
    until: Moment,
}

impl Evictor {
    pub(super) fn new(
        pool: Box<dyn Pool>,
        clock: Arc<dyn Clock>,
        after: Box<dyn Fn() + Send + Sync>,
    ) -> Self {
        Self { pool, clock, after, choosing: Mutex::new(()), coming: Mutex::default() }
    }

    /// Makes room for a rejected request, unless other unloads already make enough.
    pub(super) fn for_request(self: &Arc<Self>, desk: &'static Desk, cost: Cost) -> Hint {
        let (coming, takes) = self.coming();
        if desk.fits(cost, coming) {
            return Hint::Unloading(takes);
        }
        // Read again for each choice: another thread may have started unloads.
        let fits = |freed: Cost| desk.fits(cost, self.coming().0.and(freed));
        match self.claim(desk, fits, |claims| Some(self.announce(claims))) {
            // Room became free. Nothing runs on this thread, which may belong to an async runtime.
            Ok((claims, _)) if claims.list.is_empty() => Hint::Unloading(self.coming().1),
            Ok((claims, coming)) => {
                let takes = claims.takes;
                let owed = Owed { desk, evictor: Arc::clone(self), of: Made::Announced(coming) };
                match (Eviction { claims, owed }).start() {
                    Ok(_) => Hint::Unloading(takes),
                    Err(_) => Hint::Unknown,
                }
            }
            Err(Some(stays)) => Hint::Resident(stays),
            Err(None) => Hint::Unknown,
        }
    }

    /// Claims resources that make room for a load, and reserves what the load needs in addition.
    ///
    /// # Errors
    /// The time after which the minimum residency of enough resources ends, if any suffice.
    pub(super) fn for_load(
        self: &Arc<Self>,
        desk: &'static Desk,
        cost: Cost,
    ) -> Result<Eviction, Option<Duration>> {
        let book = |claims: &Claims| desk.reserve(cost, claims.cost());
        let fits = |freed| desk.fits_standing(cost, freed);
        let (claims, reserved) = self.claim(desk, fits, book)?;
        let of = Made::Reserved { cost, reserved: Some(reserved) };
        Ok(Eviction { claims, owed: Owed { desk, evictor: Arc::clone(self), of } })
    }

    /// Chooses and claims, and reserves while no other thread chooses.
    fn claim<B>(
        &self,
        desk: &'static Desk,
        fits: impl Fn(Cost) -> bool,
        book: impl Fn(&Claims) -> Option<B>,
    ) -> Result<(Claims, B), Option<Duration>> {
        for _ in 0..CHOICES_MAX {
            // Dropped after the lock: the last handle of a resource runs its unload.
            let mut handles = Vec::new();
            let choosing = lock(&self.choosing);
            let mut idle = self.pool.idle();
            handles.extend(idle.iter().map(|idle| Arc::clone(&idle.resource)));
            idle.retain(|idle| std::ptr::eq(idle.desk, desk));
            let chosen = choose(idle, &fits)?;
            let takes = chosen.iter().map(|idle| idle.unload_time).max().unwrap_or_default();
            let count = chosen.len();
            let list: Vec<_> = chosen.into_iter().map_while(|idle| idle.resource.claim()).collect();
            let claims = Claims { list, takes };
            if claims.list.len() == count
                && let Some(reserved) = book(&claims)
            {
                return Ok((claims, reserved));
            }
            // One of them came into use, or another request took the room. The others are put back,
            // which wakes their waiters.
            drop(choosing);
            drop(claims);
        }
        Err(None)
    }

    /// Returns the bytes that become free soon, because they are being unloaded for requests, and
    /// the expected time.
    fn coming(&self) -> (Cost, Duration) {
        let now = self.clock.now();
        let coming = lock(&self.coming);
        let counted = coming.iter().filter(|coming| now < coming.until);
        counted.fold((Cost::ZERO, Duration::ZERO), |(cost, takes), coming| {
            (cost.and(coming.cost), takes.max(coming.ready - now))
        })
    }

    /// Counts the claimed bytes as coming, unless the claim is empty.
    fn announce(&self, claims: &Claims) -> Arc<Coming> {
        let now = self.clock.now();
        let (ready, until) = (now + claims.takes, now + UNLOAD_MAX);
        let coming = Arc::new(Coming { cost: claims.cost(), ready, until });
        if !claims.list.is_empty() {
            lock(&self.coming).push(Arc::clone(&coming));
        }
        coming
    }
}

impl fmt::Debug for Evictor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Evictor").finish_non_exhaustive()
    }
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
    // The last one may have made earlier ones superfluous.
    for at in (0..idle.len()).rev() {
        let others = idle.iter().enumerate().filter(|(other, _)| *other != at);
        if fits(others.fold(Cost::ZERO, |sum, (_, idle)| cost_of(sum, idle))) {
            idle.remove(at);
        }
    }
    Ok(idle)
}

/// Resources that are out of use.
struct Claims {
    list: Vec<Box<dyn Claimed>>,
    /// The expected duration of their unloads.
    takes: Duration,
}

impl Claims {
    fn cost(&self) -> Cost {
        self.list.iter().fold(Cost::ZERO, |sum, claimed| sum.and(claimed.cost()))
    }
}

/// The purpose of an eviction.
enum Made {
    /// A request that retries and finds the room free.
    Announced(Arc<Coming>),
    /// A load and its additional reservation; `None` once that is part of its permit.
    Reserved { cost: Cost, reserved: Option<[Reservation; 2]> },
}

/// Releases a reservation, or hands it over, when the unloads have ended.
struct Owed {
    desk: &'static Desk,
    evictor: Arc<Evictor>,
    of: Made,
}

impl Owed {
    /// Returns the permit of the load, now that these bytes are free; `None` for a request.
    fn hand_over(&mut self, freed: Vec<Permit>) -> Option<Permit> {
        let Made::Reserved { cost, reserved } = &mut self.of else { return None };
        Some(self.desk.exchange(freed, reserved.take()?, *cost))
    }
}

impl Drop for Owed {
    fn drop(&mut self) {
        match &mut self.of {
            Made::Announced(coming) => {
                lock(&self.evictor.coming).retain(|other| !Arc::ptr_eq(other, coming));
            }
            Made::Reserved { reserved, .. } => {
                if let Some(reserved) = reserved.take() {
                    self.desk.unreserve(reserved);
                }
            }
        }
    }
}

/// Resources claimed to make room. Dropping it before the start puts them back.
pub(super) struct Eviction {
    claims: Claims,
    owed: Owed,
}

/// The reason why a load has no room although resources were claimed for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum EvictionError {
    /// No thread could be started to unload them; they are back in use.
    NoThread(io::ErrorKind),
    /// The unloads have not ended within [`UNLOAD_MAX`]. Their bytes stay reserved until they do.
    Stuck,
}

impl Eviction {
    /// Unloads the claimed resources and returns the permit of the load. Blocks this thread until
    /// the unloads end, at most for [`UNLOAD_MAX`].
    pub(super) fn run(self) -> Result<Permit, EvictionError> {
        let clock = Arc::clone(&self.owed.evictor.clock);
        let deadline = clock.now() + UNLOAD_MAX;
        let unloads = self.start().map_err(|error| EvictionError::NoThread(error.kind()))?;
        // Ends at the deadline at the latest: each iteration waits until then, or for the end.
        loop {
            if let Some(permit) = lock(&unloads.state).made.take() {
                return Ok(permit);
            }
            if clock.now() >= deadline {
                return Err(EvictionError::Stuck);
            }
            clock.wait_until(&unloads.bell, deadline);
        }
    }

    /// Unloads the claimed resources on separate threads.
    fn start(self) -> io::Result<Arc<UnloadsInProgress>> {
        let Self { claims: Claims { list, .. }, owed } = self;
        let (count, after) = (list.len(), Arc::clone(&owed.evictor));
        let freed = Vec::with_capacity(count);
        let state =
            UnloadsState { claims: list, unloading: count, freed, owed: Some(owed), made: None };
        let unloads =
            Arc::new(UnloadsInProgress { after, state: Mutex::new(state), bell: Bell::new() });
        if count == 0 {
            unloads.finish();
        }
        for nth in 0..count.min(THREADS_MAX) {
            let of_thread = Arc::clone(&unloads);
            let thread = thread::Builder::new().name("lowtide-unload".to_owned());
            match thread.spawn(move || of_thread.work()) {
                Ok(_) => {}
                // The running threads unload the rest.
                Err(_) if nth > 0 => break,
                Err(error) => {
                    let claims = std::mem::take(&mut lock(&unloads.state).claims);
                    drop(claims);
                    return Err(error);
                }
            }
        }
        Ok(unloads)
    }
}

/// Unloads in progress.
struct UnloadsInProgress {
    after: Arc<Evictor>,
    state: Mutex<UnloadsState>,
    bell: Arc<Bell>,
}

struct UnloadsState {
    /// Not started yet.
    claims: Vec<Box<dyn Claimed>>,
    /// The number that has not ended.
    unloading: usize,
    /// The permits of those that have ended.
    freed: Vec<Permit>,
    owed: Option<Owed>,
    /// The permit of the load, once it has room.
    made: Option<Permit>,
}

impl UnloadsInProgress {
    /// Unloads the resources that no other thread has taken.
    fn work(&self) {
        // Ends: each iteration takes one of the claims.
        loop {
            let Some(claimed) = lock(&self.state).claims.pop() else { return };
            let permit = claimed.unload();
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
        let _ = caught(|| (self.after.after)());
        let mut state = lock(&self.state);
        let freed = std::mem::take(&mut state.freed);
        let owed = state.owed.take();
        if let Some(mut owed) = owed {
            // A request's room is free before it is no longer counted as coming.
            state.made = owed.hand_over(freed);
        }
        drop(state);
        self.bell.ring();
    }
}
