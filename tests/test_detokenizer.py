from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import SupportsIndex

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models

from kvcore.errors import InvalidArgument
from kvcore.text.detokenizer import Detokenizer, StopChecker
from kvcore.text.tokenizer import Tokenizer

SENTENCEPIECE = json.loads((Path(__file__).parent / "data" / "sentencepiece_bpe.json").read_text(encoding="utf-8"))


@dataclass
class ByteTokens:
    """A tokenizer whose token i is the i-th of some byte strings."""

    tokens: Sequence[bytes]
    special: frozenset[int] = frozenset()
    strips_leading_space: bool = False
    byte_exact: bool = True

    def token_bytes(self, token_id: SupportsIndex) -> bytes:
        return self.tokens[token_id.__index__()]

    def is_special(self, token_id: SupportsIndex) -> bool:
        return token_id.__index__() in self.special

    def decode(self, ids: Iterable[SupportsIndex], skip_special_tokens: bool = True) -> str:
        kept = [i for i in ids if not (skip_special_tokens and self.is_special(i))]
        text = b"".join(map(self.token_bytes, kept)).decode("utf-8", "replace")
        return text[1:] if self.strips_leading_space and text.startswith(" ") else text


def stream(tokenizer: ByteTokens | Tokenizer, ids: Iterable[int], skip: bool = True) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip)
    return [*(detokenizer.push(i) for i in ids), detokenizer.finish()]


@pytest.mark.parametrize(
    ("tokens", "pieces"),
    [
        ([b"\xf0\x9f", b"\xa4", b"\xa3"], ["", "", "🤣", ""]),
        ([b"\xed", b"\x95\x9c"], ["", "한", ""]),
        ([b"\x85"], ["\ufffd", ""]),  # no character begins so: known at once
        ([b"a\x85b"], ["a\ufffdb", ""]),
        ([b"\xf0\x9f", b"a"], ["", "\ufffda", ""]),  # known to be broken by what follows
        ([b"\xf0\x9f", b"\xf0\x9f", b"\x98\x80"], ["", "\ufffd", "😀", ""]),
        ([b"\xe2\x82"], ["", "\ufffd"]),  # cut short: known at the end
        ([b"\xc0\xaf"], ["\ufffd\ufffd", ""]),
        ([b"\xed\xa0", b"\x80"], ["\ufffd\ufffd", "\ufffd", ""]),  # a surrogate is no character
        ([b"x \xed", b"\x95", b"\x9c\xea", b"\xb8\x80!"], ["x ", "", "한", "글!", ""]),
        ([], [""]),
    ],
)
def test_characters_stay_whole(tokens: list[bytes], pieces: list[str]) -> None:
    tokenizer = ByteTokens(tokens)
    assert stream(tokenizer, range(len(tokens))) == pieces
    assert "".join(pieces) == tokenizer.decode(range(len(tokens)))


def test_broken_bytes_leave_at_once() -> None:
    """Only what can still become a character is held: checked for every sequence of up to three bytes of interest."""
    characters = [chr(point).encode() for point in range(0x80, 0x110000, 64) if not 0xD800 <= point < 0xE000]
    starts = {b""} | {character[:n] for character in characters for n in range(1, len(character))}
    interesting = [
        0x41,
        0x80,
        0x8F,
        0x90,
        0x9F,
        0xA0,
        0xBF,
        *(0xC1, 0xC2, 0xDF, 0xE0, 0xE1, 0xED, 0xEF, 0xF0, 0xF1, 0xF4, 0xF5, 0xFF),
    ]
    tokenizer = ByteTokens([bytes((b,)) for b in range(256)])
    for n in (1, 2, 3):
        for data in itertools.product(interesting, repeat=n):
            detokenizer = Detokenizer(tokenizer)
            out = "".join(map(detokenizer.push, data))
            held = next(k for k in range(n, -1, -1) if bytes(data[n - k :]) in starts)
            assert out == bytes(data[: n - held]).decode("utf-8", "replace"), bytes(data)


UTF8_PARTS = st.sampled_from(
    [b"\xf0\x9f", b"\xa4", b"\xa3", b"\xed", b"\x95\x9c", b"\x85", b"a", b" ", b"\xe2\x82", b"\xac", b"\xff", b"\xc2"]
)


