"""Who goes first, and for how many tokens blocks are set aside.

    order         the smallest goes first; whoever has the largest is preempted first
      fcfs        (arrival, ...)
      priority    (priority * AGING + arrival, arrival, ...)       a smaller priority goes first, as in vLLM
    reservation   tokens whose blocks must be there when a request is let in
      known       those that are known now: paging
      others      contiguous memory, to compare with

A priority is worth ``AGING`` arrivals and no more. So a request is overtaken by at most ``AGING`` later ones for each
step between its priority and theirs, however many come: nobody starves, and no clock is needed to age a queue.

Source of the reservations: PagedAttention (Kwon et al., 2023), where they are called Orca (Max, Pow2, Oracle).
"""

from __future__ import annotations

from collections.abc import Callable

from kvcore.engine.sequence import Sequence
from kvcore.errors import InvalidArgument

AGING = 256
"""Arrivals that one step of priority is worth."""

POLICIES = ("fcfs", "priority")

Reservation = Callable[[Sequence], int]


def order(policy: str, priority: int, arrival: int) -> tuple[int, int]:
    """Where a request stands among others, for all its life."""
    return (priority * AGING + arrival if policy == "priority" else arrival, arrival)


def reservation(kind: str, max_model_len: int | None) -> Reservation:
    """A function that says for how many tokens blocks are set aside for a sequence.

    Args:
        kind: "known": its tokens of now. "max_model_len": the longest that there can be. "power_of_two": the next
            power of two of its final length. "max_tokens": its final length, an oracle where ``max_tokens`` is how
            long it will be.

    Raises:
        InvalidArgument: another kind, or no longest length where one is needed.
    """
    if kind == "known":
        return lambda seq: len(seq.token_ids)
    if kind == "max_tokens":
        return lambda seq: seq.max_stored()
    if kind == "power_of_two":
        return lambda seq: 1 << (seq.max_stored() - 1).bit_length()
    if kind == "max_model_len":
        if max_model_len is None:
            raise InvalidArgument("reservation: expected a max_model_len beside 'max_model_len', got None")
        longest = max_model_len
        return lambda seq: longest
    raise InvalidArgument(f"reservation: expected one of known, max_model_len, power_of_two, max_tokens, got {kind!r}")
