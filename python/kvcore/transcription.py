"""Speech to text with Whisper: windows of 30 seconds, each one request.

    seek = 0
    while seek < the end:
        features = log-mel of the 30 s from seek on
        answer   = start token, language, task (, no timestamps), then what the model says
        short:     the answer is the text
        long:      timestamps part it into segments; seek goes to the end of the last whole one

Sources: Whisper (Radford et al., 2022) and its reference implementation for the tokens, what timestamps may follow
which, and how windows move on. A window is not told what was said before it, and is decoded once, at temperature 0.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kvcore.audio import HOP, SAMPLE_RATE, load_wav, log_mel
from kvcore.checkpoint.config import GenerationConfig
from kvcore.engine.interfaces import FloatArray
from kvcore.engine.sampling_params import SamplingParams
from kvcore.errors import InvalidArgument
from kvcore.llm import LLM

TASKS = ("transcribe", "translate")
_FRAMES = 3000
_SECONDS = 0.02
"""Of one step of a timestamp."""

_FIRST_BY = 50
"""The first segment begins within this many steps."""

_MULTILINGUAL = 51865
"""Tokens from here on make a model of many languages; those of English alone have one less."""

_LEAST = 10
"""Frames that a window behind the first has at least: 0.1 s, less holds no word."""

_LANGUAGE = re.compile(r"<\|[a-z]{2,3}\|>")


@dataclass(frozen=True)
class Segment:
    """A piece of speech.

    Attributes:
        start, end: seconds from the beginning of the sound.
        text: what was said.
        token_ids: the same as token ids, without timestamps.
    """

    start: float
    end: float
    text: str
    token_ids: list[int] = field(repr=False)


@dataclass(frozen=True)
class Transcription:
    """What was said.

    Attributes:
        language: of the speech, as Whisper calls it ("en"); None for a model of one language.
        segments: the pieces, in order.
        duration: seconds of the sound.
    """

    language: str | None
    segments: list[Segment]
    duration: float

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(segment.text for segment in self.segments).strip()


def transcribe(
    llm: LLM,
    audio: str | Path | Any,
    *,
    language: str | None = None,
    task: str = "transcribe",
    timestamps: bool = False,
    callback: Callable[[Segment], Any] | None = None,
) -> Transcription:
    """Write down speech.

    Args:
        llm: a Whisper model with its tokenizer.
        audio: a WAV file, or samples [n] at 16 kHz.
        language: of the speech ("en"); None: the model says.
        task: transcribe, or translate (to English).
        timestamps: whether sound of up to 30 s is parted into segments. Longer sound always is.
        callback: is called with each segment as soon as it is known.

    Raises:
        InvalidArgument: a file that is no WAV file, samples that are no finite numbers, another kind of model, a
            language or task that it lacks.
        TypeError: a value of the wrong type.
    """
    for name, value, kind, expected in (
        ("language", language, (str, type(None)), "None or a string"),
        ("task", task, str, "a string"),
        ("timestamps", timestamps, bool, "True or False"),
    ):
        if not isinstance(value, kind):
            raise TypeError(f"{name}: expected {expected}, got {value!r}")
    if callback is not None and not callable(callback):
        raise TypeError(f"callback: expected None or a function, got {callback!r}")
    words = Words(llm)
    samples = load_wav(audio) if isinstance(audio, (str, Path)) else _samples(audio)
    if task not in TASKS:
        raise InvalidArgument(f"task: expected one of {', '.join(TASKS)}, got {task!r}")
    if language is not None and language not in words.languages:
        known = ", ".join(words.languages) or "none, as the model has one language"
        raise InvalidArgument(f"language: expected one of {known}, got {language!r}")

    def say(sound: Any, timestamps: bool) -> list[int]:
        nonlocal language
        features = log_mel(sound, words.mel_bins, _FRAMES)
        ids, language = words.answer(features, language, task, timestamps=timestamps)
        return ids

    segments: list[Segment] = []
    short = len(samples) <= _FRAMES * HOP and not timestamps
    for segment in _whole(words, samples, say) if short else _parts(words, samples, say):
        segments.append(segment)
        if callback is not None:
            callback(segment)
    return Transcription(language, segments, len(samples) / SAMPLE_RATE)


def _samples(audio: Any) -> FloatArray:
    try:
        given = np.asarray(audio)
    except ValueError as error:  # lists of different lengths
        raise InvalidArgument(f"audio: expected a WAV file or samples [n], got {reprlib.repr(audio)}") from error
    if given.dtype.kind not in "fiu":
        raise TypeError(f"audio: expected a WAV file or samples [n], got {reprlib.repr(audio)} (dtype {given.dtype})")
    if given.ndim != 1 or not len(given):
        raise InvalidArgument(f"audio: expected a WAV file or samples [n], got shape {list(given.shape)}")
    with np.errstate(over="ignore"):  # what float32 cannot hold is refused as infinite
        samples = given.astype(np.float32)
    if not np.isfinite(samples).all():
        at = int(np.isfinite(samples).argmin())
        raise InvalidArgument(f"audio[{at}]: expected a finite number, got {given[at]}")
    return samples


Say = Callable[[Any, bool], list[int]]
"""From samples, and whether there shall be timestamps, to what the model says."""


def _whole(words: Words, samples: Any, say: Say) -> Iterator[Segment]:
    yield words.segment(say(samples, False), 0.0, len(samples) / SAMPLE_RATE)


def _parts(words: Words, samples: Any, say: Say) -> Iterator[Segment]:
    seek, frames = 0, -(-len(samples) // HOP)
    while seek == 0 or frames - seek >= _LEAST:
        ids = say(samples[seek * HOP :][: _FRAMES * HOP], True)
        pieces, passed = split(ids, words.first_timestamp, min(_FRAMES, frames - seek))
        at = seek * HOP / SAMPLE_RATE
        for start, end, piece in pieces:
            segment = words.segment(piece, at + start * _SECONDS, at + end * _SECONDS)
            if segment.text.strip():
                yield segment
        seek += passed


Piece = tuple[int, int, list[int]]


def split(ids: list[int], first: int, window: int) -> tuple[list[Piece], int]:
    """Part an answer at its timestamps.

    Args:
        ids: the answer, without the end of text.
        first: the timestamp 0; the others follow, 0.02 s apart.
        window: frames of sound (0.01 s) in the window.

    Returns:
        Pieces (start and end in steps of 0.02 s, token ids), and how many frames the window is done with: all, if
        speech ends in it, or up to the last timestamp behind which another segment began.
    """
    stamped = [token >= first for token in ids]
    ends = [i for i in range(1, len(ids)) if stamped[i - 1] and stamped[i]]
    closed = stamped[-2:] == [False, True]
    if not ends:
        stamps = [token - first for token in ids if token >= first]
        end = stamps[-1] if stamps and stamps[-1] > 0 else window // 2
        return [(max(0, ids[0] - first) if ids else 0, end, ids)], window
    pieces: list[Piece] = []
    start = 0
    for stop in [*ends, *([len(ids)] if closed else [])]:
        piece = ids[start:stop]
        pieces.append((max(0, piece[0] - first), max(0, piece[-1] - first), piece))
        start = stop
    passed = window if closed else 2 * (ids[start - 1] - first)
    return pieces, min(passed, window) or window  # always on


class Words:
    """A Whisper model's special tokens, and answers with them.

    Attributes:
        mel_bins: what the encoder takes.
        languages: what it knows, none for a model of English alone.
        first_timestamp: the token of timestamp 0.
        no_timestamps: the token that asks for none.
    """

    def __init__(self, llm: LLM) -> None:
        """Raises InvalidArgument for a model that is not Whisper, or that has no tokenizer; TypeError for no LLM."""
        if not hasattr(llm, "_prompts"):
            raise TypeError(f"llm: expected an LLM, got {llm!r}")
        reader, tokenizer = llm._prompts.reader, llm.tokenizer
        bins = None if reader is None else reader.mel_bins
        if bins is None or reader is None:
            raise InvalidArgument(f"transcribe: expected a Whisper model, got {llm.name}, which takes no sound")
        if tokenizer is None:
            raise InvalidArgument(f"transcribe: expected a model with a tokenizer, got {llm.name} without one")
        self._llm, self._tokenizer = llm, tokenizer
        self.mel_bins = bins
        self.start = reader.start_token_id
        self.no_timestamps = self._token("<|notimestamps|>")
        self.first_timestamp = self.no_timestamps + 1
        self._end = self._token("<|endoftext|>")
        generation = llm.generation_config or GenerationConfig()
        vocab = llm._decoder.spec.vocab_size
        self.languages: dict[str, int] = {}
        if generation.defaults.get("is_multilingual", vocab >= _MULTILINGUAL):
            tokens = ((token, tokenizer.id_to_token(token) or "") for token in range(self.start, self.no_timestamps))
            self.languages = {text[2:-2]: token for token, text in tokens if _LANGUAGE.fullmatch(text)}
        self._never = [token for token in generation.suppress_tokens if token < vocab]
        self._not_first = [token for token in generation.begin_suppress_tokens if token < vocab]

    def _token(self, text: str) -> int:
        token = self._tokenizer.token_to_id(text)
        if token is None:
            raise InvalidArgument(f"transcribe: expected a tokenizer with {text}, got {self._llm.name}'s without it")
        return token

    def answer(
        self, features: FloatArray, language: str | None, task: str, *, timestamps: bool
    ) -> tuple[list[int], str | None]:
        """What the model says of a window, without the end of text, and in which language the speech is.

        Where nobody knows that the model says it first, in the same request.
        """
        prompt, opening = [self.start], list[list[int]]()
        if self.languages:
            known = list(self.languages.values()) if language is None else [self.languages[language]]
            opening = [known, [self._token(f"<|{task}|>")]]
        if not timestamps:
            opening.append([self.no_timestamps])
        while opening and len(opening[0]) == 1:
            prompt += opening.pop(0)
        adjust = partial(self._adjust, timestamps, opening)
        limit = (self._llm.max_model_len or 448) // 2
        params = SamplingParams(temperature=0, max_tokens=limit, logits_processors=[adjust])
        (output,) = self._llm.generate({"input_features": features, "decoder_token_ids": prompt}, params)
        said = output.token_ids
        if opening:
            language = next(name for name, token in self.languages.items() if token == said[0])
        return [token for token in said[len(opening) :] if token != self._end], language

    def segment(self, ids: list[int], start: float, end: float) -> Segment:
        """A segment of these tokens."""
        said = [token for token in ids if token < self._end]
        return Segment(round(start, 2), round(end, 2), self._tokenizer.decode(said), said)

    def _adjust(self, timestamps: bool, opening: list[list[int]], said: list[int], row: FloatArray) -> FloatArray:
        """Forbid what may not come next. ``said`` is the answer so far, at first one of each of ``opening``."""
        if len(said) < len(opening):
            allowed = opening[len(said)]
            kept = row[allowed]
            row[:] = -np.inf
            row[allowed] = kept
            return row
        said = said[len(opening) :]
        row[self._never] = -np.inf
        if not said:
            row[self._not_first] = -np.inf
        row[self._end + 1 : self.first_timestamp] = -np.inf
        if timestamps:
            self._adjust_timestamps(said, row)
        else:
            row[self.first_timestamp :] = -np.inf
        return row

    def _adjust_timestamps(self, said: list[int], row: FloatArray) -> None:
        """They come in pairs, never go back, and come where they are together more probable than any word."""
        first = self.first_timestamp
        last = bool(said) and said[-1] >= first
        before = len(said) < 2 or said[-2] >= first
        if last and before:
            row[first:] = -np.inf
        elif last:
            row[: self._end] = -np.inf
        stamps = [token for token in said if token >= first]
        if stamps:
            row[first : stamps[-1] + (0 if last and not before else 1)] = -np.inf
        if not said:
            row[:first] = -np.inf
            row[first + _FIRST_BY + 1 :] = -np.inf
        top = row.max()
        stamp_sum = np.exp(row[first:].astype(np.float64) - top).sum()
        if np.log(max(stamp_sum, 1e-300)) > row[:first].max() - top:
            row[:first] = -np.inf
