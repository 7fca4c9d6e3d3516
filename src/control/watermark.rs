//! The watermark of a device: when its neighbours have taken so much that idle memory of ours goes
//! back before its time.
//!
//! Short while `free < low`, `low = part x total`; from then on as much idle memory is wanted back
//! as brings `free` to `high = 3/2 low`, or half the way from `low` to all there is where that is
//! less, and no more, so that what serves the next request stays where there is room for it. What
//! we give back raises `free` itself: were that the end, the next burst would take it again, and so
//! on. So it ends when there is room for what we held at the beginning as well
//! (`free - given >= high`: the neighbour has left), or when `free >= high` for a minute without a
//! break (what we held is not needed any more). In between nothing changes.
//!
//! Pure: it reads no clock, calls no driver, and gives nothing back itself. How often it looks is
//! its caller's rate.
//!
//! Invariant: it begins and ends alternately; it begins only below `low`, and `wanted = 0` while it
//! is not short or `free >= high`.

use std::time::Duration;

use crate::bytes::ByteSize;
use crate::clock::Moment;

/// For how long the device must have had room where what was given back has not come back to it
/// by somebody's leaving. A guess: it bounds how often a shortage can begin anew, to once in this
/// time.
const CALM: Duration = Duration::from_secs(60);

/// What was found of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceSample {
    /// The memory of the device.
    pub total: ByteSize,
    /// What of it nobody holds.
    pub free: ByteSize,
    /// What our arenas hold of it.
    pub committed: ByteSize,
}

/// What changed with a look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trend {
    /// Nothing.
    Same,
    /// The device is short of memory from now on.
    Short,
    /// It has room again.
    Room,
}

/// What follows of a look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Decision {
    /// What changed.
    pub tide: Trend,
    /// How much idle memory is to go back, as far as there is any.
    pub wanted: ByteSize,
}

/// The state of one device.
#[derive(Clone, Copy, Debug)]
pub struct Watermark {
    part: f64,
    short: Option<Shortage>,
}

#[derive(Clone, Copy, Debug)]
struct Shortage {
    /// What our arenas held when it began.
    committed: ByteSize,
    /// Since when the device had room.
    calm_since: Option<Moment>,
}

impl Watermark {
    /// One at this part of the device's memory, in `[0, 1)`; with 0 it never is short.
    #[must_use]
    pub const fn new(part: f64) -> Self {
        Self { part, short: None }
    }

    /// Whether the device is short.
    #[must_use]
    pub const fn is_short(&self) -> bool {
        self.short.is_some()
    }

    /// Below how much free memory it is short.
    #[must_use]
    pub fn low(&self, total: ByteSize) -> ByteSize {
        total.scaled(self.part)
    }

    /// Takes a look into account.
    pub fn look(&mut self, now: Moment, look: DeviceSample) -> Decision {
        let low = self.low(look.total);
        let beyond = look.total.saturating_sub(low).min(low);
        let high = low.saturating_add(ByteSize::new(beyond.get() / 2));
        let has_room = look.free >= high;
        let mut tide = Trend::Same;
        match &mut self.short {
            None if look.free < low => {
                self.short = Some(Shortage { committed: look.committed, calm_since: None });
                tide = Trend::Short;
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
                    tide = Trend::Room;
                }
            }
        }
        let wanted = if self.is_short() { high.saturating_sub(look.free) } else { ByteSize::ZERO };
        Decision { tide, wanted }
    }

    /// Forgets a shortage, where nothing is known of the device any more.
    pub const fn forget(&mut self) {
        self.short = None;
    }
}

#[cfg(all(test, not(lowtide_loom)))]
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
            (500, 400, Trend::Same, 0),
            (100, 400, Trend::Same, 0),
            (99, 400, Trend::Short, 51),
            // 51 given back: that alone is no end.
            (150, 349, Trend::Same, 0),
            (120, 379, Trend::Same, 30),
            (150, 349, Trend::Same, 0),
            // 100 of the neighbour's are free: we could hold 400 again.
            (250, 349, Trend::Room, 0),
            (150, 449, Trend::Same, 0),
        ];
        for (second, (free, committed, tide, wanted)) in (0..).zip(steps) {
            let verdict = mark.look(at(second), look(free, committed));
            let expected = Decision { tide, wanted: ByteSize::mib(wanted) };
            assert_eq!(verdict, expected, "{free} free, {committed} committed");
        }
    }

    #[test]
    fn what_is_not_needed_any_more_ends_it_after_a_calm_minute() {
        let mut mark = Watermark::new(0.1);
        assert_eq!(mark.look(at(0), look(50, 400)).tide, Trend::Short);
        assert_eq!(mark.look(at(1), look(160, 290)).tide, Trend::Same);
        assert_eq!(mark.look(at(50), look(149, 301)).tide, Trend::Same, "a break");
        assert_eq!(mark.look(at(51), look(160, 290)).tide, Trend::Same);
        assert_eq!(mark.look(at(110), look(160, 290)).tide, Trend::Same);
        assert_eq!(mark.look(at(111), look(160, 290)).tide, Trend::Room);
        assert!(!mark.is_short());
    }

    /// The bug: from a part of two thirds on no device had room again, since half as much once more
    /// is more than there is.
    #[test]
    fn a_large_part_made_a_shortage_without_end() {
        for part in [0.5, 0.67, 0.9, 0.999] {
            let mut mark = Watermark::new(part);
            assert_eq!(mark.look(at(0), look(400, 100)).tide, Trend::Short, "{part}");
            assert_eq!(mark.look(at(1), look(1000, 0)).wanted, ByteSize::ZERO, "{part}");
            mark.look(at(61), look(1000, 0));
            assert!(!mark.is_short(), "{part}");
        }
    }

    #[test]
    fn without_a_part_nothing_is_short() {
        let mut mark = Watermark::new(0.0);
        let verdict = mark.look(at(0), look(0, 1000));
        assert_eq!(verdict, Decision { tide: Trend::Same, wanted: ByteSize::ZERO });
    }

    /// A burst each second that takes back what was given: whoever looks at `free` alone begins and
    /// ends with each.
    #[test]
    fn bursts_beside_a_neighbour_that_stays_are_one_shortage() {
        let mut mark = Watermark::new(0.1);
        let mut begun = 0;
        for second in 0..600 {
            let (free, committed) = if second % 2 == 0 { (60, 400) } else { (150, 310) };
            let verdict = mark.look(at(second), look(free, committed));
            begun += u32::from(verdict.tide == Trend::Short);
            assert_ne!(verdict.tide, Trend::Room, "second {second}");
        }
        assert_eq!(begun, 1);
    }
}
