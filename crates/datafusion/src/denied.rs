//! Why a consumer may not grow, with the figures.
//!
//! DataFusion's error carries a text only, and operators spill only on that variant. So the figures
//! are also in [`PoolStats::last_denied`](super::PoolStats::last_denied).
//!
//! Invariant: the text is bounded, whatever a consumer's name is.

use datafusion_common::DataFusionError;
use lowtide_admission::{ByteSize, Rejected};
use thiserror::Error;

/// The longest name of a consumer that is kept, in bytes. An estimate: names are those of operators
/// with the number of a partition.
const NAME_MAX: usize = 128;

/// Growth that was denied. An operator that can spill does so; for another one, the query fails.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error(
    "cannot reserve {asked} for {consumer}, which holds {held}: {reason}; its share of the pool's \
     minimum is {share}"
)]
#[non_exhaustive]
pub struct Denied {
    /// The name of the consumer, at most 128 bytes of it.
    pub consumer: String,
    /// `true` if the consumer can spill.
    pub can_spill: bool,
    /// The bytes requested.
    pub asked: ByteSize,
    /// The bytes that the consumer holds.
    pub held: ByteSize,
    /// The bytes that the consumer may hold while memory is short: its share of the pool's minimum,
    /// or the whole minimum if it cannot spill.
    pub share: ByteSize,
    /// The reason.
    pub reason: DenyReason,
}

/// Why growth was denied.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum DenyReason {
    /// The pool would exceed its own limit.
    #[error("the pool holds {used} of at most {limit}")]
    Limit {
        /// The bytes that all consumers hold.
        used: ByteSize,
        /// The limit of the pool.
        limit: ByteSize,
    },
    /// A request or a resource lacks memory that consumers can release by spilling.
    #[error("{wanted} of the pool are to be released for others")]
    Reclaimed {
        /// The bytes that are still to be released.
        wanted: ByteSize,
    },
    /// The ledger has no room, others wait for it, or the pressure level is high.
    #[error(transparent)]
    Rejected(Rejected),
}

impl From<Denied> for DataFusionError {
    fn from(denied: Denied) -> Self {
        Self::ResourcesExhausted(denied.to_string())
    }
}

/// Returns the name, shortened to [`NAME_MAX`] bytes at most.
pub(crate) fn bounded(name: &str) -> String {
    let mut end = name.len().min(NAME_MAX);
    while !name.is_char_boundary(end) {
        end -= 1;
    }
    name[..end].to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_cut_at_a_character() {
        assert_eq!(bounded("ExternalSorter[0]"), "ExternalSorter[0]");
        assert_eq!(bounded(&"é".repeat(100)).len(), NAME_MAX);
        assert_eq!(bounded(&format!("a{}", "é".repeat(100))).len(), NAME_MAX - 1);
    }

    #[test]
    fn the_text_names_consumer_bytes_and_what_was_expected() {
        let reason = DenyReason::Limit { used: ByteSize::mib(60), limit: ByteSize::mib(64) };
        let denied = Denied {
            consumer: bounded("ExternalSorter[0]"),
            can_spill: true,
            asked: ByteSize::mib(5),
            held: ByteSize::mib(50),
            share: ByteSize::mib(8),
            reason,
        };
        let text = DataFusionError::from(denied).to_string();
        assert_eq!(
            text,
            "Resources exhausted: cannot reserve 5.0 MiB for ExternalSorter[0], which holds \
             50.0 MiB: the pool holds 60.0 MiB of at most 64.0 MiB; its share of the pool's \
             minimum is 8.0 MiB"
        );
    }
}
