"""Rotary embeddings: trap 19, and rows that depend on nothing but position and request (law 1)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore.checkpoint.config import Config
from kvcore.errors import CheckpointError, InvalidArgument
from kvcore.models.rope import KINDS, RopeSpec, rope_from_config
from kvcore.models.rope_table import RopeTable, inv_freq


def rope(head_dim: int = 32, max_positions: int = 128, theta: float = 10000.0, **parameters: Any) -> RopeSpec:
    config = Config({"rope_theta": theta, "rope_scaling": parameters or None}, "model.gguf")
    return rope_from_config(config, head_dim, max_positions)


SPECS = {
    "default": rope(),
    "linear": rope(rope_type="linear", factor=4.0),
    "dynamic": rope(max_positions=32, rope_type="dynamic", factor=2.0),
    "llama3": rope(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                   original_max_position_embeddings=64),
    "yarn": rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=32),
    "factors": rope(rope_type="factors", factors=[1.0 + i / 4 for i in range(16)]),
    "longrope": rope(rope_type="longrope", short_factor=[1.0 + i / 8 for i in range(16)],
                     long_factor=[1.0 + i for i in range(16)], original_max_position_embeddings=32),
}  # fmt: skip


def test_default_frequencies() -> None:
    got, factor = inv_freq(SPECS["default"])
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, [10000.0 ** (-i / 16) for i in range(16)], rtol=2e-7)
    assert factor == 1.0


def test_linear_divides_by_the_factor() -> None:
    assert np.array_equal(inv_freq(SPECS["linear"])[0], inv_freq(SPECS["default"])[0] / np.float32(4))


def test_factors_divide_one_by_one() -> None:
    want = inv_freq(SPECS["default"])[0] / np.array([1 + i / 4 for i in range(16)], np.float32)
    assert np.array_equal(inv_freq(SPECS["factors"])[0], want)


def test_llama3_multipliers() -> None:
    spec = rope(128, theta=500000.0, rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                original_max_position_embeddings=8192)  # fmt: skip
    multipliers = inv_freq(spec)[0] / inv_freq(rope(128, theta=500000.0))[0]
    assert multipliers[28] == 1
    assert multipliers[32] == pytest.approx(0.371122, abs=1e-6)
    assert multipliers[36] == 0.125


def test_yarn_attention_factor() -> None:
    assert rope(rope_type="yarn", factor=64.0, attention_factor=1.0).attention_factor == 1.0
    assert rope(rope_type="yarn", factor=16.0, mscale=1, mscale_all_dim=1).attention_factor == 1.0
    assert rope(rope_type="yarn", factor=4.0).attention_factor == 0.1 * math.log(4) + 1
    want = (0.1 * 0.5 * math.log(8) + 1) / (0.1 * 0.7 * math.log(8) + 1)
    assert rope(rope_type="yarn", factor=8.0, mscale=0.5, mscale_all_dim=0.7).attention_factor == want
    # one of the two alone, or zero, counts for nothing, as in transformers
    assert rope(rope_type="yarn", factor=4.0, mscale=0.5).attention_factor == 0.1 * math.log(4) + 1
    assert rope(rope_type="yarn", factor=4.0, mscale=1, mscale_all_dim=0).attention_factor == 0.1 * math.log(4) + 1
    assert rope(rope_type="yarn", factor=0.5).attention_factor == 1.0


def test_yarn_frequencies() -> None:
    plain = inv_freq(rope(128))[0]
    spec = rope(128, rope_type="yarn", factor=4.0, original_max_position_embeddings=4096)
    multipliers = inv_freq(spec)[0] / plain
    np.testing.assert_allclose(multipliers[:21], 1, rtol=1e-6)  # floor(20.9...): more than 32 turns
    np.testing.assert_allclose(multipliers[46:], 0.25, rtol=1e-6)  # ceil(45.03): less than one turn
    assert (np.diff(multipliers[20:47]) < 0).all()
    exact = inv_freq(rope(128, rope_type="yarn", factor=4.0, original_max_position_embeddings=4096, truncate=False))[0]
    assert not np.array_equal(exact, inv_freq(spec)[0])
    narrow = rope(128, rope_type="yarn", factor=4.0, original_max_position_embeddings=4096, beta_fast=8, beta_slow=4)
    assert not np.array_equal(inv_freq(narrow)[0], inv_freq(spec)[0])


def test_yarn_factor_may_follow_from_the_lengths() -> None:
    assert rope(max_positions=256, rope_type="yarn", original_max_position_embeddings=64).factor == 4.0
    assert rope(max_positions=256, rope_type="yarn", factor=2.0).original_max_position == 256


def test_longrope() -> None:
    spec = SPECS["longrope"]
    plain = inv_freq(SPECS["default"])[0]
    assert spec.attention_factor == math.sqrt(1 + math.log(128 / 32) / math.log(32))
    for length, step in ((0, 1 / 8), (32, 1 / 8), (33, 1), (1000, 1)):
        np.testing.assert_allclose(inv_freq(spec, length)[0], plain / (1 + step * np.arange(16)), rtol=3e-7)
    # one set of factors for all tokens of a sequence, by the length that it has reached
    assert [spec.context_len(12, length) for length in (12, 32, 33, 100)] == [32, 32, 33, 33]
    assert [spec.base_length(p, 32) for p in (0, 31)] == [0, 0]
    assert [spec.base_length(p, 33) for p in (0, 31, 90)] == [33, 33, 33]
    assert spec.cache_key(32) is None
    assert spec.cache_key(33) == spec.cache_key(1000) != None  # noqa: E711
    # the limit may stand outside, as in Phi-3's files, and "su" is the oldest name
    old = Config({"original_max_position_embeddings": 32, "rope_scaling": {
        "type": "su", "short_factor": spec.freq_factors, "long_factor": spec.long_factors}})  # fmt: skip
    assert rope_from_config(old, 32, 128) == spec
    assert rope(rope_type="longrope", short_factor=[1.0] * 16, long_factor=[1.0] * 16, factor=4.0,
                attention_factor=1.5).attention_factor == 1.5  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"short_factor": [1.0] * 15}, "short_factor: expected 16 numbers, got .*15 numbers"),
        ({"long_factor": "much"}, "long_factor: expected a list of numbers"),
        ({"long_factor": None}, "long_factor: expected a list of numbers"),
        ({"short_factor": [0.0] * 16}, r"short_factor\[0\]: expected a number"),
        ({"original_max_position_embeddings": 1}, "original_max_position_embeddings: expected at least 2"),
    ],
)
def test_bad_longrope(changes: dict[str, Any], message: str) -> None:
    good = {"short_factor": [1.0] * 16, "long_factor": [2.0] * 16, "original_max_position_embeddings": 32}
    with pytest.raises(CheckpointError, match=message):
        rope(rope_type="longrope", **{**good, **changes})


def test_type_and_rope_type_are_both_read() -> None:
    assert rope(type="linear", factor=2.0) == rope(rope_type="linear", factor=2.0)
    assert rope(type="default") == rope()
    new = rope_from_config({"rope_parameters": {"rope_type": "linear", "rope_theta": 5.0, "factor": 2.0}}, 32, 128)
    assert new == rope(theta=5.0, rope_type="linear", factor=2.0)


def test_dynamic_base() -> None:
    spec = SPECS["dynamic"]
    assert np.array_equal(inv_freq(spec, 32)[0], inv_freq(SPECS["default"])[0])
    assert np.array_equal(inv_freq(spec, 7)[0], inv_freq(SPECS["default"])[0])
    base = 10000.0 * (2.0 * 48 / 32 - 1) ** (32 / 30)
    np.testing.assert_allclose(inv_freq(spec, 48)[0], [base ** (-i / 16) for i in range(16)], rtol=3e-7)


def test_dynamic_is_a_function_of_the_request() -> None:
    spec = SPECS["dynamic"]
    assert [spec.base_length(p, 20) for p in (0, 19, 20, 31, 32, 40)] == [0, 0, 0, 0, 33, 41]
    assert [spec.base_length(p, 37) for p in (0, 36, 37)] == [37, 37, 38]
    assert spec.cache_key(32) is None
    assert spec.cache_key(33) not in (None, spec.cache_key(34))
    assert all(SPECS[kind].cache_key(1000) is None for kind in KINDS if kind not in ("dynamic", "longrope"))


def row(spec: RopeSpec, position: int, prompt_len: int) -> tuple[np.ndarray, np.ndarray]:
    """A row by the definition, with Python's own functions."""
    frequencies, factor = inv_freq(spec, spec.base_length(position, prompt_len))
    angles = [float(np.float32(position) * f) for f in frequencies]
    scale = np.float32(factor)
    cos = np.array([math.cos(a) for a in angles], np.float32) * scale
    return cos, np.array([math.sin(a) for a in angles], np.float32) * scale


