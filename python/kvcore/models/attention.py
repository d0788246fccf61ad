"""A layer's attention: from the residual stream to what its heads say, by way of the cache.

q, k, v = split(norm(x) @ Wqkv);  q, k = rope(qk_norm(q)), rope(qk_norm(k))
cache.write(layer, k, v)
heads = cache.attend(layer, q)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvcore._kvcore import rope_split
from kvcore.models.norm import projection
from kvcore.models.relative import bias_options

if TYPE_CHECKING:
    from kvcore._kvcore import Batch, KVCache
    from kvcore.models.reader import Reader

FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Step:
    """What all layers share in one forward pass.

    Attributes:
        batch: the planned rows.
        angles: cosines and sines, float32 [rows, rotary_dim / 2], where ``DecoderSpec.rope_of`` says: of each rope, and
            at the end some without columns.
        maps: takes the weights of each layer's cross-attention, if given.
    """

    batch: Batch
    angles: list[tuple[FloatArray, FloatArray]]
    maps: dict[int, FloatArray] | None = None


class Attention:
    """Attention with a K and a V for each KV head."""

    def __init__(self, read: Reader, layer: int, cache: KVCache) -> None:
        """Read and pack its tensors."""
        spec, attention = read.spec, read.spec.layers[layer].attention
        self._layer = layer
        self._cache = cache
        self._rope = spec.rope_of(layer)
        self._heads = (spec.num_heads, spec.num_kv_heads, spec.head_dim)
        norm = read.optional_norm("input_norm", layer)
        self._qkv = projection(read.adapted(("q_proj", "k_proj", "v_proj"), layer), norm)
        self._split: dict[str, Any] = {"threads": read.threads}
        if attention.rope is not None:
            self._split["interleaved"] = attention.rope.interleaved
        if attention.qk_norm is not None:
            self._split |= {
                "q_norm": _head_weights(read, "q_norm", layer, spec.num_heads * spec.head_dim),
                "k_norm": _head_weights(read, "k_norm", layer, spec.num_kv_heads * spec.head_dim),
                "norm": spec.norm.kind,
                "norm_eps": spec.norm.eps,
                "joint_norm": attention.qk_norm == "all",
            }
        self._scoring: dict[str, Any] = {"scale": attention.scale}
        if attention.softcap is not None:
            self._scoring["softcap"] = attention.softcap
        if attention.sinks:
            self._scoring["sinks"] = read.vector("sinks", layer)
        if attention.relative is not None:
            self._scoring |= bias_options(attention.relative, read.vector("relative_bias.weight", layer))

    def __call__(self, x: FloatArray, step: Step) -> FloatArray:
        """x [rows, hidden_size]; the result is [rows, num_heads * head_dim]."""
        q, k, v = rope_split(self._qkv(x), *step.angles[self._rope], *self._heads, **self._split)
        self._cache.write(self._layer, step.batch, k, v)
        heads: FloatArray = self._cache.attend(self._layer, step.batch, q, **self._scoring)
        return heads.reshape(len(x), -1)


def _head_weights(read: Reader, role: str, layer: int, width: int) -> FloatArray:
    """The weights of a norm of heads, for each value of all heads.

    Stored for all heads, for one in place of all, or one by one (StableLM).
    """
    if read.has(f"{role}.0.weight", layer):
        heads = width // read.spec.head_dim
        return np.concatenate([read.norm(f"{role}.{head}", layer).weight for head in range(heads)])
    weight = read.norm(role, layer).weight.reshape(-1)
    return np.tile(weight, width // len(weight))
