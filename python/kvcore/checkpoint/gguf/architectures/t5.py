"""T5 1.0 and 1.1: an encoder and a decoder, whose tensors begin with ``enc.`` and ``dec.``."""

from __future__ import annotations

from dataclasses import replace

from kvcore.checkpoint.gguf import keys
from kvcore.checkpoint.gguf.architecture import Architecture
from kvcore.checkpoint.gguf.keys import Hyperparameters, integer, number

_SELF = {
    "attn_norm": "layer.0.layer_norm",
    "attn_q": "layer.0.SelfAttention.q",
    "attn_k": "layer.0.SelfAttention.k",
    "attn_v": "layer.0.SelfAttention.v",
    "attn_o": "layer.0.SelfAttention.o",
    "attn_rel_b": "layer.0.SelfAttention.relative_attention_bias",
}
_CROSS = {
    "cross_attn_norm": "layer.1.layer_norm",
    "cross_attn_q": "layer.1.EncDecAttention.q",
    "cross_attn_k": "layer.1.EncDecAttention.k",
    "cross_attn_v": "layer.1.EncDecAttention.v",
    "cross_attn_o": "layer.1.EncDecAttention.o",
}


def _mlp(place: int, gated: bool) -> dict[str, str]:
    dense = f"layer.{place}.DenseReluDense"
    up = {"ffn_gate": f"{dense}.wi_0", "ffn_up": f"{dense}.wi_1"} if gated else {"ffn_up": f"{dense}.wi"}
    return {"ffn_norm": f"layer.{place}.layer_norm", **up, "ffn_down": f"{dense}.wo"}


def _buckets(read: Hyperparameters) -> int:
    for side in ("enc", "dec"):
        second = f"{side}.blk.1.attn_rel_b.weight"
        if second in read.file.tensors:
            raise read.error(second, "relative positions in the first layer only (UMT5 is not supported)", "them here")
    return read.integer("attention.relative_buckets_count", 32)


def _table(gated: bool) -> Architecture:
    sides = {"enc": ("encoder", {**_SELF, **_mlp(1, gated)}), "dec": ("decoder", {**_SELF, **_CROSS, **_mlp(2, gated)})}
    return Architecture(
        model_type="t5",
        config={
            "is_encoder_decoder": True,
            "vocab_size": keys.vocab_size,
            "d_model": integer("embedding_length"),
            "d_ff": integer("feed_forward_length"),
            "d_kv": keys.head_dim,
            "num_layers": keys.layers,
            "num_decoder_layers": integer("decoder_block_count", keys.layers),
            "num_heads": keys.heads,
            "n_positions": integer("context_length", 512),
            "layer_norm_epsilon": number("attention.layer_norm_rms_epsilon"),
            "relative_attention_num_buckets": _buckets,
            "feed_forward_proj": "gated-gelu" if gated else "relu",
            "decoder_start_token_id": lambda read: read.integer("decoder_start_token_id", 0, minimum=0),
            "tie_word_embeddings": keys.tied,
        },
        tensors={
            "token_embd": "shared",
            "enc.output_norm": "encoder.final_layer_norm",
            "dec.output_norm": "decoder.final_layer_norm",
            "output": "lm_head",
        },
        prefix="",
        layer={
            f"{side}.{base}": f"{name}.block.{{layer}}.{target}"
            for side, (name, targets) in sides.items()
            for base, target in targets.items()
        },
    )


_GATED = _table(gated=True)


def _variant(read: Hyperparameters) -> Architecture | None:
    return _GATED if "enc.blk.0.ffn_gate.weight" in read.file.tensors else None


T5 = replace(_table(gated=False), variant=_variant)
