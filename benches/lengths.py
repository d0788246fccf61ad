"""Workloads: how long the prompts and replies of requests are.

sharegpt   first prompt and first reply of real conversations
alpaca     instructions with 19 tokens in and 58 out on average, drawn from a seeded distribution
turns      every turn of real conversations, the history in front of it, all sent at once: a trace that is replayed
           knows the replies beforehand, so turns of one conversation run side by side
chat       the same turns, but each is sent when the turn before it has been answered
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

SHAREGPT = Path(__file__).resolve().parent / "data" / "sharegpt_lengths.json"


@dataclass(frozen=True)
class Request:
    """``prompt`` tokens in, of which token p equals token p of all requests of the same conversation; ``reply`` out."""

    conversation: int
    prompt: int
    reply: int

    @property
    def total(self) -> int:
        """Tokens when the request ends."""
        return self.prompt + self.reply


@dataclass(frozen=True)
class Workload:
    """Requests by conversation, in the order in which they come.

    Attributes:
        chained: a conversation's next request comes when the one before has ended, not together with it.
    """

    name: str
    title: str
    conversations: list[list[Request]]
    chained: bool = False

    @property
    def requests(self) -> list[Request]:
        """All requests."""
        return [request for turns in self.conversations for request in turns]

    @property
    def shares(self) -> bool:
        """Whether any two requests have a front in common."""
        return any(len(turns) > 1 for turns in self.conversations)


def sharegpt(seed: int, max_length: int, limit: int) -> Workload:
    """``limit`` conversations that fit, in random order: the first exchange of each."""
    pairs = [(piece[0], piece[1]) for piece in _pieces("openings")]
    pairs = [(prompt, reply) for prompt, reply in pairs if prompt + reply <= max_length]
    random.Random(seed).shuffle(pairs)
    return Workload("sharegpt", "ShareGPT, first exchanges", _alone(pairs[:limit]))


def alpaca(seed: int, max_length: int, limit: int) -> Workload:
    """``limit`` requests with log-normal lengths.

    Means are those that the PagedAttention paper gives for Alpaca; the shape is our choice: sigma 0.5 for prompts (95%
    within a factor 2.7 of the median), 0.9 for replies (a factor 5.8). Both are cut so that a request fits.
    """
    rng = random.Random(seed)

    def draw(mean: float, sigma: float, most: int) -> int:
        return min(max(1, round(rng.lognormvariate(math.log(mean) - sigma**2 / 2, sigma))), most)

    pairs = []
    for _ in range(limit):
        prompt = draw(19.3, 0.5, max_length - 1)
        pairs.append((prompt, draw(58.5, 0.9, max_length - prompt)))
    return Workload("alpaca", "Alpaca's lengths", _alone(pairs))


def turns(seed: int, max_length: int, limit: int) -> Workload:
    """``limit`` conversation pieces in random order, all their turns that fit."""
    return Workload("turns", "ShareGPT, all turns at once", _with_history(seed, max_length, limit))


def chat(seed: int, max_length: int, limit: int) -> Workload:
    """The requests of ``turns``, one after another in each conversation."""
    return Workload("chat", "ShareGPT, turn after turn", _with_history(seed, max_length, limit), chained=True)


WORKLOADS: dict[str, Callable[[int, int, int], Workload]] = {
    "sharegpt": sharegpt,
    "alpaca": alpaca,
    "turns": turns,
    "chat": chat,
}
"""By name: a function of seed, most tokens of a request, and most conversations."""


def _pieces(*kinds: str) -> list[list[int]]:
    data = json.loads(SHAREGPT.read_text(encoding="utf-8"))
    return [piece for kind in kinds for piece in data[kind]]


def _alone(pairs: list[tuple[int, int]]) -> list[list[Request]]:
    return [[Request(i, prompt, reply)] for i, (prompt, reply) in enumerate(pairs)]


def _with_history(seed: int, max_length: int, limit: int) -> list[list[Request]]:
    pieces = _pieces("openings", "continuations")
    random.Random(seed).shuffle(pieces)
    conversations: list[list[Request]] = []
    for piece in pieces:
        history, requests = 0, []
        for prompt, reply in zip(piece[::2], piece[1::2], strict=True):
            if history + prompt + reply > max_length:
                break
            requests.append(Request(len(conversations), history + prompt, reply))
            history += prompt + reply
        if requests and len(conversations) < limit:
            conversations.append(requests)
    return conversations
