"""What a model's steps have to read and to multiply: what they take at least, on a machine with given limits.

decode   reads    all packed weights (of tables the looked-up rows, of experts the chosen), and each request's cache
         products one for each weight and token; in attention head_dim + v_head_dim for each token and query head
prefill  products the same, the output matrix for the last token only, and causal: token i sees i others
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcore.models.spec import MoeSpec

if TYPE_CHECKING:
    from kvcore.llm import LLM
    from kvcore.models.spec import DecoderSpec


@dataclass(frozen=True)
class Limits:
    """What a machine can do: bytes a second that it reads, multiply-adds a second that it computes."""

    read_bandwidth: float
    product_rate: float


class Work:
    """The work of an open ``LLM``."""

    def __init__(self, llm: LLM) -> None:
        self._decoder = llm._decoder
        self._spec: DecoderSpec = self._decoder.spec
        self._cached: int = llm.cache.bytes_per_token
        self._layers: int = layer_products(self._spec)
        self._output: int = self._spec.vocab_size * self._spec.hidden_size

    def decode_bytes(self, requests: int, context: int) -> int:
        """Bytes that a step reads, each request with so many tokens of context."""
        return int(self._decoder.step_nbytes(requests)) + requests * self.cache_bytes(context)

    def cache_bytes(self, context: int) -> int:
        """Bytes of a request's cache that its next token reads; windows leave out what is behind them."""
        layers = self._spec.cache_layers()
        widths = [c.num_kv_heads * (c.head_dim + (0 if c.kind == "latent" else c.v_head_dim)) for c in layers]
        seen = [context if c.window is None else min(context, c.window) for c in layers]
        return self._cached * sum(w * n for w, n in zip(widths, seen, strict=True)) // max(sum(widths), 1)

    def decode_products(self, requests: int, context: int) -> int:
        """Multiply-adds of a step."""
        attended = sum(width * min(context, window or context) for width, window in attention_products(self._spec))
        return requests * (self._layers + self._output + attended)

    def prefill_products(self, prompt: int) -> int:
        """Multiply-adds of a prompt, up to its first token."""
        attended = 0
        for width, window in attention_products(self._spec):
            inside = min(prompt, window or prompt)
            attended += width * (inside * (inside + 1) // 2 + (prompt - inside) * inside)
        return prompt * self._layers + self._output + attended

    def decode_seconds(self, requests: int, context: int, limits: Limits) -> float:
        """The least that a step takes: reading or multiplying, whichever is longer."""
        return max(
            self.decode_bytes(requests, context) / limits.read_bandwidth,
            self.decode_products(requests, context) / limits.product_rate,
        )

    def prefill_seconds(self, prompt: int, limits: Limits) -> float:
        """The least that a prompt takes: its products."""
        return self.prefill_products(prompt) / limits.product_rate


def layer_products(spec: DecoderSpec) -> int:
    """Multiply-adds of a token in all layers, attention aside: one for each weight of a matrix that it goes through."""
    total = 0.0
    for layer in spec.layers:
        for tensor in layer.tensors.values():
            if len(tensor.shape) == 2 and tensor.required and tensor.role.endswith(".weight"):
                share = 1.0
                if isinstance(layer.mlp, MoeSpec) and tensor.role.startswith("experts."):
                    share = layer.mlp.router.top_k / layer.mlp.num_experts
                total += share * tensor.shape[0] * tensor.shape[1]
    return round(total)


def attention_products(spec: DecoderSpec) -> list[tuple[int, int | None]]:
    """For each layer: multiply-adds of a token for each token that it sees, and the window."""
    return [(spec.num_heads * (cache.head_dim + cache.v_head_dim), cache.window) for cache in spec.cache_layers()]
