"""Weights of 8 and 4 bits: what they cost, and that a row's bits stay its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ggufs import convert
from kvcore import LLM, InvalidArgument, SamplingParams
from kvcore._kvcore import Linear
from kvcore.checkpoint.dequantize import BLOCKS, dequantize
from kvcore.checkpoint.gguf import GGUFWeights
from kvcore.models.table import NUMPY_DTYPES, Table
from models import REFERENCE, assert_nothing_held, assert_same_bits, copy_reference

BITS = ["int8", "int4"]
EXPECTED = json.loads((Path(__file__).parent / "data" / "smollm2" / "expected.json").read_text())


# -- Linear ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", BITS)
@pytest.mark.parametrize("given", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_linear(dtype: str, given: Any) -> None:
    generator = np.random.default_rng(1)
    weight = generator.standard_normal((70, 96), np.float32).astype(given)
    x = generator.standard_normal((9, 96), np.float32)
    linear = Linear(weight, np.arange(70, dtype=np.float32), dtype=dtype)
    assert (linear.dtype, linear.in_features, linear.out_features) == (dtype, 96, 70)
    wide = weight.astype(np.float32)
    exact = x @ wide.T + np.arange(70)
    got = linear(x)
    # A step is about 1/127 of the largest weight of 32, or 1/15 of their range; 96 errors of half of it go either way.
    bound = (0.15 if dtype == "int8" else 1.6) * np.sqrt(np.mean(x**2))
    assert np.abs(got - exact).max() < 4 * bound
    assert np.sqrt(np.mean((got - exact) ** 2)) < bound
    bits = {"int8": 8.5, "int4": 5}[dtype]
    assert linear.nbytes == 96 * 96 * bits / 8 + 70 * 4  # 70 outputs are padded to 96
    for i in range(9):
        assert_same_bits(linear(x[i : i + 1])[0], got[i], i)


def test_linear_bad_input() -> None:
    rows = np.zeros((4, 40), np.uint8)
    assert Linear(rows, dtype="int4", blocks="Q4_1").in_features == 64
    for weight, kwargs, error, text in [
        (rows, {"dtype": "int8", "blocks": "Q4_1"}, InvalidArgument, "dtype"),
        (rows, {"dtype": "int4", "blocks": "Q4_0"}, InvalidArgument, "whole blocks of 18 bytes, got 40"),
        (rows, {"dtype": "int4", "blocks": "Q6_K"}, InvalidArgument, 'one of Q4_0, Q4_1, Q4_K, Q5_0, Q8_0, got "Q6_K"'),
        (rows, {"dtype": "int4", "blocks": "Q4_K"}, InvalidArgument, "whole blocks of 144 bytes, got 40"),
        (rows[0], {"dtype": "int4", "blocks": "Q4_1"}, InvalidArgument, "shape"),
        (rows.astype(np.int8), {"dtype": "int4", "blocks": "Q4_1"}, TypeError, "expected uint8, got int8"),
        (rows, {"dtype": "int4"}, TypeError, "got uint8"),
        (rows.astype(np.float32), {"dtype": "int3"}, InvalidArgument, 'int8 or int4, got "int3"'),
    ]:
        with pytest.raises(error, match=text):
            Linear(weight, **kwargs)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q4_K", "Q5_0", "Q8_0"])
def test_linear_of_blocks(kind: str) -> None:
    """The codes are those that the file's own formula expands."""
    per_block, block_bytes, _ = BLOCKS[kind]
    generator = np.random.default_rng(2)
    rows = generator.integers(0, 256, (40, 2 * block_bytes), np.uint8)
    halves = np.array([0.01, 0.02], np.float16).view(np.uint8)
    rows[:, :4] = rows[:, block_bytes : block_bytes + 4] = halves  # finite scales; more bytes than some kinds have
    exact = dequantize(kind, rows.reshape(-1)).reshape(40, 2 * per_block)
    linear = Linear(rows, dtype="int8" if kind in ("Q5_0", "Q8_0") else "int4", blocks=kind)
    got = linear(np.eye(2 * per_block, dtype=np.float32)).T
    # The factors of Q4_K's groups are rounded to halves; the sums of codes and minima are float32.
    tolerance = 2**-10 if kind == "Q4_K" else 1e-5
    np.testing.assert_allclose(got, exact, rtol=0, atol=tolerance * np.abs(exact).max())


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q8_0"])
def test_rows_of_blocks(kind: str) -> None:
    """They are the file's values."""
    per_block, block_bytes, _ = BLOCKS[kind]
    rows = np.random.default_rng(3).integers(0, 256, (40, 3 * block_bytes), np.uint8)
    blocks = rows.reshape(-1, block_bytes)
    blocks[:, :4] = np.array([0.01, -0.02], np.float16).view(np.uint8)
    blocks[::2, 1] ^= 0x80  # scales below 0
    linear = Linear(rows, dtype="int8" if kind in ("Q5_0", "Q8_0") else "int4", blocks=kind)
    ids = np.array([39, 0, 17, 17])
    exact = dequantize(kind, rows.reshape(-1)).reshape(40, 3 * per_block)[ids]
    assert np.array_equal(linear.rows(ids), exact)
    assert np.array_equal(linear.rows(list(map(int, ids))), exact)


