//! A range of addresses as a strip of pixels: large spans exact, small ones as shades.
//!
//! Pure arithmetic. A span of at least `WIDE` pixels keeps its edges. Narrower spans are summed up
//! in pixel columns, each in proportion to its part of a column. Adjacent columns of one shade are
//! one bar.
//!
//! Invariant: at most `width + width / WIDE` bars, for any input.

/// The number of pixels from which on a span is drawn separately.
pub(super) const WIDE: f64 = 2.0;

/// The number of shades between empty and full.
const SHADES: f64 = 8.0;

/// A bar to draw, in pixels from the strip's left.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Bar {
    pub(super) left: f64,
    pub(super) width: f64,
    /// The covered fraction, above 0 and at most 1.
    pub(super) shade: f64,
    /// The index of the span in the order of adding, if the bar is a single span.
    pub(super) span: Option<usize>,
}

/// A strip that is being filled.
#[derive(Clone, Debug)]
pub(super) struct Strip {
    start: u64,
    end: u64,
    bars: Vec<Bar>,
    columns: Vec<f64>,
    added: usize,
}

impl Strip {
    /// Creates an empty strip of this many pixels for the addresses from `start` to `end`.
    pub(super) fn new(start: u64, end: u64, pixels: usize) -> Self {
        Self { start, end, bars: Vec::new(), columns: vec![0.0; pixels], added: 0 }
    }

    /// Adds a span, as far as it lies in the strip. Spans of one strip must not overlap.
    pub(super) fn add(&mut self, from: u64, to: u64) {
        let nth = self.added;
        self.added += 1;
        let (left, right) = (self.pixel(from), self.pixel(to));
        if right - left >= WIDE {
            self.bars.push(Bar { left, width: right - left, shade: 1.0, span: Some(nth) });
            return;
        }
        let first = column(left);
        for (nth, covered) in self.columns.iter_mut().enumerate().skip(first).take(3) {
            let edge = float(nth);
            *covered += (right.min(edge + 1.0) - left.max(edge)).max(0.0);
        }
    }

    /// Returns the bars: the wide spans, then the shades.
    pub(super) fn finish(self) -> Vec<Bar> {
        let mut bars = self.bars;
        let wide = bars.len();
        for (nth, covered) in self.columns.into_iter().enumerate() {
            if covered <= 0.0 {
                continue;
            }
            let shade = (covered.min(1.0) * SHADES).ceil() / SHADES;
            let left = float(nth);
            match bars.get_mut(wide..).and_then(<[Bar]>::last_mut) {
                Some(last) if last.left + last.width >= left && same(last.shade, shade) => {
                    last.width += 1.0;
                }
                _ => bars.push(Bar { left, width: 1.0, shade, span: None }),
            }
        }
        bars
    }

    /// Returns the position of an address, within the strip.
    pub(super) fn pixel(&self, address: u64) -> f64 {
        let within = float64(address.clamp(self.start, self.end) - self.start);
        within / float64((self.end - self.start).max(1)) * float(self.columns.len())
    }
}

/// Compares shades, which are eighths and so exact.
fn same(one: f64, other: f64) -> bool {
    (one - other).abs() < 1.0 / SHADES / 2.0
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a pixel's number")]
fn column(pixel: f64) -> usize {
    pixel.max(0.0) as usize
}

#[expect(clippy::cast_precision_loss, reason = "a pixel's number")]
const fn float(number: usize) -> f64 {
    number as f64
}

#[expect(clippy::cast_precision_loss, reason = "a place in a picture")]
const fn float64(number: u64) -> f64 {
    number as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wide_span_keeps_its_edges_and_what_lies_outside_is_cut_off() {
        let mut strip = Strip::new(1000, 2000, 100);
        strip.add(0, 1100);
        strip.add(1250, 1305);
        strip.add(1990, 5000);
        strip.add(5000, 6000);
        let bars = strip.finish();
        let bar = |left, width, shade, span| Bar { left, width, shade, span };
        assert_eq!(
            bars,
            [bar(0.0, 10.0, 1.0, Some(0)), bar(25.0, 5.5, 1.0, Some(1)), bar(99.0, 1.0, 1.0, None)]
        );
    }

    #[test]
    fn narrow_spans_become_shades_and_equal_shades_one_bar() {
        let mut strip = Strip::new(0, 1000, 100);
        // Half of every pixel from 10 to 20, in spans of half a pixel.
        (10..20).for_each(|pixel| strip.add(pixel * 10, pixel * 10 + 5));
        let bars = strip.finish();
        assert_eq!(bars, [Bar { left: 10.0, width: 10.0, shade: 0.5, span: None }]);
    }

    #[test]
    fn the_number_of_bars_is_bounded_by_the_pixels() {
        let mut strip = Strip::new(0, 1 << 40, 100);
        let mut at = 0;
        for nth in 0..100_000_u64 {
            let size = 1 << (nth * 7919 % 36);
            strip.add(at, at + size);
            at += size + (1 << (nth * 104_729 % 34));
        }
        let bars = strip.finish();
        assert!(bars.len() <= 150, "{}", bars.len());
        assert!(bars.iter().all(|bar| bar.left >= 0.0 && bar.left + bar.width <= 100.001));
        assert!(bars.iter().all(|bar| bar.shade > 0.0 && bar.shade <= 1.0));
    }
}
