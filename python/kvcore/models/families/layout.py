"""Lists of tensors by role: matrices, alone and stored as one, and norms; by Llama's names if nothing else is said."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from kvcore.models.tensors import Part, TensorSpec

LAYER: Final = "model.layers.{layer}."
"""How the names of a layer's tensors begin."""

NORMS: Final = {"input_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
"""Roles and names of the norms before attention and MLP."""

QKV: Final = ("q_proj", "k_proj", "v_proj")

IGNORED: Final = ("model.layers.*.self_attn.rotary_emb.inv_freq",)
"""What old files hold beside the weights."""


def by_role(tensors: Iterable[TensorSpec]) -> Mapping[str, TensorSpec]:
    """Tensors by their roles."""
    return {tensor.role: tensor for tensor in tensors}


def linear(role: str, name: str, rows: int, columns: int, bias: bool | None = None) -> list[TensorSpec]:
    """A matrix and its bias: True must be there, False is used if it is (whatever the config says), None is none."""
    weight = TensorSpec(f"{role}.weight", f"{name}.weight", (rows, columns))
    return [weight] if bias is None else [weight, TensorSpec(f"{role}.bias", f"{name}.bias", (rows,), required=bias)]


def gated_mlp(
    role: str, prefix: str, hidden: int, inner: int, bias: bool | None = None,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> list[TensorSpec]:  # fmt: skip
    """Gate, up and down of an MLP; ``role`` goes before their roles."""
    gate, up, down = names
    return [
        *linear(f"{role}gate_proj", prefix + gate, inner, hidden, bias),
        *linear(f"{role}up_proj", prefix + up, inner, hidden, bias),
        *linear(f"{role}down_proj", prefix + down, hidden, inner, bias),
    ]


def fused(
    roles: Sequence[str],
    name: str,
    sizes: Sequence[int],
    columns: int,
    bias: bool | None = None,
    *,
    groups: int = 1,
    transposed: bool = False,
) -> list[TensorSpec]:
    """Matrices that are stored as one, below each other in each of so many groups of rows; ``bias`` as ``linear``."""
    tensors, start, total = [], 0, sum(sizes)
    stored = (columns, total) if transposed else (total, columns)
    for role, rows in zip(roles, sizes, strict=True):
        stop = start + rows // groups
        part = Part(stored, transposed=transposed, groups=groups, start=start, stop=stop)
        tensors.append(TensorSpec(f"{role}.weight", f"{name}.weight", (rows, columns), part=part))
        if bias is not None:
            part = Part((total,), groups=groups, start=start, stop=stop)
            tensors.append(TensorSpec(f"{role}.bias", f"{name}.bias", (rows,), required=bias, part=part))
        start = stop
    return tensors


def norm(role: str, name: str, width: int, *, bias: bool = False) -> list[TensorSpec]:
    """A norm's weight, and its bias if it has one."""
    names = ("weight", "bias") if bias else ("weight",)
    return [TensorSpec(f"{role}.{n}", f"{name}.{n}", (width,)) for n in names]
