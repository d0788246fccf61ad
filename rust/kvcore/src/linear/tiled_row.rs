//! One row of bf16 weights by vectors, with the bits that tile registers give.
//!
//! ```text
//! for each group of 32 outputs: for each step of 32 inputs:
//!   even, odd = 0, 0
//!   for each pair of inputs:  even += weights * (the row's even one, 0);  odd += weights * (0, its odd one)
//!   sums += even + odd
//! where a sum is zero, infinite or no number: the group by tiles
//! ```
//! One row takes as long as reading the weights does, and vectors keep more reads under way than tiles do; from two rows on twice
//! as many products take longer than that (docs/performance.md).
//! Products of pairs and of tiles take what is below the least normal number for zero, so sums between them are made to. The
//! other half of a pair adds a zero; that changes nothing but signs of zeros and, times a weight that is infinite, all.
#![forbid(unsafe_code)]

use super::ahead::next_page;
use super::pack::{GROUP, GROUP_OUTPUTS};
use super::product::{Task, Weights, finish};
use super::tiled;
use crate::simd::{Dot, Format, LANES, Simd, TILE_WORDS};

/// The first of a pair of factors, and the second, each as a pair.
const EVEN: u32 = 0xffff;
const ODD: u32 = 0xffff << 16;

/// A step of the format's weights.
type Raw<F> = <F as Weights>::Raw;

/// Multiply a task's one row with its columns.
#[inline(always)]
pub(super) fn run<S: Simd, F: Dot<Raw: Send + Sync>>(s: S, tiles: S::Tiles, mut task: Task<'_, F, u32>) {
    let coefs = &task.coefs[..task.steps];
    for group in 0..task.weights.len() / task.steps {
        let sums = multiply::<S, F>(s, &task.weights[group * task.steps..][..task.steps], coefs);
        let column = group * GROUP_OUTPUTS;
        let outputs = GROUP_OUTPUTS.min(task.out[0].len() - column);
        if !are_settled(s, &sums, outputs) {
            tiled::run(s, tiles, only(&mut task, group, outputs));
            continue;
        }
        for (panel, sum) in sums.into_iter().enumerate() {
            finish(s, sum, task.bias, column + panel * LANES, task.add, task.out[0]);
        }
    }
}

/// One group of a task, as a task.
fn only<'t, F: Weights>(task: &'t mut Task<'_, F, u32>, group: usize, outputs: usize) -> Task<'t, F, u32> {
    let columns = group * GROUP_OUTPUTS..group * GROUP_OUTPUTS + outputs;
    Task {
        weights: &task.weights[group * task.steps..][..task.steps],
        bias: task.bias.map(|bias| &bias[columns.clone()]),
        steps: task.steps,
        stride: task.stride,
        coefs: task.coefs,
        out: task.out.iter_mut().map(|out| &mut out[columns.clone()]).collect(),
        add: task.add,
    }
}

/// Whether all sums of so many outputs are numbers whose bits do not depend on how zeros were added.
#[inline(always)]
fn are_settled<S: Simd>(s: S, sums: &[S::F32; GROUP], outputs: usize) -> bool {
    let mut lanes = [[0.0; LANES]; GROUP];
    for (sum, lanes) in sums.iter().zip(&mut lanes) {
        s.store(*sum, lanes);
    }
    lanes.as_flattened()[..outputs].iter().all(|x| *x != 0.0 && x.is_finite())
}

#[inline(always)]
fn multiply<S: Simd, F: Dot<Raw: Send + Sync>>(s: S, weights: &[[Raw<F>; GROUP]], coefs: &[u32]) -> [S::F32; GROUP] {
    let zero = F::load(s, &bytemuck::Zeroable::zeroed());
    let mut sums = [s.splat(0.0); GROUP];
    for (weights, coefs) in weights.chunks(TILE_WORDS).zip(coefs.chunks(TILE_WORDS)) {
        let (mut even, mut odd) = ([s.splat(0.0); GROUP], [s.splat(0.0); GROUP]);
        for (weights, coef) in weights.iter().zip(coefs) {
            next_page(s, weights);
            for g in 0..GROUP {
                let loaded = F::load(s, &weights[g]);
                even[g] = dot::<S, F>(s, even[g], loaded, coef & EVEN);
                odd[g] = dot::<S, F>(s, odd[g], loaded, coef & ODD);
            }
        }
        for g in 0..GROUP {
            let step = dot::<S, F>(s, s.add(even[g], odd[g]), zero, 0);
            sums[g] = dot::<S, F>(s, s.add(sums[g], step), zero, 0);
        }
    }
    sums
}

/// Add the products with a pair of bf16 factors: as they are, where there are tile registers.
#[inline(always)]
fn dot<S: Simd, F: Dot>(s: S, sum: S::F32, x: F::Loaded<S>, pair: u32) -> S::F32 {
    F::dot(s, sum, x, &bytemuck::cast::<u32, <F as Format>::Coef<S>>(pair))
}
