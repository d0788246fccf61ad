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
    TileView,
    __version__,
    available_simd,
    simd,
)
from kvcore.engine.sampling_params import BeamSearchParams, SamplingParams, StructuredOutputsParams
from kvcore.errors import (
    CheckpointError,
    InvalidArgument,
    InvalidHandle,
    InvalidState,
    KvcoreError,
    OutOfBlocks,
    OutOfMemory,
    PinLimit,
    StaleBatch,
    UnsupportedSimd,
)

if TYPE_CHECKING:
    from kvcore import viz
    from kvcore.async_llm import AsyncLLM
    from kvcore.llm import LLM
    from kvcore.lora import LoRARequest
    from kvcore.outputs import BeamSearchOutput, CompletionOutput, RequestOutput, Usage
    from kvcore.session import Session
    from kvcore.transcription import transcribe

__all__ = [
    "LLM",
    "AsyncLLM",
    "Batch",
    "BeamSearchOutput",
    "BeamSearchParams",
    "CheckpointError",
    "CompletionOutput",
    "InvalidArgument",
    "InvalidHandle",
    "InvalidState",
    "KVCache",
    "KVGroup",
    "KvcoreError",
    "Linear",
    "LoRARequest",
    "OutOfBlocks",
    "OutOfMemory",
    "Pin",
    "PinLimit",
    "RequestOutput",
    "SamplingParams",
    "Sequence",
    "Session",
    "StaleBatch",
    "StructuredOutputsParams",
    "Threads",
    "TileView",
    "UnsupportedSimd",
    "Usage",
    "__version__",
    "available_simd",
    "simd",
    "transcribe",
    "viz",
]

_LAZY = {
    "AsyncLLM": "kvcore.async_llm",
    "BeamSearchOutput": "kvcore.outputs",
    "CompletionOutput": "kvcore.outputs",
    "LLM": "kvcore.llm",
    "LoRARequest": "kvcore.lora",
    "RequestOutput": "kvcore.outputs",
    "Session": "kvcore.session",
    "Usage": "kvcore.outputs",
    "transcribe": "kvcore.transcription",
}


def __getattr__(name: str) -> Any:
    # The cache alone needs numpy and nothing else; the rest is imported when it is first asked for.
    from importlib import import_module

    if name == "viz":
        return import_module("kvcore.viz")
    if name in _LAZY:
        value = getattr(import_module(_LAZY[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
