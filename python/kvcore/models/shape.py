"""From a configuration to what each of its layers keeps in the cache.

    kind of a layer = layer_types[layer]                      where the file has it and the family reads it
                      else the family's rule                  every n-th layer full, the last ones sliding, ...
    row of a layer  = K and V of each KV head                 full, sliding_window, cross
                      one latent vector with its rope part    latent (MLA)

Nothing but the configuration is read. Both styles of config.json (transformers 4 and 5) give the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final, Literal

from kvcore.checkpoint.config import Config, ConfigReader
from kvcore.errors import CheckpointError

Kind = Literal["full", "sliding_window", "latent", "cross", "none"]

MAX_LAYERS: Final = 10_000
MAX_HEADS: Final = 1 << 16
MAX_HEAD_DIM: Final = 1 << 16

_MISSING: Final = object()


@dataclass(frozen=True)
class LayerCache:
    """What one layer keeps for each token.

    Attributes:
        kind: ``"full"`` keeps all tokens, ``"sliding_window"`` the last ``window`` of them, ``"latent"`` one compressed
            row for each token (MLA), ``"cross"`` the encoder's tokens (written once), ``"none"`` nothing.
        num_kv_heads: heads of K and V; 1 for a latent layer, whose row all query heads share.
        head_dim: width of a head's K; ``rank + rope_dim`` for a latent layer.
        v_head_dim: width of a head's V. A latent layer stores none: its V is the first ``rank`` dimensions of K.
        window: tokens that a query sees, itself included; None unless the layer slides.
        rank: width of the compressed part of a latent row, else None.
        rope_dim: width of the part with positions of a latent row, else None.
        layer: which decoder layer it belongs to.
    """

    kind: Kind
    num_kv_heads: int = 0
    head_dim: int = 0
    v_head_dim: int = 0
    window: int | None = None
    rank: int | None = None
    rope_dim: int | None = None
    layer: int = 0


@dataclass(frozen=True)
class CacheGroup:
    """Layers that keep the same: they share a pool of blocks and a block table.

    Attributes:
        cache: what each of them keeps; its ``layer`` is the first of them.
        layers: the decoder layers, ascending.
    """

    cache: LayerCache
    layers: tuple[int, ...]


@dataclass(frozen=True)
class Heads:
    """The heads of a model's decoder.

    Attributes:
        queries: query heads.
        kv: heads of K and V.
        k_dim: width of a K head.
        v_dim: width of a V head.
    """

    queries: int
    kv: int
    k_dim: int
    v_dim: int


def cache_layers(config: Mapping[str, Any], *, expanded: bool = False) -> list[LayerCache]:
    """What every decoder layer keeps, in the order of the layers.

    Element i is layer i's self-attention. Models with an encoder have their layers' cross-attention behind these, as
    elements of kind ``"cross"``. Encoder layers keep nothing and are not listed.

    Args:
        config: config.json of any family of ``FAMILIES``. If it has a ``text_config`` (beside a part that reads
            pictures or sound), that counts.
        expanded: as if every query head had a K and a V of its own: neither grouped heads nor a compressed row.

    Raises:
        CheckpointError: the family is not known, or a value is missing or nonsensical; names the file and the key.
    """
    config = text_config(config)
    read = ConfigReader(config)
    family = FAMILIES[read.string("model_type")]
    count = num_layers(config)
    heads = attention_heads(config)
    rank = rope_dim = None
    if family.latent:
        rank, rope_dim = latent_dims(read)
    if expanded:
        heads = replace(heads, kv=heads.queries)
        rank = rope_dim = None
    layers: list[LayerCache] = []
    for layer, window in enumerate(family.windows(config, count)):
        if rank is not None and rope_dim is not None:
            layers.append(LayerCache("latent", 1, rank + rope_dim, rank, None, rank, rope_dim, layer))
        else:
            kind: Kind = "full" if window is None else "sliding_window"
            layers.append(LayerCache(kind, heads.kv, heads.k_dim, heads.v_dim, window, layer=layer))
    if family.encoder:
        layers += [LayerCache("cross", heads.kv, heads.k_dim, heads.v_dim, layer=layer) for layer in range(count)]
    return layers


def cache_groups(layers: Sequence[LayerCache]) -> list[CacheGroup]:
    """Layers that keep the same, together; groups stand in the order of their first layers."""
    groups: dict[LayerCache, list[LayerCache]] = {}
    for cache in layers:
        groups.setdefault(replace(cache, layer=0), []).append(cache)
    return [CacheGroup(members[0], tuple(cache.layer for cache in members)) for members in groups.values()]


def text_config(config: Mapping[str, Any]) -> Config:
    """The part of a configuration that describes the language model.

    That is ``text_config`` of a model that reads pictures or sound as well, else all of it.

    Raises:
        CheckpointError: it has no ``model_type``, or one that is not known.
    """
    read = ConfigReader(config)
    inner = read.child("text_config")
    source = read.source
    if inner is not None:
        shared = {key: config[key] for key in ("dtype", "torch_dtype", "tie_word_embeddings") if key in config}
        config, source = {**shared, **config["text_config"]}, inner.source
    result = Config(config, source)
    result.pop("text_config", None)  # what comes out goes in again unchanged
    known = f"a model type that is known ({', '.join(sorted(FAMILIES))})"
    read = ConfigReader(result)
    if not read.has("model_type"):
        raise CheckpointError(f"{source}: model_type: expected {known}, got no such key")
    if read.string("model_type") not in FAMILIES:
        raise read.error("model_type", known, result["model_type"])
    return result


def num_layers(config: Mapping[str, Any]) -> int:
    """Decoder layers. Raises ``CheckpointError``."""
    read, family = _family(config)
    if family.layers == "num_decoder_layers":  # T5
        default = read.integer("num_layers", 6, maximum=MAX_LAYERS)
        return read.integer("num_decoder_layers", default, maximum=MAX_LAYERS)
    if family.num_layers is None:
        return read.integer(family.layers, maximum=MAX_LAYERS)
    return read.integer(family.layers, family.num_layers, maximum=MAX_LAYERS)


def attention_heads(config: Mapping[str, Any]) -> Heads:
    """The decoder's heads; of MLA as they are after expansion. Raises ``CheckpointError``."""
    read, family = _family(config)
    default: Any = _MISSING if family.num_heads is None else family.num_heads
    queries = _integer(read, family.heads, default, MAX_HEADS)
    if family.latent:
        k_dim = _width(read, "qk_nope_head_dim") + _width(read, "qk_rope_head_dim")
        return Heads(queries, queries, k_dim, _width(read, "v_head_dim"))
    kv = queries
    if family.grouped:
        kv = read.integer("num_key_value_heads", family.num_kv_heads or queries, maximum=MAX_HEADS)
        if queries % kv:
            raise read.error("num_key_value_heads", f"a divisor of {family.heads} ({queries})", kv)
    if family.head_dim_key is not None and read.has(family.head_dim_key):
        width = _width(read, family.head_dim_key)
    elif family.head_dim is not None and family.head_dim_key not in config:
        width = family.head_dim  # left out, as files do with a value that is the family's default
    else:
        hidden = hidden_size(config)
        if hidden % queries:
            raise read.error(family.hidden, f"a multiple of {family.heads} ({queries})", hidden)
        width = hidden // queries
        where = f"head_dim ({family.hidden} / {family.heads})"
        if width % 2:
            raise read.error(where, "an even number", width)
        if width > MAX_HEAD_DIM:
            raise read.error(where, f"an integer of at most {MAX_HEAD_DIM}", width)
    return Heads(queries, kv, width, width)


