"""Drafts that branch: a committed path is, to the bit, what it would be had it been planned and written alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore import Batch, InvalidArgument, InvalidState, KVCache, KVGroup, OutOfBlocks, Sequence, StaleBatch
from kvmodel import values
from kvtools import Floats, assert_bitwise, assert_no_leak, run_python

FORMATS: list[dict[str, Any]] = [
    {"dtype": "float32"},
    {"dtype": "float16"},
    {"dtype": "bfloat16"},
    {"dtype": "fp8_e4m3"},
    {"dtype": "fp8_e4m3", "scale_mode": "per_token_head"},
    {"dtype": "fp8_e5m2", "scale_mode": "per_token_head"},
    {"dtype": "int8"},
    {"dtype": "int4"},
]
LAYERS = 3
HEADS, K_DIM, V_DIM = 2, 6, 10
TREE = [-1, 0, 0, 1, 2, 3, -1]
"""Seven rows: 0 - 1 - 3 - 5, 0 - 2 - 4, and 6 beside 0."""


def make(window: int = 20, num_blocks: int = 64, **changes: Any) -> KVCache:
    """Two full layers, and one with a window between them."""
    groups = [
        KVGroup("full", [0, 2], num_kv_heads=HEADS, head_dim=K_DIM, v_head_dim=V_DIM),
        KVGroup("sliding_window", [1], num_kv_heads=HEADS, head_dim=K_DIM, v_head_dim=V_DIM, window=window),
    ]
    cache = KVCache(groups=groups, num_blocks=num_blocks, num_threads=1, **({"dtype": "float32"} | changes))
    if cache.dtype not in ("int8", "int4"):
        cache._fill(float("nan"))
    return cache


def rows(paths: list[list[int]], layer: int) -> tuple[Floats, Floats, Floats]:
    """K, V and Q of the last token of each path: only the tokens of the path decide about them."""
    sizes = [HEADS * K_DIM, HEADS * V_DIM, 2 * HEADS * K_DIM]
    joint = np.array([values(repr(path).encode(), layer, sum(sizes)) for path in paths], np.float32)
    k, v, q = np.split(joint.reshape(len(paths), sum(sizes)), np.cumsum(sizes)[:2], axis=1)
    return k.reshape(-1, HEADS, K_DIM), v.reshape(-1, HEADS, V_DIM), q.reshape(-1, 2 * HEADS, K_DIM)


def compute(cache: KVCache, batch: Batch, paths: list[list[int]], **options: Any) -> Floats:
    """Write and attend: [layers, rows, q heads, V_DIM]."""
    outs = []
    for layer in range(LAYERS):
        k, v, q = rows(paths, layer)
        cache.write(layer, batch, k, v)
        outs.append(cache.attend(layer, batch, q, **options))
    return np.stack(outs)


def path_to(parents: list[int], row: int) -> list[int]:
    path = [row]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


def linear(cache: KVCache, seq: Sequence) -> Floats:
    """One step over all open tokens."""
    tokens, start = cache.token_ids(seq).tolist(), cache.num_computed_tokens(seq)
    batch = cache.plan([(seq, len(tokens) - start)])
    out = compute(cache, batch, [tokens[: i + 1] for i in range(start, len(tokens))])
    cache.commit(batch)
    return out


def plan_tree(cache: KVCache, seq: Sequence, drafts: list[int], parents: list[int]) -> tuple[Batch, list[list[int]]]:
    """The drafts' batch, and for each row all tokens up to it."""
    before = cache.token_ids(seq).tolist()
    cache.append(seq, drafts)
    batch = cache.plan([(seq, len(drafts))], parents=[parents])
    return batch, [before + [drafts[i] for i in path_to(parents, row)] for row in range(len(drafts))]


def assert_same(a: KVCache, s: Sequence, b: KVCache, t: Sequence) -> None:
    a.check()
    b.check()
    assert a.token_ids(s).tolist() == b.token_ids(t).tolist()
    assert a.num_computed_tokens(s) == b.num_computed_tokens(t)
    for layer in range(LAYERS):
        for x, y in zip(a.read(layer, s), b.read(layer, t), strict=True):
            assert_bitwise(x, y, f"layer {layer}")


