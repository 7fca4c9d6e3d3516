//! A stub for the CUDA device in a build without the feature `cuda`: none opens.

use std::convert::Infallible;

use lowtide::device::{Buffer, DeviceArena, Lease};

use super::ModelError;

/// No device.
#[derive(Debug)]
pub(crate) struct Cuda(Infallible);

impl Cuda {
    pub(crate) fn open(arena: &DeviceArena) -> Result<Self, ModelError> {
        Err(ModelError::NoCuda { arena: arena.name().to_owned() })
    }

    pub(crate) fn alloc(&self, _: usize) -> Result<Buffer<f32>, ModelError> {
        match self.0 {}
    }

    pub(crate) fn fill(
        &self,
        _: &mut Buffer<f32>,
        _: &Lease,
        _: impl FnMut() -> f32,
    ) -> Result<(), ModelError> {
        match self.0 {}
    }

    pub(crate) fn embed(
        &self,
        _: &Buffer<f32>,
        _: &Buffer<f32>,
        _: &[u32],
        _: &Lease,
    ) -> Result<Vec<f32>, ModelError> {
        match self.0 {}
    }
}
