"""A thousand requests of every kind through a pool that is a twentieth of what they need together."""

from __future__ import annotations

import gc
import random
from typing import Any

import numpy as np
import pytest

from kvcore import LLM
from kvcore.engine.engine import Engine
from kvcore.engine.sampling_params import BeamSearchParams, SamplingParams
from kvcore.engine.sequence import Sequence
from mocks import MockCache, MockDecoder
from models import EXACT, REFERENCE, assert_nothing_held

EOS = 31
FRONTS = [[(i * j + j) % 30 for j in range(20)] for i in range(1, 6)]


def random_params(rng: random.Random) -> SamplingParams | BeamSearchParams:
    """Greedy, or seeded: what an undisturbed run gives again."""
    length = rng.choice([1, 3, 8, 20, 40])
    kind = rng.randrange(8)
    seed = rng.randrange(1000)
    ignore = rng.random() < 0.5
    if kind < 3:
        return SamplingParams(temperature=0, max_tokens=length, ignore_eos=ignore, stop_token_ids=[rng.randrange(31)])
    if kind == 3:
        return SamplingParams(seed=seed, max_tokens=length, top_k=5, ignore_eos=ignore, logprobs=2)
    if kind == 4:
        return SamplingParams(seed=seed, max_tokens=length, frequency_penalty=1.0, repetition_penalty=1.2, top_p=0.9)
    if kind == 5:
        return SamplingParams(n=rng.choice([2, 3]), seed=seed, max_tokens=length, ignore_eos=ignore)
    if kind == 6:
        return SamplingParams(temperature=0, max_tokens=length, prompt_logprobs=1, min_tokens=1, logit_bias={3: 2.0})
    return BeamSearchParams(beam_width=2, max_tokens=min(length, 8))


def random_prompt(rng: random.Random) -> list[int]:
    front = rng.choice(FRONTS)[: rng.choice([0, 8, 20])]
    return front + [rng.randrange(30) for _ in range(rng.choice([1, 4, 11, 30]))]


def answers(seq: Sequence) -> list[Any]:
    return [seq, *seq.siblings]


def result(sequences: list[Sequence]) -> Any:
    return [(s.token_ids, s.finish_reason, s.stop_reason, s.logprobs, s.prompt_logprobs) for s in sequences]


def blocks(prompt: list[int], params: Any) -> int:
    width = params.beam_width if isinstance(params, BeamSearchParams) else params.n
    return width * -(-(len(prompt) + params.max_tokens) // 4)


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_thousand_requests(policy: str) -> None:
    rng = random.Random(0)
    requests = [(random_prompt(rng), random_params(rng)) for _ in range(1000)]
    pool = sum(blocks(*request) for request in requests) // 20
    tight = 40  # blocks; the largest request needs 36
    for num_blocks in (pool, tight):
        engine = Engine(
            MockDecoder(MockCache(num_blocks)),
            eos_token_ids=[EOS],
            max_num_seqs=64,
            max_num_batched_tokens=128,
            scheduling_policy=policy,
        )
        cache: Any = engine._cache
        sequences: dict[int, list[Sequence]] = {}
        aborted: set[int] = set()
        for number, (prompt, params) in enumerate(requests):
            sequences[number] = answers(engine.add_request(str(number), prompt, params, priority=rng.randrange(3)))
            while engine.has_unfinished and (rng.random() < 0.4 or len(engine._requests) > 150):
                outputs = engine.step()
                assert not [o for o in outputs if o.error is not None]
            if rng.random() < 0.1:
                victim = max(0, number - rng.randrange(60))
                if str(victim) in engine._requests:
                    aborted.add(victim)
                engine.abort(str(victim))
            if number % 100 == 0:
                cache.check()
        while engine.has_unfinished:
            engine.step()
        cache.check_empty()
        stats = engine.stats()
        assert stats["num_finished"]["error"] == 0
        assert stats["num_preemptions"] > (50 if num_blocks == tight else -1)
        assert len(aborted) > 20
        scheduler = engine._scheduler
        left = (engine._requests, engine._deadlines, scheduler.running, scheduler.waiting, scheduler.items)
        assert not any(left)
        for number, (prompt, params) in enumerate(requests):
            got = result(sequences[number])
            expected = solo(number, prompt, params)
            if number not in aborted:
                assert got == expected, (number, params)
            elif isinstance(params, SamplingParams):
                for mine, whole in zip(got, expected, strict=True):
                    assert mine[0] == whole[0][: len(mine[0])]


SOLO: dict[int, Any] = {}


def solo(number: int, prompt: list[int], params: Any) -> Any:
    if number not in SOLO:
        engine = Engine(MockDecoder(MockCache(200)), eos_token_ids=[EOS])
        sequences = answers(engine.add_request("solo", prompt, params))
        while engine.has_unfinished:
            engine.step()
        SOLO[number] = result(sequences)
    return SOLO[number]


def test_nothing_of_ended_requests_is_kept() -> None:
    before, rng = number_of_sequences(), random.Random(1)
    engine = Engine(MockDecoder(MockCache(60)), eos_token_ids=[EOS], max_num_seqs=8)
    for number in range(300):
        engine.add_request(str(number), random_prompt(rng), random_params(rng), timeout=1e9)
        for _ in range(rng.randrange(30)):
            engine.step()
        if number % 3 == 0:
            engine.abort(str(number - 1))
    while engine.has_unfinished:
        engine.step()
    assert number_of_sequences() == before


def number_of_sequences() -> int:
    gc.collect()
    return sum(isinstance(x, Sequence) for x in gc.get_objects())


def test_a_real_model_under_load() -> None:
    """Fewer requests, but real logits: every answer is what the request gives alone."""
    rng = random.Random(3)
    prompts = [
        np.random.default_rng(rng.randrange(6)).integers(0, 320, rng.choice([5, 17, 40])).tolist() for _ in range(60)
    ]
    params = []
    for i in range(60):
        length = rng.choice([2, 9, 25])
        params.append(
            SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
            if i % 2
            else SamplingParams(seed=i, n=1 + i % 3, max_tokens=length, ignore_eos=True, top_p=0.95)
        )
    with LLM(REFERENCE / "llama_gqa", num_kv_blocks=12, max_num_batched_tokens=64, **EXACT) as llm:
        outputs = llm.generate(prompts, params)
        assert llm.stats()["num_preemptions"] > 0
        assert_nothing_held(llm)
        for prompt, each, output in zip(prompts, params, outputs, strict=True):
            (alone,) = llm.generate(prompt, each, use_cache=False)
            assert [c.token_ids for c in output.outputs] == [c.token_ids for c in alone.outputs]
