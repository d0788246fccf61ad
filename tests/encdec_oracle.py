"""An encoder-decoder's forward as a textbook has it, in float64, straight from tensors' names and a configuration.

It shares nothing with the product: neither its specs nor its arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Get = Callable[[str], Floats]


def softmax(x: Floats) -> Floats:
    e = np.exp(x - x.max(-1, keepdims=True))
    return np.asarray(e / e.sum(-1, keepdims=True))


def activation(name: str, x: Floats) -> Floats:
    if name == "relu":
        return np.maximum(x, 0)
    if name in ("silu", "swish"):
        return x / (1 + np.exp(-x))
    if name == "gelu":
        return np.asarray(x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2)
    assert name == "gelu_new"
    return np.asarray(x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2)


def attention(q: Floats, k: Floats, v: Floats, heads: int, scale: float, bias: Floats | float, causal: bool) -> Floats:
    q, k, v = (y.reshape(len(y), heads, -1) for y in (q, k, v))
    scores = np.einsum("qhd,khd->hqk", q, k) * scale + bias
    if causal:
        scores = np.where(np.tri(len(q), len(k), dtype=bool), scores, -np.inf)
    return np.einsum("hqk,khd->qhd", softmax(scores), v).reshape(len(q), -1)


# -- T5 --------------------------------------------------------------------------------------------------------------


def t5_bias(weight: Floats, rows: int, config: Mapping[str, Any], both: bool) -> Floats:
    count, longest = config["relative_attention_num_buckets"], config["relative_attention_max_distance"]
    bias = np.empty((weight.shape[1], rows, rows))
    for query in range(rows):
        for token in range(rows):
            n, size, first = query - token, count, 0
            if both:
                size //= 2
                first, n = (size if n < 0 else 0), abs(n)
            n, exact = max(n, 0), size // 2
            if n >= exact:
                n = exact + int(math.log(n / exact) / math.log(longest / exact) * (size - exact) + 1e-9)
            bias[:, query, token] = weight[first + min(n, size - 1)]
    return bias


def t5(config: Mapping[str, Any], get: Get, source: Any, ids: Any) -> Floats:
    heads, eps = config["num_heads"], config["layer_norm_epsilon"]

    def norm(x: Floats, name: str) -> Floats:
        return np.asarray(x / np.sqrt(np.mean(x * x, -1, keepdims=True) + eps) * get(f"{name}.weight"))

    def attend(x: Floats, y: Floats, name: str, bias: Floats | float, causal: bool) -> Floats:
        q, k, v = (z @ get(f"{name}.{letter}.weight").T for z, letter in ((x, "q"), (y, "k"), (y, "v")))
        return attention(q, k, v, heads, 1.0, bias, causal) @ get(f"{name}.o.weight").T

    def mlp(x: Floats, name: str) -> Floats:
        kind = config["feed_forward_proj"]
        act = "gelu_new" if kind == "gated-gelu" else kind.removeprefix("gated-")
        if kind.startswith("gated"):
            inner = activation(act, x @ get(f"{name}.wi_0.weight").T) * (x @ get(f"{name}.wi_1.weight").T)
        else:
            inner = activation(act, x @ get(f"{name}.wi.weight").T)
        return inner @ get(f"{name}.wo.weight").T

    def stack(side: str, tokens: Any, layers: int, memory: Floats | None) -> Floats:
        x = get("shared.weight")[tokens]
        weight = get(f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight")
        bias = t5_bias(weight, len(x), config, memory is None)
        for layer in range(layers):
            at = f"{side}.block.{layer}.layer."
            y = norm(x, at + "0.layer_norm")
            x = x + attend(y, y, at + "0.SelfAttention", bias, memory is not None)
            if memory is not None:
                x = x + attend(norm(x, at + "1.layer_norm"), memory, at + "1.EncDecAttention", 0.0, False)
            last = 1 if memory is None else 2
            x = x + mlp(norm(x, f"{at}{last}.layer_norm"), f"{at}{last}.DenseReluDense")
        return norm(x, f"{side}.final_layer_norm")

    encoded = stack("encoder", source, config["num_layers"], None)
    x = stack("decoder", ids, config["num_decoder_layers"], encoded)
    if config["tie_word_embeddings"] and config.get("scale_decoder_outputs", True):
        return x * config["d_model"] ** -0.5 @ get("shared.weight").T
    return x @ get("lm_head.weight").T


# -- BART, Marian, Whisper -------------------------------------------------------------------------------------------


def bart(config: Mapping[str, Any], get: Get, source: Any, ids: Any) -> Floats:
    kind, width = config["model_type"], config["d_model"]
    pre = kind == "whisper"

    def norm(x: Floats, name: str) -> Floats:
        x = x - x.mean(-1, keepdims=True)
        x = x / np.sqrt(np.mean(x * x, -1, keepdims=True) + 1e-5)
        return np.asarray(x * get(f"{name}.weight") + get(f"{name}.bias"))

    def linear(x: Floats, name: str) -> Floats:
        bias = 0.0 if pre and name.endswith("k_proj") else get(f"{name}.bias")
        return np.asarray(x @ get(f"{name}.weight").T + bias)

    def block(x: Floats, name: str, run: Callable[[Floats], Floats]) -> Floats:
        return x + run(norm(x, name)) if pre else norm(x + run(x), name)

    def embed(side: str, tokens: Any) -> Floats:
        shared = config.get("share_encoder_decoder_embeddings", True) and not pre
        table = "model.shared" if shared else f"model.{side}.embed_tokens"
        x = get(f"{table}.weight")[tokens] * (math.sqrt(width) if config["scale_embedding"] and not pre else 1.0)
        if kind == "marian":
            position = np.arange(len(x))[:, None] / 10000 ** (2 * (np.arange(width) // 2) / width)
            return np.asarray(x + np.concatenate([np.sin(position[:, 0::2]), np.cos(position[:, 1::2])], 1))
        x = x + get(f"model.{side}.embed_positions.weight")[2 * (not pre) :][: len(x)]
        return norm(x, f"model.{side}.layernorm_embedding") if kind == "bart" else x

    def sound(features: Floats) -> Floats:
        x = np.asarray(features, np.float64)
        for name, stride in (("conv1", 1), ("conv2", 2)):
            weight, padded = get(f"model.encoder.{name}.weight"), np.pad(x, ((0, 0), (1, 1)))
            steps = [np.einsum("oik,ik->o", weight, padded[:, t : t + 3]) for t in range(0, x.shape[1], stride)]
            x = activation("gelu", np.array(steps).T + get(f"model.encoder.{name}.bias")[:, None])
        return np.asarray(x.T + get("model.encoder.embed_positions.weight")[: x.shape[1]])

    def stack(side: str, x: Floats, memory: Floats | None) -> Floats:
        heads = config[f"{side}_attention_heads"]

        def look(memory: Floats | None, name: str, causal: bool, y: Floats) -> Floats:
            z = y if memory is None else memory
            q, k, v = linear(y, name + "q_proj"), linear(z, name + "k_proj"), linear(z, name + "v_proj")
            return linear(attention(q, k, v, heads, (width / heads) ** -0.5, 0.0, causal), name + "out_proj")

        def mlp(at: str, y: Floats) -> Floats:
            return linear(activation(config["activation_function"], linear(y, at + "fc1")), at + "fc2")

        for layer in range(config[f"{side}_layers"]):
            at = f"model.{side}.layers.{layer}."
            run: Callable[[Floats], Floats] = partial(look, None, at + "self_attn.", memory is not None)
            x = block(x, at + "self_attn_layer_norm", run)
            if memory is not None:
                x = block(x, at + "encoder_attn_layer_norm", partial(look, memory, at + "encoder_attn.", False))
            x = block(x, at + "final_layer_norm", partial(mlp, at))
        return norm(x, f"model.{side}.layer_norm") if pre else x

    encoded = stack("encoder", sound(source) if pre else embed("encoder", source), None)
    x = stack("decoder", embed("decoder", ids), encoded)
    if not config.get("tie_word_embeddings", True):
        output = get("proj_out.weight" if pre else "lm_head.weight")
    elif pre or not config.get("share_encoder_decoder_embeddings", True):
        output = get("model.decoder.embed_tokens.weight")
    else:
        output = get("model.shared.weight")
    return np.asarray(x @ output.T + (0.0 if pre else get("final_logits_bias")))
