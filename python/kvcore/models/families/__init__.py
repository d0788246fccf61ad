"""The model families: each file turns a config.json into a spec, and is nothing but data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

from kvcore.checkpoint.config import ConfigReader
from kvcore.errors import CheckpointError
from kvcore.models.families import llama
from kvcore.models.spec import DecoderSpec

FAMILIES: Final[Mapping[str, Callable[[Mapping[str, Any]], DecoderSpec]]] = MappingProxyType(
    {
        "llama": llama.spec_from_config,
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
