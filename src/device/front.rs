//! The per-thread front: freed blocks of hot sizes, kept where the next request finds them without
//! the arena's lock.
//!
//! Each thread has a home (threads share one where there are more of them than homes), and each
//! home a front behind a lock of its own, which only a reclaim or another thread of that home ever
//! contends for. A block goes back to the home that it was taken from; a size is hot that was asked
//! for [`HOT`] times lately. To the books a block in a front is live; the front says how much is
//! not. It calls no driver. Whoever gives memory back empties the fronts first, so that a front
//! never keeps what the arena needs.
//!
//! A block in a front keeps the hold on the home that its buffer had, and the next buffer gets it:
//! a pair of calls takes and gives no count, which would cost as much as its two locks. So a home
//! whose front holds anything keeps itself; the arena's last handle empties the fronts for good.
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

use super::lane::Known;
use super::region::{Placed, Region};
use super::shared::Shared;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::{Brief, BriefGuard, brief, try_brief, try_lock};

/// Requests for a size since it was last cooled, from which on it is hot. A guess: twice for a
/// coincidence, and as often again.
const HOT: u8 = 4;

/// The most that a size's heat comes to: it is cold at the second look after its last use.
const HEAT_MAX: u8 = 4 * HOT - 1;

/// Blocks of one size that a front keeps: a request seldom frees more of one size than it asks
/// for again at once. A guess.
const BLOCKS_MAX: usize = 4;

/// Sizes that a front knows, in sets of [`WAYS`]. A guess: what a layer of a model asks for.
const SETS: usize = 8;
const WAYS: usize = 2;

/// Homes of an arena at most.
const HOMES_MAX: usize = 64;

/// What a block in a front, or one on its way there, is asked by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Key(u64);

impl Key {
    /// No block has it.
    const NONE: Self = Self(0);

    /// For blocks of this size, a positive multiple of 256 bytes, in this region.
    #[inline]
    pub(super) const fn new(region: Region, size: u64) -> Self {
        Self(size | region.number() as u64)
    }

    /// Where the ways of its set begin.
    #[inline]
    fn ways(self) -> usize {
        // Fibonacci hashing: the top bits of the product.
        let hash =
            self.0.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> (u64::BITS - SETS.trailing_zeros());
        usize::try_from(hash).unwrap_or(0) * WAYS
    }
}

/// A block of a region.
pub(super) type Kept = (Region, Placed);

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
    /// The lanes that use the block: the one it was taken on first. Where there are any, it goes to
    /// the books.
    pub(super) lanes: Vec<Arc<Known>>,
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
        Box::new(Self { home, region, block, place: Place::of(block), lanes: Vec::new() })
    }

    /// Frees the block: into its home's front where it is of a hot size, else in the books. In a
    /// forked child does nothing.
    #[inline]
    pub(super) fn release(self: Box<Self>) {
        let Some(placed) = &self.block else { return };
        let shared = &self.home.shared;
        if shared.check_here().is_err() {
            return;
        }
        let fits = shared.is_fresh(self.region, placed)
            && placed.span.size <= shared.front_room()
            && self.lanes.is_empty();
        let left = if fits { self.give() } else { Some(self) };
        if let Some((owned, placed)) =
            left.and_then(|owned| owned.block.map(|block| (owned, block)))
        {
            owned.home.shared.release_after(owned.region, placed, &owned.lanes);
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
        let Some(vacant) = front.admit(&self, home.shared.front_room()) else { return Some(self) };
        *vacant = Some(self);
        home.shared.note_kept();
        home.cached.store(front.tally.cached(), Ordering::Relaxed);
        None
    }
}

/// The blocks of one size.
#[derive(Debug)]
struct Class {
    key: Key,
    heat: u8,
    kept: usize,
    blocks: [Option<Box<Owned>>; BLOCKS_MAX],
}

impl Class {
    const VACANT: Self =
        Self { key: Key::NONE, heat: 0, kept: 0, blocks: [const { None }; BLOCKS_MAX] };
}

/// What a front has done since the arena was opened.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Tally {
    /// Blocks handed out of it, and taken in; those that the books were given later do not count.
    pub(super) allocs: u64,
    pub(super) frees: u64,
    /// Bytes in it now, by region.
    pub(super) cached: [u64; 2],
    /// Requested bytes of what it handed out less those of what it took in, by region; wraps.
    pub(super) requested: [u64; 2],
}

impl Tally {
    pub(super) fn add(&mut self, other: Self) {
        self.allocs += other.allocs;
        self.frees += other.frees;
        for region in Region::ALL.map(Region::number) {
            self.cached[region] += other.cached[region];
            let requested = &mut self.requested[region];
            *requested = requested.wrapping_add(other.requested[region]);
        }
    }

    /// Bytes in the front now.
    #[inline]
    pub(super) fn cached(&self) -> u64 {
        self.cached.iter().sum()
    }

    /// Books a block that went out.
    #[inline]
    fn went(&mut self, region: Region, size: u64, requested: u64) {
        self.cached[region.number()] -= size;
        let sum = &mut self.requested[region.number()];
        *sum = sum.wrapping_add(requested);
    }

