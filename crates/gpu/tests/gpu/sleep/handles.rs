//! Handles that blocks touch in part, after a wake that put several blocks into one handle.

use lowtide_cuda_sim::{Order, SimError};
use lowtide_gpu::clock::Clock as _;
use lowtide_gpu::driver::{DeviceAddress, Driver as _};
use lowtide_gpu::{Buffer, ByteSize, DeviceError, Region};

use super::states::NOW;
use super::support::{Bed, MIB, at};

/// Blocks that a wake put into few handles, of which most were freed since. The mark of a block is
/// its number.
fn scattered(bed: &Bed) -> Vec<(u64, Buffer<u8>)> {
    let mut blocks: Vec<_> =
        (0..256).map(|mark| (mark, bed.marked(MIB / 8, Region::Stable, mark))).collect();
    bed.arena.sleep(NOW).expect("asleep");
    bed.arena.wake().expect("awake");
    blocks.retain(|(mark, _)| mark % 4 == 1);
    bed.arena.wait_for_pending().expect("idle");
    blocks
}

/// Lets stuck memory leave, and returns what stays committed.
fn committed(bed: &Bed) -> ByteSize {
    // Each check divides a few handles.
    for _ in 0..8 {
        bed.arena.decay(bed.sim.clock().now()).expect("no error");
    }
    bed.arena.purge().expect("no error");
    bed.arena.snapshot().committed
}

fn addresses(bed: &Bed, blocks: &[(u64, Buffer<u8>)]) -> Vec<DeviceAddress> {
    let lease = bed.arena.enter().expect("a lease");
    let addresses = blocks.iter().map(|(_, buffer)| at(buffer, &lease)).collect();
    drop(lease);
    bed.arena.wait_for_pending().expect("the lease named no lane");
    addresses
}

#[test]
fn idle_memory_in_a_handle_leaves_and_the_blocks_stay_whole_where_they_are() {
    let bed = Bed::new(Order::Lazy);
    let blocks = scattered(&bed);
    let before = addresses(&bed, &blocks);
    let committed = committed(&bed);
    assert!(committed <= ByteSize::mib(9), "{committed}: 64 blocks are live, 8 MiB");
    assert_eq!(addresses(&bed, &blocks), before);
    for (mark, buffer) in &blocks {
        bed.assert_marked(buffer, *mark);
    }
    drop(blocks);
    bed.end();
}

/// A lease is granted between two handles, and while one is held none is divided.
#[test]
fn no_handle_is_divided_while_a_lease_is_held() {
    let bed = Bed::new(Order::Lazy);
    let blocks = scattered(&bed);
    let lease = bed.arena.enter().expect("a lease");
    let before = bed.arena.snapshot().committed;
    assert_eq!(committed(&bed), before, "all is in handles that blocks touch");
    drop(lease);
    bed.arena.wait_for_pending().expect("the lease named no lane");
    assert!(committed(&bed) < before);
    drop(blocks);
    bed.end();
}

/// Raw blocks may be used without a lease, and pinned ones by their address.
#[test]
fn a_handle_with_a_block_that_may_not_move_stays() {
    let bed = Bed::new(Order::Lazy);
    let blocks = scattered(&bed);
    let pins: Vec<_> = blocks.iter().map(|(_, buffer)| buffer.pin()).collect();
    let before = bed.arena.snapshot().committed;
    assert_eq!(committed(&bed), before);
    drop(pins);
    assert!(committed(&bed) < before);
    drop(blocks);
    bed.end();
}

/// Each call of the division fails in turn: the contents are whole, or the blocks say that they are
/// lost, and the next check goes on.
#[test]
fn contents_are_whole_or_known_to_be_lost_wherever_a_call_fails() {
    let (mut lost, mut nth) = (0, 0);
    loop {
        let bed = Bed::new(Order::Lazy);
        let blocks = scattered(&bed);
        let before = bed.sim.calls_total();
        bed.sim.fail_nth(None, nth, SimError::InvalidValue);
        let _ = bed.arena.decay(bed.sim.clock().now()); // the failed call may be its own
        let is_over = bed.sim.calls_total() - before <= nth;
        while is_over && bed.sim.headroom().is_ok() {} // until the planned failure has happened
        for (mark, buffer) in &blocks {
            let lease = bed.arena.enter().expect("a lease");
            match buffer.address(&lease) {
                Ok(_) => bed.assert_marked(buffer, *mark),
                Err(error) => {
                    assert!(matches!(error, DeviceError::ContentsLost { .. }), "{error}");
                    lost += 1;
                }
            }
        }
        drop(blocks);
        bed.end();
        if is_over {
            break;
        }
        nth += 1;
    }
    println!("{nth} calls failed, {lost} blocks lost their contents");
    assert!(nth > 20 && lost > 0);
}
