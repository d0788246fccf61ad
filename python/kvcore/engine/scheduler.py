"""Which tokens go into the next batch, and who must wait for it.

    loop:
        budget = max_num_batched_tokens
        every running sequence that decodes:            its one token
        every running sequence that is in its prompt:   as much of it as the budget still allows
        while budget, room and seats are left:          the first that waits is let in, and a first chunk of its prompt
        cache.plan(all of these)
        if it lacks blocks:  preempt the running sequence that is last in order, let nobody in, and choose again

With speculative decoding (``speculation.py``) the rows that are left in a batch go to drafts of the sequences that
decode. A draft takes no block that a running sequence needs for the tokens it has, and if the batch lacks blocks with
drafts, it goes without them before anybody is preempted.

The queue and the running sequences are in the policy's order (``policy.py``). Space in the cache decides who is let in:
the blocks of all tokens that are *known now* must be there, beside those that running sequences still need for theirs,
and one in twenty must stay free for them to grow. So blocks can run out while answers grow. Then the last in order
gives its blocks back, returns to its place in the queue, and is computed again later. What the prefix index still
holds of it is not computed again; with a second tier of the cache that is everything, which makes this swapping.

It never comes to a halt: the first in order is never preempted while anybody else holds blocks, and no request is
taken that would not fit alone.

A sequence that begins like one whose prompt is just being computed waits for those blocks instead of computing them as
well. Others may go before it meanwhile, which ends with that prompt.

Ctrl-C can raise KeyboardInterrupt between any two byte codes. So handles move with single C calls (``_open``), a handle
is given up only after it is on the list of those to free (``_close``), and both can be repeated.
"""

from __future__ import annotations

from bisect import insort
from contextlib import suppress
from functools import partial
from typing import Any

from kvcore.engine.interfaces import Cache, Handle, Model
from kvcore.engine.policy import Reservation
from kvcore.engine.sequence import Sequence, State
from kvcore.engine.space import Space
from kvcore.errors import InvalidHandle, OutOfBlocks

Item = tuple[Sequence, int]
"""A sequence and how many of its next tokens go into the batch."""

_HEADROOM = 20
"""One block in so many stays free when somebody is let in beside others. More would be used less, fewer would make more
requests start again: benches/throughput.py, and the table in docs/utilisation.md."""

_PROMPT_LOGPROB_ROWS = 256
"""A chunk of a prompt whose log probabilities are wanted: each row's logits are as wide as the vocabulary."""


