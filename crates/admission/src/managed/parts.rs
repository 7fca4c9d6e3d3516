//! The configuration of a resource, collected by its builder and kept by its cell.
//!
//! Plain values, two closures and the load scope. It loads and unloads nothing.
//!
//! Invariant: nothing in it changes once the cell has it.

use std::sync::Arc;
use std::time::Duration;

use crate::cost::Cost;

use super::load_scope::LoadScope;
use lowtide_core::BoxError;

type Loader<T> = Box<dyn Fn() -> Result<T, BoxError> + Send + Sync>;
type Unloader<T> = Box<dyn Fn(T) + Send + Sync>;

/// The default load timeout: enough for 60 GiB at 100 MiB/s. A guess.
const LOAD_TIMEOUT: Duration = Duration::from_secs(600);

/// The pause after a failed load. It doubles with each failure in a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Backoff {
    /// The pause after the first failure.
    pub first: Duration,
    /// The longest pause.
    pub max: Duration,
}

impl Backoff {
    /// Returns the pause after this many failures in a row; zero after none.
    #[must_use]
    pub fn pause(self, failures: u32) -> Duration {
        let Some(doublings) = failures.checked_sub(1) else { return Duration::ZERO };
        let factor = 1_u32.checked_shl(doublings).unwrap_or(u32::MAX);
        self.first.saturating_mul(factor).min(self.max)
    }
}

impl Default for Backoff {
    /// 250 ms to 30 s. A guess.
    fn default() -> Self {
        Self { first: Duration::from_millis(250), max: Duration::from_secs(30) }
    }
}

/// The values that a builder collects.
pub(super) struct Parts<T> {
    pub(super) name: Arc<str>,
    pub(super) loader: Loader<T>,
    pub(super) unload: Unloader<T>,
    pub(super) load_scope: Option<Arc<dyn LoadScope>>,
    pub(super) idle: Option<Duration>,
    pub(super) min_residency: Duration,
    pub(super) cost: Cost,
    pub(super) backoff: Backoff,
    /// `None` for no timeout.
    pub(super) load_timeout: Option<Duration>,
}

impl<T: 'static> Parts<T> {
    pub(super) fn new(name: Arc<str>, loader: Loader<T>) -> Self {
        Self {
            name,
            loader,
            unload: Box::new(drop),
            load_scope: None,
            idle: None,
            min_residency: Duration::ZERO,
            cost: Cost::ZERO,
            backoff: Backoff::default(),
            load_timeout: Some(LOAD_TIMEOUT),
        }
    }
}
