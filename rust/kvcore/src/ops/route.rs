//! Which experts a row goes to, and with what weight.
//!
//! ```text
//! score  = softmax(logits) or sigmoid(logits);   merit = score + bias       the bias balances, it does not weigh
//! groups: of each the sum of its best merits; experts outside of the best groups are out
//! chosen = the top_k of greatest merit, the lower index of equal ones
//! weight = score, divided by the sum of the chosen ones if wanted, times scale
//! ```
//! Sources: Mixtral (arXiv 2401.04088), DeepSeek-V2 (arXiv 2405.04434), DeepSeek-V3 (arXiv 2412.19437).
#![forbid(unsafe_code)]

use super::rows_per_task;
use crate::shape::{expect_len, rows_of};
use crate::threads::{ShouldStop, Threads};
use crate::{Error, Result};

/// What turns logits into scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scoring {
    /// Over all experts.
    Softmax,
    /// Of each expert alone.
    Sigmoid,
}

/// How experts are chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Routing {
    /// Logits to scores.
    pub scoring: Scoring,
    /// Experts of a row.
    pub top_k: usize,
    /// Groups that experts are in, equally many and side by side; 1 for no groups.
    pub groups: usize,
    /// Groups that a row's experts may be in.
    pub top_groups: usize,
    /// How many of its best merits make a group's.
    pub group_best: usize,
    /// Whether weights are divided by their sum.
    pub renormalize: bool,
    /// What weights are multiplied by.
    pub scale: f32,
}

impl Routing {
    fn check(&self, experts: usize) -> Result<()> {
        let Self { top_k, groups, top_groups, group_best, scale, .. } = *self;
        let wrong = |text: String| Err(Error::InvalidArgument(text));
        if groups == 0 || !experts.is_multiple_of(groups) {
            return wrong(format!("groups: expected a divisor of the {experts} experts, got {groups}"));
        }
        let size = experts / groups;
        if !(1..=groups).contains(&top_groups) {
            return wrong(format!("top_groups: expected 1 to {groups}, got {top_groups}"));
        }
        if !(1..=size).contains(&group_best) {
            return wrong(format!("group_best: expected 1 to {size} (experts of a group), got {group_best}"));
        }
        if !(1..=top_groups * size).contains(&top_k) {
            return wrong(format!(
                "top_k: expected 1 to {} (experts of the top groups), got {top_k}",
                top_groups * size
            ));
        }
        if !scale.is_finite() {
            return wrong(format!("scale: expected a finite number, got {scale}"));
        }
        Ok(())
    }
}

/// Choose the experts of each row. `logits`: `[rows, experts]`, `bias`: `[experts]`; `ids` and `weights`:
/// `[rows, top_k]`, a row's experts in ascending order.
///
/// # Errors
/// [`Error::InvalidArgument`] if shapes or counts do not fit;
/// [`Error::Interrupted`] if `should_stop` said so.
#[expect(clippy::too_many_arguments, reason = "an operation, its sizes, and where it runs")]
pub fn route(
    threads: &Threads,
    logits: &[f32],
    experts: usize,
    bias: Option<&[f32]>,
    routing: Routing,
    ids: &mut [u32],
    weights: &mut [f32],
    should_stop: ShouldStop<'_>,
) -> Result<()> {
    let rows = rows_of("logits", logits.len(), experts)?;
    routing.check(experts)?;
    if let Some(bias) = bias {
        expect_len("bias", &format!("shape [{experts}]"), experts, bias.len())?;
    }
    let (k, expected) = (routing.top_k, format!("shape [{rows}, {}]", routing.top_k));
    expect_len("ids", &expected, rows * k, ids.len())?;
    expect_len("weights", &expected, rows * k, weights.len())?;
    let each = rows_per_task(rows, experts.saturating_mul(16 + k), threads);
    let outs = ids.chunks_mut(each * k).zip(weights.chunks_mut(each * k));
    threads.for_each(logits.chunks(each * experts).zip(outs).collect(), should_stop, |(logits, (ids, weights))| {
        let mut row = Row { scores: vec![0.0; experts], merits: vec![0.0; experts], open: vec![true; experts] };
        for (logits, (ids, weights)) in
            logits.chunks_exact(experts).zip(ids.chunks_exact_mut(k).zip(weights.chunks_exact_mut(k)))
        {
            row.choose(logits, bias, routing, ids, weights);
        }
    })
}

/// What is known of one row's experts.
struct Row {
    scores: Vec<f32>,
    merits: Vec<f32>,
    open: Vec<bool>,
}

impl Row {
    fn choose(&mut self, logits: &[f32], bias: Option<&[f32]>, routing: Routing, ids: &mut [u32], weights: &mut [f32]) {
        self.scores.copy_from_slice(logits);
        match routing.scoring {
            Scoring::Softmax => softmax(&mut self.scores),
            Scoring::Sigmoid => self.scores.iter_mut().for_each(|x| *x = 1.0 / (1.0 + (-*x).exp())),
        }
        self.merits.copy_from_slice(&self.scores);
        for (merit, bias) in self.merits.iter_mut().zip(bias.unwrap_or_default()) {
            *merit += bias;
        }
        self.open_groups(routing);
        for id in ids.iter_mut() {
            let best = largest(&self.merits, &self.open);
            self.open[best] = false;
            *id = best as u32;
        }
        ids.sort_unstable();
        for (id, weight) in ids.iter().zip(weights.iter_mut()) {
            *weight = self.scores[*id as usize];
        }
        if routing.renormalize {
            let sum: f32 = weights.iter().sum::<f32>() + 1e-20; // as DeepSeek-V3, against a division by 0
            weights.iter_mut().for_each(|weight| *weight /= sum);
        }
        weights.iter_mut().for_each(|weight| *weight *= routing.scale);
    }

    /// Only experts of the best groups may be chosen.
    fn open_groups(&mut self, routing: Routing) {
        let size = self.merits.len() / routing.groups;
        self.open.fill(routing.top_groups == routing.groups);
        if routing.top_groups == routing.groups {
            return;
        }
        let groups = self.merits.chunks_exact(size).map(|merits| {
            let mut open = vec![true; size];
            let best = (0..routing.group_best).map(|_| {
                let best = largest(merits, &open);
                open[best] = false;
                merits[best]
            });
            best.sum()
        });
        let (groups, mut closed): (Vec<f32>, _) = (groups.collect(), vec![true; routing.groups]);
        for _ in 0..routing.top_groups {
            let best = largest(&groups, &closed);
            closed[best] = false;
            self.open[best * size..][..size].fill(true);
        }
    }
}

/// The index of the largest open value, the lowest of equal ones; a value that is no number may be taken for it.
fn largest(values: &[f32], open: &[bool]) -> usize {
    let mut best = None;
    for (i, &value) in values.iter().enumerate().filter(|&(i, _)| open[i]) {
        if best.is_none_or(|(_, largest)| value > largest) {
            best = Some((i, value));
        }
    }
    best.map_or(0, |(i, _)| i)
}

fn softmax(x: &mut [f32]) {
    let largest = x.iter().fold(f32::NEG_INFINITY, |a, &b| a.max(b));
    x.iter_mut().for_each(|x| *x = (*x - largest).exp());
    let sum: f32 = x.iter().sum();
    x.iter_mut().for_each(|x| *x /= sum);
}
