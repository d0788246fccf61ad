"""The oracle, and with it configurations, weights and rope, against the outputs of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcore.checkpoint.config import load_config
from kvcore.checkpoint.weights import SafetensorsFile, SafetensorsWeights
from kvcore.models.families import spec_from_config
from kvcore.models.spec import check_weights, unused_tensors
from oracle import Oracle

REFERENCE = Path(__file__).parent / "data" / "reference"
CASES = [
    (folder.name, config.name)
    for folder in sorted(REFERENCE.glob("*/"))
    if not load_config(folder).get("is_encoder_decoder")  # tests/encdec_oracle.py is theirs
    for config in sorted(folder.glob("config*.json"))
]


def load(folder: Path, config: str, dtype: Any = np.float32) -> Oracle:
    spec = spec_from_config(load_config(folder / config))
    weights = SafetensorsWeights.open(folder)
    check_weights(spec, weights)
    oracle = Oracle(spec, weights, dtype)
    assert unused_tensors(spec, weights) == []
    return oracle


def expected(folder: Path) -> dict[str, np.ndarray]:
    # integers are not weights, so the file is read with the format's own package
    from safetensors.numpy import load_file

    return load_file(folder / "expected.safetensors")


def test_all_folders_are_there() -> None:
    assert len(CASES) == 56


@pytest.mark.parametrize(("name", "config"), CASES)
def test_logits_and_greedy_tokens(name: str, config: str) -> None:
    folder = REFERENCE / name
    atol = json.loads((folder / "meta.json").read_text())["tolerance"]["float32"]["atol"]
    want = expected(folder)
    oracle = load(folder, config)
    np.testing.assert_allclose(oracle.logits(want["input_ids"]), want["logits"], rtol=0, atol=atol)
    np.testing.assert_allclose(oracle.logits(want["input_ids_16"]), want["logits_16"], rtol=0, atol=atol)
    first = oracle.hidden_states(want["input_ids"])[1]
    np.testing.assert_allclose(first, want["hidden_after_layer0"], rtol=0, atol=atol)
    count = 40 if name.startswith("llama") else 6  # the others' cases are many
    assert oracle.greedy(want["input_ids"], count) == want["greedy_ids"][:count].tolist()
    if "greedy_ids_recompute" in want:
        assert oracle.greedy(want["input_ids"], 40, recompute=True) == want["greedy_ids_recompute"].tolist()


def test_float64_agrees() -> None:
    folder = REFERENCE / "llama_gqa"
    want = expected(folder)
    oracle = load(folder, "config.json", np.float64)
    logits = oracle.logits(want["input_ids"])
    assert logits.dtype == np.float64
    np.testing.assert_allclose(logits, want["logits"], rtol=0, atol=1e-4)


def test_stored_weights_are_views_of_the_file() -> None:
    file = SafetensorsFile(REFERENCE / "llama_gqa" / "model.safetensors")
    array = file.get("model.norm.weight")
    assert not array.flags.owndata
    assert not array.flags.writeable
