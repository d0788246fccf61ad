"""A short name for a model's exact weights, so that saved K and V are not read back into another model.

    for each file: its name, its size, its configuration or first 64 KiB, and 256 samples of 4 KiB at even distances

Reading all of a large model would take longer than loading it. Another model of the same shape differs nearly
everywhere, so it differs in the samples.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

from kvcore.errors import CheckpointError

_HEAD: Final = 64 << 10
_SAMPLE: Final = 4 << 10
_SAMPLES: Final = 256


def fingerprint(path: Path) -> str:
    """32 hexadecimal digits for the model in a folder (config.json and safetensors) or in a single file.

    Raises:
        CheckpointError: a file cannot be read.
    """
    files = sorted([*path.glob("*.safetensors"), *path.glob("config.json")]) if path.is_dir() else [path]
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        try:
            _add(digest, file)
        except OSError as error:
            raise CheckpointError(f"{file}: cannot be read: {error}") from error
    return digest.hexdigest()


def _add(digest: hashlib.blake2b, file: Path) -> None:
    with file.open("rb", buffering=0) as stream:
        size = file.stat().st_size
        # A folder may be renamed; its files keep their names.
        digest.update(f"{file.name if file.suffix != '.gguf' else ''}\0{size}\0".encode())
        digest.update(stream.read(_HEAD))
        step = max(size // _SAMPLES, _SAMPLE)
        for start in range(_HEAD, size, step):
            stream.seek(start)
            digest.update(stream.read(_SAMPLE))
