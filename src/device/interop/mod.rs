//! Memory that crosses the border of an arena: lent to code that keeps addresses, or adopted from
//! it.
//!
//! What such code does with an address is on nobody's record: it may use streams that the arena
//! does not know. So its end is proved by completion of the whole context, as the host has seen,
//! and by nothing less. Files: `exported` (a buffer whose address is out), `imported` (memory that
//! somebody else allocated), `outstanding` (the books of both, pure). It knows no library by name.
//!
//! Invariants: what is lent stays live, where it is, and awake; what was lent or adopted is reused,
//! moved, unmapped or released only after the host saw the whole context complete since it came
//! back; a release function is called at most once, with no lock held, and never in a drop that
//! waits.

mod exported;
mod imported;
pub(super) mod outstanding;

pub use exported::{ExportError, Exported};
pub use imported::{ImportError, Imported};
