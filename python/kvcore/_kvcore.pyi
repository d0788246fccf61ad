"""Types and documentation of the native core."""

from collections.abc import Sequence as _Sequence
from typing import Any, final

import numpy as np
import numpy.typing as npt

__all__ = [
    "Arena",
    "Batch",
    "KVCache",
    "Linear",
    "Sequence",
    "Threads",
    "__version__",
    "argmax",
    "available_simd",
    "e4m3_decode",
    "e4m3_encode",
    "reference_attention",
    "rms_norm",
    "rope_split",
    "silu_mul",
    "simd",
]

__version__: str

_Floats = npt.NDArray[Any]
"""float32; float16 and ml_dtypes' bfloat16 are widened, other dtypes are a TypeError."""

@final
class Threads:
    """A pool of worker threads that calls share (the calling thread is one of them), and the SIMD level they run on.

    Workers start with the first parallel call, sleep when idle, and are started anew after a fork.
    """

    def __new__(cls, num_threads: int | None = None) -> Threads:
        """A pool; None: as many threads as CPU affinity and cgroup quota allow.

        Raises:
            InvalidArgument: fewer than 1 or more than 1024.
        """

    @property
    def num_threads(self) -> int:
        """Threads that a call may use, the calling one among them."""

    @property
    def simd(self) -> str:
        """Name of the SIMD level: what KVCORE_SIMD forced when the pool was made, or the best."""

@final
class Sequence:
    """A sequence in a KVCache: a handle that ends with ``KVCache.free``."""

    @property
    def num_cached_tokens(self) -> int:
        """Tokens whose K and V came from the prefix cache when the sequence was added."""

@final
class Batch:
    """Slots for the next tokens of some sequences: what ``KVCache.plan`` grants.

    It may be written and attended until a newer plan, fork, truncate or free of any of its sequences, and attended
    (but not written) after its commit.
    """

    @property
    def num_tokens(self) -> int:
        """New tokens of all sequences: the rows that write and attend take."""

    @property
    def positions(self) -> npt.NDArray[np.int64]:
        """Position of each row in its sequence, [num_tokens]."""

