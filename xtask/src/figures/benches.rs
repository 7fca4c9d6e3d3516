//! Figures that benches print.
//!
//! It runs each bench that has a wanted figure once, and fails if a figure was not printed or the
//! bench missed a goal. It runs the others first.

use crate::run::cargo;

/// A bench, and the figures that it prints under names of its own.
pub(super) struct Bench {
    pub(super) arguments: &'static str,
    /// The figures of the subject that it measures, and their names there; the same if `None`.
    pub(super) figures: &'static [(&'static str, Option<&'static str>)],
}

/// Measures these figures of the benches, or all, and prints them.
pub(super) fn measure(benches: &[Bench], only: &[String]) -> Result<(), String> {
    let names = || benches.iter().flat_map(|bench| bench.figures).map(|(name, _)| *name);
    if let Some(unknown) = only.iter().find(|one| names().all(|name| name != one.as_str())) {
        let names: Vec<_> = names().collect();
        return Err(format!("unknown figure {unknown:?}: expected one of {}", names.join(", ")));
    }
    let mut failed = Vec::new();
    for Bench { arguments, figures } in benches {
        let is_chosen = |name: &str| only.is_empty() || only.iter().any(|one| one == name);
        if !figures.iter().any(|(name, _)| is_chosen(name)) {
            continue;
        }
        let (text, is_held) = cargo(arguments).shown()?;
        if !is_held {
            failed.push(format!("{arguments} missed a goal"));
        }
        for (name, theirs) in *figures {
            let begin = format!("figure {} ", theirs.unwrap_or(name));
            match text.lines().find_map(|line| line.strip_prefix(&*begin)) {
                Some(value) if theirs.is_some() => println!("figure {name} {value}"),
                Some(_) => {}
                None => failed.push(format!("{name} was not printed")),
            }
        }
    }
    if failed.is_empty() { Ok(()) } else { Err(failed.join("; ")) }
}
