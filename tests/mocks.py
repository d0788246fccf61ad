"""A cache and a decoder without arithmetic worth the name, for tests of everything above them.

``MockCache`` has the interface of ``kvcore.KVCache``: blocks with reference counts, reuse of whole cached blocks, all
or nothing planning, and one number per token slot in place of keys and values. ``MockDecoder`` computes logits as a
hash of all numbers that it reads back through the block table. So a wrong table, a block that was freed too early or a
slot that was never written changes the tokens.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvcore.errors import InvalidArgument, InvalidHandle, InvalidState, OutOfBlocks, StaleBatch

_PRIME = 2_147_483_647


@dataclass(eq=False)
class MockSequence:
    owner: MockCache
    token_ids: list[int]
    salt: bytes | None
    use_prefix: bool
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_cached_tokens: int = 0
    version: int = 0
    freed: bool = False


@dataclass(frozen=True, eq=False)
class MockRow:
    seq: MockSequence
    start: int
    len: int
    blocks: tuple[int, ...]
    version: int


@dataclass(eq=False)
class MockBatch:
    rows: list[MockRow]
    committed: bool = False


class MockCache:
    """``fail`` maps the name of a method to a function that is called first, and may raise."""

    def __init__(self, num_blocks: int, block_size: int = 4, *, enable_prefix_caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.bytes_per_token = 8
        self.fail: dict[str, Callable[[], None]] = {}
        self._prefix = enable_prefix_caching
        self._slots = np.full((num_blocks, block_size), -1, np.int64)
        self._refs = [0] * num_blocks
        self._free = list(range(num_blocks))
        self._cached: OrderedDict[int, None] = OrderedDict()  # unreferenced but findable, oldest first
        self._key_of: dict[int, Any] = {}
        self._block_of: dict[Any, int] = {}
        self._sequences: set[MockSequence] = set()
        self.calls: Counter[str] = Counter()
        self.marks: list[tuple[tuple[int, ...], float | None]] = []

    @property
    def num_free_blocks(self) -> int:
        return len(self._free) + len(self._cached)

    def add(self, token_ids: Any, salt: Any = None, *, use_prefix: bool = True) -> MockSequence:
        self._call("add")
        if len(token_ids) == 0:
            raise InvalidArgument("token_ids: expected at least one, got none")
        seq = MockSequence(self, [int(t) for t in token_ids], salt, use_prefix and self._prefix)
        if seq.use_prefix:
            for i in range((len(seq.token_ids) - 1) // self.block_size):
                block = self._block_of.get(self._key(seq, i))
                if block is None:
                    break
                self._cached.pop(block, None)
                self._refs[block] += 1
                seq.blocks.append(block)
        seq.num_cached_tokens = seq.num_computed = len(seq.blocks) * self.block_size
        self._sequences.add(seq)
        return seq

    def append(self, seq: MockSequence, token_ids: Any) -> None:
        self._call("append")
        self._alive(seq).token_ids.extend(token_ids)

    def plan(self, items: list[tuple[MockSequence, int]]) -> MockBatch:
        self._call("plan")
        if len({id(seq) for seq, _ in items}) != len(items) or not items:
            raise InvalidArgument("plan: expected sequences, each once")
        wanted = []
        for seq, n in items:
            if not 1 <= n <= len(self._alive(seq).token_ids) - seq.num_computed:
                raise InvalidArgument(f"plan: expected 1 to {len(seq.token_ids) - seq.num_computed} tokens, got {n}")
            wanted.append(max(0, -(-(seq.num_computed + n) // self.block_size) - len(seq.blocks)))
            wanted[-1] += self._shares_last(seq)
        if sum(wanted) > self.num_free_blocks:
            raise OutOfBlocks(f"{sum(wanted)} blocks needed, {self.num_free_blocks} available of {self.num_blocks}")
        rows = []
        for seq, n in items:
            if self._shares_last(seq):
                source = seq.blocks[-1]
                seq.blocks[-1] = self._allocate()
                self._refs[source] -= 1
                self._slots[seq.blocks[-1]] = self._slots[source]
            while len(seq.blocks) < -(-(seq.num_computed + n) // self.block_size):
                seq.blocks.append(self._allocate())
            seq.version += 1
            used = -(-(seq.num_computed + n) // self.block_size)
            rows.append(MockRow(seq, seq.num_computed, n, tuple(seq.blocks[:used]), seq.version))
        return MockBatch(rows)

    def write(self, layer: int, batch: MockBatch, k: np.ndarray, v: np.ndarray) -> None:
        self._call("write")
        self._fresh(batch)
        if batch.committed:
            raise InvalidState("write: batch is committed")
        assert layer == 0
        assert len(k) == len(v) == sum(row.len for row in batch.rows)
        at = 0
        for row in batch.rows:
            for position in range(row.start, row.start + row.len):
                block = row.blocks[position // self.block_size]
                assert self._refs[block] == 1, "a write into a shared block"
                assert block not in self._key_of, "a write into a block that can be found"
                self._slots[block, position % self.block_size] = k[at]
                at += 1

    def attend(self, layer: int, batch: MockBatch, q: np.ndarray, scale: float | None = None) -> np.ndarray:
        """For each row a hash of all slots up to its own position."""
        self._call("attend")
        self._fresh(batch)
        assert layer == 0
        out: list[np.ndarray] = []
        for row in batch.rows:
            end = row.start + row.len
            values = self._slots[list(row.blocks)].reshape(-1)[:end]
            assert (values >= 0).all(), "a slot was read that nobody wrote"
            weights = np.arange(1, end + 1) * 40_503 % 65_521
            out.append((np.cumsum(values * weights % _PRIME) % _PRIME)[row.start :])
        return np.concatenate(out)

    def commit(self, batch: MockBatch) -> None:
        self._call("commit")
        self._fresh(batch)
        if batch.committed:
            raise InvalidState("commit: batch is committed")
        batch.committed = True
        for row in batch.rows:
            seq = row.seq
            seq.num_computed = row.start + row.len
            if seq.use_prefix:
                for i in range(row.start // self.block_size, seq.num_computed // self.block_size):
                    if seq.blocks[i] not in self._key_of and self._key(seq, i) not in self._block_of:
                        key = self._key(seq, i)
                        self._key_of[seq.blocks[i]], self._block_of[key] = key, seq.blocks[i]

    def fork(self, seq: MockSequence) -> MockSequence:
        self._call("fork")
        return self._fork(self._alive(seq))

    def reorder(self, seqs: list[MockSequence], parents: list[int]) -> list[MockSequence]:
        self._call("reorder")
        assert len({id(self._alive(seq)) for seq in seqs}) == len(seqs)
        kept: set[int] = set()
        result = []
        for parent in parents:
            result.append(self._fork(seqs[parent]) if parent in kept else seqs[parent])
            kept.add(parent)
        for i, seq in enumerate(seqs):
            if i not in kept:
                self._free_blocks(seq)
        return result

    def truncate(self, seq: MockSequence, num_tokens: int) -> None:
        self._call("truncate")
        assert 1 <= num_tokens <= len(self._alive(seq).token_ids)
        del seq.token_ids[num_tokens:]
        seq.num_computed = min(seq.num_computed, num_tokens)
        while len(seq.blocks) > -(-seq.num_computed // self.block_size):
            self._drop(seq.blocks.pop())

    def mark(self, seq: MockSequence, num_tokens: int | None = None, *, ttl: float | None = None) -> None:
        self._call("mark")
        self.marks.append((tuple(self._alive(seq).token_ids[:num_tokens]), ttl))

    def _fork(self, seq: MockSequence) -> MockSequence:
        twin = MockSequence(self, list(seq.token_ids), seq.salt, seq.use_prefix, list(seq.blocks), seq.num_computed)
        for block in twin.blocks:
            self._refs[block] += 1
        self._sequences.add(twin)
        return twin

    def _shares_last(self, seq: MockSequence) -> bool:
        return seq.num_computed % self.block_size != 0 and self._refs[seq.blocks[-1]] > 1

    def free(self, seq: MockSequence) -> None:
        self._call("free")
        self._free_blocks(self._alive(seq))

    def _free_blocks(self, seq: MockSequence) -> None:
        seq.freed = True
        self._sequences.remove(seq)
        for block in reversed(seq.blocks):
            self._drop(block)

    def _drop(self, block: int) -> None:
        self._refs[block] -= 1
        if self._refs[block] == 0:
            if block in self._key_of:
                self._cached[block] = None
            else:
                self._free.append(block)

    def block_table(self, seq: MockSequence) -> list[int]:
        return list(self._alive(seq).blocks)

    def num_tokens(self, seq: MockSequence) -> int:
        return len(self._alive(seq).token_ids)

    def num_computed_tokens(self, seq: MockSequence) -> int:
        return self._alive(seq).num_computed

    def reset_prefix_cache(self) -> None:
        self._free.extend(self._cached)
        self._cached.clear()
        self._key_of.clear()
        self._block_of.clear()

    def stats(self) -> dict[str, int]:
        return {
            "total": self.num_blocks,
            "free": len(self._free),
            "cached": len(self._cached),
            "used": self.num_blocks - self.num_free_blocks,
            "num_sequences": len(self._sequences),
        }

    def check(self) -> None:
        """Raise AssertionError unless every block is exactly one of free, cached and referenced as often as it is."""
        refs = Counter(block for seq in self._sequences for block in seq.blocks)
        assert [refs[b] for b in range(self.num_blocks)] == self._refs
        idle = Counter([*self._free, *self._cached])
        assert idle == Counter({b: 1 for b in range(self.num_blocks) if refs[b] == 0})
        assert {key: block for block, key in self._key_of.items()} == self._block_of
        assert set(self._cached) <= set(self._key_of)
        assert not set(self._free) & set(self._key_of)

    def check_empty(self) -> None:
        """Law 2 after everything has ended: no sequence, and free + cached = total."""
        self.check()
        assert not self._sequences
        assert self.num_free_blocks == self.num_blocks

    def _key(self, seq: MockSequence, i: int) -> Any:
        return seq.salt, tuple(seq.token_ids[: (i + 1) * self.block_size])

    def _allocate(self) -> int:
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            del self._block_of[self._key_of.pop(block)]
        self._refs[block] = 1
        self._slots[block] = -1
        return block

    def _alive(self, seq: MockSequence) -> MockSequence:
        if seq.owner is not self or seq.freed:
            raise InvalidHandle("sequence: expected one of this cache that was not freed")
        return seq

    def _fresh(self, batch: MockBatch) -> None:
        for row in batch.rows:
            if self._alive(row.seq).version != row.version:
                raise StaleBatch("batch: a newer plan has outdated it")

    def _call(self, name: str) -> None:
        self.calls[name] += 1
        if name in self.fail:
            self.fail[name]()


class MockDecoder:
    """Logits that depend on every token of the history, as the cache gives it back, and on nothing else.

    Args:
        cache: its cache.
        vocab_size: width of the logits.
        dynamic: what is stored depends on the prompt's length as well, as with dynamic rope beyond its limit.
        long_from: what is stored depends on whether the sequence has so many tokens by now, as with longrope.
        script: tokens by position that get all the weight, to steer what is generated.
    """

    def __init__(
        self,
        cache: MockCache,
        vocab_size: int = 32,
        *,
        dynamic: bool = False,
        long_from: int | None = None,
        script: dict[int, int] | None = None,
    ) -> None:
        self.cache = cache
        self.spec = SimpleNamespace(vocab_size=vocab_size)
        self.dynamic = dynamic
        self.long_from = long_from
        self.script = script or {}
        self.fail: Callable[[], None] | None = None
        self.edit: Callable[[np.ndarray, np.ndarray], None] | None = None  # (logits, positions of their rows)
        self.batches: list[list[int]] = []

    def context_len(self, prompt_len: int, length: int) -> int:
        return prompt_len if self.long_from is None else int(length >= self.long_from)

    def prompt_salt(self, context_len: int) -> bytes | None:
        return str(context_len).encode() if self.dynamic or self.long_from is not None else None

    def forward(
        self,
        batch: MockBatch,
        token_ids: np.ndarray,
        positions: np.ndarray,
        context_lens: np.ndarray,
        logit_rows: np.ndarray,
    ) -> np.ndarray:
        self._check_rows(batch, token_ids, positions, context_lens, logit_rows)
        self.batches.append([row.len for row in batch.rows])
        values = (token_ids + 1) * 7_919 + positions * 104_729
        if self.long_from is not None:
            values += context_lens * 15_485_863
        elif self.dynamic:
            values += np.maximum(context_lens, positions + 1) * 15_485_863
        self.cache.write(0, batch, values, values)
        if self.fail is not None:
            self.fail()
        digests = self.cache.attend(0, batch, values)[logit_rows]
        columns = np.arange(self.spec.vocab_size)
        # An integer hash per column, spread over [0, 4): flat enough for every token to have a chance.
        mixed = (digests[:, None] * (2 * columns + 1) + columns * 69_069) % _PRIME
        mixed = (mixed ^ (mixed >> 15)) * 48_271 % _PRIME
        logits = (mixed % 4_096 / 1_024).astype(np.float32)
        for row, position in zip(logits, positions[logit_rows].tolist(), strict=True):
            if position in self.script:
                row[self.script[position]] += 100.0
        if self.edit is not None:
            self.edit(logits, positions[logit_rows])
        return logits

    @staticmethod
    def _check_rows(
        batch: MockBatch,
        token_ids: np.ndarray,
        positions: np.ndarray,
        context_lens: np.ndarray,
        logit_rows: np.ndarray,
    ) -> None:
        assert {a.dtype for a in (token_ids, positions, context_lens, logit_rows)} == {np.dtype(np.int64)}
        known = [t for row in batch.rows for t in row.seq.token_ids[row.start : row.start + row.len]]
        assert token_ids.tolist() == known
        assert positions.tolist() == [p for row in batch.rows for p in range(row.start, row.start + row.len)]
        assert len(context_lens) == len(positions)
        assert all(0 <= r < len(positions) for r in logit_rows.tolist())


class MockTokenizer:
    """One token per byte, 0 to 255; 256 is the end-of-sequence token."""

    vocab_size = 257
    byte_exact = True
    strips_leading_space = False
    chat_template = None
    special_tokens: dict[str, str] = {"eos_token": "</s>"}  # noqa: RUF012
    eos_id = 256

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Any, skip_special_tokens: bool = True) -> str:
        return b"".join(self.token_bytes(i) for i in ids if not (skip_special_tokens and i == 256)).decode(
            errors="replace"
        )

    def token_bytes(self, token_id: int) -> bytes:
        return b"</s>" if token_id == 256 else bytes([token_id])

    def is_special(self, token_id: int) -> bool:
        return token_id == 256


class MockChatTemplate:
    def render(self, messages: Any, add_generation_prompt: bool = True, **extra: Any) -> str:
        text = "".join(f"<{m['role']}>{m['content']}\n" for m in messages)
        return text + ("<assistant>" if add_generation_prompt else "")


def text_script(prompt_len: int, answer: str, *, eos: bool = True) -> dict[int, int]:
    """A script that makes the model say ``answer`` after a prompt of this length."""
    tokens = list(answer.encode()) + ([256] if eos else [])
    return {prompt_len - 1 + i: token for i, token in enumerate(tokens)}
