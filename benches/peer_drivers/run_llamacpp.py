"""llama.cpp by its own C calls: no work in Python but the argmax of each row of logits."""

from __future__ import annotations

import ctypes
from pathlib import Path

from serve import Generate, serve

CONTEXT, BATCH, SEQUENCES = 4096, 2048, 32


def open_llamacpp(model: str, num_threads: int, quantized: str | None = None) -> tuple[str, Generate]:
    import llama_cpp
    import numpy as np

    quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
    llama_cpp.llama_log_set(quiet, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    if quantized is not None:
        model = quantize(model, quantized)
    weights = llama_cpp.llama_model_load_from_file(model.encode(), llama_cpp.llama_model_default_params())
    if not weights:
        raise SystemExit(f"llama.cpp cannot open {model}")
    vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(weights))

    def context(sequences: int, length: int) -> llama_cpp.llama_context_p:
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = sequences * length
        params.n_batch = BATCH
        params.n_seq_max = sequences
        params.n_threads = params.n_threads_batch = num_threads
        params.flash_attn_type = 1  # on
        return llama_cpp.llama_init_from_model(weights, params)

    contexts = {1: context(1, CONTEXT), SEQUENCES: context(SEQUENCES, 512)}
    batch = llama_cpp.llama_batch_init(BATCH, 0, 1)

    def run(ctx: llama_cpp.llama_context_p, rows: list[tuple[int, int, int, bool]]) -> list[int]:
        """Decode (token, position, sequence, wanted) rows, and give the most probable token of the wanted."""
        found = []
        for start in range(0, len(rows), BATCH):
            piece = rows[start : start + BATCH]
            batch.n_tokens = len(piece)
            for i, (token, position, sequence, wanted) in enumerate(piece):
                batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
                batch.n_seq_id[i] = 1
                batch.seq_id[i][0] = sequence
            if llama_cpp.llama_decode(ctx, batch) != 0:
                raise SystemExit("llama_decode failed")
            for i, row in enumerate(piece):
                if row[3]:
                    logits = llama_cpp.llama_get_logits_ith(ctx, i)
                    found.append(int(np.ctypeslib.as_array(logits, (vocabulary,)).argmax()))
        return found

    def generate(prompts: list[list[int]], new_tokens: int) -> None:
        ctx = contexts[1 if len(prompts) == 1 else SEQUENCES]
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(ctx), True)
        rows = []
        for sequence, prompt in enumerate(prompts):
            rows += [(token, i, sequence, i == len(prompt) - 1) for i, token in enumerate(prompt)]
        last = run(ctx, rows)
        for step in range(new_tokens - 1):
            last = run(ctx, [(token, len(prompts[s]) + step, s, True) for s, token in enumerate(last)])

    return llama_cpp.__version__, generate


def quantize(model: str, kind: str) -> str:
    """The same model in another format of GGUF's, beside this one's scratch files."""
    import llama_cpp

    target = Path.cwd() / f"{Path(model).stem}.{kind}.gguf"
    if not target.exists():
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
        params.allow_requantize = True
        part = target.with_suffix(".part")
        if llama_cpp.llama_model_quantize(model.encode(), str(part).encode(), ctypes.byref(params)) != 0:
            raise SystemExit(f"llama.cpp cannot quantise {model} to {kind}")
        part.rename(target)
    return str(target)


if __name__ == "__main__":
    serve(open_llamacpp)
