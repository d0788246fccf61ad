"""What each number format of the KV cache costs in quality: perplexity and logits on a public-domain text.

    python benches/quality.py [--model smollm2] [--tokens 20000] [--context 2048] [--formats int8,int4] [--json]

    reference: the model with a float32 cache
    for each few formats:                    --together of them have a model open at a time, besides the reference
        for each window of the text:
            logits of the reference and of each format, over the same tokens
            surprise of each next token; distance of the logits from the reference's

A window is ``context`` tokens, and its last row predicts the token behind it, so that windows side by side predict
every token once. They are spread evenly over the text. Weights are the same in all rows, only the cache differs.
Formats with static scales are calibrated on pieces of the same text that no window touches. Formats that this build of
kvcore lacks are left out, with a note.

Takes 8 bytes for each of context x vocabulary logits besides the models.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcore import LLM, __version__
from kvcore.errors import InvalidArgument, KvcoreError
from publictext import NoTextError, find_text

Floats = npt.NDArray[np.float32]
Show = Callable[[str, int], None]

_ROWS = 32
"""Rows of logits that are worked on at once."""

_CALIBRATION_PIECES = 4


@dataclass(frozen=True)
class Format:
    """A way to store K and V. ``scale_mode`` None leaves the option out; ``calibrate`` asks for static scales."""

    name: str
    dtype: str
    scale_mode: str | None = None
    calibrate: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """The options of ``LLM`` that choose it."""
        mode = {} if self.scale_mode is None else {"kv_cache_scale_mode": self.scale_mode}
        return {"kv_cache_dtype": self.dtype, **mode}


REFERENCE = Format("float32", "float32")
BASE = Format("bfloat16", "bfloat16")
FORMATS = (
    REFERENCE,
    Format("float16", "float16"),
    BASE,
    Format("fp8_e4m3, unit", "fp8_e4m3"),
    Format("fp8_e4m3, static", "fp8_e4m3", "static", calibrate=True),
    Format("fp8_e4m3, per token and head", "fp8_e4m3", "per_token_head"),
    Format("fp8_e5m2, unit", "fp8_e5m2"),
    Format("fp8_e5m2, static", "fp8_e5m2", "static", calibrate=True),
    Format("fp8_e5m2, per token and head", "fp8_e5m2", "per_token_head"),
    Format("int8", "int8"),
    Format("int4", "int4"),
)


class LacksFormatError(Exception):
    """This build of kvcore does not have a format; says why."""


@dataclass
class Score:
    """Sums over the tokens of one format's run."""

    surprises: list[npt.NDArray[np.float64]] = field(default_factory=list)
    largest: float = 0.0
    total: float = 0.0
    count: int = 0

    def add(self, logits: Floats, reference: Floats, targets: Sequence[int]) -> None:
        """Count the first ``len(targets)`` rows of logits [rows, vocab]: row i predicts targets[i]."""
        ids = np.asarray(targets, np.int64)
        self.surprises.append(surprises(logits, ids))
        for start in range(0, len(ids), _ROWS):
            end = min(start + _ROWS, len(ids))
            distance = np.abs(logits[start:end] - reference[start:end])
            self.largest = float(np.maximum(self.largest, distance.max()))  # keeps NaN
            self.total += float(distance.sum(dtype=np.float64))
            self.count += distance.size

    def extend(self, other: Score) -> None:
        """Take the counts of other rows in."""
        self.surprises += other.surprises
        self.largest = float(np.maximum(self.largest, other.largest))
        self.total += other.total
        self.count += other.count

    @property
    def tokens(self) -> npt.NDArray[np.float64]:
        """The surprise of every token, in nats."""
        return np.concatenate(self.surprises)


@dataclass(frozen=True)
class Row:
    """One line of the table. ``change`` and ``uncertainty`` are in percent of bfloat16's perplexity."""

    format: str
    tokens: int
    bytes_per_token: int
    perplexity: float
    change: float | None
    uncertainty: float | None
    largest_logit_error: float
    mean_logit_error: float


