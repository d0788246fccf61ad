"""LLM on mock parts: prompts of every kind, text, streaming, threads and interrupts."""

from __future__ import annotations

import _thread
import gc
import random
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import kvcore.engine
import kvcore.loading as loading
from kvcore.checkpoint.config import GenerationConfig
from kvcore.engine.sampling_params import SamplingParams
from kvcore.errors import InvalidArgument, InvalidState, OutOfBlocks
from kvcore.llm import LLM
from kvcore.loading import Options
from kvcore.memory import available_memory, total_memory
from kvcore.models.shape import LayerCache
from kvcore.outputs import RequestOutput
from mocks import MockCache, MockChatTemplate, MockDecoder, MockTokenizer, text_script

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
TEXT = SamplingParams(temperature=0, max_tokens=100)


def make(
    num_blocks: int = 200,
    *,
    script: dict[int, int] | None = None,
    tokenizer: Any = None,
    block_size: int = 4,
    **options: Any,
) -> LLM:
    decoder = MockDecoder(MockCache(num_blocks, block_size), 257, script=script)
    return LLM._from_parts(
        decoder, tokenizer, GenerationConfig((256,)), chat_template=MockChatTemplate() if tokenizer else None, **options
    )


def talker(prompt: str, answer: str, *, eos: bool = True, **options: Any) -> LLM:
    """An LLM that answers this prompt (or any of the same length) with this text."""
    return make(script=text_script(len(prompt.encode()), answer, eos=eos), tokenizer=MockTokenizer(), **options)


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


# -- prompts ---------------------------------------------------------------------------------------------------------


def test_kinds_of_prompts() -> None:
    llm = make(tokenizer=MockTokenizer())
    (one,) = llm.generate("ab", GREEDY)
    assert (one.prompt, one.prompt_token_ids) == ("ab", [97, 98])
    same: list[Any] = [
        [97, 98],
        (97, 98),
        np.array([97, 98]),
        {"prompt": "ab"},
        {"prompt_token_ids": [97, 98]},
        ["ab"],
        [[97, 98]],
        [np.array([97, 98])],
        [{"prompt_token_ids": np.array([97, 98])}],
    ]
    for prompts in same:
        (output,) = llm.generate(prompts, GREEDY)
        assert output.prompt_token_ids == [97, 98]
        assert tokens([output]) == tokens([one])
    mixed = llm.generate(["ab", [97, 98], {"prompt": "c"}], GREEDY)
    assert [o.prompt for o in mixed] == ["ab", None, "c"]
    assert tokens(mixed)[0] == tokens(mixed)[1] == one.token_ids
    assert len({o.request_id for o in mixed}) == 3


@pytest.mark.parametrize("prompts", ["", [], [[]], [""], ["a", ""], [[1], []], np.array([], int), {"prompt": ""}, {}])
def test_trap_11_empty_prompts(prompts: Any) -> None:
    llm = make(tokenizer=MockTokenizer())
    with pytest.raises(InvalidArgument, match="prompt"):
        llm.generate(prompts, GREEDY)
    with pytest.raises(InvalidArgument, match="max_tokens"):
        llm.generate("a", SamplingParams(max_tokens=0))
    assert len(llm.generate("a", GREEDY)[0].token_ids) == 6


@pytest.mark.parametrize(
    "prompts", [None, 5, [None], [1.5], [True], [1, "a"], ["a", 1], {1, 2}, {"prompt": [1]}, {"prompt_token_ids": "a"}]
)
def test_prompts_of_the_wrong_type(prompts: Any) -> None:
    with pytest.raises(TypeError, match="prompt"):
        make(tokenizer=MockTokenizer()).generate(prompts, GREEDY)


def test_params_for_each_prompt() -> None:
    llm = make()
    outputs = llm.generate([[1], [1]], [GREEDY, SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)])
    assert [len(t) for t in tokens(outputs)] == [6, 2]
    assert tokens(outputs)[0][:2] == tokens(outputs)[1]
    with pytest.raises(InvalidArgument, match="each of the 2 prompts, got 1"):
        llm.generate([[1], [1]], [GREEDY])
    with pytest.raises(TypeError, match="params"):
        llm.generate([1], {"max_tokens": 5})  # type: ignore[arg-type]
    assert len(llm.generate([1])[0].token_ids) <= 16
    with pytest.raises(TypeError, match="use_cache"):
        llm.generate([1], GREEDY, use_cache=1)  # type: ignore[arg-type]