class Scheduler:
    """Keeps the waiting and the running sequences, and their handles in the cache.

    Attributes:
        waiting: sequences that wait, in order. (Of beams the first stands for all.)
        running: sequences that have been let in, in order.
        items, batch: what ``schedule()`` has chosen, and the cache's slots for it.
        moving: the sequence that is on its way into the cache or out of it, which is to blame if that raises.
        num_preemptions: how often blocks were taken back.
    """

    def __init__(
        self,
        model: Model,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        reservation: Reservation | None = None,
        share_prompts: bool = True,
    ) -> None:
        self._model = model
        self._cache: Cache = model.cache
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._reserved: Reservation = reservation or (lambda seq: len(seq.token_ids))
        self._share_prompts = share_prompts
        self._headroom = 0 if reservation else max(1, self._cache.num_blocks // _HEADROOM)
        self._to_free: list[Handle] = []
        self._refused: tuple[Sequence, list[int]] | None = None  # who did not fit, and the room there was
        self.space = Space(self._cache, max_num_batched_tokens)
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.items: list[Item] = []
        self.batch: Any = None
        self.moving: Sequence | None = None
        self.num_preemptions = 0

    def add(self, seq: Sequence) -> None:
        """Put a sequence in the queue."""
        insort(self.waiting, seq, key=_order)

    def start(self, seq: Sequence) -> None:
        """Let a sequence run that has its handle already: a fork of a running one. Without a seat it waits."""
        if len(self.running) < self._max_num_seqs:
            seq.state = State.RUNNING
            insort(self.running, seq, key=_order)
        else:
            self._close(seq)
            self.add(seq)

    def schedule(self) -> list[Item]:
        """Choose the next batch and get its slots, in ``batch``. Empty if nobody can go on.

        Raises:
            OutOfBlocks: the only running sequence lacks blocks, which others than this scheduler hold.
        """
        self._choose(admit=True)
        self._draft()
        while self.items:
            try:
                self.batch = self._cache.plan([(seq.handles[0], n) for seq, n in self.items])
                break
            except OutOfBlocks:
                if self._drop_drafts():
                    continue
                last = self.running[-1]
                if all(seq in last.unit for seq in self.running):
                    raise
                self.preempt(last)
                self._choose(admit=False)
        return self.items

    def ahead(self) -> list[Item]:
        """The sequences whose next tokens have been sampled already: a batch with nothing to compute."""
        self.items = [(seq, 1) for seq in self.running if seq.ahead]
        return self.items

    def preempt(self, seq: Sequence) -> None:
        """Take a running sequence's blocks back and put it in its place in the queue."""
        self.moving = seq
        for member in seq.unit:
            self._close(member)
            member.state = State.WAITING
        self.running = [other for other in self.running if other not in seq.unit]
        self.add(seq.unit[0])
        self.num_preemptions += 1
        seq.metrics.num_preemptions += 1
        self.moving = None

    def release(self, seq: Sequence) -> None:
        """Take a sequence out, and free what it holds or hand it to whoever keeps it. Can be repeated."""
        for queue in (self.running, self.waiting):
            if seq in queue:
                queue.remove(seq)
        if self._refused is not None and self._refused[0] is seq:
            self._refused = None
        if seq.keep is not None and seq.error is None:
            seq.keep.extend(seq.handles)
            seq.handles.clear()
        self._close(seq)
        seq.state = State.FINISHED

    def restart(self, seq: Sequence) -> None:
        """Forget what is stored of a running sequence; it is opened again in the next step, as what it is by then.

        That is how sequences go on that do without the cache, and those whose block key has changed.
        """
        self._close(seq)

    def free(self, handles: list[Handle]) -> None:
        """Free sequences of the cache and empty the list. Can be repeated."""
        self._to_free.extend(handles)
        handles.clear()
        self._sweep()

    def room(self) -> list[int]:
        """Blocks that are free and that no running sequence needs for the tokens it has, of each group of layers."""
        room = self.space.free()
        for seq in self.running:
            room = _minus(room, self._to_come(seq))
        return room

    def _choose(self, *, admit: bool) -> None:
        self.items, self.batch = [], None
        self._sweep()
        budget = self._max_num_batched_tokens
        for seq in self.running:
            if seq.handles and seq.context_len != self._context_len(seq):
                self._close(seq)  # its keys turn otherwise at this length: all of it is computed anew
        # beams that wait for others of their unit miss nothing
        missing = [(seq, len(seq.token_ids) - seq.num_stored) for seq in self.running]
        decoding = [seq for seq, n in missing if n == 1]
        for seq in decoding + [seq for seq, n in missing if n > 1]:
            if budget == 0:
                return
            if not seq.handles:
                self._enter(seq)
            budget -= self._take(seq, budget)
        if admit and self.waiting:
            self._admit(budget)

    def _take(self, seq: Sequence, budget: int) -> int:
        n = min(len(seq.token_ids) - seq.num_stored, budget, self.space.max_chunk)
        if seq.prompt_logprobs is not None and seq.num_stored < seq.prompt_len:
            n = min(n, _PROMPT_LOGPROB_ROWS)
        self.items.append((seq, n))
        return n

    def _draft(self) -> None:
        """Let sequences that decode try their drafts, as far as the batch has rows left."""
        left = self._max_num_batched_tokens - sum(n for _, n in self.items)
        room: int | None = None
        for i, (seq, n) in enumerate(self.items):
            if seq.drafts is None or seq.num_generated == 0 or seq.num_missing > 1:
                continue
            length = len(seq.token_ids)
            # a token is sampled behind the last row as well
            most = min(left, self.space.max_chunk - n, seq.max_new_tokens - seq.num_generated - 1)
            draft = seq.drafts.propose(seq.token_ids, most)
            while draft and self._model.context_len(seq.prompt_len, length + len(draft)) != seq.context_len:
                draft.pop()
            blocks = self.space.blocks(length + len(draft)) - self.space.blocks(length)
            if blocks:
                room = min(self.room()) if room is None else room
                if blocks > room:
                    del draft[-length % self.space.block_size :]
                else:
                    room -= blocks
            if draft:
                seq.draft = draft
                self.items[i] = seq, n + len(draft)
                left -= len(draft)
                self._cache.append(seq.handles[0], draft)

    def _drop_drafts(self) -> bool:
        """Do without drafts in this step; whether there were any."""
        drafted = [seq for seq, _ in self.items if seq.draft]
        self.items = [(seq, n - len(seq.draft)) for seq, n in self.items]
        for seq in drafted:
            self._cache.truncate(seq.handles[0], len(seq.token_ids))
            seq.draft = []
        return bool(drafted)

    def _admit(self, budget: int) -> None:
        place = 0
        while budget and place < min(len(self.waiting), self._max_num_seqs):
            seq = self.waiting[place]
            wanted = sum(member.seats for member in seq.unit)
            if self.running and sum(other.seats for other in self.running) + wanted > self._max_num_seqs:
                return
            if self._share_prompts and self._begins_like_a_prompt_under_way(seq):
                place += 1
                continue
            if not self._let_in(seq):
                return
            for member in seq.unit:
                if budget and member.num_stored < len(member.token_ids):
                    budget -= self._take(member, budget)

    def _let_in(self, seq: Sequence) -> bool:
        room = self.room()
        # Nothing has become free since it was refused, so it is not asked again (each time costs a prefix look-up) -
        # unless it is alone: then nothing ever would.
        refused, then = self._refused or (None, room)
        if self.running and refused is seq and all(a <= b for a, b in zip(room, then, strict=True)):
            return False
        self.moving = seq
        for member in seq.unit:
            self._open(member)
        # Opening has taken shared blocks out of the free ones, and off what it still needs.
        left = self.room()
        for member in seq.unit:
            left = _minus(left, self._to_come(member))
        if self._encoded_alike(seq) is None:
            left = _minus(left, self.space.to_come(0, 0, 0, seq.encoder))
        if not self.space.has_room(left, self._headroom if self.running else 0):
            for member in seq.unit:
                self._close(member)
            self._refused = (seq, room)
            self.moving = None
            return False
        self._refused = None
        self._encode(seq.unit)
        self.waiting.remove(seq)
        for member in seq.unit:
            if not member.started:
                member.num_cached_tokens = member.num_reached = member.num_stored
            member.state = State.RUNNING
            insort(self.running, member, key=_order)
        self.moving = None
        return True

    def _begins_like_a_prompt_under_way(self, seq: Sequence) -> bool:
        """Whether a running sequence is about to compute a block that this one needs, too."""
        if not seq.use_prefix:
            return False
        for other in self.running:
            end = other.num_stored + self.space.block_size
            if (
                other.use_prefix
                and end <= len(other.token_ids)
                and end < len(seq.token_ids)
                and seq.token_ids[:end] == other.token_ids[:end]
                and self._key(seq) == self._key(other)
            ):
                return True
        return False

    def _to_come(self, seq: Sequence) -> list[int]:
        # a prefix that ends inside of a block is copied before the first write
        copies = seq.num_stored == seq.num_cached_tokens and seq.num_stored % self.space.block_size != 0
        tokens = min(self._reserved(seq), self.space.capacity)
        encoder = None if seq.handles or seq is not seq.unit[0] else seq.encoder
        return self.space.to_come(seq.num_stored, copies, tokens, encoder)

    def _context_len(self, seq: Sequence) -> int:
        return self._model.context_len(seq.prompt_len, len(seq.token_ids))

    def _salt(self, seq: Sequence) -> bytes | None:
        """What a sequence's blocks depend on beside its tokens: what the model says, and whose they are."""
        of_model = self._model.prompt_salt(self._context_len(seq))
        if seq.salt is None:
            return of_model
        salt = seq.salt.encode(errors="surrogatepass")
        return b"salt %d %d " % (len(salt), of_model is None) + salt + (of_model or b"")

    def _key(self, seq: Sequence) -> tuple[bytes | None, dict[str, Any]]:
        """What the keys of its blocks have beside the tokens, as ``Cache.add`` takes it."""
        options: dict[str, Any] = {}
        if seq.adapter is not None:
            options["adapter"] = seq.adapter.identity
        if seq.encoder is not None:
            options["extra"] = seq.encoder.key
        return self._salt(seq), options

    def _enter(self, seq: Sequence) -> None:
        self.moving = seq
        self._open(seq)
        self._encode([seq])
        self.moving = None

    def _open(self, seq: Sequence) -> None:
        salt, options = self._key(seq)
        add = partial(self._cache.add, use_prefix=seq.use_prefix, **options)
        # One C call from the cache's answer to the list: no byte code between them at which an interrupt could lose it.
        seq.handles.extend(map(add, (seq.token_ids,), (salt,)))
        seq.num_stored = seq.handles[0].num_cached_tokens
        context_len = self._context_len(seq)
        if seq.context_len != context_len:  # nothing was computed of it yet, or nothing that is of use
            seq.context_len, seq.num_reached = context_len, seq.num_stored
        for num_tokens, ttl in seq.marks:
            self._cache.mark(seq.handles[0], num_tokens, ttl=ttl)

    def _encode(self, unit: list[Sequence]) -> None:
        """Run the encoder for sequences that have just been opened, unless others have what it gives; all share it."""
        source = self._encoded_alike(unit[0])
        for seq in unit if unit[0].encoder is not None else ():
            if source is None:
                self._model.encode(seq.handles[0], seq.encoder)
                source = seq
            else:
                self._cache.share_cross(seq.handles[0], source.handles[0])

    def _encoded_alike(self, seq: Sequence) -> Sequence | None:
        """A running sequence with the same encoder input. (Who does without the cache does without this, too.)"""
        if seq.encoder is None or not seq.use_cache:
            return None
        alike = (other for other in self.running if other.encoder is not None and other.handles and other.use_cache)
        return next((other for other in alike if self._key(other) == self._key(seq)), None)

    def _close(self, seq: Sequence) -> None:
        seq.num_stored = 0
        self.free(seq.handles)

    def _sweep(self) -> None:
        while self._to_free:
            with suppress(InvalidHandle):  # freed before, by a call that was interrupted before it could note that
                self._cache.free(self._to_free[-1])
            self._to_free.pop()


def _order(seq: Sequence) -> tuple[int, ...]:
    return seq.order


def _minus(have: list[int], need: list[int]) -> list[int]:
    return [a - b for a, b in zip(have, need, strict=True)]
