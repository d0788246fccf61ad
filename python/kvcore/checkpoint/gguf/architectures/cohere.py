"""Cohere's Command models. Their rope turns neighbours in Hugging Face as well, so heads are stored as they are."""

from __future__ import annotations

from kvcore.checkpoint.gguf import keys
from kvcore.checkpoint.gguf.architecture import Architecture
from kvcore.checkpoint.gguf.architectures.llama import ATTENTION, CONFIG, HEAD_NORMS, MLP, TENSORS
from kvcore.checkpoint.gguf.keys import has_tensor, number

_CONFIG = {
    **{key: value for key, value in CONFIG.items() if key != "rms_norm_eps"},
    "layer_norm_eps": number("attention.layer_norm_epsilon"),
    "logit_scale": number("logit_scale"),
    "attention_bias": has_tensor("blk.{layer}.attn_q.bias"),
}
_LAYER = {**{key: value for key, value in ATTENTION.items() if key != "ffn_norm"}, **MLP}

COMMAND_R = Architecture(
    model_type="cohere",
    config={**_CONFIG, "use_qk_norm": has_tensor("blk.{layer}.attn_q_norm.weight")},
    tensors=TENSORS,
    layer={**_LAYER, **HEAD_NORMS},
)
COHERE2 = Architecture(
    model_type="cohere2",
    config={**_CONFIG, "sliding_window": keys.window, "layer_types": keys.layer_types(4)},
    tensors=TENSORS,
    layer=_LAYER,
)
