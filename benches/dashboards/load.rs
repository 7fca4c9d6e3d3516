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
use lowtide::BoxError;
use tokio::time::{Instant, sleep, sleep_until, timeout_at};

use crate::common::http::{Http, client};
use crate::process::post;

/// A part of the load, for each proxy.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Phase {
    name: &'static str,
    seconds: u64,
    /// Clients that send texts without a pause, and how long their texts are.
    readers: usize,
    text_bytes: usize,
    /// Clients that ask for embeddings.
    embedders: usize,
    /// `true` if a text comes that no budget is large enough for.
    giant: bool,
}

impl Phase {
    /// Embeddings alone: the model is to be loaded, and beside texts it may not find the room.
    const fn embeddings(name: &'static str, seconds: u64) -> Self {
        Self { embedders: 2, ..Self::pause(name, seconds) }
    }

    const fn pause(name: &'static str, seconds: u64) -> Self {
        Self { name, seconds, readers: 0, text_bytes: 0, embedders: 0, giant: false }
    }
}

/// In their order; the first three are for one proxy.
pub(crate) const PHASES: [Phase; 11] = [
    Phase::pause("nothing", 3),
    Phase::embeddings("the model is loaded", 3),
    Phase {
        name: "a load that fits",
        seconds: 12,
        readers: 3,
        text_bytes: 256 << 10,
        embedders: 2,
        giant: false,
    },
    Phase::pause("the arena falls asleep", 7),
    Phase::embeddings("it wakes", 3),
    Phase {
        name: "more than before",
        seconds: 6,
        readers: 3,
        text_bytes: 512 << 10,
        embedders: 2,
        giant: false,
    },
    Phase {
        name: "a burst that is too large",
        seconds: 14,
        readers: 20,
        text_bytes: 512 << 10,
        embedders: 2,
        giant: true,
    },
    Phase::pause("the model is unloaded", 15),
    Phase::embeddings("it is loaded again", 3),
    Phase {
        name: "a load that fits again",
        seconds: 8,
        readers: 3,
        text_bytes: 256 << 10,
        embedders: 4,
        giant: false,
    },
    Phase::pause("the end", 5),
];

/// Runs phases against proxies.
pub(crate) async fn run(targets: &[SocketAddr], phases: &[Phase]) -> Result<(), BoxError> {
    let client = client();
    for phase in phases {
        println!("{} s: {}", phase.seconds, phase.name);
        let end = Instant::now() + Duration::from_secs(phase.seconds);
        let text = Bytes::from(text(phase.text_bytes));
        let mut clients = tokio::task::JoinSet::new();
        for target in targets {
            let words = format!("http://{target}/words");
            for _ in 0..phase.readers {
                clients.spawn(ask(client.clone(), words.clone(), "text/plain", text.clone(), end));
            }
            for nth in 0..phase.embedders {
                let url = format!("http://{target}/embed");
                // Of another length for each, so that blocks are.
                let long = self::text(2000 * (nth + 1));
                let body = Bytes::from(format!(r#"{{"texts": ["the tide goes out", "{long}"]}}"#));
                clients.spawn(ask(client.clone(), url, "application/json", body, end));
            }
            if phase.giant {
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
