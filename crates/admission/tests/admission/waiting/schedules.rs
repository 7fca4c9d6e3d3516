//! Random schedules of requests that wait for room, without threads and in virtual time.
//!
//! Each request reserves all that it needs when it is admitted. In half of the schedules all bodies
//! arrive at once; in the others they arrive in pieces, and the reservations of slow ones are
//! suspended. A seed draws arrivals, pieces, ends, clients that leave, late polls and ticks. It
//! checks five claims: never more is reserved than the ceiling; no request holds more than it has
//! reserved; nothing waits while nothing runs; each request is answered by its deadline; and none
//! is overtaken by more than a ceiling of bytes.
//!
//! It relies on the queue of `lowtide-admission` and on nothing else: no control loop measures.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use lowtide_admission::clock::Moment;
use lowtide_admission::layer::{LargeRequest, RequestFigures, SLOW_AFTER, Waiting};
use lowtide_admission::{Admission, Budget, ByteSize, Cost, Permit, Priority, Rejected};
use lowtide_core::sync::lock;

#[path = "../sim/chance.rs"]
#[allow(dead_code, clippy::duplicate_mod, reason = "other simulations have it too")]
mod chance;
use self::chance::Chance;

/// The longest wait.
const WITHIN: Duration = Duration::from_millis(500);
const TICK: Duration = Duration::from_millis(10);
const STEPS: usize = 160;
/// What a suspended request reserves beyond what it holds.
const WINDOW: ByteSize = ByteSize::kib(64);

/// What happened in schedules.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Seen {
    pub(crate) waited: u64,
    pub(crate) rejected: u64,
    pub(crate) passed: u64,
    pub(crate) suspended: u64,
    pub(crate) resumed: u64,
}

/// Evenly below a number.
fn below(chance: &mut Chance, most: usize) -> usize {
    usize::try_from(chance.next() % (most.max(1) as u64)).unwrap_or_default()
}

#[derive(Default)]
struct Woken(AtomicBool);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// A place in the queue, and when it was entered.
struct Place(Waiting, Arc<Woken>, Moment);

impl Place {
    fn new(waiting: Waiting, now: Moment) -> Self {
        Self(waiting, Arc::new(Woken(AtomicBool::new(true))), now)
    }

    /// Forgets that it was woken.
    fn rest(&self) {
        self.1.0.store(false, Ordering::Relaxed);
    }

    fn is_woken(&self) -> bool {
        self.1.0.load(Ordering::Relaxed)
    }

    /// Returns whether it is its turn, or whether it is answered otherwise; `None` if it waits.
    fn poll(&self) -> Option<bool> {
        let waker = Waker::from(Arc::clone(&self.1));
        match self.0.poll_turn(&Context::from_waker(&waker)) {
            Poll::Ready(is_turn) => Some(is_turn),
            Poll::Pending => None,
        }
    }
}

struct Request {
    cost: Cost,
    priority: Priority,
    /// The order of arrival.
    number: u64,
    place: Place,
    /// The bytes that were admitted of requests that arrived later.
    overtaken: u64,
}

/// An admitted request, which the registry of the admission refers to.
#[derive(Default)]
struct Admitted(Mutex<Option<Upload>>);

/// A request whose body arrives.
struct Upload {
    permit: Permit,
    number: u64,
    claim: ByteSize,
    /// The length of its body, at most its claim, and how much of it has arrived.
    length: u64,
    arrived: u64,
    /// The last time at which its claim was reserved.
    reserved_at: Moment,
    waits: Option<Place>,
}

impl Upload {
    const fn is_whole(&self) -> bool {
        self.arrived == self.length
    }

    /// What it holds: its body, and once that is whole, its claim.
    const fn held(&self) -> ByteSize {
        if self.is_whole() { self.claim } else { ByteSize::new(self.arrived) }
    }
}

impl LargeRequest for Admitted {
    fn figures(&self) -> Option<RequestFigures> {
        let upload = lock(&self.0);
        let upload = upload.as_ref()?;
        let (reserved, admitted_at) = (upload.permit.cost().host, Some(upload.reserved_at));
        Some(RequestFigures { reserved, admitted_at, ..RequestFigures::default() })
    }

    fn suspend(&self, now: Moment) {
        let mut upload = lock(&self.0);
        let Some(upload) = &mut *upload else { return };
        if upload.is_whole()
            || upload.permit.is_suspended()
            || now - upload.reserved_at < SLOW_AFTER
        {
            return;
        }
        upload.permit.suspend(upload.held().saturating_add(WINDOW));
    }
}

struct World {
    admission: Admission,
    ceiling: ByteSize,
    now: Moment,
    chance: Chance,
    waiting: Vec<Request>,
    running: Vec<Arc<Admitted>>,
    /// `true` if bodies arrive in pieces.
    has_pieces: bool,
    arrived: u64,
    seen: Seen,
}

