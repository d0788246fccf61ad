"""What ``quantization_config`` of config.json says, and who reads such weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvcore.checkpoint.config import ConfigReader
from kvcore.checkpoint.fp8 import Block, fp8_recipes
from kvcore.checkpoint.mxfp4 import mxfp4_recipes
from kvcore.checkpoint.quantized import QuantizedWeights
from kvcore.checkpoint.weights import SafetensorsWeights, Weights
from kvcore.errors import CheckpointError


def check_quantization(config: Mapping[str, Any]) -> None:
    """Refuse weights that are quantised by a method that is not supported.

    Raises:
        CheckpointError: names the method.
    """
    _scheme(config)


def expanded(config: Mapping[str, Any], weights: SafetensorsWeights) -> Weights:
    """A folder's tensors by what they stand for, however they are stored.

    Raises:
        CheckpointError: weights are quantised by a method that is not supported, or codes and scales do not fit.
    """
    method, block = _scheme(config)
    if method is None:
        return weights
    recipes = mxfp4_recipes(weights) if method == "mxfp4" else fp8_recipes(weights, block)
    return QuantizedWeights(weights, recipes)


def _scheme(config: Mapping[str, Any]) -> tuple[str | None, Block | None]:
    """The method, or None, and rows and columns of float8 weights that share a scale, or None."""
    top = ConfigReader(config)
    key = "quantization_config" if top.has("quantization_config") else "compression_config"
    if not top.has(key):
        return None, None
    read = top.child(key) if isinstance(config[key], Mapping) else None
    method = read.string("quant_method", None) if read is not None else None
    if read is None or method not in ("fp8", "fbgemm_fp8", "compressed-tensors", "mxfp4"):
        raise _refusal(top, key, method or "an unnamed method")
    if method == "mxfp4":
        return method, None
    if method == "compressed-tensors":
        return method, _compressed(top, key, read)
    kind = read.string("fmt", "e4m3")
    if kind != "e4m3":
        raise _refusal(top, key, f"{method} in the format {kind}")
    return method, _block(read, "weight_block_size")


def _compressed(top: ConfigReader, key: str, read: ConfigReader) -> Block | None:
    groups = read.child("config_groups")
    blocks: set[Block | None] = set()
    for name in () if groups is None else groups.keys():
        group = None if groups is None else groups.child(name)
        weights = None if group is None else group.child("weights")
        if weights is not None:
            kind, bits = weights.string("type", "int"), weights.integer("num_bits", 8)
            if (kind, bits) != ("float", 8):
                raise _refusal(top, key, f"compressed-tensors as {kind} of {bits} bits")
            blocks.add(_block(weights, "block_structure"))
    if len(blocks) != 1:
        raise _refusal(top, key, f"compressed-tensors in {len(blocks)} ways")
    return blocks.pop()


def _block(read: ConfigReader, key: str) -> Block | None:
    if not read.has(key):
        return None
    sizes = read.numbers(key)
    if len(sizes) != 2 or any(size != int(size) or size < 1 for size in sizes):
        raise read.error(key, "two sizes of at least 1", list(sizes))
    return int(sizes[0]), int(sizes[1])


def _refusal(read: ConfigReader, key: str, how: str) -> CheckpointError:
    return CheckpointError(
        f"{read.source}: {key}: expected weights in float32, float16 or bfloat16, float8 by fp8, fbgemm_fp8 or "
        f"compressed-tensors, or mxfp4, got weights quantised by {how}, which is not supported; use the unquantised "
        f"checkpoint or a .gguf file"
    )