def surprises(logits: Floats, targets: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """-log softmax(row i)[targets[i]] for each target, float64 [targets]: logits [rows, vocab].

    The terms of the softmax's sum are float32 (each within 1e-7 of itself), the sum is float64.
    """
    result = np.empty(len(targets))
    for start in range(0, len(targets), _ROWS):
        ids = targets[start : start + _ROWS]
        rows = logits[start : start + len(ids)]
        largest = rows.max(axis=1, keepdims=True)
        chosen = rows[np.arange(len(ids)), ids].astype(np.float64) - largest[:, 0]
        result[start : start + len(ids)] = np.log(np.exp(rows - largest).sum(axis=1, dtype=np.float64)) - chosen
    return result


def perplexity(tokens: npt.NDArray[np.float64]) -> float:
    """exp of the mean surprise."""
    return math.exp(tokens.mean())


def compare(tokens: npt.NDArray[np.float64], base: npt.NDArray[np.float64]) -> tuple[float, float]:
    """How much larger a perplexity is than the base's over the same tokens, and the standard error, in percent.

    Should one have gone further than the other, the tokens that both have count.
    """
    both = min(len(tokens), len(base))
    difference = tokens[:both] - base[:both]
    ratio = math.exp(difference.mean())
    return 100 * (ratio - 1), 100 * ratio * float(difference.std()) / math.sqrt(len(difference))


def windows(num_ids: int, tokens: int, context: int) -> list[tuple[int, int]]:
    """Where windows begin and how many tokens each predicts: ``tokens`` in all, or as many as there are.

    A window (start, n) reads ids start to start + n - 1 and predicts start + 1 to start + n. None predicts a token that
    another one does; if the text is just long enough they lie side by side, else with equal gaps.
    """
    tokens = min(tokens, num_ids - 1)
    count = -(-tokens // context)
    lengths = [context] * (count - 1) + [tokens - context * (count - 1)] if count > 0 else []
    gap = (num_ids - 1 - tokens) / max(count, 1)
    return [(i * context + int((i + 0.5) * gap), length) for i, length in enumerate(lengths)]


def calibration_pieces(places: Sequence[tuple[int, int]], num_ids: int, size: int) -> list[tuple[int, int]]:
    """(start, end) of up to four pieces between the windows, each of at most ``size`` tokens.

    The windows' tokens themselves, should they leave no gaps.
    """
    ends = [0, *(start + n + 1 for start, n in places)]
    starts = [*(start for start, _ in places), num_ids]
    gaps = [(end, min(start, end + size)) for end, start in zip(ends, starts, strict=True) if start - end >= 16]
    if not gaps:
        gaps = [(start, start + min(n, size)) for start, n in places]
    step = max(len(gaps) // _CALIBRATION_PIECES, 1)
    return gaps[::step][:_CALIBRATION_PIECES]


class Measurement:
    """The same windows of a text through caches of several formats."""

    def __init__(
        self,
        open_model: Callable[..., LLM],
        reference: LLM,
        ids: Sequence[int],
        tokens: int,
        context: int,
    ) -> None:
        """``open_model`` takes the options of a format; ``reference`` was opened with those of ``REFERENCE``."""
        self._open = open_model
        self._reference = reference
        self._ids = ids
        self.windows = windows(len(ids), tokens, context)
        # One less than a window: calibrating samples a token behind each piece.
        pieces = calibration_pieces(self.windows, len(ids), max(context - 1, 1))
        self._pieces = [list(ids[start:end]) for start, end in pieces]
        self.num_tokens = sum(n for _, n in self.windows)
        self.rows: list[Row] = []
        self.notes: list[str] = []
        self._base: npt.NDArray[np.float64] | None = None

    def run(self, formats: Sequence[Format], together: int = 4, show: Show = lambda name, tokens: None) -> None:
        """Fill ``rows`` and ``notes``, ``together`` formats at a time.

        bfloat16 is among the first, as all are compared with it. An interrupt leaves rows of the windows done so far.
        """
        order = {form.name: i for i, form in enumerate(formats)}
        queue = sorted(formats, key=lambda form: form is not BASE)
        for start in range(0, len(queue), together):
            with ExitStack() as stack:
                models: list[tuple[Format, LLM]] = []
                for form in queue[start : start + together]:
                    try:
                        models.append((form, stack.enter_context(self._opened(form))))
                    except LacksFormatError as error:
                        self.notes.append(f"{form.name}: left out: {error}")
                        show(form.name, self.num_tokens)
                try:
                    self._measure(models, show)
                finally:
                    self.rows.sort(key=lambda row: order[row.format])

    @contextmanager
    def _opened(self, form: Format) -> Iterator[LLM]:
        """The reference has been opened with all options but the format's, so that what is refused is the format."""
        if form is REFERENCE:
            yield self._reference
            return
        try:
            llm = self._open(**form.options)
        except (InvalidArgument, TypeError) as error:
            raise LacksFormatError(str(error)) from error
        with llm:
            if form.calibrate:
                calibrate: Callable[[Any], object] | None = getattr(llm, "calibrate", None)
                if calibrate is None:
                    raise LacksFormatError("this build has no LLM.calibrate")
                calibrate(self._pieces)
            yield llm

    def _measure(self, models: Sequence[tuple[Format, LLM]], show: Show) -> None:
        scores = [Score() for _ in models]
        try:
            for start, n in self.windows if models else ():
                inputs, targets = self._ids[start : start + n], self._ids[start + 1 : start + n + 1]
                expected = self._reference.logits(inputs)
                parts = [Score() for _ in models]
                for (form, llm), part in zip(models, parts, strict=True):
                    part.add(expected if llm is self._reference else llm.logits(inputs), expected, targets)
                    show(form.name, n)
                for score, part in zip(scores, parts, strict=True):  # none has a window that others lack
                    score.extend(part)
        finally:
            for (form, llm), score in zip(models, scores, strict=True):
                if form is BASE and score.count > 0:
                    self._base = score.tokens
                if score.count > 0:
                    self.rows.append(self._row(form, llm, score))

    def _row(self, form: Format, llm: LLM, score: Score) -> Row:
        change, uncertainty = (None, None) if self._base is None else compare(score.tokens, self._base)
        if len(score.tokens) < self.num_tokens:
            self.notes.append(f"{form.name}: ended after {len(score.tokens):,} tokens")
        return Row(
            format=form.name,
            tokens=len(score.tokens),
            bytes_per_token=llm.cache.bytes_per_token,
            perplexity=perplexity(score.tokens),
            change=change,
            uncertainty=uncertainty,
            largest_logit_error=score.largest,
            mean_logit_error=score.total / score.count,
        )


def table(rows: Sequence[Row]) -> str:
    """The rows in Markdown."""
    lines = [
        "| KV format | bytes per token | perplexity | against bfloat16 | largest logit error | mean logit error |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        change = "" if row.change is None else f"{row.change:+.2f}% ± {row.uncertainty:.2f}"
        lines.append(
            f"| {row.format} | {row.bytes_per_token:,} | {row.perplexity:.3f} | {change} "
            f"| {row.largest_logit_error:.3f} | {row.mean_logit_error:.4f} |"
        )
    return "\n".join(lines)


def plain(markdown: str) -> str:
    """A Markdown table in columns."""
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in markdown.splitlines()]
    cells = [line for line in cells if not all(set(cell) == {"-"} for cell in line)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(w) if i else cell.ljust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True)))
        for line in cells
    )


