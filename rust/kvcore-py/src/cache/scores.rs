//! Arguments of attention: queries, and how scores become weights.
#![forbid(unsafe_code)]

use kvcore::attention::Bias;
use kvcore::cache::AttendOptions;
use numpy::{PyReadonlyArrayDyn, PyUntypedArray, PyUntypedArrayMethods};
use pyo3::prelude::*;

use crate::arrays::{Size, floats};
use crate::error::invalid;

/// The most rows or heads that one call shows the weights of.
const MAX_CHOSEN: usize = 1 << 20;

/// `[num_tokens, q heads, k_dim]`, and the number of query heads.
pub fn queries<'py>(
    q: &Bound<'py, PyAny>,
    num_tokens: usize,
    k_dim: usize,
) -> PyResult<(PyReadonlyArrayDyn<'py, f32>, usize)> {
    let heads = match q.cast::<PyUntypedArray>() {
        Ok(array) if array.ndim() == 3 => array.shape()[1],
        _ => 0,
    };
    Ok((floats("q", q, &[Some(num_tokens), None, Some(k_dim)])?, heads))
}

/// Indices, or none for all.
pub fn chosen(name: &str, value: Option<&Bound<'_, PyAny>>) -> PyResult<Option<Vec<usize>>> {
    let Some(value) = value else { return Ok(None) };
    let mut indices = Vec::new();
    for index in value.try_iter()? {
        if indices.len() == MAX_CHOSEN {
            return Err(invalid(format!("{name}: expected at most {MAX_CHOSEN} indices, got more")));
        }
        indices.push(index?.extract::<Size<'_>>()?.get(name)?);
    }
    Ok(Some(indices))
}

/// What was said of the scores, with the arrays that it is borrowed from.
pub struct ScoreArrays<'py> {
    scale: Option<f32>,
    window: Option<usize>,
    softcap: Option<f32>,
    sinks: Option<PyReadonlyArrayDyn<'py, f32>>,
    alibi_slopes: Option<PyReadonlyArrayDyn<'py, f32>>,
    position_bias: Option<PyReadonlyArrayDyn<'py, f32>>,
    bias_ahead: usize,
}

/// What a call says of how scores become weights; arrays not looked at yet.
pub struct ScoreArguments<'a, 'py> {
    pub scale: Option<f32>,
    pub window: Option<Size<'py>>,
    pub softcap: Option<f32>,
    pub sinks: Option<&'a Bound<'py, PyAny>>,
    pub alibi_slopes: Option<&'a Bound<'py, PyAny>>,
    pub position_bias: Option<&'a Bound<'py, PyAny>>,
    pub bias_ahead: Option<Size<'py>>,
}

impl<'py> ScoreArrays<'py> {
    /// Arrays of one number for each of `heads` query heads; `position_bias` of some for each, and how many of these are
    /// for tokens ahead of the query.
    pub fn new(heads: usize, given: ScoreArguments<'_, 'py>) -> PyResult<Self> {
        let ScoreArguments { scale, window, softcap, sinks, alibi_slopes, position_bias, bias_ahead } = given;
        if alibi_slopes.is_some() && position_bias.is_some() {
            return Err(invalid("position_bias: expected None beside alibi_slopes, got an array".into()));
        }
        if position_bias.is_none() && bias_ahead.is_some() {
            return Err(invalid("bias_ahead: expected None without a position_bias, got a number".into()));
        }
        let per_head = |name: &str, value: Option<&Bound<'py, PyAny>>| {
            value.map(|value| floats(name, value, &[Some(heads)])).transpose()
        };
        Ok(Self {
            scale,
            window: window.map(|window| window.get("window")).transpose()?,
            softcap,
            sinks: per_head("sinks", sinks)?,
            alibi_slopes: per_head("alibi_slopes", alibi_slopes)?,
            position_bias: position_bias.map(|b| floats("position_bias", b, &[Some(heads), None])).transpose()?,
            bias_ahead: bias_ahead.map_or(Ok(0), |ahead| ahead.get("bias_ahead"))?,
        })
    }

    /// As the core takes it.
    pub fn options(&self) -> PyResult<AttendOptions<'_>> {
        let bias = match (&self.alibi_slopes, &self.position_bias) {
            (Some(slopes), _) => Bias::Alibi(slopes.as_slice()?),
            (None, Some(bias)) => {
                let width = bias.shape()[1];
                if width == 0 {
                    return Err(invalid("position_bias: expected at least 1 distance, got 0".into()));
                }
                // Behind the value of the query's own token are those of the tokens ahead.
                let Some(before) = (width - 1).checked_sub(self.bias_ahead) else {
                    let most = width - 1;
                    return Err(invalid(format!("bias_ahead: expected at most {most}, got {}", self.bias_ahead)));
                };
                Bias::Relative { table: bias.as_slice()?, before }
            }
            (None, None) => Bias::None,
        };
        let sinks = self.sinks.as_ref().map(|sinks| sinks.as_slice()).transpose()?;
        Ok(AttendOptions { scale: self.scale, window: self.window, softcap: self.softcap, bias, sinks })
    }
}
