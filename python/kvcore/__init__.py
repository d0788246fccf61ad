"""kvcore: the KV cache of large language models as real software.

Paged blocks with copy-on-write sharing, prefix reuse, SIMD attention over block tables, and an engine on top::

    from kvcore import LLM, SamplingParams

    llm = LLM("smollm2")
    print(llm.generate("The capital of France is", SamplingParams(max_tokens=8, temperature=0.0))[0].outputs[0].text)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvcore._kvcore import (
    Batch,
    KVCache,
    KVGroup,
    Linear,
    Pin,
    Sequence,
    Threads,
    __version__,
    available_simd,
    simd,
)
from kvcore.engine.sampling_params import SamplingParams
from kvcore.errors import (
    CheckpointError,
    InvalidArgument,
    InvalidHandle,
    InvalidState,
    KvcoreError,
    OutOfBlocks,
    OutOfMemory,
    PinLimitExceeded,
    StaleBatch,
    UnsupportedSimd,
)

if TYPE_CHECKING:
    from kvcore.llm import LLM
    from kvcore.outputs import CompletionOutput, RequestOutput

__all__ = [
    "LLM",
    "Batch",
    "CheckpointError",
    "CompletionOutput",
    "InvalidArgument",
    "InvalidHandle",
    "InvalidState",
    "KVCache",
    "KVGroup",
    "KvcoreError",
    "Linear",
    "OutOfBlocks",
    "OutOfMemory",
    "Pin",
    "PinLimitExceeded",
    "RequestOutput",
    "SamplingParams",
    "Sequence",
    "StaleBatch",
    "Threads",
    "UnsupportedSimd",
    "__version__",
    "available_simd",
    "simd",
]

_LAZY = {"LLM": "kvcore.llm", "RequestOutput": "kvcore.outputs", "CompletionOutput": "kvcore.outputs"}


def __getattr__(name: str) -> Any:
    # The cache alone needs numpy and nothing else; the model side is imported when it is first asked for.
    if name in _LAZY:
        from importlib import import_module

        value = getattr(import_module(_LAZY[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
