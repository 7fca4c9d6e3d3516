//! ONNX Runtime as it comes, under the C library's allocator or a preloaded one; no lowtide.

use engines::{Arguments, BoxError, Service};
use ort::environment::Environment;
use ort::session::Session;

#[global_allocator]
static HEAP: std::alloc::System = std::alloc::System;

struct Plain {
    environment: Environment,
    arguments: Arguments,
    session: Option<Session>,
}

impl Service for Plain {
    fn load(&mut self) -> Result<(), BoxError> {
        let mut builder = Session::builder(&self.environment)?;
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
    let arguments = Arguments::read()?;
    let environment = arguments.environment()?;
    let mut plain = Plain { environment, arguments: arguments.clone(), session: None };
    engines::run(&arguments, &mut plain)?;
    Ok(())
}