def test_without_a_tokenizer_only_text_raises() -> None:
    llm = make()
    assert llm.generate([1, 2], GREEDY)[0].outputs[0].text == ""
    for call in (
        lambda: llm.generate("text", GREEDY),
        lambda: llm.stream("text", GREEDY),
        lambda: llm.chat([{"role": "user", "content": "x"}]),
        lambda: llm.generate([1], SamplingParams(stop="x")),
    ):
        with pytest.raises(InvalidArgument, match=r"tokenizer|template"):
            call()


def test_all_prompts_are_checked_before_any_runs() -> None:
    llm = make(10)
    with pytest.raises(OutOfBlocks, match="11 blocks of 4 needed, 10 available"):
        llm.generate([[1], [2], [3] * 41], GREEDY)
    with pytest.raises(InvalidArgument, match="vocabulary"):
        llm.generate([[1], [257]], GREEDY)
    assert llm.stats()["num_requests"] == llm.stats()["num_steps"] == 0
    assert len(llm.generate([[1], [2]], GREEDY)) == 2


def test_trap_10_through_generate() -> None:
    llm = make(49, block_size=16)
    with pytest.raises(OutOfBlocks, match=r"63 .*49"):
        llm.generate([[1] * 1002, [1, 2, 3]], GREEDY)
    assert len(llm.generate([1, 2, 3], GREEDY)[0].token_ids) == 6


# -- text ------------------------------------------------------------------------------------------------------------


def test_text_ends_before_the_end_token() -> None:
    llm = talker("hi", "naïve 🤣 한")
    (output,) = llm.generate("hi", TEXT)
    completion = output.outputs[0]
    assert completion.text == "naïve 🤣 한"
    assert completion.token_ids == [*"naïve 🤣 한".encode(), 256]
    assert (completion.finish_reason, completion.stop_reason, completion.finished) == ("stop", None, True)
    with_end = SamplingParams(temperature=0, max_tokens=100, include_stop_str_in_output=True, skip_special_tokens=False)
    assert llm.generate("hi", with_end)[0].text == "naïve 🤣 한</s>"


def test_stop_strings() -> None:
    llm = talker("hi", "one two three")
    text = "one two three"
    for stop, expected, reason in (
        ("two", "one ", "two"),
        (["xyz", "ee"], "one two thr", "ee"),
        ("e t", "on", "e t"),
        ("nowhere", text, None),
    ):
        params = SamplingParams(temperature=0, max_tokens=100, stop=stop)
        (output,) = llm.generate("hi", params)
        assert (output.text, output.outputs[0].stop_reason, output.finish_reason) == (expected, reason, "stop")
        if reason is not None:
            assert output.token_ids == list(text[: text.index(reason) + len(reason)].encode())
        pieces = [item.text for item in llm.stream("hi", params)]
        assert "".join(pieces) == expected
    kept = SamplingParams(temperature=0, max_tokens=100, stop="two", include_stop_str_in_output=True)
    assert llm.generate("hi", kept)[0].text == "one two"
    # found in the very last token that max_tokens allows: the stop string is the reason
    params = SamplingParams(temperature=0, max_tokens=7, stop="two")
    assert llm.generate("hi", params)[0].finish_reason == "stop"
    llm.cache.check_empty()


def test_held_back_text_comes_out_at_the_end() -> None:
    llm = talker("hi", "abc")
    params = SamplingParams(temperature=0, max_tokens=3, stop="cd")
    assert llm.generate("hi", params)[0].text == "abc"
    llm = talker("hi", "a🤣", eos=False)
    assert llm.generate("hi", SamplingParams(temperature=0, max_tokens=3))[0].text == "a\ufffd"


def test_stop_tokens_are_not_part_of_the_text() -> None:
    llm = talker("hi", "abc")
    params = SamplingParams(temperature=0, stop_token_ids=[ord("b")])
    (output,) = llm.generate("hi", params)
    assert (output.text, output.token_ids, output.outputs[0].stop_reason) == ("a", [97, 98], 98)


