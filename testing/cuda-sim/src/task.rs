//! Tasks: named kernels, copies with real host memory, host functions.
//!
//! A task is a closure over the device's memory and the host memory that the device can access; this
//! module follows no pointer. A task declares the ranges that it touches, so that memory released
//! under it is recorded as a fault before it runs; it may touch only those ranges.
//!
//! Invariant: a task is kept exactly as long as it is queued or captured; a task with an illegal
//! access changed nothing.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use super::call::Call;
use super::fault::WorkKind;
use super::host::HostBytes;
use super::memory::{Memory, Range};
use super::model::{Answer, IMPLICIT, Model};
use super::sparse::{blocks, index};
use super::work::Work;
use lowtide_gpu_driver::StreamHandle;

/// The kind of host memory that the device can access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HostKind {
    /// Allocated page-locked.
    Locked,
    /// Allocated by its user and page-locked later.
    Registered,
    /// Managed memory, shared by host and device.
    Managed,
}

/// Real host memory by its address.
#[derive(Debug, Default)]
pub(super) struct HostRanges(pub(super) BTreeMap<u64, (HostKind, Arc<HostBytes>)>);

impl HostRanges {
    /// Returns the registered range that contains this one: its start, its kind and its bytes.
    pub(super) fn find(&self, part: Range) -> Option<(u64, HostKind, &Arc<HostBytes>)> {
        let (&at, (kind, bytes)) = self.0.range(..=part.at).next_back()?;
        Range { at, size: bytes.size() }.holds(part).then_some((at, *kind, bytes))
    }

    /// Returns `true` if any of the range is registered.
    pub(super) fn touches(&self, range: Range) -> bool {
        let before = self.0.range(..range.end()).next_back();
        before.is_some_and(|(&at, (_, bytes))| Range { at, size: bytes.size() }.overlaps(range))
    }

    /// The bytes that are managed, or those that are page-locked. Cost: O(ranges).
    pub(super) fn bytes(&self, managed: bool) -> u64 {
        let all = self.0.values().filter(|(kind, _)| managed == (*kind == HostKind::Managed));
        all.map(|(_, bytes)| bytes.size()).sum()
    }
}

/// Work accessed an address with no memory behind it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unreachable {
    /// The start of the accessed range.
    pub at: u64,
    /// The size of the range, in bytes.
    pub size: u64,
    /// The first address with no memory behind it.
    pub bare: u64,
}

/// The memory that a kernel can access.
#[derive(Debug)]
pub struct DeviceBytes<'a> {
    memory: &'a mut Memory,
    hosts: &'a HostRanges,
}

impl DeviceBytes<'_> {
    /// Checks that there is memory behind the whole range.
    ///
    /// # Errors
    /// [`Unreachable`] if there is not.
    pub fn check(&self, at: u64, size: u64) -> Result<(), Unreachable> {
        if size == 0 || self.hosts.find(Range { at, size }).is_some() {
            return Ok(());
        }
        let bare = self.memory.first_bare(Range { at, size });
        bare.map_or(Ok(()), |bare| Err(Unreachable { at, size, bare }))
    }

    /// Reads bytes.
    ///
    /// # Errors
    /// [`Unreachable`] if there is no memory behind all of the range; nothing is read then.
    pub fn read(&self, at: u64, into: &mut [u8]) -> Result<(), Unreachable> {
        let size = into.len() as u64;
        if let Some((base, _, bytes)) = self.hosts.find(Range { at, size }) {
            bytes.read(at - base, into);
            return Ok(());
        }
        self.check(at, size)?;
        for (done, length) in blocks(size, at, at) {
            self.memory.read(at + done, &mut into[index(done)..][..length]);
        }
        Ok(())
    }

    /// Writes bytes.
    ///
    /// # Errors
    /// [`Unreachable`] if there is no memory behind all of the range; nothing is written then.
    pub fn write(&mut self, at: u64, from: &[u8]) -> Result<(), Unreachable> {
        let size = from.len() as u64;
        if let Some((base, _, bytes)) = self.hosts.find(Range { at, size }) {
            bytes.write(at - base, from);
            return Ok(());
        }
        self.check(at, size)?;
        for (done, length) in blocks(size, at, at) {
            let part = &from[index(done)..][..length];
            self.memory.write(at + done, length, |bytes| bytes.copy_from_slice(part));
        }
        Ok(())
    }
}

