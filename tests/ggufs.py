"""GGUF files for tests: a writer that can write what no honest writer would, and reference folders converted.

The converter follows llama.cpp's, with the names of the ``gguf`` package: it shares nothing with the reader's tables.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np

from kvcore.checkpoint.weights import SafetensorsWeights

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
PACK = {U8: "<B", I8: "<b", U16: "<H", I16: "<h", U32: "<I", I32: "<i", F32: "<f", BOOL: "<B", U64: "<Q", I64: "<q",
        F64: "<d"}  # fmt: skip


def string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def value(kind: int, content: Any) -> bytes:
    return string(content) if kind == STRING else struct.pack(PACK[kind], content)


def entry(key: str, kind: int, content: Any) -> bytes:
    return string(key) + struct.pack("<I", kind) + value(kind, content)


def array_entry(key: str, kind: int, items: Sequence[Any]) -> bytes:
    head = string(key) + struct.pack("<IIQ", ARRAY, kind, len(items))
    return head + b"".join(value(kind, item) for item in items)


def info(name: str, dimensions: Sequence[int], kind: int, offset: int) -> bytes:
    head = string(name) + struct.pack("<I", len(dimensions))
    return head + struct.pack(f"<{len(dimensions)}QIQ", *dimensions, kind, offset)


def build(
    entries: Sequence[bytes], infos: Sequence[bytes], data: bytes, *, version: int = 3, magic: bytes = b"GGUF",
    tensor_count: int | None = None, entry_count: int | None = None, alignment: int = 32,
) -> bytes:  # fmt: skip
    head = magic + struct.pack(
        "<IQQ",
        version,
        len(infos) if tensor_count is None else tensor_count,
        len(entries) if entry_count is None else entry_count,
    )
    head += b"".join(entries) + b"".join(infos)
    return head + bytes(-len(head) % alignment) + data


def file_of(
    entries: Sequence[bytes], tensors: dict[str, tuple[int, Sequence[int], bytes]], alignment: int = 32
) -> bytes:
    """A well-formed file: name to type, dimensions (innermost first) and bytes."""
    infos, data = [], b""
    for name, (kind, dimensions, content) in tensors.items():
        infos.append(info(name, dimensions, kind, len(data)))
        data += content + bytes(-len(content) % alignment)
    return build(entries, infos, data, alignment=alignment)


def f32(array: np.ndarray) -> tuple[int, Sequence[int], bytes]:
    return 0, array.shape[::-1], array.astype(np.float32).tobytes()


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


# Reference folders as llama.cpp's converter would write them

ARCHITECTURE_OF = {
    "mistral": "llama", "mixtral": "llama", "gemma3_text": "gemma3", "cohere": "command-r", "gpt_neox": "gptneox",
    "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "deepseek_v2": "deepseek2", "deepseek_v3": "deepseek2",
    "gpt_oss": "gpt-oss",
}  # fmt: skip
"""``model_type`` to GGUF's name, where they differ."""

_INTEGERS = {
    "block_count": ("num_hidden_layers", "n_layer"),
    "context_length": ("max_position_embeddings", "n_positions"),
    "embedding_length": ("hidden_size", "n_embd"),
    "feed_forward_length": ("intermediate_size", "n_inner"),
    "attention.head_count": ("num_attention_heads", "n_head"),
    "attention.head_count_kv": ("num_key_value_heads",),
    "attention.sliding_window": ("sliding_window",),
    "expert_count": ("num_local_experts", "num_experts", "n_routed_experts"),
    "expert_used_count": ("num_experts_per_tok",),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
    "expert_shared_count": ("n_shared_experts",),
    "expert_group_count": ("n_group",),
    "expert_group_used_count": ("topk_group",),
    "leading_dense_block_count": ("first_k_dense_replace",),
    "attention.q_lora_rank": ("q_lora_rank",),
    "attention.kv_lora_rank": ("kv_lora_rank",),
    "attention.relative_buckets_count": ("relative_attention_num_buckets",),
    "decoder_block_count": ("num_decoder_layers",),
    "decoder_start_token_id": ("decoder_start_token_id",),
}
_FLOATS = {
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps",),
    "attention.layer_norm_epsilon": ("layer_norm_eps", "layer_norm_epsilon"),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "attention.scale": ("attention_multiplier",),
    "embedding_scale": ("embedding_multiplier",),
    "residual_scale": ("residual_multiplier",),
    "logit_scale": ("logits_scaling", "logit_scale"),
    "expert_weights_scale": ("routed_scaling_factor",),
}
_T5 = {
    "num_layers": "num_hidden_layers",
    "d_model": "hidden_size",
    "d_ff": "intermediate_size",
    "num_heads": "num_attention_heads",
    "d_kv": "head_dim",
    "layer_norm_epsilon": "rms_norm_eps",
}
_LLAMA_LIKE = ("llama", "granite", "smollm3")


