//! The configuration of a resource, collected by its builder and kept by its cell.
//!
//! Plain values, two closures and the load scope. It loads and unloads nothing.
//!
//! Invariant: nothing in it changes once the cell has it.

use std::sync::Arc;
use std::time::Duration;

use crate::cost::Cost;

use super::load_scope::LoadScope;
use super::{Backoff, LOAD_TIMEOUT};
use lowtide_core::BoxError;

type Loader<T> = Box<dyn Fn() -> Result<T, BoxError> + Send + Sync>;
type Unloader<T> = Box<dyn Fn(T) + Send + Sync>;

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