/// The function of a task.
pub type Job = Box<dyn FnMut(&mut DeviceBytes<'_>) -> Result<(), Unreachable> + Send>;

/// A task, queued or captured so many times.
pub(super) struct Task {
    pub(super) touches: Vec<Range>,
    uses: u64,
    /// The turns of its stream that pass before it runs; in a graph, at its first launch.
    delay: u64,
    /// `None` while it runs.
    job: Option<Job>,
}

impl Task {
    pub(super) fn new(touches: Vec<Range>, delay: u64, job: Job) -> Self {
        Self { touches, uses: 1, delay, job: Some(job) }
    }
}

impl fmt::Debug for Task {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Task").field("touches", &self.touches).finish_non_exhaustive()
    }
}

impl Model {
    /// All memory that the device reaches, and its stores.
    pub(super) fn bytes(&mut self) -> DeviceBytes<'_> {
        DeviceBytes { memory: &mut self.memory, hosts: &self.host_ranges }
    }

    /// Queues a task on a live stream, or captures it.
    pub(super) fn start_task(&mut self, stream: u64, kind: WorkKind, task: Task) -> Answer {
        self.live_stream(stream)?;
        let work = Work::Task(self.tasks.insert(task), kind);
        let queued = self.queue(stream, work);
        if queued.is_err() && self.lost.is_none() {
            self.drop_tasks(&[work]);
        }
        queued
    }

    /// Lets a turn pass for the next work of a stream: `true` if it is not its turn to run yet.
    pub(super) fn is_delayed(&mut self, stream: u64) -> bool {
        let Some(Work::Task(task, _)) = self.queues.next(stream) else { return false };
        let delay = self.tasks.get_mut(*task).map(|task| &mut task.delay);
        let left = delay.and_then(|delay| Some((delay.checked_sub(1)?, delay)));
        left.map(|(left, delay)| *delay = left).is_some()
    }

    /// Counts one use more of a task.
    pub(super) fn use_task(&mut self, work: &Work) {
        if let Work::Task(task, _) = work
            && let Some(task) = self.tasks.get_mut(*task)
        {
            task.uses += 1;
        }
    }

    /// Forgets one use of each of these tasks.
    pub(super) fn drop_tasks(&mut self, work: &[Work]) {
        for work in work {
            let Work::Task(number, _) = *work else { continue };
            let Some(task) = self.tasks.get_mut(number) else { continue };
            task.uses -= 1;
            if task.uses == 0 {
                self.tasks.remove(number);
            }
        }
    }

    pub(super) fn run_task(&mut self, stream: StreamHandle, work: &Work, number: u64) {
        let Some(mut job) = self.tasks.get_mut(number).and_then(|task| task.job.take()) else {
            return;
        };
        let done = job(&mut self.bytes());
        if let Some(task) = self.tasks.get_mut(number) {
            task.job = Some(job);
        }
        self.drop_tasks(&[*work]);
        if let Err(Unreachable { at, size, bare }) = done {
            self.illegal(Some(stream), work, (Range { at, size }, bare));
        }
    }

    /// The first unfinished work that touches a range, and its stream.
    pub(super) fn unfinished_in(&self, range: Range) -> Option<(StreamHandle, WorkKind)> {
        let touches = |work: &Work| {
            let of_task = match work {
                Work::Task(task, _) => self.tasks.get(*task).map(|task| task.touches.as_slice()),
                _ => None,
            };
            let of_task = of_task.unwrap_or_default().iter().copied();
            work.ranges().chain(of_task).any(|touched| touched.overlaps(range))
        };
        let (stream, work) = self.queues.find(touches)?;
        Some((StreamHandle::new(stream), work.kind()))
    }

    /// Lets the next work of a stream come after what the legacy default stream, or the streams
    /// that are ordered with it, were given before.
    pub(super) fn order_with_legacy(&mut self, stream: u64) {
        let before: Vec<u64> = if stream == self.legacy {
            self.blocking.iter().copied().collect()
        } else if self.blocking.contains(&stream) {
            vec![self.legacy]
        } else {
            return;
        };
        for other in before {
            let end = self.queues.end(other);
            if !self.queues.is_done(end) {
                self.queues.push(stream, Work::Wait(end));
            }
        }
    }

    /// The legacy default stream, for a launch; using it while a stream that is ordered with it
    /// captures is an error, and spoils the capture.
    pub(super) fn legacy_stream(&mut self) -> Answer<u64> {
        self.call = Call::Launch;
        if self.captures.keys().any(|stream| self.blocking.contains(stream)) {
            return Err(self.spoil_all(IMPLICIT));
        }
        if self.legacy == 0 {
            self.legacy = self.implicit_stream();
        }
        Ok(self.legacy)
    }

    /// Creates an implicit stream: the default one, or that of a thread.
    pub(super) fn implicit_stream(&mut self) -> u64 {
        let stream = self.queues.create();
        self.implicit.insert(stream);
        stream
    }
}
