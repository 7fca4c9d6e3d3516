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

// Enums of names.

/// Defines an enum each of whose variants is a name: `ALL`, `name`, `Display` and, with the
/// caller's feature `serde`, `Serialize`, all of the same texts.
#[macro_export]
macro_rules! named_enum {
    (
        $(#[$meta:meta])*
        $vis:vis enum $name:ident {
            $($(#[$of_variant:meta])* $variant:ident = $text:literal,)*
        }
    ) => {
        $(#[$meta])*
        $vis enum $name {
            $($(#[$of_variant])* $variant,)*
        }

        #[allow(dead_code, reason = "not every enum is listed or named")]
        impl $name {
            /// All of them, in order.
            $vis const ALL: [Self; [$($text),*].len()] = [$(Self::$variant),*];

            /// Returns the name, as in metrics, JSON and settings.
            #[must_use]
            $vis const fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $text,)*
                }
            }
        }

        impl ::std::fmt::Display for $name {
            fn fmt(&self, f: &mut ::std::fmt::Formatter<'_>) -> ::std::fmt::Result {
                f.pad(self.name())
            }
        }

        #[cfg(feature = "serde")]
        impl ::serde::Serialize for $name {
            fn serialize<S: ::serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
                to.serialize_str(self.name())
            }
        }
    };
}

/// Implements `FromStr` for an enum of [`named_enum!`]; the error describes the accepted names.
#[macro_export]
macro_rules! by_name {
    ($name:ty, $expected:literal) => {
        impl ::std::str::FromStr for $name {
            type Err = &'static str;

            fn from_str(text: &str) -> Result<Self, Self::Err> {
                Self::ALL.into_iter().find(|it| it.name() == text).ok_or($expected)
            }
        }
    };
}

/// Implements `Debug` for a type of which only these figures are of interest. Type parameters come
/// first, in brackets.
#[macro_export]
macro_rules! debug_as {
    (
        $([$($parameters:tt)+])? $name:ident $(<$($argument:tt),+>)?,
        |$it:ident| $($figure:ident: $value:expr),+
    ) => {
        impl $(<$($parameters)+>)? ::std::fmt::Debug for $name $(<$($argument),+>)? {
            fn fmt(&self, f: &mut ::std::fmt::Formatter<'_>) -> ::std::fmt::Result {
                let $it = self;
                f.debug_struct(stringify!($name))
                    $(.field(stringify!($figure), &$value))+
                    .finish_non_exhaustive()
            }
        }
    };
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

#[cfg(test)]
mod named_tests {
    named_enum! {
        #[derive(Clone, Copy, Debug, PartialEq)]
        enum Tide {
            Ebb = "ebb",
            HighWater = "high_water",
        }
    }

    #[test]
    fn an_enum_is_listed_named_and_shown_by_the_same_texts() {
        assert_eq!(Tide::ALL, [Tide::Ebb, Tide::HighWater]);
        assert_eq!(Tide::ALL.map(Tide::name), ["ebb", "high_water"]);
        assert_eq!(format!("{:>4}", Tide::Ebb), " ebb");
    }
}
