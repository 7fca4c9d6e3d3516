//! Room made by unloading idle resources, in one step: enough for what asks, or nothing.
//!
//! Called where a load or a request does not fit. An [`Evictor`] chooses idle resources, claims
//! them, and books what the load needs beyond their bytes. Threads of their own unload them. What
//! they had booked stays booked until the last of them is gone, and becomes the load's in one
//! exchange, so that no other request takes that room. A request is not kept waiting: it is
//! rejected, with the time that the unloads take, and finds the room when it comes again.
//!
//! It relies on resources that can be claimed ([`Claimable`]): none uses them, none waits for them,
//! and their minimum residency is over. It knows neither their types nor their registry.
//!
//! Invariants: what is claimed makes enough room together with what is free, else nothing is
//! claimed; what was claimed is unloaded or put back; bytes of an unload that has not ended are
//! booked. No lock is held while a resource is unloaded or put back.
//!
//! It deliberately does not wait for resources in use, and does not measure what an unload freed.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use crate::clock::{Bell, Clock, Moment};
use crate::sync::{Mutex, caught, lock};

use super::admission::Cost;
use super::desk::Desk;
use super::ledger::Reservation;
use super::permit::Permit;

/// How long a load waits for the unloads that make room for it. A guess: an unload that takes
/// longer is stuck.
const UNLOAD_MAX: Duration = Duration::from_secs(30);
/// Threads that unload for one eviction. A stuck unload holds up at most what its thread would
/// have unloaded next.
const THREADS_MAX: usize = 16;
/// How often a choice is made again because one of the chosen came into use meanwhile.
const CHOICES_MAX: usize = 8;

/// A resource that can be taken out of use.
pub(super) trait Claimable: Send + Sync {
    /// Takes it out of use if it may be evicted now. Those who ask for it then wait.
    fn claim(self: Arc<Self>) -> Option<Box<dyn Claimed>>;
}

/// A resource that is out of use. Dropping it puts the resource back.
pub(super) trait Claimed: Send {
    /// What it has booked.
    fn cost(&self) -> Cost;

    /// Unloads it on this thread and returns what it had booked.
    fn unload(self: Box<Self>) -> Option<Permit>;
}

/// A resource that may be evicted, now or after its minimum residency.
pub struct Idle {
    /// The desk on which it is booked.
    pub(super) desk: &'static Desk,
    /// What it has booked.
    pub(super) cost: Cost,
    /// How long it stays at least.
    pub(super) stays_for: Duration,
    /// How long its last unload took.
    pub(super) unload_time: Duration,
    /// The larger, the sooner it goes.
    pub(super) score: f64,
    pub(super) resource: Arc<dyn Claimable>,
}

impl fmt::Debug for Idle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Idle").field("cost", &self.cost).finish_non_exhaustive()
    }
}

/// Where idle resources come from.
pub(super) trait Pool: Send + Sync {
    /// Those that may be evicted, now or after their minimum residency.
    fn idle(&self) -> Vec<Idle>;
}

/// When a request that does not fit should come again.
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
    /// Called after the unloads, before the room is used: releases what they left behind.
    after: Box<dyn Fn() + Send + Sync>,
    /// One choice at a time.
    choosing: Mutex<()>,
    coming: Mutex<Vec<Arc<Coming>>>,
}

/// Bytes that are being unloaded for a request that was rejected.
struct Coming {
    cost: Cost,
    /// When they are expected to be free.
    ready: Moment,
    /// Counted on no longer than this.
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

    /// Makes room for a request that was rejected, unless other unloads make enough already.
    pub(super) fn for_request(self: &Arc<Self>, desk: &'static Desk, cost: Cost) -> Hint {
        let (coming, takes) = self.coming();
        if desk.fits(cost, coming) {
            return Hint::Unloading(takes);
        }
        // Read again for each choice: another thread may have begun unloads meanwhile.
        let fits = |freed: Cost| desk.fits(cost, self.coming().0.and(freed));
        match self.claim(desk, fits, |claims| Some(self.announce(claims))) {
            // Room came meanwhile. Nothing runs on this thread, which may be an async runtime's.
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

    /// Claims what makes room for a load, and books what the load needs besides.
    ///
    /// # Errors
    /// When enough resources would have stayed for their minimum residency, if they ever will.
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

    /// Chooses and claims, and books while no other thread chooses.
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
            // One of them came into use, or another request took the room: the others are put back,
            // which wakes those who wait.
            drop(choosing);
            drop(claims);
        }
        Err(None)
    }

