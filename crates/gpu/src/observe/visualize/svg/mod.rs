//! A map as an SVG file: the address space in rows, blocks above, granules below.
//!
//! Text and arithmetic only. The file is self-contained, without scripts, fonts and links, and
//! follows the reader's dark or light mode.
//!
//! Invariant: at most `ROWS_MAX` rows of at most `3 x BARS_MAX` bars; every text from outside is
//! escaped and cut to `TEXT_MAX` characters.

mod rows;
mod segment;
mod strip;

use super::{ArenaMap, BlockState, GranuleState};
use lowtide_core::bytes::ByteSize;

/// Width of the picture in pixels.
const WIDTH: usize = 1100;
/// The left edge of rows. Offsets are written to the left of it.
const LEFT: usize = 104;
/// Width of a row.
const ROW_WIDTH: usize = 960;
/// The longest text from outside, in characters.
const TEXT_MAX: usize = 48;

/// Colours, first light, then dark. They are classes, because not every viewer knows variables.
const STYLE: &str = "\
text{font-family:system-ui,-apple-system,'Segoe UI',Roboto,sans-serif;font-size:12px;fill:#1d2433}\
.title{font-size:21px;font-weight:650}.name{font-size:15px;font-weight:650}\
.figure{font-size:17px;font-weight:600}.muted{fill:#667085}.right{text-anchor:end}\
.page{fill:#fff}.bare{fill:#f7f8fa;stroke:#e1e5eb}.live{fill:#2f6fdb}.pending{fill:#c77800}\
.hole{fill:#f7c9b4}.idle{fill:#bfe5cc}.active{fill:#7d889b}.resting{fill:#45a873}\
.line{stroke:#cfd5de;stroke-dasharray:2 4}\
@media(prefers-color-scheme:dark){text{fill:#e7eaf0}.muted{fill:#98a2b3}.page{fill:#12151c}\
.bare{fill:#171b23;stroke:#2a303b}.live{fill:#5b95ff}.pending{fill:#f0b03c}.hole{fill:#a0553e}\
.idle{fill:#2b6a4c}.active{fill:#8792a5}.resting{fill:#4cb883}.line{stroke:#3a4250}}";

/// The meanings of the block colours.
const LEGEND: [(&str, &str, f64); 6] = [
    ("live", "live block", 96.0),
    ("pending", "freed, in use by the device", 196.0),
    ("hole", "free, between live blocks", 170.0),
    ("idle", "free, can be released", 168.0),
    ("active", "active granule", 124.0),
    ("resting", "idle granule", 110.0),
];

/// Sums over all segments.
#[derive(Clone, Copy, Debug, Default)]
struct Sums {
    requested: ByteSize,
    live: ByteSize,
    pending: ByteSize,
    holes: ByteSize,
    idle: ByteSize,
    committed: ByteSize,
    reserved: ByteSize,
}

impl Sums {
    fn of(map: &ArenaMap) -> Self {
        let mut sums = Self::default();
        for segment in &map.segments {
            let live_blocks = segment.blocks.iter().filter(|b| b.state == BlockState::Live);
            let add = |sum: &mut ByteSize, part: ByteSize| *sum = sum.saturating_add(part);
            add(&mut sums.requested, live_blocks.map(|block| block.requested).sum());
            add(&mut sums.live, segment.taken(BlockState::Live));
            add(&mut sums.pending, segment.taken(BlockState::Pending));
            add(&mut sums.idle, segment.backed(GranuleState::Idle));
            add(&mut sums.committed, segment.backed(GranuleState::Active));
            add(&mut sums.reserved, segment.size);
        }
        sums.holes = sums.committed.saturating_sub(sums.live).saturating_sub(sums.pending);
        sums.committed = sums.committed.saturating_add(sums.idle);
        sums
    }
}

/// A page that grows downwards.
#[derive(Debug)]
struct Page {
    body: String,
    /// The vertical position of the next element.
    y: usize,
}

impl Page {
    fn push(&mut self, text: &str) {
        self.body.push_str(text);
        self.body.push('\n');
    }

    /// Adds a line of text, which is escaped already or not from outside.
    fn text(&mut self, x: usize, y: usize, class: &str, text: &str) {
        self.push(&format!("<text x=\"{x}\" y=\"{y}\" class=\"{class}\">{text}</text>"));
    }

    fn rect(&mut self, class: &str, (x, y): (f64, usize), width: f64, height: usize) {
        let (x, width) = (short(x), short(width));
        let size = format!("width=\"{width}\" height=\"{height}\"");
        self.push(&format!("<rect class=\"{class}\" x=\"{x}\" y=\"{y}\" {size}/>"));
    }
}

