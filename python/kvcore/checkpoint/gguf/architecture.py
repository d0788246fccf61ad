"""What a table says of an architecture that GGUF names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvcore.checkpoint.gguf.keys import Hyperparameters, Value
from kvcore.checkpoint.gguf.layouts import Layout


@dataclass(frozen=True)
class Joined:
    """A tensor of Hugging Face that is several of GGUF's, or that has a name without ``.weight`` or ``.bias``.

    Attributes:
        stored: GGUF's names within a layer, with their ``.weight`` or ``.bias``.
        layout: how they become one.
    """

    stored: tuple[str, ...]
    layout: Layout


@dataclass(frozen=True)
class Architecture:
    """How an architecture of GGUF maps to Hugging Face.

    Attributes:
        model_type: of config.json, or the function that decides it.
        config: config.json's other keys: constants, and functions of ``keys.py``.
        tensors: names outside the layers, GGUF's to Hugging Face's, without ``.weight`` and ``.bias``.
        layer: the same for what lies in ``blk.N.``; ``enc.`` or ``dec.`` before that stays. ``{expert}`` in a name says
            that GGUF has a tensor for each expert (or head) in one, the first dimension counting them.
        prefix: what Hugging Face's names within a layer begin with; ``{layer}`` stands for its index.
        layouts: for tensors that the converter changed, by GGUF's name without ``.weight`` and ``.bias``.
        joined: Hugging Face's names within a layer that one stored tensor alone does not give.
        variant: the function that picks another table for a file of this architecture, or None if this one is right.
    """

    model_type: str
    config: Mapping[str, Any | Value]
    tensors: Mapping[str, str]
    layer: Mapping[str, str]
    prefix: str = "model.layers.{layer}."
    layouts: Mapping[str, Layout] = field(default_factory=dict)
    joined: Mapping[str, Joined] = field(default_factory=dict)
    variant: Callable[[Hyperparameters], Architecture | None] = lambda read: None
