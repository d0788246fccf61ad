"""LoRA adapters per request: prefixes are kept apart, rows do not touch each other, answers are the adapter's."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from kvcore import LLM, AsyncLLM, BeamSearchParams, CheckpointError, InvalidArgument, LoRARequest, SamplingParams
from kvcore.checkpoint.lora import load_lora
from models import EXACT, REFERENCE, assert_nothing_held, assert_same_bits, recorded
from test_lora import TARGETS, lora_of, merged
from test_lora_files import adapter, half

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
PROMPT = list(range(3, 40))
NAME = "llama_gqa"


def saved(folder: Path, seed: int, name: str = NAME) -> LoRARequest:
    """An adapter on disk. (Its alpha is its rank: the scale is 1.)"""
    tensors = {}
    for module, pair in lora_of(name, TARGETS[name], seed).modules.items():
        tensors |= {half(module, "A"): pair.a, half(module, "B"): pair.b}
    return LoRARequest(folder.name, adapter(folder, tensors, r=3, lora_alpha=3))


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[LoRARequest]:
    folder = tmp_path_factory.mktemp("adapters")
    return [saved(folder / f"a{seed}", seed) for seed in (1, 2)]


@pytest.fixture
def llm() -> Iterator[LLM]:
    with LLM(REFERENCE / NAME, num_kv_blocks=64, **EXACT) as llm:
        yield llm
        assert_nothing_held(llm)


def tokens(llm: LLM, prompts: Any, **options: Any) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, GREEDY, **options)]


def test_answers_are_those_of_merged_weights(llm: LLM, adapters: list[LoRARequest], tmp_path: Path) -> None:
    plain = tokens(llm, PROMPT)
    for seed, request in enumerate(adapters, start=1):
        with LLM(merged(NAME, lora_of(NAME, TARGETS[NAME], seed), tmp_path / str(seed)), **EXACT) as other:
            want, logits = tokens(other, PROMPT), other.logits(PROMPT)
        assert tokens(llm, PROMPT, lora_request=request) == want != plain
        np.testing.assert_allclose(llm.logits(PROMPT, lora_request=request), logits, rtol=0, atol=3e-3)
    assert tokens(llm, PROMPT) == plain


def test_prefixes_are_kept_apart(llm: LLM, adapters: list[LoRARequest]) -> None:
    """Trap 3: neither a salt, nor another adapter, nor none, nor other files under the same name find what one left."""

    def cached(request: LoRARequest | None) -> int:
        return llm.generate(PROMPT, GREEDY, lora_request=request)[0].num_cached_tokens

    first, second = adapters
    assert cached(None) == cached(first) == cached(second) == 0
    assert cached(None) == cached(first) == cached(second) == 36
    assert cached(LoRARequest("another name", first.lora_path)) == 36
    assert cached(LoRARequest(first.lora_name, second.lora_path)) == 36
    salted: Any = {"prompt_token_ids": PROMPT, "cache_salt": load_lora(first.lora_path).identity}
    for request in (None, first, second):
        assert llm.generate(salted, GREEDY, lora_request=request)[0].num_cached_tokens == 0
        assert llm.generate(salted, GREEDY, lora_request=request)[0].num_cached_tokens == 36


def test_other_files_under_the_same_path(llm: LLM, tmp_path: Path) -> None:
    request = saved(tmp_path / "x", 1)
    before = llm.generate(PROMPT, GREEDY, lora_request=request)[0]
    saved(tmp_path / "x", 2)
    after = llm.generate(PROMPT, GREEDY, lora_request=request)[0]
    assert after.num_cached_tokens == 0
    assert after.outputs[0].token_ids != before.outputs[0].token_ids


@settings(max_examples=20)
@given(st.data())
def test_a_request_does_not_notice_others(adapters: list[LoRARequest], data: st.DataObject) -> None:
    """Law 1: what is sampled from has the bits of a run alone, whatever adapters go along, or how it is cut."""
    prompts = st.lists(st.integers(3, 300), min_size=1, max_size=40)
    asked = data.draw(st.lists(st.tuples(prompts, st.sampled_from([None, *adapters])), min_size=1, max_size=5))
    options = {"max_num_batched_tokens": data.draw(st.sampled_from([7, 64])), "max_num_seqs": 3, "num_kv_blocks": 12}
    with LLM(REFERENCE / NAME, **options, **EXACT) as llm:
        requests = [request for _, request in asked]
        with recorded(llm) as rows:
            together = [rows(o) for o in llm.generate([ids for ids, _ in asked], GREEDY, lora_request=requests)]
        assert_nothing_held(llm)
    with LLM(REFERENCE / NAME, num_kv_blocks=64, **EXACT) as llm:
        for (ids, request), got in zip(asked, together, strict=True):
            with recorded(llm) as rows:
                (alone,) = llm.generate(ids, GREEDY, lora_request=request, use_cache=False)
                want = rows(alone)
            assert_same_bits(got[-len(want) :], want)


def test_every_way_to_ask(llm: LLM, adapters: list[LoRARequest]) -> None:
    want = tokens(llm, PROMPT, lora_request=adapters[0])[0]
    streamed = [t for item in llm.stream(PROMPT, GREEDY, lora_request=adapters[0]) for t in item.outputs[0].token_ids]
    assert streamed == want
    beams = llm.beam_search(
        PROMPT, BeamSearchParams(beam_width=2, max_tokens=6, ignore_eos=True), lora_request=adapters[0]
    )
    plain = llm.beam_search(PROMPT, BeamSearchParams(beam_width=2, max_tokens=6, ignore_eos=True))
    assert beams[0].sequences[0].tokens != plain[0].sequences[0].tokens

    async def through_async() -> list[int]:
        async_llm = AsyncLLM(REFERENCE / NAME, num_kv_blocks=64, **EXACT)
        try:
            items = async_llm.generate(PROMPT, GREEDY, lora_request=adapters[0])
            return [t async for item in items for t in item.outputs[0].token_ids]
        finally:
            await async_llm.close()

    assert asyncio.run(through_async()) == want
    params = SamplingParams(temperature=1.0, seed=1, n=3, max_tokens=4)
    several = llm.generate(PROMPT, params, lora_request=adapters[0])[0]
    again = llm.generate(PROMPT, params, lora_request=adapters[0])[0]
    assert [a.token_ids for a in several.outputs] == [a.token_ids for a in again.outputs]


def test_bad_requests(llm: LLM, adapters: list[LoRARequest], tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="lora_request: expected None or a LoRARequest, got 'x'"):
        llm.generate(PROMPT, GREEDY, lora_request="x")
    with pytest.raises(InvalidArgument, match="lora_request: expected one for each of the 1 prompts, got 2"):
        llm.generate(PROMPT, GREEDY, lora_request=[None, adapters[0]])
    with pytest.raises(InvalidArgument, match="lora_name: expected a name"):
        LoRARequest("", tmp_path)
    with pytest.raises(TypeError, match="lora_path: expected a folder, got 1"):
        LoRARequest("x", 1)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=r"adapter_config\.json: expected a JSON file, got no such file"):
        llm.generate(PROMPT, GREEDY, lora_request=LoRARequest("x", tmp_path / "nothing"))
    with pytest.raises(CheckpointError, match="expected a folder: "):
        llm.generate(PROMPT, GREEDY, lora_request=LoRARequest("x", "a\0b"))
    module = "model.layers.0.self_attn.query"
    ones = np.ones((1, 1), np.float32)
    adapter(tmp_path / "y", {half(module, "A"): ones, half(module, "B"): ones}, r=1)
    with pytest.raises(CheckpointError, match=r"module 'model\.layers\.0\.self_attn\.query': expected one of this"):
        llm.generate([PROMPT, PROMPT], GREEDY, lora_request=[None, LoRARequest("y", tmp_path / "y")])
    assert llm.stats()["num_requests"] == 0  # all is checked before anything runs


def test_adapters_that_are_not_used_give_way(llm: LLM, tmp_path: Path) -> None:
    requests = [saved(tmp_path / str(seed), seed) for seed in range(10)]
    first = tokens(llm, PROMPT, lora_request=requests[0])
    for request in requests[1:]:
        tokens(llm, PROMPT, lora_request=request)
    assert len(llm._adapters._loaded) == 8
    again = llm.generate(PROMPT, GREEDY, lora_request=requests[0])[0]
    assert [list(again.outputs[0].token_ids)] == first
    save_file({"x": np.ones(1, np.float32)}, tmp_path / "0" / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match="tensor 'x': expected only"):
        llm.generate(PROMPT, GREEDY, lora_request=requests[0])
