"""Anything that is wrong gives ``LLM`` a typed exception that says what was expected and what came, and no harm.

After each mistake the same model answers as before, and no block is held.
"""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore import (
    LLM,
    AsyncLLM,
    CheckpointError,
    InvalidArgument,
    InvalidState,
    KvcoreError,
    OutOfMemory,
    SamplingParams,
    Session,
)
from models import END, EXACT, REFERENCE, TINY, add_tokenizer, assert_nothing_held, chain_folder, copy_reference
from soak import resident_bytes

GQA = REFERENCE / "llama_gqa"
GREEDY = SamplingParams(temperature=0, max_tokens=4)
LETTERS = {byte: byte + 1 for byte in b"abcdefghijklmnopqrstuvwxy"} | {ord("z"): END}
ONE_PROMPT = (
    np.array([97, 98]),
    [97, 98],
    (97, 98),
    "ab",
    {"prompt": "ab"},
    {"prompt_token_ids": [97, 98]},
    range(97, 99),
)


class Odd:
    """An object that is nothing in particular."""

    def __repr__(self) -> str:
        return "<odd>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that says the alphabet, with a tokenizer and a chat template."""
    return add_tokenizer(chain_folder(tmp_path_factory.mktemp("letters"), LETTERS, eos_token_id=END))


@pytest.fixture(scope="module")
def shared(folder: Path) -> Iterator[LLM]:
    with LLM(folder, num_kv_blocks=12, max_model_len=150) as llm:
        yield llm


@pytest.fixture
def llm(shared: LLM) -> Iterator[LLM]:
    """A model that must be as good after the test as it was before."""
    yield shared
    check_usable(shared)


def check_usable(llm: LLM) -> None:
    assert_nothing_held(llm)
    assert llm.generate("a", GREEDY)[0].text == "bcde"
    assert_nothing_held(llm)


# -- options ---------------------------------------------------------------------------------------------------------

INTEGERS = (
    "kv_cache_memory",
    "num_kv_blocks",
    "block_size",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "num_threads",
)
NAMES = ("dtype", "quantization", "kv_cache_dtype")
BAD_OPTIONS: list[tuple[str, Any, type[Exception], str]] = [
    *((name, value, InvalidArgument, "at least 1") for name in INTEGERS for value in (0, -1, -(2**70))),
    *(
        (name, value, TypeError, "integer")
        for name in INTEGERS
        for value in (1.5, 16.0, "16", True, b"1", [16], Odd(), np.float64(16))
    ),
    *((name, None, TypeError, "integer") for name in ("block_size", "max_num_seqs", "max_num_batched_tokens")),
    *(
        (name, value, TypeError, "string")
        for name in NAMES
        for value in (None, 32, np.float32, ["float32"], b"float32", Odd())
    ),
    *(
        (name, value, InvalidArgument, "expected one of")
        for name in NAMES
        for value in ("", "float64", "FLOAT32", "auto ", "\0")
    ),
    ("quantization", "int5", InvalidArgument, "expected one of auto, none, int8, int4"),
    *(("kv_cache_scale_mode", value, InvalidArgument, "expected one of auto, static") for value in ("", "dynamic")),
    ("kv_cache_scale_mode", 1, TypeError, "string"),
    ("block_size", 8, InvalidArgument, "a multiple of 16, got 8"),
    ("block_size", 17, InvalidArgument, "a multiple of 16, got 17"),
    ("block_size", 16 * 1000, InvalidArgument, "16000"),
    ("block_size", 2**70, InvalidArgument, str(2**70)),
    *(("num_kv_blocks", value, InvalidArgument, f"at most 2147483647, got {value}") for value in (2**32, 2**62, 2**70)),
    ("kv_cache_memory", 100, InvalidArgument, r"at least \d+ bytes \(one block\), got 100"),
    *(("kv_cache_memory", value, InvalidArgument, f"at most .* got {value}") for value in (2**60, 2**63, 2**90)),
    ("max_model_len", 257, InvalidArgument, r"at most 256 .*got 257"),
    ("num_threads", 1025, InvalidArgument, "got 1025"),
    ("num_threads", 2**70, InvalidArgument, str(2**70)),
    ("seed", -1, InvalidArgument, "at least 0, got -1"),
    *(("seed", value, TypeError, "integer") for value in (1.0, "1", True, Odd())),
    *(("enable_prefix_caching", value, TypeError, "True or False") for value in (None, 0, 1, "yes", Odd())),
    *(("prefix_ttl", value, TypeError, "seconds") for value in ("300", True, Odd(), [1])),
    *(("prefix_ttl", value, InvalidArgument, "at least 0") for value in (-1, -0.5, float("inf"), float("nan"))),
]


