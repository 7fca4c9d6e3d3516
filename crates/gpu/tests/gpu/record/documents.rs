//! The page about the format, held against what is read and written.

use lowtide_gpu::record::Log;

use super::host;

fn page() -> String {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/RECORDING.md");
    std::fs::read_to_string(path).expect("the page is there")
}

/// The text of the code block after this heading.
fn block_after<'a>(page: &'a str, heading: &str) -> &'a str {
    let (_, after) = page.split_once(&format!("## {heading}\n")).expect(heading);
    let (_, block) = after.split_once("```text\n").expect("a block");
    block.split_once("```").expect("its end").0
}

#[test]
fn the_example_of_the_page_is_read_and_its_replay_gives_its_hash() {
    let page = page();
    let log = Log::parse(block_after(&page, "An example")).expect("the example is a recording");
    let closing = log.closing().expect("it has a last line");
    assert_eq!(closing.hash, log.hash(), "the example's hash is {}", log.hash());
    let replayed = log.replay(host(), log.header().config()).expect("open");
    assert_eq!((replayed.first_difference, replayed.matches()), (None, Some(true)));
}

#[test]
fn every_word_and_field_is_on_the_page() {
    let page = page();
    let grammar = block_after(&page, "Grammar");
    let words = "open alloc refuse free resize move use pin unpin lane lane_end end_run limit \
                 decay_time decay trim shrink compact reset close contents sleep wake end";
    for word in words.split_whitespace() {
        let stands = grammar.lines().any(|line| line.starts_with(&format!("TIME {word}")));
        assert!(stands || grammar.contains(&format!("0 {word}")), "{word} is not in the grammar");
    }
    for field in grammar.split(|c: char| !(c.is_ascii_lowercase() || c == '=' || c == '_')) {
        if field.ends_with('=') {
            assert!(page.contains(&format!("| `{field}`")), "{field} has no row");
        }
    }
}
