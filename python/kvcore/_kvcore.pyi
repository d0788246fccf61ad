"""Types and documentation of the native core."""

from collections.abc import Callable as _Callable
from collections.abc import Iterable as _Iterable
from collections.abc import Sequence as _Sequence
from os import PathLike as _PathLike
from typing import Any, TypeVar, final
from typing import Literal as _Literal
from typing import overload as _overload

import numpy as np
import numpy.typing as npt

__all__ = [
    "Arena",
    "Batch",
    "KVCache",
    "KVGroup",
    "Linear",
    "Pin",
    "Sequence",
    "Threads",
    "TileView",
    "__version__",
    "activate",
    "argmax",
    "available_simd",
    "e4m3_decode",
    "e4m3_encode",
    "layer_norm",
    "linear_heads",
    "reference_attention",
    "rms_norm",
    "rope",
    "rope_split",
    "route",
    "simd",
    "softcap",
]

__version__: str

_T = TypeVar("_T")

_Floats = npt.NDArray[Any]
"""float32; float16 and ml_dtypes' bfloat16 and fp8 types are widened, other dtypes are a TypeError."""

@final
class Threads:
    """A pool of worker threads that calls share (the calling thread is one of them), and the SIMD level they run on.

    Workers start with the first parallel call, sleep when idle, and are started anew after a fork. The memory of large
    results that nobody has any more (at most 256 MiB) is kept for later ones, as long as the pool lives.
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
class Pin:
    """A prefix that ``KVCache.pin`` keeps until ``KVCache.unpin``."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the prefix."""

@final
class TileView:
    """Up to 16 tokens of a sequence in one layer, where they lie: what ``KVCache.view`` gives.

    Read-only arrays on the cache's memory, of the type that is stored: float32, float16, int8, or ml_dtypes'
    bfloat16, float8_e4m3fn, float8_e5m2. ``np.from_dlpack`` (numpy 2.1 or newer) and ``memoryview`` take those of
    numpy's own types; others' bits go as ``view.k.view("uint16")`` (bfloat16) or ``"uint8"`` (fp8).

    float32 and float16 store single values; the others store pairs, of two dimensions of K and of two tokens of V.
    ``k.reshape(num_tokens, num_kv_heads, head_dim)`` and ``v.reshape(-1, num_kv_heads, v_head_dim)`` undo the pairs,
    and copy.

    Nothing that is done to the sequence or the cache changes what the arrays show. Any of them, and any array made of
    them, keeps the block (it counts as used, and a sequence that goes on in it writes into a copy) and the memory of
    its group's whole pool, also after ``close``.
    """

    @property
    def k(self) -> npt.NDArray[Any]:
        """[num_tokens, num_kv_heads, head_dim], or with pairs [num_tokens, num_kv_heads, head_dim / 2, 2]."""

    @property
    def v(self) -> npt.NDArray[Any] | None:
        """[num_tokens, num_kv_heads, v_head_dim], or with pairs [num_tokens // 2, 2, num_kv_heads, v_head_dim].

        None in latent layers: V is the first part of K's rows.
        """

    @property
    def v_last(self) -> npt.NDArray[Any] | None:
        """V of the last token, [num_kv_heads, v_head_dim], where it is half of a pair; otherwise None."""

    @property
    def k_scale(self) -> npt.NDArray[np.float32] | None:
        """What K is to be multiplied by; None for formats without scales.

        [num_tokens, num_kv_heads] where each token has its own; of static fp8 scales a copy, [num_kv_heads].
        """

    @property
    def v_scale(self) -> npt.NDArray[np.float32] | None: ...
    @property
    def start(self) -> int:
        """Position of the first token: 16 times the index."""

    @property
    def num_tokens(self) -> int:
        """1 to 16."""

@final
class Batch:
    """Slots for the next tokens of some sequences: what ``KVCache.plan`` grants.

    It may be written and attended until a newer plan, fork, truncate or free of any of its sequences, and attended
    (but not written) after its commit. A commit with ``keep`` ends it.
    """

    @property
    def num_tokens(self) -> int:
        """New tokens of all sequences: the rows that write and attend take."""

    @property
    def positions(self) -> npt.NDArray[np.int64]:
        """Position of each row in its sequence, [num_tokens]: what rope needs. Rows of a tree may have the same."""

