"""The engine on a mock model: every request's tokens equal its solo run, and nothing leaks, whatever happens."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvcore.engine.engine import Engine
from kvcore.engine.sampling_params import BeamSearchParams, SamplingParams
from kvcore.engine.sequence import Sequence
from kvcore.errors import InvalidArgument, InvalidState, OutOfBlocks
from mocks import MockCache, MockDecoder

EOS = 31


def make(
    num_blocks: int = 200,
    *,
    dynamic: bool = False,
    long_from: int | None = None,
    script: dict[int, int] | None = None,
    habit: float = 0.0,
    **options: Any,
) -> Engine:
    decoder = MockDecoder(MockCache(num_blocks), dynamic=dynamic, long_from=long_from, script=script, habit=habit)
    return Engine(decoder, **{"eos_token_ids": [EOS], **options})


def cache_of(engine: Engine) -> MockCache:
    cache = engine._cache
    assert isinstance(cache, MockCache)
    return cache


def decoder_of(engine: Engine) -> MockDecoder:
    decoder = engine._model
    assert isinstance(decoder, MockDecoder)
    return decoder


def finish(engine: Engine) -> None:
    while engine.has_unfinished:
        engine.step()
        cache_of(engine).check()


def generated(seq: Sequence) -> list[int]:
    return seq.token_ids[seq.prompt_len :]


def solo(prompt: list[int], params: SamplingParams, *, dynamic: bool = False, **options: Any) -> list[int]:
    engine = make(dynamic=dynamic, **options)
    seq = engine.add_request("solo", prompt, params)
    finish(engine)
    cache_of(engine).check_empty()
    return generated(seq)


GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def test_counts_of_the_article() -> None:
    prompt = [i % 30 for i in range(1000)]
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    tokens = []
    for use_cache, expected in ((True, 1_099), (False, 104_950)):
        engine = make(300)
        seq = engine.add_request("a", prompt, params, use_cache=use_cache)
        while engine.has_unfinished:
            engine.step()
        assert seq.num_computed_tokens == expected
        assert engine.stats()["num_computed_tokens"] == expected
        assert len(generated(seq)) == 100
        tokens.append(generated(seq))
        cache_of(engine).check_empty()
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(seed=42, max_tokens=8, ignore_eos=True)])
def test_tokens_are_the_same_in_every_setting(dynamic: bool, params: SamplingParams) -> None:
    """Trap 16, as far as the engine goes: alone, in batches, in chunks, cold, on a hit, with and without the cache."""
    prompts = [[(7 * i + j) % 31 for j in range(length)] for i, length in enumerate((1, 4, 5, 9, 16, 17, 23))]
    expected = [solo(p, params, dynamic=dynamic) for p in prompts]
    for budget, seats, use_cache in itertools.product((1, 3, 7, 2048), (1, 2, 7), (True, False)):
        engine = make(dynamic=dynamic, max_num_batched_tokens=budget, max_num_seqs=seats)
        for attempt in range(2):
            order = list(range(7)) if attempt == 0 else [4, 1, 6, 0, 5, 2, 3]
            seqs = {i: engine.add_request(f"{attempt}-{i}", prompts[i], params, use_cache=use_cache) for i in order}
            finish(engine)
            assert [generated(seqs[i]) for i in range(7)] == expected
            hits = sum(seq.num_cached_tokens for seq in seqs.values())
            assert (hits > 0) == (use_cache and attempt == 1)
            cache_of(engine).check_empty()


def test_trap_2_full_hits() -> None:
    for length in (3, 4, 5, 7, 8, 9):
        engine = make()
        prompt = list(range(length))
        first = engine.add_request("1", prompt, GREEDY)
        finish(engine)
        second = engine.add_request("2", prompt, GREEDY)
        finish(engine)
        assert second.num_cached_tokens == (length - 1) // 4 * 4
        assert second.num_computed_tokens == length - second.num_cached_tokens + 7
        assert generated(first) == generated(second)


def test_the_models_salt_separates_prefixes() -> None:
    engine = make(dynamic=True)
    first = list(range(9))
    for prompt, cached in ((first, 0), ([*first, 9], 0), (first, 8)):
        seq = engine.add_request("a", prompt, GREEDY)
        finish(engine)
        assert seq.num_cached_tokens == cached
        assert generated(seq) == solo(prompt, GREEDY, dynamic=True)


def test_trap_10_never_fits() -> None:
    cache = MockCache(49, 16)
    engine = Engine(MockDecoder(cache))
    with pytest.raises(OutOfBlocks, match=r"1002 tokens can never fit: 63 blocks .* needed, 49 available"):
        engine.add_request("long", [1] * 1002, GREEDY)
    short = engine.add_request("short", [1] * 10, GREEDY)
    finish(engine)
    assert len(generated(short)) == 8
    cache.check_empty()


def test_trap_10_ends_with_length_at_capacity() -> None:
    cache = MockCache(63, 16)
    engine = Engine(MockDecoder(cache))
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    seqs = [engine.add_request(str(i), [i] * 1000, params) for i in range(3)]
    finish(engine)
    for seq in seqs:
        # 1,008 slots: 8 for generated tokens, and the ninth token needs none
        assert (seq.finish_reason, seq.num_generated) == ("length", 9)
    cache.check_empty()


def test_who_keeps_a_request_gets_its_handle_at_the_end() -> None:
    cache = MockCache(63, 16)
    engine = Engine(MockDecoder(cache))
    kept: list[Any] = []
    engine.add_request("a", [1] * 20, SamplingParams(temperature=0, max_tokens=3, ignore_eos=True), keep=kept)
    engine.add_request("b", [2] * 20, GREEDY)
    finish(engine)
    assert [cache.num_computed_tokens(handle) for handle in kept] == [22]
    cache.free(kept.pop())
    engine.add_request("c", [3] * 20, GREEDY, keep=kept)
    engine.abort("c")  # was never let in, so there is nothing to keep
    assert kept == []
    cache.check_empty()


def test_max_model_len() -> None:
    engine = make(max_model_len=20)
    with pytest.raises(InvalidArgument, match=r"at most 20 tokens .*, got 21 tokens"):
        engine.add_request("x", [1] * 21, GREEDY)
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    counts = []
    for length in (20, 19, 15, 1):
        seq = engine.add_request("x", [1] * length, params)
        finish(engine)
        assert seq.finish_reason == "length"
        counts.append(seq.num_generated)
    assert counts == [1, 1, 5, 19]


@pytest.mark.parametrize(
    ("prompt", "error"),
    [
        ([], InvalidArgument),
        ([-1], InvalidArgument),
        ([32], InvalidArgument),
        ([2**70], InvalidArgument),
        ([1.0], TypeError),
        ([True], TypeError),
        (["a"], TypeError),
        ([[1]], TypeError),
        ("text", TypeError),
        (None, TypeError),
        (5, TypeError),
        (np.zeros(3), TypeError),
        (np.zeros((2, 2), int), TypeError),
        (np.array([], np.int64), InvalidArgument),
    ],
)
def test_bad_prompts(prompt: Any, error: type[Exception]) -> None:
    engine = make()
    with pytest.raises(error, match="prompt: expected"):
        engine.add_request("a", prompt, GREEDY)
    assert not engine.has_unfinished
    assert engine.add_request("a", np.array([1, 2], np.uint8), GREEDY).token_ids == [1, 2]


def test_params_are_checked_against_the_vocabulary() -> None:
    with pytest.raises(InvalidArgument, match="stop_token_ids"):
        make().add_request("a", [1], SamplingParams(stop_token_ids=[32]))


def test_trap_12_request_ids() -> None:
    engine = make()
    expected = solo([1, 2, 3], GREEDY)
    seq = engine.add_request("a", [1, 2, 3], GREEDY)
    engine.step()
    with pytest.raises(InvalidArgument, match="'a' again"):
        engine.add_request("a", [4, 5], GREEDY)
    engine.abort("unknown")
    finish(engine)
    assert generated(seq) == expected
    engine.abort("a")
    assert seq.finish_reason == "length"
    engine.add_request("a", [4, 5], GREEDY)


def test_trap_23_end_of_sequence() -> None:
    script = {0: 1, 1: 7, 2: 2, 3: 9, 4: 3}
    engine = make(script=script, eos_token_ids=[7, 5])
    seq = engine.add_request("a", [0], SamplingParams(temperature=0))
    finish(engine)
    assert (generated(seq), seq.finish_reason, seq.stop_reason) == ([1, 7], "stop", None)
    seq = engine.add_request("b", [0], SamplingParams(temperature=0, ignore_eos=True, max_tokens=4))
    finish(engine)
    assert (generated(seq), seq.finish_reason) == ([1, 7, 2, 9], "length")
    seq = engine.add_request("c", [0], SamplingParams(temperature=0, ignore_eos=True, stop_token_ids=[9]))
    finish(engine)
    assert (generated(seq), seq.finish_reason, seq.stop_reason) == ([1, 7, 2, 9], "stop", 9)


def test_trap_26_a_seed_gives_the_same_tokens_beside_anything() -> None:
    params = SamplingParams(seed=42, max_tokens=20, ignore_eos=True)
    expected = solo([1, 2, 3], params)
    assert expected == solo([1, 2, 3], params)
    assert expected != solo([1, 2, 3], SamplingParams(seed=43, max_tokens=20, ignore_eos=True))
    for place in range(3):
        engine = make(seed=42)
        others = [SamplingParams(max_tokens=9), SamplingParams(seed=5, top_k=3), SamplingParams(seed=42, max_tokens=3)]
        others.insert(place, params)
        seqs = [engine.add_request(str(i), [1, 2, 3], p) for i, p in enumerate(others)]
        finish(engine)
        assert generated(seqs[place]) == expected


def test_the_engines_seed_makes_unseeded_requests_reproducible() -> None:
    def run(seed: int | None) -> list[list[int]]:
        engine = make(seed=seed)
        seqs = [engine.add_request(str(i), [1], SamplingParams(ignore_eos=True)) for i in range(3)]
        finish(engine)
        return [generated(seq) for seq in seqs]

    assert run(1) == run(1)
    assert len({tuple(t) for t in run(1)}) == 3
    assert run(1) != run(2)
    assert run(None) != run(None)


def test_logprobs() -> None:
    engine = make()
    seq = engine.add_request("a", [1], SamplingParams(logprobs=2, max_tokens=5, ignore_eos=True))
    finish(engine)
    assert seq.logprobs is not None
    assert [next(iter(p)) for p in seq.logprobs] == generated(seq)


def test_metrics() -> None:
    engine = make(max_num_seqs=1)
    seqs = [engine.add_request(str(i), [1] * 9, GREEDY) for i in range(2)]
    engine.step()
    assert engine.stats()["num_running"] == engine.stats()["num_waiting"] == 1
    finish(engine)
    for seq in seqs:
        m = seq.metrics
        assert m.queue_time is not None
        assert m.ttft is not None
        assert m.tpot is not None
        assert m.e2e_time is not None
        assert 0 <= m.queue_time <= m.ttft <= m.e2e_time
        assert m.ttft + 7 * m.tpot <= m.e2e_time
    stats = engine.stats()
    assert (stats["num_requests"], stats["num_finished"]["length"], stats["num_prompt_tokens"]) == (2, 2, 18)
    assert (stats["num_generation_tokens"], stats["num_cached_tokens"], stats["num_preemptions"]) == (16, 8, 0)
    assert stats["num_computed_tokens"] == sum(seq.num_computed_tokens for seq in seqs)


def test_logits() -> None:
    prompt = [i % 30 for i in range(11)]
    engine = make(max_num_batched_tokens=4)
    logits = engine.logits(prompt)
    assert logits.shape == (11, 32)
    assert logits.dtype == np.float32
    assert (logits == make().logits(prompt)).all()
    assert logits[-1].argmax() == solo(prompt, GREEDY)[0]
    cache_of(engine).check_empty()
    assert cache_of(engine).stats()["cached"] == 0
    with pytest.raises(OutOfBlocks, match="can never fit"):
        make(2).logits(prompt)
    engine = make(3)
    seq = engine.add_request("a", [1, 2], GREEDY)
    engine.step()
    with pytest.raises(OutOfBlocks, match="11 tokens need 3 blocks of 4, and 2 are available"):
        engine.logits(prompt)
    engine.logits([1, 2, 3])
    finish(engine)
    assert generated(seq) == solo([1, 2], GREEDY)


def test_logits_frees_after_a_failure() -> None:
    engine = make()
    cache_of(engine).fail["commit"] = raiser(RuntimeError("no"))
    with pytest.raises(RuntimeError, match="no"):
        engine.logits([1, 2, 3])
    cache_of(engine).check_empty()


# -- failures ------------------------------------------------------------------------------------------------------


def raiser(error: BaseException, after: int = 0) -> Callable[[], None]:
    """Raises once, at the call number ``after``."""
    calls = itertools.count()

    def call() -> None:
        if next(calls) == after:
            raise error

    return call


def test_logits_that_are_not_finite_end_their_request_only() -> None:
    engine = make()
    expected = solo([1, 2, 3], GREEDY)

    def edit(logits: np.ndarray, positions: np.ndarray) -> None:
        logits[positions == 11] = np.nan

    decoder_of(engine).edit = edit
    good = engine.add_request("good", [1, 2, 3], GREEDY)
    bad = engine.add_request("bad", [4] * 10, GREEDY)
    outputs = []
    while engine.has_unfinished:
        outputs += engine.step()
    assert generated(good) == expected
    assert isinstance(bad.error, InvalidState)
    assert "'bad', token 2" in str(bad.error)
    assert [o.error for o in outputs if o.error is not None] == [bad.error]
    cache_of(engine).check_empty()


@pytest.mark.parametrize("where", ["add", "plan", "write", "attend", "commit", "append", "forward"])
@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt(), OutOfBlocks("none left")])
@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("after", [0, 1, 3])
def test_an_error_ends_the_batch_and_nothing_leaks(
    where: str, error: BaseException, use_cache: bool, after: int
) -> None:
    engine = make(max_num_batched_tokens=8, max_num_seqs=2)
    seqs = [engine.add_request(str(i), [i] * 6, GREEDY, use_cache=use_cache) for i in range(4)]
    if where == "forward":
        decoder_of(engine).fail = raiser(error, after)
    else:
        cache_of(engine).fail[where] = raiser(error, after)
    raised = False
    while engine.has_unfinished:
        try:
            engine.step()
        except type(error):
            raised = True
            cache_of(engine).check()
    failed = [seq for seq in seqs if seq.error is error]
    if where == "plan" and isinstance(error, OutOfBlocks):
        # that is no error but the call to preempt somebody, who is computed again
        assert not raised
        assert engine.stats()["num_preemptions"] == 1
        assert [seq.error for seq in seqs] == [None] * 4
    else:
        assert raised or (where == "append" and not use_cache)
    assert 1 <= len(failed) <= 2 or not raised
    for i, seq in enumerate(seqs):
        if seq not in failed:
            assert generated(seq) == solo([i] * 6, GREEDY)
    cache_of(engine).check_empty()


def test_sequences_outside_of_the_engine_do_not_block_it() -> None:
    engine = make(6)
    cache = cache_of(engine)
    handle = cache.add(list(range(17)), None)
    cache.plan([(handle, 17)])  # 5 of 6 blocks
    seq = engine.add_request("a", [1, 2, 3], GREEDY)
    outputs = [output for _ in range(3) for output in engine.step()]
    assert [output.token_id is not None for output in outputs] == [True, True, False]
    assert isinstance(outputs[2].error, OutOfBlocks)
    assert "2 blocks of 4 tokens needed, 1 available" in str(outputs[2].error)
    assert seq.error is outputs[2].error
    assert not engine.has_unfinished
    waiting = engine.add_request("b", [1, 2, 3, 4, 5], GREEDY)
    assert "2 blocks of 4 tokens needed, 1 available" in str(engine.step()[0].error)
    assert waiting.finished
    cache.free(handle)
    seq = engine.add_request("a", [1, 2, 3], GREEDY)
    finish(engine)
    assert seq.finish_reason == "length"


def test_trap_7_no_end_leaks() -> None:
    random_ = random.Random(0)
    engine = make(24, max_num_seqs=3, max_num_batched_tokens=8, script={6: EOS})
    cache, decoder = cache_of(engine), decoder_of(engine)
    for loop in range(1000):
        prompt = [random_.randrange(30) for _ in range(random_.choice([2, 5, 9, 14]))]
        if loop % 3:
            prompt = [3] * len(prompt)
        names = [f"{loop}-{i}" for i in range(4)]
        for name in names:
            engine.add_request(name, prompt, SamplingParams(seed=loop, max_tokens=5), use_cache=random_.random() < 0.8)
        kind = loop % 8
        for _ in range(random_.randrange(4)):
            engine.step()
        if kind < 3:  # waiting, in the prompt, decoding: whatever they are at
            engine.abort(names[kind])
        elif kind == 3:
            engine.finish(names[0], "stop", "text")
        elif kind < 7:
            name = ("plan", "commit", "add")[kind - 4]
            cache.fail[name] = raiser(OutOfBlocks("injected"))
        else:
            decoder.fail = raiser(KeyboardInterrupt())
        while engine.has_unfinished:
            try:
                engine.step()
            except (OutOfBlocks, KeyboardInterrupt):
                cache.check()
        cache.fail.clear()
        decoder.fail = None
        cache.check_empty()
    assert min(engine.metrics.num_finished.values()) > 100


def test_a_step_inside_of_a_step_is_refused_and_an_abort_waits() -> None:
    engine = make()
    seqs = [engine.add_request(str(i), [i], GREEDY) for i in range(2)]
    refused = []

    def inside() -> None:
        engine.abort("0")
        with pytest.raises(InvalidState, match="inside"):
            engine.step()
        refused.append(True)

    decoder_of(engine).fail = inside
    engine.step()
    assert refused == [True]
    assert (seqs[0].finish_reason, seqs[1].finish_reason) == ("abort", None)
    decoder_of(engine).fail = None
    finish(engine)
    assert generated(seqs[1]) == solo([1], GREEDY)
    cache_of(engine).check_empty()


def test_the_scheduler_costs_little() -> None:
    engine = make(2000)
    for i in range(64):
        engine.add_request(str(i), [i % 30] * 9, SamplingParams(temperature=0, max_tokens=100, ignore_eos=True))
    engine.step()
    times = []
    for _ in range(50):
        start = time.perf_counter()
        engine._scheduler.schedule()
        times.append(time.perf_counter() - start)
    assert min(times) < 1e-3


# -- anything in any order -----------------------------------------------------------------------------------------


class Machine(RuleBasedStateMachine):
    """Arrivals, aborts, steps and failures in any order, in a pool that is always too small."""

    habit = 0.0
    options: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[tuple[list[Sequence], list[int], Any, bool]] = []
        self.count = 0

    @initialize(
        num_blocks=st.integers(3, 12),
        budget=st.sampled_from([1, 3, 8, 64]),
        seats=st.integers(1, 5),
        dynamic=st.booleans(),
        long_from=st.sampled_from([None, 12]),
        policy=st.sampled_from(["fcfs", "priority"]),
    )
    def start(
        self, num_blocks: int, budget: int, seats: int, dynamic: bool, long_from: int | None, policy: str
    ) -> None:
        self.rope: dict[str, Any] = {"dynamic": dynamic, "long_from": long_from, "habit": self.habit}
        self.num_blocks = num_blocks
        self.seats = seats
        self.engine = make(
            num_blocks,
            **self.rope,
            max_num_batched_tokens=budget,
            max_num_seqs=seats,
            scheduling_policy=policy,
            **self.options,
        )
        self.cache = cache_of(self.engine)

    @rule(
        length=st.integers(1, 30),
        start=st.integers(0, 2),
        max_tokens=st.integers(1, 9),
        seed=st.sampled_from([None, 1, 2]),
        kind=st.sampled_from(["one", "one", "two", "penalty", "prompt", "beams"]),
        use_cache=st.booleans(),
        priority=st.integers(0, 3),
    )
    def arrive(
        self, length: int, start: int, max_tokens: int, seed: int | None, kind: str, use_cache: bool, priority: int
    ) -> None:
        prompt = [(start + i * i) % 31 for i in range(length)]
        params: Any = SamplingParams(
            temperature=0.0 if seed is None else 1.0,
            seed=seed,
            max_tokens=max_tokens,
            n=2 if kind == "two" and seed is not None else 1,
            presence_penalty=0.5 if kind == "penalty" else 0.0,
            prompt_logprobs=1 if kind == "prompt" else None,
        )
        if kind == "beams" and use_cache:
            params = BeamSearchParams(beam_width=2, max_tokens=max_tokens)
        self.count += 1
        name = str(self.count)
        try:
            seq = self.engine.add_request(name, prompt, params, use_cache=use_cache, priority=priority)
        except OutOfBlocks:
            beams = params.beam_width if isinstance(params, BeamSearchParams) else 1
            assert beams * -(-(length + beams - 1) // 4) > self.num_blocks
        except InvalidArgument:
            assert isinstance(params, BeamSearchParams)
            assert self.seats < 2
        else:
            self.requests.append(([seq, *seq.siblings], prompt, params, use_cache))

    @rule(which=st.integers(0, 20))
    def abort(self, which: int) -> None:
        self.engine.abort(str(self.count - which))

    @rule(count=st.integers(1, 6))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.engine.step()

    @rule(
        where=st.sampled_from(
            ["add", "plan", "write", "attend", "commit", "append", "truncate", "fork", "reorder", "free", "forward"]
        ),
        error=st.sampled_from([RuntimeError, KeyboardInterrupt, OutOfBlocks]),
        after=st.integers(0, 2),
    )
    def failing_step(self, where: str, error: type[BaseException], after: int) -> None:
        injected = error("injected")
        if where == "forward":
            decoder_of(self.engine).fail = raiser(injected, after)
        else:
            self.cache.fail[where] = raiser(injected, after)
        with suppress(error):
            self.engine.step()
        decoder_of(self.engine).fail = None
        self.cache.fail.clear()

    @invariant()
    def whole(self) -> None:
        if self.count:
            self.cache.check()
            scheduler = self.engine._scheduler
            assert len(scheduler.running) <= self.seats
            assert [s.order for s in scheduler.running] == sorted(s.order for s in scheduler.running)
            assert [s.order for s in scheduler.waiting] == sorted(s.order for s in scheduler.waiting)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for _ in range(10_000):
            if not self.engine.has_unfinished:
                break
            self.engine.step()
        assert not self.engine.has_unfinished
        self.cache.check_empty()
        for sequences, prompt, params, use_cache in self.requests:
            expected = self.undisturbed(prompt, params)
            for seq, whole in zip(sequences, expected, strict=True):
                assert seq.finished
                assert (seq.finish_reason is None) == (seq.error is not None)
                self.compare(seq, whole, prompt, params, use_cache)

    def undisturbed(self, prompt: list[int], params: Any) -> list[Sequence]:
        engine = make(**self.rope)
        if isinstance(params, BeamSearchParams):  # the pool's size is a limit of the search
            slots = self.num_blocks // params.beam_width * 4
            most = min(params.max_tokens, slots - len(prompt) + 1)
            params = BeamSearchParams(beam_width=params.beam_width, max_tokens=most)
        seq = engine.add_request("solo", prompt, params)
        sequences = [seq, *seq.siblings]
        finish(engine)
        return sequences

    def compare(self, seq: Sequence, whole: Sequence, prompt: list[int], params: Any, use_cache: bool) -> None:
        got, expected = generated(seq), generated(whole)
        if isinstance(params, BeamSearchParams):
            if seq.finish_reason in ("stop", "length"):
                assert got == expected
            return
        assert got == expected[: len(got)]
        n, p = len(got), len(prompt)
        if seq.finish_reason == "stop":
            assert got == expected
        elif seq.finish_reason == "length":
            assert n == min(params.max_tokens or 0, self.num_blocks * 4 - p + 1)
        if seq.finish_reason in ("stop", "length"):
            if seq.prompt_logprobs is not None:
                assert seq.prompt_logprobs == whole.prompt_logprobs
            if params.n == 1:
                rounds = n * p + n * (n - 1) // 2
                once = p + n - 1 - seq.num_cached_tokens
                limit = self.rope["long_from"]
                if use_cache and limit is not None and p < limit <= p + n - 1:  # once more, but for what others left
                    assert once < seq.num_computed_tokens < once + limit
                else:
                    assert seq.num_computed_tokens == (once if use_cache else rounds)


Machine.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
TestMachine = Machine.TestCase
