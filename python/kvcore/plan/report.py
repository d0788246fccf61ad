"""A plan as a table for people, and as a dict for programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from kvcore.models.shape import LayerCache
from kvcore.plan.budget import BLOCK_SIZE, GroupCost, Plan, Reservation
from kvcore.plan.sizes import format_size

_WAYS: Final = {"paged": "paged", "power_of_two": "next power of two", "max_length": "maximum length"}


# -- for programs ----------------------------------------------------------------------------------------------------


def as_dict(plan: Plan) -> dict[str, Any]:
    """The whole plan, ready for JSON; docs/plan.md explains every name. Sizes are in bytes."""
    parameters, stored = plan.parameters, plan.stored_weights
    return {
        "model": plan.model.name,
        "source": plan.model.source,
        "model_type": plan.model_type,
        "kv_cache_dtype": plan.format.name,
        "scale_mode": plan.scale_mode,
        "dtype": plan.dtype,
        "quantization": plan.quantization,
        "block_size": BLOCK_SIZE,
        "context": plan.context,
        "max_length": plan.max_length,
        "source_tokens": plan.source_tokens,
        "bytes_per_token": plan.bytes_per_token,
        "padding_bytes_per_token": plan.padding_per_token,
        "growth_bytes_per_token": plan.growth_per_token,
        "cross_bytes_per_token": plan.cross_bytes_per_token,
        "all_heads_bytes_per_token": plan.all_heads_bytes_per_token,
        "groups": [_group(cost) for cost in plan.groups],
        "request": {"tokens": plan.context, "bytes": plan.request_bytes},
        "parameters": {
            "total": parameters.total,
            "active": parameters.active,
            "embedding": parameters.embedding,
            "output": parameters.output,
            "attention": parameters.attention,
            "mlp": parameters.mlp,
            "norms": parameters.norms,
            "other": parameters.other,
            "layers": [
                {"attention": layer.attention, "mlp": layer.mlp, "mlp_active": layer.mlp_active, "norms": layer.norms}
                for layer in parameters.layers
            ],
            "encoder_layers": len(parameters.encoder_layers),
        },
        "weights": {
            "bytes": plan.weight_bytes,
            "files": None
            if stored is None
            else {
                "files": stored.files,
                "tensors": stored.tensors,
                "parameters": stored.parameters,
                "bytes": stored.bytes,
                "types": dict(stored.types),
            },
        },
        "memory": plan.memory,
        "cache_memory": plan.cache_memory,
        "reservations": {item.way: _reservation(item) for item in plan.reservations},
        "notes": list(plan.notes),
    }


def _group(cost: GroupCost) -> dict[str, Any]:
    cache = cost.group.cache
    return {
        "kind": cache.kind,
        "layers": list(cost.group.layers),
        "num_kv_heads": cache.num_kv_heads,
        "head_dim": cache.head_dim,
        "v_head_dim": cache.v_head_dim,
        "window": cache.window,
        "rank": cache.rank,
        "rope_dim": cache.rope_dim,
        "layer_bytes_per_token": cost.layer_bytes,
        "bytes_per_token": cost.bytes_per_token,
        "padding_bytes_per_token": cost.padding,
        "tokens_per_request": cost.tokens,
        "bytes_per_request": cost.bytes,
        "blocks_per_request": cost.blocks,
        "paged_bytes_per_request": cost.paged_bytes,
        "max_bytes_per_request": None if cache.window is None else cache.window * cost.bytes_per_token,
    }


def _reservation(item: Reservation) -> dict[str, Any]:
    return {
        "tokens": item.tokens,
        "bytes": item.bytes,
        "utilization": item.used / item.bytes if item.bytes else 0.0,
        "requests": item.requests,
    }


# -- for people ------------------------------------------------------------------------------------------------------


def as_text(plan: Plan) -> str:
    """The plan as a few tables, of lines that end without a space."""
    parts = [_title(plan), _cache(plan), _request(plan), _weights(plan)]
    if plan.memory is not None:
        parts.append(_fit(plan))
    if plan.notes:
        parts.append("\n".join(f"Note: {note}." for note in plan.notes))
    return "\n\n".join(parts)


def _title(plan: Plan) -> str:
    active = ""
    if plan.parameters.active != plan.parameters.total:
        active = f", {_short_count(plan.parameters.active)} of them active for a token"
    total = _short_count(plan.parameters.total)
    return f"{plan.model.name} ({plan.model.source}): {plan.model_type}, {total} parameters{active}"


def _cache(plan: Plan) -> str:
    rows = [("layers", "kind", "KV heads", "K + V", "a token in a layer", "a token")]
    for cost in plan.groups:
        rows.append(
            (
                _layers(cost.group.layers),
                _kind(cost.group.cache),
                str(cost.group.cache.num_kv_heads),
                _widths(cost.group.cache),
                format_size(cost.layer_bytes),
                format_size(cost.bytes_per_token),
            )
        )
    encoder = len(plan.parameters.encoder_layers)
    if encoder:
        rows.append((f"{encoder} of the encoder", "none", "-", "-", "-", "-"))
    mode = f", scales {plan.scale_mode}" if len(plan.format.scale_modes) > 1 or plan.scale_mode != "static" else ""
    lines = [f"KV cache in {plan.format.name}{mode}", *_table(rows, left=(0, 1))]
    lines.append(f"  A token takes {_exact(plan.bytes_per_token)}.")
    if plan.all_heads_bytes_per_token != plan.bytes_per_token:
        times = plan.all_heads_bytes_per_token / plan.bytes_per_token
        lines.append(
            f"  With K and V of every query head it would be {_exact(plan.all_heads_bytes_per_token)}, "
            f"{times:.1f} times as much."
        )
    if plan.growth_per_token != plan.bytes_per_token:
        lines.append(f"  Once the windows are full it adds {_exact(plan.growth_per_token)}.")
    if plan.cross_bytes_per_token:
        lines.append(f"  A token of the encoder takes {_exact(plan.cross_bytes_per_token)}.")
    if plan.padding_per_token:
        lines.append(f"  kvcore fills rows of V up to 16 dimensions: {_exact(plan.padding_per_token)} a token more.")
    return "\n".join(lines)


def _request(plan: Plan) -> str:
    source = "" if plan.source_tokens is None else f" and {plan.source_tokens:,} of the encoder"
    lines = [f"A request of {plan.context:,} tokens{source}: {_exact(plan.request_bytes)}"]
    if len(plan.groups) > 1 or plan.groups[0].group.cache.window is not None:
        rows = [("kind", "keeps", "bytes", "at most")]
        for cost in plan.groups:
            window = cost.group.cache.window
            most = "-" if window is None else format_size(window * cost.bytes_per_token)
            rows.append((_kind(cost.group.cache), f"{cost.tokens:,} tokens", format_size(cost.bytes), most))
        lines += _table(rows, left=(0,))
    return "\n".join(lines)


def _weights(plan: Plan) -> str:
    p = plan.parameters
    held = "" if plan.quantization is None else f", quantization {plan.quantization}, as they are held"
    lines = [f"Weights in {plan.dtype}{held}: {_exact(plan.weight_bytes)}"]
    parts = [("embedding", p.embedding), ("attention", p.attention), ("MLP", p.mlp), ("norms", p.norms)]
    parts += [("output", p.output), ("other", p.other)]
    rows = [("part", "parameters", "share")]
    rows += [(name, f"{count:,}", f"{100 * count / p.total:.1f}%") for name, count in parts if count]
    lines += _table(rows, left=(0,))
    layer = p.layers[-1]
    lines.append(f"  A layer: attention {_short_count(layer.attention)}, MLP {_short_count(layer.mlp)}.")
    if not p.output:
        lines.append("  The output matrix is the embedding.")
    if plan.stored_weights is not None:
        stored = plan.stored_weights
        types = ", ".join(f"{name} {format_size(size)}" for name, size in stored.types.items())
        files = "1 file" if stored.files == 1 else f"{stored.files} files"
        lines.append(f"  On disk: {_exact(stored.bytes)} in {files}: {types}.")
    return "\n".join(lines)


def _fit(plan: Plan) -> str:
    assert plan.memory is not None
    assert plan.cache_memory is not None
    if plan.cache_memory <= 0:
        return (
            f"Memory of {format_size(plan.memory)}: the weights do not fit, they take {format_size(plan.weight_bytes)}"
            if plan.cache_memory < 0
            else f"Memory of {format_size(plan.memory)}: the weights take all of it"
        )
    lines = [f"Memory of {format_size(plan.memory)}: {format_size(plan.cache_memory)} are left for the cache"]
    rows = [("memory set aside", "tokens", "for a request", "holds tokens", "requests at once")]
    for item in plan.reservations:
        name = f"paged, blocks of {BLOCK_SIZE}" if item.way == "paged" else _WAYS[item.way]
        share = f"{100 * item.used / item.bytes:.1f}%" if item.bytes else "-"
        rows.append((name, f"{item.tokens:,}", format_size(item.bytes), share, f"{item.requests:,}"))
    return "\n".join([*lines, *_table(rows, left=(0,))])


def _table(rows: Sequence[tuple[str, ...]], left: tuple[int, ...]) -> list[str]:
    """Columns as wide as they need to be; those in ``left`` begin at the left, the others end at the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  "
        + "  ".join(
            f"{cell:<{w}}" if i in left else f"{cell:>{w}}" for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _kind(cache: LayerCache) -> str:
    return f"sliding_window({cache.window:,})" if cache.window is not None else cache.kind


def _widths(cache: LayerCache) -> str:
    return f"{cache.rank} + {cache.rope_dim}" if cache.kind == "latent" else f"{cache.head_dim} + {cache.v_head_dim}"


def _layers(layers: Sequence[int]) -> str:
    """How many they are, and which if they lie in a row."""
    if len(layers) > 1 and layers[-1] - layers[0] == len(layers) - 1:
        return f"{len(layers)} ({layers[0]} to {layers[-1]})"
    shown = ", ".join(map(str, layers[:3])) + (", ..." if len(layers) > 3 else "")
    return f"{len(layers)} ({shown})"


def _exact(count: int) -> str:
    """A size with its bytes."""
    size = format_size(count)
    return size if size.endswith(("bytes", "byte")) else f"{size} ({count:,} bytes)"


def _short_count(count: int) -> str:
    """A count with three or four digits: "8.03B", "176M"."""
    for name, unit in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if count >= unit:
            value = count / unit
            return f"{value:.2f}{name}" if value < 10 else f"{value:.1f}{name}" if value < 100 else f"{value:.0f}{name}"
    return str(count)
