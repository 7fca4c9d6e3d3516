//! A sort of random rows by DataFusion, and what came of it. The tests run it too.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use datafusion_common::arrow::array::{ArrayRef, AsArray, Int64Array, RecordBatch};
use datafusion_common::arrow::datatypes::{DataType, Field, Int64Type, Schema, SchemaRef};
use datafusion_common::{DataFusionError, Result};
use datafusion_execution::TaskContext;
use datafusion_execution::config::SessionConfig;
use datafusion_execution::memory_pool::MemoryPool;
use datafusion_execution::runtime_env::RuntimeEnvBuilder;
use datafusion_physical_plan::ExecutionPlan;
use datafusion_physical_plan::expressions::{PhysicalSortExpr, col};
use datafusion_physical_plan::memory::{LazyBatchGenerator, LazyMemoryExec};
use datafusion_physical_plan::sorts::sort::SortExec;
use futures::StreamExt;
use parking_lot::RwLock;

/// A row has a random key and seven numbers more: 64 bytes.
const COLUMNS: usize = 8;
const BATCH_ROWS: usize = 8192;
/// The bytes of a batch: 512 KiB.
pub(crate) const BATCH_BYTES: usize = BATCH_ROWS * COLUMNS * size_of::<i64>();
/// What a sort keeps for merging. DataFusion's default of 10 MB is meant for larger ones.
const MERGE_BYTES: usize = 4 << 20;

/// What came of a sort.
#[derive(Debug)]
pub(crate) struct Sorted {
    pub(crate) bytes: usize,
    pub(crate) is_sorted: bool,
    /// `true` if the keys that came out are those that went in, by their number and sum.
    pub(crate) is_complete: bool,
    pub(crate) spills: usize,
    pub(crate) spilled_bytes: usize,
}

/// Sorts this many batches with the memory of a pool. `between` is called before each batch, with
/// its number.
///
/// # Errors
/// If the pool cannot hold a batch and what the merge keeps, or on an error of a file.
pub(crate) async fn sort(
    pool: Arc<dyn MemoryPool>,
    batches: usize,
    between: impl Fn(usize) + Send + Sync + 'static,
) -> Result<Sorted> {
    let runtime = RuntimeEnvBuilder::new().with_memory_pool(pool).build_arc()?;
    let config = SessionConfig::new()
        .with_batch_size(BATCH_ROWS)
        .with_sort_spill_reservation_bytes(MERGE_BYTES);
    let task = TaskContext::default().with_session_config(config).with_runtime(runtime);

    let name = |column| format!("column_{column}");
    let field = |column| Field::new(name(column), DataType::Int64, false);
    let schema: SchemaRef = Arc::new(Schema::new((0..COLUMNS).map(field).collect::<Vec<_>>()));
    let rows = Rows { schema: schema.clone(), next: 0, batches, between: Arc::new(between) };
    let input = LazyMemoryExec::try_new(schema.clone(), vec![Arc::new(RwLock::new(rows))])?;
    let order = [PhysicalSortExpr::new_default(col(&name(0), &schema)?)];
    let sort = SortExec::new(order.into(), Arc::new(input));

    let mut output = sort.execute(0, Arc::new(task))?;
    let (mut is_sorted, mut last, mut count, mut sum) = (true, i64::MIN, 0, 0_i64);
    while let Some(batch) = output.next().await {
        for key in batch?.column(0).as_primitive::<Int64Type>().values() {
            is_sorted &= last <= *key;
            (last, count, sum) = (*key, count + 1, sum.wrapping_add(*key));
        }
    }
    drop(output);
    let metrics = sort.metrics().ok_or_else(|| DataFusionError::Internal("no metrics".into()))?;
    let expected = (0..batches).flat_map(keys).fold(0, i64::wrapping_add);
    Ok(Sorted {
        bytes: batches * BATCH_BYTES,
        is_sorted,
        is_complete: (count, sum) == (batches * BATCH_ROWS, expected),
        spills: metrics.spill_count().unwrap_or(0),
        spilled_bytes: metrics.spilled_bytes().unwrap_or(0),
    })
}

/// The keys of a batch: those of a `SplitMix64` generator with the number of the batch as seed.
fn keys(batch: usize) -> impl Iterator<Item = i64> {
    let mut state = batch as u64;
    std::iter::repeat_with(move || {
        state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (state ^ (state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (mixed ^ (mixed >> 31)).cast_signed()
    })
    .take(BATCH_ROWS)
}

/// The input: one batch at a time, so that only the sort holds rows.
struct Rows {
    schema: SchemaRef,
    next: usize,
    batches: usize,
    between: Arc<dyn Fn(usize) + Send + Sync>,
}

impl fmt::Debug for Rows {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rows").field("next", &self.next).finish_non_exhaustive()
    }
}

impl fmt::Display for Rows {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rows of {} batches", self.batches)
    }
}

impl LazyBatchGenerator for Rows {
    fn as_any(&self) -> &dyn Any {
        self
    }

    fn generate_next_batch(&mut self) -> Result<Option<RecordBatch>> {
        if self.next == self.batches {
            return Ok(None);
        }
        (self.between)(self.next);
        let column = |_| Arc::new(keys(self.next).collect::<Int64Array>()) as ArrayRef;
        let batch = RecordBatch::try_new(self.schema.clone(), (0..COLUMNS).map(column).collect())?;
        self.next += 1;
        Ok(Some(batch))
    }

    /// Called for each execution of the plan.
    fn reset_state(&self) -> Arc<RwLock<dyn LazyBatchGenerator>> {
        let (schema, between) = (self.schema.clone(), Arc::clone(&self.between));
        Arc::new(RwLock::new(Self { schema, next: 0, batches: self.batches, between }))
    }
}
