"""What a decoder is, as data: sizes, rope, and which tensors it is made of.

A family file turns config.json into a ``DecoderSpec``; whatever runs or checks a model reads the spec alone and knows
no family. Tensors are named by role ("q_proj.weight"), so that a checkpoint with other names differs only in data.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvcore.errors import CheckpointError, InvalidArgument

if TYPE_CHECKING:
    from kvcore.checkpoint.weights import Weights
    from kvcore.models.rope import RopeSpec


@dataclass(frozen=True)
class TensorSpec:
    """One tensor that a model reads.

    Attributes:
        role: what it is to the model, such as ``"q_proj.weight"``.
        name: its name in the checkpoint; ``{layer}`` stands for the layer's index.
        shape: ``[out, in]`` for matrices.
        required: whether the model cannot do without it. One that is not required is used where it is there.
    """

    role: str
    name: str
    shape: tuple[int, ...]
    required: bool = True


@dataclass(frozen=True)
class DecoderSpec:
    """A decoder-only model.

    Attributes:
        family: the ``model_type`` it was made from.
        vocab_size: rows of the embedding, and logits per position.
        hidden_size: width of the residual stream.
        num_layers: decoder layers.
        num_heads: query heads.
        num_kv_heads: key and value heads; divides ``num_heads``.
        head_dim: width of one head; even.
        intermediate_size: width of the MLP.
        norm_eps: what the norms add to the mean square.
        activation: ``"silu"``.
        rope: the rotary embedding.
        max_position_embeddings: positions that the model was made for.
        tie_word_embeddings: whether the embedding is the output matrix, too, see ``read_output``.
        tensors: the tensors outside the layers.
        layer_tensors: the tensors of every layer.
        ignored_tensors: patterns (``*``) of names that may be in a file and mean nothing.
    """

    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    norm_eps: float
    activation: str
    rope: RopeSpec
    max_position_embeddings: int
    tie_word_embeddings: bool
    tensors: tuple[TensorSpec, ...] = field(repr=False)
    layer_tensors: tuple[TensorSpec, ...] = field(repr=False)
    ignored_tensors: tuple[str, ...] = field(default=(), repr=False)

    def tensor(self, role: str, layer: int | None = None) -> TensorSpec:
        """The tensor with this role, of this layer if one is given, with its full name.

        Raises:
            InvalidArgument: there is no such role or layer.
        """
        if layer is not None and not 0 <= layer < self.num_layers:
            raise InvalidArgument(f"layer: expected 0 to {self.num_layers - 1}, got {layer}")
        for tensor in self.tensors if layer is None else self.layer_tensors:
            if tensor.role == role:
                return tensor if layer is None else _of_layer(tensor, layer)
        raise InvalidArgument(f"role: a {self.family} model has no tensor {role!r}")

    def all_tensors(self) -> Iterator[TensorSpec]:
        """Every tensor of the model, with its full name."""
        yield from self.tensors
        for layer in range(self.num_layers):
            for tensor in self.layer_tensors:
                yield _of_layer(tensor, layer)


def check_weights(spec: DecoderSpec, weights: Weights) -> None:
    """Check that every tensor is there, in a shape and a type that can be read, without reading any.

    Raises:
        CheckpointError: names the tensor, what was expected and what came.
    """
    for tensor in spec.all_tensors():
        _check(weights, tensor)


def read_tensor(spec: DecoderSpec, weights: Weights, role: str, layer: int | None = None) -> npt.NDArray[Any] | None:
    """The tensor with this role as it is stored (float32, float16 or bfloat16), or None if it may be and is missing.

    Raises:
        CheckpointError: it is missing and required, or its shape or type is not what the model needs.
        InvalidArgument: there is no such role or layer.
    """
    tensor = spec.tensor(role, layer)
    return weights.get(tensor.name) if _check(weights, tensor) else None


def read_blocks(
    spec: DecoderSpec, weights: Weights, role: str, layer: int | None = None
) -> tuple[str, npt.NDArray[np.uint8]] | None:
    """The quantised blocks of the tensor with this role, as ``Weights.blocks`` has them. Raises as ``read_tensor``."""
    tensor = spec.tensor(role, layer)
    return weights.blocks(tensor.name) if _check(weights, tensor) else None


def read_output(spec: DecoderSpec, weights: Weights) -> npt.NDArray[Any] | None:
    """The output matrix ``[vocab_size, hidden_size]``, or None if it is the embedding.

    Files of tied models may hold a second copy of the embedding as output matrix. Should the two differ then the file
    says more than the flag, and the stored matrix counts; transformers 5 does the same.

    Raises:
        CheckpointError: as ``read_tensor``.
    """
    output = read_tensor(spec, weights, "lm_head.weight")
    if output is None or not spec.tie_word_embeddings:
        return output
    embedding = read_tensor(spec, weights, "embed_tokens.weight")
    return None if embedding is not None and _same(output, embedding) else output


def unused_tensors(spec: DecoderSpec, weights: Weights) -> list[str]:
    """Names of tensors in the file that were never read and are not known to mean nothing, sorted."""
    return [n for n in weights.unused() if not any(fnmatchcase(n, pattern) for pattern in spec.ignored_tensors)]


def _of_layer(tensor: TensorSpec, layer: int) -> TensorSpec:
    return TensorSpec(tensor.role, tensor.name.replace("{layer}", str(layer)), tensor.shape, tensor.required)


def _check(weights: Weights, tensor: TensorSpec) -> bool:
    """Whether the tensor is there; raises if it must be and is not, or if it is not what it should be."""
    if tensor.name not in weights:
        if tensor.required:
            raise CheckpointError(
                f"{weights.source}: tensor {tensor.name!r}: expected shape {list(tensor.shape)}, got no such tensor"
            )
        return False
    shape = weights.shape(tensor.name)
    if shape != tensor.shape:
        raise CheckpointError(
            f"{weights.source}: tensor {tensor.name!r}: expected shape {list(tensor.shape)}, got {list(shape)}"
        )
    weights.dtype(tensor.name)  # raises for a type that cannot be read
    return True


def _same(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> bool:
    """Whether two arrays of equal shape hold the same bytes, in pieces so that no large mask is made."""
    if a.dtype != b.dtype:
        return False
    pieces = ((a[i : i + 1024], b[i : i + 1024]) for i in range(0, len(a), 1024))
    return all(np.array_equal(x.view(np.uint8), y.view(np.uint8)) for x, y in pieces)
