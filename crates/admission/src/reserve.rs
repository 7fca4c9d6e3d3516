//! Requests that wait for room: a handle to one in the queue, and the future of a reservation.
//!
//! The tower layer uses [`Waiting`], since it estimates the need of a request again at each
//! attempt. Programs use [`Admission::reserve`]. Loads wait in the same queue, and so do suspended
//! requests that resume ([`Permit::resume`]).

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use lowtide_core::bytes::ByteSize;

use super::admission::Admission;
use super::cost::{Cost, Priority};
use super::desk::Desk;
use super::eviction::RequestLabel;
use super::permit::Permit;
use super::rejected::Rejected;
use super::waiting::{Lack, WaitId, WaitTerms};

/// A request in the queue. Dropping it leaves the queue.
#[doc(hidden)]
#[derive(Debug)]
pub struct Waiting {
    desk: &'static Desk,
    id: WaitId,
}

impl Waiting {
    pub(super) fn enter(desk: &'static Desk, terms: WaitTerms) -> Option<Self> {
        let terms = WaitTerms { cost: desk.by_budget(terms.cost), ..terms };
        let id = desk.queue.enter(terms, desk.host.ceiling())?;
        desk.hurry();
        Some(Self { desk, id })
    }

    const fn id(&self) -> &WaitId {
        &self.id
    }

    /// Waits until the request may try again. Returns `false` if this is the last attempt, because
    /// the deadline has passed or waiting has ended.
    pub fn poll_turn(&self, cx: &Context<'_>) -> Poll<bool> {
        self.desk.queue.poll(&self.id, cx)
    }

    /// Tries to admit the request. A rejection is not counted.
    ///
    /// # Errors
    /// As for [`Admission::try_admit_with`], and [`Rejected::Full`] if others come first.
    pub fn try_admit(
        &self,
        cost: Cost,
        priority: Priority,
        label: RequestLabel<'_>,
    ) -> Result<Permit, Rejected> {
        self.desk.try_admit(Some(&self.id), cost, priority, label)
    }

    /// Records why an attempt of a load was rejected, so that the queue keeps room for it.
    pub(super) fn lacks(&self, rejected: &Rejected) {
        let lack = match rejected {
            Rejected::Full { budget, .. } => Lack::Load(*budget),
            _ => Lack::Other,
        };
        self.desk.queue.lacks(&self.id, lack);
    }

    /// Records that the attempt failed before admission, for another reason than bytes: the request
    /// delays no others.
    pub fn lacks_other(&self) {
        self.desk.queue.lacks(&self.id, Lack::Other);
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        if self.desk.queue.leave(&self.id) {
            // It may have held up others.
            self.desk.released();
        }
    }
}

/// The future of [`Admission::reserve`].
#[must_use = "futures do nothing unless polled"]
pub struct Reserve {
    admission: Admission,
    cost: Cost,
    priority: Priority,
    waiting: Option<Waiting>,
}

impl fmt::Debug for Reserve {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reserve").field("cost", &self.cost).finish_non_exhaustive()
    }
}

impl Future for Reserve {
    type Output = Result<Permit, Rejected>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        // Ends: each iteration after the first needs a wake of the queue.
        loop {
            let is_last = match &self.waiting {
                Some(waiting) => !ready!(waiting.poll_turn(cx)),
                None => false,
            };
            let (cost, priority) = (self.cost, self.priority);
            let tried = match self.waiting.as_ref().filter(|_| !is_last) {
                Some(waiting) => waiting.try_admit(cost, priority, None),
                None => self.admission.try_admit_uncounted(cost, priority, None),
            };
            let rejected = match tried {
                Ok(permit) => {
                    self.waiting = None;
                    return Poll::Ready(Ok(permit));
                }
                Err(rejected) => rejected,
            };
            if self.waiting.is_none() && rejected.may_wait() {
                self.waiting = self.admission.wait(cost, priority, 0, None);
            }
            if is_last || self.waiting.is_none() || !rejected.may_wait() {
                self.waiting = None;
                return Poll::Ready(Err(self.admission.reject(rejected)));
            }
        }
    }
}