@pytest.mark.parametrize(("name", "value", "error", "match"), BAD_OPTIONS)
def test_options(name: str, value: Any, error: Any, match: str) -> None:
    config = TINY | {"max_position_embeddings": 256}
    for make in (lambda **options: LLM(GQA, **options), lambda **options: LLM.from_config(config, **options)):
        with pytest.raises(error, match=match) as caught:
            make(**{name: value})
        assert str(caught.value).startswith(f"{name}: expected")


def test_good_options_after_all_these() -> None:
    values = {"num_kv_blocks": np.int64(8), "block_size": np.uint8(32), "max_num_seqs": np.int32(2), "prefix_ttl": None}
    with LLM(GQA, **values, max_model_len=256, num_threads=np.int16(1), seed=2**100) as llm:
        assert (llm.cache.num_blocks, llm.cache.block_size, llm.max_model_len) == (8, 32, 256)
        assert len(llm.generate([1], GREEDY)[0].token_ids) > 0
    for short, full in {"f32": "float32", "bf16": "bfloat16", "f16": "float16", "fp8": "fp8_e4m3"}.items():
        with LLM(GQA, kv_cache_dtype=short, num_kv_blocks=4) as llm:
            assert llm.cache.dtype == full


def test_options_that_do_not_go_together() -> None:
    with pytest.raises(InvalidArgument, match="kv_cache_memory, num_kv_blocks: expected at most one"):
        LLM(GQA, kv_cache_memory=1 << 20, num_kv_blocks=4)
    with pytest.raises(TypeError, match="nonsense"):
        LLM(GQA, nonsense=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="nonsense"):
        LLM.from_config(TINY, nonsense=1)
    with pytest.raises(TypeError, match="positional"):
        LLM(GQA, "float32")  # type: ignore[misc]


# -- models ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "model", [None, 5, b"smollm2", ["smollm2"], Odd(), GQA / "config.json" and {"model_type": "llama"}]
)
def test_models_of_the_wrong_type(model: Any) -> None:
    with pytest.raises(TypeError, match=f"model: expected a str or a Path, got {type(model).__name__}"):
        LLM(model)


@pytest.mark.parametrize(
    "model", ["", ".", "smollm3000", "/no/such/folder", "no.gguf", "a b", "x\0y", "a/b/c", "~nobody/x", "ü" * 5000]
)
def test_models_that_are_not_there(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError):
        LLM(model)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth", "model.ckpt"])
