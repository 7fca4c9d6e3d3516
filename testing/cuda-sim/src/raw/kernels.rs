//! The available kernels, by name. To add one, add a row to [`KERNELS`].
//!
//! A kernel accesses memory only through [`DeviceBytes`], so a wrong access is reported as an
//! error. It declares the ranges that it touches, so that memory released during the kernel is
//! recorded as a fault.
//!
//! Invariant: a kernel touches only the ranges that it declares.

use super::{DeviceBytes, Unreachable};

/// A kernel: its name, the size of each of its arguments in bytes (at most 8), and its function,
/// which receives each argument widened to 64 bits.
#[derive(Debug)]
pub struct Kernel {
    /// The name under which a module exports it.
    pub name: &'static str,
    /// The size of each argument in bytes: 1, 2, 4 or 8.
    pub sizes: &'static [usize],
    /// Returns the ranges that it touches: address and bytes.
    pub touches: fn(&[u64]) -> Vec<(u64, u64)>,
    /// Returns the turns of the device that pass before it runs: as many as it takes milliseconds.
    pub delay: fn(&[u64]) -> u64,
    /// Runs the kernel.
    pub run: fn(&mut DeviceBytes<'_>, &[u64]) -> Result<(), Unreachable>,
}

/// A kernel of which nothing is known: it takes its turn on its stream, and touches nothing.
pub const UNKNOWN: Kernel = Kernel {
    name: "unknown",
    sizes: &[],
    touches: |_| Vec::new(),
    delay: |_| 0,
    run: |_, _| Ok(()),
};

/// All kernels whose work is modelled.
pub const KERNELS: &[Kernel] = &[
    // fill_u32(u32 *at, u32 value, u64 count)
    Kernel {
        name: "fill_u32",
        sizes: &[8, 4, 8],
        touches: |a| vec![(a[0], bytes(a[2], 4))],
        run: fill_u32,
        ..UNKNOWN
    },
    // add_f32(const float *a, const float *b, float *out, u64 count)
    Kernel {
        name: "add_f32",
        sizes: &[8, 8, 8, 8],
        touches: |a| a[..3].iter().map(|at| (*at, bytes(a[3], 4))).collect(),
        run: add_f32,
        ..UNKNOWN
    },
    // copy_u8(const u8 *from, u8 *to, u64 count)
    Kernel {
        name: "copy_u8",
        sizes: &[8, 8, 8],
        touches: |a| vec![(a[0], a[2]), (a[1], a[2])],
        run: copy_u8,
        ..UNKNOWN
    },
    // gather_sum(const float *table, u64 table_rows, const u32 *rows, u64 count, float *out)
    Kernel {
        name: "gather_sum",
        sizes: &[8, 8, 8, 8, 8],
        touches: |a| vec![(a[0], bytes(a[1], ROW)), (a[2], bytes(a[3], 4)), (a[4], ROW)],
        run: gather_sum,
        ..UNKNOWN
    },
    // project(const float *matrix, const float *vector, float *out)
    Kernel {
        name: "project",
        sizes: &[8, 8, 8],
        touches: |a| vec![(a[0], ROW * WIDTH as u64), (a[1], ROW), (a[2], ROW)],
        run: project,
        ..UNKNOWN
    },
    // touch(u32 *at, u64 mask, u64 rounds): reads and writes somewhere in a buffer; here nothing
    // changes
    Kernel {
        name: "touch",
        sizes: &[8, 8, 8],
        touches: |a| vec![(a[0], a[1].saturating_add(4))],
        run: |device, a| device.check(a[0], a[1].saturating_add(4)),
        ..UNKNOWN
    },
    // torture_fill(u32 *at, u64 words, u32 seed, u64 ns)
    Kernel {
        name: "torture_fill",
        sizes: &[8, 8, 4, 8],
        touches: |a| vec![(a[0], bytes(a[1], 4))],
        delay: |a| a[3] / 1_000_000,
        run: torture_fill,
    },
    // torture_check(const u32 *at, u64 words, u32 seed, u64 ns, u64 *result)
    Kernel {
        name: "torture_check",
        sizes: &[8, 8, 4, 8, 8],
        touches: |a| vec![(a[0], bytes(a[1], 4)), (a[4], 24)],
        delay: |a| a[3] / 1_000_000,
        run: torture_check,
    },
    // spin(u64 cycles): no time passes, and nothing is touched
    Kernel { name: "spin", sizes: &[8], ..UNKNOWN },
];

/// Numbers in a row of the two kernels of the proxy's model, and its bytes.
const WIDTH: usize = 256;
const ROW: u64 = (WIDTH * 4) as u64;

/// The number of elements processed at once.
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

/// A word of the pattern of a seed; the upper halves of the arguments count for nothing.
fn torture_word(index: u64, seed: u64) -> [u8; 4] {
    let mixed = index.wrapping_mul(0x9E37_79B1).wrapping_add(seed.wrapping_mul(0x85EB_CA77));
    let low = mixed & u64::from(u32::MAX);
    let [a, b, c, d, ..] = (low ^ (low >> 15)).to_le_bytes();
    [a, b, c, d]
}

fn torture_fill(device: &mut DeviceBytes<'_>, a: &[u64]) -> Result<(), Unreachable> {
    device.check(a[0], bytes(a[1], 4))?;
    for (from, count) in parts(a[1]) {
        let words = (from..).take(count).flat_map(|index| torture_word(index, a[2]));
        device.write(a[0] + from * 4, &words.collect::<Vec<_>>())?;
    }
    Ok(())
}

fn torture_check(device: &mut DeviceBytes<'_>, a: &[u64]) -> Result<(), Unreachable> {
    device.check(a[0], bytes(a[1], 4))?;
    device.check(a[4], 24)?;
    let (mut wrong, mut last) = (0_u64, [0; 4]);
    for (from, count) in parts(a[1]) {
        let mut found = vec![0; count * 4];
        device.read(a[0] + from * 4, &mut found)?;
        for (index, word) in (from..).zip(found.chunks_exact(4)) {
            if word != torture_word(index, a[2]) {
                wrong += 1;
                last.copy_from_slice(word);
            }
        }
    }
    if wrong > 0 {
        let mut sum = [0; 8];
        device.read(a[4], &mut sum)?;
        device.write(a[4], &u64::from_le_bytes(sum).wrapping_add(wrong).to_le_bytes())?;
        device.write(a[4] + 8, &a[2].to_le_bytes())?;
        device.write(a[4] + 16, &u64::from(u32::from_le_bytes(last)).to_le_bytes())?;
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

/// The numbers of a row.
fn row(device: &mut DeviceBytes<'_>, at: u64) -> Result<Vec<f32>, Unreachable> {
    let mut read = [0; WIDTH * 4];
    device.read(at, &mut read)?;
    let floats = |bytes: &[u8]| f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
    Ok(read.chunks_exact(4).map(floats).collect())
}

fn put_row(device: &mut DeviceBytes<'_>, at: u64, row: &[f32]) -> Result<(), Unreachable> {
    device.write(at, &row.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<_>>())
}

fn gather_sum(device: &mut DeviceBytes<'_>, a: &[u64]) -> Result<(), Unreachable> {
    device.check(a[2], bytes(a[3], 4))?;
    device.check(a[4], ROW)?;
    let mut sums = vec![0.0; WIDTH];
    for nth in 0..a[3] {
        let mut number = [0; 4];
        device.read(a[2] + nth * 4, &mut number)?;
        let number = u64::from(u32::from_le_bytes(number));
        if number < a[1] {
            let row = row(device, a[0] + number * ROW)?;
            sums.iter_mut().zip(row).for_each(|(sum, value)| *sum += value);
        }
    }
    put_row(device, a[4], &sums)
}

fn project(device: &mut DeviceBytes<'_>, a: &[u64]) -> Result<(), Unreachable> {
    let vector = row(device, a[1])?;
    let mut out = Vec::new();
    for nth in 0..WIDTH as u64 {
        let weights = row(device, a[0] + nth * ROW)?;
        out.push(weights.iter().zip(&vector).map(|(weight, value)| weight * value).sum::<f32>());
    }
    put_row(device, a[2], &out)
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
