//! The cases: handlers, their bodies, and what their requests hold by construction.

use serde::{Deserialize, Serialize};

/// Bytes of a MiB.
pub(crate) const MIB: usize = 1 << 20;

/// The body of a request.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) enum Upload {
    Nothing,
    Letters(usize),
    Json(usize),
}

impl Upload {
    pub(crate) const fn bytes(self) -> usize {
        match self {
            Self::Nothing => 0,
            Self::Letters(bytes) | Self::Json(bytes) => bytes,
        }
    }
}

/// The bytes that a request holds at its peak.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Peak {
    Bytes(usize),
    /// Depends on the speed of the connection.
    Unknown,
    /// The body, and what parsing it needs, which is measured apart.
    Parsed,
}

/// Requests of one kind.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Case {
    pub(crate) name: &'static str,
    /// The path of its handler.
    pub(crate) path: &'static str,
    pub(crate) upload: Upload,
    pub(crate) peak: Peak,
}

const fn case(name: &'static str, path: &'static str, upload: Upload, peak: Peak) -> Case {
    Case { name, path, upload, peak }
}

use Peak::{Bytes, Parsed, Unknown};
use Upload::{Json, Letters, Nothing};

/// All cases.
pub(crate) const CASES: [Case; 22] = [
    case("collects 1 MiB", "collect", Letters(MIB), Bytes(2 * MIB)),
    case("collects 5 MiB", "collect", Letters(5 * MIB), Bytes(10 * MIB)),
    case("collects 20 MiB", "collect", Letters(20 * MIB), Bytes(40 * MIB)),
    case("reads 1 MiB into a prepared Vec", "prepared", Letters(MIB), Bytes(MIB)),
    case("reads 20 MiB into a prepared Vec", "prepared", Letters(20 * MIB), Bytes(20 * MIB)),
    // A Vec doubles its capacity: 16 MiB while 32 are allocated.
    case("reads 20 MiB into a Vec that grows", "growing", Letters(20 * MIB), Bytes(48 * MIB)),
    case("keeps 5 MiB of frames", "frames", Letters(5 * MIB), Bytes(5 * MIB)),
    case("parses 5 MiB of JSON", "json", Json(5 * MIB), Parsed),
    case("reads 20 MiB and drops them", "drain", Letters(20 * MIB), Bytes(0)),
    case("answers with its body, 20 MiB", "pass", Letters(20 * MIB), Unknown),
    case("pushes 20 MiB onto a Vec", "pushes", Nothing, Bytes(48 * MIB)),
    case("frees 20 MiB in the same poll", "transient", Nothing, Bytes(20 * MIB)),
    case("frees 20 times 1 MiB in a poll", "churn", Nothing, Bytes(MIB)),
    case("spawn_blocking, scoped", "blocking", Nothing, Bytes(10 * MIB)),
    case("four tasks, scoped", "tasks", Nothing, Bytes(12 * MIB)),
    case("gives 8 MiB to another task", "given", Nothing, Bytes(8 * MIB)),
    case("takes 8 MiB from another task", "taken", Nothing, Bytes(8 * MIB)),
    case("puts 4 MiB into a cache", "cached", Nothing, Bytes(4 * MIB)),
    // The clients read these answers late.
    case("answers 20 MiB", "answer", Nothing, Bytes(20 * MIB)),
    case("answers 20 MiB of a constant", "answer_constant", Nothing, Bytes(0)),
    case("streams 20 MiB in pieces of 256 KiB", "stream", Nothing, Unknown),
    case("streams 20 MiB in pieces of 4 KiB", "stream_small", Nothing, Unknown),
];

impl Case {
    /// Returns `true` if its client reads the answer late.
    pub(crate) fn reads_late(&self) -> bool {
        self.path.starts_with("answer") || self.path.starts_with("stream")
    }

    /// The bytes that it hands to others.
    pub(crate) fn handed(&self) -> usize {
        if self.path == "given" { 8 * MIB } else { 0 }
    }

    /// The case without memory of the handler: it reads the body and drops it, if there is one.
    pub(crate) fn baseline(mut self) -> Self {
        self.path = if self.upload.bytes() > 0 { "drain" } else { "hello" };
        self
    }
}
