//! The chart: the memory of both runs over time, as an SVG file.
//!
//! Four panels with the same scales: heap above, device below; this crate on the left, jemalloc's
//! defaults on the right. The lower area is live memory, the area above it is retained. It measures
//! nothing.

use std::path::Path;

use lowtide::BoxError;
use plotters::prelude::*;

use crate::run::Sample;

/// Pixels of the whole.
const SIZE: (u32, u32) = (1000, 520);
const LIVE: RGBColor = RGBColor(0x1f, 0x77, 0xa4);
const RETAINED: RGBColor = RGBColor(0xf0, 0xa0, 0x30);
const INK: RGBColor = RGBColor(0x33, 0x33, 0x33);

/// The figures of a panel: live and retained bytes of a sample.
type Amounts = fn(&Sample) -> (u64, u64);

/// Draws both runs into the file.
pub(crate) fn draw(file: &Path, managed: &[Sample], twin: &[Sample]) -> Result<(), BoxError> {
    let heap: Amounts = |sample| (sample.water.heap_live, sample.water.heap_retained());
    let device: Amounts = |sample| (sample.water.device_live, sample.water.device_retained());
    let whole = SVGBackend::new(file, SIZE).into_drawing_area();
    whole.fill(&WHITE)?;
    let (head, fields) = whole.split_vertically(34);
    legend(&head)?;
    let seconds = both(managed, twin).map(|one| one.seconds).fold(1.0, f64::max);
    for ((row, amounts), place) in
        [("heap", heap), ("device", device)].into_iter().zip(fields.split_evenly((2, 1)))
    {
        let top = both(managed, twin).map(|one| mib(sum(amounts(one)))).fold(1.0, f64::max);
        let columns = [("lowtide", managed), ("jemalloc's defaults", twin)];
        for ((name, run), place) in columns.into_iter().zip(place.split_evenly((1, 2))) {
            let title = format!("{row}, {name}");
            field(&place, &title, (seconds, top * 1.05), run, amounts)?;
        }
    }
    Ok(whole.present()?)
}

type Area<'a> = DrawingArea<SVGBackend<'a>, plotters::coord::Shift>;

fn legend(area: &Area<'_>) -> Result<(), BoxError> {
    let entries = [(40, LIVE, "live"), (120, RETAINED, "retained: held but unused")];
    for (x, color, text) in entries {
        area.draw(&Rectangle::new([(x, 10), (x + 18, 24)], color.filled()))?;
        area.draw(&Text::new(text, (x + 24, 10), ("sans-serif", 15).into_font().color(&INK)))?;
    }
    Ok(())
}

fn field(
    area: &Area<'_>,
    title: &str,
    (seconds, top): (f64, f64),
    run: &[Sample],
    amounts: Amounts,
) -> Result<(), BoxError> {
    let mut chart = ChartBuilder::on(area)
        .caption(title, ("sans-serif", 16).into_font().color(&INK))
        .margin_right(14)
        .x_label_area_size(28)
        .y_label_area_size(58)
        .build_cartesian_2d(0.0..seconds, 0.0..top)?;
    chart
        .configure_mesh()
        .disable_x_mesh()
        .light_line_style(WHITE)
        .x_labels(8)
        .y_labels(5)
        .x_label_formatter(&|x| format!("{x:.0} s"))
        .y_label_formatter(&|y| format!("{y:.0} MiB"))
        .axis_style(INK)
        .draw()?;
    let line = |of: fn((u64, u64)) -> u64| {
        run.iter().map(move |one| (one.seconds, mib(of(amounts(one))))).collect::<Vec<_>>()
    };
    // The sum is drawn first and live over it: the visible rest is retained.
    chart.draw_series(AreaSeries::new(line(sum), 0.0, RETAINED.filled()))?;
    chart.draw_series(AreaSeries::new(line(|(live, _)| live), 0.0, LIVE.filled()))?;
    Ok(())
}

fn both<'a>(managed: &'a [Sample], twin: &'a [Sample]) -> impl Iterator<Item = &'a Sample> {
    managed.iter().chain(twin)
}

fn sum((live, retained): (u64, u64)) -> u64 {
    live.saturating_add(retained)
}

#[expect(clippy::cast_precision_loss, reason = "for a picture")]
fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}
