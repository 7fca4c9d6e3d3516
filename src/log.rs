//! Events of this crate, which no subscriber can turn into a failure of what logs them.
//!
//! A subscriber is the application's code, and may panic: that of `tracing-subscriber` does when
//! neither its writer nor standard error takes a line (a full disk, a closed pipe). All events go
//! through [`log!`]; `tests/tidy` finds one that does not. What a caller has to keep (a state, a
//! count, an entry of a list) it keeps before it logs, since a subscriber may also block.
//!
//! Invariant: nothing unwinds out of `log!`.

/// Logs an event: the level's name, then what `tracing`'s macro of this level takes. A panic of the
/// subscriber ends here.
macro_rules! log {
    ($level:ident, $($event:tt)+) => {{
        let _ = $crate::sync::caught(|| ::tracing::$level!($($event)+));
    }};
}

#[cfg(all(test, not(lowtide_loom)))]
mod tests {
    use tracing::span::{Attributes, Id, Record};
    use tracing::{Event, Metadata, Subscriber};

    struct Panics;

    impl Subscriber for Panics {
        fn enabled(&self, _: &Metadata<'_>) -> bool {
            true
        }

        fn new_span(&self, _: &Attributes<'_>) -> Id {
            Id::from_u64(1)
        }

        fn record(&self, _: &Id, _: &Record<'_>) {}

        fn record_follows_from(&self, _: &Id, _: &Id) {}

        fn event(&self, _: &Event<'_>) {
            panic!("the disk is full");
        }

        fn enter(&self, _: &Id) {}

        fn exit(&self, _: &Id) {}
    }

    #[test]
    fn a_subscriber_that_panics_does_not_reach_the_code_that_logs() {
        let mut done = 0;
        tracing::subscriber::with_default(Panics, || {
            log!(warn, count = 1, "{} disk is full", 1);
            done += 1;
            log!(info, target: "lowtide", text = %"a", "{} disks are full", 2);
            done += 1;
        });
        assert_eq!(done, 2);
    }
}
