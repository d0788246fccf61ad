"""The arithmetic of benches/quality.py, its text, and the command on tiny models."""

from __future__ import annotations

import itertools
import json
import math
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore import LLM
from models import EXACT, TINY, add_tokenizer, table_folder

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benches"))
import publictext  # noqa: E402
import quality  # noqa: E402

FP8 = quality.FORMATS[3]


def tiny(**options: Any) -> LLM:
    return LLM.from_config(TINY, dtype="float32", num_kv_blocks=4, num_threads=1, seed=5, **options)


def measure(formats: list[quality.Format], ids: list[int], tokens: int, together: int = 2) -> quality.Measurement:
    with tiny(**quality.REFERENCE.options) as reference:
        measured = quality.Measurement(tiny, reference, ids, tokens, context=48)
        measured.run(formats, together)
        return measured


# -- arithmetic ------------------------------------------------------------------------------------------------------


def test_perplexity_of_equal_logits_is_the_size_of_the_vocabulary() -> None:
    tokens = quality.surprises(np.full((200, 37), -5.0, np.float32), np.arange(200) % 37)
    assert quality.perplexity(tokens) == pytest.approx(37, rel=1e-12)


def test_perplexity_of_a_known_distribution() -> None:
    """Logits are log probabilities: the surprise of a token is minus its own."""
    p = np.array([0.5, 0.25, 0.125, 0.125])
    targets = np.array([0, 1, 2, 3, 0])
    logits = np.tile(np.log(p) + 7.0, (5, 1)).astype(np.float32)
    tokens = quality.surprises(logits, targets)
    np.testing.assert_allclose(tokens, -np.log(p[targets]), atol=1e-6)
    assert quality.perplexity(tokens) == pytest.approx(2 ** ((1 + 2 + 3 + 3 + 1) / 5), rel=1e-6)


def test_large_logits_do_not_overflow() -> None:
    tokens = quality.surprises(np.array([[1e30, -1e30], [3e4, 3e4]], np.float32), np.array([0, 1]))
    np.testing.assert_allclose(tokens, [0.0, math.log(2)])


def test_compare() -> None:
    base = np.array([1.0, 2.0, 3.0, 4.0])
    assert quality.compare(base, base) == (0.0, 0.0)
    change, uncertainty = quality.compare(base + math.log(1.03), base)
    assert change == pytest.approx(3.0)
    assert uncertainty == pytest.approx(0.0, abs=1e-9)
    change, uncertainty = quality.compare(base + np.array([0.1, -0.1, 0.1, -0.1]), base)
    assert change == pytest.approx(0.0, abs=1e-9)
    assert uncertainty == pytest.approx(5.0)


def test_score_counts_each_row_once() -> None:
    """More rows than are worked on at once, and rows behind the last target are left out."""
    random = np.random.default_rng(0)
    logits = random.standard_normal((150, 11), np.float32)
    reference = logits + np.linspace(0, 1, 150, dtype=np.float32)[:, None]
    score = quality.Score()
    score.add(logits, reference, [3] * 140)
    score.add(logits[:1], logits[:1], [4])
    assert len(score.tokens) == 141
    assert score.count == 141 * 11
    assert score.largest == pytest.approx(139 / 149, abs=1e-5)
    assert score.total / (140 * 11) == pytest.approx(139 / 149 / 2, abs=1e-5)
    naive = -np.log(np.exp(logits[:140, 3]) / np.exp(logits[:140]).sum(axis=1))
    np.testing.assert_allclose(score.tokens[:140], naive, rtol=1e-5)


def test_a_logit_that_is_no_number_shows() -> None:
    score = quality.Score()
    rows = np.zeros((2, 3), np.float32)
    score.add(np.array([[0, np.nan, 0], [0, 0, 0]], np.float32), rows, [0, 0])
    score.add(rows, rows, [0, 0])
    assert math.isnan(score.largest)
    assert math.isnan(quality.perplexity(score.tokens))


@given(num_ids=st.integers(2, 300), tokens=st.integers(1, 400), context=st.integers(1, 90))
def test_windows_predict_each_token_once(num_ids: int, tokens: int, context: int) -> None:
    places = quality.windows(num_ids, tokens, context)
    predicted = [start + 1 + i for start, n in places for i in range(n)]
    assert len(predicted) == len(set(predicted)) == min(tokens, num_ids - 1)
    assert all(0 < token < num_ids for token in predicted)
    assert predicted == sorted(predicted)
    assert all(1 <= n <= context for _, n in places)
    if tokens >= num_ids - 1:  # side by side
        assert predicted == list(range(1, num_ids))


