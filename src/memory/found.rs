//! What the heap was started with, compared with what was asked: the notes of a start.
//!
//! It changes nothing and reads nothing; the comparison itself is the heap's
//! ([`EffectiveConf::differences_from`]).
//!
//! Invariant: a process that was started as it was asked to be has no note.

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

/// What is otherwise than asked and cannot be moved any more: what was written for jemalloc and
/// had no effect; what the kernel or the build decides; what a profile asks that somebody asked
/// for. A profile that nobody asked for says nothing: the binary may well carry another one on
/// purpose.
pub(super) fn at_start_otherwise(config: &Config, found: &EffectiveConf) -> Vec<String> {
    let asked = (config.profile.source != Source::Default).then(|| {
        found.asked_by(match config.profile.value {
            Profile::LowMemory => HeapProfile::LowMemory,
            Profile::Balanced => HeapProfile::Balanced,
            Profile::Throughput => HeapProfile::Throughput,
        })
    });
    let nothing = || HeapConf::new("");
    let expected = asked.clone().or_else(|| found.asked_by_binary()).unwrap_or_else(nothing);
    let mut differences = found.differences_from(&expected);
    differences.retain(Difference::is_fixed_at_start);
    let (given, fixed): (Vec<_>, Vec<_>) = differences
        .into_iter()
        .partition(|it| matches!(it.cause, Cause::KernelHugePages | Cause::PageOfBuild));
    let mut notes: Vec<_> =
        found.ignored().iter().chain(&given).map(Difference::to_string).collect();
    notes.extend(
        asked.filter(|_| !fixed.is_empty()).map(|asked| in_part(config, found, &asked, &fixed)),
    );
    notes
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
    format!(
        "profile {} is in force in part; fixed at start otherwise: {}; start the process with \
         {}={}",
        config.profile.value,
        list.collect::<Vec<_>>().join(", "),
        found.variable(),
        found.variable_for(asked),
    )
}