def test_pickle_files_are_refused_and_not_run(name: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace"

    class Bomb:
        def __reduce__(self) -> Any:
            return Path.touch, (trace,)

    folder = copy_reference("llama_gqa", tmp_path / "model")
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(pickle.dumps(Bomb()))
    for model in (folder, folder / name):
        with pytest.raises(CheckpointError, match=r"(?s)pickle.*safetensors|safetensors.*pickle") as caught:
            LLM(model)
        assert str(folder) in str(caught.value)
    assert not trace.exists()


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("config.json", b"{", "config.json"),
        ("config.json", b"[1]", "config.json"),
        ("config.json", b"\xff\xfe\x00", "config.json"),
        ("config.json", b'{"model_type": 5}', "config.json.*model_type"),
        ("config.json", b'{"model_type": "llama"}', "config.json.*expected"),
        ("generation_config.json", b"nonsense", "generation_config.json"),
        ("generation_config.json", b'{"eos_token_id": "two"}', "generation_config.json.*eos_token_id"),
        ("generation_config.json", b'{"eos_token_id": [-1]}', "generation_config.json.*eos_token_id"),
        ("tokenizer.json", b"", "tokenizer.json"),
        ("tokenizer.json", b"{}", "tokenizer.json"),
        ("tokenizer.json", b'{"model": {"type": "BPE"}}', "tokenizer.json"),
        ("tokenizer_config.json", b"{{", "tokenizer_config.json"),
        ("model.safetensors", b"", "model.safetensors"),
        ("model.safetensors", bytes(100), "model.safetensors"),
        ("model.safetensors.index.json", b'{"weight_map": {"a": "../../x.safetensors"}}', "x.safetensors|index.json"),
    ],
)
def test_damaged_files(name: str, content: bytes, match: str, tmp_path: Path) -> None:
    folder = add_tokenizer(chain_folder(tmp_path, LETTERS))
    if name == "model.safetensors.index.json":
        (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=match) as caught:
        LLM(folder, num_kv_blocks=4)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({"hidden_size": 0}, "hidden_size: expected an integer of at least 1, got 0"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"hidden_size": 64.0}, "hidden_size"),
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": 65}, "multiple of num_attention_heads"),
        ({"num_attention_heads": -4}, "num_attention_heads"),
        ({"num_key_value_heads": 3}, "divisor of num_attention_heads"),
        ({"head_dim": 7}, "head_dim: expected an even number, got 7"),
        ({"head_dim": 258}, "head_dim"),
        ({"vocab_size": 2**40}, "vocab_size"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"hidden_act": "relu6"}, "hidden_act"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rope_theta": -1}, "rope_theta"),
        ({"rope_scaling": "linear"}, "rope_scaling"),
        ({"rope_scaling": {"rope_type": "spiral"}}, "spiral"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"max_position_embeddings": 0}, "max_position_embeddings"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"eos_token_id": "end"}, "eos_token_id"),
        ({"model_type": "mamba"}, "mamba.*llama|llama.*mamba"),
        ({"model_type": None}, "model_type"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq|quantization"),
    ],
)
def test_configurations(values: dict[str, Any], match: str, tmp_path: Path) -> None:
    if "quantization_config" not in values:  # random weights are not quantised
        with pytest.raises((CheckpointError, InvalidArgument), match=match):
            LLM.from_config(TINY | values, num_kv_blocks=4)
    folder = copy_reference("llama_gqa", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text()) | {"rope_parameters": None, "head_dim": None} | values
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises((CheckpointError, InvalidArgument), match=match):
        LLM(folder, num_kv_blocks=4)


@pytest.mark.parametrize("config", [None, 5, "llama", [TINY], Odd()])
def test_configurations_of_the_wrong_type(config: Any) -> None:
    with pytest.raises(TypeError, match="config: expected a dict"):
        LLM.from_config(config)


def test_from_config_has_no_weights_to_read() -> None:
    with pytest.raises(InvalidArgument, match="random_weights"):
        LLM.from_config(TINY, random_weights=False)
    with pytest.raises(InvalidArgument, match="seed"):
        LLM.from_config(TINY, seed=-1)


def test_a_cache_too_large_for_any_memory() -> None:
    with pytest.raises(OutOfMemory):
        LLM.from_config(TINY | {"num_hidden_layers": 2000}, num_kv_blocks=1_000_000, block_size=1024)


def test_a_model_too_large_for_any_memory() -> None:
    config = TINY | {
        "vocab_size": 2**31 - 1,
        "hidden_size": 2**24,
        "num_attention_heads": 2**16,
        "num_key_value_heads": 1,
    }
    with pytest.raises(OutOfMemory):
        LLM.from_config(config, num_kv_blocks=1)


@pytest.mark.parametrize("quantization", ["none", "int4"])
@pytest.mark.parametrize(("key", "tensor"), [("vocab_size", "embed_tokens"), ("intermediate_size", "mlp")])
def test_a_tensor_too_large_for_any_memory(key: str, tensor: str, quantization: str) -> None:
    with pytest.raises(OutOfMemory, match=rf"{tensor}.*: expected a tensor of at most \d+ bytes .*got \[2147483647, "):
        LLM.from_config(TINY | {key: 2**31 - 1}, quantization=quantization)