@given(num_ids=st.integers(2, 300), tokens=st.integers(1, 400), context=st.integers(1, 90))
def test_calibration_leaves_the_measured_tokens_alone(num_ids: int, tokens: int, context: int) -> None:
    places = quality.windows(num_ids, tokens, context)
    pieces = quality.calibration_pieces(places, num_ids, context)
    assert 1 <= len(pieces) <= 4
    assert all(0 <= start < end <= num_ids and end - start <= context for start, end in pieces)
    free = set(range(num_ids)) - {start + i for start, n in places for i in range(n + 1)}
    if pieces[0][0] in free:
        assert all(set(range(start, end)) <= free for start, end in pieces)


# -- the text --------------------------------------------------------------------------------------------------------


def packed(windows: list[bytes], size: int) -> bytes:
    """A file in the form of bible.data, of gzip's windows: the reader leaves their kind to gzip."""
    import gzip

    streams = [gzip.compress(window) for window in windows]
    head = 92 + 4 * len(windows) + 3
    starts = [head + sum(len(s) - 3 for s in streams[:i]) for i in range(len(streams))]
    header = b"EC02".ljust(84, b"\0") + struct.pack(f">2I{len(windows)}I", size, len(windows), *starts)
    return header + streams[0][:3] + b"".join(stream[3:] for stream in streams)


@pytest.mark.skipif(sys.platform == "win32", reason="there is no gzip")
def test_text_is_unpacked() -> None:
    text = b"Title.\nGe1:1 In the beginning.\n1Sa2:10 The adversaries: 2:3\n"
    data = packed([text[:20], text[20:40], text[40:]], 20)
    assert publictext.unpack(data) == text.decode()
    assert publictext.verses(text.decode()) == "In the beginning.\nThe adversaries: 2:3\n"


@pytest.mark.skipif(sys.platform == "win32", reason="there is no gzip")
@pytest.mark.parametrize(
    "data",
    [b"", b"EC01".ljust(200, b"\0"), b"EC02", packed([b"x" * 20], 20)[:110], packed([b"xx", b"y"], 20)],
    ids=["empty", "another format", "header cut", "window cut", "short window"],
)
def test_a_damaged_package_is_told(data: bytes) -> None:
    with pytest.raises(publictext.NoTextError):
        publictext.unpack(data)


def test_licences_stand_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fails() -> publictext.PublicText:
        raise publictext.NoTextError("no network")

    monkeypatch.setattr(publictext, "fetch_package", fails)
    monkeypatch.setattr(publictext, "LICENCES", tmp_path)
    with pytest.raises(publictext.NoTextError, match="no network"):
        publictext.find_text()
    (tmp_path / "B").write_text("second")
    (tmp_path / "A").write_text("first")
    text = publictext.find_text()
    assert text.text == "first\nsecond"
    assert "no network" in text.name


def test_a_file_is_taken_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_text("Ge1:1 stays", encoding="utf-8")
    assert publictext.find_text(file) == publictext.PublicText("text", "Ge1:1 stays")
    file.write_bytes(b"\xff")
    for wrong in (file, tmp_path / "none"):
        with pytest.raises(publictext.NoTextError):
            publictext.find_text(wrong)


# -- measuring -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("together", [1, 2, 5])
def test_formats_of_a_random_model(together: int) -> None:
    ids = np.random.default_rng(1).integers(0, 96, 400).tolist()
    measured = measure([quality.REFERENCE, quality.BASE, FP8], ids, 120, together)
    reference, base, fp8 = measured.rows
    assert [row.format for row in measured.rows] == ["float32", "bfloat16", FP8.name]
    assert measured.num_tokens == 120
    assert not measured.notes
    assert (reference.largest_logit_error, reference.mean_logit_error) == (0.0, 0.0)
    assert base.change == base.uncertainty == 0.0
    assert 0 < base.largest_logit_error < fp8.largest_logit_error
    assert 0 < base.mean_logit_error < fp8.mean_logit_error
    assert reference.bytes_per_token == 2 * base.bytes_per_token == 4 * fp8.bytes_per_token
    # all of it by hand
    with tiny(kv_cache_dtype="float32") as llm:
        total = 0.0
        for start, n in measured.windows:
            rows = llm.logits(ids[start : start + n]).astype(np.float64)
            p = np.exp(rows) / np.exp(rows).sum(axis=1, keepdims=True)
            total -= sum(math.log(p[i, ids[start + 1 + i]]) for i in range(n))
    assert reference.perplexity == pytest.approx(math.exp(total / 120), rel=1e-6)


