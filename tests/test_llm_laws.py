"""Law 1 through ``LLM``: logits are the same to the bit, however they came about.

The measure is the plainest way: one request at a time, nothing cached, its prompt in one piece, one thread. Each other
way (with the cache, from cached prefixes, in batches, in chunks, on more threads) must give its bits.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvcore import LLM, SamplingParams, Session
from kvcore._kvcore import available_simd, simd
from models import EXACT, REFERENCE, TINY, Floats, assert_nothing_held, assert_same_bits, expected, recorded

MODEL = REFERENCE / "llama_gqa"
FORMATS = [  # weights, cache
    ("float32", "float32"),
    ("bfloat16", "bfloat16"),
    ("bfloat16", "fp8_e4m3"),
    ("float32", "bfloat16"),
    ("float32", "fp8_e4m3"),
    ("float16", "float16"),
]
CHUNKS = [1, 7, 16, 2048]
NEW_TOKENS = 5
GREEDY = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)

# Seven prompts whose fronts are shared in every way: by whole blocks, by parts of blocks, not at all.
_LONG = expected("llama_gqa")["input_ids"].tolist() * 2
PROMPTS = [_LONG[:70], _LONG[:33], _LONG[:32], _LONG[:31], _LONG[:16] + [5] * 20, [_LONG[0]], [9, *_LONG[:40]]]


LEVELS = available_simd()
WAYS = [(level, *pair) for level in LEVELS for pair in (FORMATS if level == LEVELS[-1] else FORMATS[:3])]
"""The rarer formats on the best level only."""


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Everything built in the test runs on this SIMD level."""
    monkeypatch.setenv("KVCORE_SIMD", request.param)
    assert simd() == request.param
    return request.param


def make(weights: str, cache: str, **options: Any) -> LLM:
    return LLM(MODEL, **{"dtype": weights, "kv_cache_dtype": cache, "num_kv_blocks": 96, "num_threads": 1, **options})


def run(llm: LLM, prompts: list[list[int]], *, use_cache: bool = True) -> list[Floats]:
    """The logits of each request's tokens, [NEW_TOKENS, vocab]."""
    with recorded(llm) as rows:
        outputs = llm.generate(prompts, GREEDY, use_cache=use_cache)
        result = [rows(output) for output in outputs]
    assert_nothing_held(llm)
    return result


def plainest(llm: LLM) -> list[Floats]:
    """The measure: alone, without the cache, in one piece."""
    return [run(llm, [prompt], use_cache=False)[0] for prompt in PROMPTS]


def all_ways(llm: LLM, want: list[Floats], *, every_slot: bool) -> None:
    """Alone, in a batch of 7 and of 2, in every slot (or in one), cold and on a hit, and without the cache."""

    def check(indices: list[int], what: str, **kind: Any) -> None:
        for i, got in zip(indices, run(llm, [PROMPTS[i] for i in indices], **kind), strict=True):
            assert_same_bits(got, want[i], f"prompt {i}, {what}")

    n = len(PROMPTS)
    for i in range(n):
        llm.cache.reset_prefix_cache()
        check([i], "alone, cold")
        check([i], "alone, hit")
    for i in range(n) if every_slot else [2]:
        pair, turned = [i, (i + 3) % n], [*range(i, n), *range(i)]
        llm.cache.reset_prefix_cache()
        check(pair, "of a pair, cold")
        check(pair[::-1], "of a pair, hit")
        llm.cache.reset_prefix_cache()
        check(turned, f"of seven from {i} on, cold")
        check(turned, f"of seven from {i} on, hit")
    check(list(range(n)), "of seven without cache", use_cache=False)
    check([0] * n, "seven times")


@pytest.mark.parametrize(("level", "weights", "cache"), WAYS, indirect=["level"])
def test_every_way_gives_the_same_bits(weights: str, cache: str, level: str) -> None:
    want: list[Floats] | None = None
    for chunk in CHUNKS[::-1]:
        with make(weights, cache, max_num_batched_tokens=chunk) as llm:
            if want is None:
                want = plainest(llm)
                everything = llm.logits(PROMPTS[0])
                assert_same_bits(everything[-1:], want[0][:1], "logits() and generate()")
                assert len({row.tobytes() for rows in want for row in rows}) > 4 * len(PROMPTS)
            assert_same_bits(llm.logits(PROMPTS[0]), everything, f"logits() by {chunk}")
            all_ways(llm, want, every_slot=chunk > 7)


def test_decoding_equals_one_pass(level: str) -> None:
    """The logits of tokens as they were generated, and of the same tokens as one prompt."""
    for weights, cache in FORMATS:
        with make(weights, cache) as llm, recorded(llm) as rows:
            for prompt in PROMPTS:
                (output,) = llm.generate(prompt, GREEDY)
                whole = llm.logits(prompt + output.token_ids[:-1])
                assert_same_bits(whole[len(prompt) - 1 :], rows(output), (weights, cache, len(prompt)))


# -- threads ---------------------------------------------------------------------------------------------------------

