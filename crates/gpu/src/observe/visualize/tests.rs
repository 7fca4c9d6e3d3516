//! Tests of maps: with maps made by hand, and with maps of an arena.

use std::sync::Arc;
use std::time::Duration;

use super::*;
use crate::{ArenaConfig, Buffer, DeviceArena, Region};
use lowtide_core::clock::{Clock, ManualClock};
use lowtide_cuda_sim::trial::FaultInjectingDriver;

const MIB: u64 = 1 << 20;

/// Opens an arena that keeps its last events. Returns it with its clock.
fn arena(history: usize, limit: ByteSize) -> (DeviceArena, ManualClock) {
    let clock = ManualClock::new();
    let reserve = ByteSize::gib(1);
    let config = ArenaConfig { history, limit, reserve, ..ArenaConfig::new("trial") };
    let driver = Arc::new(FaultInjectingDriver::new());
    let arena = DeviceArena::open(driver, Arc::new(clock.clone()), config);
    (arena.expect("open"), clock)
}

fn bytes(arena: &DeviceArena, size: u64) -> Buffer<u8> {
    arena.alloc(usize::try_from(size).expect("a length"), Region::Dynamic).expect("room")
}

/// Returns the bytes of granules in a state.
fn backed(segment: &SegmentMap, state: GranuleState) -> ByteSize {
    segment.granules.iter().filter(|run| run.state == state).map(|run| run.size).sum()
}

/// Returns the bytes of blocks in a state.
fn taken(segment: &SegmentMap, state: BlockState) -> ByteSize {
    segment.blocks.iter().filter(|block| block.state == state).map(|block| block.size).sum()
}

#[test]
fn a_map_and_a_snapshot_of_one_arena_agree() {
    let (arena, clock) = arena(0, ByteSize::MAX);
    let mut buffers: Vec<_> = (1..200).map(|nth| bytes(&arena, nth * 7919 * 3)).collect();
    for nth in (0..buffers.len()).rev().filter(|nth| nth % 3 == 0) {
        buffers.swap_remove(nth);
    }
    let weights = arena.alloc::<u64>(100_000, Region::Stable).expect("room");
    clock.advance(Duration::from_secs(4));
    arena.decay(clock.now()).expect("decay");
    let (map, snapshot) = (arena.map(), arena.snapshot());
    map.validate();
    for (segment, region) in map.segments.iter().zip(&snapshot.regions) {
        assert_eq!(segment.region, region.region.name());
        assert_eq!(taken(segment, BlockState::Live), region.live);
        assert_eq!(backed(segment, GranuleState::Active), region.active);
        assert_eq!(backed(segment, GranuleState::Idle), region.idle);
        assert_eq!(segment.size, region.reserved);
    }
    assert_eq!(map.segments[1].blocks.len(), buffers.len());
    assert_eq!((map.taken, map.granularity), (clock.now(), ByteSize::mib(2)));
    assert!(map.events.is_empty(), "not asked for");
    drop(weights);
}

#[test]
fn a_block_whose_memory_is_on_its_way_is_free_and_its_granules_are_active() {
    let driver = Arc::new(FaultInjectingDriver::new());
    let clock = Arc::new(ManualClock::new());
    let config = ArenaConfig { history: 10, ..ArenaConfig::new("trial") };
    let arena = DeviceArena::open(driver.clone(), clock, config).expect("open");
    let kept = bytes(&arena, 3 * MIB);
    driver.hold();
    std::thread::scope(|scope| {
        let other = scope.spawn(|| bytes(&arena, 6 * MIB));
        driver.wait_until_held(1);
        let (map, snapshot) = (arena.map(), arena.snapshot());
        driver.let_go();
        map.validate();
        let segment = &map.segments[1];
        assert_eq!((segment.blocks.len(), map.events.len()), (1, 2));
        assert_eq!(backed(segment, GranuleState::Active), snapshot.active);
        assert_eq!(backed(segment, GranuleState::Idle), ByteSize::ZERO);
        other.join().expect("room");
    });
    drop(kept);
}