@pytest.mark.parametrize("kind", KINDS)
def test_table_against_the_definition(kind: str) -> None:
    table = RopeTable(SPECS[kind])
    positions = [0, 1, 15, 16, 31, 32, 33, 47, 255, 256, 1000, 131_071, 1_000_003]
    for prompt_len in (1, 20, 48):
        cos, sin = table.cos_sin(np.array(positions), np.full(len(positions), prompt_len))
        assert cos.dtype == sin.dtype == np.float32
        assert cos.shape == sin.shape == (len(positions), 16)
        for i, position in enumerate(positions):
            want_cos, want_sin = row(SPECS[kind], position, prompt_len)
            np.testing.assert_allclose(cos[i], want_cos, rtol=0, atol=1.3e-7)
            np.testing.assert_allclose(sin[i], want_sin, rtol=0, atol=1.3e-7)


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 600), st.integers(1, 80)), min_size=1, max_size=12),
    st.randoms(use_true_random=False),
)
def test_a_row_depends_on_position_and_request_alone(kind: str, rows: list[tuple[int, int]], random: Any) -> None:
    spec = SPECS[kind]
    alone = {r: RopeTable(spec).cos_sin([r[0]], [r[1]]) for r in rows}
    shared = RopeTable(spec)
    for _ in range(2):
        random.shuffle(rows)
        cos, sin = shared.cos_sin([p for p, _ in rows], [n for _, n in rows])
        for i, r in enumerate(rows):
            assert cos[i].tobytes() == alone[r][0][0].tobytes()
            assert sin[i].tobytes() == alone[r][1][0].tobytes()