WIDE = TINY | {
    "vocab_size": 1536,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
"""Wide enough that products and attention are shared out among threads."""


@pytest.mark.parametrize(("weights", "cache"), FORMATS[:3])
def test_any_number_of_threads_gives_the_same_bits(weights: str, cache: str, level: str) -> None:
    random = np.random.default_rng(3)
    long = random.integers(0, 1536, 330).tolist()
    prompts = [long, long[:200], random.integers(0, 1536, 17).tolist(), long[:5]]
    want: list[Floats] = []
    for num_threads in (1, 2, 3):
        for chunk in (2048, 100):
            with LLM.from_config(
                WIDE,
                dtype=weights,
                kv_cache_dtype=cache,
                num_kv_blocks=96,
                num_threads=num_threads,
                max_num_batched_tokens=chunk,
            ) as llm:
                assert llm.cache.threads.num_threads == num_threads
                want = want or [run(llm, [p], use_cache=False)[0] for p in prompts]
                for what in ("cold", "hit"):
                    for i, got in enumerate(run(llm, prompts)):
                        assert_same_bits(got, want[i], f"prompt {i}, {what}, {num_threads} threads, by {chunk}")
                assert_same_bits(run(llm, [long])[0], want[0], f"alone, {num_threads} threads, by {chunk}")


# -- rope that depends on the prompt ---------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", ["float32", "fp8_e4m3"])
def test_dynamic_rope_follows_the_request(cache: str) -> None:
    """Across the limit (32) by prompt or by decoding: recomputing takes the bases that the cache was filled with."""
    folder, prompts = (
        REFERENCE / "llama_rope_dynamic",
        [p[:n] for p, n in zip(PROMPTS, (70, 33, 30, 31, 36, 1, 41), strict=True)],
    )
    want: list[Floats] = []
    for chunk in (2048, 7, 1):
        options = {"dtype": "float32", "kv_cache_dtype": cache, "num_kv_blocks": 96}
        with LLM(folder, max_num_batched_tokens=chunk, **options) as llm:
            want = want or [run(llm, [p], use_cache=False)[0] for p in prompts]
            for what in ("cold", "hit"):
                for i, got in enumerate(run(llm, prompts)):
                    assert_same_bits(got, want[i], f"prompt {i}, {what}, by {chunk}")
            for i, got in enumerate(run(llm, prompts, use_cache=False)):
                assert_same_bits(got, want[i], f"prompt {i}, without cache, by {chunk}")


# -- any mixture of requests -----------------------------------------------------------------------------------------


@functools.cache
def _llm(cache: str, chunk: int) -> LLM:
    """Kept over all examples. The pool is small: prefixes are evicted, and requests wait."""
    return make("float32", cache, max_num_batched_tokens=chunk, num_kv_blocks=24, max_num_seqs=5)


@functools.cache
def _alone(cache: str, prompt: tuple[int, ...], new_tokens: int) -> Floats:
    llm = _llm(cache, 2048)
    params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
    with recorded(llm) as rows:
        return rows(llm.generate(list(prompt), params, use_cache=False)[0])


@st.composite
def requests(draw: st.DrawFn) -> list[tuple[tuple[int, ...], int, bool]]:
    """(prompt, tokens to generate, use_cache); prompts are cut from two texts that part somewhere, with tails."""
    seed, parts_at = draw(st.integers(0, 3)), draw(st.sampled_from([0, 15, 16, 40]))
    text = np.random.default_rng(seed).integers(0, 320, 80).tolist()
    other = text[:parts_at] + np.random.default_rng(seed + 10).integers(0, 320, 80 - parts_at).tolist()

    def request() -> tuple[tuple[int, ...], int, bool]:
        prompt = draw(st.sampled_from([text, other]))[: draw(st.integers(1, 80))]
        tail = draw(st.lists(st.integers(0, 319), max_size=3))
        return tuple(prompt + tail), draw(st.integers(1, 20)), draw(st.sampled_from([True, True, True, False]))

    return [request() for _ in range(draw(st.integers(1, 7)))]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    cache=st.sampled_from(["float32", "bfloat16", "fp8_e4m3"]),
    chunk=st.sampled_from([1, 7, 16, 33, 2048]),
    calls=st.lists(requests(), min_size=1, max_size=3),
)
def test_any_mixture_of_requests(cache: str, chunk: int, calls: list[list[tuple[tuple[int, ...], int, bool]]]) -> None:
    llm = _llm(cache, chunk)
    llm.cache.reset_prefix_cache()
    for call in calls:
        for use_cache in (True, False):
            some = [(prompt, n) for prompt, n, kind in call if kind is use_cache]
            if not some:
                continue
            params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for _, n in some]
            want = [_alone(cache, prompt, n) for prompt, n in some]
            with recorded(llm) as rows:
                outputs = llm.generate([list(prompt) for prompt, _ in some], params, use_cache=use_cache)
                for output, logits in zip(outputs, want, strict=True):
                    assert_same_bits(rows(output), logits, f"{len(output.prompt_token_ids)} tokens")
                    assert output.num_cached_tokens < len(output.prompt_token_ids)
            assert_nothing_held(llm)


