"""Runs any decoder that a ``DecoderSpec`` describes, over a paged KV cache.

    x = embed_tokens[token_ids]
    for each layer:
        x += attention(x) @ Wo                  q, k, v through the cache, see attention.py
        x += mlp(x)                             dense or a mixture of experts, see mlp.py and moe.py
    logits = norm(x[wanted rows]) @ Wout

Activations are float32 [rows, hidden_size]; rows of many sequences, prefill and decode alike, go through together. Each
row's result depends on its own token, position and context alone, down to the bit, because every native call promises
that of its rows, and of numpy only what rounds each value by itself (sums and products of two) is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvcore._kvcore import softcap
from kvcore.errors import CheckpointError
from kvcore.models.attention import Step
from kvcore.models.embedding import Embedding
from kvcore.models.layer import Layer
from kvcore.models.norm import projection
from kvcore.models.reader import Reader
from kvcore.models.rope_table import RopeTable

if TYPE_CHECKING:
    from kvcore._kvcore import Batch, KVCache
    from kvcore.checkpoint.lora import LoraWeights
    from kvcore.checkpoint.weights import Weights
    from kvcore.models.lora import Adapter, Rows
    from kvcore.models.spec import DecoderSpec

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]


class Decoder:
    """A decoder with packed weights.

    Args:
        spec: what the decoder is.
        weights: its tensors, read one at a time.
        cache: the KV cache; its shape must be the spec's, its threads run the products, too.
        dtype: what matrices are held in: float32, bfloat16 or float16. Norms and biases are float32.
        quantization: int8 or int4, in place of ``dtype`` for all but the embedding's rows: blocks that are stored so
            are taken as they are, if all matrices with one input are of one kind, all else is rounded. The output
            matrix, whose errors nothing evens out, is rounded to 8 bits at least. The embedding's rows are read from
            the output matrix where the two are one and nothing was rounded, else from the file's blocks, else held in
            ``dtype``. "auto": each matrix as it is stored, in ``dtype``, in 4 bits, or (5 bits and more) in 8.
            None: ``dtype``.
        reader: what reads and packs the tensors.

    Attributes:
        weight_format: what most weights of matrices are held in, as ``Linear`` has it.

    Raises:
        CheckpointError: a tensor is missing or has another shape or type than the spec says.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        weights: Weights,
        cache: KVCache,
        *,
        dtype: str,
        quantization: str | None = None,
        reader: type[Reader] = Reader,
    ) -> None:
        read = reader(spec, weights, cache.threads, dtype=dtype, quantization=quantization)
        for rope in spec.ropes:
            if rope.rotary_dim > spec.head_dim:
                raise CheckpointError(
                    f"rope: expected at most {spec.head_dim} rotated dimensions, got {rope.rotary_dim}"
                )
        self.spec = spec
        self.cache = cache
        self._ropes = {rope: RopeTable(rope) for rope in spec.ropes}
        output, table = read.output()
        self._embedding = Embedding(read, table)
        self._output = projection(output, read.optional_norm("norm"))
        self._layers = [Layer(read, layer, cache) for layer in range(spec.num_layers)]
        self._nbytes = read.nbytes + self._read_more(weights, reader, dtype=dtype, quantization=quantization)
        self.weight_format = read.formats.most_common(1)[0][0]
        self._adapters = read.adapters
        read.warn_of_unused()

    def _read_more(self, weights: Weights, reader: type[Reader], **held_in: Any) -> int:
        """Read what is there beside the decoder; how many bytes it takes."""
        return 0

    @property
    def nbytes(self) -> int:
        """Bytes of all weights as they are held."""
        return self._nbytes

    def step_nbytes(self, num_tokens: int) -> int:
        """Bytes of weights that a step of so many tokens reads, one of each request.

        Of tables those rows that are looked up; of experts those that are chosen, if all are as likely.
        """
        of_layers = sum(layer.idle_nbytes(num_tokens) for layer in self._layers)
        return self._nbytes - self._embedding.idle_nbytes(num_tokens) - of_layers

    def adapter(self, lora: LoraWeights) -> Adapter:
        """Pack an adapter for this decoder.

        Raises:
            CheckpointError: a module is not the model's or cannot be adapted, or has another shape.
        """
        return self._adapters.fit(lora)

    def context_len(self, prompt_len: int, length: int, /) -> int:
        """The length that the rope of a request follows, see ``RopeSpec.context_len``.

        Args:
            prompt_len: tokens of its prompt.
            length: tokens that it has by now.
        """
        of_length = (rope for rope in self._ropes if rope.follows_length)
        return next((rope.context_len(prompt_len, length) for rope in of_length), prompt_len)

    def prompt_salt(self, context_len: int, /) -> bytes | None:
        """What the rope of a request with this ``context_len`` adds to its block keys; None for most kinds."""
        keys = [key for rope in self._ropes if (key := rope.cache_key(context_len)) is not None]
        return b" ".join(keys) if keys else None

    def forward(
        self,
        batch: Batch,
        token_ids: IntArray,
        positions: IntArray,
        context_lens: IntArray,
        logit_rows: IntArray,
        /,
        adapters: Sequence[Rows] = (),
        maps: dict[int, FloatArray] | None = None,
    ) -> FloatArray:
        """Run the planned rows and write their K and V; the caller plans before and commits after.

        Args:
            batch: what ``cache.plan`` granted for these rows.
            token_ids: int64 [rows], each below ``spec.vocab_size``.
            positions: int64 [rows].
            context_lens: int64 [rows], ``context_len`` of each row's request (for rope that depends on it).
            logit_rows: int64 [n], the rows whose logits are wanted.
            adapters: adapters that ``adapter`` made, each with the rows that have it, int64, ascending.
            maps: takes the cross-attention's weights of each layer, float32 [rows, heads, encoder rows], if given: of
                a batch with one sequence.

        Returns:
            float32 [n, vocab_size].
        """
        spec = self.spec
        self._adapters.rows = adapters
        x = self._embedding(token_ids, positions)
        step = Step(batch, self._angles(positions, context_lens), maps)
        for layer in self._layers[:-1]:
            layer.finish(x, layer.attention(x, step), step)
        # Behind the last layer's K and V only the wanted rows matter.
        last = self._layers[-1]
        attended = last.attention(x, step)
        if len(logit_rows) < len(x) and last.cross is None:
            x, attended = x[logit_rows], attended[logit_rows]
            self._adapters.keep(logit_rows)
        last.finish(x, attended, step)
        if len(x) != len(logit_rows):
            x = x[logit_rows]
        logits = self._output(x)
        if spec.logit_scale != 1:
            logits *= np.float32(spec.logit_scale)
        if spec.logit_softcap is not None:
            softcap(logits, spec.logit_softcap, threads=self.cache.threads)
        return logits

    def _angles(self, positions: IntArray, context_lens: IntArray) -> list[tuple[FloatArray, FloatArray]]:
        none = np.empty((len(positions), 0), np.float32)
        return [*(table.cos_sin(positions, context_lens) for table in self._ropes.values()), (none, none)]