@pytest.mark.parametrize("held", ["float32", "bfloat16", "float16", "int8", "int4"])
def test_rows(held: str) -> None:
    weight = np.random.default_rng(4).standard_normal((45, 40), np.float32)
    linear = Linear(weight, np.ones(45, np.float32), dtype=held)
    rows = linear.rows(range(45))
    assert (rows.dtype, rows.shape) == (np.float32, (45, 40))
    if held in NUMPY_DTYPES:
        assert_same_bits(rows, weight.astype(NUMPY_DTYPES[held]).astype(np.float32))
    else:
        assert np.abs(rows - weight).max() < (0.02 if held == "int8" else 0.25)
    assert linear.rows([]).shape == (0, 40)
    bad: list[tuple[Any, type[Exception]]] = [
        ([45], InvalidArgument),  # the first of the padding
        ([0, -1], InvalidArgument),
        ([1 << 70], InvalidArgument),
        (np.zeros((2, 2), np.int64), InvalidArgument),
        ([0.5], TypeError),
        (7, TypeError),
        ("7", TypeError),
        (None, TypeError),
    ]
    for ids, error in bad:
        with pytest.raises(error, match="ids: expected"):
            linear.rows(ids)


# -- LLM -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quantization", BITS)
def test_batches_and_chunks_change_no_bit(quantization: str, tmp_path: Path) -> None:
    folder = copy_reference("llama_gqa", tmp_path / "model")
    prompts = [[1 + (7 * i + j) % 90 for j in range(n)] for i, n in enumerate((3, 40, 17, 40))]
    want: list[list[int]] = []
    for chunk, num_threads in ((2048, 1), (16, 2)):
        with LLM(
            folder,
            dtype="float32",
            quantization=quantization,
            num_kv_blocks=64,
            num_threads=num_threads,
            max_num_batched_tokens=chunk,
        ) as llm:
            logits = [llm.logits(prompt) for prompt in prompts]
            params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
            alone = [llm.generate([prompt], params)[0].outputs[0].token_ids for prompt in prompts]
            together = [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params)]
            want = want or together
            assert together == want == [list(ids) for ids in alone]
            assert_same_bits(llm.logits(prompts[1] + [5])[:40], logits[1])
            assert_nothing_held(llm)


TIED = REFERENCE / "llama_tied_bias_headdim"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("quantization", ["auto", "none", *BITS])
@pytest.mark.parametrize("kind", ["bfloat16", "Q4_0", "Q4_1", "Q5_0", "Q8_0"])
def test_how_an_embedding_is_held_changes_no_bit(kind: str, quantization: str, dtype: str, tmp_path: Path) -> None:
    """Its rows are those of the file, rounded to ``dtype``, also where they are read from packed blocks."""
    model = convert(TIED, tmp_path / "model.gguf", kinds={"token_embd.weight": kind} if kind in BLOCKS else None)
    table = GGUFWeights.open(model).get("model.embed_tokens.weight").astype(NUMPY_DTYPES[dtype])
    prompt = list(range(0, 320, 7))
    with LLM(model, dtype=dtype, quantization=quantization, num_kv_blocks=8) as llm:
        logits = llm.logits(prompt)
        embedding = llm._decoder._embedding
        assert np.array_equal(embedding.table(np.arange(320)), table.astype(np.float32))
        embedding.table = Table(table, dtype)
        assert_same_bits(llm.logits(prompt), logits)


