//! Enums of names.

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

#[cfg(test)]
mod tests {
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
