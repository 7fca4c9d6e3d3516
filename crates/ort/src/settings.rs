//! A profile's settings, applied to a session.
//!
//! ONNX Runtime accepts any key and any value of a session entry, so nothing is known from the
//! acceptance; `verify` observes the effect.
//!
//! Invariant: a setting that cannot be applied is an error, never skipped.

use lowtide::config::{OrtSetting, Profile};
use ort::session::builder::SessionBuilder;

use super::error::text;

/// Sessions use the allocator that is registered with the environment.
pub(crate) const ENV_ALLOCATORS: &str = "session.use_env_allocators";
/// The threads that compute one operator, the caller included.
pub(crate) const INTRA_THREADS: &str = "intra_op_num_threads";
/// One block for a whole run.
pub(crate) const PATTERN: &str = "enable_mem_pattern";
/// Threads of the pool poll for work before they sleep.
pub(crate) const SPINNING: &str = "session.intra_op.allow_spinning";

const INTER_THREADS: &str = "inter_op_num_threads";
const ARENA: &str = "enable_cpu_mem_arena";
/// Without an observable effect in 1.32 for the CPU: packed weights are reserved anyway, and others
/// are used where they were read.
const WEIGHTS: &str = "session.use_device_allocator_for_initializers";
/// Settings of a profile that the registered allocator replaces.
const REPLACED: [&str; 3] = [ARENA, PATTERN, WEIGHTS];

/// The settings of every session of a runtime.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SessionSettings(Vec<(&'static str, String)>);

impl SessionSettings {
    /// The settings of a profile, with the registered allocator in the place of ONNX Runtime's
    /// arena.
    pub(crate) fn of(profile: Profile, cpus: u32) -> Self {
        let of_profile = profile.onnxruntime(cpus).into_iter();
        let kept = of_profile.filter(|setting| !REPLACED.contains(&setting.key));
        let mut all: Vec<_> =
            kept.map(|OrtSetting { key, value, .. }| (key, value.into())).collect();
        all.push((ENV_ALLOCATORS, "1".to_owned()));
        all.push((PATTERN, "false".to_owned()));
        Self(all)
    }

    /// Returns the value of a setting.
    pub(crate) fn get(&self, key: &str) -> Option<&str> {
        self.0.iter().find(|(name, _)| *name == key).map(|(_, value)| &**value)
    }

    /// Returns the same with another value.
    #[cfg(test)]
    pub(crate) fn with(&self, key: &'static str, value: &str) -> Self {
        let others = self.0.iter().filter(|(name, _)| *name != key).cloned();
        Self(others.chain([(key, value.to_owned())]).collect())
    }

    /// Returns the number of threads that a session starts.
    pub(crate) fn pool_threads(&self) -> Option<usize> {
        let threads: usize = self.get(INTRA_THREADS)?.parse().ok()?;
        threads.checked_sub(1) // the caller computes too
    }

    /// Applies them.
    pub(crate) fn apply(&self, mut builder: SessionBuilder) -> Result<SessionBuilder, String> {
        for (key, value) in &self.0 {
            let number =
                || value.parse().map_err(|_| format!("{key}={value:?}: expected a number"));
            let applied = match *key {
                INTRA_THREADS => builder.with_intra_threads(number()?),
                INTER_THREADS => builder.with_inter_threads(number()?),
                PATTERN => builder.with_memory_pattern(value != "false"),
                key if key.contains('.') => builder.with_config_entry(key, value),
                key => return Err(format!("no function of ONNX Runtime for the setting {key}")),
            };
            builder = applied.map_err(|error| text(&error))?;
        }
        Ok(builder)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lowtide::config::OrtPlace;

    #[test]
    fn every_setting_of_every_profile_can_be_applied() {
        for profile in Profile::ALL {
            let settings = SessionSettings::of(profile, 4);
            let known = |key: &str| {
                key.contains('.') || [INTRA_THREADS, INTER_THREADS, PATTERN].contains(&key)
            };
            assert!(settings.0.iter().all(|(key, _)| known(key)), "{settings:?}");
            let entries = profile.onnxruntime(4);
            let entries = entries.iter().filter(|one| one.place == OrtPlace::SessionEntry);
            let entries = entries.filter(|one| !REPLACED.contains(&one.key));
            entries.for_each(|entry| assert_eq!(settings.get(entry.key), Some(&*entry.value)));
        }
    }

    #[test]
    fn a_session_uses_the_registered_allocator_and_the_threads_of_the_profile() {
        let settings = SessionSettings::of(Profile::Balanced, 4);
        assert_eq!(settings.get(ENV_ALLOCATORS), Some("1"));
        assert_eq!((settings.get(PATTERN), settings.get(ARENA)), (Some("false"), None));
        assert_eq!(settings.pool_threads(), Some(3));
        assert_eq!(SessionSettings::of(Profile::LowMemory, 4).pool_threads(), Some(0));
    }
}
