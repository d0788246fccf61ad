"""Ctrl-C at any byte code of everything that moves blocks: preemption, forks, beams, sessions, callbacks."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any

import pytest

from kvcore import BeamSearchParams, SamplingParams
from kvcore.llm import LLM
from kvcore.session import Session
from mocks import MockTokenizer
from test_llm import interrupt_at, make

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def preempting(llm: LLM) -> Any:
    return [o.token_ids for o in llm.generate([[i] * 9 for i in range(3)], GREEDY, progress=False)]


def forking(llm: LLM) -> Any:
    params = SamplingParams(n=3, seed=1, max_tokens=5, ignore_eos=True)
    return [[c.token_ids for c in o.outputs] for o in llm.generate([[1] * 5, [2] * 6], params, progress=False)]


def searching(llm: LLM) -> Any:
    params = BeamSearchParams(beam_width=2, max_tokens=5, ignore_eos=True)
    return [[s.tokens for s in o.sequences] for o in llm.beam_search([[1] * 5, [2] * 3], params, progress=False)]


def talking(llm: LLM) -> Any:
    with Session(llm, [1, 2, 3, 4, 5]) as session:
        session.generate(GREEDY, progress=False)
        session.rewind(8)
        with session.fork() as twin:
            twin.append([7])
            return [twin.generate(GREEDY, progress=False).token_ids, len(session)]


def speculating(llm: LLM) -> Any:
    before = llm.stats()["spec_decode_num_accepted_tokens"]
    outputs = llm.generate([[i] * 9 for i in range(3)], GREEDY, progress=False)
    assert llm.stats()["spec_decode_num_accepted_tokens"] > before
    return [o.token_ids for o in outputs]


def calling(llm: LLM) -> Any:
    seen: list[int] = []
    outputs = llm.generate(
        [[1], [2] * 5], GREEDY, progress=False, timeout=1e9, callback=lambda item: seen.extend(item.token_ids)
    )
    return [o.token_ids for o in outputs], sorted(seen)


@pytest.mark.skipif(sys.gettrace() is not None, reason="needs the trace function for itself")
# Python prints what is raised in a __del__ and goes on; pytest makes a warning of that
@pytest.mark.filterwarnings("ignore:Exception ignored in. <function Session.__del__")
@pytest.mark.parametrize("work", [preempting, forking, searching, talking, calling, speculating])
def test_ctrl_c_at_any_byte_code(work: Callable[[LLM], Any]) -> None:
    options: dict[str, Any] = {}
    if work is speculating:
        options = {"script": dict.fromkeys(range(50), 7), "speculative_config": {"num_speculative_tokens": 3}}
    llm = make(10, tokenizer=MockTokenizer(), max_num_batched_tokens=16, max_num_seqs=6, **options)
    session_like = work is talking

    def run(count: int) -> int:
        trace, seen = interrupt_at(count)
        sys.settrace(trace)
        try:
            work(llm)
        finally:
            sys.settrace(None)
        return seen[0]

    run(sys.maxsize)
    total = run(sys.maxsize)
    expected = work(llm)
    if work is preempting:
        assert llm.stats()["num_preemptions"] > 0
    points = sorted(random.Random(0).sample(range(total), 120))
    for i, point in enumerate(points):
        try:
            run(point)
        except KeyboardInterrupt:
            pass
        else:
            # how much is done depends on what the cache has; an interrupt in __del__ is printed, not raised
            assert point > total // 2 or session_like
        engine: Any = llm._engine
        assert not engine.has_unfinished
        assert not llm._dispatcher.replies
        llm.cache.check_empty()
        if i % 30 == 0:
            assert work(llm) == expected
    assert work(llm) == expected
