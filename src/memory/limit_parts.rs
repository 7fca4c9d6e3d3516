//! Where the limit of host memory goes: parts that add up to it.
//!
//! Pure arithmetic over one snapshot. The figures come from different sources (jemalloc, the
//! kernel, admission), so each part is at most what those before it leave of physical memory.
//!
//! Invariant: `requests + resources + heap + fragmentation + purgeable + arenas + other + headroom
//! = max(limit, physical)`, or `physical` without a limit.

use crate::bytes::ByteSize;
use lowtide_heap::{ARENA_NAME_MAX, HeapSnapshot};

use super::snapshot::MemorySnapshot;

/// The parts of the limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct LimitParts {
    /// Live heap memory of running measured requests.
    requests: ByteSize,
    /// Live heap memory in the arenas of loaded resources.
    resources: ByteSize,
    /// The other live blocks of the heap.
    heap: ByteSize,
    /// Heap memory that is neither live nor purgeable: holes, thread caches, metadata.
    fragmentation: ByteSize,
    /// Dirty and muzzy pages.
    purgeable: ByteSize,
    /// Memory committed by device arenas in host memory.
    arenas: ByteSize,
    /// The rest of physical memory: stacks, mapped files, heaps of C code, other processes.
    other: ByteSize,
    /// The rest of the limit.
    headroom: ByteSize,
}

/// The figures from which the parts are computed.
#[derive(Clone, Copy, Debug, Default)]
struct Figures {
    physical: ByteSize,
    limit: Option<ByteSize>,
    live: ByteSize,
    resident: ByteSize,
    /// Dirty and muzzy pages of the heap.
    unused: ByteSize,
    requests: ByteSize,
    resources: ByteSize,
    arenas: ByteSize,
}

impl LimitParts {
    fn of(figures: Figures) -> Self {
        let mut left = figures.physical;
        let mut take = |bytes: ByteSize| {
            let bytes = bytes.min(left);
            left = left.saturating_sub(bytes);
            bytes
        };
        let live = take(figures.live);
        let arenas = take(figures.arenas);
        let retained = figures.resident.saturating_sub(figures.live);
        let purgeable = figures.unused.min(retained);
        let fragmentation = take(retained.saturating_sub(purgeable));
        let purgeable = take(purgeable);
        let requests = figures.requests.min(live);
        let resources = figures.resources.min(live.saturating_sub(requests));
        Self {
            requests,
            resources,
            heap: live.saturating_sub(requests).saturating_sub(resources),
            fragmentation,
            purgeable,
            arenas,
            other: left,
            headroom: figures.limit.unwrap_or_default().saturating_sub(figures.physical),
        }
    }

    /// Returns each part with its name in metrics.
    pub(super) fn by_name(self) -> impl Iterator<Item = (&'static str, ByteSize)> {
        [
            ("requests", self.requests),
            ("resources", self.resources),
            ("heap", self.heap),
            ("fragmentation", self.fragmentation),
            ("purgeable", self.purgeable),
            ("arenas", self.arenas),
            ("other", self.other),
            ("headroom", self.headroom),
        ]
        .into_iter()
    }
}

impl MemorySnapshot {
    /// Returns the parts of the limit; `requests` is the memory that running requests hold.
    pub(super) fn limit_parts(&self, requests: ByteSize) -> LimitParts {
        let of_heap =
            |bytes: fn(&HeapSnapshot) -> ByteSize| self.heap.as_ref().map_or(ByteSize::ZERO, bytes);
        // The name of an arena is as much of the resource's name as fits.
        let is_of = |name: &str, resource: &str| {
            resource == name || (name.len() + 4 > ARENA_NAME_MAX && resource.starts_with(name))
        };
        let is_resource =
            |name: &str| self.resources.iter().any(|resource| is_of(name, &resource.name));
        let of_resources = self.heap_arenas.iter().filter(|(name, _)| is_resource(name));
        let arenas = self.devices.on_host();
        LimitParts::of(Figures {
            physical: self.physical,
            limit: self.signal.limit.is_known().then_some(self.signal.limit.bytes),
            live: of_heap(|heap| heap.live),
            resident: of_heap(|heap| heap.resident),
            unused: of_heap(|heap| heap.dirty.saturating_add(heap.muzzy)),
            requests,
            resources: of_resources.map(|(_, arena)| arena.live).sum(),
            arenas: arenas.into_iter().map(|(_, committed)| committed).sum(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: fn(u64) -> ByteSize = ByteSize::mib;

    #[test]
    fn a_container_with_all_kinds_of_memory_is_divided() {
        let parts = LimitParts::of(Figures {
            physical: MIB(200),
            limit: Some(MIB(256)),
            live: MIB(80),
            resident: MIB(120),
            unused: MIB(25),
            requests: MIB(30),
            resources: MIB(10),
            arenas: MIB(50),
        });
        let expected = [
            ("requests", 30),
            ("resources", 10),
            ("heap", 40),
            ("fragmentation", 15),
            ("purgeable", 25),
            ("arenas", 50),
            ("other", 30),
            ("headroom", 56),
        ];
        let expected = expected.map(|(name, mib)| (name, MIB(mib)));
        assert_eq!(parts.by_name().collect::<Vec<_>>(), expected);
    }

    /// Figures of different moments contradict each other; the parts still add up.
    #[test]
    fn the_parts_add_up_whatever_the_figures_are() {
        let sizes = [0, 1, 7, 100, 300].map(MIB);
        let mut random = 0x2545_F491_4F6C_DD1D_u64;
        let mut pick = || {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            sizes[usize::try_from(random % 5).expect("small")]
        };
        for _ in 0..2_000 {
            let figures = Figures {
                physical: pick(),
                limit: Some(pick()).filter(|limit| !limit.is_zero()),
                live: pick(),
                resident: pick(),
                unused: pick(),
                requests: pick(),
                resources: pick(),
                arenas: pick(),
            };
            let sum: ByteSize = LimitParts::of(figures).by_name().map(|(_, bytes)| bytes).sum();
            let whole = figures.limit.unwrap_or_default().max(figures.physical);
            assert_eq!(sum, whole, "{figures:?}");
        }
    }
}
