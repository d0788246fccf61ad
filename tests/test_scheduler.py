"""Who goes into a batch, and who is let in."""

from __future__ import annotations

from kvcore.engine.metrics import RequestMetrics
from kvcore.engine.sampling_params import SamplingParams
from kvcore.engine.scheduler import Scheduler
from kvcore.engine.sequence import Sequence, State
from mocks import MockCache, MockDecoder


def make(num_blocks: int = 100, *, seats: int = 8, budget: int = 16) -> tuple[Scheduler, MockCache]:
    cache = MockCache(num_blocks)
    return Scheduler(MockDecoder(cache), max_num_seqs=seats, max_num_batched_tokens=budget), cache


def seq(name: str, prompt: int, new: int = 4, *, first: int = 0, use_cache: bool = True) -> Sequence:
    ids = list(range(first, first + prompt))
    return Sequence(name, SamplingParams(), ids, prompt, new, use_cache, None, RequestMetrics(0.0))


def run(scheduler: Scheduler, cache: MockCache) -> list[tuple[str, int]]:
    """One step without a model: every sequence that is all there gets a token."""
    items = scheduler.schedule()
    if items:
        cache.commit(cache.plan([(s.handles[0], n) for s, n in items]))
    for s, n in items:
        s.num_stored += n
        if s.num_missing == 0:
            s.token_ids.append(7)
            if s.num_generated == s.max_new_tokens:
                scheduler.release(s)
            elif s.use_cache:
                cache.append(s.handles[0], [7])
            else:
                scheduler.end_round(s)
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


def test_admission_reserves_the_worst_case() -> None:
    scheduler, cache = make(4)  # 16 tokens
    scheduler.add(seq("a", 4, new=9))  # 12 stored at most: 3 blocks
    scheduler.add(seq("b", 4, new=2, first=50))  # 5 stored: 2 blocks
    scheduler.add(seq("c", 1, new=1, first=80))  # would fit, but b is before it
    names = []
    for _ in range(9):
        names.append({name for name, _ in run(scheduler, cache)})
        assert cache.num_free_blocks >= 0
    assert names == [{"a"}] * 9
    assert run(scheduler, cache) == [("b", 4), ("c", 1)]


def test_shared_blocks_are_counted_once() -> None:
    scheduler, cache = make(6)
    scheduler.add(seq("a", 13, new=4))  # 16 stored: 4 blocks, 3 of them whole after the prompt
    run(scheduler, cache)
    scheduler.add(seq("b", 13, new=4))  # shares 3, needs 1
    assert run(scheduler, cache) == [("a", 1), ("b", 1)]
    other = seq("c", 5, new=1, first=100)  # 2 blocks, one is left
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
    scheduler.add(seq("b", 9, new=2, first=50))
    for _ in range(8):
        run(scheduler, cache)
    assert cache.calls["add"] == 2


def test_without_the_cache_every_round_starts_over() -> None:
    scheduler, cache = make(budget=4)
    s = seq("a", 5, new=3, use_cache=False)
    scheduler.add(s)
    steps = [run(scheduler, cache) for _ in range(2)]
    assert (s.handles, s.num_stored, scheduler.room()) == ([], 0, 98)  # its worst case of 7 tokens stays reserved
    steps += [run(scheduler, cache) for _ in range(4)]
    assert steps == [[("a", 4)], [("a", 1)], [("a", 4)], [("a", 2)], [("a", 4)], [("a", 3)]]
    assert s.finished
    cache.check_empty()


def test_a_prefix_that_ends_inside_a_block_counts_as_a_copy_to_come() -> None:
    scheduler, _ = make()
    s = seq("a", 8, new=1)
    s.num_stored = s.num_cached_tokens = 6
    assert scheduler._blocks_to_come(s) == 1
    s.num_stored = 7
    assert scheduler._blocks_to_come(s) == 0


def test_release_can_be_repeated() -> None:
    scheduler, cache = make()
    s = seq("a", 5)
    scheduler.add(s)
    run(scheduler, cache)
    for _ in range(2):
        scheduler.release(s)
        assert s.finished
        cache.check_empty()
