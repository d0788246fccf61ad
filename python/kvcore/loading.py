"""From a model's name and the options of ``LLM`` to the parts that it runs: decoder, cache, tokenizer, template.

Each part is built by one small function here, and each heavy module is imported by the function that needs it.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, fields
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvcore.engine.speculation import SpeculativeConfig
from kvcore.errors import InvalidArgument, OutOfMemory
from kvcore.memory import available_memory, total_memory

if TYPE_CHECKING:
    from kvcore._kvcore import KVCache, Threads
    from kvcore.checkpoint.config import GenerationConfig
    from kvcore.models.spec import DecoderSpec
    from kvcore.text.chat import ChatTemplate
    from kvcore.text.tokenizer import Tokenizer

DTYPE_NAMES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16", "fp8": "fp8_e4m3"}
"""Short forms, taken wherever a dtype is."""

WEIGHT_DTYPES = ("auto", "float32", "bfloat16", "float16")
KV_DTYPES = ("float32", "bfloat16", "float16", "fp8_e4m3", "fp8_e5m2", "int8", "int4")
"""What a cache can hold."""

SCALE_MODES = ("auto", "static", "per_token_head")
_DEFAULT_KV_MEMORY = 4 << 30
_WINDOWS = 64  # as many as run at once by default
_MOST_DRAWN = 4_194_301
"""Random values of a matrix before they repeat: a prime."""

# What the native core takes. Checked here, so that errors speak of the option, and none is too large to be passed on.
_MAX_BLOCKS = 2**31 - 1
_MAX_BLOCK_SIZE = 1024
_MAX_THREADS = 1024


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of ``LLM``, checked; ``LLM`` documents them.

    Raises:
        InvalidArgument: a value out of range.
        TypeError: a value of the wrong type.
    """

    dtype: str = "auto"
    quantization: str = "auto"
    mla: str = "absorbed"
    kv_cache_dtype: str = "auto"
    kv_cache_scale_mode: str = "auto"
    kv_cache_memory: int | None = None
    num_kv_blocks: int | None = None
    block_size: int = 16
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    enable_prefix_caching: bool = True
    prefix_ttl: float | None = 300.0
    prompt_cache_min_tokens: int = 1024
    swap_space: int = 0
    scheduling_policy: str = "fcfs"
    num_threads: int | None = None
    seed: int | None = None
    speculative_config: Any = None  # a dict; a SpeculativeConfig as soon as it is checked

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", _name("dtype", self.dtype, WEIGHT_DTYPES))
        object.__setattr__(self, "kv_cache_dtype", _name("kv_cache_dtype", self.kv_cache_dtype, ("auto", *KV_DTYPES)))
        _name("quantization", self.quantization, ("auto", "none", "int8", "int4"))
        _name("mla", self.mla, ("absorbed", "expanded"))
        _name("kv_cache_scale_mode", self.kv_cache_scale_mode, SCALE_MODES)
        maxima = {"block_size": _MAX_BLOCK_SIZE, "num_kv_blocks": _MAX_BLOCKS, "num_threads": _MAX_THREADS}
        for name in ("block_size", "max_num_seqs", "max_num_batched_tokens"):
            _check_integer(name, getattr(self, name), 1, maxima.get(name))
        for name in ("kv_cache_memory", "num_kv_blocks", "max_model_len", "num_threads"):
            if getattr(self, name) is not None:
                _check_integer(name, getattr(self, name), 1, maxima.get(name))
        for name in ("prompt_cache_min_tokens", "swap_space"):
            _check_integer(name, getattr(self, name), 0)
        _name("scheduling_policy", self.scheduling_policy, ("fcfs", "priority"))
        if self.seed is not None:
            _check_integer("seed", self.seed, 0)
        if self.speculative_config is not None:
            object.__setattr__(self, "speculative_config", SpeculativeConfig.from_dict(self.speculative_config))
        if self.block_size % 16 != 0:
            raise InvalidArgument(f"block_size: expected a multiple of 16, got {self.block_size}")
        if self.kv_cache_memory is not None and self.num_kv_blocks is not None:
            raise InvalidArgument("kv_cache_memory, num_kv_blocks: expected at most one of them, got both")
        if not isinstance(self.enable_prefix_caching, bool):
            raise TypeError(f"enable_prefix_caching: expected True or False, got {self.enable_prefix_caching!r}")
        ttl: Any = self.prefix_ttl
        if ttl is not None:
            if isinstance(ttl, bool) or not isinstance(ttl, (int, float)):
                raise TypeError(f"prefix_ttl: expected None or seconds, got {ttl!r}")
            if not 0 <= ttl < math.inf:
                raise InvalidArgument(f"prefix_ttl: expected None or seconds of at least 0, got {ttl!r}")

    @classmethod
    def check(cls, values: Mapping[str, Any]) -> Options:
        """Options from keyword arguments. Raises TypeError for a name that is none."""
        names = [field.name for field in fields(cls)]
        for name in values:
            if name not in names:
                raise TypeError(f"{name}: expected an option of LLM ({', '.join(names)})")
        return cls(**values)


