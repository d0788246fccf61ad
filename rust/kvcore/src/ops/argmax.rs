//! The largest of a row: greedy token selection.
#![forbid(unsafe_code)]

use crate::simd::{LANES, Level, Simd, Work};
use crate::{Error, Result};

/// The index of the largest value; of equal ones the lowest.
///
/// # Errors
/// [`Error::InvalidArgument`] for an empty row, or one with a NaN (its index is named).
pub fn argmax(level: Level, row: &[f32]) -> Result<usize> {
    if row.is_empty() {
        return Err(Error::InvalidArgument("argmax: expected at least one value, got none".into()));
    }
    let (max, has_nan) = level.dispatch(Largest(row));
    if has_nan {
        let at = row.iter().position(|x| x.is_nan()).unwrap_or(0);
        return Err(Error::InvalidArgument(format!("argmax: expected numbers, got NaN at index {at}")));
    }
    // Whole chunks are compared at once; only the one with the largest value is looked into.
    let chunk = row.chunks(LANES).position(|chunk| chunk.iter().fold(false, |found, &x| found | (x == max)));
    let start = chunk.unwrap_or(0) * LANES;
    Ok(start + row[start..].iter().position(|&x| x == max).unwrap_or(0))
}

/// The largest value, and whether there is a NaN (the value then means nothing).
struct Largest<'a>(&'a [f32]);

impl<S: Simd> Work<S> for Largest<'_> {
    type Output = (f32, bool);

    #[inline(always)]
    fn run(self, s: S) -> (f32, bool) {
        let (chunks, rest) = self.0.as_chunks::<LANES>();
        let mut max = s.splat(f32::NEG_INFINITY);
        let mut nan = [0u32; LANES];
        for x in chunks {
            max = s.max(max, s.load(x));
            for (nan, x) in nan.iter_mut().zip(x) {
                *nan |= u32::from(x.is_nan());
            }
        }
        let mut lanes = [f32::NEG_INFINITY; LANES];
        lanes[..rest.len()].copy_from_slice(rest);
        let has_nan = nan.iter().any(|&n| n != 0) || rest.iter().any(|x| x.is_nan());
        (s.reduce_max(s.max(max, s.load(&lanes))), has_nan)
    }
}
