//! Modules and their kernels, by name.
//!
//! A module's text must look like PTX and is ignored otherwise. Each module has all kernels of
//! [`KERNELS`] and, with [`Options::UNKNOWN_KERNELS`], every other one.
//!
//! Invariant: a function's number consists of its module's and its index in the table.
#![expect(unsafe_code, reason = "exports functions under C names: the attribute alone")]

use std::ffi::{c_int, c_uint};

use lowtide_cuda_sim::raw::{KERNELS, Kernel, UNKNOWN};

use crate::call::{Answer, INVALID_HANDLE, INVALID_PTX, INVALID_VALUE, NOT_FOUND, NOT_SUPPORTED};
use crate::control::Options;
use crate::ffi::{Arguments, Out, Text, Untyped, export};
use crate::handle::Kind;
use crate::state::{Seat, current, state, stream};

/// A word that every PTX text contains.
const PTX: &str = ".version";

/// Numbers of functions: the module's times this, and the place in the table.
const MODULE_STEP: u64 = 1 << 8;

fn load(to: Out<u64>, text: &str) -> Answer {
    let seat = current()?;
    if !text.contains(PTX) {
        return Err(INVALID_PTX);
    }
    let mut state = state();
    state.modules_loaded += 1;
    let number = state.modules_loaded;
    state.devices[seat.device].context.modules.insert(number);
    to.put(seat.handle(Kind::Module, number))
}

fn module(bits: u64) -> Answer<(Seat, u64)> {
    let mut state = state();
    let (seat, number) = state.find(bits, Kind::Module, INVALID_HANDLE)?;
    let loaded = state.devices[seat.device].context.modules.contains(&number);
    if loaded { Ok((seat, number)) } else { Err(INVALID_HANDLE) }
}

fn function(bits: u64) -> Answer<(Seat, &'static Kernel)> {
    let mut state = state();
    let (seat, number) = state.find(bits, Kind::Function, INVALID_HANDLE)?;
    let loaded = state.devices[seat.device].context.modules.contains(&(number / MODULE_STEP));
    let place = usize::try_from(number % MODULE_STEP).unwrap_or(usize::MAX);
    let known = KERNELS.get(place);
    let kernel = if place == KERNELS.len() { Some(&UNKNOWN) } else { known };
    Ok((seat, kernel.filter(|_| loaded).ok_or(INVALID_HANDLE)?))
}

fn launch(bits: u64, grid: [c_uint; 6], queue: u64, arguments: Arguments) -> Answer {
    let (seat, kernel) = function(bits)?;
    let (other, stream) = stream(queue)?;
    if other.device != seat.device {
        return Err(INVALID_HANDLE);
    }
    let block = grid[3..].iter().map(|size| u64::from(*size)).product::<u64>();
    if grid.contains(&0) || block > 1_024 {
        return Err(INVALID_VALUE);
    }
    if arguments.is_absent() && !kernel.sizes.is_empty() {
        return Err(INVALID_VALUE);
    }
    let sizes = kernel.sizes.iter().enumerate();
    let values: Answer<Vec<u64>> = sizes.map(|(at, size)| arguments.get(at, *size)).collect();
    seat.sim.raw().launch(kernel, &values?, stream)
}

export! {
    fn cuModuleLoadData(to: Out<u64>, image: Text) {
        load(to, &image.get()?)
    }

    // A program that links cudarc needs the name.
    fn cuModuleLoad() {
        Err(NOT_SUPPORTED)
    }

    fn cuModuleUnload(bits: u64) {
        let (seat, number) = module(bits)?;
        state().devices[seat.device].context.modules.remove(&number);
        Ok(())
    }

    fn cuModuleGetFunction(to: Out<u64>, bits: u64, name: Text) {
        let (seat, number) = module(bits)?;
        let name = name.get()?;
        let known = KERNELS.iter().position(|kernel| kernel.name == name);
        let has_all = state().options.flags & Options::UNKNOWN_KERNELS != 0;
        let unknown = has_all.then_some(KERNELS.len());
        let place = known.or(unknown).ok_or(NOT_FOUND)?;
        to.put(seat.handle(Kind::Function, number * MODULE_STEP + place as u64))
    }

    fn cuFuncGetAttribute(value: Out<c_int>, which: c_int, bits: u64) {
        function(bits)?;
        value.put(if which == 0 { 1_024 } else { 0 })
    }

    fn cuFuncSetAttribute(bits: u64, _which: c_int, _value: c_int) {
        function(bits).map(drop)
    }

    fn cuLaunchKernel(
        bits: u64,
        grid_x: c_uint,
        grid_y: c_uint,
        grid_z: c_uint,
        block_x: c_uint,
        block_y: c_uint,
        block_z: c_uint,
        _shared: c_uint,
        stream: u64,
        arguments: Arguments,
        extra: Untyped,
    ) {
        if extra.address() != 0 {
            return Err(NOT_SUPPORTED);
        }
        launch(bits, [grid_x, grid_y, grid_z, block_x, block_y, block_z], stream, arguments)
    }
}