def hidden_size(config: Mapping[str, Any]) -> int:
    """Width of the residual stream. Raises ``CheckpointError``."""
    read, family = _family(config)
    default: Any = _MISSING if family.hidden_size is None else family.hidden_size
    return _integer(read, family.hidden, default)


def latent_dims(read: ConfigReader) -> tuple[int, int]:
    """Widths of the compressed part and of the part with positions. Raises ``CheckpointError``."""
    return _width(read, "kv_lora_rank"), _width(read, "qk_rope_head_dim")


def max_length(config: Mapping[str, Any]) -> int | None:
    """The most tokens of a sequence that the model was made for; None if it does not say.

    Raises:
        CheckpointError: it says something else than a number.
    """
    read, family = _family(config)
    return read.integer(family.positions, family.max_positions)


def source_length(config: Mapping[str, Any]) -> int | None:
    """The most tokens that its encoder gives; None without an encoder. Raises ``CheckpointError``."""
    read, family = _family(config)
    return read.integer(family.source_positions, 512) if family.encoder else None


# -- which layers slide ----------------------------------------------------------------------------------------------

Windows = Callable[[Config, int], "list[int | None]"]
"""From a configuration and its number of layers to each layer's window, None where it keeps everything."""


def _full(config: Config, count: int) -> list[int | None]:
    return [None] * count


