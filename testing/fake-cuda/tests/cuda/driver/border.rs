//! Memory that crosses the border of an arena over CUDA: lent to cudarc by its address, adopted
//! from it, released through its raw calls. Work is done as late as may be.
//!
//! Invariant: what a stream that the arena does not know was given comes before what the arena
//! does next with that memory.
#![expect(unsafe_code, reason = "memory of cudarc's raw calls is adopted")]

use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::{CudaContext, CudaSlice, CudaStream, result};
use lowtide::ByteSize;
use lowtide_fake_cuda::Fake;
use lowtide_gpu::driver::{DeviceAddress, Driver as _};
use lowtide_gpu::{DeviceError, Imported, Region, SleepOptions};

use super::support::{Bed, LAZY, UNIT, check, end, start, write};

/// A slice over an address, as a library makes one; it frees nothing.
fn foreign(stream: &Arc<CudaStream>, at: DeviceAddress, len: usize) -> ManuallyDrop<CudaSlice<u8>> {
    // SAFETY: the tests keep the memory while they use it, and the slice is never dropped.
    ManuallyDrop::new(unsafe { stream.upgrade_device_ptr(at.get(), len) })
}

/// Lets go of it, without a wait of its stream.
fn let_go(slice: ManuallyDrop<CudaSlice<u8>>) {
    let _ = ManuallyDrop::into_inner(slice).leak();
}

/// Memory of cudarc's plain call, and what frees it.
fn theirs(bed: &Bed, size: usize) -> DeviceAddress {
    bed.context.bind_to_thread().expect("current");
    // SAFETY: freed by `frees`, once.
    let at = unsafe { result::malloc_sync(size) }.expect("room");
    DeviceAddress::new(at)
}

fn frees(context: &Arc<CudaContext>) -> impl FnOnce(DeviceAddress, ByteSize) + Send + 'static {
    let context = Arc::clone(context);
    move |at, _| {
        context.bind_to_thread().expect("current");
        // SAFETY: it came of `theirs`, and a release is called once.
        unsafe { result::free_sync(at.get()) }.expect("freed");
    }
}

/// Lends a buffer to a stream of others, frees it while that is at work, and returns `true` if the
/// next buffer holds its own bytes.
fn next_after_a_loan() -> bool {
    let (fake, bed, arena, lane) = start();
    let exported =
        lane.alloc::<u8>(2 * UNIT, Region::Dynamic).expect("room").export().expect("awake");
    let mut slice = foreign(&bed.two, exported.address(), exported.buffer().len());
    bed.two.memcpy_htod(&vec![9; 2 * UNIT], &mut *slice).expect("queued");
    drop(exported);
    let mut next = lane.alloc::<u8>(2 * UNIT, Region::Dynamic).expect("room");
    write(&bed.one, &mut next, 1).expect("queued");
    bed.one.synchronize().expect("done");
    bed.two.synchronize().expect("done");
    let bytes = super::support::read(&bed.one, &next).expect("read");
    let_go(slice);
    drop(next);
    end((fake, bed, arena, lane));
    bytes.iter().all(|&byte| byte == 1)
}

#[test]
fn what_was_lent_to_a_stream_of_others_is_waited_for() {
    assert!(next_after_a_loan());
}

#[test]
fn a_buffer_that_comes_back_from_a_loan_has_its_view_and_its_contents_through_a_sleep() {
    let (fake, bed, arena, lane) = start();
    let exported =
        lane.alloc::<u8>(2 * UNIT, Region::Stable).expect("room").export().expect("awake");
    let mut slice = foreign(&bed.two, exported.address(), exported.buffer().len());
    bed.two.memcpy_htod(&vec![9; 2 * UNIT], &mut *slice).expect("queued");
    let_go(slice);
    let options = SleepOptions { drain: Duration::ZERO, ..SleepOptions::default() };
    assert!(matches!(arena.sleep(options), Err(DeviceError::Exported { count: 1, .. })));
    let buffer = exported.end();
    arena.sleep(options).expect("after that work");
    check(&bed.one, &buffer, 9);
    drop(buffer);
    end((fake, bed, arena, lane));
}

#[test]
fn memory_of_cudarcs_is_viewed_and_freed_once_after_all_work() {
    let (fake, bed, arena, lane) = start();
    let at = theirs(&bed, UNIT);
    // SAFETY: nobody else uses it until `frees` is called.
    let mut imported = unsafe { lane.import::<u8>(at, UNIT, frees(&bed.context)) }.expect("theirs");
    let lease = lane.enter().expect("awake");
    let mut view = imported.cuda_mut(&lease).expect("a view");
    bed.two.memcpy_htod(&vec![5; UNIT], &mut view).expect("queued");
    let read = bed.one.clone_dtoh(imported.cuda(&lease).expect("a view")).expect("queued");
    bed.one.synchronize().expect("done");
    assert_eq!(read, vec![5; UNIT]);
    drop(lease);
    let before = fake.calls(c"cuMemFree_v2");
    drop(imported);
    assert_eq!(fake.calls(c"cuMemFree_v2"), before, "a drop frees nothing");
    arena.purge().expect("waited");
    assert_eq!(fake.calls(c"cuMemFree_v2"), before + 1);
    assert_eq!(arena.snapshot().imported_count, 0);
    end((fake, bed, arena, lane));
}