#[test]
fn events_lead_from_nothing_to_what_the_map_shows() {
    let (arena, clock) = arena(1000, ByteSize::mib(16));
    let kept = bytes(&arena, 100);
    clock.advance(Duration::from_secs(1));
    drop(bytes(&arena, 4 * MIB));
    assert!(arena.alloc::<u8>(20 << 20, Region::Dynamic).is_err());
    arena.purge().expect("purge");
    let map = arena.map();
    map.validate();
    let kinds: Vec<_> = map.events.iter().map(kind_and_size).collect();
    let headroom = ByteSize::mib(16).saturating_sub(arena_committed(&map.events[..5]));
    assert_eq!(
        kinds[..6],
        [
            ("commit", ByteSize::mib(2)),
            ("alloc", ByteSize::new(100)),
            ("commit", ByteSize::mib(4)),
            ("alloc", ByteSize::mib(4)),
            ("free", ByteSize::mib(4)),
            ("out of memory", ByteSize::mib(20)),
        ]
    );
    assert!(
        matches!(map.events[5], MapEvent::OutOfMemory { headroom: left, .. } if left == headroom)
    );
    assert_eq!(arena_committed(&map.events), ByteSize::mib(2));
    let block = map.segments[1].base + map.segments[1].blocks[0].offset.get();
    assert!(matches!(map.events[1], MapEvent::Alloc { address, .. } if address == block));
    assert_eq!(map.events[2].at() - map.events[1].at(), Duration::from_secs(1));
    drop(kept);
}

#[test]
fn events_tell_of_blocks_resized_and_of_every_block_though_fronts_are_asked_for() {
    let (arena, clock) = arena(1000, ByteSize::MAX);
    arena.set_thread_cache(ByteSize::mib(64));
    (0..50).for_each(|_| drop(bytes(&arena, 1000)));
    let mut buffer = bytes(&arena, 1000);
    buffer.resize(100_000).expect("moved");
    buffer.resize(5_000).expect("where it stands");
    let map = arena.map();
    map.validate();
    let count = |kind| map.events.iter().filter(|event| kind_and_size(event).0 == kind).count();
    assert_eq!((count("alloc"), count("free")), (53, 52));
    let address = map.segments[1].base + map.segments[1].blocks[0].offset.get();
    let at = clock.now();
    let last = MapEvent::Alloc { at, address, size: ByteSize::new(5_000) };
    assert_eq!(map.events.last(), Some(&last));
    drop(buffer);
}

fn kind_and_size(event: &MapEvent) -> (&'static str, ByteSize) {
    match *event {
        MapEvent::Alloc { size, .. } => ("alloc", size),
        MapEvent::Free { size, .. } => ("free", size),
        MapEvent::Commit { size, .. } => ("commit", size),
        MapEvent::Decommit { size, .. } => ("decommit", size),
        MapEvent::OutOfMemory { requested, .. } => ("out of memory", requested),
    }
}

/// Returns the committed memory after these events.
fn arena_committed(events: &[MapEvent]) -> ByteSize {
    let of = |kind| events.iter().map(kind_and_size).filter(move |event| event.0 == kind);
    let sum = |kind| of(kind).map(|(_, size)| size).sum();
    let (committed, given): (ByteSize, ByteSize) = (sum("commit"), sum("decommit"));
    committed.checked_sub(given).expect("given back after it was committed")
}

#[cfg(feature = "memory-viz")]
mod memory_viz {
    use std::collections::BTreeMap;

    use serde_pickle::{DeOptions, HashableValue, Value};

    use super::*;

    /// Returns a segment of 64 GiB: granules of 2 MiB at these offsets in MiB, and blocks in bytes.
    fn segment(
        granules: &[(u64, u64, GranuleState)],
        blocks: &[(u64, u64, BlockState)],
    ) -> SegmentMap {
        let run = |&(offset, size, state): &(u64, u64, GranuleState)| GranuleRun {
            offset: ByteSize::mib(offset),
            size: ByteSize::mib(size),
            state,
        };
        let block = |&(offset, size, state): &(u64, u64, BlockState)| BlockSpan {
            offset: ByteSize::new(offset),
            size: ByteSize::new(size),
            requested: ByteSize::new(size - 56),
            state,
        };
        SegmentMap {
            region: "dynamic".to_owned(),
            base: 1 << 40,
            size: ByteSize::gib(64),
            granules: granules.iter().map(run).collect(),
            blocks: blocks.iter().map(block).collect(),
        }
    }

