//! Resident memory over time, a line for each allocator.
//!
//! The axis of memory is logarithmic: what matters is by what factor one keeps more than another.
//! Invariant: 0 s is the end of each one's traffic.

use std::path::Path;

use plotters::prelude::*;
use retention::BoxError;

use crate::burst::Course;

const SIZE: (u32, u32) = (1000, 560);
/// Width of the legend, on the right.
const LEGEND: u32 = 190;
const TIMES: std::ops::Range<f64> = -4.0..10.0;
const MEMORY: std::ops::Range<f64> = 80.0..1_200.0;

/// By allocator: its colour, and how wide its line is.
const STYLES: [(&str, RGBColor, u32); 12] = [
    ("glibc", RGBColor(150, 90, 40), 1),
    ("glibc_trim", RGBColor(210, 120, 20), 2),
    ("glibc_arena2", RGBColor(205, 170, 110), 1),
    ("trim_100ms", RGBColor(240, 180, 0), 1),
    ("mimalloc_collect", RGBColor(120, 60, 160), 1),
    ("snmalloc", RGBColor(190, 130, 220), 1),
    ("jemalloc_default", RGBColor(200, 30, 30), 2),
    ("jemalloc_bg_1000", RGBColor(240, 110, 110), 1),
    ("jemalloc_bg_5000", RGBColor(245, 160, 160), 1),
    ("low_memory", RGBColor(0, 110, 60), 3),
    ("balanced", RGBColor(0, 90, 200), 3),
    ("throughput", RGBColor(0, 170, 190), 3),
];

/// Draws it.
pub(crate) fn draw(path: &Path, courses: &[Course]) -> Result<(), BoxError> {
    let area = SVGBackend::new(path, SIZE).into_drawing_area();
    area.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&area)
        .caption("Resident memory after a burst", ("sans-serif", 20))
        .margin(12)
        .x_label_area_size(42)
        .y_label_area_size(60)
        .margin_right(LEGEND)
        .build_cartesian_2d(TIMES, MEMORY.log_scale())?;
    chart
        .configure_mesh()
        .x_desc("seconds after the end of the traffic")
        .y_desc("MiB (logarithmic)")
        .y_label_formatter(&|mib| format!("{mib:.0}"))
        .light_line_style(TRANSPARENT)
        .bold_line_style(RGBColor(225, 225, 225))
        .draw()?;
    for (at, course) in courses.iter().enumerate() {
        let known = STYLES.iter().find(|(name, ..)| *name == course.name);
        let (color, width) = known.map_or((BLACK, 1), |(_, color, width)| (*color, *width));
        let style = color.stroke_width(width);
        let shown = course.points.iter().filter(|(at, _)| TIMES.contains(at)).copied();
        chart.draw_series(LineSeries::new(shown, style))?;
        // The legend beside the chart, by hand: plotters keeps its own within it.
        let left = i32::try_from(SIZE.0 - LEGEND)? + 12;
        let top = 60 + 22 * i32::try_from(at)?;
        area.draw(&PathElement::new(vec![(left, top), (left + 24, top)], style))?;
        let last = course.points.last().map_or(0.0, |(_, mib)| *mib);
        let text = format!("{}: {last:.0}", course.name);
        area.draw(&Text::new(text, (left + 30, top - 6), ("sans-serif", 13)))?;
    }
    area.present()?;
    Ok(())
}