def test_logprobs_have_text() -> None:
    llm = talker("hi", "abc")
    (output,) = llm.generate("hi", SamplingParams(temperature=0, max_tokens=3, logprobs=1))
    completion = output.outputs[0]
    assert completion.logprobs is not None
    assert [next(iter(p.values())).decoded_token for p in completion.logprobs] == ["a", "b", "c"]
    assert completion.cumulative_logprob == pytest.approx(
        sum(next(iter(p.values())).logprob for p in completion.logprobs)
    )
    assert llm.generate("hi", GREEDY)[0].outputs[0].logprobs is None


def test_chat() -> None:
    messages = [{"role": "user", "content": "hi"}]
    prompt = "<user>hi\n<assistant>"
    llm = talker(prompt, "hello")
    (output,) = llm.chat(messages, TEXT)
    assert (output.prompt, output.text) == (prompt, "hello")
    assert [o.text for o in llm.chat([messages, messages], TEXT)] == ["hello", "hello"]
    assert "".join(item.text for item in llm.stream_chat(messages, TEXT)) == "hello"
    (output,) = llm.chat(messages, TEXT, add_generation_prompt=False)
    assert output.prompt == "<user>hi\n"
    (output,) = llm.chat(messages, TEXT, chat_template="{{ messages[0]['content'] }}{{ eos_token }}")
    assert output.prompt == "hi</s>"
    with pytest.raises(InvalidArgument, match="at least one message"):
        llm.chat([])
    with pytest.raises(InvalidArgument, match="messages"):
        llm.chat("hi")  # type: ignore[arg-type]


# -- counts and times ------------------------------------------------------------------------------------------------


def test_outputs_carry_counts_and_times() -> None:
    llm = make()
    prompt = list(range(10))
    llm.generate(prompt, GREEDY)
    (output,) = llm.generate(prompt, GREEDY)
    assert (output.num_cached_tokens, output.num_computed_tokens) == (8, 2 + 5)
    assert output.metrics.ttft is not None
    assert output.metrics.tpot is not None
    assert output.metrics.ttft > 0
    assert output.metrics.tpot > 0
    (again,) = llm.generate(prompt, GREEDY, use_cache=False)
    assert (again.num_cached_tokens, again.num_computed_tokens) == (0, sum(range(10, 16)))
    assert again.token_ids == output.token_ids
    assert llm.stats()["num_preemptions"] == 0
    assert llm.stats()["cache"]["total"] == 200


def test_a_batch_decodes_together() -> None:
    llm = make()
    outputs = llm.generate([[i] for i in range(5)], GREEDY)
    decoder = llm._decoder
    assert decoder.batches == [[1] * 5] * 6
    for i, output in enumerate(outputs):
        assert tokens([output]) == tokens(make().generate([i], GREEDY))


def test_logits() -> None:
    llm = make()
    assert llm.logits([1, 2, 3]).shape == (3, 257)
    with pytest.raises(InvalidArgument, match="prompt"):
        llm.logits([])
    llm.cache.check_empty()


# -- streaming -------------------------------------------------------------------------------------------------------


def test_stream_gives_what_is_new() -> None:
    llm = talker("hi", "né 🤣!")
    (whole,) = llm.generate("hi", TEXT)
    items = list(llm.stream("hi", TEXT))
    assert "".join(item.outputs[0].text for item in items) == whole.text
    assert [t for item in items for t in item.outputs[0].token_ids] == whole.token_ids
    assert all(len(item.token_ids) == 1 for item in items)
    assert [item.finished for item in items] == [False] * (len(items) - 1) + [True]
    assert items[-1].finish_reason == "stop"
    assert items[-1].prompt_token_ids == [104, 105]
    assert items[0].metrics.num_generation_tokens == 1


def test_a_stream_that_is_left_returns_its_blocks() -> None:
    llm = make()
    stream = llm.stream([1] * 9, GREEDY)
    for item in stream:
        assert item.token_ids
        break
    assert llm.cache.stats()["num_sequences"] == 1
    assert isinstance(stream, Iterator)
    stream.close()  # type: ignore[attr-defined]
    llm.cache.check_empty()
    for _ in llm.stream([1] * 9, GREEDY):
        break
    gc.collect()
    llm.cache.check_empty()
    llm.stream([1], GREEDY)  # never begun
    llm.cache.check_empty()
    assert llm.stats()["num_finished"]["abort"] == 2


