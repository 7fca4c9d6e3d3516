//! The live picture: bars of live and retained memory, redrawn in place on a terminal.
//!
//! If the output is not a terminal it prints a plain line every two seconds instead. It needs 80
//! columns; a narrower terminal truncates the lines. `NO_COLOR` is respected. It measures nothing.

use std::fmt::Write as _;
use std::io::{IsTerminal as _, Write as _};
use std::time::Duration;

use lowtide::ByteSize;

/// Characters in a full bar: with the amounts after it a line of 79 columns.
const BAR: usize = 32;
/// Between two plain lines.
const PLAIN_EVERY: Duration = Duration::from_secs(2);

/// The state shown at one instant.
#[derive(Clone, Debug)]
pub(crate) struct Scene<'a> {
    /// The run and the stage in it.
    pub(crate) title: &'a str,
    /// The progress of the whole run, from 0 to 1.
    pub(crate) progress: f64,
    /// Time since the start of the run.
    pub(crate) elapsed: Duration,
    /// Live and retained bytes of the heap.
    pub(crate) heap: (ByteSize, ByteSize),
    /// Live and retained bytes of the device.
    pub(crate) device: (ByteSize, ByteSize),
    /// The process's resident memory, from the kernel.
    pub(crate) rss: ByteSize,
    /// The text after the stage: counts, level.
    pub(crate) note: String,
}

/// The output of the scenes.
#[derive(Debug)]
pub(crate) struct Picture {
    terminal: bool,
    colour: bool,
    /// The number of lines of the last drawing, to be overwritten.
    lines: usize,
    /// The amount that fills a bar; it only grows.
    full: ByteSize,
    last_plain: Option<Duration>,
}

impl Picture {
    /// A picture on the standard output; drawn if that is a terminal, in plain lines otherwise.
    pub(crate) fn new() -> Self {
        let named = |name: &str| std::env::var_os(name).unwrap_or_default();
        let terminal = std::io::stdout().is_terminal() && named("TERM") != "dumb";
        let colour = named("NO_COLOR").is_empty();
        Self { terminal, colour, lines: 0, full: ByteSize::mib(64), last_plain: None }
    }

    /// Shows one scene.
    pub(crate) fn show(&mut self, scene: &Scene<'_>) {
        for (live, retained) in [scene.heap, scene.device] {
            self.full = self.full.max(live.saturating_add(retained));
        }
        let text = if self.terminal { self.drawn(scene) } else { self.plain(scene) };
        let mut out = std::io::stdout().lock();
        // A closed pipe ends the showing, not the run.
        let _ = out.write_all(text.as_bytes());
        let _ = out.flush();
    }

    fn plain(&mut self, scene: &Scene<'_>) -> String {
        let due = self.last_plain.is_none_or(|last| scene.elapsed >= last + PLAIN_EVERY);
        if !due {
            return String::new();
        }
        self.last_plain = Some(scene.elapsed);
        format!(
            "{:5.1} s  {:<34} heap live {:>10} retained {:>10}  \
             device live {:>10} retained {:>10}  rss {:>10}  {}\n",
            scene.elapsed.as_secs_f64(),
            scene.title,
            scene.heap.0.to_string(),
            scene.heap.1.to_string(),
            scene.device.0.to_string(),
            scene.device.1.to_string(),
            scene.rss.to_string(),
            scene.note,
        )
    }

    fn drawn(&mut self, scene: &Scene<'_>) -> String {
        // Lines are not wrapped while it draws: it counts them to get back to the first.
        let mut text = "\x1b[?7l".to_owned();
        if self.lines > 0 {
            let _ = write!(text, "\x1b[{}A", self.lines);
        }
        let done = cells(scene.progress, BAR);
        let mut line = |content: &str| {
            let _ = writeln!(text, "\r\x1b[2K{content}");
        };
        let [bold, live, kept, plain] = self.colours();
        line(&format!("{bold}{}{plain}  {:.0} s", scene.title, scene.elapsed.as_secs_f64()));
        line(&format!("  run    {}{}", "━".repeat(done), "╌".repeat(BAR - done)));
        for (name, (live, retained)) in [("heap  ", scene.heap), ("device", scene.device)] {
            let bar = self.bar(live, retained);
            line(&format!("  {name} {bar}  live {live:>10}  retained {retained:>10}"));
        }
        line(&format!("  rss {}   {}", scene.rss, scene.note));
        line(&format!("         {live}█{plain} live  {kept}▒{plain} retained (held but unused)"));
        text.push_str("\x1b[?7h");
        self.lines = 6;
        text
    }

    /// Returns the escape codes for the bold title, for live and retained, and for plain text.
    fn colours(&self) -> [&'static str; 4] {
        if self.colour { ["\x1b[1m", "\x1b[36m", "\x1b[33m", "\x1b[0m"] } else { [""; 4] }
    }

    fn bar(&self, live: ByteSize, retained: ByteSize) -> String {
        let part = |size: ByteSize| size.as_f64() / self.full.as_f64();
        let lives = cells(part(live), BAR);
        let both = cells(part(live.saturating_add(retained)), BAR).max(lives);
        let [_, live, kept, plain] = self.colours();
        format!(
            "{live}{}{kept}{}{plain}{}",
            "█".repeat(lives),
            "▒".repeat(both - lives),
            "·".repeat(BAR - both)
        )
    }
}

/// Returns the number of cells, of `all`, for this part.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    clippy::cast_sign_loss,
    reason = "held between 0 and a few dozen"
)]
fn cells(part: f64, all: usize) -> usize {
    ((part.clamp(0.0, 1.0) * all as f64).round() as usize).min(all)
}
