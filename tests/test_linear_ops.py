"""Linear and the small operations against numpy in float64, and law 1: a row is the same in every company."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore import InvalidArgument, Linear, Threads, available_simd
from kvcore._kvcore import activate, argmax, layer_norm, linear_heads, rms_norm, rope, rope_split, route, softcap
from kvtools import assert_bitwise, forced_simd, rounded

WEIGHT_DTYPES = ("float32", "bfloat16", "float16")
SOURCES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
EPS = 1e-5


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def as_input(x: np.ndarray, dtype: str) -> np.ndarray:
    """Inputs as the product takes them: bf16 weights round x to bf16."""
    return rounded(x, "bfloat16" if dtype == "bfloat16" else "float32").astype(np.float64)


def close(got: np.ndarray, x: np.ndarray, weight: np.ndarray, *rest: np.ndarray, rounding: float = 0.0) -> None:
    """``got`` = x @ weight.T + rest, within float32 sums' error and a relative rounding of each product."""
    x, weight, *rest = (a.astype(np.float64) for a in (x, weight, *rest))
    bound = (np.abs(x) @ np.abs(weight).T) * (2.0**-20 + rounding) + sum(np.abs(a) for a in rest) * 2.0**-22 + 1e-30
    error = np.abs(got - (x @ weight.T + sum(rest)))
    assert got.dtype == np.float32
    assert (error <= bound).all(), f"{(error / bound).max():.3g} times the bound"


def norm64(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    x = x.astype(np.float64)
    return weight * x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps)


def silu64(x: np.ndarray) -> np.ndarray:
    gate, up = np.split(x.astype(np.float64), 2, axis=-1)
    return gate / (1 + np.exp(-gate)) * up


SIZES = st.one_of(st.integers(1, 70), st.sampled_from([64, 96, 128, 257]))


@pytest.mark.parametrize("dtype", WEIGHT_DTYPES)
@given(
    rows=st.integers(0, 20),
    inputs=SIZES,
    outputs=SIZES,
    source=st.sampled_from(list(SOURCES)),
    with_bias=st.booleans(),
    level=st.sampled_from(available_simd()),
)
def test_linear_is_numpys(
    dtype: str, rows: int, inputs: int, outputs: int, source: str, with_bias: bool, level: str
) -> None:
    given_weight = normal(outputs, inputs).astype(SOURCES[source])
    bias = normal(outputs, seed=1) if with_bias else None
    with forced_simd(level):
        linear = Linear(given_weight, bias, dtype=dtype)
    assert (linear.in_features, linear.out_features, linear.dtype) == (inputs, outputs, dtype)
    assert linear.nbytes >= inputs * outputs * (4 if dtype == "float32" else 2)
    weight = rounded(given_weight, dtype)
    bias = np.zeros(outputs) if bias is None else bias

    x = normal(rows, inputs, seed=2)
    plain = linear(x)
    assert plain.shape == (rows, outputs)
    close(plain, as_input(x, dtype), weight, bias)

    residual = normal(rows, outputs, seed=3)
    before = residual.copy()
    assert linear.add_forward(x, residual) is None
    assert_bitwise(residual, before + plain)

    # What goes in is rounded to bf16 once more after the first operation.
    rounding = 2.0**-8 if dtype == "bfloat16" else 2.0**-18
    norm_weight = normal(inputs, seed=4)
    close(linear.norm_forward(x, norm_weight, EPS), norm64(x, norm_weight, EPS), weight, bias, rounding=rounding)

    gate_up = normal(rows, 2 * inputs, seed=5)
    residual = before.copy()
    assert linear.gated_add_forward(gate_up, residual) is None
    close(residual, silu64(gate_up), weight, bias, before, rounding=rounding)


@pytest.mark.parametrize("dtype", WEIGHT_DTYPES)
def test_fused_calls_are_their_parts(dtype: str, simd_level: str) -> None:
    linear = Linear(normal(50, 70), normal(50), dtype=dtype)
    x, weight, gate_up, residual = normal(9, 70), normal(70), normal(9, 140), normal(9, 50)
    assert_bitwise(linear.norm_forward(x, weight, EPS), linear(rms_norm(x, weight, EPS)))
    expected = residual + linear(activate(gate_up, gated=True))
    linear.gated_add_forward(gate_up, residual)
    assert_bitwise(residual, expected)


