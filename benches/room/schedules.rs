//! Random schedules of requests that wait for room, without threads and in virtual time.
//!
//! Each request reserves all that it needs when it is admitted: all bodies arrive at once. A seed
//! draws arrivals, ends, clients that leave, late polls and ticks. It checks four claims:
//! never more is reserved than the ceiling; nothing waits while nothing runs; each request is
//! answered by its deadline; and none is overtaken by more than a ceiling of bytes.
//!
//! It relies on the queue of `lowtide-admission` and on nothing else: no control loop measures.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use lowtide_admission::clock::Moment;
use lowtide_admission::{Admission, Budget, ByteSize, Cost, Permit, Priority, Rejected, Waiting};

/// The longest wait.
const WITHIN: Duration = Duration::from_millis(500);
const TICK: Duration = Duration::from_millis(10);
const STEPS: usize = 160;

/// What went wrong in a schedule.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    OverTheCeiling,
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

struct World {
    admission: Admission,
    ceiling: ByteSize,
    now: Moment,
    chance: Chance,
    waiting: Vec<Request>,
    running: Vec<Permit>,
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
    admission.tend_queue(now); // deadlines pass
    let (waiting, running) = (Vec::new(), Vec::new());
    let mut world = World {
        admission,
        ceiling,
        now,
        chance,
        waiting,
        running,
        arrived: 0,
        seen: Seen::default(),
    };
    for _ in 0..STEPS {
        match world.chance.below(8) {
            0..=3 => world.arrive(),
            4 => world.finish(),
            5 => world.leave(),
            6 => drop(world.poll_one()),
            _ => world.tick()?,
        }
        world.check()?;
    }
    // Everything ends, and so does all waiting.
    while !(world.waiting.is_empty() && world.running.is_empty()) {
        world.finish();
        world.tick()?;
        world.check()?;
    }
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
        match self.admission.try_admit_uncounted(cost, priority) {
            Ok(permit) => self.admitted(permit, self.arrived),
            Err(rejected) if rejected.may_wait() => {
                let within = Some(WITHIN);
                let Some(waiting) = self.admission.wait(cost, priority, tenant, within) else {
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
        for other in self.waiting.iter_mut().filter(|other| other.number < number) {
            other.overtaken += bytes;
            self.seen.passed += 1;
        }
        self.running.push(permit);
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
                request.waiting.try_admit(cost, priority)
            } else {
                self.admission.try_admit_uncounted(cost, priority)
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
        let woken = |at: &usize| self.waiting[*at].woken.0.load(Ordering::Relaxed);
        let all: Vec<_> = (0..self.waiting.len()).filter(woken).collect();
        if all.is_empty() {
            return false;
        }
        let at = all[self.chance.below(all.len())];
        self.poll(at);
        true
    }

    fn finish(&mut self) {
        if !self.running.is_empty() {
            let at = self.chance.below(self.running.len());
            drop(self.running.swap_remove(at));
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
        self.admission.tend_queue(self.now);
        // Ends: a request that waits again was not woken since.
        while self.poll_one() {}
        // The time counts from the first tick after the request entered.
        let latest = WITHIN + 8 * TICK;
        if self.waiting.iter().any(|request| self.now - request.entered > latest) {
            return Err(Fault::Unanswered);
        }
        if self.running.is_empty() && !self.waiting.is_empty() {
            return Err(Fault::Deadlock);
        }
        Ok(())
    }

    fn check(&self) -> Result<(), Fault> {
        if self.reserved() > self.ceiling {
            return Err(Fault::OverTheCeiling);
        }
        if self.waiting.iter().any(|request| request.overtaken > self.ceiling.get()) {
            return Err(Fault::Overtaken);
        }
        Ok(())
    }
}
