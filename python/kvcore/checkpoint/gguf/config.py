"""From the metadata of a GGUF file to config.json, by the table of its architecture."""

from __future__ import annotations

from typing import Any, Final

from kvcore.checkpoint.config import Config, ConfigReader
from kvcore.checkpoint.gguf.architecture import Architecture
from kvcore.checkpoint.gguf.architectures import ARCHITECTURES
from kvcore.checkpoint.gguf.file import GGUFFile
from kvcore.checkpoint.gguf.keys import Hyperparameters, resolve
from kvcore.errors import CheckpointError

_DTYPES: Final = {0: "float32", 1: "float16", 32: "bfloat16"}
"""``general.file_type`` of files that are not quantised."""


def to_config(file: GGUFFile) -> Config:
    """A file's hyperparameters as config.json would have them.

    Raises:
        CheckpointError: the architecture or a feature is not supported, or a value is missing or nonsensical.
    """
    table, read = architecture_of(file)
    values = {"model_type": table.model_type, **resolve(table.config, read), **_token_ids(file)}
    general = ConfigReader({"file_type": file.metadata.get("general.file_type")}, f"{file.path}: general")
    dtype = _DTYPES.get(general.integer("file_type", -1, minimum=0))
    if dtype is not None:
        values["dtype"] = dtype
    return Config(values, str(file.path))


def architecture_of(file: GGUFFile) -> tuple[Architecture, Hyperparameters]:
    """The table of a file's architecture, and its hyperparameters.

    Raises:
        CheckpointError: the architecture is not supported; the message lists those that are.
    """
    name = file.metadata.get("general.architecture")
    table = ARCHITECTURES.get(name) if isinstance(name, str) else None
    if table is None:
        supported = ", ".join(sorted(ARCHITECTURES))
        raise CheckpointError(
            f"{file.path}: general.architecture: expected a supported architecture ({supported}), got {name!r}"
        )
    read = Hyperparameters(file, str(name))
    return table.variant(read) or table, read


def _token_ids(file: GGUFFile) -> dict[str, Any]:
    prefix = "tokenizer.ggml."
    read = ConfigReader(
        {k.removeprefix(prefix): v for k, v in file.metadata.items() if k.startswith(prefix)},
        f"{file.path}: tokenizer.ggml",
    )
    ends = [id_ for kind in ("eos", "eot", "eom") for id_ in read.token_ids(f"{kind}_token_id")]
    single = {"bos_token_id": "bos_token_id", "pad_token_id": "padding_token_id"}
    return {
        "eos_token_id": list(dict.fromkeys(ends)),
        **{ours: next(iter(read.token_ids(theirs)), None) for ours, theirs in single.items()},
    }