def test_a_tied_embedding_is_held_once(tmp_path: Path) -> None:
    """Unless its rows were rounded to be packed."""

    def weight_bytes(model: Path, quantization: str = "auto") -> int:
        with LLM(model, dtype="bfloat16", quantization=quantization, num_kv_blocks=8) as llm:
            return llm.weight_bytes

    values = 320 * 64
    others = weight_bytes(TIED) - 2 * values
    bits = {"Q4_0": 5, "Q4_1": 5, "Q5_0": 8.5, "Q8_0": 8.5, None: 16}
    for kind, held in bits.items():
        kinds = {"token_embd.weight": kind} if kind else {}
        model = convert(TIED, tmp_path / "model.gguf", kinds=kinds)
        assert weight_bytes(model) == others + values * held / 8, kind
        assert weight_bytes(model, "none") == others + values * 2
    with LLM(TIED, dtype="bfloat16", quantization="int8", num_kv_blocks=8) as llm:
        rounded = llm._decoder
        assert rounded.nbytes - rounded.step_nbytes(320) == 0
        assert rounded.nbytes - rounded.step_nbytes(1) == 319 * 64 * 2  # rows of bfloat16 beside the packed matrix


@pytest.mark.model
def test_blocks_of_a_file_are_taken_as_they_are(smollm2_path: Path) -> None:
    weights = GGUFWeights.open(smollm2_path)
    kinds = {}
    for name in ("model.layers.0.self_attn.q_proj.weight", "model.layers.3.mlp.down_proj.weight"):
        found = weights.blocks(name)
        assert found is not None
        kinds[found[0]] = name
        blocks = Linear(found[1], dtype="int4", blocks=found[0])
        exact = weights.get(name)
        # One value in a row of x is not rounded: the result is the stored weight, up to float32.
        x = np.eye(blocks.in_features, dtype=np.float32)[:50]
        assert np.abs(blocks(x) - exact.T[:50]).max() < 1e-6 * np.abs(exact).max() * 20
    assert set(kinds) <= {"Q4_0", "Q4_1"}
    assert weights.blocks("model.norm.weight") is None


@pytest.mark.model
def test_auto_is_as_the_file_has_it(smollm2_path: Path) -> None:
    """4 bits and an output matrix of 8, unless float32 is asked for."""
    logits, sizes = {}, {}
    for options in ({}, {"quantization": "int4"}, {"dtype": "float32"}, {"dtype": "float32", "quantization": "none"}):
        with LLM(smollm2_path, num_kv_blocks=16, **options) as llm:
            logits[tuple(options.values())] = llm.logits([1, 2, 3, 4, 5])
            sizes[tuple(options.values())] = llm.weight_bytes
    assert_same_bits(logits[()], logits[("int4",)])
    assert_same_bits(logits[("float32",)], logits[("float32", "none")])
    assert sizes[()] == sizes[("int4",)] < sizes[("float32",)] / 3


@pytest.mark.model
@pytest.mark.parametrize(("quantization", "bound"), [("int8", 0.01), ("int4", 0.05)])
def test_smollm2_quality(quantization: str, bound: float, smollm2_path: Path) -> None:
    """Perplexity within 1% (int8) and 5% (int4) of that of the same weights in float32."""

    def likelihood(**options: Any) -> tuple[float, list[np.ndarray]]:
        with LLM(smollm2_path, num_kv_blocks=256, **options) as llm:
            total, count, logits = 0.0, 0, []
            for prompt in EXPECTED["prompts"]:
                ids = prompt["input_ids"] + prompt["greedy_ids"]
                rows = llm.logits(ids[:-1]).astype(np.float64)
                logits.append(rows)
                top = rows.max(-1, keepdims=True)
                scores = rows - top - np.log(np.exp(rows - top).sum(-1, keepdims=True))
                total -= scores[np.arange(len(rows)), ids[1:]].sum()
                count += len(rows)
            return total / count, logits

    exact, exact_logits = likelihood(dtype="float32", quantization="none")
    got, got_logits = likelihood(quantization=quantization)
    # A few hundred tokens: far from the noise of a text, but the bound of a long one holds here, too.
    assert got - exact < np.log1p(bound) + 0.01
    for a, b in zip(exact_logits, got_logits, strict=True):
        assert np.abs(a - b).mean() < 0.1 * a.std()