    /// Bytes that become free soon, because they are being unloaded for requests, and how long
    /// that is expected to take.
    fn coming(&self) -> (Cost, Duration) {
        let now = self.clock.now();
        let coming = lock(&self.coming);
        let counted = coming.iter().filter(|coming| now < coming.until);
        counted.fold((Cost::ZERO, Duration::ZERO), |(cost, takes), coming| {
            (cost.and(coming.cost), takes.max(coming.ready - now))
        })
    }

    /// Counts what is claimed as coming; an empty claim is none.
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

/// The fewest of these resources that make room, those that cost least to load again first.
///
/// # Errors
/// When enough of them would have stayed for their minimum residency, if they ever will.
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
    // The last may have made those before it superfluous.
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
    /// How long their unloads are expected to take.
    takes: Duration,
}

impl Claims {
    fn cost(&self) -> Cost {
        self.list.iter().fold(Cost::ZERO, |sum, claimed| sum.and(claimed.cost()))
    }
}

/// What an eviction makes room for.
enum Made {
    /// A request that comes again and finds the room free.
    Announced(Arc<Coming>),
    /// A load, and what it has booked besides; `None` once that is part of its permit.
    Reserved { cost: Cost, reserved: Option<[Reservation; 2]> },
}

/// What is to be released, or handed over, when the unloads have ended.
struct Owed {
    desk: &'static Desk,
    evictor: Arc<Evictor>,
    of: Made,
}

impl Owed {
    /// What is booked for the load, now that these bytes are free; `None` for a request.
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

/// Resources that are claimed to make room. Dropping it unstarted puts them back.
pub(super) struct Eviction {
    claims: Claims,
    owed: Owed,
}

/// A load that has no room although resources were claimed for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum EvictionError {
    /// No thread could be started to unload them: they are back in use.
    NoThread(io::ErrorKind),
    /// The unloads have not ended within [`UNLOAD_MAX`]. Their bytes stay booked until they do.
    Stuck,
}

impl Eviction {
    /// Unloads what was claimed and returns what is booked for the load. Waits for the unloads on
    /// this thread, at most for [`UNLOAD_MAX`].
    pub(super) fn run(self) -> Result<Permit, EvictionError> {
        let clock = Arc::clone(&self.owed.evictor.clock);
        let deadline = clock.now() + UNLOAD_MAX;
        let unloads = self.start().map_err(|error| EvictionError::NoThread(error.kind()))?;
        // Ends at the deadline at the latest: each turn waits until then, or for the end.
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

    /// Unloads what was claimed, on threads of its own.
    fn start(self) -> io::Result<Arc<Unloads>> {
        let Self { claims: Claims { list, .. }, owed } = self;
        let (count, after) = (list.len(), Arc::clone(&owed.evictor));
        let freed = Vec::with_capacity(count);
        let state =
            UnloadsState { claims: list, unloading: count, freed, owed: Some(owed), made: None };
        let unloads = Arc::new(Unloads { after, state: Mutex::new(state), bell: Bell::new() });
        if count == 0 {
            unloads.finish();
        }
        for nth in 0..count.min(THREADS_MAX) {
            let of_thread = Arc::clone(&unloads);
            let thread = thread::Builder::new().name("lowtide-unload".to_owned());
            match thread.spawn(move || of_thread.work()) {
                Ok(_) => {}
                // The threads that run unload the rest.
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

/// Unloads under way.
struct Unloads {
    after: Arc<Evictor>,
    state: Mutex<UnloadsState>,
    bell: Arc<Bell>,
}

struct UnloadsState {
    /// Not begun yet.
    claims: Vec<Box<dyn Claimed>>,
    /// How many have not ended.
    unloading: usize,
    /// What those that have ended had booked.
    freed: Vec<Permit>,
    owed: Option<Owed>,
    /// What is booked for the load, once it has room.
    made: Option<Permit>,
}

impl Unloads {
    /// Unloads what no other thread has begun to.
    fn work(&self) {
        // Ends: each turn takes one of the claims.
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
