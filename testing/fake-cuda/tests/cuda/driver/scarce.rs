//! Less address space than a device's memory needs, and a shortage that WSL shows by other results.

use std::ffi::CStr;
use std::sync::Arc;

use lowtide::ByteSize;
use lowtide::clock::{Clock, ManualClock};
use lowtide_fake_cuda::{Fake, Options};
use lowtide_gpu::driver::cuda::{CudaDriver, CudaOptions};
use lowtide_gpu::driver::{Backend, Driver as _, DriverError};
use lowtide_gpu::{ArenaConfig, DeviceArena, DeviceError, Region};

const MIB: usize = 1 << 20;
const GIB: usize = 1 << 30;

fn open(driver: &Arc<CudaDriver>, config: ArenaConfig) -> Result<DeviceArena, DeviceError> {
    DeviceArena::open(driver.clone(), Arc::new(ManualClock::new()), config)
}

fn driver() -> Arc<CudaDriver> {
    Arc::new(CudaDriver::open(CudaOptions::default()).expect("a device"))
}

/// Returns the number of blocks of 1 GiB that fit a region.
fn usable(arena: &DeviceArena, region: Region) -> usize {
    std::iter::from_fn(|| arena.alloc::<u8>(GIB, region).ok()).collect::<Vec<_>>().len()
}

/// Reported in llama.cpp #29142 and #27918: 4 GiB of 24 were usable.
#[test]
fn a_device_is_usable_with_little_more_addresses_than_memory() {
    for flags in [0, Options::INTEGRATED] {
        for reserve in [ByteSize::MAX, ByteSize::gib(1024)] {
            let (capacity, address_space) = (24 << 30, 64 << 30);
            let few = Options { flags, capacity, address_space, devices: 1, ..Options::default() };
            let fake = Fake::start(few);
            let driver = driver();
            let arena = open(&driver, ArenaConfig { reserve, ..ArenaConfig::new("model") });
            let arena = arena.expect("an arena");
            for region in [Region::Stable, Region::Dynamic] {
                let gib = usable(&arena, region);
                assert!(gib >= 23, "{flags}, {reserve}, {region:?}: {gib} GiB");
                if region == Region::Dynamic && flags == 0 && reserve == ByteSize::MAX {
                    println!("figure field.device.usable_gib {gib} GiB");
                }
                arena.purge().expect("nothing is live");
            }
            drop((arena, driver));
            fake.assert_clean();
        }
    }
}

/// Reported in llama.cpp#29142 and #27918: with 48 GiB of addresses 17 of 24 GiB were usable.
#[test]
fn a_device_is_usable_with_fewer_addresses_than_memory() {
    for (space, flags) in [(48, 0), (32, 0), (16, 0), (4, 0), (16, Options::NO_POOLS)] {
        let (capacity, address_space) = (24 << 30, space << 30);
        let few = Options { flags, capacity, address_space, devices: 1, ..Options::default() };
        let fake = Fake::start(few);
        let driver = driver();
        let [skipped, ..] = driver.skipped() else { panic!("{space}: {}", driver.backend()) };
        let needed = ByteSize::gib(27);
        assert_eq!(skipped.1, DriverError::Addresses { needed }, "{space}");
        let arena = open(&driver, ArenaConfig::new("model")).expect("an arena");
        for region in [Region::Stable, Region::Dynamic] {
            let gib = usable(&arena, region);
            // Memory of any backend has addresses.
            let fits = usize::try_from(space.min(24)).expect("few") - 1;
            assert!(gib >= fits, "{space}, {flags}, {region:?}: {gib} GiB");
            if region == Region::Dynamic && (space, flags) == (32, 0) {
                println!("figure field.device.usable_few_gib {gib} GiB");
            }
            arena.wait_for_pending().expect("waited");
            arena.purge().expect("nothing is live");
        }
        drop((arena, driver));
        fake.assert_clean();
    }
}

