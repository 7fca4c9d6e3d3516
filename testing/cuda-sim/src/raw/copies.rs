//! Copies, memsets, kernels and host functions, queued on a stream.
//!
//! All work runs in stream order: a copy reads host memory when it runs, not when it is queued. To
//! read it at the call, pass a copy of it.
//!
//! Invariant: as in [`super`]; the ranges of a piece of work are validated before the first byte is
//! written.

use std::sync::Arc;

use super::super::call::Call;
use super::super::fault::WorkKind;
use super::super::memory::Range;
use super::super::model::INVALID_VALUE;
use super::super::sparse::index;
use super::super::task::{DeviceBytes, Job, Task, Unreachable};
use super::super::work::Work;
use super::{Answer, HostBytes, Kernel, Raw, code};
use lowtide_core::bytes::ByteSize;

/// The block size of a copy.
const STEP: u64 = 64 << 10;

/// One end of a copy.
#[derive(Clone, Debug)]
pub enum Place {
    /// An address that the device can access, in its own memory or the host's.
    Device(u64),
    /// Host memory that the device cannot access by itself, from an offset on. The caller waits for
    /// a copy into it before the memory is freed.
    Host(Arc<HostBytes>, u64),
}

impl Place {
    const fn range(&self, size: u64) -> Option<Range> {
        match self {
            Self::Device(at) => Some(Range { at: *at, size }),
            Self::Host(..) => None,
        }
    }

    fn check(&self, device: &DeviceBytes<'_>, size: u64) -> Result<(), Unreachable> {
        self.range(size).map_or(Ok(()), |range| device.check(range.at, range.size))
    }

    fn read(
        &self,
        device: &DeviceBytes<'_>,
        done: u64,
        into: &mut [u8],
    ) -> Result<(), Unreachable> {
        match self {
            Self::Device(at) => device.read(at + done, into),
            Self::Host(bytes, offset) => {
                bytes.read(offset + done, into);
                Ok(())
            }
        }
    }

    fn write(
        &self,
        device: &mut DeviceBytes<'_>,
        done: u64,
        from: &[u8],
    ) -> Result<(), Unreachable> {
        match self {
            Self::Device(at) => device.write(at + done, from),
            Self::Host(bytes, offset) => {
                bytes.write(offset + done, from);
                Ok(())
            }
        }
    }
}

#[expect(clippy::missing_errors_doc, reason = "each answers with the codes of cuda.h")]
impl Raw<'_> {
    /// Queues a copy.
    pub fn copy_async(&self, to: Place, from: Place, size: u64, stream: u64) -> Answer {
        let call = match (&to, &from) {
            (_, Place::Host(..)) => Call::Restore,
            (Place::Host(..), _) => Call::Offload,
            _ => Call::CopyAsync,
        };
        let mut model = self.model();
        model.enter(call, ByteSize::new(size)).map_err(code)?;
        if size == 0 {
            return Ok(());
        }
        if let (&Place::Device(to), &Place::Device(from)) = (&to, &from)
            && model.memory.is_inside(to)
            && model.memory.is_inside(from)
        {
            if to.abs_diff(from) < size {
                return Err(1);
            }
            let work = Work::Copy(Range { at: from, size }, to, WorkKind::Copy);
            return model
                .live_stream(stream)
                .and_then(|()| model.queue(stream, work))
                .map_err(code);
        }
        let touches = [&to, &from].into_iter().filter_map(|place| place.range(size)).collect();
        let job: Job = Box::new(move |device| {
            to.check(device, size)?;
            from.check(device, size)?;
            let mut buffer = vec![0; index(STEP.min(size))];
            let mut done = 0;
            while done < size {
                let part = &mut buffer[..index(STEP.min(size - done))];
                from.read(device, done, part)?;
                to.write(device, done, part)?;
                done += part.len() as u64;
            }
            Ok(())
        });
        model.start_task(stream, WorkKind::HostCopy, Task::new(touches, 0, job)).map_err(code)
    }

    /// Queues a memset with a pattern of 1, 2 or 4 bytes, repeated.
    pub fn set_async(&self, at: u64, pattern: &[u8], count: u64, stream: u64) -> Answer {
        let size = count.checked_mul(pattern.len() as u64).ok_or(1_u32)?;
        let pattern = pattern.to_vec();
        let job: Job = Box::new(move |device| {
            device.check(at, size)?;
            let run = pattern.repeat(index(STEP) / pattern.len());
            let mut done = 0;
            while done < size {
                let part = &run[..index(STEP.min(size - done))];
                device.write(at + done, part)?;
                done += part.len() as u64;
            }
            Ok(())
        });
        self.call(Call::Set, size, |model| {
            if size == 0 {
                return Ok(());
            }
            model.start_task(stream, WorkKind::Set, Task::new(vec![Range { at, size }], 0, job))
        })
    }

    /// Queues a kernel with its arguments, each widened to 64 bits.
    pub fn launch(&self, kernel: &'static Kernel, arguments: &[u64], stream: u64) -> Answer {
        self.call(Call::Launch, 0, |model| {
            if arguments.len() != kernel.sizes.len() {
                return Err(model.fail(INVALID_VALUE));
            }
            let arguments = arguments.to_vec();
            let delay = (kernel.delay)(&arguments);
            let ranges = (kernel.touches)(&arguments).into_iter();
            let touches = ranges.map(|(at, size)| Range { at, size }).collect();
            let job: Job = Box::new(move |device| (kernel.run)(device, &arguments));
            model.start_task(stream, WorkKind::Kernel, Task::new(touches, delay, job))
        })
    }

    /// Queues a host function. It runs under the device's lock: it must not call CUDA, and must not
    /// wait for a thread that does.
    pub fn host_function(&self, stream: u64, mut function: Box<dyn FnMut() + Send>) -> Answer {
        let job: Job = Box::new(move |_| {
            function();
            Ok(())
        });
        self.call(Call::LaunchHostFunction, 0, |model| {
            model.start_task(stream, WorkKind::HostFunction, Task::new(Vec::new(), 0, job))
        })
    }
}
