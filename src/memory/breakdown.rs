//! Divides the host's physical memory among its holders.
//!
//! Called for the endpoints, the verdict and the error about exhaustion. It relies on a snapshot
//! and on the memory of running requests; it measures nothing itself.
//!
//! Invariant: `sum of parts = physical`. The figures are read one after the other and by different
//! counters, so a part is cut if the parts before it leave less.

use std::fmt;

use crate::bytes::ByteSize;
use lowtide_heap::{ARENA_NAME_MAX, HeapSnapshot};

use super::snapshot::MemorySnapshot;

lowtide_core::named_enum! {
    /// The kind of a holder of host memory.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    #[non_exhaustive]
    pub enum PartKind {
        /// Heap blocks and frames of running requests, as measured.
        Requests = "requests",
        /// A loaded resource: its heap arena, and memory outside the heap as measured at its load.
        Resource = "resource",
        /// Live heap blocks that belong to neither: caches and state of the application,
        /// connections, leaks.
        HeapLive = "heap_live",
        /// Freed blocks in jemalloc's thread caches.
        ThreadCaches = "thread_caches",
        /// Free parts of heap pages that contain live or cached blocks. A purge does not release
        /// them.
        Fragmentation = "fragmentation",
        /// Free heap pages, dirty and muzzy, which a purge releases, and those that the kernel does
        /// not take back.
        FreePages = "free_pages",
        /// jemalloc's metadata.
        HeapMetadata = "heap_metadata",
        /// A device arena in host memory, or a pinned pool: its committed memory.
        Arena = "arena",
        /// Contents of sleeping arenas in host memory, and memory kept for the next sleep.
        Offloaded = "offloaded",
        /// Everything else: heaps of C code, stacks, and other processes of the cgroup.
        Untracked = "untracked",
    }
}

impl PartKind {
    const fn description(self) -> &'static str {
        match self {
            Self::Requests => "running requests",
            Self::Resource => "resource",
            Self::HeapLive => "live heap outside requests and resources",
            Self::ThreadCaches => "thread caches",
            Self::Fragmentation => "heap fragmentation",
            Self::FreePages => "free heap pages",
            Self::HeapMetadata => "heap metadata",
            Self::Arena => "arena",
            Self::Offloaded => "contents of sleeping arenas",
            Self::Untracked => "untracked memory",
        }
    }
}

/// A part of the host's physical memory.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct MemoryPart {
    /// The kind of its holder.
    pub kind: PartKind,
    /// The name of a resource or arena; otherwise `None`.
    pub name: Option<String>,
    /// Its bytes.
    pub bytes: ByteSize,
}

impl fmt::Display for MemoryPart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.kind.description())?;
        if let Some(name) = &self.name {
            write!(f, " {name:?}")?;
        }
        write!(f, " {}", self.bytes)
    }
}

/// Formats parts with this separator.
pub(super) fn list(parts: &[&MemoryPart], separator: &str) -> String {
    parts.iter().map(ToString::to_string).collect::<Vec<_>>().join(separator)
}

/// The host's physical memory by holder.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Breakdown {
    /// The parts that are not empty. Their sum is the physical memory.
    pub parts: Vec<MemoryPart>,
    /// The rest up to the limit; `None` without a limit.
    pub headroom: Option<ByteSize>,
}

/// The maximum number of resources, and of arenas, with a part of their own. The others share one.
const NAMED_MAX: usize = 32;

impl Breakdown {
    /// Divides the physical memory of a snapshot. `requests` are the bytes that running requests
    /// hold.
    pub(super) fn new(snapshot: &MemorySnapshot, requests: ByteSize) -> Self {
        let mut rest = Rest { bytes: snapshot.physical, parts: Vec::new() };
        let heap = snapshot.heap.unwrap_or_default();
        let mut live = heap.live;
        rest.take_from(&mut live, PartKind::Requests, None, requests);
        let mut foreign = Vec::new();
        #[cfg(feature = "device")]
        let arenas = snapshot.devices.on_host();
        #[cfg(not(feature = "device"))]
        let arenas = Vec::<(String, ByteSize)>::new();
        let committed: ByteSize = arenas.iter().map(|(_, committed)| *committed).sum();
        let loaded = snapshot.resources.iter().filter(|resource| resource.loaded);
        for resource in loaded.take(NAMED_MAX) {
            // The name of an arena is as much of the resource's name as fits.
            let is_of = |name: &str| {
                name == &*resource.name
                    || (name.len() + 4 > ARENA_NAME_MAX && resource.name.starts_with(name))
            };
            let arena = snapshot.heap_arenas.iter().find(|(name, _)| is_of(name));
            let (in_heap, active) = arena.map(|(_, it)| (it.live, it.active)).unwrap_or_default();
            rest.take_from(&mut live, PartKind::Resource, Some(&resource.name), in_heap);
            let measured = resource.measured.unwrap_or_default().host;
            // Measured by the growth of the process, which includes arenas in host memory.
            foreign
                .push((&resource.name, measured.saturating_sub(active).saturating_sub(committed)));
        }
        rest.take(PartKind::HeapLive, None, live);
        let HeapSnapshot { thread_caches, active, metadata, .. } = heap;
        rest.take(PartKind::ThreadCaches, None, thread_caches);
        let filled = heap.live.saturating_add(thread_caches);
        rest.take(PartKind::Fragmentation, None, active.saturating_sub(filled));
        // With the second, of which the dirty and muzzy ones are a part, a purge releases none.
        rest.take(PartKind::FreePages, None, heap.purgeable().max(snapshot.unreleased));
        rest.take(PartKind::HeapMetadata, None, metadata);
        for (name, committed) in arenas.iter().take(NAMED_MAX) {
            rest.take(PartKind::Arena, Some(name), *committed);
        }
        let others = arenas.iter().skip(NAMED_MAX).map(|(_, committed)| *committed).sum();
        rest.take(PartKind::Arena, None, others);
        #[cfg(feature = "device")]
        rest.take(PartKind::Offloaded, None, snapshot.devices.offloaded());
        for (name, bytes) in foreign {
            rest.take(PartKind::Resource, Some(name), bytes);
        }
        let bytes = rest.bytes;
        rest.take(PartKind::Untracked, None, bytes);
        let limit = snapshot.signal.limit.bytes;
        let headroom = (limit != ByteSize::MAX).then(|| limit.saturating_sub(snapshot.physical));
        Self { parts: rest.parts, headroom }
    }

