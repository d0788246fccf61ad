"""LoRA adapters as a call asks for them, and those that an ``LLM`` has loaded."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvcore.errors import CheckpointError, InvalidArgument

_KEPT: Final = 8
"""Adapters that stay in memory when nobody uses them."""

_FILES: Final = ("adapter_config.json", "adapter_model.safetensors")


@dataclass(frozen=True)
class LoRARequest:
    """An adapter for ``LLM.generate(..., lora_request=...)``.

    What is computed with an adapter is found again by its files' content: two names for the same files share it,
    and other files under the same name do not.

    Attributes:
        lora_name: what to call it.
        lora_path: a folder with ``adapter_config.json`` and ``adapter_model.safetensors``, as peft saves them.
        lora_int_id: is not used; vLLM's requests have it.
    """

    lora_name: str
    lora_path: str | Path
    lora_int_id: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.lora_name, str) or not self.lora_name:
            raise InvalidArgument(f"LoRARequest.lora_name: expected a name, got {self.lora_name!r}")
        if not isinstance(self.lora_path, (str, Path)):
            raise TypeError(f"LoRARequest.lora_path: expected a folder, got {self.lora_path!r}")


class LoadedAdapters:
    """The adapters that a decoder has packed. Files that have changed are read again."""

    def __init__(self, pack: Callable[[Any], Any]) -> None:
        """``pack`` makes a decoder's adapter of what was read (``Decoder.adapter``)."""
        self._pack = pack
        self._loaded: OrderedDict[tuple[Any, ...], Any] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, request: Any) -> Any:
        """The adapter that a request names, or None for None.

        Raises:
            CheckpointError: it is missing, damaged, not supported, or does not fit the model.
            TypeError: no ``LoRARequest``.
        """
        if request is None:
            return None
        if not isinstance(request, LoRARequest):
            raise TypeError(f"lora_request: expected None or a LoRARequest, got {request!r}")
        from kvcore.checkpoint.lora import load_lora

        folder = Path(request.lora_path).expanduser()
        with self._lock:
            state = _state(folder)
            adapter = self._loaded.pop(state, None) if state is not None else None
            if adapter is None:
                adapter = self._pack(load_lora(folder))
            if state is not None:
                self._loaded[state] = adapter
                while len(self._loaded) > _KEPT:
                    self._loaded.popitem(last=False)
            return adapter


def _state(folder: Path) -> tuple[Any, ...] | None:
    """What changes when a file does; None if one is missing, which reading it will say better."""
    try:
        stats = [(folder / name).stat() for name in _FILES]
    except OSError:
        return None
    except ValueError as error:  # a null character
        raise CheckpointError(f"{str(folder)!r}: expected a folder: {error}") from error
    return (str(folder.absolute()), *((stat.st_mtime_ns, stat.st_size, stat.st_ino) for stat in stats))
