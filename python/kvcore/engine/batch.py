"""The rows of a batch, as the model wants them."""

from __future__ import annotations

import numpy as np

from kvcore.engine.interfaces import Adapter, IntArray
from kvcore.engine.scheduler import Item
from kvcore.engine.sequence import Sequence


def batch_rows(items: list[Item]) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Token ids, positions and context lengths of a batch's rows in order, and the rows whose logits are wanted."""
    token_ids: list[int] = []
    positions: list[int] = []
    context_lens: list[int] = []
    logit_rows: list[int] = []
    for seq, n in items:
        start, end = seq.num_stored, seq.num_stored + n
        if seq.prompt_logprobs is not None:
            offset = len(token_ids) - start
            logit_rows += [offset + position for position in prompt_rows(seq, start, end)]
        token_ids += seq.token_ids[start:end]
        positions += range(start, end)
        context_lens += [seq.context_len] * n
        if end == len(seq.token_ids):
            logit_rows.append(len(token_ids) - 1)
    return (
        np.array(token_ids, np.int64),
        np.array(positions, np.int64),
        np.array(context_lens, np.int64),
        np.array(logit_rows, np.int64),
    )


def adapter_rows(items: list[Item]) -> list[tuple[Adapter, IntArray]]:
    """Each adapter that a row of the batch has, with all its rows."""
    rows: dict[str, tuple[Adapter, list[int]]] = {}
    start = 0
    for seq, n in items:
        if seq.adapter is not None:
            rows.setdefault(seq.adapter.identity, (seq.adapter, []))[1].extend(range(start, start + n))
        start += n
    return [(adapter, np.array(own, np.int64)) for adapter, own in rows.values()]


def prompt_rows(seq: Sequence, start: int, end: int) -> range:
    """Positions from ``start`` to ``end`` whose logits tell of a prompt token that has no log probability yet."""
    assert seq.prompt_logprobs is not None
    return range(max(start, len(seq.prompt_logprobs) - 1), min(end, seq.prompt_len - 1))
