"""``kvcore bench``: what it computes and shows, on tiny models; and the scripts beside it. No time decides."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore import LLM, cli
from kvcore.bench import Settings, as_dict, as_text, measure, run_bench
from kvcore.bench.limits import measure_limits
from kvcore.bench.rounds import Case, num_pieces, open_run
from kvcore.bench.work import Limits, Work, layer_products
from kvcore.errors import InvalidArgument
from kvcore.models.families import spec_from_config
from models import REFERENCE, TINY

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benches"))
import endtoend  # noqa: E402
import peers  # noqa: E402

QUICK = ["--prompt-lengths", "5,20", "--batch-sizes", "1,3", "--batch-prompt-length", "7", "--new-tokens", "3"]
GEMMA = {**TINY, "model_type": "gemma3_text", "head_dim": 8, "sliding_window": 8, "sliding_window_pattern": 2}
MIXTRAL = {**TINY, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 1}


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A config.json; the machine's limits are measured on little."""
    monkeypatch.setattr("kvcore.bench.rounds.measure_limits", partial(measure_limits, scale=1 / 64))
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY))
    return str(path)


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = cli.main(["bench", *argv])
    return code, *capsys.readouterr()


# -- figures ----------------------------------------------------------------------------------------------------------


def test_json(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "--random", config, "--rounds", "2", "--dtype", "bf16", "--json", *QUICK)
    assert (code, err) == (0, "")
    values = json.loads(out)
    assert (values["rounds"], values["new_tokens"], values["weights"]) == (2, 3, "bfloat16")
    assert values["kv_cache_dtype"] == "bfloat16"
    assert values["num_threads"] >= 1
    assert 0 < values["weight_bytes_of_a_step"] < values["weight_bytes"]
    assert values["kv_cache_bytes"] > 0
    assert values["load_seconds"] > 0
    assert all(rate > 0 for rate in values["limits"].values())
    assert [(row["requests"], row["prompt"]) for row in values["results"]] == [(1, 5), (1, 20), (3, 7)]
    for row in values["results"]:
        assert {key for key, value in row.items() if not isinstance(value, str) and value <= 0} == set()
        assert row["decode_bound_by"] in ("reading", "products")
        assert row["decode_tokens_per_second"] == pytest.approx(row["requests"] / row["tpot"])
        assert row["decode_bytes_of_a_step"] > values["weight_bytes_of_a_step"]


def test_text(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "--random", config, "--rounds", "1", "--quantization", "int4", *QUICK)
    assert (code, err) == (0, "")
    assert "random weights" in out
    assert "weights int4, KV bfloat16" in out
    assert "1 round of 3 new tokens" in out
    table = [line.split() for line in out.splitlines() if line.strip()[:1].isdigit()]
    assert [row[:2] for row in table] == [["1", "5"], ["1", "20"], ["3", "7"]]
    assert {len(row) for row in table} == {11}


def test_a_step_reads_no_embedding() -> None:
    tied_config = {**TINY, "tie_word_embeddings": True}
    with LLM.from_config(TINY, dtype="float32", num_kv_blocks=4) as llm:
        table, row = 96 * 32 * 4, 32 * 4
        decoder: Any = llm._decoder
        assert decoder.step_nbytes(1) == llm.weight_bytes - table + row
        assert decoder.step_nbytes(96) == decoder.step_nbytes(1000) == llm.weight_bytes
        work = Work(llm)
        assert work.cache_bytes(10) == 10 * llm.cache.bytes_per_token
        assert work.decode_bytes(2, 10) == decoder.step_nbytes(2) + 20 * llm.cache.bytes_per_token
        assert work.decode_seconds(1, 10, Limits(1e9, 1e30)) == work.decode_bytes(1, 10) / 1e9
        assert work.decode_seconds(1, 10, Limits(1e30, 1e9)) == work.decode_products(1, 10) / 1e9
        with LLM.from_config(tied_config, dtype="float32", num_kv_blocks=4) as tied:
            assert tied._decoder.step_nbytes(1) == tied.weight_bytes == llm.weight_bytes - table


def test_a_step_reads_chosen_experts() -> None:
    with LLM.from_config(MIXTRAL, dtype="float32", num_kv_blocks=4) as llm:
        expert, layers = 3 * 48 * 32 * 4, 2
        decoder: Any = llm._decoder
        idle = llm.weight_bytes - decoder.step_nbytes(1) - 95 * 32 * 4
        assert idle == pytest.approx(layers * 3 * expert, rel=0.01)
        assert llm.weight_bytes - decoder.step_nbytes(96) < expert
    dense = layer_products(spec_from_config(TINY))
    assert dense == layers * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 48 * 32)
    assert layer_products(spec_from_config(MIXTRAL)) == dense + layers * 4 * 32  # one expert, and the router


