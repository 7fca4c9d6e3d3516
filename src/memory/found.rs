//! Compares the heap's settings at start with the requested ones, for the diagnostics of a start.
//!
//! It changes and reads nothing; the comparison itself is [`EffectiveConf::differences_from`].
//!
//! Invariant: a process that was started with the requested settings has no diagnostic.

use crate::bytes::ByteSize;
use crate::config::{Config, Profile, Source};
use lowtide_heap::{
    Applied, Cause, ConfSource, Difference, EffectiveConf, HeapConf, HeapProfile, HeapSettings,
};

/// Returns a text for each setting that was passed to jemalloc at start and that lowtide changed.
pub(super) fn moved(
    at_start: &EffectiveConf,
    settings: &HeapSettings,
    applied: &Applied,
) -> Vec<String> {
    let said = |cause: &Cause| match cause {
        Cause::SetBy(ConfSource::Binary(_) | ConfSource::Build) => false,
        Cause::SetBy(_) => true,
        _ => false,
    };
    let untold = |setting| applied.differences.iter().all(|known| known.setting != setting);
    at_start
        .differences_from(HeapConf::from(settings))
        .iter()
        .filter(|it| !it.is_fixed_at_start() && said(&it.cause) && untold(it.setting))
        .map(|Difference { setting, asked, found, cause, .. }| {
            format!(
                "{setting} was {found} ({cause}) and is now {asked}: set it with \
                 LOWTIDE_HEAP_DECAY, LOWTIDE_BACKGROUND_THREADS or the profile"
            )
        })
        .collect()
}

/// Returns a text for each setting that differs from the request and cannot be changed any more:
/// settings for jemalloc without effect, settings fixed by the kernel or the build, and the
/// settings of an explicit profile. Without an explicit profile the binary may contain another
/// profile on purpose, so only a binary that contains none is reported.
pub(super) fn at_start_otherwise(config: &Config, found: &EffectiveConf) -> Vec<String> {
    let asked = config.profile.source != Source::Default;
    let asked = asked.then(|| found.requested_by(profile(config)));
    let nothing = || HeapConf::new("");
    let expected = asked.clone().or_else(|| found.requested_by_binary()).unwrap_or_else(nothing);
    let mut differences = found.differences_from(&expected);
    differences.retain(Difference::is_fixed_at_start);
    let (given, fixed): (Vec<_>, Vec<_>) = differences
        .into_iter()
        .partition(|it| matches!(it.cause, Cause::KernelHugePages | Cause::PageOfBuild));
    let mut diagnostics: Vec<_> =
        found.ignored().iter().chain(&given).map(Difference::to_string).collect();
    match asked.filter(|_| !fixed.is_empty()) {
        Some(asked) => diagnostics.push(in_part(config, found, &asked, &fixed)),
        None if !is_configured(found) => diagnostics.push(format!(
            "this binary exports no settings, so jemalloc uses its defaults for those that are \
             fixed before `main`; make `lowtide::global_allocator!({});` its allocator, or start \
             the process with {}={}",
            profile(config),
            found.variable(),
            found.variable_for(&found.requested_by(profile(config))),
        )),
        None => {}
    }
    diagnostics
}

/// Returns a warning that jemalloc keeps addresses, of which the process may have few. They are not
/// available for blocks of other sizes, and an allocation that finds no address aborts a Rust
/// program.
pub(super) fn keeps_addresses(limit: ByteSize, found: &EffectiveConf) -> String {
    let (name, value) = (found.variable(), found.variable_for(&HeapConf::new("retain:false")));
    format!(
        "the address space is limited (ulimit -v or -d), so the limit is {limit} now, and falls as \
         jemalloc keeps addresses for reuse; start the process with {name}={value}, or limit its \
         memory with a cgroup instead of ulimit"
    )
}

/// Returns the heap profile for the configured profile.
fn profile(config: &Config) -> HeapProfile {
    match config.profile.value {
        Profile::LowMemory => HeapProfile::LowMemory,
        Profile::Balanced => HeapProfile::Balanced,
        Profile::Throughput => HeapProfile::Throughput,
    }
}

/// Returns `true` if jemalloc was configured by the binary, the build, or at the start of the
/// process.
fn is_configured(found: &EffectiveConf) -> bool {
    found.conf_of_binary.is_some()
        || found.conf_of_build.is_some()
        || found.conf_of_symlink.is_some()
        || found.conf_of_variable.is_some()
        || found.conf_of_harder.is_some()
}

/// Describes a profile that is only partly in force, and how to apply all of it.
fn in_part(
    config: &Config,
    found: &EffectiveConf,
    asked: &HeapConf,
    fixed: &[Difference],
) -> String {
    let list = fixed.iter().map(|difference| {
        let Difference { setting, asked, found, cause, .. } = difference;
        format!("{setting} is {found} instead of {asked} ({cause})")
    });
    let or_add = match found.conf_of_binary {
        Some(_) => String::new(),
        None => {
            format!("make `lowtide::global_allocator!({});` its allocator, or ", profile(config))
        }
    };
    format!(
        "profile {} is only partly in force; fixed at start: {}; {or_add}start the process \
         with {}={}",
        config.profile.value,
        list.collect::<Vec<_>>().join(", "),
        found.variable(),
        found.variable_for(asked),
    )
}