@dataclass(frozen=True)
class Parts:
    """What an ``LLM`` is made of."""

    decoder: Any
    generation: GenerationConfig | None = None
    tokenizer: Tokenizer | None = None
    chat_template: ChatTemplate | None = None
    max_model_len: int | None = None
    name: str = "model"

    @property
    def reader(self) -> Any:
        """What reads prompts for the encoder, if there is one."""
        return self.decoder if hasattr(self.decoder, "encoder_input") else None


def load_parts(model: str | Path, options: Options) -> Parts:
    """Open a checkpoint and build everything from it.

    Raises:
        CheckpointError: the files are bad, missing or not supported.
        InvalidArgument: options that the model does not allow.
    """
    from kvcore.checkpoint.fingerprint import fingerprint
    from kvcore.checkpoint.source import open_checkpoint

    checkpoint = open_checkpoint(model)
    tokenizer = make_tokenizer(checkpoint.tokenizer_source)
    spec = make_spec(checkpoint.config, options)
    return Parts(
        make_decoder(spec, checkpoint.weights, checkpoint.config, options, fingerprint(checkpoint.path)),
        checkpoint.generation,
        tokenizer,
        make_chat_template(tokenizer) if spec.encoder is None else None,  # a text for the encoder is no conversation
        model_length(spec, options),
        str(checkpoint.name),
    )


def parts_from_config(config: Mapping[str, Any], seed: int, options: Options) -> Parts:
    """Build a model with random weights from a configuration alone; it serves token ids.

    Raises:
        CheckpointError: the configuration is bad or not supported.
        InvalidArgument: options that the model does not allow.
        OutOfMemory: a tensor or the cache does not fit.
    """
    from kvcore.checkpoint.config import GenerationConfig

    spec = make_spec(config, options)
    return Parts(
        make_decoder(spec, RandomWeights(spec, seed), config, options, f"random weights of seed {seed}, {spec!r}"),
        GenerationConfig.merge(config),
        max_model_len=model_length(spec, options),
        name=f"random {spec.family}",
    )


def make_spec(config: Mapping[str, Any], options: Options) -> DecoderSpec:
    """What the configuration describes. Raises CheckpointError."""
    from kvcore.models.families import spec_from_config

    spec = spec_from_config(config)
    return spec.expanded() if options.mla == "expanded" else spec


def make_tokenizer(source: Any) -> Tokenizer | None:
    """The tokenizer of a GGUF file's metadata or of a folder; None if it has none.

    Raises:
        CheckpointError: it has one that is damaged or not supported.
    """
    is_gguf = isinstance(source, Mapping)
    if "tokenizer.ggml.model" not in source if is_gguf else not (Path(source) / "tokenizer.json").exists():
        return None
    from kvcore.text.tokenizer import Tokenizer

    return Tokenizer.from_gguf(source) if is_gguf else Tokenizer.from_file(source)


def make_chat_template(tokenizer: Tokenizer | None, template: str | None = None) -> ChatTemplate | None:
    """The tokenizer's chat template, or ``template`` with the tokenizer's special tokens."""
    from kvcore.text.chat import ChatTemplate

    if template is not None:
        return ChatTemplate(template, special_tokens=tokenizer.special_tokens if tokenizer is not None else None)
    if tokenizer is None or tokenizer.chat_template is None:
        return None
    return ChatTemplate.from_tokenizer(tokenizer)


