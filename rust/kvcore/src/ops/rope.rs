//! Rotary position embedding, and the split of a joint q, k, v row before it.
//!
//! ```text
//! (a, b) = (x[i], x[i + w])           half-split, as in most of Hugging Face's models, or
//!          (x[2 i], x[2 i + 1])       interleaved, as in Cohere, GLM-4 and DeepSeek;   i < w
//! a' = a * cos[i] - b * sin[i];  b' = b * cos[i] + a * sin[i]
//! ```
//! `w` is the number of cos columns: half of the head's rotated dims. What lies behind `2 * w` is copied.
#![forbid(unsafe_code)]

use super::norm::Norm;
use super::rows_per_task;
use crate::shape::{expect_len, rows_of};
use crate::simd::{LANES, Level, Simd, Work};
use crate::threads::{ShouldStop, Threads};
use crate::{Error, Result};

/// Sizes of a joint q, k, v row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RopeShape {
    /// Query heads (H).
    pub num_heads: usize,
    /// Key and value heads (KV).
    pub num_kv_heads: usize,
    /// Dims of a head (hd).
    pub head_dim: usize,
    /// Columns of cos and sin (w): the first `2 * w` dims of each head are rotated; at most `head_dim / 2`.
    pub cos_width: usize,
    /// Whether pairs are neighbours, or half of the rotated dims apart.
    pub interleaved: bool,
}

impl RopeShape {
    /// Values of a q row and of a k or v row.
    fn widths(&self) -> Result<(usize, usize)> {
        let Self { num_heads, num_kv_heads, head_dim, cos_width, .. } = *self;
        if num_heads == 0 || num_kv_heads == 0 || head_dim == 0 || cos_width > head_dim / 2 {
            return Err(Error::InvalidArgument(format!(
                "rope: expected at least one head of each kind, at least one dim and at most head_dim / 2 columns \
                 of cos, got {num_heads} and {num_kv_heads} heads of {head_dim} dims and {cos_width} columns"
            )));
        }
        let overflow = || Error::InvalidArgument(format!("rope: {self:?} overflows"));
        let q = num_heads.checked_mul(head_dim).ok_or_else(overflow)?;
        let kv = num_kv_heads.checked_mul(head_dim).ok_or_else(overflow)?;
        kv.checked_mul(2).and_then(|kv| kv.checked_add(q)).ok_or_else(overflow)?;
        Ok((q, kv))
    }
}

/// Normalisation of q and k before they are rotated.
#[derive(Clone, Copy, Debug)]
pub struct HeadNorms<'a> {
    /// Weights `[H * hd]`.
    pub q: Norm<'a>,
    /// Weights `[KV * hd]`.
    pub k: Norm<'a>,
    /// All heads of a row together (OLMo 2), or each head alone (Qwen 3).
    pub joint: bool,
}

/// Split `qkv` (`[rows, (H + 2 * KV) * hd]`: all q heads, all k heads, all v heads) into `q` (`[rows, H, hd]`), `k` and
/// `v` (`[rows, KV, hd]`), normalising q and k if there are `norms`, and rotating them. `cos_sin`: cos and sin, each
/// `[rows, w]`.
///
/// # Errors
/// [`Error::InvalidArgument`] if the shapes do not fit;
/// [`Error::Interrupted`](crate::Error::Interrupted) if `should_stop` said so.
#[expect(clippy::too_many_arguments, reason = "an operation, its sizes, and where it runs")]
pub fn rope_split(
    level: Level,
    threads: &Threads,
    qkv: &[f32],
    cos_sin: (&[f32], &[f32]),
    shape: RopeShape,
    norms: Option<HeadNorms<'_>>,
    out: (&mut [f32], &mut [f32], &mut [f32]),
    should_stop: ShouldStop<'_>,
) -> Result<()> {
    let (q_width, kv_width) = shape.widths()?;
    let width = q_width + 2 * kv_width;
    let rows = rows_of("qkv", qkv.len(), width)?;
    let ((cos, sin), (q, k, v)) = (cos_sin, out);
    for (what, x) in [("cos", cos), ("sin", sin)] {
        expect_len(what, &format!("shape [{rows}, {}]", shape.cos_width), rows * shape.cos_width, x.len())?;
    }
    for (what, x, width) in [("q", &*q, q_width), ("k", &*k, kv_width), ("v", &*v, kv_width)] {
        expect_len(what, &format!("shape [{rows}, {width}]"), rows * width, x.len())?;
    }
    if let Some(norms) = norms {
        norms.q.check("q_norm", q_width)?;
        norms.k.check("k_norm", kv_width)?;
    }
    let each = rows_per_task(rows, width, threads);
    let items = qkv
        .chunks(each * width)
        .zip(q.chunks_mut(each * q_width))
        .zip(k.chunks_mut(each * kv_width).zip(v.chunks_mut(each * kv_width)))
        .enumerate()
        .map(|(i, ((qkv, q), (k, v)))| {
            let from = i * each * shape.cos_width;
            Split { qkv, cos: &cos[from..], sin: &sin[from..], shape, norms, q, k, v }
        })
        .collect();
    threads.for_each(items, should_stop, |item| level.dispatch(item))
}

