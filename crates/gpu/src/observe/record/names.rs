//! The names of values that a recording writes as one of a few words.

use super::fields::Names;
use super::operation::{After, BlockKind, Closed, Ended, Sleepless, Why};
use crate::driver::Backend;
use crate::state::region::Region;
use crate::types::compact::StopReason;
use crate::types::sleep::{Contents, SleepState};

/// A value with a name.
pub(super) trait Named: Sized + 'static {
    /// All values with their names.
    const NAMES: Names<Self>;

    /// The names, as an error lists them.
    const EXPECTED: &'static str;
}

/// Implements [`Named`] for enums: the names as an error lists them, and the values.
macro_rules! named {
    ($($type:ident: $expected:literal [$($value:ident),+])+) => { $(
        impl Named for $type {
            const NAMES: Names<Self> = &[$((Self::$value.name(), Self::$value)),+];
            const EXPECTED: &'static str = $expected;
        }
    )+ };
}

/// The same for enums of recordings, and names their values.
macro_rules! names {
    ($($type:ident: $expected:literal [$($value:ident $name:literal),+])+) => { $(
        impl $type {
            /// Returns the name used in recordings.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$value => $name),+
                }
            }
        }

        named! { $type: $expected [$($value),+] }
    )+ };
}

named! {
    Backend: "host, cuda_virtual_memory, cuda_pool, cuda_plain, pinned_host or custom"
        [Host, CudaVirtualMemory, CudaPool, CudaPlain, PinnedHost, Custom]
    Contents: "discard, keep or stay" [Discard, Keep, Stay]
    Region: "stable or dynamic" [Stable, Dynamic]
    SleepState: "awake, draining, asleep or waking" [Awake, Draining, Asleep, Waking]
    StopReason: "finished, busy or failed" [Finished, Busy, Failed]
}

names! {
    After: "lanes or all" [Lanes "lanes", All "all"]
    BlockKind: "buffer, raw or reserve" [Buffer "buffer", Raw "raw", Reserve "reserve"]
    Closed: "done, live_blocks or failed"
        [Done "done", LiveBlocks "live_blocks", Failed "failed"]
    Ended: "gone, finished or full" [Gone "gone", Finished "finished", Full "full"]
    Sleepless: "leased, cancelled, capturing, budget, state or driver"
        [Leased "leased", Cancelled "cancelled", Capturing "capturing", Budget "budget",
         State "state", Driver "driver"]
    Why: "limit, device, addresses, too_large or driver"
        [Limit "limit", Device "device", Addresses "addresses", TooLarge "too_large",
         Driver "driver"]
}