def test_tensors_too_large_together(tmp_path: Path) -> None:
    """Each of them would fit: what is held together is told before any is read or drawn."""
    config = TINY | {"num_hidden_layers": 4000, "hidden_size": 1 << 13, "intermediate_size": 1 << 15}
    config |= {"num_attention_heads": 64, "num_key_value_heads": 64, "dtype": "bfloat16"}
    before = resident_bytes() or 0
    weights = 4000 * (4 * (1 << 26) + 3 * (1 << 28))
    for quantization, bits in (("none", 16), ("int4", 5)):
        with pytest.raises(OutOfMemory, match=r"expected weights of at most \d+ bytes .*, got \d+ bytes in") as error:
            LLM.from_config(config, quantization=quantization)
        got = int(re.findall(r"got (\d+) bytes", str(error.value))[0])
        assert got == pytest.approx(weights * bits / 8, rel=0.001)
    assert (resident_bytes() or 0) < before + (64 << 20)


def test_a_checkpoint_larger_than_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(GQA, dtype="bfloat16", num_kv_blocks=4) as llm:
        held = llm.weight_bytes
    monkeypatch.setattr("kvcore.loading.total_memory", lambda: held)
    LLM(GQA, dtype="bfloat16", num_kv_blocks=4).close()
    with pytest.raises(OutOfMemory, match=rf"model\.safetensors: expected weights of at most {held} bytes .*, got \d+"):
        LLM(GQA, dtype="float32", num_kv_blocks=4)
    monkeypatch.setattr("kvcore.loading.total_memory", lambda: held - 1)
    monkeypatch.setattr("kvcore.models.reader.Linear", None)  # nothing is packed
    with pytest.raises(OutOfMemory, match=f"at most {held - 1} bytes .*, got {held} bytes in bfloat16"):
        LLM(GQA, dtype="bfloat16", num_kv_blocks=4)
    monkeypatch.setattr("kvcore.loading.total_memory", lambda: None)  # unknown: whatever the system says
    with pytest.raises(TypeError):
        LLM(GQA, dtype="bfloat16", num_kv_blocks=4)


# -- prompts ---------------------------------------------------------------------------------------------------------

LOOP: list[Any] = []
LOOP.append(LOOP)

WRONG_TYPES: list[Any] = [
    None,
    5,
    1.5,
    True,
    b"ab",
    Odd(),
    {97, 98},
    iter([97]),
    [None],
    [1.0],
    [97, 98.0],
    [True],
    [97, None],
    [97, "b"],
    ["a", 98],
    ["a", None],
    [b"a"],
    [Odd()],
    [[97], 5],
    [[[97]]],
    LOOP,
    [Fraction(97)],
    np.array([97.0]),
    np.array(97),
    np.array([[97.0]]),
    np.array([True]),
    np.array(["ab"]),
    np.array([None]),
    np.array([97], "datetime64[s]"),
    {"prompt": 5},
    {"prompt": None},
    {"prompt": [97]},
    {"prompt_token_ids": "ab"},
    {"prompt_token_ids": None},
    {"prompt_token_ids": [1.5]},
    {"prompt_token_ids": np.array([1.5])},
]


@pytest.mark.parametrize("prompts", WRONG_TYPES, ids=repr)
def test_prompts_of_the_wrong_type(prompts: Any, llm: LLM) -> None:
    with pytest.raises(TypeError, match=r"(?s)prompts?\b.*expected .*got"):
        llm.generate(prompts, GREEDY)
    with pytest.raises((TypeError, InvalidArgument), match=r"(?s)prompts?\b.*expected .*got"):
        llm.stream(prompts, GREEDY)  # a list of one wrong prompt is wrong in two ways


WRONG_VALUES: list[tuple[Any, str]] = [
    ([-1], "from 0 to 257 .*got -1"),
    ([97, 258], "from 0 to 257 .*got 258"),
    ([2**31], f"got {2**31}"),
    ([2**32 + 97], f"got {2**32 + 97}"),
    ([2**64], f"got {2**64}"),
    ([-(2**70)], f"got -{2**70}"),
    (np.array([97, -5], np.int8), "got -5"),
    (np.array([2**64 - 1], np.uint64), f"got {2**64 - 1}"),
    (range(300), "got 299"),
    ([97] * 151, r"at most 150 tokens \(max_model_len\), got 151 tokens"),
    ("a" * 151, r"at most 150 tokens \(max_model_len\), got 151 tokens"),
    ({}, "'prompt_token_ids' or 'prompt'"),
    ({"text": "a"}, "'prompt_token_ids' or 'prompt' .*, got the keys"),
    ({"prompt": "a", "prompt_token_ids": [97]}, "either"),
    ({"prompt_token_ids": []}, "at least one token"),
    ({"prompt": ""}, "not empty"),
]


