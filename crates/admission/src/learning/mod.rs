//! Learns the need of requests from the memory that earlier requests of their route held.
//!
//! The caller identifies a route by a number and measures the requests. [`Needs`] turns measured
//! bytes into reservations, `Trials` limits the requests of a route until its need is known, and
//! `Routes` bounds the number of records. The tower layer of `lowtide` and the simulated
//! controller use it.

mod need;
mod routes;
mod slow_start;
mod trial;

pub use need::{Compared, Kind, LESSONS_MIN, Needs, Room};
pub use routes::ROUTES_MAX;
pub use slow_start::{LASTS, TooManyRunning};
pub use trial::Trial;
