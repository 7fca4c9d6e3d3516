//! The contract of an arena over every driver, case by case: contents, order of streams, release of
//! memory, sleep and wake, refusals.
//!
//! A case is told of a device and knows none: it asks the driver what it can do, and leaves out
//! what it cannot. It measures nothing. It panics at nothing, so that a program can say which held.
//!
//! Invariant: after a case that held, the arena that it made is closed and has nothing committed.

macro_rules! ensure {
    ($held:expr, $($said:tt)+) => {
        if !$held {
            return Err(format!($($said)+).into());
        }
    };
}

#[path = "bed.rs"]
mod bed;

use std::error::Error;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use lowtide_gpu::ByteSize;
use lowtide_gpu::clock::{Clock, SystemClock};
use lowtide_gpu::driver::{DeviceAddress, Driver};
use lowtide_gpu::{
    Buffer, CompactOptions, Contents, DeviceArena, DeviceError, Lane, Lease, PinnedConfig,
    PinnedKind, PinnedPool, RawBlock, Region, SleepOptions, SleepState,
};

use bed::Bed;

/// A device with work that writes and reads.
pub(crate) trait Device: Sync {
    fn driver(&self) -> Arc<dyn Driver>;

    /// A lane of a new stream, which the device keeps.
    fn lane(&self, arena: &DeviceArena) -> Result<Lane, Fault>;

    /// Queues work of the lane's stream that writes a value to every byte.
    fn write(&self, lane: &Lane, to: &mut Buffer<u8>, lease: &Lease, value: u8) -> Outcome;

    /// Returns `true` if every byte has the value, once the work of the lane's stream that asks is
    /// done.
    fn holds(&self, lane: &Lane, of: &Buffer<u8>, lease: &Lease, value: u8) -> Result<bool, Fault>;

    /// Queues work of the lane's stream that writes a value to every byte of a raw block.
    fn write_raw(&self, lane: &Lane, to: RawBlock, value: u8) -> Outcome;

    /// Returns `true` if every byte of a raw block has the value, once the work of the lane's
    /// stream that asks is done.
    fn raw_holds(&self, lane: &Lane, of: RawBlock, value: u8) -> Result<bool, Fault>;

    /// Returns `true` if committed memory is taken from the device before its first use.
    fn takes_at_once(&self) -> bool {
        true
    }
}

pub(crate) type Fault = Box<dyn Error + Send + Sync>;
pub(crate) type Outcome = Result<(), Fault>;

