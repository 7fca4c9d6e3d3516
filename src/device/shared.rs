//! What the handles, buffers and leases of one arena share: its driver, its books, its fronts.
//!
//! The lock of the books is taken here and nowhere else but around driver calls; a thread that has
//! to wait for it is counted. It decides nothing.
//!
//! Invariants: no driver call under a lock; locks are taken in the order sweep, front, books; the
//! arena's memory lives as long as a handle, a buffer or a lease of it.

use std::fmt;
use std::mem::ManuallyDrop;
use std::ptr;
use std::sync::{Arc, OnceLock, Weak};

use super::books::Books;
use super::driver::sealed::Key;
use super::driver::{Capabilities, Driver};
use super::error::DeviceError;
use super::front::{Home, Swept};
use super::kept::Tally;
use super::lane::Known;
use super::planted::Plants;
use super::record::Recorder;
use super::record::operation::After;
use super::region::{Placed, Region};
use super::reserve;
use super::shortage::Callbacks;
use super::sleep::SleepConfig;
use super::snapshot::{ArenaGlance, ArenaSnapshot};
use crate::bytes::ByteSize;
use crate::clock::Clock;
use crate::decay::DecayTime;
use crate::fork::Birth;
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::sync::{Condvar, Mutex, MutexGuard, lock, try_lock};

/// What is shared.
pub(super) struct Shared {
    pub(super) name: String,
    pub(super) driver: Arc<dyn Driver>,
    pub(super) clock: Arc<dyn Clock>,
    pub(super) books: Mutex<Books>,
    /// Notified whenever a driver call's result has been booked.
    pub(super) settled: Condvar,
    pub(super) capabilities: Capabilities,
    /// The smallest unit that the arena commits.
    pub(super) granule: ByteSize,
    /// The largest block that each region could ever have.
    pub(super) largest: [ByteSize; 2],
    /// How often blocks of each region have moved: a copy of the books' figures.
    pub(super) moves: [AtomicU64; 2],
    pub(super) fronts: Fronts,
    /// Who is asked for memory when it is short.
    pub(super) callbacks: Arc<Callbacks>,
    /// Nothing more is handed out.
    pub(super) closed: AtomicBool,
    /// When it falls asleep by itself, and how it wakes.
    pub(super) sleep: SleepConfig,
    pub(super) birth: Birth,
    /// The one that the books tell, for whoever passes on what it was told.
    pub(super) recorder: Option<Recorder>,
    pub(super) plants: Plants,
    /// Errors of CUDA that a freed buffer's view left with cudarc.
    #[cfg(feature = "cuda")]
    pub(super) parked: AtomicU64,
}

/// Lanes that may keep as much as a thread does; where there are more, each keeps less, so that all
/// together keep about so many times as much. A guess.
const LANES: u64 = 8;

/// What an arena knows of the fronts of its threads and lanes.
#[derive(Debug, Default)]
pub(super) struct Fronts {
    /// Where the threads' are; set once, when the arena is opened.
    homes: OnceLock<Box<[Weak<Home>]>>,
    /// Where those of the lanes are.
    lanes: Mutex<Vec<Weak<Home>>>,
    /// The most bytes that each of a thread, and each of a lane, may keep now, worked out of the
    /// rules; read under a front's lock, so that a front which was emptied after this became zero
    /// stays empty.
    room: AtomicU64,
    lane_room: AtomicU64,
    rules: Mutex<Rules>,
    /// Little is left under the limit: what a front keeps would be missed elsewhere.
    tight: AtomicBool,
    /// Some front may hold something; set under that front's lock.
    hold: AtomicBool,
    /// Held from when blocks are taken out of the fronts until they are in the books: meanwhile
    /// neither counts them as free.
    sweep: Mutex<()>,
    /// Times that a front was found busy.
    contended: AtomicU64,
}

/// How much a front may keep, and why nothing.
#[derive(Debug, Default)]
struct Rules {
    room_max: ByteSize,
    /// Freed blocks may still be worked on: threads keep none.
    asynchronous: bool,
    /// Lanes with a front.
    lanes: u64,
    /// Idle memory is given back at once.
    at_once: bool,
    /// The arena sleeps: what a front keeps would have no memory behind it.
    asleep: bool,
    /// Who needs the fronts to be empty now.
    shut: u32,
}

/// Keeps all fronts from taking anything in.
pub(super) struct Shut<'a>(&'a Fronts);

impl Drop for Shut<'_> {
    fn drop(&mut self) {
        self.0.set(|rules| rules.shut -= 1);
    }
}