@final
class KVCache:
    """A paged KV cache: blocks of tokens, shared by reference, copied only when one must be changed.

    One round of a model::

        seq = cache.add(token_ids)                    # reuses the longest cached prefix
        batch = cache.plan([(seq, n)])                # slots for the next n tokens
        for layer in range(num_layers):
            cache.write(layer, batch, k, v)
            out = cache.attend(layer, batch, q)
        cache.commit(batch)                           # full blocks become findable
        cache.append(seq, [next_token])

    Calls from several threads are safe: reads (attend, read, stats, ...) run side by side, changes one at a time. A
    signal handler may use the cache whose call it interrupts; what would have to wait for that call raises
    InvalidState. A handle that was freed, or belongs to another cache, raises InvalidHandle everywhere.

    Sources: PagedAttention (Kwon et al., 2023) for blocks, tables and copy-on-write; vLLM's block pool for the LRU
    order of unreferenced blocks.
    """

    def __new__(
        cls,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        num_blocks: int,
        block_size: int = 16,
        dtype: str = "bfloat16",
        k_scale: float | None = None,
        v_scale: float | None = None,
        groups: None = None,
        num_threads: int | None = None,
        threads: Threads | None = None,
        enable_prefix_caching: bool = True,
        _equal_hashes: bool = False,
    ) -> KVCache:
        """Reserve a pool. Memory becomes resident as blocks are first written.

        Args:
            num_layers: layers that have a cache.
            num_kv_heads: KV heads of each layer.
            head_dim: dimensions of a head, even, 2 to 256.
            num_blocks: blocks of the pool.
            block_size: tokens of a block, a multiple of 16 up to 1024.
            dtype: float32, float16, bfloat16 or fp8_e4m3; f32, f16, bf16 and fp8 for short.
            k_scale, v_scale: fp8 only: stored value = value / scale. None: 1.
            groups: layers of different kinds; not supported yet.
            num_threads: threads of a pool of its own; None: all available CPUs.
            threads: a pool to share instead.
            enable_prefix_caching: whether full blocks may be found by later sequences.

        Raises:
            InvalidArgument: a size, dtype or scale out of range.
            OutOfMemory: the system refuses the memory.
            UnsupportedSimd: KVCORE_SIMD forces a level that this CPU lacks.
        """

    def add(
        self,
        token_ids: _Sequence[int] | npt.NDArray[Any],
        salt: str | bytes | None = None,
        *,
        use_prefix: bool = True,
    ) -> Sequence:
        """Register a sequence and take references to the blocks of its longest cached prefix.

        Whole blocks are reused, at most all tokens but the last, so that at least one is computed.

        Args:
            token_ids: at least one id.
            salt: sequences share blocks only if their salts are equal; None differs from an empty salt.
            use_prefix: False neither reads nor publishes prefixes.

        Raises:
            InvalidArgument: no tokens, or an id out of range. TypeError: not integers.
        """

    def append(self, seq: Sequence, token_ids: _Sequence[int] | npt.NDArray[Any]) -> None:
        """Add token ids that have no K and V yet, such as a sampled token."""

    def plan(self, items: _Sequence[tuple[Sequence, int]]) -> Batch:
        """Take slots for the next n tokens of each ``(seq, n)`` that have no K and V yet, all or nothing.

        Copies that sharing demands are carried out: a block that another sequence or the prefix index can read is
        never written.

        Raises:
            OutOfBlocks: the pool lacks blocks; nothing was changed.
            InvalidArgument: n below 1 or above the tokens without K and V, or a sequence twice.
        """

    def write(self, layer: int, batch: Batch, k: _Floats, v: _Floats) -> None:
        """Store K and V of the planned tokens in one layer.

        Args:
            layer: 0 to num_layers - 1.
            batch: from the latest plan of its sequences, not committed.
            k, v: [num_tokens, num_kv_heads, head_dim], rows in the order of the plan. Values are rounded to nearest,
                ties to even; fp8 saturates at 448 times its scale.

        Raises:
            InvalidArgument: a shape that does not fit. StaleBatch, InvalidState: a batch outside its life.
        """

    def attend(
        self,
        layer: int,
        batch: Batch,
        q: _Floats,
        scale: float | None = None,
        window: None = None,
        softcap: None = None,
        sinks: None = None,
    ) -> npt.NDArray[np.float32]:
        """Attention of the planned tokens over their sequences: softmax(q K^T * scale) V.

        A row sees its own token and everything before it. Query head h reads KV head h // (q heads / num_kv_heads).
        A row's bits depend on nothing but its query and the tokens that it sees: neither on the other rows, nor on
        how a prompt is cut, nor on the number of threads. bf16 and fp8 caches round queries and softmax weights to
        bf16 (sums are float32); float32 and float16 caches are float32 throughout.

        Args:
            layer: a layer that this batch has written.
            batch: from the latest plan of its sequences.
            q: [num_tokens, q heads, head_dim], q heads a multiple of num_kv_heads.
            scale: multiplies the scores; None: 1 / sqrt(head_dim).
            window, softcap, sinks: not supported yet.

        Returns:
            [num_tokens, q heads, head_dim].

        Raises:
            InvalidArgument: a shape that does not fit. InvalidState: the layer is not written. StaleBatch.
        """

    def commit(self, batch: Batch) -> None:
        """Mark the planned tokens as computed; blocks that became full can be found by later sequences.

        Raises:
            InvalidState: a layer was not written, or the batch was committed before. StaleBatch.
        """

    def fork(self, seq: Sequence) -> Sequence:
        """A second sequence with the same tokens that shares all blocks until one of the two writes."""

    def truncate(self, seq: Sequence, num_tokens: int) -> None:
        """Keep the first ``num_tokens`` tokens, at least 1."""

    def free(self, seq: Sequence) -> None:
        """End a sequence; its full blocks stay findable until their space is needed, the least recently used first."""

    def read(self, layer: int, seq: Sequence) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """What is stored: K and V of the computed tokens, dense copies [tokens, num_kv_heads, head_dim]."""

    def block_table(self, seq: Sequence) -> list[int]:
        """The blocks of a sequence in the order of its tokens."""

    def token_ids(self, seq: Sequence) -> npt.NDArray[np.int64]:
        """All token ids of a sequence."""

    def num_tokens(self, seq: Sequence) -> int:
        """Token ids of a sequence."""

    def num_computed_tokens(self, seq: Sequence) -> int:
        """Tokens of a sequence that have K and V: cached or committed."""

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes; sequences keep their blocks."""

    def stats(self) -> dict[str, int]:
        """Counts: blocks ``total`` = ``used`` (held by sequences) + ``cached`` (held by none, findable) + ``free``;
        ``num_sequences``, ``tokens`` stored for them; since the start ``hit_tokens`` of ``query_tokens``,
        ``evictions`` of cached blocks, ``copies`` of blocks.
        """

    def check(self) -> None:
        """Verify every invariant. Raises InvalidState that names the broken one."""

    def close(self) -> None:
        """Give the memory back. Every later call but the sizes raises InvalidState."""

    def _fill(self, value: float) -> None:
        """Overwrite every stored value; tests poison the pool with it."""

    @property
    def num_layers(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def dtype(self) -> str:
        """The full name."""

    @property
    def k_scale(self) -> float: ...
    @property
    def v_scale(self) -> float: ...
    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes in all layers, K and V (V rows are padded to a multiple of 16 dimensions)."""

    @property
    def nbytes(self) -> int:
        """Bytes that are reserved."""

    @property
    def num_free_blocks(self) -> int:
        """Blocks that a plan may take: free ones, and cached ones that no sequence holds."""

    @property
    def threads(self) -> Threads:
        """The pool of threads in use."""

