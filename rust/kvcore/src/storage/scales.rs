//! The static scales of an arena: one for each layer and head, of K and of V.
#![forbid(unsafe_code)]

use super::layout::Layout;
use crate::{Error, Result};

/// What stored values are multiplied by: stored = value / scale. Given from outside, so that a stored value depends on
/// nothing but its token and position. Only fp8 in the static mode takes scales other than 1.
#[derive(Clone, Debug, PartialEq)]
pub struct Scales {
    /// For K: `[num_layers, num_kv_heads]`.
    pub k: Vec<f32>,
    /// For V: `[num_layers, num_kv_heads]`. In a latent layout V is a part of K and has K's scales: these are not used.
    pub v: Vec<f32>,
}

impl Scales {
    /// No scaling.
    pub fn unit(layout: &Layout) -> Self {
        Self::uniform(layout, 1.0, 1.0)
    }

    /// The same for all layers and heads. (None at all for a layout that has too many of them for memory: no arena
    /// can be had for it either.)
    pub fn uniform(layout: &Layout, k: f32, v: f32) -> Self {
        let all = |scale: f32| {
            let mut scales = Vec::new();
            let n = layout.num_layers.saturating_mul(layout.num_kv_heads);
            if scales.try_reserve_exact(n).is_ok() {
                scales.resize(n, scale);
            }
            scales
        };
        Self { k: all(k), v: all(v) }
    }

    /// Check that there is one for each layer and head, that all are positive, finite, normal numbers, and that they
    /// are 1 unless the layout takes others.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] that names the scale.
    pub fn checked(self, layout: &Layout) -> Result<Self> {
        let takes_others = layout.dtype.is_fp8() && layout.scale_mode == super::ScaleMode::Static;
        for (name, scales) in [("k_scale", &self.k), ("v_scale", &self.v)] {
            let (layers, heads) = (layout.num_layers, layout.num_kv_heads);
            if Some(scales.len()) != layers.checked_mul(heads) {
                return Err(Error::InvalidArgument(format!(
                    "{name}: expected {layers} layers x {heads} KV heads, got {} scales",
                    scales.len()
                )));
            }
            for (i, &scale) in scales.iter().enumerate() {
                check_scale(name, scale.into())?;
                if scale != 1.0 && !takes_others {
                    return Err(Error::InvalidArgument(format!(
                        "{name}: {} with {} scales takes none but 1, got {scale} for layer {}, head {}",
                        layout.dtype,
                        layout.scale_mode,
                        i / heads,
                        i % heads
                    )));
                }
            }
        }
        Ok(self)
    }
}

/// Check that a scale and its inverse are positive, finite, normal float32 numbers; the scale as one.
///
/// # Errors
/// [`Error::InvalidArgument`] that names it.
pub fn check_scale(name: &str, scale: f64) -> Result<f32> {
    let narrow = scale as f32;
    // The quotient must be finite as well, which a subnormal scale would not give.
    if narrow.is_normal() && narrow > 0.0 && (1.0 / narrow).is_normal() {
        return Ok(narrow);
    }
    Err(Error::InvalidArgument(format!(
        "{name}: expected a number from 1.18e-38 to 8.5e37 (it and its inverse are normal float32 numbers), got {scale:?}"
    )))
}
