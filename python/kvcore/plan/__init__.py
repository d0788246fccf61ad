"""The memory calculator: what a model's weights and cache take, and how many requests fit.

Everything follows from the configuration; weights are never loaded, and numpy is not needed unless a model has files
whose weights are to be listed.
"""

from __future__ import annotations

from kvcore.models.shape import CacheGroup, LayerCache, cache_groups, cache_layers
from kvcore.plan.budget import Plan, make_plan
from kvcore.plan.model import Model, find_model, known_models
from kvcore.plan.parameters import Parameters, count_parameters
from kvcore.plan.report import as_dict, as_text
from kvcore.plan.sizes import format_size, parse_size, parse_tokens

__all__ = [
    "CacheGroup",
    "LayerCache",
    "Model",
    "Parameters",
    "Plan",
    "as_dict",
    "as_text",
    "cache_groups",
    "cache_layers",
    "count_parameters",
    "find_model",
    "format_size",
    "known_models",
    "make_plan",
    "parse_size",
    "parse_tokens",
]