@pytest.mark.parametrize(("prompt", "match"), WRONG_VALUES)
def test_prompts_of_the_wrong_value(prompt: Any, match: str, llm: LLM) -> None:
    calls: list[Callable[[], Any]] = [
        lambda: llm.generate(prompt, GREEDY),
        lambda: llm.generate(["a", prompt, "b"], GREEDY),
        lambda: llm.stream(prompt, GREEDY),
    ]
    for call in calls:
        with pytest.raises(InvalidArgument, match=match):
            call()


def test_text_that_is_no_unicode(llm: LLM) -> None:
    """Lone surrogates cannot be encoded."""
    for text in ("\ud800", "ab\udfff"):
        with pytest.raises((InvalidArgument, TypeError), match=r"prompt|text|unicode|surrogate"):
            llm.generate(text, GREEDY)
    assert llm.generate("\0a", GREEDY)[0].text == "bcde"


def test_logits_of_the_wrong_kind(llm: LLM) -> None:
    for prompt in ("ab", None, 5, {"prompt": "ab"}, [1.5], [[97]], np.zeros((2, 2), np.int64), ["a"]):
        with pytest.raises(TypeError, match="prompt: expected a list of token ids, got"):
            llm.logits(prompt)
    for prompt, match in (([], "at least one"), ([258], "got 258"), ([0] * 151, "at most 150")):
        with pytest.raises(InvalidArgument, match=match):
            llm.logits(prompt)


def test_all_kinds_of_good_prompts(llm: LLM) -> None:
    for prompt in ONE_PROMPT:
        assert llm.generate(prompt, GREEDY)[0].text == "cdef"
        assert "".join(item.text for item in llm.stream(prompt, GREEDY)) == "cdef"
    outputs = llm.generate(list(ONE_PROMPT), GREEDY)
    assert [output.text for output in outputs] == ["cdef"] * len(ONE_PROMPT)
    assert outputs[0].prompt_token_ids == [97, 98]
    assert all(type(token) is int for output in outputs for token in output.prompt_token_ids)


def test_one_prompt_only_can_be_streamed(llm: LLM) -> None:
    for prompts in (["a"], ["a", "b"], [[97]], [[97], [98]]):
        with pytest.raises(InvalidArgument, match="prompt: expected one prompt"):
            llm.stream(prompts, GREEDY)


# -- parameters ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "params", [5, "greedy", {"temperature": 0}, SamplingParams, [None], [GREEDY, 5], Odd()], ids=repr
)
def test_params_of_the_wrong_type(params: Any, llm: LLM) -> None:
    prompts = ["a"] * (len(params) if isinstance(params, list) else 1)
    with pytest.raises(TypeError, match="params: expected SamplingParams or a list of them, got"):
        llm.generate(prompts, params)


def test_params_for_each_prompt(llm: LLM) -> None:
    for params in ([], [GREEDY], [GREEDY] * 3, (GREEDY,)):
        with pytest.raises(InvalidArgument, match=f"params: expected one for each of the 2 prompts, got {len(params)}"):
            llm.generate(["a", "b"], params)
    for use_cache in (None, 1, "no"):
        with pytest.raises(TypeError, match="use_cache: expected True or False, got"):
            llm.generate("a", GREEDY, use_cache=use_cache)
        with pytest.raises(TypeError, match="use_cache: expected True or False, got"):
            list(llm.stream("a", GREEDY, use_cache=use_cache))


