//! A request reserves the memory that it takes: the live heap is watched through the worst bodies.
//!
//! Other tests would be seen as well, so it runs in a process of its own: this binary again. The
//! watch looks as often as it can and may miss a short peak; no more is claimed than what it saw.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use lowtide::ByteSize;
use lowtide_heap::HeapProbe;

use super::support::{Managed, alone, ask, embed, post};
use crate::app::{FORWARD_COST, Options};
use crate::embed::{BODY_MAX, TEXT_MAX, TEXTS_MAX, host_cost};
use crate::upstream::words_cost;

/// A body, and what becomes of it.
struct Case {
    name: &'static str,
    path: &'static str,
    body: Vec<u8>,
    status: u16,
}

/// Different words of so many letters, as many as make a MiB.
fn different_words(letters: usize) -> Vec<u8> {
    let mut text = Vec::new();
    for number in 0_usize.. {
        if text.len() >= 1 << 20 {
            break;
        }
        let mut rest = number;
        for _ in 0..letters {
            text.push(b"abcdefghijklmnopqrstuvwxyz0123456789"[rest % 36]);
            rest /= 36;
        }
        text.push(b' ');
    }
    text.truncate(1 << 20);
    text
}

/// A MiB with as many words, and as many different ones, as are taken apart.
fn worst_accepted() -> Vec<u8> {
    let different = different_words(4);
    let mut text = different[..5 * ((1 << 20) / 24)].to_vec();
    let mut words = (1 << 20) / 24;
    while words < (1 << 20) / 4 {
        text.extend_from_slice(b"a b ");
        words += 2;
    }
    text.resize(1 << 20, b' ');
    text
}

fn prose() -> Vec<u8> {
    let text = include_str!("../../../docs/DEPLOYING.md");
    text.bytes().cycle().take(1 << 20).collect()
}

fn texts(text: &str, count: usize) -> Vec<u8> {
    serde_json::json!({ "texts": vec![text; count] }).to_string().into_bytes()
}

fn cases() -> Vec<Case> {
    let words = |name, body, status| Case { name, path: "/words", body, status };
    let embed = |name, body, status| Case { name, path: "/embed", body, status };
    let longest = "a ".repeat(TEXT_MAX.as_usize().expect("it fits") / 2);
    let body_max = BODY_MAX.as_usize().expect("it fits");
    let filled = |start: &str, piece: &str, end: &str| {
        let count = (body_max - start.len() - end.len()) / piece.len();
        [start, &piece.repeat(count), end].concat().into_bytes()
    };
    vec![
        words("prose", prose(), 200),
        words("the most words of a text", worst_accepted(), 200),
        words("one letter a word", b"a b ".repeat(1 << 18), 422),
        words("different words of 4 letters", different_words(4), 422),
        words("different words of 6 letters", different_words(6), 422),
        embed("short texts", texts("a", TEXTS_MAX), 200),
        embed("one long word each", texts(&"x".repeat(1 << 16), TEXTS_MAX), 200),
        embed("the longest texts", texts(&longest, TEXTS_MAX), 200),
        embed("empty strings", filled("{\"texts\":[", "\"\",", "\"\"]}"), 422),
        embed("numbers", filled("{\"texts\":[", "1,", "1]}"), 422),
        embed("a long string", filled("{\"texts\":\"", "\\n", "\"}"), 422),
        embed("a long name", filled("{\"", "\u{7f}", "\":1}"), 422),
        embed("no list", texts(&"\u{7f}".repeat(1 << 16), 1), 422),
        embed("a string of escapes", filled("{\"texts\":[\"", "\\u0001", "\"]}"), 422),
        embed("lists in lists", filled("", "[", ""), 422),
    ]
}

/// Ends a watch when it is dropped, also in a panic: a runtime waits for its blocking tasks.
struct Ends(Arc<AtomicBool>);

impl Drop for Ends {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// The largest heap while this is done, above that at the start.
async fn peak_of<T>(work: impl Future<Output = T>) -> (ByteSize, T) {
    let probe = HeapProbe::new().expect("jemalloc");
    let start = probe.snapshot().expect("figures").live;
    let done = Arc::new(AtomicBool::new(false));
    let watch = {
        let done = done.clone();
        tokio::task::spawn_blocking(move || {
            let mut peak = start;
            while !done.load(Ordering::Relaxed) {
                peak = peak.max(probe.snapshot().expect("figures").live);
            }
            peak
        })
    };
    let ends = Ends(done);
    let output = work.await;
    drop(ends);
    (watch.await.expect("no panic").saturating_sub(start), output)
}

/// The bugs: a MiB of short words, or of different ones, took 40 MiB where 10 were booked, and
/// 4 MiB of empty strings 86 MiB where 12 were.
#[tokio::test(flavor = "multi_thread")]
async fn bodies_took_several_times_what_was_booked_for_them() {
    if !alone("proxy::reserved::bodies_took_several_times_what_was_booked_for_them") {
        return;
    }
    let proxy = Managed::with(Options::default(), |builder| builder).await;
    assert_eq!(embed(proxy.at, &["the model is there"]).await.status(), 200);
    assert_eq!(ask(proxy.at, post("/words", "text/plain", "a b")).await.status(), 200);
    for case in cases() {
        let request = post(case.path, "application/json", &case.body);
        let length = case.body.len() as u64;
        let reserved = match case.path {
            "/words" => FORWARD_COST.saturating_add(ByteSize::new(words_cost(length))),
            _ => host_cost(length),
        };
        let (peak, answer) = peak_of(ask(proxy.at, &request)).await;
        println!("{}: {}, took {peak} of {reserved} booked", case.name, answer.status());
        assert_eq!(answer.status(), case.status, "{}: {}", case.name, answer.text());
        assert!(peak <= reserved, "{}: took {peak}, booked {reserved}", case.name);
    }
    proxy.end().await;
}
