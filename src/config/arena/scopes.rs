//! Options behind a scope: `ep_factory.<name>.arena.*` of the process, `ep.<name>.arena.*` of a
//! session.
//!
//! A factory's name stands verbatim, a provider's in lower case, as in ONNX Runtime. Keys of other
//! providers and other software are passed over. A key that ONNX Runtime would pass over although
//! it is meant for this arena (the prefix in another case, the other place's scope, no scope at
//! all, the shrink of a run) is a fault.
//!
//! Invariant: every key that ends in an option of this arena is read or is a fault.

use super::error::{ArenaOptionsError, OptionFault};
use super::keys::Dialect;
use super::options::{ArenaOptions, Reader};
use super::selector::SHRINK_OPTION;

const BARE: &str = "arena.";

/// Where options stand.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    Process,
    Session,
}

impl Place {
    /// What stands before the key; `arena.` is its end.
    fn prefix(self, name: &str) -> String {
        match self {
            Self::Process => format!("ep_factory.{name}.{BARE}"),
            Self::Session => format!("ep.{}.{BARE}", name.to_ascii_lowercase()),
        }
    }

    const fn other(self) -> Self {
        match self {
            Self::Process => Self::Session,
            Self::Session => Self::Process,
        }
    }
}

impl ArenaOptions {
    /// Reads the options of the shared arena out of the process's (`OrtEnvCreationOptions`):
    /// `ep_factory.<name>.arena.*`, the name verbatim as `GetName()` gives it.
    ///
    /// ```
    /// use lowtide::config::arena::ArenaOptions;
    ///
    /// let entries = [("ep_factory.CudaEp.arena.max_mem", "1073741824"), ("session.intra", "4")];
    /// assert!(!ArenaOptions::of_process("CudaEp", entries)?.is_empty());
    /// assert!(ArenaOptions::of_process("OtherEp", entries)?.is_empty());
    /// assert!(ArenaOptions::of_process("cudaep", entries).is_err()); // another case: said
    /// # Ok::<(), lowtide::config::arena::ArenaOptionsError>(())
    /// ```
    ///
    /// # Errors
    /// As [`ArenaOptions::from_keys`]; keys that are meant for this arena and not read here.
    pub fn of_process<K: AsRef<str>, V: AsRef<str>>(
        name: &str,
        entries: impl IntoIterator<Item = (K, V)>,
    ) -> Result<Self, ArenaOptionsError> {
        scoped(Place::Process, name, entries)
    }

    /// Reads the options of a session: `ep.<name>.arena.*`, the name in lower case.
    ///
    /// # Errors
    /// As [`ArenaOptions::of_process`]; [`OptionFault::RunOption`] for
    /// `memory.enable_memory_arena_shrinkage`, which does nothing in a session.
    pub fn of_session<K: AsRef<str>, V: AsRef<str>>(
        name: &str,
        entries: impl IntoIterator<Item = (K, V)>,
    ) -> Result<Self, ArenaOptionsError> {
        scoped(Place::Session, name, entries)
    }
}

fn scoped<K: AsRef<str>, V: AsRef<str>>(
    place: Place,
    name: &str,
    entries: impl IntoIterator<Item = (K, V)>,
) -> Result<ArenaOptions, ArenaOptionsError> {
    let (prefix, elsewhere) = (place.prefix(name), place.other().prefix(name));
    let mut reader = Reader::default();
    for (key, value) in entries {
        let key = key.as_ref();
        if let Some(tail) = key.strip_prefix(&prefix) {
            reader.put(&format!("{BARE}{tail}"), key, value.as_ref(), Dialect::Keys);
        } else if tail_in_any_case(key, &prefix).is_some() {
            let (key, expected) = (key.to_owned(), prefix.clone());
            reader.faults.push(OptionFault::WrongCase { key, expected });
        } else if let Some(tail) =
            tail_in_any_case(key, &elsewhere).or_else(|| tail_in_any_case(key, BARE))
        {
            let (key, expected) = (key.to_owned(), format!("{prefix}{tail}"));
            reader.faults.push(OptionFault::WrongScope { key, expected });
        } else if place == Place::Session && key == SHRINK_OPTION {
            reader.faults.push(OptionFault::RunOption);
        }
    }
    reader.finish()
}

/// What follows the prefix, whatever the case of that.
fn tail_in_any_case<'a>(key: &'a str, prefix: &str) -> Option<&'a str> {
    let (head, tail) = key.split_at_checked(prefix.len())?;
    head.eq_ignore_ascii_case(prefix).then_some(tail)
}
