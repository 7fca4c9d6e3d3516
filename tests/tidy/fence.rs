//! The unsafe fence: which files may write `unsafe`, and how they open.
//!
//! It looks at code only, whatever the form: block, function, impl, trait, extern, attribute,
//! macro. That each use is proved is clippy's to check (`undocumented_unsafe_blocks`).
//!
//! Invariant: files of `src` with `unsafe` <= FENCE, and each of them opens with its reason.

use crate::tokens::{Token, after_group, reads};
use crate::{Faults, Source};

/// The only files of `src` in which `unsafe` may be written.
const FENCE: &[&str] = &[
    "src/fork.rs",
    "src/host/allocator.rs",
    "src/host/mallctl.rs",
    "src/host/libc_heap.rs",
    "src/host/api2.rs",
    "src/host/arenas.rs",
    "src/device/driver/host.rs",
    "src/device/driver/cuda/probe.rs",
    "src/device/driver/cuda/library.rs",
    "src/device/driver/cuda/table.rs",
    "src/device/driver/cuda/calls.rs",
    "src/device/driver/cuda/mapping.rs",
    "src/device/driver/cuda/pooling.rs",
    "src/device/buffer.rs",
    "src/device/front.rs",
    "src/device/interop/adopted.rs",
    "src/device/lane.rs",
    "src/device/view.rs",
    "src/device/pinned.rs",
];

/// Exports a symbol from the program by a macro: its attribute is unsafe, and nothing else there.
const ATTRIBUTE_ONLY: &str = "src/host/profile.rs";

/// The fake driver: a crate of its own, with a fence of its own.
const FAKE: &str = "tests/fake-cuda";

/// The only files of the fake driver in which `unsafe` may be written.
const FAKE_FENCE: &[&str] = &[
    "tests/fake-cuda/src/ffi.rs",
    "tests/fake-cuda/src/host.rs",
    "tests/fake-cuda/src/library.rs",
];

/// Files of the fake driver that export functions by the macro of `ffi`, or by one of their own:
/// the attribute is unsafe, and nothing else there.
const FAKE_EXPORTS: &[&str] = &[
    "tests/fake-cuda/src/control.rs",
    "tests/fake-cuda/src/copy.rs",
    "tests/fake-cuda/src/devices.rs",
    "tests/fake-cuda/src/event.rs",
    "tests/fake-cuda/src/graph.rs",
    "tests/fake-cuda/src/memory.rs",
    "tests/fake-cuda/src/missing.rs",
    "tests/fake-cuda/src/module.rs",
    "tests/fake-cuda/src/names.rs",
    "tests/fake-cuda/src/pool.rs",
    "tests/fake-cuda/src/stream.rs",
    "tests/fake-cuda/src/virtual_memory.rs",
];

/// The lint's levels that let unsafe code pass.
const OPENING: &[&str] = &["allow", "expect", "warn"];

pub(crate) fn check(source: &Source, faults: &mut Faults) {
    let code = source.code();
    let name = source.name.as_str();
    let beside = !source.is_under("src") && !source.is_under(FAKE);
    let fenced = beside || FENCE.contains(&name) || FAKE_FENCE.contains(&name);
    let exports = name == ATTRIBUTE_ONLY || FAKE_EXPORTS.contains(&name);
    let head = head(&code);
    let opens = opening_has_reason(&code[..head]);
    for (at, token) in code.iter().enumerate() {
        if token.is("unsafe") {
            let attribute = at > 0 && code[at - 1].is("[") && reads(&code, at + 1, &["("]);
            if exports && attribute {
                continue;
            }
            if !fenced {
                faults.add(source, token.line, "`unsafe` outside the fence");
            } else if !opens {
                let what = "`unsafe` in a file that does not open with \
                            #![expect(unsafe_code, reason = ...)]";
                faults.add(source, token.line, what);
            }
        } else if token.is("unsafe_code") && is_opened(&code[..at]) {
            if !fenced && !exports {
                faults.add(source, token.line, "unsafe_code is opened outside the fence");
            } else if fenced && at >= head {
                faults.add(source, token.line, "unsafe_code is opened elsewhere than at the head");
            }
        }
    }
}

/// Whether the attribute that these tokens lead into lets the lint pass.
fn is_opened(before: &[Token<'_>]) -> bool {
    let levels = ["allow", "expect", "warn", "deny", "forbid"];
    let level = before.iter().rev().find(|token| levels.iter().any(|level| token.is(level)));
    level.is_some_and(|token| OPENING.iter().any(|opening| token.is(opening)))
}

/// The number of tokens in the inner attributes with which a file opens.
fn head(code: &[Token<'_>]) -> usize {
    let mut at = 0;
    while reads(code, at, &["#", "!", "["]) {
        at = after_group(code, at + 2);
    }
    at
}

/// Whether `#![expect(unsafe_code, reason = "...")]` is among these attributes.
fn opening_has_reason(head: &[Token<'_>]) -> bool {
    let mut starts = (0..head.len()).filter(|at| reads(head, *at, &["#", "!", "["]));
    starts.any(|at| {
        let attribute = &head[at..after_group(head, at + 2)];
        let reason =
            |token: &Token<'_>| token.content().is_some_and(|text| !text.trim().is_empty());
        reads(attribute, 3, &["expect", "("])
            && attribute.iter().any(|token| token.is("unsafe_code"))
            && attribute.windows(3).any(|w| w[0].is("reason") && w[1].is("=") && reason(&w[2]))
    })
}
