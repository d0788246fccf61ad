//! The naive oracle: attention by the formula, softmax(Q K^T * scale) V with all that may come between, one row at a
//! time over dense K and V, with sums in f64. It is what the tile kernels are tested against, and the shortest
//! description of what they compute.
#![forbid(unsafe_code)]

use std::borrow::Cow;
use std::ops::Range;

use super::mask::Mask;
use super::scoring::Scoring;

/// K and V of one sequence, token after token.
#[derive(Clone, Debug)]
pub struct Dense<'a> {
    /// `[tokens, kv heads, k_dim]`
    pub k: &'a [f32],
    /// `[tokens, kv heads, v_dim]`
    pub v: Cow<'a, [f32]>,
    /// KV heads.
    pub num_kv_heads: usize,
    /// Dimensions of a head's K.
    pub k_dim: usize,
    /// Dimensions of a head's V.
    pub v_dim: usize,
}

impl<'a> Dense<'a> {
    /// Latent rows `[tokens, k_dim]`: one head, whose V is the first `v_dim` dimensions of each row.
    pub fn latent(rows: &'a [f32], k_dim: usize, v_dim: usize) -> Self {
        let v = rows.chunks_exact(k_dim).flat_map(|row| row[..v_dim].iter().copied()).collect();
        Self { k: rows, v, num_kv_heads: 1, k_dim, v_dim }
    }

    /// Attention of the query `q` (`k_dim` values) of one query head in the row at `position`, over the tokens `sees`:
    /// `v_dim` values, and the logarithm of the sum of all exponentials.
    pub fn attend_query(
        &self,
        q: &[f32],
        (q_head, num_q_heads): (usize, usize),
        position: usize,
        sees: Range<usize>,
        scoring: &Scoring<'_>,
    ) -> (Vec<f32>, f32) {
        let head = q_head / (num_q_heads / self.num_kv_heads);
        let k = |token: usize| &self.k[(token * self.num_kv_heads + head) * self.k_dim..][..self.k_dim];
        let v = |token: usize| &self.v[(token * self.num_kv_heads + head) * self.v_dim..][..self.v_dim];
        let bias = scoring.bias_of(q_head, num_q_heads);
        let scores: Vec<f64> = sees
            .clone()
            .map(|token| {
                let score: f64 = q.iter().zip(k(token)).map(|(&q, &k)| f64::from(q) * f64::from(k)).sum();
                let score = score * f64::from(scoring.scale);
                let bent = scoring.softcap.map_or(score, |cap| f64::from(cap) * (score / f64::from(cap)).tanh());
                bent + f64::from(bias.at(token, position))
            })
            .collect();
        let sink = scoring.sinks.map_or(f64::NEG_INFINITY, |sinks| f64::from(sinks[q_head]));
        let max = scores.iter().copied().fold(sink, f64::max);
        let weights: Vec<f64> = scores.iter().map(|s| (s - max).exp()).collect();
        let sum = weights.iter().sum::<f64>() + (sink - max).exp();
        let out = (0..self.v_dim).map(|d| {
            let mix: f64 = weights.iter().zip(sees.clone()).map(|(w, token)| w * f64::from(v(token)[d])).sum();
            (mix / sum) as f32
        });
        (out.collect(), (max + sum.ln()) as f32)
    }

    /// Attention with grouped query heads: `q` is `[rows, q heads, k_dim]` for rows at positions from `start` on; the
    /// results are `[rows, q heads, v_dim]`, and `[rows, q heads]` logarithms of sums of exponentials.
    pub fn attend(
        &self,
        q: &[f32],
        num_q_heads: usize,
        scoring: &Scoring<'_>,
        mask: Mask,
        start: usize,
    ) -> (Vec<f32>, Vec<f32>) {
        let rows = q.chunks_exact(num_q_heads * self.k_dim).enumerate();
        let queries = rows.flat_map(|(row, q)| {
            q.chunks_exact(self.k_dim).enumerate().map(move |(head, q)| {
                let position = start + row;
                self.attend_query(q, (head, num_q_heads), position, mask.sees(position), scoring)
            })
        });
        let (outs, lses): (Vec<_>, Vec<_>) = queries.unzip();
        (outs.concat(), lses)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// "Understanding the KV cache": scores 4, 1, 0 give weights 0.94, 0.05, 0.02.
    #[test]
    fn the_articles_worked_example() {
        let k = [4.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0];
        let v = [1.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 2.0, 0.0, 0.0];
        let dense = Dense { k: &k, v: Cow::Borrowed(&v), num_kv_heads: 1, k_dim: 4, v_dim: 4 };
        let (out, lse) = dense.attend_query(&[1.0, 0.0, 0.0, 0.0], (0, 1), 2, 0..3, &Scoring::plain(1.0));
        assert!((lse.exp() - 58.3).abs() < 0.05, "{lse}");
        let expected = [0.94, 0.08, 0.98, 0.94];
        assert!(out.iter().zip(expected).all(|(x, e)| (x - e).abs() < 0.005), "{out:?}");
    }
}
