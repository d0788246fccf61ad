"""Well-known models by name: their published configurations, as far as memory depends on them.

Keys are those of the models' own config.json files, so these are read like any other configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final


def _llama(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, **more: Any) -> dict[str, Any]:
    return {
        "model_type": "llama", "torch_dtype": "bfloat16", "vocab_size": 128256, "hidden_size": hidden,
        "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "max_position_embeddings": 131072, "tie_word_embeddings": False, **more,
    }  # fmt: skip


def _qwen(kind: str, hidden: int, inner: int, layers: int, heads: int, kv_heads: int, **more: Any) -> dict[str, Any]:
    return {
        "model_type": kind, "torch_dtype": "bfloat16", "vocab_size": 151936, "hidden_size": hidden,
        "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "use_sliding_window": False, **more,
    }  # fmt: skip


def _mistral(kind: str, **more: Any) -> dict[str, Any]:
    return {
        "model_type": kind, "torch_dtype": "bfloat16", "vocab_size": 32000, "hidden_size": 4096,
        "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "max_position_embeddings": 32768, "tie_word_embeddings": False, **more,
    }  # fmt: skip


def _gemma2(hidden: int, inner: int, layers: int, heads: int, kv_heads: int) -> dict[str, Any]:
    return {
        "model_type": "gemma2", "torch_dtype": "bfloat16", "vocab_size": 256000, "hidden_size": hidden,
        "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": 256, "sliding_window": 4096, "max_position_embeddings": 8192,
    }  # fmt: skip


def _gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    return {
        "model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880,
        "num_hidden_layers": layers, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
        "attention_bias": True, "num_local_experts": experts, "num_experts_per_tok": 4, "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * (layers // 2), "max_position_embeddings": 131072,
        "tie_word_embeddings": False, "quantization_config": {"quant_method": "mxfp4"},
    }  # fmt: skip


def _whisper(width: int, layers: int, heads: int, **more: Any) -> dict[str, Any]:
    return {
        "model_type": "whisper", "torch_dtype": "float32", "vocab_size": 51865, "d_model": width,
        "encoder_layers": layers, "encoder_attention_heads": heads, "encoder_ffn_dim": 4 * width,
        "decoder_layers": layers, "decoder_attention_heads": heads, "decoder_ffn_dim": 4 * width,
        "num_mel_bins": 80, "max_source_positions": 1500, "max_target_positions": 448, **more,
    }  # fmt: skip


def _t5(width: int, inner: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        "model_type": "t5", "vocab_size": 32128, "d_model": width, "d_kv": 64, "d_ff": inner, "num_layers": layers,
        "num_heads": heads, "n_positions": 512, "relative_attention_num_buckets": 32,
    }  # fmt: skip


SHAPES: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "llama-3-8b": _llama(4096, 14336, 32, 32, 8, max_position_embeddings=8192),
        "llama-3-70b": _llama(8192, 28672, 80, 64, 8, max_position_embeddings=8192),
        "llama-3.1-8b": _llama(4096, 14336, 32, 32, 8),
        "llama-3.1-70b": _llama(8192, 28672, 80, 64, 8),
        "llama-3.1-405b": _llama(16384, 53248, 126, 128, 8),
        "llama-3.2-1b": _llama(2048, 8192, 16, 32, 8, head_dim=64, tie_word_embeddings=True),
        "llama-3.2-3b": _llama(3072, 8192, 28, 24, 8, head_dim=128, tie_word_embeddings=True),
        "smollm2": _llama(
            576, 1536, 30, 9, 3, vocab_size=49152, max_position_embeddings=8192, tie_word_embeddings=True
        ),
        "mistral-7b": _mistral("mistral", sliding_window=4096),
        "mistral-7b-v0.3": _mistral("mistral", sliding_window=None, vocab_size=32768),
        "mixtral-8x7b": _mistral("mixtral", sliding_window=None, num_local_experts=8, num_experts_per_tok=2),
        "qwen2.5-0.5b": _qwen(
            "qwen2", 896, 4864, 24, 14, 2, max_position_embeddings=32768, max_window_layers=24, sliding_window=32768,
            tie_word_embeddings=True,
        ),
        "qwen2.5-coder-0.5b": _qwen(  # as `kvcore pull` brings it
            "qwen2", 896, 4864, 24, 14, 2, max_position_embeddings=32768, tie_word_embeddings=False
        ),
        "qwen2.5-7b": _qwen(
            "qwen2", 3584, 18944, 28, 28, 4, max_position_embeddings=131072, max_window_layers=28,
            sliding_window=131072, vocab_size=152064, tie_word_embeddings=False,
        ),
        "qwen3-0.6b": _qwen(
            "qwen3", 1024, 3072, 28, 16, 8, head_dim=128, max_position_embeddings=40960, max_window_layers=28,
            sliding_window=None, tie_word_embeddings=True,
        ),
        "qwen3-8b": _qwen(
            "qwen3", 4096, 12288, 36, 32, 8, head_dim=128, max_position_embeddings=40960, max_window_layers=36,
            sliding_window=None, tie_word_embeddings=False,
        ),
        "qwen3-30b-a3b": _qwen(
            "qwen3_moe", 2048, 6144, 48, 32, 4, head_dim=128, max_position_embeddings=40960, max_window_layers=48,
            sliding_window=None, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768,
            decoder_sparse_step=1, mlp_only_layers=[], tie_word_embeddings=False,
        ),
        "gemma-2-2b": _gemma2(2304, 9216, 26, 8, 4),
        "gemma-2-9b": _gemma2(3584, 14336, 42, 16, 8),
        "gemma3-270m": {
            "model_type": "gemma3_text", "torch_dtype": "bfloat16", "vocab_size": 262144, "hidden_size": 640,
            "intermediate_size": 2048, "num_hidden_layers": 18, "num_attention_heads": 4, "num_key_value_heads": 1,
            "head_dim": 256, "sliding_window": 512, "sliding_window_pattern": 6, "max_position_embeddings": 32768,
        },
        "gemma-3-1b": {
            "model_type": "gemma3_text", "torch_dtype": "bfloat16", "vocab_size": 262144, "hidden_size": 1152,
            "intermediate_size": 6912, "num_hidden_layers": 26, "num_attention_heads": 4, "num_key_value_heads": 1,
            "head_dim": 256, "sliding_window": 512, "sliding_window_pattern": 6, "max_position_embeddings": 32768,
        },
        # as published: what is left out is the family's default
        "gemma-3-4b": {
            "model_type": "gemma3",
            "torch_dtype": "bfloat16",
            "text_config": {
                "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
                "sliding_window": 1024,
            },
        },
        "phi-3-mini-4k": {
            "model_type": "phi3", "torch_dtype": "bfloat16", "vocab_size": 32064, "hidden_size": 3072,
            "intermediate_size": 8192, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
            "sliding_window": 2047, "max_position_embeddings": 4096, "tie_word_embeddings": False,
        },
        "gpt-oss-20b": _gpt_oss(24, 32),
        "gpt-oss-120b": _gpt_oss(36, 128),
        "deepseek-v2-lite": {
            "model_type": "deepseek_v2", "torch_dtype": "bfloat16", "vocab_size": 102400, "hidden_size": 2048,
            "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_hidden_layers": 27,
            "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": None, "kv_lora_rank": 512,
            "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 64,
            "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1, "moe_layer_freq": 1,
            "max_position_embeddings": 163840, "tie_word_embeddings": False,
        },
        "deepseek-v3": {
            "model_type": "deepseek_v3", "torch_dtype": "bfloat16", "vocab_size": 129280, "hidden_size": 7168,
            "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61,
            "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512,
            "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 256,
            "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3, "moe_layer_freq": 1,
            "num_nextn_predict_layers": 1, "max_position_embeddings": 163840, "tie_word_embeddings": False,
            "quantization_config": {"quant_method": "fp8"},
        },
        "gpt2": {
            "model_type": "gpt2", "vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12,
            "n_positions": 1024,
        },
        "t5-small": _t5(512, 2048, 6, 8),
        "t5-base": _t5(768, 3072, 12, 12),
        "bart-base": {
            "model_type": "bart", "torch_dtype": "float32", "vocab_size": 50265, "d_model": 768, "encoder_layers": 6,
            "encoder_attention_heads": 12, "encoder_ffn_dim": 3072, "decoder_layers": 6,
            "decoder_attention_heads": 12, "decoder_ffn_dim": 3072, "max_position_embeddings": 1024,
        },
        "whisper-base": _whisper(512, 6, 8),
        "whisper-small": _whisper(768, 12, 12),
        "whisper-large-v3": _whisper(1280, 32, 20, torch_dtype="float16", vocab_size=51866, num_mel_bins=128),
    }
)  # fmt: skip
"""Configurations by the names that ``kvcore plan`` takes."""
