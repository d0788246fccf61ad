//! The two register tiles of attention: its scores and its mixes. (The linear layers have a tile of their own.)
//!
//! ```text
//! dot:  acc[m][b] = sum over i of panels[b][i] * coefs[i][m]            panels side by side, each read once
//! mix:  acc[m][d] += sum over i of rows[i * stride + d] * coefs[m][i]   rows below each other
//! ```
//! Each accumulator has 16 lanes, and each lane's sum runs over `i` in order, whatever M, B or D are: how work is
//! cut into tiles never changes a bit.
#![forbid(unsafe_code)]

use super::format::Dot;
use super::vector::Simd;

/// Sixteen products for each of `M` factors and `B` panels: `acc[m][b] = sum of panels[b][i] * coefs[i][m]`.
///
/// All panels must have at least `coefs.len()` steps. `ahead` is called once for
/// each cache line of a panel.
#[inline(always)]
pub fn dot<S: Simd, F: Dot, const M: usize, const B: usize>(
    s: S,
    panels: [&[F::Raw]; B],
    coefs: &[[F::Coef<S>; M]],
    mut ahead: impl FnMut(),
) -> [[S::F32; B]; M] {
    let steps = coefs.len();
    let mut panels = panels;
    for panel in &mut panels {
        *panel = &panel[..steps];
    }
    let mut acc = [[s.splat(0.0); B]; M];
    for i in (0..steps / 2).map(|i| 2 * i) {
        let mut loaded = [F::load_two(s, panels[0][i..].first_chunk().expect("two steps")); B];
        for b in 1..B {
            loaded[b] = F::load_two(s, panels[b][i..].first_chunk().expect("two steps"));
        }
        for half in 0..2 {
            if ((i + half) * size_of::<F::Raw>()).is_multiple_of(LINE) {
                ahead();
            }
            for m in 0..M {
                for b in 0..B {
                    acc[m][b] = F::dot(s, acc[m][b], loaded[b][half], &coefs[i + half][m]);
                }
            }
        }
    }
    if !steps.is_multiple_of(2) {
        let i = steps - 1;
        let mut loaded = [F::load(s, &panels[0][i]); B];
        for b in 1..B {
            loaded[b] = F::load(s, &panels[b][i]);
        }
        if (i * size_of::<F::Raw>()).is_multiple_of(LINE) {
            ahead();
        }
        for m in 0..M {
            for b in 0..B {
                acc[m][b] = F::dot(s, acc[m][b], loaded[b], &coefs[i][m]);
            }
        }
    }
    acc
}

/// `acc[m][d] += sum of rows[i * stride + d] * coefs[m][i]` over the steps `from..to`, `rows` beginning at `from`.
/// With `half_first`, of the first step only the last value of each pair counts, with `half_last`, of the last step
/// only the first (an odd number of tokens: what lies beside them may be anything); never both of one step. `ahead` is
/// called at each step.
#[inline(always)]
#[allow(clippy::too_many_arguments)] // A register tile is its arguments; a struct would only rename them.
pub fn mix<S: Simd, F: Dot, const M: usize, const D: usize, const N: usize>(
    s: S,
    acc: &mut [[S::F32; D]; M],
    rows: &[F::Raw],
    stride: usize,
    coefs: &[[F::Coef<S>; N]; M],
    mut ahead: impl FnMut(),
    from: usize,
    to: usize,
    (half_first, half_last): (bool, bool),
) {
    assert!(to <= N);
    let whole = from + usize::from(half_first)..to - usize::from(half_last);
    for i in from..to {
        let row = &rows[(i - from) * stride..][..D];
        let mut loaded = [F::load(s, &row[0]); D];
        if D.is_multiple_of(2) {
            for d in 0..D / 2 {
                [loaded[2 * d], loaded[2 * d + 1]] = F::load_two(s, row[2 * d..].first_chunk().expect("two steps"));
            }
        } else {
            for d in 1..D {
                loaded[d] = F::load(s, &row[d]);
            }
        }
        ahead();
        if !whole.contains(&i) {
            for x in &mut loaded {
                *x = if i < whole.start { F::last(s, *x) } else { F::first(s, *x) };
            }
        }
        for m in 0..M {
            for d in 0..D {
                acc[m][d] = F::dot(s, acc[m][d], loaded[d], &coefs[m][i]);
            }
        }
    }
}

/// Bytes of a cache line.
pub const LINE: usize = 64;
