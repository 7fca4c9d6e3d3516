use lowtide::ByteSize;
use lowtide::clock::SystemClock;
use lowtide::device::{ArenaConfig, DeviceArena, HostDriver, Region};
use std::sync::Arc;
use std::time::Instant;
fn main() {
    let args: Vec<u64> = std::env::args().skip(1).map(|a| a.parse().unwrap()).collect();
    let (front, rounds) = (ByteSize::mib(args[0]), args[1]);
    for size in [8 << 20] {
        let arena = DeviceArena::open(
            Arc::new(HostDriver::new()),
            Arc::new(SystemClock::new()),
            ArenaConfig { front, ..ArenaConfig::new("a") },
        )
        .unwrap();
        let keep = arena.alloc::<u8>(100, Region::Dynamic).unwrap();
        let mut best = f64::MAX;
        for _ in 0..rounds {
            let t = Instant::now();
            for _ in 0..1000 {
                std::hint::black_box(arena.alloc::<u8>(size, Region::Dynamic).unwrap());
            }
            best = best.min(t.elapsed().as_nanos() as f64 / 1000.0);
        }
        println!("{front} {size} {best:.1} ns contended {}", arena.snapshot().lock_contended_total);
        drop(keep);
    }
}