def _everywhere(default: int | None) -> Windows:
    """Every layer slides if there is a window."""

    def windows(config: Config, count: int) -> list[int | None]:
        types = _layer_types(config, count)
        return [_window(config, default)] * count if types is None else _where(types, config, default)

    return windows


def _every_nth_full(default: int, period: int) -> Windows:
    """Layers slide but for every n-th; n is ``sliding_window_pattern`` where the file has it."""

    def windows(config: Config, count: int) -> list[int | None]:
        types = _layer_types(config, count)
        if types is None:
            read = ConfigReader(config)
            n = read.integer("sliding_window_pattern", read.integer("_sliding_window_pattern", period))
            types = [(layer + 1) % n != 0 for layer in range(count)]
        return _where(types, config, default)

    return windows


def _from_layer_on(first: int) -> Windows:
    """Qwen: layers from ``max_window_layers`` on, and only if ``use_sliding_window``."""

    def windows(config: Config, count: int) -> list[int | None]:
        types = _layer_types(config, count)
        read = ConfigReader(config)
        if not read.boolean("use_sliding_window", False):
            return [None] * count
        if types is None:
            start = read.integer("max_window_layers", first, minimum=0)
            types = [layer >= start for layer in range(count)]
        return _where(types, config, 4096)

    return windows


def _without_rope(config: Config, count: int) -> list[int | None]:
    """SmolLM3: the layers without rope, and only if ``use_sliding_window``."""
    types = _layer_types(config, count)
    read = ConfigReader(config)
    if not read.boolean("use_sliding_window", False) or _window(config, None) is None:
        return [None] * count
    if types is None:
        types = [not turns for turns in rope_layers(config, count)]
    return _where(types, config, None)


def rope_layers(config: Mapping[str, Any], count: int) -> list[bool]:
    """SmolLM3: whether each layer has rope: where ``no_rope_layers`` is 1, or without it, all but every n-th.

    Raises:
        CheckpointError: a value is nonsensical.
    """
    read = ConfigReader(config)
    values = layer_list(config, "no_rope_layers", count)
    if values is None:
        every = read.integer("no_rope_layer_interval", 4)
        return [(layer + 1) % every != 0 for layer in range(count)]
    for layer, value in enumerate(values):
        if value not in (0, 1):
            raise read.error(f"no_rope_layers[{layer}]", "1 (rope) or 0 (none)", value)
    return [value == 1 for value in values]


def _layer_types(config: Config, count: int) -> list[bool] | None:
    """Whether each layer slides as ``layer_types`` has it, which goes before all patterns; None if it is not there."""
    names = layer_list(config, "layer_types", count)
    for layer, name in enumerate(names or ()):
        if name not in ("full_attention", "sliding_attention"):
            expected = '"full_attention" or "sliding_attention"'
            raise ConfigReader(config).error(f"layer_types[{layer}]", expected, name)
    return None if names is None else [name == "sliding_attention" for name in names]


def _where(slides: Sequence[bool], config: Config, default: int | None) -> list[int | None]:
    """The window for the layers that slide. It is read only if one does: files name windows that nobody uses."""
    if not any(slides):
        return [None] * len(slides)
    window = _window(config, default)
    if window is None:
        raise ConfigReader(config).error("sliding_window", "a window, as there are layers that slide", None)
    return [window if slide else None for slide in slides]


def _window(config: Config, default: int | None) -> int | None:
    """``sliding_window``: the family's default if the key is missing, None if it is null."""
    return ConfigReader(config).integer("sliding_window", None if "sliding_window" in config else default)


# -- the families ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Family:
    """How a family's configuration is read.

    A default counts where the key is missing: files leave out what equals it. Without one the key must be there.

    Attributes:
        windows: which layers slide.
        layers: key of the number of decoder layers.
        heads: key of the number of query heads.
        hidden: key of the width of the residual stream.
        grouped: whether ``num_key_value_heads`` is read.
        head_dim_key: key of a head's width; None if it always follows from the others.
        head_dim: its default; None is hidden size / heads.
        num_layers, num_heads, num_kv_heads, hidden_size: other defaults.
        positions: key of the longest sequence.
        max_positions: its default.
        latent: whether K and V are compressed to one row (MLA).
        encoder: whether there is an encoder that the decoder attends to.
        source_positions: key of the encoder's longest input.
    """

    windows: Windows = _full
    layers: str = "num_hidden_layers"
    heads: str = "num_attention_heads"
    hidden: str = "hidden_size"
    grouped: bool = True
    head_dim_key: str | None = "head_dim"
    head_dim: int | None = None
    num_layers: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    hidden_size: int | None = None
    positions: str = "max_position_embeddings"
    max_positions: int | None = None
    latent: bool = False
    encoder: bool = False
    source_positions: str = "max_position_embeddings"