@pytest.mark.parametrize("dtype", WEIGHT_DTYPES)
def test_a_row_is_the_same_in_every_company(dtype: str, simd_level: str) -> None:
    """Alone, among others at any place, on 1 and 2 threads; large enough that threads and tiles are split."""
    inputs, outputs, rows = 300, 520, 70
    weight, bias, norm_weight = normal(outputs, inputs), normal(outputs), normal(inputs)
    x, gate_up, before = normal(rows, inputs), normal(rows, 2 * inputs), normal(rows, outputs, seed=1)

    def in_place(call: Callable[[np.ndarray, np.ndarray], None], x: np.ndarray, span: slice) -> np.ndarray:
        residual = before[span].copy()
        call(x[span], residual)
        return residual

    first: list[np.ndarray] = []
    for num_threads in (1, 2):
        linear = Linear(weight, bias, dtype=dtype, threads=Threads(num_threads))
        calls: list[Callable[[slice], np.ndarray]] = [
            lambda span, linear=linear: linear(x[span]),
            lambda span, linear=linear: linear.norm_forward(x[span], norm_weight, EPS),
            lambda span, linear=linear: in_place(linear.add_forward, x, span),
            lambda span, linear=linear: in_place(linear.gated_add_forward, gate_up, span),
        ]
        whole = [call(slice(None)) for call in calls]
        first = first or whole
        for call, expected, whole_rows in zip(calls, first, whole, strict=True):
            assert_bitwise(whole_rows, expected)
            for size in (1, 2, 3, 7, 16, 33, 69):
                for start in range(0, rows - size + 1, max(1, size // 2) if size > 1 else 9):
                    span = slice(start, start + size)
                    assert_bitwise(call(span), expected[span], f"{num_threads} threads, rows {span}")


def test_weights_that_fit_are_held_exactly() -> None:
    """One-hot inputs read the weights back."""
    for dtype in WEIGHT_DTYPES:
        for source in SOURCES.values():
            weight = normal(33, 40).astype(source)
            np.testing.assert_array_equal(Linear(weight, dtype=dtype)(np.eye(40, dtype=np.float32)).T,
                                          rounded(weight, dtype))  # fmt: skip


def test_layouts_of_weights_and_inputs() -> None:
    weight, x = normal(33, 40), normal(9, 40)
    for dtype in (np.float32, np.float16, ml_dtypes.bfloat16):
        stored = weight.astype(dtype)
        expected = Linear(stored)(x)
        wide = np.zeros((66, 80), dtype)
        wide[::2, ::2] = stored
        raw = np.zeros(stored.nbytes + 1, np.uint8)
        unaligned = raw[1:].view(dtype).reshape(stored.shape)
        unaligned[...] = stored
        for other in (np.asfortranarray(stored), wide[::2, ::2], unaligned, stored[::-1].copy()[::-1]):
            assert_bitwise(Linear(other)(x), expected)
    linear = Linear(weight)
    expected = linear(x)
    assert_bitwise(linear(np.asfortranarray(x)), expected)
    assert_bitwise(linear(x[::-1].copy()[::-1]), expected)
    assert_bitwise(linear(x.astype(np.float16)), linear(x.astype(np.float16).astype(np.float32)))
    with pytest.raises(ValueError, match="residual"):
        linear.add_forward(x, np.asfortranarray(np.zeros((9, 33), np.float32)))
    frozen = np.zeros((9, 33), np.float32)
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match="residual"):
        linear.add_forward(x, frozen)
    with pytest.raises(TypeError, match="residual"):
        linear.add_forward(x, np.zeros((9, 33)))
    square = Linear(normal(40, 40))
    with pytest.raises(ValueError, match="shares no memory"):
        square.add_forward(x, x)
    np.testing.assert_array_equal(x, normal(9, 40))


def test_a_nan_stays_in_its_row() -> None:
    linear = Linear(normal(50, 70))
    x = normal(9, 70)
    clean = linear(x)
    x[4, 30] = np.nan
    spoiled = linear(x)
    assert np.isnan(spoiled[4]).all()
    assert_bitwise(np.delete(spoiled, 4, axis=0), np.delete(clean, 4, axis=0))


@given(rows=st.integers(0, 9), n=SIZES, eps=st.sampled_from([0.0, 1e-6, 1e-5, 0.1]),
       level=st.sampled_from(available_simd()))  # fmt: skip
def test_rms_norm(rows: int, n: int, eps: float, level: str) -> None:
    x, weight = normal(rows, n) * 100, normal(n, seed=1)
    with forced_simd(level):
        out = rms_norm(x, weight, eps)
    assert out.shape == (rows, n)
    assert out.dtype == np.float32
    np.testing.assert_allclose(out, norm64(x, weight, eps), rtol=2e-6, atol=1e-12)


@given(
    rows=st.integers(0, 5),
    heads=st.integers(1, 5),
    kv_heads=st.integers(1, 3),
    half=st.integers(1, 40),
    width=st.integers(0, 40),
    level=st.sampled_from(available_simd()),
)
def test_rope_split(rows: int, heads: int, kv_heads: int, half: int, width: int, level: str) -> None:
    dim, width = 2 * half, min(width, half)
    qkv = normal(rows, (heads + 2 * kv_heads) * dim)
    angles = normal(rows, width, seed=1).astype(np.float64)
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    with forced_simd(level):
        q, k, v = rope_split(qkv, cos, sin, heads, kv_heads, dim)
    joint = qkv.reshape(rows, heads + 2 * kv_heads, dim)
    c, s = cos[:, None].astype(np.float64), sin[:, None].astype(np.float64)
    a, b, rest = joint[..., :width], joint[..., width : 2 * width], joint[..., 2 * width :]
    turned = np.concatenate([a * c - b * s, b * c + a * s, rest], axis=-1)
    np.testing.assert_allclose(q, turned[:, :heads], rtol=0, atol=2e-6)
    np.testing.assert_allclose(k, turned[:, heads : heads + kv_heads], rtol=0, atol=2e-6)
    assert_bitwise(v, joint[:, heads + kv_heads :])
    assert_bitwise(q[..., 2 * width :], joint[:, :heads, 2 * width :])


@given(rows=st.integers(0, 5), n=SIZES, level=st.sampled_from(available_simd()))
def test_layer_norm(rows: int, n: int, level: str) -> None:
    x, weight, bias = normal(rows, n) * 100, normal(n, seed=1), normal(n, seed=2)
    with forced_simd(level):
        plain, shifted = layer_norm(x, weight, None, EPS), layer_norm(x, weight, bias, EPS)
    want = norm64(x - x.astype(np.float64).mean(axis=1, keepdims=True), weight, EPS)
    np.testing.assert_allclose(plain, want, rtol=0, atol=3e-5)
    assert_bitwise(shifted, plain + bias)


def test_experts_are_chosen_by_merit_and_weighed_by_score() -> None:
    logits = np.array([[0.0, 1.0, 2.0, 3.0], [5.0, 5.0, 5.0, 5.0]], np.float32)
    ids, weights = route(logits, top_k=2)
    assert ids.tolist() == [[2, 3], [0, 1]]
    np.testing.assert_allclose(weights, [[0.23688284, 0.6439143], [0.25, 0.25]], rtol=1e-6)
    ids, weights = route(logits, np.array([9.0, 0, 0, 0], np.float32), top_k=2, scoring="sigmoid", renormalize=True)
    assert ids.tolist() == [[0, 3], [0, 1]]
    np.testing.assert_allclose(weights.sum(axis=1), 1, rtol=1e-6)
    np.testing.assert_allclose(weights[0, 0] / weights[0, 1], 0.5 * (1 + np.exp(-3)), rtol=1e-6)
    with pytest.raises(InvalidArgument, match="top_k: expected at most 4"):
        route(logits, top_k=5)
    assert route(np.zeros((0, 4), np.float32), top_k=2)[0].shape == (0, 2)
    spoiled = np.array([[np.nan, 1.0, 2.0, 3.0], *logits], np.float32)
    assert_bitwise(route(spoiled, top_k=2)[1][1:], route(logits, top_k=2)[1])


@given(rows=st.integers(0, 5), n=SIZES, level=st.sampled_from(available_simd()))
def test_gated_silu(rows: int, n: int, level: str) -> None:
    x = normal(rows, 2 * n) * 10
    with forced_simd(level):
        out = activate(x, gated=True)
    np.testing.assert_allclose(out, silu64(x), rtol=3e-6, atol=1e-7)


def test_gated_silu_at_the_ends() -> None:
    gate = np.array([-1e6, -200, -88, -0.0, 0, 88, 200, 1e30], np.float32)
    out = activate(np.concatenate([gate, np.ones_like(gate)])[None], gated=True)
    np.testing.assert_allclose(out[0], np.where(gate > 0, gate, gate * 0), atol=1e-30)


def capped(x: np.ndarray, threads: Threads) -> np.ndarray:
    x = x.copy()
    assert softcap(x, 3.0, threads=threads) is None
    return x


OPERATIONS = ["rms_norm", "layer_norm", "activate", "gelu", "rope_split", "rope", "softcap", "route", "linear_heads"]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_operations_are_the_same_on_any_number_of_threads(operation: str) -> None:
    x = normal(600, 512)
    calls: dict[str, Callable[[Threads, slice], np.ndarray]] = {
        "rms_norm": lambda threads, span: rms_norm(x[span], x[0], EPS, threads=threads),
        "layer_norm": lambda threads, span: layer_norm(x[span], x[0], x[1], EPS, threads=threads),
        "activate": lambda threads, span: activate(x[span], gated=True, threads=threads),
        "gelu": lambda threads, span: activate(x[span, :301], "gelu", threads=threads),
        "rope": lambda threads, span: rope(
            x[span].reshape(-1, 4, 128), x[span, :60], x[span, 60:120], interleaved=True, threads=threads
        ),
        "softcap": lambda threads, span: capped(x[span, :301], threads),
        "route": lambda threads, span: route(
            x[span], x[0], top_k=9, scoring="sigmoid", groups=8, top_groups=3, group_best=2, threads=threads
        )[1],
        "linear_heads": lambda threads, span: linear_heads(
            [Linear(x[i : i + 33, :128], threads=threads) for i in range(4)], x[span].reshape(-1, 4, 128)
        ),
        "rope_split": lambda threads, span: np.concatenate(
            rope_split(x[span], x[span, :32], x[span, 32:64], 4, 2, 64, threads=threads), axis=1
        ),
    }
    call = calls[operation]
    one, two = Threads(1), Threads(2)
    expected = call(one, slice(None))
    assert_bitwise(call(two, slice(None)), expected)
    for start in range(0, 600, 37):
        assert_bitwise(call(two, slice(start, start + 5)), expected[start : start + 5])


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=70), st.sampled_from(available_simd()))
def test_argmax_takes_the_first_of_the_largest(values: list[float], level: str) -> None:
    row = np.array(values, np.float32)
    with forced_simd(level):
        assert argmax(row) == int(row.argmax())
        assert argmax(np.round(row / 1e38)) == int(np.round(row / 1e38).argmax())


@pytest.mark.parametrize("n", [1, 15, 16, 17, 100])
def test_argmax_refuses_nan(n: int) -> None:
    row = np.zeros(n, np.float32)
    for at in range(n):
        row[:] = 0
        row[at] = np.nan
        with pytest.raises(InvalidArgument, match=f"index {at}"):
            argmax(row)
    with pytest.raises(InvalidArgument):
        argmax(np.zeros(0, np.float32))
    assert argmax(np.full(n, -np.inf, np.float32)) == 0