@pytest.mark.parametrize("together", [1, 3])
def test_an_interrupt_leaves_whole_windows(together: int) -> None:
    """The fourth call of fp8's logits is interrupted, in the fourth of five windows."""
    ids = np.random.default_rng(1).integers(0, 96, 400).tolist()
    calls = 0

    def interrupted(**options: Any) -> LLM:
        llm = tiny(**options)
        if options == FP8.options:
            compute = llm.logits

            def logits(token_ids: Any) -> Any:
                nonlocal calls
                calls += 1
                if calls == 4:
                    raise KeyboardInterrupt
                return compute(token_ids)

            llm.logits = logits  # type: ignore[method-assign]
        return llm

    with tiny(**quality.REFERENCE.options) as reference:
        measured = quality.Measurement(interrupted, reference, ids, 240, 48)
        with pytest.raises(KeyboardInterrupt):
            measured.run([quality.REFERENCE, FP8, quality.BASE], together)
    rows = {row.format: row for row in measured.rows}
    assert list(rows) == ["float32", FP8.name, "bfloat16"]
    assert rows[FP8.name].tokens == 144
    assert rows["bfloat16"].tokens == rows["float32"].tokens == (240 if together == 1 else 144)
    assert f"{FP8.name}: ended after 144 tokens" in measured.notes


def test_formats_that_the_build_lacks_are_left_out() -> None:
    unknown = quality.Format("int3", "int3")
    option = quality.Format("fp8, somehow", "fp8_e4m3", "somehow")
    measured = measure([unknown, quality.BASE, option], list(range(90)), 50)
    assert [row.format for row in measured.rows] == ["bfloat16"]
    assert len(measured.notes) == 2
    assert measured.notes[0].startswith("int3: left out: ")


def test_static_scales_are_calibrated_beside_the_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(LLM, "calibrate", lambda self, texts: seen.append(texts), raising=False)
    ids = np.random.default_rng(1).integers(0, 96, 300).tolist()
    measured = measure([quality.BASE, quality.Format("fp8, static", "fp8_e4m3", calibrate=True)], ids, 96)
    assert [row.format for row in measured.rows] == ["bfloat16", "fp8, static"]
    (pieces,) = seen
    assert pieces
    assert all(0 < len(piece) <= 48 for piece in pieces)


def test_names_choose_formats() -> None:
    assert quality.chosen(None) == list(quality.FORMATS)
    assert quality.chosen("int4") == [quality.BASE, quality.FORMATS[-1]]
    assert all(f.dtype in ("bfloat16", "fp8_e4m3") for f in quality.chosen("fp8_e4m3"))
    with pytest.raises(ValueError, match="int3"):
        quality.chosen("int4,int3")


# -- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose next token depends on the latest one alone: its perplexity is known."""
    table = np.random.default_rng(3).standard_normal((258, 258), np.float32)
    return add_tokenizer(table_folder(tmp_path_factory.mktemp("model"), table))


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "benches" / "quality.py"), *arguments],
        capture_output=True,
        encoding="utf-8",
        timeout=300,
        check=False,
    )


def test_the_command(folder: Path, tmp_path: Path) -> None:
    table = np.random.default_rng(3).standard_normal((258, 258), np.float32).astype(np.float64)
    text = tmp_path / "text"
    text.write_text("In the beginning. " * 20, encoding="utf-8")
    run = ["--model", str(folder), "--text", str(text), "--dtype", "float32", "--context", "64", "--num-threads", "1"]
    done = command(*run, "--tokens", "100000", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    ids = list(text.read_bytes())
    assert result["tokens"] == len(ids) - 1
    logs = table - np.log(np.exp(table).sum(axis=1, keepdims=True))
    expected = math.exp(-np.mean([logs[a, b] for a, b in itertools.pairwise(ids)]))
    rows = {row["format"]: row for row in result["rows"]}
    assert {"float32", "bfloat16", FP8.name} <= set(rows)
    for row in rows.values():
        assert row["perplexity"] == pytest.approx(expected, rel=1e-4)
        assert row["change"] == pytest.approx(0, abs=1e-3)
    assert len(result["rows"]) + len(result["notes"]) == len(quality.FORMATS)

    done = command(*run, "--tokens", "40", "--markdown", "--formats", "float32")
    assert done.returncode == 0, done.stderr
    assert "| bfloat16 | 64 |" in done.stdout
    assert "40 tokens of text" in done.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ("--tokens", "0"),
        ("--context", "-1"),
        ("--together", "0"),
        ("--formats", "int3"),
        ("--json", "--markdown"),
        ("--model", "nowhere", "--text", __file__),
        ("--text", "/nowhere/text"),
    ],
)
def test_bad_arguments_are_told(arguments: tuple[str, ...]) -> None:
    done = command(*arguments)
    assert done.returncode in (1, 2)
    assert "Traceback" not in done.stderr
    assert done.stderr


def test_a_text_of_one_token_is_told(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("x")
    done = command("--model", str(folder), "--text", str(tmp_path / "text"))
    assert done.returncode == 1
    assert "expected at least 2 tokens, got 1" in done.stderr


def test_the_reference_is_float32() -> None:
    assert quality.REFERENCE.options == {"kv_cache_dtype": EXACT["kv_cache_dtype"]}
