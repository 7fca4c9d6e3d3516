//! What the heap was started with, compared with what was asked: the notes of a start.
//!
//! It changes nothing and reads nothing; the comparison itself is the heap's
//! ([`EffectiveConf::differences_from`]).
//!
//! Invariant: a process that was started as it was asked to be has no note.

use crate::bytes::ByteSize;
use crate::config::{Config, Profile, Source};
use crate::host::{
    Applied, Cause, ConfSource, Difference, EffectiveConf, HeapConf, HeapProfile, HeapSettings,
};

/// What whoever started the process said to jemalloc, and we moved.
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
        .map(|Difference { setting, asked, found, cause }| {
            format!(
                "{setting} is moved from {found}, {cause}, to {asked}: LOWTIDE_HEAP_DECAY, \
                 LOWTIDE_BACKGROUND_THREADS and the profile decide it"
            )
        })
        .collect()
}

/// What differs from what was asked and cannot be changed any more: settings that were written for
/// jemalloc and had no effect; what the kernel or the build decides; the settings of a profile that
/// was asked for explicitly. Without an explicit profile the binary may carry another one on
/// purpose, so only a binary that carries none at all is reported.
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
            "this binary has no heap profile, so jemalloc runs with its defaults for all that is \
             fixed before `main`; add `lowtide::heap_profile!({});` to the binary, or start the \
             process with {}={}",
            profile(config),
            found.variable(),
            found.variable_for(&found.requested_by(profile(config))),
        )),
        None => {}
    }
    diagnostics
}

/// That jemalloc keeps addresses, of which the process may have few: what it keeps is no longer
/// there for blocks of other sizes, and an allocation that finds none aborts a Rust program.
pub(super) fn keeps_addresses(limit: ByteSize, found: &EffectiveConf) -> String {
    let (name, value) = (found.variable(), found.variable_for(&HeapConf::new("retain:false")));
    format!(
        "the process may map little (ulimit -v or -d), so the limit is {limit} now, and falls as \
         jemalloc keeps addresses for reuse; start the process with {name}={value}, or limit its \
         memory with a cgroup in place of ulimit"
    )
}

/// The heap profile that goes with the configured one.
fn profile(config: &Config) -> HeapProfile {
    match config.profile.value {
        Profile::LowMemory => HeapProfile::LowMemory,
        Profile::Balanced => HeapProfile::Balanced,
        Profile::Throughput => HeapProfile::Throughput,
    }
}

/// Whether the binary, the build or whoever started the process configured jemalloc.
fn is_configured(found: &EffectiveConf) -> bool {
    found.conf_of_binary.is_some()
        || found.conf_of_build.is_some()
        || found.conf_of_symlink.is_some()
        || found.conf_of_variable.is_some()
        || found.conf_of_harder.is_some()
}

/// That a profile is in force in part, and how it would be wholly.
fn in_part(
    config: &Config,
    found: &EffectiveConf,
    asked: &HeapConf,
    fixed: &[Difference],
) -> String {
    let list = fixed.iter().map(|difference| {
        let Difference { setting, asked, found, cause } = difference;
        format!("{setting} is {found} instead of {asked} ({cause})")
    });
    let or_add = match found.conf_of_binary {
        Some(_) => String::new(),
        None => format!("add `lowtide::heap_profile!({});` to the binary, or ", profile(config)),
    };
    format!(
        "profile {} is in force in part; fixed at start otherwise: {}; {or_add}start the process \
         with {}={}",
        config.profile.value,
        list.collect::<Vec<_>>().join(", "),
        found.variable(),
        found.variable_for(asked),
    )
}
