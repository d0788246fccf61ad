"""A smoke test of an installed wheel: plain Python, no test runner, no network.

It generates token ids with a tiny reference model and checks that they are those that transformers chooses, with
another cached prompt in between, and that nothing is left in use.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

import kvcore
from kvcore import LLM, SamplingParams

REPOSITORY = Path(__file__).resolve().parents[1]
MODEL = REPOSITORY / "tests" / "data" / "reference" / "llama_gqa"


def expected_ids(name: str) -> list[int]:
    """A tensor of int32 ids from the reference's outputs; the wheel's dependencies have no package that reads them."""
    data = (MODEL / "expected.safetensors").read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    begin, end = json.loads(data[8:start])[name]["data_offsets"]
    ids: list[int] = np.frombuffer(data[start + begin : start + end], np.int32).tolist()
    return ids


def main() -> None:
    installed = Path(kvcore.__file__).resolve()
    assert REPOSITORY / "python" not in installed.parents, f"{installed} is the source tree, not an installed wheel"

    prompt, greedy = expected_ids("input_ids"), expected_ids("greedy_ids")
    params = SamplingParams(max_tokens=len(greedy), temperature=0.0, ignore_eos=True)
    with LLM(MODEL, dtype="float32", kv_cache_dtype="float32") as llm:
        for cached in (0, 36):  # cold, then all but the last of the 37 prompt tokens
            output = llm.generate(prompt, params)[0]
            assert output.outputs[0].token_ids == greedy, output.outputs[0].token_ids
            assert output.num_cached_tokens == cached, output.num_cached_tokens
        llm.cache.check()
        assert llm.cache.num_free_blocks == llm.cache.num_blocks, llm.stats()
    print(f"smoke: kvcore {kvcore.__version__} ({kvcore.simd()}) generates the expected {len(greedy)} tokens, twice")


if __name__ == "__main__":
    main()
