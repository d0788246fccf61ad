"""Encoder-decoders in other configurations than those of the reference models, against a plain forward pass."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

import encdec_oracle
from kvcore import LLM, CheckpointError, SamplingParams
from kvcore.checkpoint.config import Config
from kvcore.loading import Options, RandomWeights, make_decoder, model_length
from kvcore.models.families import spec_from_config
from kvcore.models.spec import DecoderSpec
from kvcore.plan import cache_layers, count_parameters
from models import EXACT, REFERENCE, assert_same_bits, recorded


class NoisyWeights(RandomWeights):
    """Random weights, biases and norms as well, and all that may be there is there, but computed positions."""

    def __init__(self, spec: DecoderSpec) -> None:
        super().__init__(spec, 3)
        left_out = {"lm_head.weight", "proj_out.weight"} if spec.tie_word_embeddings else set()
        if spec.sinusoidal:
            left_out |= {f"model.{side}.embed_positions.weight" for side in ("encoder", "decoder")}
        self._shapes = {t.name: t.stored_shape for t in spec.all_tensors() if t.name not in left_out}

    def get(self, name: str) -> np.ndarray:
        shape = self._shapes[name]
        values = np.random.default_rng([*name.encode()]).standard_normal(shape).astype(np.float32)
        if name == "final_logits_bias":
            return values
        if len(shape) > 1 and "layer_norm" not in name:
            return values / np.float32(np.sqrt(np.prod(shape[1:])))
        return values / 4 + ("norm" in name) * np.float32(not name.endswith("bias"))


SIZES = {"encoder_layers": 1, "decoder_layers": 3, "encoder_attention_heads": 2, "decoder_attention_heads": 4,
         "encoder_ffn_dim": 40, "decoder_ffn_dim": 56}  # fmt: skip
VARIATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "t5, more decoder layers": ("t5", {"num_decoder_layers": 3, "num_layers": 1}),
    "t5, other buckets": ("t5", {"relative_attention_num_buckets": 12, "relative_attention_max_distance": 19}),
    "t5, few buckets": ("t5", {"relative_attention_num_buckets": 4, "relative_attention_max_distance": 300}),
    "t5, wide heads": ("t5", {"num_heads": 2, "d_kv": 34}),
    "t5, gelu": ("t5", {"feed_forward_proj": "gelu"}),
    "t5, gated silu, untied": ("t5", {"feed_forward_proj": "gated-silu", "tie_word_embeddings": False}),
    "t5_gated, eps": ("t5_gated", {"layer_norm_epsilon": 1e-2}),
    "bart, other sizes": ("bart", {**SIZES, "scale_embedding": True, "activation_function": "relu"}),
    "bart, untied": ("bart", {"tie_word_embeddings": False, "activation_function": "gelu_new"}),
    "bart, one head": ("bart", {"decoder_attention_heads": 1, "encoder_attention_heads": 1}),
    "marian, other sizes": ("marian", {**SIZES, "scale_embedding": False, "d_model": 24}),
    "marian, two vocabularies": ("marian", {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 200,
                                            "decoder_start_token_id": 7, "pad_token_id": 7}),
    "whisper, other sizes": ("whisper", {**SIZES, "num_mel_bins": 128, "max_source_positions": 45}),
    "whisper, untied, scaled": ("whisper", {"tie_word_embeddings": False, "scale_embedding": True}),
}  # fmt: skip


def config_of(name: str, changes: dict[str, Any]) -> Config:
    values = {**json.loads((REFERENCE / name / "config.json").read_text()), **changes}
    return Config({key: value for key, value in values.items() if value is not ...}, "here/config.json")


def llm_of(config: Config, **options: Any) -> tuple[LLM, NoisyWeights]:
    spec = spec_from_config(config)
    weights, checked = NoisyWeights(spec), Options(**{**EXACT, "num_kv_blocks": 16, **options})
    decoder = make_decoder(spec, weights, {}, checked, "noise")
    return LLM._from_parts(decoder, max_model_len=model_length(spec, checked), **{**EXACT, **options}), weights


@pytest.mark.parametrize("name", VARIATIONS)
def test_other_configurations(name: str) -> None:
    folder, changes = VARIATIONS[name]
    config, random = config_of(folder, changes), np.random.default_rng(5)
    source: Any = {"encoder_token_ids": random.integers(0, 200, 41).tolist()}
    if folder == "whisper":
        frames = int(random.integers(31, 2 * config["max_source_positions"]))
        source = {"input_features": random.standard_normal((config["num_mel_bins"], frames)).astype(np.float32)}
    ids = random.integers(0, 200, 23).tolist()
    llm, weights = llm_of(config)
    with llm, recorded(llm) as logits:
        got = llm.logits(ids, encoder=source)
        (output,) = llm.generate({**source, "decoder_token_ids": ids}, SamplingParams(temperature=0, max_tokens=3))
        assert_same_bits(logits(output)[0], got[-1], name)
    forward = encdec_oracle.t5 if folder.startswith("t5") else encdec_oracle.bart
    want = forward(config, lambda tensor: weights.get(tensor).astype(np.float64), *source.values(), ids)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4 * max(1.0, float(np.abs(want).max())))


@pytest.mark.parametrize("name", VARIATIONS)
def test_the_calculator_agrees(name: str) -> None:
    config = config_of(*VARIATIONS[name])
    spec = spec_from_config(config)
    assert spec.cache_layers() == cache_layers(config)
    assert sum(int(np.prod(shape)) for shape in NoisyWeights(spec)._shapes.values()) == count_parameters(config).total


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("t5", {"feed_forward_proj": "gated-sinus"}, "feed_forward_proj: expected one of"),
        ("t5", {"relative_attention_num_buckets": 2}, "relative_attention_num_buckets: expected .* at least 4"),
        ("t5", {"relative_attention_max_distance": 16}, "relative_attention_max_distance: expected .* at least 17"),
        ("t5", {"relative_attention_max_distance": 1 << 30}, "relative_attention_max_distance: expected .* at most"),
        ("t5", {"d_kv": 258}, "width of a head: expected an even number of at most 256"),
        ("bart", {"encoder_attention_heads": 5}, r"encoder_attention_heads: expected a divisor of d_model \(32\)"),
        ("bart", {"activation_function": "sinus"}, "activation_function: expected one of"),
        ("bart", {"encoder_layers": ...}, "encoder_layers: expected"),
        ("bart", {"encoder_ffn_dim": None}, "encoder_ffn_dim: expected"),
        ("marian", {"decoder_start_token_id": -1}, "decoder_start_token_id: expected"),
        ("whisper", {"num_mel_bins": 0}, "num_mel_bins: expected"),
        ("whisper", {"encoder_attention_heads": 16}, "width of a head: expected an even number"),
    ],
)  # fmt: skip
def test_values_that_are_refused(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=f"here/config.json: {message}"):
        spec_from_config(config_of(name, changes))
