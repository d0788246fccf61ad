"""The model families: each file turns a config.json into a spec, and is nothing but data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

from kvcore.checkpoint.config import ConfigReader
from kvcore.errors import CheckpointError
from kvcore.models.families import (
    bart,
    cohere,
    deepseek,
    gemma,
    glm4,
    gpt2,
    gpt_neox,
    gpt_oss,
    granite,
    llama,
    mistral,
    mixtral,
    olmo2,
    phi3,
    qwen2,
    qwen3,
    qwen_moe,
    smollm3,
    stablelm,
    t5,
    whisper,
)
from kvcore.models.spec import DecoderSpec

FAMILIES: Final[Mapping[str, Callable[[Mapping[str, Any]], DecoderSpec]]] = MappingProxyType(
    {
        "bart": bart.bart,
        "cohere": cohere.cohere,
        "cohere2": cohere.cohere2,
        "deepseek_v2": deepseek.deepseek_v2,
        "deepseek_v3": deepseek.deepseek_v3,
        "gemma": gemma.gemma,
        "gemma2": gemma.gemma2,
        "gemma3_text": gemma.gemma3,
        "glm4": glm4.spec_from_config,
        "gpt2": gpt2.spec_from_config,
        "gpt_neox": gpt_neox.spec_from_config,
        "gpt_oss": gpt_oss.spec_from_config,
        "granite": granite.spec_from_config,
        "llama": llama.spec_from_config,
        "marian": bart.marian,
        "mistral": mistral.spec_from_config,
        "mixtral": mixtral.spec_from_config,
        "olmo2": olmo2.spec_from_config,
        "phi3": phi3.spec_from_config,
        "qwen2": qwen2.spec_from_config,
        "qwen2_moe": qwen_moe.qwen2_moe,
        "qwen3": qwen3.spec_from_config,
        "qwen3_moe": qwen_moe.qwen3_moe,
        "smollm3": smollm3.spec_from_config,
        "stablelm": stablelm.spec_from_config,
        "t5": t5.spec_from_config,
        "whisper": whisper.spec_from_config,
    }
)
"""``model_type`` of config.json to the function that makes its spec."""


def spec_from_config(config: Mapping[str, Any]) -> DecoderSpec:
    """Turn a configuration, in the style of transformers 4 or 5, into a spec.

    Raises:
        CheckpointError: the ``model_type`` is missing or not supported (the message lists what is), or a value is
            missing or nonsensical (the message names the file and the key).
    """
    reader = ConfigReader(config)
    supported = f"a supported model type ({', '.join(sorted(FAMILIES))})"
    if not reader.has("model_type"):
        raise CheckpointError(f"{reader.source}: model_type: expected {supported}, got no such key")
    family = FAMILIES.get(reader.string("model_type"))
    if family is None:
        raise reader.error("model_type", supported, config["model_type"])
    return family(config)
