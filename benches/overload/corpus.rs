//! Text to send: this project's own documents and sources, cut into shared pieces.
//!
//! Pieces are views of one copy, so that a request under way weighs next to nothing on the sending
//! side. Invariant: a cut begins and ends at white space, so that it is whole words and letters.

use std::path::Path;

use bytes::Bytes;

use crate::model::Chance;

/// Bytes that are sent in one piece at most.
const PIECE: usize = 64 << 10;

/// The text.
#[derive(Clone, Debug)]
pub(crate) struct Corpus(Bytes);

impl Corpus {
    /// Reads the text files of this project.
    pub(crate) fn of_this_project() -> Result<Self, String> {
        let home = Path::new(env!("CARGO_MANIFEST_DIR"));
        let mut text = String::new();
        for part in ["docs", "src", "examples"] {
            let folder = home.join(part);
            gather(&folder, &mut text).map_err(|error| format!("{}: {error}", folder.display()))?;
        }
        if text.len() < 2 * PIECE {
            return Err(format!("{} hold too little text", home.display()));
        }
        Ok(Self(text.into()))
    }

    /// About `size` bytes from seeded places.
    pub(crate) fn cut(&self, size: usize, chance: &mut Chance) -> Vec<Bytes> {
        let mut pieces = Vec::with_capacity(size.div_ceil(PIECE));
        let mut left = size;
        while left > 0 {
            let span = left.min(PIECE);
            let places = (self.0.len() - span) as u64;
            let from = self.space_after(usize::try_from(chance.bits() % places).unwrap_or(0));
            let to = self.space_after((from + span).min(self.0.len()));
            pieces.push(self.0.slice(from..to));
            left -= span;
        }
        pieces
    }

    fn space_after(&self, at: usize) -> usize {
        let space = self.0[at..].iter().position(u8::is_ascii_whitespace);
        space.map_or(self.0.len(), |more| at + more)
    }
}

/// Adds the text files of a folder and of those in it, in order of their names.
fn gather(folder: &Path, text: &mut String) -> std::io::Result<()> {
    let mut paths: Vec<_> = std::fs::read_dir(folder)?.flatten().map(|one| one.path()).collect();
    paths.sort();
    for path in paths {
        if path.is_dir() {
            gather(&path, text)?;
        } else if path.extension().is_some_and(|end| end == "md" || end == "rs") {
            text.push_str(&std::fs::read_to_string(path)?);
            text.push('\n');
        }
    }
    Ok(())
}
