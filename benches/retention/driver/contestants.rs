//! The allocators that are measured: the program of each, its arguments, and its environment.
//!
//! Invariant: a name is the one in the figures.

use lowtide::heap::HeapProfile;
use retention::BoxError;

/// An allocator with its settings.
#[derive(Clone, Debug)]
pub(crate) struct Contestant {
    /// Its name in the figures.
    pub(crate) name: String,
    /// Its program.
    pub(crate) program: &'static str,
    /// The variant that it runs.
    pub(crate) way: String,
    /// A variable of its environment.
    pub(crate) variable: Option<(&'static str, String)>,
}

/// The programs, of which Cargo knows where they lie.
pub(crate) const GLIBC: &str = env!("CARGO_BIN_EXE_retention-glibc");
pub(crate) const JEMALLOC: &str = env!("CARGO_BIN_EXE_retention-jemalloc");
pub(crate) const LOWTIDE: &str = env!("CARGO_BIN_EXE_retention-lowtide");
pub(crate) const COSTS: &str = env!("CARGO_BIN_EXE_retention-costs");
const MIMALLOC: Option<&str> = option_env!("CARGO_BIN_EXE_retention-mimalloc");

/// The variable from which jemalloc reads its settings.
pub(crate) const CONF: &str = "_RJEM_MALLOC_CONF";

/// All of them that were built.
pub(crate) fn all() -> Vec<Contestant> {
    let conf = |text: &str| Some((CONF, text.to_owned()));
    let bg_1000_muzzy_0 = "background_thread:true,dirty_decay_ms:1000,muzzy_decay_ms:0";
    let mut all = vec![
        of("glibc", GLIBC, "", None),
        of("glibc_trim", GLIBC, "trim", None),
        of("trim_100ms", GLIBC, "trim_100ms", None),
    ];
    let no_delay = ("MIMALLOC_PURGE_DELAY", "0".to_owned());
    all.extend(MIMALLOC.map(|program| of("mimalloc_collect", program, "", None)));
    all.extend(MIMALLOC.map(|program| of("mimalloc_purge_0", program, "plain", Some(no_delay))));
    all.extend([
        of("jemalloc_default", JEMALLOC, "", None),
        of("jemalloc_bg_1000_0", JEMALLOC, "", conf(bg_1000_muzzy_0)),
    ]);
    all.extend(HeapProfile::ALL.map(lowtide));
    let low_memory = lowtide(HeapProfile::LowMemory);
    let (name, way) = (APART.to_owned(), format!("{}/apart", low_memory.way));
    all.push(Contestant { name, way, ..low_memory });
    all
}

/// low-memory, with the requests that outlive a wave in an arena of their own.
pub(crate) const APART: &str = "low_memory_apart";

/// lowtide under one of its profiles.
pub(crate) fn lowtide(profile: HeapProfile) -> Contestant {
    let conf = profile.conf().to_string_lossy().into_owned();
    let way = profile.name().replace('_', "-");
    of(profile.name(), LOWTIDE, &way, Some((CONF, conf)))
}

/// Those of these names.
pub(crate) fn named(names: &[&str]) -> Vec<Contestant> {
    all().into_iter().filter(|one| names.contains(&one.name.as_str())).collect()
}

/// Those that the command line asks for.
pub(crate) fn chosen(only: &[String]) -> Result<Vec<Contestant>, BoxError> {
    let mut chosen = all();
    if let Some(name) = only.iter().find(|name| !chosen.iter().any(|one| &one.name == *name)) {
        let names: Vec<_> = chosen.iter().map(|one| one.name.as_str()).collect();
        return Err(format!("{name:?} is no allocator here: expected {}", names.join(", ")).into());
    }
    chosen.retain(|one| only.is_empty() || only.contains(&one.name));
    Ok(chosen)
}

fn of(
    name: &str,
    program: &'static str,
    way: &str,
    variable: Option<(&'static str, String)>,
) -> Contestant {
    Contestant { name: name.to_owned(), program, way: way.to_owned(), variable }
}
