//! Observes the settings of a session in a small model.
//!
//! ONNX Runtime accepts every session entry, known or not. The observations: whether the registered
//! allocator is asked for memory, how often, how many threads start, and whether they spin.
//!
//! Called once, before any session exists, so that the allocator serves no other session.
//!
//! Invariant: a setting that is not observed to be in force is an error.

#[cfg(test)]
pub(crate) mod model;

use std::thread::park_timeout;
use std::time::Duration;

use ort::environment::Environment;
use ort::session::Session;
use ort::session::builder::SessionBuilder;
use ort::value::TensorRef;

use super::allocator::{OrtAllocator, OrtAllocatorStats};
use super::error::{OrtError, text};
use super::session::{
    ENV_ALLOCATORS, INTRA_THREADS, PATTERN, PoolThreads, SPINNING, SessionSettings,
};

/// `out = in x a x b x a + c`, for any number of rows of [`WIDTH`] ones, with weights of ones: each
/// product needs a block, as long as no pattern joins them. The tests' `model` writes it.
pub(crate) const MODEL: &[u8] = include_bytes!("verify/model.onnx");
/// Columns of the input and the output.
pub(crate) const WIDTH: usize = 64;
/// Rows of the input.
const ROWS: usize = 64;
/// The threads are watched after the runs until they sleep, at most this many times, for half a
/// second.
const IDLE_LOOKS_MAX: u32 = 100;
const IDLE_LOOK: Duration = Duration::from_millis(5);
/// The CPU time of a thread that does not spin: its start, if that is late. Observed: .6 ms, and
/// 32 ms of one that spins.
const IDLE_CPU_MAX: Duration = Duration::from_millis(3);

/// What a session of the small model did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Observed {
    /// Blocks that the first run and the second one allocated.
    allocs: [u64; 2],
    /// Threads that the load started.
    threads: usize,
    /// Their CPU time from the last run until they sleep.
    idle_cpu: Duration,
}

/// Loads and runs the small model, and compares what it does with the settings.
///
/// # Errors
/// [`OrtError::NotInForce`], [`OrtError::Runtime`].
pub(crate) fn observe(
    environment: &Environment,
    allocator: &OrtAllocator,
    settings: &SessionSettings,
    version: &str,
) -> Result<(), OrtError> {
    let observed = try_out(environment, settings, || allocator.stats());
    let observed =
        observed.map_err(|cause| OrtError::Runtime { act: "run a small model", cause })?;
    observed.compare(settings, version)
}

pub(crate) fn try_out(
    environment: &Environment,
    settings: &SessionSettings,
    stats: impl Fn() -> OrtAllocatorStats,
) -> Result<Observed, String> {
    let failed = |error: ort::Error| text(&error);
    let of_builder = |error: ort::Error<SessionBuilder>| text(&error);
    let threads = PoolThreads::of("check");
    let builder = settings.apply(Session::builder(environment).map_err(failed)?)?;
    let mut builder = builder.with_thread_manager(threads.clone()).map_err(of_builder)?;
    let mut session = builder.commit_from_memory(MODEL).map_err(failed)?;
    let input = vec![1.0_f32; ROWS * WIDTH];
    let mut allocs = [0; 2];
    for allocs in &mut allocs {
        let before = stats();
        let view = TensorRef::from_array_view(([ROWS, WIDTH], &*input)).map_err(failed)?;
        let outputs = session.run(ort::inputs![view]).map_err(failed)?;
        *allocs = stats().allocs - before.allocs;
        drop(outputs);
    }
    let idle_cpu = idle_cpu(&threads);
    Ok(Observed { allocs, threads: threads.started(), idle_cpu })
}

/// Waits until the threads sleep, and returns the CPU time that they use until then.
fn idle_cpu(threads: &PoolThreads) -> Duration {
    let before = threads.cpu_time();
    let mut used = Duration::ZERO;
    for _ in 0..IDLE_LOOKS_MAX {
        park_timeout(IDLE_LOOK);
        used = threads.cpu_time().saturating_sub(before);
        if threads.are_asleep() || used > idle_cpu_max(threads.started()) {
            break;
        }
    }
    used
}

/// Returns the most CPU time that so many threads use after a run, if they do not spin.
fn idle_cpu_max(threads: usize) -> Duration {
    IDLE_CPU_MAX.saturating_mul(u32::try_from(threads).unwrap_or(u32::MAX))
}

impl Observed {
    pub(crate) fn compare(
        &self,
        settings: &SessionSettings,
        version: &str,
    ) -> Result<(), OrtError> {
        let [first, second] = self.allocs;
        let spun = self.threads > 0 && self.idle_cpu > idle_cpu_max(self.threads);
        let checks = [
            (ENV_ALLOCATORS, first > 0, "no call of the registered allocator in a run".to_owned()),
            (
                PATTERN,
                second >= first,
                format!("{first} blocks in a run, {second} in the next one"),
            ),
            (
                INTRA_THREADS,
                settings.pool_threads() == Some(self.threads),
                format!("{} threads of the pool", self.threads),
            ),
            (SPINNING, !spun, format!("{:?} of CPU time of the pool without work", self.idle_cpu)),
        ];
        for (key, holds, observed) in checks {
            let Some(value) = settings.get(key) else { continue };
            if !holds {
                let (value, version) = (value.to_owned(), version.to_owned());
                return Err(OrtError::NotInForce { key, value, observed, version });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lowtide::config::Profile;

    /// What ONNX Runtime does if the settings of `balanced` are in force, for two CPUs.
    const IN_FORCE: Observed =
        Observed { allocs: [3, 3], threads: 1, idle_cpu: Duration::from_micros(600) };

    const SPUN: Duration = Duration::from_millis(4);

    fn fault(observed: Observed) -> Option<&'static str> {
        let settings = SessionSettings::of(Profile::Balanced, 2);
        let error = observed.compare(&settings, "1.32.0").err()?;
        let OrtError::NotInForce { key, .. } = error else { panic!("{error}") };
        Some(key)
    }

    #[test]
    fn each_setting_without_effect_is_named() {
        assert_eq!(fault(IN_FORCE), None);
        let cases = [
            (Observed { allocs: [0, 0], ..IN_FORCE }, ENV_ALLOCATORS),
            (Observed { allocs: [3, 2], ..IN_FORCE }, PATTERN),
            (Observed { threads: 7, ..IN_FORCE }, INTRA_THREADS),
            (Observed { threads: 0, ..IN_FORCE }, INTRA_THREADS),
            (Observed { idle_cpu: SPUN, ..IN_FORCE }, SPINNING),
        ];
        for (observed, key) in cases {
            assert_eq!(fault(observed), Some(key), "{observed:?}");
        }
    }

    #[test]
    fn the_error_names_the_setting_its_value_and_the_observation() {
        let settings = SessionSettings::of(Profile::Balanced, 2);
        let fault = Observed { threads: 7, ..IN_FORCE }.compare(&settings, "1.32.0").unwrap_err();
        let text =
            "ONNX Runtime 1.32.0 ignores intra_op_num_threads=2: observed 7 threads of the pool";
        assert_eq!(fault.to_string(), text);
    }

    #[test]
    fn a_setting_that_is_not_made_is_not_checked() {
        let settings = SessionSettings::of(Profile::Throughput, 2);
        let spinning = Observed { idle_cpu: SPUN, ..IN_FORCE };
        assert!(spinning.compare(&settings, "1.32.0").is_ok());
    }
}
