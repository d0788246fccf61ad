"""``LLM`` on SmolLM2-135M-Instruct, against what transformers computes with the same weights."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcore import LLM, SamplingParams
from kvcore.outputs import RequestOutput
from models import EXACT, Floats, assert_nothing_held

pytestmark = pytest.mark.model

EXPECTED = json.loads((Path(__file__).parent / "data" / "smollm2" / "expected.json").read_text())
PROMPTS: dict[str, dict[str, Any]] = {prompt["name"]: prompt for prompt in EXPECTED["prompts"]}
CHATS = [prompt for prompt in PROMPTS.values() if "messages" in prompt]
GREEDY = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True, logprobs=5, skip_special_tokens=False)
# Room for all prompts and for what is computed between: nothing is evicted, and nothing expires on a slow machine.
OPTIONS: dict[str, Any] = {"quantization": "none", "num_kv_blocks": 256, "prefix_ttl": None}


@pytest.fixture(scope="module")
def llm(smollm2_path: Path) -> Iterator[LLM]:
    """float32 throughout."""
    with LLM(smollm2_path, **EXACT, **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def answers(llm: LLM) -> dict[str, RequestOutput]:
    """All twelve prompts in one batch."""
    outputs = llm.generate([prompt["input_ids"] for prompt in PROMPTS.values()], GREEDY)
    assert_nothing_held(llm)
    return dict(zip(PROMPTS, outputs, strict=True))


@pytest.fixture(scope="module")
def forced(llm: LLM) -> dict[str, Floats]:
    return {name: forced_logits(llm, prompt) for name, prompt in PROMPTS.items()}


def forced_logits(llm: LLM, prompt: dict[str, Any]) -> Floats:
    """Logits of the prompt and of the 48 recorded steps after it: row ``len(prompt) - 1 + i`` is of step i."""
    return llm.logits(prompt["input_ids"] + prompt["greedy_ids"][:-1])


def log_softmax(logits: Floats) -> np.ndarray:
    values = logits.astype(np.float64)
    values -= values.max(axis=-1, keepdims=True)
    return values - np.log(np.exp(values).sum(axis=-1, keepdims=True))


def nll(logits: Floats, prompt: dict[str, Any]) -> float:
    """Mean negative log likelihood of the prompt's tokens 2 to n."""
    ids = prompt["input_ids"]
    return float(
        -np.mean([row[token] for row, token in zip(log_softmax(logits[: len(ids) - 1]), ids[1:], strict=True)])
    )


# -- float32 ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PROMPTS)
def test_greedy_tokens(name: str, answers: dict[str, RequestOutput]) -> None:
    output, want = answers[name], PROMPTS[name]
    assert output.prompt_token_ids == want["input_ids"]
    assert output.token_ids == want["greedy_ids"]
    assert output.text == want["greedy_text"]
    assert output.finish_reason == "length"


@pytest.mark.parametrize("name", PROMPTS)
def test_log_probabilities(name: str, answers: dict[str, RequestOutput]) -> None:
    got = answers[name].outputs[0].logprobs
    assert got is not None
    for step, (found, tops) in enumerate(zip(got, PROMPTS[name]["top5_logprobs"], strict=False)):
        for rank, top in enumerate(tops, start=1):
            assert found[top["id"]].logprob == pytest.approx(top["logprob"], abs=1e-3), (step, rank)
            assert found[top["id"]].rank == rank


@pytest.mark.parametrize("name", [name for name, prompt in PROMPTS.items() if "prompt_nll" in prompt])
def test_likelihood_of_the_prompt(name: str, forced: dict[str, Floats]) -> None:
    assert nll(forced[name], PROMPTS[name]) == pytest.approx(PROMPTS[name]["prompt_nll"]["mean"], abs=1e-3)


@pytest.mark.parametrize("name", PROMPTS)
def test_margins(name: str, forced: dict[str, Floats]) -> None:
    steps = forced[name][len(PROMPTS[name]["input_ids"]) - 1 :]
    best = np.sort(steps, axis=1)
    assert steps.argmax(axis=1).tolist() == PROMPTS[name]["greedy_ids"]
    np.testing.assert_allclose(best[:, -1] - best[:, -2], PROMPTS[name]["greedy_margin"], rtol=0, atol=2e-3)


def test_text_becomes_the_same_tokens(llm: LLM, answers: dict[str, RequestOutput]) -> None:
    texts = [prompt for prompt in PROMPTS.values() if "messages" not in prompt]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    outputs = llm.generate([prompt["prompt"] for prompt in texts], params)
    for prompt, output in zip(texts, outputs, strict=True):
        assert output.prompt_token_ids == prompt["input_ids"], prompt["name"]
        assert output.token_ids == prompt["greedy_ids"][:6], prompt["name"]
        assert output.num_cached_tokens == len(prompt["input_ids"]) - 1, prompt["name"]


