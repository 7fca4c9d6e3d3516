//! The reclaim step that releases the idle memory of arenas.

use std::sync::Arc;

use crate::memory::shared::Shared;
use crate::sync::{Mutex, lock};
use lowtide_admission::{Ask, Budget, Reclaim, Recovered};

/// Returns the step, for the budget in which arenas count. `joined` is set once the parts are
/// connected.
pub(in crate::memory) fn idle_memory(
    joined: &Arc<Mutex<Option<Arc<Shared>>>>,
    relieves: Budget,
) -> Option<Arc<dyn Reclaim>> {
    Some(Arc::new(IdleMemory { shared: Arc::clone(joined), relieves }))
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
