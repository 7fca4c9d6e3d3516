//! The values of a problem: buffers with sizes, lifetimes and alignments.
//!
//! A time is a step of the plan's user: an index into a graph's nodes, or a tick of a trace. A
//! lifetime is half-open: `3..5` is live at steps 3 and 4. Any value can be built here;
//! `Problem::add` checks it.

use std::fmt;
use std::ops::Range;

use lowtide_core::bytes::ByteSize;

/// The number of a buffer of a problem, in the order of addition.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BufferId(pub(super) u32);

impl BufferId {
    /// Returns the number, from 0.
    #[must_use]
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// A part of a buffer: the bytes from `low` to before `high`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ByteWindow {
    /// The first byte.
    pub low: u64,
    /// One past the last byte.
    pub high: u64,
}

impl fmt::Display for ByteWindow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.low, self.high)
    }
}

/// A part of a lifetime in which only a window of the buffer is needed, or none of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gap {
    /// The steps, half-open.
    pub span: Range<i64>,
    /// The bytes still needed; `None` for none.
    pub window: Option<ByteWindow>,
}

/// The relation of a buffer to the outside of the plan.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Role {
    /// Written first and read last within the plan.
    #[default]
    Inner,
    /// Present before the first step: live from then on, so no two inputs share memory.
    Input,
    /// Read after the last step: live until then, so its memory is not reused.
    Output,
    /// Both input and output: a trained weight, or a cache.
    Through,
    /// Memory owned by the caller: it gets no offset.
    External,
}

/// A buffer to plan: its size, lifetime and constraints.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Demand {
    /// The name, for errors and drawings; it need not be unique.
    pub name: String,
    /// The size; zero is allowed.
    pub size: ByteSize,
    /// The alignment of its offset in bytes; 1 for none.
    pub align: u64,
    /// The steps at which it is live, half-open; may be empty.
    pub live: Range<i64>,
    /// Parts of `live` in which less of the buffer is needed, in order.
    pub gaps: Vec<Gap>,
    /// A fixed offset, if any.
    pub offset: Option<u64>,
    /// The relation to the outside of the plan.
    pub role: Role,
}

impl Demand {
    /// Creates a buffer of this size that is live at these steps, without alignment and gaps.
    #[must_use]
    pub fn new(name: impl Into<String>, size: ByteSize, live: Range<i64>) -> Self {
        let (align, gaps, offset) = (1, Vec::new(), None);
        Self { name: name.into(), size, align, live, gaps, offset, role: Role::Inner }
    }
}
