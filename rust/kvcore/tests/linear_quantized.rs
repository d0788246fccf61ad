//! Linear layers of 8 and 4 bits: GGUF's blocks against their own formulas, what rounding may cost, and law 1.

mod cases;

use cases::cases;
use half::f16;
use kvcore::Error;
use kvcore::linear::{Blocks, Linear, WeightDtype, WeightsIn};
use kvcore::simd::Level;
use kvcore::threads::{NEVER, Threads};
use proptest::prelude::*;

const BITS: [WeightDtype; 2] = [WeightDtype::Int8, WeightDtype::Int4];

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

fn forward(linear: &Linear, level: Level, threads: &Threads, x: &[f32], add: bool) -> Vec<f32> {
    let mut out = vec![if add { 0.5 } else { f32::NAN }; x.len() / linear.inputs() * linear.outputs()];
    linear.forward(level, threads, x, &mut out, add, NEVER).unwrap();
    out
}

/// The weights of a layer, read by rows that have one value each: 127 / 127, so that nothing of the row is rounded.
fn weights_of(linear: &Linear, level: Level, threads: &Threads) -> Vec<Vec<f64>> {
    let mut x = vec![0.0; linear.inputs() * linear.inputs()];
    for i in 0..linear.inputs() {
        x[i * linear.inputs() + i] = 127.0;
    }
    let out = forward(linear, level, threads, &x, false);
    let weight = |output, input: usize| f64::from(out[input * linear.outputs() + output]) / 127.0;
    (0..linear.outputs()).map(|o| (0..linear.inputs()).map(|i| weight(o, i)).collect()).collect()
}

/// A row as it is multiplied, by the documented rule.
fn rounded(x: &[f32]) -> Vec<f64> {
    let group = |x: &[f32]| {
        let largest = x.iter().fold(0.0f32, |largest, x| largest.max(x.abs()));
        let (scale, inverse) = (largest / 127.0, if largest > 0.0 { 127.0 / largest } else { 0.0 });
        x.iter().map(|x| f64::from((x * inverse).round_ties_even()) * f64::from(scale)).collect::<Vec<_>>()
    };
    x.chunks(32).flat_map(group).collect()
}

/// Blocks of GGUF with random codes, and what they stand for.
fn blocks(kind: Blocks, seed: u64, count: usize) -> (Vec<u8>, Vec<f64>) {
    let (mut bytes, mut values) = (Vec::new(), Vec::new());
    for b in 0..count {
        let numbers = noise(seed + b as u64, 280);
        let (d, m) = (f16::from_f32(numbers[0] / 8.0), f16::from_f32(numbers[1]));
        let codes: Vec<u8> = numbers[2..].iter().map(|x| ((x + 1.0) * 127.99) as u8).collect();
        let (wide, minimum) = (f64::from(d.to_f32()), f64::from(m.to_f32()));
        let (nibble, halves) = (|i: usize| codes[i] & 15, |i: usize| codes[i] & 15 | (codes[i + 16] & 15) << 4);
        bytes.extend(d.to_le_bytes());
        match kind {
            Blocks::Q8_0 => {
                bytes.extend(&codes[..32]);
                values.extend(codes[..32].iter().map(|&code| f64::from(code as i8) * wide));
            }
            Blocks::Q4_0 => {
                bytes.extend((0..16).map(halves));
                values.extend((0..32).map(|i| (f64::from(nibble(i)) - 8.0) * wide));
            }
            Blocks::Q4_1 => {
                bytes.extend(m.to_le_bytes());
                bytes.extend((0..16).map(halves));
                values.extend((0..32).map(|i| f64::from(nibble(i)) * wide + minimum));
            }
            Blocks::Q5_0 => {
                let fifth = (0..32).fold(0u32, |bits, i| bits | u32::from(codes[i] >> 7) << i);
                bytes.extend(fifth.to_le_bytes());
                bytes.extend((0..16).map(halves));
                let code = |i: usize| f64::from(nibble(i)) + if codes[i] >= 128 { 16.0 } else { 0.0 };
                values.extend((0..32).map(|i| (code(i) - 16.0) * wide));
            }
            Blocks::Q4_K => {
                let (s, t): (Vec<u8>, Vec<u8>) = (0..8).map(|g| (codes[256 + g] & 63, codes[264 + g] & 63)).unzip();
                bytes.extend(m.to_le_bytes());
                bytes.extend((0..4).map(|g| s[g] | s[g + 4] >> 4 << 6));
                bytes.extend((0..4).map(|g| t[g] | t[g + 4] >> 4 << 6));
                bytes.extend((4..8).map(|g| s[g] & 15 | (t[g] & 15) << 4));
                for pair in codes[..256].chunks(64) {
                    bytes.extend((0..32).map(|i| pair[i] & 15 | (pair[i + 32] & 15) << 4));
                }
                let held = |x: f64| f64::from(f16::from_f64(x).to_f32());
                values.extend((0..256).map(|i| {
                    f64::from(nibble(i)) * held(wide * f64::from(s[i / 32])) - held(minimum * f64::from(t[i / 32]))
                }));
            }
        }
    }
    (bytes, values)
}

