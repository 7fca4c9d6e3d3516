//! ONNX Runtime as `docs/ENGINES.md` recommends it, in the profile `balanced` unless
//! `LOWTIDE_PROFILE` names another one. With feature `interpose`, jemalloc serves ONNX Runtime as
//! well. `ENGINES_ARENA=heap` takes the memory of runs from a heap arena, and
//! `ENGINES_ARENA=engine` leaves it to ONNX Runtime.
#![expect(clippy::disallowed_methods, reason = "it waits in real time")]

use std::process::ExitCode;
use std::thread::sleep;
use std::time::Duration;

use engines::{Arguments, BoxError, Service};
use lowtide::admission::{Cost, Resource as _};
use lowtide::config::{DeviceChoice, OrtPlace};
use lowtide::decay::DecayTime;
use lowtide::heap::HostArena;
use lowtide::{ByteSize, Memory, ResourceBuilder};
use lowtide_ort::ort::ep::CPU;
use lowtide_ort::ort::session::Session;
use lowtide_ort::ort::session::builder::SessionBuilder;
use lowtide_ort::{LoadedSession, ManagedSession, Runtime};

lowtide::global_allocator!(balanced);

/// After the look at idle memory.
const IDLE_UNLOAD: Duration = Duration::from_secs(4);
const POLL: Duration = Duration::from_millis(50);
/// Looks for the unload until it counts as missed.
const POLLS_MAX: u32 = 400;
const MIB: f64 = 1_048_576.0;

struct Lowtide {
    memory: Memory,
    model: ManagedSession,
}

impl Service for Lowtide {
    fn load(&mut self) -> Result<(), BoxError> {
        drop(self.model.acquire_blocking()?);
        Ok(())
    }

    fn request(
        &mut self,
        run: &mut dyn FnMut(&mut Session) -> Result<(), BoxError>,
    ) -> Result<(), BoxError> {
        let _permit = self.memory.admission().try_admit(Cost::host(ByteSize::mib(1)))?;
        let model = self.model.acquire_blocking()?;
        run(&mut model.lock())
    }

    fn unload(&mut self) -> Result<(), BoxError> {
        for _ in 0..POLLS_MAX {
            if !self.model.stats().loaded {
                return Ok(());
            }
            sleep(POLL);
        }
        Err("the model is still loaded long after its idle time".into())
    }

    fn measured_and_recovered(&self) -> Option<(f64, f64)> {
        let stats = self.model.stats();
        let mib = |bytes: ByteSize| bytes.as_f64() / MIB;
        Some((mib(stats.measured?.host), mib(stats.recovered_total.host)))
    }
}

/// ONNX Runtime without the allocator, as a profile sets it up.
fn by_profile(memory: &Memory, mut builder: SessionBuilder) -> Result<SessionBuilder, BoxError> {
    type Failed = lowtide_ort::ort::Error<SessionBuilder>;
    let text = |error: Failed| error.to_string();
    let cpus = memory.snapshot().cpus.whole().unwrap_or(1);
    builder = builder.with_config_entry("session.use_env_allocators", "0").map_err(text)?;
    let mut pattern = true;
    for setting in memory.config().profile.value.onnxruntime(cpus) {
        let is_on = setting.value != "false";
        builder = match (setting.place, setting.key) {
            (OrtPlace::SessionOption, "enable_cpu_mem_arena") => {
                let cpu = CPU::default().with_arena_allocator(is_on).build();
                builder.with_execution_providers([cpu]).map_err(text)?
            }
            (OrtPlace::SessionOption, "enable_mem_pattern") => {
                pattern = is_on;
                builder
            }
            _ => builder,
        };
    }
    Ok(builder.with_memory_pattern(pattern).map_err(text)?)
}

/// Opens ONNX Runtime, and returns a session of the model.
fn open(memory: &Memory, asked: &Arguments) -> Result<ResourceBuilder<LoadedSession>, BoxError> {
    let model = asked.model.clone();
    let kind = std::env::var("ENGINES_ARENA").unwrap_or_default();
    let pattern = std::env::var("ENGINES_PATTERN").is_ok();
    Ok(match &*kind {
        "heap" => {
            let arena = HostArena::new("runs")?;
            arena.set_decay(DecayTime::Within(Duration::from_secs(1)))?;
            let runtime = Runtime::open_in(memory, &asked.library, arena)?;
            runtime.session("embedder", model)
        }
        "engine" => {
            let runtime = Runtime::open(memory, &asked.library)?;
            let weak = memory.downgrade();
            runtime.session_with("embedder", model, move |builder| {
                by_profile(&weak.upgrade().ok_or("the service ends")?, builder)
            })
        }
        _ if pattern => {
            let runtime = Runtime::open(memory, &asked.library)?;
            runtime.session_with("embedder", model, move |builder| {
                Ok(builder.with_memory_pattern(true).map_err(|error| error.to_string())?)
            })
        }
        _ => Runtime::open(memory, &asked.library)?.session("embedder", model),
    })
}

fn main() -> Result<ExitCode, BoxError> {
    let arguments = Arguments::read()?;
    let memory = Memory::builder().device(DeviceChoice::Host).start()?;
    let model = open(&memory, &arguments)?.idle(IDLE_UNLOAD);
    let model = model.register()?;
    let mut service = Lowtide { memory, model };
    let held = engines::run(&arguments, &mut service)?;
    if arguments.name != "serve" {
        for note in service.memory.report().diagnostics() {
            println!("note: {note}");
        }
    }
    let _ = service.memory.shutdown_blocking(Duration::from_secs(5));
    Ok(if held { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