    /// Books a block that came in.
    #[inline]
    fn came(&mut self, region: Region, placed: &Placed) {
        self.cached[region.number()] += placed.span.size;
        let sum = &mut self.requested[region.number()];
        *sum = sum.wrapping_sub(placed.requested);
    }
}

/// The blocks kept for one home.
#[derive(Debug, Default)]
struct Front {
    /// Empty until the first request, then `SETS x WAYS`.
    classes: Vec<Class>,
    tally: Tally,
}

impl Front {
    /// The place of a size; claims that of a cold one without blocks, where it has none.
    #[inline]
    fn claim(&mut self, key: Key) -> Option<&mut Class> {
        if self.classes.is_empty() {
            self.classes.extend((0..SETS * WAYS).map(|_| Class::VACANT));
        }
        let set = key.ways();
        let ways = &mut self.classes[set..set + WAYS];
        if let Some(way) = ways.iter().position(|class| class.key == key) {
            return Some(&mut ways[way]);
        }
        // Each miss cools the set, so that a size which came once does not stay in the way.
        for class in &mut *ways {
            class.heat = class.heat.saturating_sub(1);
        }
        let cold = ways.iter_mut().find(|class| class.heat == 0 && class.kept == 0)?;
        *cold = Class { key, ..Class::VACANT };
        Some(cold)
    }

    #[inline]
    fn take(&mut self, key: Key, requested: u64) -> Option<Box<Owned>> {
        let class = self.claim(key)?;
        class.heat = HEAT_MAX.min(class.heat + 1);
        let last = class.kept.checked_sub(1)?;
        let mut owned = class.blocks[last].take()?;
        class.kept = last;
        self.tally.allocs += 1;
        if let Some(placed) = &mut owned.block {
            placed.requested = requested;
            self.tally.went(owned.region, placed.span.size, requested);
        }
        Some(owned)
    }

    /// Books a block, and says where it is to be put; nowhere, where it belongs to the books.
    #[inline]
    fn admit(&mut self, owned: &Owned, room: u64) -> Option<&mut Option<Box<Owned>>> {
        let placed = owned.block.as_ref()?;
        if self.classes.is_empty() || self.tally.cached() + placed.span.size > room {
            return None;
        }
        let key = Key::new(owned.region, placed.span.size);
        let set = key.ways();
        let mut ways = self.classes[set..set + WAYS].iter_mut();
        let class = ways.find(|class| class.key == key && class.heat >= HOT)?;
        let vacant = class.blocks.get_mut(class.kept)?;
        class.kept += 1;
        self.tally.frees += 1;
        self.tally.came(owned.region, placed);
        Some(vacant)
    }

    /// Takes out the blocks of the sizes that `gone` names.
    fn empty(&mut self, gone: impl Fn(&Class) -> bool, mut out: impl FnMut(Kept)) {
        for class in self.classes.iter_mut().filter(|class| gone(class)) {
            class.kept = 0;
            for owned in class.blocks.iter_mut().filter_map(Option::take) {
                let Some(placed) = owned.block else { continue };
                // The books count its release: the front has not freed it any more.
                self.tally.frees -= 1;
                self.tally.went(owned.region, placed.span.size, placed.requested);
                out((owned.region, placed));
            }
        }
    }
}

/// Where the blocks of some threads come from and go back to. Buffers hold it, so that neither
/// taking nor giving back touches a count that other threads use.
#[repr(align(128))]
pub(super) struct Home {
    pub(super) shared: Arc<Shared>,
    front: Brief<Front>,
    /// A copy of the front's figure, for who must not take its lock.
    cached: AtomicU64,
}

impl Home {
    fn new(shared: Arc<Shared>) -> Self {
        Self { shared, front: Brief::new(Front::default()), cached: AtomicU64::new(0) }
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
            let mut books = try_lock(&self.shared.books)?;
            let clock = &*self.shared.clock;
            front.empty(|_| true, |(region, placed)| books.release(region, placed, clock));
            drop(books);
        }
        self.cached.store(front.tally.cached(), Ordering::Relaxed);
        taken
    }

    /// Takes all blocks out.
    pub(super) fn empty(&self, out: &mut Vec<Kept>) {
        self.sweep(out, |_| true);
    }

    /// Halves the heat of every size and takes out the blocks of those that are no longer hot;
    /// says whether any stay.
    pub(super) fn cool(&self, out: &mut Vec<Kept>) -> bool {
        let mut front = brief(&self.front);
        for class in &mut front.classes {
            class.heat /= 2;
        }
        drop(front);
        self.sweep(out, |class| class.heat < HOT)
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

    fn sweep(&self, out: &mut Vec<Kept>, gone: impl Fn(&Class) -> bool) -> bool {
        let mut front = brief(&self.front);
        front.empty(gone, |kept| out.push(kept));
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
            (0..homes()).map(|_| Arc::new(Home::new(Arc::clone(shared)))).collect();
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
