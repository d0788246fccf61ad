"""Layers of different kinds in one cache: full, sliding windows, latent rows, an encoder's memory, none."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvcore import InvalidArgument, InvalidHandle, InvalidState, KVCache, KVGroup, OutOfBlocks, Sequence, StaleBatch
from kvtools import assert_bitwise, assert_no_leak

Floats = npt.NDArray[np.float32]
DTYPES = ["float32", "bfloat16", "fp8_e4m3", "int8", "int4"]


def softmax(x: Floats) -> Floats:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def mixed(**changes: Any) -> KVCache:
    sizes: dict[str, Any] = {
        "groups": [
            KVGroup("full", [0, 3], num_kv_heads=2, head_dim=8),
            KVGroup("sliding_window", [1], num_kv_heads=1, head_dim=16, window=20),
            KVGroup("latent", [2], rank=16, rope_dim=4),
            KVGroup("none", [4]),
        ],
        "num_blocks": 32,
        "dtype": "float32",
        "num_threads": 1,
    }
    return KVCache(**(sizes | changes))


SHAPES = {0: (2, 8, 8), 1: (1, 16, 16), 2: (1, 20, 16), 3: (2, 8, 8)}


class Rows:
    """K, V and Q of a sequence, by layer."""

    def __init__(self, tokens: int, seed: int = 0) -> None:
        rng = np.random.default_rng([tokens * 0 + seed])
        draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
        self.tokens = rng.integers(0, 50_000, 400)[:tokens]
        self.k = {i: draw(400, heads, dim)[:tokens] for i, (heads, dim, _) in SHAPES.items()}
        self.v = {i: draw(400, heads, width)[:tokens] for i, (heads, _, width) in SHAPES.items()}
        self.q = {i: draw(400, 2 * heads, dim)[:tokens] for i, (heads, dim, _) in SHAPES.items()}


def step(cache: KVCache, seq: Sequence, rows: Rows, n: int) -> dict[int, Floats]:
    batch = cache.plan([(seq, n)])
    at = batch.positions
    out = {}
    for layer in SHAPES:
        cache.write(layer, batch, rows.k[layer][at], None if layer == 2 else rows.v[layer][at])
        scale = 12**-0.5 if layer == 2 else None
        out[layer] = cache.attend(layer, batch, rows.q[layer][at], scale)
    cache.commit(batch)
    return out


def run(cache: KVCache, rows: Rows, cuts: list[int], seq: Sequence | None = None) -> tuple[Sequence, dict[int, Floats]]:
    seq = cache.add(rows.tokens) if seq is None else seq
    outs: dict[int, list[Floats]] = {layer: [] for layer in SHAPES}
    for end in [*cuts, len(rows.tokens)]:
        n = end - cache.num_computed_tokens(seq)
        if n > 0:
            for layer, out in step(cache, seq, rows, n).items():
                outs[layer].append(out)
    return seq, {layer: np.concatenate(out) for layer, out in outs.items()}


def expected(rows: Rows, layer: int, window: int | None, scale: float) -> Floats:
    k, v = rows.k[layer], (rows.k[layer][:, :, :16] if layer == 2 else rows.v[layer])
    out = []
    for p, q in enumerate(rows.q[layer]):
        first = 0 if window is None else max(0, p + 1 - window)
        heads = []
        for h, one in enumerate(q):
            g = h // 2
            heads.append(softmax(k[first : p + 1, g] @ one * scale) @ v[first : p + 1, g])
        out.append(heads)
    return np.array(out, np.float32)


def test_each_layer_attends_in_its_own_way() -> None:
    cache = mixed()
    cache._fill(float("nan"))
    rows = Rows(60)
    seq, out = run(cache, rows, [])
    for layer, window, scale in ((0, None, 8**-0.5), (1, 20, 0.25), (2, None, 12**-0.5), (3, None, 8**-0.5)):
        np.testing.assert_allclose(out[layer], expected(rows, layer, window, scale), atol=2e-5)
    for layer in (0, 3):
        np.testing.assert_array_equal(cache.read(layer, seq)[0], rows.k[layer])
    k, v = cache.read(2, seq)
    np.testing.assert_array_equal(k, rows.k[2])
    np.testing.assert_array_equal(v, rows.k[2][:, :, :16])


@pytest.mark.parametrize("dtype", DTYPES)
def test_law_1_over_all_kinds(dtype: str) -> None:
    rows = Rows(100)
    _, whole = run(mixed(dtype=dtype, enable_prefix_caching=False), rows, [])
    for cuts in ([1, 2, 3], [50], [16, 32, 48], list(range(1, 100))):
        cache = mixed(dtype=dtype)
        cache._fill(1e30 if dtype not in ("int8", "int4") else 1.0)
        _, out = run(cache, rows, cuts)
        for layer in SHAPES:
            assert_bitwise(out[layer], whole[layer], f"layer {layer}, cuts {cuts}")
        for common in (5, 33, 70, 99):
            hit, again = run(cache, rows, [], cache.add(rows.tokens))
            assert hit.num_cached_tokens == 99
            for layer in SHAPES:
                assert_bitwise(again[layer], whole[layer][99:], f"hit, layer {layer}")
            cache.free(hit)
            short = cache.add([*rows.tokens[:common], 60_000])
            assert short.num_cached_tokens in (0, common)
            cache.free(short)
        cache.check()


def test_trap_14_a_window_includes_the_token_itself() -> None:
    cache = KVCache(groups=[KVGroup("sliding_window", [0], num_kv_heads=1, head_dim=16, window=4)], num_blocks=4,
                    dtype="float32", num_threads=1)  # fmt: skip
    seq = cache.add(range(10))
    batch = cache.plan([(seq, 10)])
    cache.write(0, batch, np.zeros((10, 1, 16), np.float32), np.eye(10, 16, dtype=np.float32)[:, None])
    out = cache.attend(0, batch, np.ones((10, 1, 16), np.float32))
    np.testing.assert_array_equal(out[9, 0], [0] * 6 + [0.25] * 4 + [0] * 6)


def test_a_window_of_the_call_does_the_same_where_the_layer_keeps_all() -> None:
    cache = KVCache(num_layers=1, num_kv_heads=1, head_dim=16, num_blocks=8, dtype="float32", num_threads=1)
    sliding = KVCache(groups=[KVGroup("sliding_window", [0], num_kv_heads=1, head_dim=16, window=20)], num_blocks=8,
                      dtype="float32", num_threads=1)  # fmt: skip
    rng = np.random.default_rng(1)
    k, v, q = (rng.standard_normal((70, 1, 16)).astype(np.float32) for _ in range(3))
    outs = []
    for one, window in ((cache, 20), (sliding, None)):
        seq = one.add(range(70))
        batch = one.plan([(seq, 70)])
        one.write(0, batch, k, v)
        outs.append(one.attend(0, batch, q, window=window))
    assert_bitwise(outs[0], outs[1])
    for bad in (0, -1):
        with pytest.raises(InvalidArgument, match="window"):
            sliding.attend(0, batch, q, window=bad)


def test_blocks_outside_the_window_go_back_to_the_pool() -> None:
    sliding = KVGroup("sliding_window", [1], num_kv_heads=1, head_dim=16, window=20, num_blocks=5)
    cache = mixed(groups=[KVGroup("full", [0, 2, 3], num_kv_heads=2, head_dim=8), sliding])
    seq = cache.add(range(200))
    k = np.zeros((4, 2, 8), np.float32)
    s = np.zeros((4, 1, 16), np.float32)
    for _ in range(50):
        batch = cache.plan([(seq, 4)])
        for layer in (0, 2, 3):
            cache.write(layer, batch, k, k)
        cache.write(1, batch, s, s)
        cache.commit(batch)
        held = [block for block in cache.block_table(seq, 1) if block >= 0]
        assert len(held) <= 3
        cache.check()
    assert cache.stats()["groups"][1]["used"] <= 3
    assert cache.stats()["groups"][0]["used"] == 13
    k_read, _ = cache.read(1, seq)
    assert 19 <= len(k_read) <= 48
    cache.free(seq)
    assert_no_leak(cache)


def test_a_rollback_deeper_than_the_window_reaches_is_refused() -> None:
    for rollback in (0, 40):
        cache = KVCache(groups=[KVGroup("sliding_window", [0], num_kv_heads=1, head_dim=2, window=16)], num_blocks=16,
                        dtype="float32", num_threads=1, max_rollback=rollback)  # fmt: skip
        seq = cache.add(range(120))
        x = np.zeros((20, 1, 2), np.float32)
        for _ in range(6):
            batch = cache.plan([(seq, 20)])
            cache.write(0, batch, x, x)
            cache.commit(batch)
        with pytest.raises(InvalidArgument, match="max_rollback"):
            cache.truncate(seq, 30)
        assert cache.num_computed_tokens(seq) == 120
        cache.truncate(seq, 120 - rollback)
        cache.append(seq, [1])
        batch = cache.plan([(seq, 1)])
        cache.write(0, batch, x[:1], x[:1])
        assert np.isfinite(cache.attend(0, batch, x[:1])).all()
        cache.check()


def test_trap_15_latent_rows() -> None:
    nope, rope, width, rank, heads, tokens = 8, 4, 6, 16, 3, 40
    rng = np.random.default_rng(5)
    draw = lambda *shape: rng.standard_normal(shape)  # noqa: E731
    c, k_rope = draw(tokens, rank), draw(tokens, rope)
    up_k, up_v = draw(heads, rank, nope), draw(heads, rank, width)
    q_nope, q_rope = draw(tokens, heads, nope), draw(tokens, heads, rope)
    cache = KVCache(groups=[KVGroup("latent", [0], rank=rank, rope_dim=rope)], num_blocks=4, dtype="float32",
                    num_threads=1)  # fmt: skip
    assert cache.bytes_per_token == 20 * 4
    seq = cache.add(range(tokens))
    batch = cache.plan([(seq, tokens)])
    row = np.concatenate([c, k_rope], 1)[:, None].astype(np.float32)
    assert row.shape[2] == 20
    cache.write(0, batch, row)
    q = np.concatenate([np.einsum("thn,hrn->thr", q_nope, up_k), q_rope], 2).astype(np.float32)
    scale = (nope + rope) ** -0.5
    assert scale == pytest.approx(1 / np.sqrt(12))
    latent = cache.attend(0, batch, q, scale)
    absorbed = np.einsum("thr,hrw->thw", latent, up_v)
    assert absorbed.shape == (tokens, heads, 6)
    k = np.concatenate([np.einsum("tr,hrn->thn", c, up_k), np.repeat(k_rope[:, None], heads, 1)], 2)
    v = np.einsum("tr,hrw->thw", c, up_v)
    full_q = np.concatenate([q_nope, q_rope], 2)
    for t in range(tokens):
        for h in range(heads):
            weights = softmax((k[: t + 1, h] @ full_q[t, h] * scale)[None])[0]
            np.testing.assert_allclose(absorbed[t, h], weights @ v[: t + 1, h], atol=1e-4)
    with pytest.raises(InvalidArgument, match="scale"):
        cache.attend(0, batch, q)
    with pytest.raises(InvalidArgument, match="v:"):
        cache.write(0, batch, row, row)


def test_deepseek_v3_takes_70272_bytes_a_token() -> None:
    cache = KVCache(groups=[KVGroup("latent", range(61), rank=512, rope_dim=64)], num_blocks=2, num_threads=1)
    assert cache.bytes_per_token == 70_272
    llama = KVCache(num_layers=32, num_kv_heads=8, head_dim=128, num_blocks=2, num_threads=1)
    assert llama.bytes_per_token == 128 << 10
    half = KVCache(num_layers=32, num_kv_heads=8, head_dim=128, num_blocks=2, dtype="fp8", num_threads=1)
    assert half.bytes_per_token == 64 << 10


def encoder_decoder(**changes: Any) -> KVCache:
    sizes: dict[str, Any] = {
        "groups": [KVGroup("full", [0, 1]), KVGroup("cross", [2, 3], num_blocks=8)],
        "num_kv_heads": 2, "head_dim": 8, "num_blocks": 16, "dtype": "float32", "num_threads": 1,
    }  # fmt: skip
    return KVCache(**(sizes | changes))


def test_cross_attention_sees_all_of_the_encoder() -> None:
    cache = encoder_decoder()
    cache._fill(float("nan"))
    rng = np.random.default_rng(2)
    draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    sequences = []
    for tokens in (37, 5):
        seq = cache.add([1, 2, 3])
        memory = {layer: (draw(tokens, 2, 8), draw(tokens, 2, 8)) for layer in (2, 3)}
        for layer, (k, v) in memory.items():
            cache.write_cross(layer, seq, k, v)
        sequences.append((seq, memory))
    batch = cache.plan([(seq, 3) for seq, _ in sequences])
    x, q = draw(6, 2, 8), draw(6, 4, 8)
    for layer in (0, 1):
        cache.write(layer, batch, x, x)
    for layer in (2, 3):
        out = cache.attend(layer, batch, q)
        for row in range(6):
            k, v = sequences[row // 3][1][layer]
            for h in range(4):
                weights = softmax((k[:, h // 2] @ q[row, h] * 8**-0.5)[None])[0]
                np.testing.assert_allclose(out[row, h], weights @ v[:, h // 2], atol=1e-5)
    cache.commit(batch)
    beams = [sequences[0][0], *cache.fork(sequences[0][0], 3)]
    assert cache.snapshot()["sequences"][-1]["cross"] == cache.snapshot()["sequences"][0]["cross"]
    cache.free(beams[0])
    np.testing.assert_array_equal(cache.read(2, beams[1])[0], sequences[0][1][2][0])
    for beam in beams[1:]:
        cache.append(beam, [9])
    batch = cache.plan([(beam, 1) for beam in beams[1:]])
    alone = cache.attend(2, batch, np.repeat(q[:1], 3, 0))
    assert_bitwise(alone[0], alone[2])
    for seq in [*beams[1:], sequences[1][0]]:
        cache.free(seq)
    assert_no_leak(cache)


def test_an_encoder_is_written_once() -> None:
    cache = encoder_decoder()
    seq = cache.add([1, 2])
    x = np.zeros((20, 2, 8), np.float32)
    batch = cache.plan([(seq, 2)])
    with pytest.raises(InvalidState, match="write_cross"):
        cache.attend(2, batch, np.zeros((2, 2, 8), np.float32))
    cache.write_cross(2, seq, x, x)
    with pytest.raises(InvalidState, match="already"):
        cache.write_cross(2, seq, x, x)
    with pytest.raises(InvalidArgument, match="20 encoder tokens"):
        cache.write_cross(3, seq, x[:4], x[:4])
    with pytest.raises(InvalidArgument, match="not of kind cross"):
        cache.write_cross(0, seq, x, x)
    with pytest.raises(InvalidArgument):
        cache.write(2, batch, x[:2], x[:2])
    with pytest.raises(InvalidState, match="not written"):
        cache.read(3, seq)
    big = np.zeros((16 * 8, 2, 8), np.float32)
    other = cache.add([1, 2])
    with pytest.raises(OutOfBlocks, match="8 needed, 6 available"):
        cache.write_cross(2, other, big, big)
    cache.check()


def test_an_encoders_memory_is_shared_by_reference() -> None:
    cache = encoder_decoder()
    first, second, third = cache.add([1, 2]), cache.add([3]), cache.add([4])
    x = np.random.default_rng(3).standard_normal((20, 2, 8)).astype(np.float32)
    with pytest.raises(InvalidState, match="source has no K and V"):
        cache.share_cross(second, first)
    for layer in (2, 3):
        cache.write_cross(layer, first, x, x)
    stale = cache.plan([(second, 1)])
    cache.share_cross(second, first)
    assert cache.stats()["groups"][-1]["used"] == 2
    with pytest.raises(StaleBatch):
        cache.attend(2, stale, x[:1])
    for again in (first, second):
        with pytest.raises(InvalidState, match="already"):
            cache.share_cross(again, first)
    cache.check()
    cache.free(first)
    batch = cache.plan([(second, 1)])
    assert np.isfinite(cache.attend(3, batch, x[:1])).all()
    np.testing.assert_array_equal(cache.read(2, second)[0], x)
    with pytest.raises(InvalidHandle):
        cache.share_cross(third, first)
    cache.free(second)
    cache.free(third)
    assert_no_leak(cache)


@pytest.mark.parametrize("ahead", [0, 1, 4, 6])
def test_a_bias_by_distance_to_both_sides(ahead: int) -> None:
    """Rows of a sequence over as many rows of an encoder, each side of the table clamped at its end."""
    rng, tokens = np.random.default_rng(4), 25
    q, k, v = (rng.standard_normal((tokens, 2, 8)).astype(np.float32) for _ in range(3))
    table = rng.standard_normal((2, 7)).astype(np.float32)
    cache = encoder_decoder()
    seq = cache.add(range(tokens))
    cache.write_cross(2, seq, k, v)
    batch = cache.plan([(seq, tokens)])
    options: dict[str, Any] = {"scale": 1.0, "position_bias": table, "bias_ahead": ahead}
    out = cache.attend(2, batch, q, **options)
    weights = cache.attention_weights(2, batch, q, **options)
    before = 6 - ahead
    for row in range(tokens):
        distances = np.clip(np.arange(tokens) - row, -before, ahead)
        for h in range(2):
            want = softmax((k[:, h] @ q[row, h] + table[h, distances + before])[None])[0]
            np.testing.assert_allclose(weights[row, h], want, atol=1e-5)
            np.testing.assert_allclose(out[row, h], want @ v[:, h], atol=1e-4)
    with pytest.raises(InvalidArgument, match="bias_ahead: expected at most 6, got 7"):
        cache.attend(2, batch, q, position_bias=table, bias_ahead=7)
    with pytest.raises(InvalidArgument, match="bias_ahead: expected None without a position_bias"):
        cache.attend(2, batch, q, bias_ahead=1)


def test_decoders_share_prefixes_only_of_the_same_input() -> None:
    cache = encoder_decoder()
    x = np.zeros((20, 2, 8), np.float32)

    def go(extra: str | None) -> int:
        seq = cache.add(range(20), extra=extra)
        batch = cache.plan([(seq, 20 - seq.num_cached_tokens)])
        for layer in (0, 1):
            cache.write(layer, batch, x[: batch.num_tokens], x[: batch.num_tokens])
        cache.commit(batch)
        cache.free(seq)
        return seq.num_cached_tokens

    assert [go(None), go(None), go("a"), go("a"), go("b")] == [0, 0, 0, 19, 0]


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([], "num_layers|layer"),
        ([KVGroup("none", [0])], "at least one of kind full"),
        ([KVGroup("full", [0]), KVGroup("full", [0])], "in two groups"),
        ([KVGroup("full", [1])], "layer 1"),
        ([KVGroup("full", [0]), KVGroup("cross", [1]), KVGroup("cross", [2])], "at most one of kind cross"),
        ([KVGroup("latent", [0], rank=1000, rope_dim=64)], "576|k_dim|rank"),
        ([KVGroup("latent", [0], rank=3, rope_dim=4)], "even"),
    ],
)  # fmt: skip
def test_groups_that_make_no_cache(groups: list[KVGroup], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        KVCache(groups=groups, num_kv_heads=1, head_dim=8, num_blocks=4, num_threads=1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "half", "layers": [0]}, "kind: expected one of full"),
        ({"kind": "full", "layers": []}, "at least one"),
        ({"kind": "full", "layers": [-1]}, "layers"),
        ({"kind": "full", "layers": [1 << 40]}, "layers"),
        ({"kind": "sliding_window", "layers": [0]}, "window"),
        ({"kind": "sliding_window", "layers": [0], "window": 0}, "window"),
        ({"kind": "full", "layers": [0], "window": 4}, "window: expected none"),
        ({"kind": "latent", "layers": [0], "rank": 8}, "rope_dim"),
        ({"kind": "none", "layers": [0], "num_blocks": 4}, "num_blocks: expected none"),
    ],
)  # fmt: skip
def test_bad_groups(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        KVGroup(**arguments)
    with pytest.raises(InvalidArgument, match=message):
        KVCache(groups=[arguments], num_kv_heads=1, head_dim=8, num_blocks=4, num_threads=1)


def test_groups_are_groups() -> None:
    for bad in (5, [5], "full", [None]):
        with pytest.raises(TypeError, match="groups"):
            KVCache(groups=bad, num_blocks=4)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="num_layers"):
        KVCache(groups=[KVGroup("full", [0])], num_layers=2, num_kv_heads=1, head_dim=2, num_blocks=4, num_threads=1)
    with pytest.raises(InvalidArgument, match="head_dim"):
        KVCache(groups=[KVGroup("full", [0], num_kv_heads=1)], num_blocks=4, num_threads=1)
    with pytest.raises(TypeError, match="num_blocks: expected an integer"):
        KVCache(num_layers=1, num_kv_heads=1, head_dim=2)
    group = KVGroup("sliding_window", (2, 0), num_kv_heads=1, head_dim=4, window=7)
    assert repr(group) == "KVGroup('sliding_window', [2, 0], num_kv_heads=1, head_dim=4, window=7)"
    assert group == KVGroup("sliding_window", [2, 0], num_kv_heads=1, head_dim=4, window=7)
    cache = mixed()
    assert [g.kind for g in cache.groups] == ["full", "sliding_window", "latent", "none"]
    with pytest.raises(InvalidArgument, match="kind none"):
        cache.read(4, cache.add([1]))
