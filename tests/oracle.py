"""A decoder's forward as a textbook has it: the twin that faster code is tested against.

    no cache, no batch, no tiles; every call computes the whole sequence, one head and one row's experts at a time

It reads the same spec and weights as the product and shares none of its arithmetic.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcore.checkpoint.weights import Weights
from kvcore.models.rope import RopeSpec
from kvcore.models.rope_table import inv_freq
from kvcore.models.spec import ActivationSpec, DecoderSpec, MlpSpec, MoeSpec, read_output, read_tensor

Floats = npt.NDArray[Any]
Turns = dict[RopeSpec | None, tuple[Floats, Floats]]


class Oracle:
    """A decoder in float32 or float64, with weights widened from what is stored."""

    def __init__(self, spec: DecoderSpec, weights: Weights, dtype: npt.DTypeLike = np.float32) -> None:
        self.spec = spec
        self.dtype = np.dtype(dtype)
        self.weights: dict[tuple[str, int | None], Floats] = {}
        for layer, tensors in ((None, spec.tensors), *((i, x.tensors) for i, x in enumerate(spec.layers))):
            for role in tensors:
                value = read_tensor(spec, weights, role, layer)
                if value is not None:
                    self.weights[role, layer] = value.astype(self.dtype)
        output = read_output(spec, weights)
        self.output = self.weights["embed_tokens.weight", None] if output is None else output.astype(self.dtype)

    def hidden_states(self, token_ids: npt.ArrayLike, context_len: int | None = None) -> list[Floats]:
        """The residual stream [T, hidden] before the first layer and after each layer."""
        ids = np.asarray(token_ids, np.int64)
        turns = self.turns(len(ids), len(ids) if context_len is None else context_len)
        x = self.weights["embed_tokens.weight", None][ids] * self.dtype.type(self.spec.embedding_scale)
        positions = self.weights.get(("position_embedding.weight", None))
        states = [x if positions is None else x + positions[: len(ids)]]
        for index, layer in enumerate(self.spec.layers):
            x = states[-1]
            scale = self.dtype.type(self.spec.residual_scale)
            attended = self.attention(self.norm(x, "input_norm", index), index, turns)
            attended = scale * self.norm(self.linear(attended, "o_proj", index), "post_attention_norm", index)
            before = x if layer.parallel else x + attended
            shared = layer.parallel and ("mlp_norm.weight", index) not in self.weights
            normed = self.norm(before, "input_norm" if shared else "mlp_norm", index)
            mlp = self.moe if isinstance(layer.mlp, MoeSpec) else self.mlp
            states.append(x + attended + scale * self.norm(mlp(normed, index, layer.mlp), "post_mlp_norm", index))
        return states

    def logits(self, token_ids: npt.ArrayLike, context_len: int | None = None, last: int | None = None) -> Floats:
        """Logits [T, vocab], or of the last few positions; ``context_len``: see ``RopeSpec``, None is all of it."""
        x = self.hidden_states(token_ids, context_len)[-1]
        logits = self.norm(x if last is None else x[-last:], "norm", None) @ self.output.T
        return self.cap(logits * self.dtype.type(self.spec.logit_scale), self.spec.logit_softcap)

    def greedy(self, token_ids: npt.ArrayLike, count: int, *, recompute: bool = False) -> list[int]:
        """Greedy continuation. ``recompute`` takes the whole sequence for the prompt at every step."""
        ids = [int(i) for i in np.asarray(token_ids)]
        prompt_len = len(ids)
        for _ in range(count):
            ids.append(int(self.logits(ids, None if recompute else prompt_len, last=1)[0].argmax()))
        return ids[prompt_len:]

    def norm(self, x: Floats, role: str, layer: int | None, *, eps: float | None = None) -> Floats:
        """The norm of this role, if the model has it; with ``eps`` a root-mean-square norm, whatever the model's."""
        weight = self.weights.get((f"{role}.weight", layer))
        if weight is None:
            return x
        spec = self.spec.norm
        if spec.kind == "layer" and eps is None:
            x = x - x.mean(axis=-1, keepdims=True)
        x = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self.dtype.type(eps or spec.eps))
        return x * (weight + self.dtype.type(0 if eps else spec.offset)) + self.weights.get((f"{role}.bias", layer), 0)

    def linear(self, x: Floats, name: str, layer: int) -> Floats:
        y = x @ self.weights[f"{name}.weight", layer].T
        bias = self.weights.get((f"{name}.bias", layer))
        return y if bias is None else y + bias

    # -- what follows attention --------------------------------------------------------------------------------------

    def mlp(self, x: Floats, layer: int, spec: Any, role: str = "") -> Floats:
        up = self.linear(x, f"{role}up_proj", layer)
        gate = self.linear(x, f"{role}gate_proj", layer) if getattr(spec, "gated", True) else None
        return self.linear(self.activation(spec.activation, gate, up), f"{role}down_proj", layer)

    def activation(self, spec: ActivationSpec, gate: Floats | None, up: Floats) -> Floats:
        if spec.name == "clamped_swiglu":
            assert gate is not None
            gate, up = np.minimum(gate, spec.limit), np.clip(up, -spec.limit, spec.limit)
            return (up + 1) * gate * sigmoid(spec.alpha * gate)
        x = up if gate is None else gate
        y = {
            "silu": lambda: x * sigmoid(x),
            "gelu": lambda: x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2,
            "gelu_tanh": lambda: x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
            "relu": lambda: np.maximum(x, 0),
        }[spec.name]().astype(self.dtype)
        return y if gate is None else y * up

    def moe(self, x: Floats, layer: int, spec: MoeSpec) -> Floats:
        router, out = spec.router, np.zeros_like(x)
        logits = self.linear(x, "router", layer)
        powers = np.exp(logits - logits.max(axis=1, keepdims=True))
        scores = sigmoid(logits) if router.scoring == "sigmoid" else powers / powers.sum(axis=1, keepdims=True)
        merits = scores + self.weights.get(("router.correction", layer), 0)
        groups = np.sort(merits.reshape(len(x), router.groups, -1), axis=2)[:, :, -router.group_best :].sum(axis=2)
        for row in range(len(x)):
            best = np.argsort(-groups[row], kind="stable")[: router.top_groups]
            size = spec.num_experts // router.groups
            open_experts = [e for e in range(spec.num_experts) if e // size in best]
            chosen = sorted(open_experts, key=lambda e: -merits[row, e])[: router.top_k]
            weights = scores[row, chosen]
            weights = weights / weights.sum() if router.renormalize else weights
            for expert, weight in zip(chosen, weights, strict=True):
                y = self.mlp(x[row : row + 1], layer, MlpSpec(spec.inner, spec.activation), f"experts.{expert}.")
                out[row] += weight * self.dtype.type(router.scale) * y[0]
        if spec.shared_inner is not None:
            shared = self.mlp(x, layer, MlpSpec(spec.shared_inner, spec.activation), "shared.")
            out += shared * sigmoid(self.linear(x, "shared_gate", layer)) if spec.shared_gate else shared
        return out

    # -- attention ---------------------------------------------------------------------------------------------------

    def attention(self, x: Floats, layer: int, turns: Turns) -> Floats:
        """What the heads say, [T, heads * width of v]."""
        spec, attention, rows = self.spec, self.spec.layers[layer].attention, len(x)
        heads = self.latent_heads if attention.latent else self.heads
        q, k, v = heads(x, layer, turns[attention.rope])
        out = np.empty((rows, spec.num_heads, v.shape[2]), self.dtype)
        at = np.arange(rows)
        unseen = at[None] > at[:, None]
        if attention.window is not None:
            unseen |= at[None] <= at[:, None] - attention.window
        for head in range(spec.num_heads):
            shared = head * k.shape[1] // spec.num_heads
            scale = spec.head_dim**-0.5 if attention.scale is None else attention.scale
            scores = self.cap(q[:, head] @ k[:, shared].T * self.dtype.type(scale), attention.softcap)
            scores[unseen] = -np.inf
            sink = np.full((rows, 1), self.weights["sinks", layer][head] if attention.sinks else -np.inf, self.dtype)
            top = np.maximum(scores.max(axis=-1, keepdims=True), sink)
            weights = np.exp(scores - top)
            out[:, head] = weights / (weights.sum(axis=-1, keepdims=True) + np.exp(sink - top)) @ v[:, shared]
        return out.reshape(rows, -1)

    def heads(self, x: Floats, layer: int, turn: tuple[Floats, Floats]) -> tuple[Floats, Floats, Floats]:
        spec, attention = self.spec, self.spec.layers[layer].attention
        q, k, v = (self.linear(x, f"{name}_proj", layer) for name in "qkv")
        if attention.qk_norm == "all":
            q, k = self.norm(q, "q_norm", layer), self.norm(k, "k_norm", layer)
        q, k, v = (y.reshape(len(x), -1, spec.head_dim) for y in (q, k, v))
        if attention.qk_norm == "head":
            q, k = self.head_norm(q, "q_norm", layer), self.head_norm(k, "k_norm", layer)
        return self.rotate(q, attention.rope, *turn), self.rotate(k, attention.rope, *turn), v

    def head_norm(self, x: Floats, role: str, layer: int) -> Floats:
        if (f"{role}.0.weight", layer) not in self.weights:
            return self.norm(x, role, layer)
        return np.stack([self.norm(x[:, head], f"{role}.{head}", layer) for head in range(x.shape[1])], axis=1)

    def latent_heads(self, x: Floats, layer: int, turn: tuple[Floats, Floats]) -> tuple[Floats, Floats, Floats]:
        """Each head's K and V, made of the compressed row."""
        attention, heads = self.spec.layers[layer].attention, self.spec.num_heads
        latent = attention.latent
        assert latent is not None
        if latent.q_rank is None:
            q = self.linear(x, "q_proj", layer)
        else:
            compressed = self.norm(self.linear(x, "q_a_proj", layer), "q_a_norm", layer, eps=latent.norm_eps)
            q = self.linear(compressed, "q_b_proj", layer)
        q = q.reshape(len(x), heads, -1)
        row = self.linear(x, "kv_a_proj", layer)
        compressed = self.norm(row[:, : latent.rank], "kv_a_norm", layer, eps=latent.norm_eps)
        k, v = (self.linear(compressed, f"{name}_b_proj", layer).reshape(len(x), heads, -1) for name in "kv")
        q_rope = self.rotate(q[..., latent.nope_dim :], attention.rope, *turn)
        k_rope = self.rotate(row[:, None, latent.rank :], attention.rope, *turn)
        q = np.concatenate([q[..., : latent.nope_dim], q_rope], axis=2)
        return q, np.concatenate([k, np.repeat(k_rope, heads, axis=1)], axis=2), v

    def cap(self, x: Floats, cap: float | None) -> Floats:
        return x if cap is None else (cap * np.tanh(x / cap)).astype(self.dtype)

    def turns(self, length: int, context_len: int) -> Turns:
        """Cosines and sines [T, rotary_dim / 2] of each rope, each row from its own frequencies."""
        none = np.empty((length, 0), self.dtype)
        turns: Turns = {None: (none, none)}
        for rope in self.spec.ropes:
            cos, sin = [], []
            for position in range(length):
                frequencies, factor = inv_freq(rope, rope.base_length(position, context_len))
                angles = (np.float32(position) * frequencies).astype(np.float64)
                cos.append(np.cos(angles) * factor)
                sin.append(np.sin(angles) * factor)
            turns[rope] = np.stack(cos).astype(self.dtype), np.stack(sin).astype(self.dtype)
        return turns

    def rotate(self, x: Floats, rope: RopeSpec | None, cos: Floats, sin: Floats) -> Floats:
        """Turn pairs of [T, heads, head_dim]: neighbours, or half of the rotated dimensions apart; the rest stays."""
        half = cos.shape[1]
        turned, rest = x[..., : 2 * half], x[..., 2 * half :]
        cos, sin = cos[:, None], sin[:, None]
        if rope is not None and rope.interleaved:
            a, b = turned[..., ::2], turned[..., 1::2]
            pairs = np.stack([a * cos - b * sin, b * cos + a * sin], axis=-1)
            return np.concatenate([pairs.reshape(turned.shape), rest], axis=-1)
        a, b = turned[..., :half], turned[..., half:]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)


def sigmoid(x: Floats) -> Floats:
    return 1 / (1 + np.exp(-x))
