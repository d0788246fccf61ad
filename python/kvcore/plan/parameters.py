"""How many parameters a model has, and where they are, from its configuration alone.

    a layer = attention + MLP (or router and experts) + norms        counted from the shapes of its tensors
    model   = embedding + layers + output matrix + the rest          an output tied to the embedding counts once

The counts are those of the tensors in a checkpoint's files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from kvcore.checkpoint.config import Config, ConfigReader
from kvcore.models.shape import (
    MAX_LAYERS,
    Heads,
    attention_heads,
    hidden_size,
    latent_dims,
    num_layers,
    text_config,
)


@dataclass(frozen=True)
class LayerParameters:
    """The parameters of one layer.

    Attributes:
        attention: its projections with biases, norms of queries and keys, and sinks; a decoder's cross-attention, too.
        mlp: the MLP, or the router with all experts.
        mlp_active: of these, what one token uses.
        norms: the norms around both.
    """

    attention: int
    mlp: int
    mlp_active: int
    norms: int


@dataclass(frozen=True)
class Parameters:
    """The parameters of a model.

    Attributes:
        embedding: the table of token embeddings.
        output: the output matrix; 0 if it is the embedding.
        other: learned positions, final norms, convolutions and the like.
        layers: the decoder's layers.
        encoder_layers: the encoder's layers.
    """

    embedding: int
    output: int
    other: int
    layers: tuple[LayerParameters, ...]
    encoder_layers: tuple[LayerParameters, ...] = ()

    @property
    def attention(self) -> int:
        """Of all layers."""
        return sum(layer.attention for layer in self.layers + self.encoder_layers)

    @property
    def mlp(self) -> int:
        """Of all layers, with all experts."""
        return sum(layer.mlp for layer in self.layers + self.encoder_layers)

    @property
    def norms(self) -> int:
        """Of all layers."""
        return sum(layer.norms for layer in self.layers + self.encoder_layers)

    @property
    def total(self) -> int:
        """Everything."""
        return self.embedding + self.output + self.other + self.attention + self.mlp + self.norms

    @property
    def active(self) -> int:
        """What one token uses: everything but the experts that were not chosen."""
        return self.total - sum(layer.mlp - layer.mlp_active for layer in self.layers + self.encoder_layers)


def count_parameters(config: Mapping[str, Any]) -> Parameters:
    """Count the parameters of a model of any family of ``models.shape.FAMILIES``.

    Layers for predicting several tokens at once (DeepSeek-V3's ``num_nextn_predict_layers``) do not count, nor do
    the parts of a model that read pictures.

    Raises:
        CheckpointError: the family is not known, or a value is missing or nonsensical; names the file and the key.
    """
    config = text_config(config)
    return _COUNTERS[ConfigReader(config).string("model_type")](config)


# -- decoders with the tensors of Llama, more or less ----------------------------------------------------------------

_Flag = bool | tuple[str, bool]
"""Yes or no, or the key that says so with its default."""


@dataclass(frozen=True)
class _Decoder:
    """What differs among decoders.

    Attributes:
        qkv_bias: whether q, k and v have biases.
        o_bias: whether the projection behind attention has.
        mlp_bias: whether the MLP has.
        gated: whether the MLP has a gate.
        norms: of a layer.
        norm_bias: whether norms have biases.
        qk_norm: of queries and keys: None, "head" (one for all heads) or "all" (one for each head).
        qk_norm_key: the key that switches it on, if there is one.
        parallel: the key that says that attention and MLP share a norm.
        tied: the default of ``tie_word_embeddings``.
        vocab: the default of ``vocab_size``, if files leave it out.
        inner: the default of ``intermediate_size``, if files leave it out.
        mlp: counts (all, active) of the MLP of each of so many layers, if it is another one.
        sinks: whether each query head has a sink.
    """

    qkv_bias: _Flag = False
    o_bias: _Flag = False
    mlp_bias: _Flag = False
    gated: bool = True
    norms: int = 2
    norm_bias: bool = False
    qk_norm: str | None = None
    qk_norm_key: str | None = None
    parallel: str | None = None
    tied: bool = False
    vocab: int | None = None
    inner: int | None = None
    mlp: Callable[[Config, int], list[tuple[int, int]]] | None = None
    sinks: bool = False

    def __call__(self, config: Config) -> Parameters:
        read = ConfigReader(config)
        hidden, heads = hidden_size(config), attention_heads(config)
        norm = 2 * hidden if self.norm_bias else hidden
        norms = self.norms - (self.parallel is not None and read.boolean(self.parallel, False))
        attention = self._attention(read, hidden, heads)
        count = num_layers(config)
        mlps = self.mlp(config, count) if self.mlp else [(self._mlp(read, hidden),) * 2] * count
        layers = tuple(LayerParameters(attention, mlp, active, norms * norm) for mlp, active in mlps)
        embedding = _vocab(read, self.vocab) * hidden
        output = 0 if read.boolean("tie_word_embeddings", self.tied) else embedding
        return Parameters(embedding, output, norm, layers)

    def _attention(self, read: ConfigReader, hidden: int, heads: Heads) -> int:
        q, kv = heads.queries * heads.k_dim, heads.kv * heads.k_dim
        count = _linear(hidden, q + 2 * kv, _flag(read, self.qkv_bias)) + _linear(q, hidden, _flag(read, self.o_bias))
        if self.qk_norm and (self.qk_norm_key is None or read.boolean(self.qk_norm_key, False)):
            count += q + kv if self.qk_norm == "all" else 2 * heads.k_dim
        return count + (heads.queries if self.sinks else 0)

    def _mlp(self, read: ConfigReader, hidden: int) -> int:
        inner = (
            read.integer("intermediate_size") if self.inner is None else read.integer("intermediate_size", self.inner)
        )
        return _mlp(hidden, inner, gated=self.gated, bias=_flag(read, self.mlp_bias))


def _mixtral(config: Config, count: int) -> list[tuple[int, int]]:
    """Router, and experts like MLPs."""
    read, hidden = ConfigReader(config), hidden_size(config)
    experts, chosen = _experts(read, ("num_local_experts",))
    expert = _mlp(hidden, read.integer("intermediate_size"))
    return [(hidden * experts + experts * expert, hidden * experts + chosen * expert)] * count


def _qwen_moe(config: Config, count: int) -> list[tuple[int, int]]:
    """Some layers have experts, of Qwen 2 a shared one behind a gate beside them."""
    read, hidden = ConfigReader(config), hidden_size(config)
    step = read.integer("decoder_sparse_step", 1)
    dense_layers = config.get("mlp_only_layers") or []
    if not isinstance(dense_layers, (list, tuple)):
        raise read.error("mlp_only_layers", "a list of layers", dense_layers)
    sparse = [(layer + 1) % step == 0 for layer in range(count)]
    for layer in dense_layers:
        if isinstance(layer, int) and 0 <= layer < count:
            sparse[layer] = False
    dense = mixed = (0, 0)
    if not all(sparse):
        dense = (_mlp(hidden, read.integer("intermediate_size")),) * 2
    if any(sparse):
        experts, chosen = _experts(read, ("num_experts", "num_local_experts"))
        expert = _mlp(hidden, read.integer("moe_intermediate_size"))
        always = hidden * experts
        if read.has("shared_expert_intermediate_size"):
            always += _mlp(hidden, read.integer("shared_expert_intermediate_size")) + hidden
        mixed = (always + experts * expert, always + chosen * expert)
    return [mixed if is_sparse else dense for is_sparse in sparse]


def _gpt_oss(config: Config, count: int) -> list[tuple[int, int]]:
    """Router and experts with biases; gate and up are one matrix."""
    read, hidden = ConfigReader(config), hidden_size(config)
    experts, chosen = _experts(read, ("num_local_experts",))
    inner = read.integer("intermediate_size")
    router = _linear(hidden, experts, True)
    expert = _linear(hidden, 2 * inner, True) + _linear(inner, hidden, True)
    return [(router + experts * expert, router + chosen * expert)] * count


def _experts(read: ConfigReader, keys: tuple[str, ...]) -> tuple[int, int]:
    """How many there are, by the first key that is there, and how many a token uses."""
    key = next((key for key in keys if read.has(key)), keys[0])
    experts = read.integer(key, maximum=1 << 20)
    return experts, read.integer("num_experts_per_tok", maximum=experts)


# -- the others ------------------------------------------------------------------------------------------------------


def _deepseek(config: Config) -> Parameters:
    """MLA: q and the compressed row go through norms of their own; first layers dense, the others with experts."""
    read, hidden, heads = ConfigReader(config), hidden_size(config), attention_heads(config)
    rank, rope_dim = latent_dims(read)
    bias = read.boolean("attention_bias", False)
    q = heads.queries * heads.k_dim
    if read.has("q_lora_rank"):
        q_rank = read.integer("q_lora_rank")
        attention = _linear(hidden, q_rank, bias) + q_rank + q_rank * q
    else:
        attention = hidden * q
    expanded = heads.queries * (heads.k_dim - rope_dim + heads.v_dim)
    attention += _linear(hidden, rank + rope_dim, bias) + rank + rank * expanded
    attention += _linear(heads.queries * heads.v_dim, hidden, bias)

    dense = _mlp(hidden, read.integer("intermediate_size"))
    mlps = [(dense, dense)] * num_layers(config)
    if read.has("n_routed_experts"):
        experts, chosen = _experts(read, ("n_routed_experts",))
        inner = read.integer("moe_intermediate_size")
        expert = _mlp(hidden, inner)
        always = hidden * experts
        if read.string("model_type") == "deepseek_v3":
            always += experts  # the correction that balances them
        if read.integer("n_shared_experts", 0, minimum=0):
            always += _mlp(hidden, inner * read.integer("n_shared_experts"))
        first, step = read.integer("first_k_dense_replace", 0, minimum=0), read.integer("moe_layer_freq", 1)
        for layer in range(first, len(mlps)):
            if layer % step == 0:
                mlps[layer] = (always + experts * expert, always + chosen * expert)
    layers = tuple(LayerParameters(attention, mlp, active, 2 * hidden) for mlp, active in mlps)
    embedding = _vocab(read) * hidden
    output = 0 if read.boolean("tie_word_embeddings", False) else embedding
    return Parameters(embedding, output, hidden, layers)


def _gpt2(config: Config) -> Parameters:
    read, hidden = ConfigReader(config), hidden_size(config)
    inner = read.integer("n_inner", 4 * hidden)
    layer = _layer(_linear(hidden, 3 * hidden, True) + _linear(hidden, hidden, True),
                   _mlp(hidden, inner, gated=False, bias=True), 2 * 2 * hidden)  # fmt: skip
    embedding = _vocab(read, 50257) * hidden
    output = 0 if read.boolean("tie_word_embeddings", True) else embedding
    other = read.integer("n_positions", 1024) * hidden + 2 * hidden
    return Parameters(embedding, output, other, (layer,) * num_layers(config))


def _t5(config: Config) -> Parameters:
    read, hidden, heads = ConfigReader(config), hidden_size(config), attention_heads(config)
    attention = 4 * hidden * heads.queries * heads.k_dim
    kind = read.string("feed_forward_proj", "relu")
    mlp = _mlp(hidden, read.integer("d_ff"), gated=kind.startswith("gated-"))
    encoder = (_layer(attention, mlp, 2 * hidden),) * read.integer("num_layers", 6, maximum=MAX_LAYERS)
    decoder = (_layer(2 * attention, mlp, 3 * hidden),) * num_layers(config)
    embedding = _vocab(read) * hidden
    # transformers 5 always writes "tied", and tells by the scale whether it is
    tied = read.boolean("tie_word_embeddings", True) and read.boolean("scale_decoder_outputs", True)
    buckets = read.integer("relative_attention_num_buckets", 32)
    other = 2 * buckets * heads.queries + 2 * hidden
    return Parameters(embedding, 0 if tied else embedding, other, decoder, encoder)


def _bart(config: Config) -> Parameters:
    """BART, and Marian with computed positions and no norm behind the embedding."""
    read, hidden = ConfigReader(config), hidden_size(config)
    attention = 4 * _linear(hidden, hidden, True)
    vocab = _vocab(read)
    embedding = vocab * hidden
    shared = read.boolean("share_encoder_decoder_embeddings", True)
    outputs = vocab if shared else read.integer("decoder_vocab_size", vocab)
    other = outputs  # final_logits_bias
    if read.string("model_type") == "bart":
        # two positions come before the first
        other += 2 * ((read.integer("max_position_embeddings", 1024) + 2) * hidden + 2 * hidden)
    elif not shared:
        other += outputs * hidden
    output = 0 if read.boolean("tie_word_embeddings", True) else outputs * hidden
    return Parameters(embedding, output, other, *_seq2seq(config, attention, attention))


def _whisper(config: Config) -> Parameters:
    """The encoder begins with two convolutions; keys have no bias."""
    read, hidden = ConfigReader(config), hidden_size(config)
    attention = 4 * _linear(hidden, hidden, True) - hidden
    embedding = _vocab(read, 51865) * hidden
    other = _linear(3 * read.integer("num_mel_bins", 80), hidden, True) + _linear(3 * hidden, hidden, True)
    positions = read.integer("max_source_positions", 1500) + read.integer("max_target_positions", 448)
    other += positions * hidden + 2 * 2 * hidden
    output = 0 if read.boolean("tie_word_embeddings", True) else embedding
    return Parameters(embedding, output, other, *_seq2seq(config, attention, attention))


def _seq2seq(
    config: Config, self_attention: int, cross_attention: int
) -> tuple[tuple[LayerParameters, ...], tuple[LayerParameters, ...]]:
    """Decoder and encoder layers with biases everywhere, as BART, Marian and Whisper have them."""
    read, hidden = ConfigReader(config), hidden_size(config)
    decoder = _layer(
        self_attention + cross_attention,
        _mlp(hidden, read.integer("decoder_ffn_dim"), gated=False, bias=True),
        3 * 2 * hidden,
    )
    encoder = _layer(
        self_attention, _mlp(hidden, read.integer("encoder_ffn_dim"), gated=False, bias=True), 2 * 2 * hidden
    )
    return (decoder,) * num_layers(config), (encoder,) * read.integer("encoder_layers", maximum=MAX_LAYERS)


_COUNTERS: Final[Mapping[str, Callable[[Config], Parameters]]] = MappingProxyType(
    {
        "llama": _Decoder(("attention_bias", False), ("attention_bias", False), ("mlp_bias", False)),
        "granite": _Decoder(("attention_bias", False), ("attention_bias", False), ("mlp_bias", False)),
        "olmo2": _Decoder(("attention_bias", False), ("attention_bias", False), qk_norm="all"),
        "cohere": _Decoder(
            ("attention_bias", False), ("attention_bias", False),
            norms=1, qk_norm="all", qk_norm_key="use_qk_norm", tied=True,
        ),
        "cohere2": _Decoder(("attention_bias", False), ("attention_bias", False), norms=1, tied=True),
        "stablelm": _Decoder(
            ("use_qkv_bias", False),
            norm_bias=True, qk_norm="all", qk_norm_key="qk_layernorm", parallel="use_parallel_residual",
        ),
        "glm4": _Decoder(("attention_bias", False), norms=4),
        "mistral": _Decoder(),
        "mixtral": _Decoder(mlp=_mixtral),
        "phi3": _Decoder(),
        "qwen2": _Decoder(True),
        "qwen2_moe": _Decoder(("qkv_bias", True), mlp=_qwen_moe),
        "qwen3": _Decoder(("attention_bias", False), ("attention_bias", False), qk_norm="head"),
        "qwen3_moe": _Decoder(("attention_bias", False), ("attention_bias", False), qk_norm="head", mlp=_qwen_moe),
        "smollm3": _Decoder(("attention_bias", False), ("attention_bias", False), ("mlp_bias", False), tied=True),
        "gemma": _Decoder(("attention_bias", False), ("attention_bias", False), tied=True),
        "gemma2": _Decoder(("attention_bias", False), ("attention_bias", False), norms=4, tied=True),
        "gemma3_text": _Decoder(
            ("attention_bias", False), ("attention_bias", False),
            norms=4, qk_norm="head", tied=True, vocab=262208, inner=9216,
        ),
        "gpt_oss": _Decoder(("attention_bias", True), ("attention_bias", True), mlp=_gpt_oss, sinks=True),
        "gpt_neox": _Decoder(
            ("attention_bias", True), ("attention_bias", True), True, gated=False, norm_bias=True
        ),
        "gpt2": _gpt2,
        "deepseek_v2": _deepseek,
        "deepseek_v3": _deepseek,
        "t5": _t5,
        "bart": _bart,
        "marian": _bart,
        "whisper": _whisper,
    }
)  # fmt: skip


def _linear(inputs: int, outputs: int, bias: bool) -> int:
    return inputs * outputs + (outputs if bias else 0)


def _mlp(hidden: int, inner: int, *, gated: bool = True, bias: bool = False) -> int:
    return _linear(hidden, inner, bias) * (2 if gated else 1) + _linear(inner, hidden, bias)


def _layer(attention: int, mlp: int, norms: int) -> LayerParameters:
    return LayerParameters(attention, mlp, mlp, norms)


def _flag(read: ConfigReader, flag: _Flag) -> bool:
    return flag if isinstance(flag, bool) else read.boolean(*flag)


def _vocab(read: ConfigReader, default: int | None = None) -> int:
    return read.integer("vocab_size") if default is None else read.integer("vocab_size", default)
