//! Scoped options: `ep_factory.<name>.arena.*` of the process, `ep.<name>.arena.*` of a session.
//!
//! A factory's name is verbatim, a provider's in lower case, as in ONNX Runtime. Keys of other
//! providers and other software are ignored. A key that is meant for this arena but that ONNX
//! Runtime would ignore (the prefix in another case, the other place's scope, no scope, the shrink
//! of a run) is a fault.
//!
//! Invariant: every key that ends in an option of this arena is read or is a fault.

use super::error::{ArenaOptionsError, OptionFault};
use super::keys::Dialect;
use super::options::{ArenaOptions, Reader};
use super::selector::SHRINK_OPTION;

const BARE: &str = "arena.";

/// The place in which options are set.
#[derive(Clone, Copy, PartialEq, Eq)]
enum OptionScope {
    Process,
    Session,
}

impl OptionScope {
    /// Returns the text in front of the key, which ends in `arena.`.
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
    /// Reads the options of the shared arena from those of the process (`OrtEnvCreationOptions`):
    /// `ep_factory.<name>.arena.*`, with the name exactly as `GetName()` returns it.
    ///
    /// ```
    /// use lowtide::config::arena::ArenaOptions;
    ///
    /// let entries = [("ep_factory.CudaEp.arena.max_mem", "1073741824"), ("session.intra", "4")];
    /// assert!(!ArenaOptions::of_process("CudaEp", entries)?.is_empty());
    /// assert!(ArenaOptions::of_process("OtherEp", entries)?.is_empty());
    /// assert!(ArenaOptions::of_process("cudaep", entries).is_err()); // differs only in case
    /// # Ok::<(), lowtide::config::arena::ArenaOptionsError>(())
    /// ```
    ///
    /// # Errors
    /// The same as for [`ArenaOptions::from_keys`], and keys that are meant for this arena but are
    /// not read in this place.
    pub fn of_process<K: AsRef<str>, V: AsRef<str>>(
        name: &str,
        entries: impl IntoIterator<Item = (K, V)>,
    ) -> Result<Self, ArenaOptionsError> {
        scoped(OptionScope::Process, name, entries)
    }

    /// Reads the options of a session: `ep.<name>.arena.*`, with the name in lower case.
    ///
    /// # Errors
    /// The same as for [`ArenaOptions::of_process`]; [`OptionFault::RunOption`] for
    /// `memory.enable_memory_arena_shrinkage`, which has no effect in a session.
    pub fn of_session<K: AsRef<str>, V: AsRef<str>>(
        name: &str,
        entries: impl IntoIterator<Item = (K, V)>,
    ) -> Result<Self, ArenaOptionsError> {
        scoped(OptionScope::Session, name, entries)
    }
}

fn scoped<K: AsRef<str>, V: AsRef<str>>(
    place: OptionScope,
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
        } else if place == OptionScope::Session && key == SHRINK_OPTION {
            reader.faults.push(OptionFault::RunOption);
        }
    }
    reader.finish()
}

/// Returns the part after the prefix, which is compared without case.
fn tail_in_any_case<'a>(key: &'a str, prefix: &str) -> Option<&'a str> {
    let (head, tail) = key.split_at_checked(prefix.len())?;
    head.eq_ignore_ascii_case(prefix).then_some(tail)
}
