//! The load: clients that send one request after another, some with large bodies, some with small.
//!
//! All clients of a size send the same bytes, so the load process itself needs little memory.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use lowtide::ByteSize;

use crate::requests::{self, Tally};
use crate::{BIG, BIG_CLIENTS, SMALL, SMALL_CLIENTS};

/// Results of one run, by the size of bodies.
#[derive(Clone, Debug, Default)]
pub(crate) struct Load {
    pub(crate) big: Tally,
    pub(crate) small: Tally,
}

/// Sends requests for this long, or until `over`, and waits for the last answers.
pub(crate) async fn send(to: SocketAddr, lasts: Duration, over: &Arc<AtomicBool>) -> Load {
    let end = Instant::now() + lasts;
    let start = |clients, size| {
        let (body, over) = (records(size), Arc::clone(over));
        let goes_on = move || Instant::now() < end && !over.load(Ordering::Relaxed);
        requests::send(clients, 0, goes_on, move |_, _| {
            let (length, body) = (body.len(), Full::new(body.clone()).boxed());
            requests::request(to, "/", "application/json", length, body)
        })
    };
    let (big, small) = tokio::join!(start(BIG_CLIENTS, BIG), start(SMALL_CLIENTS, SMALL));
    Load { big, small }
}

/// A JSON array of records, about as long as this.
fn records(size: ByteSize) -> Bytes {
    let size = size.as_usize().unwrap_or(0);
    let mut text = String::from("[");
    for id in 0_u32.. {
        let record = serde_json::json!({
            "id": id,
            "name": format!("customer {id}"),
            "score": f64::from(id) / 8.0,
            "tags": ["new", "north"],
            "notes": "ordered twice and returned once, pays by invoice within thirty days, prefers \
                      delivery in the morning and asks for a call one hour before, last visit in \
                      spring, no complaints",
        });
        text += &record.to_string();
        if text.len() >= size {
            break;
        }
        text.push(',');
    }
    (text + "]").into()
}
