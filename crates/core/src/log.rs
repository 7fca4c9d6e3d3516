//! Log events of this crate, isolated from panics of the subscriber.
//!
//! A subscriber is the application's code and may panic: `tracing-subscriber` does when neither its
//! writer nor standard error accepts a line (a full disk, a closed pipe). All events go through
//! [`log!`](crate::log!); a check of the sources finds one that does not. Code updates its own
//! state before it logs, because a subscriber may also block.
//!
//! Invariant: nothing unwinds out of `log!`.

/// Logs an event. Takes the level's name, then the arguments of `tracing`'s macro of that level.
/// Catches a panic of the subscriber. The caller's package depends on `tracing`.
#[macro_export]
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