/// Returns the whole file.
pub(super) fn draw(map: &ArenaMap) -> String {
    let mut page = Page { body: String::new(), y: 46 };
    let sums = Sums::of(map);
    head(&mut page, map, &sums);
    let (shown, left_out) = map.segments.split_at(map.segments.len().min(rows::SEGMENTS_MAX));
    let row = rows::row_bytes(shown);
    legend(&mut page, map, row);
    for segment in shown {
        segment::draw(&mut page, segment, row, map.granularity);
    }
    if !left_out.is_empty() {
        let text = format!("{} more segments are not shown", left_out.len());
        page.y += 28;
        page.text(LEFT, page.y, "muted", &text);
    }
    let height = page.y + 36;
    let name = escaped(&map.name);
    let Page { body, .. } = page;
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" \
         width=\"{WIDTH}\" height=\"{height}\" role=\"img\">\n<title>Arena {name}</title>\n\
         <style>{STYLE}</style>\n\
         <rect class=\"page\" width=\"{WIDTH}\" height=\"{height}\"/>\n{body}</svg>\n"
    )
}

/// Draws the name, the sums, and a bar of committed memory.
fn head(page: &mut Page, map: &ArenaMap, sums: &Sums) {
    const COLUMN: usize = 137;
    page.text(36, page.y, "title", &escaped(&map.name));
    page.y += 34;
    let figures = [
        ("live", sums.live),
        ("requested", sums.requested),
        ("pending", sums.pending),
        ("holes", sums.holes),
        ("idle", sums.idle),
        ("committed", sums.committed),
    ];
    // Unknown requested sizes are not shown.
    let known = |name: &str| name != "requested" || sums.requested != sums.live;
    let figures: Vec<_> = figures.into_iter().filter(|(name, _)| known(name)).collect();
    for (nth, &(name, size)) in figures.iter().enumerate() {
        page.text(36 + nth * COLUMN, page.y, "muted", name);
        page.text(36 + nth * COLUMN, page.y + 21, "figure", &mib(size));
    }
    let x = 36 + figures.len() * COLUMN;
    page.text(x, page.y, "muted", "addresses reserved");
    page.text(x, page.y + 21, "figure", &sums.reserved.to_string());
    page.y += 38;
    let width = f64_of(WIDTH - 72);
    page.rect("bare", (36.0, page.y), width, 12);
    let mut x = 36.0;
    let parts = [sums.live, sums.pending, sums.holes, sums.idle];
    for (class, part) in ["live", "pending", "hole", "idle"].into_iter().zip(parts) {
        let part = width * part.as_f64() / sums.committed.as_f64().max(1.0);
        if part > 0.0 {
            page.rect(class, (x, page.y), part, 12);
        }
        x += part;
    }
    page.y += 36;
}

fn legend(page: &mut Page, map: &ArenaMap, row: u64) {
    let mut x = 36.0;
    for (class, meaning, width) in LEGEND {
        page.rect(class, (x, page.y - 10), 12.0, 12);
        let text_x = x + 18.0;
        page.push(&format!("<text x=\"{text_x}\" y=\"{}\">{meaning}</text>", page.y));
        x += width + 12.0;
    }
    let (row, granule) = (ByteSize::new(row), map.granularity);
    let scale = format!(
        "A row shows {row} of addresses: blocks above, granules of {granule} beneath. Rows without \
         committed memory are left out."
    );
    page.y += 24;
    page.text(36, page.y, "muted", &scale);
}

/// Returns a size for comparing: always in MiB, with thousands separators.
fn mib(size: ByteSize) -> String {
    let tenths = format!("{:.1}", size.as_f64() / ByteSize::mib(1).as_f64());
    let (whole, tenth) = tenths.split_once('.').unwrap_or((&tenths, "0"));
    format!("{}.{tenth} MiB", grouped(whole))
}

/// Returns digits in groups of three.
fn grouped(digits: &str) -> String {
    let mut text = String::new();
    for (nth, digit) in digits.chars().enumerate() {
        if nth > 0 && (digits.len() - nth).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Returns a text from outside, made safe for an element: cut, escaped, without characters that XML
/// forbids.
fn escaped(text: &str) -> String {
    let mut escaped = String::new();
    for (nth, character) in text.chars().enumerate() {
        if nth == TEXT_MAX {
            escaped.push('…');
            break;
        }
        match character {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\'' => escaped.push_str("&#39;"),
            '\u{fffe}' | '\u{ffff}' => escaped.push('\u{fffd}'),
            _ if character.is_control() => escaped.push('\u{fffd}'),
            _ => escaped.push(character),
        }
    }
    escaped
}

/// Returns a coordinate with at most two decimals.
fn short(number: f64) -> String {
    let text = format!("{number:.2}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

#[expect(clippy::cast_precision_loss, reason = "a number of pixels")]
const fn f64_of(pixels: usize) -> f64 {
    pixels as f64
}
