//! Computes the memory to commit beyond the need of a block: doubling steps, or nothing.
//!
//! Pure arithmetic: ONNX Runtime's `kNextPowerOfTwo` with one difference: the cap also applies to
//! growth forced by a request, so 1.1 GiB under a cap of 1 GiB commits 1.1 GiB and not 2.
//!
//! Invariant: `needed <= committed by one step <= max(needed, cap, room)`.

use crate::types::Growth;

/// The steps of one arena.
#[derive(Debug)]
pub(crate) struct GrowthSteps {
    growth: Growth,
    /// The next step, in bytes.
    next: u64,
}

impl GrowthSteps {
    pub(crate) const fn new(growth: Growth) -> Self {
        let next = match growth {
            Growth::SameAsRequested => 0,
            Growth::NextPowerOfTwo { initial, .. } => initial.get(),
        };
        Self { growth, next }
    }

    /// Returns `true` if a commit may be larger than needed.
    pub(crate) const fn grow(&self) -> bool {
        matches!(self.growth, Growth::NextPowerOfTwo { .. })
    }

    /// Returns the bytes to commit if `needed` are needed and the limit leaves `room`.
    pub(crate) fn commit(&mut self, needed: u64, room: u64) -> u64 {
        let Growth::NextPowerOfTwo { cap, .. } = self.growth else { return needed };
        let cap = cap.get();
        if needed >= cap {
            return needed;
        }
        let mut step = self.next.clamp(1, cap);
        let raised = step < needed;
        // At most 64 doublings.
        while step < needed {
            step = step.saturating_mul(2).min(cap);
        }
        self.next = if raised { step } else { step.saturating_mul(2).min(cap) };
        step.min(room).max(needed)
    }

    /// Restarts after a shrink.
    pub(crate) const fn shrunk(&mut self) {
        if let Growth::NextPowerOfTwo { after_shrink, .. } = self.growth {
            self.next = after_shrink.get();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lowtide_core::bytes::ByteSize;

    const MIB: u64 = 1 << 20;

    fn doubling() -> GrowthSteps {
        GrowthSteps::new(Growth::NextPowerOfTwo {
            initial: ByteSize::mib(1),
            after_shrink: ByteSize::mib(2),
            cap: ByteSize::gib(1),
        })
    }

    #[test]
    fn steps_double_up_to_the_cap_and_start_anew_after_a_shrink() {
        let mut steps = doubling();
        let taken = [(); 12].map(|()| steps.commit(MIB, u64::MAX) / MIB);
        assert_eq!(taken, [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 1024]);
        steps.shrunk();
        assert_eq!(steps.commit(MIB, u64::MAX), 2 * MIB);
    }

    /// Regression test for a bug of ONNX Runtime's arena: its cap bounds the automatic growth only.
    #[test]
    fn the_cap_holds_for_growth_that_a_request_forces() {
        let mut steps = doubling();
        assert_eq!(steps.commit(1126 * MIB, u64::MAX), 1126 * MIB, "not 2 GiB");
        assert_eq!(steps.commit(600 * MIB, u64::MAX), 1024 * MIB);
        assert_eq!(steps.commit(600 * MIB, 700 * MIB), 700 * MIB, "the limit's room");
        assert_eq!(GrowthSteps::new(Growth::SameAsRequested).commit(3 * MIB, u64::MAX), 3 * MIB);
    }
}