    fn map(name: &str, segments: Vec<SegmentMap>) -> ArenaMap {
        let granularity = ByteSize::mib(2);
        let since_epoch = Duration::from_secs(1_700_000_000);
        let name = name.to_owned();
        ArenaMap { name, granularity, segments, since_epoch, ..ArenaMap::default() }
    }

    fn sample() -> ArenaMap {
        use BlockState::{Live, Pending};
        use GranuleState::{Active, Idle};
        let granules = [(0, 6, Active), (6, 4, Idle), (40_000, 4, Active)];
        let blocks = [
            (0, MIB, Live),
            (MIB + 256, 3 * MIB, Pending),
            (5 * MIB, 256, Live),
            (40_001 * MIB, 512, Live),
        ];
        map("embedder", vec![segment(&granules, &blocks)])
    }

    /// The opcodes of pickle protocol 3 that `MemoryViz.js` reads, each with the length of its
    /// argument: a number of bytes, or one to four bytes that hold that number.
    const READ: [(u8, Argument); 14] = [
        (0x80, Argument::Bytes(1)), // PROTO
        (b'K', Argument::Bytes(1)), // BININT1
        (b'M', Argument::Bytes(2)), // BININT2
        (b'J', Argument::Bytes(4)), // BININT
        (0x8a, Argument::Short),    // LONG1
        (b'X', Argument::Long),     // BINUNICODE
        (b'}', Argument::Bytes(0)), // EMPTY_DICT
        (b']', Argument::Bytes(0)), // EMPTY_LIST
        (b'(', Argument::Bytes(0)), // MARK
        (b'u', Argument::Bytes(0)), // SETITEMS
        (b'e', Argument::Bytes(0)), // APPENDS
        (b't', Argument::Bytes(0)), // TUPLE
        (0x86, Argument::Bytes(0)), // TUPLE2
        (0x88, Argument::Bytes(0)), // NEWTRUE
    ];

    enum Argument {
        Bytes(usize),
        Short,
        Long,
    }

    /// Walks a pickle, and fails at opcodes that the viewers do not read.
    fn walk(pickle: &[u8]) {
        let mut at = 0;
        loop {
            let opcode = pickle[at];
            at += 1;
            if opcode == b'.' {
                break;
            }
            let known = READ.iter().find(|(known, _)| *known == opcode);
            let (_, argument) = known.unwrap_or_else(|| panic!("{opcode:#x} at {at} is not read"));
            at += match argument {
                Argument::Bytes(count) => *count,
                Argument::Short => {
                    let count = usize::from(pickle[at]);
                    assert!(count <= 8, "an integer of {count} bytes");
                    1 + count
                }
                Argument::Long => {
                    let count: [u8; 4] = pickle[at..at + 4].try_into().expect("four bytes");
                    4 + u32::from_le_bytes(count) as usize
                }
            };
        }
        assert_eq!(at, pickle.len(), "nothing follows");
    }

    fn pickled(map: &ArenaMap) -> Value {
        let mut pickle = Vec::new();
        map.write_memory_viz(&mut pickle).expect("written");
        walk(&pickle);
        serde_pickle::value_from_slice(&pickle, DeOptions::new()).expect("read back")
    }

