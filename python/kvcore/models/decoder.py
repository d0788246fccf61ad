"""Runs any decoder that a ``DecoderSpec`` describes, over a paged KV cache.

    x = embed_tokens[token_ids]
    for each layer:
        q, k, v = rope(norm(x) @ Wqkv)          one joint product
        cache.write(layer, k, v)
        x += cache.attend(layer, q) @ Wo
        x += (silu(gate) * up) @ Wdown          gate, up = norm(x) @ Wgate_up, one joint product
    logits = norm(x[wanted rows]) @ Wout

Activations are float32 [rows, hidden_size]; rows of many sequences, prefill and decode alike, go through together. Each
row's result depends on its own token, position and context alone, down to the bit, because every native call promises
that of its rows.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from kvcore._kvcore import Arena, Linear, rope_split
from kvcore.errors import CheckpointError
from kvcore.models.rope import RopeTable
from kvcore.models.spec import check_weights, read_blocks, read_output, read_tensor, unused_tensors

if TYPE_CHECKING:
    from kvcore._kvcore import Batch, KVCache
    from kvcore.checkpoint.weights import Weights
    from kvcore.models.spec import DecoderSpec

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]

_NUMPY_DTYPES: dict[str, Any] = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


@dataclass(frozen=True)
class _Layer:
    """One layer's weights, packed; the norms are float32 [hidden_size]."""

    input_norm: FloatArray
    qkv: Linear
    output: Linear
    mlp_norm: FloatArray
    gate_up: Linear
    down: Linear


class Decoder:
    """A decoder with packed weights.

    Args:
        spec: what the decoder is.
        weights: its tensors, read one at a time.
        cache: the KV cache; its shape must be the spec's, its threads run the products, too.
        dtype: what matrices are held in: float32, bfloat16 or float16. Norms and biases are float32.
        quantization: int8 or int4, in place of ``dtype`` for all but the embedding's rows: blocks that are stored so
            are taken as they are, if all matrices with one input are of one kind, all else is rounded. The output
            matrix, whose errors nothing evens out, is rounded to 8 bits at least. None: ``dtype``.

    Raises:
        CheckpointError: a tensor is missing or has another shape or type than the spec says.
    """

    def __init__(
        self, spec: DecoderSpec, weights: Weights, cache: KVCache, *, dtype: str, quantization: str | None = None
    ) -> None:
        check_weights(spec, weights)
        if spec.rope.rotary_dim > spec.head_dim:
            raise CheckpointError(
                f"rope: expected at most {spec.head_dim} rotated dimensions, got {spec.rope.rotary_dim}"
            )
        self.spec = spec
        self.cache = cache
        self._threads = cache.threads
        self._rope = RopeTable(spec.rope)
        self._dtype = dtype
        read = _Reader(spec, weights, dtype, quantization, cache)
        self._embedding = read.matrix("embed_tokens.weight")
        self._output = read.output(self._embedding)
        self._norm = read.vector("norm.weight")
        self._layers = [read.layer(layer) for layer in range(spec.num_layers)]
        left = unused_tensors(spec, weights)
        if left:
            names = ", ".join(left[:5]) + (f" and {len(left) - 5} more" if len(left) > 5 else "")
            number = "1 tensor is" if len(left) == 1 else f"{len(left)} tensors are"
            warnings.warn(f"{weights.source}: {number} not used: {names}", stacklevel=2)

    @property
    def nbytes(self) -> int:
        """Bytes of all weights as they are held."""
        layers = sum(x.qkv.nbytes + x.output.nbytes + x.gate_up.nbytes + x.down.nbytes for x in self._layers)
        norms = self._norm.nbytes + sum(x.input_norm.nbytes + x.mlp_norm.nbytes for x in self._layers)
        return self._embedding.nbytes + self._output.nbytes + layers + norms

    def prompt_salt(self, prompt_len: int, /) -> bytes | None:
        """What the rope of a prompt of this length adds to its block keys; None for all kinds but dynamic."""
        return self._rope.cache_key(prompt_len)

    def forward(
        self,
        batch: Batch,
        token_ids: IntArray,
        positions: IntArray,
        prompt_lens: IntArray,
        logit_rows: IntArray,
        /,
    ) -> FloatArray:
        """Run the planned rows and write their K and V; the caller plans before and commits after.

        Args:
            batch: what ``cache.plan`` granted for these rows.
            token_ids: int64 [rows], each below ``spec.vocab_size``.
            positions: int64 [rows].
            prompt_lens: int64 [rows], the prompt length of each row's request (for rope that depends on it).
            logit_rows: int64 [n], the rows whose logits are wanted.

        Returns:
            float32 [n, vocab_size].
        """
        spec, cache = self.spec, self.cache
        cos, sin = self._rope.cos_sin(positions, prompt_lens)
        x: FloatArray = self._embedding[token_ids].astype(np.float32)
        width = spec.num_heads * spec.head_dim
        for i, layer in enumerate(self._layers):
            qkv = layer.qkv.norm_forward(x, layer.input_norm, spec.norm_eps)
            q, k, v = rope_split(qkv, cos, sin, spec.num_heads, spec.num_kv_heads, spec.head_dim, threads=self._threads)
            cache.write(i, batch, k, v)
            attended = cache.attend(i, batch, q)
            if i == spec.num_layers - 1 and len(logit_rows) < len(x):
                # Behind the last layer's K and V only the wanted rows matter.
                x, attended = x[logit_rows], attended[logit_rows]
            layer.output.add_forward(attended.reshape(-1, width), x)
            gate_up = layer.gate_up.norm_forward(x, layer.mlp_norm, spec.norm_eps)
            layer.down.gated_add_forward(gate_up, x)
        if len(x) != len(logit_rows):
            x = x[logit_rows]
        return self._output.norm_forward(x, self._norm, spec.norm_eps)


