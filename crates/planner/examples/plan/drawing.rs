//! A drawing of a plan: time across, addresses up, segments stacked.
//!
//! Each buffer is drawn at its offset for its lifetime, without gaps. It decides nothing.
//!
//! Invariant: rectangles overlap only where the plan does.

use std::fmt::{Result, Write as _};
use std::ops::Range;

use lowtide_planner::ByteSize;
use lowtide_planner::{Demand, Plan, Problem};

/// The whole picture, and within it what the plan is drawn in.
const WIDTH: f64 = 1_200.0;
const HEIGHT: f64 = 760.0;
const LEFT: f64 = 100.0;
const RIGHT: f64 = 1_080.0;
const TOP: f64 = 70.0;
const BOTTOM: f64 = 690.0;

/// Marks of an axis.
const MARKS: u32 = 8;

/// From steps and bytes to places in the picture.
struct Scale {
    first: i64,
    steps: u64,
    bytes: ByteSize,
    /// The start of each segment, and the end of the last one.
    starts: Vec<u64>,
}

impl Scale {
    fn of(problem: &Problem, plan: &Plan) -> Self {
        let demands = problem.demands();
        let first = demands.iter().map(|demand| demand.live.start).min().unwrap_or(0);
        let end = demands.iter().map(|demand| demand.live.end).max().unwrap_or(0);
        let mut starts = vec![0];
        for size in plan.segments() {
            starts.push(starts.last().copied().unwrap_or(0) + size.get());
        }
        let bytes = plan.peak().max(ByteSize::new(1));
        Self { first, steps: end.abs_diff(first).max(1), bytes, starts }
    }

    fn across(&self, step: i64) -> f64 {
        let part = ByteSize::new(step.abs_diff(self.first)).as_f64();
        LEFT + part / ByteSize::new(self.steps).as_f64() * (RIGHT - LEFT)
    }

    fn up(&self, bytes: u64) -> f64 {
        BOTTOM - ByteSize::new(bytes).as_f64() / self.bytes.as_f64() * (BOTTOM - TOP)
    }
}

/// The plan as SVG, with this as its title.
pub(crate) fn drawn(
    title: &str,
    problem: &Problem,
    plan: &Plan,
) -> std::result::Result<String, std::fmt::Error> {
    let scale = Scale::of(problem, plan);
    let mut svg = String::new();
    writeln!(svg, "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {HEIGHT}'")?;
    writeln!(svg, " font-family='sans-serif' font-size='13' fill='#333'>")?;
    writeln!(svg, "<rect width='{WIDTH}' height='{HEIGHT}' fill='#fff'/>")?;
    writeln!(svg, "<text x='{LEFT}' y='30' font-size='18'>{}</text>", escaped(title))?;
    let proved = if plan.is_optimal() { ", proved: none needs less" } else { "" };
    let (count, peak, bound) = (problem.demands().len(), plan.peak(), plan.bound());
    let text = format!("{count} buffers, peak {peak}, bound {bound}{proved}");
    writeln!(svg, "<text x='{LEFT}' y='52'>{text}</text>")?;
    axes(&mut svg, &scale)?;
    for (id, demand) in problem.ids().zip(problem.demands()) {
        let place = plan.place(id);
        for (span, low, high) in pieces(demand) {
            let base = scale.starts[place.segment as usize] + place.offset;
            let (left, right) = (scale.across(span.start), scale.across(span.end));
            let (top, bottom) = (scale.up(base + high), scale.up(base + low));
            // Neighbours in turn in other colours.
            let hue = id.index() * 137 % 360;
            let light = 62 + id.index() % 3 * 8;
            write!(svg, "<rect x='{left:.2}' y='{top:.2}' width='{:.2}' ", right - left)?;
            write!(svg, "height='{:.2}' fill='hsl({hue} 48% {light}%)' ", bottom - top)?;
            write!(svg, "stroke='#fff' stroke-width='.6'>")?;
            let name = escaped(&demand.name);
            writeln!(svg, "<title>{name}: {} at {}</title></rect>", demand.size, place.offset)?;
        }
    }
    lines(&mut svg, &scale, plan)?;
    svg.push_str("</svg>\n");
    Ok(svg)
}

/// Both axes with their marks.
fn axes(svg: &mut String, scale: &Scale) -> Result {
    writeln!(svg, "<path d='M{LEFT} {TOP}V{BOTTOM}H{RIGHT}' fill='none' stroke='#333'/>")?;
    for mark in 0..=u64::from(MARKS) {
        let bytes = scale.bytes.get() / u64::from(MARKS) * mark;
        let (y, text) = (scale.up(bytes), ByteSize::new(bytes));
        writeln!(svg, "<path d='M{} {y:.1}H{RIGHT}' stroke='#ddd'/>", LEFT - 5.0)?;
        let x = LEFT - 10.0;
        writeln!(svg, "<text x='{x}' y='{:.1}' text-anchor='end'>{text}</text>", y + 4.0)?;
        let steps = i64::try_from(scale.steps / u64::from(MARKS) * mark).unwrap_or(0);
        let step = scale.first.saturating_add(steps);
        let (x, y) = (scale.across(step), BOTTOM + 20.0);
        writeln!(svg, "<path d='M{x:.1} {BOTTOM}v5' stroke='#333'/>")?;
        writeln!(svg, "<text x='{x:.1}' y='{y}' text-anchor='middle'>{step}</text>")?;
    }
    let (middle, below) = (f64::midpoint(LEFT, RIGHT), BOTTOM + 45.0);
    writeln!(svg, "<text x='{middle}' y='{below}' text-anchor='middle'>step</text>")
}

/// The peak, the bound, and where segments meet.
fn lines(svg: &mut String, scale: &Scale, plan: &Plan) -> Result {
    let mut line = |bytes: u64, colour: &str, text: &str, drop: f64| {
        let y = scale.up(bytes);
        write!(svg, "<path d='M{LEFT} {y:.1}H{RIGHT}' stroke='{colour}' stroke-width='1.5' ")?;
        write!(svg, "stroke-dasharray='6 3'/><text x='{}' ", RIGHT + 6.0)?;
        writeln!(svg, "y='{:.1}' fill='{colour}'>{text}</text>", y + drop)
    };
    let inner = scale.starts.len().max(2) - 2;
    for start in scale.starts.iter().skip(1).take(inner) {
        line(*start, "#333", "", 4.0)?;
    }
    if plan.segments().len() > 1 {
        let text = format!("{} segments", plan.segments().len());
        return line(plan.peak().get(), "#b3261e", &text, 4.0);
    }
    line(plan.peak().get(), "#b3261e", "peak", 0.0)?;
    line(plan.bound().get(), "#1a56b0", "bound", 14.0)
}

/// When which bytes of a buffer are needed.
fn pieces(demand: &Demand) -> Vec<(Range<i64>, u64, u64)> {
    let (size, mut from, mut pieces) = (demand.size.get(), demand.live.start, Vec::new());
    for gap in &demand.gaps {
        pieces.push((from..gap.span.start, 0, size));
        pieces.extend(gap.window.map(|window| (gap.span.clone(), window.low, window.high)));
        from = gap.span.end;
    }
    pieces.push((from..demand.live.end, 0, size));
    pieces.retain(|(span, low, high)| !span.is_empty() && low < high);
    pieces
}

fn escaped(name: &str) -> String {
    name.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}