    fn field<'a>(value: &'a Value, name: &str) -> &'a Value {
        let Value::Dict(fields) = value else { panic!("{value} is no dictionary") };
        let fields: &BTreeMap<HashableValue, Value> = fields;
        fields.get(&HashableValue::String(name.to_owned())).unwrap_or_else(|| panic!("no {name}"))
    }

    fn number(value: &Value, name: &str) -> u64 {
        match field(value, name) {
            Value::I64(number) => u64::try_from(*number).expect("not negative"),
            other => panic!("{name} is {other}"),
        }
    }

    fn text<'a>(value: &'a Value, name: &str) -> &'a str {
        match field(value, name) {
            Value::String(text) => text,
            other => panic!("{name} is {other}"),
        }
    }

    fn list(value: &Value) -> &[Value] {
        let Value::List(items) = value else { panic!("{value} is no list") };
        items
    }

    #[test]
    fn a_snapshot_has_a_segment_for_each_stretch_and_blocks_that_tile_it() {
        let snapshot = pickled(&sample());
        let segments = list(field(&snapshot, "segments"));
        let sizes: Vec<_> = segments.iter().map(|s| number(s, "total_size")).collect();
        assert_eq!(sizes, [10 * MIB, 4 * MIB]);
        let mut states = Vec::new();
        for segment in segments {
            let mut at = number(segment, "address");
            for block in list(field(segment, "blocks")) {
                assert_eq!(number(block, "address"), at);
                at += number(block, "size");
                states.push((text(block, "state"), number(block, "size")));
            }
            assert_eq!(at, number(segment, "address") + number(segment, "total_size"));
            assert_eq!(number(segment, "device"), 0);
        }
        assert_eq!(
            states,
            [
                ("active_allocated", MIB),
                ("inactive", 256),
                ("active_pending_free", 3 * MIB),
                ("inactive", MIB - 256),
                ("active_allocated", 256),
                ("inactive", 5 * MIB - 256),
                ("inactive", MIB),
                ("active_allocated", 512),
                ("inactive", 3 * MIB - 512),
            ]
        );
        assert_eq!(number(&segments[0], "allocated_size"), MIB + 256);
        assert_eq!(number(&segments[0], "active_size"), 4 * MIB + 256);
        assert_eq!(number(&segments[0], "requested_size"), MIB + 256 - 2 * 56);
    }

    #[test]
    fn the_events_of_a_snapshot_undone_from_its_end_leave_nothing() {
        let (arena, clock) = arena(10_000, ByteSize::mib(64));
        let mut buffers = Vec::new();
        for nth in 0..500_u64 {
            clock.advance(Duration::from_millis(100));
            buffers.push(bytes(&arena, (nth * 7919) % 300_000 + 1));
            if nth % 5 > 1 {
                buffers.remove(usize::try_from(nth * 31).expect("small") % buffers.len());
            }
            arena.decay(clock.now()).expect("decay");
        }
        let snapshot = pickled(&arena.map());
        // As the viewer does: starts from the final state, and undoes every event.
        let mut blocks = BTreeMap::new();
        let mut backed = 0;
        for segment in list(field(&snapshot, "segments")) {
            backed += number(segment, "total_size");
            for block in list(field(segment, "blocks")) {
                if text(block, "state") == "active_allocated" {
                    blocks.insert(number(block, "address"), ());
                }
            }
        }
        let traces = list(field(&snapshot, "device_traces"));
        assert_eq!(traces.len(), 1);
        for event in list(&traces[0]).iter().rev() {
            let (address, size) = (number(event, "addr"), number(event, "size"));
            match text(event, "action") {
                "alloc" => assert!(blocks.remove(&address).is_some(), "{address:#x}"),
                "free_requested" => assert!(blocks.contains_key(&address)),
                "free_completed" => assert!(blocks.insert(address, ()).is_none()),
                "segment_map" => backed -= size,
                "segment_unmap" => backed += size,
                other => panic!("{other}"),
            }
        }
        assert!(blocks.is_empty() && backed == 0, "{backed} {blocks:?}");
    }

    #[test]
    fn numbers_stay_below_what_the_viewers_read_and_time_is_the_wall_clocks() {
        let mut all = sample();
        all.device = 2;
        all.taken = Moment::after_origin(Duration::from_secs(10));
        let at = Moment::after_origin(Duration::from_secs(7));
        let most = ByteSize::MAX;
        all.events.push(MapEvent::Alloc { at, address: u64::MAX, size: most });
        all.events.push(MapEvent::OutOfMemory { at, requested: most, headroom: most });
        let snapshot = pickled(&all);
        let traces = list(field(&snapshot, "device_traces"));
        assert_eq!(traces.len(), 3, "the device's own is the third");
        let [block, event] = [0, 1].map(|nth| &list(&traces[2])[nth]);
        let fields = [(block, "addr"), (block, "size"), (event, "size"), (event, "device_free")];
        for (event, name) in fields {
            assert_eq!(number(event, name), i64::MAX.cast_unsigned(), "{name}");
            assert_eq!(number(event, "time_us"), 1_699_999_997_000_000);
        }
        pickled(&map("nothing", Vec::new()));
    }

    #[test]
    fn an_error_of_the_writer_comes_back() {
        let mut room = [0_u8; 64];
        let error = sample().write_memory_viz(&mut room[..]).expect_err("no room");
        assert_eq!(error.kind(), std::io::ErrorKind::WriteZero);
    }
}
