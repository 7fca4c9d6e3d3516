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
    /// The bytes that it hands to others.
    pub(crate) handed: usize,
    /// The client reads the answer late.
    pub(crate) reads_late: bool,
}

const fn upload(name: &'static str, path: &'static str, mib: usize, peak: usize) -> Case {
    let (upload, peak) = (Upload::Letters(mib * MIB), Peak::Bytes(peak * MIB));
    Case { name, path, upload, peak, handed: 0, reads_late: false }
}

const fn bare(name: &'static str, path: &'static str, peak: usize) -> Case {
    Case { upload: Upload::Nothing, ..upload(name, path, 0, peak) }
}

const fn late(name: &'static str, path: &'static str, peak: usize) -> Case {
    Case { reads_late: true, ..bare(name, path, peak) }
}

/// All cases.
pub(crate) const CASES: [Case; 22] = [
    upload("collects 1 MiB", "collect", 1, 2),
    upload("collects 5 MiB", "collect", 5, 10),
    upload("collects 20 MiB", "collect", 20, 40),
    upload("reads 1 MiB into a prepared Vec", "prepared", 1, 1),
    upload("reads 20 MiB into a prepared Vec", "prepared", 20, 20),
    // A Vec doubles its capacity: 16 MiB while 32 are allocated.
    upload("reads 20 MiB into a Vec that grows", "growing", 20, 48),
    upload("keeps 5 MiB of frames", "frames", 5, 5),
    upload("parses 5 MiB of JSON", "json", 0, 0).parsed(5 * MIB),
    upload("reads 20 MiB and drops them", "drain", 20, 0),
    upload("answers with its body, 20 MiB", "pass", 20, 0).streamed(),
    bare("pushes 20 MiB onto a Vec", "pushes", 48),
    bare("frees 20 MiB in the same poll", "transient", 20),
    bare("frees 20 times 1 MiB in a poll", "churn", 1),
    bare("spawn_blocking, scoped", "blocking", 10),
    bare("four tasks, scoped", "tasks", 12),
    bare("gives 8 MiB to another task", "given", 8).handed(8 * MIB),
    bare("takes 8 MiB from another task", "taken", 8),
    bare("puts 4 MiB into a cache", "cached", 4),
    late("answers 20 MiB", "answer", 20),
    late("answers 20 MiB of a constant", "answer_constant", 0),
    late("streams 20 MiB in pieces of 256 KiB", "stream", 0).streamed(),
    late("streams 20 MiB in pieces of 4 KiB", "stream_small", 0).streamed(),
];

impl Case {
    const fn parsed(mut self, bytes: usize) -> Self {
        (self.upload, self.peak) = (Upload::Json(bytes), Peak::Parsed);
        self
    }

    const fn streamed(mut self) -> Self {
        self.peak = Peak::Unknown;
        self
    }

    const fn handed(mut self, bytes: usize) -> Self {
        self.handed = bytes;
        self
    }

    /// The case without memory of the handler: it reads the body and drops it, if there is one.
    pub(crate) const fn baseline(mut self) -> Self {
        self.path = if self.upload.bytes() > 0 { "drain" } else { "hello" };
        self.reads_late = false;
        self
    }
}
