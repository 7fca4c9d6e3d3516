//! The per-thread front: freed blocks of hot sizes, kept where the next request finds them without
//! the arena's lock.
//!
//! Each thread has a home (threads share one where there are more of them than homes), and each
//! home a front behind a lock of its own, which only a reclaim or another thread of that home ever
//! contends for. A block goes back to the home that it was taken from; a size is hot that was asked
//! for `HOT` times lately. To the books a block in a front is live; the front says how much is
//! not. It calls no driver. Whoever gives memory back empties the fronts first, so that a front
//! never keeps what the arena needs. What it keeps of which sizes is [`kept`](super::kept).
//!
//! Where work goes on after its call returned, a thread's front keeps nothing: the next block might
//! go to another stream. There each lane has a home of its own, in whose front the blocks wait that
//! this lane alone used. It has them back at once, its work being done in order. To others they are
//! freed when they come to the books, with the lane's use of then, which is no earlier than theirs.
//!
//! A block in a front keeps the hold on the home that its buffer had, and the next buffer gets it:
//! a pair of calls takes and gives no count, which would cost as much as its two locks. So a home
//! whose front holds anything keeps itself; the arena's last handle empties the fronts for good,
//! the end of a lane that lane's. A block in a front holds no lane.
//!
//! Invariants: `cached = sum of the blocks in the front <= room`; what a front holds is handed out
//! at most once; no front's lock is taken under the arena's; without a handle of the arena every
//! front is empty.
#![expect(unsafe_code, reason = "a block that holds its home is put into that home")]

use std::cell::Cell;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize as Number;
use std::thread;

use super::books::Books;
use super::kept::{Front, HOT, Heat, Key, Tally};
use super::lane::Known;
use super::region::{Placed, Region};
use super::shared::Shared;
use super::streams::StreamKey;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::{Brief, BriefGuard, brief, try_brief, try_lock};

/// Homes of an arena at most.
const HOMES_MAX: usize = 64;

/// A block of a region.
pub(super) type Kept = (Region, Placed);

/// A block that came out of a front, and the stream of the lane whose front that was.
pub(super) type Swept = (Kept, Option<StreamKey>);

/// A block with the home that it goes back to: a buffer's, or a front's while nobody has it. On the
/// heap, so that it changes hands as a pointer.
#[derive(Debug)]
pub(super) struct Owned {
    pub(super) home: Arc<Home>,
    pub(super) region: Region,
    /// Nothing, where a buffer's elements have no bytes; never so in a front.
    pub(super) block: Option<Placed>,
    /// Where the block was last known to be.
    pub(super) place: Place,
    /// The lanes that use the block: the one it was taken on first. None in a front.
    pub(super) lanes: Vec<Arc<Known>>,
    /// Its address was out with code that uses streams of its own.
    pub(super) foreign: bool,
}

/// Where a block was when its region had seen so many moves.
#[derive(Debug)]
pub(super) struct Place {
    pub(super) at: AtomicU64,
    pub(super) moves: AtomicU64,
}

impl Place {
    pub(super) fn of(block: Option<Placed>) -> Self {
        let (at, moves) = block.map_or((0, 0), |block| (block.at.get(), block.moves));
        Self { at: AtomicU64::new(at), moves: AtomicU64::new(moves) }
    }
}

impl Owned {
    pub(super) fn new(home: Arc<Home>, region: Region, block: Option<Placed>) -> Box<Self> {
        Box::new(Self {
            home,
            region,
            block,
            place: Place::of(block),
            lanes: Vec::new(),
            foreign: false,
        })
    }

    /// Frees the block: into its home's front where it is of a hot size, else in the books. In a
    /// forked child does nothing.
    #[inline]
    pub(super) fn release(mut self: Box<Self>) {
        let Some(placed) = &self.block else { return };
        let (home, shared) = (&self.home, &self.home.shared);
        if shared.check_here().is_err() {
            return;
        }
        let fits = shared.is_fresh(self.region, placed)
            && placed.span.size <= home.room()
            && home.is_of(&self.lanes)
            && !self.foreign;
        if !fits {
            return self.free();
        }
        // Let go of last: where it is the last of its lane, the lane's end empties the front.
        let lane = self.lanes.pop();
        if let Some(mut left) = self.give() {
            left.lanes.extend(lane);
            left.free();
        }
    }

