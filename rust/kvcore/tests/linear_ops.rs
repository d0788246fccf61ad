//! The operations between products: against f64, row by row, and their argument checks.

mod cases;

use cases::cases;
use kvcore::Error;
use kvcore::ops::{RopeShape, argmax, rms_norm, rope_split, silu_mul};
use kvcore::simd::Level;
use kvcore::threads::{NEVER, Threads};
use proptest::collection::vec;
use proptest::prelude::*;

fn threads() -> Threads {
    Threads::new(Some(2)).unwrap()
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

fn near(a: f32, b: f64, tolerance: f64) -> bool {
    (f64::from(a) - b).abs() <= tolerance * b.abs() + 1e-30
}

/// One to eight rows of `n` numbers.
fn rows(n: usize) -> impl Strategy<Value = Vec<f32>> {
    vec(vec(-4.0f32..4.0, n), 1..9).prop_map(|rows| rows.concat())
}

proptest! {
    #![proptest_config(cases(64))]

    #[test]
    fn rms_norm_is_near_f64_and_row_by_row(
        (x, weight) in (1usize..80).prop_flat_map(|n| (rows(n), vec(-2.0f32..2.0, n))),
    ) {
        let (n, eps, threads) = (weight.len(), 1e-5, threads());
        for level in Level::available() {
            let mut out = vec![f32::NAN; x.len()];
            rms_norm(level, &threads, &x, &weight, eps, &mut out, NEVER).unwrap();
            for (x, out) in x.chunks(n).zip(out.chunks(n)) {
                let mean = x.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / n as f64;
                let inv = 1.0 / (mean + f64::from(eps)).sqrt();
                for i in 0..n {
                    prop_assert!(near(out[i], f64::from(weight[i]) * f64::from(x[i]) * inv, 1e-6), "{}", level.name());
                }
                let mut alone = vec![0.0; n];
                rms_norm(level, &threads, x, &weight, eps, &mut alone, NEVER).unwrap();
                prop_assert_eq!(bits(&alone), bits(out));
            }
        }
    }

    #[test]
    fn silu_mul_is_near_f64_and_row_by_row((n, x) in (1usize..60).prop_flat_map(|n| (Just(n), rows(2 * n)))) {
        let threads = threads();
        for level in Level::available() {
            let mut out = vec![f32::NAN; x.len() / 2];
            silu_mul(level, &threads, &x, n, &mut out, NEVER).unwrap();
            for (x, out) in x.chunks(2 * n).zip(out.chunks(n)) {
                for i in 0..n {
                    let (gate, up) = (f64::from(x[i]), f64::from(x[n + i]));
                    prop_assert!(near(out[i], gate / (1.0 + (-gate).exp()) * up, 2e-6), "{}", level.name());
                }
                let mut alone = vec![0.0; n];
                silu_mul(level, &threads, x, n, &mut alone, NEVER).unwrap();
                prop_assert_eq!(bits(&alone), bits(out));
            }
        }
    }

    #[test]
    fn rope_split_is_the_plain_rotation(
        seed in 0u32..1000, rows in 1usize..6, num_heads in 1usize..5, num_kv_heads in 1usize..4, head_dim in 1usize..70,
        part in 0.0f64..=1.0,
    ) {
        let cos_width = ((head_dim / 2) as f64 * part).round() as usize;
        let shape = RopeShape { num_heads, num_kv_heads, head_dim, cos_width };
        let width = (num_heads + 2 * num_kv_heads) * head_dim;
        let wave = |n: usize, step: f32| (0..n).map(|i| (seed as f32 + i as f32 * step).sin()).collect::<Vec<f32>>();
        let (qkv, cos, sin) = (wave(rows * width, 0.7), wave(rows * cos_width, 0.3), wave(rows * cos_width, 1.1));
        for level in Level::available() {
            let mut q = vec![f32::NAN; rows * num_heads * head_dim];
            let mut k = vec![f32::NAN; rows * num_kv_heads * head_dim];
            let mut v = k.clone();
            rope_split(level, &threads(), &qkv, (&cos, &sin), shape, (&mut q, &mut k, &mut v), NEVER).unwrap();
            for row in 0..rows {
                let (cos, sin) = (&cos[row * cos_width..], &sin[row * cos_width..]);
                for head in 0..num_heads + 2 * num_kv_heads {
                    let x = &qkv[row * width + head * head_dim..][..head_dim];
                    let out = if head < num_heads {
                        &q[(row * num_heads + head) * head_dim..]
                    } else if head < num_heads + num_kv_heads {
                        &k[(row * num_kv_heads + head - num_heads) * head_dim..]
                    } else {
                        &v[(row * num_kv_heads + head - num_heads - num_kv_heads) * head_dim..]
                    };
                    for i in 0..head_dim {
                        let w = cos_width;
                        let truth = if head >= num_heads + num_kv_heads || i >= 2 * w {
                            x[i]
                        } else if i < w {
                            x[i] * cos[i] - x[i + w] * sin[i]
                        } else {
                            x[i] * cos[i - w] + x[i - w] * sin[i - w]
                        };
                        prop_assert_eq!(out[i], truth, "{} row {} head {} dim {}", level.name(), row, head, i);
                    }
                }
            }
        }
    }

    #[test]
    fn argmax_is_the_first_of_the_largest(x in vec((-6i8..6).prop_map(f32::from), 1..90)) {
        let max = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let first = x.iter().position(|&x| x == max).unwrap();
        for level in Level::available() {
            prop_assert_eq!(argmax(level, &x), Ok(first));
        }
    }
}

#[test]
fn argmax_takes_infinities_and_reports_nan() {
    for level in Level::available() {
        for n in [1, 15, 16, 17, 40] {
            let lowest = vec![f32::NEG_INFINITY; n];
            assert_eq!(argmax(level, &lowest), Ok(0));
            for at in 0..n {
                let mut x = lowest.clone();
                x[at] = f32::INFINITY;
                assert_eq!(argmax(level, &x), Ok(at));
                x[n - 1 - at] = f32::NAN;
                let message = argmax(level, &x).unwrap_err().to_string();
                assert!(message.contains(&format!("NaN at index {}", n - 1 - at)), "{message}");
            }
        }
        assert!(matches!(argmax(level, &[]), Err(Error::InvalidArgument(_))));
    }
}

/// Enough rows for several tasks.
#[test]
fn threads_change_no_bit() {
    let level = Level::best();
    let x: Vec<f32> = (0..700 * 600).map(|i| (i as f32 * 0.37).sin()).collect();
    let weight: Vec<f32> = (0..600).map(|i| (i as f32 * 0.11).cos()).collect();
    let shape = RopeShape { num_heads: 6, num_kv_heads: 2, head_dim: 60, cos_width: 30 };
    let angles: Vec<f32> = (0..700 * 30).map(|i| (i as f32 * 0.013).cos()).collect();
    let run = |n| {
        let threads = Threads::new(Some(n)).unwrap();
        let (mut normed, mut gated) = (vec![0.0; x.len()], vec![0.0; x.len() / 2]);
        rms_norm(level, &threads, &x, &weight, 1e-6, &mut normed, NEVER).unwrap();
        silu_mul(level, &threads, &x, 300, &mut gated, NEVER).unwrap();
        let (mut q, mut k, mut v) = (vec![0.0; 700 * 360], vec![0.0; 700 * 120], vec![0.0; 700 * 120]);
        rope_split(level, &threads, &x, (&angles, &angles), shape, (&mut q, &mut k, &mut v), NEVER).unwrap();
        [normed, gated, q, k, v].map(|x| bits(&x))
    };
    let one = run(1);
    assert!(one == run(2) && one == run(5));
}

#[test]
fn bad_arguments_are_errors() {
    let (level, threads) = (Level::best(), threads());
    let norm = |x: usize, weight: usize, eps: f32, out: usize| {
        rms_norm(level, &threads, &vec![1.0; x], &vec![1.0; weight], eps, &mut vec![0.0; out], NEVER)
    };
    let bad = |result: Result<(), Error>| assert!(matches!(result, Err(Error::InvalidArgument(_))), "{result:?}");
    bad(norm(4, 0, 1e-5, 4));
    bad(norm(5, 2, 1e-5, 5));
    bad(norm(4, 2, 1e-5, 5));
    bad(norm(4, 2, f32::NAN, 4));
    bad(norm(4, 2, -1.0, 4));
    assert_eq!(norm(0, 2, 0.0, 0), Ok(()));

    let silu = |x: usize, n, out: usize| silu_mul(level, &threads, &vec![1.0; x], n, &mut vec![0.0; out], NEVER);
    bad(silu(4, 0, 0));
    bad(silu(6, 2, 3));
    bad(silu(8, 2, 3));
    bad(silu(8, usize::MAX, 3));
    assert_eq!(silu(0, 2, 0), Ok(()));

    let rope = |shape: RopeShape, qkv: usize, cos: usize, q: usize, kv: usize| {
        let (mut q, mut k, mut v) = (vec![0.0; q], vec![0.0; kv], vec![0.0; kv]);
        let cos = vec![1.0; cos];
        rope_split(level, &threads, &vec![1.0; qkv], (&cos, &cos), shape, (&mut q, &mut k, &mut v), NEVER)
    };
    let shape = RopeShape { num_heads: 2, num_kv_heads: 1, head_dim: 4, cos_width: 2 };
    assert_eq!(rope(shape, 32, 4, 16, 8), Ok(()));
    assert_eq!(rope(shape, 0, 0, 0, 0), Ok(()));
    bad(rope(shape, 31, 4, 16, 8));
    bad(rope(shape, 32, 2, 16, 8));
    bad(rope(shape, 32, 4, 15, 8));
    bad(rope(shape, 32, 4, 16, 4));
    bad(rope(RopeShape { cos_width: 3, ..shape }, 32, 6, 16, 8));
    bad(rope(RopeShape { num_heads: 0, ..shape }, 32, 4, 16, 8));
    bad(rope(RopeShape { num_heads: usize::MAX, ..shape }, 32, 4, 16, 8));
    bad(rope(RopeShape { num_kv_heads: usize::MAX / 4, ..shape }, 32, 4, 16, 8));
}
