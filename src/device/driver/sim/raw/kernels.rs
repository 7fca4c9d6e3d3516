//! The kernels that there are, by name. A further one is a row in [`KERNELS`].
//!
//! A kernel reaches memory through [`DeviceBytes`] alone, so that a wrong access is an answer. It
//! names what it touches, so that memory taken away under it is on record.
//!
//! Invariant: a kernel touches no more than what it names.

use super::{DeviceBytes, Unreachable};

/// A kernel: its name, the size of each of its arguments in bytes (at most 8), and what it does
/// with them, each widened to 64 bits.
#[derive(Debug)]
pub struct Kernel {
    /// The name under which a module gives it.
    pub name: &'static str,
    /// The size of each argument in bytes: 1, 2, 4 or 8.
    pub sizes: &'static [usize],
    /// The ranges that it touches: address and bytes.
    pub touches: fn(&[u64]) -> Vec<(u64, u64)>,
    /// What it does.
    pub run: fn(&mut DeviceBytes<'_>, &[u64]) -> Result<(), Unreachable>,
}

/// All kernels.
pub const KERNELS: &[Kernel] = &[
    // fill_u32(u32 *at, u32 value, u64 count)
    Kernel {
        name: "fill_u32",
        sizes: &[8, 4, 8],
        touches: |a| vec![(a[0], bytes(a[2], 4))],
        run: fill_u32,
    },
    // add_f32(const float *a, const float *b, float *out, u64 count)
    Kernel {
        name: "add_f32",
        sizes: &[8, 8, 8, 8],
        touches: |a| a[..3].iter().map(|at| (*at, bytes(a[3], 4))).collect(),
        run: add_f32,
    },
    // copy_u8(const u8 *from, u8 *to, u64 count)
    Kernel {
        name: "copy_u8",
        sizes: &[8, 8, 8],
        touches: |a| vec![(a[0], a[2]), (a[1], a[2])],
        run: copy_u8,
    },
    // spin(u64 cycles): no time passes, and nothing is touched
    Kernel { name: "spin", sizes: &[8], touches: |_| Vec::new(), run: |_, _| Ok(()) },
];

/// How many elements are worked on at once.
const STEP: u64 = 4 << 10;

const fn bytes(count: u64, size: u64) -> u64 {
    count.saturating_mul(size)
}

/// The parts of `count` elements, each of at most [`STEP`]: the first one and how many.
fn parts(count: u64) -> impl Iterator<Item = (u64, usize)> {
    let step = usize::try_from(STEP).unwrap_or(usize::MAX);
    (0..count)
        .step_by(step)
        .map(move |from| (from, usize::try_from(STEP.min(count - from)).unwrap_or(usize::MAX)))
}

fn fill_u32(device: &mut DeviceBytes<'_>, a: &[u64]) -> Result<(), Unreachable> {
    device.check(a[0], bytes(a[2], 4))?;
    // The argument has 4 bytes.
    let value = a[1].to_le_bytes();
    for (from, count) in parts(a[2]) {
        device.write(a[0] + from * 4, &value[..4].repeat(count))?;
    }
    Ok(())
}

fn add_f32(device: &mut DeviceBytes<'_>, a: &[u64]) -> Result<(), Unreachable> {
    for at in &a[..3] {
        device.check(*at, bytes(a[3], 4))?;
    }
    for (from, count) in parts(a[3]) {
        let (mut left, mut right) = (vec![0; count * 4], vec![0; count * 4]);
        device.read(a[0] + from * 4, &mut left)?;
        device.read(a[1] + from * 4, &mut right)?;
        let floats = |bytes: &[u8]| f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        let both = left.chunks_exact(4).zip(right.chunks_exact(4));
        let sums = both.flat_map(|(left, right)| (floats(left) + floats(right)).to_le_bytes());
        device.write(a[2] + from * 4, &sums.collect::<Vec<_>>())?;
    }
    Ok(())
}

fn copy_u8(device: &mut DeviceBytes<'_>, a: &[u64]) -> Result<(), Unreachable> {
    device.check(a[0], a[2])?;
    device.check(a[1], a[2])?;
    for (from, count) in parts(a[2]) {
        let mut part = vec![0; count];
        device.read(a[0] + from, &mut part)?;
        device.write(a[1] + from, &part)?;
    }
    Ok(())
}
