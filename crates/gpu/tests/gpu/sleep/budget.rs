//! The host's budget and the stores: what who books is told, in which order, what becomes of
//! host memory when others give idle memory back, or the arena ends, in between.

use std::any::Any;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use lowtide_cuda_sim::{Call, Order, SimDriver, SimError};
use lowtide_gpu::ByteSize;
use lowtide_gpu::{Contents, DeviceError, HostBudget, Region, SleepOptions, SleepState};

use super::support::{Bed, MIB};

const NOW: SleepOptions =
    SleepOptions { drain: Duration::ZERO, stable: Contents::Keep, dynamic: Contents::Keep };

/// Writes down what it is told, and how many copies the device had been given by then.
struct Teller {
    sim: Arc<SimDriver>,
    told: Arc<Mutex<Vec<String>>>,
    panics: bool,
}

struct Booked(Arc<Mutex<Vec<String>>>, bool);

fn tell(told: &Mutex<Vec<String>>, what: String) {
    told.lock().expect("whole").push(what);
}

impl Drop for Booked {
    fn drop(&mut self) {
        tell(&self.0, "given back".to_owned());
        assert!(!self.1, "planted");
    }
}

impl HostBudget for Teller {
    fn reserve(&self, bytes: ByteSize) -> Result<Box<dyn Any + Send>, String> {
        let (stores, copies) = (self.sim.calls(Call::HostAlloc), self.sim.calls(Call::Offload));
        tell(&self.told, format!("{bytes} booked at {stores} stores and {copies} copies"));
        Ok(Box::new(Booked(Arc::clone(&self.told), self.panics)))
    }

    fn settle(&self, booked: &mut (dyn Any + Send)) {
        assert!(booked.is::<Booked>(), "what it gave");
        let (copies, late) = (self.sim.calls(Call::Offload), self.sim.unfinished());
        tell(&self.told, format!("settled at {copies} copies, {late} under way"));
        assert!(!self.panics, "planted");
    }
}

fn tellers(bed: &Bed, panics: bool) -> Arc<Mutex<Vec<String>>> {
    let told: Arc<Mutex<Vec<String>>> = Arc::default();
    let teller = Teller { sim: bed.sim.clone(), told: Arc::clone(&told), panics };
    bed.arena.set_host_budget(Arc::new(teller));
    told
}

fn take(told: &Mutex<Vec<String>>) -> Vec<String> {
    std::mem::take(&mut told.lock().expect("whole"))
}

#[test]
fn who_books_is_told_before_the_first_copy_after_the_last_and_when_the_memory_is_back() {
    let bed = Bed::new(Order::Lazy);
    let told = tellers(&bed, false);
    let kept = [1, 2].map(|mark| bed.marked(MIB, Region::ALL[mark - 1], mark as u64));
    bed.arena.sleep(NOW).expect("asleep");
    let expected = ["2.0 MiB booked at 0 stores and 0 copies", "settled at 0 copies, 0 under way"];
    assert_eq!(take(&told), expected);
    bed.arena.wake().expect("awake");
    bed.arena.purge().expect("no error");
    assert_eq!(take(&told), ["given back"]);
    // What could not be copied goes at once.
    bed.sim.fail_nth(Some(Call::Offload), 1, SimError::Unknown);
    assert!(bed.arena.sleep(NOW).is_err());
    let booked = "2.0 MiB booked at 1 stores and 2 copies";
    assert_eq!(take(&told), [booked, "settled at 2 copies, 0 under way", "given back"]);
    bed.sim.fail_nth(Some(Call::HostAlloc), 0, SimError::OutOfMemory);
    assert!(bed.arena.sleep(NOW).is_err());
    assert_eq!(take(&told).last().map(String::as_str), Some("given back"), "without a store");
    bed.assert_all_marked(1, &kept);
    drop(kept);
    bed.end();
}

#[test]
fn a_budget_that_panics_stops_neither_sleep_nor_wake_nor_the_end() {
    let bed = Bed::new(Order::Lazy);
    let told = tellers(&bed, true);
    let kept = bed.marked(MIB, Region::Stable, 1);
    bed.arena.sleep(NOW).expect("asleep");
    bed.assert_marked(&kept, 1);
    bed.arena.purge().expect("no error");
    assert_eq!(take(&told).last().map(String::as_str), Some("given back"));
    bed.arena.sleep(NOW).expect("asleep");
    assert_eq!(take(&told).len(), 2);
    // Dropped in its sleep, with the last handle.
    let Bed { sim, arena, stream } = bed;
    drop((kept, arena));
    assert_eq!(take(&told), ["given back"]);
    sim.stream_destroy(stream).expect("a stream");
    sim.assert_no_faults();
    assert!(sim.leaks().is_empty(), "{:?}", sim.leaks());
}