/// If no other backend works, or this one is asked for, both regions get the same, and some
/// addresses are left for others.
#[test]
fn addresses_are_shared_out_however_few_there_are() {
    for (space, is_asked) in [(48, true), (32, true), (16, true), (4, true), (16, false)] {
        let (capacity, address_space) = (24 << 30, space << 30);
        let fake =
            Fake::start(Options { capacity, address_space, devices: 1, ..Options::default() });
        let backend = is_asked.then_some(Backend::CudaVirtualMemory);
        let has = |name: &str| is_asked || !["cuMemPoolCreate", "cuMemAlloc_v2"].contains(&name);
        let options = CudaOptions { backend, ..CudaOptions::default() };
        let driver = Arc::new(CudaDriver::open_with(options, &has).expect("a device"));
        assert_eq!(driver.backend(), Backend::CudaVirtualMemory);
        let arena = open(&driver, ArenaConfig::new("model")).expect("an arena");
        let reserved = arena.snapshot().regions.map(|region| region.reserved);
        assert_eq!(reserved[0], reserved[1], "{space}");
        let both = reserved[0].checked_mul(2).expect("few");
        let left = ByteSize::new(address_space).saturating_sub(both);
        let left = left.saturating_sub(driver.capabilities().granularity);
        assert!(
            both.get() > address_space / 2 && left.get() > address_space / 32,
            "{space}: {both}"
        );
        drop((arena, driver));
        fake.assert_clean();
    }
}

/// Reported in pytorch #192269: the 40th arena had 20 MiB of addresses.
#[test]
fn an_arena_takes_addresses_by_its_limit() {
    let fake = Fake::start(Options { capacity: 80 << 30, devices: 1, ..Options::default() });
    let driver = driver();
    let limit = ByteSize::gib(2);
    let mut all = Vec::new();
    while all.len() < 1_000 {
        let config = ArenaConfig { limit, ..ArenaConfig::new(format!("model {}", all.len())) };
        match open(&driver, config) {
            Ok(arena) if arena.snapshot().regions[1].reserved >= limit => all.push(arena),
            _ => break,
        }
    }
    println!("figure field.device.arenas {} arenas", all.len());
    assert!(all.len() >= 500, "{}", all.len());
    let last = all.last().expect("some");
    assert_eq!(usable(last, Region::Dynamic), 2);
    last.purge().expect("nothing is live");
    drop(all);
    drop(driver);
    fake.assert_clean();
}

/// Reported in WSL #41176: an allocation failed while 256 MiB were idle.
#[test]
fn idle_memory_is_released_for_a_shortage_by_any_result_of_wsl() {
    let calls: [&CStr; 3] = [c"cuMemCreate", c"cuMemMap", c"cuMemSetAccess"];
    for (name, code) in calls.into_iter().flat_map(|name| [2, 205, 304, 600].map(|it| (name, it))) {
        let fake = Fake::start(Options { capacity: 4 << 30, devices: 1, ..Options::default() });
        let driver = driver();
        let clock = Arc::new(ManualClock::new());
        let arena = DeviceArena::open(driver.clone(), clock.clone(), ArenaConfig::new("one"));
        let arena = arena.expect("an arena");
        let stream = driver.stream_create().expect("a stream");
        #[expect(unsafe_code, reason = "a stream of the driver is given to a lane")]
        // SAFETY: the stream is this driver's, and is destroyed after the lane.
        let lane = unsafe { arena.lane(stream) }.expect("a lane");
        let all: Vec<_> =
            (0..8).map(|_| lane.alloc::<u8>(64 * MIB, Region::Dynamic).expect("room")).collect();
        let kept: Vec<_> = all.into_iter().step_by(2).collect();
        for _ in 0..4 {
            driver.synchronize().expect("done");
            arena.decay(clock.now()).expect("looked at");
        }
        let idle = arena.snapshot().idle;
        assert_eq!(idle, ByteSize::mib(256), "{name:?} {code}");
        fake.fail(name, 1, code);
        let large = lane.alloc::<u8>(700 * MIB, Region::Dynamic);
        assert!(large.is_ok(), "{name:?} {code}: {}", large.expect_err("refused"));
        drop((large, kept, lane));
        #[expect(unsafe_code, reason = "the stream of the lane is destroyed")]
        // SAFETY: the stream is this driver's, and its lane is gone.
        unsafe { driver.stream_destroy(stream) }.expect("destroyed");
        arena.close().expect("nothing is live");
        drop((arena, driver));
        fake.assert_clean();
    }
}
