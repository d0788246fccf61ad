"""A llama forward as a textbook has it: the twin that faster code is tested against.

    no cache, no batch, no tiles; every call computes the whole sequence, one head at a time

It reads the same spec and weights as the product and shares none of its arithmetic.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvcore.checkpoint.weights import Weights
from kvcore.models.rope import inv_freq
from kvcore.models.spec import ActivationSpec, DecoderSpec, read_output, read_tensor

Floats = npt.NDArray[Any]


class LlamaOracle:
    """A llama model in float32 or float64, with weights widened from what is stored."""

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

    def hidden_states(self, token_ids: npt.ArrayLike, prompt_len: int | None = None) -> list[Floats]:
        """The residual stream [T, hidden] before the first layer and after each layer."""
        ids = np.asarray(token_ids, np.int64)
        cos, sin = self.rotations(len(ids), len(ids) if prompt_len is None else prompt_len)
        states = [self.weights["embed_tokens.weight", None][ids]]
        for layer in range(self.spec.num_layers):
            x = states[-1]
            x = x + self.attention(self.norm(x, "input_norm.weight", layer), layer, cos, sin)
            x = x + self.mlp(self.norm(x, "mlp_norm.weight", layer), layer)
            states.append(x)
        return states

    def logits(self, token_ids: npt.ArrayLike, prompt_len: int | None = None, last: int | None = None) -> Floats:
        """Logits [T, vocab], or of the last few positions; ``prompt_len`` (all of it) matters to dynamic rope only."""
        x = self.hidden_states(token_ids, prompt_len)[-1]
        return self.norm(x if last is None else x[-last:], "norm.weight", None) @ self.output.T

    def greedy(self, token_ids: npt.ArrayLike, count: int, *, recompute: bool = False) -> list[int]:
        """Greedy continuation. ``recompute`` takes the whole sequence for the prompt at every step."""
        ids = [int(i) for i in np.asarray(token_ids)]
        prompt_len = len(ids)
        for _ in range(count):
            ids.append(int(self.logits(ids, None if recompute else prompt_len, last=1)[0].argmax()))
        return ids[prompt_len:]

    def norm(self, x: Floats, role: str, layer: int | None) -> Floats:
        scale = 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self.dtype.type(self.spec.norm.eps))
        return x * scale * self.weights[role, layer]

    def linear(self, x: Floats, name: str, layer: int) -> Floats:
        y = x @ self.weights[f"{name}.weight", layer].T
        bias = self.weights.get((f"{name}.bias", layer))
        return y if bias is None else y + bias

    def mlp(self, x: Floats, layer: int) -> Floats:
        assert self.spec.layers[layer].mlp.activation == ActivationSpec("silu")
        gate = self.linear(x, "gate_proj", layer)
        return self.linear(gate / (1 + np.exp(-gate)) * self.linear(x, "up_proj", layer), "down_proj", layer)

    def attention(self, x: Floats, layer: int, cos: Floats, sin: Floats) -> Floats:
        spec = self.spec
        rows = len(x)
        q = self.rotate(self.linear(x, "q_proj", layer).reshape(rows, spec.num_heads, spec.head_dim), cos, sin)
        k = self.rotate(self.linear(x, "k_proj", layer).reshape(rows, spec.num_kv_heads, spec.head_dim), cos, sin)
        v = self.linear(x, "v_proj", layer).reshape(rows, spec.num_kv_heads, spec.head_dim)
        out = np.empty_like(q)
        future = np.triu(np.ones((rows, rows), np.bool_), 1)
        for head in range(spec.num_heads):
            shared = head * spec.num_kv_heads // spec.num_heads
            scores = q[:, head] @ k[:, shared].T / self.dtype.type(spec.head_dim**0.5)
            scores[future] = -np.inf
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            out[:, head] = weights / weights.sum(axis=-1, keepdims=True) @ v[:, shared]
        return self.linear(out.reshape(rows, -1), "o_proj", layer)

    def rotations(self, length: int, prompt_len: int) -> tuple[Floats, Floats]:
        """Cosines and sines [T, rotary_dim / 2], each row from its own frequencies."""
        (rope,) = self.spec.ropes
        cos, sin = [], []
        for position in range(length):
            frequencies, factor = inv_freq(rope, rope.base_length(position, prompt_len))
            angles = (np.float32(position) * frequencies).astype(np.float64)
            cos.append(np.cos(angles) * factor)
            sin.append(np.sin(angles) * factor)
        return np.stack(cos).astype(self.dtype), np.stack(sin).astype(self.dtype)

    def rotate(self, x: Floats, cos: Floats, sin: Floats) -> Floats:
        """Turn pairs (k, k + rotary_dim / 2) of [T, heads, head_dim]; dimensions beyond rotary_dim stay."""
        half = self.spec.ropes[0].rotary_dim // 2
        a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        cos, sin = cos[:, None], sin[:, None]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)