@final
class Arena:
    """Memory that the weights of one model share: side by side on huge pages where the system has them.

    Small layers with memory of their own lie on small pages, which a product reads at half the speed. The arena may go
    before its layers.
    """

    def __new__(cls) -> Arena: ...

@final
class Linear:
    """A linear layer y = x @ W.T + b over packed weights.

    A row's bits depend on nothing but the row: neither on the other rows nor on the number of threads. bfloat16
    weights round x to bf16 (sums are float32); float32 and float16 weights are float32 arithmetic.
    """

    def __new__(
        cls,
        weight: _Floats,
        bias: _Floats | None = None,
        *,
        dtype: str = "float32",
        threads: Threads | None = None,
        arena: Arena | None = None,
    ) -> Linear:
        """Pack weights.

        Args:
            weight: [out_features, in_features] float32, float16 or bfloat16.
            bias: [out_features].
            dtype: what weights are held in: float32, float16 or bfloat16; rounded once if it cannot hold them.
            threads: a pool to share; None: a pool of its own for all available CPUs.
            arena: memory to share; None: memory of its own.

        Raises:
            InvalidArgument: a shape or dtype name that does not fit. TypeError: another array type.
        """

    def __call__(self, x: _Floats) -> npt.NDArray[np.float32]:
        """x @ W.T + b: x [rows, in_features], the result [rows, out_features]."""

    def norm_forward(self, x: _Floats, norm_weight: _Floats, eps: float) -> npt.NDArray[np.float32]:
        """rms_norm(x, norm_weight, eps) @ W.T + b: x [rows, in_features], norm_weight [in_features]."""

    def add_forward(self, x: _Floats, residual: npt.NDArray[np.float32]) -> None:
        """residual += x @ W.T + b, in place: x [rows, in_features], residual [rows, out_features]."""

    def gated_add_forward(self, gate_up: _Floats, residual: npt.NDArray[np.float32]) -> None:
        """residual += (silu(gate) * up) @ W.T + b, in place: gate_up [rows, 2 * in_features], gate before up."""

    @property
    def in_features(self) -> int: ...
    @property
    def out_features(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    @property
    def nbytes(self) -> int:
        """Bytes held, padding and bias included."""

def simd() -> str:
    """Name of the SIMD level in use: what KVCORE_SIMD forces, or the best of this CPU.

    Raises:
        UnsupportedSimd: KVCORE_SIMD names a level that is unknown or that this CPU lacks.
    """

def available_simd() -> list[str]:
    """Names of the SIMD levels that this CPU has, the best last."""

def rms_norm(x: _Floats, weight: _Floats, eps: float, *, threads: Threads | None = None) -> npt.NDArray[np.float32]:
    """weight * x / sqrt(mean(x^2) + eps) for each row: x [rows, n], weight [n]."""

def rope_split(
    qkv: _Floats,
    cos: _Floats,
    sin: _Floats,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    threads: Threads | None = None,
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Split joint rows and rotate q and k (half-split pairs, as Hugging Face's models).

    Args:
        qkv: [rows, (num_heads + 2 * num_kv_heads) * head_dim]: all q heads, all k heads, all v heads.
        cos, sin: [rows, w]: the first 2 w dimensions of each head turn.

    Returns:
        q [rows, num_heads, head_dim], k and v [rows, num_kv_heads, head_dim].
    """

def silu_mul(gate_up: _Floats, *, threads: Threads | None = None) -> npt.NDArray[np.float32]:
    """silu(gate) * up: gate_up [rows, 2 n], each row all of gate, then all of up; the result is [rows, n]."""

def argmax(row: _Floats) -> int:
    """Index of the largest value of ``row`` [n], the lowest of equal ones. Raises InvalidArgument for a NaN."""

def e4m3_encode(values: _Floats, scale: float = 1.0) -> npt.NDArray[np.uint8]:
    """fp8 e4m3 codes of values / scale: nearest, ties to even, saturating at 448; NaN stays NaN. values [n]."""

def e4m3_decode(codes: npt.NDArray[np.uint8], scale: float = 1.0) -> npt.NDArray[np.float32]:
    """Values of fp8 e4m3 codes times scale: codes [n]."""

def reference_attention(q: _Floats, k: _Floats, v: _Floats, scale: float | None = None) -> npt.NDArray[np.float32]:
    """The naive oracle, causal, with sums in float64.

    q [rows, q heads, d] belong to the last rows of k and v [tokens, kv heads, d]; the result has q's shape.
    """
