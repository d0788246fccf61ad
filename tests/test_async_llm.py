"""AsyncLLM: many tasks at once, cancellation, slow consumers, errors."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine
from typing import Any

import numpy as np
import pytest

from kvcore import SamplingParams
from kvcore.async_llm import AsyncLLM
from kvcore.errors import InvalidArgument, InvalidState, OutOfBlocks
from mocks import MockTokenizer
from test_llm import make

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, 60))


async def collect(stream: Any) -> list[int]:
    return [token async for item in stream for token in item.outputs[0].token_ids]


async def settled(llm: AsyncLLM) -> None:
    """The thread has done everything that was posted before."""
    while (await llm.stats())["num_running"] or (await llm.stats())["num_waiting"]:
        await asyncio.sleep(0.001)


def test_many_at_once_are_one_batch() -> None:
    async def main() -> None:
        llm = make()
        expected = [o.token_ids for o in llm.generate([[i] * 3 for i in range(8)], GREEDY)]
        cache = llm.cache
        llm._decoder.fail = lambda: time.sleep(0.001)
        async with AsyncLLM(llm) as async_llm:
            got = await asyncio.gather(*(collect(async_llm.generate([i] * 3, GREEDY)) for i in range(8)))
            assert got == expected
            assert max(map(len, llm._decoder.batches)) > 4
        cache.check_empty()
        with pytest.raises(InvalidState, match="close"):
            async_llm.generate([1], GREEDY)

    run(main())
    assert not any(t.name == "kvcore-engine" for t in threading.enumerate())


def test_items_are_what_is_new_and_text() -> None:
    async def main() -> None:
        async with AsyncLLM(make(tokenizer=MockTokenizer())) as llm:
            whole = llm.llm.generate("hello", GREEDY)[0]
            items = [item async for item in llm.generate("hello", GREEDY)]
            assert "".join(item.text for item in items) == whole.text
            assert [item.finished for item in items] == [False] * (len(items) - 1) + [True]
            chat = [{"role": "user", "content": "hi"}]
            assert await collect(llm.chat(chat, GREEDY)) == llm.llm.chat(chat, GREEDY)[0].token_ids

    run(main())


def test_cancellation_returns_the_blocks() -> None:
    async def main() -> None:
        llm = make()
        llm._decoder.fail = lambda: time.sleep(0.001)
        async with AsyncLLM(llm) as async_llm:
            long = SamplingParams(temperature=0, max_tokens=700, ignore_eos=True)
            tasks = [asyncio.create_task(collect(async_llm.generate([i], long))) for i in range(3)]
            other = asyncio.create_task(collect(async_llm.generate([9], GREEDY)))
            await asyncio.sleep(0.02)
            for task in tasks:
                task.cancel()
            assert len(await other) == 20
            for task in tasks:
                with pytest.raises(asyncio.CancelledError):
                    await task
            await settled(async_llm)
            llm.cache.check_empty()
            # left, not cancelled
            async for _ in async_llm.generate([1], long):
                break
            await asyncio.sleep(0.01)
            await settled(async_llm)
            llm.cache.check_empty()
            assert llm.stats()["num_finished"]["abort"] == 4

    run(main())


def test_a_slow_consumer_gets_everything_and_holds_up_nobody() -> None:
    async def main() -> None:
        async with AsyncLLM(make()) as llm:
            expected = llm.llm.generate([1], GREEDY)[0].token_ids
            slow = llm.generate([1], GREEDY)
            first = await anext(slow)
            assert len(await collect(llm.generate([2], GREEDY))) == 20
            rest = [item async for item in slow]
            assert len(rest) <= 2
            assert [t for item in [first, *rest] for t in item.token_ids] == expected

    run(main())


def test_errors_reach_those_whom_they_concern() -> None:
    async def main() -> None:
        llm = make(10)
        async with AsyncLLM(llm) as async_llm:
            for prompt, error in (([], InvalidArgument), ([1] * 60, OutOfBlocks), ([[1], [2]], InvalidArgument)):
                with pytest.raises(error):
                    async_llm.generate(prompt, GREEDY)

            def edit(logits: np.ndarray, positions: np.ndarray) -> None:
                logits[positions == 12] = np.nan

            llm._decoder.edit = edit
            bad = asyncio.create_task(collect(async_llm.generate([3] * 10, GREEDY)))
            short = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
            good = asyncio.create_task(collect(async_llm.generate([1], short)))
            assert len(await good) == 5
            with pytest.raises(InvalidState, match="finite"):
                await bad
            llm._decoder.edit = None

            def fail() -> None:
                raise RuntimeError("broken")

            llm._decoder.fail = fail
            with pytest.raises(InvalidState, match="broken"):
                await collect(async_llm.generate([1], GREEDY))
            llm._decoder.fail = None
            assert len(await collect(async_llm.generate([1], GREEDY))) == 20
            llm.cache.check_empty()

    run(main())


def test_close_ends_what_runs() -> None:
    async def main() -> None:
        llm = make()
        llm._decoder.fail = lambda: time.sleep(0.001)
        async_llm = AsyncLLM(llm)
        cache = llm.cache
        long = SamplingParams(temperature=0, max_tokens=700, ignore_eos=True)
        task = asyncio.create_task(collect(async_llm.generate([1], long)))
        await asyncio.sleep(0.02)
        await async_llm.close()
        with pytest.raises(InvalidState, match="closed before"):
            await task
        await async_llm.close()
        cache.check_empty()

    run(main())


def test_options_are_not_given_twice() -> None:
    with pytest.raises(InvalidArgument, match="max_num_seqs"):
        AsyncLLM(make(), max_num_seqs=3)


def test_timeouts() -> None:
    async def main() -> None:
        llm = make()
        llm._decoder.fail = lambda: time.sleep(0.001)
        async with AsyncLLM(llm) as async_llm:
            long = SamplingParams(temperature=0, max_tokens=700, ignore_eos=True)
            items = [item async for item in async_llm.generate([1], long, timeout=0.05)]
            assert (items[-1].finish_reason, items[-1].outputs[0].stop_reason) == ("abort", "timeout")

    run(main())
