//! The acts of a worker, in one table: a new one is a function and a line here.
//!
//! Each says in the midst of which driver calls of others it may be done: it must not wait for what
//! such a call is about.
//!
//! Invariant: an act leaves what the worker holds in order, whatever the arena answered.

mod arena;
mod graphs;
mod loans;
mod memory;
mod sleep;
mod work;

use super::world::{Act, Worker, World};
use crate::chance::Chance;

pub(super) use graphs::end_graph;

/// In the midst of what, each with more that must not be waited for than the one before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Amid {
    /// Of no driver call.
    Nothing,
    /// A call about events or streams: nothing waits for it but the end of a stream.
    Events,
    /// A commit or a decommit: who needs those granules waits.
    Commits,
    /// A move, perhaps: who wants a lease waits.
    Moves,
}

/// One of the table.
pub(super) struct Entry {
    pub(super) name: &'static str,
    weight: usize,
    /// The most that it may be in the midst of.
    amid: Amid,
    pub(super) run: fn(&World, &mut Worker) -> Act,
    /// A stream captures meanwhile, or from then on.
    pub(super) captures: bool,
    /// It may put the arena to sleep: see `World::drowsy`.
    pub(super) sleeps: bool,
}

const fn entry(
    name: &'static str,
    weight: usize,
    amid: Amid,
    run: fn(&World, &mut Worker) -> Act,
) -> Entry {
    Entry { name, weight, amid, run, captures: false, sleeps: false }
}

/// All acts.
const TABLE: &[Entry] = &[
    entry("alloc on a lane", 36, Amid::Events, memory::alloc),
    entry("alloc on no lane", 2, Amid::Events, memory::alloc_on_none),
    entry("reserve", 1, Amid::Events, memory::reserve),
    entry("alloc by address", 2, Amid::Events, memory::alloc_raw),
    entry("free by address", 2, Amid::Moves, memory::free_raw),
    entry("free", 12, Amid::Moves, memory::free),
    entry("check and free", 16, Amid::Commits, memory::finish),
    entry("resize", 4, Amid::Events, memory::resize),
    entry("pin", 2, Amid::Events, memory::pin),
    entry("unpin", 2, Amid::Moves, memory::unpin),
    entry("write", 4, Amid::Commits, work::write),
    entry("check", 6, Amid::Commits, work::check),
    entry("check by address", 1, Amid::Commits, work::check_raw),
    entry("use elsewhere", 8, Amid::Commits, work::share),
    entry("visit another stream", 6, Amid::Commits, work::visit),
    entry("lend", 3, Amid::Commits, loans::export),
    entry("foreign work", 4, Amid::Moves, loans::work),
    entry("end a loan", 4, Amid::Events, loans::end),
    entry("send", 4, Amid::Moves, work::send),
    entry("receive", 5, Amid::Moves, work::receive),
    entry("end a run", 4, Amid::Moves, work::end_run),
    entry("fresh stream", 4, Amid::Moves, work::fresh),
    entry("second lane", 2, Amid::Moves, work::second_lane),
    entry("device works on", 8, Amid::Moves, work::advance),
    entry("device does all", 1, Amid::Moves, work::run_all),
    entry("purge", 3, Amid::Events, arena::purge),
    entry("trim", 2, Amid::Events, arena::trim),
    entry("shrink", 1, Amid::Events, arena::shrink),
    entry("decay", 4, Amid::Events, arena::decay),
    entry("decay time", 1, Amid::Events, arena::decay_time),
    entry("limit", 1, Amid::Events, arena::limit),
    entry("compact", 8, Amid::Events, arena::compact),
    entry("enter", 2, Amid::Commits, arena::enter),
    entry("enter a lane", 2, Amid::Commits, sleep::enter_lane),
    entry("name a stream", 2, Amid::Moves, sleep::name_stream),
    entry("begin to enter", 1, Amid::Nothing, sleep::begin_to_enter),
    entry("leave", 8, Amid::Moves, arena::leave),
    Entry { sleeps: true, ..entry("sleep", 8, Amid::Events, sleep::sleep) },
    Entry { sleeps: true, ..entry("sleep if idle", 3, Amid::Events, sleep::sleep_if_idle) },
    entry("prepare", 2, Amid::Events, sleep::prepare),
    entry("wake", 2, Amid::Commits, sleep::wake),
    entry("set contents", 3, Amid::Commits, sleep::set_contents),
    entry("look", 2, Amid::Events, arena::look),
    Entry { captures: true, ..entry("begin a capture", 2, Amid::Nothing, graphs::begin) },
    entry("end a capture", 3, Amid::Nothing, graphs::end),
    entry("launch", 3, Amid::Commits, graphs::launch),
    entry("drop a graph", 1, Amid::Nothing, graphs::forget),
];

/// One by weight, of those that may be in the midst of this.
pub(super) fn choose(chance: &mut Chance, amid: Amid) -> &'static Entry {
    let fits = || TABLE.iter().filter(|entry| entry.amid >= amid);
    let mut left = chance.below(fits().map(|entry| entry.weight).sum());
    for entry in fits() {
        match left.checked_sub(entry.weight) {
            Some(rest) => left = rest,
            None => return entry,
        }
    }
    &TABLE[0]
}
