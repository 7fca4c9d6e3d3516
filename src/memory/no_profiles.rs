//! The stand-in for `profiles` in a build without the heap profiler: no profile is taken.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use crate::bytes::ByteSize;
use crate::clock::{Bell, Clock, Moment};
use crate::config::Config;

use super::error::Diagnostic;
use super::trend::LeakSuspects;

/// No profiles. No value exists.
#[derive(Debug)]
pub(super) enum Profiles {}

/// No captures. No value exists.
#[derive(Debug)]
pub(super) enum Captures {}

pub(super) fn prepare(config: &Config, diagnostics: &mut Vec<Diagnostic>) -> Option<Arc<Profiles>> {
    let folder = config.heap_profile_dir.value.as_ref()?;
    let text = format!(
        "no heap profile is written to {folder:?}: this build of lowtide has no feature \
         `profiling`; build with the feature, or unset"
    );
    diagnostics.push(Diagnostic::warning("profiler", text));
    None
}

impl Captures {
    pub(super) const fn of(_: Option<&Arc<Profiles>>, _: &Config) -> Option<Self> {
        None
    }

    pub(super) const fn see(&mut self, _: Moment, _: ByteSize, _: ByteSize) {
        match *self {}
    }
}

impl Profiles {
    pub(super) const fn compare(&self) {
        match *self {}
    }

    pub(super) const fn bell(&self) -> &Arc<Bell> {
        match *self {}
    }

    pub(super) const fn suspects(&self) -> Option<LeakSuspects> {
        match *self {}
    }
}

pub(super) const fn run(profiles: &Profiles, _: Option<&Path>, _: &dyn Clock, _: &AtomicBool) {
    match *profiles {}
}
