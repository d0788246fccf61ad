"""From what a user calls a model to its configuration, weights and tokenizer.

a folder             config.json and safetensors
a .gguf file         everything in one file
a CTranslate2 file   model.bin of a Whisper model, its tokenizer.json beside it
a short name         what ``kvcore pull`` knows ("smollm2"), fetched if needed
"organisation/name"  a repository on the Hugging Face hub, fetched if needed
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvcore.checkpoint.config import Config, GenerationConfig, load_config, load_generation_config
from kvcore.checkpoint.ctranslate2 import CTranslate2Weights, is_ctranslate2
from kvcore.checkpoint.gguf import GGUFWeights
from kvcore.checkpoint.quantization import check_quantization, expanded
from kvcore.checkpoint.weights import PICKLE_ADVICE, PICKLE_SUFFIXES, SafetensorsWeights, Weights
from kvcore.errors import CheckpointError, InvalidArgument

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_HUB_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")

_HUB_PATTERNS: Final = ("*.json", "*.safetensors", "*.jinja")
_HUB_IGNORED: Final = ("*/*", "consolidated*", "adapter_*")


@dataclass(frozen=True)
class Checkpoint:
    """A model that is open: nothing of its weights has been read yet.

    Attributes:
        name: what to call it.
        config: config.json, or what a GGUF file says in config.json's words.
        generation: how it wants to be sampled, and which ids end a text.
        weights: its tensors by Hugging Face names.
        tokenizer_source: where its tokenizer is: the folder that may have a tokenizer.json, or the metadata of a GGUF
            file.
        path: the folder or file that all of it came from.
    """

    name: str
    config: Config
    generation: GenerationConfig
    weights: Weights
    tokenizer_source: Path | Mapping[str, Any]
    path: Path


def open_checkpoint(model: str | Path) -> Checkpoint:
    """Open a model.

    Args:
        model: a folder, a .gguf file, a name that ``kvcore pull`` knows, or an id "organisation/name" of the hub. What
            is there on disk goes before what would have to be fetched.

    Raises:
        TypeError: neither a string nor a path.
        CheckpointError: there is no such model (the message lists what was tried), it could not be fetched, or it is
            damaged or not supported.
    """
    if not isinstance(model, (str, Path)):
        raise TypeError(f"model: expected a str or a Path, got {type(model).__name__}")
    text = str(model)
    path = _existing(text)
    if path is not None:
        return _open_path(path, path.resolve().name)
    tried = [f"a folder or file {text!r}: not there"]
    is_name = isinstance(model, str)
    if is_name and _NAME.fullmatch(text) and not text.endswith(".gguf"):
        try:
            fetched: Path = importlib.import_module("kvcore.checkpoint.pull").pull(text)
        except InvalidArgument as error:
            tried.append(f"a name that `kvcore pull` knows: {error}")
        else:
            return _open_path(fetched, text)
    elif is_name and _HUB_ID.fullmatch(text) and not text.endswith(".gguf"):
        return _open_path(_fetch(text), text)
    else:
        tried.append("a name that `kvcore pull` knows, or an id like organisation/name: does not look like one")
    raise CheckpointError(f"no model {text!r}; tried " + "; ".join(tried))


def open_folder(folder: Path, name: str) -> Checkpoint:
    """Open a folder with config.json and safetensors.

    Raises:
        CheckpointError: something is missing, damaged or not supported.
    """
    if not (folder / "config.json").exists():
        # say what is there: a pickle alone, or an empty folder, deserves its own message
        SafetensorsWeights.open(folder)
    config = load_config(folder)
    check_quantization(config)  # before a missing shard is complained of
    generation = load_generation_config(folder, config)
    weights = expanded(config, SafetensorsWeights.open(folder))
    return Checkpoint(name, config, generation, weights, folder, folder)


def open_gguf(path: Path, name: str) -> Checkpoint:
    """Open a GGUF file.

    Raises:
        CheckpointError: it is damaged or not supported.
    """
    weights = GGUFWeights.open(path)
    config = weights.to_config()
    return Checkpoint(name, config, GenerationConfig.merge(config), weights, weights.file.metadata, path)


def open_ctranslate2(path: Path, name: str) -> Checkpoint:
    """Open a CTranslate2 file of a Whisper model.

    Raises:
        CheckpointError: it is damaged or not supported.
    """
    weights = CTranslate2Weights(path)
    config = weights.to_config()
    return Checkpoint(name, config, GenerationConfig.merge(config), weights, path.parent, path)


def _existing(text: str) -> Path | None:
    try:
        path = Path(text).expanduser()
        return path if text and path.exists() else None
    except (OSError, ValueError, RuntimeError):  # too long, a null character, no home
        return None


def _open_path(path: Path, name: str) -> Checkpoint:
    if path.is_dir():
        files = sorted(path.glob("*.gguf"))
        if len(files) == 1 and not (path / "config.json").exists():
            return open_gguf(files[0], name)
        if is_ctranslate2(path / "model.bin"):
            return open_ctranslate2(path / "model.bin", name)
        return open_folder(path, name)
    if path.suffix == ".gguf":
        return open_gguf(path, name)
    if is_ctranslate2(path):
        return open_ctranslate2(path, name)
    if path.suffix in PICKLE_SUFFIXES:
        raise CheckpointError(f"{path}: expected safetensors or a .gguf file, got a pickle file. {PICKLE_ADVICE}")
    if path.suffix == ".safetensors" or path.name == "config.json":
        raise CheckpointError(f"{path}: expected a folder with config.json and safetensors; give the folder it is in")
    raise CheckpointError(f"{path}: expected a folder or a .gguf file, got another kind of file")


def _fetch(hub_id: str) -> Path:
    """A repository's snapshot, from the hub's cache on disk or from the hub."""
    try:
        hub = importlib.import_module("huggingface_hub")
        found = hub.snapshot_download(hub_id, allow_patterns=list(_HUB_PATTERNS), ignore_patterns=list(_HUB_IGNORED))
    except Exception as error:  # network, access and cache errors of many libraries; nothing else runs in here
        raise CheckpointError(f"no folder {hub_id!r}, and on the hub: {_advice(error)}") from error
    return Path(found)


def _advice(error: Exception) -> str:
    """What went wrong on the hub, and what helps."""
    kind = type(error).__name__
    if kind == "GatedRepoError":
        advice = "accept the model's licence on its page and log in with `hf auth login`"
    elif kind in ("RepositoryNotFoundError", "RevisionNotFoundError", "HFValidationError"):
        advice = "check the id; for a private model log in with `hf auth login`"
    else:
        advice = "check the network, or download the model elsewhere and give its folder"
    return f"{kind}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}; {advice}"