    /// Returns the bytes of all parts of a kind.
    #[must_use]
    pub fn total(&self, kind: PartKind) -> ByteSize {
        self.parts.iter().filter(|part| part.kind == kind).map(|part| part.bytes).sum()
    }

    /// Returns the bytes by the label `part` in metrics. Their sum is the limit, or the physical
    /// memory if there is no limit or it is exceeded.
    pub(super) fn by_label(&self) -> [(&'static str, ByteSize); 8] {
        use PartKind as Kind;
        let sum = |kinds: &[Kind]| kinds.iter().map(|kind| self.total(*kind)).sum();
        [
            ("requests", sum(&[Kind::Requests])),
            ("resources", sum(&[Kind::Resource])),
            ("heap", sum(&[Kind::HeapLive])),
            ("fragmentation", sum(&[Kind::ThreadCaches, Kind::Fragmentation, Kind::HeapMetadata])),
            ("purgeable", sum(&[Kind::FreePages])),
            ("arenas", sum(&[Kind::Arena, Kind::Offloaded])),
            ("other", sum(&[Kind::Untracked])),
            ("headroom", self.headroom.unwrap_or_default()),
        ]
    }

    /// Returns the largest parts.
    pub(super) fn largest(&self, count: usize) -> Vec<&MemoryPart> {
        let mut parts: Vec<_> = self.parts.iter().collect();
        parts.sort_by_key(|part| std::cmp::Reverse(part.bytes));
        parts.truncate(count);
        parts
    }
}

/// The memory that is not divided yet.
struct Rest {
    bytes: ByteSize,
    parts: Vec<MemoryPart>,
}

impl Rest {
    /// Adds a part of at most the rest. A second part of the same holder is added to the first.
    fn take(&mut self, kind: PartKind, name: Option<&str>, bytes: ByteSize) {
        let bytes = bytes.min(self.bytes);
        if bytes.is_zero() {
            return;
        }
        self.bytes = self.bytes.saturating_sub(bytes);
        let same = |part: &&mut MemoryPart| part.kind == kind && part.name.as_deref() == name;
        match self.parts.iter_mut().find(same) {
            Some(part) => part.bytes = part.bytes.saturating_add(bytes),
            None => self.parts.push(MemoryPart { kind, name: name.map(str::to_owned), bytes }),
        }
    }

    /// Adds a part of at most `of`, and subtracts it from that.
    fn take_from(
        &mut self,
        of: &mut ByteSize,
        kind: PartKind,
        name: Option<&str>,
        bytes: ByteSize,
    ) {
        let bytes = bytes.min(*of);
        *of = of.saturating_sub(bytes);
        self.take(kind, name, bytes);
    }
}

#[cfg(all(test, not(lowtide_loom)))]
mod tests {
    use super::*;

    /// Figures of different moments contradict each other; the parts still add up.
    #[test]
    fn the_parts_add_up_whatever_the_figures_are() {
        let sizes = [0, 1, 7, 100, 300].map(ByteSize::mib);
        let mut random = 0x2545_F491_4F6C_DD1D_u64;
        let mut pick = || {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            sizes[usize::try_from(random % 5).expect("small")]
        };
        for _ in 0..2_000 {
            let physical = pick();
            let mut rest = Rest { bytes: physical, parts: Vec::new() };
            let mut live = pick();
            rest.take_from(&mut live, PartKind::Requests, None, pick());
            rest.take_from(&mut live, PartKind::Resource, Some("model"), pick());
            rest.take(PartKind::HeapLive, None, live);
            rest.take(PartKind::Resource, Some("model"), pick());
            let bytes = rest.bytes;
            rest.take(PartKind::Untracked, None, bytes);
            let parts = Breakdown { parts: rest.parts, headroom: None };
            let sum: ByteSize = parts.by_label().iter().map(|(_, bytes)| *bytes).sum();
            assert_eq!(sum, physical, "{parts:?}");
            assert!(parts.parts.iter().filter(|part| part.kind == PartKind::Resource).count() <= 1);
        }
    }
}
