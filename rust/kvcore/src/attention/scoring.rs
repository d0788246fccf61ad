//! How scores become softmax weights.
//!
//! ```text
//! s = q . k * scale
//! s = cap * tanh(s / cap)                 softcap: before the bias, and before the mask
//! s = s + bias(q head, token - position)
//! weight = exp(s) / (sum of exp(s) + exp(sink of the q head))
//! ```
//! Softcap is that of Gemma 2 (Gemma Team, 2024), sinks are the learned logits of gpt-oss (OpenAI, 2025) and, as the
//! "off-by-one" softmax, of Miller (2023); the biases are those of ALiBi (Press et al., 2022) and T5 (Raffel et al., 2020).
#![forbid(unsafe_code)]

use crate::{Error, Result};

/// The largest number that scores are given: it stays finite in base 2.
const LARGEST: f32 = 2e38;

/// The largest slope: times any distance between positions of 32 bits it stays below [`LARGEST`].
const STEEPEST: f32 = 1e28;

/// What is added to the scores of a query head, by the token's distance from the query.
#[derive(Clone, Copy, Debug, Default)]
pub enum Bias<'a> {
    /// Nothing.
    #[default]
    None,
    /// ALiBi: `slope * (token - position)`, a slope for each query head.
    Alibi(&'a [f32]),
    /// A table for each query head: `table[head][clamp(token - position, -before, after) + before]`, `before + 1 + after`
    /// values wide.
    Relative {
        /// `[q heads, before + 1 + after]`
        table: &'a [f32],
        /// Distances behind the query that have values of their own.
        before: usize,
    },
}

/// How scores become weights, in all rows of a call.
#[derive(Clone, Copy, Debug)]
pub struct Scoring<'a> {
    /// Multiplies the scores.
    pub scale: f32,
    /// Scores are bent to stay within plus and minus this.
    pub softcap: Option<f32>,
    /// Added to the scores.
    pub bias: Bias<'a>,
    /// One logit for each query head that takes part in the softmax's sum and gives nothing to the result.
    pub sinks: Option<&'a [f32]>,
}

impl Scoring<'static> {
    /// The plain softmax of scores times `scale`.
    pub fn plain(scale: f32) -> Self {
        Self { scale, softcap: None, bias: Bias::None, sinks: None }
    }
}

/// A query's own bias.
#[derive(Clone, Copy, Debug)]
pub enum HeadBias<'a> {
    /// Nothing.
    None,
    /// `slope * (token - position)`
    Slope(f32),
    /// `row[clamp(token - position, -before, ..) + before]`
    Row {
        /// The head's values.
        row: &'a [f32],
        /// Distances behind the query.
        before: usize,
    },
}

impl<'a> Scoring<'a> {
    /// Whether there is nothing but the scale.
    pub fn is_plain(&self) -> bool {
        self.only_scales() && self.sinks.is_none()
    }

    /// Whether nothing but the scale is done to scores; sinks come into the sum afterwards.
    pub(super) fn only_scales(&self) -> bool {
        self.softcap.is_none() && matches!(self.bias, Bias::None)
    }

    /// # Errors
    /// [`Error::InvalidArgument`] for numbers that are not finite or of the wrong count.
    pub(super) fn check(&self, num_q_heads: usize) -> Result<()> {
        let wrong = |text: String| Err(Error::InvalidArgument(text));
        if !self.scale.is_finite() || self.scale.abs() > LARGEST {
            return wrong(format!("scale: expected a finite number up to {LARGEST:e}, got {:?}", self.scale));
        }
        if let Some(cap) = self.softcap
            && !(f32::MIN_POSITIVE..=LARGEST).contains(&cap)
        {
            let least = f32::MIN_POSITIVE;
            return wrong(format!(
                "softcap: expected a finite number above 0, from {least:e} to {LARGEST:e}, got {cap:?}"
            ));
        }
        // Scores are scaled to the cap before they are bent: 0 times infinity would be no number.
        if let Some(cap) = self.softcap
            && !(self.scale / cap).is_finite()
        {
            return wrong(format!(
                "softcap: expected scale / softcap to be a finite float32, got {} / {cap}",
                self.scale
            ));
        }
        let per_head = |name: &str, values: &[f32]| match values.len() == num_q_heads {
            true => Ok(()),
            false => wrong(format!("{name}: expected one for each of {num_q_heads} q heads, got {}", values.len())),
        };
        let numbers = |name: &str, values: &[f32], most: f32| match values.iter().find(|x| x.is_nan() || x.abs() > most)
        {
            None => Ok(()),
            Some(x) => wrong(format!("{name}: expected finite numbers from -{most:e} to {most:e}, got {x:?}")),
        };
        if let Some(sinks) = self.sinks {
            per_head("sinks", sinks)?;
            // A head without a sink is one whose logit is minus infinity.
            if let Some(x) = sinks.iter().find(|x| x.is_nan() || **x > LARGEST) {
                return wrong(format!("sinks: expected numbers up to {LARGEST:e}, got {x:?}"));
            }
        }
        match self.bias {
            Bias::None => Ok(()),
            Bias::Alibi(slopes) => {
                per_head("alibi_slopes", slopes).and_then(|()| numbers("alibi_slopes", slopes, STEEPEST))
            }
            Bias::Relative { table, before } => {
                let width = table.len() / num_q_heads;
                if width * num_q_heads != table.len() || width <= before {
                    return wrong(format!(
                        "position_bias: expected {num_q_heads} q heads x more than {before} distances, got {} values",
                        table.len()
                    ));
                }
                numbers("position_bias", table, LARGEST)
            }
        }
    }

