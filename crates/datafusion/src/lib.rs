//! A memory pool for [DataFusion](https://datafusion.apache.org) that reserves its bytes in the
//! ledger from which a service admits its requests.
//!
//! Queries and requests share one limit. While there is room, queries take it. When memory is short
//! or requests wait, operators that can spill are denied growth, so they write to disk and release
//! what they hold.
//!
//! ```
//! use std::sync::Arc;
//! use datafusion_execution::runtime_env::RuntimeEnvBuilder;
//! use lowtide_admission::{Admission, ByteSize};
//! use lowtide_datafusion::AdmissionMemoryPool;
//!
//! # fn main() -> datafusion_common::Result<()> {
//! let admission = Admission::with_limit(ByteSize::gib(2)); // or `Memory::admission`
//! let pool = AdmissionMemoryPool::new(admission).with_min(ByteSize::mib(64));
//! let runtime = RuntimeEnvBuilder::new().with_memory_pool(Arc::new(pool)).build_arc()?;
//! # Ok(())
//! # }
//! ```
//!
//! # Limits
//!
//! * DataFusion has no call that makes an operator spill. An operator that is denied spills when it
//!   grows next; one that only holds memory, such as a merge or the build side of a join, holds it
//!   until it ends.
//! * The pool sees what operators report, which is less than they use: not the batches that flow
//!   between operators, the buffers of readers and writers, nor what the allocator adds. lowtide
//!   measures that difference: its correction factor, 1 to 5, multiplies the bytes of the pool and
//!   of requests, so less is admitted the more memory is used per reserved byte. An
//!   [`Admission`](lowtide_admission::Admission) with a fixed limit measures nothing; leave room
//!   for the difference there.
//! * If a handler polls a query, the memory that the query allocates then is measured as that of
//!   the request too, and counts twice. Run the query in a task of its own, and send its batches to
//!   the handler.

mod denied;
mod pool;

pub use denied::{Denied, DenyReason};
pub use pool::{AdmissionMemoryPool, PoolStats};

/// The README's code, compiled.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