def make_decoder(spec: DecoderSpec, weights: Any, config: Mapping[str, Any], options: Options, fingerprint: str) -> Any:
    """The decoder with its weights packed and its cache allocated; ``fingerprint`` names the weights.

    Raises:
        OutOfMemory: its weights are more than the machine has memory; nothing was read then.
    """
    from kvcore._kvcore import Threads
    from kvcore.models.decoder import Decoder
    from kvcore.models.encoder_decoder import EncoderDecoder
    from kvcore.models.held import held_nbytes, held_quantization

    dtype = weight_dtype(config, options)
    quantization = held_quantization(options.quantization, dtype)
    held_in = f"{quantization} beside {dtype}" if quantization else dtype
    held, most = held_nbytes(spec, weights, dtype=dtype, quantization=quantization), total_memory()
    if most is not None and held > most:
        what = dtype if quantization in (None, "auto") else f"{quantization} and {dtype}"
        raise OutOfMemory(
            f"{weights.source}: expected weights of at most {most} bytes (this machine's memory and swap, or its "
            f"container's limit), got {held} bytes in {what}"
        )
    threads = Threads(options.num_threads)
    probe = make_cache(spec, dtype, options, 1, threads, "")
    blocks = num_blocks(spec, probe.bytes_per_token, options, cross_block_bytes=_cross_block_bytes(probe))
    cache = make_cache(spec, dtype, options, blocks, threads, f"{fingerprint} in {held_in}")
    kind = Decoder if spec.encoder is None else EncoderDecoder
    return kind(spec, weights, cache, dtype=dtype, quantization=quantization)


def make_cache(
    spec: DecoderSpec, dtype: str, options: Options, num_blocks: int, threads: Threads, fingerprint: str
) -> KVCache:
    """The model's cache beside weights of this dtype. Its memory becomes resident as it is used."""
    from kvcore._kvcore import KVCache, KVGroup
    from kvcore.models.shape import cache_groups

    groups = []
    for group in cache_groups(spec.cache_layers()):
        cache, layers, blocks, sizes = group.cache, group.layers, num_blocks, {}
        if cache.kind == "cross":
            layers = tuple(spec.num_layers + layer for layer in layers)
            blocks = cross_blocks(spec, options, num_blocks)
        if cache.window is not None:
            blocks = min(num_blocks, window_blocks(cache.window, options))
        if cache.kind == "latent":
            sizes = {"rank": cache.rank, "rope_dim": cache.rope_dim}
        else:
            sizes = {"num_kv_heads": cache.num_kv_heads, "head_dim": cache.head_dim, "v_head_dim": cache.v_head_dim}
        groups.append(KVGroup(cache.kind, layers, window=cache.window, num_blocks=blocks, **sizes))
    return KVCache(
        groups=groups,
        block_size=options.block_size,
        dtype=kv_cache_dtype(dtype, options),
        scale_mode=None if options.kv_cache_scale_mode == "auto" else options.kv_cache_scale_mode,
        enable_prefix_caching=options.enable_prefix_caching,
        prefix_ttl=options.prefix_ttl,
        threads=threads,
        fingerprint=fingerprint,
        spill_dir=tempfile.gettempdir() if options.swap_space else None,
        spill_bytes=options.swap_space or None,
    )


def weight_dtype(config: Mapping[str, Any], options: Options) -> str:
    """What weights are held in: "auto" is the type that they were saved in, bfloat16 if that is none of ours."""
    from kvcore.checkpoint.config import config_dtype

    if options.dtype != "auto":
        return options.dtype
    saved = config_dtype(config)
    return saved if saved in WEIGHT_DTYPES else "bfloat16"


def kv_cache_dtype(dtype: str, options: Options) -> str:
    """What the cache holds: "auto" is float32 beside float32 weights, and bfloat16 beside all others."""
    if options.kv_cache_dtype != "auto":
        return options.kv_cache_dtype
    return "float32" if dtype == "float32" else "bfloat16"