@pytest.mark.parametrize(
    ("values", "error"),
    [
        *(
            ({name: value}, TypeError)
            for name in ("n", "top_k", "max_tokens", "seed", "logprobs")
            for value in (1.5, "1", True)
        ),
        *(({name: value}, TypeError) for name in ("temperature", "top_p", "min_p") for value in (None, "1", True, [1])),
        *(({name: float("nan")}, InvalidArgument) for name in ("temperature", "top_p", "min_p")),
        *(({name: float("inf")}, InvalidArgument) for name in ("temperature", "top_p", "min_p")),
        *(({name: -0.1}, InvalidArgument) for name in ("temperature", "top_p", "min_p")),
        *(({name: 1.1}, InvalidArgument) for name in ("top_p", "min_p")),
        ({"temperature": 10**400}, InvalidArgument),
        ({"top_p": 0}, InvalidArgument),
        ({"top_k": -2}, InvalidArgument),
        ({"n": 0}, InvalidArgument),
        ({"n": 1025}, InvalidArgument),
        ({"max_tokens": 0}, InvalidArgument),
        ({"max_tokens": -1}, InvalidArgument),
        ({"seed": -1}, InvalidArgument),
        ({"seed": 2**64}, InvalidArgument),
        ({"logprobs": -2}, InvalidArgument),
        ({"stop": 5}, TypeError),
        ({"stop": ["a", 5]}, TypeError),
        ({"stop": b"a"}, TypeError),
        ({"stop": ""}, InvalidArgument),
        ({"stop": ["a", ""]}, InvalidArgument),
        ({"stop_token_ids": 5}, TypeError),
        ({"stop_token_ids": "5"}, TypeError),
        ({"stop_token_ids": [1.0]}, TypeError),
        ({"stop_token_ids": [-1]}, InvalidArgument),
        ({"ignore_eos": 1}, TypeError),
        ({"include_stop_str_in_output": None}, TypeError),
        ({"skip_special_tokens": "no"}, TypeError),
    ],
    ids=repr,
)
def test_sampling_params(values: dict[str, Any], error: type[Exception]) -> None:
    (name,) = values
    with pytest.raises(error, match=f"SamplingParams.{name}: expected .*, got"):
        SamplingParams(**values)


# -- conversations ---------------------------------------------------------------------------------------------------


MESSAGES: list[Any] = [
    *(None, 5, "hi", {"role": "user", "content": "a"}, [5], [None], ["hi"], Odd()),
    *([], [[]], [[5]], [{}], [{"role": "user"}], [{"content": "a"}]),
    *([{"role": "user", "content": value}] for value in (5, ["a"], b"a", {"a": Odd()})),
]


@pytest.mark.parametrize("messages", MESSAGES, ids=repr)
def test_messages(messages: Any, llm: LLM) -> None:
    """A conversation is data, which may come from anywhere: whatever is wrong with it is an InvalidArgument."""
    with Session(llm, [1, 2, 3]) as session:
        for call in (llm.chat, llm.stream_chat, AsyncLLM(llm).chat, session.chat):
            with pytest.raises(InvalidArgument, match=r"(?s)messages.*: expected .*, got"):
                call(messages, GREEDY)
        assert session.token_ids == [1, 2, 3]
    with pytest.raises(InvalidArgument, match=r"(?s)messages.*: expected .*, got"):
        llm.render_chat(messages)


@pytest.mark.parametrize(
    "prompt", [None, 5, 5.0, b"ab", Odd(), {1, 2}, True, {"prompt": None}, {"text": "a"}, [[None]], ["a", 5]], ids=repr
)
def test_what_is_no_prompt(prompt: Any, llm: LLM) -> None:
    """Every way to ask says what a prompt is."""
    for call in (llm.generate, llm.stream, AsyncLLM(llm).generate):
        with pytest.raises((TypeError, InvalidArgument), match=r"(?s)prompt.*: expected .*, got"):
            call(prompt, GREEDY)
    if prompt is not None:
        with pytest.raises((TypeError, InvalidArgument), match=r"(?s)prompt.*: expected .*, got"):
            Session(llm, prompt)


@pytest.mark.parametrize(
    ("template", "error"),
    [
        ("{% if %}", InvalidArgument),
        ("{{ raise_exception('no systems here') }}", InvalidArgument),
        ("{{ messages.__class__.__mro__ }}", InvalidArgument),
        ("{{ 1 / 0 }}", InvalidArgument),
        ("{{ nothing.at.all }}", InvalidArgument),
        ("", InvalidArgument),
        (5, TypeError),
    ],
)
def test_templates(template: Any, error: type[Exception], llm: LLM) -> None:
    with pytest.raises(error, match=r"(?i)template|prompt|no systems here"):
        llm.chat([{"role": "user", "content": "a"}], GREEDY, chat_template=template)