@final
class KVGroup:
    """Layers of a KVCache that keep K and V in the same way, with a pool of blocks of their own."""

    def __new__(
        cls,
        kind: str,
        layers: _Sequence[int],
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        v_head_dim: int | None = None,
        window: int | None = None,
        rank: int | None = None,
        rope_dim: int | None = None,
        num_blocks: int | None = None,
    ) -> KVGroup:
        """What is left out is the cache's.

        Args:
            kind: ``"full"``: all tokens. ``"sliding_window"``: a query sees the last ``window`` tokens, its own among
                them; blocks wholly before that go back to the pool. ``"latent"``: multi-head latent attention
                (DeepSeek-V2), one row of ``rank + rope_dim`` values per token, of which the first ``rank`` are V, too.
                ``"cross"``: K and V of an encoder, written once for a sequence with ``write_cross``. ``"none"``: layers
                without K and V.
            layers: which layers of the cache; every layer is in exactly one group.
            num_kv_heads, head_dim: of full, sliding and cross layers.
            v_head_dim: width of a head of V; None: ``head_dim``.
            window: of sliding layers, at least 1.
            rank, rope_dim: of latent layers.
            num_blocks: blocks of this group's pool.

        Raises:
            InvalidArgument: a size that is missing, out of range, or means nothing for this kind.
        """

    def __eq__(self, other: object, /) -> bool: ...
    @property
    def kind(self) -> str: ...
    @property
    def layers(self) -> list[int]: ...
    @property
    def num_kv_heads(self) -> int | None: ...
    @property
    def head_dim(self) -> int | None: ...
    @property
    def v_head_dim(self) -> int | None: ...
    @property
    def window(self) -> int | None: ...
    @property
    def rank(self) -> int | None: ...
    @property
    def rope_dim(self) -> int | None: ...
    @property
    def num_blocks(self) -> int | None: ...