/// Runs the schedule of a seed.
///
/// # Errors
/// The first claim that did not hold.
pub(crate) fn run(seed: u64) -> Result<Seen, &'static str> {
    let mut chance = Chance::new(seed);
    let ceiling = ByteSize::mib(16 << below(&mut chance, 4));
    let admission = Admission::with_limit(ceiling);
    let now = Moment::ORIGIN;
    admission.state().tend_queue(now); // deadlines pass
    let (has_pieces, arrived, seen) = (seed % 2 == 1, 0, Seen::default());
    let (waiting, running) = (Vec::new(), Vec::new());
    let mut world =
        World { admission, ceiling, now, chance, waiting, running, has_pieces, arrived, seen };
    for _ in 0..STEPS {
        match below(&mut world.chance, if has_pieces { 12 } else { 8 }) {
            0..=3 => world.arrive(),
            4 => world.finish(),
            5 => world.leave(),
            6 => drop(world.poll_one()),
            7 => world.tick()?,
            _ => world.receive(),
        }
        world.check()?;
    }
    // Everything ends, and so does all waiting.
    while !(world.waiting.is_empty() && world.running.is_empty()) {
        world.receive();
        world.finish();
        world.tick()?;
        world.check()?;
    }
    world.seen.suspended = world.admission.stats().suspended_total;
    let stats = world.admission.stats();
    if stats.waiting != 0 || !world.reserved().is_zero() {
        return Err("something is left");
    }
    Ok(world.seen)
}

impl World {
    fn reserved(&self) -> ByteSize {
        self.admission.ledger(Budget::Host).reserved_bytes()
    }

    fn arrive(&mut self) {
        let part = self.ceiling.get() >> [10, 8, 5, 2, 1][below(&mut self.chance, 5)];
        let bytes = 1 + self.chance.next() % part.max(1);
        let cost = Cost::host(ByteSize::new(bytes));
        let priority = [Priority::Normal, Priority::Normal, Priority::Low, Priority::High];
        let priority = priority[below(&mut self.chance, 4)];
        let tenant = below(&mut self.chance, 3) as u64;
        self.arrived += 1;
        match self.admission.state().try_admit_uncounted(None, cost, priority, None) {
            Ok(permit) => self.admitted(permit, self.arrived),
            Err(rejected) if rejected.may_wait() => {
                let within = Some(WITHIN);
                let Some(waiting) = self.admission.state().wait(cost, priority, tenant, within)
                else {
                    self.seen.rejected += 1;
                    return;
                };
                let (place, number) = (Place::new(waiting, self.now), self.arrived);
                self.waiting.push(Request { cost, priority, number, place, overtaken: 0 });
                self.poll(self.waiting.len() - 1);
            }
            Err(_) => self.seen.rejected += 1,
        }
    }

    /// Counts an admission as passing the requests that arrived earlier and wait.
    fn admitted(&mut self, permit: Permit, number: u64) {
        let bytes = permit.cost().host.get();
        self.passes(bytes, number);
        let claim = permit.cost().host;
        let length = (bytes / (1 + self.chance.next() % 4)).max(1);
        let arrived = if self.has_pieces { 0 } else { length };
        let (reserved_at, waits) = (self.now, None);
        let upload = Upload { permit, number, claim, length, arrived, reserved_at, waits };
        let admitted = Arc::new(Admitted::default());
        if self.has_pieces {
            upload.permit.state().register(Arc::<Admitted>::clone(&admitted));
        }
        *lock(&admitted.0) = Some(upload);
        self.running.push(admitted);
    }

    /// Counts bytes that the request with this number reserves before those that came earlier.
    fn passes(&mut self, bytes: u64, number: u64) {
        for other in self.waiting.iter_mut().filter(|other| other.number < number) {
            other.overtaken += bytes;
            self.seen.passed += 1;
        }
    }

    /// A piece of a body arrives, if there is room for it, and its client is not waiting.
    fn receive(&mut self) {
        if self.running.is_empty() {
            return;
        }
        let at = below(&mut self.chance, self.running.len());
        let pieces = 1 + below(&mut self.chance, 4) as u64;
        let admitted = Arc::clone(&self.running[at]);
        let mut upload = lock(&admitted.0);
        let Some(it) = upload.as_mut().filter(|it| it.waits.is_none() && !it.is_whole()) else {
            return;
        };
        let arrived = (it.arrived + pieces * it.length.div_ceil(8)).min(it.length);
        let wanted = ByteSize::new(arrived).saturating_add(WINDOW);
        let is_last = arrived == it.length;
        if it.permit.is_suspended() && (is_last || !it.permit.reserve_arriving(wanted)) {
            let waiting = it.permit.wait_to_resume(Priority::Normal, 0, WITHIN);
            it.waits = waiting.map(|waiting| Place::new(waiting, self.now));
            let has_room = it.waits.is_some();
            drop(upload);
            if has_room {
                self.resume(at);
            } else {
                // The queue is full: it is rejected.
                self.end(at);
                self.seen.rejected += 1;
            }
            return;
        }
        it.arrived = arrived;
    }

