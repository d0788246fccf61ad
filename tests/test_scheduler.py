"""Who goes into a batch, and who is let in."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvcore import KVCache, KVGroup
from kvcore.engine.engine import Engine
from kvcore.engine.metrics import RequestMetrics
from kvcore.engine.policy import AGING, order, reservation
from kvcore.engine.sampling_params import SamplingParams
from kvcore.engine.scheduler import Scheduler
from kvcore.engine.sequence import Sequence, State
from kvcore.engine.space import Space
from kvcore.errors import InvalidArgument, OutOfBlocks
from mocks import MockCache, MockDecoder

ARRIVALS = itertools.count()


def make(num_blocks: int = 100, *, seats: int = 8, budget: int = 16) -> tuple[Scheduler, MockCache]:
    cache = MockCache(num_blocks)
    return Scheduler(MockDecoder(cache), max_num_seqs=seats, max_num_batched_tokens=budget), cache


def seq(name: str, prompt: int, new: int = 4, *, first: int = 0, use_cache: bool = True) -> Sequence:
    ids = list(range(first, first + prompt))
    arrival = next(ARRIVALS)
    return Sequence(
        name,
        SamplingParams(),
        ids,
        prompt,
        new,
        use_cache,
        None,
        RequestMetrics(0.0),
        use_prefix=use_cache,
        order=order("fcfs", 0, arrival),
    )


def run(scheduler: Scheduler, cache: MockCache) -> list[tuple[str, int]]:
    """One step without a model: every sequence that is all there gets a token."""
    items = scheduler.schedule()
    if items:
        cache.commit(scheduler.batch)
    for s, n in items:
        s.metrics.first_scheduled_time = 0.0
        s.store(n)
        if s.num_missing == 0:
            s.token_ids.append(7)
            if s.num_generated == s.max_new_tokens:
                scheduler.release(s)
            elif s.use_cache:
                cache.append(s.handles[0], [7])
            else:
                scheduler.restart(s)
    return [(s.request_id, n) for s, n in items]


def test_decode_first_then_chunks_then_admission() -> None:
    scheduler, cache = make()
    scheduler.add(seq("a", 5))
    assert run(scheduler, cache) == [("a", 5)]
    scheduler.add(seq("b", 40, first=100))
    scheduler.add(seq("c", 3, first=200))
    assert run(scheduler, cache) == [("a", 1), ("b", 15)]
    assert run(scheduler, cache) == [("a", 1), ("b", 15)]
    assert run(scheduler, cache) == [("a", 1), ("b", 10), ("c", 3)]  # a has its four tokens
    assert run(scheduler, cache) == [("b", 1), ("c", 1)]


def test_seats_and_budget() -> None:
    scheduler, cache = make(seats=2, budget=3)
    for i, name in enumerate("abc"):
        scheduler.add(seq(name, 2, first=10 * i))
    assert run(scheduler, cache) == [("a", 2), ("b", 1)]
    assert run(scheduler, cache) == [("a", 1), ("b", 1)]
    assert [s.request_id for s in scheduler.waiting] == ["c"]


def test_a_request_is_let_in_when_its_prompt_fits() -> None:
    """Not its worst case: the answer may become shorter, or others may have ended by then."""
    scheduler, cache = make(4)  # 16 tokens
    scheduler.add(seq("a", 4, new=9))  # 12 stored in the end: 3 blocks
    scheduler.add(seq("b", 4, new=9, first=50))
    assert run(scheduler, cache) == [("a", 4), ("b", 4)]
    assert scheduler.room() == [0]  # both have a token more than a block now


def test_the_last_in_order_is_preempted_and_comes_back() -> None:
    scheduler, cache = make(4)
    first, second = seq("a", 4, new=9), seq("b", 4, new=9, first=50)
    scheduler.add(first)
    scheduler.add(second)
    steps = []
    while not (first.finished and second.finished):
        steps.append(run(scheduler, cache))
        cache.check()
    assert (scheduler.num_preemptions, second.metrics.num_preemptions, first.metrics.num_preemptions) == (1, 1, 0)
    # a needs its third block for its ninth token; b has eight tokens then, and gives back two blocks
    assert steps[:6] == [[("a", 4), ("b", 4)], *[[("a", 1), ("b", 1)]] * 4, [("a", 1)]]
    # one block was still found when a had ended, in which the last token is computed with those that are lost
    assert steps[9] == [("b", 5)]
    assert (second.num_computed_tokens, second.num_recomputed_tokens) == (12, 4)
    cache.check_empty()


def test_one_in_twenty_blocks_stays_free_for_others_to_grow() -> None:
    scheduler, cache = make(300, budget=4096)
    scheduler.add(seq("a", 4))
    run(scheduler, cache)
    scheduler.add(seq("b", 4 * 284, first=10))  # 1 block is held, 1 is needed next, 14 of 15 would be left
    assert run(scheduler, cache) == [("a", 1)]
    scheduler.add(seq("c", 4, first=5000))
    assert run(scheduler, cache) == [("a", 1)]  # nobody overtakes
    steps = [run(scheduler, cache) for _ in range(3)]
    assert steps == [[("a", 1)], [("b", 1136), ("c", 4)], [("b", 1), ("c", 1)]]


def test_shared_blocks_are_counted_once() -> None:
    scheduler, cache = make(7)
    scheduler.add(seq("a", 13, new=4))  # 16 stored: 4 blocks, 3 of them whole after the prompt
    run(scheduler, cache)
    scheduler.add(seq("b", 13, new=4))  # shares 3, needs 1
    assert run(scheduler, cache) == [("a", 1), ("b", 1)]
    other = seq("c", 5, new=1, first=100)  # 2 blocks; 2 are left, of which one is to stay free
    scheduler.add(other)
    assert [name for name, _ in run(scheduler, cache)] == ["a", "b"]
    assert other.state is State.WAITING
    assert not other.handles
    while other.state is State.WAITING:
        assert run(scheduler, cache)
    cache.check()


def test_a_refused_head_is_not_looked_up_in_every_step() -> None:
    scheduler, cache = make(4)
    scheduler.add(seq("a", 4, new=12))
    scheduler.add(seq("b", 13, new=1, first=50))
    for _ in range(8):
        run(scheduler, cache)
    assert cache.calls["add"] == 2


def test_equal_prompts_that_come_together_are_computed_once() -> None:
    scheduler, cache = make(budget=8)
    seqs = [seq(name, 17) for name in "abc"]
    other = seq("d", 3, first=100)
    for s in (*seqs, other):
        scheduler.add(s)
    assert run(scheduler, cache) == [("a", 8)]
    assert run(scheduler, cache) == [("a", 8)]
    # all blocks that can be shared are there: the others begin, each with its last token
    assert run(scheduler, cache) == [("a", 1), ("b", 1), ("c", 1), ("d", 3)]
    assert [s.num_cached_tokens for s in seqs] == [0, 16, 16]
    assert scheduler.num_preemptions == 0


def test_who_shares_the_beginning_only_waits_for_the_beginning_only() -> None:
    scheduler, cache = make(budget=8)
    scheduler.add(seq("a", 40))
    branch = seq("b", 9)
    branch.token_ids[8] = 99
    scheduler.add(branch)
    stranger = seq("c", 40, first=100)
    scheduler.add(stranger)
    assert run(scheduler, cache) == [("a", 8)]
    assert run(scheduler, cache) == [("a", 8)]
    assert branch.num_cached_tokens == 0  # the budget was used up by those before it
    assert branch in scheduler.waiting
    for _ in range(4):
        run(scheduler, cache)
    assert branch.num_cached_tokens == 8


def test_waiting_for_a_prompt_ends_with_it() -> None:
    """Whoever waits for blocks of a sequence that is preempted or aborted computes them itself."""
    scheduler, cache = make(budget=8)
    first, second = seq("a", 30), seq("b", 30)
    scheduler.add(first)
    scheduler.add(second)
    assert run(scheduler, cache) == [("a", 8)]
    scheduler.release(first)
    assert run(scheduler, cache) == [("b", 8)]
    assert second.num_cached_tokens == 8


def test_without_shared_prefixes_nobody_waits() -> None:
    cache = MockCache(100, enable_prefix_caching=False)
    scheduler = Scheduler(MockDecoder(cache), max_num_seqs=8, max_num_batched_tokens=16, share_prompts=False)
    for name in "ab":
        scheduler.add(seq(name, 8))
    assert run(scheduler, cache) == [("a", 8), ("b", 8)]


def test_priorities_go_first_and_age() -> None:
    """A request is overtaken by at most AGING later ones for each step of priority between them."""
    assert order("fcfs", -5, 7) == (7, 7)
    scheduler, cache = make(seats=1)
    old = seq("old", 2)
    old.order = order("priority", 1, 0)
    scheduler.add(seq("first", 2, new=4))
    assert [name for name, _ in run(scheduler, cache)] == ["first"]
    scheduler.add(old)
    names = []
    for arrival in range(1, 3 * AGING):
        while scheduler.running:
            names += [name for name, _ in run(scheduler, cache)]
        urgent = seq(f"urgent {arrival}", 2, new=1, first=arrival)
        urgent.order = order("priority", 0, arrival)
        scheduler.add(urgent)
        names += [name for name, _ in run(scheduler, cache)]
    begun = list(dict.fromkeys(names))
    assert begun.index("old") == AGING  # behind "first" and so many urgent ones, though more were always waiting
    assert old.finished


def test_the_least_urgent_is_preempted() -> None:
    scheduler, cache = make(4)
    late, urgent = seq("late", 4, new=9), seq("urgent", 4, new=9, first=50)
    late.order, urgent.order = order("priority", 5, 0), order("priority", 1, 1)
    scheduler.add(late)
    run(scheduler, cache)
    scheduler.add(urgent)
    while not urgent.finished:
        run(scheduler, cache)
    assert (late.metrics.num_preemptions, urgent.metrics.num_preemptions) == (1, 0)


@pytest.mark.parametrize(
    ("kind", "at_once"), [("known", 5), ("max_tokens", 4), ("power_of_two", 2), ("max_model_len", 1)]
)
def test_reservations(kind: str, at_once: int) -> None:
    """16 blocks of 4. 9 + 8 tokens are 3 blocks now and 4 in the end, 9 + 9 tokens 32 slots, 40 tokens 10 blocks."""
    cache = MockCache(16, enable_prefix_caching=False)
    scheduler = Scheduler(
        MockDecoder(cache),
        max_num_seqs=8,
        max_num_batched_tokens=100,
        reservation=None if kind == "known" else reservation(kind, 40),
        share_prompts=False,
    )
    for i in range(8):
        scheduler.add(seq(str(i), 9, new=9 if kind == "power_of_two" else 8, first=20 * i))
    assert len(run(scheduler, cache)) == at_once
    while scheduler.running:
        run(scheduler, cache)
        assert kind == "known" or scheduler.num_preemptions == 0
    with pytest.raises(InvalidArgument, match="reservation"):
        reservation("buddy", 40)
    with pytest.raises(InvalidArgument, match="max_model_len"):
        reservation("max_model_len", None)


def test_without_the_cache_every_round_starts_over() -> None:
    scheduler, cache = make(budget=4)
    s = seq("a", 5, new=3, use_cache=False)
    scheduler.add(s)
    steps = [run(scheduler, cache) for _ in range(2)]
    assert (s.handles, s.num_stored, scheduler.room()) == ([], 0, [98])  # the 6 tokens that it has stay reserved
    steps += [run(scheduler, cache) for _ in range(4)]
    assert steps == [[("a", 4)], [("a", 1)], [("a", 4)], [("a", 2)], [("a", 4)], [("a", 3)]]
    assert s.finished
    cache.check_empty()


def test_a_prefix_that_ends_inside_a_block_counts_as_a_copy_to_come() -> None:
    scheduler, _ = make()
    s = seq("a", 8, new=1)
    s.num_stored = s.num_cached_tokens = 6
    assert scheduler._to_come(s) == [1]
    s.num_stored = 7
    assert scheduler._to_come(s) == [0]


def test_pools_of_several_groups() -> None:
    """Layers with a window of 32 tokens in a pool of 12 blocks, beside full ones in a pool of 100."""
    groups = [
        KVGroup("full", [0], num_kv_heads=1, head_dim=8, num_blocks=100),
        KVGroup("sliding_window", [1], num_kv_heads=1, head_dim=8, window=32, num_blocks=12),
    ]
    space = Space(KVCache(groups=groups), 16)
    assert space.capacity == 1600
    assert space.free() == [100, 12]
    assert space.to_come(0, 0, 1600) == [100, 4]  # window and step, and a block that both only touch
    assert space.to_come(1600, 0, 1600) == [0, 0]
    windows = [KVGroup("sliding_window", [0], num_kv_heads=1, head_dim=8, window=32, num_blocks=12)]
    assert Space(KVCache(groups=windows), 16).capacity > 10**6
    assert (
        Space(KVCache(groups=windows), 2048).max_chunk == 9 * 16
    )  # two blocks for the window, and one it only touches
    cross = [KVGroup("full", [0], num_kv_heads=1, head_dim=8, num_blocks=50), KVGroup("cross", [1], num_blocks=3)]
    space = Space(KVCache(groups=cross, num_kv_heads=1, head_dim=8), 16)
    assert (space.capacity, space.free()) == (800, [50, 3])  # what an encoder gives has blocks of its own
    assert space.to_come(0, 0, 20) == [2, 0]
    assert space.to_come(0, 0, 20, SimpleNamespace(num_tokens=33, key=b"")) == [2, 3]
    assert space.has_room([5, 0], 5)
    assert not space.has_room([4, 3], 5)
    assert not space.has_room([9, -1], 0)


class Zeros:
    """A model of two layers that stores zeros and always says the same."""

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self.spec = SimpleNamespace(vocab_size=100)

    def context_len(self, prompt_len: int, length: int, /) -> int:
        return prompt_len

    def prompt_salt(self, context_len: int, /) -> bytes | None:
        return None

    def forward(self, batch: Any, ids: Any, positions: Any, lens: Any, rows: Any, /) -> Any:
        zeros = np.zeros((len(ids), 1, 8), np.float32)
        for layer in range(2):
            self.cache.write(layer, batch, zeros, zeros)
        return np.eye(1, 100, dtype=np.float32).repeat(len(rows), 0)


def test_windows_in_a_small_pool() -> None:
    """Prompts much longer than the window's pool, several at once: nobody is refused, and nothing leaks."""
    groups = [
        KVGroup("full", [0], num_kv_heads=1, head_dim=8, num_blocks=150),
        KVGroup("sliding_window", [1], num_kv_heads=1, head_dim=8, window=32, num_blocks=12),
    ]
    cache = KVCache(groups=groups)
    engine = Engine(Zeros(cache))
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    seqs = [engine.add_request(str(i), [i] * (600 + i), params) for i in range(6)]
    with pytest.raises(OutOfBlocks, match="151 blocks of 16 needed, 150 available"):
        engine.add_request("long", [1] * 2401, params)
    while engine.has_unfinished:
        assert not [o.error for o in engine.step() if o.error is not None]
    assert [s.finish_reason for s in seqs] == ["length"] * 6
    assert [s.num_generated for s in seqs] == [40] * 6
    assert engine.logits([1] * 600).shape == (600, 100)
    cache.check()
    assert cache.stats()["used"] == 0


def test_release_can_be_repeated() -> None:
    scheduler, cache = make()
    s = seq("a", 5)
    scheduler.add(s)
    run(scheduler, cache)
    for _ in range(2):
        scheduler.release(s)
        assert s.finished
        cache.check_empty()
