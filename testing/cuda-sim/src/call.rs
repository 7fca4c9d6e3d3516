//! The calls of the simulated driver, and their costs in virtual time.
//!
//! A call of the [`Driver`](lowtide_gpu_driver::Driver) consists of several CUDA calls: a commit
//! of three handles is three times create, map and release, and one set-access. Counts, costs and
//! injected failures are per CUDA call, because those are the calls that fail and cost time.
//!
//! Invariant: `Call::ALL[call as usize] == call`.

use lowtide_core::bytes::ByteSize;

/// Declares the calls: the name here, the name in cuda.h, and the guess at its cost: nanoseconds a
/// call, nanoseconds a handle, nanoseconds a MiB.
macro_rules! calls {
    ($($(#[$mark:meta])* $call:ident $name:literal $guess:expr,)*) => {
        /// A call of the CUDA driver.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Call {
            $(
                #[doc = concat!("`", $name, "`")]
                $(#[$mark])*
                $call,
            )*
        }

        impl Call {
            /// All kinds, in order.
            pub const ALL: [Self; Self::COUNT] = [$(Self::$call,)*];
        }

        const TABLE: &[(&str, [u64; 3])] = &[$(($name, $guess),)*];
    };
}

calls! {
    #[default]
    AddressReserve "cuMemAddressReserve" [3_000, 0, 0],
    AddressFree "cuMemAddressFree" [3_000, 0, 0],
    Create "cuMemCreate" [30_000, 0, 1_000],
    Map "cuMemMap" [2_000, 0, 0],
    SetAccess "cuMemSetAccess" [10_000, 10_000, 0],
    Unmap "cuMemUnmap" [10_000, 5_000, 0],
    Release "cuMemRelease" [2_000, 0, 0],
    GetInfo "cuMemGetInfo" [10_000, 0, 0],
    Copy "cuMemcpyDtoD" [10_000, 0, 1_000], // and the wait for it
    CopyAsync "cuMemcpyDtoDAsync" [3_000, 0, 1_000],
    Offload "cuMemcpyDtoHAsync" [3_000, 0, 20_000],
    Restore "cuMemcpyHtoDAsync" [3_000, 0, 20_000],
    HostAlloc "cuMemHostAlloc" [50_000, 0, 100_000],
    HostFree "cuMemFreeHost" [50_000, 0, 50_000],
    StreamCreate "cuStreamCreate" [20_000, 0, 0],
    StreamDestroy "cuStreamDestroy" [10_000, 0, 0],
    StreamWaitEvent "cuStreamWaitEvent" [500, 0, 0],
    StreamSynchronize "cuStreamSynchronize" [5_000, 0, 0],
    StreamIsCapturing "cuStreamIsCapturing" [100, 0, 0],
    BeginCapture "cuStreamBeginCapture" [5_000, 0, 0],
    EndCapture "cuStreamEndCapture" [10_000, 0, 0],
    EventCreate "cuEventCreate" [1_000, 0, 0],
    EventDestroy "cuEventDestroy" [1_000, 0, 0],
    EventRecord "cuEventRecord" [1_000, 0, 0],
    EventQuery "cuEventQuery" [500, 0, 0],
    EventSynchronize "cuEventSynchronize" [5_000, 0, 0],
    Synchronize "cuCtxSynchronize" [10_000, 0, 0],
    Launch "cuLaunchKernel" [3_000, 0, 0],
    LaunchHostFunction "cuLaunchHostFunc" [3_000, 0, 0],
    GraphLaunch "cuGraphLaunch" [5_000, 0, 0],
    GraphDestroy "cuGraphExecDestroy" [5_000, 0, 0],
    RetainHandle "cuMemRetainAllocationHandle" [2_000, 0, 0],
    Alloc "cuMemAlloc" [30_000, 0, 1_000],
    Free "cuMemFree" [30_000, 0, 500],
    AllocManaged "cuMemAllocManaged" [30_000, 0, 1_000],
    AllocAsync "cuMemAllocFromPoolAsync" [3_000, 0, 0],
    FreeAsync "cuMemFreeAsync" [2_000, 0, 0],
    PoolCreate "cuMemPoolCreate" [20_000, 0, 0],
    PoolDestroy "cuMemPoolDestroy" [20_000, 0, 0],
    PoolTrim "cuMemPoolTrimTo" [20_000, 0, 500],
    Set "cuMemsetD8Async" [3_000, 0, 500],
    HostRegister "cuMemHostRegister" [50_000, 0, 100_000],
    HostUnregister "cuMemHostUnregister" [50_000, 0, 50_000],
    StreamQuery "cuStreamQuery" [500, 0, 0],
    GraphInstantiate "cuGraphInstantiate" [20_000, 0, 0],
}

impl Call {
    /// The number of kinds of calls.
    pub const COUNT: usize = TABLE.len();

    /// Returns the function's name in cuda.h, without a version suffix.
    #[must_use]
    pub const fn name(self) -> &'static str {
        TABLE[self as usize].0
    }

    /// Returns `true` if a graph capture may forbid the call by capture modes alone: calls that
    /// allocate or free memory that belongs to no stream. Calls for streams and events also check
    /// the capture itself, and are refused at their own place.
    pub(super) const fn is_unsafe_in_capture(self) -> bool {
        matches!(
            self,
            Self::Alloc
                | Self::Free
                | Self::AllocManaged
                | Self::HostAlloc
                | Self::HostFree
                | Self::HostRegister
                | Self::HostUnregister
        )
    }
}

/// The cost of a call in virtual time. All zero: the call is free.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cost {
    /// Nanoseconds per call.
    pub call_ns: u64,
    /// Nanoseconds per physical handle that the call touches.
    pub handle_ns: u64,
    /// Nanoseconds per MiB; charged when the work is done for a queued copy, otherwise by the call.
    pub mib_ns: u64,
}

