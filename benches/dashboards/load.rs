//! The load: what a day brings, in a minute and a quarter.
//!
//! Embeddings that load the model, texts that make the heap rise and fall, pauses in which the
//! arena falls asleep and the model is unloaded, a burst that is too large, and a request that can
//! never fit. It asserts nothing: what came of it shows in the metrics.
//!
//! Invariant: a phase ends by time, whatever the proxies answer.

use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;
use common::http::{Http, client};
use lowtide::BoxError;
use tokio::time::{Instant, sleep, sleep_until, timeout_at};

use crate::process::post;

/// A part of the load, for each proxy: its name and seconds, the clients that send texts without a
/// pause, the KiB of their texts, and the clients that ask for embeddings.
pub(crate) type Phase = (&'static str, u64, usize, usize, usize);

/// The phase in which a text comes that no budget is large enough for.
const BURST: &str = "a burst that is too large";

/// In their order; the first three are for one proxy. Models are loaded without texts, beside which
/// they may not find the room.
pub(crate) const PHASES: [Phase; 11] = [
    ("nothing", 3, 0, 0, 0),
    ("the model is loaded", 3, 0, 0, 2),
    ("a load that fits", 12, 3, 256, 2),
    ("the arena falls asleep", 7, 0, 0, 0),
    ("it wakes", 3, 0, 0, 2),
    ("more than before", 6, 3, 512, 2),
    (BURST, 14, 20, 512, 2),
    ("the model is unloaded", 15, 0, 0, 0),
    ("it is loaded again", 3, 0, 0, 2),
    ("a load that fits again", 8, 3, 256, 4),
    ("the end", 5, 0, 0, 0),
];

/// Runs phases against proxies.
pub(crate) async fn run(targets: &[SocketAddr], phases: &[Phase]) -> Result<(), BoxError> {
    let client = client();
    for (name, seconds, readers, kib, embedders) in phases {
        println!("{seconds} s: {name}");
        let end = Instant::now() + Duration::from_secs(*seconds);
        let text = Bytes::from(text(kib << 10));
        let mut clients = tokio::task::JoinSet::new();
        for target in targets {
            let words = format!("http://{target}/words");
            for _ in 0..*readers {
                clients.spawn(ask(client.clone(), words.clone(), "text/plain", text.clone(), end));
            }
            for nth in 0..*embedders {
                let url = format!("http://{target}/embed");
                // Of another length for each, so that blocks are.
                let long = self::text(2000 * (nth + 1));
                let body = Bytes::from(format!(r#"{{"texts": ["the tide goes out", "{long}"]}}"#));
                clients.spawn(ask(client.clone(), url, "application/json", body, end));
            }
            if *name == BURST {
                let giant = Bytes::from(vec![b'a'; 64 << 20]);
                let client = client.clone();
                clients.spawn(async move {
                    let _ = timeout_at(end, post(&client, &words, "text/plain", giant)).await;
                });
            }
        }
        while let Some(ended) = clients.join_next().await {
            ended?;
        }
        sleep_until(end).await;
    }
    Ok(())
}

/// Asks again and again; who is turned away waits a little, as a client should.
pub(crate) async fn ask(client: Http, url: String, kind: &'static str, body: Bytes, end: Instant) {
    while Instant::now() < end {
        match timeout_at(end, post(&client, &url, kind, body.clone())).await {
            Ok(200) => {}
            Ok(_) => sleep(Duration::from_millis(300)).await,
            Err(_) => return,
        }
        sleep(Duration::from_millis(20)).await;
    }
}

/// A text of this length that needs what is booked for it: a word for each four bytes, and as many
/// different ones as the upstream takes.
pub(crate) fn text(bytes: usize) -> String {
    const LETTERS: &[u8; 36] = b"abcdefghijklmnopqrstuvwxyz0123456789";
    let different = (bytes / 24).clamp(1, LETTERS.len().pow(3));
    let mut text = String::with_capacity(bytes + 4);
    for nth in 0..bytes / 4 {
        let word = nth % different;
        for place in [word / (36 * 36), word / 36, word] {
            text.push(LETTERS[place % 36].into());
        }
        text.push(' ');
    }
    text
}