@contextmanager
def progress_bar(total: int) -> Iterator[Show]:
    """Yields ``show(what is measured, tokens done since the last call)``; silent unless stderr is a terminal."""
    if not sys.stderr.isatty():
        yield lambda name, tokens: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("tokens", total=total)
        yield lambda name, tokens: bar.update(task, description=name, advance=tokens)


def chosen(names: str | None) -> list[Format]:
    """The formats whose name begins with one of the names; bfloat16 always. Raises ValueError for a name of none."""
    if names is None:
        return list(FORMATS)
    prefixes = [name.strip() for name in names.split(",") if name.strip()]
    for prefix in prefixes:
        if not any(form.name.startswith(prefix) for form in FORMATS):
            raise ValueError(f"{prefix!r}: expected the beginning of one of: {'; '.join(f.name for f in FORMATS)}")
    return [form for form in FORMATS if form is BASE or form.name.startswith(tuple(prefixes))]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="a model with a tokenizer; smollm2")
    parser.add_argument("--dtype", default="float32", help="what weights are held in, in all rows; float32")
    parser.add_argument("--tokens", type=int, default=20_000, help="tokens to predict; 20000")
    parser.add_argument("--context", type=int, default=2048, help="tokens of a window; 2048")
    parser.add_argument("--formats", help="beginnings of names, separated by commas: fp8_e4m3,int8; all")
    parser.add_argument("--together", type=int, default=4, help="formats that have a model open at a time; 4")
    parser.add_argument("--text", type=Path, help="a UTF-8 file; Debian's bible-kjv-text, else licence texts")
    parser.add_argument("--num-threads", type=int, help="one per core")
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print everything as JSON")
    output.add_argument("--markdown", action="store_true", help="print the table in Markdown")
    args = parser.parse_args(arguments)
    for name in ("tokens", "context", "together"):
        if getattr(args, name) < 1:
            parser.error(f"--{name}: expected at least 1, got {getattr(args, name)}")
    try:
        args.formats = chosen(args.formats)
    except ValueError as error:
        parser.error(f"--formats: {error}")
    return args


