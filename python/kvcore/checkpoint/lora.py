"""LoRA adapters as peft saves them: ``adapter_config.json`` and ``adapter_model.safetensors``.

    y = W x + scale * B (A x)          A [rank, in], B [out, rank], for each module that the adapter changes
    scale = lora_alpha / rank          rsLoRA: lora_alpha / sqrt(rank)

What would change more than that (DoRA, biases, modules of its own, embeddings) is refused by name: an adapter that is
applied in part gives answers that nobody trained.
Sources: LoRA (arXiv 2106.09685), rsLoRA (arXiv 2312.03732), https://github.com/huggingface/peft
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvcore.checkpoint.config import Config, ConfigReader, read_json
from kvcore.checkpoint.weights import PICKLE_ADVICE, SafetensorsFile
from kvcore.errors import CheckpointError

_TENSOR: Final = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<half>[AB])(?:\.default)?\.weight")
_NAME: Final = re.compile(r"[\w.-]+")
_FLOATS: Final = ("F32", "F16", "BF16")
_MAX_RANK: Final = 4096
_CHANGED_BASE: Final = ("pissa", "olora", "corda", "loftq")
"""Ways to initialise that take something off the base model: their adapters fit no other."""


@dataclass(frozen=True)
class LoraPair:
    """What an adapter adds to one module: ``b @ (a @ x)``, the scale in ``b``.

    Attributes:
        a: float32 [rank, in].
        b: float32 [out, rank].
    """

    a: npt.NDArray[np.float32]
    b: npt.NDArray[np.float32]


@dataclass(frozen=True)
class LoraWeights:
    """An adapter in memory.

    Attributes:
        source: its folder.
        identity: 32 hexadecimal digits that differ for files with any other byte.
        modules: what it adds, by Hugging Face's names of modules ("model.layers.0.self_attn.q_proj").
    """

    source: str
    identity: str
    modules: Mapping[str, LoraPair]


def load_lora(folder: str | Path) -> LoraWeights:
    """Read an adapter.

    Raises:
        CheckpointError: a file is missing or damaged, or the adapter is of a kind that is not supported.
    """
    folder = Path(folder)
    path = folder / "adapter_config.json"
    config = Config(read_json(path), str(path))
    scale = _Scale(config)
    weights = folder / "adapter_model.safetensors"
    if not weights.exists() and (folder / "adapter_model.bin").exists():
        raise CheckpointError(f"{folder}: expected adapter_model.safetensors, got adapter_model.bin. {PICKLE_ADVICE}")
    file = SafetensorsFile(weights)
    halves = dict(_halves(file))
    modules = {}
    for module in sorted({module for module, _ in halves}):
        missing = next((half for half in "AB" if (module, half) not in halves), None)
        if missing is not None:
            raise CheckpointError(f"{weights}: module {module!r}: expected lora_A and lora_B, got no lora_{missing}")
        a, b = halves[module, "A"], halves[module, "B"]
        if a.ndim != 2 or b.ndim != 2 or len(a) != b.shape[1] or not 0 < len(a) <= _MAX_RANK:
            raise CheckpointError(
                f"{weights}: module {module!r}: expected lora_A [rank, in] and lora_B [out, rank], rank up to "
                f"{_MAX_RANK}, got {list(a.shape)} and {list(b.shape)}"
            )
        scale.check_rank(module, len(a))
        modules[module] = LoraPair(a.astype(np.float32), b.astype(np.float32) * np.float32(scale.of_rank(len(a))))
    if not modules:
        raise CheckpointError(f"{weights}: expected tensors named lora_A and lora_B, got none")
    return LoraWeights(str(folder), _identity(path, weights), modules)


class _Scale:
    """What config says of ranks and factors, once all that is not supported is refused."""

    def __init__(self, config: Config) -> None:
        self._read = read = ConfigReader(config)
        kind = read.string("peft_type")
        if kind != "LORA":
            raise read.error("peft_type", '"LORA"', kind)
        refused = {
            "use_dora": False, "lora_bias": False, "bias": "none", "modules_to_save": None, "alpha_pattern": {},
            "layer_replication": None, "trainable_token_indices": None, "megatron_config": None,
        }  # fmt: skip
        for key, plain in refused.items():
            if config.get(key) not in (None, plain, []):
                raise read.error(key, f"{plain!r}, as anything else is not supported", config[key])
        start = config.get("init_lora_weights", True)
        if isinstance(start, str) and start.startswith(_CHANGED_BASE):
            raise read.error("init_lora_weights", "a way that leaves the base model as it is", start)
        self._rank = read.integer("r", 8)
        ranks = read.child("rank_pattern")
        self._ranks = {} if ranks is None else {name: ranks.integer(name) for name in config["rank_pattern"]}
        self._alpha = read.number("lora_alpha", 8.0)
        self._root = read.boolean("use_rslora", False)

    def check_rank(self, module: str, rank: int) -> None:
        """Raises CheckpointError for a module of a rank that the config does not give it.

        A key of rank_pattern that is a regular expression is not run, as it may take for ever: it may mean any module.
        """
        key, allowed = "r", []
        for name, of_name in self._ranks.items():
            if not _NAME.fullmatch(name):
                allowed.append(of_name)
            elif f".{module}".endswith(f".{name}"):
                allowed.append(of_name)
                key = "rank_pattern"
                break
        else:
            allowed.append(self._rank)
        if rank not in allowed:
            expected = f"{rank}, as the tensors of module {module!r} have it"
            raise self._read.error(key, expected, allowed[0] if len(allowed) == 1 else allowed)

    def of_rank(self, rank: int) -> float:
        """The factor of a module of this rank."""
        return self._alpha / (math.sqrt(rank) if self._root else rank)


def _halves(file: SafetensorsFile) -> Iterator[tuple[tuple[str, str], npt.NDArray[Any]]]:
    """(module, "A" or "B") and the tensor."""
    for name, (dtype, *_) in file.tensors.items():
        match = _TENSOR.fullmatch(name)
        if match is None:
            expected = "only base_model.model.*.lora_A.weight and lora_B.weight, as others are not supported"
            raise CheckpointError(f"{file.path}: tensor {name!r}: expected {expected}")
        if dtype not in _FLOATS:
            raise CheckpointError(f"{file.path}: tensor {name!r}: expected {', '.join(_FLOATS)}, got {dtype}")
        yield (match["module"], match["half"]), file.get(name)


def _identity(*paths: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for path in paths:
        try:
            content = path.read_bytes()
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error}") from error
        digest.update(len(content).to_bytes(8, "little"))
        digest.update(content)
    return digest.hexdigest()
