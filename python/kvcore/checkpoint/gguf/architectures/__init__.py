"""One table for each architecture that is read, by ``general.architecture``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from kvcore.checkpoint.gguf.architecture import Architecture
from kvcore.checkpoint.gguf.architectures.cohere import COHERE2, COMMAND_R
from kvcore.checkpoint.gguf.architectures.deepseek import DEEPSEEK2
from kvcore.checkpoint.gguf.architectures.gemma import GEMMA, GEMMA2, GEMMA3
from kvcore.checkpoint.gguf.architectures.glm import GLM4
from kvcore.checkpoint.gguf.architectures.gpt import GPT2, GPT_NEOX
from kvcore.checkpoint.gguf.architectures.gpt_oss import GPT_OSS
from kvcore.checkpoint.gguf.architectures.llama import GRANITE, LLAMA, OLMO2, SMOLLM3
from kvcore.checkpoint.gguf.architectures.phi import PHI3
from kvcore.checkpoint.gguf.architectures.qwen import QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE
from kvcore.checkpoint.gguf.architectures.stablelm import STABLELM
from kvcore.checkpoint.gguf.architectures.t5 import T5

ARCHITECTURES: Final[Mapping[str, Architecture]] = {
    "llama": LLAMA,
    "qwen2": QWEN2,
    "qwen2moe": QWEN2_MOE,
    "qwen3": QWEN3,
    "qwen3moe": QWEN3_MOE,
    "gemma": GEMMA,
    "gemma2": GEMMA2,
    "gemma3": GEMMA3,
    "phi3": PHI3,
    "granite": GRANITE,
    "olmo2": OLMO2,
    "smollm3": SMOLLM3,
    "command-r": COMMAND_R,
    "cohere2": COHERE2,
    "stablelm": STABLELM,
    "glm4": GLM4,
    "gpt2": GPT2,
    "gptneox": GPT_NEOX,
    "deepseek2": DEEPSEEK2,
    "gpt-oss": GPT_OSS,
    "t5": T5,
}
