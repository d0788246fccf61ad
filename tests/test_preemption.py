"""Trap 9 and its kin: running out of blocks changes when tokens come, and nothing else."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from kvcore import LLM, SamplingParams
from kvcore.engine.engine import Engine
from mocks import MockCache, MockDecoder
from models import EXACT, REFERENCE, assert_nothing_held

MIXED = [
    SamplingParams(temperature=0, max_tokens=20, ignore_eos=True),
    SamplingParams(seed=7, max_tokens=20, ignore_eos=True, logprobs=1),
    SamplingParams(seed=3, max_tokens=20, ignore_eos=True, frequency_penalty=0.5, repetition_penalty=1.3),
]


def run(num_blocks: int, prompts: list[list[int]], *, caching: bool = True, **options: Any) -> tuple[Any, ...]:
    """Tokens as they were streamed, usage of each request, and how often somebody was preempted."""
    cache = MockCache(num_blocks, enable_prefix_caching=caching)
    engine = Engine(MockDecoder(cache), enable_prefix_caching=caching, **options)
    seqs = [engine.add_request(str(i), prompt, MIXED[i % 3]) for i, prompt in enumerate(prompts)]
    streamed: dict[str, list[int]] = {seq.request_id: [] for seq in seqs}
    while engine.has_unfinished:
        for output in engine.step():
            assert output.error is None
            assert output.token_id is not None
            streamed[output.request_id].append(output.token_id)
        cache.check()
    cache.check_empty()
    for seq in seqs:
        assert streamed[seq.request_id] == seq.token_ids[seq.prompt_len :]
    usage = [(seq.prompt_len, seq.num_generated, seq.num_cached_tokens, seq.num_computed_tokens) for seq in seqs]
    stats = engine.stats()
    computed = sum(seq.num_computed_tokens + seq.num_recomputed_tokens for seq in seqs)
    assert stats["num_computed_tokens"] <= computed  # after a preemption the prefix index may know of some
    return streamed, usage, stats["num_preemptions"]


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("budget", [3, 16, 2048])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_trap_9_a_tiny_pool_gives_what_a_huge_one_gives(caching: bool, budget: int, policy: str) -> None:
    prompts = [[(5 * i + j * j) % 31 for j in range(9 + i)] for i in range(7)]
    options: dict[str, Any] = {
        "caching": caching,
        "max_num_batched_tokens": budget,
        "max_num_seqs": 7,
        "scheduling_policy": policy,
    }
    streamed, usage, calm = run(500, prompts, **options)
    tiny, tiny_usage, preemptions = run(11, prompts, **options)
    assert (tiny, tiny_usage) == (streamed, usage)
    assert calm == 0
    assert preemptions > 0


def test_trap_9_through_llm_with_a_real_model() -> None:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 320, 20 + 3 * i).tolist() for i in range(6)]
    params = [MIXED[i % 3] for i in range(6)]
    results = []
    for blocks in (200, 7):
        with LLM(REFERENCE / "llama_gqa", num_kv_blocks=blocks, max_num_batched_tokens=32, **EXACT) as llm:
            pieces: dict[str, list[int]] = {}

            def take(item: Any, pieces: dict[str, list[int]] = pieces) -> None:
                pieces.setdefault(item.request_id, []).extend(item.token_ids)

            outputs = llm.generate(prompts, params, callback=take)
            assert [pieces[o.request_id] for o in outputs] == [o.token_ids for o in outputs]
            assert (llm.stats()["num_preemptions"] > 0) == (blocks == 7)
            assert any(o.num_recomputed_tokens for o in outputs) == (blocks == 7)
            assert sum(o.metrics.num_preemptions for o in outputs) == llm.stats()["num_preemptions"]
            results.append(
                [
                    (o.token_ids, o.outputs[0].logprobs, o.num_cached_tokens, o.num_computed_tokens, o.usage)
                    for o in outputs
                ]
            )
            assert_nothing_held(llm)
    assert results[0] == results[1]


KINDS = ("gemma3_text", "gpt_oss", "mistral_swa8", "deepseek_v3", "phi3_longrope", "llama_rope_dynamic", "mixtral")


@pytest.mark.parametrize("name", KINDS)
def test_trap_9_for_layers_of_other_kinds(name: str) -> None:
    """Windows, latent rows, sinks, experts, rope that depends on length; samples that share a prompt among them."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 300, 20 + 3 * i).tolist() for i in range(6)]
    params = [
        SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
        if i % 2
        else SamplingParams(seed=i, n=2, max_tokens=20, ignore_eos=True)
        for i in range(6)
    ]
    results = []
    for blocks, budget in ((200, 2048), (8, 2048), (8, 24)):
        with LLM(REFERENCE / name, num_kv_blocks=blocks, max_num_batched_tokens=budget, **EXACT) as llm:
            outputs = llm.generate(prompts, params)
            results.append([[c.token_ids for c in output.outputs] for output in outputs])
            assert (llm.stats()["num_preemptions"] > 0) == (blocks == 8)
            llm.cache.check()
            assert llm.stats()["cache"]["used"] == llm.stats()["cache"]["num_sequences"] == 0
    assert results[0] == results[1] == results[2]


