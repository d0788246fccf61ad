"""How windows, timestamps and special tokens make a text of speech. Real speech is in tests/test_real_models.py."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import kvcore.cli as cli
from kvcore import InvalidArgument, transcribe
from kvcore.checkpoint.config import GenerationConfig
from kvcore.transcription import split
from models import EXACT, REFERENCE

END, START, EN, DE, TRANSCRIBE, TRANSLATE, NONE, ZERO = 50, 51, 52, 53, 54, 55, 56, 57
NAMES = {END: "endoftext", START: "startoftranscript", EN: "en", DE: "de", TRANSCRIBE: "transcribe",
         TRANSLATE: "translate", NONE: "notimestamps"}  # fmt: skip
VOCAB = ZERO + 1501


class Speaker:
    """Looks like an LLM, and says what it is told: an answer for each window."""

    name, max_model_len = "speaker", 448

    def __init__(self, *answers: list[int], **generation: Any) -> None:
        self.answers = list(answers)
        self.asked: list[Any] = []
        self.params: list[Any] = []
        self._decoder = SimpleNamespace(spec=SimpleNamespace(vocab_size=VOCAB))
        self._prompts = SimpleNamespace(reader=SimpleNamespace(mel_bins=80, start_token_id=START))
        self.generation_config = GenerationConfig(defaults={"is_multilingual": True}, **generation)
        self.tokenizer: Any = self

    def generate(self, prompt: Any, params: Any) -> Any:
        assert prompt["input_features"].shape == (80, 3000)
        self.asked.append(prompt["decoder_token_ids"])
        self.params.append(params)
        return [SimpleNamespace(token_ids=self.answers.pop(0))]

    def __enter__(self) -> Speaker:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def token_to_id(self, text: str) -> int | None:
        return next((token for token, name in NAMES.items() if f"<|{name}|>" == text), None)

    def id_to_token(self, token: int) -> str | None:
        return f"<|{NAMES[token]}|>" if token in NAMES else None

    def decode(self, ids: list[int]) -> str:
        return "".join(f" {token}" for token in ids)


def sound(seconds: float) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(int(16_000 * seconds)).astype(np.float32)


def at(seconds: float) -> int:
    return ZERO + round(seconds / 0.02)


def said(llm: Any, seconds: float, **options: Any) -> list[tuple[float, float, str]]:
    return [(s.start, s.end, s.text) for s in transcribe(llm, sound(seconds), **options).segments]


def test_a_short_one_in_a_given_language() -> None:
    llm = Speaker([1, 2, END])
    result = transcribe(llm, sound(2), language="de", task="translate")
    assert (result.text, result.language, result.duration) == ("1 2", "de", 2.0)
    assert llm.asked == [[START, DE, TRANSLATE, NONE]]
    assert [(s.start, s.end) for s in result.segments] == [(0.0, 2.0)]


def test_the_model_says_which_language() -> None:
    """In the request that says the words, so that the sound is encoded once."""
    llm = Speaker([DE, TRANSCRIBE, NONE, 1, END])
    result = transcribe(llm, sound(1))
    assert (result.language, result.text) == ("de", "1")
    assert llm.asked == [[START]]
    (process,) = llm.params[0].logits_processors

    def allowed(*said: int) -> list[int]:
        return np.flatnonzero(np.isfinite(process(list(said), np.zeros(VOCAB, np.float32)))).tolist()

    assert [allowed(), allowed(DE), allowed(DE, TRANSCRIBE)] == [[EN, DE], [TRANSCRIBE], [NONE]]
    assert allowed(DE, TRANSCRIBE, NONE) == list(range(END + 1))
    llm = Speaker([DE, TRANSLATE, at(0), 1, at(29), at(29), END], [at(0), 2, at(1), END])
    assert transcribe(llm, sound(31), task="translate").text == "1 2"
    assert llm.asked == [[START], [START, DE, TRANSLATE]]


def test_timestamps_part_a_short_one() -> None:
    llm = Speaker([at(0), 1, at(1), at(1.5), 2, 3, at(2), END])
    assert said(llm, 2.5, language="en", timestamps=True) == [(0.0, 1.0, " 1"), (1.5, 2.0, " 2 3")]
    assert llm.asked == [[START, EN, TRANSCRIBE]]


def test_windows_go_on_where_the_last_whole_segment_ended() -> None:
    llm = Speaker(
        [at(0), 1, at(10), at(10), 2, at(28), at(28.5), 3, END],  # cut off: again from 28.0 on
        [at(0.5), 3, at(4), at(4), 4, at(30)],  # ends in the window: done with all of it
        [at(0), 5, at(1)],
    )
    heard: list[Any] = []
    assert said(llm, 60, language="en", callback=heard.append) == [
        (0.0, 10.0, " 1"), (10.0, 28.0, " 2"), (28.5, 32.0, " 3"), (32.0, 58.0, " 4"), (58.0, 59.0, " 5"),
    ]  # fmt: skip
    assert len(heard) == 5
    assert not llm.answers


@pytest.mark.parametrize(
    ("ids", "window", "pieces", "passed"),
    [
        ([], 3000, [(0, 1500, [])], 3000),
        ([5], 1000, [(0, 500, [5])], 1000),
        ([ZERO, 5, ZERO + 100], 3000, [(0, 100, [ZERO, 5, ZERO + 100])], 3000),
        ([ZERO + 7, 5], 3000, [(7, 7, [ZERO + 7, 5])], 3000),
        ([ZERO, ZERO], 3000, [(0, 0, [ZERO])], 3000),  # nothing moved: on to the next window
        ([ZERO, 5, ZERO + 90, ZERO + 90], 3000, [(0, 90, [ZERO, 5, ZERO + 90])], 180),
        ([ZERO, 5, ZERO + 1500, ZERO + 1500, 6], 400, [(0, 1500, [ZERO, 5, ZERO + 1500])], 400),
    ],
)
def test_split(ids: list[int], window: int, pieces: Any, passed: int) -> None:
    assert split(ids, ZERO, window) == (pieces, passed)


def rules(timestamps: bool, said: list[int], row: np.ndarray | None = None) -> list[int]:
    """Which tokens may come next."""
    llm = Speaker([END], suppress_tokens=(7, 9, 10**6), begin_suppress_tokens=(8,))
    transcribe(llm, sound(1), language="en", timestamps=timestamps)
    (process,) = llm.params[0].logits_processors
    row = np.zeros(VOCAB, np.float32) if row is None else row
    return np.flatnonzero(np.isfinite(process(said, row.copy()))).tolist()


def test_what_may_be_said() -> None:
    words = [token for token in range(END + 1) if token not in (7, 9)]
    assert rules(False, [1]) == words
    assert rules(False, []) == [token for token in words if token != 8]
    assert rules(True, []) == list(range(ZERO, ZERO + 51))  # a start within the first second
    certain = np.zeros(VOCAB, np.float32)
    certain[[3, END]] = 20
    assert rules(True, [at(1), 3], certain) == [*words, *range(at(1) + 1, VOCAB)]
    assert rules(True, [at(1), 3]) == list(range(at(1) + 1, VOCAB))  # all timestamps together beat any word
    assert rules(True, [at(1), 3, at(2)], certain) == [END, *range(at(2), VOCAB)]
    assert rules(True, [at(1), 3, at(2), at(2)], certain) == words


def test_what_is_refused(tmp_path: Path) -> None:
    from kvcore import LLM

    for options, message in (
        ({"language": "xx"}, "language: expected one of en, de, got 'xx'"),
        ({"task": "sing"}, "task: expected one of transcribe, translate"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            transcribe(Speaker(), sound(1), **options)  # type: ignore[arg-type]
    for bad in (np.zeros((2, 5)), np.zeros(0), [[0.0], [0.0, 1.0]], [0.0, np.nan], [0.0, 1e300]):
        with pytest.raises(InvalidArgument, match="audio"):
            transcribe(Speaker(), bad)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="llm: expected an LLM, got None"):
        transcribe(None, sound(1))  # type: ignore[arg-type]
    for audio in (["a"], b"abc", None, 1j * sound(1)):
        with pytest.raises(TypeError, match="audio: expected a WAV file or samples"):
            transcribe(Speaker(), audio)  # type: ignore[arg-type]
    for name in ("language", "task", "timestamps", "callback"):
        speaker = Speaker()
        for wrong in ([1], 5):
            with pytest.raises(TypeError, match=f"{name}: expected .*, got"):
                transcribe(speaker, sound(1), **{name: wrong})  # type: ignore[arg-type]
        assert not speaker.asked
    for folder, message in (("whisper", "without one"), ("t5", "takes no sound"), ("llama_gqa", "takes no sound")):
        with LLM(REFERENCE / folder, **EXACT) as llm, pytest.raises(InvalidArgument, match=message):
            transcribe(llm, sound(1))


# -- the command -----------------------------------------------------------------------------------------------------

SPEECH = str(Path(__file__).parent / "data" / "audio" / "espeak_16k.wav")


def command(
    llm: Speaker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *argv: str
) -> tuple[int, str, str]:
    monkeypatch.setattr(cli, "_open", lambda model, **options: llm)
    code = cli.main(["transcribe", *argv])
    return code, *capsys.readouterr()


def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(Speaker([EN, TRANSCRIBE, NONE, 1, 2, END]), monkeypatch, capsys, SPEECH) == (0, "1 2\n", "")
    llm = Speaker([at(0), 1, at(1), at(1), 2, at(7), END])
    code, out, err = command(llm, monkeypatch, capsys, SPEECH, "--timestamps", "--language", "en")
    assert (code, err) == (0, "")
    assert out == "[00:00.00 --> 00:01.00] 1\n[00:01.00 --> 00:07.00] 2\n"
    code, out, _ = command(Speaker([1, END]), monkeypatch, capsys, SPEECH, "--json", "--language", "de")
    told = json.loads(out)
    assert (code, told["text"], told["language"], told["model"]) == (0, "1", "de", "speaker")
    assert told["segments"] == [{"start": 0.0, "end": 7.36, "text": " 1"}]


def test_the_command_says_what_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "text.wav").write_text("no sound")
    for argv, message in (
        ([str(tmp_path / "none.wav")], "expected a WAV file, got No such file"),
        ([str(tmp_path / "text.wav")], "expected a WAV file of integer samples"),
        ([SPEECH, "--language", "xx"], "language: expected one of en, de"),
        ([SPEECH, "--task", "sing"], "task: expected one of"),
    ):
        code, out, err = command(Speaker(), monkeypatch, capsys, *argv)
        assert (code, out) == (1, "")
        assert err.startswith("kvcore: ")
        assert err.count("\n") == 1
        assert message in err
    assert command(Speaker(), monkeypatch, capsys)[0] == 2


def test_clock() -> None:
    assert [cli._clock(seconds) for seconds in (0, 61.5, 3600)] == ["00:00.00", "01:01.50", "1:00:00.00"]
