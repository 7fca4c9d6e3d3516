//! The watermark of a device: decides when to release idle memory early because other processes use
//! the device.
//!
//! A shortage begins when `free < low`, with `low = part x total`. From then on, idle memory is
//! released until `free` reaches `high = 3/2 low`, or half of the way from `low` to the total if
//! that is less, and no more, so that the next request still finds its memory if there is room. The
//! memory that we release raises `free` itself. If that ended the shortage, the next burst would
//! take the memory again. So the shortage ends when there is room for everything we held at its
//! start as well (`free - released >= high`: the other process has left), or when `free >= high`
//! for a whole minute (we no longer need what we held). In between nothing changes.
//!
//! Pure: it reads no clock, calls no driver and releases nothing. The caller decides how often it
//! runs.
//!
//! Invariant: begin and end alternate; a shortage begins only below `low`; `wanted = 0` while there
//! is no shortage or `free >= high`.

use std::time::Duration;

use crate::bytes::ByteSize;
use crate::clock::Moment;

/// The time for which the device must have room if the other process has not left. A guess. It
/// limits how often a shortage can begin to once in this time.
const CALM: Duration = Duration::from_secs(60);

/// A measurement of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct DeviceSample {
    /// The memory of the device.
    pub(super) total: ByteSize,
    /// The free memory of the device.
    pub(super) free: ByteSize,
    /// The device memory that this process's arenas have committed.
    pub(super) committed: ByteSize,
}

/// The watermark of one device, with the last sample.
#[derive(Clone, Copy, Debug)]
pub(super) struct Watermark {
    part: f64,
    short: Option<DeviceShortage>,
    /// The last sample; `None` until the device answers again, which never happens after its
    /// context is lost.
    pub(super) last: Option<DeviceSample>,
    /// Bytes released because device memory was low.
    pub(super) released_total: u64,
}

#[derive(Clone, Copy, Debug)]
struct DeviceShortage {
    /// The committed memory of our arenas when the shortage began.
    committed: ByteSize,
    /// The time since which the device has room.
    calm_since: Option<Moment>,
}

impl Watermark {
    /// Creates a watermark at this part of the device's memory, in `[0, 1)`. 0 disables it.
    pub(super) const fn new(part: f64) -> Self {
        Self { part, short: None, last: None, released_total: 0 }
    }

    /// Returns `true` if the device is short of memory.
    pub(super) const fn is_short(&self) -> bool {
        self.short.is_some()
    }

    /// Returns the free memory below which a shortage begins.
    pub(super) fn low(&self, total: ByteSize) -> ByteSize {
        total.scaled(self.part)
    }

    /// Updates the state with a sample. Returns the idle memory to release, as far as there is any.
    pub(super) fn look(&mut self, now: Moment, look: DeviceSample) -> ByteSize {
        self.last = Some(look);
        let low = self.low(look.total);
        let beyond = look.total.saturating_sub(low).min(low);
        let high = low.saturating_add(ByteSize::new(beyond.get() / 2));
        let has_room = look.free >= high;
        match &mut self.short {
            None if look.free < low => {
                self.short = Some(DeviceShortage { committed: look.committed, calm_since: None });
            }
            None => {}
            Some(shortage) => {
                let since = *shortage.calm_since.get_or_insert(now);
                if !has_room {
                    shortage.calm_since = None;
                }
                let given = shortage.committed.saturating_sub(look.committed);
                let has_left = look.free.saturating_sub(given) >= high;
                if has_room && (has_left || now - since >= CALM) {
                    self.short = None;
                }
            }
        }
        if self.is_short() { high.saturating_sub(look.free) } else { ByteSize::ZERO }
    }

    /// Discards the last sample and ends a shortage, for example if the device can no longer be
    /// read.
    pub(super) const fn forget(&mut self) {
        (self.last, self.short) = (None, None);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Moment {
        Moment::ORIGIN + Duration::from_secs(seconds)
    }

    /// Of 1000 MiB; short below 100, until 150.
    fn look(free: u64, committed: u64) -> DeviceSample {
        let mib = ByteSize::mib;
        DeviceSample { total: mib(1000), free: mib(free), committed: mib(committed) }
    }

    #[test]
    fn a_neighbour_that_comes_and_leaves_makes_one_shortage() {
        let mut mark = Watermark::new(0.1);
        let steps = [
            (500, 400, false, 0),
            (100, 400, false, 0),
            (99, 400, true, 51),
            // 51 released: that alone does not end it.
            (150, 349, true, 0),
            (120, 379, true, 30),
            (150, 349, true, 0),
            // 100 of the neighbour's are free: we could hold 400 again.
            (250, 349, false, 0),
            (150, 449, false, 0),
        ];
        for (second, (free, committed, is_short, wanted)) in (0..).zip(steps) {
            let found = mark.look(at(second), look(free, committed));
            let found = (mark.is_short(), found);
            let expected = (is_short, ByteSize::mib(wanted));
            assert_eq!(found, expected, "{free} free, {committed} committed");
        }
    }

    #[test]
    fn what_is_not_needed_any_more_ends_it_after_a_calm_minute() {
        let mut mark = Watermark::new(0.1);
        let mut is_short = |second, free, committed| {
            mark.look(at(second), look(free, committed));
            mark.is_short()
        };
        assert!(is_short(0, 50, 400));
        assert!(is_short(1, 160, 290));
        assert!(is_short(50, 149, 301), "a break");
        assert!(is_short(51, 160, 290));
        assert!(is_short(110, 160, 290));
        assert!(!is_short(111, 160, 290));
    }

    /// The bug: from a part of two thirds on, a device never had room again, since one and a half
    /// times that is more than the total.
    #[test]
    fn a_large_part_made_a_shortage_without_end() {
        for part in [0.5, 0.67, 0.9, 0.999] {
            let mut mark = Watermark::new(part);
            mark.look(at(0), look(400, 100));
            assert!(mark.is_short(), "{part}");
            assert_eq!(mark.look(at(1), look(1000, 0)), ByteSize::ZERO, "{part}");
            mark.look(at(61), look(1000, 0));
            assert!(!mark.is_short(), "{part}");
        }
    }

    #[test]
    fn without_a_part_nothing_is_short() {
        let mut mark = Watermark::new(0.0);
        assert_eq!(mark.look(at(0), look(0, 1000)), ByteSize::ZERO);
        assert!(!mark.is_short());
    }

    /// A burst each second that takes the released memory again. Checking `free` alone would begin
    /// and end a shortage with each.
    #[test]
    fn bursts_beside_a_neighbour_that_stays_are_one_shortage() {
        let mut mark = Watermark::new(0.1);
        for second in 0..600 {
            let (free, committed) = if second % 2 == 0 { (60, 400) } else { (150, 310) };
            mark.look(at(second), look(free, committed));
            assert!(mark.is_short(), "second {second}");
        }
    }
}