impl Admission {
    /// Waits until the cost fits, and reserves it: for pipelines, and for background work that can
    /// wait. Requests and reservations wait in one queue, in the order of their arrival within each
    /// priority. Smaller ones that fit may pass a larger one, up to as many bytes as that needs.
    ///
    /// There is no deadline: use a timeout of your runtime. The future can be dropped at any time,
    /// and reserves nothing until it completes.
    ///
    /// ```
    /// use lowtide_admission::{Admission, ByteSize, Cost, Rejected};
    ///
    /// # async fn run() -> Result<(), Rejected> {
    /// let admission = Admission::with_limit(ByteSize::mib(100));
    /// let permit = admission.reserve(Cost::host(ByteSize::mib(60))).await?;
    /// // The next one waits until this permit is dropped.
    /// drop(permit);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Rejected::TooLarge`] if it can never fit, [`Rejected::Exhausted`],
    /// [`Rejected::ShuttingDown`], and [`Rejected::Full`] if the queue is full: 4,096 requests, or
    /// one for each 256 KiB of the ceiling.
    pub fn reserve(&self, cost: Cost) -> Reserve {
        self.reserve_with(cost, Priority::Normal)
    }

    /// Like [`Admission::reserve`], with a priority. Requests of higher priority come first, until
    /// as many bytes as the ceiling have passed one of lower priority.
    pub fn reserve_with(&self, cost: Cost, priority: Priority) -> Reserve {
        Reserve { admission: self.clone(), cost, priority, waiting: None }
    }

    /// Enters the queue of requests that wait for room. Returns `None` if it is full, or if there
    /// is no control loop for the deadline.
    #[doc(hidden)]
    #[must_use]
    pub fn wait(
        &self,
        cost: Cost,
        priority: Priority,
        tenant: u64,
        within: Option<Duration>,
    ) -> Option<Waiting> {
        let is_admitted = false;
        Waiting::enter(self.desk(), WaitTerms { cost, priority, tenant, within, is_admitted })
    }

    /// Enters the queue of requests for the room of a load, before those that were not admitted.
    /// Returns `None` as [`Admission::wait`] does.
    pub(super) fn wait_for_load(&self, cost: Cost, within: Duration) -> Option<Waiting> {
        let cost = self.desk().by_budget(cost);
        // Resources are not multiplied by the correction factor.
        let host = self.desk().host.in_units(cost.host);
        let cost = Cost { host, device: self.desk().device.in_units(cost.device) };
        let (priority, tenant, within) = (Priority::Normal, 0, Some(within));
        let terms = WaitTerms { cost, priority, tenant, within, is_admitted: true };
        Waiting::enter(self.desk(), terms)
    }
}

impl Permit {
    /// Ends the suspension: reserves host memory up to `claim` in total, in the order of the queue.
    ///
    /// # Errors
    /// [`Rejected`], which is not counted; the reservation stays suspended.
    #[doc(hidden)]
    pub fn resume(
        &mut self,
        waiting: Option<&Waiting>,
        claim: ByteSize,
        priority: Priority,
    ) -> Result<(), Rejected> {
        self.book_again(waiting.map(Waiting::id), claim, priority)
    }

    /// Enters the queue to resume, before the requests that were not admitted yet. Returns `None`
    /// as [`Admission::wait`](super::Admission::wait) does.
    #[doc(hidden)]
    pub fn wait_to_resume(
        &self,
        claim: ByteSize,
        priority: Priority,
        tenant: u64,
        within: Duration,
    ) -> Option<Waiting> {
        let cost = Cost::host(claim.saturating_sub(self.cost().host));
        let within = Some(within);
        let terms = WaitTerms { cost, priority, tenant, within, is_admitted: true };
        Waiting::enter(self.desk(), terms)
    }
}
