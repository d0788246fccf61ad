"""The command line: ``kvcore generate``, ``chat``, ``transcribe``, ``pull``, ``plan``, ``bench``.

The answer goes to stdout, everything else to stderr. Exit codes: 0, 1 for an error of kvcore's (one line says which),
2 for wrong usage (``plan`` and ``bench``: also for a value that they do not take), 130 after Ctrl-C. Heavy modules are
imported by the commands that need them, so that ``--help`` is quick.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvcore.errors import InvalidArgument, KvcoreError, OutOfBlocks

if TYPE_CHECKING:
    from kvcore.llm import LLM
    from kvcore.outputs import RequestOutput

DEFAULT_MODEL = "smollm2"

_COMMANDS = "/reset starts over, /help lists the commands, /exit leaves, Ctrl-C stops an answer"
_NOT_UTF8 = "the prompt is not valid UTF-8 (check the locale)"

app = typer.Typer(
    name="kvcore",
    help="Run language models on CPUs, with a paged, shared KV cache.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_Model = Annotated[
    str,
    typer.Option(
        "--model", "-m", help="A name that `kvcore pull` knows, a folder, a .gguf file or a hub id (org/name)."
    ),
]
_KvDtype = Annotated[
    str,
    typer.Option(
        help="What keys and values are stored in: auto, float32, float16, bfloat16, fp8, fp8_e5m2, int8, int4 "
        "(short: f32, f16, bf16)."
    ),
]
_Quantization = Annotated[
    str,
    typer.Option(
        help="Of the matrices: auto (as the file has them), none (expanded), int8 or int4 (8 or 4 bits: a half or a "
        "third of their memory, and faster)."
    ),
]
_MaxTokens = Annotated[int, typer.Option(help="The most tokens of an answer.")]
_Temperature = Annotated[float, typer.Option(help="0 takes the most probable token; higher is more varied.")]
_TopP = Annotated[float, typer.Option(help="Sample from the most probable tokens that add up to this.")]
_TopK = Annotated[int, typer.Option(help="Sample from so many of the most probable tokens; 0: all.")]
_Seed = Annotated[int | None, typer.Option(help="Makes sampling reproducible.")]
_Speculative = Annotated[
    int, typer.Option(help="Guess so many tokens ahead from what the text repeats; the answer is the same. 0: none.")
]
_Threads = Annotated[int | None, typer.Option(help="Threads; by default one per core.", show_default=False)]


def main(argv: list[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: the arguments after the program's name; None takes the process's.

    Returns:
        The exit code.
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a character that the terminal lacks is no reason to fail
            stream.reconfigure(errors="replace")
    try:
        app(args=argv, prog_name="kvcore")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except OSError as error:  # outside of the commands: --help or --version could not be written
        _complain(error)
        return 1
    return 0


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import PackageNotFoundError, version

        try:
            print(f"kvcore {version('kvcore')}", flush=True)
        except PackageNotFoundError:
            print("kvcore (not installed)", flush=True)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None: ...


@app.command()
def generate(
    prompt: Annotated[
        str | None, typer.Argument(help='What to answer; "-" reads it from stdin.', show_default=False)
    ] = None,
    file: Annotated[
        str | None,
        typer.Option(
            "--file", "-f", help="Answer each line of a file, as one batch; prints a JSON object for each, in order."
        ),
    ] = None,
    model: _Model = DEFAULT_MODEL,
    kv_cache_dtype: _KvDtype = "auto",
    quantization: _Quantization = "auto",
    max_tokens: _MaxTokens = 256,
    temperature: _Temperature = 0.0,
    top_p: _TopP = 1.0,
    top_k: _TopK = 0,
    seed: _Seed = None,
    no_chat: Annotated[bool, typer.Option("--no-chat", help="Continue the text; no chat template around it.")] = False,
    no_cache: Annotated[
        bool, typer.Option("--no-cache", help="Compute everything again for each token, as if there were no KV cache.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
    live: Annotated[
        bool, typer.Option("--live", help="Show blocks, requests, hit rate and times on stderr meanwhile.")
    ] = False,
    num_speculative_tokens: _Speculative = 0,
    num_threads: _Threads = None,
) -> None:
    """Answer a prompt, and show what it took.

    The default model is fetched when it is used for the first time. A model without a chat template continues the text.
    """
    with _reporting():
        if (prompt is None) == (file is None):
            raise typer.BadParameter("expected either a prompt or --file")
        params = _params(max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)
        options = {
            "kv_cache_dtype": kv_cache_dtype,
            "quantization": quantization,
            "speculative_config": _speculative_config(num_speculative_tokens),
            "num_threads": num_threads,
        }
        if file is not None:
            texts = _lines(file)
            with _open(model, **options) as llm:
                _answer_all(llm, texts, params, chat=not no_chat, use_cache=not no_cache, live=live)
            return
        text = _prompt(prompt or "")
        with _open(model, **options) as llm:
            if no_chat or llm.chat_template is None:
                stream = llm.stream(text, params, use_cache=not no_cache)
            else:
                stream = llm.stream_chat([{"role": "user", "content": text}], params, use_cache=not no_cache)
            answer = _Answer(llm)
            with _viewed(llm, live):
                for item in stream:
                    piece = answer.add(item)
                    if not as_json and not live:  # the view has the terminal to itself
                        print(piece, end="", flush=True)
            if live and not as_json:
                print(answer.text, end="", flush=True)
            if as_json:
                print(
                    json.dumps({"model": llm.name, "prompt": text, **answer.as_dict()}, ensure_ascii=False), flush=True
                )
            else:
                print(flush=True)
                print(answer.figures(), file=sys.stderr)


@app.command()
def chat(
    model: _Model = DEFAULT_MODEL,
    system: Annotated[str | None, typer.Option(help="A system message to begin with.")] = None,
    kv_cache_dtype: _KvDtype = "auto",
    quantization: _Quantization = "auto",
    max_tokens: _MaxTokens = 1024,
    temperature: _Temperature = 0.0,
    top_p: _TopP = 1.0,
    top_k: _TopK = 0,
    seed: _Seed = None,
    figures: Annotated[
        bool, typer.Option("--figures", help="Show after each answer what it took, and what the cache saved.")
    ] = False,
    num_speculative_tokens: _Speculative = 0,
    num_threads: _Threads = None,
) -> None:
    """Talk with a model. /reset starts over, /exit or the end of input leaves, /help lists; Ctrl-C stops an answer."""
    with _reporting():
        if sys.stdin is None:
            raise InvalidArgument("stdin: expected what to answer, but it is closed")
        _check_text(system or "")
        params = _params(max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)
        beginning = [] if system is None else [{"role": "system", "content": system}]
        options = {
            "kv_cache_dtype": kv_cache_dtype,
            "quantization": quantization,
            "speculative_config": _speculative_config(num_speculative_tokens),
            "num_threads": num_threads,
        }
        with _open(model, **options) as llm:
            messages = list(beginning)
            if sys.stdin.isatty():
                print(f"{llm.name}: {_COMMANDS}", file=sys.stderr)
            while (text := _read_line("> ")) not in (None, "/exit", "/quit"):
                if text == "/reset":
                    messages = list(beginning)
                elif text == "/help":
                    print(_COMMANDS, file=sys.stderr)
                elif text:
                    messages.append({"role": "user", "content": text})
                    try:
                        _check_text(text)
                        messages.append({"role": "assistant", "content": _say(llm, messages, params, figures)})
                    except KvcoreError as error:  # the conversation has become too long, for example
                        messages.pop()
                        full = isinstance(error, OutOfBlocks) or "max_model_len" in str(error)
                        advice = " (the context is full: /reset starts over)" if full else ""
                        print(f"kvcore: {error}{advice}", file=sys.stderr)


@app.command()
def transcribe(
    file: Annotated[str, typer.Argument(help="A WAV file.")],
    model: _Model = "whisper-base",
    language: Annotated[
        str | None, typer.Option(help="Of the speech, such as en; by default the model says.", show_default=False)
    ] = None,
    task: Annotated[str, typer.Option(help="transcribe, or translate (to English).")] = "transcribe",
    timestamps: Annotated[bool, typer.Option("--timestamps", help="Show when each piece was said.")] = False,
    quantization: _Quantization = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
    num_threads: _Threads = None,
) -> None:
    """Write down the speech of a WAV file, piece by piece as it is known.

    The default model is fetched when it is used for the first time.
    """
    with _reporting():
        from kvcore.audio import load_wav
        from kvcore.transcription import Segment, transcribe

        def show(segment: Segment) -> None:
            times = f"[{_clock(segment.start)} --> {_clock(segment.end)}] " if timestamps else ""
            print(f"{times}{segment.text.strip()}", flush=True)

        samples = load_wav(file)  # before the model: it may be a long time to load
        with _open(model, quantization=quantization, num_threads=num_threads, max_num_seqs=1) as llm:
            callback = None if as_json else show
            result = transcribe(llm, samples, language=language, task=task, timestamps=timestamps, callback=callback)
        if as_json:
            segments = [{"start": s.start, "end": s.end, "text": s.text} for s in result.segments]
            fields = {"text": result.text, "language": result.language, "duration": result.duration}
            print(json.dumps({"model": llm.name, **fields, "segments": segments}, ensure_ascii=False), flush=True)


@app.command()
def pull(
    name: Annotated[str, typer.Argument(help="The model, such as smollm2.")],
) -> None:
    """Fetch a model and print where it is. Nothing is fetched twice."""
    with _reporting():
        from kvcore.checkpoint.pull import pull as fetch

        print(fetch(name, progress=True), flush=True)


@app.command()
def plan(
    model: Annotated[
        str,
        typer.Argument(
            help="A folder, a config.json, a .gguf file, a name that `kvcore pull` knows or a built-in shape such as "
            "llama-3-8b (a wrong name lists all). Weights are never loaded."
        ),
    ],
    memory: Annotated[
        str | None,
        typer.Option(help="For weights and cache, such as 24GiB or 24GB: shows how many requests fit."),
    ] = None,
    context: Annotated[
        str | None,
        typer.Option(
            help="Tokens of a request, prompt and answer, such as 8192 or 8K. By default 8192, or the longest that the "
            "model was made for if that is less.",
            show_default=False,
        ),
    ] = None,
    kv_cache_dtype: Annotated[
        str,
        typer.Option(
            help="What keys and values are stored in: auto, float32, float16, bfloat16, fp8_e4m3, fp8_e5m2, int8, int4 "
            "(short: f32, f16, bf16, fp8)."
        ),
    ] = "auto",
    scale_mode: Annotated[
        str | None,
        typer.Option(help="Scales of fp8: static (the default) or per_token_head.", show_default=False),
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="What weights are held in: auto (as saved), float32, bfloat16, float16.")
    ] = "auto",
    quantization: Annotated[
        str | None,
        typer.Option(
            help="What matrices are held in beside --dtype: auto, none, int8, int4. Weights are then the bytes that "
            "kvcore holds (packed, with scales and padding; blocks of a GGUF file as the file has them), "
            "not parameters times bytes of --dtype.",
            show_default=False,
        ),
    ] = None,
    source_tokens: Annotated[
        str | None,
        typer.Option(
            help="Tokens that the encoder gives, of a model that has one. By default the most.", show_default=False
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object; sizes are in bytes.")] = False,
) -> None:
    """Compute what a model's weights and KV cache take, and how many requests fit.

    For example: kvcore plan llama-3-8b --memory 24GiB --context 1000
    """
    with _reporting(bad_argument=2):
        from kvcore.plan import as_dict, as_text, find_model, make_plan, parse_size, parse_tokens

        result = make_plan(
            find_model(model),
            memory=None if memory is None else parse_size(memory, "memory"),
            context=None if context is None else parse_tokens(context, "context"),
            source_tokens=None if source_tokens is None else parse_tokens(source_tokens, "source_tokens"),
            kv_cache_dtype=kv_cache_dtype,
            scale_mode=scale_mode,
            dtype=dtype,
            quantization=quantization,
        )
        print(json.dumps(as_dict(result), ensure_ascii=False) if as_json else as_text(result), flush=True)


@app.command()
def bench(
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            help="A name that `kvcore pull` knows, a folder, a .gguf file or a hub id (org/name); by default "
            f"{DEFAULT_MODEL}.",
            show_default=False,
        ),
    ] = None,
    random: Annotated[
        str | None,
        typer.Option(
            help="In place of a model its shape, with random weights: a config.json or a name such as llama-3.2-1b "
            "(a wrong one lists all).",
            show_default=False,
        ),
    ] = None,
    prompt_lengths: Annotated[str, typer.Option(help="Tokens of the prompts that run alone.")] = "90,871,3430",
    batch_sizes: Annotated[str, typer.Option(help="Requests at once.")] = "1,32",
    batch_prompt_length: Annotated[int, typer.Option(help="Tokens of each prompt of batches above 1.")] = 220,
    new_tokens: Annotated[int, typer.Option(help="Tokens that each request generates.")] = 64,
    rounds: Annotated[int, typer.Option(help="How often all of it is repeated; medians count.")] = 3,
    dtype: Annotated[
        str, typer.Option(help="What weights are held in: auto (as saved), float32, bfloat16, float16.")
    ] = "auto",
    quantization: _Quantization = "auto",
    kv_cache_dtype: _KvDtype = "auto",
    num_threads: _Threads = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object; bytes, seconds, multiply-adds a second.")
    ] = False,
) -> None:
    """Measure prefill and decode, beside what this machine could do at most.

    Prompts are random token ids. For example: kvcore bench --quantization int4 --kv-cache-dtype fp8
    """
    with _reporting(bad_argument=2):
        from kvcore.bench import Settings, as_text, run_bench

        settings = Settings(
            model=DEFAULT_MODEL if model is None and random is None else model,
            random=random,
            prompt_lengths=_numbers(prompt_lengths, "prompt_lengths"),
            batch_sizes=_numbers(batch_sizes, "batch_sizes"),
            batch_prompt_length=batch_prompt_length,
            new_tokens=new_tokens,
            rounds=rounds,
            dtype=dtype,
            quantization=quantization,
            kv_cache_dtype=kv_cache_dtype,
            num_threads=num_threads,
        )
        run_bench(settings, lambda values: print(json.dumps(values) if as_json else as_text(values), flush=True))


class _Answer:
    """What a stream has brought so far."""

    def __init__(self, llm: LLM) -> None:
        self._bytes_per_token = int(llm.cache.bytes_per_token)
        self._block_size = int(llm.cache.block_size)
        self._pieces: list[str] = []
        self._token_ids: list[int] = []
        self._last: RequestOutput | None = None

    def add(self, item: RequestOutput) -> str:
        """Take an item in, and return its text."""
        self._pieces.append(item.text)
        self._token_ids += item.token_ids
        self._last = item
        return item.text

    @property
    def begun(self) -> bool:
        """Whether anything has come."""
        return self._last is not None

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._pieces)

    def fills(self, max_model_len: int | None) -> bool:
        """Whether prompt and answer have used up the model's length."""
        if self._last is None or max_model_len is None or self._last.finish_reason != "length":
            return False
        return len(self._last.prompt_token_ids) + len(self._token_ids) >= max_model_len

    def figures(self) -> str:
        """One line about what the answer took."""
        values = self.as_dict()
        usage, metrics = values["usage"], values["metrics"]
        parts = [
            f"prompt {usage['prompt_tokens']} tokens ({usage['cached_tokens']} cached)",
            f"answer {usage['completion_tokens']} tokens",
            f"TTFT {_milliseconds(metrics['ttft'])}",
            f"TPOT {_milliseconds(metrics['tpot'])}",
            f"{metrics['tokens_per_second']:.1f} tokens/s",
            f"KV {_bytes(usage['kv_bytes'])}",
        ]
        return " | ".join(parts)

    def as_dict(self) -> dict[str, Any]:
        """Text, token ids, usage and metrics (seconds), ready for JSON."""
        last = self._last
        assert last is not None
        prompt, answer, metrics = len(last.prompt_token_ids), len(self._token_ids), last.metrics
        blocks = -(-(prompt + answer - 1) // self._block_size)
        return {
            "text": self.text,
            "token_ids": self._token_ids,
            "finish_reason": last.finish_reason,
            "usage": {
                "prompt_tokens": prompt,
                "cached_tokens": last.num_cached_tokens,
                "completion_tokens": answer,
                "computed_tokens": last.num_computed_tokens,
                "kv_bytes": blocks * self._block_size * self._bytes_per_token,
            },
            "metrics": {
                "queue_time": metrics.queue_time,
                "ttft": metrics.ttft,
                "tpot": metrics.tpot,
                "e2e_time": metrics.e2e_time,
                "tokens_per_second": answer / metrics.e2e_time if metrics.e2e_time else 0.0,
            },
        }


def _answer_all(llm: LLM, texts: list[str], params: Any, *, chat: bool, use_cache: bool, live: bool) -> None:
    """Answer all in one batch, and print a JSON object for each."""
    progress = False if live else None
    with _viewed(llm, live):
        if chat and llm.chat_template is not None:
            conversations: list[Any] = [[{"role": "user", "content": text}] for text in texts]
            outputs = llm.chat(conversations, params, use_cache=use_cache, progress=progress)
        else:
            outputs = llm.generate(texts, params, use_cache=use_cache, progress=progress)
    for text, output in zip(texts, outputs, strict=True):
        answer = _Answer(llm)
        answer.add(output)
        print(json.dumps({"model": llm.name, "prompt": text, **answer.as_dict()}, ensure_ascii=False), flush=True)


@contextmanager
def _viewed(llm: LLM, live: bool) -> Iterator[None]:
    """Show what happens, if that is wanted."""
    if not live:
        yield
        return
    from kvcore.live import live_view

    with live_view(llm):
        yield


def _lines(path: str) -> list[str]:
    """The lines of a file that are not empty."""
    try:
        with open(path, encoding="utf-8") as file:
            lines = [line.rstrip("\n") for line in file if line.strip()]
    except UnicodeDecodeError:
        raise InvalidArgument(f"--file: expected UTF-8, got other bytes in {path}") from None
    if not lines:
        raise InvalidArgument(f"--file: expected at least one line that is not empty, got none in {path}")
    return lines


def _open(model: str, **options: Any) -> LLM:
    from kvcore.llm import LLM

    return LLM(model, **options)


def _speculative_config(num_tokens: int) -> dict[str, Any] | None:
    return {"method": "ngram", "num_speculative_tokens": num_tokens} if num_tokens else None


def _numbers(text: str, field: str) -> tuple[int, ...]:
    """The numbers of a list such as ``"90,871"``, where 8K is 8192."""
    from kvcore.plan import parse_tokens

    return tuple(parse_tokens(part, field) for part in text.split(","))


def _params(**values: Any) -> Any:
    from kvcore.engine.sampling_params import SamplingParams

    return SamplingParams(**values)


def _say(llm: LLM, messages: list[Mapping[str, Any]] | list[dict[str, str]], params: Any, figures: bool = False) -> str:
    """Print an answer as it comes; Ctrl-C ends it early."""
    answer = _Answer(llm)
    try:
        for item in llm.stream_chat(list(messages), params):
            print(answer.add(item), end="", flush=True)
    except KeyboardInterrupt:
        print(" ...", end="")
    print(flush=True)
    if answer.fills(llm.max_model_len):
        print("kvcore: the context is full: /reset starts over", file=sys.stderr)
    if figures and answer.begun:
        print(answer.figures(), file=sys.stderr)
    return answer.text


def _prompt(argument: str) -> str:
    """The prompt that an argument stands for: itself, or what stdin has."""
    text = argument
    if argument == "-":
        if sys.stdin is None:
            raise InvalidArgument("prompt: expected a text on stdin, but it is closed")
        try:
            text = sys.stdin.read().removesuffix("\n")
        except UnicodeDecodeError:
            raise InvalidArgument(_NOT_UTF8) from None
    if not text:
        raise InvalidArgument("prompt: expected a text that is not empty, got ''")
    _check_text(text)
    return text


def _check_text(text: str) -> None:
    """Refuse lone surrogates: Python's stand-ins for bytes that it could not decode."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidArgument(_NOT_UTF8) from None


def _read_line(prompt: str) -> str | None:
    """A line without the spaces around it, or None at the end of input. Only a terminal sees the prompt."""
    try:
        return input(prompt if sys.stdin.isatty() else "").strip()
    except EOFError:
        return None
    except UnicodeDecodeError:
        raise InvalidArgument(_NOT_UTF8) from None


@contextmanager
def _reporting(*, bad_argument: int = 1) -> Iterator[None]:
    """Turn what may go wrong into one line and an exit code; that of an argument with a bad value is given."""
    try:
        yield
    except KeyboardInterrupt:
        print(file=sys.stderr)
        raise typer.Exit(130) from None
    except BrokenPipeError:
        # The reader has left. Nothing more can be said to it, also not when Python flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(1) from None
    except (KvcoreError, OSError, MemoryError) as error:
        _complain(error)
        raise typer.Exit(bad_argument if isinstance(error, InvalidArgument) else 1) from None


def _complain(error: BaseException) -> None:
    """Say what went wrong, and see to it that Python's flush at exit does not fail with it once more."""
    with suppress(OSError):
        print(f"kvcore: {str(error) or 'out of memory'}", file=sys.stderr, flush=True)
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _clock(seconds: float) -> str:
    """As 01:02.34, hours before it where there are any."""
    minutes, rest = divmod(seconds, 60)
    hours, minutes = divmod(int(minutes), 60)
    return f"{hours}:{minutes:02}:{rest:05.2f}" if hours else f"{minutes:02}:{rest:05.2f}"


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.1f} ms"


def _bytes(count: int) -> str:
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"
