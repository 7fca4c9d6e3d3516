//! Figures of what a user has to learn: public types, documented items, and names with two
//! meanings.

use std::fs;

use super::{Figure, count, figure};
use crate::packages::packages;
use crate::run::cargo;
use crate::tree;

/// Headings of rustdoc's page of all items that are lists of types.
const TYPES: [&str; 5] = ["structs", "enums", "unions", "traits", "types"];

/// Counts what rustdoc lists for the façade with its default features.
pub(super) fn measure_public() -> Result<Vec<Figure>, String> {
    let folder = tree::root().join("target/figures");
    let doc = cargo("doc --no-deps --lib -p lowtide");
    doc.arg("--target-dir").arg(&folder).run()?;
    let page = folder.join("doc/lowtide/all.html");
    let page = fs::read_to_string(&page).map_err(|e| format!("{}: {e}", page.display()))?;
    let items = items(&page);
    if items.is_empty() {
        return Err("rustdoc's page lists nothing".to_owned());
    }
    let types = items.iter().filter(|(kind, _)| TYPES.contains(&kind.as_str())).count();
    let outside = items.iter().filter(|(_, path)| !path.starts_with("device::")).count();
    Ok(vec![
        figure("public_types", count(types), "types", Some(120.0)),
        figure("documented_items", count(outside), "items", Some(150.0)),
    ])
}

/// The kind and path of each item on rustdoc's page.
fn items(page: &str) -> Vec<(String, String)> {
    let mut found = Vec::new();
    for section in page.split("<h3 id=\"").skip(1) {
        let (kind, rest) = section.split_once('"').unwrap_or_default();
        for item in rest.split("<li>").skip(1) {
            let path = item.split("</a>").next().and_then(|link| link.rsplit('>').next());
            found.extend(path.map(|path| (kind.to_owned(), path.to_owned())));
        }
    }
    found
}

/// Counts the lines that a user writes, of the programs in the documents: those of a service, and
/// the statements by which a model is added to it.
pub(super) fn measure_lines() -> Result<Vec<Figure>, String> {
    let read = |name: &str| {
        let text = fs::read_to_string(tree::root().join(name));
        text.map_err(|error| format!("{name}: {error}"))
    };
    let (axum, page) = (read("README.md")?, read("docs/GETTING_STARTED.md")?);
    let tonic = read("examples/tonic/health_in_tonic.rs")?;
    let model = page.split_once("## A model").map_or("", |(_, text)| text);
    let is_statement = |line: &&str| {
        let starts = ["use ", "fn ", "async fn ", "}"];
        !starts.iter().any(|start| line.trim_start().starts_with(start))
    };
    let (axum, tonic) = (lines(block(&axum)).count(), lines(&tonic).count());
    let model = lines(block(model)).filter(is_statement).count();
    if axum.min(tonic).min(model) == 0 {
        return Err("a program is not where it was".to_owned());
    }
    Ok(vec![
        figure("axum_lines", count(axum), "lines", Some(15.0)),
        figure("tonic_lines", count(tonic), "lines", Some(18.0)),
        figure("model_lines", count(model), "lines", Some(6.0)),
    ])
}

/// Returns the first block of Rust in a page.
fn block(page: &str) -> &str {
    let rest = page.split_once("```rust").map_or("", |(_, rest)| rest);
    let rest = rest.split_once('\n').map_or("", |(_, rest)| rest);
    rest.split("```").next().unwrap_or_default()
}

/// Returns the lines with code.
fn lines(program: &str) -> impl Iterator<Item = &str> {
    let is_code = |line: &&str| {
        let line = line.trim_start();
        !line.is_empty() && !line.starts_with("//") && !line.starts_with("#!")
    };
    program.lines().filter(is_code)
}

/// Counts the dependencies between packages that their libraries need, and those of a published
/// package on an unpublished one. Cargo lets none go round.
pub(super) fn measure_arrows() -> Result<Vec<Figure>, String> {
    let all = packages()?;
    let is_published = |name: &String| all.iter().any(|one| &one.name == name && one.is_published);
    let arrows = all.iter().filter(|one| one.is_published).flat_map(|one| &one.needs);
    let up = arrows.clone().filter(|name| !is_published(name)).count();
    Ok(vec![
        figure("arrows", count(arrows.count()), "arrows", Some(26.0)),
        figure("arrows_up", count(up), "arrows", Some(0.0)),
    ])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_a_program_are_those_with_code() {
        let page =
            "Text.\n```rust,no_run\n// A comment.\n\nlet one = 1;\n    two(one); // why\n```\nx\n";
        assert_eq!(
            lines(block(page)).collect::<Vec<_>>(),
            ["let one = 1;", "    two(one); // why"]
        );
        assert_eq!(block("no program"), "");
    }

    #[test]
    fn items_are_read_from_rustdocs_page() {
        let page = "<h3 id=\"structs\">Structs</h3><ul class=\"all-items\"><li><a href=\"a.html\">\
                    device::Arena</a></li><li><a href=\"b.html\">Memory</a></li></ul>\
                    <h3 id=\"functions\">Functions</h3><ul><li><a href=\"c.html\">f</a></li></ul>";
        let found = items(page);
        let found: Vec<_> = found.iter().map(|(kind, path)| (&**kind, &**path)).collect();
        let expected = [("structs", "device::Arena"), ("structs", "Memory"), ("functions", "f")];
        assert_eq!(found, expected);
    }
}
