"""vLLM on the CPU: a folder of bfloat16 weights."""

from __future__ import annotations

import os

from serve import Generate, serve


def open_vllm(model: str, num_threads: int) -> tuple[str, Generate]:
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"  # GB
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{num_threads - 1}"
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import vllm

    llm = vllm.LLM(
        model,
        dtype="bfloat16",
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_model_len=4096,
        max_num_seqs=32,
        max_num_batched_tokens=4096,
        disable_log_stats=True,
    )

    def generate(prompts: list[list[int]], new_tokens: int) -> None:
        params = vllm.SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True, detokenize=False)
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        assert all(len(output.outputs[0].token_ids) == new_tokens for output in outputs)

    return vllm.__version__, generate


if __name__ == "__main__":
    serve(open_vllm)
