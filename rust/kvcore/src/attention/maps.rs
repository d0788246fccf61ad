//! The weights themselves, for who wants to see what a row looks at.
//!
//! ```text
//! for each chosen row and query head: the scores that attention takes, over all chunks; softmax in f64
//! ```
//! A second pass beside [`super::attend`], only where it is asked for: attention itself never holds a row's weights.
#![forbid(unsafe_code)]

use super::Call;
use super::format::with_format;
use super::products::Multiply;
use super::tile::{Partial, QueryTile, Row, Scratch};
use super::tree;
use crate::simd::{Level, Simd, Work};
use crate::threads::ShouldStop;
use crate::{Error, Result};

/// Attention weights of the rows `rows` (counted within the call's sequence `sequence`) and the query heads `q_heads`:
/// `out` is `[rows, q_heads, tokens]`, where tokens is as many as the sequence's last row sees. Tokens that a row does
/// not see have weight 0; a row's weights sum to 1, less what its sink takes.
///
/// # Errors
/// [`Error::InvalidArgument`] for rows, heads or shapes that do not fit, [`Error::Interrupted`].
pub fn attention_weights(
    level: Level,
    call: &Call<'_>,
    sequence: usize,
    rows: &[usize],
    q_heads: &[usize],
    out: &mut [f32],
    should_stop: ShouldStop<'_>,
) -> Result<()> {
    let queries = call.q.len() / call.view.layout.k_dim;
    call.check_lengths(queries.saturating_mul(call.view.layout.v_dim), None)?;
    let Some(of) = call.rows.get(sequence) else {
        let text = format!(
            "index: expected a sequence of the batch, 0 to {}, got {sequence}",
            call.rows.len().saturating_sub(1)
        );
        return Err(Error::InvalidArgument(text));
    };
    for (name, chosen, count) in [("rows", rows, of.len), ("heads", q_heads, call.num_q_heads)] {
        if let Some(i) = chosen.iter().find(|&&i| i >= count) {
            return Err(Error::InvalidArgument(format!("{name}: expected indices below {count}, got {i}")));
        }
    }
    let tokens = of.tokens();
    let expected = rows.len().saturating_mul(q_heads.len()).saturating_mul(tokens);
    if out.len() != expected {
        let text = format!("out: expected {expected} values, got {}", out.len());
        return Err(Error::InvalidArgument(text));
    }
    let first: usize = call.rows[..sequence].iter().map(|rows| rows.len).sum();
    let maps = Maps { call, sequence, first, rows, q_heads, tokens, out, should_stop };
    with_format!(level, &call.view.layout, |F| level.dispatch(On::<F>(maps, std::marker::PhantomData)))
}

struct Maps<'a> {
    call: &'a Call<'a>,
    sequence: usize,
    /// Of the sequence's rows in the call.
    first: usize,
    rows: &'a [usize],
    q_heads: &'a [usize],
    tokens: usize,
    out: &'a mut [f32],
    should_stop: ShouldStop<'a>,
}

struct On<'a, F>(Maps<'a>, std::marker::PhantomData<F>);

impl<S: Simd, F: Multiply> Work<S> for On<'_, F> {
    type Output = Result<()>;

    #[inline(always)]
    fn run(self, s: S) -> Result<()> {
        let Maps { call, sequence, first, rows, q_heads, tokens, out, should_stop } = self.0;
        let of = &call.rows[sequence];
        let (group, q_width) =
            (call.num_q_heads / call.view.layout.num_kv_heads, call.num_q_heads * call.view.layout.k_dim);
        let mut scratch = Scratch::<S, F>::default();
        let mut running = Partial::default();
        let places = tree::places(of);
        let mut logits = vec![0.0f32; tokens];
        for (i, out) in out.chunks_exact_mut(tokens.max(1)).enumerate() {
            if should_stop() {
                return Err(Error::Interrupted);
            }
            let (row, q_head) = (rows[i / q_heads.len()], q_heads[i % q_heads.len()]);
            let q = &call.q[(first + row) * q_width..][..q_width];
            let (position, path) = places[row].clone();
            let rows = [Row { position, sees: of.mask.sees(position), q, path }];
            let head = q_head / group;
            let heads = head..head + 1;
            let (view, blocks) = (call.view, of.blocks);
            let tile = QueryTile { view, blocks, heads, group, rows: &rows, scoring: &call.scoring };
            tile.run_of_chunks(s, &mut scratch, tile.chunks(), &mut running, |query, token, visible, scores, unit| {
                if query == q_head % group {
                    for (logit, score) in logits[token + visible.start..].iter_mut().zip(&scores[visible]) {
                        *logit = score * unit;
                    }
                }
            });
            let seen = rows[0].sees.clone();
            let sink = call
                .scoring
                .sinks
                .map_or(f64::NEG_INFINITY, |sinks| f64::from(sinks[q_head]) * std::f64::consts::LOG2_E);
            let max = logits[seen.clone()].iter().fold(sink, |max, &x| max.max(f64::from(x)));
            let exp = |x: f64| (x - max).exp2();
            let sum: f64 = logits[seen.clone()].iter().map(|&x| exp(f64::from(x))).sum::<f64>() + exp(sink);
            out.fill(0.0);
            for (out, &x) in out[seen.clone()].iter_mut().zip(&logits[seen]) {
                *out = (exp(f64::from(x)) / sum) as f32;
            }
        }
        Ok(())
    }
}
