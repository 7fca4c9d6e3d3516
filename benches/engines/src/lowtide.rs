//! ONNX Runtime as the documents recommend it: the heap, a `Memory`, the session as its resource,
//! set up by the profile: `balanced`, unless `LOWTIDE_PROFILE` names another one. With feature
//! `interpose`, jemalloc serves ONNX Runtime as well.
#![expect(clippy::disallowed_methods, reason = "it waits in real time")]

use std::process::ExitCode;
use std::sync::{Mutex, PoisonError};
use std::thread::sleep;
use std::time::Duration;

use engines::{Arguments, BoxError, Service};
use lowtide::admission::{Cost, Managed, Resource as _};
use lowtide::config::{DeviceChoice, OrtPlace, Profile};
use lowtide::{ByteSize, Memory};
use ort::environment::Environment;
use ort::ep::CPU;
use ort::session::Session;
use ort::session::builder::SessionBuilder;

lowtide::global_allocator!(balanced);

/// After the look at idle memory.
const IDLE_UNLOAD: Duration = Duration::from_secs(4);
const POLL: Duration = Duration::from_millis(50);
/// Looks for the unload until it counts as missed.
const POLLS_MAX: u32 = 400;

struct Lowtide {
    memory: Memory,
    model: Managed<Mutex<Session>>,
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
        let mut session = model.lock().unwrap_or_else(PoisonError::into_inner);
        run(&mut session)
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
}

/// An error that holds no builder, which is not `Send`.
fn text(error: ort::Error<SessionBuilder>) -> String {
    error.to_string()
}

/// Sets what the profile says.
fn configured(
    mut builder: SessionBuilder,
    profile: Profile,
    cpus: u32,
) -> Result<SessionBuilder, BoxError> {
    for setting in profile.onnxruntime(cpus) {
        let value = &*setting.value;
        builder = match (setting.place, setting.key) {
            (OrtPlace::SessionOption, "enable_cpu_mem_arena") => {
                let cpu = CPU::default().with_arena_allocator(value == "true").build();
                builder.with_execution_providers([cpu]).map_err(text)?
            }
            (OrtPlace::SessionOption, "enable_mem_pattern") => {
                builder.with_memory_pattern(value == "true").map_err(text)?
            }
            (OrtPlace::SessionOption, "intra_op_num_threads") => {
                builder.with_intra_threads(value.parse()?).map_err(text)?
            }
            (OrtPlace::SessionOption, "inter_op_num_threads") => {
                builder.with_inter_threads(value.parse()?).map_err(text)?
            }
            (OrtPlace::SessionEntry, key) => builder.with_config_entry(key, value).map_err(text)?,
            (_, key) => return Err(format!("the profile sets {key}, unknown to this bench").into()),
        };
    }
    Ok(builder)
}

fn registered(
    memory: &Memory,
    environment: Environment,
    arguments: &Arguments,
) -> Result<Managed<Mutex<Session>>, BoxError> {
    let (model, profile) = (arguments.model.clone(), memory.config().profile.value);
    let cpus = memory.snapshot().cpus.whole().unwrap_or(1);
    let load = move || {
        let builder = Session::builder(&environment)?;
        let mut builder = configured(builder, profile, cpus)?;
        Ok(Mutex::new(builder.commit_from_file(&model)?))
    };
    let cost = Cost::host(ByteSize::mib(1));
    Ok(memory.register(memory.managed("embedder", load).cost(cost).idle(IDLE_UNLOAD))?)
}

fn main() -> Result<ExitCode, BoxError> {
    let arguments = Arguments::read()?;
    let environment = arguments.environment()?;
    let memory = Memory::builder().device(DeviceChoice::Host).start()?;
    let model = registered(&memory, environment, &arguments)?;
    let mut service = Lowtide { memory, model };
    let held = engines::run(&arguments, &mut service)?;
    let stats = service.model.stats();
    let measured = stats.measured.unwrap_or_default().host;
    println!("figure {}.measured_mib {} MiB", arguments.name, measured.get() >> 20);
    for note in service.memory.diagnostics() {
        println!("note: {note}");
    }
    let _ = service.memory.shutdown(Duration::from_secs(5));
    Ok(if held { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