proptest! {
    #![proptest_config(cases(24))]

    #[test]
    fn blocks_are_multiplied_as_they_are(
        seed in 0u64..1000, rows in 1usize..20, groups in 1usize..5, outputs in 1usize..70, kind in 0usize..5, add: bool,
    ) {
        let kind = Blocks::ALL[kind];
        let inputs = kind.weights() * groups;
        let (bytes, weights) = blocks(kind, seed, outputs * groups);
        let (source, dtype) = (WeightsIn::Blocks(kind, &bytes), kind.dtype());
        let bias = noise(seed + 1, outputs);
        let x = noise(seed + 2, rows * inputs);
        let threads = Threads::new(Some(1)).unwrap();
        for level in Level::available() {
            let linear = Linear::pack(level, &threads, source, outputs, inputs, dtype, Some(&bias)).unwrap();
            let out = forward(&linear, level, &threads, &x, add);
            for (row, x) in x.chunks(inputs).enumerate() {
                let x = rounded(x);
                for output in 0..outputs {
                    let products = weights[output * inputs..][..inputs].iter().zip(&x).map(|(w, x)| w * x);
                    let own = f64::from(bias[output]) + if add { 0.5 } else { 0.0 };
                    let sum = products.clone().sum::<f64>() + own;
                    // Sums of codes and of minima, many times as large as the weights, cancel in float32.
                    let size = products.map(f64::abs).sum::<f64>() * 20.0 + 2.0;
                    let got = f64::from(out[row * outputs + output]);
                    prop_assert!((got - sum).abs() <= 5e-7 * size, "{} {kind:?}: {got} is not {sum}", level.name());
                }
            }
        }
    }

    #[test]
    fn weights_are_rounded_to_the_nearest_code(
        seed in 0u64..1000, inputs in 1usize..70, outputs in 1usize..40, magnitude in -12i32..6, shift in -2i32..3,
    ) {
        let scale = 2.0f32.powi(magnitude);
        let weights: Vec<f32> = noise(seed, outputs * inputs).iter().map(|x| (x + shift as f32) * scale).collect();
        let threads = Threads::new(Some(1)).unwrap();
        let level = Level::best();
        for dtype in BITS {
            let linear = Linear::pack(level, &threads, WeightsIn::F32(&weights), outputs, inputs, dtype, None).unwrap();
            let held = weights_of(&linear, level, &threads);
            for (held, weights) in held.iter().zip(weights.chunks(inputs)) {
                for (held, group) in held.chunks(32).zip(weights.chunks(32)) {
                    let (low, high) = group.iter().fold((0.0f32, 0.0f32), |(l, h), &x| (l.min(x), h.max(x)));
                    let step = match dtype {
                        WeightDtype::Int8 => low.abs().max(high) / 127.0,
                        _ => (high - low) / 15.0,
                    };
                    // Half a step; scales and minima are halves, rounded to 11 bits (of a step, and of the minimum).
                    let bound = f64::from(step) * 0.5 * 1.002 + f64::from(low.abs()) * 5e-4 + 1e-7;
                    for (held, weight) in held.iter().zip(group) {
                        let off = (held - f64::from(*weight)).abs();
                        prop_assert!(off <= bound, "{dtype:?}: {weight} is held as {held}, step {step}");
                    }
                }
            }
        }
    }

    #[test]
    fn a_rows_bits_are_its_own(seed in 0u64..1000, rows in 1usize..120, inputs in 1usize..300, outputs in 1usize..140) {
        let weights = noise(seed, outputs * inputs);
        let x = noise(seed + 2, rows * inputs);
        let one = Threads::new(Some(1)).unwrap();
        let two = Threads::new(Some(2)).unwrap();
        for dtype in BITS {
            for level in Level::available() {
                let pack = || Linear::pack(level, &one, WeightsIn::F32(&weights), outputs, inputs, dtype, None).unwrap();
                let linear = pack();
                let together = forward(&linear, level, &one, &x, true);
                prop_assert_eq!(bits(&forward(&linear, level, &two, &x, true)), bits(&together));
                for (row, (x, out)) in x.chunks(inputs).zip(together.chunks(outputs)).enumerate() {
                    let alone = forward(&linear, level, &one, x, true);
                    prop_assert_eq!(bits(&alone), bits(out), "{} {:?} row {}", level.name(), dtype, row);
                }
            }
        }
    }
}

