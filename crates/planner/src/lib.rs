//! The lifetime planner: computes offsets for buffers with known lifetimes, with the smallest peak.
//!
//! Planned memory is reserved once and then served without a search, by looking up offsets. A
//! [`Problem`] is a set of buffers with sizes, alignments and lifetimes, some of which share
//! memory; a [`Planner`] computes a [`Plan`] for it within a budget. This crate allocates no
//! device memory and runs nothing: an arena holds and serves the plan
//! (`lowtide_gpu::DeviceArena::reserve_plan`).
//!
//! Steps: the problem is split in time and reduced (`part`). Dives (`dive`) and a portfolio of
//! rules (`order`) produce a first plan, in a sequence that `solve` decides; if the budget lets all
//! rules run, it is no worse than those of GGML, ONNX Runtime, TFLite and XLA, whose rules are
//! among them. Then an exact search (`probe`, `search`) probes heights between the lower bound and
//! the best so far. The result is verified by code that is independent of the solver (`verify`).
//!
//! ```
//! use lowtide_planner::ByteSize;
//! use lowtide_planner::clock::SystemClock;
//! use lowtide_planner::{Demand, Planner, Problem, Role};
//!
//! let mut problem = Problem::new();
//! let input = Demand { role: Role::Input, ..Demand::new("tokens", ByteSize::kib(4), 0..1) };
//! let input = problem.add(input)?;
//! let hidden = problem.add(Demand::new("hidden", ByteSize::kib(64), 0..3))?;
//! let attention = problem.add(Demand::new("attention", ByteSize::kib(32), 1..3))?;
//! let output = problem.add(Demand::new("output", ByteSize::kib(64), 2..4))?;
//! problem.reuse(output, hidden)?; // written in its place, at the step that reads it last
//!
//! let plan = Planner::new(&SystemClock::new()).plan(&problem)?;
//! assert_eq!(plan.peak(), ByteSize::kib(96)); // and not 164
//! assert_eq!(plan.offset(output), plan.offset(hidden));
//! assert_eq!(plan.offset(input), plan.offset(attention)); // never live together
//! # Ok::<(), lowtide_planner::PlanError>(())
//! ```
//!
//! Invariants: every returned plan is verified; without a time limit (one of
//! `Duration::MAX`) the same problem and the same budget of nodes produce the same plan.
#![cfg_attr(docsrs, feature(doc_cfg))]

mod bump;
mod csv;
mod dive;
mod error;
mod graph;
mod order;
mod part;
mod planned;
mod probe;
mod problem;
mod search;
mod shape;
mod solve;
mod verify;

pub use lowtide_core::{ByteSize, clock};

pub use bump::{Bump, packed};
pub use error::PlanError;
pub use graph::Graph;
pub use order::Heuristic;
pub use planned::{Plan, PlanCache, PlannedPlace};
pub use problem::{BufferId, Demand, Gap, Problem, Role};
pub use solve::Planner;

/// The README's code, compiled.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