def entries_of(config: dict[str, Any]) -> list[bytes]:
    """The metadata of a configuration in the style of transformers 5."""
    kind = config["model_type"]
    arch = ARCHITECTURE_OF.get(kind, kind)
    if kind == "t5":
        config = {**config, **{theirs: config[ours] for ours, theirs in _T5.items()}, "n_positions": 512}
    file_type = {"float32": 0, "float16": 1, "bfloat16": 32}[config.get("dtype") or "bfloat16"]
    entries = [entry("general.architecture", STRING, arch), entry("general.file_type", U32, file_type)]

    def add(key: str, number: int, value: Any) -> None:
        entries.append(entry(f"{arch}.{key}", number, value))

    if kind == "gpt2":
        config = {**config, "n_inner": config["n_inner"] or 4 * config["n_embd"]}
    if kind == "deepseek_v2" or kind == "deepseek_v3":
        config = {**config, "num_key_value_heads": 1}
    for table, number in ((_INTEGERS, U32), (_FLOATS, F32)):
        for key, names in table.items():
            found = next((config[name] for name in names if config.get(name) is not None), None)
            if found is not None and (key != "attention.sliding_window" or kind != "mistral"):
                add(key, number, found)
    heads = config.get("num_attention_heads") or config["n_head"]
    head_dim = config.get("head_dim") or (config.get("hidden_size") or config["n_embd"]) // heads
    if kind.startswith("deepseek"):
        rank, rope, nope = (config[key] for key in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim"))
        for key, value in (("key_length", rank + rope), ("value_length", rank), ("key_length_mla", nope + rope),
                           ("value_length_mla", config["v_head_dim"])):  # fmt: skip
            add(f"attention.{key}", U32, value)
        add("rope.dimension_count", U32, rope)
        add("expert_weights_norm", BOOL, config["norm_topk_prob"])
        add("expert_gating_func", U32, 2 if kind == "deepseek_v3" else 1)
    elif config.get("head_dim"):
        add("attention.key_length", U32, head_dim)
        add("attention.value_length", U32, head_dim)
    if kind == "gpt_oss":
        add("expert_feed_forward_length", U32, config["intermediate_size"])
    if "use_parallel_residual" in config:
        add("use_parallel_residual", BOOL, config["use_parallel_residual"])
    _add_rope(add, config, head_dim)
    return entries


def _add_rope(add: Any, config: dict[str, Any], head_dim: int) -> None:
    rope = config.get("rope_parameters")
    if rope is None:
        return
    rope = rope.get("full_attention", rope)
    add("rope.freq_base", F32, rope["rope_theta"])
    if "partial_rotary_factor" in rope:
        add("rope.dimension_count", U32, int(head_dim * rope["partial_rotary_factor"]))
    if rope["rope_type"] in ("linear", "yarn"):
        add("rope.scaling.type", STRING, rope["rope_type"])
        add("rope.scaling.factor", F32, rope["factor"])
    if rope["rope_type"] == "yarn":
        add("rope.scaling.original_context_length", U32, rope["original_max_position_embeddings"])
        for key in ("beta_fast", "beta_slow"):
            if key in rope:
                add(f"rope.scaling.yarn_{key}", F32, rope[key])
        if "mscale_all_dim" in rope:
            add("rope.scaling.yarn_log_multiplier", F32, 0.1 * rope["mscale_all_dim"])
    if rope["rope_type"] == "longrope":
        add("rope.scaling.original_context_length", U32, rope["original_max_position_embeddings"])


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to the rows of q and k."""
    return weight.reshape(heads, 2, len(weight) // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def _changed(config: dict[str, Any], name: str, array: np.ndarray) -> list[tuple[str, np.ndarray]]:
    """A tensor as the converter gives it, under Hugging Face's name."""
    kind, base = config["model_type"], name.rpartition(".")[0]
    heads = config.get("num_attention_heads") or config.get("n_head")
    if ARCHITECTURE_OF.get(kind, kind) in _LLAMA_LIKE and base.endswith(("q_proj", "k_proj")):
        array = permuted(array, heads if base.endswith("q_proj") else config["num_key_value_heads"])
    if kind.startswith("gemma") and base.endswith("norm"):
        array = array.astype(np.float32) + 1
    if kind == "gpt2" and name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
        array = array.T
    if kind == "gpt_neox" and base.endswith("query_key_value"):
        parts = array.reshape(heads, 3, len(array) // heads // 3, *array.shape[1:])
        array = np.concatenate([parts[:, i].reshape(-1, *array.shape[1:]) for i in range(3)])
    if kind.startswith("deepseek") and base.endswith("kv_b_proj"):
        parts = array.reshape(heads, -1, array.shape[-1])
        k, v = np.split(parts, [config["qk_nope_head_dim"]], axis=1)
        return [(name.replace("kv_b", "k_b"), k.swapaxes(1, 2)), (name.replace("kv_b", "v_b"), v)]
    if kind == "gpt_oss":
        name = name.replace("down_proj_bias", "down_proj.bias").replace("sinks", "sinks.weight")
        if name.endswith("down_proj"):
            return [(f"{name}.weight", array.swapaxes(1, 2))]
        if name.endswith("gate_up_proj"):
            array = array.swapaxes(1, 2)
            return [(name.replace("gate_up_proj", f"{part}_proj.weight"), array[:, i::2])
                    for i, part in enumerate(("gate", "up"))]  # fmt: skip
        if name.endswith("gate_up_proj_bias"):
            return [(name.replace("gate_up_proj_bias", f"{part}_proj.bias"), array[:, i::2])
                    for i, part in enumerate(("gate", "up"))]  # fmt: skip
    return [(name, array)]


def tensors_of(config: dict[str, Any], weights: Any) -> dict[str, tuple[int, Sequence[int], bytes]]:
    """The tensors of a folder: matrices as they are (bfloat16 or float32), vectors float32, experts stacked."""
    kind = config["model_type"]
    arch = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}[ARCHITECTURE_OF.get(kind, kind)]
    names = gguf.get_tensor_name_map(
        arch, config.get("num_hidden_layers") or config.get("n_layer") or config["num_layers"]
    )
    dense = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 64)  # llama.cpp knows no qwen2moe with a dense layer
    experts: dict[str, dict[int, np.ndarray]] = {}
    arrays: dict[str, np.ndarray] = {}
    for name in weights.names():
        for target, array in _changed(config, name, weights.get(name)):
            match = re.fullmatch(r"(.*\.)(?:block_sparse_moe|mlp)\.experts\.(\d+)\.(\w+)(\.\w+)", target)
            if match:
                merged = f"{match[1].removeprefix('model.')}feed_forward.experts.{match[3]}"
                if not match[3].startswith("w"):
                    merged = f"{match[1]}mlp.experts.{match[3]}"
                experts.setdefault(f"{merged}{match[4]}", {})[int(match[2])] = array
            else:
                arrays[target] = array
    arrays |= {name: np.stack([parts[i] for i in sorted(parts)]) for name, parts in experts.items()}
    tensors = {}
    for name, array in arrays.items():
        theirs = name.replace("e_score_correction_bias", "e_score_correction.bias")
        stored = names.get_name(theirs, (".weight", ".bias")) or dense.get_name(theirs, (".weight", ".bias"))
        assert stored is not None, name
        wide = array.ndim == 1 or array.dtype == np.float32 or "sinks" in name
        content = array.astype(np.float32) if wide else array
        tensors[stored] = (0 if wide else 30, array.shape[::-1], np.ascontiguousarray(content).tobytes())
    rope = config.get("rope_parameters") or {}
    for part in ("long", "short"):
        if f"{part}_factor" in rope:
            tensors[f"rope_factors_{part}.weight"] = f32(np.array(rope[f"{part}_factor"]))
    return tensors


def convert(folder: Path, to: Path, extra: Sequence[bytes] = (), kinds: Mapping[str, str] | None = None) -> Path:
    """A folder with a configuration in the style of transformers 5 as a GGUF file.

    Matrices whose names in the file match a pattern of ``kinds`` are quantised to its kind, the first one's that does,
    if its rows are whole blocks.
    """
    config = json.loads((folder / "config.json").read_text())
    tensors = tensors_of(config, SafetensorsWeights.open(folder))
    for name, (number, dimensions, content) in tensors.items():
        kind = next((kind for pattern, kind in (kinds or {}).items() if fnmatchcase(name, pattern)), None)
        if kind is not None and len(dimensions) == 2 and dimensions[0] % 32 == 0:
            given = np.frombuffer(content, np.float32 if number == 0 else ml_dtypes.bfloat16)
            wanted = gguf.GGMLQuantizationType[kind]
            blocks = gguf.quants.quantize(given.astype(np.float32).reshape(dimensions[::-1]), wanted)
            tensors[name] = (int(wanted), dimensions, blocks.tobytes())
    return write(to, file_of([*entries_of(config), *extra], tensors))