#[test]
fn rows_are_what_the_codes_stand_for() {
    let threads = Threads::new(Some(2)).unwrap();
    let (outputs, groups) = (70, 2);
    let ids: Vec<u32> = (0..outputs as u32).rev().chain([3, 3]).collect();
    for kind in Blocks::ALL {
        let inputs = kind.weights() * groups;
        let (bytes, values) = blocks(kind, 5, outputs * groups);
        let source = WeightsIn::Blocks(kind, &bytes);
        let bias = vec![9.0; outputs];
        let linear = Linear::pack(Level::best(), &threads, source, outputs, inputs, kind.dtype(), Some(&bias)).unwrap();
        let mut rows = vec![f32::NAN; ids.len() * inputs];
        linear.rows(&threads, &ids, &mut rows, NEVER).unwrap();
        let expected = ids.iter().flat_map(|&id| &values[id as usize * inputs..][..inputs]);
        for (&row, &value) in rows.iter().zip(expected) {
            // Products of codes and halves are exact in f32; a sum of them and a minimum is rounded once.
            assert_eq!(row, value as f32, "{kind:?}");
        }
    }
    // Inputs that do not fill their last group.
    let weights = noise(1, 40 * 45);
    for dtype in BITS {
        let linear = Linear::pack(Level::best(), &threads, WeightsIn::F32(&weights), 40, 45, dtype, None).unwrap();
        let held = weights_of(&linear, Level::best(), &threads);
        let mut rows = vec![f32::NAN; 2 * 45];
        linear.rows(&threads, &[39, 0], &mut rows, NEVER).unwrap();
        for (row, held) in rows.iter().zip(held[39].iter().chain(&held[0])) {
            assert!((f64::from(*row) - held).abs() < 1e-5, "{dtype:?}");
        }
    }
}

#[test]
fn rows_that_are_no_numbers_give_none() {
    let threads = Threads::new(Some(1)).unwrap();
    let weights = noise(1, 64 * 64);
    for dtype in BITS {
        for level in Level::available() {
            let linear = Linear::pack(level, &threads, WeightsIn::F32(&weights), 64, 64, dtype, None).unwrap();
            for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let mut x = noise(2, 128);
                x[70] = bad;
                let out = forward(&linear, level, &threads, &x, false);
                assert!(out[..64].iter().all(|x| x.is_finite()) && out[64..].iter().all(|x| x.is_nan()));
            }
            let zeros = forward(&linear, level, &threads, &[0.0; 64], false);
            assert_eq!(zeros, vec![0.0; 64]);
            let tiny = forward(&linear, level, &threads, &[1e-40; 64], false);
            assert!(tiny.iter().all(|x| x.abs() < 1e-30));
            let large = forward(&linear, level, &threads, &[1e30; 64], false);
            assert!(large.iter().all(|x| !x.is_nan()));
        }
    }
}

