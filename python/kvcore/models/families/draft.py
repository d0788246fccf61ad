"""A spec in the making: what families have in common, sizes from a configuration first.

    draft = Draft(config)                              the sizes, checked
    attention = draft.attention(rope, ...)             of each layer
    layers = draft.llama_layers(attention, mlp, ...)   each with its tensors, by Llama's names
    spec = draft.spec(layers, norm, ...)               the whole

Where tensors have other names or are stored otherwise, ``draft.layers`` takes a function that lists them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Literal

from kvcore.checkpoint.config import ConfigReader
from kvcore.models.families.layout import IGNORED, LAYER, NORMS, QKV, by_role, gated_mlp, linear, norm
from kvcore.models.rope import RopeSpec
from kvcore.models.shape import attention_heads, cache_layers, hidden_size, max_length, num_layers
from kvcore.models.spec import ActivationSpec, AttentionSpec, DecoderSpec, LayerSpec, MlpSpec, MoeSpec, NormSpec
from kvcore.models.tensors import TensorSpec

ACTIVATIONS: Final = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
}
"""transformers' names of activations to the native core's."""

MAX_HEAD_DIM: Final = 256
"""The widest head that the native cache holds."""

Mlp = MlpSpec | MoeSpec


class Draft:
    """The sizes that a configuration gives, and a spec in the making.

    Attributes:
        config: the configuration.
        read: asks it for more.
        hidden: width of the residual stream.
        heads: query heads, K and V heads and their widths.
        num_layers: decoder layers.
        windows: of each layer; None where it keeps all tokens.
        positions: positions that the model was made for.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Read and check them.

        Raises:
            CheckpointError: names the file and key, what was expected and what came.
        """
        self.config = config
        self.read = ConfigReader(config)
        self.hidden = hidden_size(config)
        self.heads = attention_heads(config)
        self.num_layers = num_layers(config)
        self.windows = [layer.window for layer in cache_layers(config)]
        self.positions = max_length(config) or self.read.integer("max_position_embeddings")
        if max(self.heads.k_dim, self.heads.v_dim) > MAX_HEAD_DIM:
            given = self.read.has("head_dim")
            where = "head_dim" if given else "head_dim (hidden_size / num_attention_heads)"
            raise self.read.error(where, f"an integer of at most {MAX_HEAD_DIM}", self.heads.k_dim)

    def activation(self, key: str = "hidden_act", default: str = "silu") -> ActivationSpec:
        """The MLP's activation. Raises ``CheckpointError`` for one that is not known."""
        name = self.read.string(key, default)
        if name not in ACTIVATIONS:
            raise self.read.error(key, f"one of {', '.join(ACTIVATIONS)}", name)
        return ActivationSpec(ACTIVATIONS[name])

    def attention(
        self,
        rope: RopeSpec | Sequence[RopeSpec | None] | None,
        *,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: bool = False,
        qk_norm: Literal["head", "all"] | None = None,
    ) -> list[AttentionSpec]:
        """Each layer's attention. ``rope`` is one for all or each layer's."""
        ropes = rope if isinstance(rope, Sequence) else [rope] * self.num_layers
        return [
            AttentionSpec(scale, rope, window, softcap, sinks, qk_norm)
            for rope, window in zip(ropes, self.windows, strict=True)
        ]

    def mlp(self, activation: ActivationSpec | None = None, *, gated: bool = True) -> MlpSpec:
        """The dense MLP."""
        return MlpSpec(self.read.integer("intermediate_size"), activation or self.activation(), gated)

    def attention_tensors(self, *, qkv_bias: bool = False, o_bias: bool = False) -> list[TensorSpec]:
        """The four projections, with biases that must be there, or are used if they are."""
        h = self.heads
        q, kv, o = h.queries * h.k_dim, h.kv * h.k_dim, h.queries * h.v_dim
        tensors: list[TensorSpec] = []
        for role, rows in zip(QKV, (q, kv, h.kv * h.v_dim), strict=True):
            tensors += linear(role, f"{LAYER}self_attn.{role}", rows, self.hidden, qkv_bias)
        return tensors + linear("o_proj", LAYER + "self_attn.o_proj", self.hidden, o, o_bias)

    def mlp_tensors(self, inner: int, *, bias: bool = False) -> list[TensorSpec]:
        """Gate, up and down."""
        return gated_mlp("", LAYER + "mlp.", self.hidden, inner, bias)

    def qk_norm_tensors(self, *, joint: bool = False) -> list[TensorSpec]:
        """The norms of queries and keys, of a width of all heads together or of one."""
        h = self.heads
        widths = (h.queries * h.k_dim, h.kv * h.k_dim) if joint else (h.k_dim, h.k_dim)
        names = ("q_norm", "k_norm")
        return [t for n, width in zip(names, widths, strict=True) for t in norm(n, f"{LAYER}self_attn.{n}", width)]

    def norm_tensors(self, names: Mapping[str, str] = NORMS, *, bias: bool = False) -> list[TensorSpec]:
        """The norms of a layer, by role."""
        return [t for role, name in names.items() for t in norm(role, LAYER + name, self.hidden, bias=bias)]

    def layers(
        self,
        attention: Sequence[AttentionSpec],
        mlp: Mlp | Sequence[Mlp],
        tensors: Callable[[Mlp], Iterable[TensorSpec]],
        *,
        parallel: bool = False,
    ) -> tuple[LayerSpec, ...]:
        """The layers. ``tensors`` says which a layer with this MLP has; it is asked once for layers that are alike."""
        mlps = mlp if isinstance(mlp, Sequence) else [mlp] * self.num_layers
        of: dict[Mlp, Mapping[str, TensorSpec]] = {m: by_role(tensors(m)) for m in dict.fromkeys(mlps)}
        return tuple(LayerSpec(a, m, of[m], parallel) for a, m in zip(attention, mlps, strict=True))

    def llama_layers(
        self,
        attention: Sequence[AttentionSpec],
        mlp: MlpSpec,
        *,
        norms: Mapping[str, str] = NORMS,
        qkv_bias: bool = False,
        o_bias: bool = False,
        mlp_bias: bool = False,
        norm_bias: bool = False,
        parallel: bool = False,
    ) -> tuple[LayerSpec, ...]:
        """Layers with Llama's tensors, and the norms that there are."""
        qk_norm = attention[0].qk_norm

        def tensors(_: Mlp) -> Iterable[TensorSpec]:
            yield from self.norm_tensors(norms, bias=norm_bias)
            yield from self.attention_tensors(qkv_bias=qkv_bias, o_bias=o_bias)
            if qk_norm is not None:
                yield from self.qk_norm_tensors(joint=qk_norm == "all")
            yield from self.mlp_tensors(mlp.inner, bias=mlp_bias)

        return self.layers(attention, mlp, tensors, parallel=parallel)

    def spec(
        self,
        layers: tuple[LayerSpec, ...],
        norm_spec: NormSpec,
        *,
        tied: bool = False,
        vocab: int | None = None,
        norm_bias: bool = False,
        names: tuple[str, str, str] = ("model.embed_tokens", "model.norm", "lm_head"),
        more: Iterable[TensorSpec] = (),
        ignored: tuple[str, ...] = IGNORED,
        **values: Any,
    ) -> DecoderSpec:
        """The whole model.

        Args:
            layers: its layers.
            norm_spec: how it normalises.
            tied, vocab: defaults of ``tie_word_embeddings`` and ``vocab_size``.
            norm_bias: whether the last norm has one.
            names: of the embedding, the last norm and the output matrix.
            more: other tensors outside of the layers.
            ignored: see ``DecoderSpec.ignored_tensors``.
            values: its other attributes.
        """
        size = self.read.integer("vocab_size") if vocab is None else self.read.integer("vocab_size", vocab)
        tied = self.read.boolean("tie_word_embeddings", tied)
        embedding, last_norm, output = names
        return DecoderSpec(
            family=self.read.string("model_type"),
            vocab_size=size,
            hidden_size=self.hidden,
            num_heads=self.heads.queries,
            num_kv_heads=self.heads.kv,
            head_dim=self.heads.k_dim,
            norm=norm_spec,
            layers=layers,
            max_position_embeddings=self.positions,
            tie_word_embeddings=tied,
            tensors=by_role(
                [
                    TensorSpec("embed_tokens.weight", f"{embedding}.weight", (size, self.hidden)),
                    *norm("norm", last_norm, self.hidden, bias=norm_bias),
                    TensorSpec("lm_head.weight", f"{output}.weight", (size, self.hidden), required=not tied),
                    *more,
                ]
            ),
            ignored_tensors=ignored,
            **values,
        )


def expert_counts(read: ConfigReader, *keys: str, default: tuple[int, int]) -> tuple[int, int]:
    """How many experts there are, by the first key that is there, and how many a token uses."""
    key = next((key for key in keys if read.has(key)), keys[0])
    experts = read.integer(key, default[0], maximum=1 << 14)
    return experts, read.integer("num_experts_per_tok", min(default[1], experts), maximum=experts)


def refuse(read: ConfigReader, key: str) -> None:
    """Raise ``CheckpointError`` if the configuration asks for something that there is not."""
    if read.boolean(key, False):
        raise read.error(key, "false (nothing else is supported)", True)


def layer_norm(read: ConfigReader, key: str = "layer_norm_eps", default: float = 1e-5) -> NormSpec:
    """LayerNorms with this eps."""
    return NormSpec("layer", read.number(key, default))


def rms(read: ConfigReader, default: float = 1e-6, *, offset: float = 0.0) -> NormSpec:
    """Root-mean-square norms with ``rms_norm_eps``."""
    return NormSpec("rms", read.number("rms_norm_eps", default), offset)