/// The costs of all calls.
///
/// The defaults are guesses of the right order of magnitude, for no particular device. They are not
/// measured and support no claim about speed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DriverCosts {
    rows: [Cost; Call::COUNT],
}

impl DriverCosts {
    /// Returns a table in which no call costs anything; the clock then stands still.
    #[must_use]
    pub const fn zero() -> Self {
        Self { rows: [Cost { call_ns: 0, handle_ns: 0, mib_ns: 0 }; Call::COUNT] }
    }

    /// Returns the table with the cost of one call replaced.
    #[must_use]
    pub const fn with(mut self, call: Call, cost: Cost) -> Self {
        self.rows[call as usize] = cost;
        self
    }

    /// Returns the cost of a call.
    #[must_use]
    pub const fn of(&self, call: Call) -> Cost {
        self.rows[call as usize]
    }

    /// Returns the nanoseconds for one call with this many handles and bytes. Saturates.
    #[must_use]
    pub fn nanoseconds(&self, call: Call, handles: u64, bytes: ByteSize) -> u64 {
        let cost = self.of(call);
        let by_handle = cost.handle_ns.saturating_mul(handles);
        let by_byte = u128::from(cost.mib_ns) * u128::from(bytes.get()) / u128::from(MIB);
        let by_byte = u64::try_from(by_byte).unwrap_or(u64::MAX);
        cost.call_ns.saturating_add(by_handle).saturating_add(by_byte)
    }
}

const MIB: u64 = ByteSize::mib(1).get();

impl Default for DriverCosts {
    fn default() -> Self {
        let row = |call: Call| {
            let [call_ns, handle_ns, mib_ns] = TABLE[call as usize].1;
            Cost { call_ns, handle_ns, mib_ns }
        };
        Self { rows: Call::ALL.map(row) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn costs_go_by_call_handle_and_byte_and_do_not_wrap() {
        let cost = Cost { call_ns: 7, handle_ns: 100, mib_ns: 1_000 };
        let costs = DriverCosts::zero().with(Call::Map, cost);
        assert_eq!(costs.nanoseconds(Call::Map, 3, ByteSize::kib(512)), 7 + 300 + 500);
        assert_eq!(costs.nanoseconds(Call::Unmap, 3, ByteSize::kib(512)), 0);
        let dear = Cost { call_ns: u64::MAX, handle_ns: u64::MAX, mib_ns: u64::MAX };
        let costs = costs.with(Call::Map, dear);
        assert_eq!(costs.nanoseconds(Call::Map, u64::MAX, ByteSize::MAX), u64::MAX);
    }

    #[test]
    fn each_call_has_a_name_of_its_own() {
        let names: std::collections::BTreeSet<_> = Call::ALL.map(Call::name).into();
        assert_eq!(names.len(), Call::COUNT);
    }
}
