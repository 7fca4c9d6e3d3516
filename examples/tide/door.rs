//! The requests that admission rejected in a run: their number, the reasons, and the state of the
//! account at that moment.
//!
//! It samples ten times a second, so an account may be up to a tenth of a second newer than its
//! rejection. It explains and does not judge: the report does.
//!
//! Invariant: `first` and `last` are either both present or both absent, and `first` is not after
//! `last`.

use lowtide::admission::RejectReason;
use lowtide::{ByteSize, Memory};
use serde::{Deserialize, Serialize};

/// The rejections so far.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Door {
    /// Rejected requests, in the order of [`RejectReason::ALL`].
    shed: [u64; RejectReason::ALL.len()],
    /// The account at the first and the last sample that saw a new rejection.
    first: Option<Account>,
    last: Option<Account>,
}

/// The host's account at one instant.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Account {
    /// Seconds since the start of the run.
    seconds: f64,
    k: f64,
    reserved: u64,
    allowance: u64,
    ceiling: u64,
    physical: u64,
    purgeable: u64,
    level: String,
}

impl Door {
    /// Looks whether more was turned away, and if so, how the account stands.
    pub(crate) fn look(&mut self, memory: &Memory, seconds: f64) {
        let shed = memory.admission().stats().rejected;
        if shed == self.shed {
            return;
        }
        self.shed = shed;
        let all = memory.snapshot();
        let account = Account {
            seconds,
            k: all.host.correction_factor,
            reserved: all.host.reserved.get(),
            allowance: all.host.allowance.get(),
            ceiling: all.host.ceiling.get(),
            physical: all.physical.get(),
            purgeable: all.purgeable.get(),
            level: all.host.level.to_string(),
        };
        self.first.get_or_insert_with(|| account.clone());
        self.last = Some(account);
    }

    /// Returns the rejections by reason, in lines that leave room for an indent in 80 columns.
    pub(crate) fn lines(&self) -> Vec<String> {
        let reasons = RejectReason::ALL.into_iter().zip(self.shed).filter(|(_, count)| *count > 0);
        let reasons: Vec<_> =
            reasons.map(|(reason, count)| format!("{} {count}", reason.name())).collect();
        if reasons.is_empty() {
            return vec!["admission rejected no request".to_owned()];
        }
        let mut lines = vec![format!("rejected by admission: {}", reasons.join(", "))];
        for (name, account) in [("first", &self.first), ("last", &self.last)] {
            let Some(account) = account else { continue };
            let size = |bytes| ByteSize::new(bytes).to_string();
            lines.push(format!(
                "{name:<5} at {:.1} s: K {:.2}, pressure {}, ceiling {}",
                account.seconds,
                account.k,
                account.level,
                size(account.ceiling),
            ));
            let (reserved, allowance) = (size(account.reserved), size(account.allowance));
            lines.push(format!("      reserved {reserved} of an allowance of {allowance}"));
            let (physical, purgeable) = (size(account.physical), size(account.purgeable));
            lines.push(format!("      physical {physical}, {purgeable} of it purgeable"));
        }
        lines
    }
}
