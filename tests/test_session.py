"""Sessions: a conversation computes nothing twice, whatever runs between its turns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcore import LLM, SamplingParams
from kvcore.errors import CheckpointError, InvalidArgument, InvalidState
from kvcore.session import Session
from mocks import MockTokenizer
from models import EXACT, REFERENCE, assert_nothing_held
from test_llm import make

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def model(**options: Any) -> LLM:
    return LLM(REFERENCE / "llama_gqa", **{"num_kv_blocks": 24, **EXACT, **options})


def random_tokens(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 320, count).tolist()  # type: ignore[no-any-return]


def test_turns() -> None:
    with model() as llm:
        session = Session(llm, random_tokens(40))
        first = session.generate(GREEDY)
        assert (first.num_cached_tokens, len(session)) == (0, 46)
        # others push everything out of the cache that nobody holds
        for seed in range(1, 5):
            llm.generate(random_tokens(250, seed), GREEDY)
        session.append([1, 2, 3])
        second = session.generate(GREEDY)
        assert second.prompt_token_ids == session.token_ids[:49]
        assert second.num_cached_tokens == 45  # all but the answer's last token, which was never computed
        expected = llm.generate(second.prompt_token_ids, GREEDY, use_cache=False)[0].token_ids
        assert second.token_ids == expected
        session.close()
        session.close()
        assert_nothing_held(llm)
        with pytest.raises(InvalidState, match="close"):
            session.append([1])


def test_forks_share_and_rewinding_goes_back() -> None:
    with model() as llm:
        session = Session(llm, random_tokens(40))
        session.generate(GREEDY)
        used = llm.stats()["cache"]["used"]
        twin = session.fork()
        assert llm.stats()["cache"]["used"] == used
        session.append([1, 2])
        twin.append([3, 4])
        outputs = [s.generate(GREEDY) for s in (session, twin)]
        # the first has computed the last token of what they share, so the second finds that as well
        assert [o.num_cached_tokens for o in outputs] == [45, 46]
        session.rewind(40)
        assert session.token_ids == random_tokens(40)
        again = session.generate(GREEDY)
        assert again.num_cached_tokens == 39
        assert session.token_ids[:46] == twin.token_ids[:46]
        session.rewind(0)
        assert (len(session), session.num_cached_tokens) == (0, 0)
        with pytest.raises(InvalidArgument, match="at least one token"):
            session.generate(GREEDY)
        for bad, error in ((-1, InvalidArgument), (1, InvalidArgument), (1.5, TypeError)):
            with pytest.raises(error, match="num_tokens"):
                session.rewind(bad)  # type: ignore[arg-type]
        session.close()
        twin.close()
        assert_nothing_held(llm)


def test_streams() -> None:
    with model() as llm, Session(llm, random_tokens(20)) as session:
        tokens = [t for item in session.stream(GREEDY) for t in item.token_ids]
        assert session.token_ids[20:] == tokens
        for _ in session.stream(GREEDY):
            break
        assert len(session) == 27
        assert session.num_cached_tokens == 26
        with pytest.raises(InvalidArgument, match="n=2"):
            session.stream(SamplingParams(n=2))


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "talk.safetensors"
    with model() as llm, Session(llm, random_tokens(40)) as session:
        with pytest.raises(InvalidArgument, match="at least one token"):
            Session(llm).generate(GREEDY)
        session.generate(GREEDY)
        session.save(path)
        expected = session.token_ids
        session.append([5])
        wanted = session.generate(GREEDY).token_ids
    with model() as llm:
        session = Session.load(llm, path)
        assert session.token_ids == expected
        session.append([5])
        output = session.generate(GREEDY)
        assert (output.num_cached_tokens, output.token_ids) == (45, wanted)
        session.close()
        assert_nothing_held(llm)
        with pytest.raises(CheckpointError):
            Session.load(llm, tmp_path / "nothing")
        with pytest.raises(InvalidState, match="computed"):
            Session(llm).save(path)


def test_text_and_chat() -> None:
    llm = make(tokenizer=MockTokenizer())
    session = Session(llm, "hello")
    session.append(" you")
    assert session.token_ids == list(b"hello you")
    session.generate(GREEDY)
    with pytest.raises(InvalidArgument, match="prompt"):
        session.append("")
    with pytest.raises(InvalidArgument, match="vocabulary"):
        session.append([300])
    messages = [{"role": "user", "content": "a long question about many things"}]
    block = {"type": "text", "text": messages[0]["content"], "cache_control": {"type": "ephemeral"}}
    with Session(llm) as other:
        marked = other.chat([{"role": "user", "content": [block]}], GREEDY)
    first = session.chat(messages, GREEDY)
    assert marked.prompt_token_ids == first.prompt_token_ids
    assert first.token_ids == llm.chat(messages, GREEDY)[0].token_ids
    messages += [{"role": "assistant", "content": "yes"}, {"role": "user", "content": "why?"}]
    second = session.chat(messages, GREEDY)
    assert second.num_cached_tokens >= 32
    session.close()
    llm.cache.check_empty()


def test_a_session_that_is_dropped_lets_go() -> None:
    with model() as llm:
        session = Session(llm, random_tokens(20))
        session.generate(GREEDY)
        del session
        assert_nothing_held(llm)
        kept = Session(llm, random_tokens(20))
        kept.generate(GREEDY)
    kept.close()
    assert "closed" in repr(kept)