@given(st.integers(1, 40))
def test_products_of_a_prompt(prompt: int) -> None:
    """A prompt is its tokens one after the other, but for the output matrix."""
    with LLM.from_config(GEMMA, dtype="float32", num_kv_blocks=4, num_threads=1) as llm:
        work, output = Work(llm), 96 * 32
        steps = sum(work.decode_products(1, context) - output for context in range(1, prompt + 1))
        assert work.prefill_products(prompt) == steps + output
        full, sliding = (llm.cache.bytes_per_token // 2 * min(prompt, n) for n in (prompt, 8))
        assert work.cache_bytes(prompt) == full + sliding


def test_progress_has_all_pieces(config: str) -> None:
    settings = Settings(random=config, prompt_lengths=(4,), batch_sizes=(1, 2), batch_prompt_length=4, new_tokens=2)
    run_ = open_run(settings)
    with run_.llm:
        assert sum(1 for _ in measure(run_)) == num_pieces(settings)
    assert run_.rounds == len(run_.samples[Case(2, 4)]) == settings.rounds


def test_limits() -> None:
    from kvcore._kvcore import Threads

    for weights in ("float32", "bfloat16", "int8", "int4"):
        limits = measure_limits(Threads(1), weights, scale=1 / 64)
        assert limits.read_bandwidth > 0
        assert limits.product_rate > 0


# -- errors and interrupts --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--prompt-lengths", "90,,5"], "prompt_lengths: expected a number of tokens"),
        (["--prompt-lengths", "0"], "prompt_lengths: expected from 1"),
        (["--batch-sizes", "many"], "batch_sizes: expected a number"),
        (["--batch-prompt-length", "0"], "batch_prompt_length: expected at least 1, got 0"),
        (["--new-tokens", "1"], "new_tokens: expected at least 2, got 1"),
        (["--rounds", "0"], "rounds: expected at least 1, got 0"),
        (["--dtype", "int9"], "dtype: expected one of"),
        (["--quantization", "int3"], "quantization: expected one of"),
        (["--kv-cache-dtype", "f8"], "kv_cache_dtype: expected one of"),
        (["--num-threads", "0"], "num_threads: expected an integer of at least 1"),
        (["--model", "smollm2"], "model, random: expected one of them, got both"),
        (["--prompt-lengths", "2046"], "prompt_lengths: expected at most 1984 tokens"),
    ],
)
def test_bad_arguments(config: str, capsys: pytest.CaptureFixture[str], argv: list[str], words: str) -> None:
    code, out, err = run(capsys, "--random", config, *argv)
    assert (code, out) == (2, "")
    assert words in err
    assert err.count("\n") == 1


def test_no_such_model(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "--model", "no-such-model")
    assert (code, out) == (1, "")
    assert "no model 'no-such-model'" in err
    code, out, err = run(capsys, "--random", "no-such-shape")
    assert (code, out) == (2, "")
    assert "llama-3.2-1b" in err


def test_models_with_an_encoder(capsys: pytest.CaptureFixture[str]) -> None:
    for option in ("--random", "--model"):
        code, out, err = run(capsys, option, str(REFERENCE / "t5"))
        assert (code, out) == (2, "")
        assert "model, random: expected a decoder-only model, got" in err


@pytest.mark.parametrize("complete", [0, 1])
def test_ctrl_c_shows_complete_rounds(
    config: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, complete: int
) -> None:
    left = [Limits(1e9, 1e9)] * complete

    def limits(*_: Any) -> Limits:
        if not left:
            raise KeyboardInterrupt
        return left.pop()

    monkeypatch.setattr("kvcore.bench.rounds.measure_limits", limits)
    code, out, _ = run(capsys, "--random", config, "--json", *QUICK)
    assert code == 130
    assert [json.loads(line)["rounds"] for line in out.splitlines()] == [complete] * complete


def test_settings_need_a_model() -> None:
    with pytest.raises(InvalidArgument, match="expected one of them, got none"):
        Settings()


# -- random weights ---------------------------------------------------------------------------------------------------


def test_large_random_matrices_repeat_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvcore.loading import RandomWeights

    monkeypatch.setattr("kvcore.loading._MOST_DRAWN", 101)
    weights = RandomWeights(spec_from_config(TINY), 7)
    matrix = weights.get("model.embed_tokens.weight")
    assert matrix.shape == (96, 32)
    assert len(np.unique(matrix, axis=0)) == 96
    assert np.array_equal(matrix, RandomWeights(spec_from_config(TINY), 7).get("model.embed_tokens.weight"))
    assert abs(float(matrix.std()) * 32**0.5 - 1) < 0.3


# -- scripts ----------------------------------------------------------------------------------------------------------


