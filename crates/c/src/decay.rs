//! The thread that releases idle memory of all allocators of the process.
//!
//! It starts with the first allocator and stays. It takes no signals, so that a handler of the
//! program never runs on it. Without an arena it sleeps until one is opened. When the process
//! exits, the driver layer refuses its calls before CUDA shuts down.
//!
//! Invariant: a pass holds [`PASS`] while it has handles of arenas, so that `close` can wait for
//! its end.
#![expect(unsafe_code, reason = "the signal mask of a thread is set by C calls")]

use std::sync::{Arc, Mutex, OnceLock};
use std::thread;
use std::time::Duration;

use lowtide_core::clock::{Bell, Clock, Moment, SystemClock};
use lowtide_core::sync::lock;

use crate::failure::{Failure, Outcome};
use crate::registry;

/// The longest time between two checks while an arena is open: no notification tells that memory
/// became idle. A quarter of a second, as the worker of a `Memory`.
const POLL: Duration = Duration::from_millis(250);

/// The stack of the thread. As many as glibc's default for small threads of a service; a decay
/// needs some ten KiB of it.
const STACK: usize = 256 << 10;

static PASS: Mutex<()> = Mutex::new(());

struct Decay {
    clock: Arc<SystemClock>,
    bell: Arc<Bell>,
}

fn decay() -> &'static Decay {
    static DECAY: OnceLock<Decay> = OnceLock::new();
    DECAY.get_or_init(|| Decay { clock: Arc::new(SystemClock::new()), bell: Bell::new() })
}

/// Returns the clock of all arenas.
pub(crate) fn clock() -> Arc<dyn Clock> {
    decay().clock.clone()
}

/// Starts the thread, once.
///
/// # Errors
/// [`Failure::Thread`]; the next call tries again.
pub(crate) fn start() -> Outcome<()> {
    static IS_STARTED: Mutex<bool> = Mutex::new(false);
    let mut is_started = lock(&IS_STARTED);
    if !*is_started {
        let thread = thread::Builder::new().name("lowtide-decay".to_owned()).stack_size(STACK);
        let spawned = without_signals(|| thread.spawn(run));
        drop(spawned.map_err(|error| Box::new(Failure::Thread { message: error.to_string() }))?);
        *is_started = true;
    }
    Ok(())
}

/// Tells the thread that an arena was opened.
pub(crate) fn wake() {
    decay().bell.ring();
}

/// Waits for the end of a pass that is in progress, which may hold handles of arenas.
pub(crate) fn wait_for_pass() {
    drop(lock(&PASS));
}

fn run() {
    let Decay { clock, bell } = decay();
    loop {
        let next = pass(clock.now());
        clock.wait_until(bell, next);
    }
}

/// Releases what is due in every arena, and returns the time of the next pass.
fn pass(now: Moment) -> Moment {
    let _pass = lock(&PASS);
    let arenas = registry::arenas();
    if arenas.is_empty() {
        return Moment::NEVER;
    }
    let mut next = now + POLL;
    for arena in arenas {
        // A failing driver is asked again at the next pass, and tells callers itself.
        if arena.decay(now).is_ok() {
            next = next.min(arena.next_decay());
        }
    }
    next
}

/// Runs `act` with all signals blocked; a thread that it starts keeps them blocked.
fn without_signals<T>(act: impl FnOnce() -> T) -> T {
    let mut all = std::mem::MaybeUninit::<libc::sigset_t>::zeroed();
    let mut before = std::mem::MaybeUninit::<libc::sigset_t>::zeroed();
    // SAFETY: a set of ours is filled in.
    unsafe { libc::sigfillset(all.as_mut_ptr()) };
    // SAFETY: both are sets of ours; the first was filled in above.
    let blocked =
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr()) };
    let done = act();
    if blocked == 0 {
        // SAFETY: the mask that the call above wrote.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), std::ptr::null_mut()) };
    }
    done
}
