//! The naive oracle: attention by the formula, softmax(Q K^T * scale) V, one row at a time over dense K and V, with
//! sums in f64. It is what the tile kernels are tested against, and the shortest description of what they compute.
#![forbid(unsafe_code)]

use std::borrow::Cow;
use std::ops::Range;

use super::mask::Mask;

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

    /// Attention of one query of `k_dim` values over the tokens `sees` of one head: `v_dim` values.
    pub fn attend_row(&self, q: &[f32], head: usize, sees: Range<usize>, scale: f32) -> Vec<f32> {
        let k = |token: usize| &self.k[(token * self.num_kv_heads + head) * self.k_dim..][..self.k_dim];
        let v = |token: usize| &self.v[(token * self.num_kv_heads + head) * self.v_dim..][..self.v_dim];
        let scores: Vec<f64> = sees
            .clone()
            .map(|token| q.iter().zip(k(token)).map(|(&q, &k)| f64::from(q) * f64::from(k)).sum::<f64>())
            .map(|score| score * f64::from(scale))
            .collect();
        let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<f64> = scores.iter().map(|s| (s - max).exp()).collect();
        let sum: f64 = weights.iter().sum();
        (0..self.v_dim)
            .map(|d| {
                let mix: f64 = weights.iter().zip(sees.clone()).map(|(w, token)| w * f64::from(v(token)[d])).sum();
                (mix / sum) as f32
            })
            .collect()
    }

    /// Attention with grouped query heads: `q` is `[rows, q heads, k_dim]` for rows at positions from `start` on; the
    /// result is `[rows, q heads, v_dim]`.
    pub fn attend(&self, q: &[f32], num_q_heads: usize, scale: f32, mask: Mask, start: usize) -> Vec<f32> {
        let group = num_q_heads / self.num_kv_heads;
        q.chunks_exact(num_q_heads * self.k_dim)
            .enumerate()
            .flat_map(|(row, q)| q.chunks_exact(self.k_dim).enumerate().map(move |(head, q)| (row, head, q)))
            .flat_map(|(row, head, q)| self.attend_row(q, head / group, mask.sees(start + row), scale))
            .collect()
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
        let out = dense.attend_row(&[1.0, 0.0, 0.0, 0.0], 0, 0..3, 1.0);
        let expected = [0.94, 0.08, 0.98, 0.94];
        assert!(out.iter().zip(expected).all(|(x, e)| (x - e).abs() < 0.005), "{out:?}");
    }
}