    /// Polls a suspended request until it waits again, or goes on, or ends. Returns `false` if it
    /// does not wait.
    fn resume(&mut self, at: usize) -> bool {
        let admitted = Arc::clone(&self.running[at]);
        let mut upload = lock(&admitted.0);
        let Some(it) = &mut *upload else { return false };
        loop {
            let Some(place) = &it.waits else { return false };
            place.rest();
            let Some(is_turn) = place.poll() else { return true };
            let before = it.permit.cost().host.get();
            match it.permit.resume(Some(&place.0).filter(|_| is_turn), Priority::Normal) {
                Ok(()) => {
                    (it.waits, it.reserved_at) = (None, self.now);
                    let (number, more) = (it.number, it.permit.cost().host.get() - before);
                    drop(upload);
                    self.passes(more, number);
                    self.seen.resumed += 1;
                    return true;
                }
                Err(_) if is_turn => {}
                Err(_) => {
                    drop(upload);
                    self.end(at);
                    self.seen.rejected += 1;
                    return true;
                }
            }
        }
    }

    fn end(&mut self, at: usize) {
        let ended = lock(&self.running.swap_remove(at).0).take();
        drop(ended);
    }

    /// Polls a waiting request until it waits again, or is answered.
    fn poll(&mut self, at: usize) {
        let Some(request) = self.waiting.get(at) else { return };
        request.place.rest();
        loop {
            let Some(is_turn) = request.place.poll() else { return };
            let (cost, priority) = (request.cost, request.priority);
            let waiting = is_turn.then_some(&request.place.0);
            match self.admission.state().try_admit_uncounted(waiting, cost, priority, None) {
                Ok(permit) => {
                    let request = self.waiting.swap_remove(at);
                    self.seen.waited += 1;
                    return self.admitted(permit, request.number);
                }
                Err(Rejected::Full { .. }) if is_turn => {}
                Err(_) => {
                    self.waiting.swap_remove(at);
                    self.seen.rejected += 1;
                    return;
                }
            }
        }
    }

    /// Polls one of the requests that were woken. Returns `false` if there is none.
    fn poll_one(&mut self) -> bool {
        let is_woken = |admitted: &Arc<Admitted>| {
            let upload = lock(&admitted.0);
            upload.as_ref().is_some_and(|it| it.waits.as_ref().is_some_and(Place::is_woken))
        };
        if let Some(at) = self.running.iter().position(is_woken) {
            return self.resume(at);
        }
        let is_woken = |at: &usize| self.waiting[*at].place.is_woken();
        let all: Vec<_> = (0..self.waiting.len()).filter(is_woken).collect();
        if all.is_empty() {
            return false;
        }
        let at = all[below(&mut self.chance, all.len())];
        self.poll(at);
        true
    }

    /// A request ends whose body is there, or, now and then, any other.
    fn finish(&mut self) {
        let is_whole =
            |admitted: &Arc<Admitted>| lock(&admitted.0).as_ref().is_some_and(Upload::is_whole);
        let any = below(&mut self.chance, 8) == 0;
        let all: Vec<_> =
            (0..self.running.len()).filter(|at| any || is_whole(&self.running[*at])).collect();
        if !all.is_empty() {
            let at = all[below(&mut self.chance, all.len())];
            self.end(at);
        }
    }

    /// A client leaves.
    fn leave(&mut self) {
        if !self.waiting.is_empty() && below(&mut self.chance, 4) == 0 {
            let at = below(&mut self.chance, self.waiting.len());
            drop(self.waiting.swap_remove(at));
        }
    }

    fn tick(&mut self) -> Result<(), &'static str> {
        self.now = self.now + TICK * (1 + u32::try_from(below(&mut self.chance, 4)).unwrap_or(0));
        self.admission.state().tend_queue(self.now);
        // Ends: a request that waits again was not woken since.
        while self.poll_one() {}
        // The time counts from the first tick after the request entered.
        let latest = WITHIN + 8 * TICK;
        let mut entered: Vec<_> = self.waiting.iter().map(|request| request.place.2).collect();
        let mut runs = false;
        for admitted in &self.running {
            match lock(&admitted.0).as_ref().and_then(|upload| upload.waits.as_ref()) {
                Some(place) => entered.push(place.2),
                None => runs = true,
            }
        }
        if entered.iter().any(|since| self.now - *since > latest) {
            return Err("not answered in time");
        }
        if !runs && !entered.is_empty() {
            return Err("nothing runs, and requests wait");
        }
        Ok(())
    }

    fn check(&self) -> Result<(), &'static str> {
        if self.reserved() > self.ceiling {
            return Err("over the ceiling");
        }
        let holds_more = |upload: &Upload| upload.held() > upload.permit.cost().host;
        if self.running.iter().any(|of| lock(&of.0).as_ref().is_some_and(holds_more)) {
            return Err("over its reservation");
        }
        if self.waiting.iter().any(|request| request.overtaken > self.ceiling.get()) {
            return Err("overtaken by too much");
        }
        Ok(())
    }
}
