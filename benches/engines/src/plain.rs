//! ONNX Runtime without lowtide, under the C library's allocator or a preloaded one: with its
//! defaults, or without its arena if `ENGINES_ARENA_OFF` is set. With `ENGINES_SPIN_OFF` threads
//! sleep at once, as with lowtide, so that CPU times can be compared.
#![expect(clippy::disallowed_methods, reason = "a variable chooses how it runs")]

use clap::Parser as _;
use engines::{Arguments, BoxError, Service};
use lowtide_ort::ort;
use lowtide_ort::ort::environment::Environment;
use lowtide_ort::ort::ep::CPU;
use lowtide_ort::ort::session::Session;
use lowtide_ort::ort::session::builder::SessionBuilder;

#[global_allocator]
static HEAP: std::alloc::System = std::alloc::System;

struct Plain {
    environment: Environment,
    arguments: Arguments,
    session: Option<Session>,
}

impl Service for Plain {
    fn load(&mut self) -> Result<(), BoxError> {
        let text = |error: ort::Error<SessionBuilder>| error.to_string();
        let mut builder = Session::builder(&self.environment)?;
        if std::env::var_os("ENGINES_ARENA_OFF").is_some() {
            let cpu = CPU::default().with_arena_allocator(false).build();
            builder = builder.with_execution_providers([cpu]).map_err(text)?;
            builder = builder.with_memory_pattern(false).map_err(text)?;
        }
        if std::env::var_os("ENGINES_SPIN_OFF").is_some() {
            builder = builder.with_intra_op_spinning(false).map_err(text)?;
        }
        self.session = Some(builder.commit_from_file(&self.arguments.model)?);
        Ok(())
    }

    fn request(
        &mut self,
        run: &mut dyn FnMut(&mut Session) -> Result<(), BoxError>,
    ) -> Result<(), BoxError> {
        run(self.session.as_mut().ok_or("the model is not loaded")?)
    }

    fn unload(&mut self) -> Result<(), BoxError> {
        self.session = None;
        Ok(())
    }
}

fn main() -> Result<(), BoxError> {
    let arguments = Arguments::parse();
    let environment = ort::init_from(&arguments.library)?.with_telemetry(false).build()?;
    let mut plain = Plain { environment, arguments: arguments.clone(), session: None };
    engines::run(&arguments, &mut plain)?;
    Ok(())
}