def _bart(**changes: Any) -> Family:
    keys = {"layers": "decoder_layers", "heads": "decoder_attention_heads", "hidden": "d_model"}
    return Family(**{**keys, "grouped": False, "head_dim_key": None, "encoder": True, **changes})


FAMILIES: Final[Mapping[str, Family]] = MappingProxyType(
    {
        "llama": Family(max_positions=2048),
        "granite": Family(max_positions=2048),
        "olmo2": Family(max_positions=2048),
        "cohere": Family(max_positions=8192),
        "stablelm": Family(max_positions=4096),
        "glm4": Family(head_dim=128),
        "mistral": Family(_everywhere(4096)),
        "mixtral": Family(_everywhere(None)),
        "phi3": Family(_everywhere(None), max_positions=4096),
        "qwen2": Family(_from_layer_on(28), max_positions=32768),
        "qwen2_moe": Family(_from_layer_on(28), max_positions=32768),
        "qwen3": Family(_from_layer_on(28), head_dim=128, max_positions=32768),
        "qwen3_moe": Family(_from_layer_on(0), max_positions=32768),
        "smollm3": Family(_without_rope, max_positions=32768),
        "gemma": Family(head_dim=256, max_positions=8192),
        "gemma2": Family(_every_nth_full(4096, 2), head_dim=256, max_positions=8192),
        "gemma3_text": Family(
            _every_nth_full(4096, 6), head_dim=256, max_positions=131072,
            num_layers=26, num_heads=8, num_kv_heads=4, hidden_size=2304,
        ),
        "cohere2": Family(_every_nth_full(4096, 4), max_positions=8192),
        "gpt_oss": Family(_every_nth_full(128, 2), head_dim=64, max_positions=131072),
        "gpt2": Family(
            layers="n_layer", heads="n_head", hidden="n_embd", grouped=False, head_dim_key=None,
            positions="n_positions", max_positions=1024,
        ),
        "gpt_neox": Family(grouped=False, head_dim_key=None, max_positions=2048),
        "deepseek_v2": Family(latent=True, max_positions=2048),
        "deepseek_v3": Family(latent=True, max_positions=4096),
        "t5": Family(
            layers="num_decoder_layers", heads="num_heads", hidden="d_model", grouped=False, head_dim_key="d_kv",
            head_dim=64, positions="n_positions", encoder=True, source_positions="n_positions",
        ),
        "bart": _bart(max_positions=1024),
        "marian": _bart(max_positions=1024),
        "whisper": _bart(positions="max_target_positions", max_positions=448, source_positions="max_source_positions"),
    }
)  # fmt: skip
"""``model_type`` to how its configuration is read. Defaults are those of transformers."""


def layer_list(config: Mapping[str, Any], key: str, count: int) -> list[Any] | None:
    """A list with an element for each layer; more of them are ignored. None if it is missing or null.

    Raises:
        CheckpointError: not a list, or too short.
    """
    value = config.get(key)
    if value is None:
        return None
    if not isinstance(value, (list, tuple)) or len(value) < count:
        raise ConfigReader(config).error(key, f"a list with an element for each of the {count} layers", value)
    return list(value[:count])


def _family(config: Mapping[str, Any]) -> tuple[ConfigReader, Family]:
    config = text_config(config)
    read = ConfigReader(config)
    return read, FAMILIES[read.string("model_type")]


def _integer(read: ConfigReader, key: str, default: Any, maximum: int = 2**31 - 1) -> int:
    value: int = (
        read.integer(key, maximum=maximum) if default is _MISSING else read.integer(key, default, maximum=maximum)
    )
    return value


def _width(read: ConfigReader, key: str) -> int:
    """The width of a head: even, since pairs of dimensions turn together."""
    value = read.integer(key, maximum=MAX_HEAD_DIM)
    if value % 2:
        raise read.error(key, "an even number", value)
    return value
