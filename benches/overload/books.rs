//! The state of lowtide's ledger while it was full, which tells why it served no more.
//!
//! A thread of the service reads three atomics each 10 ms; it changes nothing. Invariant: the two
//! lists are as long as each other.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use lowtide::Memory;
use lowtide_admission::Budget;

use crate::measures::MIB;

/// Looks that are kept: five minutes of them, so that the lists never grow while it is measured.
const KEPT: usize = 30_000;
const EVERY: Duration = Duration::from_millis(10);

/// The records: correction factors, and reserved MiB.
#[derive(Clone, Debug)]
pub(crate) struct Books(Arc<Mutex<(Vec<f64>, Vec<f64>)>>);

impl Books {
    /// Looks at this ledger from now on.
    pub(crate) fn watch(memory: &Memory, budget: Budget) -> std::io::Result<Self> {
        let books =
            Self(Arc::new(Mutex::new((Vec::with_capacity(KEPT), Vec::with_capacity(KEPT)))));
        let (kept, admission) = (books.clone(), memory.admission().clone());
        // Ends with the process, or with its room.
        std::thread::Builder::new().name("books".to_owned()).spawn(move || {
            for _ in 0..KEPT {
                let ledger = admission.ledger(budget);
                let (reserved, allowance) = (ledger.reserved(), ledger.allowance());
                if reserved.as_f64() * 2.0 >= allowance.as_f64() {
                    let mut all = kept.0.lock().unwrap_or_else(PoisonError::into_inner);
                    all.0.push(ledger.correction_factor());
                    all.1.push(reserved.as_f64() / MIB);
                }
                std::thread::sleep(EVERY);
            }
        })?;
        Ok(books)
    }

    /// The multipliers and the booked MiB.
    pub(crate) fn told(&self) -> (Vec<f64>, Vec<f64>) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}