/// The bug: a purge, which tries again to give back a store that the driver had refused, waited for
/// the copies that another thread had queued until then, and noted that none was under way. Where a
/// later copy failed, its store was given back while copies to it ran.
#[test]
fn a_purge_beside_copies_noted_that_there_were_none() {
    let bed = Bed::new(Order::Lazy);
    let mut kept = [1, 2, 3].map(|mark| bed.marked(MIB, Region::Stable, mark));
    kept[1].set_contents(Some(Contents::Discard)).expect("here");
    let other = bed.marked(MIB, Region::Dynamic, 4);
    bed.sim.fail_always(Call::HostFree, Some(SimError::Unknown));
    bed.sim.fail_nth(Some(Call::Offload), 1, SimError::Unknown);
    assert!(bed.arena.sleep(NOW).is_err());
    assert!(!bed.arena.snapshot().offloaded.is_zero(), "a store is left");
    bed.sim.forget_failures();
    let arena = bed.arena.clone();
    bed.sim.before(Call::Offload, 1, move || {
        arena.purge().expect("no error");
    });
    bed.sim.fail_nth(Some(Call::Offload), 2, SimError::Unknown);
    let failed = bed.arena.sleep(NOW).expect_err("the third copy");
    assert!(matches!(failed, DeviceError::Driver(_)), "{failed}");
    bed.sim.run_all();
    bed.sim.assert_no_faults();
    assert_eq!(bed.arena.state(), SleepState::Awake);
    assert_eq!(bed.arena.snapshot().offloaded, ByteSize::ZERO, "both stores are back");
    bed.assert_all_marked(1, &kept);
    drop((kept, other));
    bed.end();
}

/// Asks the arena, or the device, when what it booked is given back.
struct Asks<F>(F);

struct Asked<F: Fn()>(F);

impl<F: Fn()> Drop for Asked<F> {
    fn drop(&mut self) {
        self.0();
    }
}

impl<F: Fn() + Clone + Send + Sync + 'static> HostBudget for Asks<F> {
    fn reserve(&self, _: ByteSize) -> Result<Box<dyn Any + Send>, String> {
        Ok(Box::new(Asked(self.0.clone())))
    }
}

/// The end of an arena that sleeps, and a wake, give the stores back first: until then the bytes
/// are the host's.
#[test]
fn a_booking_goes_after_the_stores_it_is_for() {
    for wakes in [false, true] {
        let bed = Bed::new(Order::Lazy);
        let seen: Arc<Mutex<Vec<u64>>> = Arc::default();
        let (sim, see) = (bed.sim.clone(), Arc::clone(&seen));
        let look = move || see.lock().expect("whole").push(sim.leaks().host_stores as u64);
        bed.arena.set_host_budget(Arc::new(Asks(look)));
        let kept = bed.marked(MIB, Region::Stable, 1);
        bed.arena.sleep(NOW).expect("asleep");
        assert_eq!(bed.sim.leaks().host_stores, 1);
        if wakes {
            bed.arena.wake().expect("awake");
        }
        let Bed { sim, arena, stream } = bed;
        drop((kept, arena));
        assert_eq!(*seen.lock().expect("whole"), [0], "stores that were there still");
        sim.stream_destroy(stream).expect("a stream");
        sim.assert_no_faults();
        assert_eq!(sim.leaks().host_stores, 0);
    }
}

/// Long for a look at an arena.
const LONG: Duration = Duration::from_secs(20);

/// Whoever books may ask the arena when the booking goes: no lock is held.
#[test]
fn a_booking_goes_with_no_lock_held() {
    let bed = Bed::new(Order::Lazy);
    let kept = bed.marked(MIB, Region::Stable, 1);
    let arena = bed.arena.clone();
    let (told, tell) = std::sync::mpsc::channel();
    let asks = move || {
        let (arena, (look, looked)) = (arena.clone(), std::sync::mpsc::channel());
        // A thread that looks would wait for ever for a lock that this one holds.
        std::thread::spawn(move || look.send(arena.snapshot().offloaded));
        told.send(looked.recv_timeout(LONG)).expect("heard");
    };
    bed.arena.set_host_budget(Arc::new(Asks(asks)));
    bed.arena.sleep(NOW).expect("asleep");
    bed.arena.wake().expect("awake");
    bed.arena.purge().expect("no error");
    assert_eq!(tell.try_recv(), Ok(Ok(ByteSize::ZERO)));
    // Where it could not be copied.
    bed.sim.fail_nth(Some(Call::Offload), 0, SimError::Unknown);
    assert!(bed.arena.sleep(NOW).is_err());
    assert_eq!(tell.try_recv(), Ok(Ok(ByteSize::ZERO)));
    bed.arena.set_host_budget(Arc::new(Asks(|| {}))); // the other one holds the arena
    bed.assert_marked(&kept, 1);
    drop(kept);
    bed.end();
}