@given(
    tokens=st.lists(st.one_of(st.binary(max_size=6), UTF8_PARTS, st.text(max_size=3).map(str.encode))),
    special=st.frozensets(st.integers(0, 8)),
    strips=st.booleans(),
    skip=st.booleans(),
)
def test_pieces_joined_are_the_whole(tokens: list[bytes], special: frozenset[int], strips: bool, skip: bool) -> None:
    tokenizer = ByteTokens(tokens, special, strips)
    assert "".join(stream(tokenizer, range(len(tokens)), skip)) == tokenizer.decode(range(len(tokens)), skip)


@given(data=st.binary(), cuts=st.lists(st.integers(0, 40)))
def test_any_cut_of_any_bytes(data: bytes, cuts: list[int]) -> None:
    edges = [0, *sorted(min(c, len(data)) for c in cuts), len(data)]
    tokens = [data[a:b] for a, b in itertools.pairwise(edges)]
    assert "".join(stream(ByteTokens(tokens), range(len(tokens)))) == data.decode("utf-8", "replace")


@given(text=st.text(), cuts=st.lists(st.integers(0, 40)))
def test_valid_text_has_no_replacement(text: str, cuts: list[int]) -> None:
    data = text.encode()
    edges = [0, *sorted(min(c, len(data)) for c in cuts), len(data)]
    tokens = [data[a:b] for a, b in itertools.pairwise(edges)]
    pieces = stream(ByteTokens(tokens), range(len(tokens)))
    assert "".join(pieces) == text
    assert sum(piece.count("\ufffd") for piece in pieces) == text.count("\ufffd")


def test_special_tokens() -> None:
    tokenizer = ByteTokens([b"\xed", b"<eos>", b"\x95\x9c"], frozenset({1}))
    assert stream(tokenizer, [0, 1, 2]) == ["", "", "한", ""]
    assert stream(tokenizer, [0, 1, 2], skip=False) == ["", "\ufffd<eos>", "\ufffd\ufffd", ""]


def test_reuse_after_finish() -> None:
    detokenizer = Detokenizer(ByteTokens([b" a", b"\xed"], strips_leading_space=True))
    for _ in range(2):
        assert [detokenizer.push(0), detokenizer.push(0), detokenizer.push(1), detokenizer.finish()] == [
            "a",
            " a",
            "",
            "\ufffd",
        ]


def test_bad_ids() -> None:
    detokenizer = Detokenizer(Tokenizer.from_gguf(SENTENCEPIECE["metadata"]))
    with pytest.raises(InvalidArgument):
        detokenizer.push(-1)
    with pytest.raises(TypeError):
        detokenizer.push("a")
    assert detokenizer.push(10**9) == ""


@given(text=st.text(max_size=30), skip=st.booleans())
def test_sentencepiece(text: str, skip: bool) -> None:
    tokenizer = Tokenizer.from_gguf(SENTENCEPIECE["metadata"])
    ids = [1, *tokenizer.encode(text, False), 2]
    assert "".join(stream(tokenizer, ids, skip)) == tokenizer.decode(ids, skip)


