"""Sessions: a conversation computes nothing twice, whatever runs between its turns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcore import LLM, BeamSearchParams, SamplingParams
from kvcore.errors import CheckpointError, InvalidArgument, InvalidState, OutOfBlocks
from kvcore.session import Session
from mocks import MockTokenizer
from models import EXACT, REFERENCE, assert_nothing_held
from test_llm import make
from test_llm_lora import saved

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
        push_out(llm)
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


def test_a_request_without_room_beside_sessions_says_of_which_pool() -> None:
    with model(num_kv_blocks=10) as llm:
        sessions = [Session(llm, random_tokens(40, seed)) for seed in range(2)]
        for session in sessions:
            session.generate(GREEDY)
        # a session's 46 tokens hold 3 blocks
        with pytest.raises(OutOfBlocks, match=r"5 blocks of 16 tokens needed, 4 available: .* the rest of 10"):
            llm.generate(random_tokens(78, 9), GREEDY)
        sessions[0].close()
        assert llm.generate(random_tokens(78, 9), GREEDY)[0].finish_reason == "length"
        sessions[1].close()


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
        assert session.num_cached_tokens == 45
        session.append([5])
        output = session.generate(GREEDY)
        assert (output.num_cached_tokens, output.token_ids) == (45, wanted)
        session.close()
        assert_nothing_held(llm)
        with pytest.raises(CheckpointError):
            Session.load(llm, tmp_path / "nothing")
        with pytest.raises(InvalidState, match="computed"):
            Session(llm).save(path)
        with Session(llm, [9, 8, 7]) as session, pytest.raises(InvalidState, match="computed"):
            session.save(path)


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


def push_out(llm: LLM) -> None:
    """Push everything out of the cache that nobody holds."""
    for seed in range(1, 5):
        llm.generate(random_tokens(250, seed), GREEDY)


def test_others_cannot_take_the_blocks_between_an_answers_end_and_its_return(monkeypatch: pytest.MonkeyPatch) -> None:
    with model() as llm, Session(llm, random_tokens(40)) as session:
        generate = llm.generate

        def then_others(*args: Any, **options: Any) -> Any:
            outputs = generate(*args, **options)
            for seed in range(1, 5):
                generate(random_tokens(250, seed), GREEDY)
            return outputs

        with monkeypatch.context() as patch:
            patch.setattr(llm, "generate", then_others)
            session.generate(GREEDY)
        assert session.num_cached_tokens == len(session) - 1
        for item in session.stream(GREEDY):
            if item.finished:
                push_out(llm)
        assert session.num_cached_tokens == len(session) - 1
        session.close()
        assert_nothing_held(llm)


def test_a_stream_that_outlives_its_session_holds_nothing() -> None:
    with model() as llm:
        session = Session(llm, random_tokens(40))
        stream = session.stream(GREEDY)
        next(stream)
        session.close()
        assert sum(len(item.token_ids) for item in stream) == 5
        assert_nothing_held(llm)


@pytest.mark.parametrize("options", [{"enable_prefix_caching": False}, {"prefix_ttl": 0}, {"prefix_ttl": 0.0}])
def test_models_without_prefixes_have_no_sessions(options: dict[str, Any], tmp_path: Path) -> None:
    with model(**options) as llm:
        for begin in (lambda: Session(llm, [1]), lambda: Session.load(llm, tmp_path / "x")):
            with pytest.raises(InvalidArgument, match="enable_prefix_caching=False or prefix_ttl=0"):
                begin()


def test_what_is_held_outlives_its_ttl() -> None:
    with model(prefix_ttl=1e-3) as llm, Session(llm, random_tokens(40)) as session:
        session.generate(GREEDY)
        push_out(llm)
        assert session.generate(GREEDY).num_cached_tokens == 45


def test_adapters_hold_what_they_compute(tmp_path: Path) -> None:
    lora, path = saved(tmp_path / "adapter", 1), tmp_path / "talk.safetensors"
    with model() as llm, Session(llm, random_tokens(40)) as session:
        session.generate(GREEDY, lora_request=lora)
        assert session.num_cached_tokens == 45
        push_out(llm)
        session.save(path)
        with session.fork() as twin:
            assert twin.generate(GREEDY, lora_request=lora).num_cached_tokens == 45
        session.rewind(30)
        assert session.num_cached_tokens == 29
        with Session.load(llm, path) as loaded:
            assert loaded.num_cached_tokens == 45
            assert {item.num_cached_tokens for item in loaded.stream(GREEDY, lora_request=lora)} == {45}
            assert loaded.num_cached_tokens == 51
            # without the adapter all is another's
            assert loaded.generate(GREEDY).num_cached_tokens == 0
        for bad in ("x", ["x"], [lora, lora]):
            with pytest.raises(TypeError, match="lora_request: expected"):
                session.generate(GREEDY, lora_request=bad)
        session.close()
        assert_nothing_held(llm)


def test_what_was_appended_is_saved(tmp_path: Path) -> None:
    path = tmp_path / "talk.safetensors"
    with model() as llm, Session(llm, random_tokens(40)) as session:
        session.generate(GREEDY)
        session.append([1, 2, 3])
        session.save(path)
        session.save(path)
        with Session.load(llm, path) as loaded:
            assert (loaded.token_ids, loaded.num_cached_tokens) == (session.token_ids, 45)
            assert loaded.generate(GREEDY).num_cached_tokens == 45


def test_a_chat_that_is_refused_changes_nothing() -> None:
    llm = make(tokenizer=MockTokenizer(), max_model_len=64)
    with Session(llm, "hello") as session:
        session.generate(GREEDY)
        before, held = session.token_ids, session.num_cached_tokens
        long, short = ([{"role": "user", "content": text}] for text in ("long " * 40, "why?"))
        bad: list[tuple[Any, Any, type[Exception], str]] = [
            (long, GREEDY, InvalidArgument, "at most 63 tokens"),
            (short, SamplingParams(n=2), InvalidArgument, "n=2"),
            (short, SamplingParams(stop_token_ids=[9999]), InvalidArgument, "stop_token"),
            (short, 5, TypeError, "params: expected SamplingParams, got int"),
        ]
        for messages, params, error, match in bad:
            with pytest.raises(error, match=match):
                session.chat(messages, params)
            assert (session.token_ids, session.num_cached_tokens) == (before, held)
    llm.cache.check_empty()


def test_a_full_session_says_so() -> None:
    with model(max_model_len=50) as llm, Session(llm, random_tokens(40)) as session:
        output = session.generate(SamplingParams(temperature=0, max_tokens=None, ignore_eos=True))
        assert (output.outputs[0].finish_reason, len(session)) == ("length", 50)
        before = session.token_ids
        for ask in (session.generate, session.stream):
            with pytest.raises(InvalidArgument, match=r"at most 49 tokens .*max_model_len.*, got 50 tokens"):
                ask(GREEDY)
        assert (session.token_ids, session.num_cached_tokens) == (before, 49)
        assert llm.logits(before).shape[0] == 50
        session.rewind(49)
        assert len(session.generate(GREEDY).token_ids) == 1


@pytest.mark.parametrize("params", [[GREEDY], "x", 5, BeamSearchParams(beam_width=2, max_tokens=4)])
def test_params_of_another_type(params: Any) -> None:
    llm = make()
    with Session(llm, [1, 2]) as session:
        for ask in (session.generate, session.stream):
            with pytest.raises(TypeError, match=f"params: expected SamplingParams, got {type(params).__name__}"):
                ask(params)
        assert session.token_ids == [1, 2]


def test_no_llm(tmp_path: Path) -> None:
    for begin in (lambda: Session(None, [1]), lambda: Session.load(None, tmp_path / "x")):  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="llm: expected an LLM, got NoneType"):
            begin()