#[test]
fn weights_that_are_no_numbers_or_too_large_are_not_hidden() {
    let threads = Threads::new(Some(1)).unwrap();
    let level = Level::best();
    let pack = |weights: &[f32], dtype| Linear::pack(level, &threads, WeightsIn::F32(weights), 2, 32, dtype, None);
    for dtype in BITS {
        let mut weights = noise(1, 64);
        weights[40] = f32::NAN;
        let out = forward(&pack(&weights, dtype).unwrap(), level, &threads, &[1.0; 32], false);
        assert!(out[0].is_finite() && out[1].is_nan());
        for large in [f32::INFINITY, f32::NEG_INFINITY, 1e30, -1e7] {
            weights[40] = large;
            assert!(matches!(pack(&weights, dtype), Err(Error::InvalidArgument(_))), "{dtype:?} {large}");
        }
    }
    let mut block = [0u8; 18];
    for (scale, good) in [(8000.0, true), (9000.0, false), (f32::NAN, true)] {
        block[..2].copy_from_slice(&f16::from_f32(scale).to_le_bytes());
        let packed =
            Linear::pack(level, &threads, WeightsIn::Blocks(Blocks::Q4_0, &block), 1, 32, WeightDtype::Int4, None);
        assert_eq!(packed.is_ok(), good, "{scale}");
    }
}

#[test]
fn blocks_go_into_their_own_format_alone() {
    let threads = Threads::new(Some(1)).unwrap();
    let (bytes, _) = blocks(Blocks::Q4_1, 1, 4);
    let pack = |dtype, outputs, inputs| {
        Linear::pack(Level::best(), &threads, WeightsIn::Blocks(Blocks::Q4_1, &bytes), outputs, inputs, dtype, None)
    };
    assert!(pack(WeightDtype::Int4, 2, 64).is_ok());
    for (dtype, outputs, inputs) in [
        (WeightDtype::Int8, 2, 64),
        (WeightDtype::Bf16, 2, 64),
        (WeightDtype::Int4, 8, 16),
        (WeightDtype::Int4, 2, 96),
        (WeightDtype::Int4, 0, 64),
    ] {
        assert!(matches!(pack(dtype, outputs, inputs), Err(Error::InvalidArgument(_))));
    }
}

/// Whole numbers are exact, and what is around them is the same: with tile registers or without, few rows or many.
#[test]
fn tile_registers_change_no_bit() {
    let levels = Level::available();
    let named = |name: &str| levels.iter().find(|level| level.name() == name).copied();
    let (Some(with), Some(without)) = (named("amx"), named("avx512f")) else { return };
    let threads = Threads::new(Some(2)).unwrap();
    for dtype in BITS {
        for (inputs, outputs) in [(1, 1), (33, 31), (64, 33), (416, 70), (1000, 96), (8192, 2)] {
            let (weights, bias) = (noise(3, inputs * outputs), noise(4, outputs));
            let source = WeightsIn::F32(&weights);
            for bias in [None, Some(&bias[..])] {
                let linear = Linear::pack(without, &threads, source, outputs, inputs, dtype, bias).unwrap();
                for rows in [1, 31, 95, 96, 97, 112, 300] {
                    let mut x = noise(rows as u64, rows * inputs);
                    x[rows / 2 * inputs] = f32::NAN;
                    for add in [false, true] {
                        let [a, b] = [with, without].map(|level| forward(&linear, level, &threads, &x, add));
                        let same =
                            a.iter().zip(&b).all(|(a, b)| a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan()));
                        assert!(same, "{dtype:?} {inputs} x {outputs}, {rows} rows, add {add}");
                    }
                }
            }
        }
    }
}

/// Longer rows than a task's factors should take: a task has some rows all the same.
#[test]
fn rows_of_any_length_are_multiplied() {
    let threads = Threads::new(Some(1)).unwrap();
    for level in Level::available() {
        for (dtype, inputs, rows) in [(WeightDtype::Bf16, 600_000, 2), (WeightDtype::Int8, 900_000, 96)] {
            let weights = vec![1.0; inputs];
            let linear = Linear::pack(level, &threads, WeightsIn::F32(&weights), 1, inputs, dtype, None).unwrap();
            let out = forward(&linear, level, &threads, &vec![1.0; rows * inputs], false);
            assert!(out.iter().all(|x| (x / inputs as f32 - 1.0).abs() < 0.01), "{level:?} {dtype:?} {out:?}");
        }
    }
}
