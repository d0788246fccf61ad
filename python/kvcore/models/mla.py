"""Multi-head latent attention: all heads' K and V are made of one compressed row for each token.

    q               = q_norm(x @ Wqa) @ Wqb or x @ Wq         [heads, nope + rope]
    latent, k_rope  = kv_norm(row[:rank]), rope(row[rank:])   row = x @ Wkva
    K of a head     = [latent @ Wk of the head, k_rope];      V of a head = latent @ Wv of the head

Absorbed, the cache holds [latent, k_rope], each head's query goes through its Wk and each head's output through its
Wv: (q_nope @ Wk) . latent is q_nope . (latent @ Wk). Expanded, the cache holds each head's K and V. The two differ in
rounding alone; an LLM keeps to one of them, for prefill and decode alike.

Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvcore._kvcore import linear_heads, rope
from kvcore.models.norm import projection

if TYPE_CHECKING:
    from kvcore._kvcore import KVCache
    from kvcore.models.attention import Step
    from kvcore.models.reader import Reader
    from kvcore.models.spec import LatentSpec

FloatArray = npt.NDArray[np.float32]


class LatentAttention:
    """A layer's latent attention, in the form that the spec says."""

    def __init__(self, read: Reader, layer: int, latent: LatentSpec, cache: KVCache) -> None:
        """Read and pack its tensors."""
        spec, attention = read.spec, read.spec.layers[layer].attention
        self._layer = layer
        self._cache = cache
        self._latent = latent
        self._heads = spec.num_heads
        self._scale = attention.scale
        self._rope = spec.rope_of(layer)
        self._interleaved = attention.rope is not None and attention.rope.interleaved
        compressed = latent.q_rank is not None
        down = read.adapted(("q_a_proj" if compressed else "q_proj", "kv_a_proj"), layer)
        self._down = projection(down, read.optional_norm("input_norm", layer))
        self._q_up = None
        if compressed:
            q_norm = read.norm("q_a_norm", layer, eps=latent.norm_eps)
            self._q_up = projection(read.adapted(("q_b_proj",), layer), q_norm)
        self._kv_norm = read.norm("kv_a_norm", layer, eps=latent.norm_eps)
        if latent.absorbed:
            self._k_heads = read.heads("k_b_proj", layer, spec.num_heads, transposed=True)
            self._v_heads = read.heads("v_b_proj", layer, spec.num_heads)
        else:
            self._kv_up = read.adapted(("k_b_proj", "v_b_proj"), layer)

    def __call__(self, x: FloatArray, step: Step) -> FloatArray:
        """x [rows, hidden_size]; the result is [rows, num_heads * v_dim]."""
        latent, rows = self._latent, len(x)
        joint = self._down(x)
        q, row = np.split(joint, [joint.shape[1] - latent.rank - latent.rope_dim], axis=1)
        if self._q_up is not None:
            q = self._q_up(q)
        q_nope, q_rope = np.split(q.reshape(rows, self._heads, -1), [latent.nope_dim], axis=2)
        q_rope, k_rope = self._turn(q_rope, step), self._turn(row[:, None, latent.rank :], step)
        compressed = self._kv_norm(row[:, : latent.rank])
        form = self._absorbed if latent.absorbed else self._expanded
        return form(q_nope, q_rope, compressed, k_rope, step).reshape(rows, -1)

    def _absorbed(
        self, q_nope: FloatArray, q_rope: FloatArray, latent: FloatArray, k_rope: FloatArray, step: Step
    ) -> FloatArray:
        self._cache.write(self._layer, step.batch, np.concatenate([latent[:, None], k_rope], axis=2))
        q = np.concatenate([linear_heads(self._k_heads, q_nope), q_rope], axis=2)
        return linear_heads(self._v_heads, self._cache.attend(self._layer, step.batch, q, scale=self._scale))

    def _expanded(
        self, q_nope: FloatArray, q_rope: FloatArray, latent: FloatArray, k_rope: FloatArray, step: Step
    ) -> FloatArray:
        rows, heads, width = q_nope.shape
        k_nope, v = np.split(self._kv_up(latent), [heads * width], axis=1)
        shared = np.broadcast_to(k_rope, q_rope.shape)
        k = np.concatenate([k_nope.reshape(rows, heads, width), shared], axis=2)
        self._cache.write(self._layer, step.batch, k, v.reshape(rows, heads, -1))
        q = np.concatenate([q_nope, q_rope], axis=2)
        return self._cache.attend(self._layer, step.batch, q, scale=self._scale)

    def _turn(self, x: FloatArray, step: Step) -> FloatArray:
        return rope(x, *step.angles[self._rope], interleaved=self._interleaved, threads=self._cache.threads)
