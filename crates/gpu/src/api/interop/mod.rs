//! Memory that crosses the border of an arena: exported to code that keeps addresses, or imported
//! from it.
//!
//! The use of an address by such code is unknown: it may use streams that the arena does not know.
//! So only completion of the whole context, seen by the host, proves its end. Files: `exported` (a
//! buffer whose address is exported), `imported` (memory that foreign code allocated). The
//! accounting of both is in the state. It has no code for particular libraries.
//!
//! Invariants: exported memory stays live, at its address, and awake; after an export or import
//! ends, the memory is reused, moved, unmapped or released only after the host saw the whole
//! context complete; a release function is called at most once, with no lock held, and never in a
//! drop that waits.

mod exported;
mod imported;

pub use exported::{ExportError, Exported};
pub use imported::Imported;