    /// Frees the block in the books.
    fn free(&self) {
        if let Some(placed) = self.block {
            let lanes = if self.foreign { &[][..] } else { &self.lanes };
            self.home.shared.release_after(self.region, placed, lanes);
        }
    }

    /// Puts the block into its home's front; returns it where it belongs to the books: its size is
    /// not hot, there is no room, or the front is busy.
    #[inline]
    fn give(self: Box<Self>) -> Option<Box<Self>> {
        // SAFETY: what is here holds the home until it is put into the front below. From when the
        // front's lock is given up after that, another thread may take it out and let go of the
        // home: so `home` is used no more then, and the guard's last act is a store to the lock,
        // an atomic, whose reference need not outlive the store.
        let home = unsafe { &*Arc::as_ptr(&self.home) };
        let Some(mut front) = try_brief(&home.front) else {
            home.shared.note_contended();
            return Some(self);
        };
        // Both under the front's lock: whoever empties it after shutting the fronts finds this
        // block, or this finds no room.
        let Some(vacant) = front.admit(&self, home.room()) else { return Some(self) };
        *vacant = Some(self);
        home.shared.note_kept();
        home.cached.store(front.tally.cached(), Ordering::Relaxed);
        None
    }
}

/// Where the blocks of some threads, or of one lane, come from and go back to. Buffers hold it, so
/// that neither taking nor giving back touches a count that other threads use.
#[repr(align(128))]
pub(super) struct Home {
    pub(super) shared: Arc<Shared>,
    /// Whose it is, where it is a lane's.
    stream: Option<StreamKey>,
    front: Brief<Front>,
    /// A copy of the front's figure, for who must not take its lock.
    cached: AtomicU64,
}

impl Home {
    fn new(shared: Arc<Shared>, stream: Option<StreamKey>) -> Self {
        let front = Brief::new(Front::default());
        Self { shared, stream, front, cached: AtomicU64::new(0) }
    }

    /// The home of a lane, known to the arena until [`Home::retire`].
    pub(super) fn of_lane(shared: &Arc<Shared>, stream: StreamKey) -> Arc<Self> {
        let home = Arc::new(Self::new(Arc::clone(shared), Some(stream)));
        shared.fronts.add(&home);
        home
    }

    /// The most bytes that its front may keep now.
    #[inline]
    pub(super) fn room(&self) -> u64 {
        match self.stream {
            Some(_) => self.shared.lane_room(),
            None => self.shared.front_room(),
        }
    }

    /// A block of its front, as who frees it in the books needs it.
    pub(super) const fn swept(&self, region: Region, placed: Placed) -> Swept {
        ((region, placed), self.stream)
    }

    /// Whether a block that these lanes used may wait in its front.
    #[inline]
    fn is_of(&self, lanes: &[Arc<Known>]) -> bool {
        match (lanes, self.stream) {
            ([], None) => true,
            ([lane], Some(stream)) => lane.key() == Some(stream),
            _ => false,
        }
    }

    /// Frees what the front holds, in the books, and lets those count what it has done: its lane is
    /// at its end.
    pub(super) fn retire(&self) {
        let mut front = brief(&self.front);
        let mut books = self.shared.books();
        self.empty_into(&mut front, &mut books);
        books.add_front(&std::mem::take(&mut front.tally));
        drop((books, front));
        self.shared.fronts.remove(self);
    }

    /// Frees in the books what the front holds.
    pub(super) fn give_up(&self) {
        if self.cached() > 0 {
            let mut front = brief(&self.front);
            self.empty_into(&mut front, &mut self.shared.books());
        }
    }

    fn empty_into(&self, front: &mut Front, books: &mut Books) {
        let clock = &*self.shared.clock;
        front.empty(|_| true, |kept| books.release_swept((kept, self.stream), clock));
        self.cached.store(0, Ordering::Relaxed);
    }