def test_chat_and_text_without_a_tokenizer() -> None:
    messages = [{"role": "user", "content": "a"}]
    with LLM(GQA, num_kv_blocks=4) as llm:
        for call in (
            lambda: llm.generate("text", GREEDY),
            lambda: llm.generate([[1], "text"], GREEDY),
            lambda: llm.stream("text", GREEDY),
            lambda: llm.generate([1], SamplingParams(stop="x")),
            lambda: llm.chat(messages, GREEDY, chat_template="{{ messages[0].content }}"),
        ):
            with pytest.raises(InvalidArgument, match="without a tokenizer"):
                call()
        with pytest.raises(InvalidArgument, match="chat template"):
            llm.chat(messages, GREEDY)
        assert llm.generate([1], GREEDY)[0].text == ""
        assert_nothing_held(llm)


def test_a_tokenizer_with_more_ids_than_the_model(tmp_path: Path) -> None:
    """Its text may become ids that the model does not have."""
    add_tokenizer(chain_folder(tmp_path, LETTERS | {ord("z"): 0}, vocab_size=123))
    with LLM(tmp_path, num_kv_blocks=4) as llm:
        with pytest.raises(InvalidArgument, match=r"from 0 to 122 .*got 123"):
            llm.generate("{", GREEDY)
        assert llm.generate("a", GREEDY)[0].text == "bcde"


# -- the end ---------------------------------------------------------------------------------------------------------


def test_after_close(folder: Path) -> None:
    llm = LLM(folder, num_kv_blocks=4)
    stream = llm.stream("a", GREEDY)
    started = llm.stream("a", GREEDY)
    next(started)
    llm.close()
    llm.close()
    for call in (
        lambda: llm.generate("a", GREEDY),
        lambda: llm.chat([{"role": "user", "content": "a"}], GREEDY),
        lambda: llm.stream("a", GREEDY),
        lambda: llm.logits([97]),
        lambda: next(stream),
        lambda: llm.stats(),
        lambda: llm.cache,
    ):
        with pytest.raises(InvalidState, match="close"):
            call()
    rest = list(started)  # it was aborted
    assert all(item.finish_reason in (None, "abort") for item in rest)


# -- anything at all -------------------------------------------------------------------------------------------------

JUNK = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.integers(90, 130),
        st.floats(),
        st.text(max_size=5),
        st.binary(max_size=3),
        st.just(Odd()),
        st.sampled_from([np.int64(97), np.float32(1), np.array([97]), np.array([[97, 98]]), np.zeros(0), GREEDY]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.tuples(inner),
        st.dictionaries(st.sampled_from(["prompt", "prompt_token_ids", "role", "content"]), inner, max_size=2),
    ),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(
    prompt=JUNK,
    params=st.one_of(st.just(GREEDY), st.none(), JUNK),
    call=st.sampled_from(["generate", "stream", "chat", "logits"]),
)
def test_any_call(prompt: Any, params: Any, call: str, shared: LLM) -> None:
    message = "no error"
    try:
        result = getattr(shared, call)(*((prompt,) if call == "logits" else (prompt, params)))
        if call != "logits":
            list(result)
    except (KvcoreError, TypeError) as error:
        message = str(error)
    assert message
    assert_nothing_held(shared)
    assert shared.generate("x", GREEDY)[0].text == "yz"


@settings(max_examples=150, deadline=None)
@given(name=st.sampled_from([*INTEGERS, *NAMES, "seed", "enable_prefix_caching", "prefix_ttl"]), value=JUNK)
def test_any_option(name: str, value: Any) -> None:
    if name in ("num_kv_blocks", "kv_cache_memory") and isinstance(value, (int, np.integer)) and value > 10**9:
        return  # reserving is fine; it is tested above
    message = name
    try:
        with LLM(GQA, **{**EXACT, "num_kv_blocks": None if name == "kv_cache_memory" else 4, name: value}) as llm:
            llm.generate([1], SamplingParams(temperature=0, max_tokens=1))
    except OutOfMemory:
        pass
    except (KvcoreError, TypeError) as error:
        message = str(error)
    assert name in message