impl Fronts {
    /// Lets fronts take nothing in while the arena sleeps.
    pub(super) fn set_asleep(&self, is_asleep: bool) {
        self.set(|rules| rules.asleep = is_asleep);
    }

    /// Fronts that may keep so much each; those of threads nothing, where work is `asynchronous`.
    pub(super) fn new(room_max: ByteSize, decay: DecayTime, asynchronous: bool) -> Self {
        let fronts = Self::default();
        fronts.set(|rules| rules.asynchronous = asynchronous);
        fronts.set_room(room_max);
        fronts.set_decay(decay);
        fronts
    }

    /// Makes the homes known, once.
    pub(super) fn know(&self, homes: Box<[Weak<Home>]>) {
        let known = self.homes.set(homes);
        debug_assert!(known.is_ok(), "the homes are made once");
    }

    /// Makes the home of a lane known.
    pub(super) fn add(&self, home: &Arc<Home>) {
        lock(&self.lanes).push(Arc::downgrade(home));
        self.set(|rules| rules.lanes += 1);
    }

    /// Forgets the home of a lane.
    pub(super) fn remove(&self, home: &Home) {
        lock(&self.lanes).retain(|known| !ptr::eq(known.as_ptr(), home));
        self.set(|rules| rules.lanes -= 1);
    }

    /// Sets how much each may keep.
    pub(super) fn set_room(&self, room_max: ByteSize) {
        self.set(|rules| rules.room_max = room_max);
    }

    /// Notes how much of the limit is live: from seven eighths on, fronts keep nothing.
    pub(super) fn note_live(&self, live: u64, limit: u64) {
        let tight = live > limit - limit / 8;
        // Read first, as in `Shared::note_kept`.
        if self.tight.load(Ordering::Relaxed) != tight {
            self.tight.store(tight, Ordering::Relaxed);
        }
    }

    /// Sets how long idle memory may stay: where that is not at all, fronts keep nothing.
    pub(super) fn set_decay(&self, decay: DecayTime) {
        self.set(|rules| rules.at_once = decay == DecayTime::AtOnce);
    }

    /// Lets fronts take nothing in until what is returned goes.
    pub(super) fn shut(&self) -> Shut<'_> {
        self.set(|rules| rules.shut += 1);
        Shut(self)
    }

    fn set(&self, change: impl FnOnce(&mut Rules)) {
        let mut rules = lock(&self.rules);
        change(&mut rules);
        let none = rules.at_once || rules.asleep || rules.shut > 0;
        let room = if none { 0 } else { rules.room_max.get() };
        self.room.store(if rules.asynchronous { 0 } else { room }, Ordering::Relaxed);
        self.lane_room.store(room / rules.lanes.div_ceil(LANES).max(1), Ordering::Relaxed);
    }
}

