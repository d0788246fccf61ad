"""OpenVINO GenAI: it reads the GGUF file itself."""

from __future__ import annotations

from serve import Generate, serve


def open_openvino(model: str, num_threads: int) -> tuple[str, Generate]:
    import numpy as np
    import openvino
    import openvino_genai

    scheduler = openvino_genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False
    scheduler.cache_size = 1  # GB
    scheduler.max_num_batched_tokens = 4096
    scheduler.max_num_seqs = 32
    pipeline = openvino_genai.LLMPipeline(model, "CPU", scheduler_config=scheduler, INFERENCE_NUM_THREADS=num_threads)

    def generate(prompts: list[list[int]], new_tokens: int) -> None:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = new_tokens
        config.ignore_eos = True
        config.do_sample = False
        config.apply_chat_template = False
        ids = np.array(prompts, np.int64)
        inputs = openvino_genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
        results = pipeline.generate(inputs, config)
        assert all(len(tokens) == new_tokens for tokens in results.tokens)

    return openvino_genai.__version__.split("-")[0], generate


if __name__ == "__main__":
    serve(open_openvino)