def test_stream_checks_at_once() -> None:
    llm = make(10, tokenizer=MockTokenizer())
    for prompt, error in (
        ("", InvalidArgument),
        (["a", "b"], InvalidArgument),
        ([], InvalidArgument),
        ([1] * 50, OutOfBlocks),
        (5, TypeError),
    ):
        with pytest.raises(error, match="prompt"):
            llm.stream(prompt, GREEDY)


def test_streams_and_calls_can_be_interleaved() -> None:
    llm = make()
    expected = tokens(llm.generate([[1], [2], [3]], GREEDY))
    first, second = llm.stream([1], GREEDY), llm.stream([2], GREEDY)
    got: list[list[int]] = [[], []]
    got[0] += next(first).token_ids
    got[1] += next(second).token_ids
    assert tokens(llm.generate([3], GREEDY)) == expected[2:]
    for i, stream in enumerate((first, second)):
        items = list(stream)
        got[i] += [t for item in items for t in item.token_ids]
        assert items[-1].finished
    assert got == expected[:2]
    llm.cache.check_empty()


# -- failures and interrupts -------------------------------------------------------------------------------------------


def test_an_error_of_one_request_ends_its_call_only() -> None:
    llm = make()
    other = llm.stream([1], GREEDY)
    expected = tokens(llm.generate([1], GREEDY))[0]
    got = next(other).token_ids

    def edit(logits: np.ndarray, positions: np.ndarray) -> None:
        logits[positions == 10] = np.nan

    llm._decoder.edit = edit
    with pytest.raises(InvalidState, match="finite"):
        llm.generate([[2], [3] * 10], GREEDY)
    llm._decoder.edit = None
    assert got + [t for item in other for t in item.token_ids] == expected
    llm.cache.check_empty()


def test_an_error_in_a_shared_batch_reaches_both_calls() -> None:
    llm = make()
    other = llm.stream([1], GREEDY)
    next(other)

    def fail() -> None:
        raise RuntimeError("broken")

    llm._decoder.fail = fail
    with pytest.raises(RuntimeError, match="broken"):
        llm.generate([2], GREEDY)
    llm._decoder.fail = None
    with pytest.raises(InvalidState, match=r"shared.*broken"):
        next(other)
    llm.cache.check_empty()
    assert len(llm.generate([2], GREEDY)[0].token_ids) == 6


def test_an_error_in_making_text_ends_its_request_only() -> None:
    class Broken(MockTokenizer):
        def token_bytes(self, token_id: int) -> bytes:
            if token_id == ord("b"):
                raise RuntimeError("no such token")
            return super().token_bytes(token_id)

    llm = make(script=text_script(2, "abc"), tokenizer=Broken())
    with pytest.raises(RuntimeError, match="no such token"):
        llm.generate("hi", TEXT)
    llm.cache.check_empty()
    assert llm.generate("hi", SamplingParams(max_tokens=1, temperature=0))[0].text == "a"


PACKAGE = str(Path(kvcore.engine.__file__).parent.parent)


def interrupt_at(count: int) -> tuple[Any, list[int]]:
    """A trace function that raises KeyboardInterrupt at byte code number ``count`` of this package, and its counter."""
    seen = [0]

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        if seen[0] > count or not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        frame.f_trace_opcodes = True
        if event in ("opcode", "line"):
            seen[0] += 1
            if seen[0] > count:
                raise KeyboardInterrupt
        return trace

    return trace, seen