def test_chat(llm: LLM) -> None:
    for prompt in CHATS:
        assert llm.render_chat(prompt["messages"]) == prompt["prompt"]
    params = SamplingParams(temperature=0, max_tokens=48)
    outputs = llm.chat([prompt["messages"] for prompt in CHATS], params)
    for prompt, output in zip(CHATS, outputs, strict=True):
        assert output.prompt == prompt["prompt"]
        assert output.prompt_token_ids == prompt["input_ids"]
        end = prompt["first_eos"]
        assert end is not None
        assert output.token_ids == prompt["greedy_ids"][: end + 1]
        assert output.finish_reason == "stop"
        assert output.outputs[0].stop_reason is None
        assert prompt["greedy_text"].startswith(output.text)
        assert "<|im_end|>" not in output.text
        # one conversation alone, streamed
        pieces = list(llm.stream_chat(prompt["messages"], params))
        assert "".join(piece.text for piece in pieces) == output.text
        assert [token for piece in pieces for token in piece.token_ids] == output.token_ids
    assert_nothing_held(llm)


@pytest.mark.parametrize("name", ["korean", "emoji", "code"])
def test_stream(name: str, llm: LLM, answers: dict[str, RequestOutput]) -> None:
    """Korean and emoji take several tokens a character: no piece has half of one."""
    items = list(llm.stream(PROMPTS[name]["prompt"], SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)))
    assert "".join(item.text for item in items) == answers[name].text
    assert [token for item in items for token in item.token_ids] == PROMPTS[name]["greedy_ids"]
    assert [item.finished for item in items] == [False] * 47 + [True]
    if "\ufffd" not in answers[name].text:
        assert all("\ufffd" not in item.text for item in items)


def test_without_the_cache(llm: LLM) -> None:
    prompt = PROMPTS["capital"]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    (bare,) = llm.generate(prompt["prompt"], params, use_cache=False)
    assert bare.token_ids == prompt["greedy_ids"][:12]
    assert bare.num_computed_tokens == sum(range(5, 17))


def test_stop_strings(llm: LLM) -> None:
    prompt = PROMPTS["story"]
    text = prompt["greedy_text"]
    word = text[40:47]  # across tokens
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True, stop=["never to be found", word])
    (output,) = llm.generate(prompt["prompt"], params)
    assert output.text == text[: text.index(word)]
    assert (output.finish_reason, output.outputs[0].stop_reason) == ("stop", word)
    assert len(output.token_ids) < 48
    assert_nothing_held(llm)


# -- bfloat16 --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", ["bfloat16", "fp8_e4m3"])
def test_bfloat16_weights(cache: str, smollm2_path: Path) -> None:
    """Teacher forcing over all 576 steps: the same token wherever the margin is above 0.3."""
    with LLM(smollm2_path, dtype="bfloat16", kv_cache_dtype=cache, **OPTIONS) as llm:
        differing, clear, farthest = 0, 0, 0.0
        for name, prompt in PROMPTS.items():
            logits = forced_logits(llm, prompt)
            steps = logits[len(prompt["input_ids"]) - 1 :]
            tokens = steps.argmax(axis=1)
            for step, token in enumerate(prompt["greedy_ids"]):
                if prompt["greedy_margin"][step] > 0.3:
                    clear += 1
                    if cache == "bfloat16":
                        assert tokens[step] == token, (name, step)
                differing += int(tokens[step] != token)
            for row, tops in zip(log_softmax(steps[:8]), prompt["top5_logprobs"], strict=True):
                farthest = max([farthest, *(abs(row[top["id"]] - top["logprob"]) for top in tops)])
            if name == "alice":
                assert nll(logits, prompt) == pytest.approx(prompt["prompt_nll"]["mean"], abs=0.02)
        assert clear > 400
        if cache == "bfloat16":
            # transformers in bfloat16: 13 other tokens, log probabilities of all tokens by up to 0.21
            assert differing <= 20
            assert farthest < 0.3
        else:
            assert differing <= 40
            assert farthest < 1.5


# -- loading ---------------------------------------------------------------------------------------------------------


def test_trap_28_other_threads_run_while_it_loads(smollm2_path: Path) -> None:
    stop, ticks = threading.Event(), [time.perf_counter()]

    def count() -> None:
        while not stop.is_set():
            time.sleep(0.001)
            ticks.append(time.perf_counter())

    counter = threading.Thread(target=count)
    counter.start()
    try:
        LLM(smollm2_path, **OPTIONS).close()
    finally:
        stop.set()
        counter.join()
    assert max(np.diff(ticks)) < max(0.25 * (ticks[-1] - ticks[0]), 0.2)
    assert len(ticks) > 50