impl Shared {
    /// Takes the lock of the books, and counts it where that had to be waited for.
    pub(super) fn books(&self) -> MutexGuard<'_, Books> {
        if let Some(books) = try_lock(&self.books) {
            return books;
        }
        let from = self.clock.now();
        let mut books = lock(&self.books);
        books.totals.contended += 1;
        books.totals.waited += self.clock.now() - from;
        books
    }

    /// Refuses in a forked child, where the lock may be held by a thread that is not there.
    #[inline]
    pub(super) fn check_here(&self) -> Result<(), DeviceError> {
        if self.birth.is_here() { Ok(()) } else { Err(DeviceError::Forked) }
    }

    /// Refuses in a forked child, and once the arena is closed.
    #[inline]
    pub(super) fn check_open(&self) -> Result<(), DeviceError> {
        self.check_here()?;
        if self.is_closed() { Err(self.was_closed()) } else { Ok(()) }
    }

    /// Whether nothing more is handed out; certain under the lock of the books.
    #[inline]
    pub(super) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Relaxed)
    }

    pub(super) fn was_closed(&self) -> DeviceError {
        DeviceError::Closed { arena: self.name.clone() }
    }

    pub(super) fn check_host_access(&self) -> Result<(), DeviceError> {
        if self.capabilities.host_access { Ok(()) } else { Err(self.no_host_access()) }
    }

    pub(super) fn no_host_access(&self) -> DeviceError {
        DeviceError::Unsupported { what: "access from the host", backend: self.driver.backend() }
    }

    /// Frees a block in the books: bookkeeping only.
    pub(super) fn release(&self, region: Region, placed: Placed) {
        self.books().release(region, placed, &*self.clock);
        self.pass_on();
    }

    /// Frees a block that these lanes used, in the books.
    pub(super) fn release_after(&self, region: Region, placed: Placed, lanes: &[Arc<Known>]) {
        let streams: Vec<_> = lanes.iter().filter_map(|lane| lane.key()).collect();
        let after = if lanes.is_empty() { After::All } else { After::Lanes };
        self.books().release_after(region, placed, (&streams, after), &*self.clock);
        self.pass_on();
    }

    /// Frees blocks in the books.
    pub(super) fn release_all(&self, blocks: Vec<Swept>) {
        if blocks.is_empty() {
            return;
        }
        let mut books = self.books();
        for block in blocks {
            books.release_swept(block, &*self.clock);
        }
    }

    /// The most bytes that a thread's front may keep now.
    #[inline]
    pub(super) fn front_room(&self) -> u64 {
        let tight = self.fronts.tight.load(Ordering::Relaxed);
        if tight { 0 } else { self.fronts.room.load(Ordering::Relaxed) }
    }

    /// The most bytes that a lane's front may keep now.
    #[inline]
    pub(super) fn lane_room(&self) -> u64 {
        let tight = self.fronts.tight.load(Ordering::Relaxed);
        if tight { 0 } else { self.fronts.lane_room.load(Ordering::Relaxed) }
    }

    /// Notes that a front holds something.
    #[inline]
    pub(super) fn note_kept(&self) {
        // Read first: a line that all threads write would be what the fronts are to avoid.
        if !self.fronts.hold.load(Ordering::Relaxed) {
            self.fronts.hold.store(true, Ordering::Relaxed);
        }
    }

    /// Notes that a front was busy.
    pub(super) fn note_contended(&self) {
        self.fronts.contended.fetch_add(1, Ordering::Relaxed);
    }

    /// Whether a front may hold something.
    pub(super) fn fronts_hold(&self) -> bool {
        self.fronts.hold.load(Ordering::Relaxed)
    }

    /// Gives all that the fronts hold back to the books; says whether that was anything.
    pub(super) fn empty_fronts(&self) -> bool {
        let sweep = lock(&self.fronts.sweep);
        self.empty_under(&sweep)
    }

    /// Lets fronts take nothing in until what is returned goes, and gives all that they hold back
    /// to the books; says whether that was anything. It looks into each, whatever they have said:
    /// under its lock, one that takes a block in before that is found to hold it, and one that
    /// would after it finds that there is no room.
    pub(super) fn shut_fronts(&self) -> (Shut<'_>, bool) {
        let shut = self.fronts.shut();
        let held = self.empty_all(&lock(&self.fronts.sweep));
        (shut, held)
    }

    /// Lets fronts take nothing in any more, and empties them: no handle of the arena is left. In a
    /// forked child does nothing.
    pub(super) fn retire_fronts(&self) {
        if self.check_here().is_ok() {
            let _for_good = ManuallyDrop::new(self.fronts.shut());
            self.empty_all(&lock(&self.fronts.sweep));
        }
    }

    fn empty_under(&self, sweep: &MutexGuard<'_, ()>) -> bool {
        // What is put into a front from here on says so again.
        self.fronts.hold.swap(false, Ordering::Relaxed) && self.empty_all(sweep)
    }

    /// The same, whatever the fronts have said.
    fn empty_all(&self, sweep: &MutexGuard<'_, ()>) -> bool {
        let mut blocks = Vec::new();
        self.homes().for_each(|home| home.empty(&mut blocks));
        self.release_swept(blocks, sweep)
    }

    /// Gives back to the books what the fronts hold of sizes that are no longer hot.
    pub(super) fn cool_fronts(&self) {
        let sweep = lock(&self.fronts.sweep);
        if !self.fronts.hold.swap(false, Ordering::Relaxed) {
            return;
        }
        let mut blocks = Vec::new();
        for home in self.homes() {
            if home.cool(&mut blocks) {
                self.note_kept();
            }
        }
        self.release_swept(blocks, &sweep);
    }

    /// Frees in the books what was taken out of the fronts; says whether that was anything.
    fn release_swept(&self, blocks: Vec<Swept>, _: &MutexGuard<'_, ()>) -> bool {
        if blocks.is_empty() {
            return false;
        }
        self.release_all(blocks);
        true
    }

    /// The homes of threads, then those of lanes.
    fn homes(&self) -> impl Iterator<Item = Arc<Home>> {
        let of_lanes = lock(&self.fronts.lanes).clone();
        let homes = self.fronts.homes.get().into_iter().flatten().cloned();
        homes.chain(of_lanes).filter_map(|home| home.upgrade())
    }

    /// All figures at one instant: the fronts are held still meanwhile, and then the books.
    pub(super) fn snapshot(&self) -> ArenaSnapshot {
        let sweep = lock(&self.fronts.sweep);
        self.snapshot_under(&sweep)
    }

    fn snapshot_under(&self, _: &MutexGuard<'_, ()>) -> ArenaSnapshot {
        // Dropped last: the last holder of a home takes the lock of the books.
        let homes: Vec<_> = self.homes().collect();
        let still: Vec<_> = homes.iter().map(|home| home.still()).collect();
        let mut fronts = Tally::default();
        still.iter().for_each(|front| fronts.add(front.tally()));
        let books = self.books();
        let mut snapshot = books.snapshot(&self.name, self.driver.backend(), &fronts);
        books.outstanding.show(&mut snapshot);
        snapshot.lock_contended_total += self.fronts.contended.load(Ordering::Relaxed);
        #[cfg(feature = "cuda")]
        {
            snapshot.parked_errors_total = self.parked.load(Ordering::Relaxed);
        }
        snapshot
    }

    /// Lets nothing more be handed out, where nothing is live; says whether it was open. Another
    /// thread that closes it waits for the outcome.
    pub(super) fn close(&self) -> Result<bool, DeviceError> {
        let _shut = self.fronts.shut();
        let sweep = lock(&self.fronts.sweep);
        if self.closed.swap(true, Ordering::Relaxed) {
            return Ok(false);
        }
        // From here on no front hands anything out, being empty, and the books hand out nothing
        // without a look at `closed` under their lock.
        self.empty_all(&sweep);
        let snapshot = self.snapshot_under(&sweep);
        let count = snapshot.allocs_total - snapshot.frees_total;
        let held = self.books().outstanding.imported.held();
        if count == 0 && held == 0 {
            return Ok(true);
        }
        self.closed.store(false, Ordering::Relaxed);
        if count == 0 {
            let (arena, bytes) = (self.name.clone(), snapshot.imported);
            return Err(DeviceError::AdoptedHeld { arena, count: held, bytes });
        }
        Err(DeviceError::LiveBlocks { arena: self.name.clone(), count, bytes: snapshot.live })
    }

    /// A few figures, without the fronts' locks.
    pub(super) fn glance(&self) -> ArenaGlance {
        let cached = self.homes().map(|home| home.cached()).sum();
        let books = self.books();
        ArenaGlance {
            live: ByteSize::new(books.live().saturating_sub(cached)),
            committed: ByteSize::new(books.backed()),
            idle: ByteSize::new(books.idle()),
        }
    }

    pub(super) fn validate(&self) {
        lock(&self.books).validate();
        self.snapshot().validate();
    }

    /// Validates in debug builds.
    pub(super) fn debug_validate(&self) {
        if cfg!(debug_assertions) {
            self.validate();
        }
    }
}

