//! Places that lock the state of an arena, and files that add methods to it.

use std::collections::BTreeMap;

use super::super::product::product;
use super::super::{Figure, count, figure};
use super::FOLDER;
use crate::text::tidy::tokens::{Token, after_group, reads};
use crate::tree::{self, Tree};

/// The type behind the lock.
const TYPE: &str = "ArenaState";
/// The field with the mutex.
const FIELD: &str = "guarded";
/// The methods that lock it.
const METHODS: &[&str] = &["lock_state", "try_lock_state"];

/// Counts both.
pub(super) fn measure() -> Result<Vec<Figure>, String> {
    let tree = Tree::read(&tree::root())?;
    let (mut sites, mut files) = (BTreeMap::new(), Vec::new());
    for file in product(&tree, FOLDER)? {
        let code = file.code();
        let name = file.name.trim_start_matches(FOLDER).trim_start_matches("src/").to_owned();
        if has_impl(&code) {
            files.push(name.clone());
        }
        sites.insert(name, lock_sites(&code));
    }
    sites.retain(|_, sites| *sites > 0);
    let listed: Vec<_> = sites.iter().map(|(name, sites)| format!("{name} {sites}")).collect();
    println!("  locked in {}", listed.join(", "));
    println!("  impl {TYPE} in {}", files.join(", "));
    if sites.is_empty() || files.is_empty() {
        return Err(format!("nothing locks {FIELD}, or {TYPE} has no impl: change the names"));
    }
    Ok(vec![
        figure("lock_sites", count(sites.values().sum()), "places", Some(15.0)),
        figure("lock_files", count(files.len()), "files", Some(3.0)),
    ])
}

/// Counts the calls that lock the state: `.method(...)`, `lock(&….field)`, `try_lock(&….field)`,
/// `.field.lock()` and its like, and `.field.get_mut()`.
fn lock_sites(code: &[Token<'_>]) -> usize {
    let is_call = |at: usize, methods: &[&str]| {
        methods.iter().any(|method| reads(code, at, &[".", method, "("]))
    };
    let by_function = |at: usize| {
        let is_free = at == 0 || !code[at - 1].is(".") && !code[at - 1].is("fn");
        let is_call = ["lock", "try_lock"].iter().any(|name| reads(code, at, &[name, "("]));
        let end = if is_free && is_call { after_group(code, at + 1) } else { 0 };
        end >= 3 && reads(code, end - 3, &[".", FIELD, ")"])
    };
    let by_mutex = |at: usize| {
        let of_field = at >= 2 && reads(code, at - 2, &[".", FIELD]);
        of_field && is_call(at, &["lock", "try_lock", "get_mut"])
    };
    let is_site = |at: &usize| by_function(*at) || by_mutex(*at) || is_call(*at, METHODS);
    (0..code.len()).filter(is_site).count()
}

/// Returns `true` if there is an `impl` of the type.
fn has_impl(code: &[Token<'_>]) -> bool {
    (0..code.len()).any(|at| reads(code, at, &["impl", TYPE]) || reads(code, at, &["for", TYPE]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::tidy::tokens::{code, tokens};

    #[test]
    fn each_way_to_lock_the_state_is_counted() {
        for (text, expected) in [
            ("self.books().live(); shared\n    .books()\n    .idle();", 2),
            ("let books = lock(&self.shared.books); try_lock(&self.books);", 2),
            ("self.books.get_mut(); self.books.lock();", 2),
            ("fn books(&self) {} books.lock; lock(&self.rules); other.lock(&self.books)", 0),
            ("// lock(&self.books)\n \".books()\"; self.books", 0),
        ] {
            assert_eq!(lock_sites(&code(&tokens(text))), expected, "{text}");
        }
    }

    #[test]
    fn an_impl_of_the_state_is_found() {
        for (text, expected) in [
            ("impl Books {}", true),
            ("impl fmt::Debug for Books {}", true),
            ("impl From<Books> for Other {} struct Books;", false),
            ("fn f(of: impl FnOnce(&mut Books)) {}", false),
        ] {
            assert_eq!(has_impl(&code(&tokens(text))), expected, "{text}");
        }
    }
}
