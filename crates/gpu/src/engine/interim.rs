//! Steps of `reclaim` and `shortage` for operations, until those are operations themselves.

use super::call::CallKind;
use super::completion::complete_all;
use super::port::Port;
use super::reclaim::CALLS_MAX;
use super::refusal::{AllocFailure, Cause};
use super::shortage::{Shortage, numbers};
use super::stores::end_copies;
use crate::observe::visualize::Act;
use crate::state::aging::Ages;
use crate::state::region::Search;
use crate::types::error::DeviceError;
use crate::types::region::Region;
use lowtide_core::log;

pub(super) struct Released {
    pub(super) granules: u64,
}

pub(super) async fn give_back(port: &Port<'_>, granules: u64, ages: Option<Ages>) -> Released {
    if port.with(|state| state.sleep.may_be_copied()) && end_copies(port).await != Ok(true) {
        return Released { granules: 0 };
    }
    let leaving = port.with(|state| state.begin_leave(granules, CALLS_MAX, ages));
    let mut released = 0;
    let mut is_refused = false;
    for run in leaving {
        let (at, size) = (run.at, run.size);
        is_refused = is_refused || port.does(CallKind::Decommit { at, size }).await.is_err();
        port.with(|state| {
            state.end_leave(run, !is_refused);
            if !is_refused {
                state.history.record(port.clock, Act::Decommit, at.get(), size);
                released += run.run.granules();
            }
        });
    }
    Released { granules: released }
}

pub(super) async fn call_for_room<T>(
    port: &Port<'_>,
    region: Region,
    mut failure: AllocFailure,
    attempt: &impl AsyncFn(Search) -> Result<T, AllocFailure>,
) -> Result<T, AllocFailure> {
    let taken = port.outside(|| port.surroundings.callback_turn()).await;
    let Some((turn, has_waited)) = taken else { return Err(failure) };
    if has_waited {
        match after_pending(port, attempt).await {
            Err(again) if again.is_shortage() => failure = again,
            outcome => return outcome,
        }
    }
    let arena = port.with(|state| state.name.clone());
    let (requested, cause) = numbers(&failure);
    let shortage = Shortage { arena: &arena, region, requested, cause };
    let asked = port.outside(|| turn.ask(&shortage)).await;
    if port.surroundings.is_forked() {
        let error = DeviceError::Forked;
        return Err(AllocFailure { cause: Cause::Uncounted, error });
    }
    port.with(|state| {
        state.totals.shortage_calls += asked.calls;
        state.totals.shortage_panics += asked.panics;
    });
    port.outside(|| {
        log!(debug, arena, calls = asked.calls, released = asked.gave, "shortage callbacks called");
    })
    .await;
    if asked.gave { after_pending(port, attempt).await } else { Err(failure) }
}

async fn after_pending<T>(
    port: &Port<'_>,
    attempt: &impl AsyncFn(Search) -> Result<T, AllocFailure>,
) -> Result<T, AllocFailure> {
    if port.with(|state| state.pending()) > 0 {
        let _ = complete_all(port).await; // if it fails, memory stays pending
    }
    attempt(Search::Cheapest).await
}