def found(cache: KVCache, tokens: list[int]) -> int:
    seq = cache.add([*tokens, 999])
    n = seq.num_cached_tokens
    cache.free(seq)
    return n


@st.composite
def trees(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Parents, and a path: mostly chains with some branches."""
    n = draw(st.integers(1, 40))
    parents = [-1]
    for row in range(1, n):
        parents.append(draw(st.sampled_from([row - 1, row - 1, draw(st.integers(-1, row - 1))])))
    end = draw(st.integers(0, n))
    return parents, path_to(parents, end) if end < n else []


@settings(max_examples=60, deadline=None)
@given(
    form=st.sampled_from(FORMATS),
    window=st.sampled_from([1, 7, 20, 40]),
    block_size=st.sampled_from([16, 32]),
    prompt=st.integers(1, 50),
    steps=st.lists(trees(), min_size=1, max_size=4),
    forks=st.booleans(),
    tokens=st.lists(st.integers(0, 2), min_size=40, max_size=40),
)
def test_a_path_is_what_it_would_be_alone(
    form: dict[str, Any],
    window: int,
    block_size: int,
    prompt: int,
    steps: list[tuple[list[int], list[int]]],
    forks: bool,
    tokens: list[int],
) -> None:
    tree, twin = (make(window, block_size=block_size, **form) for _ in range(2))
    start = list(range(100, 100 + prompt))
    s, t = tree.add(start), twin.add(start)
    assert_bitwise(linear(tree, s), linear(twin, t))
    for parents, path in steps:
        if forks:
            # Somebody else reads the block in which the drafts begin.
            other = tree.fork(s)
            stored = [tree.read(layer, other) for layer in range(LAYERS)]
        n = tree.num_tokens(s)
        drafts = tokens[: len(parents)]
        batch, paths = plan_tree(tree, s, drafts, parents)
        assert batch.positions.tolist() == [len(path) - 1 for path in paths]
        out = compute(tree, batch, paths)
        tree.check()
        tree.commit(batch, keep=[path])
        tree.check()
        if path:
            twin.append(t, [drafts[row] for row in path])
            assert_bitwise(out[:, path], linear(twin, t))
        else:
            # A plan that is forgotten: it may have returned blocks that a window has passed.
            twin.append(t, [0])
            twin.plan([(t, 1)])
            twin.truncate(t, n)
        assert tree.num_tokens(s) == n + len(path)
        assert_same(tree, s, twin, t)
        if forks:
            for layer in range(LAYERS):
                for x, y in zip(stored[layer], tree.read(layer, other), strict=True):
                    assert_bitwise(x, y)
            tree.free(other)
    # A later token, and what others find.
    for cache, seq in ((tree, s), (twin, t)):
        cache.append(seq, [77])
    assert_bitwise(linear(tree, s), linear(twin, t))
    known = tree.token_ids(s).tolist()
    for prefix in (known, known[: len(known) // 2], [*known[:-1], 5]):
        assert found(tree, prefix) == found(twin, prefix)
    tree.free(s)
    assert found(tree, known) >= min(len(known), 1)
    assert_no_leak(tree)


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: "-".join(form.values()))
def test_every_row_is_its_path(form: dict[str, Any]) -> None:
    """Not only those of the path that is kept; the weights, too."""
    cache = make(**form)
    seq = cache.add(range(30))
    linear(cache, seq)
    batch, paths = plan_tree(cache, seq, [1, 2, 3, 4, 5, 6, 7], TREE)
    out = compute(cache, batch, paths)
    weights = [cache.attention_weights(layer, batch, rows(paths, layer)[2]) for layer in range(LAYERS)]
    for row, path in enumerate(paths):
        alone = cache.add(path, use_prefix=False)
        single = cache.plan([(alone, len(path))])
        assert_bitwise(compute(cache, single, [path[: i + 1] for i in range(len(path))])[:, -1], out[:, row])
        for layer in range(LAYERS):
            q = rows([path[: i + 1] for i in range(len(path))], layer)[2]
            expected = cache.attention_weights(layer, single, q, rows=[len(path) - 1])
            assert_bitwise(weights[layer][row, :, : len(path)], expected[0])
            assert not weights[layer][row, :, len(path) :].any()
        cache.free(alone)


def test_only_the_path_is_found() -> None:
    cache = make()
    seq = cache.add(range(40))
    linear(cache, seq)
    batch, paths = plan_tree(cache, seq, [1, 2, 3, 4, 5, 6, 7], TREE)
    compute(cache, batch, paths)
    assert found(cache, paths[5]) == 40, "nothing before the commit"
    cache.commit(batch, keep=[[0, 2, 4]])
    assert cache.token_ids(seq)[40:].tolist() == [1, 3, 5]
    assert found(cache, paths[4]) == 43
    assert found(cache, paths[5]) == 41
    assert found(cache, paths[6]) == 40


def test_several_sequences_with_and_without_trees() -> None:
    cache = make()
    seqs = [cache.add(range(at, at + 20 + at // 100)) for at in (0, 100, 200, 300)]
    for seq in seqs:
        linear(cache, seq)
    before = [cache.token_ids(seq).tolist() for seq in seqs]
    cache.append(seqs[0], [1, 2, 3, 4, 5, 6, 7])
    for seq in seqs[1:]:
        cache.append(seq, [8, 9])
    batch = cache.plan([(seqs[0], 7), *((seq, 2) for seq in seqs[1:])], parents=[TREE, None, [-1, -1], None])
    n = [len(tokens) for tokens in before]
    assert batch.positions.tolist() == [
        *(n[0] + depth for depth in (0, 1, 1, 2, 2, 3, 0)), n[1], n[1] + 1, n[2], n[2], n[3], n[3] + 1,
    ]  # fmt: skip
    paths = [before[0] + [row + 1 for row in path_to(TREE, row)] for row in range(7)]
    ends = [(1, [8]), (1, [8, 9]), (2, [8]), (2, [9]), (3, [8]), (3, [8, 9])]
    paths += [before[at] + end for at, end in ends]
    compute(cache, batch, paths)
    # Tokens that come behind the drafts stay behind the path.
    cache.append(seqs[0], [50])
    cache.append(seqs[3], [51])
    cache.commit(batch, keep=[[0, 1], None, [1], [0]])
    now = [[1, 2, 50], [8, 9], [9], [8, 51]]
    for seq, tokens, end in zip(seqs, before, now, strict=True):
        assert cache.token_ids(seq).tolist() == tokens + end
    assert [cache.num_computed_tokens(seq) - was for seq, was in zip(seqs, n, strict=True)] == [2, 2, 1, 1]
    twin = make()
    for seq, tokens in zip(seqs, before, strict=True):
        other = twin.add(tokens)
        linear(twin, other)
        twin.append(other, cache.token_ids(seq)[len(tokens) : cache.num_computed_tokens(seq)])
        linear(twin, other)
        twin.append(other, cache.token_ids(seq)[cache.num_computed_tokens(seq) :])
        assert_same(cache, seq, twin, other)


def test_drafts_that_do_not_branch() -> None:
    cache = make()
    seq = cache.add(range(14))
    linear(cache, seq)
    cache.append(seq, [1, 2, 3, 4])
    batch = cache.plan([(seq, 4)])
    compute(cache, batch, [[*range(14), *range(1, i)] for i in range(2, 6)])
    assert cache.stats()["used"] == 4
    cache.commit(batch, keep=[range(2)])
    assert cache.token_ids(seq)[14:].tolist() == [1, 2]
    assert cache.stats()["used"] == 2, "the block of the other two is given back"
    with pytest.raises(StaleBatch, match="committed in part"):
        cache.commit(batch)
    with pytest.raises(StaleBatch):
        cache.attend(0, batch, np.ones((4, 4, K_DIM), np.float32))
    cache.check()


def test_a_batch_that_keeps_everything_ends_too() -> None:
    cache = make()
    seq = cache.add(range(5))
    batch = cache.plan([(seq, 5)])
    compute(cache, batch, [list(range(i + 1)) for i in range(5)])
    cache.commit(batch, keep=[None])
    assert cache.num_computed_tokens(seq) == 5
    with pytest.raises(StaleBatch):
        cache.commit(batch, keep=[None])


def test_views_and_pins_stay_as_they_are() -> None:
    """Of the block in which the drafts begin: they are written into a copy."""
    cache = make(dtype="bfloat16")
    seq = cache.add(range(20))
    linear(cache, seq)
    view, pin = cache.view(0, seq, 1), cache.pin(seq)
    shown = np.array(view.k)
    batch, paths = plan_tree(cache, seq, [1, 2, 3, 4, 5, 6, 7], TREE)
    compute(cache, batch, paths)
    with pytest.raises(InvalidState):
        cache.view(0, seq, 1)
    cache.commit(batch, keep=[[6]])
    np.testing.assert_array_equal(shown, view.k)
    assert cache.view(0, seq, 1).num_tokens == 5
    cache.unpin(pin)
    cache.check()


def test_the_newest_plan_counts() -> None:
    """A tree that is planned again, forked or truncated is forgotten, as any plan."""
    cache = make()
    seq = cache.add(range(20))
    linear(cache, seq)
    ends: list[Callable[[], Any]] = [
        lambda: cache.plan([(seq, 7)]),
        lambda: cache.free(cache.fork(seq)),
        lambda: cache.truncate(seq, 20),
    ]
    for end in ends:
        cache.truncate(seq, 20)
        batch, paths = plan_tree(cache, seq, [1, 2, 3, 4, 5, 6, 7], TREE)
        compute(cache, batch, paths)
        end()
        with pytest.raises(StaleBatch):
            cache.commit(batch, keep=[[0]])
        cache.check()
    assert cache.token_ids(seq).tolist() == list(range(20))


def test_saved_after_a_path(tmp_path: Path) -> None:
    cache = make(dtype="int4")
    seq = cache.add(range(30))
    linear(cache, seq)
    batch, paths = plan_tree(cache, seq, [1, 2, 3, 4, 5, 6, 7], TREE)
    compute(cache, batch, paths)
    cache.commit(batch, keep=[[0, 2, 4]])
    cache.save(seq, tmp_path / "tree")
    twin = make(dtype="int4")
    other = twin.add(paths[4])
    linear(twin, other)
    twin.save(other, tmp_path / "twin")
    assert_same(make_loaded := make(dtype="int4"), make_loaded.load(tmp_path / "tree"), twin, other)


def test_cross_layers_take_positions_of_the_path() -> None:
    """All rows see the encoder's tokens; a bias by distance counts from the row's position."""

    def cross() -> KVCache:
        groups = [
            KVGroup("full", [0], num_kv_heads=1, head_dim=4), KVGroup("cross", [1], num_kv_heads=1, head_dim=4),
            KVGroup("none", [2]),
        ]  # fmt: skip
        return KVCache(groups=groups, num_blocks=16, dtype="float32", num_threads=1)

    rng = np.random.default_rng(0)
    memory, x = rng.standard_normal((2, 9, 1, 4), np.float32), rng.standard_normal((9, 1, 4), np.float32)
    bias = rng.standard_normal((1, 6), np.float32)
    tree, twin = cross(), cross()
    s, t = tree.add([1, 2, 3, 4, 5, 6, 7, 8, 9]), twin.add([1, 2, 3, 4, 6, 8])
    for cache, seq in ((tree, s), (twin, t)):
        cache.write_cross(1, seq, memory[0], memory[1])
        batch = cache.plan([(seq, 2)])
        cache.write(0, batch, x[:2], x[:2])
        cache.commit(batch)
    path = [0, 1, 3, 5]
    batch = tree.plan([(s, 7)], parents=[TREE])
    single = twin.plan([(t, 4)])
    tree.write(0, batch, x[2:], x[2:])
    twin.write(0, single, x[2:][path], x[2:][path])
    for layer in (0, 1):
        out = tree.attend(layer, batch, x[2:], position_bias=bias)
        assert_bitwise(out[path], twin.attend(layer, single, x[2:][path], position_bias=bias))
        weights = tree.attention_weights(layer, batch, x[2:], rows=[5], position_bias=bias)
        expected = twin.attention_weights(layer, single, x[2:][path], rows=[3], position_bias=bias)
        assert_bitwise(weights[..., : expected.shape[2]], expected)
    tree.commit(batch, keep=[path])
    twin.commit(single)
    for a, b in zip(tree.read(0, s), twin.read(0, t), strict=True):
        assert_bitwise(a, b)
    tree.check()


def test_blocks_for_all_rows_or_none() -> None:
    cache = make(num_blocks=3)
    seq = cache.add(range(16))
    linear(cache, seq)
    cache.append(seq, range(33))
    with pytest.raises(OutOfBlocks):
        cache.plan([(seq, 33)], parents=[[-1] * 33])
    cache.check()
    batch = cache.plan([(seq, 32)], parents=[[-1] * 32])
    compute(cache, batch, [[*range(16), i] for i in range(32)])
    cache.commit(batch, keep=[[31]])
    # What stands behind the drafts stands behind the path.
    assert cache.token_ids(seq)[16:].tolist() == [31, 32]
    assert cache.num_free_blocks == 1


Call = Callable[[KVCache, Sequence, Batch], Any]

BAD: list[tuple[type[Exception], str, Call]] = [
    (InvalidArgument, "parents: expected those of each of 1 sequences, got those of 0",
     lambda c, s, b: c.plan([(s, 3)], parents=[])),
    (InvalidArgument, "parents: expected those of each of 1 sequences, got those of 2",
     lambda c, s, b: c.plan([(s, 3)], parents=[None, None])),
    (InvalidArgument, "parents[0]: expected one for each of 3 new tokens, got 2",
     lambda c, s, b: c.plan([(s, 3)], parents=[[-1, 0]])),
    (InvalidArgument, "parents[0]: expected that row 1 follows none or one before it, got row 1",
     lambda c, s, b: c.plan([(s, 3)], parents=[[-1, 1, 0]])),
    (InvalidArgument, "parents[0]: expected that row 0 follows none or one before it, got row 2",
     lambda c, s, b: c.plan([(s, 3)], parents=[[2, 1, 0]])),
    (InvalidArgument, "parents[0]: expected rows, got -2", lambda c, s, b: c.plan([(s, 3)], parents=[[-2, 0, 0]])),
    (InvalidArgument, "parents[0]: expected rows, got 18446744073709551616",
     lambda c, s, b: c.plan([(s, 3)], parents=[[-1, 2**64, 0]])),
    (InvalidArgument, "parents[0]: expected at most 1024 rows, got more",
     lambda c, s, b: c.plan([(s, 3)], parents=[itertools.repeat(-1)])),
    (InvalidArgument, "parents[64]: expected at most 0 rows, got more",
     lambda c, s, b: c.plan([(s, 3)], parents=itertools.repeat([-1] * 1024))),
    (InvalidArgument, "parents: expected at most 1048576 lists, got more",
     lambda c, s, b: c.plan([(s, 3)], parents=itertools.repeat(None))),
    (TypeError, "parents[0]: expected integers, got bool", lambda c, s, b: c.plan([(s, 2)], parents=[[-1, False]])),
    (TypeError, "parents[0]: expected integers, got float", lambda c, s, b: c.plan([(s, 2)], parents=[[-1, 0.0]])),
    (TypeError, "parents[0]: expected integers, got NoneType", lambda c, s, b: c.plan([(s, 2)], parents=[[None, 0]])),
    (TypeError, "parents[0]: expected a list of rows or None, got int", lambda c, s, b: c.plan([(s, 2)], parents=[-1])),
    (TypeError, "parents: expected a list with a list of rows", lambda c, s, b: c.plan([(s, 2)], parents=3)),
    (InvalidArgument, "keep[0]: expected the rows of one path of the sequence's tree, got None",
     lambda c, s, b: c.commit(b)),
    (InvalidArgument, "keep[0]: expected the rows of one path of the sequence's tree, got None",
     lambda c, s, b: c.commit(b, keep=[None])),
    (InvalidArgument, "keep: expected the rows of each of 1 sequences, got those of 0",
     lambda c, s, b: c.commit(b, keep=[])),
    (InvalidArgument, "keep: expected the rows of each of 1 sequences, got those of 2",
     lambda c, s, b: c.commit(b, keep=[[0], [1]])),
    (InvalidArgument, "keep[0]: expected rows from 0 to 6, got 7", lambda c, s, b: c.commit(b, keep=[[0, 7]])),
    (InvalidArgument, "keep[0]: expected rows, got -1", lambda c, s, b: c.commit(b, keep=[[-1]])),
    (InvalidArgument, "keep[0]: expected rows that ascend, got 1 before 0",
     lambda c, s, b: c.commit(b, keep=[[1, 0]])),
    (InvalidArgument, "keep[0]: expected rows that ascend, got 0 before 0",
     lambda c, s, b: c.commit(b, keep=[[0, 0]])),
    (InvalidArgument, "keep[0]: expected a path: row 2 follows row 0, got it after row 1",
     lambda c, s, b: c.commit(b, keep=[[0, 1, 2]])),
    (InvalidArgument, "keep[0]: expected a path: row 1 follows row 0, got it after the token before the plan",
     lambda c, s, b: c.commit(b, keep=[[1]])),
    (InvalidArgument, "keep[0]: expected a path: row 6 follows the token before the plan, got it after row 0",
     lambda c, s, b: c.commit(b, keep=[[0, 6]])),
    (InvalidArgument, "keep[0]: expected at most 7 rows, got more",
     lambda c, s, b: c.commit(b, keep=[itertools.count()])),
    (TypeError, "keep: expected a list with a list of rows", lambda c, s, b: c.commit(b, keep=0)),
    (TypeError, "keep[0]: expected integers, got str", lambda c, s, b: c.commit(b, keep=["0"])),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "message", "call"), BAD, ids=[str(i) for i in range(len(BAD))])
def test_what_is_said(kind: type[Exception], message: str, call: Call) -> None:
    """And that nothing has changed: the tree can be committed."""
    cache = make()
    seq = cache.add(range(20))
    linear(cache, seq)
    batch, paths = plan_tree(cache, seq, [1, 2, 3, 4, 5, 6, 7], TREE)
    compute(cache, batch, paths)
    before = cache.stats()
    with pytest.raises(kind) as raised:
        call(cache, seq, batch)
    assert message in str(raised.value)
    assert cache.stats() == before
    cache.check()
    cache.commit(batch, keep=[[0, 2, 4]])
    twin = make()
    other = twin.add(paths[4])
    linear(twin, other)
    assert_same(cache, seq, twin, other)


def test_layers_that_are_not_written() -> None:
    cache = make()
    seq = cache.add(range(20))
    linear(cache, seq)
    batch, paths = plan_tree(cache, seq, [1, 2, 3, 4, 5, 6, 7], TREE)
    k, v, _ = rows(paths, 0)
    cache.write(0, batch, k, v)
    with pytest.raises(InvalidState, match="2 not written"):
        cache.commit(batch, keep=[[0]])
    compute(cache, batch, paths)
    cache.commit(batch, keep=[[0]])
    cache.check()


def test_a_sequence_keeps_a_token() -> None:
    cache = make()
    seq = cache.add([1, 2])
    batch = cache.plan([(seq, 2)], parents=[[-1, -1]])
    compute(cache, batch, [[1], [2]])
    with pytest.raises(InvalidArgument, match=r"keep\[0\]: expected at least one row"):
        cache.commit(batch, keep=[[]])
    cache.append(seq, [3])
    cache.commit(batch, keep=[[]])
    assert (cache.token_ids(seq).tolist(), cache.num_computed_tokens(seq)) == ([3], 0)
    linear(cache, seq)
    cache.free(seq)
    assert_no_leak(cache)


def test_the_longest_tree() -> None:
    cache = make(num_blocks=70)
    seq = cache.add(range(5))
    linear(cache, seq)
    drafts = [i % 7 for i in range(1024)]
    # Two chains, row by row in turns.
    parents = [max(row - 2, -1) for row in range(1024)]
    batch, paths = plan_tree(cache, seq, drafts, parents)
    out = compute(cache, batch, paths)
    cache.commit(batch, keep=[list(range(1, 1024, 2))])
    twin = make(num_blocks=70)
    other = twin.add(paths[-1])
    assert_bitwise(linear(twin, other)[:, 5:], out[:, 1::2])
    assert_same(cache, seq, twin, other)


def test_lists_that_never_end() -> None:
    """They are refused before they fill the memory."""
    run_python(
        """
import itertools
from kvcore import InvalidArgument
from kvtools import make_cache

cache = make_cache()
seq = cache.add([1])
for parents in (itertools.repeat([]), itertools.repeat(itertools.repeat(0)), [range(2**62)]):
    try:
        cache.plan([(seq, 1)], parents=parents)
    except InvalidArgument as error:
        assert "at most" in str(error), error
    else:
        raise SystemExit("no error")
assert cache.num_tokens(seq) == 1
"""
    )