def model_length(spec: DecoderSpec, options: Options) -> int | None:
    """The most tokens of a sequence: the option, else what the model was made for, where that is a limit.

    Raises:
        InvalidArgument: the option is more than the model was made for.
    """
    limit = None if spec.takes_any_length else spec.max_position_embeddings
    if options.max_model_len is None:
        return limit
    if limit is not None and options.max_model_len > limit:
        raise InvalidArgument(
            f"max_model_len: expected at most {limit} (the model's max_position_embeddings), "
            f"got {options.max_model_len}"
        )
    return options.max_model_len


def num_blocks(spec: DecoderSpec, bytes_per_token: int, options: Options, *, cross_block_bytes: int = 0) -> int:
    """How many blocks the cache gets: the option, or as many as ``kv_cache_memory`` bytes hold.

    Without either: what ``max_num_seqs`` sequences of the full length need, but no more than 4 GiB (or what one
    such sequence needs, if that is more), and no more than half of the memory that is available. Layers with a window
    get no more than ``window_blocks``; what they leave becomes blocks of the others. Behind an encoder
    these are the blocks of the decoder's tokens; the encoder's come on top (``cross_blocks``) and are paid from the
    same memory, ``cross_block_bytes`` each.

    Raises:
        InvalidArgument: the memory does not hold a single block, or more blocks than there can be.
    """
    if options.num_kv_blocks is not None:
        return options.num_kv_blocks
    block = bytes_per_token * options.block_size
    of_sequence, of_source = _full_length(spec, options)
    source = of_source * cross_block_bytes
    pools = _Pools(spec, block, options)
    memory = options.kv_cache_memory
    if memory is None:
        sequence = pools.nbytes(of_sequence) + source
        all_of_them = pools.nbytes(options.max_num_seqs * of_sequence) + options.max_num_seqs * source
        memory = min(all_of_them, max(_DEFAULT_KV_MEMORY, sequence))
        memory = max(min(memory, available_memory() // 2), block + source)
    if memory < block + source:
        what = "one block" if not source else f"one block, and {of_source} for one input of the encoder"
        raise InvalidArgument(f"kv_cache_memory: expected at least {block + source} bytes ({what}), got {memory}")
    if memory // block > _MAX_BLOCKS:
        raise InvalidArgument(f"kv_cache_memory: expected at most {_MAX_BLOCKS * block} bytes, got {memory}")
    if not source:
        return pools.most_blocks(memory)
    return min((memory - source) // block, max(1, memory * of_sequence // (of_sequence * block + source)))


def window_blocks(window: int, options: Options) -> int:
    """The blocks that layers with such a window get at most: ``num_kv_blocks``, if that is given. Else:

    Twice what the most sequences that run at once hold in a step: a window each, which begins and ends within blocks,
    and the step's tokens. The other half keeps windows of sessions, and of prefixes that nobody uses now, which may be
    many although few run: ``_WINDOWS`` sequences count at least.
    """
    if options.num_kv_blocks is not None:
        return options.num_kv_blocks
    size = options.block_size
    of_sequence = -(-window // size) + 2
    return 2 * (max(options.max_num_seqs, _WINDOWS) * of_sequence + -(-options.max_num_batched_tokens // size))


class _Pools:
    """Bytes of a cache's pools if they have so many blocks, those of windows as far as they need them."""

    def __init__(self, spec: DecoderSpec, block: int, options: Options) -> None:
        """``block``: bytes of a block in all layers, which all keep as much of a token."""
        windows = [layer.window for layer in spec.cache_layers() if layer.kind != "cross"]
        self._layer = block // len(windows)
        self._full = block - self._layer * sum(window is not None for window in windows)
        self._most = sorted(window_blocks(window, options) for window in windows if window is not None)

    def nbytes(self, blocks: int) -> int:
        """Of all pools."""
        return blocks * self._full + sum(min(blocks, most) for most in self._most) * self._layer

    def most_blocks(self, memory: int) -> int:
        """The most blocks whose pools take no more."""
        of_a_block = self._full + len(self._most) * self._layer
        for most in self._most:  # the smallest first: once it has all of its blocks, others cost less
            if memory // of_a_block < most:
                break
            memory, of_a_block = memory - most * self._layer, of_a_block - self._layer
            if of_a_block == 0:
                return most
        return min(memory // of_a_block, _MAX_BLOCKS)


def cross_blocks(spec: DecoderSpec, options: Options, blocks: int) -> int:
    """Blocks for what encoders give beside so many for the decoder's tokens: for as many sequences, at least one."""
    of_sequence, of_source = _full_length(spec, options)
    return min(max(-(-blocks * of_source // of_sequence), of_source), _MAX_BLOCKS)


def _full_length(spec: DecoderSpec, options: Options) -> tuple[int, int]:
    """Blocks of a sequence of the full length, and of the longest input of its encoder."""
    length = model_length(spec, options) or spec.max_position_embeddings
    encoder = spec.encoder
    source = 0 if encoder is None else encoder.max_rows or encoder.stack.max_position_embeddings
    return -(-length // options.block_size), -(-source // options.block_size)


def _cross_block_bytes(probe: KVCache) -> int:
    """Bytes of a block for what encoders give, from a cache with one block in each of its other groups."""
    stats = probe.stats()
    blocks = sum(group["total"] for group in stats["groups"] if group["kind"] == "cross")
    others = probe.bytes_per_token * probe.block_size
    return (stats["bytes_total"] - others) // blocks if blocks else 0


class RandomWeights:
    """Weights that are drawn when asked for: norms are 1, biases 0, matrices normal with deviation 1 / sqrt(inputs).

    They depend on the seed and the tensor's name only. Large matrices repeat their first values, or drawing those of
    some thousand million parameters would take minutes; rows begin at different places, so that none is like another.
    """

    source = "random weights"

    def __init__(self, spec: DecoderSpec, seed: int) -> None:
        """Raises OutOfMemory for a model with a tensor that alone is more than the available memory."""
        self._seed = seed
        self._shapes = spec.required_shapes()
        available = available_memory()
        for name, shape in self._shapes.items():
            if 4 * math.prod(shape) > available:
                raise OutOfMemory(
                    f"{name}: expected a tensor of at most {available} bytes (the memory that is available), got "
                    f"{list(shape)} of float32, which are {4 * math.prod(shape)} bytes"
                )

    def __contains__(self, name: object) -> bool:
        return name in self._shapes

    def names(self) -> list[str]:
        """All names, sorted."""
        return sorted(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        """The tensor's shape."""
        return self._shapes[name]

    def dtype(self, name: str) -> np.dtype[Any]:
        """Always float32."""
        return np.dtype(np.float32)

    def get(self, name: str) -> npt.NDArray[Any]:
        """The tensor, float32."""
        shape = self._shapes[name]
        if len(shape) == 1 or "norm" in name:
            return (np.zeros if name.endswith("bias") else np.ones)(shape, np.float32)
        generator = np.random.default_rng([self._seed, *name.encode()])
        # an embedding's rows are looked up, so its inputs are its width as well
        values = generator.standard_normal(min(math.prod(shape), _MOST_DRAWN), np.float32)
        values /= np.float32(math.sqrt(shape[-1]))
        return np.resize(values, shape)

    def blocks(self, name: str) -> None:
        """None: random values are no blocks."""

    def block_kind(self, name: str) -> None:
        """None, too."""

    def unused(self) -> list[str]:
        """Nothing is ever left over."""
        return []


def _name(field: str, value: Any, allowed: tuple[str, ...]) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{field}: expected a string, got {type(value).__name__}")
    name = DTYPE_NAMES.get(value, value)
    if name not in allowed:
        raise InvalidArgument(f"{field}: expected one of {', '.join(allowed)}, got {value!r}")
    return name


def _check_integer(field: str, value: Any, minimum: int, maximum: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{field}: expected an integer, got {value!r} ({type(value).__name__})")
    if value < minimum:
        raise InvalidArgument(f"{field}: expected an integer of at least {minimum}, got {value}")
    if maximum is not None and int(value) > maximum:
        raise InvalidArgument(f"{field}: expected an integer of at most {maximum}, got {value}")