@final
class KVCache:
    """A paged KV cache: blocks of tokens, shared by reference, copied only when one must be changed.

    One round of a model::

        seq = cache.add(token_ids)                    # reuses the longest cached prefix, to the token
        batch = cache.plan([(seq, n)])                # slots for the next n tokens
        for layer in range(num_layers):
            cache.write(layer, batch, k, v)
            out = cache.attend(layer, batch, q)
        cache.commit(batch)                           # what was written becomes findable
        cache.append(seq, [next_token])

    Calls from several threads are safe: reads (attend, read, stats, ...) run side by side, changes one at a time, each
    when the reads that run are done. Ctrl-C ends a call that waits. A signal handler may use the cache whose call it
    interrupts; what would have to wait for that call raises InvalidState. So do, in a forked child, changes of a cache
    that another thread was reading at the fork, and all calls if it was changing it. A handle that was freed, or is of
    another cache, raises InvalidHandle everywhere.

    Sources: PagedAttention (Kwon et al., 2023) for blocks, tables and copy-on-write; vLLM's block pool for the LRU
    order of unreferenced blocks; SGLang's radix tree for sharing to the token.
    """

    def __new__(
        cls,
        *,
        num_layers: int | None = None,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        num_blocks: int | None = None,
        block_size: int = 16,
        dtype: str = "bfloat16",
        k_scale: float | _Floats | None = None,
        v_scale: float | _Floats | None = None,
        scale_mode: str | None = None,
        groups: _Iterable[KVGroup | dict[str, Any]] | None = None,
        num_threads: int | None = None,
        threads: Threads | None = None,
        enable_prefix_caching: bool = True,
        min_prefix_tokens: int | None = None,
        prefix_ttl: float | None = ...,
        max_pinned_fraction: float = 0.5,
        max_rollback: int | None = None,
        max_events: int | None = None,
        spill_dir: str | _PathLike[str] | None = None,
        spill_bytes: int | None = None,
        fingerprint: str = "",
        clock: _Callable[[], float] | None = None,
        _equal_hashes: bool = False,
    ) -> KVCache:
        """Reserve the pools. Memory becomes resident as blocks are first written.

        Args:
            num_layers: layers of the cache; may be left out where ``groups`` says it.
            num_kv_heads: KV heads of each layer.
            head_dim: dimensions of a head, even, 2 to 256.
            num_blocks: blocks of the pool (of each group's that says nothing else).
            block_size: tokens of a block, a multiple of 16 up to 1024.
            dtype: float32, float16, bfloat16, fp8_e4m3, fp8_e5m2, int8 or int4; f32, f16, bf16 and fp8 for short.
            k_scale, v_scale: fp8 with static scales only: stored value = value / scale; a number, or one for each layer
                and head, [num_layers, num_kv_heads]. None: 1. See ``calibrate``.
            scale_mode: ``"static"``, or ``"per_token_head"``: a scale of its own for each token and head, from its
                largest value. None: per_token_head for int8 and int4, which know nothing else, static for the others.
            groups: layers of different kinds. None: all are full.
            num_threads: threads of a pool of its own; None: all available CPUs.
            threads: a pool to share instead.
            enable_prefix_caching: whether written tokens may be found by later sequences.
            min_prefix_tokens: a cached prefix of fewer tokens is not reused. None: 0.
            prefix_ttl: seconds that a prefix is kept after the last sequence that used it was freed; a hit renews it.
                None: no expiry. Default: 300.
            max_pinned_fraction: share of a group's blocks that may be pinned, 0 to 1.
            max_rollback: tokens that ``truncate`` may always take back from sequences with sliding windows. None: 0.
            max_events: events that are kept for ``events()``; older ones are dropped, and counted. None: 0, no events.
            spill_dir, spill_bytes: a folder and a size, both or neither: evicted prefixes go to a file there and come
                back on a hit.
            fingerprint: names the model; files that were saved under another one are refused.
            clock: seconds since any fixed point, at least 0; for tests of what expires. None: the system's monotonic
                clock.

        Raises:
            InvalidArgument: a size, dtype or scale out of range.
            OutOfMemory: the system refuses the memory.
            CheckpointError: the spill file cannot be made.
            UnsupportedSimd: KVCORE_SIMD forces a level that this CPU lacks.
        """

    def add(
        self,
        token_ids: _Sequence[int] | npt.NDArray[Any],
        salt: str | bytes | None = None,
        *,
        adapter: str | bytes | None = None,
        extra: str | bytes | None = None,
        use_prefix: bool = True,
        min_prefix_tokens: int | None = None,
        ttl: float | None = ...,
        priority: int | None = None,
    ) -> Sequence:
        """Register a sequence and take references to its longest cached prefix.

        To the token: a block that is equal only up to its middle is reused, too, and copied before the first write. At
        most all tokens but the last are reused, so that at least one is computed.

        Args:
            token_ids: 1 to 2^27 ids, 0 to 2^32 - 2.
            salt: whose tokens these are (a tenant). Sequences share blocks only if their salts are equal, and so for
                adapter and extra; None differs from an empty one.
            adapter: identity of the adapter (LoRA) that computes them; another file under the same name is another one.
            extra: what else K and V depend on, such as a hash of an image or of an encoder's input. A cache with cross
                layers shares prefixes only of sequences that say it.
            use_prefix: False neither reads nor publishes prefixes.
            min_prefix_tokens: None: the cache's.
            ttl: seconds that what this sequence publishes is kept, see ``prefix_ttl``; None: no expiry. Default: the
                cache's.
            priority: 0 to 100: where space is needed lower ones are evicted first. None: 50.

        Raises:
            InvalidArgument: no tokens, too many, or an id out of range. TypeError: not integers. OutOfMemory: the
                system refuses the memory for them; no sequence was added.
        """

    def append(self, seq: Sequence, token_ids: _Sequence[int] | npt.NDArray[Any]) -> None:
        """Add token ids that have no K and V yet, such as a sampled token; at most 2^27 at once. All or nothing."""

    def plan(
        self, items: _Iterable[tuple[Sequence, int]], parents: _Iterable[_Iterable[int] | None] | None = None
    ) -> Batch:
        """Take slots for the next n tokens of each ``(seq, n)`` that have no K and V yet, all or nothing.

        Copies that sharing demands are carried out: a block that another sequence or the prefix index can read is
        never changed where they can read it.

        Args:
            items: pairs of a sequence and n, at least 1.
            parents: for drafts that branch (speculative decoding): for each item a list with, for each of its n rows,
                the row among them that it follows, or -1 for the token before them; None for rows that follow each
                other. A row then sees the tokens before the plan and its own path; ``Batch.positions`` are those on
                the path. Such a batch is committed with ``keep``. A tree has at most 1024 rows, all trees 65536.

        Raises:
            OutOfBlocks: a pool lacks blocks; nothing was changed.
            InvalidArgument: n below 1 or above the tokens without K and V, a sequence twice, or more than 2^20 pairs;
                parents that do not fit the items, or that are not before their row.
        """

    def write(self, layer: int, batch: Batch, k: _Floats, v: _Floats | None = None) -> None:
        """Store K and V of the planned tokens in one layer.

        Args:
            layer: 0 to num_layers - 1.
            batch: from the latest plan of its sequences, not committed.
            k, v: [num_tokens, num_kv_heads, head_dim], rows in the order of the plan; float32, float16 or bfloat16 and
                the fp8 types of ml_dtypes. In latent layers k is [num_tokens, 1, rank + rope_dim] and there is no v.
                Values are rounded to nearest, ties to even; fp8 saturates at its largest value times the scale.

        Raises:
            InvalidArgument: a shape that does not fit. StaleBatch, InvalidState: a batch outside its life.
        """

    def write_cross(self, layer: int, seq: Sequence, k: _Floats, v: _Floats) -> None:
        """Store an encoder's K and V in one layer of kind cross, once for a sequence and its forks.

        The first layer that is written takes the blocks. Write all cross layers before the sequence is planned.

        Args:
            layer: one of kind cross.
            seq: the decoder's sequence.
            k, v: [encoder tokens, num_kv_heads, head_dim], as many tokens in every layer.

        Raises:
            InvalidArgument: a layer or shape that does not fit. InvalidState: written already. OutOfBlocks.
        """

    def share_cross(self, seq: Sequence, source: Sequence) -> None:
        """Give a sequence the encoder's K and V of another one with the same encoder input, as forks share them.

        Raises:
            InvalidState: the sequence has its own already, or the source has none. InvalidHandle.
        """

    @_overload
    def attend(
        self,
        layer: int,
        batch: Batch,
        q: _Floats,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
        sinks: _Floats | None = None,
        *,
        alibi_slopes: _Floats | None = None,
        position_bias: _Floats | None = None,
        bias_ahead: int | None = None,
        return_lse: _Literal[False] = False,
    ) -> npt.NDArray[np.float32]: ...
    @_overload
    def attend(
        self,
        layer: int,
        batch: Batch,
        q: _Floats,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
        sinks: _Floats | None = None,
        *,
        alibi_slopes: _Floats | None = None,
        position_bias: _Floats | None = None,
        bias_ahead: int | None = None,
        return_lse: _Literal[True],
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """Attention of the planned tokens over their sequences: softmax(q K^T * scale) V.

        A row sees its own token and what its layer keeps before it (of a tree of drafts its path, at its positions); in
        a cross layer all of the encoder's tokens. Query
        head h reads KV head h // (q heads / num_kv_heads). A row's bits depend on nothing but its query and the tokens
        that it sees: neither on the other rows, nor on how a prompt is cut, nor on the number of threads. Sequences
        whose block tables begin with the same blocks read these together, which changes no bit either. float32 and
        float16 caches are float32 throughout; all others round queries and softmax weights to bf16 (sums are float32).

        A score becomes ``s = q . k * scale``; with a softcap ``s = softcap * tanh(s / softcap)``; then a bias is added.

        Args:
            layer: a layer that this batch has written.
            batch: from the latest plan of its sequences.
            q: [num_tokens, q heads, head_dim], q heads a multiple of num_kv_heads; in latent layers
                [num_tokens, q heads, rank + rope_dim], q already multiplied by the up-projection of K.
            scale: multiplies the scores; None: 1 / sqrt(head_dim). Latent layers need it.
            window: tokens that a row sees, its own among them, where the layer keeps more. None: all.
            softcap: above 0; bends scores to stay within plus and minus this (Gemma 2). Like all numbers that scores
                are given at most 2e38.
            sinks: [q heads], a logit of each head that takes part in the softmax's sum and has no value (gpt-oss);
                -inf for none.
            alibi_slopes: [q heads], at most 1e28; slope * (token - position) is added to the scores (ALiBi, Press et
                al., 2022).
            position_bias: [q heads, n]; value [-1 - d] is added for the token d before the query's own, and value [0]
                for all from n - 1 on (T5's relative bias, as a table of distances); in cross layers value [-1] for all
                tokens behind the query's position. Not beside alibi_slopes.
            bias_ahead: how many of the last values of ``position_bias`` are for tokens ahead of the query, in cross
                layers (T5's encoder): value [-1 - bias_ahead + d] is added for the token d ahead of the query's
                position, or -d behind it, and beyond both ends of the table the value there. None: 0.
            return_lse: also return the logarithm of the sum of the exponentials of a query's scores, its sink's among
                them: what merges attention over parts of a context. Within 1e-5 in float32 and float16 caches; in all
                others it sums weights that are rounded to bf16, and is within 0.004.

        Returns:
            [num_tokens, q heads, v_head_dim]; in latent layers [num_tokens, q heads, rank]. With ``return_lse`` a pair
            of that and [num_tokens, q heads].

        Raises:
            InvalidArgument: a shape or number that does not fit. InvalidState: the layer is not written. StaleBatch.
        """

    def attention_weights(
        self,
        layer: int,
        batch: Batch,
        q: _Floats,
        index: int | None = None,
        rows: _Iterable[int] | None = None,
        heads: _Iterable[int] | None = None,
        *,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
        sinks: _Floats | None = None,
        alibi_slopes: _Floats | None = None,
        position_bias: _Floats | None = None,
        bias_ahead: int | None = None,
    ) -> npt.NDArray[np.float32]:
        """What the rows of one sequence look at: the softmax weights, for attention maps.

        A pass of its own beside ``attend``, which never holds them; it takes memory for each weight that is asked for.

        Args:
            layer, batch, q: as for ``attend``, q of the whole batch.
            index: which sequence of the batch's plan; None: the first.
            rows: indices into its new tokens; None: all.
            heads: query heads; None: all.
            scale, window, softcap, sinks, alibi_slopes, position_bias, bias_ahead: as for ``attend``.

        Returns:
            [rows, heads, tokens], tokens being all up to the sequence's last new one. Weight 0 where a row does not see
            a token. The weights of a row sum to 1, or less by the weight of its sink. In a tree of drafts the tokens
            are those of the row's path, by position.

        Raises:
            As ``attend``.
        """

    def commit(self, batch: Batch, keep: _Iterable[_Iterable[int] | None] | None = None) -> None:
        """Mark the planned tokens as computed; they can be found by later sequences. All or nothing.

        With ``keep`` only the rows of one path of each sequence: what is stored of them is moved, bit by bit, to the
        front of the new slots, other slots are given back, and the tokens of other rows are forgotten. Tokens that were
        appended behind the planned ones stay behind the path. All is then as if the paths alone had been planned and
        written. The batch ends: later calls with it raise StaleBatch.

        Args:
            keep: for each sequence of the plan the rows of a path, from one that follows the token before the plan, in
                order; of a sequence without ``parents`` its first rows. An empty list keeps none, None (not for trees)
                all. A batch with trees needs it.

        Raises:
            InvalidState: a layer was not written, or the batch was committed before. StaleBatch.
            InvalidArgument: rows that are no path, a tree without rows, or a sequence that would have no tokens left.
        """

    @_overload
    def fork(self, seq: Sequence, n: None = None) -> Sequence: ...
    @_overload
    def fork(self, seq: Sequence, n: int) -> list[Sequence]:
        """A second sequence with the same tokens that shares all blocks until one of the two writes; or ``n`` of it."""

    def reorder(self, seqs: _Iterable[Sequence], parents: _Sequence[int] | npt.NDArray[Any]) -> list[Sequence]:
        """One step of beam search: result[i] continues ``seqs[parents[i]]``.

        The first that continues a parent keeps its handle, others are forks, and those that nobody continues are freed.
        All by reference, all or nothing.

        Args:
            seqs: the beams, each once.
            parents: indices into ``seqs``, 1 to 65536 of them.

        Raises:
            InvalidArgument: no parents or too many, an index out of range, or a sequence twice. OutOfMemory.
        """

    def truncate(self, seq: Sequence, num_tokens: int) -> None:
        """Keep the first ``num_tokens`` tokens, at least 1.

        Raises:
            InvalidArgument: out of range, or deeper than a sliding window's blocks reach back (``max_rollback`` tokens
                always can be taken back).
        """

    def free(self, seq: Sequence) -> None:
        """End a sequence; what it wrote stays findable until it expires or its space is needed."""

    def mark(
        self, seq: Sequence, num_tokens: int | None = None, *, ttl: float | None = ..., priority: int | None = None
    ) -> None:
        """A breakpoint: the prefix of ``num_tokens`` tokens is kept as long as this says, at least.

        Args:
            num_tokens: None: all tokens.
            ttl, priority: as for ``add``. Parents of a block outlive it: they are kept at least as long.

        Raises:
            InvalidState: the sequence shares no prefixes: ``use_prefix=False``, prefix caching is off, or there are
                cross layers and it was added without ``extra``.
        """

    def pin(self, seq: Sequence, num_tokens: int | None = None) -> Pin:
        """Keep the K and V of a prefix until ``unpin``, also after the sequence was freed.

        Args:
            num_tokens: computed tokens of the sequence; None: all of them.

        Raises:
            PinLimit: more than ``max_pinned_fraction`` of a pool would be pinned. InvalidArgument: not computed.
            InvalidState: the sequence shares no prefixes.
        """

    def unpin(self, pin: Pin) -> None:
        """End a pin. Raises InvalidHandle for one that was ended."""

    def calibrate(self, run: _Callable[[], _T]) -> _T:
        """Static fp8 scales from what a model writes: ``cache.calibrate(lambda: llm.generate(texts))``.

        The largest |K| and |V| of each layer and head while ``run`` runs become the largest value of the format.
        Everything that was written is forgotten.

        Returns:
            What ``run`` returns.

        Raises:
            InvalidState: the cache is not empty, views of it are left, it has no static scales, or nothing was written.
        """

    def save(self, seq: Sequence, path: str | _PathLike[str]) -> None:
        """Write a sequence's tokens, K and V to a safetensors file, atomically. Raises CheckpointError."""

    def load(self, path: str | _PathLike[str]) -> Sequence:
        """A sequence from a file of ``save``; what is cached already is shared, the rest takes blocks.

        Raises:
            CheckpointError: the file is damaged, or of another model, dtype, layout or version. OutOfBlocks. No
                sequence was added then.
        """

    def save_prefixes(self, folder: str | _PathLike[str]) -> int:
        """Write all cached prefixes to a file in a folder, atomically; how many blocks. Raises CheckpointError."""

    def load_prefixes(self, folder: str | _PathLike[str]) -> int:
        """Take cached prefixes from a folder of ``save_prefixes``, as many as free blocks hold; how many blocks.

        Raises:
            CheckpointError: as for ``load``; nothing has changed then.
        """

    def read(self, layer: int, seq: Sequence, dtype: Any = None) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """What is stored: K and V of the computed tokens, dense copies [tokens, num_kv_heads, head_dim].

        In sliding layers only the last tokens, whose blocks were not returned; in latent layers V is the first part of
        K's rows; in cross layers the encoder's tokens.

        Args:
            dtype: None: float32. A numpy dtype, or float16, bfloat16, fp8_e4m3, fp8_e5m2 (of ml_dtypes): the values
                rounded to that type, which changes nothing if it is the cache's own and has no scales.
        """

    def view(self, layer: int, seq: Sequence, index: int) -> TileView:
        """Tokens ``16 * index`` to ``16 * index + 15`` of what is stored, as far as they are computed, without a copy.

        16 tokens are a tile, the unit in which they lie: the whole block if ``block_size`` is 16. In cross layers they
        are the encoder's tokens.

        Raises:
            InvalidArgument: an index without stored tokens, or before what a sliding layer keeps; int4, two values of
                which share a byte (``read`` copies). InvalidState: a batch that is not committed writes into the
                block; a cross layer is not written. InvalidHandle.
        """

    def block_table(self, seq: Sequence, group: int | None = None) -> list[int]:
        """The blocks of a sequence in the order of its tokens, -1 where a sliding window has returned one.

        Args:
            group: counts the groups but those of kind cross and none. None: the first.
        """

    def token_ids(self, seq: Sequence) -> npt.NDArray[np.int64]:
        """All token ids of a sequence."""

    def num_tokens(self, seq: Sequence) -> int:
        """Token ids of a sequence."""

    def num_computed_tokens(self, seq: Sequence) -> int:
        """Tokens of a sequence that have K and V: cached or committed."""

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes but pinned ones; sequences keep their blocks."""

    def stats(self) -> dict[str, Any]:
        """Counts over all groups, and under ``groups`` those of each, of kind cross last.

        Blocks: ``total`` = ``used`` (held by sequences or views) + ``cached`` (held by none, findable, ``pinned``
        ones among them) + ``free``; ``spilled`` blocks are in the second tier. ``tokens`` are stored for sequences in
        ``slots`` of their blocks, a shared one counted once; ``utilisation`` = tokens / slots. ``num_sequences``.
        Bytes: ``bytes_total``, ``bytes_used``, ``bytes_cached``. Since the start: ``hit_tokens`` of ``query_tokens``;
        ``evictions`` of cached blocks, ``evicted_lru`` and ``evicted_expired`` among them; ``copies`` of blocks;
        ``spills`` to the second tier and ``fetches`` from there.
        """

    def events(self) -> dict[str, Any]:
        """What happened to blocks since the last call, for a router or a monitor.

        ``events``: a list, oldest first, of dicts with ``type``: ``"stored"`` (block, group, hash, parent_hash,
        num_tokens), ``"removed"`` (block, group, hash, cause), ``"copied"`` (group, src, dst). ``dropped``: how many
        older ones there was no room for.
        """

    def snapshot(self) -> dict[str, Any]:
        """Which block holds what now: ``kvcore.viz.block_map`` draws it.

        ``block_size``; ``groups``: dicts with kind, layers, window, num_blocks and for each block ``refs``, ``filled``
        (tokens), ``pins`` (0 or 1) and ``state`` (0 vacant, 1 used, 2 cached, 3 pinned); ``sequences``: dicts with id,
        num_tokens, num_computed, num_cached, token_ids, ``tables`` (block ids for each group, -1 for returned ones),
        ``cross`` (blocks of the encoder's memory) and cross_tokens; ``copies``: the last block copies, [group, source,
        destination].
        """

    def check(self) -> None:
        """Verify every invariant. Raises InvalidState that names the broken one."""

    def close(self) -> None:
        """Give the memory back. Every later call but the sizes raises InvalidState."""

    def _fill(self, value: float) -> None:
        """Overwrite every stored value; tests poison the pool with it."""

    def _repr_html_(self) -> str: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def num_kv_heads(self) -> int:
        """Of the first group."""

    @property
    def head_dim(self) -> int:
        """Of the first group."""

    @property
    def num_blocks(self) -> int:
        """Blocks of the smallest group."""

    @property
    def block_size(self) -> int: ...
    @property
    def dtype(self) -> str:
        """The full name."""

    @property
    def scale_mode(self) -> str: ...
    @property
    def k_scale(self) -> Any:
        """The static scale; float32 [num_layers, num_kv_heads] if they differ."""

    @property
    def v_scale(self) -> Any: ...
    @property
    def groups(self) -> list[KVGroup]: ...
    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token in all layers but cross ones (V rows are padded to a multiple of 16 dimensions)."""

    @property
    def nbytes(self) -> int:
        """Bytes that are reserved."""

    @property
    def num_free_blocks(self) -> int:
        """Blocks that a plan may take: free ones, and cached ones that are not pinned. Of the group with fewest."""

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
    weights round x to bf16 (sums are float32); float32 and float16 weights are float32 arithmetic; int8 and int4
    weights round x to 8 bits, 32 values at a time with a scale of their own, and sum these 32 products exactly.
    """

    def __new__(
        cls,
        weight: _Floats | npt.NDArray[np.uint8],
        bias: _Floats | None = None,
        *,
        dtype: str = "float32",
        blocks: str | None = None,
        threads: Threads | None = None,
        arena: Arena | None = None,
    ) -> Linear:
        """Pack weights.

        Args:
            weight: [out_features, in_features] float32, float16 or bfloat16; with ``blocks`` uint8
                [out_features, bytes of a row].
            bias: [out_features].
            dtype: what weights are held in: float32, float16, bfloat16, int8 (for each 32 inputs of an output a
                float16 scale) or int4 (a float16 scale and minimum); rounded once if it cannot hold them. Of 32 weights
                that are all below 0.008 (int8) or 0.001 (int4) the scale has fewer digits, and below 4e-6 or 5e-7 none.
            blocks: that ``weight`` has GGUF's blocks of this name: Q4_0, Q4_1 or Q4_K for int4, Q5_0 or Q8_0 for int8,
                which hold them exactly but for the scales of Q4_K's groups (they are rounded to float16).
            threads: a pool to share; None: a pool of its own for all available CPUs.
            arena: memory to share; None: memory of its own.

        Raises:
            InvalidArgument: a shape, dtype or kind of blocks that does not fit, or weights too large for float16
                scales. TypeError: another array type.
        """

    @staticmethod
    def packed_nbytes(out_features: int, in_features: int, *, dtype: str = "float32", bias: bool = False) -> int:
        """``nbytes`` of a layer of this shape, without making one.

        Raises:
            InvalidArgument: a size below 1 or beyond what can be addressed, or another dtype.
        """

    def __call__(self, x: _Floats) -> npt.NDArray[np.float32]:
        """x @ W.T + b: x [rows, in_features], the result [rows, out_features]."""

    def norm_forward(
        self,
        x: _Floats,
        norm_weight: _Floats,
        eps: float,
        *,
        norm_bias: _Floats | None = None,
        norm: str = "rms",
    ) -> npt.NDArray[np.float32]:
        """norm(x) @ W.T + b: x [rows, in_features], norm_weight and norm_bias [in_features].

        Args:
            norm: ``"rms"`` or ``"layer"``, as ``rms_norm`` and ``layer_norm``.
        """

    def add_forward(self, x: _Floats, residual: npt.NDArray[np.float32]) -> None:
        """residual += x @ W.T + b, in place: x [rows, in_features], residual [rows, out_features]."""

    def gated_add_forward(
        self,
        gate_up: _Floats,
        residual: npt.NDArray[np.float32],
        activation: str = "silu",
        *,
        alpha: float = 1.702,
        limit: float = 7.0,
    ) -> None:
        """residual += (f(gate) * up) @ W.T + b, in place: gate_up [rows, 2 * in_features], gate before up.

        activation, alpha and limit are those of ``activate``.
        """

    def activated_add_forward(self, x: _Floats, residual: npt.NDArray[np.float32], activation: str) -> None:
        """residual += f(x) @ W.T + b, in place: x [rows, in_features], residual [rows, out_features]."""

    def rows(self, ids: _Sequence[int] | npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        """Rows of W as they are held, without b: float32 [ids, in_features].

        Of int8 weights these are scale * code, of int4 weights scale * code + minimum. What a file has as blocks of
        Q4_0, Q4_1, Q5_0 or Q8_0 comes back as the file's formula expands it.

        Raises:
            InvalidArgument: an id that is not below out_features. TypeError: no sequence of integers.
        """

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

def layer_norm(
    x: _Floats, weight: _Floats, bias: _Floats | None, eps: float, *, threads: Threads | None = None
) -> npt.NDArray[np.float32]:
    """weight * (x - mean(x)) / sqrt(var(x) + eps) + bias for each row: x [rows, n], weight and bias [n]."""

def linear_heads(linears: list[Linear], x: _Floats) -> npt.NDArray[np.float32]:
    """Each head of a row through a layer of its own: x [rows, heads, inputs], the result [rows, heads, outputs].

    Raises:
        InvalidArgument: layers of different sizes, or x of another shape.
    """

def rope(
    x: _Floats, cos: _Floats, sin: _Floats, *, interleaved: bool = False, threads: Threads | None = None
) -> npt.NDArray[np.float32]:
    """Rotate heads: x [rows, heads, dim], cos and sin [rows, w], of which the first 2 w dimensions of each head turn.

    Args:
        interleaved: dimensions 2 i and 2 i + 1 turn together, else i and i + w.
    """

def rope_split(
    qkv: _Floats,
    cos: _Floats,
    sin: _Floats,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    interleaved: bool = False,
    q_norm: _Floats | None = None,
    k_norm: _Floats | None = None,
    norm: str = "rms",
    norm_eps: float = 1e-6,
    joint_norm: bool = False,
    threads: Threads | None = None,
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Split joint rows, normalise q and k if weights for that are given, and rotate them.

    Args:
        qkv: [rows, (num_heads + 2 * num_kv_heads) * head_dim]: all q heads, all k heads, all v heads.
        cos, sin: [rows, w]: the first 2 w dimensions of each head turn.
        interleaved: as for ``rope``.
        q_norm, k_norm: weights of all q heads and of all k heads, [heads * head_dim]; both or none.
        norm, norm_eps: ``"rms"`` or ``"layer"``, as ``rms_norm`` and ``layer_norm``.
        joint_norm: all heads of a row together (OLMo 2), else each head alone (Qwen 3).

    Returns:
        q [rows, num_heads, head_dim], k and v [rows, num_kv_heads, head_dim].
    """

def activate(
    x: _Floats,
    activation: str = "silu",
    *,
    gated: bool = False,
    alpha: float = 1.702,
    limit: float = 7.0,
    threads: Threads | None = None,
) -> npt.NDArray[np.float32]:
    """f(x) of each value of x [rows, n]; or gated, f(gate) * up of x [rows, 2 n], each row gate before up.

    Args:
        activation: ``silu``; ``gelu``, x times the normal distribution; ``gelu_tanh``, its approximation; ``relu``;
            ``sigmoid``; or ``clamped_swiglu`` (gpt-oss, gated only): (up + 1) * gate * sigmoid(alpha * gate), gate at
            most ``limit`` and up from -limit to limit.

    Returns:
        float32 [rows, n]. Within 2e-6 of the exact function, relative to the larger of its value and the input.
    """

def softcap(x: npt.NDArray[np.float32], cap: float, *, threads: Threads | None = None) -> None:
    """x = cap * tanh(x / cap), in place: x [rows, n], cap above 0."""

def route(
    logits: _Floats,
    bias: _Floats | None = None,
    *,
    top_k: int,
    scoring: str = "softmax",
    groups: int | None = None,
    top_groups: int | None = None,
    group_best: int | None = None,
    renormalize: bool = False,
    scale: float = 1.0,
    threads: Threads | None = None,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Which experts each row goes to, and with what weights.

    Args:
        logits: [rows, experts].
        bias: [experts], added to the scores for the choice alone, not for the weights (DeepSeek-V3).
        top_k: experts of a row.
        scoring: ``softmax`` over all experts, or ``sigmoid`` of each.
        groups, top_groups: experts are in so many equal groups, and a row's may be in so many of them. None: 1.
        group_best: a group's merit is the sum of so many of its best experts'. None: 1.
        renormalize: divide a row's weights by their sum.
        scale: what the weights are multiplied by then.

    Returns:
        ids int64 [rows, top_k], ascending in each row, and weights float32 [rows, top_k].

    Raises:
        InvalidArgument: a shape or a count that does not fit.
    """

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
