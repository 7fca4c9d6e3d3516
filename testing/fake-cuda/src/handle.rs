//! Handles: numbers that name the device, the lifetime of its context, the kind and the object.
//!
//! A handle of the wrong kind, of another device or of a destroyed context is recognized, whatever
//! its number.
//!
//! Invariant: `Handle::decode(it.encode()) == Some(it)`, and no handle is 0, 1 or 2.

/// The kinds of objects that a handle names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Context,
    Stream,
    Event,
    Physical,
    Pool,
    Module,
    Function,
    Graph,
    GraphExec,
}

const KINDS: [Kind; 9] = [
    Kind::Context,
    Kind::Stream,
    Kind::Event,
    Kind::Physical,
    Kind::Pool,
    Kind::Module,
    Kind::Function,
    Kind::Graph,
    Kind::GraphExec,
];

const NUMBER_BITS: u32 = 52;
const LIFE_BITS: u32 = 6;
const KIND_BITS: u32 = 4;

/// The number of lives of contexts that handles distinguish.
pub(crate) const LIVES: u64 = 1 << LIFE_BITS;

/// A handle, taken apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Handle {
    pub(crate) kind: Kind,
    /// The device's number, below 3.
    pub(crate) device: usize,
    /// Which life of its context, modulo [`LIVES`].
    pub(crate) life: u64,
    pub(crate) number: u64,
}

impl Handle {
    /// # Panics
    /// If a number does not fit, after a million lives of one place.
    pub(crate) fn encode(self) -> u64 {
        assert!(self.number < 1 << NUMBER_BITS && self.device < 3, "{self:?} does not fit");
        let mut bits = self.device as u64 + 1;
        bits = (bits << KIND_BITS) | self.kind as u64;
        bits = (bits << LIFE_BITS) | (self.life % LIVES);
        (bits << NUMBER_BITS) | self.number
    }

    pub(crate) fn decode(bits: u64) -> Option<Self> {
        let part = |from: u32, size: u32| (bits >> from) & ((1 << size) - 1);
        let device = usize::try_from(part(NUMBER_BITS + LIFE_BITS + KIND_BITS, 2)).ok()?;
        let kind = usize::try_from(part(NUMBER_BITS + LIFE_BITS, KIND_BITS)).ok()?;
        Some(Self {
            kind: *KINDS.get(kind)?,
            device: device.checked_sub(1)?,
            life: part(NUMBER_BITS, LIFE_BITS),
            number: part(0, NUMBER_BITS),
        })
    }
}
