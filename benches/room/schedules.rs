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
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use lowtide_admission::clock::Moment;
use lowtide_admission::layer::{LargeRequest, SLOW_AFTER, Waiting};
use lowtide_admission::{Admission, Budget, ByteSize, Cost, Permit, Priority, Rejected};

/// The longest wait.
const WITHIN: Duration = Duration::from_millis(500);
const TICK: Duration = Duration::from_millis(10);
const STEPS: usize = 160;
/// What a suspended request reserves beyond what it holds.
const WINDOW: ByteSize = ByteSize::kib(64);

/// What went wrong in a schedule.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    OverTheCeiling,
    OverItsReservation,
    Deadlock,
    Unanswered,
    Overtaken,
    Left,
}

/// What happened in schedules.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Seen {
    pub(crate) waited: u64,
    pub(crate) rejected: u64,
    pub(crate) passed: u64,
    pub(crate) suspended: u64,
    pub(crate) resumed: u64,
}

/// A generator of numbers (Steele, Lea and Flood, 2014: `SplitMix64`).
struct Chance(u64);

impl Chance {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, most: usize) -> usize {
        usize::try_from(self.next() % (most.max(1) as u64)).unwrap_or_default()
    }
}

#[derive(Default)]
struct Woken(AtomicBool);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::Relaxed);
    }
}

struct Request {
    cost: Cost,
    priority: Priority,
    /// The order of arrival.
    number: u64,
    entered: Moment,
    waiting: Waiting,
    woken: Arc<Woken>,
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
    is_suspended: bool,
    /// Its place in the queue, and when it entered.
    waits: Option<(Waiting, Arc<Woken>, Moment)>,
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

impl Admitted {
    fn upload(&self) -> MutexGuard<'_, Option<Upload>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl LargeRequest for Admitted {
    fn reserved(&self) -> Option<ByteSize> {
        self.upload().as_ref().map(|upload| upload.permit.cost().host)
    }

    fn admitted_at(&self) -> Option<Moment> {
        self.upload().as_ref().map(|upload| upload.reserved_at)
    }

