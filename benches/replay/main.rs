//! Replay: what recorded allocations of model code need of the device, in our arena and in peers.
fn main() {}
