//! Acts about graphs: a capture is begun, ends, is launched again and again, and dropped.
//!
//! Its stream is its own, so that nobody else's work is captured; the buffers whose addresses are
//! in the graph are pinned, and kept for as long as it is there.
//!
//! Invariant: while nobody takes turns, a capture begins and ends within one act.

use std::sync::atomic::Ordering;

use lowtide_gpu::{Contents, Region};

use super::super::world::{Act, Held, Recorded, Worker, World};
use super::memory::held;

/// Graphs of a worker at most.
const GRAPHS_MAX: usize = 3;

pub(super) fn begin(world: &World, worker: &mut Worker) -> Act {
    let open = worker.recorded.iter().any(|recorded| recorded.graph.is_none());
    if !world.schedule.captures || open || worker.recorded.len() == GRAPHS_MAX {
        return Ok(());
    }
    let home = world.track()?;
    // What is queued while it captures is queued under this one as well.
    let Some(_lease) = world.take(home.lane.enter())? else { return Ok(()) };
    let Some(mut first) = buffer(world, worker, &home)? else { return Ok(()) };
    // Something that others may want while the stream captures.
    if let Some(mut gone) = buffer(world, worker, &home)? {
        world.fill(&mut gone, worker.mark())?;
    }
    world.fill(&mut first, worker.mark())?;
    world.insist(|sim| sim.begin_capture(home.stream()))?;
    world.capturing.fetch_add(1, Ordering::Relaxed);
    world.check(&first, &home)?;
    let mut buffers = vec![first];
    // Memory that is had while the stream captures, and that the graph writes.
    if let Some(mut second) = buffer(world, worker, &home)? {
        world.fill(&mut second, worker.mark())?;
        world.check(&second, &home)?;
        buffers.push(second);
    }
    worker.recorded.push(Recorded { graph: None, buffers, home });
    if world.schedule.turns { Ok(()) } else { end(world, worker) }
}

/// A pinned buffer of a stream that captures, or will.
fn buffer(
    world: &World,
    worker: &mut Worker,
    home: &super::super::world::Track,
) -> Result<Option<Held>, String> {
    let size = 1 + worker.chance.below(4096);
    let Some(buffer) = world.take(home.lane.alloc(size, Region::Dynamic))? else {
        return Ok(None);
    };
    let pin = world.take(buffer.pin())?;
    let mut held = Held { pin, ..held(world, buffer, home.clone()) };
    // The graph checks it again and again.
    held.buffer.set_contents(Some(Contents::Keep)).map_err(|error| error.to_string())?;
    held.keeps = true;
    Ok(Some(held))
}

pub(super) fn end(world: &World, worker: &mut Worker) -> Act {
    let open = worker.recorded.iter_mut().find(|recorded| recorded.graph.is_none());
    let Some(recorded) = open else { return Ok(()) };
    world.take(recorded.home.lane.end_run())?;
    close(world, recorded)
}

fn close(world: &World, recorded: &mut Recorded) -> Act {
    let stream = recorded.home.stream();
    let ended = world.sim.end_capture(stream);
    world.capturing.fetch_sub(1, Ordering::Relaxed);
    let graph = ended.map_err(|error| format!("the capture was spoiled: {error}"))?;
    recorded.graph = Some(graph);
    let Some(_lease) = world.take(recorded.home.lane.enter())? else { return Ok(()) };
    world.insist(|sim| sim.graph_launch(graph, stream))
}

pub(super) fn launch(world: &World, worker: &mut Worker) -> Act {
    let graph = worker.recorded.iter().find_map(|recorded| Some((recorded.graph?, recorded)));
    let Some((graph, recorded)) = graph else { return Ok(()) };
    let Some(_lease) = world.take(recorded.home.lane.enter())? else { return Ok(()) };
    world.insist(|sim| sim.graph_launch(graph, recorded.home.stream()))
}

pub(super) fn forget(world: &World, worker: &mut Worker) -> Act {
    let whole = worker.recorded.iter().position(|recorded| recorded.graph.is_some());
    let Some(nth) = whole else { return Ok(()) };
    let recorded = worker.recorded.swap_remove(nth);
    end_graph(world, worker, recorded)
}

/// Gives a graph up; its buffers are as any others from then on.
pub(in super::super) fn end_graph(
    world: &World,
    worker: &mut Worker,
    mut recorded: Recorded,
) -> Act {
    if recorded.graph.is_none() {
        close(world, &mut recorded)?;
    }
    if let Some(graph) = recorded.graph {
        world.insist(|sim| sim.graph_destroy(graph))?;
    }
    worker.held.append(&mut recorded.buffers);
    worker.later.push(recorded.home);
    Ok(())
}
