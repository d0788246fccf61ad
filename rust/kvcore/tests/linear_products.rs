//! Linear layers against naive f64 sums, and law 1: an output's bits depend on its own row and weights alone.

mod cases;

use cases::cases;
use half::{bf16, f16};
use kvcore::Error;
use kvcore::linear::{Linear, WeightDtype, WeightsIn, activated_linear_add, norm_linear, per_head};
use kvcore::ops::{Activation, Norm, activate, normalize};
use kvcore::simd::Level;
use kvcore::threads::{NEVER, Threads};
use proptest::prelude::*;

const DTYPES: [WeightDtype; 3] = [WeightDtype::F32, WeightDtype::Bf16, WeightDtype::F16];

/// Numbers in [-1, 1) that look random and are the same in every run.
fn noise(seed: u64, n: usize) -> Vec<f32> {
    let mut state = (seed + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    std::iter::repeat_with(next).take(n).collect()
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

fn round(dtype: WeightDtype, x: f32) -> f32 {
    match dtype {
        WeightDtype::F32 => x,
        WeightDtype::Bf16 => bf16::from_f32(x).to_f32(),
        WeightDtype::F16 => f16::from_f32(x).to_f32(),
        _ => unreachable!("tests/linear_quantized.rs has these"),
    }
}

struct Case {
    rows: usize,
    inputs: usize,
    outputs: usize,
    weights: Vec<f32>,
    bias: Option<Vec<f32>>,
    x: Vec<f32>,
    residual: Vec<f32>,
}

impl Case {
    fn new(seed: u64, rows: usize, inputs: usize, outputs: usize, bias: bool) -> Self {
        Self {
            rows,
            inputs,
            outputs,
            weights: noise(seed, outputs * inputs),
            bias: bias.then(|| noise(seed + 1, outputs)),
            x: noise(seed + 2, rows * inputs),
            residual: noise(seed + 3, rows * outputs),
        }
    }

    fn pack(&self, level: Level, threads: &Threads, dtype: WeightDtype) -> Linear {
        let weights = WeightsIn::F32(&self.weights);
        Linear::pack(level, threads, weights, self.outputs, self.inputs, dtype, self.bias.as_deref()).unwrap()
    }

    fn run(&self, level: Level, threads: &Threads, dtype: WeightDtype, add: bool) -> Vec<f32> {
        let linear = self.pack(level, threads, dtype);
        // What `out` held before must not matter unless it is added to.
        let mut out = if add { self.residual.clone() } else { vec![f32::NAN; self.rows * self.outputs] };
        linear.forward(level, threads, &self.x, &mut out, add, NEVER).unwrap();
        out
    }

    /// One row on its own.
    fn run_row(&self, level: Level, threads: &Threads, linear: &Linear, row: usize, add: bool) -> Vec<f32> {
        let mut out = self.residual[row * self.outputs..][..self.outputs].to_vec();
        let x = &self.x[row * self.inputs..][..self.inputs];
        linear.forward(level, threads, x, &mut out, add, NEVER).unwrap();
        out
    }

    fn check(&self, out: &[f32], dtype: WeightDtype, add: bool, what: &str) {
        let rounded = |x: f32| f64::from(if dtype == WeightDtype::Bf16 { round(dtype, x) } else { x });
        let x: Vec<f64> = self.x.iter().map(|&x| rounded(x)).collect();
        let weights: Vec<f64> = self.weights.iter().map(|&w| f64::from(round(dtype, w))).collect();
        for row in 0..self.rows {
            for output in 0..self.outputs {
                let at = row * self.outputs + output;
                let bias = self.bias.as_ref().map_or(0.0, |bias| f64::from(bias[output]));
                let residual = if add { f64::from(self.residual[at]) } else { 0.0 };
                let (x, w) = (&x[row * self.inputs..], &weights[output * self.inputs..][..self.inputs]);
                let products = w.iter().zip(x).map(|(w, x)| w * x);
                let (sum, size) = products
                    .fold((bias + residual, bias.abs() + residual.abs()), |(sum, size), p| (sum + p, size + p.abs()));
                // Rounding errors of n additions that go either way grow with the root of n.
                let bound = 3e-7 * (1.0 + (self.inputs as f64).sqrt() / 4.0) * size + 1e-30;
                let near = (f64::from(out[at]) - sum).abs() <= bound;
                assert!(near, "{what} {dtype:?} [{row}, {output}]: {} is not {sum}", out[at]);
            }
        }
    }
}

proptest! {
    #![proptest_config(cases(32))]

    #[test]
    fn products_are_near_the_exact_sums(
        seed in 0u64..1000, rows in 1usize..71, inputs in 1usize..150, outputs in 1usize..140, bias: bool, add: bool,
    ) {
        let case = Case::new(seed, rows, inputs, outputs, bias);
        let threads = Threads::new(Some(1)).unwrap();
        for level in Level::available() {
            for dtype in DTYPES {
                case.check(&case.run(level, &threads, dtype, add), dtype, add, level.name());
            }
        }
    }

    #[test]
    fn a_rows_bits_depend_on_that_row_alone(
        seed in 0u64..1000, rows in 1usize..71, inputs in 1usize..100, outputs in 1usize..100, bias: bool, add: bool,
    ) {
        let case = Case::new(seed, rows, inputs, outputs, bias);
        let threads = Threads::new(Some(1)).unwrap();
        for level in Level::available() {
            for dtype in DTYPES {
                let linear = case.pack(level, &threads, dtype);
                let together = case.run(level, &threads, dtype, add);
                for row in 0..rows {
                    let alone = case.run_row(level, &threads, &linear, row, add);
                    let got = &together[row * outputs..][..outputs];
                    prop_assert_eq!(bits(&alone), bits(got), "{} {:?} row {}", level.name(), dtype, row);
                }
            }
        }
    }
}

/// Values of all sizes about one at which products, or their sums, leave the range of floats; zeros, and seldom infinity.
fn extremes(seed: u64, n: usize, exponent: i32, infinities: bool) -> Vec<f32> {
    let sizes = noise(seed, n);
    let extreme = |(&x, &size): (&f32, &f32)| match (size * 1000.0) as i32 {
        999 if infinities => f32::INFINITY.copysign(x),
        -999..-850 => 0.0f32.copysign(x),
        _ => x * 2f32.powi(exponent + (size * 12.0) as i32),
    };
    noise(seed + 1, n).iter().zip(&sizes).map(extreme).collect()
}

proptest! {
    #![proptest_config(cases(64))]

    /// Products below the least float and above the largest: alone and beside others, a row is the same.
    #[test]
    fn rows_of_numbers_at_the_ends_of_the_range_depend_on_themselves_alone(
        seed in 0u64..1000,
        inputs in 1usize..150,
        // Of many outputs one is often zero or infinite, which changes how all of them are summed.
        outputs in prop_oneof![1usize..4, 1usize..70],
        (of_weights, of_rows) in prop::sample::select(vec![(-63, -63), (-75, -50), (-20, -110), (60, 60), (-100, 90), (0, 0)]),
        infinities: bool,
    ) {
        let rows = 3;
        let case = Case {
            weights: extremes(seed, outputs * inputs, of_weights, infinities),
            x: extremes(seed + 5, rows * inputs, of_rows, infinities),
            ..Case::new(seed, rows, inputs, outputs, false)
        };
        let threads = Threads::new(Some(1)).unwrap();
        for level in Level::available() {
            for dtype in [WeightDtype::F32, WeightDtype::Bf16] {
                let linear = case.pack(level, &threads, dtype);
                let together = case.run(level, &threads, dtype, false);
                for row in 0..rows {
                    let mut alone = vec![0.0; outputs];
                    linear.forward(level, &threads, &case.x[row * inputs..][..inputs], &mut alone, false, NEVER).unwrap();
                    for (alone, got) in alone.iter().zip(&together[row * outputs..]) {
                        let same = alone.to_bits() == got.to_bits() || alone.is_nan() && got.is_nan();
                        prop_assert!(same, "{} {dtype:?} row {row}: {alone:e} alone, {got:e} beside others", level.name());
                    }
                }
            }
        }
    }
}

/// One row in every slot of every batch size, among rows of NaN or infinity.
#[test]
fn a_row_is_the_same_in_every_slot_whatever_its_neighbours_hold() {
    let (inputs, outputs) = (35, 70);
    let case = Case::new(3, 1, inputs, outputs, true);
    let threads = Threads::new(Some(1)).unwrap();
    for level in Level::available() {
        for dtype in DTYPES {
            let linear = case.pack(level, &threads, dtype);
            let alone = case.run(level, &threads, dtype, false);
            for rows in 1..=70 {
                for slot in (0..rows).filter(|slot| rows <= 26 || slot % 7 == rows % 7) {
                    let mut x = vec![if slot % 2 == 0 { f32::NAN } else { f32::INFINITY }; rows * inputs];
                    x[slot * inputs..][..inputs].copy_from_slice(&case.x);
                    let mut out = vec![0.0; rows * outputs];
                    linear.forward(level, &threads, &x, &mut out, false, NEVER).unwrap();
                    let got = &out[slot * outputs..][..outputs];
                    assert_eq!(bits(got), bits(&alone), "{} {dtype:?} slot {slot} of {rows}", level.name());
                }
            }
        }
    }
}

/// Large enough for several tasks, row blocks and slices of the inputs.
#[test]
fn threads_and_cutting_change_no_bit() {
    let level = Level::best();
    for dtype in DTYPES {
        for (rows, inputs, outputs) in [(1, 9000, 200), (5, 5001, 333), (300, 2048, 96), (530, 130, 210)] {
            let case = Case::new(7, rows, inputs, outputs, true);
            let [one, two, five] = [1, 2, 5].map(|n| case.run(level, &Threads::new(Some(n)).unwrap(), dtype, true));
            assert_eq!(bits(&one), bits(&two), "{dtype:?} {rows} x {inputs} x {outputs}");
            assert_eq!(bits(&one), bits(&five), "{dtype:?} {rows} x {inputs} x {outputs}");
            let threads = Threads::new(Some(1)).unwrap();
            let linear = case.pack(level, &threads, dtype);
            for row in [0, rows / 3, rows - 1] {
                let alone = case.run_row(level, &threads, &linear, row, true);
                assert_eq!(bits(&alone), bits(&one[row * outputs..][..outputs]), "{dtype:?} row {row} of {rows}");
            }
        }
    }
}

/// Sums that are cut into slices of the inputs, on every level.
#[test]
fn long_sums_are_near_the_exact_ones() {
    let threads = Threads::new(Some(2)).unwrap();
    for (rows, inputs) in [(1, 9001), (14, 6001), (13, 1024), (4, 512)] {
        let case = Case::new(11, rows, inputs, 40, true);
        for level in Level::available() {
            for dtype in DTYPES {
                case.check(&case.run(level, &threads, dtype, false), dtype, false, level.name());
            }
        }
    }
}

/// A lane that leaks into another output, or padding that is not zero, would show as NaN.
#[test]
fn poison_beside_an_output_has_no_effect_on_it() {
    let threads = Threads::new(Some(1)).unwrap();
    for level in Level::available() {
        for dtype in DTYPES {
            for (inputs, outputs) in [(1, 2), (3, 15), (17, 17), (31, 33), (2, 65)] {
                let mut case = Case::new(5, 3, inputs, outputs, false);
                let before = case.run(level, &threads, dtype, false);
                case.x[2 * inputs..].fill(f32::INFINITY);
                case.weights[(outputs - 1) * inputs..].fill(f32::NAN);
                let after = case.run(level, &threads, dtype, false);
                for row in 0..2 {
                    let kept = row * outputs..(row + 1) * outputs - 1;
                    assert!(after[kept.end].is_nan());
                    assert_eq!(bits(&after[kept.clone()]), bits(&before[kept]), "{} {dtype:?}", level.name());
                }
            }
        }
    }
}

#[test]
fn weights_of_every_source_are_held_exactly_or_rounded_once() {
    let (inputs, outputs) = (45, 50);
    let threads = Threads::new(Some(2)).unwrap();
    let wide = noise(9, inputs * outputs);
    let f16s: Vec<u16> = wide.iter().map(|&x| f16::from_f32(x).to_bits()).collect();
    let bf16s: Vec<u16> = wide.iter().map(|&x| bf16::from_f32(x).to_bits()).collect();
    let sources = [
        (WeightsIn::F32(&wide), wide.clone()),
        (WeightsIn::F16(&f16s), f16s.iter().map(|&x| f16::from_bits(x).to_f32()).collect()),
        (WeightsIn::Bf16(&bf16s), bf16s.iter().map(|&x| bf16::from_bits(x).to_f32()).collect::<Vec<_>>()),
    ];
    for level in Level::available() {
        for dtype in DTYPES {
            for (source, values) in &sources {
                let linear = Linear::pack(level, &threads, *source, outputs, inputs, dtype, None).unwrap();
                // A row with a single one reads one column of the weights.
                for i in [0, 1, 15, 16, 31, 32, 43, 44] {
                    let mut x = vec![0.0; inputs];
                    x[i] = 1.0;
                    let mut out = vec![0.0; outputs];
                    linear.forward(level, &threads, &x, &mut out, false, NEVER).unwrap();
                    for (o, got) in out.iter().enumerate() {
                        assert_eq!(*got, round(dtype, values[o * inputs + i]), "{} {dtype:?} [{o}, {i}]", level.name());
                    }
                }
            }
        }
    }
}

#[test]
fn fused_steps_are_their_parts() {
    let (rows, inputs, outputs) = (5, 24, 40);
    let case = Case::new(21, rows, inputs, outputs, true);
    let threads = Threads::new(Some(2)).unwrap();
    let level = Level::best();
    let linear = case.pack(level, &threads, WeightDtype::Bf16);
    let (norm, gate_up) = (noise(1, inputs), noise(2, rows * 2 * inputs));

    let mut normed = vec![0.0; rows * inputs];
    normalize(level, &threads, &case.x, Norm::rms(&norm, 1e-5), &mut normed, NEVER).unwrap();
    let (mut parts, mut fused) = (vec![0.0; rows * outputs], vec![0.0; rows * outputs]);
    linear.forward(level, &threads, &normed, &mut parts, false, NEVER).unwrap();
    norm_linear(level, &threads, &linear, &case.x, Norm::rms(&norm, 1e-5), &mut fused, NEVER).unwrap();
    assert_eq!(bits(&fused), bits(&parts));

    let mut gated = vec![0.0; rows * inputs];
    activate(level, &threads, Activation::Silu, true, &gate_up, inputs, &mut gated, NEVER).unwrap();
    let (mut parts, mut fused) = (case.residual.clone(), case.residual.clone());
    linear.forward(level, &threads, &gated, &mut parts, true, NEVER).unwrap();
    activated_linear_add(level, &threads, &linear, Activation::Silu, true, &gate_up, &mut fused, NEVER).unwrap();
    assert_eq!(bits(&fused), bits(&parts));
}

#[test]
fn bad_arguments_are_errors_that_say_what_came() {
    let threads = Threads::new(Some(1)).unwrap();
    let level = Level::best();
    let pack = |n: usize, outputs, inputs, bias: Option<&[f32]>| {
        Linear::pack(level, &threads, WeightsIn::F32(&vec![0.0; n]), outputs, inputs, WeightDtype::F32, bias)
    };
    let message = |result: Result<Linear, Error>| match result {
        Err(Error::InvalidArgument(message)) => message,
        other => panic!("{other:?}"),
    };
    assert!(message(pack(5, 2, 3, None)).contains("expected 6 values (shape [2, 3]), got 5"));
    assert!(message(pack(6, 2, 3, Some(&[0.0]))).contains("bias: expected 2"));
    message(pack(0, 0, 3, None));
    message(pack(0, 3, 0, None));
    message(pack(6, usize::MAX, 2, None));
    message(pack(0, 1 << 40, 1 << 24, None));

    let linear = pack(6, 2, 3, None).unwrap();
    let run = |x: usize, out: usize| linear.forward(level, &threads, &vec![0.0; x], &mut vec![0.0; out], false, NEVER);
    assert!(matches!(run(4, 2), Err(Error::InvalidArgument(_))));
    assert!(matches!(run(6, 3), Err(Error::InvalidArgument(_))));
    assert_eq!(run(0, 0), Ok(()));
    assert_eq!(run(6, 4), Ok(()));
    let stopped = linear.forward(level, &threads, &[0.0; 3], &mut [0.0; 2], false, &|| true);
    assert_eq!(stopped, Err(Error::Interrupted));
    let (x, mut out) = ([0.0; 3], [0.0; 2]);
    let norm = norm_linear(level, &threads, &linear, &x, Norm::rms(&[1.0; 2], 1e-5), &mut out, NEVER);
    assert!(matches!(norm, Err(Error::InvalidArgument(_))));
    let gated = activated_linear_add(level, &threads, &linear, Activation::Silu, true, &x, &mut out, NEVER);
    assert!(matches!(gated, Err(Error::InvalidArgument(_))));
}

#[test]
fn heads_are_layers_of_their_own() {
    let (rows, heads, inputs, outputs) = (5, 3, 7, 9);
    let threads = Threads::new(Some(2)).unwrap();
    for level in Level::available() {
        let pack = |seed| {
            let weights = noise(seed, inputs * outputs);
            Linear::pack(level, &threads, WeightsIn::F32(&weights), outputs, inputs, WeightDtype::F32, None).unwrap()
        };
        let layers: Vec<_> = (0..heads as u64).map(pack).collect();
        let layers: Vec<_> = layers.iter().collect();
        let x = noise(9, rows * heads * inputs);
        let mut out = vec![f32::NAN; rows * heads * outputs];
        per_head(level, &threads, &layers, &x, &mut out, NEVER).unwrap();
        for row in 0..rows {
            for head in 0..heads {
                let at = row * heads + head;
                let mut one = vec![0.0; outputs];
                layers[head].forward(level, &threads, &x[at * inputs..][..inputs], &mut one, false, NEVER).unwrap();
                assert_eq!(bits(&one), bits(&out[at * outputs..][..outputs]));
            }
        }
        let short = per_head(level, &threads, &layers, &x[1..], &mut out, NEVER);
        assert!(matches!(short, Err(Error::InvalidArgument(_))));
        assert!(matches!(per_head(level, &threads, &[], &x, &mut out, NEVER), Err(Error::InvalidArgument(_))));
    }
}

#[test]
fn rows_are_the_weights_as_they_are_held() {
    let threads = Threads::new(Some(2)).unwrap();
    for (outputs, inputs) in [(1, 1), (33, 7), (70, 64), (96, 35)] {
        let case = Case::new(3, 1, inputs, outputs, true);
        for dtype in DTYPES {
            for level in Level::available() {
                let linear = case.pack(level, &threads, dtype);
                let ids: Vec<u32> = (0..outputs as u32).rev().chain([0, 0]).collect();
                let mut rows = vec![f32::NAN; ids.len() * inputs];
                linear.rows(&threads, &ids, &mut rows, NEVER).unwrap();
                let held = ids.iter().flat_map(|&id| &case.weights[id as usize * inputs..][..inputs]);
                let held: Vec<f32> = held.map(|x| round(dtype, *x)).collect();
                assert_eq!(bits(&rows), bits(&held), "{} {dtype:?} {outputs} x {inputs}", level.name());
            }
        }
    }
}

#[test]
fn rows_that_are_not_there_are_refused() {
    let threads = Threads::new(Some(1)).unwrap();
    let linear = Case::new(3, 1, 8, 20, false).pack(Level::best(), &threads, WeightDtype::F32);
    let refused = |ids: &[u32], len: usize| {
        let mut out = vec![7.0; len];
        let error = linear.rows(&threads, ids, &mut out, NEVER).unwrap_err();
        assert!(out.iter().all(|x| *x == 7.0));
        matches!(error, Error::InvalidArgument(_))
    };
    // 20 to 31 are padding.
    assert!(refused(&[0, 20], 16) && refused(&[u32::MAX], 8));
    assert!(refused(&[0, 1], 15) && refused(&[], 8));
    linear.rows(&threads, &[], &mut [], NEVER).unwrap();
}
