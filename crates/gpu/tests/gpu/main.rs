//! The device arena through its public interface: over host memory, over the simulation of the
//! driver, and against models of its peers.
//!
//! Tests that read figures of the whole process run in a child process each (`test_fork`).

mod arena;
#[path = "../../../../benches/index/chance.rs"]
mod chance;
mod compact;
mod index;
mod interop;
mod ladder;
mod own_driver;
mod peers;
mod pinned_process;
mod planned;
mod process;
mod record;
mod replay_peers;
mod schedules;
mod segments;
mod sleep;
mod streams;