/// A case: its name and what it does.
pub(crate) type Case = (&'static str, fn(&dyn Device) -> Outcome);

pub(crate) const CASES: &[Case] = &[
    ("buffers hold what was written to them", contents),
    ("a lane takes again what it freed, after its own work", same_lane),
    ("another lane takes what one freed, after its work", other_lane),
    ("work on a lane that was named is waited for", recorded_use),
    ("a stream for every request costs no more memory than one", fresh_streams),
    ("idle memory goes back when it is purged", purged),
    ("idle memory goes back when its time is over, and not before", decayed),
    ("contents that are kept are there after a sleep, at their addresses", sleep_keeps),
    ("contents that are discarded leave their addresses", sleep_discards),
    ("a lease keeps the arena awake, and entering wakes it", leases),
    ("under the limit nothing is refused, beyond it everything, typed", limits),
    ("idle memory serves another region", other_region),
    ("a compaction keeps contents and frees granules", compacts),
    ("a resize keeps what was there", resizes),
    ("blocks by address", raw_blocks),
    ("a raw block of a lane is that lane's again, after its own work", raw_same_lane),
    ("another lane takes the raw block that one freed, after its work", raw_other_lane),
    ("work on a lane that was named for a raw block is waited for", raw_recorded_use),
    ("a raw block whose lane has ended is reused after its work", raw_ended_lane),
    ("freed memory is idle after a wait for its work", waits_for_pending),
    ("raw blocks are found by any of their addresses", raw_lookup),
    ("threads beside each other", threads),
    ("sizes that can never fit are refused", absurd_sizes),
    ("a lent buffer stays where it is, awake, and keeps its contents", exported),
    ("a pinned buffer is copied to the device and back", pinned_copies),
    ("what the device says of its memory adds up", device_memory),
    ("closing waits for live blocks to be freed", closes),
];

fn contents(device: &dyn Device) -> Outcome {
    let bed = Bed::new(device)?;
    let unit = bed.unit;
    let sizes = [1, 255, 256, 257, unit / 8, unit / 2 + 1, unit, unit + 3, 2 * unit + unit / 2];
    let buffers = sizes.iter().zip(1..).map(|(&size, value)| {
        let region = if size % 2 == 0 { Region::Stable } else { Region::Dynamic };
        Ok((bed.written(size, region, value)?, value))
    });
    let buffers: Result<Vec<_>, Fault> = buffers.collect();
    for (buffer, value) in &buffers? {
        bed.check(buffer, *value)?;
    }
    bed.end()
}

fn same_lane(device: &dyn Device) -> Outcome {
    let bed = Bed::new(device)?;
    let before = bed.arena.snapshot().committed;
    for value in 0..20 {
        let buffer = bed.written(bed.unit / 2, Region::Dynamic, value)?;
        bed.check(&buffer, value)?;
        drop(bed.written(bed.unit / 2, Region::Dynamic, 200)?);
        bed.check(&buffer, value)?;
    }
    let grown = bed.arena.snapshot().committed.get() - before.get();
    ensure!(grown <= 2 * bed.unit as u64, "it grew by {grown} bytes");
    bed.end()
}

fn other_lane(device: &dyn Device) -> Outcome {
    let bed = Bed::with(device, Some(2))?;
    let (second, size) = (device.lane(&bed.arena)?, bed.unit + bed.unit / 2);
    for value in 0..10 {
        // More than half of the limit: the second lane gets what the first one has just freed.
        drop(bed.written(size, Region::Dynamic, 100 + value)?);
        let taken = bed.written_on(&second, size, Region::Dynamic, value)?;
        let lease = second.enter()?;
        ensure!(device.holds(&second, &taken, &lease, value)?, "the first lane wrote to it later");
    }
    drop(second);
    bed.end()
}

fn recorded_use(device: &dyn Device) -> Outcome {
    let bed = Bed::with(device, Some(2))?;
    let (second, size) = (device.lane(&bed.arena)?, bed.unit + bed.unit / 2);
    for value in 0..10 {
        let mut shared = bed.lane.alloc::<u8>(size, Region::Dynamic)?;
        shared.record_use(&second)?;
        let lease = second.enter()?;
        device.write(&second, &mut shared, &lease, 100)?;
        drop((lease, shared));
        let taken = bed.written(size, Region::Dynamic, value)?;
        bed.check(&taken, value)?;
    }
    drop(second);
    bed.end()
}

fn fresh_streams(device: &dyn Device) -> Outcome {
    let bed = Bed::new(device)?;
    let mut after_two = ByteSize::ZERO;
    for request in 0..12_u8 {
        let lane = device.lane(&bed.arena)?;
        drop(bed.written_on(&lane, 4 * bed.unit, Region::Dynamic, request)?);
        lane.end_run()?;
        drop(lane);
        if request == 1 {
            after_two = bed.arena.snapshot().committed;
        }
    }
    let committed = bed.arena.snapshot().committed;
    ensure!(committed <= after_two, "{after_two} after two requests, {committed} after twelve");
    bed.end()
}

fn purged(device: &dyn Device) -> Outcome {
    let bed = Bed::new(device)?;
    let kept = bed.written(bed.unit / 2, Region::Stable, 7)?;
    drop(bed.written(16 * bed.unit, Region::Dynamic, 8)?);
    let before = bed.arena.snapshot().committed;
    bed.settle()?;
    let released = bed.arena.purge()?;
    let after = bed.arena.snapshot().committed;
    ensure!(released >= ByteSize::of(15 * bed.unit), "{released} were given back");
    ensure!(after.get() + released.get() == before.get(), "{before}, then {after}");
    bed.check(&kept, 7)?;
    drop(kept);
    bed.end()
}

fn decayed(device: &dyn Device) -> Outcome {
    let bed = Bed::new(device)?;
    drop(bed.written(8 * bed.unit, Region::Dynamic, 1)?);
    bed.settle()?;
    bed.arena.decay(bed.clock.now())?;
    let held = bed.arena.snapshot().committed;
    bed.clock.advance(Duration::from_secs(5));
    bed.arena.decay(bed.clock.now())?;
    let after_half = bed.arena.snapshot().committed;
    ensure!(held == after_half, "{held}, and {after_half} after half of the time");
    for _ in 0..4 {
        bed.clock.advance(Duration::from_secs(10));
        bed.arena.decay(bed.clock.now())?;
    }
    let left = bed.arena.snapshot().committed;
    ensure!(left.is_zero(), "{left} are left after four times its time");
    bed.end()
}

fn sleep_keeps(device: &dyn Device) -> Outcome {
    let bed = Bed::new(device)?;
    let regions = [Region::Stable, Region::Dynamic];
    let buffers = (0..6_u8).map(|nth| {
        let size = bed.unit / 4 + usize::from(nth) * bed.unit / 2;
        bed.written(size, regions[usize::from(nth % 2)], nth + 1)
    });
    let buffers: Vec<_> = buffers.collect::<Result<_, Fault>>()?;
    let addresses: Vec<_> = buffers.iter().map(|it| bed.address(it)).collect::<Result<_, _>>()?;
    if !bed.arena.capabilities().virtual_memory {
        let refused = bed.arena.sleep(keeps());
        ensure!(matches!(refused, Err(DeviceError::Unsupported { .. })), "{refused:?}");
        drop(buffers);
        return bed.end();
    }
    for _ in 0..3 {
        bed.arena.sleep(keeps())?;
        ensure!(bed.arena.state() == SleepState::Asleep, "it is {:?}", bed.arena.state());
        let committed = bed.arena.snapshot().committed;
        // On the host there is nowhere to keep contents but where they are.
        let stays = bed.arena.capabilities().host_backed;
        ensure!(stays || committed.is_zero(), "asleep with {committed} committed");
        for (buffer, value) in buffers.iter().zip(1..) {
            bed.check(buffer, value)?;
        }
    }
    let after: Vec<_> = buffers.iter().map(|it| bed.address(it)).collect::<Result<_, _>>()?;
    ensure!(addresses == after, "other addresses: {addresses:x?}, then {after:x?}");
    drop(buffers);
    bed.end()
}

fn keeps() -> SleepOptions {
    let drain = Duration::ZERO;
    SleepOptions { drain, stable: Contents::Keep, dynamic: Contents::Keep }
}

fn sleep_discards(device: &dyn Device) -> Outcome {
    let bed = Bed::new(device)?;
    if !bed.arena.capabilities().virtual_memory {
        return bed.end();
    }
    let mut lost = bed.written(3 * bed.unit / 2, Region::Dynamic, 1)?;
    let kept = bed.written(bed.unit / 2, Region::Stable, 2)?;
    let at = bed.address(&lost)?;
    bed.arena.sleep(SleepOptions { dynamic: Contents::Discard, ..keeps() })?;
    ensure!(bed.address(&lost)? == at, "it has another address");
    ensure!(lost.take_discarded() && !kept.take_discarded(), "what was discarded is not said");
    bed.check(&kept, 2)?;
    let lease = bed.lane.enter()?;
    device.write(&bed.lane, &mut lost, &lease, 3)?;
    drop(lease);
    bed.check(&lost, 3)?;
    drop((lost, kept));
    bed.end()
}

fn leases(device: &dyn Device) -> Outcome {
    let bed = Bed::new(device)?;
    let buffer = bed.written(bed.unit / 2, Region::Stable, 1)?;
    let lease = bed.arena.enter()?;
    if !bed.arena.capabilities().virtual_memory {
        drop((lease, buffer));
        return bed.end();
    }
    let refused = bed.arena.sleep(keeps());
    ensure!(matches!(refused, Err(DeviceError::Leased { leases: 1, .. })), "{refused:?}");
    drop(lease);
    bed.arena.sleep(keeps())?;
    let twice = bed.arena.sleep(keeps());
    ensure!(matches!(twice, Err(DeviceError::State { .. })), "{twice:?}");
    drop(bed.arena.enter()?);
    ensure!(bed.arena.state() == SleepState::Awake, "it is {:?}", bed.arena.state());
    bed.check(&buffer, 1)?;
    drop(buffer);
    bed.end()
}

fn limits(device: &dyn Device) -> Outcome {
    let bed = Bed::with(device, Some(32))?;
    let held: Vec<_> = (0..15)
        .map(|value| bed.written(2 * bed.unit, Region::Dynamic, value))
        .collect::<Result<_, Fault>>()?;
    let refused = bed.lane.alloc::<u8>(8 * bed.unit, Region::Dynamic);
    let refused = refused.err().ok_or("8 granules were given where 2 are left")?;
    ensure!(refused.is_out_of_memory(), "{refused}");
    for (buffer, value) in held.iter().zip(0..) {
        bed.check(buffer, value)?;
    }
    drop(held);
    let all = bed.written(30 * bed.unit, Region::Dynamic, 99)?;
    bed.check(&all, 99)?;
    drop(all);
    bed.end()
}

fn other_region(device: &dyn Device) -> Outcome {
    let bed = Bed::with(device, Some(16))?;
    for value in 0..6 {
        let region = if value % 2 == 0 { Region::Stable } else { Region::Dynamic };
        let buffer = bed.written(12 * bed.unit, region, value)?;
        bed.check(&buffer, value)?;
    }
    bed.end()
}

fn compacts(device: &dyn Device) -> Outcome {
    let bed = Bed::new(device)?;
    let mut blocks = (0..96_u8)
        .map(|value| Ok((bed.written(bed.unit / 8, Region::Dynamic, value)?, value)))
        .collect::<Result<Vec<_>, Fault>>()?;
    blocks.retain(|(_, value)| value % 3 == 0);
    bed.settle()?;
    bed.arena.purge()?;
    let before = bed.arena.snapshot().committed;
    // Views may be used on any stream.
    bed.arena.wait_for_pending()?;
    bed.arena.compact(CompactOptions::new(Region::Dynamic), |_| {})?;
    bed.settle()?;
    bed.arena.purge()?;
    let after = bed.arena.snapshot().committed;
    ensure!(after < before, "{before} before, {after} after");
    for (block, value) in &blocks {
        bed.check(block, *value)?;
    }
    drop(blocks);
    bed.end()
}

fn resizes(device: &dyn Device) -> Outcome {
    let bed = Bed::new(device)?;
    let mut buffer = bed.written(bed.unit / 2, Region::Dynamic, 5)?;
    let beside = bed.written(bed.unit / 2, Region::Dynamic, 6)?;
    buffer.resize(3 * bed.unit)?;
    buffer.resize(bed.unit / 2)?;
    bed.check(&buffer, 5)?;
    bed.check(&beside, 6)?;
    let refused = buffer.resize(usize::MAX);
    ensure!(refused.is_err(), "a buffer of all memory there could be");
    bed.check(&buffer, 5)?;
    drop((buffer, beside));
    bed.end()
}

fn raw_blocks(device: &dyn Device) -> Outcome {
    let bed = Bed::new(device)?;
    let align = ByteSize::kib(4);
    let block = bed.arena.alloc_raw(ByteSize::of(3 * bed.unit / 2), align, Region::Stable)?;
    ensure!(block.at.is_multiple_of(align), "{} is not aligned", block.at);
    bed.arena.free(block.at)?;
    let twice = bed.arena.free(block.at);
    ensure!(matches!(twice, Err(DeviceError::NotLive { .. })), "{twice:?}");
    bed.end()
}

fn raw_same_lane(device: &dyn Device) -> Outcome {
    let bed = Bed::new(device)?;
    let size = ByteSize::of(bed.unit / 2);
    let alloc = || bed.lane.alloc_raw(size, ByteSize::new(512), Region::Dynamic);
    for value in 0..20 {
        let (kept, freed) = (alloc()?, alloc()?);
        device.write_raw(&bed.lane, kept, value)?;
        device.write_raw(&bed.lane, freed, 200)?;
        bed.lane.free(freed.at)?;
        let again = alloc()?;
        device.write_raw(&bed.lane, again, 201)?;
        ensure!(device.raw_holds(&bed.lane, kept, value)?, "a block was written by another's work");
        bed.arena.free(again.at)?;
        bed.lane.free(kept.at)?;
    }
    let committed = bed.arena.snapshot().committed;
    ensure!(committed <= ByteSize::of(3 * bed.unit), "it grew to {committed}");
    bed.end()
}

/// A block of more than half of the limit, so that the next one gets its memory.
fn raw_large(bed: &Bed<'_>, lane: &Lane) -> Result<RawBlock, Fault> {
    let size = ByteSize::of(bed.unit + bed.unit / 2);
    Ok(lane.alloc_raw(size, ByteSize::new(1), Region::Dynamic)?)
}

fn raw_other_lane(device: &dyn Device) -> Outcome {
    let bed = Bed::with(device, Some(2))?;
    let second = device.lane(&bed.arena)?;
    for value in 0..10 {
        let freed = raw_large(&bed, &bed.lane)?;
        device.write_raw(&bed.lane, freed, 100 + value)?;
        bed.arena.free(freed.at)?;
        let taken = raw_large(&bed, &second)?;
        device.write_raw(&second, taken, value)?;
        ensure!(device.raw_holds(&second, taken, value)?, "the first lane wrote to it later");
        second.free(taken.at)?;
    }
    drop(second);
    bed.end()
}

fn raw_recorded_use(device: &dyn Device) -> Outcome {
    let bed = Bed::with(device, Some(2))?;
    let second = device.lane(&bed.arena)?;
    for value in 0..10 {
        let shared = raw_large(&bed, &bed.lane)?;
        device.write_raw(&second, shared, 100)?;
        // The work of the second lane is named before the free, or with it, or is of any stream.
        match value % 3 {
            0 => bed.arena.record_use(shared.at, &second)?,
            1 => bed.arena.record_unknown_use(shared.at)?,
            _ => {}
        }
        let frees = if value % 3 == 2 { &second } else { &bed.lane };
        frees.free(shared.at)?;
        let taken = raw_large(&bed, &bed.lane)?;
        device.write_raw(&bed.lane, taken, value)?;
        ensure!(device.raw_holds(&bed.lane, taken, value)?, "the second lane wrote to it later");
        bed.lane.free(taken.at)?;
    }
    let gone = bed.arena.record_use(DeviceAddress::new(256), &second);
    ensure!(matches!(gone, Err(DeviceError::ForeignAddress { .. })), "{gone:?}");
    let gone = bed.arena.record_unknown_use(DeviceAddress::new(256));
    ensure!(matches!(gone, Err(DeviceError::ForeignAddress { .. })), "{gone:?}");
    let other = Bed::new(device)?;
    let block = raw_large(&bed, &bed.lane)?;
    let foreign = bed.arena.record_use(block.at, &other.lane);
    ensure!(matches!(foreign, Err(DeviceError::ForeignLane { .. })), "{foreign:?}");
    bed.lane.free(block.at)?;
    drop(second);
    other.end()?;
    bed.end()
}

fn raw_ended_lane(device: &dyn Device) -> Outcome {
    let bed = Bed::with(device, Some(2))?;
    for value in 0..10 {
        let ends = device.lane(&bed.arena)?;
        let block = raw_large(&bed, &ends)?;
        device.write_raw(&ends, block, 100)?;
        drop(ends);
        bed.arena.free(block.at)?;
        let taken = raw_large(&bed, &bed.lane)?;
        device.write_raw(&bed.lane, taken, value)?;
        ensure!(device.raw_holds(&bed.lane, taken, value)?, "the ended lane wrote to it later");
        bed.lane.free(taken.at)?;
    }
    bed.end()
}

fn waits_for_pending(device: &dyn Device) -> Outcome {
    let bed = Bed::new(device)?;
    let second = device.lane(&bed.arena)?;
    for unknown in [false, true] {
        let blocks = [raw_large(&bed, &bed.lane)?, raw_large(&bed, &second)?];
        for (block, lane) in blocks.into_iter().zip([&bed.lane, &second]) {
            device.write_raw(lane, block, 1)?;
            if unknown {
                bed.arena.record_unknown_use(block.at)?;
            }
            lane.free(block.at)?;
        }
        bed.arena.wait_for_pending()?;
        let after = bed.arena.snapshot();
        ensure!(after.pending.is_zero(), "{} pending after the wait", after.pending);
        bed.arena.purge()?;
        let committed = bed.arena.snapshot().committed;
        ensure!(committed.is_zero(), "{committed} committed after the wait and a purge");
    }
    drop(second);
    bed.end()
}

fn raw_lookup(device: &dyn Device) -> Outcome {
    let bed = Bed::new(device)?;
    let sizes = [1, 256, 257, bed.unit + 1].map(ByteSize::of);
    let blocks = sizes.map(|size| bed.lane.alloc_raw(size, ByteSize::new(256), Region::Dynamic));
    let blocks: Vec<_> = blocks.into_iter().collect::<Result<_, _>>()?;
    for block in &blocks {
        let last = block.size.saturating_sub(ByteSize::new(1));
        for offset in [ByteSize::ZERO, ByteSize::new(1), last] {
            let at = block.at.checked_add(offset).ok_or("beyond all addresses")?;
            let found = bed.arena.raw_block_containing(at)?;
            ensure!(found == *block, "{at} is in {block}, found {found}");
        }
    }
    let buffer = bed.lane.alloc::<u8>(1_000, Region::Dynamic)?;
    let inside = DeviceAddress::new(bed.address(&buffer)? + 5);
    let found = bed.arena.raw_block_containing(inside);
    ensure!(matches!(found, Err(DeviceError::InteriorAddress { .. })), "{found:?}");
    drop(buffer);
    for block in &blocks {
        bed.lane.free(block.at)?;
        let found = bed.arena.raw_block_containing(block.at);
        ensure!(matches!(found, Err(DeviceError::NotLive { .. })), "{found:?}");
    }
    for at in [0, 1, 255, u64::MAX].map(DeviceAddress::new) {
        let found = bed.arena.raw_block_containing(at);
        ensure!(matches!(found, Err(DeviceError::ForeignAddress { .. })), "{at}: {found:?}");
    }
    bed.end()
}

fn exported(device: &dyn Device) -> Outcome {
    let bed = Bed::new(device)?;
    let buffer = bed.written(bed.unit / 2, Region::Stable, 3)?;
    let at = bed.address(&buffer)?;
    let exported = buffer.export()?;
    ensure!(exported.address().get() == at, "lent at {}, and is at {at:#x}", exported.address());
    let slept = bed.arena.sleep(keeps());
    let can_sleep = bed.arena.capabilities().virtual_memory;
    let refused = match slept {
        Err(DeviceError::Exported { count: 1, .. }) => can_sleep,
        Err(DeviceError::Unsupported { .. }) => !can_sleep,
        _ => false,
    };
    ensure!(refused, "{slept:?}");
    bed.check(exported.buffer(), 3)?;
    let buffer = exported.end();
    if can_sleep {
        bed.arena.sleep(keeps())?;
    }
    bed.check(&buffer, 3)?;
    drop(buffer);
    bed.end()
}

fn pinned_copies(device: &dyn Device) -> Outcome {
    let bed = Bed::new(device)?;
    for kind in [PinnedKind::PageLockedOrPageable, PinnedKind::Pageable] {
        let config = PinnedConfig { kind, ..PinnedConfig::new("contract") };
        let pool = PinnedPool::open(device.driver(), Arc::new(SystemClock::new()), config)?;
        for (value, len) in (1..).zip([1, 255, 4_096, 100_000]) {
            let mut buffer = bed.lane.alloc::<u8>(len, Region::Dynamic)?;
            let sent = bed.lane.copy_to_device(pool.alloc_from(&vec![value; len])?, &mut buffer);
            let sent = sent.map_err(DeviceError::from)?;
            let back = bed.lane.copy_to_host(&mut buffer, pool.alloc(len)?);
            let back = back.map_err(DeviceError::from)?.wait()?;
            ensure!(back.to_vec()? == vec![value; len], "{len} bytes came back changed");
            // The same memory, written by the device after the copy.
            let lease = bed.lane.enter()?;
            device.write(&bed.lane, &mut buffer, &lease, 200)?;
            drop(lease);
            let mut again = sent.wait()?;
            ensure!(again.to_vec()? == vec![value; len], "{len} bytes were changed by a copy");
            again.fill(100)?;
            bed.check(&buffer, 200)?;
            drop(bed.lane.copy_to_device(again, &mut buffer).map_err(DeviceError::from)?);
            // Perhaps in the memory of the copy that was dropped.
            let other = pool.alloc_from(&vec![50; len])?;
            let last = bed.lane.copy_to_host(&mut buffer, other).map_err(DeviceError::from)?;
            ensure!(last.wait()?.to_vec()? == vec![100; len], "a dropped copy was changed");
        }
        pool.close()?;
    }
    bed.end()
}

fn device_memory(device: &dyn Device) -> Outcome {
    let bed = Bed::new(device)?;
    let kept = bed.written(4 * bed.unit, Region::Stable, 1)?;
    let floor = device.driver().context_overhead().unwrap_or(ByteSize::ZERO);
    if let Some(memory) = device.driver().device_memory()? {
        ensure!(memory.free <= memory.total && floor <= memory.total, "{memory:?}, {floor}");
        let least = bed.arena.glance().committed;
        let is_there = memory.taken() >= least || !device.takes_at_once();
        ensure!(is_there, "{} of the device taken by {least}", memory.taken());
    }
    drop(kept);
    bed.end()
}

fn threads(device: &dyn Device) -> Outcome {
    let bed = Bed::new(device)?;
    let work = |thread: u8| -> Outcome {
        let lane = device.lane(&bed.arena)?;
        for turn in 0..24_usize {
            let size = (turn + 1) * bed.unit / 10;
            let value = thread * 32 + u8::try_from(turn)?;
            let buffer = bed.written_on(&lane, size, Region::Dynamic, value)?;
            let lease = lane.enter()?;
            ensure!(device.holds(&lane, &buffer, &lease, value)?, "another thread wrote to it");
            drop(lease);
            if turn % 5 == 0 {
                // Freed in a thread that never used the device.
                thread::scope(|scope| scope.spawn(move || drop(buffer)).join())
                    .map_err(|_| "the drop panicked")?;
            }
        }
        Ok(())
    };
    let work = &work;
    thread::scope(|scope| -> Outcome {
        let all: Vec<_> = (0..4).map(|thread| scope.spawn(move || work(thread))).collect();
        for thread in all {
            thread.join().map_err(|_| "a thread panicked")??;
        }
        Ok(())
    })?;
    bed.end()
}

fn absurd_sizes(device: &dyn Device) -> Outcome {
    let bed = Bed::new(device)?;
    for len in [usize::MAX, usize::MAX / 2, 1 << 62, 1 << 50] {
        let refused = bed.lane.alloc::<u64>(len, Region::Dynamic);
        ensure!(matches!(refused, Err(DeviceError::TooLarge { .. })), "{len}: {refused:?}");
    }
    let empty = bed.lane.alloc::<u8>(0, Region::Dynamic)?;
    ensure!(empty.is_empty() && bed.arena.snapshot().live.is_zero(), "an empty buffer has bytes");
    drop(empty);
    bed.end()
}

fn closes(device: &dyn Device) -> Outcome {
    let bed = Bed::new(device)?;
    let buffer = bed.written(bed.unit / 2, Region::Stable, 1)?;
    let refused = bed.arena.close();
    ensure!(matches!(refused, Err(DeviceError::LiveBlocks { count: 1, .. })), "{refused:?}");
    drop(buffer);
    let arena = bed.arena.clone();
    bed.end()?;
    let closed = arena.alloc::<u8>(1, Region::Stable);
    ensure!(matches!(closed, Err(DeviceError::Closed { .. })), "{closed:?}");
    Ok(())
}