    fn suspend(&self, now: Moment) {
        let mut upload = self.upload();
        let Some(upload) = &mut *upload else { return };
        if upload.is_whole() || upload.is_suspended || now - upload.reserved_at < SLOW_AFTER {
            return;
        }
        upload.is_suspended = true;
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
pub(crate) fn run(seed: u64) -> Result<Seen, Fault> {
    let mut chance = Chance(seed);
    let ceiling = ByteSize::mib(16 << chance.below(4));
    let admission = Admission::with_limit(ceiling);
    let now = Moment::ORIGIN;
    admission.state().tend_queue(now); // deadlines pass
    let (waiting, running, has_pieces) = (Vec::new(), Vec::new(), seed % 2 == 1);
    let mut world = World {
        admission,
        ceiling,
        now,
        chance,
        waiting,
        running,
        has_pieces,
        arrived: 0,
        seen: Seen::default(),
    };
    for _ in 0..STEPS {
        match world.chance.below(if has_pieces { 12 } else { 8 }) {
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
        return Err(Fault::Left);
    }
    Ok(world.seen)
}

impl World {
    fn reserved(&self) -> ByteSize {
        self.admission.ledger(Budget::Host).reserved_bytes()
    }

    fn arrive(&mut self) {
        let part = self.ceiling.get() >> [10, 8, 5, 2, 1][self.chance.below(5)];
        let bytes = 1 + self.chance.next() % part.max(1);
        let cost = Cost::host(ByteSize::new(bytes));
        let priority = [Priority::Normal, Priority::Normal, Priority::Low, Priority::High];
        let priority = priority[self.chance.below(4)];
        let tenant = self.chance.below(3) as u64;
        self.arrived += 1;
        match self.admission.state().try_admit_uncounted(cost, priority, None) {
            Ok(permit) => self.admitted(permit, self.arrived),
            Err(rejected) if rejected.may_wait() => {
                let within = Some(WITHIN);
                let Some(waiting) = self.admission.state().wait(cost, priority, tenant, within)
                else {
                    self.seen.rejected += 1;
                    return;
                };
                let woken = Arc::new(Woken(AtomicBool::new(true)));
                let (entered, number) = (self.now, self.arrived);
                let request =
                    Request { cost, priority, number, entered, waiting, woken, overtaken: 0 };
                self.waiting.push(request);
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
        let (reserved_at, is_suspended, waits) = (self.now, false, None);
        let upload =
            Upload { permit, number, claim, length, arrived, reserved_at, is_suspended, waits };
        let admitted = Arc::new(Admitted::default());
        if self.has_pieces {
            upload.permit.state().register(Arc::<Admitted>::clone(&admitted));
        }
        *admitted.upload() = Some(upload);
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
        let at = self.chance.below(self.running.len());
        let pieces = 1 + self.chance.below(4) as u64;
        let admitted = Arc::clone(&self.running[at]);
        let mut upload = admitted.upload();
        let Some(it) = upload.as_mut().filter(|it| it.waits.is_none() && !it.is_whole()) else {
            return;
        };
        let arrived = (it.arrived + pieces * it.length.div_ceil(8)).min(it.length);
        let wanted = ByteSize::new(arrived).saturating_add(WINDOW);
        let is_last = arrived == it.length;
        if it.is_suspended && (is_last || !it.permit.reserve_arriving(wanted)) {
            let waiting = it.permit.wait_to_resume(it.claim, Priority::Normal, 0, WITHIN);
            let woken = Arc::new(Woken(AtomicBool::new(true)));
            it.waits = waiting.map(|waiting| (waiting, woken, self.now));
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
        let mut upload = admitted.upload();
        let Some(it) = &mut *upload else { return false };
        loop {
            let Some((waiting, woken, _)) = &it.waits else { return false };
            woken.0.store(false, Ordering::Relaxed);
            let waker = Waker::from(Arc::clone(woken));
            let Poll::Ready(is_turn) = waiting.poll_turn(&Context::from_waker(&waker)) else {
                return true;
            };
            let before = it.permit.cost().host.get();
            match it.permit.resume(Some(waiting).filter(|_| is_turn), it.claim, Priority::Normal) {
                Ok(()) => {
                    (it.waits, it.is_suspended, it.reserved_at) = (None, false, self.now);
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
        let ended = self.running.swap_remove(at).upload().take();
        drop(ended);
    }

    /// Polls a waiting request until it waits again, or is answered.
    fn poll(&mut self, at: usize) {
        let Some(request) = self.waiting.get(at) else { return };
        request.woken.0.store(false, Ordering::Relaxed);
        let waker = Waker::from(Arc::clone(&request.woken));
        loop {
            let Poll::Ready(is_turn) = request.waiting.poll_turn(&Context::from_waker(&waker))
            else {
                return;
            };
            let (cost, priority) = (request.cost, request.priority);
            let tried = if is_turn {
                request.waiting.try_admit(cost, priority, None)
            } else {
                self.admission.state().try_admit_uncounted(cost, priority, None)
            };
            match tried {
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
            let upload = admitted.upload();
            let waits = upload.as_ref().and_then(|upload| upload.waits.as_ref());
            waits.is_some_and(|(_, woken, _)| woken.0.load(Ordering::Relaxed))
        };
        if let Some(at) = self.running.iter().position(is_woken) {
            return self.resume(at);
        }
        let woken = |at: &usize| self.waiting[*at].woken.0.load(Ordering::Relaxed);
        let all: Vec<_> = (0..self.waiting.len()).filter(woken).collect();
        if all.is_empty() {
            return false;
        }
        let at = all[self.chance.below(all.len())];
        self.poll(at);
        true
    }

    /// A request ends whose body is there, or, now and then, any other.
    fn finish(&mut self) {
        let is_whole =
            |admitted: &Arc<Admitted>| admitted.upload().as_ref().is_some_and(Upload::is_whole);
        let any = self.chance.below(8) == 0;
        let all: Vec<_> =
            (0..self.running.len()).filter(|at| any || is_whole(&self.running[*at])).collect();
        if !all.is_empty() {
            let at = all[self.chance.below(all.len())];
            self.end(at);
        }
    }

    /// A client leaves.
    fn leave(&mut self) {
        if !self.waiting.is_empty() && self.chance.below(4) == 0 {
            let at = self.chance.below(self.waiting.len());
            drop(self.waiting.swap_remove(at));
        }
    }

    fn tick(&mut self) -> Result<(), Fault> {
        self.now = self.now + TICK * (1 + u32::try_from(self.chance.below(4)).unwrap_or(0));
        self.admission.state().tend_queue(self.now);
        // Ends: a request that waits again was not woken since.
        while self.poll_one() {}
        // The time counts from the first tick after the request entered.
        let latest = WITHIN + 8 * TICK;
        let mut entered: Vec<_> = self.waiting.iter().map(|request| request.entered).collect();
        let mut runs = false;
        for admitted in &self.running {
            match admitted.upload().as_ref().and_then(|upload| upload.waits.as_ref()) {
                Some((.., since)) => entered.push(*since),
                None => runs = true,
            }
        }
        if entered.iter().any(|since| self.now - *since > latest) {
            return Err(Fault::Unanswered);
        }
        if !runs && !entered.is_empty() {
            return Err(Fault::Deadlock);
        }
        Ok(())
    }

    fn check(&self) -> Result<(), Fault> {
        if self.reserved() > self.ceiling {
            return Err(Fault::OverTheCeiling);
        }
        let holds_more = |upload: &Upload| upload.held() > upload.permit.cost().host;
        if self.running.iter().any(|of| of.upload().as_ref().is_some_and(holds_more)) {
            return Err(Fault::OverItsReservation);
        }
        if self.waiting.iter().any(|request| request.overtaken > self.ceiling.get()) {
            return Err(Fault::Overtaken);
        }
        Ok(())
    }
}
