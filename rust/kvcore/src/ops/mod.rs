//! The small operations between products: normalisation, rotary positions, activations, the choice of experts
//! and of tokens.
//!
//! Each works on rows; a row's bits depend on that row alone. Rows are shared out to threads only where that is
//! worth the hand-over.
#![forbid(unsafe_code)]

mod activation;
mod argmax;
mod norm;
mod rope;
mod route;
mod softcap;

pub use activation::{Activation, activate};
pub use argmax::argmax;
pub use norm::{Norm, NormKind, normalize};
pub use rope::{HeadNorms, RopeShape, rope, rope_split};
pub use route::{Routing, Scoring, route};
pub use softcap::softcap;

use crate::threads::Threads;

/// Rows that one task takes, if a row costs about `cost` elementary steps.
fn rows_per_task(rows: usize, cost: usize, threads: &Threads) -> usize {
    /// Steps that are worth handing to another thread.
    const TASK: usize = 1 << 16;
    let tasks = (rows.saturating_mul(cost) / TASK).clamp(1, 2 * threads.num_threads());
    rows.div_ceil(tasks).max(1)
}
