"""An encoder: a stack of layers in which every row sees every other, without a cache.

    x = embeddings of the token ids, or two convolutions over the features of sound, plus positions
    for each layer:  as a decoder's layer, but attention sees all rows
    encoded = norm(x)

One input goes through at a time, so its output depends on nothing beside it. Sources: Vaswani et al., 2017; the
convolutions are Whisper's (Radford et al., 2022).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from kvcore._kvcore import KVCache, KVGroup, activate
from kvcore.models.attention import Step
from kvcore.models.embedding import Embedding, read_positions
from kvcore.models.layer import Layer
from kvcore.models.reader import Reader

if TYPE_CHECKING:
    from kvcore._kvcore import Threads
    from kvcore.models.encoder_input import EncoderInput
    from kvcore.models.spec import EncoderSpec
    from kvcore.models.table import Table

FloatArray = npt.NDArray[np.float32]

_BLOCK = 16


class Encoder:
    """An encoder with packed weights.

    Attributes:
        nbytes: bytes of all weights as they are held, but for a table that it shares.
    """

    def __init__(self, spec: EncoderSpec, read: Reader, dtype: str, table: Table | None) -> None:
        """Read and pack the tensors of its stack; ``table``: the embedding, if the decoder has the same."""
        self._memory = _Memory(read.threads, dtype, spec.stack.num_kv_heads, spec.stack.head_dim)
        self._embedding = Embedding(read, table) if spec.mel_bins is None else None
        self._convolutions = Convolutions(read) if spec.mel_bins is not None else None
        memory = cast("KVCache", self._memory)  # it has what a layer asks of a cache
        self._layers = [Layer(read, layer, memory) for layer in range(spec.stack.num_layers)]
        self._norm = read.optional_norm("norm")
        self.nbytes = read.nbytes

    def __call__(self, source: EncoderInput, hidden: list[FloatArray] | None = None) -> FloatArray:
        """[rows, hidden_size]; the stream behind each layer goes to ``hidden``."""
        if source.features is not None:
            assert self._convolutions is not None
            x = self._convolutions(source.features)
        else:
            assert self._embedding is not None
            assert source.token_ids is not None
            x = self._embedding(source.token_ids, np.arange(len(source.token_ids)))
        none = np.empty((len(x), 0), np.float32)
        step = Step(cast("Any", None), [(none, none)])
        for layer in self._layers:
            layer.finish(x, layer.attention(x, step), step)
            if hidden is not None:
                hidden.append(x.copy())
        return x if self._norm is None else self._norm(x)


class Convolutions:
    """Whisper's way from features to rows: two convolutions of width 3, the second one of every other frame."""

    def __init__(self, read: Reader) -> None:
        """Read and pack their tensors."""
        self._threads = read.threads
        self._layers = []
        for role in ("conv1", "conv2"):
            weight = read.vector(f"{role}.weight")  # [out, in, 3]
            flat = np.ascontiguousarray(weight.swapaxes(1, 2)).reshape(len(weight), -1)
            self._layers.append(read.pack(flat, read.vector(f"{role}.bias")))
        self._positions = read_positions(read)

    def __call__(self, features: FloatArray) -> FloatArray:
        """float32 [mel bins, frames] to [ceil(frames / 2), hidden_size]."""
        x = np.ascontiguousarray(features.T)
        for linear, stride in zip(self._layers, (1, 2), strict=True):
            padded = np.pad(x, ((1, 1), (0, 0)))
            triples = np.concatenate([padded[i : i + len(x) : stride] for i in range(3)], axis=1)
            x = activate(linear(triples), "gelu", threads=self._threads)
        return x if self._positions is None else x + self._positions[: len(x)]


class _Memory:
    """What an encoder's layers write K and V to and attend over: a scratch cache that lives for one layer."""

    def __init__(self, threads: Threads, dtype: str, num_kv_heads: int, head_dim: int) -> None:
        self._options: dict[str, Any] = {"dtype": dtype, "threads": threads, "enable_prefix_caching": False}
        self._heads = {"num_kv_heads": num_kv_heads, "head_dim": head_dim}
        self._cache: KVCache | None = None
        self._batch: Any = None

    def write(self, layer: int, batch: Any, k: FloatArray, v: FloatArray) -> None:
        # Rows are planned in a layer that is never written, so that each may see all of another one of kind cross.
        groups = [KVGroup("full", [0], num_kv_heads=1, head_dim=2), KVGroup("cross", [1], **self._heads)]
        self._cache = KVCache(groups=groups, num_blocks=-(-len(k) // _BLOCK), **self._options)
        seq = self._cache.add(np.zeros(len(k), np.int64))
        self._cache.write_cross(1, seq, k, v)
        self._batch = self._cache.plan([(seq, len(k))])

    def attend(self, layer: int, batch: Any, q: FloatArray, **scoring: Any) -> FloatArray:
        assert self._cache is not None
        cache, self._cache = self._cache, None
        out: FloatArray = cache.attend(1, self._batch, q, **scoring)
        return out
