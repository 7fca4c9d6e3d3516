//! ONNX Runtime as `docs/ENGINES.md` recommends it, in the profile `balanced` unless
//! `LOWTIDE_PROFILE` names another one. With feature `interpose`, jemalloc serves ONNX Runtime as
//! well.
#![expect(clippy::disallowed_methods, reason = "it waits in real time")]

use std::process::ExitCode;
use std::thread::sleep;
use std::time::Duration;

use clap::Parser as _;
use engines::{Arguments, BoxError, Service};
use lowtide::admission::{Cost, Managed};
use lowtide::config::DeviceChoice;
use lowtide::{ByteSize, Memory};
use lowtide_ort::ort::session::Session;
use lowtide_ort::{LoadedSession, Runtime};

lowtide::global_allocator!(balanced);

/// After the look at idle memory.
const IDLE_UNLOAD: Duration = Duration::from_secs(4);
const POLL: Duration = Duration::from_millis(50);
/// Looks for the unload until it counts as missed.
const POLLS_MAX: u32 = 400;
const MIB: f64 = 1_048_576.0;

struct Lowtide {
    memory: Memory,
    model: Managed<LoadedSession>,
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

fn main() -> Result<ExitCode, BoxError> {
    let arguments = Arguments::parse();
    let memory = Memory::builder().device(DeviceChoice::Host).start()?;
    let runtime = Runtime::open(&memory, &arguments.library)?;
    let model = runtime.session("embedder", arguments.model.clone()).idle(IDLE_UNLOAD);
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
