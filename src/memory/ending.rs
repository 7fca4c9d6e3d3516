//! The signal that the policy for exhaustion ends the process, for futures on tokio.

use std::future::{Future, pending};

use tokio::sync::watch;

/// Completes the futures of `Memory::terminated` when the policy for exhaustion ends the process.
#[derive(Debug, Default)]
pub(super) struct Ending(watch::Sender<bool>);

impl Ending {
    pub(super) fn begin(&self) {
        self.0.send_replace(true);
    }

    /// Returns a future that completes when the end begins. It does not keep the manager running.
    pub(super) fn begun(&self) -> impl Future<Output = ()> + Send + use<> {
        let mut begins = self.0.subscribe();
        async move {
            if begins.wait_for(|begins| *begins).await.is_err() {
                pending::<()>().await; // the manager is gone, and signals are left
            }
        }
    }
}
