//! The reclaim steps that release the idle memory of arenas, and their host memory without
//! contents.

use std::sync::Arc;

use crate::memory::shared::Shared;
use crate::sync::{Mutex, lock};
use lowtide_admission::{Ask, Budget, Reclaim, Recovered};

use super::state::Devices;

impl Devices {
    /// Returns the steps, for the budget in which arenas count. `joined` is set once the parts are
    /// connected.
    pub(super) fn reclaim_steps(
        &self,
        joined: &Arc<Mutex<Option<Arc<Shared>>>>,
    ) -> Vec<Arc<dyn Reclaim>> {
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

    fn reclaim(&self, _ask: Ask) -> Recovered {
        let shared = lock(&self.shared).clone();
        shared.map_or(Recovered::NOTHING, |shared| Recovered::of(shared.release_stores()))
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

    fn reclaim(&self, _ask: Ask) -> Recovered {
        let shared = lock(&self.shared).clone();
        shared.map_or(Recovered::NOTHING, |shared| shared.purge_arenas())
    }
}
