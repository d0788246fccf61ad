"""Run under an emulated CPU (scripts/test_isa.sh): kvcore imports, picks this level, and generates the expected tokens.

usage: old_cpu.py LEVEL
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from safetensors.numpy import load_file

import kvcore
from kvcore import LLM, SamplingParams, UnsupportedSimd

MODEL = Path(__file__).parent / "data" / "reference" / "llama_gqa"
LEVELS = ("scalar", "avx2", "avx512", "neon")


def main(level: str) -> None:
    assert kvcore.simd() == level, f"expected {level}, got {kvcore.simd()}"
    expected = load_file(MODEL / "expected.safetensors")
    greedy = expected["greedy_ids"].tolist()
    with LLM(MODEL, dtype="float32", kv_cache_dtype="float32", num_threads=1) as llm:
        params = SamplingParams(max_tokens=len(greedy), temperature=0.0, ignore_eos=True)
        output = llm.generate(expected["input_ids"].tolist(), params)[0]
    assert output.outputs[0].token_ids == greedy, output.outputs[0].token_ids

    for name in LEVELS:
        os.environ["KVCORE_SIMD"] = name
        try:
            kvcore.KVCache(num_layers=1, num_kv_heads=1, head_dim=8, num_blocks=2)
        except UnsupportedSimd as error:
            assert name not in kvcore.available_simd(), name
            if name not in str(error):
                raise AssertionError(f"{name} is not named: {error}") from error
        else:
            assert name in kvcore.available_simd(), f"{name} was forced on a CPU without it"
    print(f"level {level}: {len(greedy)} tokens as expected; levels that are not here are refused")


if __name__ == "__main__":
    main(*sys.argv[1:])
