"""Which tokens go into the next batch.

    budget = max_num_batched_tokens
    every running sequence that decodes:            its one token
    every running sequence that is in its prompt:   as much of it as the budget still allows
    while budget, room and seats are left:          admit the first waiting sequence, and a first chunk of its prompt

First come, first served: nobody overtakes the head of the queue. Space in the cache decides who is admitted. A sequence
is let in only if the blocks of its worst case, ceil((prompt + most new tokens - 1) / block size), are there after
everything that the running ones may still take, so that decode never runs out of blocks and never deadlocks. Blocks
that it shares with cached prefixes are not counted twice.

Ctrl-C can raise KeyboardInterrupt between any two byte codes. So handles move with single C calls (``_open``), a handle
is given up only after it is on the list of those to free (``_close``), and both can be repeated.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from functools import partial

from kvcore.engine.interfaces import Cache, Handle, Model
from kvcore.engine.sequence import Sequence, State
from kvcore.errors import InvalidHandle

Item = tuple[Sequence, int]
"""A sequence and how many of its next tokens go into the batch."""


class Scheduler:
    """Keeps the waiting and the running sequences, and their handles in the cache.

    Attributes:
        waiting: sequences that have not been admitted, in order of arrival.
        running: sequences that have, in order of admission.
        items: what ``schedule()`` has put in the batch.
        opening: the sequence whose tokens are being handed to the cache, which is to blame if that raises.
    """

    def __init__(self, model: Model, *, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self._model = model
        self._cache: Cache = model.cache
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._to_free: list[Handle] = []
        self._refused: tuple[Sequence, int] | None = None  # the head that did not fit, and the room there was
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.items: list[Item] = []
        self.opening: Sequence | None = None

    def add(self, seq: Sequence) -> None:
        """Put a sequence at the end of the queue."""
        self.waiting.append(seq)

    def schedule(self) -> list[Item]:
        """Choose the next batch and admit whom it lets in. Empty if nobody can go on."""
        self.items = []
        self._sweep()
        budget = self._max_num_batched_tokens
        decoding = [seq for seq in self.running if seq.decoding]
        prefilling = [seq for seq in self.running if not seq.decoding]
        for seq in decoding + prefilling:
            if budget == 0:
                break
            if not seq.handles:
                self.opening = seq
                self._open(seq)
                self.opening = None
            budget -= self._take(seq, budget)
        while budget and self.waiting and len(self.running) < self._max_num_seqs and self._admit(self.waiting[0]):
            budget -= self._take(self.running[-1], budget)
        return self.items

    def release(self, seq: Sequence) -> None:
        """Take a sequence out and free what it holds. Can be repeated, and does nothing if there is nothing to do."""
        for queue in (self.running, self.waiting):
            if seq in queue:
                queue.remove(seq)
        self._close(seq)
        seq.state = State.FINISHED

    def end_round(self, seq: Sequence) -> None:
        """Forget the keys and values of a running sequence that does without the cache; it starts over next step."""
        self._close(seq)

    def free(self, handles: list[Handle]) -> None:
        """Free sequences of the cache and empty the list. Can be repeated."""
        self._to_free.extend(handles)
        handles.clear()
        self._sweep()

    def room(self) -> int:
        """Blocks that are free and that no running sequence will come to need."""
        return self._cache.num_free_blocks - sum(self._blocks_to_come(seq) for seq in self.running)

    def worst_case(self, seq: Sequence) -> int:
        """The most blocks that a sequence will ever hold."""
        return -(-seq.max_stored() // self._cache.block_size)

    def _take(self, seq: Sequence, budget: int) -> int:
        n = min(seq.num_missing, budget)
        self.items.append((seq, n))
        return n

    def _admit(self, seq: Sequence) -> bool:
        room = self.room()
        # Nothing has become free since it was refused, so it is not asked again (each time costs a prefix look-up) -
        # unless it is alone: then nothing ever would.
        if self.running and self._refused is not None and self._refused[0] is seq and room <= self._refused[1]:
            return False
        self.opening = seq
        self._open(seq)
        # Opening has taken shared blocks out of the free ones, and off what it still needs.
        if self._blocks_to_come(seq) > self.room():
            self._close(seq)
            self._refused = (seq, room)
            self.opening = None
            return False
        self._refused = None
        seq.num_cached_tokens = seq.num_stored
        seq.state = State.RUNNING
        self.running.append(seq)
        self.waiting.popleft()
        self.opening = None
        return True

    def _blocks_to_come(self, seq: Sequence) -> int:
        """The most blocks that a sequence will still allocate."""
        size = self._cache.block_size
        held = -(-seq.num_stored // size)
        # a prefix that ends inside of a block is copied before the first write
        copies = seq.num_stored == seq.num_cached_tokens and seq.num_stored % size != 0
        return self.worst_case(seq) - held + copies

    def _open(self, seq: Sequence) -> None:
        add = partial(self._cache.add, use_prefix=seq.use_cache)
        # One C call from the cache's answer to the list: no byte code between them at which an interrupt could lose it.
        seq.handles.extend(map(add, (seq.token_ids,), (self._model.prompt_salt(seq.prompt_len),)))
        seq.num_stored = seq.handles[0].num_cached_tokens

    def _close(self, seq: Sequence) -> None:
        seq.num_stored = 0
        self.free(seq.handles)

    def _sweep(self) -> None:
        while self._to_free:
            with suppress(InvalidHandle):  # freed before, by a call that was interrupted before it could note that
                self._cache.free(self._to_free[-1])
            self._to_free.pop()