impl Drop for Shared {
    /// Gives everything back to the driver: nobody holds a block, and nobody waits for the lock.
    /// Where the driver refuses, or the device may still work there, the range stays reserved. In a
    /// forked child does nothing.
    fn drop(&mut self) {
        if self.check_here().is_err() {
            let books = self.books.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner);
            books.forget_adopted();
            return;
        }
        log!(info, arena = self.name, "an arena is gone");
        let _ = self.ask_events(); // asks, and waits for nothing
        self.end_adopted();
        self.end_sleep();
        let books = lock(&self.books);
        // Nobody says when blocks that are out by address are used.
        let is_raw_used = books.asynchronous && !books.raw.is_empty() && !books.sleep.is_quiet();
        let is_used = books.pending() > 0 || books.sleep.may_be_copied() || is_raw_used;
        if is_used {
            let left = ByteSize::new(books.backed());
            log!(warn, arena = self.name, %left, "memory was left behind");
        }
        for event in books.streams.events() {
            let _ = self.driver.event_destroy(event, Key::new());
        }
        if is_used {
            self.end_recording(books);
            return; // the device may still work on it
        }
        for region in Region::ALL {
            reserve::give_up(&*self.driver, &books.region(region).segment);
        }
        self.end_recording(books);
    }
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared")
            .field("name", &self.name)
            .field("driver", &self.driver)
            .field("largest", &self.largest)
            .finish_non_exhaustive()
    }
}