def test_partial_rotation() -> None:
    spec = rope_from_config({"partial_rotary_factor": 0.5}, 8, 16)
    assert spec.rotary_dim == 4
    np.testing.assert_allclose(inv_freq(spec)[0], [1, 0.01], rtol=1e-6)
    assert RopeTable(spec).cos_sin([3], 1)[0].shape == (1, 2)


def test_table_forgets_what_it_has_not_used_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RopeTable, "MAX_PIECES", 2)
    table = RopeTable(SPECS["default"])
    first = table.cos_sin([5], 1)
    table.cos_sin([300, 600, 900], 1)
    assert len(table._pieces) == 2
    assert np.array_equal(table.cos_sin([5], 1), first)


def test_extreme_parameters_do_not_warn() -> None:
    for theta in (1.0, 1e30):
        for spec in (
            rope(theta=theta, max_positions=1, rope_type="dynamic", factor=1e30),
            rope(theta=theta, rope_type="linear", factor=1e-30),
            rope(theta=theta, rope_type="llama3", factor=1e30, low_freq_factor=1e-30, high_freq_factor=1e30,
                 original_max_position_embeddings=1),
        ):  # fmt: skip
            assert RopeTable(spec).cos_sin([0, 2**31 - 1], 1)[0].shape == (2, 16)


def test_no_rows() -> None:
    assert RopeTable(SPECS["dynamic"]).cos_sin([], [])[0].shape == (0, 16)


def test_bad_calls() -> None:
    table = RopeTable(SPECS["default"])
    with pytest.raises(TypeError, match="positions: expected integers, got float64"):
        table.cos_sin([0.5], [1])
    with pytest.raises(InvalidArgument, match="positions: expected at least 0, got -1"):
        table.cos_sin([-1], [1])
    with pytest.raises(InvalidArgument, match="expected positions"):
        table.cos_sin([1, 2], [1, 2, 3])
