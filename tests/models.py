"""Small models on disk for tests of the whole path, and eyes into a running ``LLM``.

reference folders   random weights, with the outputs of transformers beside them (tests/data/reference)
chain models        real checkpoints whose next token depends on the latest one alone, by a table that the test writes
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcore import LLM
from kvcore.outputs import RequestOutput

Floats = npt.NDArray[np.float32]

REFERENCE = Path(__file__).parent / "data" / "reference"
LLAMAS = [folder.name for folder in sorted(REFERENCE.glob("llama*"))]
EXACT: dict[str, Any] = {"dtype": "float32", "kv_cache_dtype": "float32"}
"""Options for float32 arithmetic throughout."""

TINY: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "eos_token_id": 2,
}
"""A config.json for ``LLM.from_config``."""


# -- reference folders -----------------------------------------------------------------------------------------------


def expected(name: str) -> dict[str, np.ndarray]:
    """Inputs and outputs of a reference folder."""
    from safetensors.numpy import load_file

    return load_file(REFERENCE / name / "expected.safetensors")


def meta(name: str) -> dict[str, Any]:
    return json.loads((REFERENCE / name / "meta.json").read_text())


def copy_reference(name: str, to: Path, config: str = "config.json", **generation: Any) -> Path:
    """A copy with this file as config.json, and with changes to generation_config.json."""
    shutil.copytree(REFERENCE / name, to, dirs_exist_ok=True)
    shutil.copyfile(REFERENCE / name / config, to / "config.json")
    if generation:
        path = to / "generation_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | generation))
    return to


# -- chain models ----------------------------------------------------------------------------------------------------

BYTES = 256
"""Token ids below this are the bytes of a chain model's text."""

PAIR = 256
"""F0 9F, the first half of most emoji, as one token."""

END = 257

_CHAIN_VOCAB = 258


def chain_folder(to: Path, successors: Mapping[int, int], *, vocab_size: int = _CHAIN_VOCAB, **config: Any) -> Path:
    """A checkpoint that says ``successors[t]`` after ``t`` (token 0 where there is none), by a wide margin."""
    table = np.zeros((vocab_size, vocab_size), np.float32)
    for token in range(vocab_size):
        table[token, successors.get(token, 0)] = 20.0
    return table_folder(to, table, **config)


def table_folder(to: Path, table: npt.ArrayLike, **config: Any) -> Path:
    """A checkpoint whose logits after token ``t`` are row ``t`` of ``table`` (up to rounding), whatever came before.

    Embeddings are unit vectors, and the layer's outputs are multiplied by 0; keys and values are as in any model.
    """
    from safetensors.numpy import save_file

    table = np.asarray(table, np.float32)
    vocab, hidden, inner = len(table), -(-len(table) // 16) * 16, 16
    random = np.random.default_rng(0)

    def matrix(rows: int, columns: int) -> Floats:
        return random.standard_normal((rows, columns), np.float32) / 4

    output = np.zeros((vocab, hidden), np.float32)
    output[:, :vocab] = table.T / np.sqrt(np.float32(hidden))
    layer = "model.layers.0."
    tensors = {
        "model.embed_tokens.weight": np.eye(vocab, hidden, dtype=np.float32),
        "model.norm.weight": np.ones(hidden, np.float32),
        "lm_head.weight": output,
        layer + "input_layernorm.weight": np.ones(hidden, np.float32),
        layer + "post_attention_layernorm.weight": np.ones(hidden, np.float32),
        layer + "self_attn.q_proj.weight": matrix(32, hidden),
        layer + "self_attn.k_proj.weight": matrix(16, hidden),
        layer + "self_attn.v_proj.weight": matrix(16, hidden),
        layer + "self_attn.o_proj.weight": np.zeros((hidden, 32), np.float32),
        layer + "mlp.gate_proj.weight": matrix(inner, hidden),
        layer + "mlp.up_proj.weight": matrix(inner, hidden),
        layer + "mlp.down_proj.weight": np.zeros((hidden, inner), np.float32),
    }
    to.mkdir(parents=True, exist_ok=True)
    save_file(tensors, to / "model.safetensors")
    values = {
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "rms_norm_eps": 1e-30,
        "max_position_embeddings": 4096,
        "dtype": "float32",
        **config,
    }
    (to / "config.json").write_text(json.dumps(values))
    return to


def add_tokenizer(folder: Path) -> Path:
    """Give a chain model a tokenizer: a token per byte, END as "</s>", and PAIR."""
    letters = _byte_letters()
    vocab = {letters[byte]: byte for byte in range(BYTES)} | {letters[0xF0] + letters[0x9F]: PAIR}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    end = {
        "id": END,
        "content": "</s>",
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [end],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": [],
        },
    }
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    settings = {"eos_token": "</s>", "chat_template": template}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def _byte_letters() -> list[str]:
    """GPT-2's letter for each byte: itself where it prints, else one from 256 on."""
    printing = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    letters, spare = [], BYTES
    for byte in range(BYTES):
        letters.append(chr(byte) if byte in printing else chr(spare))
        spare += byte not in printing
    return letters


# -- a running LLM ---------------------------------------------------------------------------------------------------


@contextmanager
def recorded(llm: LLM) -> Iterator[Callable[[RequestOutput], Floats]]:
    """Keep the logits that tokens are sampled from.

    Yields a function from an output to its rows, float32 [tokens generated, vocab].
    """
    rows: dict[str, list[Floats]] = {}
    decoder, scheduler = llm._decoder, llm._engine._scheduler
    forward = decoder.forward

    def recording(*args: Any, **options: Any) -> Floats:
        logits: Floats = forward(*args, **options)
        sampled = [seq for seq, n in scheduler.items if seq.num_missing == n]
        assert len(sampled) in (len(logits), 0)
        for seq, row in zip(sampled, logits, strict=False):
            rows.setdefault(seq.request_id, []).append(row.copy())
        return logits

    decoder.forward = recording
    try:
        yield lambda output: np.array(rows[output.request_id])
    finally:
        del decoder.forward


def assert_same_bits(got: npt.NDArray[Any], want: npt.NDArray[Any], what: Any = "") -> None:
    assert got.dtype == want.dtype
    assert got.shape == want.shape, what
    if got.tobytes() != want.tobytes():
        rows = np.flatnonzero((got.view(np.uint32) != want.view(np.uint32)).any(axis=-1))
        worst = np.abs(got.astype(np.float64) - want).max()
        raise AssertionError(f"{what}: rows {rows.tolist()[:10]} of {len(got)} differ, by up to {worst:.3g}")


def assert_nothing_held(llm: LLM) -> None:
    """Law 2: everything is over, and every block is free or cached."""
    llm.cache.check()
    stats = llm.stats()
    cache = stats["cache"]
    assert (stats["num_waiting"], stats["num_running"]) == (0, 0)
    assert (cache["used"], cache["num_sequences"], cache["tokens"]) == (0, 0, 0), cache
    assert cache["free"] + cache["cached"] == cache["total"] == llm.cache.num_free_blocks, cache