    /// The bias of a query head.
    pub(super) fn bias_of(&self, q_head: usize, num_q_heads: usize) -> HeadBias<'a> {
        match self.bias {
            Bias::None => HeadBias::None,
            Bias::Alibi(slopes) => HeadBias::Slope(slopes[q_head]),
            Bias::Relative { table, before } => {
                let width = table.len() / num_q_heads;
                HeadBias::Row { row: &table[q_head * width..][..width], before }
            }
        }
    }
}

impl HeadBias<'_> {
    /// What is added for `token` in the row at `position`.
    #[inline(always)]
    pub fn at(&self, token: usize, position: usize) -> f32 {
        match *self {
            HeadBias::None => 0.0,
            // The distance as an integer: far positions are no f32. Those that are no i64 either are all the farthest.
            HeadBias::Slope(slope) => slope * (token as i64 - position.min(i64::MAX as usize) as i64) as f32,
            HeadBias::Row { row, before } => row[(token + before).saturating_sub(position).min(row.len() - 1)],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_ends_at_both_sides() {
        let row = [-3.0, -2.0, -1.0, 0.0, 10.0];
        let bias = HeadBias::Row { row: &row, before: 3 };
        let at = |token| bias.at(token, 100);
        assert_eq!([90, 97, 98, 100, 101, 200].map(at), [-3.0, -3.0, -2.0, 0.0, 10.0, 10.0]);
        assert_eq!(HeadBias::Slope(0.5).at(97, 100), -1.5);
        assert_eq!(HeadBias::Slope(1.0).at(1 << 25, (1 << 25) + 1), -1.0);
        assert_eq!(HeadBias::Slope(0.5).at(0, 1 << 63), -((1u64 << 62) as f32));
        assert_eq!(HeadBias::Slope(1.0).at(3, usize::MAX), -((1u64 << 63) as f32));
    }

    #[test]
    fn what_does_not_fit_is_an_error() {
        let plain = Scoring::plain(1.0);
        assert!(plain.check(4).is_ok());
        for bad in [
            Scoring { scale: f32::NAN, ..plain },
            Scoring { softcap: Some(0.0), ..plain },
            Scoring { softcap: Some(f32::INFINITY), ..plain },
            Scoring { softcap: Some(-1.0), ..plain },
            Scoring { softcap: Some(1e-40), ..plain },
            Scoring { softcap: Some(2.4e38), ..plain },
            Scoring { scale: -3e38, ..plain },
            Scoring { sinks: Some(&[0.0, 0.0, 2.4e38, 0.0]), ..plain },
            Scoring { bias: Bias::Alibi(&[1e37; 4]), ..plain },
            Scoring { bias: Bias::Relative { table: &[f32::MIN; 4], before: 0 }, ..plain },
            Scoring { softcap: Some(1e-30), scale: 1e30, ..plain },
            Scoring { sinks: Some(&[0.0; 3]), ..plain },
            Scoring { sinks: Some(&[0.0, 0.0, 0.0, f32::NAN]), ..plain },
            Scoring { bias: Bias::Alibi(&[1.0]), ..plain },
            Scoring { bias: Bias::Alibi(&[1.0, 1.0, f32::INFINITY, 1.0]), ..plain },
            Scoring { bias: Bias::Relative { table: &[0.0; 6], before: 0 }, ..plain },
            Scoring { bias: Bias::Relative { table: &[0.0; 8], before: 2 }, ..plain },
        ] {
            assert!(bad.check(4).is_err(), "{bad:?}");
        }
        let sinks = [f32::NEG_INFINITY; 4];
        assert!(Scoring { sinks: Some(&sinks), ..plain }.check(4).is_ok());
        assert!(Scoring { bias: Bias::Relative { table: &[0.0; 12], before: 2 }, ..plain }.check(4).is_ok());
    }
}