def report(args: argparse.Namespace, measured: Measurement, source: str) -> str:
    """What is printed at the end: rows and notes."""
    if args.json:
        return json.dumps(
            {
                "version": __version__,
                "model": args.model,
                "dtype": args.dtype,
                "text": source,
                "tokens": measured.num_tokens,
                "context": args.context,
                "rows": [asdict(row) for row in measured.rows],
                "notes": measured.notes,
            },
            indent=1,
        )
    head = (
        f"kvcore {__version__}, {args.model}, weights {args.dtype}; {measured.num_tokens:,} tokens of {source}, "
        f"windows of {args.context:,}"
    )
    rows = table(measured.rows)
    return "\n".join([head, "", rows if args.markdown else plain(rows), "", *measured.notes]).rstrip()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit status."""
    args = parse(arguments)

    def open_model(**options: Any) -> LLM:
        return LLM(
            args.model,
            dtype=args.dtype,
            num_kv_blocks=args.context // 16 + 1,
            num_threads=args.num_threads,
            enable_prefix_caching=False,
            **options,
        )

    measured, name, status = None, "", 0
    try:
        text = find_text(args.text)
        with open_model(**REFERENCE.options) as reference:
            if reference.tokenizer is None:
                raise NoTextError(f"--model: expected one with a tokenizer, got {args.model}")
            ids = reference.tokenizer.encode(text.text, add_special_tokens=False)
            if len(ids) < 2:
                raise NoTextError(f"{text.name}: expected at least 2 tokens, got {len(ids)}")
            measured, name = Measurement(open_model, reference, ids, args.tokens, args.context), text.name
            with progress_bar(measured.num_tokens * len(args.formats)) as show:
                measured.run(args.formats, args.together, show)
    except KeyboardInterrupt:
        print("interrupted: the table has what was done by then", file=sys.stderr)
        status = 130
    except (NoTextError, KvcoreError) as error:
        print(f"quality: {error}", file=sys.stderr)
        status = 1
    if measured is not None:
        print(report(args, measured, name))
    return status


if __name__ == "__main__":
    sys.exit(main())
