//! What tests of attention share: numbers, shapes, ways of scoring, and how far a result may be from the oracle's.
#![allow(dead_code, reason = "not every test needs all")]

use kvcore::attention::{Bias, Scoring};
use kvcore::storage::{KvDtype, Layout, ScaleMode, Scales};

use crate::cases::few;

/// Small xorshift: inputs need spread, not quality.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> f32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 40) as f32 / (1 << 23) as f32 - 1.0
    }
    pub fn values(&mut self, n: usize, spread: f32) -> Vec<f32> {
        (0..n).map(|_| self.next() * spread).collect()
    }
}

/// The shape of a layer.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    pub kv_heads: usize,
    pub group: usize,
    pub k_dim: usize,
    pub v_dim: usize,
    pub latent: bool,
    pub block_size: usize,
    pub dtype: KvDtype,
    pub scale_mode: ScaleMode,
}

impl Shape {
    /// K and V of one width, in the format's usual scale mode.
    pub fn plain(kv_heads: usize, group: usize, head_dim: usize, dtype: KvDtype) -> Self {
        let scale_mode = dtype.default_scale_mode();
        Self { kv_heads, group, k_dim: head_dim, v_dim: head_dim, latent: false, block_size: 16, dtype, scale_mode }
    }

    /// Latent rows of `rank + rope_dim` values.
    pub fn latent(group: usize, rank: usize, rope_dim: usize, dtype: KvDtype) -> Self {
        Self { k_dim: rank + rope_dim, v_dim: rank, latent: true, ..Self::plain(1, group, rank, dtype) }
    }

    pub fn layout(&self, num_blocks: usize) -> Layout {
        let Self { kv_heads: num_kv_heads, k_dim, v_dim, latent, block_size, dtype, scale_mode, .. } = *self;
        Layout { num_layers: 1, num_blocks, num_kv_heads, k_dim, v_dim, latent, block_size, dtype, scale_mode }
    }

    pub fn q_heads(&self) -> usize {
        self.kv_heads * self.group
    }

    /// Values of a row of queries, and of the result.
    pub fn widths(&self) -> (usize, usize) {
        (self.q_heads() * self.k_dim, self.q_heads() * self.v_dim)
    }

    pub fn scales(&self, k: f32, v: f32) -> Scales {
        Scales { k: vec![k; self.kv_heads], v: vec![v; self.kv_heads] }
    }

    /// Every format in every scale mode.
    pub fn all_formats() -> impl Iterator<Item = (KvDtype, ScaleMode)> {
        KvDtype::ALL.into_iter().flat_map(|dtype| dtype.scale_modes().iter().map(move |&mode| (dtype, mode)))
    }

    /// Those that a sweep goes through: all, or one of each kind of arithmetic where there is little time.
    pub fn swept_formats() -> impl Iterator<Item = (KvDtype, ScaleMode)> {
        use KvDtype::{Bf16, F32, Int8};
        Self::all_formats().filter(|(dtype, _)| !few() || matches!(dtype, F32 | Bf16 | Int8))
    }

    /// How far a result may be from the oracle's, for values of V up to 1.
    ///
    /// The oracle gets queries and stored values as the kernels multiply them, so what is left is:
    /// - f32 sums and the exponential's 2e-7. Scores are below 10 here and their sums have up to 576 terms of random
    ///   sign, which makes an error of some 2^-24 * 10 * sqrt(576) at the very worst, 1.4e-5, in the exponent of a
    ///   weight, and seldom a tenth of it; over many weights these errors cancel further.
    /// - u = 2^-8, the largest relative error of rounding to bf16, for each weight, in all formats but f32 and f16.
    ///   The sum is that of the rounded weights: then the result is a mix of V by weights that are a little different,
    ///   and the error at most u * |v - result| <= 2 u. With scales of each token the sum is that of the weights
    ///   before they are rounded: at most u * |v| <= u.
    pub fn bound(&self) -> f32 {
        let u = 2.0f32.powi(-8);
        match (self.dtype, self.scale_mode) {
            (KvDtype::F32 | KvDtype::F16, _) => 2e-6,
            (KvDtype::Int4, _) | (_, ScaleMode::Static) => 2.0 * u + 2e-6,
            (_, ScaleMode::PerTokenHead) => u + 2e-6,
        }
    }
}

/// What comes between scores and weights besides the scale.
#[derive(Clone, Debug, Default)]
pub struct Style {
    pub softcap: Option<f32>,
    /// ALiBi's slopes, or a table of T5's kind with this many distances behind the query.
    pub slopes: Vec<f32>,
    pub table: Vec<f32>,
    pub before: usize,
    pub sinks: Vec<f32>,
}

impl Style {
    pub fn scoring(&self, scale: f32) -> Scoring<'_> {
        let bias = match (&self.slopes[..], &self.table[..]) {
            ([], []) => Bias::None,
            ([], table) => Bias::Relative { table, before: self.before },
            (slopes, _) => Bias::Alibi(slopes),
        };
        let sinks = Some(&self.sinks[..]).filter(|sinks| !sinks.is_empty());
        Scoring { scale, softcap: self.softcap, bias, sinks }
    }
}
