//! The naive oracle: attention by the formula, softmax(Q K^T * scale) V, one row at a time over dense K and V, with
//! sums in f64. It is what the tile kernels are tested against, and the shortest description of what they compute.
#![forbid(unsafe_code)]

/// Attention of one query row over `tokens` tokens of one KV head: `q` is `[head_dim]`, `k` and `v` are
/// `[tokens, head_dim]`, the result is `[head_dim]`.
pub fn attend_row(q: &[f32], k: &[f32], v: &[f32], scale: f32) -> Vec<f32> {
    let dim = q.len();
    let scores: Vec<f64> = k
        .chunks_exact(dim)
        .map(|k| q.iter().zip(k).map(|(&q, &k)| f64::from(q) * f64::from(k)).sum::<f64>() * f64::from(scale))
        .collect();
    let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = scores.iter().map(|s| (s - max).exp()).collect();
    let sum: f64 = weights.iter().sum();
    (0..dim)
        .map(|d| {
            let mix: f64 = weights.iter().zip(v.chunks_exact(dim)).map(|(w, v)| w * f64::from(v[d])).sum();
            (mix / sum) as f32
        })
        .collect()
}

/// Causal attention with grouped query heads: `q` is `[rows, q heads, head_dim]` for the last `rows` of `tokens`
/// positions, `k` and `v` are `[tokens, kv heads, head_dim]`; the result has the shape of `q`.
#[allow(clippy::too_many_arguments)]
pub fn attend(
    q: &[f32],
    k: &[f32],
    v: &[f32],
    tokens: usize,
    num_q_heads: usize,
    num_kv_heads: usize,
    head_dim: usize,
    scale: f32,
) -> Vec<f32> {
    let rows = q.len() / (num_q_heads * head_dim);
    let group = num_q_heads / num_kv_heads;
    let one_head = |x: &[f32], head: usize, tokens: usize| -> Vec<f32> {
        x.chunks_exact(num_kv_heads * head_dim)
            .take(tokens)
            .flat_map(|token| token[head * head_dim..(head + 1) * head_dim].iter().copied())
            .collect()
    };
    let mut out = Vec::with_capacity(q.len());
    for (row, q) in q.chunks_exact(num_q_heads * head_dim).enumerate() {
        let visible = tokens - rows + row + 1;
        for (head, q) in q.chunks_exact(head_dim).enumerate() {
            let (k, v) = (one_head(k, head / group, visible), one_head(v, head / group, visible));
            out.extend(attend_row(q, &k, &v, scale));
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::attend_row;

    /// "Understanding the KV cache": scores 4, 1, 0 give weights 0.94, 0.05, 0.02.
    #[test]
    fn the_articles_worked_example() {
        let k = [4.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0];
        let v = [1.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 2.0, 0.0, 0.0];
        let out = attend_row(&[1.0, 0.0, 0.0, 0.0], &k, &v, 1.0);
        let expected = [0.94, 0.08, 0.98, 0.94];
        assert!(out.iter().zip(expected).all(|(x, e)| (x - e).abs() < 0.005), "{out:?}");
    }
}