class _Reader:
    """Reads a spec's tensors and packs them."""

    def __init__(
        self, spec: DecoderSpec, weights: Weights, dtype: str, quantization: str | None, cache: KVCache
    ) -> None:
        self._spec = spec
        self._weights = weights
        self._dtype = dtype
        self._quantization = quantization
        self._threads = cache.threads
        self._arena = Arena()

    def layer(self, layer: int) -> _Layer:
        return _Layer(
            input_norm=self.vector("input_norm.weight", layer),
            qkv=self._joint(("q_proj", "k_proj", "v_proj"), layer),
            output=self._joint(("o_proj",), layer),
            mlp_norm=self.vector("mlp_norm.weight", layer),
            gate_up=self._joint(("gate_proj", "up_proj"), layer),
            down=self._joint(("down_proj",), layer),
        )

    def vector(self, role: str, layer: int | None = None) -> FloatArray:
        tensor = read_tensor(self._spec, self._weights, role, layer)
        assert tensor is not None, role  # check_weights has seen it
        return np.ascontiguousarray(tensor, np.float32)

    def matrix(self, role: str) -> npt.NDArray[Any]:
        tensor = read_tensor(self._spec, self._weights, role)
        assert tensor is not None, role
        return tensor.astype(_NUMPY_DTYPES[self._dtype])

    def output(self, embedding: npt.NDArray[Any]) -> Linear:
        """The output matrix: the embedding's own, or one of its own."""
        weight = read_output(self._spec, self._weights)
        if self._quantization is None:
            return self.pack(embedding if weight is None else weight, None)
        role = "embed_tokens.weight" if weight is None else "lm_head.weight"
        blocks = read_blocks(self._spec, self._weights, role)
        if blocks is not None and (blocks[0] == "Q8_0" or self._quantization == "int4"):
            return self._of_blocks(*blocks, None)
        weight = read_tensor(self._spec, self._weights, role)
        assert weight is not None, role  # check_weights or read_output has seen it
        return Linear(weight, dtype="int8", threads=self._threads, arena=self._arena)

    def pack(self, weight: npt.NDArray[Any], bias: npt.NDArray[Any] | None) -> Linear:
        dtype = self._quantization or self._dtype
        return Linear(weight, bias, dtype=dtype, threads=self._threads, arena=self._arena)

    def _of_blocks(self, kind: str, rows: npt.NDArray[np.uint8], bias: npt.NDArray[Any] | None) -> Linear:
        dtype = "int8" if kind == "Q8_0" else "int4"
        return Linear(rows, bias, dtype=dtype, blocks=kind, threads=self._threads, arena=self._arena)

    def _joint(self, names: tuple[str, ...], layer: int) -> Linear:
        """Matrices with the same input as one, the outputs below each other."""
        blocks = self._blocks(names, layer)
        shapes = [self._spec.tensor(f"{name}.weight", layer).shape for name in names]
        biases = [read_tensor(self._spec, self._weights, f"{name}.bias", layer) for name in names]
        bias = None
        if any(b is not None for b in biases):
            parts = zip(shapes, biases, strict=True)
            bias = np.concatenate(
                [np.zeros(shape[0], np.float32) if b is None else b.astype(np.float32) for shape, b in parts]
            )
        if blocks is not None:
            return self._of_blocks(*blocks, bias)
        matrices = [read_tensor(self._spec, self._weights, f"{name}.weight", layer) for name in names]
        weights = [matrix for matrix in matrices if matrix is not None]
        return self.pack(weights[0] if len(weights) == 1 else np.concatenate(weights), bias)

    def _blocks(self, names: tuple[str, ...], layer: int) -> tuple[str, npt.NDArray[np.uint8]] | None:
        """The matrices' blocks below each other, if all have the same kind of the wanted bits."""
        if self._quantization is None:
            return None
        parts = [read_blocks(self._spec, self._weights, f"{name}.weight", layer) for name in names]
        kinds = {part[0] for part in parts if part is not None}
        wanted = ("Q8_0",) if self._quantization == "int8" else ("Q4_0", "Q4_1")
        if None in parts or len(kinds) != 1 or not kinds <= set(wanted):
            return None
        rows = [part[1] for part in parts if part is not None]
        return kinds.pop(), rows[0] if len(rows) == 1 else np.concatenate(rows)
