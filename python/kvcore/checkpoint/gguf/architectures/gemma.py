"""Gemma 1, 2 and 3 (text). Norms are stored as what they multiply by, and the output matrix never."""

from __future__ import annotations

from kvcore.checkpoint.gguf import keys
from kvcore.checkpoint.gguf.architecture import Architecture
from kvcore.checkpoint.gguf.architectures.llama import ATTENTION, CONFIG, HEAD_NORMS, MLP, TENSORS
from kvcore.checkpoint.gguf.keys import Hyperparameters, Value, number
from kvcore.checkpoint.gguf.layouts import PLUS_ONE

_ACTIVATION = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}
_CONFIG = {**CONFIG, **_ACTIVATION}
_SANDWICH = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_NORMS = ("output_norm", "attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm", *HEAD_NORMS)
_LAYOUTS = dict.fromkeys(_NORMS, PLUS_ONE)


def _query_scalar(large: int) -> Value:
    """What scores are divided by the root of. No key says it: the largest model (by its layers) has another one."""

    def scalar(read: Hyperparameters) -> int:
        if keys.layers(read) == large:
            return read.integer("embedding_length") // keys.heads(read)
        return keys.head_dim(read)

    return scalar


GEMMA = Architecture(model_type="gemma", config=_CONFIG, tensors=TENSORS, layer={**ATTENTION, **MLP}, layouts=_LAYOUTS)
GEMMA2 = Architecture(
    model_type="gemma2",
    config={
        **_CONFIG,
        "attn_logit_softcapping": number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": number("final_logit_softcapping", 30.0),
        "query_pre_attn_scalar": _query_scalar(46),
        "sliding_window": keys.window,
        "layer_types": keys.layer_types(2),
    },
    tensors=TENSORS,
    layer={**ATTENTION, **MLP, **_SANDWICH},
    layouts=_LAYOUTS,
)
GEMMA3 = Architecture(
    model_type="gemma3_text",
    config={
        **{key: value for key, value in _CONFIG.items() if key != "rope_parameters"},
        "rope_theta": number("rope.freq_base", 1_000_000.0),
        "rope_local_base_freq": number("rope.freq_base_swa", 10_000.0),
        "rope_scaling": lambda read: {k: v for k, v in keys.rope(read).items() if k != "rope_theta"},
        "final_logit_softcapping": number("final_logit_softcapping", None),
        "query_pre_attn_scalar": _query_scalar(62),
        "sliding_window": keys.window,
        "layer_types": keys.layer_types(6),
    },
    tensors=TENSORS,
    layer={**ATTENTION, **HEAD_NORMS, **MLP, **_SANDWICH},
    layouts=_LAYOUTS,
)