@settings(max_examples=25, deadline=None)
@given(
    first=requests(),
    second=requests(),
    order=st.lists(st.booleans(), min_size=1, max_size=30),
    seed=st.integers(0, 100),
)
def test_streams_that_come_and_go(
    first: list[tuple[tuple[int, ...], int, bool]],
    second: list[tuple[tuple[int, ...], int, bool]],
    order: list[bool],
    seed: int,
) -> None:
    """Cached and recomputed requests in common batches, some left half way: the others do not notice."""
    llm = _llm("float32", 33)
    llm.cache.reset_prefix_cache()
    random = np.random.default_rng(seed)
    with recorded(llm) as rows:
        streams = []
        for prompt, n, use_cache in first + second:
            params = SamplingParams(temperature=0, max_tokens=n, ignore_eos=True)
            streams.append(((prompt, n), llm.stream(list(prompt), params, use_cache=use_cache)))
        for leave in order:
            if not streams:
                break
            at = int(random.integers(len(streams)))
            (prompt, n), stream = streams[at]
            item = next(stream, None)
            if leave or item is None or item.finished:
                if item is not None:
                    got = rows(item)
                    assert_same_bits(got, _alone("float32", prompt, n)[: len(got)])
                stream.close()
                del streams[at]
        for (prompt, n), stream in streams:
            items = list(stream)
            if items:
                assert_same_bits(rows(items[-1]), _alone("float32", prompt, n))
    assert_nothing_held(llm)


# -- a trained model -------------------------------------------------------------------------------------------------


@pytest.mark.model
@pytest.mark.parametrize(
    ("cache", "quantization"),
    [("float32", "none"), ("bfloat16", "none"), ("fp8_e4m3", "none"), ("fp8_e4m3", "int4"), ("bfloat16", "int8")],
)
def test_smollm2(cache: str, quantization: str, smollm2_path: Path) -> None:
    text = "The cache keeps keys and values of all tokens that a model has read, so that none is computed twice. "
    questions = ["What is it for?", "How large is it?", "한국어로 설명해 줘.", "x"]
    want: list[Floats] = []
    weights = "float32" if cache == "float32" else "bfloat16"
    for chunk, num_threads in ((2048, 1), (16, 2)):
        with LLM(
            smollm2_path,
            dtype=weights,
            quantization=quantization,
            kv_cache_dtype=cache,
            num_kv_blocks=64,
            num_threads=num_threads,
            max_num_batched_tokens=chunk,
        ) as llm:
            prompts = [llm.tokenizer.encode(text + question, True) for question in questions]
            want = want or [run(llm, [prompt], use_cache=False)[0] for prompt in prompts]
            for what in ("cold", "hit"):
                for i, got in enumerate(run(llm, prompts)):
                    assert_same_bits(got, want[i], f"question {i}, {what}, {num_threads} threads, by {chunk}")
            assert_same_bits(run(llm, prompts[:1])[0], want[0], "alone, hit")
            assert llm.stats()["num_cached_tokens"] > 3 * 16


@pytest.mark.parametrize("name", ["gemma3_text", "gpt_oss", "mistral_swa8"])
def test_pools_of_windows_suffice(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sliding group's pool is smaller than that of all tokens; whatever runs, the tokens are those of a large one."""
    monkeypatch.setattr("kvcore.loading._WINDOWS", 1)  # none but those that run
    prompts = [[1 + (5 * i + j) % 90 for j in range(n)] for i, n in enumerate((40, 90, 3, 70, 41, 88, 17, 64))]
    prompts += [prompts[1] + [7, 8, 9], [*prompts[3][:50], 4, 4]]  # prefixes of what ran before
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    answers = []
    for size in ({"kv_cache_memory": 4 << 20, "max_num_seqs": 3, "max_num_batched_tokens": 32}, {"num_kv_blocks": 200}):
        with LLM(REFERENCE / name, **EXACT, **size) as llm:
            for group in llm.cache.groups:
                if "num_kv_blocks" in size:
                    assert group.num_blocks == 200
                elif group.window is not None:
                    assert group.num_blocks == 2 * (3 * (-(-group.window // 16) + 2) + 2)
            answers.append([output.outputs[0].token_ids for output in llm.generate(prompts, params)])
            several = llm.generate(prompts[:4], SamplingParams(n=3, seed=1, max_tokens=20, ignore_eos=True))
            answers[-1] += [choice.token_ids for output in several for choice in output.outputs]
            sessions = [Session(llm, prompt) for prompt in prompts[:2]]
            for session in sessions:
                answers[-1].append(session.generate(params).outputs[0].token_ids)
            answers[-1] += [output.outputs[0].token_ids for output in llm.generate(prompts[2:], params)]
            for session in sessions:
                session.close()
            llm.cache.check()
            cache = llm.cache.stats()
            assert (cache["used"], cache["num_sequences"]) == (0, 0)
    assert answers[0] == answers[1]