@pytest.mark.skipif(sys.gettrace() is not None, reason="needs the trace function for itself")
@pytest.mark.parametrize("use_cache", [True, False])
def test_trap_28_ctrl_c_at_any_byte_code(use_cache: bool) -> None:
    params = SamplingParams(seed=1, max_tokens=3, stop="x")
    prompts = [[1] * 5, [2], [3] * 9]
    llm = make(tokenizer=MockTokenizer(), max_num_batched_tokens=8, max_num_seqs=2)

    def run(count: int) -> int:
        trace, seen = interrupt_at(count)
        sys.settrace(trace)
        try:
            llm.generate(prompts, params, use_cache=use_cache, progress=False)
            for _ in llm.stream([4], params):
                pass
        finally:
            sys.settrace(None)
        return seen[0]

    run(sys.maxsize)
    total = run(sys.maxsize)
    expected = tokens(llm.generate(prompts, params))
    points = sorted(random.Random(0).sample(range(total), 150))
    for i, point in enumerate(points):
        with pytest.raises(KeyboardInterrupt):
            run(point)
        llm.cache.check_empty()
        assert not llm._engine.has_unfinished
        assert not llm._dispatcher.replies
        if i % 30 == 0:
            assert tokens(llm.generate(prompts, params)) == expected
    assert tokens(llm.generate(prompts, params)) == expected


def test_trap_28_sigint_in_a_long_call() -> None:
    llm = make(tokenizer=MockTokenizer())
    llm._decoder.fail = lambda: time.sleep(0.005)
    counted = [0]
    done = threading.Event()

    def count() -> None:
        while not done.wait(0.001):
            counted[0] += 1

    counter = threading.Thread(target=count)
    timer = threading.Timer(0.2, _thread.interrupt_main)
    counter.start()
    timer.start()
    start = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[1], [2]], SamplingParams(max_tokens=790, ignore_eos=True))
    finally:
        done.set()
        counter.join()
    assert time.monotonic() - start < 1.2
    assert counted[0] > 10
    llm.cache.check_empty()
    assert len(llm.generate([1], GREEDY)[0].token_ids) == 6