#[test]
fn a_value_that_was_not_adopted_on_a_stream_of_cudarcs_has_no_view() {
    let (fake, bed, arena, lane) = start();
    let at = theirs(&bed, UNIT);
    // SAFETY: nobody else uses it until `frees` is called.
    let imported = unsafe { arena.import::<u8>(at, UNIT, frees(&bed.context)) };
    let mut imported: Imported<u8> = imported.expect("theirs");
    let lease = lane.enter().expect("awake");
    assert!(matches!(imported.cuda(&lease), Err(DeviceError::NoStream { .. })));
    assert!(matches!(imported.cuda_mut(&lease), Err(DeviceError::NoStream { .. })));
    assert_eq!(imported.address(&lease), Ok(at));
    drop(lease);
    imported.release().expect("done");
    end((fake, bed, arena, lane));
}

#[test]
fn memory_of_another_device_or_of_none_is_not_adopted() {
    let (fake, bed, arena, lane) = start();
    let other = CudaContext::new(1).expect("the other device");
    other.bind_to_thread().expect("current");
    // SAFETY: freed below.
    let elsewhere = DeviceAddress::new(unsafe { result::malloc_sync(UNIT) }.expect("room"));
    let here = theirs(&bed, UNIT);
    let nowhere = DeviceAddress::new(here.get() + (1 << 30));
    for (at, len) in [(elsewhere, UNIT), (nowhere, 16), (here, 1 << 30)] {
        // SAFETY: it is refused.
        let refused = unsafe { arena.import::<u8>(at, len, |_, _| panic!("not adopted")) };
        let error = refused.expect_err("not this device's");
        let DeviceError::Import { at: named, reason, .. } = &error else { panic!("{error}") };
        assert!(*named == at && reason.starts_with("it is "), "{error}");
    }
    fake.fail(c"cuPointerGetAttribute", 1, 999);
    // SAFETY: it is refused.
    let error = unsafe { arena.import::<u8>(here, 16, |_, _| panic!("not adopted")) };
    assert!(matches!(error, Err(DeviceError::Driver(_))), "{error:?}");
    assert_eq!(bed.driver.foreign_memory(here, ByteSize::of(UNIT)), Ok(None));
    frees(&bed.context)(here, ByteSize::of(UNIT));
    frees(&other)(elsewhere, ByteSize::of(UNIT));
    drop(other);
    end((fake, bed, arena, lane));
}

#[test]
fn a_driver_that_cannot_say_whose_memory_it_is_is_believed() {
    use lowtide_gpu::driver::cuda::{CudaDriver, CudaOptions};
    let fake = Fake::start(LAZY);
    let has = |name: &str| name != "cuPointerGetAttribute";
    let driver = CudaDriver::open_with(CudaOptions::default(), &has).expect("a device");
    let size = ByteSize::of(UNIT);
    assert_eq!(driver.foreign_memory(DeviceAddress::new(1 << 40), size), Ok(None));
    drop(driver);
    fake.assert_clean();
}

#[test]
fn a_context_that_is_lost_releases_nothing_and_says_so_once_a_look() {
    let (fake, bed, arena, lane) = start();
    let at = theirs(&bed, UNIT);
    // SAFETY: nobody else uses it.
    let imported = unsafe { arena.import::<u8>(at, UNIT, |_, _| panic!("not after a loss")) };
    drop(imported.expect("theirs"));
    fake.poison(0, 719);
    for _ in 0..2 {
        assert!(matches!(arena.purge(), Err(DeviceError::Driver(_))));
    }
    assert_eq!(arena.snapshot().releases_total, 0);
    drop((lane, arena, bed));
    fake.validate(0);
}

/// Page-locked host memory has a device by `cuPointerGetAttribute`: it was taken for the device's.
#[test]
fn page_locked_host_memory_is_not_adopted_and_managed_memory_is() {
    use cudarc::driver::sys;
    let (fake, bed, arena, lane) = start();
    bed.context.bind_to_thread().expect("current");
    // SAFETY: freed below, once; nobody reads it.
    let locked = unsafe { result::malloc_host(UNIT, 0) }.expect("room");
    let at = DeviceAddress::new(locked.addr() as u64);
    assert_eq!(bed.driver.foreign_memory(at, ByteSize::of(UNIT)), Ok(Some("host memory")));
    // SAFETY: it is refused.
    let refused = unsafe { arena.import::<u8>(at, UNIT, |_, _| panic!("not adopted")) };
    let error = refused.expect_err("it is the host's");
    assert!(matches!(error, DeviceError::Import { .. }), "{error}");
    // SAFETY: it came of `malloc_host`, and nobody uses it.
    unsafe { result::free_host(locked) }.expect("freed");
    let flags = sys::CUmemAttach_flags::CU_MEM_ATTACH_GLOBAL;
    // SAFETY: freed by the release, once.
    let managed = unsafe { result::malloc_managed(UNIT, flags) }.expect("room");
    let at = DeviceAddress::new(managed);
    assert_eq!(bed.driver.foreign_memory(at, ByteSize::of(UNIT)), Ok(None));
    // SAFETY: nobody else uses it until it is released.
    let imported = unsafe { arena.import::<u8>(at, UNIT, frees(&bed.context)) };
    imported.expect("managed memory is the device's").release().expect("done");
    end((fake, bed, arena, lane));
}
