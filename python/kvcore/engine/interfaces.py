"""What the engine needs of a cache and of a model, as protocols.

The engine is written against these and nothing else, so that it runs on the native ``KVCache`` and any decoder, and
on mocks in tests.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]


class Handle(Protocol):
    """A sequence in the cache."""

    @property
    def num_cached_tokens(self) -> int:
        """How many of the first tokens were found in the prefix index when the sequence was added."""
        ...


class Cache(Protocol):
    """The paged KV cache. ``kvcore.KVCache`` documents each of these."""

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool."""
        ...

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        ...

    @property
    def num_free_blocks(self) -> int:
        """Blocks that an allocation may take: unused ones, and cached ones that no sequence references."""
        ...

    def add(
        self,
        token_ids: Any,
        salt: Any = None,
        /,
        *,
        adapter: str | None = None,
        extra: bytes | None = None,
        use_prefix: bool = True,
    ) -> Handle:
        """Register a sequence; with ``use_prefix`` it starts with the blocks of its longest cached prefix."""
        ...

    def append(self, seq: Any, token_ids: Any, /) -> None:
        """Add token ids to a sequence."""
        ...

    def plan(self, items: Any, /) -> Any:
        """Take slots for the next n tokens of each ``(handle, n)``, all or nothing."""
        ...

    def commit(self, batch: Any, keep: Any = None, /) -> None:
        """Mark a batch's tokens as computed; of an item with a list in ``keep`` only these rows, others are undone."""
        ...

    def truncate(self, seq: Any, num_tokens: int, /) -> None:
        """Keep the first ``num_tokens`` tokens of a sequence."""
        ...

    def fork(self, seq: Any, /) -> Any:
        """A second sequence with the same tokens that shares all blocks."""
        ...

    def share_cross(self, seq: Any, source: Any, /) -> None:
        """Give a sequence what another one has of its encoder. Asked only of models with one."""
        ...

    def reorder(self, seqs: Any, parents: Any, /) -> list[Any]:
        """Result i continues ``seqs[parents[i]]``; those that nobody continues are freed."""
        ...

    def mark(self, seq: Any, num_tokens: Any = None, /, *, ttl: float | None = None) -> None:
        """Ask to keep the first ``num_tokens`` tokens for ``ttl`` seconds after their last use."""
        ...

    def free(self, seq: Any, /) -> None:
        """Return a sequence's blocks."""
        ...

    def stats(self) -> Mapping[str, Any]:
        """Counts of the cache."""
        ...


class Adapter(Protocol):
    """What changes a model for the sequences that ask for it: a LoRA adapter, packed for this model."""

    @property
    def identity(self) -> str:
        """Differs for adapters that compute anything else."""
        ...


class EncoderInput(Protocol):
    """What the encoder of an encoder-decoder is given for a request."""

    @property
    def num_tokens(self) -> int:
        """Rows that the encoder makes of it, for whose keys and values the cache has blocks of their own."""
        ...

    @property
    def key(self) -> bytes:
        """Differs for inputs that differ in anything."""
        ...


class Model(Protocol):
    """A decoder that keeps its keys and values in a cache."""

    @property
    def cache(self) -> Any:
        """The ``Cache`` that ``forward`` writes to and reads from."""
        ...

    @property
    def spec(self) -> Any:
        """What the decoder is; the engine reads ``spec.vocab_size``."""
        ...

    def context_len(self, prompt_len: int, length: int, /) -> int:
        """The length that the keys of a request follow, of which this many tokens are the prompt and all.

        When it changes, what is stored of the request is of no use any more.
        """
        ...

    def prompt_salt(self, context_len: int, /) -> bytes | None:
        """What a request of this ``context_len`` adds to its block keys, where keys depend on more than the tokens."""
        ...

    def encode(self, seq: Any, source: Any, /) -> None:
        """Run the encoder and keep what it gives for a sequence of the cache. Asked only of models with one."""
        ...

    def forward(
        self,
        batch: Any,
        token_ids: IntArray,
        positions: IntArray,
        context_lens: IntArray,
        logit_rows: IntArray,
        /,
        adapters: Any = (),
        maps: Any = None,
    ) -> FloatArray:
        """Run the planned rows; logits float32 [len(logit_rows), vocab] of the rows asked for.

        ``adapters``: pairs of an adapter and the rows that have it, int64, ascending. ``maps``: a dict for each layer's
        weights of cross-attention. Both are given only where they are asked for.
        """
        ...