def test_threads_share_batches_and_take_turns() -> None:
    llm = make(tokenizer=MockTokenizer())
    expected = [tokens(llm.generate([i] * 5, GREEDY)) for i in range(4)]
    llm._decoder.fail = lambda: time.sleep(0.001)
    long = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
    order: list[str] = []
    results: dict[int, list[list[int]]] = {}

    def run_long() -> None:
        llm.generate([9], long)
        order.append("long")

    def run(i: int) -> None:
        results[i] = tokens(llm.generate([i] * 5, GREEDY))
        order.append(str(i))

    threads = [threading.Thread(target=run_long)]
    threads += [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
        time.sleep(0.01)
    for thread in threads:
        thread.join(60)
    assert order[-1] == "long"
    assert [results[i] for i in range(4)] == expected
    assert max(len(batch) for batch in llm._decoder.batches) > 1
    llm.cache.check_empty()


def test_close() -> None:
    with make() as llm:
        stream = llm.stream([1], GREEDY)
        next(stream)
        cache = llm.cache
    cache.check_empty()
    llm.close()
    assert next(stream).finish_reason == "abort"
    for call in (lambda: llm.generate([1]), lambda: llm.logits([1]), lambda: llm.stats(), lambda: llm.cache):
        with pytest.raises(InvalidState, match="close"):
            call()
    assert "closed" in repr(llm)


# -- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"dtype": "f8"}, InvalidArgument, "dtype: expected one of auto, float32"),
        ({"dtype": 32}, TypeError, "dtype"),
        ({"quantization": "awq"}, InvalidArgument, "quantization"),
        ({"kv_cache_dtype": "fp4"}, InvalidArgument, "kv_cache_dtype"),
        ({"block_size": 8}, InvalidArgument, "multiple of 16, got 8"),
        ({"block_size": True}, TypeError, "block_size"),
        ({"num_kv_blocks": 0}, InvalidArgument, "num_kv_blocks"),
        ({"num_kv_blocks": 4, "kv_cache_memory": 1 << 20}, InvalidArgument, "at most one"),
        ({"max_num_seqs": 0}, InvalidArgument, "max_num_seqs"),
        ({"max_num_batched_tokens": 1.5}, TypeError, "max_num_batched_tokens"),
        ({"max_model_len": -1}, InvalidArgument, "max_model_len"),
        ({"prefix_ttl": float("nan")}, InvalidArgument, "prefix_ttl"),
        ({"enable_prefix_caching": 1}, TypeError, "enable_prefix_caching"),
        ({"seed": -1}, InvalidArgument, "seed"),
        ({"num_threads": 0}, InvalidArgument, "num_threads"),
        ({"scheduling_policy": "random"}, InvalidArgument, "scheduling_policy: expected one of fcfs, priority"),
        ({"swap_space": -1}, InvalidArgument, "swap_space"),
        ({"swap_space": 1.5}, TypeError, "swap_space"),
        ({"prompt_cache_min_tokens": -1}, InvalidArgument, "prompt_cache_min_tokens"),
        ({"speculative_config": "ngram"}, TypeError, "speculative_config: expected None or a dict, got str"),
        ({"speculative_config": {}}, InvalidArgument, "speculative_config.num_speculative_tokens"),
    ],
)
def test_options_are_checked_before_anything_is_read(options: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        LLM("/does/not/exist", **options)
    with pytest.raises(error, match=match):
        LLM.from_config({}, **options)


SPEC: Any = SimpleNamespace(
    num_layers=32,
    num_kv_heads=8,
    head_dim=128,
    max_position_embeddings=8192,
    takes_any_length=False,
    encoder=None,
    cache_layers=lambda: [LayerCache("full", 8, 128, 128, layer=layer) for layer in range(32)],
)


def test_the_size_of_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    token = 128 * 1024  # Llama 3 8B in 16 bits
    block = 16 * token

    def blocks(spec: Any = SPEC, per_token: int = token, *, available: int = 1 << 40, **options: Any) -> int:
        monkeypatch.setattr(loading, "available_memory", lambda: available)
        return loading.num_blocks(spec, per_token, Options(**options))

    assert blocks(num_kv_blocks=7) == 7
    assert blocks(kv_cache_memory=10 * block + 1) == 10
    assert blocks(per_token=token // 2, kv_cache_memory=10 * block) == 20
    with pytest.raises(InvalidArgument, match=f"at least {block} bytes"):
        blocks(kv_cache_memory=block - 1)
    assert blocks(max_num_seqs=2) == 2 * 512
    assert blocks() == (4 << 30) // block
    assert blocks(SimpleNamespace(**{**vars(SPEC), "max_position_embeddings": 131_072})) == 131_072 // 16
    assert blocks(available=40 * block) == 20
    assert blocks(available=0) == 1
    assert available_memory() > 0
    total = total_memory()
    assert total is None or total >= available_memory()


def test_windows_leave_their_memory_to_others() -> None:
    """Four layers of five with a window of 512: their pools end where it does, times sequences."""
    layers = [LayerCache("full", 1, 64, 64, layer=0)]
    layers += [LayerCache("sliding_window", 1, 64, 64, window=512, layer=layer) for layer in range(1, 5)]
    spec: Any = SimpleNamespace(**{**vars(SPEC), "cache_layers": lambda: layers})
    block = 16 * 5 * 1000
    most = loading.window_blocks(512, Options())
    assert most == 2 * (64 * 34 + 128)

    def blocks(memory: int, spec: Any = spec, **options: Any) -> int:
        return loading.num_blocks(spec, 5 * 1000, Options(kv_cache_memory=memory, **options))

    assert blocks(block) == 1
    assert blocks(most * block) == most
    assert blocks(most * block + block - 1) == most + 4  # a block of the one layer is a fifth
    assert blocks(2 * most * block) == most + 5 * most
    few = {"max_num_seqs": 1, "max_num_batched_tokens": 16}
    kept = 2 * (64 * 34 + 1)  # idle sessions and prefixes may be many although one sequence runs
    assert loading.window_blocks(512, Options(**few)) == kept
    assert blocks(10_000 * block, **few) == 50_000 - 4 * kept
    sliding: Any = SimpleNamespace(**{**vars(SPEC), "cache_layers": lambda: layers[1:]})
    assert loading.num_blocks(sliding, 4 * 1000, Options(kv_cache_memory=10_000 * block, **few)) == kept
    mixed = [*layers[:3], *(LayerCache("sliding_window", 1, 64, 64, window=16, layer=layer) for layer in (3, 4))]
    both: Any = SimpleNamespace(**{**vars(SPEC), "cache_layers": lambda: mixed})
    assert blocks(10_000 * block, both, **few) == 50_000 - 2 * kept - 2 * loading.window_blocks(16, Options(**few))
    # without a limit: what all sequences of the full length take, in which a window's pool has its end, too
    assert loading.num_blocks(spec, 5 * 1000, Options(max_num_seqs=2)) == 2 * 512


def test_memory_is_shared_with_what_encoders_give() -> None:
    """Whisper base in 16 bits: 28 blocks for 448 tokens, 94 for 1500 rows."""
    block = 16 * 12 * 1024
    encoder = SimpleNamespace(max_rows=1500)
    layers = [LayerCache("full", layer=layer) for layer in range(6)]
    spec: Any = SimpleNamespace(
        max_position_embeddings=448, takes_any_length=False, encoder=encoder, cache_layers=lambda: layers
    )

    def blocks(**options: Any) -> tuple[int, int]:
        checked = Options(**options)
        count = loading.num_blocks(spec, 12 * 1024, checked, cross_block_bytes=block)
        return count, loading.cross_blocks(spec, checked, count)

    assert blocks(num_kv_blocks=7) == (7, 94)  # one input, always
    assert blocks(num_kv_blocks=280) == (280, 940)
    assert blocks(kv_cache_memory=2 * 122 * block) == (56, 188)
    assert blocks(kv_cache_memory=95 * block) == (1, 94)
    own, cross = blocks(max_num_seqs=3)
    assert (own, cross) == (84, 282)
    with pytest.raises(InvalidArgument, match=r"one block, and 94 for one input of the encoder"):
        blocks(kv_cache_memory=95 * block - 1)


def test_the_length_of_a_model() -> None:
    assert loading.model_length(SPEC, Options()) == 8192
    assert loading.model_length(SPEC, Options(max_model_len=100)) == 100
    with pytest.raises(InvalidArgument, match=r"at most 8192 .*, got 8193"):
        loading.model_length(SPEC, Options(max_model_len=8193))
    dynamic: Any = SimpleNamespace(**{**vars(SPEC), "takes_any_length": True})
    assert loading.model_length(dynamic, Options()) is None
    assert loading.model_length(dynamic, Options(max_model_len=10_000)) == 10_000


def test_dtypes() -> None:
    assert Options(dtype="bf16", kv_cache_dtype="fp8").kv_cache_dtype == "fp8_e4m3"
    cases: list[tuple[dict[str, str], str, str]] = [
        ({"torch_dtype": "float16"}, "auto", "float16"),
        ({"dtype": "float32"}, "auto", "float32"),
        ({"dtype": "float32"}, "bf16", "bfloat16"),
        ({}, "auto", "bfloat16"),
    ]
    for config, option, expected in cases:
        assert loading.weight_dtype(config, Options(dtype=option)) == expected
    assert loading.kv_cache_dtype("float32", Options()) == "float32"
    assert loading.kv_cache_dtype("float16", Options()) == "bfloat16"
    assert loading.kv_cache_dtype("float32", Options(kv_cache_dtype="bf16")) == "bfloat16"


def test_random_weights() -> None:
    shapes = {"a.weight": (300, 200), "norm.weight": (200,), "a.bias": (300,)}
    spec: Any = SimpleNamespace(required_shapes=lambda: shapes)
    weights = loading.RandomWeights(spec, 0)
    assert weights.names() == sorted(shapes)
    assert "lm_head.weight" not in weights
    matrix = weights.get("a.weight")
    assert (matrix.shape, matrix.dtype, weights.shape("a.weight")) == ((300, 200), np.float32, (300, 200))
    assert matrix.std() == pytest.approx(200**-0.5, rel=0.02)
    assert (matrix == loading.RandomWeights(spec, 0).get("a.weight")).all()
    assert (matrix != loading.RandomWeights(spec, 1).get("a.weight")).any()
    assert (weights.get("norm.weight") == 1).all()
    assert (weights.get("a.bias") == 0).all()


def test_unknown_options() -> None:
    with pytest.raises(TypeError, match="tensor_parallel"):
        LLM.from_config({}, tensor_parallel=2)
    with pytest.raises(InvalidArgument, match="random_weights"):
        LLM.from_config({}, random_weights=False)


def test_progress_bar(capfd: pytest.CaptureFixture[str]) -> None:
    llm = make()
    llm.generate([[1]] * 9, GREEDY)
    assert capfd.readouterr().err == ""
    llm.generate([[1]] * 2, GREEDY, progress=True)
    captured = capfd.readouterr()
    assert captured.out == ""
    assert "2/2" in captured.err
