"""The command line, with mock parts behind it."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

import kvcore
import kvcore.cli as cli
from kvcore.checkpoint.config import GenerationConfig
from kvcore.errors import CheckpointError
from kvcore.llm import LLM
from mocks import MockCache, MockChatTemplate, MockDecoder, MockTokenizer, text_script

CHAT = "<user>hi\n<assistant>"


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """Every model is a mock that answers hello; returns what was opened."""
    opened: list[tuple[str, dict[str, Any]]] = []

    def open_model(model: str, **options: Any) -> LLM:
        if model == "missing":
            raise CheckpointError("missing/config.json: expected a JSON file, got no such file")
        opened.append((model, options))
        script = text_script(len(CHAT), "hello") | text_script(2, "there")
        decoder = MockDecoder(MockCache(200), 257, script=script)
        template = None if model == "base" else MockChatTemplate()
        return LLM._from_parts(
            decoder, MockTokenizer(), GenerationConfig((256,)), chat_template=template, name=model, seed=0
        )

    monkeypatch.setattr(cli, "_open", open_model)
    return opened


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = cli.main(list(argv))
    out, err = capsys.readouterr()
    return code, out, err


def test_generate(models: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "generate", "hi")
    assert (code, out) == (0, "hello\n")
    assert err.count("\n") == 1
    for part in ("prompt 20 tokens (0 cached)", "answer 6 tokens", "TTFT", "TPOT", "tokens/s", "KV 224 B"):
        assert part in err
    options = {"kv_cache_dtype": "auto", "quantization": "auto", "speculative_config": None, "num_threads": None}
    assert models == [("smollm2", options)]


def test_a_file_of_prompts_is_one_batch(models: list[Any], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("hi\n\nho\nhi\n")
    for argv in ([], ["--live"]):
        code, out, err = run(capsys, "generate", "--file", str(path), *argv)
        answers = [json.loads(line) for line in out.splitlines()]
        assert (code, [answer["prompt"] for answer in answers]) == (0, ["hi", "ho", "hi"])
        assert [answer["text"] for answer in answers] == ["hello"] * 3
        assert ("3 ended" in err) == bool(argv)
    path.write_text("\n")
    assert "at least one line" in run(capsys, "generate", "--file", str(path))[2]
    path.write_bytes(b"\xff\n")
    assert "UTF-8" in run(capsys, "generate", "--file", str(path))[2]
    assert run(capsys, "generate", "--file", str(tmp_path / "nothing"))[0] == 1
    assert run(capsys, "generate", "--file", str(path), "hi")[0] == 2


def test_live(models: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "generate", "--live", "hi")
    assert code == 0
    assert "hello" in out
    assert "1 ended" in err


def test_options(models: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["generate", "--model", "other", "--kv-cache-dtype", "fp8", "--num-threads", "2", "--max-tokens", "3"]
    argv += ["--num-speculative-tokens", "3"]
    code, out, _ = run(capsys, *argv, "--temperature", "0.5", "--top-p", "0.9", "--top-k", "9", "--seed", "7", "hi")
    assert (code, out) == (0, "hel\n")
    speculative = {"method": "ngram", "num_speculative_tokens": 3}
    options = {"kv_cache_dtype": "fp8", "quantization": "auto", "speculative_config": speculative, "num_threads": 2}
    assert models == [("other", options)]


@pytest.mark.parametrize("argv", [["--no-chat", "hi"], ["-m", "base", "hi"]])
def test_plain_text(models: list[Any], capsys: pytest.CaptureFixture[str], argv: list[str]) -> None:
    assert run(capsys, "generate", *argv)[:2] == (0, "there\n")


def test_json(models: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    for argv, computed in (([], 25), (["--no-cache"], sum(range(20, 26)))):
        code, out, err = run(capsys, "generate", "--json", *argv, "hi")
        assert (code, err) == (0, "")
        answer = json.loads(out)
        assert (answer["text"], answer["finish_reason"], answer["model"]) == ("hello", "stop", "smollm2")
        assert answer["token_ids"] == [*b"hello", 256]
        assert answer["usage"] == {
            "prompt_tokens": 20,
            "cached_tokens": 0,
            "completion_tokens": 6,
            "computed_tokens": computed,
            "kv_bytes": 224,
        }
        assert answer["metrics"]["ttft"] > 0


def test_stdin(models: list[Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("hi", "hi\n"):
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        assert run(capsys, "generate", "-")[:2] == (0, "hello\n")


@pytest.mark.parametrize("argv", [[], ["--no-chat"]])
@pytest.mark.parametrize(
    ("stdin", "message"),
    [
        (io.BytesIO(b""), "expected a text that is not empty"),
        (io.BytesIO(b"\n"), "expected a text that is not empty"),
        (io.BytesIO(b"\xff"), "the prompt is not valid UTF-8 (check the locale)"),
        (None, "expected a text on stdin, but it is closed"),
    ],
)
def test_bad_stdin(
    models: list[Any],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    argv: list[str],
    stdin: io.BytesIO | None,
    message: str,
) -> None:
    text = None if stdin is None else io.TextIOWrapper(io.BytesIO(stdin.getvalue()), encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", text)
    code, out, err = run(capsys, "generate", *argv, "-")
    assert (code, out, err.count("\n"), models) == (1, "", 1, [])
    assert message in err


@pytest.mark.parametrize(
    ("error", "line"),
    [(MemoryError(), "out of memory"), (OSError(28, "No space left on device"), "[Errno 28] No space left on device")],
)
def test_errors_of_the_system(
    models: list[Any],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    line: str,
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise error

    monkeypatch.setattr(LLM, "stream_chat", fail)
    assert run(capsys, "generate", "hi") == (1, "", f"kvcore: {line}\n")


def test_errors_are_one_line(models: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (
        ["-m", "missing", "hi"],
        ["--temperature", "-1", "hi"],
        ["--max-tokens", "0", "hi"],
        ["--no-chat", ""],
        [""],
        ["\udcff"],
        ["--no-chat", "\udcff"],
    ):
        code, out, err = run(capsys, "generate", *argv)
        assert (code, out) == (1, "")
        assert err.startswith("kvcore: ")
        assert err.count("\n") == 1


@pytest.mark.parametrize(
    "argv", [["generate"], ["generate", "--no-such"], ["nothing"], ["generate", "--seed", "x", "hi"]]
)
def test_usage_errors(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, *argv)[0] == 2


def test_interrupt(models: list[Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(LLM, "stream_chat", interrupted)
    code, out, err = run(capsys, "generate", "hi")
    assert (code, out, err.strip()) == (130, "", "")


def chat(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, lines: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    return run(capsys, "chat")


def test_chat(models: list[Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert chat(capsys, monkeypatch, "hi\n\n/exit\nhi\n") == (0, "hello\n", "")
    assert chat(capsys, monkeypatch, "hi\n/reset\nhi\n") == (0, "hello\nhello\n", "")


def test_chat_figures(models: list[Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\nhi\n"))
    code, out, err = run(capsys, "chat", "--figures", "--max-tokens", "4")
    assert (code, out.count("\n")) == (0, 2)
    first, second = err.splitlines()
    assert "prompt 20 tokens (0 cached) | answer 4 tokens | TTFT" in first
    assert "(20 cached)" in second


def test_chat_help_and_closed_stdin(
    models: list[Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, err = chat(capsys, monkeypatch, "/help\nhi\n")
    assert (code, out) == (0, "hello\n")
    assert "/reset" in err
    assert "/exit" in err
    assert chat(capsys, monkeypatch, "\udcff\nhi\n")[1:] == (
        "hello\n",
        "kvcore: the prompt is not valid UTF-8 (check the locale)\n",
    )
    monkeypatch.setattr(sys, "stdin", None)
    assert run(capsys, "chat") == (1, "", "kvcore: stdin: expected what to answer, but it is closed\n")


def test_chat_says_how_to_go_on_when_the_context_is_full(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def open_model(model: str, **options: Any) -> LLM:
        decoder = MockDecoder(MockCache(200), 257, script=text_script(len(CHAT), "hello"))
        parts = (decoder, MockTokenizer(), GenerationConfig((256,)))
        return LLM._from_parts(*parts, chat_template=MockChatTemplate(), max_model_len=len(CHAT) + 3)

    monkeypatch.setattr(cli, "_open", open_model)
    code, out, err = chat(capsys, monkeypatch, "hi\nhi\n/reset\nhi\n")
    assert (code, out) == (0, "hel\nhel\n")
    short, long, again = err.splitlines()
    assert short == again == "kvcore: the context is full: /reset starts over"
    assert "max_model_len" in long
    assert "/reset" in long


def test_chat_goes_on_after_ctrl_c_and_errors(
    models: list[Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream_chat = LLM.stream_chat
    seen: list[list[dict[str, str]]] = []

    def stream(self: LLM, messages: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(list(messages))
        for i, item in enumerate(stream_chat(self, messages[-1:], *args, **kwargs)):
            if len(seen) == 1 and i == 2:
                raise KeyboardInterrupt
            if len(seen) == 2:
                raise CheckpointError("broken")
            yield item

    monkeypatch.setattr(LLM, "stream_chat", stream)
    code, out, err = chat(capsys, monkeypatch, "hi\nhi\nhi\n")
    assert (code, out, err) == (0, "he ...\nhello\n", "kvcore: broken\n")
    assert [m["content"] for m in seen[2]] == ["hi", "he", "hi"]


def test_pull(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import kvcore.checkpoint.pull as module

    monkeypatch.setattr(module, "pull", lambda name, progress: Path("/models") / name)
    assert run(capsys, "pull", "smollm2") == (0, f"{Path('/models/smollm2')}\n", "")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--version")
    assert code == 0
    assert out.startswith("kvcore ")


def python(*argv: str, **options: Any) -> subprocess.Popen[bytes]:
    paths = [str(Path(kvcore.__file__).parent.parent), str(Path(__file__).parent)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "COLUMNS": "100"}
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, *argv], env=environment, stdout=pipe, stderr=pipe, **options)


@pytest.mark.parametrize("command", ["generate", "chat", "transcribe", "bench"])
def test_help_names_the_quantizations(command: str) -> None:
    text = next(p for p in get_command(cli.app).commands[command].params if p.name == "quantization").help  # type: ignore[attr-defined]
    assert all(name in text for name in ("auto", "none", "int8", "int4"))


def test_help_reads_well_and_imports_little() -> None:
    process = python("-X", "importtime", "-m", "kvcore", "generate", "--help")
    out, err = process.communicate()
    assert process.returncode == 0
    for option in (b"--model", b"--kv-cache-dtype", b"--max-tokens", b"--no-chat", b"--no-cache", b"--json", b"--seed"):
        assert option in out
    for module in (b"jinja2", b"tokenizers", b"huggingface_hub", b"kvcore.llm"):
        assert b"| " + module not in err.replace(b"|   ", b"| ")


ANSWERS = (
    "import sys, kvcore.cli as cli\n"
    "from test_cli import *\n"
    "def open_model(model, **options):\n"
    "    decoder = MockDecoder(MockCache(200), 257, script=text_script(len(CHAT), 'h\\u00e9'))\n"
    "    parts = (decoder, MockTokenizer(), GenerationConfig((256,)))\n"
    "    return LLM._from_parts(*parts, chat_template=MockChatTemplate(), name=model)\n"
    "cli._open = open_model\n"
    "sys.exit(cli.main(sys.argv[1:]))\n"
)


def test_a_character_that_stdout_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    process = python("-c", ANSWERS, "generate", "hi")
    out, err = process.communicate()
    assert (process.returncode, out.split()) == (0, [b"h?"])
    assert b"Traceback" not in err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("argv", [["generate", "hi"], ["--version"], ["--help"]])
def test_a_full_disk(argv: list[str]) -> None:
    process = python("-c", f"import os; os.dup2(os.open('/dev/full', os.O_WRONLY), 1)\n{ANSWERS}", *argv)
    _, err = process.communicate()
    assert (process.returncode, err.splitlines()) == (1, [b"kvcore: [Errno 28] No space left on device"])


def test_a_broken_pipe_is_quiet() -> None:
    code = (
        "import sys, kvcore.cli as cli\n"
        "from test_cli import *\n"
        "def open_model(model, **options):\n"
        "    decoder = MockDecoder(MockCache(30000), 257)\n"
        "    return LLM._from_parts(decoder, MockTokenizer(), None, name=model)\n"
        "cli._open = open_model\n"
        "sys.exit(cli.main(['generate', '--max-tokens', '100000', 'hi']))\n"
    )
    process = python("-c", code)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(5)
    process.stdout.close()
    err = process.stderr.read()
    process.stderr.close()
    assert (process.wait(60), err) == (1, b"")
