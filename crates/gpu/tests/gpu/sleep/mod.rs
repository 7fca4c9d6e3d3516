//! Sleep and wake of an arena, over the simulation of a device and over host memory: what is kept,
//! what is refused, and what a fault at any call leaves behind.

mod acts;
mod budget;
mod commits;
mod copies;
mod faults;
mod handles;
mod host;
mod idle;
mod known_bugs;
mod mixed;
mod moments;
mod sharp;
mod states;
mod stores;
mod streams;
mod support;
mod waiting;
