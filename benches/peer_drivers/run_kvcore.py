"""kvcore as one of the peers."""

from __future__ import annotations

from typing import Any

from serve import Generate, serve


def open_kvcore(model: str, num_threads: int, **options: Any) -> tuple[str, Generate]:
    from kvcore import LLM, SamplingParams, __version__

    llm = LLM(
        model,
        num_threads=num_threads,
        enable_prefix_caching=False,
        max_num_batched_tokens=4096,
        kv_cache_memory=1 << 30,
        **options,
    )

    def generate(prompts: list[list[int]], new_tokens: int) -> None:
        params = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
        outputs = llm.generate(prompts, params, progress=False)
        assert all(len(output.token_ids) == new_tokens for output in outputs)

    return __version__, generate


if __name__ == "__main__":
    serve(open_kvcore)
