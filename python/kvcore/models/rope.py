"""Rotary position embeddings as data, and how configurations tell of them; ``rope_table.py`` computes the angles.

Sources: RoFormer (arXiv 2104.09864), YaRN (arXiv 2309.00071), LongRoPE (arXiv 2402.13753), transformers'
``modeling_rope_utils.py``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvcore.checkpoint.config import ConfigReader

_FACTORS: Final = "factors"  # no name of transformers: only the configuration made of a GGUF file has it
KINDS: Final = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


@dataclass(frozen=True)
class RopeSpec:
    """A rotary embedding.

    Attributes:
        kind: ``default``; ``linear``; ``dynamic`` (NTK); ``llama3``; ``yarn``; ``longrope`` (one divisor for each
            frequency, others for long sequences); ``factors`` (one divisor for each, as a GGUF file may have them).
        theta: the base.
        rotary_dim: how many dimensions of a head turn, from its first on; even.
        max_position_embeddings: the model's positions (``dynamic`` scales beyond them).
        factor: how far positions are stretched (``linear``, ``dynamic``, ``llama3``, ``yarn``).
        original_max_position: positions that the model was first trained on (``llama3``, ``yarn``, ``longrope``).
        low_freq_factor: ``llama3``: wavelengths above original / this are scaled fully.
        high_freq_factor: ``llama3``: wavelengths below original / this are not scaled.
        attention_factor: ``yarn``, ``longrope``: what cosine and sine are multiplied by.
        score_factor: ``yarn``: what attention scores are multiplied by in families that want it (DeepSeek).
        beta_fast: ``yarn``: frequencies with more rotations than this are not scaled.
        beta_slow: ``yarn``: frequencies with fewer rotations than this are scaled fully.
        truncate: ``yarn``: whether the range between the two is rounded outwards.
        freq_factors: ``factors``, ``longrope``: ``rotary_dim / 2`` divisors.
        long_factors: ``longrope``: those of sequences longer than ``original_max_position``.
        interleaved: whether the two dimensions that turn together are neighbours, or half of ``rotary_dim`` apart.
    """

    kind: str
    theta: float
    rotary_dim: int
    max_position_embeddings: int = 2048
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float = 1.0
    score_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    freq_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    interleaved: bool = False

    @property
    def follows_length(self) -> bool:
        """Whether frequencies depend on the length of a sequence."""
        return self.kind in ("dynamic", "longrope")

    def context_len(self, prompt_len: int, length: int) -> int:
        """The length that a request's frequencies follow, see ``base_length``: its prompt's, but with ``longrope``.

        There all tokens of a sequence take the factors for the length that it has reached. When that passes
        ``original_max_position``, stored keys are of no use any more.
        """
        if self.kind != "longrope":
            return prompt_len
        return self.original_max_position + (length > self.original_max_position)

    def base_length(self, position: int, context_len: int) -> int:
        """The sequence length that decides the frequencies of a token; 0 if none does.

        ``dynamic``: made a function of the request: the tokens of the prompt take the prompt's length, a later one at
        position p takes p + 1. Up to ``max_position_embeddings`` nothing is scaled. ``longrope``: one length beyond
        ``original_max_position`` stands for all.
        """
        if self.kind == "longrope":
            return self.original_max_position + 1 if context_len > self.original_max_position else 0
        if self.kind != "dynamic":
            return 0
        length = context_len if position < context_len else position + 1
        return length if length > self.max_position_embeddings else 0

    def cache_key(self, context_len: int) -> bytes | None:
        """What must be equal, beside the tokens, for two requests to share stored keys; None if nothing is.

        Two requests whose prompts both fit ``max_position_embeddings`` turn equal tokens by equal angles, also those
        generated beyond it.
        """
        length = self.base_length(0, context_len)
        return b"rope:%d" % length if length else None


def rope_from_config(
    config: Mapping[str, Any],
    head_dim: int,
    max_position_embeddings: int,
    *,
    theta: float = 10000.0,
    theta_key: str = "rope_theta",
    partial: float = 1.0,
    partial_key: str = "partial_rotary_factor",
    layer_type: str | None = None,
    interleaved: bool = False,
) -> RopeSpec:
    """Read the rotary embedding from a configuration.

    transformers 5 has ``rope_parameters`` {rope_type, rope_theta, ...}, or one of these for each type of layer;
    transformers 4 has ``rope_theta`` and ``rope_scaling``, null or {rope_type, ...}, in older files {type, ...}.

    Args:
        config: as in config.json.
        head_dim: width of a head, or of the part of it that has positions.
        max_position_embeddings: positions that the model was made for.
        theta, theta_key: the family's default of the base, and its name outside of ``rope_parameters``.
        partial, partial_key: likewise of the share of a head that turns.
        layer_type: which entry to take where each type of layer has its own.
        interleaved: how the family pairs dimensions.

    Raises:
        CheckpointError: names the file and key, what was expected and what came.
    """
    top = ConfigReader(config)
    read = top.child("rope_parameters")
    if read is not None and layer_type is not None and not (read.has("rope_type") or read.has("type")):
        if not read.has(layer_type):
            raise read.error(layer_type, "an object", None)
        read = read.child(layer_type)
    read = read or top.child("rope_scaling")
    if read is None:
        read = ConfigReader({"rope_type": "default"}, top.source)
    type_key = "rope_type" if read.has("rope_type") or not read.has("type") else "type"
    kind = read.string(type_key)
    if kind == "su":  # its name in the first Phi-3 files
        kind = "longrope"
    if kind not in KINDS and not (kind == _FACTORS and top.source.endswith(".gguf")):
        raise read.error(type_key, f"one of {', '.join(KINDS)}", kind)

    def either(key: str, top_key: str, default: float, minimum: float) -> float:
        inside = read.has(key)
        return (read if inside else top).number(key if inside else top_key, default, minimum=minimum)

    base = either("rope_theta", theta_key, theta, 1)
    share = either("partial_rotary_factor", partial_key, partial, 1e-30)
    rotary_dim = int(head_dim * share)
    if share > 1 or rotary_dim < 2 or rotary_dim % 2:
        raise top.error(partial_key, f"a share of head_dim ({head_dim}) that is even and not 0", share)

    values: dict[str, Any] = {}
    if kind in ("linear", "dynamic", "llama3"):
        values["factor"] = read.number("factor")
    if kind == "dynamic":
        if rotary_dim < 4:
            raise top.error("head_dim", "at least 4 rotating dimensions with dynamic rope scaling", rotary_dim)
        if values["factor"] < 1:
            raise read.error("factor", "a number of at least 1", values["factor"])
    if kind == "llama3":
        low, high = read.number("low_freq_factor"), read.number("high_freq_factor")
        if high <= low:
            raise read.error("high_freq_factor", f"a number greater than low_freq_factor ({low:g})", high)
        values |= {
            "low_freq_factor": low,
            "high_freq_factor": high,
            "original_max_position": read.integer("original_max_position_embeddings"),
        }
    if kind == "yarn":
        values |= _yarn_values(read, top, base, max_position_embeddings)
    if kind == "longrope":
        values |= _longrope_values(read, top, rotary_dim, max_position_embeddings)
    if kind == "factors":
        values["freq_factors"] = _factors(read, "factors", rotary_dim)
    return RopeSpec(kind, base, rotary_dim, max_position_embeddings, interleaved=interleaved, **values)


def _yarn_values(read: ConfigReader, top: ConfigReader, theta: float, max_positions: int) -> dict[str, Any]:
    original = read.integer("original_max_position_embeddings", max_positions)
    factor = read.number("factor", max_positions / original)
    mscale = read.number("mscale", 0.0, minimum=0)
    mscale_all_dim = read.number("mscale_all_dim", 0.0, minimum=0)
    if read.has("attention_factor"):
        attention = read.number("attention_factor")
    elif mscale and mscale_all_dim:
        attention = _yarn_mscale(factor, mscale) / _yarn_mscale(factor, mscale_all_dim)
    else:
        attention = _yarn_mscale(factor, 1.0)
    beta_fast, beta_slow = read.number("beta_fast", 32.0), read.number("beta_slow", 1.0)
    if beta_fast < beta_slow:
        raise read.error("beta_fast", f"a number of at least beta_slow ({beta_slow:g})", beta_fast)
    if theta <= 1:
        raise top.error("rope_theta", "a number greater than 1 with yarn", theta)
    return {
        "factor": factor,
        "original_max_position": original,
        "attention_factor": attention,
        "score_factor": _yarn_mscale(factor, mscale_all_dim) ** 2,
        "beta_fast": beta_fast,
        "beta_slow": beta_slow,
        "truncate": read.boolean("truncate", True),
    }


def _longrope_values(read: ConfigReader, top: ConfigReader, rotary_dim: int, max_positions: int) -> dict[str, Any]:
    where = read if read.has("original_max_position_embeddings") else top
    original = where.integer("original_max_position_embeddings", max_positions)
    factor = max_positions / original if where.has("original_max_position_embeddings") else read.number("factor", 1.0)
    if factor <= 1:
        derived = 1.0
    elif original == 1:
        raise where.error("original_max_position_embeddings", "at least 2 with longrope", original)
    else:
        derived = math.sqrt(1 + math.log(factor) / math.log(original))
    return {
        "factor": factor,
        "original_max_position": original,
        "attention_factor": read.number("attention_factor", derived),
        "freq_factors": _factors(read, "short_factor", rotary_dim),
        "long_factors": _factors(read, "long_factor", rotary_dim),
    }


def _factors(read: ConfigReader, key: str, rotary_dim: int) -> tuple[float, ...]:
    """A divisor for each frequency."""
    factors = read.numbers(key)
    if len(factors) != rotary_dim // 2:
        raise read.error(key, f"{rotary_dim // 2} numbers", f"{len(factors)} numbers")
    return factors


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