def test_endtoend(
    config: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def tiny(settings: Settings, show: Any) -> None:
        assert settings.prompt_lengths == (90, 871, 3430)
        run_bench(
            Settings(
                random=config,
                prompt_lengths=(4, 6),
                batch_sizes=(1, 2),
                batch_prompt_length=4,
                new_tokens=2,
                rounds=settings.rounds,
                quantization=settings.quantization,
                kv_cache_dtype=settings.kv_cache_dtype,
            ),
            show,
        )

    monkeypatch.setattr(endtoend, "run_bench", tiny)
    assert endtoend.main(["--rounds", "1", "--json", "--quantization", "int8"]) == 0
    assert json.loads(capsys.readouterr().out)["weights"] == "int8"
    page, picture = tmp_path / "page.md", tmp_path / "picture.svg"
    page.write_text("before\n<!-- endtoend -->\nold\n<!-- end -->\nbehind\n")
    assert endtoend.main(["--rounds", "1", "--formats", "--table", str(page), "--svg", str(picture)]) == 0
    assert capsys.readouterr().out.count("limits: reading") == len(endtoend.FORMATS)
    text = page.read_text()
    assert text.startswith("before\n<!-- endtoend -->\n| weights, KV |")
    assert text.endswith("<!-- end -->\nbehind\n")
    assert text.count("\n| ") == 1 + 1 + 3 * len(endtoend.FORMATS)
    assert "old" not in text
    assert picture.read_text().startswith("<svg")


def test_endtoend_arguments(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        endtoend.main(["--svg", "x.svg"])
    page = tmp_path / "page.md"
    page.write_text("no table")
    with pytest.raises(SystemExit):
        endtoend.main(["--formats", "--table", str(page)])
    capsys.readouterr()
    assert endtoend.main(["--rounds", "0"]) == 1
    assert "rounds: expected at least 1" in capsys.readouterr().err


DRIVER = """
import sys, time
sys.path.insert(0, {folder!r})
from serve import serve
def open_peer(model, num_threads, fail=None):
    print("noise")
    if fail == "open":
        raise RuntimeError("Error: no such instruction")
    def generate(prompts, new_tokens):
        if fail == "run" and len(prompts[0]) > 90:
            raise RuntimeError("Error: too long")
    return "1.0", generate
serve(open_peer)
"""


def test_peers_go_on_without_one_that_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "driver.py").write_text(DRIVER.format(folder=str(peers.DRIVERS)))
    monkeypatch.setattr(peers, "DRIVERS", tmp_path)

    def install(package: str, *_: Any) -> None:
        raise peers.PeerError(f"pip: no matching distribution of {package}")

    monkeypatch.setattr(peers, "install", install)
    ways: list[tuple[str, str | None, dict[str, str]]] = [
        ("kvcore", None, {}),
        ("other", None, {}),
        ("shut", None, {"fail": "open"}),
        ("short", None, {"fail": "run"}),
        ("missing", "nothing==1", {}),
        ("missing too", "nothing==1", {}),
    ]
    runners = peers.Runners([peers.Peer(name, package, "driver.py", options) for name, package, options in ways])
    try:
        runners.start(tmp_path / "model.gguf", tmp_path, 1, 1)
        runners.run_round()
        runners.run_round()
    finally:
        runners.close()
    results = runners.results
    assert {name for name, result in results.items() if result.problem is None} == {"kvcore", "other"}
    assert "Error: no such instruction" in results["shut"].problem
    assert "Error: too long" in results["short"].problem
    assert "no matching distribution" in results["missing too"].problem
    assert {len(times) for times in results["kvcore"].seconds.values()} == {2}
    assert results["kvcore"].version == "1.0"
    table = peers.table(results)
    assert table.count("\n| ") == len(ways) + 2
    assert "missing: pip: no matching distribution" in table


def test_peers_figures(capsys: pytest.CaptureFixture[str]) -> None:
    fast, slow = (
        peers.Result("1", 0.1, {case: [(1.0 * k, 2.0 * k), (9.0, 99.0), (0.1, 0.2)] for case in peers.CASES})
        for k in (1, 2)
    )
    assert fast.prefill("871") == 871
    assert fast.decode("32 x 220") == 32 * 128
    assert slow.decode("90") == 64
    assert peers.Result().decode("90") is None
    assert peers.table({"kvcore": fast, "other": slow}).splitlines()[4].endswith(" | 2.00" * 7 + " |")
    assert json.loads(json.dumps(fast.as_dict()))["tokens_per_second"]["90"]["prefill"] == 90
    for wrong in (["--rounds", "0"], ["--only", "nobody"], []):
        with pytest.raises(SystemExit):
            peers.main(["--scratch", "unused", *wrong] if wrong else [])
    assert "expected beginnings of kvcore bf16" in capsys.readouterr().err


def test_report_without_what_the_system_does_not_tell(config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcore.bench.rounds.resident_memory", lambda: None)
    run_ = open_run(Settings(random=config, prompt_lengths=(4,), batch_sizes=(1,), new_tokens=2, rounds=1))
    with run_.llm:
        list(measure(run_))
        assert "memory not known" in as_text(as_dict(run_))
