"""From what a user calls a model to its configuration, and to what its files hold.

a folder, a config.json, a .gguf file     read where they are
a name that ``kvcore pull`` knows         if it is pulled; nothing is fetched
a name of ``shapes.SHAPES``               built in

No tensor is read: of weights only the header that lists them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kvcore.checkpoint import pull
from kvcore.checkpoint.config import Config, load_config, read_json
from kvcore.errors import CheckpointError, InvalidArgument
from kvcore.plan.shapes import SHAPES


@dataclass(frozen=True)
class StoredWeights:
    """What a checkpoint's files hold.

    Attributes:
        files: how many there are.
        tensors: how many there are.
        parameters: elements of all tensors; packed formats may hold several in one.
        types: bytes by the names that the files give to their types, the largest first.
    """

    files: int
    tensors: int
    parameters: int
    types: Mapping[str, int]

    @property
    def bytes(self) -> int:
        """Of all tensors."""
        return sum(self.types.values())

    @classmethod
    def of(cls, files: int, tensors: Iterable[tuple[str, tuple[int, ...], int]]) -> StoredWeights:
        """Add up (type, shape, bytes) of all tensors."""
        count = parameters = 0
        types: dict[str, int] = {}
        for kind, shape, size in tensors:
            elements = 1
            for dimension in shape:
                elements *= dimension
            count, parameters = count + 1, parameters + elements
            types[kind] = types.get(kind, 0) + size
        return cls(files, count, parameters, dict(sorted(types.items(), key=lambda item: -item[1])))


@dataclass(frozen=True)
class Model:
    """A model to plan for.

    Attributes:
        name: what to call it.
        source: where its configuration comes from: a path, or "built in".
        config: its configuration.
        weights: what its files hold, if it has any.
        path: the folder or file that has them.
        notes: what a user should know.
    """

    name: str
    source: str
    config: Config
    weights: StoredWeights | None = None
    path: Path | None = None
    notes: list[str] = field(default_factory=list)


def known_models() -> tuple[str, ...]:
    """The names that ``find_model`` knows."""
    return tuple(sorted({*SHAPES, *pull.known_names()}))


def find_model(model: str | Path) -> Model:
    """Find a model and read its configuration.

    Raises:
        InvalidArgument: there is no such model; lists the names that are known.
        CheckpointError: a file is missing, damaged or not supported.
    """
    text = str(model)
    path = _existing(text)
    if path is not None:
        return _from_path(path)
    name = text.lower()
    if name in pull.known_names():
        pulled = pull.path_of(name)
        if pulled is not None and pulled.suffix == ".gguf":
            return _from_gguf(pulled, name)
    if name in SHAPES:
        return Model(name, "built in", Config(SHAPES[name], name))
    shown = text if len(text) <= 200 else text[:197] + "..."
    raise InvalidArgument(
        f"model: expected a folder, a config.json, a .gguf file or a built-in name, got {shown!r}; the names are "
        f"{', '.join(known_models())}"
    )


def _existing(text: str) -> Path | None:
    try:
        path = Path(text).expanduser()
        return path if text and path.exists() else None
    except (OSError, ValueError, RuntimeError):  # too long, a null character, no home
        return None


def _from_path(path: Path) -> Model:
    name = path.resolve().name
    if path.is_dir():
        files = sorted(path.glob("*.gguf"))
        if (path / "config.json").exists():
            return _from_folder(path, name)
        if len(files) == 1:
            return _from_gguf(files[0], name)
        raise CheckpointError(f"{path}: expected a folder with config.json or one .gguf file, got neither")
    if path.suffix.lower() == ".gguf":
        return _from_gguf(path, name)
    if path.suffix.lower() == ".json":
        return Model(name, str(path), load_config(path))
    raise CheckpointError(f"{path}: expected a folder, a config.json or a .gguf file, got another kind of file")


def _from_folder(folder: Path, name: str) -> Model:
    config = load_config(folder)
    try:
        weights = _safetensors(folder)
    except CheckpointError as error:  # the plan needs none
        return Model(name, str(folder), config, notes=[f"the weights are not shown: {error}"])
    return Model(name, str(folder), config, weights, None if weights is None else folder)


def _safetensors(folder: Path) -> StoredWeights | None:
    """What a folder's safetensors hold; None if it has none. Imports numpy."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if not single.exists() and not index.exists():
        return None
    from kvcore.checkpoint.weights import SafetensorsFile, SafetensorsWeights

    SafetensorsWeights.open(folder)  # checks that all of it is there, and that an index stays within the folder
    names = [single.name] if single.exists() else sorted(set(read_json(index)["weight_map"].values()))
    files = [SafetensorsFile(folder / name) for name in names]
    tensors = (tensor for file in files for tensor in file.tensors.values())
    return StoredWeights.of(len(files), ((kind, shape, end - begin) for kind, shape, begin, end in tensors))


def _from_gguf(path: Path, name: str) -> Model:
    """Imports numpy."""
    from kvcore.checkpoint.gguf import ROPE_TENSORS, GGUFFile, to_config

    file = GGUFFile(path)
    tensors = [tensor for tensor_name, tensor in file.tensors.items() if tensor_name not in ROPE_TENSORS]
    weights = StoredWeights.of(1, ((t.type, t.shape, t.end - t.begin) for t in tensors))
    return Model(name, str(path), to_config(file), weights, path)