/// Rotate the heads of `x` (`[rows, heads, dim]`) into `out`. `cos_sin`: cos and sin, each `[rows, w]`, `w <= dim / 2`.
///
/// # Errors
/// As [`rope_split`].
#[expect(clippy::too_many_arguments, reason = "an operation, its sizes, and where it runs")]
pub fn rope(
    level: Level,
    threads: &Threads,
    x: &[f32],
    cos_sin: (&[f32], &[f32]),
    (heads, dim): (usize, usize),
    interleaved: bool,
    out: &mut [f32],
    should_stop: ShouldStop<'_>,
) -> Result<()> {
    let overflow = || Error::InvalidArgument(format!("rope: {heads} heads of {dim} dims overflow"));
    let width = heads.checked_mul(dim).ok_or_else(overflow)?;
    let rows = rows_of("x", x.len(), width)?;
    let (cos, sin) = cos_sin;
    let w = cos.len().checked_div(rows).unwrap_or(0);
    if w > dim / 2 {
        return Err(Error::InvalidArgument(format!("cos: expected at most {} columns, got {w}", dim / 2)));
    }
    for (what, x) in [("cos", cos), ("sin", sin)] {
        expect_len(what, &format!("shape [{rows}, {w}]"), rows * w, x.len())?;
    }
    expect_len("out", &format!("shape [{rows}, {width}]"), x.len(), out.len())?;
    let each = rows_per_task(rows, width, threads);
    let items = x
        .chunks(each * width)
        .zip(out.chunks_mut(each * width))
        .enumerate()
        .map(|(i, (x, out))| {
            let from = i * each * w;
            Heads { x, cos: &cos[from..], sin: &sin[from..], w, width, dim, interleaved, out }
        })
        .collect();
    threads.for_each(items, should_stop, |item| level.dispatch(item))
}

struct Split<'a> {
    qkv: &'a [f32],
    cos: &'a [f32],
    sin: &'a [f32],
    shape: RopeShape,
    norms: Option<HeadNorms<'a>>,
    q: &'a mut [f32],
    k: &'a mut [f32],
    v: &'a mut [f32],
}

impl<S: Simd> Work<S> for Split<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self, s: S) {
        let RopeShape { num_heads, num_kv_heads, head_dim, cos_width, interleaved } = self.shape;
        let (q_width, kv_width) = (num_heads * head_dim, num_kv_heads * head_dim);
        let mut normed = vec![0.0; if self.norms.is_some() { q_width + kv_width } else { 0 }];
        let outs = self.q.chunks_exact_mut(q_width).zip(self.k.chunks_exact_mut(kv_width));
        let outs = outs.zip(self.v.chunks_exact_mut(kv_width));
        for (row, (qkv, ((q, k), v))) in self.qkv.chunks_exact(q_width + 2 * kv_width).zip(outs).enumerate() {
            let cos = &self.cos[row * cos_width..][..cos_width];
            let sin = &self.sin[row * cos_width..][..cos_width];
            let (mut rotated, plain) = qkv.split_at(q_width + kv_width);
            if let Some(HeadNorms { q, k, joint }) = self.norms {
                let (q_out, k_out) = normed.split_at_mut(q_width);
                q.apply(s, &rotated[..q_width], if joint { q_width } else { head_dim }, q_out);
                k.apply(s, &rotated[q_width..], if joint { kv_width } else { head_dim }, k_out);
                rotated = &normed;
            }
            let heads = q.chunks_exact_mut(head_dim).chain(k.chunks_exact_mut(head_dim));
            for (x, out) in rotated.chunks_exact(head_dim).zip(heads) {
                rotate(s, x, cos, sin, interleaved, out);
            }
            v.copy_from_slice(plain);
        }
    }
}

struct Heads<'a> {
    x: &'a [f32],
    cos: &'a [f32],
    sin: &'a [f32],
    w: usize,
    width: usize,
    dim: usize,
    interleaved: bool,
    out: &'a mut [f32],
}

impl<S: Simd> Work<S> for Heads<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self, s: S) {
        let Self { w, width, dim, .. } = self;
        for (row, (x, out)) in self.x.chunks_exact(width).zip(self.out.chunks_exact_mut(width)).enumerate() {
            let (cos, sin) = (&self.cos[row * w..][..w], &self.sin[row * w..][..w]);
            for (x, out) in x.chunks_exact(dim).zip(out.chunks_exact_mut(dim)) {
                rotate(s, x, cos, sin, self.interleaved, out);
            }
        }
    }
}

/// One head; each product is rounded before the sum, as in the models' own code.
#[inline(always)]
fn rotate<S: Simd>(s: S, x: &[f32], cos: &[f32], sin: &[f32], interleaved: bool, out: &mut [f32]) {
    let width = cos.len();
    if interleaved {
        let (x, plain) = x.split_at(2 * width);
        let (out, out_plain) = out.split_at_mut(2 * width);
        out_plain.copy_from_slice(plain);
        for (((x, out), cos), sin) in x.chunks_exact(2).zip(out.chunks_exact_mut(2)).zip(cos).zip(sin) {
            (out[0], out[1]) = (x[0] * cos - x[1] * sin, x[1] * cos + x[0] * sin);
        }
        return;
    }
    let (a, rest) = x.split_at(width);
    let (b, plain) = rest.split_at(width);
    let (out_a, rest) = out.split_at_mut(width);
    let (out_b, out_plain) = rest.split_at_mut(width);
    out_plain.copy_from_slice(plain);
    let (mut i, whole) = (0, width - width % LANES);
    while i < whole {
        let at = |x: &[f32]| s.load(x[i..].first_chunk().expect("16 values behind a whole chunk's start"));
        let (a, b, cos, sin) = (at(a), at(b), at(cos), at(sin));
        let first = s.sub(s.mul(a, cos), s.mul(b, sin));
        let second = s.add(s.mul(b, cos), s.mul(a, sin));
        s.store(first, out_a[i..].first_chunk_mut().expect("as above"));
        s.store(second, out_b[i..].first_chunk_mut().expect("as above"));
        i += LANES;
    }
    for i in whole..width {
        out_a[i] = a[i] * cos[i] - b[i] * sin[i];
        out_b[i] = b[i] * cos[i] + a[i] * sin[i];
    }
}
