//! The time limits of an admitted request: the pace of its bodies, and how long it may hold its
//! permit.
//!
//! The control loop checks them, for requests that the layer has registered (`permit`). A request
//! whose limit has passed is cancelled if its handler has not answered. Otherwise its response is
//! cut: the body ends with an error when the connection polls it next. A connection whose client
//! takes nothing polls no body, and is closed (`connections`).
//!
//! Invariant: a response is cut only while a part of it is not sent.

use std::task::Waker;
use std::time::Duration;

use crate::clock::Moment;
use crate::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use crate::sync::{Mutex, lock};
use lowtide_admission::Rejected;

use super::connections::{ConnectionHandle, Overdue};
use super::pace::{MinDataRate, Pace};

/// The time limits of a request.
#[derive(Debug)]
pub(super) struct TimeLimits {
    /// `None` without a bound.
    max_hold: Option<Duration>,
    /// The pace of the request's body, and of the response.
    paces: Option<(Pace, Pace)>,
    connection: Option<ConnectionHandle>,
    /// The parts of the response that are not sent.
    unsent: AtomicU32,
    is_cut: AtomicBool,
    /// The task of the connection, while it waits for the handler.
    sender: Mutex<Option<Waker>>,
    /// Has the connection closed if its client takes nothing of a cut response.
    overdue: Mutex<Option<Overdue>>,
}

impl TimeLimits {
    /// Creates the limits of a request on this connection.
    pub(super) fn new(
        max_hold: Option<Duration>,
        rate: Option<MinDataRate>,
        connection: Option<ConnectionHandle>,
    ) -> Self {
        Self {
            max_hold,
            paces: rate.map(|rate| (Pace::of_request(rate), Pace::of_response(rate))),
            connection,
            unsent: AtomicU32::new(0),
            is_cut: AtomicBool::new(false),
            sender: Mutex::new(None),
            overdue: Mutex::new(None),
        }
    }

    /// Returns the pace of the request's body.
    pub(super) fn request(&self) -> Option<&Pace> {
        self.paces.as_ref().map(|(request, _)| request)
    }

    /// Returns the pace of the response.
    pub(super) fn response(&self) -> Option<&Pace> {
        self.paces.as_ref().map(|(_, response)| response)
    }

    /// Returns `true` if a part of the response is not sent.
    pub(super) fn is_sending(&self) -> bool {
        self.unsent.load(Ordering::SeqCst) > 0
    }

    /// Returns the limit that has passed for a request of this age.
    pub(super) fn passed(&self, age: Duration, now: Moment) -> Option<Rejected> {
        if let Some(most) = self.max_hold.filter(|most| age >= *most) {
            return Some(Rejected::HeldTooLong { most });
        }
        let response = self.response()?;
        response.is_spent(now).then(|| response.rate().too_slow())
    }

    /// Keeps the waker of the connection while it waits for the handler.
    pub(super) fn wait_for_handler(&self, waker: &Waker) {
        let mut sender = lock(&self.sender);
        if !sender.as_ref().is_some_and(|kept| kept.will_wake(waker)) {
            *sender = Some(waker.clone());
        }
    }

    /// Ends the response.
    pub(super) fn cut(&self) {
        *lock(&self.overdue) = self.connection.as_ref().map(ConnectionHandle::overdue);
        self.is_cut.store(true, Ordering::SeqCst);
        // One of this and the drop of the last part, which stores and loads the other way round,
        // sees the other.
        if !self.is_sending() {
            *lock(&self.overdue) = None;
        }
        let sender = lock(&self.sender).take();
        sender.into_iter().for_each(Waker::wake);
    }

    pub(super) fn is_cut(&self) -> bool {
        self.is_cut.load(Ordering::SeqCst)
    }

    /// Counts a part of the response that is not sent.
    pub(super) fn begin_part(&self) {
        self.unsent.fetch_add(1, Ordering::Relaxed);
    }

    /// Ends what [`TimeLimits::begin_part`] began.
    pub(super) fn end_part(&self) {
        if self.unsent.fetch_sub(1, Ordering::SeqCst) == 1 && self.is_cut() {
            *lock(&self.overdue) = None;
        }
    }
}