# -- decoders that are not bytes joined ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wordpiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    words = ["[UNK]", "[CLS]", "play", "##ing", ".", "don", "'", "t", "##ground", "한국", "!"]
    backend = tokenizers.Tokenizer(models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece(cleanup=False)
    backend.add_special_tokens(["[CLS]"])
    path = tmp_path_factory.mktemp("wordpiece") / "tokenizer.json"
    backend.save(str(path))
    return Tokenizer.from_file(path)


@given(ids=st.lists(st.integers(0, 10)), skip=st.booleans())
def test_windows(wordpiece: Tokenizer, ids: list[int], skip: bool) -> None:
    assert not wordpiece.byte_exact
    pieces = stream(wordpiece, ids, skip)
    assert "".join(pieces) == wordpiece.decode(ids, skip)


def test_windows_stream(wordpiece: Tokenizer) -> None:
    assert stream(wordpiece, [2, 3, 8, 1, 9]) == ["play", "ing", "ground", "", " 한국", ""]


@pytest.mark.parametrize("first", [[], [1]])
def test_windows_hold_broken_characters(tmp_path: Path, first: list[int]) -> None:
    """A decoder with bytes of its own that is not among the known kinds."""
    vocab = {"a": 0, "b": 1} | {f"<0x{b:02X}>": 2 + b for b in range(256)}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [], byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_file(tmp_path)
    assert not tokenizer.byte_exact
    start = ["b"] if first else []
    assert stream(tokenizer, [*first, *(2 + b for b in "🤣".encode()), 0]) == [*start, "", "", "", "🤣", "a", ""]
    assert "".join(stream(tokenizer, [*first, 2 + 0x85, 0])) == tokenizer.decode([*first, 2 + 0x85, 0])
    assert "".join(stream(tokenizer, [*first, 2 + 0x85])) == tokenizer.decode([*first, 2 + 0x85])


# -- stop strings ----------------------------------------------------------------------------------------------------


def naive_stop(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """What goes out, and the stop: the one that is complete first, the longest of several that end there."""
    for end in range(1, len(text) + 1):
        ending = [s for s in stops if text[:end].endswith(s)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


STOPS = st.lists(st.text("ab한", min_size=1, max_size=4), max_size=4)


@given(pieces=st.lists(st.text("ab한", max_size=5)), stops=STOPS, include=st.booleans())
def test_stop_is_found_as_in_the_whole(pieces: list[str], stops: list[str], include: bool) -> None:
    checker = StopChecker(stops, include)
    out = ""
    stopped = False
    for piece in pieces:
        emit, now = checker.push(piece)
        assert not (stopped and (emit or not now))
        stopped = now
        out += emit
        # Nothing that went out is part of a stop string: with one to come, it would be in what is held back.
        if not stopped:
            seen = "".join(pieces)
            assert seen.startswith(out)
    rest = checker.finish()
    assert not (stopped and rest)
    expected, stop = naive_stop("".join(pieces), stops, include)
    assert out + rest == expected
    assert stopped == (stop is not None)
    assert checker.matched == stop


@given(text=st.text("ab", max_size=12), more=st.text("ab", max_size=6), stops=STOPS)
def test_no_piece_is_part_of_a_stop(text: str, more: str, stops: list[str]) -> None:
    checker = StopChecker(stops)
    out, stopped = checker.push(text)
    if not stopped:
        expected, stop = naive_stop(text + more, stops, False)
        if stop is not None:
            assert len(out) <= len(expected)
        # And no more is held back than could still become a stop string.
        held = text[len(out) :]
        assert held == "" or any(s.startswith(held) for s in stops)


def test_stop_in_the_middle_of_a_character() -> None:
    tokenizer = ByteTokens([b"Hi \xf0\x9f", b"\xa4", b"\xa3 there"])
    detokenizer, checker = Detokenizer(tokenizer), StopChecker("🤣")
    results = [checker.push(detokenizer.push(i)) for i in range(3)]
    assert results == [("Hi ", False), ("", False), ("", True)]
    # A stop string that begins inside one token's bytes and ends inside another's.
    tokenizer = ByteTokens([b"a\xed", b"\x95\x9c\xea", b"\xb8\x80b"])
    detokenizer, checker = Detokenizer(tokenizer), StopChecker(["한글"], include_stop=True)
    assert [checker.push(detokenizer.push(i)) for i in range(3)] == [("a", False), ("", False), ("한글", True)]


def test_stop_examples() -> None:
    checker = StopChecker(["\n\nUser:", "</s>"])
    assert checker.push("Yes.\n") == ("Yes.", False)
    assert checker.push("\nUs") == ("", False)
    assert checker.push("ually <") == ("\n\nUsually ", False)
    assert checker.finish() == "<"
    checker = StopChecker(None)
    assert checker.push("all of it") == ("all of it", False)
    assert checker.finish() == ""
    checker = StopChecker(["aab", "b"])
    assert checker.push("aaab tail") == ("a", True)
    assert checker.push("more") == ("", True)
    assert checker.finish() == ""
    assert checker.matched == "aab"


def test_bad_stops() -> None:
    with pytest.raises(InvalidArgument, match="empty"):
        StopChecker(["a", ""])
    with pytest.raises(InvalidArgument, match="empty"):
        StopChecker("")
    with pytest.raises(TypeError, match="str, got int"):
        StopChecker([1])
