//! The lifetime planner: offsets for buffers whose lifetimes are known, with the smallest peak.
//!
//! Memory that is planned is reserved once and then served without a search: who runs the plan
//! looks offsets up. A [`Problem`] is buffers with sizes, alignments and lifetimes, some of which
//! share memory; a [`Planner`] makes a [`Plan`] of it within a budget. It allocates no device
//! memory and runs nothing: an arena holds and serves it
//! ([`DeviceArena::reserve_plan`](super::DeviceArena::reserve_plan)).
//!
//! How: the problem is taken apart in time and made small (`part`); dives (`dive`) and a portfolio
//! of rules (`order`, `place`) give a first plan, which is no worse than those of GGML, ONNX
//! Runtime, TFLite and XLA where the budget lets all rules run, since theirs are among them; then
//! heights between the lower bound and the best so far are probed by an exact search (`probe`,
//! `search`, `floors`). Whatever comes of it is verified by code that knows nothing of the solver
//! (`verify`).
//!
//! ```
//! use lowtide::ByteSize;
//! use lowtide::clock::SystemClock;
//! use lowtide::device::plan::{Demand, Planner, Problem, Role};
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
//! # Ok::<(), lowtide::device::plan::PlanError>(())
//! ```
//!
//! Invariants: no plan leaves here that was not verified; without a limit of time (a `Budget::time`
//! of `Duration::MAX`) the same problem and the same budget of nodes give the same plan.

mod bump;
mod chance;
mod csv;
mod dive;
mod error;
mod floors;
mod graph;
mod kinds;
mod order;
mod part;
mod place;
mod planned;
mod probe;
mod problem;
mod reuse;
mod search;
mod shape;
mod solve;
mod totals;
mod union;
mod verify;
mod walls;

pub use bump::{Bump, BumpFull, packed};
pub use csv::{CsvError, CsvFault, CsvWriteError, Ends};
pub use error::{PlanError, PlanFault};
pub use graph::{Graph, ValueId};
pub use kinds::{JointPlan, Kind};
pub use order::Heuristic;
pub use planned::{Place, Plan};
pub use problem::{BufferId, Demand, Gap, Problem, Role, Window};
pub use reuse::{Fingerprint, PlanCache, Unserved};
pub use solve::{Budget, Planner};
