//! Host memory for contents: booked before the copy, given back after the wake unless it is to
//! stay.
//!
//! Invariant: `booked >= offloaded`.

use std::sync::{Arc, Mutex};

use lowtide_cuda_sim::{Call, Order, SimError};
use lowtide_gpu::ByteSize;
use lowtide_gpu::clock::Clock as _;
use lowtide_gpu::{Contents, HostBudget, Region, SleepOptions};

use super::states::NOW;
use super::support::{Bed, MIB};

/// Books up to so much.
struct Budget {
    left: Mutex<u64>,
}

struct Booked(Arc<Budget>, u64);

impl Drop for Booked {
    fn drop(&mut self) {
        *self.0.left.lock().expect("whole") += self.1;
    }
}

struct Shared(Arc<Budget>);

impl HostBudget for Shared {
    fn reserve(&self, bytes: ByteSize) -> Result<Box<dyn std::any::Any + Send>, String> {
        let mut left = self.0.left.lock().expect("whole");
        if *left < bytes.get() {
            return Err(format!("{} left", ByteSize::new(*left)));
        }
        *left -= bytes.get();
        Ok(Box::new(Booked(Arc::clone(&self.0), bytes.get())))
    }
}

#[test]
fn host_memory_is_booked_before_a_copy_and_given_back_after_the_wake() {
    let bed = Bed::new(Order::Lazy);
    let budget = Arc::new(Budget { left: Mutex::new(4 << 20) });
    bed.arena.set_host_budget(Arc::new(Shared(Arc::clone(&budget))));
    let left = || *budget.left.lock().expect("whole") >> 20;
    let mut kept = vec![bed.marked(4 * MIB, Region::Dynamic, 1)];
    bed.arena.sleep(NOW).expect("asleep");
    assert_eq!(left(), 0);
    bed.arena.wake().expect("awake");
    assert_eq!(left(), 4);
    kept.push(bed.marked(MIB, Region::Stable, 2));
    let calls = bed.sim.calls(Call::HostAlloc);
    let refused = bed.arena.sleep(NOW).expect_err("over budget");
    assert_eq!(
        refused.to_string(),
        "arena \"sleeper\" cannot sleep: cannot reserve 5.0 MiB of host memory: 4.0 MiB left"
    );
    assert_eq!((bed.sim.calls(Call::HostAlloc), left()), (calls, 4));
    for (mark, buffer) in (1..).zip(&kept) {
        bed.assert_marked(buffer, mark);
    }
    bed.arena.sleep(SleepOptions { stable: Contents::Discard, ..NOW }).expect("asleep");
    assert_eq!(left(), 0);
    drop(kept);
    bed.end();
    assert_eq!(left(), 4, "the end of the arena gives it back as well");
}

#[test]
fn host_memory_stays_between_sleeps_where_that_is_asked_for() {
    let bed = Bed::with(Order::Lazy, |config| config.sleep.keep_stores = true);
    let budget = Arc::new(Budget { left: Mutex::new(8 << 20) });
    bed.arena.set_host_budget(Arc::new(Shared(Arc::clone(&budget))));
    let left = || *budget.left.lock().expect("whole") >> 20;
    let calls = || (bed.sim.calls(Call::HostAlloc), bed.sim.calls(Call::HostFree));
    let turn = || {
        bed.arena.sleep(NOW).expect("asleep");
        bed.arena.wake().expect("awake");
    };
    let mut kept = vec![bed.marked(4 * MIB, Region::Dynamic, 1)];
    let before = calls();
    for _ in 0..3 {
        turn();
        assert_eq!((left(), bed.arena.snapshot().offloaded), (4, ByteSize::mib(4)));
    }
    assert_eq!(calls(), (before.0 + 1, before.1), "one store for three sleeps");
    // Less than there is: it does. More: it is had anew.
    bed.mark(&kept[0], &bed.arena.enter().expect("a lease"), 3);
    drop(kept.pop());
    kept.push(bed.marked(MIB, Region::Dynamic, 2));
    turn();
    assert_eq!(left(), 4);
    kept.push(bed.marked(7 * MIB, Region::Stable, 3));
    turn();
    assert_eq!((left(), calls()), (0, (before.0 + 2, before.1 + 1)));
    // What stays goes when it is told to, and with the arena; not while it holds contents.
    bed.arena.sleep(NOW).expect("asleep");
    assert_eq!(bed.arena.release_stores(), ByteSize::ZERO);
    bed.arena.wake().expect("awake");
    assert_eq!(bed.arena.release_stores(), ByteSize::mib(8));
    assert_eq!((left(), bed.arena.snapshot().offloaded), (8, ByteSize::ZERO));
    turn();
    bed.arena.set_keep_stores(false);
    assert_eq!(left(), 8);
    turn();
    assert_eq!(left(), 8);
    bed.arena.set_keep_stores(true);
    turn();
    for (mark, buffer) in (2..).zip(&kept) {
        bed.assert_marked(buffer, mark);
    }
    drop(kept);
    bed.end();
    assert_eq!(left(), 8, "the end of the arena gives it back as well");
}

#[test]
fn host_memory_that_is_not_taken_back_stays_booked_and_is_tried_again() {
    let bed = Bed::new(Order::Lazy);
    let budget = Arc::new(Budget { left: Mutex::new(4 << 20) });
    bed.arena.set_host_budget(Arc::new(Shared(Arc::clone(&budget))));
    let left = || *budget.left.lock().expect("whole") >> 20;
    let kept = bed.marked(MIB, Region::Dynamic, 1);
    bed.arena.sleep(NOW).expect("asleep");
    bed.sim.fail_always(Call::HostFree, Some(SimError::Unknown));
    bed.arena.wake().expect("awake all the same");
    assert_eq!((left(), bed.arena.snapshot().offloaded), (3, ByteSize::mib(1)));
    bed.assert_marked(&kept, 1);
    bed.sim.forget_failures();
    bed.arena.decay(bed.sim.clock().now()).expect("no error");
    assert_eq!((left(), bed.arena.snapshot().offloaded), (4, ByteSize::ZERO));
    drop(kept);
    bed.end();
}
