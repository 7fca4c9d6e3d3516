//! Idle.
fn main() {}
