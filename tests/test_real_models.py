"""Real models, pulled and run: opt-in (`make test-models`), as they are large.

The goldens (tests/data/real) were made by transformers in float32 from the weights of these files, see their "method".
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcore import LLM, SamplingParams, transcribe
from kvcore.audio import load_wav, log_mel
from kvcore.checkpoint.gguf import GGUFWeights
from kvcore.checkpoint.pull import pull
from kvcore.checkpoint.source import open_checkpoint
from kvcore.text.tokenizer import Tokenizer
from models import EXACT

pytestmark = pytest.mark.real

DATA = Path(__file__).parent / "data" / "real"
SPEECH = Path(__file__).parent / "data" / "audio" / "espeak_16k.wav"
GOLDENS = {"gemma3-270m": "gemma3-270m-q4_k_m", "qwen2.5-coder-0.5b": "qwen2.5-coder-0.5b-instruct-q4_k_m"}


@pytest.fixture(scope="module", params=GOLDENS)
def model(request: pytest.FixtureRequest) -> tuple[Path, dict[str, Any]]:
    """The file and its goldens."""
    golden = json.loads((DATA / f"{GOLDENS[request.param]}.json").read_text(encoding="utf-8"))
    return pull(request.param), golden


@pytest.fixture(scope="module", params=["none", "auto"])
def llm(request: pytest.FixtureRequest, model: tuple[Path, dict[str, Any]]) -> Iterator[tuple[LLM, float]]:
    """The model in float32, and as it is stored, with the margin below which another token may win."""
    options = EXACT if request.param == "none" else {}
    with LLM(model[0], quantization=request.param, num_kv_blocks=256, max_model_len=2048, **options) as llm:
        yield llm, 2e-3 if request.param == "none" else 0.5


def test_configuration(model: tuple[Path, dict[str, Any]]) -> None:
    config = GGUFWeights.open(model[0]).to_config()
    golden = dict(model[1]["config"])
    rope = golden.pop("rope_parameters")
    if "full_attention" in rope:
        assert config["rope_theta"] == rope["full_attention"]["rope_theta"]
        assert config["rope_local_base_freq"] == rope["sliding_attention"]["rope_theta"]
    else:
        assert config["rope_parameters"] == rope
    golden["eos_token_id"] = [golden["eos_token_id"]]
    unsaid = {"attention_bias": False, "layer_types": ["full_attention"] * golden["num_hidden_layers"]}
    for key, value in golden.items():
        assert config.get(key, unsaid.get(key)) == value, key


def test_whisper() -> None:
    """The configuration and the tokenizer; that every tensor is there is for whoever runs it to say."""
    checkpoint = open_checkpoint("whisper-base")
    golden = json.loads((DATA / "whisper-base-f16.json").read_text(encoding="utf-8"))
    for key, value in golden["config"].items():
        if key not in ("head_dim", "kv_heads", "cross_kv_tokens"):  # computed by whoever made the goldens
            assert checkpoint.config[key] == value, key
    tokenizer = Tokenizer.from_file(checkpoint.tokenizer_source)
    for case in golden["cases"]:
        assert [tokenizer.token_to_id(token) for token in case["prompt_tokens"]] == case["prompt_ids"]
        assert tokenizer.decode(case["output_ids"], skip_special_tokens=False) == case["output_text"]


@pytest.fixture(scope="module")
def whisper() -> Iterator[LLM]:
    with LLM("whisper-base", max_num_seqs=4, **EXACT) as llm:
        yield llm


def test_whispers_encoder(whisper: LLM) -> None:
    want = json.loads((DATA / "whisper-base-f16.json").read_text(encoding="utf-8"))["encoder_output"]
    decoder = whisper._decoder
    encoded = decoder.encoder(decoder.encoder_input({"input_features": log_mel(load_wav(SPEECH))}))
    assert encoded.shape == tuple(want["shape"][1:])
    np.testing.assert_allclose(encoded.mean(dtype=np.float64), want["mean"], atol=1e-5)
    for row, columns in ((0, slice(8)), (700, slice(8)), (1499, slice(-8, None))):
        name = f"row{row}_{'first8' if row < 1000 else 'last8'}"
        np.testing.assert_allclose(encoded[row, columns], want[name], atol=1e-4)


def test_whispers_greedy_tokens(whisper: LLM) -> None:
    features = log_mel(load_wav(SPEECH))
    cases = json.loads((DATA / "whisper-base-f16.json").read_text(encoding="utf-8"))["cases"]
    prompts = [{"input_features": features, "decoder_token_ids": case["prompt_ids"]} for case in cases]
    params = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True, logprobs=1)
    for case, output in zip(cases, whisper.generate(prompts, params), strict=True):
        completion = output.outputs[0]
        assert completion.token_ids == case["output_ids"], case["name"]
        got = [entry[token].logprob for entry, token in zip(completion.logprobs, completion.token_ids, strict=True)]
        np.testing.assert_allclose(got, case["logprobs"], rtol=0, atol=2e-3, err_msg=case["name"])


def test_whisper_transcribes(whisper: LLM) -> None:
    """Short and long, with the language found, and where in the sound each sentence is."""
    sentence = "value caches make language models faster."
    speech = load_wav(SPEECH)
    short = transcribe(whisper, SPEECH)
    assert short.language == "en"
    assert short.text.endswith(sentence)
    long = transcribe(whisper, np.concatenate([speech] * 6))
    ends = [segment.end for segment in long.segments if "value cache" in segment.text.lower()]
    np.testing.assert_allclose(ends, 7.36 * np.arange(1, 7), atol=0.8)


def test_token_ids(model: tuple[Path, dict[str, Any]]) -> None:
    tokenizer = Tokenizer.from_gguf(GGUFWeights.open(model[0]).file.metadata)
    for case in model[1]["cases"]:
        assert tokenizer.encode(case["prompt"]) == case["prompt_ids"], case["name"]
        assert tokenizer.decode(case["output_ids"], skip_special_tokens=False) == case["output_text"], case["name"]


def test_greedy_tokens(llm: tuple[LLM, float], model: tuple[Path, dict[str, Any]]) -> None:
    """Tokens and their log probabilities, as far as no other token is nearly as good."""
    params = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True, logprobs=1)
    cases = model[1]["cases"]
    outputs = llm[0].generate([case["prompt_ids"] for case in cases], params)
    for case, output in zip(cases, outputs, strict=True):
        margins = np.array(case["top1_top2_logit_margin"])
        sure = int(np.argmax(margins < llm[1])) if (margins < llm[1]).any() else len(margins)
        completion = output.outputs[0]
        assert completion.token_ids[:sure] == case["output_ids"][:sure], case["name"]
        if llm[1] < 0.1:
            assert sure > 20, "the goldens are no test"
            got = [entry[token].logprob for entry, token in zip(completion.logprobs, completion.token_ids, strict=True)]
            np.testing.assert_allclose(got[:sure], case["logprobs"][:sure], rtol=0, atol=2e-3, err_msg=case["name"])