def test_what_the_prefix_index_still_holds_is_not_computed_again() -> None:
    cache = MockCache(8)
    engine = Engine(MockDecoder(cache), max_num_seqs=2)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    first, second = (engine.add_request(str(i), [i] * 9, params) for i in range(2))
    while engine.has_unfinished:
        engine.step()
    assert engine.stats()["num_preemptions"] == 1
    assert first.num_recomputed_tokens == 0
    # it had 16 tokens in 4 blocks, of which the other took one
    assert second.num_recomputed_tokens == 4
    assert engine.stats()["num_recomputed_tokens"] == 4


def test_swapping_computes_nothing_again() -> None:
    """With a second tier, what gives way to others comes back from there."""
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, 320, 40).tolist() for _ in range(4)]
    params = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)
    tokens, recomputed = [], []
    for swap in (0, 1 << 24):
        with LLM(REFERENCE / "llama_gqa", num_kv_blocks=11, swap_space=swap, **EXACT) as llm:
            outputs = llm.generate(prompts, params)
            tokens.append([o.token_ids for o in outputs])
            recomputed.append(sum(o.num_recomputed_tokens for o in outputs))
            assert llm.stats()["num_preemptions"] > 0
            assert (llm.stats()["cache"]["fetches"] > 0) == (swap > 0)
            assert_nothing_held(llm)
    assert tokens[0] == tokens[1]
    assert recomputed[1] < recomputed[0]


def test_the_first_in_order_is_never_held_up() -> None:
    """Whatever comes behind it, the oldest request gets a token in every step once its prompt is there."""
    engine = Engine(MockDecoder(MockCache(6)), max_num_seqs=4, max_num_batched_tokens=16)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    names = itertools.count()
    oldest = engine.add_request(str(next(names)), [1] * 7, params)
    for _ in range(12):
        engine.add_request(str(next(names)), [2, next(names) % 30, 5, 6, 7], params)
        before = oldest.num_generated
        engine.step()
        assert oldest.num_generated == before + 1
    assert oldest.finished
    while engine.has_unfinished:
        engine.step()
    assert engine.stats()["num_preemptions"] > 0


def test_priorities_through_llm() -> None:
    with LLM(REFERENCE / "llama_gqa", num_kv_blocks=20, max_num_seqs=1, scheduling_policy="priority", **EXACT) as llm:
        ended: list[int] = []
        prompts = [[i] * 5 for i in range(4)]
        params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
        llm.generate(
            prompts,
            params,
            priority=[3, 0, 2, 1],
            callback=lambda o: ended.append(o.prompt_token_ids[0]) if o.finished else None,
        )
        assert ended == [1, 3, 2, 0]
        with pytest.raises(TypeError, match="priority"):
            llm.generate(prompts, params, priority=1.5)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="priority"):
            llm.generate(prompts, params, priority=[1])


def test_salts_separate_tenants() -> None:
    prompt = np.random.default_rng(0).integers(0, 320, 40).tolist()
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    with LLM(REFERENCE / "llama_gqa", num_kv_blocks=40, **EXACT) as llm:
        found = []
        for salt in (None, "a", "b", "a", None):
            asked = {"prompt_token_ids": prompt} | ({} if salt is None else {"cache_salt": salt})
            found.append(llm.generate(asked, params)[0].num_cached_tokens)
        assert found == [0, 0, 0, 39, 39]
        # together: only equal salts wait for each other
        new = [prompt[::-1]] * 3
        outputs = llm.generate(
            [{"prompt_token_ids": p, "cache_salt": s} for p, s in zip(new, "xyx", strict=True)], params
        )
        assert [o.num_cached_tokens for o in outputs] == [0, 0, 39]
        assert len({tuple(o.token_ids) for o in outputs}) == 1
        for bad, error in (("", ValueError), (3, TypeError)):
            with pytest.raises(error, match="cache_salt"):
                llm.generate({"prompt_token_ids": prompt, "cache_salt": bad}, params)
        assert_nothing_held(llm)
