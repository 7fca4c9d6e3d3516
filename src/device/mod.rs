//! Device memory: drivers and the arena over them. Knows no service and no policy.

pub mod driver;
mod index;
