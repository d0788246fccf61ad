"""A layer's attention to an encoder's output: queries of the decoder, K and V of the encoder.

store:  k, v = split(encoded @ Wkv)           once for a request; forks and beams share it
        cache.write_cross(layer, seq, k, v)
add:    q = cross_norm(x) @ Wq
        x += cache.attend(layer, q) @ Wo      every row sees all of the encoder's rows
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvcore.models.norm import projection

if TYPE_CHECKING:
    from kvcore._kvcore import KVCache, Sequence
    from kvcore.models.attention import Step
    from kvcore.models.reader import Reader
    from kvcore.models.spec import AttentionSpec

FloatArray = npt.NDArray[np.float32]


class CrossAttention:
    """A layer's packed weights. Its layer in the cache comes behind those of all layers' self-attention."""

    def __init__(self, read: Reader, layer: int, spec: AttentionSpec, cache: KVCache) -> None:
        """Read and pack its tensors."""
        self._layer = layer
        self._cache_layer = read.spec.num_layers + layer
        self._cache = cache
        self._heads = (read.spec.num_heads, read.spec.num_kv_heads, read.spec.head_dim)
        self._scale = spec.scale
        self._q = projection(read.linear(("cross_q_proj",), layer), read.optional_norm("cross_norm", layer))
        self._kv = read.linear(("cross_k_proj", "cross_v_proj"), layer)
        self._output = read.linear(("cross_o_proj",), layer)

    @property
    def idle_nbytes(self) -> int:
        """Bytes that a step does not read: what makes K and V is needed once for a request."""
        return self._kv.nbytes

    def store(self, seq: Sequence, encoded: FloatArray) -> None:
        """Keep K and V of the encoder's output [encoder rows, hidden_size] for a sequence of the cache."""
        _, heads, width = self._heads
        k, v = self._kv(encoded).reshape(len(encoded), 2, heads, width).swapaxes(0, 1)
        self._cache.write_cross(self._cache_layer, seq, np.ascontiguousarray(k), np.ascontiguousarray(v))

    def add(self, x: FloatArray, step: Step) -> None:
        """Add what the rows see of their encoders' outputs to x [rows, hidden_size], in place."""
        heads, _, width = self._heads
        q = self._q(x).reshape(len(x), heads, width)
        if step.maps is not None:
            weights = self._cache.attention_weights(self._cache_layer, step.batch, q, scale=self._scale)
            step.maps[self._layer] = weights
        attended = self._cache.attend(self._cache_layer, step.batch, q, scale=self._scale)
        self._output.add_forward(attended.reshape(len(x), -1), x)