    /// A block of this size out of the front; `None` where it has none, or is busy.
    ///
    /// Where it has none, what it keeps goes back to the books unless those are busy: the books
    /// then place the request with all free space before them, as close as without fronts.
    #[inline]
    pub(super) fn take(&self, key: Key, requested: u64) -> Option<Box<Owned>> {
        let Some(mut front) = try_brief(&self.front) else {
            self.shared.note_contended();
            // Loom runs an execution again and again: nothing may outlive one.
            if !cfg!(lowtide_loom) {
                move_thread();
            }
            return None;
        };
        let taken = front.take(key, requested);
        if taken.is_none() {
            if front.tally.cached() == 0 {
                return None;
            }
            self.empty_into(&mut front, &mut *try_lock(&self.shared.books)?);
            return None;
        }
        self.cached.store(front.tally.cached(), Ordering::Relaxed);
        taken
    }

    /// Takes all blocks out.
    pub(super) fn empty(&self, out: &mut Vec<Swept>) {
        self.sweep(out, |_| true);
    }

    /// Halves the heat of every size and takes out the blocks of those that are no longer hot;
    /// says whether any stay.
    pub(super) fn cool(&self, out: &mut Vec<Swept>) -> bool {
        let mut front = brief(&self.front);
        front.cool();
        drop(front);
        self.sweep(out, |heat| heat < HOT)
    }

    /// Bytes in the front, read without its lock.
    #[inline]
    pub(super) fn cached(&self) -> u64 {
        self.cached.load(Ordering::Relaxed)
    }

    /// Holds the front still: what it says is true until the guard goes.
    pub(super) fn still(&self) -> Still<'_> {
        Still(brief(&self.front))
    }

    fn sweep(&self, out: &mut Vec<Swept>, gone: impl Fn(Heat) -> bool) -> bool {
        let mut front = brief(&self.front);
        front.empty(gone, |kept| out.push((kept, self.stream)));
        self.cached.store(front.tally.cached(), Ordering::Relaxed);
        front.tally.cached() > 0
    }
}

/// All homes of an arena, held by its handles.
#[derive(Debug)]
pub(super) struct Homes(Box<[Arc<Home>]>);

impl Homes {
    /// Makes the homes of an arena, and makes them known to it.
    pub(super) fn new(shared: &Arc<Shared>) -> Self {
        let homes: Box<[_]> =
            (0..homes()).map(|_| Arc::new(Home::new(Arc::clone(shared), None))).collect();
        shared.fronts.know(homes.iter().map(Arc::downgrade).collect());
        Self(homes)
    }

    /// The home of this thread.
    #[inline]
    pub(super) fn here(&self) -> &Arc<Home> {
        // As many as `homes` says: a power of two, at least two.
        &self.0[thread_number() & (self.0.len() - 1)]
    }
}

impl Drop for Homes {
    /// Empties the fronts for good: the last handle of the arena is gone.
    fn drop(&mut self) {
        if let Some(home) = self.0.first() {
            home.shared.retire_fronts();
        }
    }
}

/// A front that is held still.
pub(super) struct Still<'a>(BriefGuard<'a, Front>);

impl Still<'_> {
    pub(super) fn tally(&self) -> Tally {
        self.0.tally
    }
}

impl fmt::Debug for Home {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Home").field("cached", &self.cached()).finish_non_exhaustive()
    }
}

/// How many homes an arena has: four for each thread that can run at once, so that threads which
/// move from a busy home find one of their own.
fn homes() -> usize {
    let threads = thread::available_parallelism().map_or(1, usize::from);
    threads.saturating_mul(4).next_power_of_two().clamp(8, HOMES_MAX)
}

/// Numbers of threads, counted up.
static NEXT: Number = Number::new(0);

thread_local! {
    static NUMBER: Cell<usize> = const { Cell::new(usize::MAX) };
}

/// The number of this thread, which says where its home is.
#[inline]
fn thread_number() -> usize {
    // A thread that is ending has no number any more: any home will do.
    let number = NUMBER.try_with(Cell::get).unwrap_or(0);
    if number == usize::MAX { move_thread() } else { number }
}

/// Gives this thread a new number, and so a new home: another thread uses the one it had.
fn move_thread() -> usize {
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let _ = NUMBER.try_with(|current| current.set(number));
    number
}
