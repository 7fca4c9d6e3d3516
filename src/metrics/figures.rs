//! Reads the figures of the table from snapshots: a function for each section of the table.
//!
//! `record` publishes them, and `/memory` shows those of heap, arenas, resources and requests.

use std::time::Duration;

use lowtide_admission::{
    AdmissionStats, Budget, Cost, EventCounts, Ledger, Level, LimitSource, MemoryUsage, Psi,
    ReclaimerStats, RejectReason, ResourceStats, UnloadReason,
};
use lowtide_heap::{HeapSnapshot, HostArenaStats};

use super::MetricsTier;
use super::names::{Kind, Metric};
use super::process::ProcessStats;
use super::record::{BUDGETS, Pressure};
#[cfg(feature = "device")]
use super::record::{Device, DeviceBudget};
use crate::bytes::ByteSize;
#[cfg(feature = "device")]
use crate::device::ArenaSnapshot;

/// The value of a metric.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Figure {
    /// Unknown, or [`ByteSize::MAX`], which means no limit.
    Absent,
    Count(u64),
    Real(f64),
    Flag(bool),
    /// A series for each value of the metric's last label.
    Each(Vec<(&'static str, Self)>),
}

impl From<u64> for Figure {
    fn from(count: u64) -> Self {
        Self::Count(count)
    }
}

impl From<f64> for Figure {
    fn from(real: f64) -> Self {
        Self::Real(real)
    }
}

impl From<bool> for Figure {
    fn from(flag: bool) -> Self {
        Self::Flag(flag)
    }
}

impl From<Duration> for Figure {
    fn from(time: Duration) -> Self {
        Self::Real(time.as_secs_f64())
    }
}

impl From<ByteSize> for Figure {
    fn from(size: ByteSize) -> Self {
        if size == ByteSize::MAX { Self::Absent } else { Self::Count(size.get()) }
    }
}

impl<T: Into<Self>> From<Option<T>> for Figure {
    fn from(value: Option<T>) -> Self {
        value.map_or(Self::Absent, Into::into)
    }
}

impl<T: Into<Self>, const N: usize> From<[(&'static str, T); N]> for Figure {
    fn from(values: [(&'static str, T); N]) -> Self {
        Self::Each(values.map(|(label, value)| (label, value.into())).into())
    }
}

impl From<Cost> for Figure {
    fn from(cost: Cost) -> Self {
        let part = |budget: &Budget| match budget {
            Budget::Host => cost.host,
            Budget::Device => cost.device,
        };
        Self::Each(BUDGETS.iter().map(|of| (of.name(), part(of).into())).collect())
    }
}

/// Returns a figure that exists only with a limit.
fn limited<T>(ledger: &Ledger, figure: T) -> Option<T> {
    (ledger.ceiling() != ByteSize::MAX).then_some(figure)
}

/// Reads the value of a row, if it has one.
macro_rules! read {
    ($each:ident [] $($metric:tt)+) => {};
    ($each:ident [$value:expr] $($metric:tt)+) => {
        $each(metric!($($metric)+), Figure::from($value));
    };
}

macro_rules! readers {
    ($(@ $labels:tt $(#[$cfg:meta])? $source:ident: $type:ty;
        $($tier:ident $kind:ident $name:literal $([$($own:literal),*])? $(as $id:ident)?
            $(= $value:expr)?, $help:literal;)*
    )*) => {
        $(
            $(#[$cfg])?
            pub(crate) fn $source($source: &$type, each: &mut dyn FnMut(Metric, Figure)) {
                $(read!(each [$($value)?] $tier $kind $name $help $labels $([$($own),*])?);)*
            }
        )*
    };
}

rows!(readers);
