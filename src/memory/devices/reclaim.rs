//! The reclaim steps that release the idle memory of arenas, and their host memory without
//! contents.

use std::sync::Arc;

use crate::bytes::ByteSize;
use crate::memory::error::Diagnostic;
use crate::memory::shared::Shared;
use crate::sync::{Mutex, lock};
use lowtide_admission::{Admission, Budget, Reclaim};

use super::device::Counted;
use super::state::Devices;

impl Devices {
    /// Makes admission use one budget if the memory of arenas is in the host's. Returns the reclaim
    /// steps of arenas, and `true` if some device has memory of its own.
    pub(in crate::memory) fn settle_budgets(
        &self,
        admission: &Admission,
        joined: &Arc<Mutex<Option<Arc<Shared>>>>,
        diagnostics: &mut Vec<Diagnostic>,
    ) -> (Vec<Arc<dyn Reclaim>>, bool) {
        if !self.has_own_memory() {
            admission.state().unify();
        }
        if self.list.iter().any(|device| device.counted == Counted::BesideKernel) {
            let text = "the device has no memory of its own: memory committed by arenas counts \
                        against the host's memory limit, and there is no device budget";
            diagnostics.push(Diagnostic::info("device", text.to_owned()));
        }
        (self.reclaim_steps(joined), self.any_own_memory())
    }

    /// Returns the steps, for the budget in which arenas count. `joined` is set once the parts are
    /// connected.
    fn reclaim_steps(&self, joined: &Arc<Mutex<Option<Arc<Shared>>>>) -> Vec<Arc<dyn Reclaim>> {
        let shared = || Arc::clone(joined);
        let relieves = if self.has_own_memory() { Budget::Device } else { Budget::Host };
        let stores = Arc::new(IdleStores { shared: shared() });
        vec![stores, Arc::new(IdleMemory { shared: shared(), relieves })]
    }
}

/// The host memory that arenas keep for their next sleep.
struct IdleStores {
    shared: Arc<Mutex<Option<Arc<Shared>>>>,
}

impl Reclaim for IdleStores {
    fn name(&self) -> &'static str {
        "host memory for sleeping arenas"
    }

    fn relieves(&self) -> Budget {
        Budget::Host
    }

    fn cost_rank(&self) -> u8 {
        0
    }

    fn reclaim(&self, _: ByteSize) -> ByteSize {
        let shared = lock(&self.shared).clone();
        shared.map_or(ByteSize::ZERO, |shared| shared.release_stores())
    }
}

struct IdleMemory {
    shared: Arc<Mutex<Option<Arc<Shared>>>>,
    relieves: Budget,
}

impl Reclaim for IdleMemory {
    fn name(&self) -> &'static str {
        "idle device memory"
    }

    fn relieves(&self) -> Budget {
        self.relieves
    }

    fn cost_rank(&self) -> u8 {
        0
    }

    fn reclaim(&self, _: ByteSize) -> ByteSize {
        let shared = lock(&self.shared).clone();
        shared.map_or(ByteSize::ZERO, |shared| shared.purge_arenas())
    }
}
